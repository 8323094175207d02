"""A part of a call means what the whole means, on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.parts import (
    PROGRAMS,
    RAGGED,
    SPLITS,
    Cut,
    Sizes,
    call_part,
    entries_of,
    make_case,
    part_of_whole,
    parts_of,
    ragged_of,
    results,
    share_of,
    whole_of,
)

import attndsl
from attndsl.errors import UnsupportedError

BACKENDS = ("reference", "cpu")


def _same(found, wanted, at):
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{at} {n}: {text}"
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", SPLITS)
def test_parts_equal_the_whole(backend, split):
    for name in PROGRAMS:
        torch.manual_seed(0)
        case = make_case(name, backend)
        whole = results(part_of_whole(whole_of(case), case, split), case.leaves())
        for shares in (False, True):
            found = results(parts_of(case, split, shares), case.leaves())
            _same(found, whole, (name, shares))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RAGGED)
def test_entries_of_their_own_lengths(backend, name):
    sizes = Sizes(batch=4, q_len=3)
    offsets, lengths = torch.tensor([5, 0, 30, 12]), torch.tensor([8, 3, 33, 40])
    for kind in (torch.int64, torch.int32):
        torch.manual_seed(0)
        case = make_case(name, backend, sizes=sizes, programs=RAGGED)
        found = ragged_of(case, offsets.to(kind), lengths.to(kind))
        found = results(found, case.leaves())
        _same(found, results(entries_of(case, offsets, lengths), case.leaves()), name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_entries_without_keys(backend):
    case = make_case("sinks", backend, sizes=Sizes(batch=2), programs=RAGGED)
    out, lse = ragged_of(case, torch.tensor([9, 9]), torch.tensor([0, 40]))
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert (lse[1] > -torch.inf).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["index", "tensor"])
def test_rows_that_tensors_place(backend, how):
    rows = torch.tensor([3, 17, 0, 11, 23]) if how == "index" else torch.arange(7, 12)
    options = {"q_index": rows} if how == "index" else {"q_offset": torch.tensor(7)}
    for name in PROGRAMS:
        torch.manual_seed(0)
        case = make_case(name, backend)
        softmax = case.lowered.program.weights is None
        out, lse = whole_of(case)
        wanted = out[:, :, rows], None if lse is None else lse[:, :, rows]
        wanted = results(wanted, case.leaves())
        cut = Cut(*[slice(None)] * 3, rows, slice(None))
        for captures in (case.captures, {n: share_of(case, n, cut) for n in case.captures}):
            found = case.attention(
                case.q[:, :, rows], case.k, case.v, q_len=24, return_lse=softmax, **options,
                **captures, **case.options,
            )  # fmt: skip
            found = found if softmax else (found, None)
            _same(results(found, case.leaves()), wanted, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_by_rows_that_only_tensors_know(backend):
    case = make_case("dropout", backend)
    text = "tensor t[q_len]: float; score = score + t[q]; weights = dropout(softmax(score), 0.5)"
    attention = attndsl.compile(text, backend=backend)
    q, t = case.q[:, :, 3:9], torch.zeros(24, dtype=torch.float64)
    options = {"q_len": 24, "seed": 5}
    whole = attention(case.q, case.k, case.v, t=t, seed=5)[:, :, 3:9]
    for offset in (3, torch.tensor(3)):
        found = attention(q, case.k, case.v, t=t, q_offset=offset, **options)
        torch.testing.assert_close(found, whole)
    found = attention(q, case.k, case.v, t=t[3:9], q_offset=3, **options)
    torch.testing.assert_close(found, whole)
    with pytest.raises(UnsupportedError, match="pass the captures whole") as refusal:
        attention(q, case.k, case.v, t=t[3:9], q_offset=torch.tensor(3), **options)
    assert "q_len is given" in str(refusal.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_alone_count_dropout_by_rows_of_the_call(backend):
    attention = attndsl.compile("weights = dropout(softmax(score), 0.5)", backend=backend)
    q, k, v = (torch.randn(1, 2, 32, 8) for _ in range(3))
    first = attention(q[:, :, :16], k, v, seed=3)
    assert torch.equal(attention(q[:, :, :16], k, v, seed=3, q_offset=16), first)
    assert not torch.equal(attention(q[:, :, :16], k, v, seed=3, q_offset=16, q_len=32), first)


@pytest.mark.parametrize("name", ["slopes", "bias", "sink", "dropout", "alibi"])
def test_higher_derivatives_and_transforms(name):
    """Made of torch operations on some rows at a time, which count their own rows too."""
    torch.manual_seed(0)
    case = make_case(name, "cpu")
    part = {"q_len": 24, "q_offset": 8, "h_offset": 2, "heads": 4, "kv_heads": 2}
    captures = {**case.captures, **case.options}

    def whole(q):
        return case.attention(q, case.k, case.v, **captures)[:, 2:, 8:]

    def own(q):
        rest = case.k[:, 1:], case.v[:, 1:]
        return case.attention(q[:, 2:, 8:], *rest, **captures, **part)

    tangent = torch.randn_like(case.q)
    for function in (
        lambda f: torch.func.jvp(f, (case.q,), (tangent,))[1],
        lambda f: torch.func.grad(lambda q: f(q).square().sum())(case.q.detach()),
        lambda f: torch.autograd.grad(
            torch.autograd.grad(f(case.q).square().sum(), case.q, create_graph=True)[0].sum(),
            case.q,
        )[0],
        lambda f: torch.func.vmap(f)(torch.stack([case.q, 2 * case.q])),
    ):
        torch.testing.assert_close(function(own), function(whole))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["slopes", "gains", "bias", "key slopes", "neighbours", "sink"])
def test_gradients_of_given_results(backend, name):
    """Of whole tensors, whose other rows get zeros, and of shares."""
    torch.manual_seed(0)
    case = make_case(name, backend)
    cut = Cut(slice(1, 2), slice(2, 4), slice(1, 2), slice(8, 24), slice(0, 40))
    names = [n for n, x in case.captures.items() if x.is_floating_point()]
    back = torch.randn(1, 2, 16, 8, dtype=torch.float64)
    for shares in (False, True):
        out, lse = call_part(case, cut, shares)
        leaves = [case.q, case.k, case.v, *(case.captures[n] for n in names)]
        wanted = torch.autograd.grad(out, leaves, back)
        given = {n: share_of(case, n, cut) if shares else x for n, x in case.captures.items()}
        found = case.attention.backward(
            case.q[cut.b, cut.h, cut.q], case.k[cut.b, cut.hkv], case.v[cut.b, cut.hkv],
            out.detach(), lse.detach(), back, wants_captures=names, batch=2, b_offset=1, heads=4,
            h_offset=2, kv_heads=2, q_len=24, q_offset=8, **given,
        )  # fmt: skip
        torch.testing.assert_close(found.q, wanted[0][cut.b, cut.h, cut.q])
        torch.testing.assert_close(found.k, wanted[1][cut.b, cut.hkv])
        for n, whole in zip(names, wanted[3:], strict=True):
            own = share_of(case, n, cut) if shares else case.captures[n]
            assert found.captures[n].shape == own.shape
            part = whole
            if shares:
                part = share_of(replace(case, captures={**case.captures, n: whole}), n, cut)
            torch.testing.assert_close(found.captures[n], part)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_in_parts_of_some_heads_put_together(backend):
    torch.manual_seed(0)
    text = "tensor s[heads]: float\nmask = causal_lower_right(); score = score + alibi()\n"
    attention = attndsl.compile(f"{text}sink = s[h] + 0.1 * h - 0.01 * kv_len", backend=backend)
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (24, 40, 40))
    s = torch.randn(4, dtype=torch.float64, requires_grad=True)
    whole = attention(q, k, v, s=s, return_lse=True)
    heads = {"heads": 4, "kv_heads": 4, "h_offset": 2}
    parts = [
        attention.without_sink()(
            q[:, 2:], k[:, 2:, keys], v[:, 2:, keys], s=s, kv_len=40, kv_offset=keys.start,
            return_lse=True, **heads,
        )
        for keys in (slice(0, 13), slice(13, 40))
    ]  # fmt: skip
    first = slice(0, 13)
    sink = attention.sink_logits(q[:, 2:], k[:, 2:, first], s=s, kv_len=40, **heads)
    out, lse = attndsl.merge(parts, sink=sink)
    torch.testing.assert_close(out, whole[0][:, 2:])
    torch.testing.assert_close(lse, whole[1][:, 2:])
    found, wanted = (torch.autograd.grad(x.sum(), s)[0] for x in (lse, whole[1][:, 2:]))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_of_either_side_of_a_product_of_rows(backend):
    """Rows of q are the left side's, keys the right side's; each may be the part's own."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 10, 8, generator=generator) for _ in range(3))
    rows, keys = (torch.randn(4, 10, 3, generator=generator) for _ in range(2))
    attention = attndsl.compile(
        "tensor rows[heads, q_len, n]: float; tensor keys[heads, kv_len, n]: float\n"
        "score = score + dot(rows[h, q, :], keys[h, kv, :])",
        backend=backend,
    )
    whole = attention(q, k, v, rows=rows, keys=keys)
    found = attention(
        q[:, 1:3, 2:7], k[:, 1:3], v[:, 1:3], rows=rows[1:3, 2:7], keys=keys[1:3], h_offset=1,
        heads=4, kv_heads=4, q_offset=2, q_len=10,
    )  # fmt: skip
    torch.testing.assert_close(found, whole[:, 1:3, 2:7], atol=1e-5, rtol=1e-5)
    parts = [
        attention(
            q, k[:, :, cut], v[:, :, cut], rows=rows, keys=keys[:, cut], kv_offset=cut.start,
            kv_len=10, return_lse=True,
        )
        for cut in (slice(0, 4), slice(4, 10))
    ]  # fmt: skip
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    weights = torch.softmax(lses, 0)[..., None]
    torch.testing.assert_close((weights * outs).sum(0), whole, atol=1e-5, rtol=1e-5)
