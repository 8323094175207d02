"""Tangents that are known before a call's results: who gets what came with these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import attndsl
from attndsl.backends.base import Call, as_fused
from attndsl.backends.dense.dense_jvp import tangent
from attndsl.backends.dense.reference import ReferenceBackend
from attndsl.call.chunked_autograd import attend_in_chunks, flattened, tangents_at
from attndsl.call.fused_jvp import Ahead, tangents_of
from attndsl.call.jvp import attend_with_tangents

TEXT = "tensor gain[heads]: float; mask = causal(); score = score * gain[h]"
LOWERED = attndsl.compile(TEXT).lowered


@dataclass
class Fused:
    """A backend with both kinds of kernels, and which of them ran; ``covers`` says for what."""

    covers: Any = lambda moved: not moved.captures
    ran: list[str] = field(default_factory=list)
    name: str = "fused"
    differentiable: bool = False
    fused: bool = True

    def why_not(self, device: torch.device) -> str | None:
        return None

    def check(self, lowered: Any, call: Call) -> None:
        pass

    def forward(self, lowered: Any, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        self.ran.append("forward")
        return ReferenceBackend().forward(lowered, call)

    def backward(self, *arguments: Any) -> Any:
        raise AssertionError

    def tangent(self, lowered: Any, call: Call, moved: Any, out: Any, lse: Any) -> Any:
        self.ran.append("tangent")
        return tangent(lowered, call, moved)

    def forward_with_tangents(self, lowered: Any, call: Call, moved: Any) -> Any:
        if not self.covers(moved):
            return None
        self.ran.append("both")
        return *ReferenceBackend().forward(lowered, call), *tangent(lowered, call, moved)


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(2, 2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    return *rows, torch.tensor([0.5, 1.5], dtype=torch.float64)


def call_of(q: Any, k: Any, v: Any, gain: Any) -> Call:
    names = ("batch", "heads", "q_len", "head_dim")
    sizes = dict(zip(names, q.shape, strict=True)) | {"kv_heads": 2, "kv_len": k.shape[2]}
    return Call(q, k, v, 0.5, sizes, {"gain": gain})


def function_of(backend: Fused | None) -> Any:
    """Of q, k, v and gain; without a backend, of torch operations."""

    def attend(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if backend is None:
            return attend_in_chunks(LOWERED, call_of(*args))
        return attend_with_tangents(backend, LOWERED, call_of(*args))

    return attend


def loss_of(backend: Fused | None) -> Any:
    def loss(*args: torch.Tensor) -> torch.Tensor:
        out, lse = function_of(backend)(*args)
        return out.sin().sum() + lse.cos().sum()

    return loss


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_it_is_a_fused_backend():
    fused = Fused()
    assert as_fused(fused) is fused


@pytest.mark.parametrize("moved", [(0,), (1,), (2,), (0, 2), (0, 1, 2), (3,), (0, 3)])
@pytest.mark.parametrize("way", ["jvp", "dual"])
def test_one_kernel_for_both_where_it_can(moved, way):
    args, found = inputs(), []
    along = [args[place].cos() for place in moved]
    backend = Fused()

    def pushed(function: Any) -> Any:
        def of_moved(*some: torch.Tensor) -> Any:
            given = dict(zip(moved, some, strict=True))
            return function(*(given.get(place, x) for place, x in enumerate(args)))

        if way == "jvp":
            return torch.func.jvp(of_moved, tuple(args[p] for p in moved), tuple(along))
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(args[p], t) for p, t in zip(moved, along, strict=True)]
            both = [forward_ad.unpack_dual(x) for x in of_moved(*duals)]
            return tuple(x.primal for x in both), tuple(x.tangent for x in both)

    found, wanted = (pushed(function_of(each)) for each in (backend, None))
    same(found, wanted)
    assert backend.ran == (["forward", "tangent"] if 3 in moved else ["both"])


def test_each_call_has_its_own():
    args, backend = inputs(), Fused()

    def twice(loss: Any) -> Any:
        def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return loss(q, k, *args[2:]) * loss(k, q, *args[2:]) + loss(*args)

        return torch.func.jvp(function, args[:2], (args[1].cos(), args[0].sin()))

    same(twice(loss_of(backend)), twice(loss_of(None)))
    assert backend.ran == ["both", "both", "forward"]


def transformed(way: str, loss: Any) -> Any:
    """What a transform makes of a loss, with the rows moved or differentiated."""
    args = inputs()
    rows, along = args[:3], tuple(x.cos() for x in args[:3])

    def of_rows(*some: torch.Tensor) -> torch.Tensor:
        return loss(*some, args[3])

    def of_q(q: torch.Tensor) -> torch.Tensor:
        return of_rows(q, *rows[1:])

    def pushed(*some: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(of_rows, some, along)[1]

    def pushed_q(t: torch.Tensor) -> Any:
        return torch.func.jvp(of_q, rows[:1], (t,))

    def of_k(k: torch.Tensor) -> Any:
        return torch.func.jvp(lambda q: of_rows(q, k, rows[2]), rows[:1], along[:1])

    def dual(q: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            both = forward_ad.unpack_dual(of_q(forward_ad.make_dual(q, along[0])))
            if not q.requires_grad:
                return both.tangent
            return both.tangent, *torch.autograd.grad(both.primal, q)

    many = tuple(torch.stack((x, 2 * x)) for x in rows)
    ways = {
        "jvp of jvp": lambda: torch.func.jvp(pushed, rows, along),
        "jvp of other inputs": lambda: torch.func.jvp(of_k, rows[1:2], along[1:2]),
        "jvp of grad": lambda: torch.func.jvp(torch.func.grad(of_rows, (0, 1, 2)), rows, along),
        "grad of jvp": lambda: torch.func.grad(pushed, (0, 1, 2))(*rows),
        "hessian": lambda: torch.func.hessian(of_q)(rows[0]),
        "jacfwd": lambda: torch.func.jacfwd(of_rows, (0, 2))(*rows),
        "vmap of jvp": lambda: torch.vmap(pushed_q)(torch.stack(along[:2])),
        "jvp of vmap": lambda: torch.func.jvp(torch.vmap(of_rows), many, many),
        "grad": lambda: torch.func.grad(of_rows)(*rows),
        "dual": lambda: dual(rows[0]),
        "dual with a gradient": lambda: dual(rows[0].clone().requires_grad_()),
    }
    return ways[way]()


@pytest.mark.parametrize(
    "way",
    ["jvp of jvp", "jvp of other inputs", "jvp of grad", "grad of jvp", "hessian", "jacfwd",
     "vmap of jvp", "jvp of vmap", "grad", "dual", "dual with a gradient"],
)  # fmt: skip
def test_other_transforms_with_it(way):
    same(transformed(way, loss_of(Fused())), transformed(way, loss_of(None)))


def test_only_the_very_same_tensors_get_them():
    args, backend = inputs(), Fused()
    form, tensors = flattened(call_of(*args))
    moved = args[0].cos()
    wanted = tangent(LOWERED, call_of(*args), tangents_at(form, (0,), (moved,)))

    def asked(inputs: Any, places: tuple[int, ...], *tangents: torch.Tensor) -> Any:
        ahead = Ahead({0: moved})
        assert ahead.tangents(tensors, (0,), (moved,)) is None
        assert ahead.results(backend, LOWERED, form, tensors) is not None
        # What is known is used once.
        assert ahead.results(backend, LOWERED, form, tensors) is None
        found = ahead.tangents(inputs, places, tangents)
        again = ahead.tangents(tensors, (0,), (moved,))
        assert (found is None) != (again is None)
        same(again if found is None else found, wanted)
        return found

    other = args[0].clone()
    assert asked(tensors, (0,), moved) is not None
    assert asked(tensors, (0,), moved.view_as(moved)) is not None
    assert asked(tensors, (0,), moved.clone()) is None
    assert asked(tensors, (0,), moved.mT) is None
    assert asked(tensors, (0,), moved[:1]) is None
    assert asked(tensors, (0,), moved.view(torch.int64)) is None
    assert asked(tensors, (1,), moved) is None
    assert asked(tensors, (0, 1), moved, moved) is None
    assert asked((other, *tensors[1:]), (0,), moved) is None
    ahead = Ahead({0: moved})
    ahead.results(backend, LOWERED, form, tensors)
    moved += 1.0
    assert ahead.tangents(tensors, (0,), (moved,)) is None


def test_nothing_is_known_of_batches():
    args = inputs()
    found = []

    def function(t: torch.Tensor) -> torch.Tensor:
        def inner(q: torch.Tensor) -> torch.Tensor:
            found.append(tangents_of((q, args[1], torch.arange(3))))
            return q.sum()

        return torch.func.jvp(inner, args[:1], (t,))[1]

    torch.vmap(function)(torch.stack((args[1], args[2])))
    assert found == [{}]
    function(args[1])
    assert list(found[1]) == [0]
    assert found[1][0].data_ptr() == args[1].data_ptr()


def test_modes_see_operations():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    args, backend = inputs(), Fused()
    with Seen():
        found = torch.func.jvp(function_of(backend), args, tuple(x.cos() for x in args))
    same(found, torch.func.jvp(function_of(None), args, tuple(x.cos() for x in args)))
    assert not backend.ran


def test_tangents_made_in_inference_mode():
    args, backend = inputs(), Fused()
    with torch.inference_mode():
        moved = args[0].cos()

    def pushed(attend: Any) -> Any:
        return torch.func.jvp(lambda q: attend(q, *args[1:]), args[:1], (moved,))

    same(pushed(function_of(backend)), pushed(function_of(None)))
    assert backend.ran == ["both"]
