"""Values of a call: a second call of one signature is checked like the first one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import attndsl
from attndsl import errors
from attndsl.passes.widths import POSITION_LIMIT

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
