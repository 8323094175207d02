"""What users read of the Hopper kernels: their text, and which calls they run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from support.jobs import job_of, task_of, why_portable

import attndsl
from attndsl import errors
from attndsl.backends.base import Wants
from attndsl.backends.emit.facts import facts_of, with_gradients
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.engine.families import HOPPER
from attndsl.backends.hopper import family
from attndsl.backends.hopper import support as support_module
from attndsl.backends.hopper.tile_sizes import CANDIDATES, candidates
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.kernels.module_headers import TAIL
from attndsl.backends.kernels.target import machine_of
from attndsl.call import dispatch
from attndsl.runtime.program_store import default_cache

GAIN = "tensor gain[heads]: float; score = 3.5 * tanh(gain[h] * score); mask = causal()"
KERNELS = {"forward": "forward", "backward": "backward_kv"}
DIMS = (8, 36, 64, 72, 128, 136, 192, 256, 264, 512)


def lines_of(text: str, head_dim: int) -> list[str]:
    backend = generated_backend(("hopper", "triton"), default_cache())
    return backend.describe(attndsl.compile(text).lowered, head_dim)


@pytest.mark.parametrize("direction", KERNELS)
def test_a_text_is_python_with_the_programs_score(direction):
    attention = attndsl.compile(GAIN)
    text = attention.source(direction, head_dim=128, backend="hopper")
    module = {item.name: item for item in ast.parse(text).body if isinstance(item, ast.FunctionDef)}
    assert f"attention_{KERNELS[direction]}" in module
    assert "warp_specialize" in text
    # What comes after the last nonlinear function is a factor of the whole row's score.
    assert "OUTER = tl.constexpr(3.5)" in text
    assert "tanh_approx(" in ast.unparse(module["score_of_pair"])
    assert "t_gain" in ast.unparse(module["factor_of_score"])
    assert attention.source(direction, head_dim=128, backend="hopper") == text
    assert attention.source(direction, head_dim=128, backend="triton") != text
    assert attention.source(direction, head_dim=128) != text


def test_no_name_in_a_kernel_hides_a_function_of_the_library():
    trees = [
        ast.parse(path.read_text("utf-8"))
        for path in sorted((Path(family.__file__).parent / "templates").glob("*.py"))
    ]
    imported = {
        name.name
        for tree in trees
        for item in ast.walk(tree)
        if isinstance(item, ast.ImportFrom)
        and (item.module or "").endswith((".library", ".channels"))
        for name in item.names
    }
    assert "pack_fields" in imported
    for tree in trees:
        for item in ast.walk(tree):
            if isinstance(item, ast.arg):
                assert item.arg not in imported
            elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
                assert item.id not in imported


@pytest.mark.parametrize(
    ("program", "leaves"),
    [("causal()", False), ("score = softcap(score, 20.0)", True), ("score = 2 * score", False)],
)
def test_threads_leave_one_by_one_where_scores_have_slopes_of_their_own(program, leaves):
    text = attndsl.compile(program).source("backward", head_dim=128, backend="hopper")
    assert f"RELEASE_PER_THREAD = tl.constexpr({leaves})" in text


@pytest.mark.parametrize("direction", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("program", [GAIN, "score"])
def test_a_text_is_what_calls_run(direction, head_dim, program):
    lowered = attndsl.compile(program).lowered
    call = example_call(lowered, head_dim, head_dim, torch.bfloat16, {})
    grads = [torch.empty_like(call.q)] * (direction == "backward")
    facts = with_gradients(facts_of(lowered.program, call, *grads), Wants())
    machine = machine_of("cuda:90")
    job = job_of(lowered, facts, KERNELS[direction]).on(machine)
    config = job.kernel.configs(job, machine)[0]
    found = attndsl.compile(program).source(direction, head_dim=head_dim, backend="hopper")
    head, quotes, body = found.removesuffix(TAIL).partition('"""')
    assert quotes + body == job.text(config, machine)
    assert all(line.startswith("#") for line in head.rstrip("\n").split("\n"))


@pytest.mark.parametrize("direction", KERNELS)
def test_every_width_has_a_text(direction):
    for width in CANDIDATES[task_of(KERNELS[direction])]:
        text = attndsl.compile("causal()").source(direction, head_dim=width, backend="hopper")
        (config, *_) = candidates(
            task_of(KERNELS[direction]),
            width,
            True,
            "masked",
            column=False,
            dropped=False,
            own=False,
        )
        if direction == "backward":
            assert text.count("(consume, (") == config.consumers
        else:
            assert f"CONSUMERS = tl.constexpr({config.consumers})" in text


def test_what_was_compiled_for_hopper_shows_its_kernels():
    text = attndsl.compile(GAIN, backend="hopper").source()
    assert text == attndsl.compile(GAIN).source(backend="hopper")
    portable = attndsl.compile(GAIN).source()
    assert attndsl.compile(GAIN, backend="hopper").source(backend="triton") == portable
    assert attndsl.compile(GAIN, backend="cpu").source() == portable


REFUSED = {
    "fp32": ("forward", {"dtype": torch.float32}, "fp16 and bf16, not torch.float32"),
    "wide": ("forward", {"head_dim": 264}, "Hopper forward kernel supports head dims up to 256"),
    "wide values": (
        "forward", {"value_dim": 512}, "Hopper forward kernel supports head dims up to 256",
    ),
    "wide backward": (
        "backward", {"head_dim": 264}, "Hopper backward kernel supports head dims up to 256",
    ),
    "odd rows": ("backward", {"head_dim": 36}, "multiples of 16 bytes"),
    "captures": (
        "backward", {"gain": torch.ones(2, requires_grad=True), "head_dim": 192},
        "gradients of captures are summed only at head dims up to 128",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_calls_without_a_hopper_kernel_have_no_text(name):
    direction, arguments, reason = REFUSED[name]
    attention = attndsl.compile(GAIN)
    with pytest.raises(errors.UnsupportedError) as caught:
        attention.source(direction, backend="hopper", **arguments)
    assert reason in caught.value.message
    assert "backend='triton'" in caught.value.hint
    assert "def attention_" in attention.source(direction, backend="triton", **arguments)


def test_a_backward_has_the_sums_of_its_gradients():
    gain = torch.ones(2, requires_grad=True)
    attention = attndsl.compile(GAIN, gain=gain)
    assert attention.source("forward", backend="hopper", gain=gain.detach()) == (
        attention.source("forward", backend="hopper")
    )
    learned = attention.source("backward", backend="hopper")
    still = attention.source("backward", backend="hopper", gain=gain.detach())
    assert "FACTOR_SUMS + place" in learned
    assert "FACTOR_SUMS + place" not in still
    cap = "tensor cap[heads]: float; score = cap[h] * tanh(score / cap[h])"
    with pytest.raises(errors.UnsupportedError, match="pair by pair"):
        attndsl.compile(cap, cap=gain).source("backward", backend="hopper")


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_calls_without_a_kernel_have_no_text(backend):
    with pytest.raises(errors.UnsupportedError, match="head dims from 1") as caught:
        attndsl.compile("score").source(backend=backend, head_dim=1024)
    assert "reference" in caught.value.hint


def test_without_gluon_there_is_no_text(without_gluon):
    with pytest.raises(errors.BackendError, match=f"the Hopper .* {without_gluon}") as caught:
        attndsl.compile(GAIN).source(backend="hopper")
    assert "backend='triton'" in caught.value.hint
    assert "def attention_forward" in attndsl.compile(GAIN).source()


FP32 = "    in fp32: triton kernels (the Hopper kernels support fp16 and bf16, not torch.float32)"
OUTPUT = "stores its output in the dtype of q, k and v"


def test_explanation_of_a_plain_program():
    assert lines_of("causal()", 64) == [
        "  forward    hopper kernels, head dims up to 256",
        FP32,
        f"    with out_dtype=torch.float32: triton kernels (the Hopper forward kernel {OUTPUT})",
        "  tangent    hopper kernels, head dims up to 128",
        FP32,
        f"    with out_dtype=torch.float32: triton kernels (the Hopper tangent kernel {OUTPUT})",
        "  backward   hopper kernels, head dims up to 256",
        FP32,
    ]


def test_explanation_of_what_repairs_results():
    lines = lines_of("tensor n[batch]: int; mask = kv < n[b]", 64)
    assert lines[-1] == "  repair     triton kernels, of tiles that are not finite"


def test_explanation_of_captures():
    parts = "param c: float; param n: int; tensor t[kv_len]: float; mask = q - kv < n\n"
    reason = "gradients inside a function of the score are summed pair by pair"
    for text, names in (
        ("tensor gain[kv_len]: float; score = tanh(gain[kv] * score)", "gain"),
        (parts + "score = tanh(c * score + t[kv])", "t, c"),
    ):
        lines = lines_of(text, 128)
        assert lines[-1] == f"    with gradients of {names}: triton kernels ({reason})"
        assert sum("gradients of" in line for line in lines) == 1
        pairs = "the Hopper tangent kernel does not compute tangents of captures"
        assert f"    with tangents of {names}: triton kernels ({pairs})" in lines


def test_explanation_of_captures_that_hopper_kernels_add_up():
    factor = "gradients of a factor need a wider range than that of fp16"
    line = f"    with gradients of gain in fp16: triton kernels ({factor})"
    assert lines_of(GAIN, 128)[-1] == line
    column = "tensor t[kv_len]: float; score = score + t[kv]"
    assert lines_of(column, 128)[-1] == FP32
    wide = "gradients of captures are summed only at head dims up to 128"
    for text, name in ((GAIN, "gain"), (column, "t")):
        found = [line for line in lines_of(text, 192) if "gradients of" in line]
        assert found == [f"    with gradients of {name}: triton kernels ({wide})"]


@pytest.mark.parametrize("head_dim", [264, 512])
def test_explanation_of_wide_heads(head_dim):
    assert lines_of(GAIN, head_dim) == [
        f"  {kind:<10} triton kernels at head dim {head_dim}: "
        f"the Hopper {kind} kernel supports head dims up to {most}"
        for kind, most in (("forward", 256), ("tangent", 128), ("backward", 256))
    ]


@pytest.mark.parametrize(
    ("weights", "dtype", "forward", "backward"),
    [("sigmoid(score) / kv_len", torch.bfloat16, True, True),
     ("dropout(2 * relu(score), 0.1)", torch.bfloat16, True, True),
     ("sigmoid(score) / (h + 1)", torch.bfloat16, True, False),
     ("sigmoid(score) / (q + 1)", torch.bfloat16, False, False),
     ("sigmoid(score) / kv_len", torch.float16, False, False)],
)  # fmt: skip
def test_what_is_multiplied_with_sums_of_weights(weights, dtype, forward, backward):
    """A backward's are of all heads that share keys; fp16 may have no room without the factor."""
    attention = attndsl.compile(f"weights = {weights}")
    for direction, common in (("forward", forward), ("backward", backward)):
        text = attention.source(direction, dtype=dtype, backend="hopper")
        assert ("factor_of_weights(" in text) == common


@pytest.mark.parametrize(
    "weights", ["sigmoid(score)", "dropout(softmax(score), 0.1)"], ids=["own", "dropout"]
)
def test_explanation_of_tangents_without_a_hopper_kernel(weights):
    (line,) = [x for x in lines_of(f"weights = {weights}", 64) if x.startswith("  tangent")]
    assert line == (
        "  tangent    triton kernels at head dim 64: "
        "the Hopper tangent kernel supports only softmax weights, without dropout"
    )


def test_explanation_of_what_no_kernel_runs():
    (line,) = lines_of("score", 1024)
    assert line.startswith("  refused    the triton backend takes head dims from 1 to 512")
    forward, *_, backward = lines_of("weights = dropout(softmax(score), 0.1)", 256)
    assert "hopper kernels" in forward
    assert "triton kernels" in backward
    assert backward.endswith("the Hopper backward kernel supports dropout at head dims up to 128")


def test_explanation_of_weights_of_ones_own():
    lines = lines_of("tensor s[heads]: float; weights = sigmoid(score + s[h])", 64)
    assert [line.split()[1:3] for line in lines if not line.startswith("    ")] == [
        ["hopper", "kernels,"], ["triton", "kernels"], ["hopper", "kernels,"],
    ]  # fmt: skip
    (line,) = [line for line in lines if "with gradients of s:" in line]
    assert line.endswith("kernel computes no gradients of captures in `weights`)")


def test_a_backward_shows_the_portable_kernels_that_it_runs_too():
    program = "tensor t[n, n]: float; tensor ty[batch, kv_len]: int; "
    attention = attndsl.compile(program + "score = score + t[ty[b, q], ty[b, kv]]")
    table = torch.zeros(3, 3, requires_grad=True)
    text = attention.source("backward", backend="hopper", t=table)
    assert "def attention_backward_kv(" in text
    assert text.count("def pairs(") == 1
    still = attention.source("backward", backend="hopper", t=table.detach())
    assert "def pairs(" not in still


@pytest.mark.parametrize("head_dim", DIMS)
def test_explanations_say_what_calls_do(head_dim):
    lowered = attndsl.compile("score").lowered
    call = example_call(lowered, head_dim, head_dim, torch.bfloat16, {})
    lines = lines_of("score", head_dim)
    for kind in KERNELS:
        (line,) = [line for line in lines if line.startswith(f"  {kind} ")]
        refused = why_portable(lowered, call, kind, torch.empty_like(call.q), Wants())
        assert ("hopper kernels" in line) == (refused is None)
        assert refused is None or line.endswith(f": {refused}")
    usual = why_portable(lowered, call, "backward") is None
    again = why_portable(lowered, call._replace(deterministic=True), "backward") is None
    shown = any(line.startswith("    with deterministic=True: triton kernels") for line in lines)
    assert shown == (usual and not again)


def test_explanations_follow_the_table_of_configs(monkeypatch):
    fewer = {width: CANDIDATES[Task.FORWARD][width] for width in (64, 128)}
    monkeypatch.setattr(support_module, "CANDIDATES", {**CANDIDATES, Task.FORWARD: fewer})
    assert "  forward    hopper kernels, head dims up to 128" in lines_of("score", 128)
    (line, *_) = lines_of("score", 256)
    assert line.endswith("the Hopper forward kernel supports head dims up to 128")


def test_the_guide_shows_an_explanation():
    guide = Path(__file__).parents[3] / "docs" / "guide.md"
    lines = lines_of("tensor cap[heads]: float; score = cap[h] * tanh(score / cap[h])", 64)
    backward = next(i for i, line in enumerate(lines) if line.startswith("  backward "))
    assert len(lines[backward:]) > 1
    shown = "`score = cap[h] * tanh(score / cap[h])`:\n\n```text\n"
    assert shown + "\n".join(lines[backward:]) + "\n```" in guide.read_text("utf-8")


@pytest.fixture
def one_hopper_gpu(monkeypatch):
    """As if there were one."""
    monkeypatch.setattr(dispatch, "_target_of", lambda device: HOPPER)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("declared", ["tensor s[heads]: float", "param s: float"])
def test_tangents_of_sinks_are_said_to_be_portable(declared):
    value = "s[h]" if "heads" in declared else "s"
    lines = lines_of(f"{declared}; mask = causal(); sink = {value}", 64)
    said = (
        "    with tangents of s: triton kernels "
        "(the Hopper tangent kernel does not compute tangents of captures)"
    )
    assert said in lines
    assert not any("gradients of s" in line for line in lines)


@pytest.mark.usefixtures("one_hopper_gpu")
def test_explain_on_a_hopper_gpu():
    attention = attndsl.compile(GAIN)
    for head_dim in (64, 256, 264):
        shown = attention.explain("cuda", head_dim=head_dim)
        expected = "\n".join(lines_of(GAIN, head_dim))
        assert "\nbackend      auto on cuda: the default for Hopper GPUs" in shown
        assert shown.endswith("\n" + expected)
    assert "triton kernels" not in attndsl.compile(GAIN, backend="triton").explain("cuda")


@pytest.mark.usefixtures("one_hopper_gpu")
def test_explain_without_gluon(without_gluon):
    chosen, fp64 = attndsl.compile(GAIN).explain("cuda").split("\n")[-2:]
    assert chosen.startswith("backend      triton on cuda")
    assert f"cannot be loaded: ModuleNotFoundError: import of {without_gluon}" in chosen
    assert fp64.startswith("  in fp64    cpu")
