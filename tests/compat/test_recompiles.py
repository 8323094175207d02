"""Graphs of torch.compile: one for all lengths and all values of run-time params."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import attndsl
from attndsl import PagedCache, scaled_dot_product_attention
from attndsl.compat import flash_attn_varlen_func, flash_attn_with_kvcache
from attndsl.flex import flex_attention

CAUSAL = attndsl.compile("causal()")
WINDOW = attndsl.compile(
    "param near: int; param gain: float; param on: bool; mask = causal() and q - kv < near; "
    "score = score * gain + where(on, q - kv, 0)"
)
GAIN = attndsl.compile(
    "tensor gain[heads]: float; tensor ends[batch]: int; mask = kv < ends[b]; "
    "score = score * gain[h]"
)
DROPPED = attndsl.compile("param p: float; weights = dropout(softmax(score), p)")
MODULE = attndsl.nn.MultiheadAttention(32, 2, batch_first=True)
SLOPES = torch.tensor([0.5, 0.25])


def _leaves(q_len, kv_len=None, batch=3):
    """Sizes that agree by chance are guarded: none do here."""
    lengths = (q_len, kv_len or q_len, kv_len or q_len)
    return [torch.randn(batch, 2, length, 32, requires_grad=True) for length in lengths]


def _padded(length):
    return torch.arange(length) >= torch.tensor([length, length - 2, 1])[:, None]


def _flex(q, k, v, slopes):
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (i - j))


LENGTHS = (17, 24, 9, 41)
CASES = {
    "lengths": (CAUSAL, [_leaves(n) for n in LENGTHS]),
    "both lengths and the batch": (
        CAUSAL, [_leaves(5, 9, 3), _leaves(6, 21, 5), _leaves(30, 12, 7)],
    ),
    "int, float and bool params": (
        lambda q, k, v, near, gain: WINDOW(q, k, v, near=near, gain=gain, on=True),
        [(*_leaves(17), n, x) for n, x in ((3, 0.5), (5, 0.7), (9, 1.5))],
    ),
    "scale": (
        lambda q, k, v, x: CAUSAL(q, k, v, scale=x), [(*_leaves(17), x) for x in (0.1, 0.2, 0.4)],
    ),
    "offset": (
        lambda q, k, v, n: CAUSAL(q, k, v, q_offset=n),
        [(*_leaves(2, n), n - 2) for n in (17, 18, 19, 40)],
    ),
    "offset of the lengths": (
        lambda q, k, v: CAUSAL(q, k, v, q_offset=k.shape[2] - q.shape[2]),
        [_leaves(2, n) for n in (17, 18, 40)],
    ),
    "a param of the lengths": (
        lambda q, k, v: WINDOW(q, k, v, near=k.shape[2] // 2, gain=k.shape[2] ** -0.5, on=False),
        [_leaves(n) for n in LENGTHS],
    ),
    "captures": (
        lambda q, k, v, gain, ends: GAIN(q, k, v, gain=gain, ends=ends),
        [
            (*_leaves(n), torch.rand(2, requires_grad=True), torch.tensor([n, n - 2, 1]))
            for n in LENGTHS
        ],
    ),
    "seeds and probabilities": (
        lambda q, k, v, p, seed: DROPPED(q, k, v, p=p, seed=seed),
        [(*_leaves(17), p, n) for p, n in ((0.1, 5), (0.2, 6), (0.4, 1 << 60))],
    ),
    "sdpa": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        [_leaves(n) for n in LENGTHS],
    ),
    "sdpa with a mask": (
        scaled_dot_product_attention,
        [(*_leaves(n, n + 2), torch.randn(n, n + 2, requires_grad=True)) for n in LENGTHS],
    ),
    "flex": (_flex, [(*_leaves(n), SLOPES) for n in LENGTHS]),
    "module": (
        lambda x, padded: MODULE(x, x, x, key_padding_mask=padded)[0],
        [(torch.randn(3, n, 32, requires_grad=True), _padded(n)) for n in LENGTHS],
    ),
}  # fmt: skip


HERE = (
    "both lengths and the batch", "int, float and bool params", "a param of the lengths",
    "captures", "seeds and probabilities", "sdpa",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in HERE else [pytest.mark.slow]) for name in CASES]
)
def test_other_values_compile_nothing(graphs, name):
    function, calls = CASES[name]
    compiled = graphs(function, dynamic=True)
    for count, arguments in enumerate(calls):
        outs = [compiled(*arguments), function(*arguments)]
        torch.testing.assert_close(*outs)
        learned = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), learned) for x in outs))
        if count == 0:
            # torch may start over once with a number that it cannot leave open, as a default.
            first = graphs.counter.frame_count
            assert first <= 2
    assert graphs.counter.frame_count == first


@pytest.mark.parametrize(
    "name",
    [
        "int, float and bool params",
        pytest.param("lengths", marks=pytest.mark.slow),
        pytest.param("offset", marks=pytest.mark.slow),
    ],
)
def test_values_seen_to_vary_compile_once_more(graphs, name):
    """Without ``dynamic=True``, as most have it."""
    function, calls = CASES[name]
    compiled = graphs(function)
    for arguments in calls:
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert graphs.counter.frame_count <= 2


CELLS = attndsl.compile(
    "tensor gain[heads]: float; tensor shift[batch]: float; score = score * gain[h] + shift[b]"
)
ENDS = attndsl.compile("tensor ends[batch]: int; mask = valid_keys(ends)")
DOC = attndsl.compile("tensor doc[kv_len]: int; mask = doc[kv] > 0")
SIZES, BATCHES = (21, 33, 50), (5, 7, 11)


def _starts(rows):
    return torch.tensor([0, rows // 3, rows], dtype=torch.int32)


def _packed(q, k, cu_q, cu_k, slopes):
    return flash_attn_varlen_func(
        q, k, k, cu_q, cu_k, 99, 99, causal=True, softcap=9.0, alibi_slopes=slopes
    )


def _cached(q, k, lengths):
    return flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, causal=True)


def _appended(q, cache, new, lengths, entries=None, first=None):
    k, v = cache.clone(), cache.clone()
    out = flash_attn_with_kvcache(
        q, k, v, new, new, cache_seqlens=lengths, causal=True, cache_batch_idx=entries,
        cache_leftpad=first,
    )  # fmt: skip
    return out, k, v


def _in_pages(pages, table, lengths, new, starts):
    k, v = pages.clone(), pages.clone()
    PagedCache(k, v, table, lengths).append(new, new, starts)
    return k, v


def _gradient_in_room(q, k):
    out, lse = CAUSAL(q, k, k, return_lse=True, q_offset=3)
    room = torch.empty_like(q)
    return CAUSAL.backward(q, k, k, out, lse, torch.ones_like(out), q_offset=3, room=room).q


_x = torch.randn
CHECKED = {
    "packed rows": (
        _packed,
        [(_x(n, 2, 8), _x(n + 13, 2, 8), _starts(n), _starts(n + 13), _x(2)) for n in SIZES],
    ),
    "packed sequences": (
        lambda x, cu: flash_attn_varlen_func(x, x, x, cu, cu, 9, 9),
        [(_x(n, 2, 8), torch.arange(b)) for n, b in zip(SIZES, BATCHES, strict=True)],
    ),
    "entries of a cache": (
        _cached, [(_x(b, 1, 2, 8), _x(b, 20, 2, 8), torch.arange(b) + 1) for b in BATCHES],
    ),
    "one length of a cache": (
        _cached, [(_x(3, 4, 2, 8), _x(3, 60, 2, 8), n) for n in SIZES],
    ),
    "a full cache": (
        lambda q, k: _cached(q, k, None), [(_x(3, 4, 2, 8), _x(3, n, 2, 8)) for n in SIZES],
    ),
    "new keys": (
        _appended,
        [(_x(3, n, 2, 8), _x(3, 99, 2, 8), _x(3, n, 2, 8), torch.tensor([9, 7, 5])) for n in SIZES],
    ),
    "room for new keys": (
        _appended, [(_x(3, 4, 2, 8), _x(3, n, 2, 8), _x(3, 6, 2, 8), n - 9) for n in SIZES],
    ),
    "new keys of chosen entries": (
        _appended,
        [
            (_x(b, 4, 2, 8), _x(b + 9, 40, 2, 8), _x(b, 6, 2, 8), torch.arange(b) + 3,
             torch.arange(b).flip(0), torch.ones(b, dtype=torch.int32))
            for b in BATCHES
        ],
    ),
    "keys in pages": (
        _in_pages,
        [
            (_x(b + 9, 4, 2, 8), torch.arange(b)[:, None], torch.ones(b, dtype=torch.int64),
             _x(b, 2, 8), torch.arange(b + 1))
            for b in BATCHES
        ],
    ),
    "kv_lengths": (
        lambda q, k, n: CAUSAL(q, k, k, kv_lengths=n, q_offset=5),
        [(_x(b, 2, 3, 8), _x(b, 2, 20, 8), torch.arange(b) + 3) for b in BATCHES],
    ),
    "offsets of entries": (
        lambda q, k, n: CAUSAL(q, k, k, q_offset=n, kv_offset=n),
        [(_x(b, 2, 3, 8), _x(b, 2, 20, 8), torch.arange(b)) for b in BATCHES],
    ),
    "a capture of lengths": (
        lambda x, n: ENDS(x, x, x, ends=n),
        [(_x(b, 2, 20, 8), torch.arange(b)) for b in BATCHES],
    ),
    "own heads and entries": (
        lambda q, k, g, s: CELLS(
            q, k, k, heads=4, h_offset=2, batch=20, b_offset=3, gain=g, shift=s
        ),
        [(_x(b, 2, 17, 8), _x(b, 2, 19, 8), _x(2), _x(b)) for b in BATCHES],
    ),
    "own keys": (
        lambda q, k, doc: DOC(q, k, k, doc=doc, kv_len=60, kv_offset=1),
        [(_x(3, 2, 17, 8), _x(3, 2, n, 8), torch.arange(n) % 3) for n in SIZES],
    ),
    "room for a gradient": (
        _gradient_in_room, [(_x(b, 2, 17, 8), _x(b, 2, 20, 8)) for b in BATCHES],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_checks_leave_sizes_open(graphs, name):
    """A text of a size, or a tensor of it, would make it a constant although nothing is refused."""
    function, calls = CHECKED[name]
    counter = CompileCounter()
    compiled = graphs(function, counter, dynamic=True)
    for arguments in calls:
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert counter.frame_count == 1


def test_constants_of_a_graph_are_no_tensors_of_the_cpu(graphs):
    """These would keep torch from using CUDA graphs."""
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = graphs(lambda q, k, v: WINDOW(q, k, v, near=3, gain=0.5, on=True), backend)
    compiled(*_leaves(5))
    assert "attndsl.forward" in seen
    assert not [name for name in seen if "zeros" in name or "stack" in name]


@pytest.mark.slow
def test_inductor(graphs):
    """Open numbers, dropout, gradients, lengths: code that torch generates for CPUs."""
    compiled = graphs(CASES["int, float and bool params"][0], "inductor", dynamic=True)
    for near, gain, length in ((3, 0.5, 17), (5, 0.7, 24)):
        leaves = _leaves(length)
        outs = [f(*leaves, near, gain) for f in (compiled, CASES["int, float and bool params"][0])]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), leaves) for x in outs))
