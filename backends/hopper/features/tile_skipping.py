"""Key-value tiles of a query tile that each consumer of a forward leaves out.

The consumers share a query tile's rows, and the first of these may attend to fewer keys than the
last. Where tiles have a closed form, so have those of a consumer's rows; where they are listed, the
lists say it.

Non-goals: backward kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.passes.tiles.tile_plan import FORWARD

from ...emit.device_functions import param_values
from ...emit.loops import print_visited
from ...kernels.kernel import Task
from .feature import Feature, OwnTiles, Texts

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ...emit.facts import KernelFacts
    from ...emit.template import Flags
    from ...kernels.config import Config
    from .feature import ModuleSpec


def own_tiles(lowered: Lowered, facts: KernelFacts, task: Task, config: Config) -> OwnTiles:
    """Tiles that consumers of one kernel leave out.

    Rows beyond the last query are many where tiles have a length that few lengths are multiples
    of. What comes by tiles, or is drawn, comes to all consumers, and so do tiles of few.
    """
    if not _may_leave_out(lowered, facts, task):
        return OwnTiles()
    sizes = config.block_m, config.block_m // config.consumers, config.block_n
    how = facts.shifted, facts.indexed, facts.wide
    if lowered.sparsity.loop(FORWARD, config.block_m, config.block_n, *how).listed is not None:
        return OwnTiles(skips=True, parts=config.consumers)
    loop = lowered.sparsity.loop_of_rows(*sizes, *how)
    return OwnTiles(loop is not None or config.block_m & (config.block_m - 1) != 0, loop)


def parts_of_lists(lowered: Lowered, facts: KernelFacts, task: Task, config: Config) -> int:
    """Number of consumers for which the lists of a kernel tell tiles apart, if it has lists.

    Looks at no tiles, so that a start from the cache derives no plan.
    """
    return config.consumers if _may_leave_out(lowered, facts, task) else 1


def _may_leave_out(lowered: Lowered, facts: KernelFacts, task: Task) -> bool:
    dropped = lowered.program.dropout is not None
    alike = bool(facts.pair_tiles) or facts.few_tiles or dropped
    return task is not Task.BACKWARD and not alike


def _skips(spec: ModuleSpec) -> bool:
    return spec.own.skips


def _flags(spec: ModuleSpec) -> Flags:
    own = spec.own
    return {"ROWS_HAVE_TILES": own.loop is not None, "ROWS_ARE_LISTED": own.parts > 1}


def _functions(spec: ModuleSpec) -> Texts:
    """The function ``rows_have`` if rows have a plan."""
    loop, facts = spec.own.loop, spec.facts
    if loop is None:
        return Texts()
    values = param_values(facts, scalar=True)
    text, used = print_visited("rows", FORWARD.along, loop, values, facts.names())
    return Texts([text], frozenset(used))


SKIPS = Feature("SKIPS", _skips, _flags, functions=_functions)
