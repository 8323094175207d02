"""Plans of calls: what a program's rows see, which exchange costs least, and a rank's table.

Masks with closed forms are planned once. Those that look tensors up are planned again for other
tensors, and only then. Numbers alone decide, so that all ranks find the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.call.argument_checks import check_names
from attndsl.call.value_checks import plain_number
from attndsl.errors import ArgumentError
from attndsl.foundation.scalars import number_key
from attndsl.ir import DType, Op, leaf_names, toposort
from attndsl.passes.tiles.tile_plan import FORWARD

from .comm_plan import Fetched, figures_of, groups_for, table_of
from .plan_costs import TILE, costs_of
from .rank_consensus import digest
from .workload import demand_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .comm_plan import Figures, Table
    from .cp_attention import ShardedProgram
    from .plan_costs import Machine, Shape
    from .row_layouts import Layout
    from .workload import Demand

EXCHANGES = ("auto", "gather", "heads")
_SIDE = 2048
"""Tiles along a side that are looked at one by one, about."""
_MATTERS = {
    "batch": ("b", "token", "batch"), "heads": ("h", "hkv", "heads"),
    "kv_heads": ("hkv", "kv_heads"), "head_dim": ("head_dim",),
}  # fmt: skip
"""Variables and sizes through which a mask may depend on each size of a call."""
_POSITIONS = frozenset({"q", "kv", "q_len", "kv_len"})
"""Variables and sizes that depend on none of these."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The captures of a program that decide which keys its rows see, when it was planned."""

    tensors: Mapping[str, torch.Tensor]
    versions: Mapping[str, int | None]

    def is_same(self, captures: Mapping[str, Any]) -> bool:
        """Return True if ``captures`` has the same tensors, and torch counted no change of them.

        NumPy, ``.data`` and collectives change tensors without a count.
        """
        return all(
            captures.get(name) is x and self.versions[name] is not None
            and _version(x) == self.versions[name]
            for name, x in self.tensors.items()
        )  # fmt: skip


def _version(x: torch.Tensor) -> int | None:
    """Number of changes to ``x`` that torch has counted; None for tensors of inference mode."""
    return None if x.is_inference() else x._version


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Plan of a program's calls of one shape."""

    name: str
    """Name of the program."""
    table: Table
    figures: Figures
    seen: Seen


class CallShape(NamedTuple):
    """Shape and exchange of a call, which its plan depends on beside the layout and the mask."""

    shape: Shape
    exchange: str
    shares: bool
    """True if a capture holds this rank's rows, for which ranks exchange no heads."""


class PlanKey(NamedTuple):
    """Key that tells plans apart, but for tensors of masks."""

    spec: Any
    """The program as a text and its declarations."""
    token: str
    """Token of the layout."""
    asked: CallShape
    numbers: tuple[tuple[str, Any], ...]


def numbers_of(program: ShardedProgram, captures: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Captures that are numbers, as keys of Python's own: NumPy's are as good."""
    found = []
    for decl in program.lowered.program.params:
        x = captures.get(decl.name, decl.default)
        if not isinstance(x, torch.Tensor):
            number = plain_number(decl.dtype, x)
            found.append((decl.name, number_key(x if number is None else number)))
    return tuple(found)


def mask_names(program: ShardedProgram) -> tuple[str, ...]:
    """The captures that decide which pairs take part, in an order that all processes have."""
    found = program.lowered.program
    roots = [x for x in (found.mask, program.lowered.sparsity.mask) if x is not None]
    names: dict[str, None] = {}
    for root in roots:
        names |= dict.fromkeys(sorted(leaf_names(root)))
    known = {x.name for x in found.params} | {x.name for x in found.tensors}
    return tuple(name for name in names if name in known)


def is_listed(program: ShardedProgram) -> bool:
    """Return True if the tiles of the mask have no closed form, so that they are listed."""
    sparsity = program.lowered.sparsity
    return sparsity.loop(FORWARD, TILE, TILE, shifted=False, indexed=False).listed is not None


def seen_by(program: ShardedProgram, captures: Mapping[str, Any]) -> Seen:
    """The captures that decide what rows of ``program`` see."""
    tensors = {
        name: captures[name] for name in mask_names(program)
        if isinstance(captures.get(name), torch.Tensor)
    }  # fmt: skip
    return Seen(tensors, {name: _version(x) for name, x in tensors.items()})


class Sight(NamedTuple):
    """Keys that the rows of a program see, without costs."""

    demand: Demand
    maps: int
    """Number of different maps over batch entries and heads."""


def sight_key(
    program: ShardedProgram, chunk: int, shape: Shape, captures: Mapping[str, Any]
) -> object:
    """Key that tells sights of one length apart: the mask, its captures, and sizes that matter."""
    numbers = dict(numbers_of(program, captures))
    read = tuple(
        (name, numbers[name] if name in numbers else digest(captures.get(name)))
        for name in mask_names(program)
    )
    sizes = tuple(getattr(shape, name) for name in _sizes_of(program))
    return program.made_of.spec, chunk, read, sizes


def _sizes_of(program: ShardedProgram) -> list[str]:
    """The sizes of a call that change what its rows see, or what tensors its mask may read."""
    found, names = program.lowered.program, mask_names(program)
    roots = [x for x in (found.mask, program.lowered.sparsity.mask) if x is not None]
    roots += [dim for decl in found.tensors if decl.name in names for dim in decl.dims]
    values = {str(x.value) for x in toposort(*roots) if x.op in (Op.VAR, Op.SIZE)} - _POSITIONS
    # A name that is none of these may stand for any size.
    known = values <= {name for some in _MATTERS.values() for name in some}
    return [size for size, some in _MATTERS.items() if not known or not values.isdisjoint(some)]


def sight_of(
    program: ShardedProgram, length: int, chunk: int, shape: Shape, captures: Mapping[str, Any]
) -> Sight:
    """Keys that ``program``'s rows see, in tiles that divide ``chunk``.

    Raises:
        AttnDSLError: Captures that are missing, or that do not fit.
    """
    grain = min(TILE, chunk)
    if length > _SIDE * grain and is_listed(program):
        while chunk % (2 * grain) == 0 and length > _SIDE * grain:
            grain *= 2
    given = {name: _on_cpu(program, name, captures[name]) for name in mask_names(program)
             if name in captures}  # fmt: skip
    reach = program.reach(
        length, length, grain, grain, shape.batch, shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, captures=given,
    )  # fmt: skip
    return Sight(demand_from(reach, chunk, 0.0, 0.0), reach.maps)


def weighed(sight: Sight, shape: Shape, machine: Machine, weight: float = 1.0) -> Demand:
    """Demand, with its seconds on ``machine``, of ``weight`` layers whose rows see ``sight``."""
    costs, grain = costs_of(machine, shape), sight.demand.grain
    tile = costs.tile * shape.batch * shape.heads / max(1, sight.maps) * (grain / TILE) ** 2
    return replace(sight.demand, tile=tile, key=costs.key * grain, weight=weight, call=costs.call)


def _on_cpu(program: ShardedProgram, name: str, value: Any) -> Any:
    """Capture ``name`` as a plan reads it: a number, or a tensor on the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    found = value.detach().cpu()
    params = {decl.name: decl.dtype for decl in program.lowered.program.params}
    if name in params and found.dim() == 0:
        number = found.item()
        return int(number) if params[name] is DType.INT else number
    return found


def plan_call(
    program: ShardedProgram,
    layout: Layout,
    rank: int,
    captures: Mapping[str, Any],
    asked: CallShape,
    machine: Machine,
    sight: Sight | None = None,
) -> Plan:
    """The plan of ``program`` on ``layout``, with the exchange that takes least.

    Args:
        program: In which nothing is optional.
        layout: Who holds which rows.
        rank: Whose plan it is.
        captures: Of the call.
        asked: Its sizes.
        machine: Speeds.
        sight: What the rows see, where that is known.

    Raises:
        ArgumentError: An exchange that these numbers of heads do not allow.
        AttnDSLError: As a call.
    """
    check_names(program.lowered.program, captures)
    shape, chunk = asked.shape, layout.chunk
    seen = seen_by(program, captures)
    if sight is None:
        sight = sight_of(program, layout.length, chunk, shape, captures)
    demand, costs = weighed(sight, shape, machine), costs_of(machine, shape)
    groups = _groups(layout.ranks, asked)
    found = [figures_of(layout, demand, n, costs, machine.latency) for n in groups]
    best = min(found, key=lambda figures: figures.seconds)
    most = int(best.fetched.max(initial=0))
    room = machine.kept * layout.rows(0) * costs.row_bytes
    fetched = Fetched(most > 0, most * costs.key_bytes <= room)
    table = table_of(layout, demand, rank, best.group, machine.call, fetched)
    return Plan(program.name, table, best, seen)


def _groups(ranks: int, asked: CallShape) -> tuple[int, ...]:
    """Sizes of groups to choose from."""
    shape = asked.shape
    possible = groups_for(ranks, shape.heads, shape.kv_heads)
    if asked.exchange == "gather" or (asked.shares and asked.exchange == "auto"):
        return (1,)
    if asked.exchange == "auto":
        return possible
    if asked.shares and ranks > 1:
        raise ArgumentError(
            "a capture holds this rank's rows alone, and exchange is 'heads'",
            hint="pass the whole tensor, or exchange='gather'",
        )
    if ranks not in possible:
        raise ArgumentError(
            f"exchange is 'heads', and {ranks} ranks cannot share {shape.heads} query heads and "
            f"{shape.kv_heads} key heads",
            hint="use exchange='auto', or a number of ranks that divides the key heads",
        )
    return (ranks,)
