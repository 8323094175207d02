"""Masks that are the same for all pairs."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attndsl.frontend import read
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.simplify import simplify
from attndsl.passes.tiles.constant_mask import verdict
from attndsl.source import Source

DOC = "tensor doc[batch, kv_len]: int\ntensor n[batch]: int\nparam w: int\nmask = "


def verdict_of(mask):
    return verdict(simplify(read(Source(DOC + mask), {})).mask)


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ("q < kv and kv < q", False),
        ("q >= kv and 2 * q < 2 * kv", False),
        ("q < 0", False),
        ("h >= heads", False),
        ("doc[b, q] == doc[b, kv] and q - kv > 0 and kv > q", False),
        ("kv < n[b] and kv >= n[b]", False),
        ("q - kv < w and q - kv > w + 3", False),
        ("q >= kv or q < kv", True),
        ("q + kv >= 0", True),
        ("h < heads and b < batch", True),
        ("hkv < kv_heads", True),
        ("hkv >= kv_heads and q >= kv", False),
        ("q - kv < hkv", None),
        ("doc[b, q] == doc[b, kv] or q >= 0", True),
        ("(q - kv) % 4 < 4", True),
        # Some of both, or nobody knows.
        ("q >= kv", None),
        ("q - kv < w", None),
        ("kv < n[b]", None),
        ("doc[b, q] == doc[b, kv]", None),
        ("not doc[b, q] == doc[b, kv]", None),
        ("score > 0", None),
        ("q >= 100000", None),
        ("q < 100000", None),
        ("kv < kv_len", None),
        ("(q * kv) % 2 == 0", None),
    ],
)
def test_verdicts(mask, found):
    assert verdict_of(mask) is found


def test_masks_of_many_operations_cost_nothing():
    """Time grew with the square of a mask's size: texts of 16,384 characters took 100 seconds."""
    conditions = " and ".join(f"(q + {n} * kv) // {n + 7} >= 0" for n in range(500))
    mask = simplify(read(Source(f"mask = {conditions}"), {})).mask
    start = time.perf_counter()
    assert verdict(mask) is None
    assert time.perf_counter() - start < 1
    few = " and ".join(f"(q + {n} * kv) // {n + 7} >= 0" for n in range(12))
    assert verdict_of(few) is True


ATOMS = st.sampled_from(
    ["q >= kv", "q - kv < 3", "kv % 3 == 1", "q > 2 * kv", "q + kv < 0", "q == kv", "kv >= 0"]
)
MASKS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("({} and {})".format, inner, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("(not {})".format, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(MASKS)
def test_verdicts_agree_with_pairs(text):
    program = simplify(read(Source(f"mask = {text}"), {}))
    if program.mask is None:
        return
    # All conditions above repeat or settle within these positions.
    pairs = [
        bool(evaluate(program.mask, Environment({"q": q, "kv": kv})))
        for q in range(14)
        for kv in range(14)
    ]
    same = pairs[0] if all(pairs) or not any(pairs) else None
    assert verdict(program.mask) is same
