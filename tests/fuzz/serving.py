"""Random programs as an engine calls them: packed queries, keys in pages, held to the dense oracle.

Queries of an entry are its last positions. The last ``counts[b]`` rows of entry ``b`` are served;
what the others would have is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from support.serving import in_pages

import attndsl

from .program import (
    Apply,
    Dot,
    Given,
    Invoke,
    Kind,
    Masked,
    Member,
    Name,
    Positions,
    Target,
    walk,
)  # fmt: skip

if TYPE_CHECKING:
    import random

    from .program import Case, Expr

_NAMES = ("b", "h", "hkv", "q")
_TOKEN = Name("token", Kind.INT)


def served(rng: random.Random, case: Case) -> Case:
    """The same without gradients and dropout, as many queries as keys, and some of them served."""
    sizes = replace(case.sizes, q_len=case.sizes.kv_len)
    lengths = tuple(rng.randint(0, sizes.kv_len) for _ in range(sizes.batch))
    counts = tuple(rng.choice((0, 1, 1, n, rng.randint(0, n))) if n else 0 for n in lengths)
    positions = Positions(
        q_starts=tuple(length - sizes.q_len for length in lengths), kv_lengths=lengths,
        counts=counts, page=rng.choice((1, 2, 3, 4, 16)),
    )  # fmt: skip
    if rng.random() < 0.5:
        case = _by_token(rng, case)
    return replace(
        case,
        sizes=sizes,
        positions=positions,
        dropout=None,
        inputs=tuple(replace(x, learned=False) for x in case.inputs),
        tensors=tuple(replace(x, values=replace(x.values, learned=False)) for x in case.tensors),
        params=tuple(
            replace(x, given=Given.TENSOR) if x.given is Given.LEARNED else x for x in case.params
        ),
    )


def _by_token(rng: random.Random, case: Case) -> Case:
    """With ``token`` in place of a variable of one line, where that line has one."""
    lines = list(case.lines)
    for number in rng.sample(range(len(lines)), len(lines)):
        value = lines[number].value
        names = sorted({x.name for x in _arguments(value) if isinstance(x, Name)} & {*_NAMES})
        hides = any(isinstance(x, Dot) for x in walk(value))
        if any(isinstance(x, Member) for x in walk(value)):
            names = [name for name in names if name == "q"]  # Any other one may be on both sides.
        if lines[number].target not in (Target.SCORE, Target.MASK) or hides or not names:
            continue
        found = _replaced(value, Name(rng.choice(names), Kind.INT))
        lines[number] = replace(lines[number], value=found)
        break
    return replace(case, lines=tuple(lines))


def _arguments(item: Expr) -> list[Expr]:
    """``item`` and all below it that is written in its line."""
    return [item, *(x for arg in item.args for x in _arguments(arg))]


def _replaced(item: Expr, old: Name) -> Expr:
    if item == old:
        return _TOKEN
    if not isinstance(item, Apply | Invoke | Masked) and not item.args:
        return item
    return replace(item, args=tuple(_replaced(arg, old) for arg in item.args))


def served_rows(case: Case) -> torch.Tensor:
    """Bool (batch, 1, q_len): which rows are looked at."""
    sizes, counts = case.sizes, case.positions.counts or ()
    firsts = sizes.q_len - torch.tensor(counts, dtype=torch.int64)
    return (torch.arange(sizes.q_len) >= firsts[:, None])[:, None]


@dataclass(frozen=True, slots=True)
class Served:
    """Calls ``attention`` as an engine does, and puts its results where a dense call has them."""

    attention: attndsl.Attention
    counts: tuple[int, ...]
    page: int
    most_queries: int | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        """As of ``attention``, with the lengths of each entry. Other rows are 0."""
        lengths, starts = arguments.pop("kv_lengths"), arguments.pop("q_offset")
        assert torch.equal(starts, lengths - q.shape[2])
        batch, heads, rows, dim = q.shape
        return_lse = arguments.get("return_lse", False)
        page = gcd(self.page, k.shape[2]) or 1
        both = torch.cat((k, v), -1).transpose(1, 2)
        keys = [each[:n] for each, n in zip(both, lengths.tolist(), strict=True)]
        pool, table = in_pages(keys or [both.new_zeros(1, *both.shape[2:])], page)
        wide = table.new_zeros(batch, k.shape[2] // page)
        wide[:, : table.shape[1]] = table[:batch, : wide.shape[1]]
        cache = attndsl.PagedCache(pool[..., :dim], pool[..., dim:], wide, lengths)
        packed = q.new_full((batch * rows, heads, dim), torch.nan)
        ends = torch.tensor([0, *self.counts]).cumsum(0).tolist()
        for b, count in enumerate(self.counts):
            packed[ends[b] : ends[b + 1]] = q[b, :, rows - count :].transpose(0, 1)
        packed[ends[-1] :] = 0
        found = self.attention.serve(
            packed,
            cache,
            torch.tensor(ends, device=q.device),
            most_queries=self.most_queries,
            **arguments,
        )
        dense = []
        for part in found if return_lse else (found,):
            whole = part.new_zeros((batch, heads, rows, *part.shape[2:]))
            for b, count in enumerate(self.counts):
                whole[b, :, rows - count :] = part[ends[b] : ends[b + 1]].transpose(0, 1)
            dense.append(whole)
        return tuple(dense) if return_lse else dense[0]
