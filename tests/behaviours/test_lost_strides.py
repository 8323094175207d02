"""Operands whose last stride a conversion loses: expanded dims, rows that overlap, other signs."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.backends.memory_order import rows_apart, rows_contiguous

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tensors are of the CPU, kernels too"
)
DIM = 16
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def _pooled(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """One row for all rows, as of a pooling layer."""
    return torch.randn(2, DIM, 1).to(dtype).transpose(1, 2).unsqueeze(2).expand(2, 1, rows, DIM)


def _frames(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Frames of one signal, four samples apart, and one apart for each batch entry."""
    signal = torch.randn(4 * rows + DIM + 2).to(dtype)
    return signal.as_strided((2, 1, rows, DIM), (1, 1, 4, 1))


LAYOUTS = {"pooled": _pooled, "frames": _frames}
TEXTS = {
    "plain": "score",
    "one run": "mask = kv < 20",
    "causal": "causal()",
    "window": "causal() and q - kv < 9",
    "scored": "score = 2.0 * score",
}


def _operands(layout: str, which: str, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    lengths = {"q": rows, "k": 30, "v": 30}
    return [
        LAYOUTS[layout](length, dtype) if name == which
        else torch.randn(2, 1, length, DIM).to(dtype)
        for name, length in lengths.items()
    ]  # fmt: skip


def _run(attention: attndsl.Attention, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients."""
    given = [x.detach().requires_grad_() for x in operands]
    out = attention(*given)
    return [out, *torch.autograd.grad(out.float().square().sum(), given)]


def _check(attention, operands: list[torch.Tensor], dense: list[torch.Tensor]) -> None:
    for a, b in zip(_run(attention, operands), _run(attention, dense), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", "qkv")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", TEXTS)
def test_operands_of_any_layout(text: str, dtype: torch.dtype, which: str, layout: str) -> None:
    attention = attndsl.compile(TEXTS[text], backend="cpu")
    for rows in (1, 4, 20, 140):
        operands = _operands(layout, which, rows, dtype)
        _check(attention, operands, [x.contiguous() for x in operands])


def test_batch_entries_between_heads() -> None:
    """Heads of a group, which lie on both sides of another batch entry."""
    q = torch.randn(100).as_strided((2, 4, 1, 8), (24, 16, 1, 1))
    k, v = torch.randn(2, 2, 2, 30, 8).unbind()
    attention = attndsl.compile("score", backend="cpu")
    _check(attention, [q, k, v], [q.contiguous(), k, v])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", "qkv")
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_signs_that_torch_has_yet_to_change(backend: str, which: str, layout: str) -> None:
    """In eager calls, and in graphs, whose operators get copies of torch's."""
    attention = attndsl.compile("mask = q >= kv or kv < 3", backend=backend)
    operands = _operands(layout, which, 20, torch.float32)
    place = "qkv".index(which)
    dense = [x.contiguous() for x in operands]
    dense[place] = -dense[place]
    operands[place] = torch._neg_view(operands[place])
    _check(attention, operands, dense)
    torch._dynamo.reset()
    graph = torch.compile(lambda q, k, v: attention(q, k, v), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for a, b in zip(_run(graph, operands), _run(attention, dense), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", "qkv")
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_conversions_of_autocast(backend: str, which: str, layout: str) -> None:
    attention = attndsl.compile("mask = q >= kv or kv < 3", backend=backend)
    operands = _operands(layout, which, 20, torch.float32)
    dense = [x.contiguous() for x in operands]
    torch._dynamo.reset()
    graph = torch.compile(lambda q, k, v: attention(q, k, v), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = attention(*dense)
        for call in (attention, graph, graph):
            torch.testing.assert_close(call(*operands), wanted, atol=0.01, rtol=0.01)


def test_layouts_that_stay() -> None:
    """What kernels can read is not copied."""
    rows = torch.randn(2, 5, 3, 8).transpose(1, 2)
    lines = [rows, rows[..., :1], rows[:, :1], rows.expand(2, 3, 5, 8), torch.randn(2, 3, 0, 8)]
    assert all(rows_contiguous(x) is x and rows_apart(x) is x for x in lines)
    pooled = torch.randn(1, 1, 1, 8).expand(2, 3, 5, 8)
    assert rows_contiguous(pooled) is pooled
    assert rows_apart(pooled).is_contiguous()
    for x in (rows, pooled, torch.randn(2, 3, 8, 5).mT, _frames(5, torch.float32)):
        for dtype in (torch.float32, torch.bfloat16):
            assert rows_contiguous(x, dtype).stride(-1) == 1
            assert rows_contiguous(x, dtype).dtype is dtype
            assert torch.equal(rows_contiguous(x, dtype), x.to(dtype))
            assert torch.empty_like(rows_apart(rows_contiguous(x, dtype))).stride(-1) == 1


@pytest.mark.parametrize("seed", range(20))
def test_room_of_results_has_last_stride_1(seed: int) -> None:
    """Of any strides, dims of size 1 included."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*among: int) -> int:
        return among[int(torch.randint(len(among), (), generator=generator))]

    for _ in range(200):
        shape = [draw(1, 2, 3) for _ in range(3)] + [draw(1, 2, 8)]
        strides = [draw(0, 1, 2, 3, 7, 8, 9, 16, 24, 48) for _ in range(3)] + [draw(1, 1, 1, 2)]
        x = rows_apart(torch.zeros(400).as_strided(shape, strides))
        assert shape[-1] == 1 or torch.empty_like(x).stride(-1) == 1
