"""A program's Hopper kernels as the text of a Python module.

Functions of loops are those of the portable kernels, letter by letter, those of pairs nearly
(:mod:`.functions`); the name ``tl`` in the module is :mod:`.dialect`.

Non-goals: compiling the text, and choosing tile sizes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attndsl.ir import Op, const, dependencies, reads_score
from attndsl.passes.magnitude import magnitude
from attndsl.passes.tiles.plan import DIRECTIONS

from ..emit.device_functions import param_values, parameters, record_of_given
from ..emit.draws import drop_function
from ..emit.loops import LIST_PARAMETERS, print_loop
from ..emit.template import Literal, fill_template, import_lines
from ..forms import APPROX
from .arguments import is_drawn
from .distances import DIAGONAL_IMPORTS, diagonal_hooks
from .functions import print_functions, weights_and_factor
from .learned import learned_in_kernel
from .memory import block_width, has_own_output, widest
from .own_tiles import flags_of_rows, own_tiles, print_rows
from .pair_texts import pair_hooks, print_pair_functions
from .rows import row_hooks
from .stored import slope_hooks

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.passes.tiles.plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts
    from ..emit.template import Flags
    from ..kernels.config import Config

FORWARD_PRODUCER = (
    "q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,",
    "sizes, origins, together,",
)
FORWARD_CONSUMER = (
    "o_desc, LSE, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,",
    "scale, sizes, origins, together,",
)
_BACKWARD_PRODUCER = (
    "q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,",
    "q_s, k_s, v_s, do_s, lse_s, delta_s, k_full, v_full, q_full, do_full, q_empty, do_empty,",
    "sizes, origins, padded, together,",
)
_BACKWARD_CONSUMER = (
    "SUMS, results, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s,",
    "k_full, v_full, q_full, do_full, q_empty, do_empty,",
    "scale, sizes, origins, padded, together,",
)
_WIDE_CONSUMER = (
    "SUMS, results, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, steep_s,",
    *_BACKWARD_CONSUMER[1:],
)
_FAMILIES = {
    "forward": (
        ("forward_shared", "forward_produce", "forward", "forward_kernel"),
        "forward",
        FORWARD_PRODUCER,
        FORWARD_CONSUMER,
    ),
    "backward_kv": (
        ("backward_shared", "backward", "backward_kernel"),
        "kv_pass",
        _BACKWARD_PRODUCER,
        _BACKWARD_CONSUMER,
    ),
    "wide backward_kv": (
        ("backward_shared", "backward_wide", "backward_kernel"),
        "kv_pass",
        _BACKWARD_PRODUCER,
        _WIDE_CONSUMER,
    ),
}
"""Templates, what they call their loop, what they hand to their warpgroups. By direction, and above
head dim 128 the backward's are others."""
_MOST_EXPONENT = {"bf16": 80.0, "fp16": 10.0}
"""In weights 2^x, and 2^-x, by dtype. Sums of 2^32 weights 2^80, of values up to 2^15, fit fp32."""
OWN_HELPERS = {"as_block", "spread"}
"""Library functions that are others here."""
_MIXED = {64: 3, 128: 2, 256: 0}
"""How many of 16 weights of bounded scores are made of multiplications, by head dim: see M3 in
docs/measured.md."""
_DROPOUT = {
    "forward": (
        "factor_of_kept, keep_packed,",
        "keep_of_rows as keep_of_tile, layout_of_row_bits as layout_of_bits,",
    ),
    "backward_kv": (
        "factor_of_kept, halves_of_kept, keep,",
        "keep_of_keys as keep_of_tile, layout_of_key_bits as layout_of_bits,",
    ),
}
"""What kernels with dropout call of ``dropout``."""
_INDENT = "    "


def generate(
    lowered: Lowered, facts: KernelFacts, direction: str, loop: LoopPlan, config: Config
) -> str:
    """The module of ``attention_{direction}``.

    Args:
        lowered: The program.
        facts: What the call is like.
        direction: ``forward`` or ``backward_kv``, which makes all three gradients.
        loop: The plan of its loop.
        config: How many warpgroups share a tile, and whether loops are peeled.
    """
    program, placed = lowered.program, lowered.placed
    forward = direction == "forward"
    wide = not forward and widest(facts) > 128
    family, name, producer, consumer = _FAMILIES["wide " * wide + direction]
    learned = learned_in_kernel(lowered, facts)
    functions, helpers = print_functions(lowered, facts, direction, learned)
    own_rows = own_tiles(lowered, facts, direction, config)
    texts, used = print_loop(
        name,
        DIRECTIONS[direction].along,
        loop,
        param_values(facts, scalar=True),
        facts.names(),
        own_rows.parts,
    )
    visits, needed = print_rows(own_rows, facts)
    texts += visits
    used |= needed
    modified, own = placed.pair.op is not Op.SCORE, program.weights is not None
    dropped = program.dropout is not None
    assert not (wide and dropped)
    listed = loop.listed is not None
    drawn = is_drawn(lowered, config)
    scaled_first = modified or own or reads_score(program.mask) or facts.scale_first
    bounded = is_bounded(lowered, facts)
    full = listed or bool(loop.full)
    anchored = forward and config.persistent and full and not (own or bounded)
    anchored = anchored and facts.dtype == "bf16"
    # The next tile's k has to come while one is read.
    halved = anchored and config.stages > 1 and comes_by_halves(lowered, facts, loop)
    flags = {
        **constants_of(facts, config),
        **flags_of_scores(lowered, name, loop),
        "SCALED_FIRST": scaled_first,
        "SIGNED": placed.inner is not None and placed.column is None and not scaled_first,
        "LEARNS_COLUMN": learned.column,
        "LEARNS_FACTOR": learned.factor,
        "PEELED": config.peeled,
        "WIDE": wide,
        "EARLY": config.early,
        # If exponents need more than a multiplication, a branch costs more than it saves: see M1 in
        # docs/measured.md.
        "LAZY": not own and not modified and placed.column is None,
        "HAS_COMMON": weights_and_factor(lowered, facts, direction)[1] is not None,
        "BOUNDED": bounded,
        "NEEDS_TILE": True,
        "MOVES_Q": False,
        "MOVES_K": False,
        "MOVES_V": False,
        "ANCHORED": anchored,
        "MIXED": _MIXED[widest(facts)] if bounded and facts.forms == APPROX else 0,
        # A soft cap gains, plain scores lose: see M8 in docs/measured.md.
        "LEAVE_EACH": not (forward or wide) and is_pairwise(placed.slope),
        "PERSISTENT": config.persistent,
        "DRAWN": drawn,
        **flags_of_rows(own_rows),
        "HAS_DROPOUT": dropped,
        "SIGNED_WEIGHTS": dropped and not own,
        "HALVED": halved,
        "OWN_OUTPUT": forward and has_own_output(facts, config),
    }
    given_names = [*parameters(facts), *(LIST_PARAMETERS if listed else ())]
    sums = ["COLUMN_SUMS,"] * learned.column + ["FACTOR_SUMS,"] * learned.factor
    left = "q_empty" if forward else "kv_empty"
    again = [f"{left}, item_s, item_full, item_empty,"] * config.persistent
    again += ["lost_s,"] * anchored
    counter = ["COUNTER,"] * drawn
    pairs = pair_hooks(lowered, facts, direction, wide)
    slopes = slope_hooks(facts)
    tiles = (*pairs["pair_consumer"], *slopes["slopes_desc"])
    output = ["o_s,"] * bool(flags["OWN_OUTPUT"])
    kept = ["kept_s, kept_full,"] * dropped
    summed = facts.adds_diagonals
    diagonals = diagonal_hooks(summed)
    given = [*counter, *kept, *diagonals["diagonal_producer"], *again, *pairs["pair_producer"]]
    taken = [*sums, *output, *kept, *diagonals["diagonal_consumer"], *again, *tiles]
    extra = [*["draws"] * bool(kept), *["diagonals"] * summed, *["forward_halves"] * halved]
    templates = (family[0], *extra, *family[1:])
    helpers |= used
    more = {
        "imports": [
            *import_lines("device", helpers - OWN_HELPERS),
            *import_lines("hopper", helpers & OWN_HELPERS),
            *(_imports_of_dropout(direction, facts) if dropped else []),
            *DIAGONAL_IMPORTS * summed,
        ],
        "learned": sums,
        "counter": counter,
        "again": again,
        "output": output,
        "kept": kept,
        "drawing": ["done, first_row, tile_before, drop,", *kept] if kept else [],
        "taking": ["keep_factor, factor2, inverse,", *kept] if kept else [],
        "steep": ["steep_s,"] * wide,
        "also_loaded": pairs["pair_producer"],
        "also_read": pairs["pair_consumer"],
        "also_given": pairs["pair_descs"],
        "more_memory": pairs["pair_memory"],
        "load_parameters": pairs["pair_load_parameters"],
        "moved_query": [],
        **row_hooks(facts),
        **slopes,
        **diagonals,
        **pairs,
        "partitions": partitions(
            (*producer, *given),
            (*consumer, *taken),
            config.consumers,
        ),
    }
    texts += print_pair_functions(lowered, facts, direction)
    if dropped:
        functions.append(drop_function(facts.draws))
    texts = [record_of_given(given_names), *functions, *texts]
    entries = (f"attention_{direction}",)
    return fill_template(__package__, templates, entries, texts, helpers, flags, given_names, more)


def constants_of(facts: KernelFacts, config: Config) -> Flags:
    """What every call decides: sizes of tiles, dims, how positions are given, the dtype."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "CONSUMERS": config.consumers,
        "REGISTERS": config.registers,
        "HEAD_DIM": facts.head_dim,
        "VALUE_DIM": facts.value_dim,
        "D": block_width(facts.head_dim),
        "DV": block_width(facts.value_dim),
        "Q_KIND": facts.q_kind,
        "KV_KIND": facts.kv_kind,
        "HALF": Literal(f"gl.{'bfloat16' if facts.dtype == 'bf16' else 'float16'}"),
    }


def flags_of_scores(lowered: Lowered, name: str, loop: LoopPlan) -> dict[str, bool | float]:
    """Flags of every module: what scores are made of, and which tiles the loop ``name`` has."""
    program, placed, listed = lowered.program, lowered.placed, loop.listed is not None
    return {
        "MASKED": program.mask is not None,
        "MODIFIED": placed.pair.op is not Op.SCORE,
        "OWN_WEIGHTS": program.weights is not None,
        "HAS_ROW": placed.row is not None,
        "HAS_COLUMN": placed.column is not None,
        "HAS_STEEPNESS": placed.steepness is not None,
        "HAS_SINK": program.sink is not None,
        "HAS_FACTOR": placed.inner is not None,
        "HAS_DERIVATIVE": placed.slope is not const(1.0),
        "PAIRWISE_DERIVATIVE": is_pairwise(placed.slope),
        "OUTER": placed.outer,
        f"{name.upper()}_HAS_FULL": listed or bool(loop.full),
        f"{name.upper()}_HAS_PARTIAL": listed or bool(loop.partial),
        f"{name.upper()}_DESCENDING": loop.descending,
    }


def comes_by_halves(lowered: Lowered, facts: KernelFacts, loop: LoopPlan) -> bool:
    """Whether an anchored forward has the scores of FULL tiles half by half.

    Products of D128 take longer than their exponentials. A soft cap needs twice as many
    exponentials. Items with few tiles wait when they begin. See M2 in docs/measured.md.
    """
    placed = lowered.placed
    plain = placed.pair.op is Op.SCORE and placed.column is None
    plain = plain and lowered.program.dropout is None and not facts.pair_tiles
    return plain and widest(facts) <= 64 and loop.listed is None and not loop.short


def is_pairwise(slope: Node) -> bool:
    """Whether a score's derivative varies within a head."""
    return not dependencies(slope)[slope] <= {"b", "h"}


def is_bounded(lowered: Lowered, facts: KernelFacts) -> bool:
    """Whether weights of all scores fit as they are, in base 2, without a maximum taken off."""
    placed = lowered.placed
    if lowered.program.weights is not None or placed.column is not None:
        return False
    exponent = placed.outer * magnitude(placed.pair) * math.log2(math.e)
    return exponent <= _MOST_EXPONENT[facts.dtype]


def _imports_of_dropout(direction: str, facts: KernelFacts) -> list[str]:
    first = "from attndsl.backends.hopper.dropout import ("
    names = (_INDENT + line for line in _DROPOUT[direction])
    drawing = "drop_of_head" if facts.draws is None else "drop_of_part"
    return [f"from attndsl.backends.device.dropout import {drawing}", first, *names, ")"]


def partitions(producer: tuple[str, ...], consumer: tuple[str, ...], consumers: int) -> list[str]:
    """The statement that sets the warpgroups to work."""
    lines = ["gl.warp_specialize(", _INDENT + "[", *_call("produce", producer)]
    for part in range(consumers):
        lines += _call("consume", (f"{part},", *consumer))
    warps = ", ".join(["4"] * consumers)
    registers = ", ".join(["REGISTERS"] * consumers)
    return [*lines, _INDENT + "],", f"{_INDENT}[{warps}],", f"{_INDENT}[{registers}],", ")"]


def _call(function: str, own: tuple[str, ...]) -> list[str]:
    inner = [3 * _INDENT + line for line in (*own, "given,")]
    return [2 * _INDENT + f"({function}, (", *inner, 2 * _INDENT + ")),"]
