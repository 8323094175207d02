"""``memory_efficient_attention`` of xFormers, with tensors (batch, length, heads, dim)."""

from __future__ import annotations

from typing import Any

import torch

from attndsl.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError

from . import biases
from .shared_program import attend, check_layout, packed_rows, present, probability_of

_LAYOUT = "(batch, length, heads, dim)"
_LOWER_RIGHT = (
    biases.BlockDiagonalCausalFromBottomRightMask,
    biases.BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    biases.BlockDiagonalCausalWithOffsetPaddedKeysMask,
)
_CAUSAL = (
    *_LOWER_RIGHT, biases.BlockDiagonalCausalMask, biases.BlockDiagonalCausalLocalAttentionMask,
)  # fmt: skip


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | biases.AttentionBias | None = None,
    p: float | None = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``xformers.ops.memory_efficient_attention``, with the biases of :mod:`attndsl.compat`.

    Args:
        query: (batch, length, heads, dim); without heads, (batch, length, dim); or in groups,
            (batch, length, groups, heads, dim).
        key: The same, of as many heads. Heads that are one expanded head are read once. There may
            also be fewer, if the number of query heads is a multiple.
        value: The same, with a dim of its own.
        attn_bias: A float tensor that is added to the scores, of a shape that broadcasts to (batch,
            heads, length, keys), or a bias such as ``LowerTriangularMask()``. Tensors get their
            gradient.
        p: Probability with which a weight is dropped.
        scale: Factor of q . k; 1 / sqrt(dim) by default.
        op: Refused: the kernels are attndsl's.
        output_dtype: dtype of the output; that of ``query`` by default, or ``torch.float32``.

    Returns:
        (batch, length, heads, value dim), with the dims of ``query``.

    Raises:
        ShapeError, ArgumentError, DTypeError: Arguments that do not go together.
        UnsupportedError: ``op``; a bias of another package.
    """
    if op is not None:
        raise UnsupportedError(
            "op chooses kernels of xFormers", hint="drop it: attndsl chooses its own"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"{name} is a {type(x).__name__}", hint=f"pass a tensor of shape {_LAYOUT}"
            )
    q, k, v = _heads(query), _key_heads(key), _key_heads(value)
    check_layout(q, k, v, 4, _LAYOUT)
    captures, options = _captures(attn_bias, q, k)
    captures |= probability_of(p)
    options |= {"scale": scale, "out_dtype": None if output_dtype is query.dtype else output_dtype}
    k, v = _same_heads(k, v)
    out, _ = attend(q, k, v, captures, options)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _heads(x: torch.Tensor) -> torch.Tensor:
    """(batch, length, heads, dim), from any layout."""
    if x.dim() == 3:
        return x[:, :, None]
    return x.flatten(2, 3) if x.dim() == 5 else x


def _key_heads(x: torch.Tensor) -> torch.Tensor:
    """The same of keys and values. Of heads that are one expanded head, one."""
    if x.requires_grad and (x.is_leaf or x.retains_grad or _is_expanded(x._base)):
        return _heads(x)  # Each head has a gradient of its own.
    if x.dim() == 5 and x.stride(3) == 0:
        return x[:, :, :, 0]
    if x.dim() == 4 and x.stride(2) == 0:
        return x[:, :, :1]
    return _heads(x)


def _is_expanded(base: torch.Tensor | None) -> bool:
    """Tell if a tensor has elements in one place before anything made a view of it."""
    return base is not None and 0 in base.stride()


def _same_heads(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``k`` and ``v``, both with the larger number of heads: only one of them may be expanded."""
    heads = max(k.shape[2], v.shape[2])

    def repeated(x: torch.Tensor) -> torch.Tensor:
        if x.shape[2] == heads or heads % x.shape[2]:
            return x
        return x.repeat_interleave(heads // x.shape[2], 2)

    return repeated(k), repeated(v)


def _captures(
    bias: object, q: torch.Tensor, k: torch.Tensor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Captures that express a bias in the program, and the offset of the call's rows.

    Raises:
        UnsupportedError: It is no bias of these.
    """
    lower_right = {"q_offset": k.shape[1] - q.shape[1]}
    match bias:
        case None:
            return {}, {}
        case torch.Tensor():
            return {"bias": _pairs(bias, q, k)}, {}
        case biases.LowerTriangularMask():
            return {"right": 0}, {}
        case biases.LowerTriangularMaskWithTensorBias():
            return {"right": 0, "bias": _pairs(bias.bias, q, k)}, {}
        case biases.LowerTriangularFromBottomRightMask():
            return {"right": 0}, lower_right
        case biases.LowerTriangularFromBottomRightLocalAttentionMask():
            return {"left": bias.window_size - 1, "right": 0}, lower_right
        case biases.LocalAttentionFromBottomRightMask():
            return {"left": bias.window_left, "right": bias.window_right}, lower_right
        case biases.BlockDiagonalMask() | biases.BlockDiagonalPaddedKeysMask():
            return _of_sequences(bias, q, k), {}
    kind = type(bias)
    raise UnsupportedError(
        f"attn_bias is a {kind.__module__}.{kind.__qualname__}",
        hint="make the bias of the same name from attndsl.compat, or pass a float tensor",
    )


def _of_sequences(
    bias: biases.BlockDiagonalMask | biases.BlockDiagonalPaddedKeysMask,
    q: torch.Tensor,
    k: torch.Tensor,
) -> dict[str, Any]:
    """The captures of packed sequences.

    Raises:
        ShapeError: The tensors are not of these sequences.
    """
    for name, x, rows in (("query", q, bias.q_starts[-1]), ("key", k, bias.k_starts[-1])):
        if x.shape[0] != 1 or x.shape[1] != rows:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, and attn_bias is of {rows} rows of batch 1",
                hint="pass the sequences one behind the other, as BlockDiagonalMask."
                "from_tensor_list packs them",
            )
    q_starts, first_keys, lengths = (
        torch.tensor(x, device=q.device)
        for x in (bias.q_starts, bias.k_starts[:-1], bias.k_lengths)
    )
    lower_right = isinstance(bias, _LOWER_RIGHT)
    rows_of = packed_rows(q.shape[1], q_starts, first_keys, lengths, lower_right)
    causal = isinstance(bias, _CAUSAL)
    window = getattr(bias, "window_size", None)
    # Rows then stand at the keys of the same number, which closed forms of the mask say.
    equal = isinstance(bias, biases.BlockDiagonalMask) and bias.q_starts == bias.k_starts
    return present(
        first=rows_of.first, end=rows_of.end, right=0 if causal else None,
        left=None if window is None else window - 1,
        aligned=rows_of.aligned if causal and not equal else None,
    )  # fmt: skip


def _pairs(bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(batch or 1, heads or 1, length, keys).

    Raises:
        ArgumentError, DTypeError: It is no float tensor.
        ShapeError: It does not broadcast to that.
    """
    if not isinstance(bias, torch.Tensor):
        raise ArgumentError(
            f"the bias is a {type(bias).__name__}",
            hint="pass a float tensor (batch, heads, length, keys)",
        )
    if not bias.is_floating_point():
        raise DTypeError(
            f"attn_bias is of {bias.dtype}",
            hint='pass torch.where(mask, 0.0, float("-inf")), or say the mask as a program',
        )
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if bias.dim() == 5:
        wide = bias.flatten(1, 2)  # Of heads in groups.
    elif bias.dim() == 3 and q.shape[2] == 1:
        wide = bias[:, None]  # Of tensors without heads.
    else:
        wide = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    if wide.dim() != 4 or any(n not in (1, size) for n, size in zip(wide.shape, full, strict=True)):
        raise ShapeError(
            f"attn_bias has shape {tuple(bias.shape)}",
            hint=f"pass a shape that broadcasts to {full}: (batch, heads, length, keys)",
        )
    return wide.expand(-1, -1, *full[2:])
