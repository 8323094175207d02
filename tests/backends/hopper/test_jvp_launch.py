"""The kernel that makes results and tangents, on a GPU: what it finds, and which calls it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import attndsl
from attndsl.backends.engine.backend import GeneratedBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.gpu

TEXTS = {
    "full": "score",
    "causal": "causal()",
    "window": "sliding_window(200)",
    "prefix": "prefix_lm(150)",
    "documents": "tensor doc[q_len]: int; mask = q >= kv and doc[q] == doc[kv]",
    "some rows": "q < 300 and q >= 100 and kv >= q",
    "alibi": "mask = causal(); score = score + alibi()",
    "softcap": "mask = causal(); score = softcap(score, 20.0)",
    "gain": "tensor gain[heads]: float; mask = causal(); score = gain[h] * score",
    "bias": """
        tensor bias[heads, q_len, kv_len]: float
        mask = causal()
        score = 40 * tanh((score + bias[h, q, kv]) / 40)
    """,
    "sink": "tensor s[heads]: float; mask = causal(); sink = s[h]",
    "nothing": "q < 0",
}
SHAPES = {
    "even": (2, 4, 4, 512, 512),
    "ragged": (1, 6, 2, 333, 700),
    "groups": (3, 8, 1, 1000, 1000),
    "short": (2, 4, 2, 5, 130),
}
"""Batch, heads, kv heads, q_len, kv_len."""


def captures_of(name: str, heads: int, q_len: int, kv_len: int) -> dict[str, torch.Tensor]:
    return {
        "documents": {"doc": (torch.arange(q_len, device="cuda") // 90).int()},
        "gain": {"gain": torch.rand(heads, device="cuda") + 0.5},
        "bias": {"bias": torch.randn(heads, q_len, kv_len, device="cuda")},
        "sink": {"s": torch.randn(heads, device="cuda")},
    }.get(name, {})


def score_of(name: str, score: torch.Tensor, captures: Mapping[str, torch.Tensor]) -> Any:
    """Final scores, and which pairs are live, of a program in torch operations."""
    _, heads, q_len, kv_len = score.shape
    h = torch.arange(heads, device="cuda")[:, None, None]
    q = torch.arange(q_len, device="cuda")[:, None]
    kv = torch.arange(kv_len, device="cuda")
    live = q >= kv
    if name == "full":
        live = torch.ones_like(live)
    elif name == "window":
        live = live & (q - kv < 200)
    elif name == "prefix":
        live = live | (kv < 150)
    elif name == "documents":
        doc = captures["doc"]
        live = live & (doc[:q_len, None] == doc[:kv_len])
    elif name == "some rows":
        live = (q < 300) & (q >= 100) & (kv >= q)
    elif name == "nothing":
        live = q + 0 * kv < 0
    if name == "alibi":
        score = score - ((2.0 ** (-8 * (h + 1) / heads)) * (q - kv)).to(score.dtype)
    elif name == "softcap":
        score = 20 * torch.tanh(score / 20)
    elif name == "gain":
        score = score * captures["gain"][:, None, None].to(score.dtype)
    elif name == "bias":
        score = 40 * torch.tanh((score + captures["bias"].to(score.dtype)) / 40)
    return score, live


def eager(name: str, captures: Mapping[str, torch.Tensor]) -> Any:
    """Attention as everybody would write it, in the dtype of its operands."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        score, live = score_of(name, q @ k.mT * q.shape[3] ** -0.5, captures)
        some = live.any(-1, keepdim=True)
        score = torch.where(live | ~some, score, -torch.inf)
        if name == "sink":
            sink = captures["s"][:, None, None].to(score.dtype).expand(*score.shape[:3], 1)
            score = torch.cat((score, sink), -1)
        weights = torch.where(some, score.softmax(-1), 0.0)[..., : live.shape[-1]]
        lse = score.logsumexp(-1)
        return weights @ v, torch.where(some[..., 0], lse, -torch.inf)

    return attend


def pushed(attend: Any, points: Any, moved: Any, moving: str) -> dict[str, torch.Tensor]:
    """Results and tangents where the operands ``moving`` move."""
    places = ["qkv".index(name) for name in moving]

    def of_some(*some: torch.Tensor) -> Any:
        given = dict(zip(places, some, strict=True))
        return attend(*(given.get(place, x) for place, x in enumerate(points)))

    some = tuple(points[place] for place in places)
    results, tangents = torch.func.jvp(of_some, some, tuple(moved[place] for place in places))
    names = ("out", "lse", "tangent of out", "tangent of lse")
    return dict(zip(names, (*results, *tangents), strict=True))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels made tangents."""
    found: list[str] = []
    both, alone = GeneratedBackend.forward_with_tangents, GeneratedBackend.tangent

    def noted_both(self: Any, *arguments: Any) -> Any:
        results = both(self, *arguments)
        found.extend(["both"] * (results is not None))
        return results

    def noted_alone(self: Any, *arguments: Any) -> Any:
        found.append("alone")
        return alone(self, *arguments)

    monkeypatch.setattr(GeneratedBackend, "forward_with_tangents", noted_both)
    monkeypatch.setattr(GeneratedBackend, "tangent", noted_alone)
    return found


def compare(
    check: Any, name: str, shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype,
    moving: str = "qkv",
) -> None:  # fmt: skip
    batch, heads, kv_heads, q_len, kv_len = shape
    sizes = [(heads, q_len, dims[0]), (kv_heads, kv_len, dims[0]), (kv_heads, kv_len, dims[1])]
    points, moved = (
        [torch.randn(batch, *size, device="cuda").to(dtype) for size in sizes] for _ in range(2)
    )
    captures = captures_of(name, heads, q_len, kv_len)
    attention = attndsl.compile(TEXTS[name], backend="hopper")

    def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q, k, v, return_lse=True, **captures)

    wide = [[x.double() for x in each] for each in (points, moved)]
    doubles = {n: x.double() if x.is_floating_point() else x for n, x in captures.items()}
    golden = pushed(eager(name, doubles), *wide, moving)
    ref = pushed(eager(name, captures), points, moved, moving)
    ref = {key: x.float() if "lse" in key else x for key, x in ref.items()}
    found = pushed(own, points, moved, moving)
    check.close(golden, ref, found, dtype)
    for _ in range(19):
        again = pushed(own, points, moved, moving)
        assert all(torch.equal(again[key], found[key]) for key in found)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_tangents(check, ran, name, dim, shape):
    sizes = SHAPES[shape]
    if name == "documents" and sizes[3] < sizes[4]:
        sizes = (*sizes[:4], sizes[3])
    compare(check, name, sizes, (dim, dim), torch.bfloat16)
    assert ran == ["both"] * 20


@pytest.mark.parametrize("moving", ["q", "k", "v", "qk", "qv", "kv"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["causal", "softcap"])
def test_some_of_the_operands(check, ran, name, dim, moving):
    compare(check, name, SHAPES["groups"], (dim, dim), torch.bfloat16, moving)
    assert ran == ["both"] * 20


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 104), (128, 64), (64, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_and_head_dims(check, ran, dims, dtype):
    compare(check, "causal", SHAPES["ragged"], dims, dtype)
    assert ran == ["both"] * 20


def operands(dim: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(2, 4, 300, dim, device="cuda", dtype=dtype) for _ in range(6)]


@pytest.mark.parametrize(
    ("text", "dim", "dtype"),
    [("causal()", 192, torch.bfloat16), ("causal()", 64, torch.float32),
     ("weights = sigmoid(score)", 64, torch.bfloat16)],
)  # fmt: skip
def test_what_the_kernel_of_tangents_runs(ran, text, dim, dtype):
    q, k, v, *moved = operands(dim, dtype)
    torch.func.jvp(attndsl.compile(text, backend="hopper"), (q, k, v), tuple(moved))
    assert ran == ["alone"]


def test_captures_that_move(ran):
    q, k, v, *moved = operands(64)
    gain = torch.rand(4, device="cuda")
    attention = attndsl.compile(TEXTS["gain"], backend="hopper")

    def attend(q: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, gain=gain)

    torch.func.jvp(attend, (q, gain), (moved[0], gain.cos()))
    assert ran == ["alone"]


def test_positions_and_strides(ran):
    """What both kernels find, where rows are shifted, and tangents lie as they may."""
    q, k, v, dq, dk, dv = operands(64)
    dq, dk, dv = dq.transpose(1, 2), dk[:1].expand_as(dk), dv.mT
    moved = (dq.contiguous().transpose(1, 2), dk, dv.contiguous().mT)
    index = torch.arange(300, device="cuda").flip(0)

    def both(backend: str, dtype: torch.dtype, options: Any) -> tuple[torch.Tensor, ...]:
        attention = attndsl.compile("sliding_window(90)", backend=backend)
        results, tangents = torch.func.jvp(
            lambda *args: attention(*args, return_lse=True, **options),
            tuple(x.to(dtype) for x in (q, k, v)), tuple(x.to(dtype) for x in moved),
        )  # fmt: skip
        return *results, *tangents

    for options in ({"q_offset": 20}, {"kv_index": index}, {"scale": -0.3}):
        found = both("hopper", torch.bfloat16, options)
        golden = both("reference", torch.float64, options)
        for own, exact in zip(found, golden, strict=True):
            kept = exact.isfinite()
            error = (own.double() - exact)[kept].square().mean().sqrt()
            assert torch.equal(own.isfinite(), kept)
            assert error <= 2**-7 * exact[kept].square().mean().sqrt()
    assert ran == ["both"] * 3


def test_graphs():
    q, k, v, *moved = operands(128)
    attention = attndsl.compile("causal()", backend="hopper")

    def tangents() -> Any:
        return torch.func.jvp(attention, (q, k, v), tuple(moved))

    expected = tangents()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = tangents()
    for _ in range(3):
        for each in kept:
            each.zero_()
        graph.replay()
        assert all(map(torch.equal, kept, expected))
