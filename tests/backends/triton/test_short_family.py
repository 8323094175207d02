"""Kernels for keys that fit: what they give, which calls have them, and what they look like."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
from support.fork_server import compiling, run_python
from support.parts import PROGRAMS, Sizes, make_case, results, whole_of, widened

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.engine.describe import describe_kernels
from attndsl.backends.engine.kernel_listing import source_of
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.kernels.target import machine_of
from attndsl.backends.triton.family import Portable
from attndsl.backends.triton.short_family import Short
from attndsl.backends.triton.short_kernels import BACKWARDS, FORWARDS
from attndsl.backends.triton.short_tiles import KEYS, keys_held, most_keys, pieces_of, shape_of
from attndsl.backends.triton.tiles import Widths
from attndsl.call.dispatch import get_backend
from attndsl.errors import UnsupportedError

SOME = (
    "all", "lower right", "by key head", "nothing for some", "alibi", "lengths", "by score", "bias",
    "relative", "sink", "dropout", "dropped sigmoid",
)  # fmt: skip
LENGTHS = [(1, 7), (16, 16), (20, 49), (70, 80), (33, 97), (130, 128)]
NARROW = Widths(64, 64, 2)
FAMILIES = (Short(), Portable())


@pytest.fixture
def ran(monkeypatch):
    """The tasks that the family has run."""
    found = []
    for task in (Task.FORWARD, Task.BACKWARD):
        real = getattr(Short, task.name)

        def seen(self, *args, real=real, task=task):
            found.append(task)
            return real(self, *args)

        monkeypatch.setattr(Short, task.name, seen)
    return found


def check(name, sizes, device, dtype, tolerance):
    """The reference runs in fp64: in bf16 it rounds scores, and ``relu`` then cuts other pairs."""
    found = {}
    for backend in ("short", "reference"):
        torch.manual_seed(0)
        case = make_case(name, backend, dtype, sizes, device)
        if backend == "reference":
            case = widened(case)
        found[backend] = results(whole_of(case), case.leaves())
    for key, value in found["reference"].items():
        scale = max(1.0, float(value[value.isfinite()].abs().amax()))
        torch.testing.assert_close(
            found["short"][key].double(), value.double(),
            rtol=tolerance, atol=tolerance * scale, equal_nan=True,
        )  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_programs(device, name, ran):
    sizes = Sizes(batch=1, heads=2, kv_heads=1, q_len=37, kv_len=75)
    check(name, sizes, device, torch.float32, 2e-3 if device == "cuda" else 2e-4)
    assert Task.FORWARD in ran


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(device, lengths, ran):
    q_len, kv_len = lengths
    sizes = Sizes(batch=1, heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len)
    check("causal", sizes, device, torch.float32, 2e-3 if device == "cuda" else 2e-4)
    assert set(ran) == {Task.FORWARD, Task.BACKWARD}


def test_programs_take_tiles_of_several_heads(device, ran):
    """Five heads of two tiles each: programs begin within a head, and end within another."""
    sizes = Sizes(batch=1, heads=5, kv_heads=1, q_len=70, kv_len=40)
    check("alibi", sizes, device, torch.float32, 2e-3 if device == "cuda" else 2e-4)
    assert Task.FORWARD in ran


def test_other_families_have_backwards_that_keep_processors_busier():
    def reason(
        beside, batch, heads, kv_heads, q_len, kv_len, *, wanted=None, deterministic=False,
        dtype=torch.bfloat16, dim=64, text="score",
    ):  # fmt: skip
        def rows(number, length):
            return torch.empty(batch, number, length, dim, dtype=dtype, device="meta")

        lowered = attndsl.compile(text).lowered
        q, k = rows(heads, q_len), rows(kv_heads, kv_len)
        call = example_call(lowered, 64, 64, torch.bfloat16, {})
        call = call._replace(q=q, k=k, v=k, deterministic=deterministic)
        return Short(beside).why_not(lowered, call, Task.BACKWARD, None, wanted or Wants())

    assert "few programs for 744 query rows" in reason(True, 1, 64, 8, 93, 93)
    assert reason(True, 1, 64, 64, 93, 93) is None
    assert reason(True, 1, 64, 8, 32, 93) is None
    assert reason(True, 9, 64, 8, 93, 93) is None
    assert "more than 96 keys of 384 heads" in reason(True, 32, 12, 12, 128, 128)
    assert reason(True, 2, 12, 12, 128, 128) is None
    assert reason(True, 32, 12, 12, 128, 96) is None
    for sizes in ((1, 64, 8, 93, 93), (32, 12, 12, 128, 128)):
        assert reason(False, *sizes) is None
        assert reason(True, *sizes) is not None
        # Hopper's backward does not run these, or has no work tiles of one head.
        for more in (
            {"wanted": Wants(wide=True)}, {"deterministic": True}, {"dim": 36},
            {"dtype": torch.float32, "dim": 16}, {"text": "weights = dropout(softmax(score), 0.1)"},
            {"text": "score = softcap(score, 20.0)"},
        ):  # fmt: skip
            assert reason(True, *sizes, **more) is None


def test_forwards_hold_three_pieces(device, ran):
    sizes = Sizes(batch=1, heads=2, kv_heads=2, q_len=20, kv_len=197)
    check("all", sizes, device, torch.float32, 2e-3 if device == "cuda" else 2e-4)
    assert ran == [Task.FORWARD]


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize(
    "text",
    ["score = score + log(q_len - q)", "score = sqrt(abs(score))", "weights = score / (q_len - q)"],
)
def test_rows_beyond_the_last_give_gradients_nothing(device, text, ran):
    """Scores of theirs are no numbers, in the first of two pieces of the keys too."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, length, 16, device=device).requires_grad_() for length in (20, 80, 80)
    )
    found = []
    for backend in ("short", "triton", "reference"):
        out = attndsl.compile(text, backend=backend)(q, k, v)
        found.append(torch.autograd.grad((out * out).sum(), (q, k, v)))
    for own, portable, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(portable, other, atol=2e-3, rtol=2e-3)
    assert set(ran) == {Task.FORWARD, Task.BACKWARD}


def test_tangents_have_the_text_of_the_portable_kernel():
    lowered, call = call_of(64, 64)
    text = source_of(FAMILIES, lowered, call, "tangent", Wants())
    assert text == source_of((Portable(),), lowered, call, "tangent", Wants())


@pytest.mark.parametrize("case", [(600, 64, 16), (600, 96, 8), (40, 16, 256), (17, 32, 128)])
@pytest.mark.parametrize("task", [Task.FORWARD, Task.BACKWARD])
def test_tile_sizes_of_fp32(task, case):
    """None that Triton misreads, and small ones in the end."""
    q_len, kv_len, head_dim = case
    lowered, call = call_of(q_len, kv_len, 1, head_dim)
    call = call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())
    assert FAMILIES[0].why_not(lowered, call, task, None, None) is None
    (job,) = FAMILIES[0].jobs(lowered, call, task, call.q, Wants())
    machine = machine_of("cuda:90")
    found = job.kernel.configs(job.on(machine), machine)
    assert found[-1].block_m == 16
    assert all(config.warps < 8 for config in found) or head_dim > 16


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(49, 49), (197, 197), (600, 77), (16, 16)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_gpus(name, lengths):
    q_len, kv_len = lengths
    sizes = Sizes(batch=3, q_len=q_len, kv_len=kv_len, head_dim=64)
    check(name, sizes, "cuda", torch.bfloat16, 3e-2)


@pytest.mark.gpu
def test_a_hundred_backwards_have_the_same_bits():
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(8, 12, 128, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    out = attndsl.compile("mask = causal(); score = score + alibi()", backend="short")(q, k, v)
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for _ in range(100):
        again = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        assert all(map(torch.equal, first, again))


def test_gradients_of_lse_and_extra_kernels(device, ran):
    """Other kernels read delta, whose padding the backward writes."""
    torch.manual_seed(0)
    text = "tensor table[n]: float; score = score + table[clamp(q - kv + 9, 0, 18)]"
    q, k, v = (torch.randn(1, 2, 20, 16, device=device).requires_grad_() for _ in range(3))
    table = torch.randn(19, device=device).requires_grad_()
    found = []
    for backend in ("short", "reference"):
        out, lse = attndsl.compile(text, backend=backend)(q, k, v, table=table, return_lse=True)
        total = (out * out).sum() + lse.cos().sum()
        found.append(torch.autograd.grad(total, (q, k, v, table)))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, atol=2e-3, rtol=2e-3)
    assert Task.FORWARD in ran


def test_programs_hold_all_keys():
    for keys in KEYS:
        pieces = pieces_of(keys)
        assert sum(pieces) == keys
        assert all(piece & (piece - 1) == 0 and piece >= 16 for piece in pieces)
        # A call that the number before does not hold has keys in each piece.
        assert sum(pieces[:-1]) <= max((other for other in KEYS if other < keys), default=0)
    assert keys_held(197, NARROW, backward=False) == 208
    assert keys_held(257, NARROW, backward=False) is None
    assert keys_held(128, NARROW, backward=True) == 128
    assert keys_held(129, NARROW, backward=True) is None
    assert keys_held(0, NARROW, backward=False) is None
    assert keys_held(129, Widths(128, 128, 2), backward=False) is None
    assert most_keys(Widths(128, 128, 2), backward=True) == 64
    assert most_keys(Widths(256, 256, 4), backward=True) == 16
    assert most_keys(Widths(512, 512, 2), backward=False) == 0


def test_every_shape_has_a_kernel():
    for q_len in (1, 16, 17, 64, 512, 513, 5000):
        for keys in KEYS:
            assert shape_of(q_len, keys, False) in FORWARDS
            assert (shape_of(q_len, keys, True) in BACKWARDS) == (keys <= 128)
    names = [kernel.name for kernel in Short.kernels]
    assert len(set(names)) == len(names)


def call_of(q_len, kv_len, heads=2, head_dim=64):
    q = torch.empty(1, heads, q_len, head_dim, dtype=torch.bfloat16)
    k = torch.empty(1, 1, kv_len, head_dim, dtype=torch.bfloat16)
    lowered = attndsl.compile("score").lowered
    return lowered, example_call(lowered, head_dim, head_dim, q.dtype, {})._replace(q=q, k=k, v=k)


def test_what_other_families_run():
    def why(task, *lengths, wants=None, **more):
        lowered, call = call_of(*lengths, **more)
        return FAMILIES[0].why_not(lowered, call, task, None, wants)

    assert why(Task.FORWARD, 5000, 256) is None
    assert "cannot hold 257 keys" in why(Task.FORWARD, 16, 257)
    assert "cannot hold 129 keys" in why(Task.BACKWARD, 16, 129)
    assert why(Task.BACKWARD, 512, 128) is None
    # Two heads share the keys.
    assert "up to 1024 query rows" in why(Task.BACKWARD, 513, 128)
    wants = Wants(tensors=frozenset({"gain"}))
    assert "not compute gradients of captures" in why(Task.BACKWARD, 16, 16, wants=wants)


def test_texts_are_plain_and_the_same_each_time():
    lowered, call = call_of(64, 64)
    text = source_of(FAMILIES, lowered, call, "forward", Wants())
    assert text == source_of(FAMILIES, lowered, call, "forward", Wants())
    assert "attention_short_forward" in text
    # There is one piece, and only keys beyond the last one are masked.
    assert "second" not in text
    assert "mask_of_pair" not in text
    backward = source_of(FAMILIES, lowered, call, "backward", Wants())
    assert backward.count("@triton.jit\ndef attention_") == 1
    lowered, call = call_of(64, 300)
    with pytest.raises(UnsupportedError, match="cannot hold 300 keys"):
        source_of(FAMILIES, lowered, call, "forward", Wants())


COMPILED = ((16, 16, 32), (49, 49, 32), (197, 197, 64), (600, 77, 64))
"""Rows, keys and head dim, for kernels of each name."""
COMPILE = textwrap.dedent(
    """
    import json
    import sys
    import torch
    import attndsl
    from attndsl.backends.base import Wants
    from support.cross import compile_jobs
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.kernels.kernel import Task
    from attndsl.backends.triton.short_family import Short

    dtype, sizes = getattr(torch, sys.argv[1]), json.loads(sys.argv[2])
    short = Short()
    rich = "tensor n[batch]: int; mask = valid_keys(n); score = softcap(score, 9.0); sink = 0.5"
    for text, number in ((rich, len(sizes)), ("score", int(sys.argv[3]))):
        lowered = attndsl.compile(text).lowered
        for q_len, kv_len, dim in sizes[:number]:
            q = torch.empty(2, 2, q_len, dim, dtype=dtype)
            k = torch.empty(2, 2, kv_len, dim, dtype=dtype)
            call = example_call(lowered, dim, dim, dtype, {})._replace(q=q, k=k, v=k)
            for task in (Task.FORWARD, Task.BACKWARD):
                if short.why_not(lowered, call, task, None, None) is None:
                    grad = None if task is Task.FORWARD else q
                    jobs = short.jobs(lowered, call, task, grad, Wants())
                    for kernel in compile_jobs(jobs, "cuda:90"):
                        print(kernel.name, kernel.shared)
    """
)


@pytest.mark.parametrize(
    ("dtype", "plain"),
    [
        ("bfloat16", 1),
        pytest.param("bfloat16", 4, marks=pytest.mark.slow),
        pytest.param("float32", 4, marks=pytest.mark.slow),
    ],
)
def test_they_compile_for_gpus_that_are_not_there(dtype, plain):
    """A program of all features at each of the sizes, and a plain one at the first ``plain``."""
    done = run_python(COMPILE, dtype, json.dumps(COMPILED), plain, env=compiling())
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    names = {name for name, _ in rows}
    assert names == {
        "forward_16x16", "backward_16x16", "forward_64x64", "backward_32x64", "forward_64x208",
        "forward_64x80_long", "backward_64x80_long",
    }  # fmt: skip
    # Two programs fit a processor.
    assert all(int(shared) <= 115 * 1024 for name, shared in rows if "long" not in name), rows


def test_they_are_described_before_the_families_of_all_lengths():
    lowered = attndsl.compile("score").lowered
    lines = describe_kernels(get_backend("short", False), FAMILIES, lowered, 128)
    assert [line.strip() for line in lines] == [
        "forward    short kernels, up to 128 keys at head dim 128",
        "backward   short kernels, up to 64 keys at head dim 128",
    ]
    learned = attndsl.compile("param cap: float; score = cap * score").lowered
    lines = describe_kernels(get_backend("short", False), FAMILIES, learned, 64)
    assert "with gradients of cap: others (the short backward kernel does not" in lines[-1]
    (line,) = describe_kernels(get_backend("short", False), FAMILIES, lowered, 600)
    assert "refused" in line
