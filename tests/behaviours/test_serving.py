"""Packed requests over pages give what a dense call of each request gives."""

from __future__ import annotations

import pytest
import torch
from support.serving import Shape, make_step, one_by_one

import attndsl
from attndsl import errors
from attndsl.passes.int_ranges import POSITION_LIMIT

LENGTHS, COUNTS = (7, 1, 13, 5, 9, 2), (1, 1, 6, 0, 3, 2)
PROGRAMS = {
    "causal": "causal()",
    "all": "score * 1.5",
    "window": "mask = causal_lower_right() and (q - kv < 5 or kv < 2); score = softcap(score, 9.0)",
    "sizes": "mask = causal(); score = score + alibi() + kv_len / 7 - q_len / 9 + 0.1 * b / batch",
    "sigmoid": "mask = causal(); weights = sigmoid(score - log(float(kv_len)))",
    "none": "q - kv < -100",
    "heads": "mask = causal() and q - kv < 3 * (h + 1); score = score + hkv / kv_heads",
}


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
def test_each_request_has_what_it_has_alone(text, page):
    attention = attndsl.compile(text)
    step = make_step(LENGTHS, COUNTS, Shape(page=page))
    weights = attention.lowered.program.weights is not None
    dense = attndsl.compile(text.split("; weights")[0]) if weights else attention
    wanted, sums = one_by_one(dense, step)
    if weights:
        wanted = _outputs(attention, step)
    for most in (None, 6, 9):
        found = attention.serve(step.q, step.cache, step.starts, most_queries=most)
        same(found, wanted)
        if not weights:
            _, lse = attention.serve(
                step.q, step.cache, step.starts, most_queries=most, return_lse=True
            )
            same(lse, sums)


def _outputs(attention, step):
    """Of programs without a log-sum-exp."""
    found = torch.zeros(len(step.q), 4, 6, dtype=torch.float64)
    for b, count in enumerate(step.counts):
        if count:
            first, length = int(step.starts[b]), len(step.k[b])
            q = step.q[first : first + count].transpose(0, 1)[None]
            k, v = (x[b].transpose(0, 1)[None] for x in (step.k, step.v))
            rows = attention(
                q, k, v, q_offset=length - count, q_len=length, batch=len(step.counts), b_offset=b
            )
            found[first : first + count] = rows[0].transpose(0, 1)
    return found


def test_captures_are_by_request_by_head_and_by_the_room():
    attention = attndsl.compile("""
param near: int
tensor doc[batch, kv_len]: int
tensor gain[heads]: float
tensor slope[batch, heads]: float
tensor logit[heads]: float
mask = causal() and doc[b, q] == doc[b, kv] and q - kv < near
score = gain[h] * score - slope[b, h] * (q - kv)
sink = logit[h]
""")
    step = make_step(LENGTHS, COUNTS)
    doc = torch.randint(0, 2, (6, step.cache.room)).cumsum(1) // 4
    given = {"gain": torch.randn(4), "logit": torch.randn(4), "slope": torch.rand(6, 4), "near": 6}
    wanted, sums = one_by_one(
        attention, step, lambda b, length, count: {**given, "doc": doc[:, :length]}
    )
    found, lse = attention.serve(step.q, step.cache, step.starts, return_lse=True, doc=doc, **given)
    same(found, wanted)
    same(lse, sums)
    with pytest.raises(errors.ShapeError, match="doc has 9 elements along dim 1"):
        attention.serve(step.q, step.cache, step.starts, doc=doc[:, :9], **given)
    with pytest.raises(errors.ShapeError, match="slope has 2 elements"):
        attention.serve(
            step.q, step.cache, step.starts, doc=doc, **{**given, "slope": torch.rand(2, 4)}
        )


def test_optional_captures_and_captures_of_size_one():
    text = "tensor seen[batch, kv_len]: bool = none\nmask = causal() and seen[b, kv]"
    step = make_step(LENGTHS, COUNTS)
    attention = attndsl.compile(text)
    plain, _ = one_by_one(attndsl.compile("causal()"), step)
    same(attention.serve(step.q, step.cache, step.starts), plain)
    seen = torch.rand(1, step.cache.room) < 0.7
    each = attention.serve(step.q, step.cache, step.starts, seen=seen.expand(6, -1))
    same(attention.serve(step.q, step.cache, step.starts, seen=seen), each)
    assert not torch.equal(each, plain)


INKLING = """
tensor rel[tokens, heads, extent]: float
mask = causal()
score = score + where(q - kv < extent, rel[token, h, clamp(q - kv, 0, extent - 1)], 0.0)
"""


@pytest.mark.parametrize("most", [None, 6])
def test_tokens_count_the_packed_rows(most):
    attention = attndsl.compile(INKLING)
    step = make_step(LENGTHS, COUNTS)
    rel = torch.randn(len(step.q), 4, 5, dtype=torch.float64)

    def of_request(b, length, count):
        first = int(step.starts[b])
        own = torch.zeros(6 * length, 4, 5, dtype=torch.float64)
        own[(b + 1) * length - count : (b + 1) * length] = rel[first : first + count]
        return {"rel": own}

    wanted, _ = one_by_one(attention, step, of_request)
    found = attention.serve(step.q, step.cache, step.starts, rel=rel, most_queries=most)
    same(found, wanted)
    with pytest.raises(errors.ShapeError, match="declared as tokens, which is 15"):
        attention.serve(step.q, step.cache, step.starts, rel=rel[:7])


TREE = """
tensor context[batch]: int
tensor ancestor[tokens, n]: bool
mask = kv < context[b] or ancestor[token, max(kv - context[b], 0)]
"""


@pytest.mark.parametrize("most", [None, 6])
def test_a_tree_of_drafts(most):
    """Each draft sees the context and its ancestors, by positions that siblings share."""
    counts = (5, 1, 3)
    lengths = (11, 8, 3)
    step = make_step(lengths, counts)
    parents = [(-1, 0, 0, 1, 2), (-1,), (-1, -1, 1)]
    ancestor = torch.zeros(len(step.q), 5, dtype=torch.bool)
    depth = torch.zeros(len(step.q), dtype=torch.int64)
    for b, tree in enumerate(parents):
        for i, parent in enumerate(tree):
            token = int(step.starts[b]) + i
            ancestor[token, i] = True
            if parent >= 0:
                above = int(step.starts[b]) + parent
                ancestor[token] |= ancestor[above]
                depth[token] = depth[above] + 1
    context = torch.tensor(lengths) - torch.tensor(counts)
    of_request = torch.arange(3).repeat_interleave(torch.tensor(counts))
    index = torch.zeros_like(depth)
    index[:9] = context[of_request] + depth[:9]
    text = TREE + "score = score - 0.25 * (q - min(kv, context[b]))"
    found, lse = attndsl.compile(text).serve(
        step.q, step.cache, step.starts, q_index=index, return_lse=True, most_queries=most,
        context=context, ancestor=ancestor,
    )  # fmt: skip
    for token in range(9):
        b = int(of_request[token])
        k, v = (x[b].repeat_interleave(2, 1) for x in (step.k, step.v))
        slots = torch.arange(lengths[b])
        sees = slots < context[b]
        sees[context[b] :] = ancestor[token, : counts[b]]
        scores = torch.einsum("hd,nhd->hn", step.q[token], k) * 8**-0.5
        scores = scores - 0.25 * (index[token] - slots.clamp(max=int(context[b])))
        scores = torch.where(sees, scores, -torch.inf)
        same(found[token], torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
        same(lse[token], scores.logsumexp(-1))
    assert (found[9:] == 0).all()


def test_layouts_of_engines_are_strides():
    attention = attndsl.compile("causal() and q - kv < 6")
    shape = Shape(dim=8, value_dim=8)
    step = make_step(LENGTHS, COUNTS, shape)
    cache = step.cache
    wanted = attention.serve(step.q, cache, step.starts)
    heads_first = [x.transpose(1, 2).contiguous() for x in (cache.k_pages, cache.v_pages)]
    joined = torch.cat(heads_first, -1)  # (pages, heads, size, 2 * dim)
    pairs = torch.stack((cache.k_pages, cache.v_pages), 1)  # (pages, 2, size, heads, dim)
    for k, v in (
        [x.transpose(1, 2) for x in heads_first],
        [x.transpose(1, 2) for x in (joined[..., :8], joined[..., 8:])],
        pairs.unbind(1),
    ):
        other = attndsl.PagedCache(k, v, cache.table.long(), cache.lengths.int())
        assert torch.equal(attention.serve(step.q, other, step.starts.int()), wanted)


def test_a_part_of_the_heads():
    text = (
        "tensor gain[heads]: float\nmask = causal() and q - kv < 4 + h\n"
        "score = gain[h] * (score + alibi())"
    )
    attention = attndsl.compile(text)
    step = make_step(LENGTHS, COUNTS)
    gain = torch.rand(4)
    wanted = attention.serve(step.q, step.cache, step.starts, gain=gain)
    c = step.cache
    half = attndsl.PagedCache(c.k_pages[:, :, 1:], c.v_pages[:, :, 1:], c.table, c.lengths)
    for given in (gain, gain[2:]):
        found = attention.serve(
            step.q[:, 2:], half, step.starts, heads=4, kv_heads=2, h_offset=2, gain=given
        )
        same(found, wanted[:, 2:])


def test_chunks_of_a_prompt_are_the_prompt():
    attention = attndsl.compile("mask = causal() and q - kv < 7; score = softcap(score, 5.0)")
    step = make_step((12,), (12,), Shape(spare=0))
    whole = attention.serve(step.q, step.cache, step.starts)
    c, begin = step.cache, 0
    for end in (3, 4, 9, 12):
        cache = attndsl.PagedCache(c.k_pages, c.v_pages, c.table, torch.tensor([end]))
        found = attention.serve(step.q[begin:end], cache, torch.tensor([0, end - begin]))
        same(found, whole[begin:end])
        begin = end


def test_halves_and_wider_results():
    attention = attndsl.compile("causal()")
    step = make_step(LENGTHS, COUNTS, Shape(dtype=torch.bfloat16))
    found = attention.serve(step.q, step.cache, step.starts)
    wide, lse = attention.serve(
        step.q, step.cache, step.starts, out_dtype=torch.float32, return_lse=True
    )
    assert (found.dtype, wide.dtype, lse.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(wide.bfloat16(), found)


def test_parts_of_the_keys_merge():
    """A prefix that requests share, and their own keys behind it."""
    program = attndsl.compile("tensor logit[heads]: float\nscore = score\nsink = logit[h]")
    part, logit = program.without_sink(), torch.randn(4)
    step = make_step((6, 9), (2, 3), Shape(spare=0))
    shared = make_step((5,), (0,), Shape(spare=0), seed=1)
    outs = [part.serve(step.q, step.cache, step.starts, return_lse=True, logit=logit)]
    c = shared.cache
    all_of_it = attndsl.PagedCache(c.k_pages, c.v_pages, c.table, c.lengths)
    outs.append(
        part.serve(step.q, all_of_it, torch.tensor([0, 5]), return_lse=True, logit=logit)
    )  # fmt: skip
    rows = [(out.transpose(0, 1)[None], lse.T[None]) for out, lse in outs]
    out, _ = attndsl.merge(rows, sink=logit.double())
    first = slice(0, 2)
    k, v = (
        torch.cat((x[0], y[0])).transpose(0, 1)[None]
        for x, y in ((shared.k, step.k), (shared.v, step.v))
    )
    wanted = program(step.q[first].transpose(0, 1)[None], k, v, logit=logit)
    same(out[:, :, first], wanted)


@pytest.mark.parametrize(
    ("lengths", "counts", "spare"),
    [((), (), 0), ((), (), 3), ((4, 3), (0, 0), 1), ((0, 3), (0, 2), 0)],
)
@pytest.mark.parametrize("most", [None, 2])
def test_nothing_to_do(lengths, counts, spare, most):
    attention = attndsl.compile("causal()")
    step = make_step(lengths or (1,), counts or (0,), Shape(spare=spare))
    cache, starts = step.cache, step.starts
    if not lengths:
        cache = attndsl.PagedCache(cache.k_pages, cache.v_pages, cache.table[:0], cache.lengths[:0])
        starts = starts[:1]
    found = attention.serve(step.q, cache, starts, most_queries=most)
    assert found.shape == (len(step.q), 4, 6)
    assert found.isfinite().all()
    assert (found[sum(counts) :] == 0).all()


BAD = {
    "a page": (lambda c, s: c.table[2].fill_(77), "request 2 has page 77 for its keys from 0 on"),
    "a negative page": (
        lambda c, s: c.table[4, 1:].fill_(-1),
        "request 4 has page -1 .* from 4 on",
    ),
    "a length": (lambda c, s: c.lengths[3:].fill_(99), "request 3 has length 99"),
    "a negative length": (lambda c, s: c.lengths[1:2].fill_(-2), "request 1 has length -2"),
    "starts": (lambda c, s: s[3:4].fill_(1), "starts falls at request 2: from 2 to 1"),
    "tokens": (lambda c, s: s[6:].fill_(50), "starts goes from 0 to 50, and there are 15 tokens"),
    "a start": (lambda c, s: s[:1].fill_(-1), "starts goes from -1"),
    "queries": (
        lambda c, s: c.lengths[2:3].fill_(5),
        "request 2 has 6 queries, and its length is 5",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_bad_values_are_named(spoil, message):
    step = make_step(LENGTHS, COUNTS)
    step.cache.validate(step.starts, len(step.q))
    spoil(step.cache, step.starts)
    with pytest.raises(errors.ArgumentError, match=message) as caught:
        step.cache.validate(step.starts, len(step.q))
    assert caught.value.hint
    with pytest.raises(errors.ArgumentError, match=message):
        attndsl.compile("causal()").serve(step.q, step.cache, step.starts)


def test_bad_values_spoil_their_own_request_alone(monkeypatch):
    """Where nobody looks, as on GPUs, nothing outside of the pool is read."""
    attention = attndsl.compile("causal()")
    step = make_step(LENGTHS, COUNTS)
    wanted = attention.serve(step.q, step.cache, step.starts)
    monkeypatch.setattr("attndsl.serving.serve_call.looks_at_values", lambda device: False)
    step.cache.table[2] = torch.tensor([1 << 30, -5, 1 << 30, -1, 3])
    step.cache.lengths[4] = 1000
    found = attention.serve(step.q, step.cache, step.starts, most_queries=6)
    good = [0, 1, 11, 12, 13, 14]
    same(found[good], wanted[good])
    step.starts[5] = 1 << 40
    attention.serve(step.q, step.cache, step.starts, most_queries=6)


REFUSED = [
    (lambda a, s, c: a.serve(s.q[:, :3], c, s.starts), errors.ShapeError, "2 heads of dim 8"),
    (lambda a, s, c: a.serve(s.q[0], c, s.starts), errors.ShapeError, "q has shape"),
    (lambda a, s, c: a.serve(s.q.float(), c, s.starts), errors.DTypeError, "q is torch.float32"),
    (lambda a, s, c: a.serve(s.q, c.table, s.starts), errors.ArgumentError, "cache is a Tensor"),
    (lambda a, s, c: a.serve(s.q, c, s.starts[:-1]), errors.ShapeError, "starts has shape"),
    (lambda a, s, c: a.serve(s.q, c, s.starts.float()), errors.DTypeError, "starts is no int"),
    (lambda a, s, c: a.serve(s.q, c, s.starts, q_index=s.starts), errors.ShapeError, "q_index"),
    (
        lambda a, s, c: a.serve(s.q, c, s.starts, q_index=torch.full((len(s.q),), 1 << 31)),
        errors.ArgumentError,
        "q_index has values",
    ),
    (
        lambda a, s, c: a.serve(s.q, c, s.starts, q_index=torch.full((len(s.q),), POSITION_LIMIT)),
        errors.ArgumentError,
        "q_index has values",
    ),
    (
        lambda a, s, c: a.serve(s.q, c, s.starts, q_index=torch.full((len(s.q),), -POSITION_LIMIT)),
        errors.ArgumentError,
        "q_index has values",
    ),
    (lambda a, s, c: a.serve(s.q, c, s.starts, most_queries=2), errors.ArgumentError, "has 6 quer"),
    (lambda a, s, c: a.serve(s.q, c, s.starts, most_queries=-1), errors.ArgumentError, "is -1"),
    (lambda a, s, c: a.serve(s.q, c, s.starts, out_dtype="x"), errors.DTypeError, "out_dtype is x"),
    (lambda a, s, c: a.serve(s.q, c, s.starts, gain=1), errors.ArgumentError, "gain"),
    (
        lambda a, s, c: a.serve(s.q.requires_grad_(), c, s.starts),
        errors.UnsupportedError,
        "forward only",
    ),
    (
        lambda a, s, c: a.serve(
            s.q,
            attndsl.PagedCache(
                *(torch.zeros_like(x).to(torch.float8_e4m3fn) for x in (c.k_pages, c.v_pages)),
                c.table,
                c.lengths,
                torch.ones(2, requires_grad=True),
            ),
            s.starts,
        ),
        errors.UnsupportedError,
        "forward only",
    ),
    (
        lambda a, s, c: attndsl.compile("weights = dropout(softmax(score), 0.5)").serve(
            s.q, c, s.starts
        ),
        errors.UnsupportedError,
        "dropout",
    ),
    (
        lambda a, s, c: attndsl.compile("weights = sigmoid(score)").serve(
            s.q, c, s.starts, return_lse=True
        ),
        errors.UnsupportedError,
        "log-sum-exp",
    ),
    (lambda a, s, c: c.append(s.q, s.q, s.starts), errors.ShapeError, "k has shape"),
    (
        lambda a, s, c: attndsl.PagedCache(c.k_pages, c.v_pages[:1], c.table, c.lengths),
        errors.ShapeError,
        "v_pages is",
    ),
    (
        lambda a, s, c: attndsl.PagedCache(c.k_pages.int(), c.v_pages, c.table, c.lengths),
        errors.DTypeError,
        "int32",
    ),
    (
        lambda a, s, c: attndsl.PagedCache(c.k_pages.mT, c.v_pages, c.table, c.lengths),
        errors.ShapeError,
        "stride",
    ),
    (
        lambda a, s, c: attndsl.PagedCache(c.k_pages, c.v_pages, c.table[0], c.lengths),
        errors.ShapeError,
        "table has shape",
    ),
    (
        lambda a, s, c: attndsl.PagedCache(c.k_pages, c.v_pages, c.table, c.lengths[:2]),
        errors.ShapeError,
        "lengths 2",
    ),
    (
        lambda a, s, c: attndsl.PagedCache(c.k_pages, c.v_pages, c.table, c.lengths, 0.5),
        errors.ArgumentError,
        "k_scale is given",
    ),
]


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED)
def test_refusals(make, kind, message):
    step = make_step(LENGTHS, COUNTS)
    with pytest.raises(kind, match=message) as caught:
        make(attndsl.compile("causal()"), step, step.cache)
    assert caught.value.hint


def test_dropout_that_a_call_leaves_out():
    text = "param p: float = none\nmask = causal()\nweights = dropout(softmax(score), p)"
    attention = attndsl.compile(text)
    step = make_step(LENGTHS, COUNTS)
    wanted = attndsl.compile("causal()").serve(step.q, step.cache, step.starts)
    same(attention.serve(step.q, step.cache, step.starts, return_lse=True)[0], wanted)
    with pytest.raises(errors.UnsupportedError, match="dropout"):
        attention.serve(step.q, step.cache, step.starts, p=0.5)


def test_without_gradients_learned_captures_serve():
    attention = attndsl.compile("tensor gain[heads]: float\nscore = gain[h] * score")
    step = make_step(LENGTHS, COUNTS)
    gain = torch.ones(4, requires_grad=True)
    with pytest.raises(errors.UnsupportedError, match="forward only"):
        attention.serve(step.q, step.cache, step.starts, gain=gain)
    with torch.no_grad():
        attention.serve(step.q, step.cache, step.starts, gain=gain)


def test_graphs_are_refused():
    attention = attndsl.compile("causal()")
    step = make_step(LENGTHS, COUNTS)
    call = torch.compile(
        lambda q: attention.serve(q, step.cache, step.starts), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="serve"):
        call(step.q)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_backends_and_checked_mode(backend):
    step = make_step(LENGTHS, COUNTS)
    wanted = attndsl.compile("causal()").serve(step.q, step.cache, step.starts)
    same(
        attndsl.compile("causal()", backend=backend).serve(step.q, step.cache, step.starts), wanted
    )
    by_token = "tensor gain[tokens]: float\nmask = causal(); score = score * gain[token]"
    checked = attndsl.compile(by_token, checked=True)
    # Rows of room look up what no token has.
    end = int(step.starts[-1])
    gain = torch.ones(end)
    same(
        checked.serve(step.q[:end], step.cache, step.starts, most_queries=6, gain=gain),
        wanted[:end],
    )
    checked = attndsl.compile("tensor t[3]: float\nscore = score + t[kv]", checked=True)
    with pytest.raises(errors.ArgumentError, match="t"):
        checked.serve(step.q, step.cache, step.starts, t=torch.zeros(3))


@pytest.mark.parametrize("values", [[-1, 1, 2], [0, 1, 3]])
def test_starts_outside_the_tokens_are_refused(values):
    """Each of the two by itself."""
    pages = torch.zeros(4, 2, 1, 8)
    table, lengths = torch.arange(4).reshape(2, 2).int(), torch.tensor([3, 2]).int()
    cache = attndsl.PagedCache(pages, pages, table, lengths)
    with pytest.raises(errors.ArgumentError, match=f"from {values[0]} to {values[-1]}, and there"):
        cache.validate(torch.tensor(values), 2)
