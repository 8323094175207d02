"""Tensors of size 1 along a dim that is declared larger: one element counts for all indices.

The program that reads such a tensor is another program: the dim is declared as 1, and every index
along it is 0. So kernels, tiles and gradients see a tensor of fewer dims, and nothing is expanded.

Non-goals: dims whose size a tensor gives a name; the rows of ``dot``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attndsl.ir import Node, const, rebuild, sides, toposort

from .sub_program import places_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from attndsl.ir import Program

Dims = tuple[tuple[str, int], ...]
"""Dims of tensors: names and numbers."""


def with_ones(program: Program, ones: Collection[tuple[str, int]]) -> Program:
    """``program`` for tensors that have size 1 along the dims ``ones``."""
    done: dict[Node, Node] = {}
    lines = [line.value for line in program.lines]
    for item in toposort(*program.roots(), *lines):
        args = [done[arg] for arg in item.args]
        for place, *looked_up in places_of(item):
            if tuple(looked_up) in ones:
                args[place] = const(0)
        done[item] = item if tuple(args) == item.args else rebuild(item, tuple(args))

    def part(root: Node | None) -> Node | None:
        return None if root is None else done[root]

    return replace(
        program,
        score=done[program.score],
        mask=part(program.mask),
        sink=part(program.sink),
        weights=part(program.weights),
        dropout=part(program.dropout),
        lines=tuple(replace(line, value=done[line.value]) for line in program.lines),
        tensors=tuple(
            replace(
                decl,
                dims=tuple(
                    const(1) if (decl.name, number) in ones else dim
                    for number, dim in enumerate(decl.dims)
                ),
            )
            for decl in program.tensors
        ),
    )


def fixed_dims(program: Program) -> frozenset[tuple[str, int]]:
    """Dims that never have size 1 in place of another: rows of ``dot`` and of ``in``."""
    rows = (side for item in program.products for side in sides(item))
    found = {(side.name, len(side.indices)) for side in rows}
    return frozenset(found | {(str(x.value), len(x.args) - 1) for x in program.lists})
