"""The one program behind all of these functions: what a call leaves out is gone from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.api import compile as compile_program
from attndsl.call.value_checks import check_range
from attndsl.errors import ArgumentError, ShapeError

from .option_checks import number_of

if TYPE_CHECKING:
    from collections.abc import Mapping

TEXT = """
param left: int = none
param right: int = none
param cap: float = none
param p: float = none
tensor first[first_rows]: int = none
tensor end[end_rows]: int = none
tensor aligned[aligned_rows]: int = none
tensor entry[entry_rows]: int = none
tensor start[batch]: int = none
tensor slopes[entries, heads]: float = none
tensor bias[batch, heads, bias_rows, bias_keys]: float = none
position = aligned[q] if given(aligned) else q
sequence = entry[q] if given(entry) else b
mask = first[q] <= kv < end[q]
mask = start[b] <= kv
mask = position - kv <= left
mask = kv - position <= right
score = softcap(score, cap)
score = score - (slopes[sequence, h] * abs(position - kv) if given(slopes) else 0.0)
score = score + bias[b, h, q, kv]
weights = dropout(softmax(score), p)
"""
PROGRAM = compile_program(TEXT, name="attndsl.compat")
"""Compiled where it is imported, so that graphs of ``torch.compile`` may call it."""


class VisibleKeys(NamedTuple):
    """Keys that packed rows may see: tensors, each (rows,) int64 on the device."""

    first: torch.Tensor
    """The first key of the row's sequence."""
    end: torch.Tensor
    """The key behind its last one; that of ``first`` where a row belongs to no sequence."""
    aligned: torch.Tensor | None
    """The key at the row's own position; None where that is the row's number."""
    entry: torch.Tensor
    """Number of the row's sequence."""


def packed_rows(
    rows: int,
    cu_q: torch.Tensor,
    first_keys: torch.Tensor,
    lengths: torch.Tensor,
    lower_right: bool,
) -> VisibleKeys:
    """Compute :class:`VisibleKeys` on the device without waiting for it.

    Args:
        rows: Number of packed rows.
        cu_q: (n + 1,) ints, the row at which each sequence begins, and the end.
        first_keys: (n,) the key at which each sequence begins.
        lengths: (n,) numbers of keys.
        lower_right: Whether the last row of a sequence stands at its last key, and not the first
            row at its first key.
    """
    cu_q, first_keys, lengths = (x.long() for x in (cu_q, first_keys, lengths))
    number = torch.arange(rows, device=cu_q.device)
    found = torch.searchsorted(cu_q[1:].contiguous(), number, right=True)
    entry = found.clamp(max=cu_q.shape[0] - 2)
    within, rows_of = number - cu_q[entry], cu_q.diff()
    # Rows before the first sequence belong to none, like those behind the last.
    inside = (within >= 0) & (within < rows_of[entry])
    first = first_keys[entry]
    end = torch.where(inside, first + lengths[entry], first)
    aligned = first + within
    if lower_right:
        aligned = aligned + (lengths - rows_of)[entry]
    return VisibleKeys(first, end, aligned, entry)


def check_within(name: str, values: torch.Tensor, greatest: int, told: str, *sizes: int) -> None:
    """Refuse ints outside of 0 to ``greatest``. Graphs of ``torch.compile`` do not look.

    See :func:`attndsl.call.value_checks.check_range`.

    Raises:
        ArgumentError: Some lie outside, and are not on a GPU, where that is an assertion.
    """
    if not torch.compiler.is_compiling():
        check_range(name, values, 0, greatest, told, *sizes)


def check_offsets(name: str, offsets: object, rows: int) -> None:
    """Refuse what does not say where sequences begin.

    Args:
        name: Of the argument.
        offsets: Its value.
        rows: Number of packed rows.

    Raises:
        ArgumentError: It is no (n + 1,) tensor of ints, there are fewer rows, or it falls.
    """
    good = (
        isinstance(offsets, torch.Tensor) and offsets.dim() == 1 and offsets.shape[0] > 1
        and offsets.dtype in (torch.int32, torch.int64)
    )  # fmt: skip
    if not good:
        raise ArgumentError(
            f"{name} does not say where sequences begin",
            hint=f"pass {name}=torch.tensor([0, 5, 12]) for sequences of 5 and 7, on the device",
        )
    assert isinstance(offsets, torch.Tensor)
    check_within(name, offsets, rows, "there are {} rows", rows)
    if offsets.device.type == "cpu":  # On GPUs a row of a sequence that falls sees nothing.
        told = "a sequence begins where the one before it ends"
        check_within(f"{name}.diff()", offsets.diff(), rows, told)


def check_layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dims: int, layout: str) -> None:
    """Refuse tensors of another layout.

    Raises:
        ArgumentError: One of them is no tensor.
        ShapeError: One of them has another number of dims.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"{name} is a {type(x).__name__}", hint=f"pass a tensor of shape {layout}"
            )
        if x.dim() != dims:
            raise ShapeError(f"{name} has {x.dim()} dims", hint=f"pass tensors of shape {layout}")


def probability_of(p: float | None) -> dict[str, Any]:
    """Dropout as captures; none where nothing is dropped.

    Raises:
        ArgumentError: No probability.
    """
    p = number_of("dropout", p)
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout is {p}", hint="pass a probability from 0 to 1")
    return {"p": p} if p > 0 else {}


def present(**captures: object) -> dict[str, Any]:
    """The captures that are there."""
    return {name: value for name, value in captures.items() if value is not None}


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    captures: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One call of the program.

    Args:
        q: (batch, length, heads, dim), as in all of these functions.
        k: (batch, keys, key heads, dim).
        v: (batch, keys, key heads, value dim).
        captures: Those that are there.
        options: Arguments of :meth:`attndsl.Attention.__call__`.

    Returns:
        The output (batch, length, heads, value dim), and the log-sum-exp (batch, heads, length) if
        the options ask for it.
    """
    found = PROGRAM(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), captures=captures, **options
    )
    out, lse = found if isinstance(found, tuple) else (found, None)
    return out.transpose(1, 2), lse
