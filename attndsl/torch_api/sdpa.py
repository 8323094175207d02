"""``scaled_dot_product_attention`` with torch's signature."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from attndsl.call.argument_checks import autocast, check_scale
from attndsl.errors import ArgumentError, ShapeError, UnsupportedError

from .mask_captures import capture_mask
from .nested_tensors import attend_jagged
from .sdpa_call import MaskCapture, attend
from .sdpa_checks import (
    broadcast_leading,
    check_dropout,
    check_key_lengths,
    check_operands,
    kv_heads,
)

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BATCHED = 4
"""Dims of (batch, heads, length, dim)."""


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention with the signature of ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: (..., Hq, Lq, D), (Hq, Lq, D) or (Lq, D), in fp16, bf16, fp32 or fp64; or
            a jagged nested tensor (B, Hq, j, D) or (B, j, D).
        key: (..., Hkv, Lk, D). Leading dims broadcast to those of ``query``, and those of ``query``
            to them; a single head serves all.
        value: (..., Hkv, Lk, Dv).
        attn_mask: Bool (true: the pair takes part) or float (added to the score), of any shape that
            broadcasts to (..., Hq, Lq, Lk); or a ``torch.nn.attention.bias.CausalBias``. A float
            mask that requires grad gets its gradient.
        dropout_p: Probability with which a weight is dropped, also in evaluation. The seed comes
            from torch's default CPU generator.
        is_causal: Whether query i sees keys 0 to i only, whatever the lengths (upper left); in
            addition to ``attn_mask``.
        scale: Factor of q . k; 1 / sqrt(D) by default.
        enable_gqa: Whether several query heads may share a key head.

    Returns:
        (..., Hq, Lq, Dv) in query's dtype, or under autocast in its dtype. Rows that see no key are
        0. Nested if query is.

    Raises:
        ShapeError: Sizes that do not go together.
        DTypeError: dtypes that do not, or that cannot be used.
        DeviceError: Tensors on several devices.
        ArgumentError: An argument of a kind or value that cannot be used.
        UnsupportedError: What the backend cannot do, or a mask of nested operands.

    Example:
        >>> import torch, attndsl
        >>> q = k = v = torch.randn(1, 2, 16, 8)
        >>> attndsl.scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([1, 2, 16, 8])
    """
    query, key, value = autocast(query), autocast(key), autocast(value)
    check_operands(query, key, value)
    check_dropout(dropout_p)
    check_scale(scale)
    reach = "causal" if is_causal else "all"
    if query.is_nested or key.is_nested or value.is_nested:
        if attn_mask is not None:
            raise UnsupportedError(
                f"attn_mask is given with nested operands (a {type(attn_mask).__name__})",
                hint="pass is_causal=True, or write the mask as a program over packed documents",
            )
        return attend_jagged(query, key, value, is_causal, dropout_p, scale, enable_gqa)
    check_key_lengths(key, value)
    if attn_mask is not None and type(attn_mask) not in _PLAIN:
        from torch.nn.attention.bias import CausalBias  # Imports torch.compile, which takes long.

        if isinstance(attn_mask, CausalBias):
            reach = _reach_of_bias(attn_mask, query.shape[-2], key.shape[-2], is_causal)
            attn_mask = None
    shape = query.shape
    if (
        query.dim() == key.dim() == value.dim() == _BATCHED
        and shape[:2] == key.shape[:2] == value.shape[:2]
        and shape[1]
    ):
        full = (*shape[:3], key.shape[2])
        leading = None
        q, k, v = query, key, value
    else:
        leading, q, k, v = _four_dims(query, key, value, enable_gqa)
        heads = () if query.dim() == key.dim() == value.dim() == 2 else q.shape[1:2]
        full = (*leading, *heads, query.shape[-2], key.shape[-2])
    captures: tuple[MaskCapture, ...] = ()
    if attn_mask is not None:
        captures = (capture_mask("attn_mask", attn_mask, full, query.device),)
    out = attend(q, k, v, reach, captures, dropout_p, scale)
    return out if leading is None else out.reshape(*full[:-1], out.shape[-1])


def _reach_of_bias(bias: CausalBias, q_len: int, kv_len: int, is_causal: bool) -> str:
    name = f"causal_{bias.variant.name.lower()}"
    if is_causal:
        raise ArgumentError(
            f"attn_mask is {name} and is_causal is True",
            hint="the bias says which alignment is meant: drop is_causal",
        )
    if (bias.seq_len_q, bias.seq_len_kv) != (q_len, kv_len):
        raise ShapeError(
            f"attn_mask is {name}({bias.seq_len_q}, {bias.seq_len_kv}), and query and key have "
            f"lengths {q_len} and {kv_len}",
            hint=f"pass {name}({q_len}, {kv_len})",
        )
    return "causal" if bias.variant.name == "UPPER_LEFT" else "causal_lower_right"


def _four_dims(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor, torch.Tensor]:
    """The leading dims that the operands have together, and the operands as a batch of heads."""
    operands = [x if x.dim() > 2 else x.unsqueeze(0) for x in (query, key, value)]
    shapes = [
        (name, x.shape[:-3]) for name, x in zip(("query", "key", "value"), operands, strict=True)
    ]
    leading = broadcast_leading(shapes)
    q, k, v = (x.expand(*leading, *x.shape[-3:]) for x in operands)
    shared = kv_heads(q.shape[-3], k.shape[-3], v.shape[-3], enable_gqa)
    if q.shape[-3] < shared:
        q = q.expand(*leading, shared, *q.shape[-2:])
    k, v = (x.expand(*leading, shared, *x.shape[-2:]) for x in (k, v))
    batch = prod(leading)
    q, k, v = (x.reshape(batch, *x.shape[-3:]) if len(leading) != 1 else x for x in (q, k, v))
    return leading, q, k, v
