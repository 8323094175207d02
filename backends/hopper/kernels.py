"""The table of Hopper's kernels: one entry a kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from attndsl.ir import Op, toposort
from attndsl.passes.tiles.tile_plan import BACKWARD_KV, FORWARD

from ..kernels.config import Config
from ..kernels.cost_model import instructions
from ..kernels.kernel import FixedKernel, Kernel, Task
from ..log_sum import FAR
from .around_backward import SUM_BLOCK, dq_from_sums, prepare_backward, sum_of_heads
from .descriptor_types import arguments_of
from .features import BY_FLAG
from .features.tile_skipping import parts_of_lists
from .generate import generate, has_wide_lines, has_wide_pairs
from .shared_memory import deepened
from .tile_shapes import block_width, config_width, widest
from .tile_sizes import (
    CANDIDATES,
    candidates,
    for_lengths,
    looks_up_many_keys,
    with_few_keys,
    with_few_rows,
    with_short_loops,
    with_small_cells,
)
from .tma_bias import fitting

if TYPE_CHECKING:
    from attndsl.passes.tiles.tile_plan import LoopPlan

    from ..emit.template import Products
    from ..kernels.kernel import Job
    from ..kernels.target import Target

_MOST_WORK_OF_THREE = 30
"""Instructions a pair beyond which three consumers, of 160 registers, spill more than two."""

_MOST_WORK_OF_LARGE = 40
"""Instructions a pair beyond which a backward of D64 spills more with tiles of 128 x 128 than with
tiles of 64 x 128."""

_MOST_WORK_OF_MASK = 40
"""Instructions a pair of a mask beyond which forwards have tiles of 128 x 64: see M39 in
docs/dev/measured.md."""

_FEW_TILES = 16
"""Tiles of 128 keys that work tiles of 128 rows visit at most where these are faster than those of
192: see M47 in docs/dev/measured.md."""

_SHORTEST = 6
"""Tiles of 128 keys that short loops of D64 visit at most where three programs a multiprocessor are
faster: see M76 in docs/dev/measured.md."""

_MOST_WORK_BESIDE_PARAMS = 30
"""Instructions a pair of a score that reads run-time params, beyond which forwards of D128 spill
with tiles of 128 x 128: see M36 in docs/dev/measured.md."""

_STATISTICS = {64: Config(128, 64, 8, 2), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 2)}
"""Launch options of the kernels around a backward, by its wider head dim."""


def _text(job: Job, config: Config, loop: LoopPlan, products: Products) -> str:
    return generate(job, loop, config)


def _tangent_configs(job: Job, machine: Target) -> tuple[Config, ...]:
    return CANDIDATES[job.kernel.task][config_width(job.kernel.task, job.facts)]


def _configs(job: Job, machine: Target) -> tuple[Config, ...]:
    """Tile sizes of a forward or backward, in order of preference."""
    lowered, facts, task = job.lowered, job.facts, job.kernel.task
    # Relative to a maximum that is not followed, weights take fewer registers, columns or not.
    column = lowered.placed.column is not None and facts.dtype != "bf16"
    dropped, own = lowered.program.dropout is not None, lowered.program.weights is not None
    plain = lowered.program.mask is None or (lowered.sparsity.plain and not own)
    forward = task is Task.FORWARD
    if not forward and job.work_of_pair > _MOST_WORK_OF_LARGE:
        plain = False
    work = job.work
    if forward and work == "short partial" and looks_up_many_keys(facts, lowered.sparsity):
        work = "masked"
    found = candidates(task, config_width(task, facts), plain, work, column, dropped, own)
    if forward and not (dropped or own or work == "short partial"):
        found = with_few_keys(facts, found)
    few = forward and work.startswith("short") and _visits_few(job, _FEW_TILES)
    found = for_lengths(task, facts, found, few)
    if forward and job.work_of_pair > _MOST_WORK_OF_THREE:
        found = tuple(config for config in found if config.consumers < 3)
    if forward and not (dropped or own) and _has_short_loops(job):
        found = with_short_loops(facts, found)
    if forward and _is_long_with_params(job):
        found = tuple(sorted(found, key=lambda config: config.block_n))
    if forward and job.work_of_mask > _MOST_WORK_OF_MASK:
        narrow = (replace(x, block_n=64, stages=3) if x.block_n > 64 else x for x in found)
        found = tuple(dict.fromkeys(narrow))
    if not forward and _is_mostly_mask(job):
        found = tuple(config for config in found if config.peeled)
    for flag in facts.features:
        change = BY_FLAG[flag].configs
        found = found if change is None else change(found)
    if facts.takes_turns:
        # Programs take work tiles in their order, one after the other.
        found = tuple(config for config in found if config.persistent)
    if forward:
        found = tuple(deepened(facts, config) for config in found)
    if not own:
        found = with_small_cells(task, facts, lowered.sparsity, with_few_rows(facts, found))
    return fitting(task, facts, found) if facts.pair_tiles else found


def _visits_few(job: Job, most: int) -> bool:
    """Return True if work tiles visit ``most`` tiles of keys, however long sequences are."""
    facts = job.facts
    visited = job.lowered.sparsity.visited(FORWARD, facts.shifted, facts.indexed)
    return visited is not None and visited <= most


def _has_short_loops(job: Job) -> bool:
    """Return True if a score of little work has few tiles a row, as with windows and documents.

    How long documents are is not known before a call, so that these count as short.
    """
    facts, sparsity = job.facts, job.lowered.sparsity
    if facts.pair_tiles or job.work_of_pair > _MOST_WORK_OF_THREE:
        return False
    if sparsity.not_affine is None:
        return job.work.startswith("short") and _visits_few(job, _SHORTEST)
    return sparsity.by_cells is None or not sparsity.by_cells.cells


def _is_mostly_mask(job: Job) -> bool:
    """Return True if most of the program's work for a pair is its mask.

    Where there are two loops, registers then spill in that over PARTIAL tiles. One loop would spill
    in all tiles, and FULL ones would have the mask's work: see M37 in docs/dev/measured.md.
    """
    return 2 * job.work_of_mask > job.work_of_pair


def _is_long_with_params(job: Job) -> bool:
    """Return True if a score takes many instructions a pair, and reads params given at the call.

    What follows from params alone stays in registers beside the scores of a tile.
    """
    pair = job.lowered.placed.pair
    return (
        pair is not None
        and any(item.op is Op.PARAM for item in toposort(pair))
        and instructions((pair,), job.facts.names()) > _MOST_WORK_BESIDE_PARAMS
    )


def _more_configs(found: tuple[Config, ...], job: Job) -> tuple[Config, ...]:
    """The same configurations, each persistent where it was not, and not where it was.

    Backwards above head dim 128 are not, and those whose work tiles take turns are.
    """
    if job.kernel.task is Task.BACKWARD and (widest(job.facts) > 128 or job.facts.takes_turns):
        return ()
    return tuple(replace(config, persistent=not config.persistent) for config in found)


def _parts_of_lists(job: Job, config: Config) -> int:
    return parts_of_lists(job.lowered, job.facts, job.kernel.task, config)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="forward",
        family="hopper",
        tasks=frozenset({Task.FORWARD}),
        entry="attention_forward",
        text=_text,
        configs=_configs,
        arguments=partial(arguments_of, Task.FORWARD),
        loop=FORWARD,
        derives=False,
        waves=(4, 2, 1),
        parts_of_lists=_parts_of_lists,
        more_configs=_more_configs,
        most_work=55,
        most_work_of_score=24,
        most_work_of_mask=130,
    ),
    Kernel(
        name="forward_tangent",
        family="hopper",
        tasks=frozenset({Task.FORWARD_TANGENT}),
        entry="attention_forward_tangent",
        text=_text,
        configs=_tangent_configs,
        arguments=partial(arguments_of, Task.FORWARD_TANGENT),
        loop=FORWARD,
        waves=(4, 2, 1),
        parts_of_lists=_parts_of_lists,
        most_work=130,
    ),
    Kernel(
        name="backward_kv",
        family="hopper",
        tasks=frozenset({Task.BACKWARD}),
        entry="attention_backward_kv",
        text=_text,
        configs=_configs,
        arguments=partial(arguments_of, Task.BACKWARD),
        loop=BACKWARD_KV,
        waves=(2, 1),
        parts_of_lists=_parts_of_lists,
        more_configs=_more_configs,
        most_work=200,
    ),
)
"""The work of a pair beyond ``most_work`` is many times the work of its products, which these
kernels overlap it with. Their text repeats that work some ten times for 64 pairs a thread. They
spill hundreds of registers and compile for minutes: see M16 in docs/dev/measured.md. In a forward
nothing overlaps with what reads the score: see M31 in docs/dev/measured.md."""


def _width(job: Job) -> dict[str, int | bool]:
    return {"WIDTH": block_width(job.facts.head_dim)}


def _width_and_checks(job: Job) -> dict[str, int | bool]:
    return {**_width(job), "CHECKS": job.lowered.program.bounded}


def _width_and_far(job: Job) -> dict[str, int | bool]:
    lowered, far = job.lowered, -1
    if has_wide_lines(lowered):
        far = 0
    elif has_wide_pairs(lowered):
        far = int(FAR)
    return {**_width(job), "FAR": far}


def _block(job: Job) -> dict[str, int | bool]:
    return {"BLOCK": SUM_BLOCK}


def _has_heads_apart(job: Job) -> bool:
    return job.facts.heads_apart


def _statistics(job: Job, machine: Target) -> tuple[Config, ...]:
    return (_STATISTICS[widest(job.facts)],)


FIXED: tuple[FixedKernel, ...] = (
    FixedKernel("prepare_backward", prepare_backward, _width_and_far, _statistics),
    FixedKernel("dq_from_sums", dq_from_sums, _width_and_checks, _statistics),
    FixedKernel("sum_of_heads", sum_of_heads, _block, _statistics, applies=_has_heads_apart),
)
