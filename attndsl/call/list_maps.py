"""Lists of keys as maps: what ``kv // 64 in chosen[b, hkv, q, :]`` looks up.

A list becomes a tensor of bools with an element for each value that the left side of ``in`` may
have, and the condition a lookup in it. So whatever runs maps of blocks runs lists: kernels leave
out tiles by them, and everything else sees a mask. An element that no pair has, such as -1 or one
out of range, is left out, and one that comes twice counts once.

Non-goals: left sides without bounds, such as positions that only a tensor tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.errors import UnsupportedError
from attndsl.ir import (
    TOKEN,
    TOKENS,
    DType,
    Node,
    Op,
    TensorDecl,
    leaf_names,
    load,
    mentions,
    node,
    size,
    substitute,
    toposort,
    var,
)
from attndsl.passes.int_ranges import ranges
from attndsl.pipeline import lower_program

from .dispatch import get_backend
from .remade_programs import remade
from .value_checks import has_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Call
    from attndsl.ir import Program
    from attndsl.passes.int_ranges import Range
    from attndsl.pipeline import Lowered

_UNIT = 16
"""Lengths of a map's rows are multiples of this, so that calls of similar lengths have equal ones,
and rows begin at addresses that kernels read well."""
_TOKEN, _TOKENS = var(TOKEN), size(TOKENS)
_MOST = 1 << 27
"""Most elements of a row of a map."""


class _ListMap(NamedTuple):
    """The map of one condition."""

    name: str
    of: str
    """The list."""
    shifted: bool
    """True if values of the left side may be negative."""
    split: int | None
    """Dim of tokens in place of which the map has one of batch entries and one of queries."""

    @property
    def width(self) -> str:
        """Name of the size that is the length of a row."""
        return f"{self.name}_width"

    @property
    def shift(self) -> str:
        """Name of the size that is added to the left side."""
        return f"{self.name}_shift"


@dataclass(frozen=True, slots=True)
class ListMaps:
    """The program of a call with lists, in which they are maps."""

    lowered: Lowered
    maps: tuple[_ListMap, ...]
    sizes: Mapping[str, int]
    """Sizes of the maps. Signatures have all that they follow from: see :func:`names_in_lists`."""

    def applied(self, call: Call) -> Call:
        """``call`` with maps in place of its lists."""
        own, rows = self.sizes, call.q.shape[::2][:2]
        tensors = {}
        for each in self.maps:
            found = _map_of(call.tensors[each.of], own[each.width], own.get(each.shift, 0))
            if each.split is not None:
                shape = found.shape
                found = found.view(*shape[: each.split], *rows, *shape[each.split + 1 :])
            tensors[each.name] = found
        part = call.part
        if part is not None and part.shares:
            more = {(x.name, dim) for x in self.maps for name, dim in part.shares if name == x.of}
            part = replace(part, shares=part.shares | more)
        tensors = {**call.tensors, **tensors}
        program = self.lowered.program
        tensors = {decl.name: tensors[decl.name] for decl in program.tensors}
        return call._replace(sizes={**call.sizes, **own}, tensors=tensors, part=part)


def maps_of(lowered: Lowered, call: Call) -> ListMaps | None:
    """The maps of a call's lists; None for a program without lists.

    Raises:
        UnsupportedError: The values of a left side have no bounds, or too many.
    """
    elements = tuple(item.args[0] for item in lowered.written.lists)
    if not elements:
        return None
    found = _ranges_of(elements, call)
    shifted = tuple(low < 0 for low, _ in found)
    moved, maps = remade(_with_maps, lowered.written, (shifted, call.part is None))
    return ListMaps(moved, maps, _sizes_of(maps, found))


def names_in_lists(program: Program) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Params, and names of offsets, on whose values the program with maps depends."""
    elements = [item.args[0] for item in program.lists]
    params = [str(item.value) for item in toposort(*elements) if item.op is Op.PARAM]
    offsets = [f"{x}_offset" for x in ("q", "kv") if mentions(*elements, name=x)]
    return tuple(dict.fromkeys(params)), tuple(offsets)


def with_maps(lowered: Lowered, call: Call) -> tuple[Lowered, Call]:
    """A program and a call of it, with maps in place of lists."""
    maps = maps_of(lowered, call)
    return (lowered, call) if maps is None else (maps.lowered, maps.applied(call))


def _with_maps(
    program: Program, how: tuple[tuple[bool, ...], bool]
) -> tuple[Lowered, tuple[_ListMap, ...]]:
    """A program in which all conditions of lists look up maps, and these.

    ``how`` says which left sides may be negative, and whether rows of q are positions: a map by
    ``token`` is one by ``b`` and ``q`` then, which kernels read by tiles.
    """
    shifted, whole = how
    taken = {decl.name for decl in program.captures()} | {*program.dim_names()}
    maps: list[_ListMap] = []
    declared = {decl.name: decl for decl in program.tensors}
    found: dict[Node, Node] = {}
    for item, negative in zip(program.lists, shifted, strict=True):
        of = declared[str(item.value)]
        number, name = len(maps), f"{of.name}_map"
        while name in taken:
            number, name = number + 1, f"{of.name}_map{number}"
        taken.add(name)
        # Sides may have conditions of this kind themselves.
        element, *indices = (substitute(arg, found) for arg in item.args)
        dims = list(of.dims[:-1])
        split = None
        places = [n for n, dim in enumerate(dims) if dim is _TOKENS and indices[n] is _TOKEN]
        if whole and places:
            split = places[0]
            indices[split : split + 1] = var("b"), var("q")
            dims[split : split + 1] = size("batch"), size("q_len")
        own = _ListMap(name, of.name, negative, split)
        maps.append(own)
        declared[name] = TensorDecl(name, DType.BOOL, (*dims, size(own.width)), of.span)
        place = node(Op.ADD, element, size(own.shift)) if negative else element
        found[item] = load(name, DType.BOOL, *indices, place, span=item.span)
    changed = _replaced(program, found)
    used = frozenset().union(*map(leaf_names, changed.roots()))
    lists = {each.of for each in maps}
    kept = [decl for decl in declared.values() if decl.name in used or decl.name not in lists]
    return lower_program(replace(changed, tensors=tuple(kept))), tuple(maps)


def _replaced(program: Program, found: Mapping[Node, Node]) -> Program:
    lines = tuple(replace(x, value=substitute(x.value, found)) for x in program.lines)
    names = [x for x in ("mask", "sink", "weights", "dropout") if getattr(program, x) is not None]
    parts: dict[str, Any] = {x: substitute(getattr(program, x), found) for x in names}
    return replace(program, score=substitute(program.score, found), lines=lines, **parts)


def _ranges_of(elements: tuple[Node, ...], call: Call) -> list[Range]:
    """The least and the greatest value of each left side at the call's pairs.

    Raises:
        UnsupportedError: They have no bounds, or are too many.
    """
    counts = {"b": "batch", "h": "heads", "hkv": "kv_heads"}
    known = {name: (0, max(0, call.sizes[count] - 1)) for name, count in counts.items()}
    known |= {name: (count, count) for name, count in call.sizes.items()}
    known |= {name: (x, x) for name, x in call.params.items() if type(x) is int}
    known[TOKEN] = 0, max(0, call.sizes["batch"] * call.sizes["q_len"] - 1)
    if call.part is not None and call.part.packed is not None:
        known[TOKEN] = 0, max(0, call.part.packed.tokens - 1)
    positions = {name: _positions_of(name, call) for name in ("q", "kv")}
    known |= {name: x for name, x in positions.items() if x is not None}
    found = []
    for element in elements:
        for name, span in positions.items():
            if span is None and mentions(element, name=name):
                raise UnsupportedError(
                    f"'in' looks for a value of {name}, whose positions only a tensor tells",
                    element.span,
                    f"give {name}_offset as a number, or {name}_len, the number of all positions",
                )
        low, high = ranges((element,), {}, known=known)[element]
        if high - low >= _MOST - _UNIT:
            raise UnsupportedError(
                f"'in' looks for a value that has no bounds but {low} and {high}",
                element.span,
                "look for a value that positions, sizes and params bound, such as kv // size",
            )
        found.append((low, high))
    return found


def _positions_of(name: str, call: Call) -> Range | None:
    """The first and the last position that rows may have; None if only a tensor tells."""
    offset, index = getattr(call, f"{name}_offset"), getattr(call, f"{name}_index")
    rows = (call.q if name == "q" else call.k).shape[2]
    whole = call.sizes[f"{name}_len"]
    counted = call.part is not None and name in call.part.counted
    if index is None and type(offset) is int:
        last = max(offset + rows, whole) if call.part is not None else offset + rows
        return min(0, offset), max(0, last - 1)
    if counted:
        return 0, max(0, whole - 1)
    return None


def _sizes_of(maps: tuple[_ListMap, ...], found: list[Range]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for each, (low, high) in zip(maps, found, strict=True):
        first = low if each.shifted else 0
        # One element more than there are values, where all others are put.
        sizes[each.width] = -(-(high - first + 2) // _UNIT) * _UNIT
        if each.shifted:
            sizes[each.shift] = -first
    return sizes


def _map_of(listed: torch.Tensor, width: int, shift: int) -> torch.Tensor:
    """Bools (..., width): True where a row of ``listed`` (..., n) has ``place - shift``.

    Each call makes its map anew: users' kernels write lists in place without a change of their
    versions, so an earlier call's map may be out of date.
    """
    device = listed.device
    if listed.is_cuda and has_values(listed) and get_backend("triton").why_not(device) is None:
        from attndsl.backends.triton.list_map_launch import launch_list_map  # Imports Triton.

        return launch_list_map(listed.detach(), width, shift)
    return _by_torch(listed, width, shift)


def _by_torch(listed: torch.Tensor, width: int, shift: int) -> torch.Tensor:
    places = listed.detach().long() + shift
    outside = (places < 0) | (places >= width - 1)
    places = torch.where(outside, width - 1, places)
    rows = torch.zeros((*listed.shape[:-1], width), dtype=torch.bool, device=listed.device)
    found: torch.Tensor = rows.scatter(-1, places, True)
    return found
