"""What the Hopper backend decides before a kernel runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.jobs import HOPPER, job_of, why_portable
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import attndsl
from attndsl.backends.base import Backward, Call, Wants
from attndsl.backends.emit.facts import facts_of
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.hopper import family
from attndsl.backends.hopper.descriptor_types import blocks_of
from attndsl.backends.hopper.family import Hopper
from attndsl.backends.hopper.launch import RowStatistics, descriptor_strides, view
from attndsl.backends.hopper.tile_sizes import candidates
from attndsl.backends.kernels.kernel import Task, task_named
from attndsl.backends.kernels.target import machine_of
from attndsl.pipeline import lower
from attndsl.runtime.program_store import default_cache
from attndsl.source import Source

LOWERED = lower(Source("score"), {})
ALL = Wants(True, True, True, frozenset(), frozenset())


def call_of(
    dtype=torch.bfloat16, head_dim=64, value_dim=64, q_len=40, kv_len=50, **more
) -> Call:  # fmt: skip
    q = torch.empty(2, 4, q_len, head_dim, dtype=dtype)
    k = torch.empty(2, 2, kv_len, head_dim, dtype=dtype)
    v = torch.empty(2, 2, kv_len, value_dim, dtype=dtype)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
    sizes["head_dim"] = head_dim
    return Call(q, k, v, 0.125, sizes, {}, {}, **more)


REFUSED = {
    "fp32": (call_of(torch.float32), "forward", None, "fp16 and bf16"),
    "wide": (call_of(head_dim=264), "forward", None, "head dims up to 256"),
    "wide backward": (call_of(value_dim=264), "backward", ALL, "head dims up to 256"),
    "deterministic": (
        call_of(head_dim=192, deterministic=True), "backward", ALL, "fixed order only at head dims",
    ),
    "fp32 output": (call_of(wide=True), "forward", None, "stores its output in the dtype of q"),
    "empty": (call_of(q_len=0), "forward", None, "nothing"),
    "odd rows": (call_of(head_dim=36), "forward", None, "16 bytes"),
    "odd values": (call_of(value_dim=36), "forward", None, "16 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_portable_kernels_run(name):
    call, kind, wants, reason = REFUSED[name]
    grad = None if kind == "forward" else torch.empty(2, 4, call.q.shape[2], call.v.shape[3])
    assert reason in why_portable(LOWERED, call, kind, grad, wants)
    backend = generated_backend(("hopper", "triton"), default_cache())
    assert backend._family(LOWERED, call, task_named(kind), grad, wants).name == "triton"


def test_what_hopper_kernels_run():
    for call in (call_of(), call_of(torch.float16, 96), call_of(head_dim=192, value_dim=128)):
        assert why_portable(LOWERED, call, "forward") is None
    grad = torch.empty(2, 4, 40, 64, dtype=torch.bfloat16)
    assert why_portable(LOWERED, call_of(), "backward", grad, ALL) is None
    assert "stores its output" in why_portable(LOWERED, call_of(wide=True), "tangent")
    wants = replace(ALL, wide=True)
    assert why_portable(LOWERED, call_of(wide=True), "backward", grad, wants) is None
    assert why_portable(LOWERED, call_of(head_dim=192), "backward", grad, ALL) is None
    grad = torch.empty(2, 4, 40, 256, dtype=torch.bfloat16)
    assert why_portable(LOWERED, call_of(value_dim=256), "backward", grad, ALL) is None
    assert why_portable(LOWERED, call_of(deterministic=True), "forward") is None


DOCUMENTS = "tensor doc[q_len]: int\nmask = q >= kv and doc[q] == doc[kv]"
GAIN = "tensor t[heads]: float\nscore = score * t[h]"
BIAS = "tensor t[heads, q_len, kv_len]: float\nscore = score + t[h, q, kv]"
SLOPES = "tensor t[heads]: float\nscore = score - t[h] * (q - kv)"
COLUMNS = "tensor t[kv_len]: float\nscore = score + t[kv]"
TENSORS = {
    SLOPES: {"t": torch.zeros(4)},
    COLUMNS: {"t": torch.zeros(50)},
    DOCUMENTS: {"doc": torch.zeros(40, dtype=torch.int32)},
    GAIN: {"t": torch.zeros(4)},
    BIAS: {"t": torch.zeros(4, 40, 50)},
}


@pytest.mark.parametrize(
    ("text", "head_dim", "reason"),
    [
        ("causal()", 64, None), ("sliding_window(9)", 128, None), ("score", 128, None),
        ("causal()", 192, "head dims up to 128"), (DOCUMENTS, 64, "looked up by position"),
        ("weights = dropout(softmax(score), 0.1)", 64, None), (GAIN, 64, None), (BIAS, 128, None),
        (SLOPES, 64, None), (COLUMNS, 128, None),
    ],
)  # fmt: skip
def test_which_deterministic_backwards_take_turns(text, head_dim, reason):
    lowered, call = lower(Source(text), {}), call_of(head_dim=head_dim, deterministic=True)
    call = call._replace(tensors=TENSORS.get(text, {}))
    grad = torch.empty(2, 4, 40, 64, dtype=torch.bfloat16)
    learned = frozenset(call.tensors) - {"doc"}
    wants = Hopper().plan_gradients(lowered, call, replace(ALL, tensors=learned)).lines
    assert bool(wants.features) == (text == BIAS)
    found = why_portable(lowered, call, "backward", grad, wants)
    if reason is not None:
        assert reason in found
        return
    assert found is None
    (job,) = Hopper().jobs(lowered, call, Task.BACKWARD, grad, wants)
    assert job.facts.takes_turns
    machine = machine_of("cuda:90")
    configs = job.kernel.configs(job, machine)
    assert all(config.persistent and job.plan(config).visitors for config in configs)
    assert job.kernel.more_configs(configs, job) == ()
    call = call._replace(deterministic=False)
    (plain,) = Hopper().jobs(lowered, call, Task.BACKWARD, grad, wants)
    assert not plain.facts.takes_turns
    assert "kv_pass_turn" not in plain.text(plain.kernel.configs(plain, machine)[0], machine)


@pytest.mark.parametrize(
    ("text", "busy"),
    [("weights = relu(score - 1.0) ** 2", False), ("score = score + score ** 3", False),
     ("weights = gelu(score)", True), ("score = erf(score)", True),
     ("score = abs(score) ** 1.7", True),
     ("score = 50.0 * tanh(score / 50.0)", False), ("score = sqrt(abs(score) + 1)", False),
     # While products are made there is time for what positions alone decide.
     ("score = score + sin(float(q - kv))", False), ("mask = kv <= q or kv % 7 == 0", False)],
)  # fmt: skip
def test_forwards_with_much_to_do_for_each_score_are_portable(text, busy):
    lowered = attndsl.compile(text).lowered
    found = why_portable(lowered, call_of(), "forward")
    assert ("work per pair" in found) if busy else found is None
    assert why_portable(lowered, call_of(), "backward", torch.empty(2, 4, 40, 64), ALL) is None


@pytest.mark.parametrize(("text", "repeats"), [("score", False), ("causal()", True)])
def test_programs_without_a_mask_have_no_loop_over_partial_tiles(text, repeats):
    source = attndsl.compile(text).source(backend="hopper")
    assert source.count("softmax = attend_tiles(") == 1 + repeats


@pytest.mark.parametrize("name", HOPPER)
def test_each_kernel_is_found_in_its_module(name):
    """Which no test of a launch sees where what is compiled is a stand-in."""
    job = job_of(LOWERED, facts_of(LOWERED.program, call_of()), name)
    if name == "forward_tangent":
        job = replace(job, facts=replace(job.facts, moving_operands="qkv"))
    machine = machine_of("cuda:90")
    config = job.kernel.configs(job, machine)[0]
    assert f"def {job.kernel.entry}(" in job.text(config, machine)


def test_a_deterministic_call_has_a_layout_of_its_own():
    backend = generated_backend(("hopper", "triton"), default_cache())
    lowered = lower(Source("score"), {})
    grad = torch.empty(2, 4, 40, 64, dtype=torch.float32)
    calls = [call_of(torch.float32), call_of(torch.float32, deterministic=True)]
    layouts = [backend._layout(lowered, call, Task.BACKWARD, grad, ALL) for call in calls]
    assert layouts[0] is not layouts[1]
    assert backend._layout(lowered, calls[0], Task.BACKWARD, grad, ALL) is layouts[0]


def test_views_make_the_descriptors_that_the_constructor_makes():
    call = call_of()
    facts = facts_of(lower(Source("score"), {}).program, call)
    (config, *_) = candidates(
        Task.FORWARD, 64, plain=True, work="dense", column=False, dropped=False, own=False
    )
    for name, block in blocks_of(Task.FORWARD, facts, config).items():
        first, second = torch.empty_like(call.q), torch.empty_like(call.q)
        steps = descriptor_strides(first)
        assert steps is not None
        shape, block_shape = list(first.shape), list(block.shape)
        expected = TensorDescriptor(second, shape, list(steps), block_shape, block.layout)
        found = view(first, steps, block, None).descriptor(second)
        assert type(found) is TensorDescriptor, name
        assert found.base is second
        assert {**vars(found), "base": 0} == {**vars(expected), "base": 0}


@pytest.mark.parametrize(
    ("shape", "strides", "wanted"),
    [
        ((2, 3, 5, 64), (960, 320, 64, 1), (960, 320, 64, 1)),
        # A stride that is never used may be anything.
        ((1, 3, 1, 64), (7, 64, 3, 1), (8, 64, 8, 1)),
        ((2, 3, 5, 64), (0, 320, 64, 1), None),
        ((2, 3, 5, 4), (60, 20, 4, 1), None),
        ((2, 3, 5, 8), (480, 160, 32, 4), None),
    ],
)
def test_strides_that_the_hardware_takes(shape, strides, wanted):
    tensor = torch.empty(2000, dtype=torch.bfloat16).as_strided(shape, strides)
    assert descriptor_strides(tensor) == wanted


def test_crowded_programs_prefer_smaller_tiles():
    def blocks(task, width, plain, work, dropped=False):
        found = candidates(task, width, plain, work, column=False, dropped=dropped, own=False)
        return [(config.block_m, config.block_n) for config in found]

    assert blocks(Task.BACKWARD, 64, False, "masked")[0][0] == 64
    for work in ("dense", "masked", "short"):
        assert blocks(Task.BACKWARD, 64, True, work)[0][0] == 128
    assert blocks(Task.BACKWARD, 64, True, "short partial")[0][0] == 64
    assert blocks(Task.BACKWARD, 64, True, "dense", dropped=True)[0][0] == 64
    assert blocks(Task.FORWARD, 64, True, "dense", dropped=True)[0] == (128, 128)
    for width in (64, 128):
        dense = blocks(Task.FORWARD, width, True, "dense")
        assert blocks(Task.FORWARD, width, True, "masked") == dense
        few = blocks(Task.FORWARD, width, True, "short partial")
        assert few[0] < dense[0]
        assert set(few) == set(dense)


def test_weights_of_ones_own_are_rounded_early():
    def early(dropped, own):
        found = candidates(
            Task.FORWARD, 128, True, "masked", column=False, dropped=dropped, own=own
        )
        return found[0].early

    assert early(dropped=False, own=True)
    assert not early(dropped=True, own=True)
    assert not early(dropped=False, own=False)


def test_a_backward_reads_outputs_where_they_lie():
    """Rows of a larger output have steps of their own, and their delta is in dQ and dK."""
    whole, grad = torch.empty(2, 4, 640, 64), torch.empty(2, 4, 128, 64)
    out, lse = whole[:, :, 128:256], torch.empty(2, 2, 4, 128)
    launched = []
    launch = SimpleNamespace(run=lambda programs, stream, arguments: launched.append(arguments))
    layout = SimpleNamespace(
        launches={"prepare_backward": launch}, grad_strides=grad.stride()[:3],
        orders=SimpleNamespace(out=SimpleNamespace(strides=grad.stride())),
    )  # fmt: skip
    buffers = SimpleNamespace(
        shift=1, rest=2, delta=3, dq_sums=4, statistics=RowStatistics(1, 4, 128)
    )
    family._prepare(layout, Backward(out, lse, grad, None, ALL), buffers, 0)
    (arguments,) = launched
    assert tuple(arguments[8:14]) == (*out.stride()[:3], *grad.stride()[:3])
