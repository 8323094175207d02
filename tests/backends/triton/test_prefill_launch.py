"""Requests with many queries, which kernels for few rows leave to dense calls."""

from __future__ import annotations

import pytest
import torch
from support.no_waiting import no_waiting
from support.serving import Shape, make_step

import attndsl
from attndsl.backends.paged_requests import Pages
from attndsl.backends.triton import prefill_launch as copies
from attndsl.errors import ArgumentError
from attndsl.serving import prefill

SHAPE = Shape(dtype=torch.float32, dim=16, value_dim=16)
PROGRAMS = {
    "plain": "causal()",
    "window": "mask = causal() and (q - kv < 25 or kv < 2); score = softcap(score, 9.0)",
    "sizes": "mask = causal(); score = score + alibi() + kv_len / 7 - q_len / 9 + 0.1 * b / batch",
    "heads": "mask = causal() and q - kv < 19 * (h + 1); score = score + hkv / kv_heads",
    "sink": "mask = causal(); sink = 0.5 * h",
    "sigmoid": "mask = causal(); weights = sigmoid(score)",
}
STEPS = {
    "one": ((90,), (70,)),
    "one in room": ((90,), (70,), 200),
    "mixture": ((90, 5, 130, 8, 33), (70, 1, 90, 0, 3)),
    "all": ((66, 70), (66, 65)),
    "in another order": ((9, 80), (2, 80)),
    "none": ((30, 70), (3, 64), 90),
}


def on(device, step):
    """The arguments of a step, on a device."""
    c = step.cache
    tensors = (c.k_pages, c.v_pages, c.table, c.lengths)
    cache = attndsl.PagedCache(*(x.to(device) for x in tensors))
    return step.q.to(device), cache, step.starts.to(device)


def chunked_of(attention: attndsl.Attention) -> list[prefill.Chunked | None]:
    """What runs the chunks of each signature that a program has served."""
    return [prepared.chunked for prepared in attention._prepared.cache.values()]


def close(found, wanted, tolerance=1e-5):
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.cpu(), other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [*(("plain", x) for x in STEPS), *((x, "mixture") for x in PROGRAMS if x != "plain")],
)
def test_results_are_those_of_gathered_keys(device, text, sizes):
    """Twice, so that steps of one signature are looked up as well."""
    lengths, counts, *more = STEPS[sizes]
    step = make_step(lengths, counts, SHAPE)
    attention = attndsl.compile(PROGRAMS[text], backend="decode")
    most = more[0] if more else max(counts)
    given = {"return_lse": "weights" not in PROGRAMS[text], "out_dtype": torch.float32}
    wanted = attndsl.compile(PROGRAMS[text]).serve(step.q, step.cache, step.starts, **given)
    for _ in range(2):
        found = attention.serve(*on(device, step), most_queries=most, **given)
        close(*(x if given["return_lse"] else (x,) for x in (found, wanted)))
    (chunked,) = chunked_of(attention)
    assert chunked is not None
    assert chunked.whole == (len(counts) == 1)


def test_captures_of_requests_and_tokens(device):
    """A slot's request, its tokens and their positions are those of the step."""
    text = """
tensor shift[batch, heads]: float
tensor bias[tokens]: float
mask = q >= kv
score = score + shift[b, h] + bias[token] * kv + 0.01 * q
"""
    step = make_step((90, 5, 130), (70, 1, 90), SHAPE)
    tokens = len(step.q)
    index = torch.cat([
        torch.arange(n) + length - n for n, length in ((70, 90), (1, 5), (90, 130))
    ])  # fmt: skip
    index = torch.cat((index, torch.zeros(tokens - len(index)).long()))
    captures = {"shift": torch.randn(3, 4), "bias": torch.randn(tokens)}
    there = {name: x.to(device) for name, x in captures.items()}
    for own in (None, index):
        given = {} if own is None else {"q_index": own}
        wanted = attndsl.compile(text).serve(step.q, step.cache, step.starts, **given, **captures)
        given = {} if own is None else {"q_index": own.to(device)}
        attention = attndsl.compile(text, backend="decode")
        found = attention.serve(*on(device, step), most_queries=90, **given, **there)
        close((found,), (wanted,), 1e-4)
        # Where positions are looked up, tiles would be in lists.
        assert (chunked_of(attention)[0] is None) == (own is not None)


@pytest.mark.parametrize("most_bytes", [0, 1 << 28])
def test_slots_of_several_calls(device, monkeypatch, most_bytes):
    """How many slots a call has changes nothing but memory; calls without a request do nothing."""
    monkeypatch.setattr(prefill, "_MOST_BYTES", most_bytes)
    step = make_step((90, 5, 130, 80), (70, 1, 90, 66), SHAPE)
    attention = attndsl.compile("causal()", backend="decode")
    found = attention.serve(*on(device, step), most_queries=128)
    close((found,), (attndsl.compile("causal()").serve(step.q, step.cache, step.starts),))
    (chunked,) = chunked_of(attention)
    assert chunked.together == (1 if not most_bytes else 3)
    assert chunked.capacity == 3


@pytest.mark.parametrize("most_chunks", [0, 1, 2, 9])
def test_the_most_chunks_of_a_step(device, most_chunks):
    """A capacity, as the most queries: less room, the same results."""
    step = make_step((90, 5, 130), (70, 1, 9), SHAPE)
    attention = attndsl.compile("causal()", backend="decode")
    if not most_chunks:
        with pytest.raises(ArgumentError, match="most_chunks is 0, and 1 requests have more than"):
            attention.serve(step.q, step.cache, step.starts, most_chunks=0)
        return
    found = attention.serve(*on(device, step), most_queries=128, most_chunks=most_chunks)
    close((found,), (attndsl.compile("causal()").serve(step.q, step.cache, step.starts),))
    (chunked,) = chunked_of(attention)
    assert chunked.capacity == 1


def test_wrong_values_of_one_request(device, monkeypatch):
    """Others have their results, and tokens of nobody are zeros, also in front of all requests."""
    monkeypatch.setattr("attndsl.serving.serve_call.looks_at_values", lambda device: False)
    step = make_step((90, 5, 130), (70, 1, 90), SHAPE)
    wanted = attndsl.compile("causal()").serve(step.q, step.cache, step.starts)
    attention = attndsl.compile("causal()", backend="decode")
    step.cache.table[0] = 1 << 30
    step.cache.lengths[0] = -5
    found = attention.serve(*on(device, step), most_queries=90)
    close((found[70:],), (wanted[70:],))
    # One chunk more than there is room for: those before it are right.
    step = make_step((90, 5, 130), (70, 1, 90), SHAPE)
    found = attention.serve(*on(device, step), most_queries=90, most_chunks=1)
    close((found[:71], found[161:]), (wanted[:71], wanted[161:]))
    alone = make_step((90,), (80,), SHAPE)
    q, cache, starts = on(device, alone)
    found = attention.serve(q, cache, starts + torch.tensor([7, 0], device=device), most_queries=80)
    later = attndsl.compile("causal()").serve(alone.q, alone.cache, torch.tensor([7, 80]))
    close((found,), (later,))
    assert (found[:7] == 0).all()


def test_what_dense_calls_do_not_run(device):
    """Pages of fp8, and masks whose tiles are in lists, stay with the kernels for pages."""
    step = make_step((90,), (70,), SHAPE)
    text = "tensor seen[tokens, n]: bool\nmask = causal() and seen[token, kv]"
    seen = torch.rand(len(step.q), step.cache.room) < 0.5
    attention = attndsl.compile(text, backend="decode")
    found = attention.serve(*on(device, step), most_queries=70, seen=seen.to(device))
    wanted = attndsl.compile(text).serve(step.q, step.cache, step.starts, seen=seen)
    close((found,), (wanted,))
    assert chunked_of(attention) == [None]
    small = attndsl.PagedCache(
        *(x.nan_to_num().to(torch.float8_e4m3fn) for x in (step.cache.k_pages, step.cache.v_pages)),
        step.cache.table, step.cache.lengths,
    )  # fmt: skip
    step = step._replace(cache=small)
    attention = attndsl.compile("causal()", backend="decode")
    found = attention.serve(*on(device, step), most_queries=70)
    close((found,), (attndsl.compile("causal()").serve(step.q, small, step.starts),))
    assert chunked_of(attention) == [None]


@pytest.mark.parametrize("kind", ["param", "tensor"])
def test_memory_behind_copied_keys(device, monkeypatch, kind):
    """Ints too large for formulas make calls visit all tiles; what lies there may be no number."""
    backend_of, launch_gather = prefill.backend_of, copies.launch_gather

    def by_kernels(lowered, spec, *rest):
        return backend_of(lowered, "triton" if spec == "auto" else spec, *rest)

    def into_used_memory(pages, found, first_slot, both, *rest):
        for x in both:
            x.fill_(torch.nan)
        launch_gather(pages, found, first_slot, both, *rest)

    monkeypatch.setattr(prefill, "backend_of", by_kernels)
    monkeypatch.setattr(copies, "launch_gather", into_used_memory)
    step = make_step((90, 70), (70, 66), SHAPE._replace(page=16))
    table = torch.zeros(2, 40, dtype=torch.int32)
    table[:, : step.cache.table.shape[1]] = step.cache.table.where(step.cache.table < 1000, 0)
    cache = attndsl.PagedCache(step.cache.k_pages, step.cache.v_pages, table, step.cache.lengths)
    step = step._replace(cache=cache)
    many = 1 << 40
    declared = {"param": "param w: int", "tensor": "tensor w[batch]: int"}[kind]
    text = f"{declared}\nmask = causal() and q - kv < {'w' if kind == 'param' else 'w[b]'}"
    attention = attndsl.compile(text, backend="decode")
    for values in ((20, 30), (many, many), (30, 20)):
        window = values[0] if kind == "param" else torch.tensor(values)
        there = window if kind == "param" else window.to(device)
        found = attention.serve(*on(device, step), most_queries=70, w=there)
        close((found,), (attndsl.compile(text).serve(step.q, cache, step.starts, w=window),))
    (chunked,) = chunked_of(attention)
    assert chunked is not None


def test_rows_of_a_page_lie_far_apart(device):
    """As where pages are the second dim: further than 32 bits count."""
    size, step, width = 16, (1 << 31) // 15 + 16, 16
    pool = torch.empty(size * step, dtype=torch.uint8, device=device).view(size, step)
    pool[:, :width] = torch.arange(size, device=device)[:, None]
    stored = pool[:, :width].view(size, 1, 1, width).transpose(0, 1)
    found = torch.zeros(5, 2, dtype=torch.int32, device=device)
    found[3, 0] = size
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    pages = Pages(stored, table[0], stored, stored, table, table[0], None, None)
    k, v = (torch.empty(1, 1, size, width, dtype=torch.uint8, device=device) for _ in range(2))
    copies.launch_gather(pages, found, 0, (k, v), False)
    for x in (k, v):
        assert torch.equal(x[0, 0], stored[0, :, 0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text", ["mask = causal(); score = score + alibi()", "sliding_window(100)"]
)
def test_bits_and_graphs(text):
    """A request alone, among others, and in a replay with other lengths; the host reads nothing."""
    shape = Shape(heads=8, kv_heads=2, dim=128, value_dim=128, page=16, dtype=torch.bfloat16)
    attention = attndsl.compile(text, backend="decode")
    step = make_step((900, 3, 700), (400, 1, 300), shape)
    q, cache, starts = on("cuda", step)
    attention.serve(q, cache, starts, most_queries=512)
    with no_waiting():
        whole = attention.serve(q, cache, starts, most_queries=512)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = attention.serve(q, cache, starts, most_queries=512)
    graph.replay()
    assert torch.equal(again, whole)
    for b in range(3):
        first, last = int(starts[b]), int(starts[b + 1])
        own = attndsl.PagedCache(
            cache.k_pages, cache.v_pages, cache.table[b : b + 1], cache.lengths[b : b + 1]
        )
        alone = attention.serve(
            q[first:last].contiguous(), own, starts[b : b + 2] - first, most_queries=512
        )
        assert torch.equal(alone, whole[first:last])
    cache.lengths.copy_(torch.tensor((850, 3, 650)))
    starts.copy_(torch.tensor((0, 300, 301, 551)))
    graph.replay()
    assert torch.equal(again, attention.serve(q, cache, starts, most_queries=512))


@pytest.mark.gpu
def test_chunks_that_end_on_tiles_of_rows():
    """A prompt has the same bits at once and in chunks that end on tiles of all kernels' rows."""
    shape = Shape(heads=8, kv_heads=2, dim=128, value_dim=128, page=16, dtype=torch.bfloat16)
    attention = attndsl.compile("causal()", backend="decode")
    q, cache, starts = on("cuda", make_step((1152,), (1152,), shape))
    whole = attention.serve(q, cache, starts, most_queries=1152)
    for first, last in ((0, 384), (384, 1152)):
        own = attndsl.PagedCache(
            cache.k_pages, cache.v_pages, cache.table, torch.tensor([last], device="cuda")
        )
        ends = torch.tensor([0, last - first], device="cuda")
        found = attention.serve(q[first:last].contiguous(), own, ends, most_queries=1152)
        assert torch.equal(found, whole[first:last])
