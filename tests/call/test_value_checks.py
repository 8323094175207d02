"""Values of a call: a second call of one signature is checked like the first one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import attndsl
from attndsl import errors
from attndsl.call.value_checks import are_between, are_within
from attndsl.passes.int_ranges import POSITION_LIMIT

BACKENDS = ("reference", "cpu", "triton")


def _inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, 5, 4) for _ in range(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are of the CPU, kernels too")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q_offset", "kv_offset"])
def test_offsets_of_a_second_call(backend: str, name: str) -> None:
    q, k, v = _inputs()
    attention = attndsl.compile("causal()", backend=backend)
    attention(q, k, v, **{name: 7})
    most = POSITION_LIMIT - 6
    for far in (2**32 + 5, most + 1, -most - 1, 2**70):
        with pytest.raises(errors.ArgumentError, match="positions are below"):
            attention(q, k, v, **{name: far})
    far = attention(q, k, v, q_offset=most, kv_offset=most - 2)
    torch.testing.assert_close(far, attention(q, k, v, q_offset=2), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["q_offset", "kv_offset", "q_index", "kv_index"])
def test_positions_in_tensors(name: str, dtype: torch.dtype) -> None:
    q, k, v = _inputs()
    attention = attndsl.compile("causal()")
    positions = torch.arange(5) if name.endswith("index") else torch.tensor(3)
    positions = positions.to(dtype)
    attention(q, k, v, **{name: positions})
    positions += POSITION_LIMIT
    with pytest.raises(errors.ArgumentError, match=f"{name} has values from .* positions are"):
        attention(q, k, v, **{name: positions})
    positions -= 2 * POSITION_LIMIT
    with pytest.raises(errors.ArgumentError, match=name):
        attention(q, k, v, **{name: positions})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("most", [0, 1, 5, POSITION_LIMIT - 9, POSITION_LIMIT - 1])
def test_what_is_asserted_on_devices(most: int, dtype: torch.dtype) -> None:
    """The same as a comparison with both ends, at these and at the ends of the dtype."""
    ends = [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    near = [s * most + d for s in (-1, 1) for d in (-2, -1, 0, 1, 2)]
    for value in {0, 1, -1, *near, *ends}:
        inside = -most <= value <= most
        for values in ([value], [0, value], [value, most, 0]):
            found = are_within(torch.tensor(values, dtype=dtype), most)
            assert found.dim() == 0
            assert bool(found) == inside
        assert bool(are_within(torch.tensor(value, dtype=dtype), most)) == inside


@pytest.mark.parametrize("number", [1, 99])
def test_a_later_call_is_checked_like_the_first(number: int) -> None:
    q, k, v = _inputs()
    attention = attndsl.compile("param w: int; mask = q - kv < w")
    positions = torch.arange(5)
    for _ in range(number):
        attention(q, k, v, w=3)
        attention(q, k, v, w=3, q_offset=1)
        attention(q, k, v, w=3, kv_index=positions)
    with pytest.raises(errors.ArgumentError, match="w does not fit"):
        attention(q, k, v, w=-(1 << 63) - 1)
    with pytest.raises(errors.ArgumentError, match="q_offset"):
        attention(q, k, v, w=3, q_offset=POSITION_LIMIT)
    positions[2] = POSITION_LIMIT
    with pytest.raises(errors.ArgumentError, match="kv_index"):
        attention(q, k, v, w=3, kv_index=positions)


def test_a_call_with_captures_is_checked_where_its_offsets_are_not_0() -> None:
    q, k, v = _inputs()
    attention = attndsl.compile("param c: float; tensor t[heads]: float; score = c * t[h] * score")
    given = {"c": 2.0, "t": torch.ones(2)}
    attention(q, k, v, **given)
    for name in ("q_offset", "kv_offset"):
        attention(q, k, v, **given, **{name: 3})
        with pytest.raises(errors.ArgumentError, match=name):
            attention(q, k, v, **given, **{name: POSITION_LIMIT})
        offset = torch.tensor(3)
        attention(q, k, v, **given, **{name: offset})
        offset += POSITION_LIMIT
        with pytest.raises(errors.ArgumentError, match=name):
            attention(q, k, v, **given, **{name: offset})


def test_positions_of_maps() -> None:
    with pytest.raises(errors.ArgumentError, match="q_offset"):
        attndsl.compile("causal()").tiles(5, 5, q_offset=torch.tensor(1 << 31))


def test_positions_in_graphs() -> None:
    q, k, v = _inputs()
    attention = attndsl.compile("causal()")
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    offset = torch.tensor(3)
    torch.testing.assert_close(
        compiled(q, k, v, q_offset=offset), attention(q, k, v, q_offset=offset)
    )
    with pytest.raises(errors.ArgumentError, match="q_offset"):
        compiled(q, k, v, q_offset=offset + (1 << 31))


def test_shapes_that_params_declare() -> None:
    q, k, v = _inputs()
    attention = attndsl.compile("param n: int; tensor t[n + 1]: float; score = score + t[kv % n]")
    t = torch.randn(4)
    attention(q, k, v, n=3, t=t)
    for other in (2, 4):
        with pytest.raises(errors.ShapeError, match="dim 0 is declared"):
            attention(q, k, v, n=other, t=t)
    attention(q, k, v, n=3, t=t)


def test_ints_of_a_second_call() -> None:
    q, k, v = _inputs()
    attention = attndsl.compile("param w: int; mask = q - kv < w")
    attention(q, k, v, w=3)
    with pytest.raises(errors.ArgumentError, match="w does not fit 64 bits"):
        attention(q, k, v, w=1 << 63)


ON_A_DEVICE = """
import torch, attndsl
q, k, v = (torch.randn(1, 2, 64, 64, device="cuda") for _ in range(3))
attention = attndsl.compile("causal()")
attention(q, k, v, q_offset=torch.tensor(3, device="cuda"))
torch.cuda.synchronize()
print("one")
attention(q, k, v, q_offset=torch.tensor(1 << 31, device="cuda"))
torch.cuda.synchronize()
print("two")
"""


@pytest.mark.gpu
def test_positions_on_a_device_stop_it() -> None:
    """In a process of its own: the assertion ends what the device does for it."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ON_A_DEVICE],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["one"], done.stderr[-2000:]
    assert done.returncode != 0
    assert "ssert" in done.stderr


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_elements_between_two_numbers(kind):
    least, most = torch.iinfo(kind).min, torch.iinfo(kind).max
    for low, high in ((0, 5), (0, 0), (3, 100), (0, 1 << 20), (0, (1 << 30) - 1)):
        for value in {0, 1, 3, 5, 6, 99, 100, 101, 120, least, most}:
            if least <= value <= most:
                inside = low <= value <= high
                fine = min(max(low, 0), most)
                several = torch.tensor([fine, value], dtype=kind)
                for given in (several, several[1]):
                    assert bool(are_between(given, low, high)) == inside, (low, high, value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are of the CPU, kernels too")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", [3, 2**70])
def test_ints_for_a_float(backend: str, first: int) -> None:
    """They are the floats next to them, in the first call and in later ones."""
    q, k, v = _inputs()
    attention = attndsl.compile("param g: float\nscore = score * (g / 4e18)", backend=backend)
    attention(q, k, v, g=first)
    # Of fp32 the next one is above it, and the one next to the float next to it is below.
    between = 2**62 + 2**38 + 1
    for g in (3, 2**53 + 1, -(2**70), between):
        assert torch.equal(attention(q, k, v, g=g), attention(q, k, v, g=float(g)))


@pytest.mark.parametrize("digits", [400, 5000])
def test_ints_that_no_float_holds(digits: int) -> None:
    q, k, v = _inputs()
    large = 10**digits
    attention = attndsl.compile("param g: float\nscore = score * g")
    told = f"g is an int of {large.bit_length()} bits"
    for first in (None, 2.0, 2):
        if first is not None:
            attention(q, k, v, g=first)
        with pytest.raises(errors.ArgumentError, match=told):
            attention(q, k, v, g=large)
        with pytest.raises(errors.ArgumentError, match=told):
            attention.tiles(5, 5, g=large)
    with pytest.raises(errors.TypeMismatchError, match="does not fit 64 bits"):
        attndsl.compile("param g: float\nscore = score * g", g=large)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are of the CPU, kernels too")
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_that_fp32_does_not_hold(backend: str) -> None:
    """A constant is what a param of that value is."""
    q, k, v = _inputs()
    text = "score = max(min(score * {}, 3.0), -3.0)"
    param = attndsl.compile("param g: float\n" + text.format("g"), backend=backend)
    for g in (1e300, 3.40282356e38):
        constant = attndsl.compile(text.format(g), backend=backend)
        torch.testing.assert_close(constant(q, k, v), param(q, k, v, g=g))
