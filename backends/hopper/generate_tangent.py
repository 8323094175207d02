"""The text of the Hopper kernel that makes a forward's results and their tangents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op, reads_score
from attndsl.passes.tiles.plan import FORWARD

from ..triton.device_functions import param_values, parameters, wrapped
from ..triton.generate import fill_template, import_lines
from ..triton.loops import LIST_PARAMETERS, print_loop
from .functions import print_functions
from .generate import OWN_HELPERS, flags_of_scores, is_bounded, partitions
from .learned import Learned
from .memory import block_width

if TYPE_CHECKING:
    from attndsl.passes.tiles.plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ..triton.specialise import Specialisation
    from ..triton.tiles import Config

_TEMPLATES = ("forward_shared", "forward_tangent")
_PRODUCER = (
    "q_desc, k_desc, v_desc, q_moved_desc, k_moved_desc, v_moved_desc,",
    "q_s, k_s, v_s, q_moved_s, k_moved_s, v_moved_s, q_full, k_full, k_empty, v_full, v_empty,",
    "batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,",
    "BLOCK_M, BLOCK_N, STAGES, CONSUMERS, Q_KIND, KV_KIND,",
)
_CONSUMER = (
    "o_desc, o_moved_desc, LSE, LSE_MOVED,",
    "q_s, k_s, v_s, q_moved_s, k_moved_s, v_moved_s, o_s,",
    "q_full, k_full, k_empty, v_full, v_empty,",
    "scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,",
    "HEAD_DIM, D, DV, BLOCK_M, BLOCK_N, STAGES, CONSUMERS, Q_KIND, KV_KIND,",
)


def generate_tangent(
    lowered: Lowered, special: Specialisation, loop: LoopPlan, config: Config
) -> str:
    """The module of ``attention_forward_tangent``.

    Args:
        lowered: A program with the softmax's weights, and no dropout.
        special: What the call is like, and which of ``q``, ``k`` and ``v`` move.
        loop: The plan of its loop.
        config: How many warpgroups share a tile.
    """
    program, placed = lowered.program, lowered.placed
    assert program.weights is None
    assert program.dropout is None
    assert not special.moving_captures
    assert not special.pair_tiles
    names = parameters(special)
    functions, helpers = print_functions(lowered, special, "forward_tangent", Learned())
    texts, used = print_loop(
        "forward", FORWARD.along, loop, names, param_values(special, scalar=True), special.names()
    )
    helpers |= used
    moves = {f"MOVES_{name.upper()}": name in special.moving_operands for name in ("q", "k", "v")}
    # Tangents are multiplied with weights before these are rounded, and fp16 has no room for more.
    wide = special.dtype == "bf16"
    listed = loop.listed is not None
    flags = {
        **flags_of_scores(lowered, "forward", loop),
        # The running maximum needs a factor that is positive.
        "SCALED_FIRST": placed.pair.op is not Op.SCORE
        or placed.inner is not None
        or reads_score(program.mask)
        or special.negative_scale,
        "LAZY": wide,
        "EARLY": config.early,
        "BOUNDED": wide and is_bounded(lowered, special),
        "ANCHORED": False,
        "MIXED": 0,
        "OWN_OUTPUT": block_width(special.head_dim) != block_width(special.value_dim),
        **moves,
        "MOVES_WEIGHTS": moves["MOVES_Q"] or moves["MOVES_K"],
    }
    lists = wrapped(LIST_PARAMETERS) if listed else []
    more = {
        "imports": [
            *import_lines("triton", helpers - OWN_HELPERS),
            *import_lines("hopper", helpers & OWN_HELPERS),
        ],
        "forward_lists": lists,
        "pair_parts": [],
        "partitions": partitions(_PRODUCER, _CONSUMER, config.consumers, [*wrapped(names), *lists]),
    }
    return fill_template(__package__, _TEMPLATES, [*functions, *texts], helpers, flags, names, more)
