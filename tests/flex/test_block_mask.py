"""Block masks: ours against torch's, and torch's taken for what they say."""

import copy
import functools
import inspect
import io
import math
import pickle
import types

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import attndsl
from attndsl.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    ShapeError,
    TraceError,
    UnsupportedError,
)
from attndsl.flex import AuxRequest, BlockMask, create_block_mask, flex_attention, noop_mask
from attndsl.inspection.tile_search import kinds_by_pairs

B, H, Q, KV, D = 2, 2, 20, 36, 8
DOC = torch.arange(KV).repeat(B, 1) // torch.tensor([[7], [12]])
SIZES = torch.tensor([3, 12])


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


MASKS = {
    "causal": causal,
    "window": lambda b, h, q, kv: (q - kv).abs() < SIZES[h],
    "documents": lambda b, h, q, kv: DOC[b, q] == DOC[b, kv],
    "grid": lambda b, h, q, kv: (q % 6 - kv % 6).abs() + (q // 6 - kv // 6).abs() < 2,
    "all": noop_mask,
    "none": lambda b, h, q, kv: kv < 0,
    "one value a pair": lambda b, h, q, kv: (q * 7 + kv * 3) % 11 < 4,
}


def blocks_of_torch(arguments, separate):
    """What torch finds; with torch 2.11 its function lists full blocks apart always."""
    if "separate_full_blocks" in inspect.signature(torch_flex.create_block_mask).parameters:
        return torch_flex.create_block_mask(*arguments, separate_full_blocks=separate)
    found = torch_flex.create_block_mask(*arguments)
    if separate:
        return found
    numbers, indices = torch_flex._dense_to_ordered(found.to_dense())
    return torch_flex.BlockMask.from_kv_blocks(
        numbers, indices, BLOCK_SIZE=found.BLOCK_SIZE, mask_mod=found.mask_mod,
        seq_lengths=found.seq_lengths,
    )  # fmt: skip


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_those_of_torch(name, separate):
    arguments = (MASKS[name], B, H, Q, KV, "cpu", (8, 4))
    mine = create_block_mask(*arguments, separate_full_blocks=separate)
    other = blocks_of_torch(arguments, separate)
    assert isinstance(mine, torch_flex.BlockMask)
    for attribute in torch_flex.BlockMask._TENSOR_ATTRS:
        found, wanted = getattr(mine, attribute), getattr(other, attribute)
        assert (found is None) == (wanted is None), attribute
        assert found is None or torch.equal(found, wanted), attribute
    assert (mine.shape, mine.BLOCK_SIZE) == (other.shape, other.BLOCK_SIZE)
    assert (str(mine), mine.sparsity(), mine.numel()) == (
        str(other), other.sparsity(), other.numel(),
    )  # fmt: skip
    assert torch.equal(mine.to_dense(), other.to_dense())


def test_public_methods_keep_the_class():
    mask = create_block_mask(causal, None, None, 32, 32, device="cpu", BLOCK_SIZE=8)
    assert mask.to("cpu").derived(B, H)
    for change in ("mask_mod", "kv_indices"):
        other = copy.copy(mask)
        assert other.derived(B, H)
        setattr(other, change, getattr(mask, change))
        assert not other.derived(B, H)
    part = mask[:, :, 1:3]
    assert isinstance(part, BlockMask)
    assert part.kv_num_blocks.tolist() == [[[1, 1]]]
    with pytest.raises(ArgumentError, match="was sliced"):
        flex_attention(*[random(1, 1, 32, D)] * 3, block_mask=part)
    assert mask.as_tuple()[-1] is causal


def test_a_corner_of_a_mask():
    mask_mod = lambda b, h, q, kv: (q - kv).abs() < 9  # noqa: E731
    whole = create_block_mask(mask_mod, None, None, 48, 48, device="cpu", BLOCK_SIZE=8)
    corner = whole._adjust(Q, KV)
    wanted = create_block_mask(mask_mod, None, None, Q, KV, device="cpu", BLOCK_SIZE=8)
    assert corner.shape == (1, 1, Q, KV)
    assert torch.equal(corner.to_dense(), wanted.to_dense())
    q, k, v = random(1, 1, Q, D), random(1, 1, KV, D, seed=1), random(1, 1, KV, D, seed=2)
    live = (torch.arange(Q)[:, None] - torch.arange(KV)).abs() < 9
    for block_mask in (corner, copy.copy(corner)):
        # The second goes by the blocks.
        torch.testing.assert_close(
            flex_attention(q, k, v, block_mask=block_mask), dense(q, k, v, live)
        )
        block_mask.mask_mod = mask_mod
    with pytest.raises(ArgumentError, match="cannot grow"):
        whole._adjust(64, 48)


def test_lists_that_are_shorter_than_a_row_of_blocks():
    numbers = torch.tensor([[[1, 2, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 0], [0, 1], [8, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        numbers, indices, BLOCK_SIZE=(8, 4), mask_mod=noop_mask, seq_lengths=(Q, KV)
    )
    assert mask.q_num_blocks.tolist() == [[[2, 2, 0, 0, 0, 0, 0, 0, 1]]]
    live = torch.zeros(Q, KV, dtype=torch.bool)
    live[:16, :4] = live[8:, 4:8] = live[16:, 32:] = True
    q, k, v = random(1, 1, Q, D), random(1, 1, KV, D, seed=1), random(1, 1, KV, D, seed=2)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), dense(q, k, v, live))
    # A block beyond the keys has no pair.
    mask.kv_indices[0, 0, 2, 0] = 9
    live[16:, 32:] = False
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), dense(q, k, v, live))


def test_slices_of_a_mask():
    mask_mod = lambda b, h, i, j: i >= j + b - h  # noqa: E731
    whole = create_block_mask(mask_mod, B, H, Q, KV, device="cpu", BLOCK_SIZE=8)
    q, k, v = random(B, H, Q, D), random(B, H, KV, D, seed=1), random(B, H, KV, D, seed=2)
    first = whole[0]
    first.mask_mod = mask_mod
    wanted = flex_attention(q[:1], k[:1], v[:1], block_mask=whole[:1].__class__.from_kv_blocks(
        whole.kv_num_blocks[:1], whole.kv_indices[:1], whole.full_kv_num_blocks[:1],
        whole.full_kv_indices[:1], BLOCK_SIZE=8, mask_mod=mask_mod, seq_lengths=(Q, KV),
    ))  # fmt: skip
    found = flex_attention(q[:1], k[:1], v[:1], block_mask=first)
    torch.testing.assert_close(found, wanted)
    rows = whole[:, :, 1:2]
    rows.mask_mod = mask_mod
    with pytest.raises(ShapeError, match=r"lists 1 row of blocks, and 20 queries have 3"):
        flex_attention(q, k, v, block_mask=rows)
    rows.mask_mod, rows.seq_lengths = (lambda b, h, i, j: mask_mod(b, h, i + 8, j)), (8, KV)
    found = flex_attention(q[:, :, 8:16], k, v, block_mask=rows)
    torch.testing.assert_close(found, flex_attention(q, k, v, block_mask=whole)[:, :, 8:16])


@pytest.mark.parametrize("name", MASKS)
def test_blocks_of_a_graph_are_those_of_the_search(name):
    attention = attndsl.compile(str(attndsl.trace(MASKS[name])))
    captures = attndsl.trace(MASKS[name]).captures
    call = attention.call_of_lengths(captures, Q, KV, B, H)
    found = kinds_by_pairs(attention.lowered, call, 8, 4)
    assert torch.equal(found, attention.tiles(Q, KV, 8, 4, B, H, **captures).kinds)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_cuda_graphs_hold_the_making_of_blocks(name):
    tables = {"DOC": DOC.cuda(), "SIZES": SIZES.cuda()}
    code = MASKS[name]
    mask_mod = types.FunctionType(code.__code__, {**globals(), **tables})
    q = random(B, H, Q, D).cuda()
    k, v = random(B, H, KV, D, seed=1).cuda(), random(B, H, KV, D, seed=2).cuda()

    def run():
        mask = create_block_mask(mask_mod, B, H, Q, KV, device="cuda", BLOCK_SIZE=(8, 4))
        return mask.kv_num_blocks, mask.kv_indices, flex_attention(q, k, v, block_mask=mask)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = run()
    tables["DOC"].copy_(DOC.flip(1))
    tables["SIZES"].add_(2)
    graph.replay()
    for found, wanted in zip(held, run(), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
def test_sliced_and_short_lists_of_blocks_on_a_gpu():
    numbers = torch.tensor([[[1, 2, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 0], [0, 1], [8, 1]]]], dtype=torch.int32)
    q, k, v = random(1, 1, Q, D), random(1, 1, KV, D, seed=1), random(1, 1, KV, D, seed=2)
    results = []
    for device in ("cpu", "cuda"):
        mask = BlockMask.from_kv_blocks(
            numbers.to(device), indices.to(device), BLOCK_SIZE=(8, 4), mask_mod=noop_mask,
            seq_lengths=(Q, KV),
        )  # fmt: skip
        first = mask[0]
        first.mask_mod = noop_mask
        inputs = [x.to(device) for x in (q, k, v)]
        results.append([flex_attention(*inputs, block_mask=m).cpu() for m in (mask, first)])
    torch.testing.assert_close(*results, atol=1e-2, rtol=1e-2)


def dense(q, k, v, live):
    """Attention over the live pairs, 0 where there is none."""
    scores = (q @ k.mT) / math.sqrt(D)
    weights = torch.softmax(scores.masked_fill(~live, -math.inf), -1)
    return torch.where(live.any(-1, keepdim=True), weights, 0.0).nan_to_num() @ v


def arbitrary(batch, heads, seed):
    """A block mask whose blocks say other things than its ``mask_mod``, and its live pairs."""
    rows, columns, size = 5, 9, 4
    kinds = torch.randint(0, 3, (batch, heads, rows, columns),
                          generator=torch.Generator().manual_seed(seed))  # fmt: skip
    lists = []
    for kind in (1, 2):
        chosen = (kinds == kind).int()
        order = torch.argsort(chosen, dim=-1, descending=True, stable=True)
        lists += [chosen.sum(-1).int(), order.int()]
    mask = torch_flex.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=size, mask_mod=causal, seq_lengths=(Q, KV)
    )
    pairs = kinds.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :Q, :KV]
    above = torch.arange(Q)[:, None] >= torch.arange(KV)
    return mask, (pairs == 2) | ((pairs == 1) & above)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (B, 1), (1, H), (B, H)])
def test_blocks_count_where_torch_made_them(batch, heads):
    mask, live = arbitrary(batch, heads, seed=batch * 2 + heads)
    q, k, v = random(B, H, Q, D), random(B, H, KV, D, seed=1), random(B, H, KV, D, seed=2)
    live = live.expand(B, H, Q, KV)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), dense(q, k, v, live))

    # A score_mod that masks more: FULL blocks are not full of live pairs then.
    odd = flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(j % 2 == 1, s, -math.inf), mask)
    odd_live = live & (torch.arange(KV) % 2 == 1)
    torch.testing.assert_close(odd, dense(q, k, v, odd_live))
    shifted = flex_attention(q, k, v, lambda s, b, h, i, j: s + 1.0, mask)
    torch.testing.assert_close(shifted, dense(q, k, v, live))


@pytest.mark.parametrize("place", ["reference", "triton"])
def test_blocks_on_other_backends(place):
    mask, live = arbitrary(1, 1, seed=3)
    q, k, v = random(1, 1, Q, D), random(1, 1, KV, D, seed=1), random(1, 1, KV, D, seed=2)
    device = "cuda" if torch.cuda.is_available() and place == "triton" else "cpu"
    out = flex_attention(
        *(x.to(device) for x in (q, k, v)),
        block_mask=mask.to(device),
        kernel_options={"backend": place, "BLOCK_M": 64},
    )
    torch.testing.assert_close(out.cpu(), dense(q, k, v, live), atol=1e-2, rtol=1e-2)


def test_a_mask_mod_that_is_replaced_counts_with_the_blocks():
    q = k = v = random(1, 1, 16, D)
    mask = create_block_mask(causal, None, None, 16, 16, device="cpu", BLOCK_SIZE=8)
    mask.mask_mod = noop_mask
    live = torch.ones(16, 16, dtype=torch.bool)
    live[:8, 8:] = False
    out = flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(out, dense(q, k, v, live))


def test_one_batch_entry_s_blocks_for_a_mask_that_varies():
    # torch goes by the blocks of entry 0, and by the mask of each entry within them.
    rows = torch.tensor([4, 16])
    q = k = v = random(2, 1, 16, D)
    mask_mod = lambda b, h, i, j: j < rows[b]  # noqa: E731
    mine = create_block_mask(mask_mod, None, None, 16, 16, device="cpu", BLOCK_SIZE=8)
    other = torch_flex.create_block_mask(mask_mod, None, None, 16, 16, "cpu", 8)
    first, second = (flex_attention(q, k, v, block_mask=mask) for mask in (mine, other))
    torch.testing.assert_close(first, second)
    live = torch.arange(16).expand(2, 1, 16, 16) < torch.tensor([4, 8]).reshape(2, 1, 1, 1)
    torch.testing.assert_close(first, dense(q, k, v, live))


def test_tiles_found_once_are_used():
    mask = create_block_mask(MASKS["documents"], B, None, Q, KV, device="cpu", BLOCK_SIZE=4)
    assert mask.tiles is not None
    q, k, v = random(B, H, Q, D), random(B, H, KV, D, seed=1), random(B, H, KV, D, seed=2)
    live = (DOC[:, :Q, None] == DOC[:, None]).unsqueeze(1)
    torch.testing.assert_close(
        flex_attention(q, k, v, block_mask=mask), dense(q, k, v, live.expand(B, H, Q, KV))
    )
    assert create_block_mask(causal, None, None, Q, KV, device="cpu").tiles is None


def test_no_batch_entries_are_not_one():
    mask = create_block_mask(causal, 0, None, Q, KV, device="cpu")
    assert mask.shape == (0, 1, Q, KV)


def test_a_batch_of_queries_over_one_of_keys():
    q, k, v = random(B, H, Q, D), random(1, H, KV, D, seed=1), random(1, H, KV, D, seed=2)
    mask = create_block_mask(MASKS["documents"], B, None, Q, KV, device="cpu", BLOCK_SIZE=8)
    live = (DOC[:, :Q, None] == DOC[:, None]).unsqueeze(1).expand(B, H, Q, KV)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), dense(q, k, v, live))
    with pytest.raises(ShapeError, match="batch"):
        flex_attention(q, k, v)


def test_grouped_heads_have_to_be_asked_for():
    q, k = random(1, 4, 8, D), random(1, 2, 8, D, seed=1)
    with pytest.raises(ShapeError, match="enable_gqa=True"):
        flex_attention(q, k, k)
    wanted = flex_attention(q, k.repeat_interleave(2, 1), k.repeat_interleave(2, 1))
    torch.testing.assert_close(flex_attention(q, k, k, enable_gqa=True), wanted)


def test_results_beside_the_output():
    q, k, v = random(1, 2, 6, D), random(1, 2, 4, D, seed=1), random(1, 2, 4, D, seed=2)
    mask = create_block_mask(lambda b, h, i, j: i > j, None, None, 6, 4, device="cpu")
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(
        torch.arange(6)[:, None] <= torch.arange(4), -math.inf
    )
    out, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert lse[0, 0, 0] == -math.inf
    assert not out[:, :, 0].any()
    for request in (AuxRequest(max_scores=True), AuxRequest(lse=True), AuxRequest()):
        again, aux = flex_attention(q, k, v, block_mask=mask, return_aux=request)
        assert torch.equal(again, out)
        assert (aux.lse is None) == (not request.lse)
        assert (aux.max_scores is None) == (not request.max_scores)
        if request.max_scores:
            torch.testing.assert_close(aux.max_scores, scores.amax(-1))
    with pytest.raises(ArgumentError, match="return_lse and return_aux"):
        flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True))


def test_autocast_and_scale():
    q = k = v = random(1, 1, 8, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flex_attention(q, k, v).dtype is torch.bfloat16
    wanted = attndsl.compile("score")(q, k, v, scale=0.5)
    torch.testing.assert_close(flex_attention(q, k, v, scale=0.5), wanted)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_keys_and_values_of_another_dtype(dtype):
    q, k, v = random(1, 2, 8, D), random(1, 2, 8, D, seed=1), random(1, 2, 8, D, seed=2)
    cached = k.to(dtype), v.to(dtype)
    # torch's kernels multiply in query's dtype, and round the weights to it.
    wanted = flex_attention(q, *(x.float() for x in cached))
    assert torch.equal(flex_attention(q, *cached), wanted)
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, *cached), wanted)
    half = flex_attention(q.bfloat16(), *cached)
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float(), wanted, atol=3e-2, rtol=3e-2)
    q.requires_grad_()
    with pytest.raises(DTypeError, match="no gradients"):
        flex_attention(q, *cached)
    with torch.no_grad():
        assert torch.equal(flex_attention(q, *cached), wanted)


BLOCKS = create_block_mask(causal, None, None, 8, 8, device="cpu")
TENSORS = (torch.zeros(1, 1, 8, D),) * 3


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: flex_attention(*TENSORS, block_mask=causal), ArgumentError, "is a function"),
        (lambda: flex_attention(*(x[:, :, :4] for x in TENSORS), block_mask=BLOCKS), ShapeError,
         "8 queries x 8 keys, and the call has 4 x 4"),
        (lambda: flex_attention(*TENSORS, block_mask=create_block_mask(causal, 3, 1, 8, 8, "cpu")),
         ShapeError, "3 batch entries"),
        (lambda: flex_attention(*TENSORS, block_mask=BLOCKS.to("meta")), DeviceError, "on meta"),
        (lambda: flex_attention(*TENSORS, kernel_options={"BLOK_M": 3}), ArgumentError, "BLOK_M"),
        (lambda: flex_attention(*TENSORS, causal), TraceError, "takes other arguments"),
        (lambda: flex_attention(TENSORS[0][0], *TENSORS[1:]), ShapeError, "3 dims"),
        (lambda: create_block_mask(lambda s, b, h, q, kv: s, 1, 1, 8, 8), TraceError, "of 5"),
        (lambda: flex_attention(*TENSORS, kernel_options=["triton"]), ArgumentError, "is a list"),
        (lambda: flex_attention(*TENSORS, return_aux=True), ArgumentError, "return_aux is True"),
        (lambda: flex_attention(*TENSORS, scale="1"), ArgumentError, "scale is a str"),
        (lambda: flex_attention(*TENSORS, lambda s, b, h, q, kv: s[q]), TraceError, "no elements"),
        (lambda: flex_attention(*TENSORS, max), TraceError, "does not say what it takes"),
        (lambda: create_block_mask(causal, 1, 1, -8, 8), ArgumentError, "Q_LEN is -8"),
        (lambda: create_block_mask(causal, "2", 1, 8, 8), ArgumentError, "B is '2'"),
        (lambda: create_block_mask(causal, 1, -1, 8, 8), ArgumentError, "H is -1"),
        (lambda: create_block_mask(causal, 1, 1, 8, 8, "cpu", 8.0), ArgumentError, "BLOCK_SIZE"),
        (lambda: create_block_mask(causal, 1, 1, 8, 8, "cpu", (8,)), ArgumentError, "BLOCK_SIZE"),
        (lambda: create_block_mask(causal, 1, 1, 8, 8, "cpu", 0), ArgumentError, "BLOCK_SIZE"),
        (lambda: create_block_mask(causal, 1, 1, 8, 8, compute_dq_write_order=True),
         UnsupportedError, "FLASH"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert caught.value.hint


def test_empty_lengths():
    q, k = torch.zeros(1, 1, 0, D), torch.zeros(1, 1, 0, D)
    keys = torch.zeros(1, 1, 4, D)
    assert flex_attention(q, keys, keys).shape == (1, 1, 0, D)
    out, aux = flex_attention(keys, k, k, return_aux=AuxRequest(True, True))
    assert not out.any()
    assert (aux.lse == -math.inf).all()
    assert (aux.max_scores == -math.inf).all()


def same_document(b, h, q, kv):
    return DOC[b, q] == DOC[b, kv]


def of_table(table, b, h, q, kv):
    return table[b, q] == table[b, kv]


class Near:
    def __init__(self, table):
        self.table = table

    def __call__(self, b, h, q, kv):
        return self.table[b, q] == self.table[b, kv]


@pytest.mark.parametrize(
    "mod", [causal, same_document, functools.partial(of_table, DOC), Near(DOC)]
)
@pytest.mark.parametrize("way", ["pickle", "torch.save", "copy"])
def test_block_masks_are_pickled(mod, way):
    made = create_block_mask(mod, B, None, Q, KV, device="cpu", BLOCK_SIZE=8)
    if way == "pickle":
        found = pickle.loads(pickle.dumps(made))
    elif way == "copy":
        found = copy.deepcopy(made)
    else:
        torch.save(made, file := io.BytesIO())
        file.seek(0)
        found = torch.load(file, weights_only=False)
    assert (type(found), found.by_mask, found.varies) == (BlockMask, True, made.varies)
    assert (found.tiles is None) == (made.tiles is None)
    q, k, v = random(B, H, Q, D), random(B, H, KV, D), random(B, H, KV, D, seed=1)
    assert torch.equal(found.to_dense(), made.to_dense())
    assert torch.equal(
        flex_attention(q, k, v, block_mask=found), flex_attention(q, k, v, block_mask=made)
    )


def test_block_masks_come_from_workers_of_a_loader():
    loader = torch.utils.data.DataLoader(Masks(), batch_size=None, num_workers=1, timeout=120)
    (found,) = loader
    assert torch.equal(found.to_dense(), Masks()[0].to_dense())


class Masks(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, place):
        return create_block_mask(same_document, B, None, Q, KV, device="cpu", BLOCK_SIZE=8)


def test_pickled_tile_maps_have_no_mask():
    program = attndsl.compile("tensor doc[kv_len]: int; mask = doc[q] == doc[kv]")
    made = program.tiles(KV, KV, doc=DOC[0])
    found = pickle.loads(pickle.dumps(made))
    assert torch.equal(found.kinds, made.kinds)
    assert (found.q_len, found.block_m, found.reason) == (KV, made.block_m, made.reason)
    with pytest.raises(UnsupportedError, match="no mask function"):
        found.to_flex()
