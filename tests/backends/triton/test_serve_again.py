"""Steps like one before: what is looked up of it, and what is not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.serving import Shape, make_step
from torch.utils._python_dispatch import TorchDispatchMode

import attndsl
from attndsl import errors
from attndsl.backends.kernels.compile import Executable
from attndsl.backends.triton import serve_launch
from attndsl.foundation.caches import CACHES, Reason
from attndsl.serving.serve_call import Serving

SHAPE = Shape(dtype=torch.float32, dim=16, value_dim=16)
TEXT = "mask = causal() and q - kv < 25; score = score + alibi() + kv_len / 7"


@pytest.fixture
def anew(monkeypatch):
    """Steps of kernels that are checked and bound in full."""
    found = []
    real = Serving._serve_anew

    def seen(self, *args):
        if self.backend == "decode":
            found.append(args)
        return real(self, *args)

    monkeypatch.setattr(Serving, "_serve_anew", seen)
    return found


def on(device, step):
    """The arguments of a step, on a device."""
    c = step.cache
    cache = attndsl.PagedCache(*(x.to(device) for x in (c.k_pages, c.v_pages, c.table, c.lengths)))
    return step.q.to(device), cache, step.starts.to(device)


def wanted(text, step, **captures):
    """What a program of its own gives on a CPU."""
    return attndsl.compile(text).serve(step.q, step.cache, step.starts, **captures)


def close(found, other):
    torch.testing.assert_close(found.cpu(), other, atol=1e-5, rtol=1e-5)


def test_other_values_of_one_signature(device, anew):
    """Lengths, starts, pages, scales and numbers of tokens are those of each step."""
    attention = attndsl.compile(TEXT, backend="decode")
    lengths = ((30, 1, 40), (12, 40, 33), (40, 40, 2))
    for counts, own in zip(((1, 1, 6), (2, 0, 3), (6, 5, 1)), lengths, strict=True):
        step = make_step(own, counts, SHAPE, seed=sum(own))
        c = step.cache
        pools = [
            torch.nn.functional.pad(x, (0, 0) * 3 + (0, 40 - len(x)))
            for x in (c.k_pages, c.v_pages)
        ]
        table = torch.nn.functional.pad(c.table, (0, 12 - c.table.shape[1]))
        step = step._replace(cache=attndsl.PagedCache(*pools, table, c.lengths))
        close(attention.serve(*on(device, step), most_queries=6), wanted(TEXT, step))
    assert len(anew) == 1


def test_everything_that_changes_the_outcome_is_another_signature(device, anew):
    attention = attndsl.compile("causal()", backend="decode")
    step = make_step((9, 20), (1, 3), SHAPE)
    q, cache, starts = on(device, step)
    usual = attention.serve(q, cache, starts, most_queries=3)
    c = cache

    def pages(k, v, table=c.table, lengths=c.lengths):
        return attndsl.PagedCache(k, v, table, lengths)

    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (c.k_pages, c.v_pages)]
    wide = torch.stack((q, -q), -1).flatten(-2)[..., ::2]
    of_half = [x.bfloat16() for x in (c.k_pages, c.v_pages)]
    for given, options in (
        ((q, cache, starts.int()), {}),
        ((q, pages(*turned), starts), {}),
        ((q, pages(c.k_pages, c.v_pages, c.table.long()), starts), {}),
        ((q, pages(c.k_pages, c.v_pages, lengths=c.lengths.int()), starts), {}),
        ((q, pages(c.k_pages, c.v_pages, c.table.t().contiguous().t()), starts), {}),
        ((wide, cache, starts), {}),
        ((q, cache, starts), {"scale": 0.25}),
        ((q, cache, starts), {"most_queries": 5}),
        ((q, cache, starts), {"heads": 4, "kv_heads": 2}),
    ):
        options = {"most_queries": 3, **options}
        found = attention.serve(*given, **options)
        again = attention.serve(*given, **options)
        assert torch.equal(found, again)
        if "scale" not in options:
            torch.testing.assert_close(found, usual, atol=1e-5, rtol=1e-5)
    assert len(anew) == 10
    half = attention.serve(q.bfloat16(), pages(*of_half), starts, most_queries=3)
    assert half.dtype is torch.bfloat16
    wide = attention.serve(
        q.bfloat16(), pages(*of_half), starts, most_queries=3, out_dtype=torch.float32
    )
    assert wide.dtype is torch.float32
    assert torch.equal(attention.serve(q, cache, starts, most_queries=3), usual)
    assert len(anew) == 12


def test_captures_of_a_step(device, anew):
    """Their values are those of each step; their kinds make signatures."""
    text = """
param near: int
tensor gain[heads]: float
tensor g[tokens]: float
mask = causal() and q - kv < near
score = gain[h] * score + g[token]
"""
    attention = attndsl.compile(text, backend="decode")
    step = make_step((9, 20), (1, 3), SHAPE)
    for near, dtype in ((5, torch.float32), (9, torch.float32), (9, torch.float16)):
        given = {"gain": torch.rand(4).to(dtype), "g": torch.rand(len(step.q)).to(dtype)}
        there = {name: x.to(device) for name, x in given.items()}
        found = attention.serve(*on(device, step), most_queries=3, near=near, **there)
        close(found, wanted(text, step, near=near, **given))
    assert len(anew) == 2
    given = {"gain": torch.rand(4, device=device), "g": torch.rand(6, device=device)}
    with pytest.raises(errors.ArgumentError, match="near does not fit 64 bits"):
        attention.serve(*on(device, step), most_queries=3, near=1 << 70, **given)
    with pytest.raises(errors.ShapeError, match="g has shape"):
        attention.serve(
            *on(device, step), most_queries=3, near=3, gain=given["gain"], g=given["g"][:5]
        )


def test_what_is_refused_is_refused_again(device, anew):
    attention = attndsl.compile("causal()", backend="decode")
    q, cache, starts = on(device, make_step((9, 20), (1, 3), SHAPE))
    attention.serve(q, cache, starts, most_queries=3)
    with pytest.raises(errors.UnsupportedError, match="requires grad"):
        attention.serve(q.clone().requires_grad_(), cache, starts, most_queries=3)
    with torch.no_grad():
        attention.serve(q.clone().requires_grad_(), cache, starts, most_queries=3)
    with pytest.raises(errors.ArgumentError, match="most_queries is True"):
        attention.serve(q, cache, starts, most_queries=True)
    if q.device.type == "cpu":
        cache.lengths[1] = 1000
        with pytest.raises(errors.ArgumentError, match="request 1 has length 1000"):
            attention.serve(q, cache, starts, most_queries=3)
    assert len(anew) == 2


def test_lists_of_tiles_are_those_of_each_step(device, anew, monkeypatch):
    """Kernels that list tiles read lengths and starts from memory."""
    listed = []
    real = serve_launch._lists
    monkeypatch.setattr(serve_launch, "_lists", lambda *args: listed.append(args) or real(*args))
    text = "mask = natten2d(8, 8, 3, 5) and causal()"
    attention = attndsl.compile(text, backend="decode")
    for lengths, counts in (((30, 9), (2, 1)), ((12, 60), (1, 3)), ((64, 64), (3, 2))):
        step = make_step((*lengths, 64), (*counts, 0), SHAPE)
        step.cache.table.clamp_(max=len(step.cache.k_pages) - 1)
        pools = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 0, 60 - len(x)))
                 for x in (step.cache.k_pages, step.cache.v_pages)]  # fmt: skip
        cache = attndsl.PagedCache(*pools, step.cache.table, step.cache.lengths)
        step = step._replace(cache=cache)
        close(attention.serve(*on(device, step), most_queries=3), wanted(text, step))
    assert len(listed) == 3
    assert len(anew) == 1


def test_steps_are_prepared_anew_for_other_kernels(device, anew):
    attention = attndsl.compile(TEXT, backend="decode")
    step = on(device, make_step((9, 20), (1, 3), SHAPE))
    for _ in range(2):
        usual = attention.serve(*step, most_queries=3)
    CACHES.invalidate(Reason.KERNELS)
    assert torch.equal(attention.serve(*step, most_queries=3), usual)
    assert len(anew) == 2


def test_tensors_of_a_step_are_not_kept(device):
    attention = attndsl.compile(
        "tensor g[tokens]: float\nscore = g[token] * score", backend="decode"
    )
    q, cache, starts = on(device, make_step((9, 20), (1, 3), SHAPE))
    g, index = torch.rand(len(q), device=device), torch.arange(len(q), device=device)
    kept = [weakref.ref(x) for x in (q, cache.k_pages, cache.lengths, starts, g, index)]
    attention.serve(q, cache, starts, most_queries=3, g=g, q_index=index)
    del q, cache, starts, g, index
    gc.collect()
    assert [x() for x in kept] == [None] * 6


class _Operations(TorchDispatchMode):
    """Names of the operations that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("lse", [False, True])
def test_a_step_again_makes_room_and_launches_once(device, anew, monkeypatch, lse):
    monkeypatch.setattr("attndsl.serving.serve_call.looks_at_values", lambda device: False)
    attention = attndsl.compile(TEXT, backend="decode")
    q, cache, starts = on(device, make_step((300, 20), (1, 3), SHAPE))
    given = {"most_queries": 3, "return_lse": lse}
    attention.serve(q, cache, starts, **given)
    launches = []
    monkeypatch.setattr(Executable, "launch_grid", lambda *args: launches.append(args))
    with _Operations() as seen:
        attention.serve(q, cache, starts, **given)
    assert set(seen.names) == {"aten.empty.memory_format"}
    assert len(launches) == len(anew) == 1


def test_tensors_whose_signs_torch_has_yet_to_change(device):
    """Kernels read what is stored, which is something else."""
    attention = attndsl.compile("tensor g[heads]: float\nscore = g[h] * score", backend="decode")
    q, cache, starts = on(device, make_step((9, 20), (1, 3), SHAPE))
    gain = torch.rand(4, device=device)
    usual = attention.serve(-q, cache, starts, most_queries=3, g=-gain)
    turned = [torch._neg_view(x) for x in (q, gain)]
    for _ in range(2):
        found = attention.serve(turned[0], cache, starts, most_queries=3, g=turned[1])
        assert torch.equal(found, usual)
    k, v = (torch._neg_view(-x) for x in (cache.k_pages, cache.v_pages))
    other = attndsl.PagedCache(k, v, cache.table, cache.lengths)
    found = attention.serve(-q, other, starts, most_queries=3, g=-gain)
    torch.testing.assert_close(found, usual, atol=1e-5, rtol=1e-5)


def test_tokens_of_nobody_are_cleared_for_all_values_of_starts(device, monkeypatch):
    """In front, behind, between and beyond the most queries; no request loses a token."""
    monkeypatch.setattr("attndsl.serving.serve_call.looks_at_values", lambda device: False)
    attention = attndsl.compile("causal()", backend="decode")
    step = make_step((4,) * 40, (1,) * 40, Shape(1, 1, 16, 16, 4, torch.float32, 30))
    q, cache, starts = on(device, step)
    right = attention.serve(q, cache, starts, most_queries=1)
    assert (right[40:] == 0).all()
    starts += 20
    torch.manual_seed(0)
    for bad in ((), (7,), (0, 40), (3, 4, 39)):
        own = starts.clone()
        own[list(bad)] = torch.randint(-5, 100, (len(bad),), device=device)
        found, lse = attention.serve(q.roll(20, 0), cache, own, most_queries=1, return_lse=True)
        first, last = own.clamp(0, 70)[:-1].tolist(), own.clamp(0, 70)[1:].tolist()
        have = {a for a, b in zip(first, last, strict=True) if b > a}
        free = [token for token in range(70) if token not in have]
        assert (found[free] == 0).all()
        assert (lse[free] == -torch.inf).all()
        for b in range(40):
            if first[b] == 20 + b and last[b] == 21 + b and first.count(first[b]) == 1:
                assert torch.equal(found[first[b]], right[b])
