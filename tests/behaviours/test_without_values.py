"""Calls whose tensors show no values: fake and meta tensors, make_fx, and torch.func's vmap."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import attndsl
from attndsl.compat import flash_attn_varlen_func, flash_attn_with_kvcache
from attndsl.flex import create_block_mask, flex_attention
from attndsl.flex import trace as trace_of

TABLE = [[0, 1], [2, 3]]
CAUSAL = attndsl.compile("causal()")
DOCUMENTS = attndsl.compile("tensor doc[kv_len]: int; mask = causal() and doc[q] == doc[kv]")


def same_document(doc):
    return lambda b, h, i, j: (i >= j) & (doc[i] == doc[j])


def blocks_of(doc):
    return create_block_mask(
        same_document(doc), None, None, 20, 20, device=doc.device, BLOCK_SIZE=8
    )


def by_blocks(x, doc):
    return flex_attention(x, x, x, block_mask=blocks_of(doc))


def blocks(x, doc):
    made = blocks_of(doc)
    return torch.cat([made.kv_num_blocks.flatten(), made.kv_indices.flatten()])


def by_replaced_blocks(x, doc):
    made = blocks_of(doc)
    made.mask_mod = same_document(doc)
    return flex_attention(x, x, x, block_mask=made)


def by_where(x, doc):
    return flex_attention(
        x, x, x, lambda s, b, h, i, j: torch.where(same_document(doc)(b, h, i, j), s, -torch.inf)
    )


def made_within(x, doc):
    def score(s, b, h, i, j):
        return s * 0.5 + torch.tensor([0.1, 0.2], device=s.device)[h]

    return flex_attention(x, x, x, score)


def tiles(x, doc):
    return DOCUMENTS.tiles(20, 20, doc=doc, block_m=8, block_n=8).kinds


def varlen(x, doc):
    starts = (doc.diff() != 0).cumsum(0).argmax().to(torch.int32)
    starts = torch.stack([starts * 0, starts + 1, starts * 0 + 20]).to(torch.int32)
    packed = x[0].transpose(0, 1)
    return flash_attn_varlen_func(packed, packed, packed, starts, starts, 20, 20, causal=True)


def appended(x, doc):
    cache, new = (
        x.transpose(1, 2).repeat(2, 1, 1, 1),
        x[:, :, :1].transpose(1, 2).repeat(2, 1, 1, 1),
    )
    lengths = doc[-2:].to(torch.int32)
    return flash_attn_with_kvcache(
        new, cache, cache.clone(), new, new, cache_seqlens=lengths, causal=True
    )


def part(x, doc):
    lengths = doc[-1:].to(torch.int32)
    return CAUSAL(x[:, :, :1], x, x, q_offset=lengths, kv_lengths=lengths + 1)


def pages(x, doc):
    # (pages, size, heads, dim)
    pool = x[0].transpose(0, 1).reshape(5, 4, 2, 8)
    table = torch.tensor(TABLE, dtype=torch.int32, device=x.device)
    lengths = doc[:2].to(torch.int32) + 3
    starts = torch.tensor([0, 1, 3], dtype=torch.int32, device=x.device)
    return attndsl.PagedCache(pool.clone(), pool.clone(), table, lengths), starts


def served(x, doc):
    cache, starts = pages(x, doc)
    return CAUSAL.serve(x[0, :, :3].transpose(0, 1), cache, starts)


def paged(x, doc):
    cache, starts = pages(x, doc)
    rows = x[0, :, :3].transpose(0, 1)
    cache.append(rows, rows, starts)
    return cache.k_pages


ALL = [
    by_blocks, blocks, by_replaced_blocks, by_where, made_within, tiles, varlen, appended, part,
    served, paged,
]  # fmt: skip


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 2, 20, 8, generator=generator)
    return x, (torch.rand(20, generator=generator) < 0.3).cumsum(0)


@pytest.mark.parametrize("call", ALL)
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_shapes_are_those_of_real_tensors(call, kind):
    x, doc = inputs()
    expected = call(x, doc)
    if kind == "fake":
        with FakeTensorMode() as mode:
            found = call(mode.from_tensor(x), mode.from_tensor(doc))
    else:
        found = call(x.to("meta"), doc.to("meta"))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("call", [call for call in ALL if call not in (served,)])
def test_graphs_of_make_fx_hold_no_values(call):
    graph = make_fx(call)(*inputs())
    torch.testing.assert_close(graph(*inputs(1)), call(*inputs(1)))


@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")
@pytest.mark.parametrize("call", [call for call in ALL if call not in (served, paged)])
def test_vmap_gives_what_a_loop_gives(call):
    each = [inputs(seed) for seed in range(3)]
    expected = torch.stack([call(*given) for given in each])
    found = torch.vmap(call)(*(torch.stack(x) for x in zip(*each, strict=True)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("call", [served, paged])
def test_pages_within_vmap_are_refused(call):
    x, doc = inputs()
    call(x, doc)
    for places in ((0, None), (None, 0)):
        given = [y if n is None else y.expand(2, *y.shape) for y, n in zip((x, doc), places)]  # noqa: B905
        with pytest.raises(attndsl.errors.UnsupportedError, match="pages"):
            torch.vmap(call, places)(*given)


def test_a_number_of_meta_is_refused():
    with torch.device("meta"), pytest.raises(attndsl.errors.TraceError, match="meta has no value"):
        trace_of(lambda s, b, h, i, j: s * torch.tensor(0.5))
