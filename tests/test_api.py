"""compile(), load() and Attention: what they take, refuse and promise."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import attndsl
from attndsl import errors
from attndsl.backends.engine.families import HOPPER
from attndsl.call import dispatch
from attndsl.call.op_encoding import heading
from attndsl.config import read_config
from attndsl.runtime.program_store import lowered_program

if TYPE_CHECKING:
    from collections.abc import Callable


def inputs(**changes: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3)]


def test_no_call_decides_the_scale_of_another():
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    attention = attndsl.compile("causal()")
    first = [attention(q, k, v, scale=scale) for scale in (0.5, None)]
    for scale, found in zip((0.5, None), first, strict=True):
        torch.testing.assert_close(found, attndsl.compile("causal()")(q, k, v, scale=scale))


@pytest.mark.parametrize("scale", ["0.5", torch.tensor(0.5)])
def test_a_scale_is_a_number_in_every_call(scale):
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    attention = attndsl.compile("causal()")
    attention(q, k, v, scale=0.25)
    with pytest.raises(errors.ArgumentError, match=f"scale is a {type(scale).__name__}") as caught:
        attention(q, k, v, scale=scale)
    assert "pass a number" in caught.value.hint


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39, -1e300, 10**400])
def test_a_scale_that_is_no_number_of_fp32_is_refused_at_each_call(scale):
    """Products with such a factor would be made with another one, or fail in the backward."""
    attention = attndsl.compile("causal()")
    q = torch.randn(1, 2, 64, 8, requires_grad=True)
    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match="scale is ") as caught:
            attention(q, q, q, scale=scale)
        assert "at most 3.4e38 in size" in str(caught.value)
        attention(q, q, q, scale=3e38 / 2**100)


def test_what_looks_like_a_file_only_behind_a_comment_is_a_program():
    assert attndsl.compile("kv<9#see.json").explain()


def test_a_scale_that_a_graph_reads_from_a_tensor():
    attention = attndsl.compile("causal()")
    q, scale = torch.randn(1, 2, 16, 8), torch.tensor(0.3)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(
            lambda q, s: attention(q, q, q, scale=s.item()), fullgraph=True, backend="eager"
        )
        torch.testing.assert_close(compiled(q, scale), attention(q, q, q, scale=0.3))


@pytest.mark.parametrize(
    ("text", "hint"),
    [("model.yaml", "attndsl.load(path)"), (" foo/local.attn", "attndsl.load(path)"),
     (lambda b, h, q, kv: q >= kv, "attndsl.trace(function)"), (3, "pass the program's text"),
     (Path("model.yaml"), "attndsl.load(path)"), (int, "pass the program's text")],
)  # fmt: skip
def test_what_is_no_text_of_a_program_is_told_of(text, hint):
    with pytest.raises(errors.ArgumentError) as caught:
        attndsl.compile(text)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"is_causal": True}, "write causal() in the program"),
        ({"dropout_p": 0.1}, "dropout(softmax(score), p)"),
        ({"attn_mask": None}, "attndsl.scaled_dot_product_attention has torch's arguments"),
        ({"doc": [0] * 16}, "pass torch.as_tensor(doc)"),
        ({"doc": torch.zeros(16).int().to_sparse()}, "pass doc.to_dense()"),
    ],
)
def test_arguments_of_other_functions_and_kinds_are_told_of(arguments, hint):
    program = "tensor doc[q_len]: int\nmask = doc[q] == doc[kv]"
    q = torch.randn(1, 2, 16, 8)
    given = arguments if "doc" in arguments else arguments | {"doc": torch.zeros(16).int()}
    with pytest.raises(errors.ArgumentError) as caught:
        attndsl.compile(program)(q, q, q, **given)
    assert hint in caught.value.hint
    with pytest.raises(errors.ArgumentError, match="q has the layout sparse_coo"):
        attndsl.compile("causal()")(q.to_sparse(), q, q)


@pytest.mark.parametrize("name", ["self", "k", "scale", "seed", "tiles", "captures"])
def test_captures_may_be_called_like_arguments_of_calls(name):
    program = f"score = score * 2; tensor {name}[heads]: float; mask = {name}[h] > 0"
    q = torch.randn(1, 2, 4, 8)
    logits = torch.tensor([1.0, -1.0])
    found = attndsl.compile(program)(q, q, q, captures={name: logits})
    assert torch.equal(found, attndsl.compile(program, **{name: logits})(q, q, q))
    assert (found[:, 0] != 0).all()
    assert (found[:, 1] == 0).all()


def test_importing_is_light() -> None:
    script = (
        "import sys, attndsl\n"
        "assert not {'torch', 'lark', 'sympy', 'islpy', 'triton'} & set(sys.modules)\n"
        "attndsl.errors if hasattr(attndsl, 'errors') else None\n"
        "assert 'compile' in dir(attndsl)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=60)


def test_names_are_numbers_tensors_or_declarations() -> None:
    q, k, v = inputs()
    gain = torch.rand(4, requires_grad=True)
    temperature = torch.tensor(1.5, requires_grad=True)
    text = "score = gain[h] * score / temperature; mask = q - kv < window"
    bound = attndsl.compile(text, gain=gain, temperature=temperature, window=3)
    declared = attndsl.compile(
        "param temperature: float; param window: int\n" + text, gain=attndsl.tensor("heads")
    )
    other = declared(q, k, v, gain=gain, temperature=temperature, window=3)
    torch.testing.assert_close(bound(q, k, v), other)
    other.sum().backward()
    assert gain.grad is not None
    assert temperature.grad is not None
    torch.testing.assert_close(
        bound(q, k, v, gain=2 * gain),
        declared(q, k, v, gain=2 * gain, temperature=temperature, window=3),
    )


def test_exact_is_part_of_a_program() -> None:
    text = "score = 5 * tanh(score / 5)"
    fast, exact = attndsl.compile(text), attndsl.compile(text, exact=True)
    assert fast != exact
    assert len({fast, exact, attndsl.compile(text, exact=True)}) == 2
    assert pickle.loads(pickle.dumps(exact)) == exact
    assert pickle.loads(pickle.dumps(exact)).lowered.program.exact
    assert fast.lowered.digest != exact.lowered.digest
    assert "tanh_approx(" in fast.source()
    assert "tanh_ex2(" in fast.source(dtype=torch.float16)
    assert "tanh(" in fast.source(dtype=torch.float32)
    assert "tanh(" in exact.source()
    assert "tanh       bf16: tanh.approx, relative error 2^-11" in fast.explain()
    assert "exact forms everywhere" in exact.explain()
    assert "functions" not in attndsl.compile("causal()").explain()


def test_exact_travels_through_graphs() -> None:
    text = "score = 5 * tanh(score / 5)"
    fast, exact = attndsl.compile(text), attndsl.compile(text, exact=True)
    specs = []

    def look(graph: Any, _inputs: Any) -> Any:
        calls = [n for n in graph.graph.nodes if "attndsl" in str(n.target)]
        specs.extend(heading(n.args[1]).spec for n in calls)
        return graph.forward

    q, k, v = (torch.randn(1, 1, 8, 8) for _ in range(3))
    torch.compile(lambda q, k, v: fast(q, k, v) + exact(q, k, v), backend=look)(q, k, v)
    assert [lowered_program(spec).program.exact for spec in specs] == [False, True]


def test_equal_hashed_pickled_and_copied() -> None:
    first, second = (attndsl.compile("q - kv < w", w=w) for w in (3, 4))
    assert first == attndsl.compile("q - kv < w", w=3)
    assert first != second
    assert len({first, attndsl.compile("q - kv < w", w=3)}) == 1
    q, k, v = inputs()
    for again in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        assert again == first
        torch.testing.assert_close(again(q, k, v), first(q, k, v))
    assert "q - kv < w" in repr(first)


CALLS = [
    ("q rank", lambda a, q, k, v: a(q[0], k, v), errors.ShapeError, "4|dims"),
    ("batch", lambda a, q, k, v: a(q, k[:1], v), errors.ShapeError, "batch 1"),
    ("head dim", lambda a, q, k, v: a(q, k[..., :4], v), errors.ShapeError, "head dim 4"),
    ("heads", lambda a, q, k, v: a(q, k[:, :3], v[:, :3]), errors.ShapeError, "k has 3"),
    ("no heads", lambda a, q, k, v: a(q[:, :0], k, v), errors.ShapeError, "0 heads"),
    (
        "lengths",
        lambda a, q, k, v: a(q, k, v[:, :, :5]),
        errors.ShapeError,
        "same heads and length",
    ),
    ("dtype", lambda a, q, k, v: a(q, k.half(), v), errors.DTypeError, "float16"),
    ("int q", lambda a, q, k, v: a(q.int(), k, v), errors.DTypeError, "int32"),
    ("a list", lambda a, q, k, v: a([1], k, v), errors.ArgumentError, "list"),
    ("meta", lambda a, q, k, v: a(q, k.to("meta"), v), errors.DeviceError, "meta"),
    ("unknown", lambda a, q, k, v: a(q, k, v, gian=1), errors.ArgumentError, "gain"),
    ("missing", lambda a, q, k, v: a(q, k, v, c=1.0), errors.ArgumentError, "gain"),
    ("rank", lambda a, q, k, v: a(q, k, v, c=1.0, gain=q), errors.ShapeError, "gain"),
    ("size", lambda a, q, k, v: a(q, k, v, c=1.0, gain=torch.ones(5)), errors.ShapeError, "heads"),
    (
        "kind",
        lambda a, q, k, v: a(q, k, v, c=1.0, gain=torch.ones(4).int()),
        errors.DTypeError,
        "gain",
    ),
    (
        "param",
        lambda a, q, k, v: a(q, k, v, c="x", gain=torch.ones(4)),
        errors.ArgumentError,
        "'x'",
    ),
    (
        "bool",
        lambda a, q, k, v: a(q, k, v, c=True, gain=torch.ones(4)),
        errors.ArgumentError,
        "True",
    ),
    (
        "0-d",
        lambda a, q, k, v: a(q, k, v, c=torch.ones(1), gain=torch.ones(4)),
        errors.ShapeError,
        "c ",
    ),
    (
        "offset",
        lambda a, q, k, v: a(q, k, v, c=1.0, gain=torch.ones(4), q_offset=1.5),
        errors.ArgumentError,
        "q_offset",
    ),
    (
        "index",
        lambda a, q, k, v: a(q, k, v, c=1.0, gain=torch.ones(4), q_index=torch.arange(3)),
        errors.ShapeError,
        "q_index",
    ),
    ("no head dim", lambda a, q, k, v: a(q[..., :0], k[..., :0], v), errors.ShapeError, "dim 0"),
    (
        "index of floats",
        lambda a, q, k, v: a(q, k, v, c=1.0, gain=torch.ones(4), kv_index=torch.ones(6)),
        errors.DTypeError,
        "kv_index is no int tensor",
    ),
    (
        "index elsewhere",
        lambda a, q, k, v: a(
            q, k, v, c=1.0, gain=torch.ones(4), q_index=torch.arange(q.shape[2], device="meta")
        ),
        errors.DeviceError,
        "q_index is on meta",
    ),
    (
        "offset of two",
        lambda a, q, k, v: a(q, k, v, c=1.0, gain=torch.ones(4), kv_offset=torch.arange(3)),
        errors.ArgumentError,
        "kv_offset is a tensor of shape",
    ),
    (
        "offset elsewhere",
        lambda a, q, k, v: a(
            q, k, v, c=1.0, gain=torch.ones(4), q_offset=torch.tensor(1, device="meta")
        ),
        errors.DeviceError,
        "q_offset is on meta",
    ),
    (
        "capture elsewhere",
        lambda a, q, k, v: a(q, k, v, c=1.0, gain=torch.ones(4, device="meta")),
        errors.DeviceError,
        "gain is on meta",
    ),
    (
        "capture of no tensor",
        lambda a, q, k, v: a(q, k, v, c=1.0, gain=2.0),
        errors.ArgumentError,
        "gain is a float",
    ),
    (
        "deterministic, a list",
        lambda a, q, k, v: a(q, k, v, c=1.0, gain=torch.ones(4), deterministic=[True]),
        errors.ArgumentError,
        "deterministic is a list",
    ),
    (
        "deterministic",
        lambda a, q, k, v: a(q, k, v, c=1.0, gain=torch.ones(4), deterministic="no"),
        errors.ArgumentError,
        "deterministic is a str",
    ),
    (
        "dtype of the output",
        lambda a, q, k, v: a(q, k, v, c=1.0, gain=torch.ones(4), out_dtype=[torch.float32]),
        errors.DTypeError,
        "out_dtype is",
    ),
]


@pytest.mark.parametrize(("name", "call", "kind", "match"), CALLS, ids=[c[0] for c in CALLS])
def test_calls_that_do_not_fit(name: str, call, kind: type, match: str) -> None:
    attention = attndsl.compile(
        "tensor gain[heads]: float; param c: float; score = c * gain[h] * score"
    )
    q, k, v = inputs()
    with pytest.raises(kind, match=match):
        call(attention, q, k, v)


def test_hopper_gpus_get_all_families(monkeypatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(dispatch, "_target_of", lambda device: HOPPER)
    assert dispatch._default(device, torch.bfloat16)[1].startswith("the default for Hopper GPUs")
    backend = dispatch.get_backend("auto", target=HOPPER)
    assert [x.name for x in backend.families] == ["short", "decode", "hopper", "triton"]
    assert backend.name == "auto"


def test_without_gluon_hopper_gpus_get_the_portable_kernels(monkeypatch, without_gluon) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(dispatch, "_target_of", lambda device: HOPPER)
    assert (
        f"cannot be loaded: ModuleNotFoundError: import of {without_gluon}"
        in (dispatch._default(device, torch.bfloat16)[1])
    )
    assert dispatch.get_backend("auto", target=HOPPER) is dispatch.get_backend("triton")


def test_backends_by_name() -> None:
    with pytest.raises(errors.BackendError, match="triton"):
        attndsl.compile("q >= kv", backend="tritn")
    with pytest.raises(errors.BackendError, match="Hopper GPUs"):
        attndsl.compile("q >= kv", backend="hopper")(*inputs())
    checked = attndsl.compile("tensor t[4]: float; score + t[q]", checked=True)
    with pytest.raises(errors.AttnDSLError, match="t"):
        checked(*inputs(), t=torch.ones(4))


def test_what_triton_refuses_it_names() -> None:
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(errors.UnsupportedError, match=r"not torch\.float64"):
        attndsl.compile("score", backend="triton")(q.double(), k.double(), v.double())


CONFIG = {"causal": "causal()", "local": {"program": "q - kv < w", "params": {"w": 4}}}


@pytest.mark.parametrize("suffix", ["yaml", "json", "toml"])
def test_configs_of_each_kind(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    if suffix == "toml":
        path.write_text('causal = "causal()"\n[local]\nprogram = "q - kv < w"\nparams = {w = 4}\n')
    else:
        path.write_text(json.dumps(CONFIG))
    found = attndsl.load(path)
    assert list(found) == ["causal", "local"]
    q, k, v = inputs()
    direct = attndsl.compile("q - kv < 4")
    torch.testing.assert_close(found["local"](q, k, v), direct(q, k, v))


def test_errors_of_a_config_point_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("first: causal()\nsecond: |\n  mask = q >= kv\n  score = scor\n")
    with pytest.raises(errors.NameResolutionError) as caught:
        attndsl.load(path)
    assert caught.value.span is not None
    assert caught.value.span.line == 4


UNUSED = {
    "yaml": "a:\n  program: |\n    mask = q - kv < w\n    score = scor\n"
    "  params: {w: 3, windw: 3, q: 1}\n",
    "json": '{"a": {"program": "q - kv < w", "params": {"w": 3, "windw": 3}}}',
    "toml": '[a]\nprogram = "q - kv < w"\nparams = {w = 3, windw = 3}\n',
}


@pytest.mark.parametrize("suffix", UNUSED)
def test_params_of_a_config_that_are_of_no_use(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    path.write_text(UNUSED[suffix])
    with pytest.raises(errors.AttnDSLError) as caught:
        attndsl.load(path)
    if suffix == "yaml":
        assert isinstance(caught.value, errors.ProgramErrors)
        typo, *found = caught.value.errors
        assert typo.span is not None
        assert typo.span.line == 4
        assert [(e.span.line, e.span.text) for e in found if e.span] == [(5, "windw"), (5, "q")]
        assert str(found[0]).startswith(f"{path}:5:18: 'windw' is bound in the params of 'a', but")
        assert "\n      params: {w: 3, windw: 3, q: 1}\n" in str(found[0])
    else:
        assert str(caught.value).startswith(f"'windw' is bound in the params of '{path}:a', but")
    assert "compile()" not in str(caught.value)


HOSTILE = {
    "number": "a: 3",
    "list": "a: [1, 2]",
    "null": "a:",
    "date": "a: 2001-01-01",
    "object": "a: !!python/object/apply:os.system ['true']",
    "aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "deep": "a: " + "[" * 5000,
    "wide": "\n".join(f"k{i}: [x]" for i in range(20_000)),
    "duplicate": "a: causal()\na: causal()",
    "unknown key": "a: {progam: causal()}",
    "bad params": "a: {program: causal(), params: {w: [1]}}",
    "no mapping": "- causal()",
    "not yaml": "a: 'x",
    "control": "a: \x01",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_configs_are_refused_quickly(
    tmp_path: Path, name: str, quickest: Callable[[Callable[[], object]], float]
) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(HOSTILE[name])

    def refuse() -> None:
        with pytest.raises(errors.AttnDSLError) as caught:
            read_config(path)
        assert len(str(caught.value)) < 20_000

    assert quickest(refuse) < 1.0


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="cannot read"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "x.txt").write_text("a: causal()")
    with pytest.raises(errors.ConfigError, match="YAML"):
        read_config(tmp_path / "x.txt")
    (tmp_path / "big.yaml").write_text("#" * (2 << 20))
    with pytest.raises(errors.ConfigError, match="larger"):
        read_config(tmp_path / "big.yaml")


def test_the_schema_accepts_what_loads() -> None:
    import jsonschema

    schema = json.loads((Path(__file__).parent.parent / "grammar/config.schema.json").read_text())
    jsonschema.validate(CONFIG, schema)
    jsonschema.validate({"a": {"program": "q < w", "params": {"w": "${model.w}"}}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"a": {"program": "q < w", "params": {"w": "16"}}}, schema)
    for bad in ({"a": 3}, {"a": {"params": {}}}, {"a": {"program": "x", "params": {"w": "y"}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


@pytest.mark.parametrize("head_dim", [0, -1, 2.5, "64", None, True])
def test_head_dims_of_sources_are_positive_ints(head_dim: object) -> None:
    attention = attndsl.compile("causal()")
    for ask in (attention.source, attention.explain):
        with pytest.raises(errors.ArgumentError, match="is no head dim"):
            ask(head_dim=head_dim)  # type: ignore[operator]


def test_sources_and_explanations_of_what_is_not_there() -> None:
    attention = attndsl.compile("causal()")
    with pytest.raises(errors.ArgumentError, match="0 is no head dim"):
        attention.source(value_dim=0)
    with pytest.raises(errors.ArgumentError, match="dtype is 'bf16'"):
        attention.source(dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match="no tensor or run-time param 'x'"):
        attention.source(x=1)
    with pytest.raises(errors.ArgumentError, match="there is no device 'foo'"):
        attention.explain("foo")


def test_tensors_whose_signs_are_yet_to_change() -> None:
    attention = attndsl.compile(
        "tensor gain[heads]: float; mask = causal(); score = score * gain[h]"
    )
    gain = torch.randn(4, dtype=torch.complex64).conj().imag
    assert gain.is_neg()
    q, k, v = (x.detach() for x in inputs())
    found = attention(torch._neg_view(q), k, v, gain=gain)
    assert torch.equal(found, attention(-q, k, v, gain=gain.clone()))


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, 10**30])
def test_ints_of_more_than_64_bits_are_refused(value: int) -> None:
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(errors.ArgumentError, match="w does not fit 64 bits"):
        attndsl.compile("param w: int; mask = q - kv < w")(q, k, v, w=value)
