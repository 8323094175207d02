"""The text of the Hopper kernel that makes a forward's results and their tangents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op, reads_score
from attndsl.passes.tiles.plan import FORWARD

from ..emit.device_functions import param_values, parameters, record_of_given
from ..emit.loops import LIST_PARAMETERS, print_loop
from ..emit.template import fill_template, import_lines
from .arguments import is_drawn
from .functions import print_functions
from .generate import (
    FORWARD_CONSUMER,
    FORWARD_PRODUCER,
    OWN_HELPERS,
    constants_of,
    flags_of_scores,
    is_bounded,
    partitions,
)
from .learned import Learned
from .memory import has_own_output
from .own_tiles import flags_of_rows, own_tiles, print_rows

if TYPE_CHECKING:
    from attndsl.passes.tiles.plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts
    from ..kernels.config import Config

_TEMPLATES = ("forward_shared", "forward_produce", "forward_tangent", "forward_kernel")
_INDENT = "    "
_DESCS = "q_moved_desc, k_moved_desc, v_moved_desc,"
_TILES = "q_moved_s, k_moved_s, v_moved_s,"
_RESULTS = "o_moved_desc, LSE_MOVED,"


def generate_tangent(lowered: Lowered, facts: KernelFacts, loop: LoopPlan, config: Config) -> str:
    """The module of ``attention_forward_tangent``.

    Args:
        lowered: A program with the softmax's weights, and no dropout.
        facts: What the call is like, and which of ``q``, ``k`` and ``v`` move.
        loop: The plan of its loop.
        config: How many warpgroups share a tile, and whether programs have one after the other.
    """
    program, placed = lowered.program, lowered.placed
    assert program.weights is None
    assert program.dropout is None
    assert not facts.moving_captures
    assert not facts.pair_tiles
    functions, helpers = print_functions(lowered, facts, "forward_tangent", Learned())
    own_rows = own_tiles(lowered, facts, "forward_tangent", config)
    texts, used = print_loop(
        "forward", FORWARD.along, loop, param_values(facts, scalar=True), facts.names(),
        own_rows.parts,
    )  # fmt: skip
    visits, needed = print_rows(own_rows, facts)
    texts += visits
    helpers |= used | needed
    moves = {f"MOVES_{name.upper()}": name in facts.moving_operands for name in ("q", "k", "v")}
    # Tangents are multiplied with weights before these are rounded, and fp16 has no room for more.
    wide = facts.dtype == "bf16"
    listed = loop.listed is not None
    drawn = is_drawn(lowered, config)
    flags = {
        **constants_of(facts, config),
        **flags_of_scores(lowered, "forward", loop),
        # The running maximum needs a factor that is positive.
        "SCALED_FIRST": placed.pair.op is not Op.SCORE
        or placed.inner is not None
        or reads_score(program.mask)
        or facts.scale_first,
        "LAZY": wide,
        "EARLY": config.early,
        "BOUNDED": wide and is_bounded(lowered, facts),
        "ANCHORED": False,
        "MIXED": 0,
        "PERSISTENT": config.persistent,
        "DRAWN": drawn,
        "NEEDS_TILE": False,
        **flags_of_rows(own_rows),
        "HAS_DROPOUT": False,
        "OWN_OUTPUT": has_own_output(facts, config),
        **moves,
        "MOVES_WEIGHTS": moves["MOVES_Q"] or moves["MOVES_K"],
    }
    given = [*parameters(facts), *(LIST_PARAMETERS if listed else ())]
    counter = ["COUNTER,"] * drawn
    again = ["q_empty, item_s, item_full, item_empty,"] * config.persistent
    output = ["o_s,"] * bool(flags["OWN_OUTPUT"])
    more = {
        "imports": [
            *import_lines("device", helpers - OWN_HELPERS),
            *import_lines("hopper", helpers & OWN_HELPERS),
        ],
        "pair_parts": [],
        "kept": [],
        "drawing": [],
        "counter": counter,
        "again": again,
        "output": output,
        "also_loaded": [_DESCS, _TILES],
        "also_read": [_RESULTS, _TILES],
        "also_given": [_DESCS, _RESULTS],
        "moved_query": ["q_moved_desc, q_moved_s,"],
        "load_parameters": [_DESCS, _TILES],
        "load_pairs": [],
        "load_partial_pairs": [_DESCS, _TILES],
        "load_full_pairs": [_DESCS, _TILES],
        "more_memory": _memory(facts.moving_operands),
        "partitions": partitions(
            (*FORWARD_PRODUCER, *counter, *again, _DESCS, _TILES),
            (*FORWARD_CONSUMER, *output, *again, _RESULTS, _TILES),
            config.consumers,
        ),
    }
    texts = [record_of_given(given), *functions, *texts]
    entries = ("attention_forward",)
    text = fill_template(__package__, _TEMPLATES, entries, texts, helpers, flags, given, more)
    return text.replace("def attention_forward(", "def attention_forward_tangent(")


def _memory(moving: str) -> list[str]:
    """Places of tiles of tangents; what does not move has none of its own, and nothing comes."""
    lines = []
    for name, number in (("q", "CONSUMERS, 1, 1, ROWS, D"), ("k", "STAGES, 1, 1, BLOCK_N, D"),
                         ("v", "STAGES, 1, 1, BLOCK_N, DV")):  # fmt: skip
        if name in moving:
            layout = f"{name}_moved_desc.layout"
            lines += [
                f"{name}_moved_s = gl.allocate_shared_memory(",
                f"{_INDENT}{name}_moved_desc.dtype, [{number}], {layout}",
                ")",
            ]
        else:
            lines.append(f"{name}_moved_s = {name}_s")
    return lines
