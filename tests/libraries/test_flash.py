"""flash-attn's functions beside plain torch formulas."""

import math

import numpy as np
import pytest
import torch

from attndsl import compat, errors
from attndsl.compat.shared_program import packed_rows


def plain(q, k, v, *, mask, scale=None, softcap=0.0, slopes=None, distance=None):
    """Attention of one sequence, (length, heads, dim), by torch operations in fp64.

    mask and distance are (length, keys).
    """
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    score = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if slopes is not None:
        score = score - slopes.double()[:, None, None] * distance.abs()
    score = score.masked_fill(~mask, -math.inf)
    lse = score.logsumexp(-1)
    weights = (score - lse[..., None]).exp().masked_fill(lse[..., None] == -math.inf, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def reach(q_len, k_len, causal, window, aligned=None):
    """mask and distance of queries aligned to the last key."""
    rows = torch.arange(q_len)[:, None] + k_len - q_len
    away = rows - torch.arange(k_len)
    left, right = window
    mask = torch.ones(q_len, k_len, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        mask &= away <= left
    if right >= 0:
        mask &= -away <= right
    return mask, away


def close(found, wanted, **limits):
    torch.testing.assert_close(found.double(), wanted, **{"atol": 2e-5, "rtol": 2e-5, **limits})


CALLS = [
    {},
    {"causal": True},
    {"window_size": (3, 2)},
    {"window_size": (-1, 2), "softmax_scale": 0.4},
    {"causal": True, "window_size": (4, 7), "softcap": 1.5},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.7])},
    {"alibi_slopes": torch.rand(3, 4), "softcap": 2.0},
]


def expected(q, k, v, call, entry):
    slopes = call.get("alibi_slopes")
    if slopes is not None:
        slopes = slopes if slopes.dim() == 1 else slopes[entry]
    mask, away = reach(
        q.shape[0], k.shape[0], call.get("causal", False), call.get("window_size", (-1, -1))
    )
    return plain(
        q, k, v, mask=mask, scale=call.get("softmax_scale"), softcap=call.get("softcap", 0.0),
        slopes=slopes, distance=away,
    )  # fmt: skip


def grads(out, inputs):
    torch.manual_seed(1)
    return torch.autograd.grad(out, inputs, torch.randn(out.shape).to(out.dtype))


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
@pytest.mark.parametrize(("q_len", "k_len"), [(9, 9), (5, 12), (12, 5)])
def test_flash_attn_func(call, q_len, k_len):
    torch.manual_seed(0)
    q = torch.randn(3, q_len, 4, 8, requires_grad=True)
    k, v = (torch.randn(3, k_len, 2, 8, requires_grad=True) for _ in range(2))
    out, lse, empty = compat.flash_attn_func(q, k, v, **call, return_attn_probs=True)
    assert (out.shape, lse.shape, empty.numel()) == (q.shape, (3, 4, q_len), 0)
    pairs = [expected(q[n], k[n], v[n], call, n) for n in range(3)]
    wanted = torch.stack([pair[0] for pair in pairs])
    close(out, wanted)
    close(lse, torch.stack([pair[1] for pair in pairs]))
    for found, grad in zip(grads(out, (q, k, v)), grads(wanted, (q, k, v)), strict=True):
        close(found, grad.double())
    assert torch.equal(compat.flash_attn_func(q, k, v, **call), out)
    assert out.is_contiguous()


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
@pytest.mark.parametrize("equal", [True, False])
def test_flash_attn_varlen_func(call, equal):
    torch.manual_seed(0)
    cu_q = torch.tensor([0, 4, 4, 13], dtype=torch.int32)
    cu_k = cu_q if equal else torch.tensor([0, 7, 9, 15], dtype=torch.int32)
    q = torch.randn(13, 4, 8, requires_grad=True)
    k, v = (torch.randn(int(cu_k[-1]), 2, 8, requires_grad=True) for _ in range(2))
    out, lse, _ = compat.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 9, 7, **call, return_attn_probs=True
    )
    assert (out.shape, lse.shape) == (q.shape, (4, 13))
    spans = [
        (slice(int(a), int(b)), slice(int(c), int(d)))
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)
    ]
    pairs = [expected(q[a], k[b], v[b], call, n) for n, (a, b) in enumerate(spans)]
    wanted = torch.cat([pair[0] for pair in pairs])
    close(out, wanted)
    close(lse, torch.cat([pair[1] for pair in pairs], 1))
    for found, grad in zip(grads(out, (q, k, v)), grads(wanted, (q, k, v)), strict=True):
        close(found, grad.double())


def test_rows_behind_the_last_sequence_are_zero():
    x = torch.randn(10, 2, 8)
    cu = torch.tensor([0, 3, 7])
    out = compat.flash_attn_varlen_func(x, x, x, cu, cu, 4, 4)
    assert torch.equal(out[7:], torch.zeros(3, 2, 8))
    close(out[3:7], expected(x[3:7], x[3:7], x[3:7], {}, 0)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_rows_before_the_first_sequence_are_zero(causal):
    x = torch.randn(10, 2, 8)
    cu = torch.tensor([0, 4, 7, 10])
    inputs = [x.clone().requires_grad_() for _ in range(3)]
    call = {"causal": causal, "return_attn_probs": True}
    whole, lse, _ = compat.flash_attn_varlen_func(*inputs, cu, cu, 4, 4, **call)
    weights = torch.randn(10, 2, 8)
    wanted = torch.autograd.grad((whole * weights)[4:].sum(), inputs)
    found, found_lse, _ = compat.flash_attn_varlen_func(*inputs, cu[1:], cu[1:], 4, 4, **call)
    assert torch.equal(found[:4], torch.zeros(4, 2, 8))
    assert (found_lse[:, :4] == -torch.inf).all()
    close(found[4:], whole[4:].double())
    close(found_lse[:, 4:], lse[:, 4:].double())
    for grad, exact in zip(
        torch.autograd.grad((found * weights).sum(), inputs), wanted, strict=True
    ):
        close(grad, exact.double())
        assert torch.equal(grad[:4], torch.zeros(4, 2, 8))


def test_rows_of_sequences_that_fall_see_nothing_where_values_are_not_read():
    rows = packed_rows(8, *(torch.tensor(x) for x in ([0, 6, 3, 8], [0, 6, 3], [6, -3, 5])), True)
    seen = [set(range(a, b)) for a, b in zip(rows.first.tolist(), rows.end.tolist(), strict=True)]
    for row, keys in enumerate(seen):
        assert not keys or (row < 6 and keys == set(range(6))) or keys == set(range(3, 8))


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
@pytest.mark.parametrize("new", [0, 2])
def test_flash_attn_with_kvcache(call, new):
    torch.manual_seed(0)
    q = torch.randn(3, 2, 4, 8)
    k_cache, v_cache = torch.randn(2, 3, 16, 2, 8)
    lengths = torch.tensor([5, 14, 2], dtype=torch.int32)
    more = torch.randn(2, 3, new, 2, 8)
    keys, values = k_cache.clone(), v_cache.clone()
    written = {"k": more[0], "v": more[1]} if new else {}
    out, lse = compat.flash_attn_with_kvcache(
        q, k_cache, v_cache, **written, cache_seqlens=lengths, **call, return_softmax_lse=True
    )
    assert lse.shape == (3, 4, 2)
    for n, length in enumerate(lengths.tolist()):
        own = torch.cat([keys[n, :length], more[0, n]]), torch.cat([values[n, :length], more[1, n]])
        wanted, wanted_lse = expected(q[n], *own, call, n)
        close(out[n], wanted)
        close(lse[n], wanted_lse)
        assert torch.equal(k_cache[n, length : length + new], more[0, n])
        assert torch.equal(k_cache[n, length + new :], keys[n, length + new :])


def test_a_cache_with_entries_elsewhere_and_padding_on_the_left():
    torch.manual_seed(0)
    q = torch.randn(2, 1, 4, 8)
    k_cache, v_cache = torch.randn(2, 5, 16, 4, 8)
    entries, start = torch.tensor([3, 1]), torch.tensor([2, 0], dtype=torch.int32)
    out = compat.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor([9, 4]), cache_batch_idx=entries,
        cache_leftpad=start, causal=True,
    )  # fmt: skip
    for n, (entry, first, end) in enumerate(((3, 2, 9), (1, 0, 4))):
        own = k_cache[entry, first:end], v_cache[entry, first:end]
        close(out[n], expected(q[n], *own, {"causal": True}, n)[0])
    leaves = [x.requires_grad_() for x in (q, k_cache, v_cache)]
    whole = compat.flash_attn_with_kvcache(q, k_cache[:2], v_cache[:2])
    wanted = torch.stack([expected(q[n], k_cache[n], v_cache[n], {}, n)[0] for n in range(2)])
    close(whole, wanted)
    for found, grad in zip(grads(whole, leaves), grads(wanted, leaves), strict=True):
        close(found, grad.double())


def test_new_keys_of_entries_elsewhere():
    q, new = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
    cache = torch.zeros(4, 6, 2, 8)
    entries = torch.tensor([2, 0])
    compat.flash_attn_with_kvcache(
        q, cache, cache.clone(), new, new, cache_seqlens=3, cache_batch_idx=entries
    )
    assert torch.equal(cache[entries, 3], new[:, 0])
    assert torch.count_nonzero(cache).item() == new.numel()


def test_caches_of_one_number_for_all():
    q, cache = torch.randn(2, 1, 2, 8), torch.randn(2, 6, 2, 8)
    found = compat.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([3]))
    wanted = compat.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3)
    assert torch.equal(found, wanted)
    before = cache.clone()
    with pytest.raises(errors.ArgumentError, match="room for 6 keys"):
        compat.flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=torch.tensor([0, 6]))
    with pytest.raises(errors.ArgumentError, match="from -1"):
        compat.flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=-1)
    assert torch.equal(cache, before)


NONE = {
    "dropout_p": None, "softmax_scale": None, "causal": None, "softcap": None,
    "alibi_slopes": None, "deterministic": None, "return_attn_probs": None,
}  # fmt: skip


@pytest.mark.parametrize("window", [None, (None, None), [None, -1], (2, None), (None, 1)])
def test_none_stands_for_defaults(window):
    given = {"window_size": window, **NONE}
    plain = (-1, -1) if window is None else [-1 if x is None else x for x in window]
    wanted = compat.flash_attn_func(X, X, X, window_size=plain)
    assert torch.equal(compat.flash_attn_func(X, X, X, **given), wanted)
    packed = (X[0], X[0], X[0], CU, CU, None, None)
    assert torch.equal(
        compat.flash_attn_varlen_func(*packed, **given),
        compat.flash_attn_varlen_func(*packed, window_size=plain),
    )
    assert torch.equal(
        compat.flash_attn_with_kvcache(X, X, X, softcap=None, window_size=window),
        compat.flash_attn_with_kvcache(X, X, X, window_size=plain),
    )


def test_numbers_of_numpy_are_numbers():
    given = {"softcap": np.float32(3.0), "window_size": (np.int64(2), np.int32(0))}
    assert torch.equal(
        compat.flash_attn_func(X, X, X, **given),
        compat.flash_attn_func(X, X, X, softcap=3.0, window_size=(2, 0)),
    )


def test_a_call_with_new_keys_that_is_refused_writes_nothing():
    q, cache, entries = torch.randn(2, 1, 2, 8), torch.randn(2, 6, 2, 8), torch.tensor([1, 0])
    before, lengths = cache.clone(), torch.tensor([3, 4])
    given = {"cache_seqlens": lengths, "cache_batch_idx": entries}
    for wrong in (
        {"window_size": (1.5, 0)}, {"softcap": "3"}, {"alibi_slopes": [0.1, 0.2]},
        {"cache_batch_idx": torch.tensor([0, 2])}, {"cache_batch_idx": torch.tensor([-1, 0])},
        {"cache_leftpad": torch.tensor([4, 4])}, {"cache_leftpad": torch.tensor([1.0, 0.0])},
    ):  # fmt: skip
        with pytest.raises(errors.AttnDSLError, match=next(iter(wrong))):
            compat.flash_attn_with_kvcache(q, cache, cache, q, q, **{**given, **wrong})
    many = torch.randn(3, 6, 2, 8)
    with pytest.raises(errors.ShapeError, match="k_cache has 3 entries"):
        compat.flash_attn_with_kvcache(q, many, many, q, q, cache_seqlens=lengths)
    one = torch.randn(1, 6, 2, 8).expand(2, -1, -1, -1)
    with pytest.raises(errors.ArgumentError, match="k_cache is expanded"):
        compat.flash_attn_with_kvcache(q, one, one.clone(), q, q, cache_seqlens=lengths)
    learned = cache.clone().requires_grad_()
    with pytest.raises(errors.UnsupportedError, match="k_cache requires grad"):
        compat.flash_attn_with_kvcache(q, learned, learned, q, q, cache_seqlens=lengths)
    assert torch.equal(cache, before)


def test_an_entry_may_begin_where_its_keys_end():
    q, cache = torch.randn(2, 1, 2, 8), torch.randn(2, 6, 2, 8)
    found = compat.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=torch.tensor([3, 4]),
        cache_leftpad=torch.tensor([3, 1], dtype=torch.uint8),
    )  # fmt: skip
    assert torch.count_nonzero(found[0]) == 0
    wanted = compat.flash_attn_func(q[1:], cache[1:, 1:4], cache[1:, 1:4])
    torch.testing.assert_close(found[1:], wanted)


def test_a_soft_cap_that_is_not_above_0_is_none():
    assert torch.equal(
        compat.flash_attn_func(X, X, X, softcap=-1.0), compat.flash_attn_func(X, X, X)
    )


def test_no_copies_of_packed_projections():
    projected = torch.randn(2, 7, 3, 4, 8)
    q, k, v = projected.unbind(2)
    close(compat.flash_attn_func(q, k, v)[0], expected(q[0], k[0], v[0], {}, 0)[0])


def test_gradients_of_slopes():
    x = torch.randn(1, 6, 2, 8)
    slopes = torch.rand(2, requires_grad=True)
    out = compat.flash_attn_func(x, x, x, alibi_slopes=slopes)
    wanted = expected(x[0], x[0], x[0], {"alibi_slopes": slopes}, 0)[0][None]
    close(grads(out, (slopes,))[0], grads(wanted, (slopes,))[0].double())


def test_dropout_drops_and_keeps_the_mean():
    torch.manual_seed(0)
    q, v = torch.zeros(1, 4, 2, 8), torch.ones(1, 4096, 2, 8)
    k = torch.randn(1, 4096, 2, 8)
    out = compat.flash_attn_func(q, k, v, dropout_p=0.5)
    assert 0.9 < out.mean() < 1.1
    assert out.std() > 1e-3
    assert not torch.equal(out, compat.flash_attn_func(q, k, v, dropout_p=0.5))


def test_one_graph():
    x = torch.randn(12, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 5, 12])

    def both(x, cu):
        packed = compat.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7, causal=True)
        return packed + compat.flash_attn_func(x[None], x[None], x[None], window_size=(3, 0))[0]

    found = torch.compile(both, fullgraph=True, backend="aot_eager")(x, cu)
    wanted = both(x, cu)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(grads(found, (x,)), grads(wanted, (x,)))


X = torch.randn(1, 4, 2, 8)
CU = torch.tensor([0, 4])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: compat.flash_attn_func(X[0], X[0], X[0]), errors.ShapeError, "3 dims"),
        (
            lambda: compat.flash_attn_func(X, X, X, dropout_p=0.1, return_attn_probs=True),
            errors.UnsupportedError, "return_attn_probs",
        ),
        (lambda: compat.flash_attn_func(X, X, X, dropout_p=1.5), errors.ArgumentError, "1.5"),
        (lambda: compat.flash_attn_func(X, X, X, window_size=(1,)), errors.ArgumentError, "window"),
        (
            lambda: compat.flash_attn_func(X, X, X, alibi_slopes=torch.rand(3)),
            errors.ShapeError, "alibi_slopes",
        ),
        (
            lambda: compat.flash_attn_varlen_func(X[0], X[0], X[0], CU, [0, 4], 4, 4),
            errors.ArgumentError, "cu_seqlens_k",
        ),
        (
            lambda: compat.flash_attn_varlen_func(X[0], X[0], X[0], CU, torch.arange(3), 4, 4),
            errors.ShapeError, "sequences",
        ),
        (
            lambda: compat.flash_attn_varlen_func(X[0], X[0], X[0], CU, CU, 4, 4, block_table=CU),
            errors.UnsupportedError, "pages",
        ),
        (
            lambda: compat.flash_attn_with_kvcache(X, X, X, rotary_cos=X, rotary_sin=X),
            errors.UnsupportedError, "rotary",
        ),
        (
            lambda: compat.flash_attn_varlen_func(X[0], X[0], X[0], CU, CU + 1, 4, 4),
            errors.ArgumentError, "there are 4 rows",
        ),
        (
            lambda: compat.flash_attn_varlen_func(
                X[0], X[0], X[0], torch.tensor([0, 3, 1]), torch.tensor([0, 3, 4]), 4, 4
            ),
            errors.ArgumentError, "where the one before it ends",
        ),
        (
            lambda: compat.flash_attn_with_kvcache(X, X, X, cache_seqlens=torch.tensor([1, 2])),
            errors.ArgumentError, "cache_seqlens has shape",
        ),
        (
            lambda: compat.flash_attn_with_kvcache(X, X, X, cache_batch_idx=torch.arange(2)),
            errors.ArgumentError, "cache_batch_idx has shape",
        ),
        (
            lambda: compat.flash_attn_with_kvcache(X, X, X, cache_seqlens=torch.tensor([1.0])),
            errors.ArgumentError, "float32",
        ),
        (
            lambda: compat.flash_attn_with_kvcache(
                X, X, X, X.double(), X.double(), cache_seqlens=0
            ),
            errors.DTypeError, "float64",
        ),
        (lambda: compat.flash_attn_func(None, X, X), errors.ArgumentError, "q is a NoneType"),
        (
            lambda: compat.flash_attn_func(X, X, X, alibi_slopes=[0.1, 0.2]),
            errors.ArgumentError, "alibi_slopes is a list",
        ),
        (
            lambda: compat.flash_attn_func(X, X, X, window_size=(2.5, 0)),
            errors.ArgumentError, "window_size has 2.5",
        ),
        (
            lambda: compat.flash_attn_varlen_func(X[0], X[0], X[0], CU, CU.to("meta"), 4, 4),
            errors.DeviceError, "cu_seqlens_k is on meta",
        ),
        (lambda: compat.flash_attn_with_kvcache(X, X, X, k=X), errors.ArgumentError, "one of"),
        (lambda: compat.flash_attn_with_kvcache(X, X, X, X, X), errors.ArgumentError, "seqlens"),
        (
            lambda: compat.flash_attn_with_kvcache(X, X, X, X[0], X[0], cache_seqlens=0),
            errors.ShapeError, "k has 3 dims",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert caught.value.hint
