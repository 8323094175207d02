"""Bounds of masks on Python's numbers: those of torch, or none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attndsl
from attndsl.backends.tiled.scalar_bounds import bounds_of
from attndsl.call.bind import bind
from attndsl.call.options import Location

MASKS = [
    "causal()",
    "causal() and q - kv < w",
    "q % 7 <= 3 and kv <= q",
    "abs(q - kv) < w or kv >= 2 * q",
    "causal() and q // 5 - kv // w * 0 >= 0",
    "q - kv >= w % 3 or q + kv_len > 30",
]
OF_FLOATS = [
    "causal() and w > 0.1",
    "sin(float(q)) > 0.0",
    "kv >= int(log(float(q + 1)))",
    "q - kv >= int(w * 10.0)",
    "float(q) * 0.1 * 10.0 == float(q)",
    "causal() and w ** w > 0",
]


def _call(attention, q_offset=0, **captures):
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 20, 8)
    return bind(attention.lowered.program, (q, k, k), captures, Location(q_offset))


@pytest.mark.parametrize("text", OF_FLOATS)
def test_floats_and_powers_are_left_to_torch(text):
    """Programs round floats to fp32, so that Python's have other values."""
    kind = "int" if "**" in text else "float"
    head, captures = (f"param w: {kind}\nmask = ", {"w": 2}) if "w" in text else ("", {})
    attention = attndsl.compile(head + text, backend="cpu")
    assert bounds_of(attention.lowered, _call(attention, **captures)) is None


@pytest.mark.parametrize(
    "text", ["kv <= q + h", "kv < 4 or kv <= q", "tensor t[1]: int\nmask = q > t[0]"]
)
def test_masks_of_more_than_positions_have_none(text):
    attention = attndsl.compile(text, backend="cpu")
    captures = {"t": torch.tensor([1])} if "tensor" in text else {}
    assert bounds_of(attention.lowered, _call(attention, **captures)) is None


@pytest.mark.parametrize("text", MASKS)
@given(
    q=st.tuples(st.integers(-40, 40), st.integers(1, 5)),
    kv=st.tuples(st.integers(-40, 40), st.integers(1, 9)),
    w=st.integers(1, 30),
)
@settings(deadline=None, max_examples=40)
def test_bounds_are_sound(text, q, kv, w):
    head, captures = ("param w: int\nmask = ", {"w": w}) if "w" in text else ("", {})
    attention = attndsl.compile(head + text, backend="cpu")
    call = _call(attention, **captures)
    bounds = bounds_of(attention.lowered, call)
    if bounds is None:
        assert "//" in text  # Values of keys.
        return
    rows = 1 if bounds.of_one_row else q[1]
    dense = _dense(text, (q[0], rows), kv, captures)
    ranges = (q[0], q[0] + rows), (kv[0], kv[0] + kv[1])
    assert bounds.may(*ranges) or not dense.any()
    assert not bounds.must(*ranges) or dense.all()


def _dense(text, q, kv, captures):
    """The mask in plain Python."""
    code = text.replace("causal()", "(kv <= q)")
    names = {"kv_len": 20, **captures}
    return torch.tensor(
        [
            [bool(eval(code, {}, {**names, "q": row, "kv": key})) for key in range(kv[0], sum(kv))]
            for row in range(q[0], sum(q))
        ]
    )
