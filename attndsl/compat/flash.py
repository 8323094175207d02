"""The functions of flash-attn 2.8: tensors (batch, length, heads, dim), and packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attndsl.call.argument_checks import check_is_like, check_is_writable
from attndsl.errors import ArgumentError, DeviceError, ShapeError, UnsupportedError

from .option_checks import ints_of, number_of, window_of
from .shared_program import (
    attend,
    check_layout,
    check_offsets,
    check_within,
    packed_rows,
    present,
    probability_of,
)

_DENSE = "(batch, length, heads, dim)"
_PACKED = "(total, heads, dim)"
Window = Sequence[int | None] | None
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float | None = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn.flash_attn_func``, on every device and in every dtype of attndsl.

    Args:
        q: (batch, length, heads, dim).
        k: (batch, keys, key heads, dim); heads are a multiple of key heads.
        v: (batch, keys, key heads, value dim).
        dropout_p: Probability with which a weight is dropped.
        softmax_scale: Factor of q . k; 1 / sqrt(dim) by default.
        causal: Whether the last query sees all keys, the one before all but one, and so on.
        window_size: How many keys to the left and to the right of its position a query sees; -1 or
            None for all. Causal queries see none to the right.
        softcap: Limit of scores; none if it is not above 0.
        alibi_slopes: (heads,) or (batch, heads): ``slope * |distance|`` is taken from the score.
            Gets its gradient, unlike in flash-attn.
        deterministic: Whether gradients are the same bit for bit in each run.
        return_attn_probs: Whether to return the log-sum-exp too.

    Returns:
        The output (batch, length, heads, value dim). With ``return_attn_probs`` a tuple: the
        output, the log-sum-exp (batch, heads, length), fp32 and differentiable, and an empty
        tensor.

    Raises:
        ShapeError, ArgumentError: Arguments that do not go together.
        UnsupportedError: ``return_attn_probs`` with dropout: flash-attn returns its own weights
            then, with the dropped ones negative.
    """
    check_layout(q, k, v, 4, _DENSE)
    _check_probabilities(dropout_p, return_attn_probs)
    captures = {
        **_window(causal, window_size), **probability_of(dropout_p),
        **present(cap=_cap(softcap), slopes=_slopes(alibi_slopes, q.shape[0], q.shape[2])),
    }  # fmt: skip
    options = _options(softmax_scale, deterministic, return_attn_probs)
    options["q_offset"] = k.shape[1] - q.shape[1]
    out, lse = attend(q, k, v, captures, options)
    return out if lse is None else (out, lse, q.new_empty(0))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float | None = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """``flash_attn.flash_attn_varlen_func``: sequences that lie one behind the other.

    Args:
        q: (total queries, heads, dim).
        k: (total keys, key heads, dim).
        v: (total keys, key heads, value dim).
        cu_seqlens_q: (batch + 1,) ints, the row at which each sequence begins, and the end.
        cu_seqlens_k: The same of keys. The same tensor as ``cu_seqlens_q`` is the faster way to
            say that lengths are equal.
        max_seqlen_q: Not needed, and not read.
        max_seqlen_k: The same.
        dropout_p: As for :func:`flash_attn_func`, like all that follow.
        softmax_scale: Factor of q . k.
        causal: Aligned to the last key of each sequence.
        window_size: Keys to the left and to the right.
        softcap: Limit of scores.
        alibi_slopes: (heads,) or (batch, heads).
        deterministic: Whether gradients are the same bit for bit in each run.
        return_attn_probs: Whether to return the log-sum-exp too.
        block_table: Refused.

    Returns:
        The output (total queries, heads, value dim). With ``return_attn_probs`` also the
        log-sum-exp (heads, total queries), and an empty tensor. Rows before the first sequence and
        behind the last are 0, and get no gradient.

    Raises:
        ShapeError, ArgumentError: Arguments that do not go together.
        UnsupportedError: Keys in pages; ``return_attn_probs`` with dropout.
    """
    check_layout(q, k, v, 3, _PACKED)
    _check_probabilities(dropout_p, return_attn_probs)
    _check_no_pages(block_table, "k")
    check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts.device != q.device:
            raise DeviceError(
                f"{name} is on {starts.device} and q is on {q.device}", hint=f"{name}.to(q.device)"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ShapeError(
            f"cu_seqlens_q is of {cu_seqlens_q.shape[0] - 1} sequences, and cu_seqlens_k of "
            f"{cu_seqlens_k.shape[0] - 1}",
            hint="pass the beginnings of the same sequences",
        )
    lengths = cu_seqlens_k.diff()
    rows = packed_rows(q.shape[0], cu_seqlens_q, cu_seqlens_k[:-1], lengths, True)
    slopes = _slopes(alibi_slopes, lengths.shape[0], q.shape[1])
    # Rows of equal sequences stand at keys of the same number, which the mask then says.
    aligned = None if cu_seqlens_q is cu_seqlens_k else rows.aligned
    captures = {
        **_window(causal, window_size), **probability_of(dropout_p),
        **present(
            cap=_cap(softcap), slopes=slopes, first=rows.first, end=rows.end, aligned=aligned,
            entry=None if slopes is None else rows.entry,
        ),
    }  # fmt: skip
    options = _options(softmax_scale, deterministic, return_attn_probs)
    out, lse = attend(q[None], k[None], v[None], captures, options)
    return out[0] if lse is None else (out[0], lse[0], q.new_empty(0))


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``flash_attn.flash_attn_with_kvcache``: queries over a cache that has room for more keys.

    Args:
        q: (batch, length, heads, dim).
        k_cache: (entries, room, key heads, dim). Elements without a key may be anything.
        v_cache: (entries, room, key heads, value dim).
        k: (batch, new keys, key heads, dim), written into the cache behind its keys, in place.
        v: The same of values.
        rotary_cos: Refused, as are ``rotary_sin`` and pages.
        rotary_sin: See above.
        cache_seqlens: (batch,) ints, the number of keys in the cache, or one int for all; without
            ``k`` the whole room by default.
        cache_batch_idx: (batch,) ints, the entry of the cache of each sequence; copies these.
        cache_leftpad: (batch,) ints, the first key of each entry.
        block_table: Refused.
        softmax_scale: Factor of q . k.
        causal: Aligned to the last key of each sequence, the new ones included.
        window_size: Keys to the left and to the right.
        softcap: Limit of scores.
        rotary_interleaved: Not read.
        alibi_slopes: (heads,) or (batch, heads).
        num_splits: Not read: how work is shared out follows from the call.
        return_softmax_lse: Whether to return the log-sum-exp too.

    Returns:
        The output (batch, length, heads, value dim), and the log-sum-exp (batch, heads, length).

    Raises:
        ShapeError, ArgumentError: Arguments that do not go together.
        UnsupportedError: Rotary embeddings, or keys in pages.
    """
    check_layout(q, k_cache, v_cache, 4, _DENSE)
    _check_no_pages(block_table, "k_cache")
    if rotary_cos is not None or rotary_sin is not None:
        raise UnsupportedError(
            "rotary_cos and rotary_sin are given", hint="rotate q and k before the call"
        )
    if (k is None) is not (v is None):
        raise ArgumentError("one of k and v is given", hint="pass both, or neither")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ShapeError(
            f"k_cache is {tuple(k_cache.shape)} and v_cache is {tuple(v_cache.shape)}",
            hint="both have the same entries, room and key heads",
        )
    batch, room = q.shape[0], k_cache.shape[1]
    if cache_seqlens is None:
        if k is not None:
            raise ArgumentError(
                "k is given without cache_seqlens", hint="pass the number of keys in the cache"
            )
        cache_seqlens = room
    lengths = ints_of("cache_seqlens", cache_seqlens, q, (), (1,), (batch,)).expand(batch)
    entries = _entries(cache_batch_idx, q, k_cache.shape[0])
    start = _start(cache_leftpad, q, lengths, room)
    slopes = _slopes(alibi_slopes, batch, q.shape[2])
    captures = {
        **_window(causal, window_size), **present(cap=_cap(softcap), slopes=slopes, start=start),
    }  # fmt: skip
    options = _options(softmax_scale, None, return_softmax_lse)
    # Behind all of that, so that a call that is refused for it has written nothing.
    if k is not None and v is not None:
        _append(q, (k_cache, v_cache), (k, v), lengths, entries)
        lengths = lengths + k.shape[1]
    if entries is not None:
        k_cache, v_cache = k_cache[entries], v_cache[entries]
    options |= {"q_offset": lengths - q.shape[1], "kv_lengths": lengths}
    out, lse = attend(q, k_cache, v_cache, captures, options)
    return out if lse is None else (out, lse)


def _entries(given: torch.Tensor | None, q: torch.Tensor, count: int) -> torch.Tensor | None:
    """The entry of each sequence in a cache that has ``count``; None where it is its number.

    Raises:
        ArgumentError: They are no ints of this batch, or there is no such entry.
    """
    if given is None:
        return None
    entries = ints_of("cache_batch_idx", given, q, (q.shape[0],)).long()
    check_within("cache_batch_idx", entries, count - 1, "the cache has {} entries", count)
    return entries


def _start(
    leftpad: torch.Tensor | None, q: torch.Tensor, lengths: torch.Tensor, room: int
) -> torch.Tensor | None:
    """The first key of each entry.

    Raises:
        ArgumentError: They are no ints of this batch, or an entry begins behind its keys. On GPUs
            such an entry has no key.
    """
    if leftpad is None:
        return None
    start = ints_of("cache_leftpad", leftpad, q, (q.shape[0],))
    if start.device.type == "cpu":
        counts = lengths.long() - start.long()
        told = "no entry begins behind its keys"
        check_within("cache_seqlens - cache_leftpad", counts, room, told)
    return start


def _append(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    lengths: torch.Tensor,
    entries: torch.Tensor | None,
) -> None:
    """Write new keys and values behind those of the cache.

    Raises:
        ShapeError: They do not fit the cache.
        DTypeError, DeviceError: The cache has another dtype, or lies elsewhere.
        ArgumentError: The cache has no room for them, or is expanded.
        UnsupportedError: The cache is learned.
    """
    check_layout(q, *new, 4, _DENSE)
    for name, cache, x in (("k", caches[0], new[0]), ("v", caches[1], new[1])):
        if x.shape[2:] != cache.shape[2:] or x.shape[0] != q.shape[0]:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, for a cache of {tuple(cache.shape)}",
                hint="pass (batch, new keys, key heads, dim)",
            )
        if entries is None and cache.shape[0] != q.shape[0]:
            raise ShapeError(
                f"{name}_cache has {cache.shape[0]} entries and q has batch {q.shape[0]}",
                hint="pass cache_batch_idx, the entry of each sequence",
            )
        if cache.device != q.device:
            raise DeviceError(
                f"{name}_cache is on {cache.device} and q is on {q.device}",
                hint=f"move one of them: {name}_cache.to(q.device)",
            )
        check_is_like(name, x, f"{name}_cache", cache)
        check_is_writable(f"{name}_cache", cache)
        if cache.is_leaf and cache.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name}_cache requires grad, and {name} is written into it",
                hint=f"pass {name}_cache.detach(), or call it within torch.no_grad()",
            )
        room, count = cache.shape[1], x.shape[1]
        told = "the cache has room for {} keys, {} of them new"
        check_within("cache_seqlens", lengths, room - count, told, room, count)
    for cache, x in zip(caches, new, strict=True):
        rows = torch.arange(x.shape[0], device=x.device) if entries is None else entries
        places = lengths.long()[:, None] + torch.arange(x.shape[1], device=x.device)
        cache[rows[:, None], places] = x


def _window(causal: bool, window_size: Window) -> dict[str, int]:
    """Reach to the left and to the right, where it is limited."""
    left, right = window_of(window_size)
    found = {"left": left} if left >= 0 else {}
    if causal:
        return {**found, "right": 0}
    return {**found, "right": right} if right >= 0 else found


def _cap(softcap: float | None) -> float | None:
    limit: float = number_of("softcap", softcap)
    return limit if limit > 0 else None


def _slopes(slopes: torch.Tensor | None, entries: int, heads: int) -> torch.Tensor | None:
    """(entries, heads)."""
    if slopes is None:
        return None
    if not isinstance(slopes, torch.Tensor):
        raise ArgumentError(
            f"alibi_slopes is a {type(slopes).__name__}", hint="pass torch.as_tensor(alibi_slopes)"
        )
    if slopes.shape not in ((heads,), (entries, heads)):
        raise ShapeError(
            f"alibi_slopes has shape {tuple(slopes.shape)}",
            hint=f"pass ({heads},) or ({entries}, {heads})",
        )
    return slopes.expand(entries, heads)


def _options(scale: float | None, deterministic: bool | None, return_lse: bool) -> dict[str, Any]:
    # None is what torch.use_deterministic_algorithms says.
    return {"scale": scale, "deterministic": deterministic or None, "return_lse": return_lse}


def _check_probabilities(dropout_p: float | None, return_attn_probs: bool) -> None:
    if number_of("dropout_p", dropout_p) > 0 and return_attn_probs:
        raise UnsupportedError(
            "return_attn_probs is given with dropout_p",
            hint="drop return_attn_probs; attn.weights(q, k, seed=...) shows which are dropped",
        )


def _check_no_pages(block_table: torch.Tensor | None, name: str) -> None:
    if block_table is not None:
        raise UnsupportedError(
            "block_table is given, and calls take no keys in pages",
            hint=f"gather them first: {name}[block_table].flatten(1, 2), and so the values",
        )
