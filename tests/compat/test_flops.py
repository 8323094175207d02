"""``FlopCounterMode`` counts calls as torch counts attention, less the tiles that are left out."""

from __future__ import annotations

from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import attndsl
from attndsl.inspection import flops

SHAPES = ((2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 24))
LONG = ((1, 2, 700, 8), (1, 2, 1000, 8), (1, 2, 1000, 8))


def _count(function, leaves, counter=None):
    counter = counter or FlopCounterMode(display=False)
    with counter:
        function(*leaves).sum().backward()
    return counter.get_total_flops()


def _dense(shapes):
    """What torch's formulas count for a forward and a backward.

    With key heads for all query heads, since torch before 2.13 counts no groups.
    """
    q, *others = shapes
    k, v = ((x[0], q[1], *x[2:]) for x in others)
    out = (*q[:3], v[3])
    return sdpa_flop_count(q, k, v), sdpa_backward_flop_count(out, q, k, v)


def _share(mask, q_len=700, kv_len=1000, tile=128):
    """The share of tiles with a live pair of a mask of (q, kv), by brute force."""
    q, kv = torch.arange(q_len)[:, None], torch.arange(kv_len)
    live = mask(q, kv).expand(q_len, kv_len)
    tiles = [
        bool(live[i : i + tile, j : j + tile].any())
        for i in range(0, q_len, tile)
        for j in range(0, kv_len, tile)
    ]
    return Fraction(sum(tiles), len(tiles))


def _forward_and_backward(attention, shapes=LONG, **arguments):
    """What is counted of a call, and of its backward."""
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    counter = FlopCounterMode(display=False)
    with counter:
        attention(*leaves, **arguments).sum().backward()
    found = counter.get_flop_counts()["Global"]
    return found[torch.ops.attndsl.forward], found[torch.ops.attndsl.backward]


def _less(shapes, share):
    return tuple(int(number * share) for number in _dense(shapes))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_products_forward_and_five_backward(backend, compiled):
    leaves = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    attention = attndsl.compile("causal()", backend=backend)
    function = torch.compile(attention, backend="aot_eager") if compiled else attention
    qk, pv = (2 * 2 * 4 * 7 * 9 * dim for dim in (16, 24))
    assert (qk + pv, 3 * qk + 2 * pv) == _dense(SHAPES)
    assert _count(function, leaves) == 3 * qk + 2 * pv + qk + pv
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        function(*leaves)
    assert counter.get_total_flops() == qk + pv
    by_operator = counter.get_flop_counts()["Global"]
    assert by_operator == {torch.ops.attndsl.forward: qk + pv}
    torch._dynamo.reset()


def test_as_torch_counts_attention():
    """A dense one of torch operations, which are counted one by one."""
    leaves = [torch.randn(2, 4, length, 16, requires_grad=True) for length in (7, 9, 9)]
    with sdpa_kernel(SDPBackend.MATH):
        dense = _count(scaled_dot_product_attention, leaves)
    # Fused backwards make the scores again.
    again = 2 * 2 * 4 * 7 * 9 * 16
    assert _count(attndsl.scaled_dot_product_attention, leaves) == dense + again


MASKS = {
    "causal()": lambda q, kv: q >= kv,
    "causal() and q - kv < 200": lambda q, kv: (q >= kv) & (q - kv < 200),
    "q >= kv or kv < 300": lambda q, kv: (q >= kv) | (kv < 300),
    "not (q < kv)": lambda q, kv: q >= kv,
    "q // 256 == kv // 256": lambda q, kv: q // 256 == kv // 256,
    "q > 2 * q_len": lambda q, kv: (q < 0) & (kv < 0),
    "mask = score == score": lambda q, kv: (q >= 0) & (kv >= 0),
}


@pytest.mark.parametrize("text", MASKS)
def test_tiles_that_are_left_out_are_not_counted(text):
    share = _share(MASKS[text])
    assert _forward_and_backward(attndsl.compile(text)) == _less(LONG, share)


def test_full_masks_are_counted_as_torch_counts_attention():
    for text in ("score", "mask = q + kv >= 0; score = softcap(score, 5.0)"):
        assert _forward_and_backward(attndsl.compile(text)) == _dense(LONG)


def test_params_offsets_and_heads_decide():
    attention = attndsl.compile("param near: int; q >= kv and q - kv < near * (h + 1)")
    masks = [lambda q, kv, h=h: (q >= kv) & (q - kv < 100 * (h + 1)) for h in range(2)]
    share = sum(map(_share, masks)) / 2
    assert _forward_and_backward(attention, near=100) == _less(LONG, share)
    share = _share(lambda q, kv: q + 300 >= kv)
    assert _forward_and_backward(attndsl.compile("causal()"), q_offset=300) == _less(LONG, share)


def test_what_tensors_decide_counts_as_computed():
    """Values are not looked at: nothing waits for a GPU."""
    doc = torch.arange(1000)[None] // 100
    causal = _share(lambda q, kv: q >= kv)
    text = "tensor doc[batch, n]: int\nmask = {} doc[b, q] == doc[b, kv]"
    for mask, share in (
        ("", 1), ("causal() and", causal), ("causal() or", 1), ("causal() and not", causal),
    ):  # fmt: skip
        attention = attndsl.compile(text.format(mask))
        assert _forward_and_backward(attention, doc=doc) == _less(LONG, Fraction(share))
    near = attndsl.compile("param near: int; causal() and q - kv < near")
    assert _forward_and_backward(near, near=torch.tensor(100)) == _less(LONG, causal)
    scores = attndsl.compile("mask = causal() and score > 0.5")
    assert _forward_and_backward(scores) == _less(LONG, causal)
    positions = torch.arange(700)
    for where in ({"q_index": positions}, {"q_offset": torch.tensor(0)}):
        assert _forward_and_backward(attndsl.compile("causal()"), **where) == _dense(LONG)


def test_parts_of_calls_are_counted_by_their_own_tiles():
    attention = attndsl.compile("causal_lower_right() and kv < 100 * (h + 1)")
    masks = [
        lambda q, kv, h=h: (q + 200 + 100 >= kv) & (kv < 100 * (h + 1)) for h in (4, 5)
    ]  # fmt: skip
    share = sum(map(_share, masks)) / 2
    place = {"q_len": 900, "q_offset": 200, "heads": 8, "h_offset": 4}
    assert _forward_and_backward(attention, **place) == _less(LONG, share)
    lengths = torch.tensor([50])
    counted = _forward_and_backward(attndsl.compile("causal()"), kv_lengths=lengths)
    assert counted == _less(LONG, _share(lambda q, kv: q >= kv))


def test_graphs_are_counted_as_eager_calls():
    attention = attndsl.compile("param near: int; causal() and q - kv < near")

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, near=k.shape[2] // 5)

    leaves = [torch.randn(shape) for shape in LONG]
    exported = torch.export.export(Layer(), tuple(leaves))
    share = _share(lambda q, kv: (q >= kv) & (q - kv < 200))
    assert _forward_and_backward(exported.module()) == _less(LONG, share)


def test_fake_tensors_are_counted():
    attention = attndsl.compile("tensor doc[batch, n]: int; causal() and doc[b, q] == doc[b, kv]")
    flops._share.cache_clear()
    with FakeTensorMode():
        doc = torch.zeros(1, 1000, dtype=torch.int32)
        found = _forward_and_backward(attention, doc=doc)
    assert found == _less(LONG, _share(lambda q, kv: q >= kv))


def test_long_calls_are_counted_in_little_time(quickest):
    """A million tokens, of which the counter knows no more than shapes."""
    shapes = ((1, 1, 1 << 20, 8),) * 3
    attention = attndsl.compile("causal() and q - kv < 4096")
    counter = FlopCounterMode(display=False)

    def count():
        flops._share.cache_clear()
        with FakeTensorMode(), counter:
            attention(*(torch.empty(shape) for shape in shapes))

    assert quickest(count) < 1
    found = Fraction(counter.get_total_flops(), _dense(shapes)[0])
    # Rows of tiles see 33 of 8192, the first ones fewer.
    assert Fraction(32, 8192) < found < Fraction(33, 8192)


def test_counts_of_many_tiles_are_those_of_all_pairs():
    """Where there is no closed form, and too many tiles to look at each."""
    shapes = ((1, 1, 1 << 23, 8),) * 3
    attention = attndsl.compile("q * kv % 7 < 3")
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(), counter:
        attention(*(torch.empty(shape) for shape in shapes))
    assert counter.get_total_flops() == _dense(shapes)[0]


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
def test_a_counter_that_was_there_before(monkeypatch, mode):
    """Made, and turned on, before anybody told torch's counters of the operators."""
    import torch.utils.flop_counter as module

    for operator in (torch.ops.attndsl.forward, torch.ops.attndsl.backward):
        monkeypatch.delitem(module.flop_registry, operator, raising=False)
    with mode():
        leaves = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
        assert _count(attndsl.compile("causal()"), leaves, FlopCounterMode(display=False)) > 0
