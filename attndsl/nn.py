"""Modules with the names, arguments and state of modules of ``torch.nn``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from attndsl.call.argument_checks import autocast_dtype
from attndsl.call.dropout_seed import draw_seed
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
from attndsl.torch_api.attention_weights import dense_weights
from attndsl.torch_api.mask_captures import capture_mask
from attndsl.torch_api.sdpa import scaled_dot_product_attention
from attndsl.torch_api.sdpa_call import MaskCapture, attend

__all__ = ["MultiheadAttention"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BATCHED = 3
"""Dims of (batch, length, features)."""


class MultiheadAttention(torch.nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` whose attention is a program of attndsl.

    Constructor, arguments, outputs and state dict are those of the base class, so that it takes the
    place of the ``self_attn`` and ``multihead_attn`` of ``TransformerEncoderLayer`` and
    ``TransformerDecoderLayer``. Masks stay apart and of their own shapes, so that tiles which they
    leave no pair are skipped. Differences:

    - Rows that see no key give 0 before the output projection, and weights of 0, never NaN.
    - ``is_causal=True`` says that ``attn_mask`` is the causal mask, which is then not read.
    - Nested tensors (batch, ragged length, features) work in training too; the output is nested.
    - The layers' fused inference kernels, which would go round this module, stay off: they are not
      for modules with hooks, and this one has a pre-hook that does nothing.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the arguments of the base class, and register a forward pre-hook."""
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim,
            batch_first, device, dtype,
        )  # fmt: skip
        self.register_forward_pre_hook(_stay_on_the_path)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of projected inputs, projected again.

        Args:
            query: (L, E), (L, N, E), or (N, L, E) with ``batch_first``; or nested (N, j, E).
            key: (S, kdim) and so on.
            value: (S, vdim) and so on.
            key_padding_mask: (N, S) or (S,): bool, true where the key is to be ignored, or float,
                added to the scores.
            need_weights: Whether to return the weights too, which takes memory for every pair.
            attn_mask: (L, S) or (N * num_heads, L, S): bool, true where the pair is left out, or
                float.
            average_attn_weights: Whether the weights are averaged over heads.
            is_causal: A hint that ``attn_mask`` is the causal mask.

        Returns:
            The output in the layout of ``query``, and the weights, (N, L, S) or with all heads
            (N, num_heads, L, S), without N for unbatched inputs; else None. They are those that
            the output was made with: dropped ones are 0.

        Raises:
            ShapeError, DTypeError, DeviceError: Tensors that do not go together.
            ArgumentError: ``is_causal`` without ``attn_mask``.
            UnsupportedError: Nested inputs with masks or ``need_weights``.
        """
        _check_inputs(self, query, key, value, attn_mask, key_padding_mask)
        if is_causal and attn_mask is None:
            raise ArgumentError(
                "is_causal is True and attn_mask is None",
                hint="the hint is about attn_mask: pass "
                "torch.nn.Transformer.generate_square_subsequent_mask(length)",
            )
        if query.is_nested:
            if key_padding_mask is not None or attn_mask is not None or need_weights:
                raise UnsupportedError(
                    "key_padding_mask, attn_mask or need_weights is given with nested inputs",
                    hint="nested inputs have no padding: pass need_weights=False and no masks",
                )
            return self._nested(query, key, value), None
        batched = query.dim() == _BATCHED
        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = self._extended(k, v)
        extra = k.shape[1] - key.shape[int(batched and self.batch_first)]
        q, k, v = (self._split(x) for x in (q, k, v))
        # A mask that is learned is read, hint or not: its gradient must not get lost.
        hinted = is_causal and not extra and attn_mask is not None and not attn_mask.requires_grad
        mask = None if hinted else attn_mask
        captures = _captures(mask, key_padding_mask, (*q.shape[:3], k.shape[2]), extra, q.device)
        reach = "causal" if hinted else "all"
        dropout_p = self.dropout if self.training else 0.0
        drawn = draw_seed(q.device) if dropout_p else None
        out = attend(q, k, v, reach, captures, dropout_p, drawn=drawn)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        weights = None
        if need_weights:
            weights = dense_weights(q, k, reach, captures, dropout_p, drawn)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Projected inputs (..., embed_dim); views of one product where the inputs are one."""
        packed, biases = self.in_proj_weight, self.in_proj_bias
        if packed is not None and query is key and key is value:
            q, k, v = functional.linear(query, packed, biases).chunk(3, -1)
            return q, k, v
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if packed is None
            else packed.chunk(3)
        )
        parts = (None, None, None) if biases is None else biases.chunk(3)
        if packed is not None and key is value:
            w, b = packed[self.embed_dim :], None if biases is None else biases[self.embed_dim :]
            k, v = functional.linear(key, w, b).chunk(2, -1)
            return functional.linear(query, weights[0], parts[0]), k, v
        q, k, v = (
            functional.linear(x, w, b)
            for x, w, b in zip((query, key, value), weights, parts, strict=True)
        )
        return q, k, v

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """(N, L, E) as (N, heads, L, E / heads)."""
        heads: torch.Tensor = x.unflatten(-1, (self.num_heads, -1))  # type: ignore[no-untyped-call]
        return heads.transpose(1, 2)

    def _extended(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (N, S, E), followed by those that every query sees."""
        for more_k, more_v in (
            (self.bias_k, self.bias_v),
            (k.new_zeros(1, 1, 1), v.new_zeros(1, 1, 1)) if self.add_zero_attn else (None, None),
        ):
            if more_k is not None and more_v is not None:
                shape = (k.shape[0], 1, k.shape[2])
                k = torch.cat((k, more_k.to(k.dtype).expand(shape)), 1)
                v = torch.cat((v, more_v.to(v.dtype).expand(shape)), 1)
        return k, v

    def _nested(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The output of nested inputs, of query's layout."""
        strided = query.layout is not torch.jagged
        if strided:
            same = query is key, key is value
            query = _jagged(query)
            key = query if same[0] else _jagged(key)
            value = key if same[1] else _jagged(value)
        q, k, v = (self._split(x) for x in self._project(query, key, value))
        dropout_p = self.dropout if self.training else 0.0
        out = scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        return torch.nested.as_nested_tensor(list(out.unbind())) if strided else out


def _check_inputs(
    module: MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
) -> None:
    """Refuse inputs not of one rank and batch or the module's widths, and masks of other types."""
    weight = module.q_proj_weight if module.in_proj_weight is None else module.in_proj_weight
    for name, x, width in (
        ("query", query, module.embed_dim),
        ("key", key, module.kdim),
        ("value", value, module.vdim),
    ):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(x).__name__}", hint="pass a tensor")
        _check_is_like_weights(name, x, weight)
        if x.dim() not in (_BATCHED - 1, _BATCHED) or x.dim() != query.dim():
            raise ShapeError(
                f"{name} has {x.dim()} dims {tuple(x.shape)}",
                hint="query, key and value are all (length, features), or all batched",
            )
        if x.size(-1) != width:
            raise ShapeError(
                f"{name} has {x.size(-1)} features", hint=f"the module was made for {width}"
            )
        if x.is_nested != query.is_nested:
            raise ArgumentError(
                f"{name} is {'' if x.is_nested else 'not '}nested, unlike query",
                hint="pass all three nested, or none",
            )
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is not None and not isinstance(mask, torch.Tensor):
            raise ArgumentError(
                f"{name} is a {type(mask).__name__}", hint="pass a bool or float tensor, or None"
            )
    if query.is_nested:
        return
    if query.dim() == _BATCHED:
        place = 0 if module.batch_first else 1
        for name, x in (("key", key), ("value", value)):
            if x.shape[place] != query.shape[place]:
                raise ShapeError(
                    f"{name} has batch {x.shape[place]} and query has batch {query.shape[place]}",
                    hint="make them equal; batch_first says which dim it is",
                )
    length = 1 if query.dim() == _BATCHED and module.batch_first else 0
    if key.shape[length] != value.shape[length]:
        raise ShapeError(
            f"key has length {key.shape[length]} and value has length {value.shape[length]}",
            hint="each key has one value: make them equal",
        )


def _check_is_like_weights(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuse inputs that cannot be multiplied with weights; other kinds of tensors see to it."""
    if type(x) not in _PLAIN or type(weight) not in _PLAIN:
        return
    if x.device != weight.device:
        raise DeviceError(
            f"{name} is on {x.device} and the module is on {weight.device}",
            hint=f"move one of them: {name}.to({str(weight.device)!r})",
        )
    own, wanted = (autocast_dtype(y.dtype, y.device.type) for y in (x, weight))
    if own is not wanted or not x.is_floating_point():
        raise DTypeError(
            f"{name} is of dtype {x.dtype}, and the module of {weight.dtype}",
            hint=f"convert one of them: {name}.to({weight.dtype})",
        )


def _captures(
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    full: tuple[int, int, int, int],
    extra: int,
    device: torch.device,
) -> list[MaskCapture]:
    """The masks there are, each by itself.

    Args:
        attn_mask: (L, S) or (N * heads, L, S).
        key_padding_mask: (N, S).
        full: N, heads, L, and S with the extra keys.
        extra: Keys at the end that every query sees.
        device: That of the query.
    """
    batch, heads, q_len, kv_len = full
    found = []
    if attn_mask is not None:
        pairs = (q_len, kv_len - extra)
        if tuple(attn_mask.shape) not in (pairs, (batch * heads, *pairs)):
            raise ShapeError(
                f"attn_mask has shape {tuple(attn_mask.shape)}",
                hint=f"it is (L, S) = {pairs}, or (N * num_heads, L, S) = "
                f"{(batch * heads, *pairs)}",
            )
        mask = functional.pad(attn_mask, (0, extra)) if extra else attn_mask
        if mask.dim() == _BATCHED:
            mask = mask.reshape(batch, heads, *mask.shape[1:])
        found.append(capture_mask("attn_mask", mask, full, device, "dead"))
    if key_padding_mask is not None:
        if tuple(key_padding_mask.shape) != (batch, kv_len - extra):
            raise ShapeError(
                f"key_padding_mask has shape {tuple(key_padding_mask.shape)}",
                hint=f"it is (N, S) = ({batch}, {kv_len - extra})",
            )
        mask = functional.pad(key_padding_mask, (0, extra)) if extra else key_padding_mask
        mask = mask[:, None, None]
        found.append(capture_mask("key_padding_mask", mask, full, device, "dead"))
    return found


def _jagged(nested: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(nested.unbind()), layout=torch.jagged)


def _stay_on_the_path(module: torch.nn.Module, args: Any) -> None:
    """Nothing; that it is a hook keeps fused inference kernels from going round the module."""
