"""Gradients of tensors that pairs look up an element each of: biases, and what they broadcast over.

A program of the kernel owns a tile of query and key positions, goes through the batch entries and
heads that the tensor does not tell apart, in order, and stores each element once.

Non-goals: positions that are looked up or shifted by what only the device knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.passes.inside import reads_inside

from ..emit.facts import TRITON_TYPES
from .terms import is_plain, terms_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from attndsl.pipeline import Lowered

    from ..base import Call
    from ..emit.expression import Capture
    from ..emit.facts import KernelFacts
    from .terms import Term

PROGRAMS = 512
"""Programs from which a GPU is busy. Fewer elements than that many tiles are added up in parts."""
_TILE = 64
"""Rows and columns of the tiles that are counted; those of a kernel may be others."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Numbers of batch entries and heads that a tensor does not tell apart."""

    batches: int
    heads: int
    """Neighbouring query heads."""


def by_pairs(lowered: Lowered, call: Call, names: Collection[str]) -> tuple[frozenset[str], ...]:
    """The tensors of ``names`` that no two pairs of one batch entry and head meet in.

    Together where they do not tell the same apart.
    """
    found: dict[Rest, set[str]] = {}
    terms: dict[str, list[Term]] = {}
    for term in terms_of(lowered, names):
        terms.setdefault(term.name, []).append(term)
    for name, own in terms.items():
        if all(_is_exact(term, call) for term in own):
            rests = {rest_of(term, call) for term in own}
            if len(rests) == 1:
                found.setdefault(rests.pop(), set()).add(name)
    return tuple(frozenset(group) for group in found.values())


def _is_exact(term: Term, call: Call) -> bool:
    if call.indexed or not is_plain(term):
        return False
    places = _places(term, call)
    if places is None or not {"q", "kv"} <= {str(index.value) for index in term.leaf.args}:
        return False
    return reads_inside(places, call.tensors[term.name].shape)


def _places(term: Term, call: Call) -> list[tuple[int, int]] | None:
    """The span of indices that pairs look up along each dim; None if only a GPU knows."""
    if isinstance(call.q_offset, torch.Tensor) or isinstance(call.kv_offset, torch.Tensor):
        return None
    batch, heads, q_len, _ = call.q.shape
    found = {
        "b": (0, batch),
        "h": (0, heads),
        "hkv": (0, call.k.shape[1]),
        "q": (call.q_offset, call.q_offset + q_len),
        "kv": (call.kv_offset, call.kv_offset + call.k.shape[2]),
    }
    return [found[str(index.value)] for index in term.leaf.args]


def rest_of(term: Term, call: Call) -> Rest:
    """Numbers of batch entries and heads that ``term``'s tensor does not tell apart."""
    batch, heads = call.q.shape[:2]
    names = {index.value for index in term.leaf.args}
    group = 1 if "h" in names else heads // call.k.shape[1] if "hkv" in names else heads
    return Rest(1 if "b" in names else batch, group)


@dataclass(frozen=True, slots=True)
class Sums:
    """Buffer in which the kernel stores the sums of one term."""

    term: Term
    total: torch.Tensor
    """(parts, *shape of the tensor) fp32, or where a part is all, in the tensor's dtype."""
    own: torch.Tensor
    """The part of ``total`` that pairs of the call look up."""
    unit: str
    """``q`` or ``kv`` where neighbours along that lie side by side, else empty."""

    def arguments(self) -> list[object]:
        """The buffer, and its steps by part, batch entry, head, query and key, but for ``unit``."""
        steps = dict(
            zip((i.value for i in self.term.leaf.args), self.own.stride()[1:], strict=True)
        )
        head = steps.get("h", steps.get("hkv", 0))
        pair = [steps[name] for name in ("q", "kv") if name != self.unit]
        return [self.own, self.own.stride(0), steps.get("b", 0), head, *pair]


def parts_of(rest: Rest, call: Call) -> int:
    """In how many parts the sums are made."""
    batch, heads, q_len, _ = call.q.shape
    together = rest.batches * rest.heads
    tiles = -(-q_len // _TILE) * -(-call.k.shape[2] // _TILE)
    programs = tiles * (batch * heads // together)
    return max(1, min(together, -(-PROGRAMS // max(1, programs))))


def dtypes_of(terms: tuple[Term, ...], call: Call) -> tuple[torch.dtype, ...]:
    """Dtypes of the terms' sums: the tensor's own where nothing is left to be added, else fp32."""
    parts = parts_of(rest_of(terms[0], call), call)
    names = [term.name for term in terms]
    return tuple(
        call.tensors[name].dtype if parts == 1 and names.count(name) == 1 else torch.float32
        for name in names
    )


def units_of(terms: tuple[Term, ...], call: Call) -> tuple[str, ...]:
    """``Sums.unit`` of each term."""
    found = []
    for term, empty in zip(terms, _buffers(terms, call, torch.device("meta")), strict=True):
        steps = zip(term.leaf.args, empty.stride()[1:], strict=True)
        side_by_side = {str(index.value) for index, step in steps if step == 1} & {"q", "kv"}
        found.append(max(side_by_side, default="", key=len))
    return tuple(found)


def aligned_of(terms: tuple[Term, ...], call: Call) -> tuple[bool, ...]:
    """Tell for each term if addresses and steps of its sums are multiples of 16, but steps of 1."""
    found = []
    for term, empty in zip(terms, _buffers(terms, call, torch.device("meta")), strict=True):
        places = _places(term, call)
        steps = all(step % 16 == 0 or step == 1 for step in empty.stride())
        found.append(steps and places is not None and not any(first for first, _ in places))
    return tuple(found)


def _buffers(terms: tuple[Term, ...], call: Call, device: torch.device) -> list[torch.Tensor]:
    """``Sums.total`` of each term, not yet written."""
    parts = parts_of(rest_of(terms[0], call), call)
    found = []
    for term, dtype in zip(terms, dtypes_of(terms, call), strict=True):
        like = call.tensors[term.name]
        if parts == 1:
            # Elements lie as in the tensor, by whose strides the kernel reads tiles too.
            found.append(torch.empty_like(like, dtype=dtype, device=device)[None])
        else:
            found.append(torch.empty((parts, *like.shape), dtype=dtype, device=device))
    return found


def sums_of(terms: tuple[Term, ...], call: Call) -> list[Sums]:
    """Buffers for the kernel, with zeros where it stores nothing."""
    found = []
    totals, units = _buffers(terms, call, call.q.device), units_of(terms, call)
    for term, total, unit in zip(terms, totals, units, strict=True):
        places = _places(term, call)
        assert places is not None
        if any(place != (0, n) for place, n in zip(places, total.shape[1:], strict=True)):
            total.zero_()
        own = total
        for dim, (first, stop) in enumerate(places):
            own = own.narrow(dim + 1, first, stop - first)
        found.append(Sums(term, total, own, unit))
    return found


def gradients_of(sums: list[Sums], call: Call) -> dict[str, torch.Tensor]:
    """Gradients by name, once the kernel has stored its sums."""
    found: dict[str, torch.Tensor] = {}
    for item in sums:
        name = item.term.name
        total = item.total[0] if item.total.shape[0] == 1 else item.total.sum(0)
        found[name] = found[name] + total if name in found else total
    return {name: total.to(call.tensors[name].dtype) for name, total in found.items()}


def with_pair_sums(facts: KernelFacts, lowered: Lowered, call: Call) -> KernelFacts:
    """``facts`` for the kernel that adds up pairs of its tensors' gradients."""
    terms = terms_of(lowered, facts.tensor_gradients)
    return replace(
        facts,
        captures=exact_captures(facts, terms),
        pair_types=tuple(TRITON_TYPES[dtype] for dtype in dtypes_of(terms, call)),
        pair_units=units_of(terms, call),
        pair_aligned=aligned_of(terms, call),
    )


def exact_captures(facts: KernelFacts, terms: tuple[Term, ...]) -> tuple[Capture, ...]:
    """The captures, told which lookups of those in ``terms`` (of ``pairs.by_pairs``) are in range.

    Where two terms look one tensor up otherwise, the last's say.
    """
    found = {term.name: tuple(str(index.value) for index in term.leaf.args) for term in terms}
    return tuple(replace(c, exact=found.get(c.name, ())) for c in facts.captures)
