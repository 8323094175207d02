"""Numbers of numpy and whole floats: what sweeps give means what Python's own numbers mean."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

import attndsl
from attndsl.errors import ArgumentError, TypeMismatchError
from attndsl.foundation.scalars import as_int, as_number, number_key, read_number

KINDS = [np.int64, np.uint8, np.float32, np.float64, np.array, float, Fraction]
"""Each makes a whole number of an int."""
TEXT = """
param window: int
param cap: float
param on: bool
mask = causal() and q - kv < window and on
score = softcap(score, cap)
"""


@pytest.mark.parametrize(
    ("value", "number", "whole"),
    [
        (True, True, None),
        (np.bool_(True), True, None),
        (3, 3, 3),
        (np.int8(-3), -3, -3),
        (3.0, 3.0, 3),
        (np.float16(0.5), 0.5, None),
        (np.longdouble(2), 2.0, 2),
        (np.array(3), 3, 3),
        (Fraction(1, 2), 0.5, None),
        (1e30, 1e30, int(1e30)),
        (float("inf"), float("inf"), None),
        (np.array([3]), None, None),
        (np.array("a", dtype=object), None, None),
        (np.datetime64("2000-01-01"), None, None),
        (np.complex64(1), None, None),
        (1j, None, None),
        ("3", None, None),
        (None, None, None),
        (torch.tensor(3), None, None),
        (torch.tensor(3.0), None, None),
    ],
    ids=repr,
)
def test_what_a_number_is(value, number, whole):
    found = as_number(value)
    assert (found, type(found)) == (number, type(number))
    assert (as_int(value), type(as_int(value))) == (whole, type(whole))


def test_nothing_is_a_whole_number_that_has_a_rest():
    assert as_int(float("nan")) is None
    assert as_int(np.float32("nan")) is None
    assert as_int(16.5) is None
    assert as_number(Fraction(10**400, 3)) is None


def test_numpy_is_not_imported():
    code = "import sys, attndsl.foundation.scalars as s; print(s.as_int(3.0))\n"
    code += "assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def _inputs():
    torch.manual_seed(0)
    return torch.randn(3, 1, 2, 16, 8).unbind()


@pytest.mark.parametrize("kind", KINDS)
def test_params_of_compile(kind):
    wanted = attndsl.compile(TEXT, window=4, cap=3.0, on=True)
    given = {"window": kind(4), "cap": kind(3), "on": np.bool_(True)}
    found = attndsl.compile(TEXT, **given)
    assert found.lowered.digest == wanted.lowered.digest
    # A declaration makes an int of a whole float. Without one a number is what it is.
    assert attndsl.compile("q - kv < w", w=kind(4)).lowered.program.params == ()


@pytest.mark.parametrize("kind", KINDS)
def test_params_of_calls(kind):
    attention = attndsl.compile(TEXT)
    q, k, v = _inputs()
    wanted = attention(q, k, v, window=4, cap=3.0, on=True)
    for _ in range(2):  # The second call has what the first one prepared.
        found = attention(q, k, v, window=kind(4), cap=kind(3), on=np.bool_(True))
        assert torch.equal(found, wanted)
    other = attention(q, k, v, window=kind(5), cap=kind(3), on=np.bool_(True))
    assert torch.equal(other, attention(q, k, v, window=5, cap=3.0, on=True))


@pytest.mark.parametrize("kind", KINDS)
def test_places_scales_and_seeds_of_calls(kind):
    attention = attndsl.compile("mask = causal(); weights = dropout(softmax(score), 0.3)")
    q, _, _ = _inputs()
    k = torch.randn(1, 2, 32, 8)
    wanted = attention(q, k, k, q_offset=16, seed=5, scale=2, kv_len=32, heads=4, h_offset=1)
    for _ in range(2):
        found = attention(
            q, k, k, q_offset=kind(16), kv_offset=kind(0), seed=kind(5), scale=kind(2),
            kv_len=kind(32), heads=kind(4), h_offset=kind(1),
        )  # fmt: skip
        assert torch.equal(found, wanted)
    leaf = q.clone().requires_grad_()
    attention.warmup(leaf, k, k, q_offset=kind(16), seed=kind(5))


@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind):
    attention = attndsl.compile("causal() and q - kv < w", w=5)
    sizes = [kind(16), kind(24), kind(8), kind(4), kind(1), kind(2)]
    assert attention.tiles(*sizes) == attention.tiles(16, 24, 8, 4, 1, 2)
    named = {"q_len": 16, "kv_len": 24, "batch": 1, "heads": 2, "block_m": 8, "block_n": 4}
    odd = {name: kind(value) for name, value in named.items()}
    assert attention.explain(**odd) == attention.explain(**named)
    assert attention.plot(**odd) == attention.plot(**named)
    assert attndsl.verify(attention, **odd) == attndsl.verify(attention, **named)
    assert attention.source(head_dim=kind(32)) == attention.source(head_dim=32)


@pytest.mark.parametrize("value", [16.5, np.float32(0.5), float("nan"), float("inf"), True, "4"])
def test_what_is_no_int_is_refused(value):
    text = "param w: int; mask = q - kv < w"
    with pytest.raises((TypeMismatchError, ArgumentError)) as caught:
        attndsl.compile(text, w=value)
    assert "w" in caught.value.message
    attention = attndsl.compile(text)
    q, k, v = _inputs()
    attention(q, k, v, w=4.0)  # A call of the signature of the floats among them.
    for name in ("w", "q_offset", "q_len", "seed"):
        with pytest.raises(ArgumentError, match=f"^{name} is "):
            attention(q, k, v, **{"w": 4, name: value})
        if value is not True and name == "q_len":
            with pytest.raises(ArgumentError, match="q_len is"):
                attention.tiles(value, 4, w=4)


@pytest.mark.parametrize("value", [1e30, 2.0**63, 10**30])
def test_whole_numbers_fit_64_bits(value):
    q, k, v = _inputs()
    text = "param w: int; mask = q - kv < w"
    with pytest.raises(TypeMismatchError, match="'w'"):
        attndsl.compile(text, w=value)
    attention = attndsl.compile(text)
    for _ in range(2):
        assert attention(q, k, v, w=1e3).shape == q.shape
        with pytest.raises(ArgumentError, match="w does not fit 64 bits"):
            attention(q, k, v, w=value)
    with pytest.raises(ArgumentError, match="positions are below"):
        attention(q, k, v, w=3, q_offset=np.int64(1 << 30))


def test_bools_and_numbers_stay_apart():
    q, k, v = _inputs()
    attention = attndsl.compile(TEXT)
    for changed in ({"on": 1}, {"on": np.int64(1)}, {"cap": np.bool_(True)}, {"window": True}):
        with pytest.raises(ArgumentError, match="the program declares it as"):
            attention(q, k, v, **{"window": 4, "cap": 3.0, "on": True, **changed})


def test_0d_tensors_keep_their_meaning():
    q, k, v = _inputs()
    text = "param cap: float; score = softcap(score, cap)"
    cap = torch.tensor(3.0, requires_grad=True)
    attention = attndsl.compile(text, cap=cap)
    assert [param.name for param in attention.lowered.program.params] == ["cap"]
    attention(q, k, v).sum().backward()
    assert cap.grad is not None
    with pytest.raises(attndsl.AttnDSLError, match="declares it as int"):
        attndsl.compile("param w: int; q - kv < w")(q, k, v, w=torch.tensor(4.0))


def test_in_graphs():
    attention = attndsl.compile("param w: int; mask = causal() and q - kv < w")
    q, k, v = _inputs()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q, k, v, w):
        return attention(q, k, v, w=w)

    wanted = attention(q, k, v, w=4)
    for w in (4.0, np.int64(4)):
        torch.testing.assert_close(layer(q, k, v, w), wanted)


def test_a_default_in_the_text_is_a_literal_of_its_type():
    with pytest.raises(TypeMismatchError, match=r"'w' is of type int, and its default 4\.0 "):
        attndsl.compile("param w: int = 4.0; mask = q - kv < w")


def test_numbers_that_are_written():
    written = (" 16 ", "0.5", "True", "-inf", "1_000", "1e400", "x", "", "9" * 401)
    found = [read_number(x) for x in written]
    assert found == [16, 0.5, True, -float("inf"), 1000, None, None, None, None]
    assert [type(x) for x in found[:4]] == [int, float, bool, float]


def test_keys_of_numbers():
    """Numbers of one type and the same bits have one key; all NaNs of a type have one."""
    different = [
        0.0, -0.0, 0, False, 1.0, 1, True, float("inf"), float("nan"), 2**70, float(2**70),
        0j, complex(0.0, -0.0), np.float32(0), np.float32(-0.0), np.float64(0), np.float32("nan"),
        np.int64(0), np.array(0.0), Fraction(0), None, "0.0", torch.float32,
    ]  # fmt: skip
    keys = [number_key(value) for value in different]
    assert len(set(keys)) == len(different)
    same = [
        (0.0, 0.0 * 1), (float("nan"), -float("nan")), (np.array(0.0), np.zeros(())),
        (np.float32("nan"), -np.float32("nan")), (Fraction(1, 2), Fraction(2, 4)),
        (10**20, 10**19 * 10),
    ]  # fmt: skip
    for a, b in same:
        assert number_key(a) == number_key(b)
        assert hash(number_key(a)) == hash(number_key(b))
