"""A program's Hopper kernels as the text of a Python module.

Functions of loops are those of the portable kernels, letter by letter, those of pairs nearly
(:mod:`.program_functions`); the name ``tl`` in the module is :mod:`.gluon_dialect`. What a kernel
has beside its loop says :mod:`.features`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attndsl.ir import Op, const, dependencies, reads_score, toposort
from attndsl.passes.magnitude import magnitude

from ..emit.device_functions import param_values, parameters, record_of_given
from ..emit.loops import LIST_PARAMETERS, print_loop
from ..emit.module_lines import wrapped
from ..emit.template import Literal, fill_template, import_lines
from ..kernels.kernel import Task
from ..log_sum import FAR
from .capture_sums import Learned, learned_in_kernel
from .features import FEATURES
from .features.feature import ModuleSpec, parts_of
from .features.tile_skipping import own_tiles
from .program_functions import print_functions, weights_and_factor
from .shared_memory import has_own_output, query_slots
from .tile_shapes import block_width, is_above_128, key_blocks, key_width

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.passes.tiles.tile_plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ..emit.template import Flags
    from ..kernels.config import Config
    from ..kernels.kernel import Job

_TEMPLATES = {
    Task.FORWARD: ("forward_produce", "forward", "forward_kernel", "forward_entry"),
    Task.FORWARD_TANGENT: ("forward_produce", "forward_tangent", "forward_kernel", "tangent_entry"),
    Task.BACKWARD: ("backward", "backward_kernel"),
}
"""Templates that follow the head and the features' device code."""
_ABOVE_128 = ("backward_wide", "backward_kernel")
"""The same for backwards of head dims above 128."""
_OWN_HELPERS = {"as_block", "spread"}
"""Names of library functions that are defined otherwise here."""


def generate(job: Job, loop: LoopPlan, config: Config) -> str:
    """The module of a kernel.

    Args:
        job: The kernel, the program, and what the call is like. A forward with tangents is of
            programs with the softmax's weights, and without dropout; a backward makes all three
            gradients.
        loop: The plan of its loop.
        config: How many warpgroups share a tile, and whether loops are peeled.
    """
    kernel, lowered, facts = job.kernel, job.lowered, job.facts
    task = kernel.task
    assert kernel.loop is not None
    if task is Task.FORWARD_TANGENT:
        assert lowered.program.weights is None
        assert lowered.program.dropout is None
        assert not facts.moving_captures
        assert not facts.pair_tiles
    own = own_tiles(lowered, facts, task, config)
    spec = ModuleSpec(lowered, facts, task, loop, config, own)
    parts = parts_of(FEATURES, spec)
    learned = Learned() if spec.is_forward else learned_in_kernel(lowered, facts)
    functions, helpers = print_functions(lowered, facts, task, learned)
    texts, used = print_loop(
        spec.loop_name,
        kernel.loop.along,
        loop,
        param_values(facts, scalar=True),
        facts.names(),
        own.parts,
    )
    helpers |= used | parts.texts.helpers
    given = [*parts.given, *parameters(facts), *(LIST_PARAMETERS if spec.is_listed else ())]
    head = "forward_shared" if spec.is_forward else "backward_shared"
    rest = _ABOVE_128 if is_above_128(facts, task) else _TEMPLATES[task]
    return fill_template(
        __package__,
        (head, *parts.templates, *rest),
        (kernel.entry,),
        [record_of_given(given), *functions, *texts, *parts.texts.functions],
        helpers,
        {**_constants(spec), **_flags(spec), **parts.flags},
        given,
        {
            "imports": [
                *import_lines("device", helpers - _OWN_HELPERS),
                *import_lines("hopper", helpers & _OWN_HELPERS),
                *parts.imports,
            ],
            "arguments": wrapped(parts.arguments),
        },
    )


def _constants(spec: ModuleSpec) -> Flags:
    """Constants of every module: sizes of tiles, dims, how positions are given, the dtype."""
    facts, config = spec.facts, spec.config
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "CONSUMERS": config.consumers,
        "REGISTERS": config.registers,
        "HEAD_DIM": facts.head_dim,
        "VALUE_DIM": facts.value_dim,
        "D": key_width(spec.task, facts),
        "KEY_BLOCKS": key_blocks(spec.task, facts),
        "DV": block_width(facts.value_dim),
        "Q_KIND": facts.q_kind,
        "KV_KIND": facts.kv_kind,
        "HALF": Literal(f"gl.{'bfloat16' if facts.dtype == 'bf16' else 'float16'}"),
    }


def _flags(spec: ModuleSpec) -> Flags:
    """Flags for the parts of a score, the tiles of the loop, and how results are stored."""
    lowered, facts, loop = spec.lowered, spec.facts, spec.loop
    program, placed = lowered.program, lowered.placed
    name = spec.loop_name.upper()
    modified, scaled = placed.pair.op is not Op.SCORE, _is_scaled_first(spec)
    wide = is_above_128(facts, spec.task)
    return {
        "MASKED": program.mask is not None,
        "MODIFIED": modified,
        "OWN_WEIGHTS": program.weights is not None,
        "HAS_ROW": placed.row is not None,
        "HAS_COLUMN": placed.column is not None,
        "WIDE": has_wide_pairs(lowered) or _is_wide(placed.column),
        "WIDE_LINES": has_wide_lines(lowered),
        "SHIFTED": has_wide_pairs(lowered) and not has_wide_lines(lowered),
        "HAS_STEEPNESS": placed.steepness is not None,
        "HAS_SINK": program.sink is not None,
        "HAS_FACTOR": placed.inner is not None,
        "HAS_DERIVATIVE": placed.slope is not const(1.0),
        "PAIRWISE_DERIVATIVE": _is_pairwise(placed.slope),
        "HAS_COMMON": weights_and_factor(lowered, facts, spec.task)[1] is not None,
        "OUTER": placed.outer,
        "SCALED_FIRST": scaled,
        "SIGNED": placed.inner is not None and placed.column is None and not scaled,
        f"{name}_HAS_FULL": spec.is_listed or bool(loop.full),
        f"{name}_HAS_PARTIAL": spec.is_listed or bool(loop.partial),
        # Without a mask the last tile alone may be PARTIAL, and it is the first to be visited.
        f"{name}_REPEATS_PARTIAL": spec.is_listed
        or (bool(loop.partial) and program.mask is not None),
        f"{name}_DESCENDING": loop.descending,
        "NEEDS_TILE": spec.is_forward and not spec.has_tangents,
        "PEELED": spec.config.peeled,
        "EARLY": spec.config.early,
        "ABOVE_128": wide,
        # A soft cap gains, plain scores lose: see M8 in docs/dev/measured.md.
        # Such arrivals order no additions to sums before them.
        "RELEASE_PER_THREAD": not (spec.is_forward or wide or facts.takes_turns)
        and _is_pairwise(placed.slope),
        "OWN_OUTPUT": spec.is_forward and has_own_output(facts, spec.config),
        "QUERIES": query_slots(facts, spec.config) if spec.task is Task.FORWARD else 1,
        "FP32_ROWS": facts.wide_gradients or facts.heads_apart,
        "HEADS_APART": facts.heads_apart,
        # Gradients of q, k and v are repaired (:mod:`..triton.nan_repair`), and others are not.
        "SPARES_DEAD": program.bounded
        and bool(facts.tensor_gradients or facts.param_gradients or facts.features),
    }


def has_wide_lines(lowered: Lowered) -> bool:
    """Tell whether tensors of positions give the scores' parts of rows or columns, maybe large."""
    placed = lowered.placed
    return _is_wide(placed.row) or _is_wide(placed.column)


def has_wide_pairs(lowered: Lowered) -> bool:
    """Tell whether tensors of positions give what scores have of pairs, and nothing bounds it."""
    pair = lowered.placed.pair
    return _is_wide(pair) and math.isinf(magnitude(pair))


def _is_wide(root: Node | None) -> bool:
    """Tell whether an expression may fill masked pairs with a large number.

    Biases do, that are looked up by position, and numbers and params that ``where`` chooses.
    """
    if root is None:
        return False
    varies = dependencies(root)
    for item in toposort(root):
        if item.op is Op.LOAD and not varies[item].isdisjoint(("q", "kv")):
            return True
        if item.op is Op.CONST and FAR < abs(float(item.value or 0)) < math.inf:
            return True
        if item.op is Op.WHERE and any(Op.PARAM in _ops(x) for x in item.args[1:]):
            return True
    return False


def _ops(root: Node) -> set[Op]:
    return {item.op for item in toposort(root)} if not reads_score(root) else set()


def _is_scaled_first(spec: ModuleSpec) -> bool:
    """Return True if scores are multiplied by the scale before anything else is done with them."""
    program, placed = spec.lowered.program, spec.lowered.placed
    found = placed.pair.op is not Op.SCORE or program.weights is not None
    # The running maximum needs a factor that is positive; tangents have no code for its sign.
    found = found or (spec.has_tangents and placed.inner is not None)
    return found or reads_score(program.mask) or spec.facts.scale_first


def _is_pairwise(slope: Node) -> bool:
    """Return True if a score's derivative varies within a head."""
    return not dependencies(slope)[slope] <= {"b", "h"}
