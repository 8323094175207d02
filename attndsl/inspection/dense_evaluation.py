"""Masks, scores and weights of a call as arrays, for people to look at.

The reference's own interpreter computes them, some rows of queries at a time. What is computed is
what :mod:`attndsl.backends.dense.reference` defines, but operands of a half type are multiplied in
fp32, as kernels do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.backends.dense.dropout_counters import heads_of, rows_of
from attndsl.backends.dense.interpret import evaluate, scope_of
from attndsl.backends.dense.philox import keep_factor, kept_at
from attndsl.backends.dense.row_blocks import Dense, own_weights, softmax, where_live
from attndsl.call.argument_checks import without_autocast
from attndsl.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attndsl.backends.base import Call
    from attndsl.backends.dense.interpret import LeafValues
    from attndsl.ir import Program
    from attndsl.pipeline import Lowered

MAX_BYTES = 1 << 30
"""Limit of an array's bytes, unless the caller allows more."""
_PAIRS_AT_ONCE = 1 << 22
"""Pairs that are evaluated together; programs have tens of values for each."""
Choice = int | slice | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Ranges of batch entries, heads and rows to look at: the first, and the one past the last."""

    b: tuple[int, int]
    h: tuple[int, int]
    rows: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch entries, heads and rows."""
        b, h, rows = (last - first for first, last in (self.b, self.h, self.rows))
        return b, h, rows

    def parts(self, kv_len: int) -> Iterator[Chosen]:
        """The same, some rows at a time; one part at least."""
        first, last = self.rows
        batch, heads, _ = self.shape
        step = max(1, _PAIRS_AT_ONCE // max(1, batch * heads * kv_len))
        for start in range(first, max(last, first + 1), step):
            yield replace(self, rows=(start, min(start + step, last)))


def choose(call: Call, b: Choice, h: Choice, rows: Choice) -> Chosen:
    """The pairs that a caller chooses by numbers or slices; all by default.

    Raises:
        ArgumentError: There is no such entry, head or row; a slice with steps.
    """
    batch, heads, q_len, _ = call.q.shape
    return Chosen(
        _range("b", b, batch, "batch entries"),
        _range("h", h, heads, "query heads"),
        _range("rows", rows, q_len, "rows of q"),
    )


def check_bytes(what: str, shape: tuple[int, ...], bytes_each: int, most: int) -> None:
    """Refuse arrays that would be larger than ``most`` bytes.

    Raises:
        ArgumentError: Says how to look at less.
    """
    if not isinstance(most, int) or isinstance(most, bool):
        raise ArgumentError(f"max_bytes is {most!r}", hint="pass a number of bytes")
    needed = math.prod(shape) * bytes_each
    if needed > most:
        pairs = " x ".join(map(str, shape))
        raise ArgumentError(
            f"the {what} of {pairs} pairs would take {needed} bytes, and max_bytes is {most}",
            hint="look at some of them: rows=slice(0, 64), h=0, b=0; or pass a larger max_bytes",
        )


def dense_mask(lowered: Lowered, call: Call, chosen: Chosen) -> torch.Tensor:
    """Bool (entries, heads, rows, kv_len): which pairs take part; the mask reads no score.

    Where entries or heads have the same mask, it is one in memory.
    """
    mask, kv_len = lowered.program.mask, call.k.shape[2]
    shape = *chosen.shape, kv_len
    raw = torch.zeros((1, 1, 1, 1), device=call.q.device)
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=call.q.device).expand(shape)

    def live(part: Chosen) -> torch.Tensor:
        (found,) = evaluate((mask,), _scope(call, part, raw))
        return found.expand(*found.shape[:2], part.shape[2], kv_len)

    with torch.no_grad():
        return _joined(live, chosen, kv_len).expand(shape)


def dense_scores(lowered: Lowered, call: Call, chosen: Chosen, raw: bool) -> torch.Tensor:
    """(entries, heads, rows, kv_len), fp32 or fp64: final scores, -inf at dead pairs.

    With ``raw`` they are ``scale * (q . k)`` of all pairs. Differentiable.
    """
    program = lowered.program

    def scores(part: Chosen) -> torch.Tensor:
        return _raw(call, part) if raw else _dense(program, call, part).score

    with without_autocast(call.q.device):
        return _joined(scores, chosen, call.k.shape[2])


def dense_weights(lowered: Lowered, call: Call, chosen: Chosen, dropped: bool) -> torch.Tensor:
    """(entries, heads, rows, kv_len), fp32 or fp64: what multiplies the values. Differentiable.

    Args:
        lowered: The program.
        call: Its call, whose v is not used.
        chosen: Which pairs.
        dropped: Whether dropout drops some, by the call's seed.
    """
    program, kv_len = lowered.program, call.k.shape[2]

    def weights(part: Chosen) -> torch.Tensor:
        dense = _dense(program, call, part)
        if program.weights is None:
            found, _ = softmax(program, dense)
        else:
            found = own_weights(program.weights, dense)
        if not dropped or program.dropout is None:
            return found
        (p,) = evaluate((program.dropout,), dense.scope)
        numbers = heads_of(call, part.b, part.h)
        rows, keys = rows_of(call, "q", part.rows), rows_of(call, "kv", (0, kv_len))
        return found * keep_factor(kept_at(call.seed, p, numbers, rows, keys), p)

    with without_autocast(call.q.device):
        return _joined(weights, chosen, kv_len)


def _joined(make: Callable[[Chosen], torch.Tensor], chosen: Chosen, kv_len: int) -> torch.Tensor:
    parts = [make(part) for part in chosen.parts(kv_len)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _range(name: str, chosen: Choice, count: int, what: str) -> tuple[int, int]:
    if chosen is None:
        return 0, count
    if isinstance(chosen, slice):
        first, last, step = chosen.indices(count)
        if step != 1:
            raise ArgumentError(
                f"{name} is a slice with steps of {step}",
                hint="pass one without, and take every second row and so on of the result",
            )
        return first, max(first, last)
    if not isinstance(chosen, int) or isinstance(chosen, bool):
        raise ArgumentError(f"{name} is {chosen!r}", hint="pass an int or a slice")
    if not -count <= chosen < count:
        raise ArgumentError(
            f"{name} is {chosen}, and there are {count} {what}", hint=f"pass 0 to {count - 1}"
        )
    return chosen % count, chosen % count + 1


def _raw(call: Call, chosen: Chosen) -> torch.Tensor:
    wide = torch.promote_types(call.q.dtype, torch.float32)
    b, h, rows = (slice(*each) for each in (chosen.b, chosen.h, chosen.rows))
    q, k = call.q[b, h, rows].to(wide), call.k[b].to(wide)
    group = call.q.shape[1] // max(1, call.k.shape[1])
    k = k[:, h] if group == 1 else k[:, torch.arange(*chosen.h, device=k.device) // group]
    return q @ k.mT * call.scale


def _dense(program: Program, call: Call, chosen: Chosen) -> Dense:
    raw = _raw(call, chosen)
    scope = _scope(call, chosen, raw)
    live = None
    if program.mask is not None:
        with torch.no_grad():
            (live,) = evaluate((program.mask,), scope)
    (score,) = evaluate((program.score,), scope)
    return Dense(scope, live, where_live(live, score, -torch.inf).expand(raw.shape), None)


def _scope(call: Call, chosen: Chosen, raw: torch.Tensor) -> LeafValues:
    """The scope of the chosen pairs; ``raw`` are their raw scores."""
    scope = scope_of(call, raw)
    variables = dict(scope.variables)
    for name, dim, (first, last) in (
        ("b", 0, chosen.b), ("h", 1, chosen.h), ("hkv", 1, chosen.h), ("q", 2, chosen.rows)
    ):  # fmt: skip
        variables[name] = variables[name].narrow(dim, first, last - first)
    return replace(scope, variables=variables)
