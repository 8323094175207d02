"""One text for many programs: captures that calls leave out, and tensors of size 1."""

from __future__ import annotations

import json
import pickle
import re
import textwrap
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.fork_server import compiling, run_python

import attndsl
from attndsl.errors import ArgumentError, AttnDSLError, ConfigError, TypeMismatchError
from attndsl.inspection.call_inputs import Param, Tensor

if TYPE_CHECKING:
    from pathlib import Path

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 2, 4, 2, 37, 16
FEATURES = {
    "window": ("param window: int", "mask = q - kv < window"),
    "pad": ("tensor pad[batch, kv_len]: bool", "mask = pad[b, kv]"),
    "doc": ("tensor doc[batch, kv_len]: int", "mask = doc[b, q] == doc[b, kv]"),
    "cap": ("param cap: float", "score = softcap(score, cap)"),
    "logit": ("tensor logit[heads]: float", "sink = logit[h]"),
    "p": ("param p: float", "weights = dropout(softmax(score), p)"),
}
SETS = [names for count in range(7) for names in combinations(FEATURES, count)]
SAMPLE = [SETS[0], ("pad", "logit"), ("window", "doc", "cap", "p"), SETS[-1]]


def written_out(names: tuple[str, ...], none: str = "") -> str:
    """The program of some features."""
    declared = [FEATURES[name][0] + none for name in names]
    return "\n".join([*declared, "mask = causal()", *(FEATURES[name][1] for name in names)])


ONE_TEXT = written_out(tuple(FEATURES), " = none")


def captures(names: tuple[str, ...]) -> dict[str, Any]:
    pad = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    pad[:, 30:] = False
    values = {
        "window": 9, "pad": pad, "doc": (torch.arange(LENGTH) // 11).expand(BATCH, -1),
        "cap": 1.5, "logit": torch.linspace(-1, 1, HEADS), "p": 0.25,
    }  # fmt: skip
    return {name: values[name] for name in names}


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    return tuple(torch.randn(BATCH, n, LENGTH, DIM, dtype=dtype) for n in shapes)


def test_all_combinations_are_the_program_written_out() -> None:
    one = attndsl.compile(ONE_TEXT)
    digests = set()
    for names in SETS:
        own = one.variant(captures(names))[0].lowered
        assert own.digest == attndsl.compile(written_out(names)).lowered.digest, names
        digests.add(own.digest)
    assert len(digests) == 64


def check_kernels(names: tuple[str, ...]) -> None:
    one, own = attndsl.compile(ONE_TEXT), attndsl.compile(written_out(names))
    given = captures(names)
    for backend in ("triton", "hopper"):
        for direction in ("forward", "backward"):
            asked = {"backend": backend, "head_dim": 64, "dtype": torch.bfloat16}
            texts = [x.source(direction, **asked, **given) for x in (one, own)]
            # Comments before a module's docstring show each program as it was written.
            left, right = (re.sub("^#.*\n", "", text, flags=re.M) for text in texts)
            assert left.count("def ") > 1
            assert left == right


@pytest.mark.parametrize("names", SAMPLE, ids="-".join)
def test_combinations_have_the_same_kernels(names: tuple[str, ...]) -> None:
    check_kernels(names)


@pytest.mark.slow
@pytest.mark.parametrize("names", SETS, ids="-".join)
def test_all_combinations_have_the_same_kernels(names: tuple[str, ...]) -> None:
    check_kernels(names)


PTX = textwrap.dedent(
    """
    import json, sys
    import torch
    import attndsl
    from attndsl.backends.emit.facts import facts_of
    from support.cross import cross_compile
    from attndsl.backends.kernels.config import Config
    from attndsl.backends.kernels.example import example_call

    one, own, names = json.loads(sys.argv[1])
    configs = dict.fromkeys(("forward", "backward_kv"), (Config(32, 32, 4, 1),))
    left = attndsl.compile(one).variant(dict.fromkeys(names, 1))[0].lowered
    found = []
    for lowered in (left, attndsl.compile(own).lowered):
        facts = facts_of(lowered.program, example_call(lowered, 32, 32, torch.bfloat16, {}))
        kernels = list(cross_compile(lowered, facts, "cuda:90", configs, configs))
        found.append([kernel.kernel.asm["ptx"] for kernel in kernels])
    assert found[0] == found[1]
    print(len(found[0]), all(".target sm_90" in ptx for ptx in found[0]))
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("pad", "logit"), SETS[0], SETS[-1]], ids="-".join)
def test_combinations_are_the_same_ptx(names: tuple[str, ...]) -> None:
    asked = json.dumps([ONE_TEXT, written_out(names), names])
    done = run_python(PTX, asked, env=compiling())
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "2 True\n"


def check_results(names: tuple[str, ...]) -> None:
    one = attndsl.compile(ONE_TEXT)
    own = attndsl.compile(written_out(names), backend="reference")
    q, k, v = (x.requires_grad_() for x in operands())
    given = captures(names)
    if "logit" in given:
        given["logit"].requires_grad_()
    inputs = [q, k, v, *(x for name, x in given.items() if name == "logit")]
    absent = dict.fromkeys(name for name in list(FEATURES)[::2] if name not in names)
    found = one(q, k, v, seed=5, **given, **absent)
    wanted = own(q, k, v, seed=5, **given)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn(found.shape)
    for one_grad, own_grad in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(wanted, inputs, grad),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one_grad, own_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("names", SAMPLE, ids="-".join)
def test_combinations_compute_what_the_reference_does(names: tuple[str, ...]) -> None:
    check_results(names)


@pytest.mark.slow
@pytest.mark.parametrize("names", SETS, ids="-".join)
def test_all_combinations_compute_what_the_reference_does(names: tuple[str, ...]) -> None:
    check_results(names)


def test_a_call_leaves_a_name_out_or_gives_none_or_changes_from_call_to_call() -> None:
    one = attndsl.compile(ONE_TEXT)
    q, k, v = operands()
    plain = attndsl.compile("causal()")(q, k, v)
    capped = attndsl.compile("mask = causal()\nscore = softcap(score, 2.0)")(q, k, v)
    for _ in range(2):
        assert torch.equal(one(q, k, v), plain)
        assert torch.equal(one(q, k, v, pad=None, captures={"cap": None}), plain)
        torch.testing.assert_close(one(q, k, v, cap=2.0), capped)


def test_what_compile_gives_stays_or_is_left_out() -> None:
    q, k, v = operands()
    text = "param cap: float = none\nmask = causal()\nscore = softcap(score, cap)"
    plain, capped = (
        attndsl.compile(x) for x in ("causal()", "mask = causal()\nscore = softcap(score, 2.0)")
    )
    bound, gone = attndsl.compile(text, cap=2.0), attndsl.compile(text, cap=None)
    assert bound.lowered.digest == capped.lowered.digest
    assert gone.lowered.digest == plain.lowered.digest
    for left_out in (bound, gone):
        with pytest.raises(ArgumentError, match="cap"):
            left_out(q, k, v, cap=3.0)
    default = attndsl.compile(text, cap=torch.tensor(2.0))
    torch.testing.assert_close(default(q, k, v), capped(q, k, v))
    assert torch.equal(default(q, k, v, cap=None), plain(q, k, v))


def test_none_is_refused_where_nothing_may_be_left_out() -> None:
    q, k, v = operands()
    for text in ("tensor g[heads]: float\nscore = score * g[h]", "param g: float\nscore * g"):
        with pytest.raises(ArgumentError, match=r"g is (None|a NoneType)") as caught:
            attndsl.compile(text)(q, k, v, g=None)
        assert caught.value.hint is not None
        assert "= none" in caught.value.hint
        with pytest.raises(AttnDSLError, match="does not declare that it may be"):
            attndsl.compile(text.replace("tensor g[heads]", "param g").replace("g[h]", "g"), g=None)
    with pytest.raises(ArgumentError, match="windw") as caught:
        attndsl.compile(ONE_TEXT)(q, k, v, windw=3)
    assert "window" in str(caught.value)


def test_a_set_without_a_meaning_is_refused_at_the_call() -> None:
    text = """
    tensor g[heads]: float
    param x: float = none
    param y: float = none
    param z: float = none
    clear = given(x) or given(y) or not given(z)
    score = score + (0.0 if clear else g[h] * x)
    """
    q, k, v = operands()
    attention = attndsl.compile(text)  # Each set of one, and that of all, is clear.
    g, plain = torch.ones(HEADS), attndsl.compile("score")(q, k, v)
    for given in ({}, {"x": 1.0}, {"y": 1.0}, {"x": 1.0, "z": 1.0}):
        torch.testing.assert_close(attention(q, k, v, g=g, **given), plain)
    with pytest.raises(TypeMismatchError, match="it is unclear whether 'g' counts then"):
        attention(q, k, v, g=g, z=1.0)


def test_programs_say_what_may_be_left_out() -> None:
    one = attndsl.compile(ONE_TEXT)
    assert Param("cap", "float", None, optional=True) in one.params
    assert Tensor("pad", "bool", ("batch", "kv_len"), optional=True) in one.tensors
    assert not any(x.required for x in (*one.params, *one.tensors))
    cap = one.__signature__.parameters["cap"]
    assert (cap.default, cap.annotation) == (None, "float | torch.Tensor | None")
    shown = one.explain(cap=2.0)
    assert "absent     pad: a call that gives it is of another program" in shown
    assert "absent     cap" not in shown


def test_all_that_looks_at_a_program_leaves_out_the_same() -> None:
    one = attndsl.compile(ONE_TEXT)
    names = ("pad", "cap")
    given, own = captures(names), attndsl.compile(written_out(names))
    q, k, v = operands()
    sizes = {"q_len": LENGTH, "kv_len": LENGTH, "batch": BATCH, "heads": HEADS}
    pad = {"pad": given["pad"]}
    for left, right in (
        (one.mask(**sizes, **pad), own.mask(**sizes, **pad)),
        (one.scores(q, k, **given), own.scores(q, k, **given)),
        (one.weights(q, k, **given), own.weights(q, k, **given)),
    ):
        assert torch.equal(left, right)
    assert str(one.tiles(**sizes, **pad)) == str(own.tiles(**sizes, **pad))
    assert attndsl.verify(one, LENGTH, LENGTH, batch=BATCH, heads=HEADS, **pad).surplus == 0
    asked = {"next_q": 40, "kv_len": 40}
    assert str(one.retained(**asked, window=5)) == "keys 36 to 39; 4 of 40"
    attndsl.compare(one, q, k, v, **given)
    assert one.sink_logits(q, k) is None
    out, lse = one(q, k, v, return_lse=True, **given)
    found = one.backward(q, k, v, out, lse, torch.ones_like(out), **given)
    wanted = own.backward(q, k, v, out, lse, torch.ones_like(out), **given)
    for left, right in zip(found, wanted, strict=True):
        assert left == right if isinstance(left, dict) else torch.equal(left, right)


def test_copies_and_joined_programs_may_leave_out_too() -> None:
    q, k, v = operands()
    text = "param cap: float = none\nscore = softcap(score, cap)"
    own = attndsl.compile("mask = causal()\nscore = softcap(score, 2.0)")
    joined = attndsl.join("causal()", text)
    for one in (joined, pickle.loads(pickle.dumps(joined)), attndsl.compile(joined.text)):
        assert torch.equal(one(q, k, v), attndsl.compile("causal()")(q, k, v))
        torch.testing.assert_close(one(q, k, v, cap=2.0), own(q, k, v))
    with pytest.raises(ArgumentError, match="program 2 leaves out 'cap' for good"):
        attndsl.join("causal()", attndsl.compile(text, cap=None))
    sinks = attndsl.compile(ONE_TEXT).without_sink()
    assert torch.equal(sinks(q, k, v), attndsl.compile("causal()")(q, k, v))


def test_configurations_leave_out_with_null(tmp_path: Path) -> None:
    text = "param cap: float = none; param w: int = none; mask = q - kv < w"
    text += "; score = softcap(score, cap)"
    whole, left = attndsl.compile(text), attndsl.compile("score = softcap(score, 2.0)")
    for name, written in {
        "a.yaml": f"m: {{program: '{text}', params: {{cap: 2.0, w: null}}}}",
        "b.yaml": f"m: {{program: '{text}', params: {{cap: 2.0, w: ~}}}}",
        "c.json": json.dumps({"m": {"program": text, "params": {"cap": 2.0, "w": None}}}),
    }.items():
        (tmp_path / name).write_text(written)
        found = attndsl.load(tmp_path / name)["m"]
        assert found.lowered.digest == left.lowered.digest != whole.lowered.digest
    (tmp_path / "d.yaml").write_text("m:\n  program: score * w\n  params: {w: null}\n")
    with pytest.raises(TypeMismatchError, match="'w' is given in the params of 'm' as none"):
        attndsl.load(tmp_path / "d.yaml")
    (tmp_path / "e.yaml").write_text("m:\n  program: score * w\n  params: {w: }\n")
    with pytest.raises(ConfigError, match="not all names with numbers"):
        attndsl.load(tmp_path / "e.yaml")


def test_graphs_leave_out_what_their_calls_do() -> None:
    one = attndsl.compile(ONE_TEXT.replace("dropout(softmax(score), p)", "softmax(score)"))
    q, k, v = operands()
    pad = captures(("pad",))["pad"]
    call = torch.compile(
        lambda *rows, **named: one(*rows, **named), backend="aot_eager", fullgraph=True
    )
    for given in ({}, {"pad": pad, "cap": None}, {"pad": pad[:1], "cap": 2.0}, {}):
        torch.testing.assert_close(call(q, k, v, **given), one(q, k, v, **given))
