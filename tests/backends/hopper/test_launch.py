"""Launches past Triton's Python: exactly what the C function gets from that, and maps made once."""

from __future__ import annotations

import ast
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.hopper_launches import (
    backend_of,
    call_of,
    kernel_of,
    plain,
    tensors,
    without_addresses,
)
from support.jobs import configs_of, plan_loop, text_of
from triton.experimental.gluon.language import NVMMASharedLayout

import attndsl.backends.hopper.hopper_layout as layout_module
import attndsl.backends.hopper.launch as launch_module
import attndsl.backends.kernels.triton_launcher as shim
from attndsl.backends.base import Backward, Call, Tangents, Wants
from attndsl.backends.emit.facts import facts_of
from attndsl.backends.hopper.descriptor_types import blocks_of
from attndsl.backends.hopper.launch import TensorMaps, launch_of, view
from attndsl.backends.hopper.tile_shapes import Block
from attndsl.backends.kernels.compile import Executable
from attndsl.backends.kernels.kernel import Task
from attndsl.errors import LaunchWarning
from attndsl.pipeline import lower
from attndsl.source import Source

if TYPE_CHECKING:
    from attndsl.backends.engine.backend import GeneratedBackend

LOWERED = lower(Source("score"), {})
WANTS = Wants()


def both_directions(backend: GeneratedBackend, call: Call, grad_out: torch.Tensor) -> None:
    out, lse = backend.forward(LOWERED, call)
    backend.backward(LOWERED, call, Backward(out, lse, grad_out, None, WANTS))


def test_launches_are_those_of_tritons_wrapper(functions, monkeypatch):
    q, k, v = tensors()
    grad_out = torch.randn(2, 4, 40, 64, dtype=torch.bfloat16)
    both_directions(backend_of(monkeypatch), call_of(q, k, v), grad_out)
    direct, functions.launched = functions.launched, []
    monkeypatch.setattr(launch_module, "why_wrapped", lambda kernel: "this test says so")
    with pytest.warns(LaunchWarning, match="Triton's own Python.*: this test says so"):
        both_directions(backend_of(monkeypatch), call_of(q, k, v), grad_out)
    # A forward, a backward with what is before and behind it, and sums of dK and dV over heads.
    assert len(direct) == len(functions.launched) == 5
    known = {x.data_ptr() for x in (q, k, v, grad_out)}
    found, wanted = (without_addresses(each, known) for each in (direct, functions.launched))
    assert found == wanted
    for address in known:
        assert str(address) in str(found)


def test_results_lie_as_their_inputs(functions, monkeypatch):
    """The output is stored by a map with its strides; its gradient is read where it lies."""
    backend, half = backend_of(monkeypatch), torch.bfloat16
    q = torch.randn(2, 40, 4, 64, dtype=half).transpose(1, 2)
    k, v = torch.randn(2, 2, 50, 64, dtype=half), tensors()[1]
    call = call_of(q, k, v)
    out, lse = backend.forward(LOWERED, call)
    (stored,) = [each for each in _maps(functions.launched[-1]) if each[1] == out.data_ptr()]
    assert stored[7] == out.stride() == q.stride()
    grad_out = torch.randn_like(out)
    found = backend.backward(LOWERED, call, Backward(out, lse, grad_out, None, WANTS))
    strides = [x.stride() for x in (found.q, found.k, found.v)]
    assert strides == [x.stride() for x in (q, k, v)]
    kernel, dq, sums = functions.launched[-3:]
    assert [each[7] for each in _maps(kernel) if each[1] == grad_out.data_ptr()] == [q.stride()]
    # Rows from one batch entry, head or key to the next: of each head's dK and dV, of dQ, then of
    # the sums over heads.
    assert str((200, 50, 1, 200, 50, 1))[1:-1] in str(plain(kernel))
    assert str((160, 1, 4))[1:-1] in str(plain(dq))
    assert str((100, 50, 1, 100, 1, 2))[1:-1] in str(plain(sums))


def test_maps_are_made_once(functions, monkeypatch):
    built: list[Task] = []
    backend, (q, k, v) = backend_of(monkeypatch, built), tensors()
    grad_out = torch.randn(2, 4, 40, 64, dtype=torch.bfloat16)
    other = torch.randn_like(k)
    inputs = {x.data_ptr() for x in (q, k, v, grad_out)}
    for _ in range(3):
        both_directions(backend, call_of(q, k, v), grad_out)
    assert built == [Task.FORWARD, Task.BACKWARD]
    # Three by the forward's blocks, four by the backward's; outputs lie where they may.
    assert [each[0] in inputs for each in functions.encoded].count(True) == 3 + 4
    backend.forward(LOWERED, call_of(q, other, v))
    assert [each[0] for each in functions.encoded].count(other.data_ptr()) == 1


def test_memory_used_again_in_another_shape_gets_a_map_of_its_own(functions, monkeypatch):
    backend = backend_of(monkeypatch)
    memory = torch.zeros(2 * 4 * 40 * 64, dtype=torch.bfloat16)
    # The last has the shape of the first.
    lies = [memory.view(2, 4, 40, 64), memory.view(2, 2, 80, 64), memory.view(2, 4, 20, 128),
            memory.view(2, 40, 4, 64).transpose(1, 2)]  # fmt: skip
    for q in (*lies, *lies):
        k, v = (torch.zeros(2, 2, 50, q.shape[3], dtype=torch.bfloat16) for _ in range(2))
        backend.forward(LOWERED, call_of(q, k, v))
        # Address, swizzle, size and type of elements, block, shape, strides, padding.
        (found,) = [each for each in _maps(functions.launched[-1]) if each[1] == memory.data_ptr()]
        assert found[6:8] == (q.shape, q.stride())
    assert [each[0] for each in functions.encoded].count(memory.data_ptr()) == len(lies)


def _maps(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        return []
    if value[:1] == ("map",):
        return [value]
    return [found for each in value for found in _maps(each)]


def test_few_maps_are_kept(monkeypatch):
    monkeypatch.setattr(launch_module, "_MAX_MAPS", 5)
    memory = torch.zeros(1, 1, 100, 64, dtype=torch.bfloat16)
    made: list[int] = []

    def encode(descriptor: Any) -> list[int]:
        made.append(descriptor.base.data_ptr())
        return [made[-1], *descriptor.shape]

    maps = TensorMaps()
    seen = view(memory[:, :, :50], (6400, 6400, 64, 1), BLOCK["q_desc"], encode)
    for row in range(12):
        tensor = memory[:, :, row : row + 50]
        assert maps.of(seen, tensor) == (tensor.data_ptr(), 1, 1, 50, 64)
        assert maps.of(seen, tensor) is maps.of(seen, tensor)
        assert len(maps) <= 5
    assert len(made) == 12


BLOCK = {"q_desc": Block((1, 1, 64, 64), "bf16", NVMMASharedLayout(128, 16, rank=4))}


@pytest.mark.parametrize("processors", [5, 100])
@pytest.mark.parametrize("text", ["score", "causal()"])
def test_persistent_programs_are_as_many_as_run(functions, monkeypatch, text, processors):
    monkeypatch.setattr(layout_module, "processors_of", lambda device: processors)
    backend, lowered = backend_of(monkeypatch, persistent=True), lower(Source(text), {})
    call = call_of(*tensors())
    for _ in range(2):
        backend.forward(lowered, call)
    # One tile of each of 4 heads of 2 batch entries.
    assert [launch[0] for launch in functions.launched] == [min(processors, 8)] * 2
    counters = list(backend.families[0]._counts._found.values())
    # Without a mask each program knows which items are its own.
    assert len(counters) == (text != "score")
    for counter in counters:
        assert not counter.any()
        assert all(str(counter.data_ptr()) in str(plain(x)) for x in functions.launched)


UNEXPECTED = {
    "scratch": ({"global_scratch_size": 128}, None, "buffers"),
    "profile": ({"profile_scratch_size": 128}, None, "buffers"),
    "no maps": ({"tensordesc_meta": None}, None, "takes descriptors apart"),
    "version": ({}, lambda patch, kernel: patch.setattr(shim, "_VERSION", (3, 99)), "not one of"),
    "field": ({}, lambda patch, kernel: delattr(kernel.run, "launch_pdl"), "has no launch_pdl"),
    "wrapper": ({}, lambda patch, kernel: setattr(kernel.run, "launch", print), "no C function"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNEXPECTED)
def test_an_unexpected_launcher_is_left_to_do_its_work(functions, monkeypatch, name):
    metadata, change, reason = UNEXPECTED[name]
    kernel = kernel_of("dq_from_sums", BLOCK, **metadata)
    if change is not None:
        change(monkeypatch, kernel)
    executable = Executable(kernel, None, False, (64,))
    with pytest.warns(LaunchWarning, match=f"kernel dq_from_sums .*{reason}"):
        found = launch_of(executable)
    assert found.run == executable.launch
    assert not found.encoders


def test_this_triton_is_expected(functions):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = launch_of(Executable(kernel_of("dq_from_sums", BLOCK), None, False, (64,)))
    assert list(found.encoders) == ["q_desc"]


@pytest.mark.parametrize("moving", ["qkv", "q", "kv"])
def test_tangents_are_launched_with_the_results(functions, monkeypatch, moving):
    built: list[Task] = []
    backend, call = backend_of(monkeypatch, built), call_of(*tensors())
    # One of any strides, and one that no map can be made of.
    rows = {"q": torch.randn_like(call.q), "k": torch.randn(50, 2, 64, 2, dtype=torch.bfloat16)}
    rows |= {
        "k": rows["k"].permute(3, 1, 0, 2),
        "v": torch.zeros_like(call.v)[..., :1].expand_as(call.v),
    }
    moved = Tangents(**{name: rows[name] for name in moving})
    for _ in range(2):
        found = backend.forward_with_tangents(LOWERED, call, moved)
        assert found is not None
        out, lse, out_moved, lse_moved = found
        assert out.shape == out_moved.shape == call.q.shape
        assert lse.shape == lse_moved.shape == (2, *call.q.shape[:3])
        assert lse.dtype == lse_moved.dtype == torch.float32
        launched = functions.launched[-1]
        maps = _maps(launched)
        assert [each[1] for each in maps[:4]] == [
            x.data_ptr() for x in (call.q, call.k, call.v, out)
        ]
        own = [each[1] for each in maps[4:7]]
        for name, address, like in zip("qkv", own, (call.q, call.k, call.v), strict=True):
            assert (address == like.data_ptr()) == (name not in moving)
            assert (address == rows[name].data_ptr()) == (name == "q" and "q" in moving)
        assert [each[1] for each in maps[7:]] == [out_moved.data_ptr()]
        assert str(lse.data_ptr()) in str(plain(launched))
        assert "0.125, 2, 4, 2, 40, 50, 0, 0, 2" in str(plain(launched))
    assert built == [Task.FORWARD_TANGENT]
    fields = {"gain": torch.ones(2)}
    assert backend.forward_with_tangents(LOWERED, call, replace(moved, captures=fields)) is None


def test_kernels_of_tangents_take_their_descriptors_in_order():
    call = call_of(*tensors())
    facts = replace(facts_of(LOWERED.program, call), moving_operands="qkv")
    (config, *_) = configs_of(LOWERED, facts, "forward_tangent")
    loop = plan_loop(LOWERED, facts, "forward_tangent", config)
    (function,) = [
        item
        for item in ast.parse(text_of(LOWERED, facts, "forward_tangent", loop, config)).body
        if getattr(item, "name", "") == "attention_forward_tangent"
    ]
    taken = [item.arg for item in function.args.args]
    blocks = list(blocks_of(Task.FORWARD_TANGENT, facts, config))
    assert taken[:11] == [*blocks[:4], "LSE", *blocks[4:], "LSE_MOVED", "scale"]
