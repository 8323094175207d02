"""Looking at a program wants what is looked at, and takes sizes from what is given."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.call.meta_call import AskedSizes, completed
from attndsl.call.options import Location
from attndsl.errors import ArgumentError, ShapeError

TEXT = """
tensor doc[batch, kv_len]: int
tensor gain[heads, kv_heads, head_dim]: float
tensor table[n, 2 * n]: float
tensor logit[heads]: float
param temp: float
param steps: int
mask = causal() and doc[b, q] == doc[b, kv]
score = temp * score * gain[h, hkv, 0] + table[kv % n, kv // steps]
sink = logit[h]
"""
DOC = torch.tensor([[0] * 40 + [1] * 24, [0] * 8 + [1] * 56])
GAIN = torch.ones(6, 3, 64)


@pytest.fixture(scope="module")
def attention():
    return attndsl.compile(TEXT)


def test_only_the_masks_captures_are_needed(attention):
    tiles = attention.tiles(64, 64, 16, 16, doc=DOC)
    assert tiles.kinds.shape == (2, 1, 4, 4)
    alone = attndsl.compile("tensor d[batch, kv_len]: int; causal() and d[b, q] == d[b, kv]")
    assert tiles == alone.tiles(64, 64, 16, 16, batch=2, d=DOC)
    shown = attention.explain(q_len=64, kv_len=64, doc=DOC)
    assert "at 64 queries x 64 keys, 2 x 1 heads of 64" in shown
    assert attndsl.verify(attention, 64, 64, block_m=16, block_n=16, doc=DOC).live
    with pytest.raises(ArgumentError, match="the call lacks 'doc'\n"):
        attention.tiles(64, 64)
    with pytest.raises(ArgumentError, match="the call lacks 'doc'\n"):
        attention.explain(q_len=64, kv_len=64, gain=GAIN)


def test_pictures_need_what_the_score_mentions_too(attention):
    given = {"doc": DOC, "gain": GAIN, "temp": 2.0, "steps": 4, "table": torch.ones(8, 16)}
    assert attention.plot(q_len=64, kv_len=64, b=1, h=5, **given).startswith("<svg")
    del given["table"]
    with pytest.raises(ArgumentError, match="the call lacks 'table'"):
        attention.plot(q_len=64, kv_len=64, **given)
    sunk = attndsl.compile("tensor logit[heads]: float; mask = causal(); sink = logit[h]")
    assert sunk._repr_html_().startswith("<svg")


def test_sizes_are_those_of_the_captures(attention):
    shown = attention.explain(q_len=64, kv_len=64, doc=DOC, gain=GAIN)
    assert "2 x 6 heads of 64" in shown
    by_head = attndsl.compile("tensor reach[kv_heads]: int; q - kv < reach[hkv]")
    assert by_head.tiles(64, 64, 16, 16, reach=torch.tensor([8, 64])).kinds.shape[:2] == (1, 2)
    late = attndsl.compile("causal()")
    for name in ("q_offset", "kv_lengths"):
        given = {name: torch.tensor([0, 20, 40])}
        assert late.tiles(16, 64, 16, 16, **given).kinds.shape[0] == 3
        assert late.explain(q_len=16, kv_len=64, **given)
        assert late.plot(q_len=16, kv_len=64, b=2, **given)


@pytest.mark.parametrize(
    ("sizes", "hint"),
    [
        ({"batch": 1}, "pass batch=2, or doc with 1 elements along dim 0"),
        ({"kv_len": 32}, "pass kv_len=64, or doc with 32 elements along dim 1"),
        ({"heads": 3}, "pass heads=6, or gain with 3 elements along dim 0"),
        ({"head_dim": 32}, "pass head_dim=64, or gain with 32 elements along dim 2"),
    ],
)
@pytest.mark.parametrize("method", ["tiles", "explain", "plot", "verify"])
def test_the_hint_names_the_argument_that_fits(attention, sizes, hint, method):
    given = {"q_len": 64, "kv_len": 64, "doc": DOC, "gain": GAIN, **sizes}
    if method == "plot" and "head_dim" in sizes:
        return  # It has no such argument.
    run = getattr(attention, method, None) or (lambda **given: attndsl.verify(attention, **given))
    with pytest.raises(ShapeError) as caught:
        run(**given)
    assert caught.value.hint == hint


def test_sizes_of_a_part_are_not_those_of_whole_captures():
    attention = attndsl.compile("tensor reach[heads]: int; q - kv < reach[h]")
    reach = torch.tensor([4, 8, 16, 32])
    part = attention.tiles(64, 64, 8, 8, heads=2, whole_sizes={"heads": 4}, h_offset=2, reach=reach)
    whole = attention.tiles(64, 64, 8, 8, reach=reach)
    assert torch.equal(part.kinds, whole.kinds[:, 2:])
    # The larger call tells no size of the part.
    assert attention.tiles(
        64, 64, 8, 8, whole_sizes={"heads": 4}, h_offset=2, reach=reach
    ).kinds.shape[:2] == (1, 1)


def test_what_is_given_is_checked_though_nobody_reads_it(attention):
    with pytest.raises(ShapeError, match=r"its dim 1 is declared as an expression of sizes"):
        attention.tiles(64, 64, doc=DOC, table=torch.ones(4, 9))
    with pytest.raises(ArgumentError, match="no tensor or run-time param 'dox'"):
        attention.tiles(64, 64, doc=DOC, dox=DOC)


@pytest.mark.parametrize("name", ["q_len", "batch", "heads", "kv_heads", "head_dim"])
@pytest.mark.parametrize("size", [-1, 1.5])
def test_sizes_that_are_no_sizes_are_refused(name, size):
    with pytest.raises(ArgumentError, match=f"{name} is {size}"):
        attndsl.compile("causal()").tiles(**{"q_len": 64, "kv_len": 64, "heads": 1, name: size})


def test_a_size_in_the_mask_comes_from_a_tensor_that_is_needed_for_it():
    program = attndsl.compile(
        "tensor t[n]: float; tensor u[m]: float; mask = kv < n; score = score + t[0] + u[0]"
    ).lowered.program
    found, sizes = completed(program, (program.mask,), {}, AskedSizes(8, 8), Location())
    assert list(found) == ["u"]
    assert (sizes.batch, sizes.heads, sizes.kv_heads) == (1, 1, 1)


def test_values_that_nobody_reads_take_no_memory():
    attention = attndsl.compile(
        "tensor bias[heads, q_len, kv_len]: float; mask = causal(); score = score + bias[h, q, kv]"
    )
    assert attention.tiles(1 << 20, 1 << 20, 1 << 14, 1 << 14).sparsity > 0.4


def test_dims_may_be_head_dims():
    attention = attndsl.compile("tensor w[head_dim]: int; q - kv < w[0]")
    assert attention.tiles(64, 64, 16, 16, head_dim=32, w=torch.full((32,), 16)).kinds.any()
