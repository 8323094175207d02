"""Plans of steps: what layers share, and which calls a plan refuses."""

from __future__ import annotations

import pytest
import torch
from support.no_waiting import no_waiting
from support.serving import Shape, make_step

import attndsl
from attndsl.errors import ArgumentError, ShapeError, UnsupportedError
from attndsl.serving.paged import PagedCache
from attndsl.serving.serve_call import Serving

SHAPE = Shape(dtype=torch.float32, dim=16, value_dim=16)
WINDOW = "mask = causal() and q - kv < 25; score = score + alibi() + kv_len / 7"
BACKENDS = ("auto", "decode")


def on(device, step):
    """The arguments of a step, on a device."""
    c = step.cache
    tensors = (c.k_pages, c.v_pages, c.table, c.lengths)
    return step.q.to(device), PagedCache(*(x.to(device) for x in tensors)), step.starts.to(device)


def layers_of(cache, count):
    """Caches of other layers: pages of their own, one table and lengths."""
    return [
        PagedCache(cache.k_pages * (1 + i), cache.v_pages + i, cache.table, cache.lengths)
        for i in range(count)
    ]


@pytest.mark.parametrize("counts", [(1, 1, 2), (1, 70, 3)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_share_a_plan(device, backend, counts):
    """Results are those without it, for layers that look alike and for others."""
    attention = attndsl.compile(WINDOW, backend=backend)
    q, cache, starts = on(device, make_step((30, 90, 40), counts, SHAPE))
    most = {"most_queries": max(counts)}
    plan = attention.plan(cache, starts, len(q), **most)
    others = layers_of(cache, 3)
    # A layer of fewer heads.
    k, v = (x[:, :, :1].clone() for x in (cache.k_pages, cache.v_pages))
    others.append(PagedCache(k, v, cache.table, cache.lengths))
    for each in others:
        for lse in (False, True):
            found = attention.serve(q, each, starts, plan=plan, return_lse=lse)
            wanted = attention.serve(q, each, starts, return_lse=lse, **most)
            pairs = zip(found, wanted, strict=True) if lse else ((found, wanted),)
            for own, other in pairs:
                torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
    # Layers of all heads have one signature for each kind of results, with a plan and without.
    assert len(attention._prepared) == (4 if backend == "decode" else 0)


def test_layers_of_another_backend_are_their_own(device):
    """A checked program looks at the lookups of a step whose plan kernels have been called with."""
    text = "tensor gain[n]: float\nmask = causal(); score = score + gain[kv]"
    q, cache, starts = on(device, make_step((30, 9), (5, 1), SHAPE))
    fast = attndsl.compile(text, backend="decode")
    plan = fast.plan(cache, starts, len(q), most_queries=5)
    few = torch.zeros(4, device=device)
    fast.serve(q, cache, starts, plan=plan, gain=few)
    slow = attndsl.compile(text, backend="reference", checked=True)
    with pytest.raises(attndsl.AttnDSLError, match="gain"):
        slow.serve(q, cache, starts, plan=plan, gain=few)
    assert (len(fast._prepared), len(slow._prepared)) == (1, 0)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_positions_are_those_of_now(device, monkeypatch, kind):
    """A plan that depends on no values serves a step whose positions are written anew."""
    monkeypatch.setattr("attndsl.serving.serve_call.looks_at_values", lambda device: False)
    shape = SHAPE._replace(dtype=torch.bfloat16)
    q, cache, starts = on(device, make_step((30, 9), (5, 1), shape))
    attention = attndsl.compile("causal()", backend="decode")
    index = torch.full((len(q),), 29, dtype=kind, device=device)
    plan = attention.plan(cache, starts, len(q), q_index=index, most_queries=5)
    for position in (29, 3, 7):
        index.fill_(position)
        for _ in range(2):
            found = attention.serve(q, cache, starts, q_index=index, plan=plan)
            wanted = attention.serve(q, cache, starts, q_index=index, most_queries=5)
            assert torch.equal(found, wanted)


def test_layers_are_looked_up(device, monkeypatch):
    """The second layer is neither checked nor prepared; its values and captures are its own."""
    text = "tensor gain[heads]: float\nparam c: float\nmask = causal()\nscore = gain[h] * score + c"
    for program, more in ((WINDOW, {}), (text, {"c": 0.5})):
        attention = attndsl.compile(program, backend="decode")
        q, cache, starts = on(device, make_step((30, 90), (1, 70), SHAPE))
        gains = [torch.rand(4, device=device) for _ in range(3)] if more else [None] * 3
        given = [more if gain is None else {**more, "gain": gain} for gain in gains]
        caches = layers_of(cache, 3)
        wanted = [
            attention.serve(q, each, starts, most_queries=70, **own)
            for each, own in zip(caches, given, strict=True)
        ]
        plan = attention.plan(cache, starts, len(q), most_queries=70)
        attention.serve(q, caches[0], starts, plan=plan, **given[0])

        def fail(*args, **named):
            raise AssertionError("nothing is prepared again")

        with monkeypatch.context() as patch:
            patch.setattr(Serving, "_serve_anew", fail)
            patch.setattr(PagedCache, "validate", fail)
            for each, own, other in zip(caches, given, wanted, strict=True):
                found = attention.serve(q, each, starts, plan=plan, **own)
                torch.testing.assert_close(found, other, atol=1e-5, rtol=1e-5)


def test_layers_of_the_next_step_are_looked_up(device, monkeypatch):
    """Other lengths, starts and addresses have the signature of a step before; positions as well.

    One whose address is no multiple of 16 is launched in another way.
    """
    shape = SHAPE._replace(dtype=torch.bfloat16)
    text, calls = "mask = q >= kv", []
    for counts in ((5, 1), (2, 4)):
        q, cache, starts = on(device, make_step((30, 12), counts, shape, seed=7))
        index = torch.arange(len(q) + 1, device=device).int() * 3
        for own in (index[:-1], index[1:]):
            fresh = attndsl.compile(text, backend="decode")
            wanted = fresh.serve(q, cache, starts, q_index=own, most_queries=5)
            calls.append(((q, cache, starts), own, wanted))
    anew = []
    real = Serving._serve_anew
    monkeypatch.setattr(Serving, "_serve_anew", lambda *args: anew.append(args) or real(*args))
    attention = attndsl.compile(text, backend="decode")
    for (q, cache, starts), own, wanted in calls:
        plan = attention.plan(cache, starts, len(q), q_index=own, most_queries=5)
        found = attention.serve(q, cache, starts, q_index=own, plan=plan)
        assert torch.equal(found, wanted)
    assert len(anew) == 1


def test_the_host_reads_values_once(monkeypatch):
    """On CPUs the plan validates and finds out which requests go together."""
    attention = attndsl.compile(WINDOW)
    step = make_step((30, 90, 40), (1, 5, 5), SHAPE)
    looked = []
    real = PagedCache.validate

    def seen(self, *args):
        looked.append(args)
        real(self, *args)

    monkeypatch.setattr(PagedCache, "validate", seen)
    plan = attention.plan(step.cache, step.starts, len(step.q))
    for each in layers_of(step.cache, 3):
        attention.serve(step.q, each, step.starts, plan=plan)
    assert len(looked) == 1
    assert len(plan.runs) == 2
    step.cache.table[1, 0] = 99
    with pytest.raises(ArgumentError, match="request 1 has page 99"):
        attention.plan(step.cache, step.starts, len(step.q))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_plan_was_not_made_for(device, backend):
    """Each difference is refused in a sentence, also where the tensors' shapes agree."""
    attention = attndsl.compile(WINDOW, backend=backend)
    step = make_step((30, 90), (1, 70), SHAPE)
    q, cache, starts = on(device, step)
    plan = attention.plan(cache, starts, len(q), most_queries=70)

    def refused(match, *args, own=attention, kind=ArgumentError, **named):
        with pytest.raises(kind, match=match):
            own.serve(*args, plan=plan, **named)

    k, v, table, lengths = cache.k_pages, cache.v_pages, cache.table, cache.lengths
    other = attndsl.compile("causal()", backend=backend)
    refused("made by another program", q, cache, starts, own=other)
    refused("another lengths", q, PagedCache(k, v, table, lengths.clone()), starts)
    refused("another table", q, PagedCache(k, v, table.clone(), lengths), starts)
    refused("another starts", q, cache, starts.clone())
    refused("another q_index", q, cache, starts, q_index=torch.zeros(len(q), device=device).int())
    refused("q has 9 tokens", q[:9], cache, starts, kind=ShapeError)
    refused("most_queries and most_chunks are 71 and None", q, cache, starts, most_queries=71)
    halves = [x.unflatten(1, (2, 2)).flatten(0, 1) for x in (k, v)]
    refused(
        "pages of 4, and the cache has pages of 2", q, PagedCache(*halves, table, lengths), starts
    )
    fewer = PagedCache(k[:-1], v[:-1], table, lengths)
    refused("pool of .* pages, and the cache has", q, fewer, starts)
    refused("q is no tensor", 3, cache, starts, kind=ShapeError)
    refused("cache is a int", q, 3, starts)
    with pytest.raises(ArgumentError, match="plan is a int"):
        attention.serve(q, cache, starts, plan=3)
    # The same memory under another name is the same step.
    same = PagedCache(k, v, table[:], lengths[:])
    attention.serve(q, same, starts, plan=plan)
    lengths.add_(0)
    if plan.versions is None:  # Nothing that was found in values, so that layers read what is now.
        assert (torch.device(device).type, backend) == ("cuda", "auto")
        attention.serve(q, cache, starts, plan=plan)
    else:
        refused("have changed since the plan was made", q, cache, starts)


def test_arguments_of_plans():
    """As those of calls."""
    attention = attndsl.compile(WINDOW, backend="decode")
    step = make_step((30, 90), (1, 70), SHAPE)
    for match, args, named in (
        ("cache is a int", (3, step.starts, 73), {}),
        ("tokens is 2.5", (step.cache, step.starts, 2.5), {}),
        ("most_chunks is -1", (step.cache, step.starts, 73), {"most_chunks": -1}),
        ("most_queries is 9, and a request has 70", (step.cache, step.starts, 73),
         {"most_queries": 9}),
        ("there are 9 tokens", (step.cache, step.starts, 9), {}),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=match):
            attention.plan(*args, **named)
    with pytest.raises(ShapeError, match="starts has shape"):
        attention.plan(step.cache, step.starts[1:], 73)


def test_gradients_are_refused_of_layers_too(device):
    """Also of a layer that looks like one before."""
    attention = attndsl.compile(WINDOW, backend="decode")
    q, cache, starts = on(device, make_step((30, 90), (1, 2), SHAPE))
    plan = attention.plan(cache, starts, len(q), most_queries=2)
    attention.serve(q, cache, starts, plan=plan)
    with pytest.raises(UnsupportedError, match="serve is forward only"):
        attention.serve(q.clone().requires_grad_(), cache, starts, plan=plan)


@pytest.mark.gpu
def test_plans_and_graphs():
    """A plan within a graph is made at each replay; one from outside is refused if it is stale."""
    shape = Shape(heads=8, kv_heads=2, dim=64, value_dim=64, page=16, dtype=torch.bfloat16)
    attention = attndsl.compile("causal()", backend="decode")
    # Each request has pages for the lengths of the replay.
    q, cache, starts = on("cuda", make_step((900, 900, 700), (400, 1, 1), shape))
    caches = layers_of(cache, 2)

    def step():
        plan = attention.plan(cache, starts, len(q), most_queries=512, most_chunks=1)
        return [attention.serve(q, each, starts, plan=plan) for each in caches]

    step()
    with no_waiting():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
    cache.lengths.copy_(torch.tensor((30, 900, 650)))
    starts.copy_(torch.tensor((0, 1, 301, 302)))
    graph.replay()
    for own, other in zip(found, step(), strict=True):
        assert torch.equal(own, other)
    stale = attention.plan(cache, starts, len(q), most_queries=512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.lengths.clone()  # torch warns of a graph that has nothing.
        with pytest.raises(ArgumentError, match="made outside of the CUDA graph"):
            attention.serve(q, caches[0], starts, plan=stale)
