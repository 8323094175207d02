"""What the Hopper backend decides before a kernel runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from support.jobs import HOPPER, job_of, why_portable
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import attndsl
from attndsl.backends.base import Backward, Call, Wants
from attndsl.backends.emit.facts import facts_of
from attndsl.backends.generated.for_hopper import hopper_backend
from attndsl.backends.hopper import family
from attndsl.backends.hopper.arguments import blocks_of
from attndsl.backends.hopper.family import Hopper
from attndsl.backends.hopper.launch import RowStatistics, descriptor_strides, view
from attndsl.backends.hopper.tiles import candidates
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.kernels.machine import machine_of
from attndsl.pipeline import lower
from attndsl.runtime.programs import default_cache
from attndsl.source import Source

if TYPE_CHECKING:
    from attndsl.backends.kernels.config import Config

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
        call_of(head_dim=192, deterministic=True), "backward", ALL, "fixed order at head dims",
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
    backend = hopper_backend(default_cache())
    assert backend._family(LOWERED, call, Task(kind), grad, wants).name == "triton"


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
    assert wants.stores_ds == (text == BIAS)
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
    assert ("for each pair" in found) if busy else found is None
    assert why_portable(lowered, call_of(), "backward", torch.empty(2, 4, 40, 64), ALL) is None


@pytest.mark.parametrize(("text", "repeats"), [("score", False), ("causal()", True)])
def test_programs_without_a_mask_have_no_loop_over_partial_tiles(text, repeats):
    source = attndsl.compile(text).source(backend="hopper")
    assert f"FORWARD_REPEATS_PARTIAL = tl.constexpr({repeats})" in source


SMALL, LARGE = (128, 128, 3), (192, 128, 3)
FORWARDS = [
    ("score", 64, {2: LARGE, 128: LARGE, 197: SMALL, 384: LARGE, 512: SMALL, 577: SMALL,
                   1024: SMALL, 2048: LARGE, 8192: LARGE}),
    ("causal()", 64, {128: LARGE, 1536: SMALL, 3072: SMALL, 4096: LARGE}),
    ("sliding_window(1024)", 64, {8192: SMALL}),
    ("sliding_window(4096)", 64, {16384: LARGE}),
    ("score", 72, {577: (128, 64, 4), 1024: (192, 64, 3), 4096: (192, 64, 3)}),
    ("causal()", 96, {577: (128, 128, 2), 4096: (192, 64, 3)}),
    ("score", 128, {256: (128, 64, 4), 1024: (128, 64, 4), 2048: (128, 128, 2)}),
    ("mask = causal(); weights = dropout(softmax(score), 0.1)", 64, {512: (128, 128, 3)}),
    ("weights = sigmoid(score)", 128, {512: (128, 128, 2)}),
    ("score", 256, {512: (128, 64, 2)}),
]  # fmt: skip
BACKWARDS = [
    ("score", 64, {160: 64, 197: 64, 256: 128, 320: 64, 512: 128, 577: 128}),
    ("causal()", 64, {200: 128}),
    ("score", 128, {197: 64, 1024: 64}),
]


@pytest.mark.parametrize(
    ("text", "head_dim", "length", "tiles"),
    [(text, dim, *one) for text, dim, found in FORWARDS for one in found.items()],
)
def test_forwards_have_the_tiles_that_suit_their_lengths(text, head_dim, length, tiles):
    first = _first_config(text, head_dim, length, Task.FORWARD)
    assert (first.block_m, first.block_n, first.stages) == tiles
    assert first.persistent == (head_dim <= 128)


@pytest.mark.parametrize(
    ("text", "head_dim", "length", "rows"),
    [(text, dim, *one) for text, dim, found in BACKWARDS for one in found.items()],
)
def test_backwards_have_the_tiles_that_suit_their_lengths(text, head_dim, length, rows):
    assert _first_config(text, head_dim, length, Task.BACKWARD).block_m == rows


def _first_config(text: str, head_dim: int, length: int, task: Task) -> Config:
    machine, lowered = machine_of("cuda:90"), lower(Source(text), {})
    call = call_of(q_len=length, kv_len=length, head_dim=head_dim, value_dim=head_dim)
    wanted = ALL if task is Task.BACKWARD else None
    (job,) = Hopper().jobs(lowered, call, task, None, wanted)
    return job.kernel.configs(job.on(machine), machine)[0]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("param n: int; param m: int; tensor t[heads, n]: float; "
         "score = score + t[h, t5_bucket(kv - q, n, m)]", 64),
        ("param n: int; param m: int; tensor t[heads, n]: float; mask = causal(); "
         "score = score + t[h, t5_bucket_causal(q - kv, n, m)]", 64),
        ("tensor t[heads, 32]: float; score = score + t[h, t5_bucket(q - kv, 32, 128)]", 128),
        ("param cap: float; score = softcap(score, cap)", 128),
        ("param w: int; mask = causal() and q - kv < w", 128),
    ],
)  # fmt: skip
def test_long_scores_with_params_begin_with_few_keys(text, columns):
    """Larger tiles spill there, and take three compilations to find that out."""
    machine, lowered = machine_of("cuda:90"), lower(Source(text), {})
    tensors = {decl.name: torch.zeros(2, 32) for decl in lowered.program.tensors}
    params = {decl.name: 32.0 if decl.name == "cap" else 32 for decl in lowered.program.params}
    for head_dim, expected in ((64, 128), (128, columns)):
        call = call_of(q_len=4096, kv_len=4096, head_dim=head_dim, value_dim=head_dim)
        call = call._replace(tensors=tensors, params=params)
        (job,) = Hopper().jobs(lowered, call, Task.FORWARD, None, None)
        assert job.kernel.configs(job.on(machine), machine)[0].block_n == expected


@pytest.mark.parametrize(
    ("text", "both"),
    [
        ("mask = global_tokens(64) or local_window(128)", False),
        ("param n: int; param w: int; mask = block_diffusion(n, w)", False),
        ("causal()", False),
        ("score = tanh(score)", True),
        ("mask = causal(); score = softcap(score, 30.0)", True),
    ],
)
def test_tiles_without_a_mask_have_a_loop_of_their_own_where_masks_take_long(text, both):
    """A backward with one loop does a mask's work in all tiles."""
    machine, lowered = machine_of("cuda:90"), lower(Source(text), {})
    params = {decl.name: 64 for decl in lowered.program.params}
    call = call_of(q_len=1024, head_dim=128, value_dim=128)._replace(params=params)
    job = job_of(lowered, facts_of(lowered.program, call), "backward_kv")
    found = {config.peeled for config in job.kernel.configs(job, machine)}
    assert found == ({True, False} if both else {True})


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("param n: int; param w: int; mask = block_diffusion(n, w)", 64),
        ("param a: int; param c: int; param t: int; mask = sta3d(a, c, t, 2, 2, 2)", 64),
        ("param n: int; mask = natten2d(n, n, 7, 7)", 128),
        (f"mask = {' + '.join(f'sin(q * kv / {n}.0)' for n in range(5, 11))} > 0.5", None),
        ("mask = log(1.0 + q + kv) > 0.5; score = log(1.0 + abs(score)) + log(2.0 + abs(score))",
         None),
        ("mask = log(1.0 + abs(score)) + log(2.0 + abs(score)) > 0.5", None),
    ],
)  # fmt: skip
def test_forwards_with_long_masks_have_few_keys(text, columns, head_dim):
    """A mask is no work of FULL tiles, so that it may take longer than a score."""
    machine, lowered = machine_of("cuda:90"), lower(Source(text), {})
    params = {decl.name: 64 for decl in lowered.program.params}
    call = call_of(q_len=1024, head_dim=head_dim, value_dim=head_dim)._replace(params=params)
    why = Hopper().why_not(lowered, call, Task.FORWARD, None, None)
    assert (why is None) == (columns is not None), why
    if columns is None:
        assert "so much work for each pair" in why
        return
    (job,) = Hopper().jobs(lowered, call, Task.FORWARD, None, None)
    found = job.kernel.configs(job.on(machine), machine)
    most = 64 if head_dim == 256 else columns
    assert max(config.block_n for config in found) == most
    assert head_dim < 256 or {config.stages for config in found} == {2}


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
    backend, lowered = hopper_backend(default_cache()), lower(Source("score"), {})
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
