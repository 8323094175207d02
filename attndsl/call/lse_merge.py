"""Merge of attentions over parts of the keys by their log-sum-exps.

With ``out_i`` and ``lse_i`` of disjoint sets of keys, the whole has lse = log(sum of exp(lse_i))
and out = sum of exp(lse_i - lse) * out_i. The formula is that of the online softmax (M. Milakov,
N. Gimelshein, arXiv 1805.02867), for attention that of M. Rabe, C. Staats (arXiv 2112.05682).

Non-goals: weights other than the softmax, whose outputs are sums already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError

if TYPE_CHECKING:
    Part = tuple[torch.Tensor, torch.Tensor]

_DIMS = 4


def merge(
    parts: Sequence[Part],
    *,
    sink: torch.Tensor | float | None = None,
    dtype: torch.dtype | None = None,
) -> Part:
    """The attention over all keys, from attentions over disjoint sets of them.

    Sums are made in fp32 (fp64 for fp64) and in the order of ``parts``, so that equal parts in one
    order give equal bits. Results are differentiable in all parts and in ``sink``, any number of
    times, also by ``torch.func`` and in graphs of ``torch.compile``.

    Args:
        parts: What calls with ``return_lse=True`` return, each for the same queries: ``out``
            (B, Hq, Lq, Dv) and ``lse`` (B, Hq, Lq), fp32 (fp64 for fp64), natural logarithm. Where
            ``lse`` is -inf, a part has no live pair, and its ``out`` is not read.
        sink: Logits of the program's sink: a number, or floats (Hq,), (B, Hq) or (1, Hq). They
            count once here, so that parts come from :meth:`attndsl.Attention.without_sink`.
        dtype: dtype of the output; that of the parts by default.

    Returns:
        ``out`` and ``lse`` of the whole. A row that has no live pair in any part has out 0 and lse
        -inf, with a sink as well as without.

    Raises:
        ArgumentError: There are no parts, or one is no pair of tensors.
        ShapeError, DTypeError, DeviceError: Parts do not go together.
    """
    outs, sums = _checked(parts)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise DTypeError(f"dtype is {dtype!r}", hint="pass a float dtype, as torch.float32")
    peak = sums[0].detach()
    for lse in sums[1:]:
        peak = torch.maximum(peak, lse.detach())
    dead = peak == -torch.inf
    logit = None if sink is None else _logits(sink, outs[0], peak.dtype)
    if logit is not None:
        peak = torch.maximum(peak, logit.detach())
    # Of dead rows too, exponents are no differences of infinities.
    shift = torch.where(dead, 0.0, peak)
    powers = [torch.exp(lse - shift) for lse in sums]
    total = powers[0]
    for power in powers[1:]:
        total = total + power
    if logit is not None:
        total = total + torch.exp(torch.where(dead, -torch.inf, logit - shift))
    total = torch.where(dead, 1.0, total)
    whole: torch.Tensor | None = None
    for out, lse, power in zip(outs, sums, powers, strict=True):
        empty = (lse == -torch.inf).unsqueeze(-1)
        part = torch.where(empty, 0.0, out.to(power.dtype)) * (power / total).unsqueeze(-1)
        whole = part if whole is None else whole + part
    assert whole is not None, "there is a part"
    merged = torch.where(dead, -torch.inf, shift + torch.log(total))
    return whole.to(outs[0].dtype if dtype is None else dtype), merged


def _checked(parts: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and log-sum-exps of ``parts``, which go together."""
    if not isinstance(parts, Sequence) or not parts:
        raise ArgumentError(
            f"parts is {'empty' if isinstance(parts, Sequence) else f'a {type(parts).__name__}'}",
            hint="pass [(out, lse), ...], what calls with return_lse=True return",
        )
    outs, sums = [], []
    for number, part in enumerate(parts):
        out, lse = _pair(number, part)
        outs.append(out)
        sums.append(lse)
        for name, found, first in (("out", out, outs[0]), ("lse", lse, sums[0])):
            _check_same(number, name, found, first)
    out, lse = outs[0], sums[0]
    if out.dim() != _DIMS or lse.shape != out.shape[:-1]:
        raise ShapeError(
            f"part 0 has an out {tuple(out.shape)} and an lse {tuple(lse.shape)}",
            hint="pass out (batch, heads, length, dim) and lse (batch, heads, length)",
        )
    work = torch.float64 if out.dtype is torch.float64 else torch.float32
    if not out.is_floating_point() or lse.dtype is not work:
        raise DTypeError(
            f"part 0 has an out of dtype {out.dtype} and an lse of dtype {lse.dtype}",
            hint="pass them as calls return them: lse is float32, or float64 with a float64 out",
        )
    return outs, sums


def _pair(number: int, part: Any) -> Part:
    """``out`` and ``lse`` of a part."""
    pair = isinstance(part, tuple | list) and len(part) == 2
    if pair and isinstance(part[0], torch.Tensor) and isinstance(part[1], torch.Tensor):
        return part[0], part[1]
    lacks = isinstance(part, torch.Tensor) or (pair and part[1] is None)
    raise ArgumentError(
        f"part {number} " + ("has no lse" if lacks else "is no pair of tensors (out, lse)"),
        hint="pass what a call with return_lse=True returns; programs with weights of their own "
        "have no lse, and the outputs of their parts are added up",
    )


def _check_same(number: int, name: str, found: torch.Tensor, first: torch.Tensor) -> None:
    """Refuse a part unlike the first."""
    if found.shape != first.shape:
        raise ShapeError(
            f"{name} of part {number} is {tuple(found.shape)}, and of part 0 {tuple(first.shape)}",
            hint="all parts are of the same queries: rows without a live pair stay in each",
        )
    if found.dtype is not first.dtype:
        raise DTypeError(
            f"{name} of part {number} is {found.dtype}, and of part 0 {first.dtype}",
            hint="make all parts with the same out_dtype",
        )
    if found.device != first.device:
        raise DeviceError(
            f"{name} of part {number} is on {found.device}, and of part 0 on {first.device}",
            hint=f"part.to({str(first.device)!r})",
        )


def _logits(sink: object, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sink's logits, of ``dtype``, against (batch, heads, length)."""
    batch, heads = out.shape[:2]
    if isinstance(sink, int | float) and not isinstance(sink, bool):
        number: float = torch.sym_float(sink)  # type: ignore[no-untyped-call]
        return torch.full((1, 1, 1), number, dtype=dtype, device=out.device)
    if not isinstance(sink, torch.Tensor) or not sink.is_floating_point():
        kind = sink.dtype if isinstance(sink, torch.Tensor) else type(sink).__name__
        raise ArgumentError(f"sink is a {kind}", hint="pass a number or a float tensor (heads,)")
    if sink.shape not in ((), (heads,), (batch, heads), (1, heads)):
        raise ShapeError(
            f"sink has shape {tuple(sink.shape)}",
            hint=f"pass a logit for each head, ({heads},), or for each entry, ({batch}, {heads})",
        )
    if sink.device != out.device:
        raise DeviceError(f"sink is on {sink.device}", hint=f"sink.to({str(out.device)!r})")
    return sink.to(dtype).reshape((*[1] * (2 - sink.dim()), *sink.shape, 1))
