"""What is not finite reaches live pairs alone, where tensors bound the keys that a row sees."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import attndsl
from attndsl import compat, errors
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.triton.nan_repair import repair_results
from attndsl.call.bind import bind
from attndsl.call.dispatch import get_backend
from attndsl.call.options import WHOLE, CallOptions
from attndsl.ir import bounds_keys

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

STARTS, ROWS = (0, 21, 47, 70), 76
"""Three sequences, and rows that belong to none."""
HEADS, KV_HEADS, WIDTH = 2, 1, 16
BOUNDS = """
tensor first[q_len]: int
tensor end[q_len]: int
mask = first[q] <= kv < end[q]
"""
PROGRAMS = {
    "plain": "",
    "causal": "mask = causal()",
    "window": "mask = causal() and q - kv < 5",
    "cap": "mask = causal()\nscore = 20.0 * tanh(score / 20.0)",
    "learned": "tensor gain[documents, heads]: float\ntensor doc[q_len]: int\n"
    "score = score - gain[doc[q], h] * 0.1 * (q - kv)",
    "bias": "tensor bias[heads, q_len, kv_len]: float\nscore = score + bias[h, q, kv]",
    "sink": "tensor logit[heads]: float\nmask = causal()\nsink = logit[h]",
    "dropout": "mask = causal()\nweights = dropout(softmax(score), 0.3)",
    "own weights": "mask = causal()\nweights = sigmoid(score)",
    "scores decide": "mask = score > -3.0",
}


def bounds():
    """The first key and the end of each row's keys, and its sequence."""
    first, end, doc = (torch.full((ROWS,), STARTS[-1], dtype=torch.int32) for _ in range(3))
    doc.fill_(3)
    for number, (start, stop) in enumerate(pairwise(STARTS)):
        first[start:stop], end[start:stop], doc[start:stop] = start, stop, number
    return first, end, doc


def live_pairs(name):
    """(rows, keys), of what positions decide."""
    first, end, _ = bounds()
    q, kv = torch.arange(ROWS)[:, None], torch.arange(ROWS)
    live = (first[:, None] <= kv) & (kv < end[:, None])
    text = PROGRAMS[name]
    if "causal" in text:
        live = live & (q >= kv)
    return live & (q - kv < 5) if "q - kv < 5" in text else live


def call(name, backend, places=None, value=torch.nan, dtype=torch.float32, device="cpu"):
    """Results and gradients on CPUs, by name; operands have ``value`` at rows of ``places``."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "grad": HEADS}
    operands = {each: drawn(1, heads, ROWS, WIDTH) for each, heads in sizes.items()}
    captures = {
        "gain": drawn(4, HEADS), "bias": drawn(HEADS, ROWS, ROWS), "logit": drawn(HEADS),
    }  # fmt: skip
    captures = {each: x for each, x in captures.items() if f"tensor {each}[" in PROGRAMS[name]}
    if places is not None:
        for at, row in places.items():
            operands[at][0, :, row, 3] = value
        for x in operands.values():
            x[:, :, STARTS[-1] :] = value
    first, end, doc = bounds()
    ints = {"first": first, "end": end} | ({"doc": doc} if name == "learned" else {})
    attn = attndsl.compile(BOUNDS + PROGRAMS[name], backend=backend)
    assert attn.lowered.program.bounded
    leaves = {each: operands[each] for each in "qkv"} | captures
    leaves = {each: x.to(device).requires_grad_() for each, x in leaves.items()}
    ints = {each: x.to(device) for each, x in ints.items()}
    q, k, v, *_ = leaves.values()
    given = {each: leaves[each] for each in captures}
    options = {"seed": 3} if name == "dropout" else {}
    has_lse = name != "own weights"
    results = attn(q, k, v, captures=ints | given, return_lse=has_lse, **options)
    out, *lse = results if has_lse else (results,)
    found = torch.autograd.grad(out, [*leaves.values()], operands["grad"].to(device))
    every = {
        "out": out,
        **dict.fromkeys(["lse"] * has_lse, *lse),
        **dict(zip(leaves, found, strict=True)),
    }
    return {each: x.cpu() for each, x in every.items()}


def wrong_rows(x):
    """Rows of (1, heads, rows, width) with what is not finite."""
    return {int(row) for row in (~x.isfinite()).nonzero()[:, 2]}


def check(name, backend, places, value=torch.nan, dtype=torch.float32, device="cpu"):
    """What has ``value`` at ``places`` reaches the live pairs of these, and no others."""
    clean = call(name, backend, dtype=dtype, device=device)
    found = call(name, backend, places, value, dtype, device)
    least = 1e-4 if dtype is torch.float32 else 0.05
    live = live_pairs(name)
    rows = {at: places[at] for at in ("q", "grad") if at in places}
    keys = [places[at] for at in "kv" if at in places]
    by_keys = set(live[:, keys].any(1).nonzero().flatten().tolist())
    reached = {*rows.values(), *by_keys}
    seen = set(live[sorted(reached)].any(0).nonzero().flatten().tolist())
    assert wrong_rows(found["out"]) <= reached - {rows.get("grad")} | by_keys
    assert wrong_rows(found["q"]) <= reached
    for each in "kv":
        assert wrong_rows(found[each]) <= seen
    if value != value and name != "scores decide":  # A mask may say that pairs of NaN are dead.
        assert wrong_rows(found["out"]) >= by_keys
        assert bool(wrong_rows(found["v"])) >= bool(rows)
    others = [row for row in range(STARTS[-1]) if not STARTS[1] <= row < STARTS[2]]
    for each in ("out", "lse", "q", "k", "v"):
        if each in found:
            torch.testing.assert_close(
                found[each][:, :, others], clean[each][:, :, others], rtol=least, atol=least / 2
            )
        if each != "lse":
            assert (found[each][:, :, STARTS[-1] :] == 0.0).all()
    if name == "learned":
        torch.testing.assert_close(
            found["gain"][[0, 2, 3]], clean["gain"][[0, 2, 3]], rtol=least, atol=least
        )
    if name == "bias":
        assert (found["bias"][~live.expand(HEADS, -1, -1)] == 0.0).all()


SPOTS = {"q": 24, "k": 30, "v": 36, "grad": 40}


@pytest.mark.gpu
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_only_live_pairs_are_reached_on_gpus(name, backend, value):
    for each, row in SPOTS.items():
        check(name, backend, {each: row}, value, torch.bfloat16, "cuda")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("at", SPOTS)
def test_only_live_pairs_are_reached(name, backend, at):
    check(name, backend, {at: SPOTS[at]})


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_live_pairs_are_reached_by_kernels(name):
    check(name, "triton", SPOTS)


@pytest.mark.parametrize("at", SPOTS)
def test_only_live_pairs_are_reached_by_each_operand_of_kernels(at):
    check("window", "triton", {at: SPOTS[at]})


@pytest.mark.parametrize("name", ["window", "cap"])
def test_only_live_pairs_are_reached_by_kernels_for_short_sequences(name):
    check(name, "short", SPOTS)


@pytest.mark.parametrize("backend", ["cpu", "reference", "triton"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinities_stay_in_their_sequence(backend, value):
    check("causal", backend, SPOTS, value)


@pytest.mark.parametrize(
    ("backend", "rows"),
    [("cpu", 1), ("cpu", 40), ("reference", 1), ("reference", 40), ("triton", 40), ("decode", 1)],
)
def test_room_for_keys_may_have_anything(backend, rows):
    """Forward and backward."""
    attn = attndsl.compile("mask = causal()", backend=backend)
    lengths = torch.tensor([50, 41, 64])
    results = []
    for value in (0.0, torch.nan, torch.inf):
        torch.manual_seed(2)
        q = torch.randn(3, HEADS, rows, WIDTH)
        k, v = (torch.randn(3, KV_HEADS, 70, WIDTH) for _ in range(2))
        for x in (k, v):
            for room, length in zip(x, lengths.tolist(), strict=True):
                room[:, length:] = value
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attn(*leaves, q_offset=lengths - rows, kv_lengths=lengths)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for found in results[1:]:
        for x, wanted in zip(found, results[0], strict=True):
            torch.testing.assert_close(x, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "decode"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_that_nobody_reads_may_have_anything(page_size, backend):
    """Rows behind the last key, and pages that a window has left."""
    attn = attndsl.compile("mask = causal() and q - kv < 6", backend=backend)
    results = []
    for value in (0.0, torch.nan):
        torch.manual_seed(2)
        table = torch.arange(32 // page_size * 2).view(2, -1).int()
        lengths = torch.tensor([19, 9], dtype=torch.int32)
        pages = [torch.randn(table.numel(), page_size, KV_HEADS, WIDTH) for _ in range(2)]
        starts = torch.tensor([0, 1, 3], dtype=torch.int32)
        for x in pages:
            rows = x.view(2, 32, KV_HEADS, WIDTH)
            for b, (length, queries) in enumerate(((19, 1), (9, 2))):
                rows[b, length:] = value
                rows[b, : max(0, length - queries - 5)] = value
        cache = attndsl.PagedCache(*pages, table, lengths)
        results.append(attn.serve(torch.randn(3, HEADS, WIDTH), cache, starts))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_functions_of_other_libraries(value):
    cu = torch.tensor([0, 5, 12, 20], dtype=torch.int32)
    mask = compat.BlockDiagonalMask.from_seqlens([5, 7, 8])

    def nested(*operands):
        parts = [
            torch.nested.nested_tensor_from_jagged(x, cu.long()).transpose(1, 2) for x in operands
        ]
        return attndsl.scaled_dot_product_attention(*parts).transpose(1, 2).values()

    calls = (
        lambda q, k, v: compat.flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, causal=True),
        lambda q, k, v: compat.memory_efficient_attention(q[None], k[None], v[None], mask)[0],
        nested,
    )
    others = [*range(5), *range(12, 20)]
    for each in calls:
        for at in range(4):
            operands = [torch.randn(20, 2, 8) for _ in range(4)]
            runs = []
            for spoilt in (False, True):
                if spoilt:
                    operands[at][7, 0, 2] = value
                leaves = [x.clone().requires_grad_() for x in operands[:3]]
                out = each(*leaves)
                runs.append((out, *torch.autograd.grad(out, leaves, operands[3])))
            assert not all(x.isfinite().all() for x in runs[1])
            for wanted, found in zip(*runs, strict=True):
                torch.testing.assert_close(found[others], wanted[others])


def test_a_cache_of_uninitialised_rows():
    lengths = torch.tensor([3, 6])
    q = torch.randn(2, 2, 4, 8)
    full = [torch.randn(2, 9, 2, 8) for _ in range(2)]
    caches = [x.clone() for x in full]
    for x in caches:
        x[0, 3:], x[1, 6:] = torch.nan, torch.inf
    found, wanted = (
        compat.flash_attn_with_kvcache(q, *each, cache_seqlens=lengths, causal=True)
        for each in (caches, full)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_half_types(backend, dtype):
    found = call("learned", backend, SPOTS, dtype=dtype)
    for each in ("out", "q", "k", "v"):
        assert wrong_rows(found[each]) <= {*range(STARTS[1], STARTS[2])}
    assert found["gain"][[0, 2, 3]].isfinite().all()


def test_what_is_finite_is_repaired_by_nobody():
    """Results of other kernels that are finite keep their bits, right or wrong."""
    attn = attndsl.compile(BOUNDS, backend="triton")
    first, end, _ = bounds()
    x = torch.randn(1, HEADS, ROWS, WIDTH)
    captures = {"first": first, "end": end}
    bound = bind(attn.lowered.program, (x, x, x), captures, WHOLE, CallOptions(scale=0.25))
    backend = get_backend("triton")
    out, lse = backend.forward(attn.lowered, bound)
    spoilt = out.clone()
    spoilt[0, 0, 5, 0], spoilt[0, 1] = torch.nan, 7.0
    layout = backend._layout(attn.lowered, bound, Task.REPAIR)
    assert not layout.lists  # Making these would take longer than the whole repair.
    repair_results(layout, attn.lowered, bound, (spoilt, lse), False)
    torch.testing.assert_close(spoilt[0, 0], out[0, 0])
    assert (spoilt[0, 1] == 7.0).all()


def test_checked_mode_finds_no_fault_in_what_nobody_reads():
    attn = attndsl.compile("tensor n[batch]: int\nmask = kv < n[b]", checked=True)
    q, k, v = (torch.randn(1, 2, 8, 8) for _ in range(3))
    k[:, :, 6:] = v[:, :, 6:] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attn(*leaves, n=torch.tensor([6]))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


def test_checked_mode_names_the_row_that_a_general_mask_leaves_out():
    attn = attndsl.compile(
        "tensor doc[batch, kv_len]: int\nmask = doc[b, q] == doc[b, kv]", checked=True
    )
    q, k, v = (torch.randn(1, 2, 8, 8) for _ in range(3))
    v[0, 1, 6, 2] = torch.nan
    with pytest.raises(errors.NonFiniteError, match=r"v is nan at \[0, 1, 6, 2\]") as caught:
        attn(q, k, v, doc=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))
    assert "masked out" in caught.value.hint


@pytest.mark.parametrize(
    ("mask", "bounded"),
    [
        ("kv < n[b]", True), ("n[b] <= kv", True), ("kv - n[b] >= 0", True),
        ("causal() and q < n[b] and kv < n[b]", True), ("kv < n[b] + q", True),
        ("causal()", False), ("q < n[b]", False), ("t[q] == t[kv]", False),
        ("t[kv] < n[b]", False), ("kv < 7", False), ("kv < n[b] or q == 0", False),
    ],
)  # fmt: skip
def test_which_masks_bound_keys(mask, bounded):
    text = f"tensor n[batch]: int\ntensor t[kv_len]: int\nmask = {mask}"
    program = attndsl.compile(text).lowered.program
    assert program.bounded is bounded
    assert bounds_keys(program.mask) is bounded
