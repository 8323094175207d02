"""Numbers that are equal and not the same: what is kept for one of them is nobody else's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attndsl
from attndsl import errors
from attndsl.backends.tiled import step_plan
from attndsl.call.op_encoding import EncodedCall
from attndsl.flex import flex_attention
from attndsl.inspection import flops
from attndsl.ir import DType, ParamDecl, Program, const, param
from attndsl.parallel import ContextParallel, Shape
from attndsl.runtime.program_store import make_spec

SIDE = "param p: float\nmask = float(q - kv) < 1.0 / p"
"""All pairs are live for 0.0, and none is for -0.0."""
TURNS = (0.0, -0.0, 0.0, -0.0)


def _drawn(rows: int = 200) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, 1, 2, rows, 8).unbind())


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are of the CPU, kernels too")
@pytest.mark.parametrize("more", ["", "\nmask = q >= kv", "\nscore = 2.0 * score"])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_zeros_of_both_signs(backend: str, more: str) -> None:
    q, k, v = _drawn()
    attention = attndsl.compile(SIDE + more, backend=backend)
    wanted = attndsl.compile(SIDE + more, backend="reference")
    for p in TURNS:
        torch.testing.assert_close(
            attention(q, k, v, p=p), wanted(q, k, v, p=p), atol=1e-5, rtol=1e-5
        )


def test_zeros_in_calls_that_are_repeated() -> None:
    attention = attndsl.compile(SIDE)
    room = torch.empty(1, 2, 200, 8)
    for p in (0.0, 0.0, 0.0, -0.0, 0.0):
        q, k, v = _drawn()
        attention(q, k, v, out=room, p=p)
        assert torch.equal(room, attention(q, k, v, p=p))
        assert bool(room.any()) is (str(p) == "0.0")


def test_zeros_in_probabilities() -> None:
    attention = attndsl.compile(
        "param x: float\nweights = dropout(softmax(score), 0.5 if 1.0 / x > 0.0 else 2.0)"
    )
    q, k, v = _drawn(8)
    attention(q, k, v, x=0.0, seed=1)
    with pytest.raises(errors.ArgumentError, match=r"probability is 2\.0 \(x = -0\.0\)"):
        attention(q, k, v, x=-0.0, seed=1)


def test_zeros_on_which_dims_depend() -> None:
    attention = attndsl.compile(
        "param x: float\ntensor t[4 if 1.0 / x > 0.0 else 8]: float\nscore = score + t[q % 4]"
    )
    q, k, v = _drawn(8)
    attention(q, k, v, x=0.0, t=torch.zeros(4))
    with pytest.raises(errors.ShapeError, match="is 8 in this call"):
        attention(q, k, v, x=-0.0, t=torch.zeros(4))
    attention(q, k, v, x=-0.0, t=torch.zeros(8))


def test_a_nan_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = step_plan.make_plan
    monkeypatch.setattr(step_plan, "make_plan", lambda *given: made.append(1) or real(*given))
    attention = attndsl.compile("param p: float\nmask = float(q - kv) < p", backend="cpu")
    q, k, v = _drawn()
    for _ in range(4):
        assert not attention(q, k, v, p=float("nan")).any()
    assert len(made) == 1


def test_counts_of_operations() -> None:
    q, k, v = (torch.empty(1, 1, 512, 8, device="meta") for _ in range(3))
    spec = make_spec(SIDE, {})

    def share(*numbers: float) -> list[int]:
        return [
            flops.live_share(EncodedCall(spec, "auto", False, q, k, v, [], [], [False], [], [x]))[0]
            for x in numbers
        ]

    assert share(*TURNS) == [16, 0, 16, 0]
    before = flops._share.cache_info().currsize
    assert share(*[float("nan")] * 3) == [share(float("nan"))[0]] * 3
    assert flops._share.cache_info().currsize == before + 1


def test_declarations_with_zeros_are_two() -> None:
    def programs(*defaults: float) -> set[Program]:
        p = param("p", DType.FLOAT)
        return {Program(p, params=(ParamDecl("p", DType.FLOAT, x),)) for x in defaults}

    assert len(programs(0.0, -0.0, 0.0)) == 2
    assert len(programs(float("nan"), -float("nan"))) == 1
    bound = {attndsl.frontend.Bound(x) for x in (0.0, -0.0, 0, False, 1, True, 1.0)}
    assert len(bound) == 7


def test_constants() -> None:
    some = {const(x) for x in (0.0, -0.0, 0, False, 1, True, 1.0, float("nan"), -float("nan"))}
    assert len(some) == 8


def test_numbers_of_traced_functions() -> None:
    q, k, v = _drawn(16)

    def run(number: complex) -> torch.Tensor:
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + (kv_idx if str(number.imag) == "0.0" else -kv_idx)

        return flex_attention(q, k, v, score_mod)

    plus, minus = attndsl.compile("score = score + kv"), attndsl.compile("score = score - kv")
    for _ in range(2):
        torch.testing.assert_close(run(complex(1.0, 0.0)), plus(q, k, v))
        torch.testing.assert_close(run(complex(1.0, -0.0)), minus(q, k, v))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are of the CPU, kernels too")
def test_scales_of_layers_that_share_a_plan() -> None:
    """Launches are kept by the sign of a scale; its value is that of each call."""
    pages = torch.randn(4, 16, 1, 16).bfloat16()
    lengths, starts = torch.tensor([20]), torch.tensor([0, 1])
    cache = attndsl.PagedCache(pages, pages, torch.tensor([[1, 3]]), lengths)
    q, other = (torch.randn(1, 2, 16).bfloat16() for _ in range(2))
    served = attndsl.compile("mask = 1.0 / score > 0.0", backend="decode")
    plan = served.plan(cache, starts, 1, most_queries=1)
    for scale in (0.5, None, 0.0, -0.0, -0.5, 0, 2, 0.0, 0.25):
        for each in (q, other):
            found = served.serve(each, cache, starts, plan=plan, scale=scale)
            anew = attndsl.compile("mask = 1.0 / score > 0.0", backend="decode")
            assert torch.equal(found, anew.serve(each, cache, starts, scale=scale, most_queries=1))
    # One of no scale, one of floats and one of ints.
    assert len(served._prepared) == 3


@pytest.fixture
def alone():
    """A sequence of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ContextParallel(init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "text", [SIDE, "param p: float\nscore = score + (1.0 if 1.0 / p > 0.0 else -1.0) * kv"]
)
def test_zeros_in_parallel_calls(alone: ContextParallel, text: str) -> None:
    q, k, v = _drawn(64)
    # It keeps no plans of its own.
    attention = attndsl.compile(text, backend="reference")
    shape = Shape(1, 2, 2, 8, 8)
    alone.shard({"q": q}, {"q": 2}, programs=[attention], shape=shape, p=0.0)
    sharded = alone(attention)
    for p in TURNS:
        assert torch.equal(sharded(q, k, v, p=p), attention(q, k, v, p=p))
    assert len(alone._plans) == 2
    for _ in range(3):
        sharded(q, k, v, p=float("nan"))
    assert len(alone._plans) == 3
    assert len(sharded._known) == 3
