"""New keys in pages, and pages of fp8."""

from __future__ import annotations

import pytest
import torch
from support.serving import in_pages

import attndsl
from attndsl import errors
from attndsl.backends.engine.backend import GeneratedBackend

FP8 = torch.float8_e4m3fn
HEADS, DIM, VALUE_DIM, PAGE = 2, 8, 6, 3
LENGTHS = (7, 1, 12)


def empty_cache(dtype, scales=None):
    """Pages without keys, for requests of up to 15 keys."""
    torch.manual_seed(0)
    pages = 17
    table = torch.randperm(pages)[:15].view(3, 5).int()
    pools = [
        torch.full((pages, PAGE, HEADS, width), torch.nan).to(dtype) for width in (DIM, VALUE_DIM)
    ]
    lengths = torch.zeros(3, dtype=torch.int32)
    return attndsl.PagedCache(*pools, table, lengths, *(scales or (None, None)))


def fill(cache, k, v, steps):
    """Append in several steps; requests have other numbers of new keys in each."""
    done = [0] * 3
    for step in steps:
        ends = [min(n, a + m) for n, a, m in zip(LENGTHS, done, step, strict=True)]
        counts = [e - a for e, a in zip(ends, done, strict=True)]
        rows = [
            torch.cat([x[b][a:e] for b, (a, e) in enumerate(zip(done, ends, strict=True))])
            for x in (k, v)
        ]
        cache.lengths.copy_(torch.tensor(ends))
        spare = torch.full((2, HEADS, 1), torch.nan)
        rows = [torch.cat((x, spare.expand(-1, -1, x.shape[2]).to(x.dtype))) for x in rows]
        cache.append(*rows, torch.tensor([0, *counts]).cumsum(0))
        done = ends
    assert tuple(done) == LENGTHS


def drawn(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(n, HEADS, width, generator=generator).to(dtype) for n in LENGTHS]
        for width in (DIM, VALUE_DIM)
    ]


STEPS = [[(20, 20, 20)], [(1, 0, 5), (3, 1, 0), (0, 0, 4), (9, 9, 9)]]


def query(dtype=torch.float32):
    torch.manual_seed(2)
    return torch.randn(6, 4, DIM, dtype=dtype), torch.tensor([0, 3, 4, 6])


@pytest.mark.parametrize("steps", STEPS)
def test_what_was_appended_is_attended_to(steps):
    k, v = drawn()
    cache = empty_cache(torch.float32)
    fill(cache, k, v, steps)
    q, starts = query()
    attention = attndsl.compile("causal()")
    rows = [torch.cat((a, b), -1) for a, b in zip(k, v, strict=True)]
    pool, table = in_pages(rows, PAGE)
    other = attndsl.PagedCache(pool[..., :DIM], pool[..., DIM:], table, cache.lengths)
    assert torch.equal(attention.serve(q, cache, starts), attention.serve(q, other, starts))


def scales_of(kind):
    if kind == "none":
        return None
    if kind == "number":
        return 0.02, 0.03
    if kind == "tensor":
        return torch.tensor(0.02), torch.tensor(0.03)
    if kind == "heads":
        return torch.tensor([0.02, 0.01]), torch.tensor([0.03, 0.05])
    return torch.full((17, PAGE, HEADS), torch.nan), torch.full((17, PAGE, HEADS), torch.nan)


def rounded(rows, kind, which):
    """What fp8 leaves of rows, in fp64."""
    rows = rows.float()
    if kind == "none":
        scale = torch.ones(())
    elif kind in ("number", "tensor"):
        scale = torch.tensor((0.02, 0.03)[which])
    elif kind == "heads":
        scale = torch.tensor(((0.02, 0.01), (0.03, 0.05))[which]).unsqueeze(-1)
    else:
        scale = rows.abs().amax(-1, keepdim=True) / 448
    return (rows / scale).clamp(-448, 448).to(FP8).float() * scale


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("kind", ["none", "number", "tensor", "heads", "positions"])
def test_fp8_pages(kind, most):
    """The program sees scaled scores: a soft cap of them is exact."""
    k, v = drawn(torch.bfloat16)
    cache = empty_cache(FP8, scales_of(kind))
    fill(cache, k, v, STEPS[1])
    q, starts = query(torch.bfloat16)
    attention = attndsl.compile("mask = causal(); score = softcap(score, 2.0) + (score + alibi())")
    found = attention.serve(q, cache, starts, most_queries=most, out_dtype=torch.float32)
    assert attention.serve(q, cache, starts).dtype is torch.bfloat16
    for b, count in enumerate((3, 1, 2)):
        first = int(starts[b])
        wanted = attention(
            q[first : first + count].transpose(0, 1)[None].float(),
            rounded(k[b], kind, 0).transpose(0, 1)[None],
            rounded(v[b], kind, 1).transpose(0, 1)[None],
            q_offset=LENGTHS[b] - count,
        )
        torch.testing.assert_close(found[first : first + count], wanted[0].transpose(0, 1))


def test_numbers_beyond_fp8_become_its_largest():
    cache = empty_cache(FP8, (0.5, 1.0))
    cache.lengths[0] = 1
    k = torch.tensor([1e6, -1e6, 224.0, 0, 0, 0, 0, 0]).expand(1, HEADS, -1)
    cache.append(k, k[..., :VALUE_DIM], torch.tensor([0, 1, 1, 1]))
    stored = cache.k_pages[int(cache.table[0, 0]), 0, 0].float()
    assert stored[:3].tolist() == [448, -448, 448]


def test_rows_of_zeros_have_a_scale():
    cache = empty_cache(FP8, scales_of("positions"))
    cache.lengths[0] = 1
    zeros = torch.zeros(1, HEADS, DIM)
    cache.append(zeros, zeros[..., :VALUE_DIM], torch.tensor([0, 1, 1, 1]))
    assert (cache.k_scale[int(cache.table[0, 0]), 0] == 1).all()


def test_numbers_too_small_for_a_scale_are_zeros():
    cache = empty_cache(FP8, scales_of("positions"))
    cache.lengths[0] = 1
    small = torch.zeros(1, HEADS, DIM)
    small[..., 0] = 1e-44
    cache.append(small, small[..., :VALUE_DIM], torch.tensor([0, 1, 1, 1]))
    page = int(cache.table[0, 0])
    assert (cache.k_scale[page, 0] == 1).all()
    assert (cache.k_pages[page, 0].float() == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_where_no_token_has_a_place_nothing_is_written(dtype, monkeypatch):
    monkeypatch.setattr("attndsl.serving.paged.looks_at_values", lambda device: False)
    cache = empty_cache(dtype, scales_of("positions") if dtype is FP8 else (None, None))
    cache.table.fill_(99)
    cache.lengths.fill_(1)
    before = [x.contiguous().view(torch.uint8).clone() for x in (cache.k_pages, cache.v_pages)]
    k = torch.ones(3, HEADS, DIM)
    cache.append(k, k[..., :VALUE_DIM], torch.tensor([0, 1, 2, 3]))
    for pages, kept in zip((cache.k_pages, cache.v_pages), before, strict=True):
        assert torch.equal(pages.contiguous().view(torch.uint8), kept)
    with pytest.raises(errors.ArgumentError, match="append has no backend 'cpu'"):
        cache.append(k, k[..., :VALUE_DIM], torch.tensor([0, 1, 2, 3]), backend="cpu")


def test_a_kernel_that_cannot_run_is_an_error(monkeypatch):
    cache = empty_cache(torch.float32)
    cache.lengths.fill_(1)
    k = torch.ones(3, HEADS, DIM)
    monkeypatch.setattr(GeneratedBackend, "why_not", lambda self, device: "no GPU")
    with pytest.raises(errors.BackendError, match="cannot run on cpu: no GPU") as caught:
        cache.append(k, k[..., :VALUE_DIM], torch.tensor([0, 1, 2, 3]), backend="decode")
    assert "backend='auto'" in caught.value.hint


def test_nothing_else_is_written():
    cache = empty_cache(torch.float32)
    k, v = drawn()
    fill(cache, k, v, STEPS[1])
    kept = torch.zeros(17, PAGE, dtype=torch.bool)
    for b, length in enumerate(LENGTHS):
        for position in range(length):
            kept[int(cache.table[b, position // PAGE]), position % PAGE] = True
    assert cache.k_pages.isnan().all(-1).all(-1)[~kept].all()
    assert not cache.k_pages[kept].isnan().any()


def test_a_wrong_page_is_refused_or_left_alone(monkeypatch):
    cache = empty_cache(torch.float32)
    cache.lengths.copy_(torch.tensor([1, 1, 1]))
    cache.table[1, 0] = 99
    k = torch.ones(3, HEADS, DIM)
    starts = torch.tensor([0, 1, 2, 3])
    with pytest.raises(errors.ArgumentError, match="request 1 has page 99"):
        cache.append(k, k[..., :VALUE_DIM], starts)
    monkeypatch.setattr("attndsl.serving.paged.looks_at_values", lambda device: False)
    cache.append(k, k[..., :VALUE_DIM], starts)
    assert (cache.k_pages == 1).sum() == 2 * HEADS * DIM


def test_scales_are_checked():
    cache = empty_cache(FP8)
    parts = cache.k_pages, cache.v_pages, cache.table, cache.lengths
    for scale, kind in (
        (torch.ones(3), errors.ShapeError),
        (torch.ones(2).half(), errors.DTypeError),
        ("1", errors.DTypeError),
        (True, errors.DTypeError),
    ):
        with pytest.raises(kind, match="v_scale"):
            attndsl.PagedCache(*parts, None, scale)
    with pytest.raises(errors.DTypeError, match="and v_pages torch"):
        attndsl.PagedCache(cache.k_pages, cache.v_pages.float(), cache.table, cache.lengths)
