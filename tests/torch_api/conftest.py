"""attndsl's call beside torch's own math in fp64, by the tolerance method."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import attndsl
from attndsl.backends.dense.philox import kept as kept_pairs
from attndsl.call.dropout_seed import draw_seed

if TYPE_CHECKING:
    from collections.abc import Callable

EXACT = {"atol": 1e-5, "rtol": 5e-6}
SEED = 7
_OF_ITS_OWN = ("query", "key", "value", "dropout_p")


def _math(query, key, value, attn_mask=None, is_causal=False, **arguments):
    if is_causal and attn_mask is not None:
        causal = torch.ones(query.shape[-2], key.shape[-2], device=query.device).tril().bool()
        if attn_mask.dtype is torch.bool:
            attn_mask, is_causal = attn_mask & causal, False
        else:
            attn_mask, is_causal = torch.where(causal, attn_mask, -torch.inf), False
    with sdpa_kernel(SDPBackend.MATH), _in_own_dtype(query.is_cuda):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, **arguments
        )


@contextlib.contextmanager
def _in_own_dtype(wanted):
    """Have torch's math compute in the operands' dtype, as the tolerance method's reference does.

    Without this it computes in fp32, as the CPU backend does but no kernel on matrix units.
    """
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(wanted)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _dropped(query, key, value, dropout_p, is_causal=False, scale=None, **arguments):
    """torch's formula with the pairs that attndsl drops."""
    torch.manual_seed(SEED)
    shape = (*query.shape[:3], key.shape[2])
    eye = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)
    eye = eye.expand(*value.shape[:2], -1, -1)
    weights = _math(query, key, eye, is_causal=is_causal, scale=scale, **arguments)
    p = torch.tensor(dropout_p, device=query.device)
    kept = kept_pairs(int(draw_seed(query.device)), p, shape)
    return torch.where(kept, weights / (1 - dropout_p), 0.0) @ value


def _spread_of_delta(
    tensors: dict[str, Any], out: torch.Tensor, dtype: torch.dtype, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Spread of the gradient of q that rounding of the output alone makes.

    A backward without the scores' matrix takes delta, the sum of dO * O in a row, from the rounded
    output (FlashAttention, arXiv:2205.14135, appendix B.4). torch's math has dP and its mean in one
    dtype: in a row with one key they are equal there, and its error is 0.
    """
    half = torch.finfo(dtype).eps / 2
    delta = (_drawn_gradient(out).double() * out * half).square().sum(-1, keepdim=True).sqrt()
    q, k = (tensors[name].detach().double() for name in ("query", "key"))
    rest = {n: x for n, x in {**tensors, **options}.items() if n not in _OF_ITS_OWN}
    rest = {
        n: x.detach().double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in rest.items()
    }
    scale = abs(options.get("scale") or q.shape[-1] ** -0.5)
    return {"q": delta * _math(q, k, k.abs(), **rest) * scale}


def _drawn_gradient(out: torch.Tensor) -> torch.Tensor:
    drawn = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn.to(out)


def _run(function: Callable[..., Any], tensors: dict[str, Any], **options: Any) -> dict[str, Any]:
    torch.manual_seed(SEED)
    out = function(**tensors, **options)
    learned = {
        name: x for name, x in tensors.items() if isinstance(x, torch.Tensor) and x.requires_grad
    }
    grads = torch.autograd.grad(out, list(learned.values()), _drawn_gradient(out))
    return {"out": out.detach(), **dict(zip(learned, grads, strict=True))}


def _leaves(tensors: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: x.detach().to(dtype).requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for name, x in tensors.items()
    }


@pytest.fixture
def against_torch(check: Any) -> Callable[..., None]:
    """``against_torch(dtype, query=..., key=..., value=..., attn_mask=..., is_causal=...)``.

    Outputs and the gradients of everything, q, k and v always included; in fp64 to (1e-5, 5e-6).
    """
    named = {"query": "q", "key": "k", "value": "v"}

    def compare(dtype: torch.dtype, **arguments: Any) -> None:
        tensors = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
        options = {n: x for n, x in arguments.items() if n not in tensors}
        for name in named:
            tensors[name].requires_grad_()
        oracle = _dropped if options.get("dropout_p") else _math
        if not options.get("dropout_p", 1):
            options.pop("dropout_p")
        golden = _run(oracle, _leaves(tensors, torch.float64), **options)
        mine = _run(attndsl.scaled_dot_product_attention, _leaves(tensors, dtype), **options)
        assert mine["out"].shape == golden["out"].shape
        if dtype is torch.float64:
            for name, value in golden.items():
                torch.testing.assert_close(mine[name], value, **EXACT, msg=lambda m, n=name: n + m)
            return
        ref = _run(oracle, _leaves(tensors, dtype), **options)
        found = [{named.get(n, n): x for n, x in part.items()} for part in (golden, ref, mine)]
        check.close(*found, dtype, more=_spread_of_delta(tensors, golden["out"], dtype, options))

    return compare
