"""Captures may have any name that the language allows: `captures=` takes those of arguments too."""

from __future__ import annotations

import inspect
import json
import pickle
import re

import pytest
import torch

import attndsl
from attndsl import cli
from attndsl.errors import ArgumentError, ShapeError, UnsupportedError
from attndsl.frontend.declare import COMPILE_ARGUMENTS

TEXT = """
tensor k[heads]: float
tensor v[heads, kv_len]: float
tensor scale[heads, 2 * kv_len]: float
tensor tiles[batch, kv_len]: int
param seed: float
param captures: float = 0.5
param q_offset: int
mask = q >= kv and tiles[b, q] == tiles[b, kv] and q - kv < q_offset
score = captures * k[h] * score + v[h, kv] + scale[h, q - kv + kv_len] + seed * q
"""
NAMES = ("k", "v", "scale", "tiles", "seed", "captures", "q_offset")
USUAL = re.sub(rf"\b({'|'.join(NAMES)})\b(?!_)", r"own_\1", TEXT)
LENGTH = 20
LEARNED = ("k", "v", "scale", "seed")


def _captures(device="cpu"):
    found = {
        "k": torch.randn(2),
        "v": torch.randn(2, LENGTH),
        "scale": torch.randn(2, 2 * LENGTH),
        "tiles": torch.arange(LENGTH).expand(1, -1) // 12,
        "seed": torch.tensor(0.1),
    }
    return {name: x.to(device) for name, x in found.items()} | {"captures": 0.4, "q_offset": 15}


def _usual(captures):
    return {f"own_{name}": value for name, value in captures.items()}


def _leaves(device="cpu"):
    q, key, value = (torch.randn(1, 2, LENGTH, 16, device=device) for _ in range(3))
    captures = _captures(device)
    leaves = [q, key, value, *(captures[name] for name in LEARNED)]
    return [x.requires_grad_() for x in leaves[:3]], leaves, captures


def _learn(captures):
    for name in LEARNED:
        captures[name].requires_grad_()


def test_names_of_arguments_mean_the_same_as_others(place):
    operands, leaves, captures = _leaves(place.device)
    _learn(captures)
    attention = attndsl.compile(TEXT, backend=place.backend)
    usual = attndsl.compile(USUAL, backend=place.backend)
    found = []
    for out, lse in (
        attention(*operands, return_lse=True, captures=captures),
        usual(*operands, return_lse=True, **_usual(captures)),
    ):
        total = out.square().sum() + lse.sum()
        found.append((out, lse, *torch.autograd.grad(total, leaves)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_by_keyword_and_at_once():
    operands, _, captures = _leaves()
    attention = attndsl.compile(TEXT)
    some = {name: captures.pop(name) for name in ("k", "v", "scale", "tiles", "seed", "q_offset")}
    some["captures"] = captures["captures"]
    whole = attention(*operands, captures=some)
    bound = attndsl.compile(USUAL, own_k=some["k"], own_scale=some["scale"])
    rest = {name: x for name, x in _usual(some).items() if name not in ("own_k", "own_scale")}
    number = rest.pop("own_q_offset")
    assert torch.equal(bound(*operands, captures=rest, own_q_offset=number), whole)
    # A call's own takes the place of one given to compile, in either way.
    other = torch.zeros(2)
    mixed = bound(*operands, captures={**rest, "own_k": other}, own_q_offset=number)
    assert not torch.equal(mixed, whole)
    assert torch.equal(mixed, bound(*operands, **rest, own_k=other, own_q_offset=number))


def test_values_given_to_compile_serve_calls():
    scale = torch.randn(2)
    attention = attndsl.compile("mask = causal(); score = scale[h] * score", scale=scale)
    q = torch.randn(1, 2, 8, 4)
    wanted = attndsl.compile("mask = causal(); score = s[h] * score", s=scale)(q, q, q)
    assert torch.equal(attention(q, q, q), wanted)
    assert not torch.equal(attention(q, q, q, scale=3.0), wanted)  # The call's own argument.
    assert torch.equal(pickle.loads(pickle.dumps(attention))(q, q, q), wanted)


@pytest.mark.parametrize("call", ["call", "tiles", "explain", "plot", "source", "to_flex", "tune"])
def test_a_name_given_twice_is_an_error(call):
    attention = attndsl.compile("param w: int\nq - kv < w")
    q = torch.zeros(1, 1, 4, 16)
    run = {
        "call": lambda **given: attention(q, q, q, **given),
        "tiles": lambda **given: attention.tiles(4, 4, **given),
        "explain": lambda **given: attention.explain(q_len=4, kv_len=4, **given),
        "plot": lambda **given: attention.plot(**given),
        "source": lambda **given: attention.source(**given),
        "to_flex": lambda **given: attention.to_flex(4, 4, **given),
        "tune": lambda **given: attention.tune(q, q, q, **given),
    }[call]
    with pytest.raises(ArgumentError, match="w is given twice: by keyword and in captures"):
        run(w=3, captures={"w": 3})
    with pytest.raises(ArgumentError, match="captures is a list that is no mapping from names"):
        run(captures=[3])
    with pytest.raises(ArgumentError, match="captures is a dict that is no mapping from names"):
        run(captures={3: 4})


def test_what_is_missing_is_told_with_where_it_goes():
    attention = attndsl.compile("tensor scale[heads]: float; param w: int; score * scale[h] + w")
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ArgumentError) as caught:
        attention(q, q, q)
    assert caught.value.message == "the call lacks 'scale', 'w'"
    assert caught.value.hint.startswith('add w=..., captures={"scale": ...} to the call')
    with pytest.raises(ArgumentError) as caught:
        attention(q, q, q, scale=torch.ones(1), w=3)
    assert 'captures={"scale": ...}' in caught.value.hint
    with pytest.raises(ArgumentError, match="no tensor or run-time param 'x'"):
        attention(q, q, q, w=3, captures={"scale": torch.ones(1), "x": 1})


def test_arguments_of_compile_are_none_of_calls():
    attention = attndsl.compile("tensor gain[heads]: float; gain[h] * score")
    q, gain = torch.zeros(1, 1, 4, 16), torch.ones(1)
    own = inspect.signature(attndsl.compile).parameters.values()
    assert {x.name for x in own if x.kind is not x.VAR_KEYWORD} == COMPILE_ARGUMENTS
    for name in COMPILE_ARGUMENTS:
        with pytest.raises(ArgumentError) as caught:
            attention(q, q, q, gain=gain, **{name: True})
        assert caught.value.hint.startswith(f"'{name}' is an argument of compile()")
        end = "captures={...}" if name in ("params", "tensors") else f"(text, {name}=...)"
        assert caught.value.hint.endswith(end)
    for ask in (attndsl.compare, attndsl.compile("param c: float = none; score * c")):
        first = (attention, q) if ask is attndsl.compare else (q,)
        with pytest.raises(ArgumentError) as caught:
            ask(*first, q, q, checked=True)
        assert caught.value.hint == (
            "'checked' is an argument of compile(): attndsl.compile(text, checked=...)"
        )


@pytest.mark.parametrize("name", sorted(COMPILE_ARGUMENTS))
def test_captures_may_be_called_like_arguments_of_compile(name):
    attention = attndsl.compile(f"param {name}: float\nscore = {name} * score")
    q = torch.zeros(1, 1, 4, 16)
    assert attention(q, q, q, **{name: 2.0}).shape == q.shape


@pytest.mark.parametrize(
    ("dims", "shown"), [("heads", "heads"), ("batch, 2 * kv_len", "batch, 2 * kv_len")]
)
def test_another_number_of_dims_is_told_with_the_declaration(dims, shown):
    index = ", ".join(["0"] * (1 + dims.count(",")))
    attention = attndsl.compile(f"tensor slope[{dims}]: float; score * slope[{index}]")
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ShapeError) as caught:
        attention(q, q, q, slope=torch.ones(1, 1, 1))
    assert f"the program declares slope[{shown}], with " in caught.value.hint


def test_all_that_takes_captures(tmp_path):
    captures = _captures()
    attention, usual = attndsl.compile(TEXT), attndsl.compile(USUAL)
    names = _usual(captures)
    tiles = attention.tiles(LENGTH, LENGTH, 8, 8, heads=2, captures=captures)
    assert tiles == usual.tiles(LENGTH, LENGTH, 8, 8, heads=2, **names)
    sizes = {"q_len": LENGTH, "kv_len": LENGTH, "heads": 2}
    assert "own_k" not in attention.explain(**sizes, captures=captures)
    assert usual.explain(**sizes, **names) == usual.explain(**sizes, captures=names)
    shown = usual.plot(**sizes, block_m=8, **names)
    assert attention.plot(**sizes, block_m=8, captures=captures).count("rect") == shown.count(
        "rect"
    )
    assert "t_scale" in attention.source(captures={"scale": torch.ones(2, 8)})
    print(attndsl.verify(attention, LENGTH, LENGTH, heads=2, captures=captures))
    q = torch.randn(1, 2, LENGTH, 16, requires_grad=True)
    attention.warmup(q, q, q, captures=captures, scale=0.3)
    with pytest.raises(UnsupportedError, match="one way to run a call"):
        attention.tune(q, q, q, captures=captures)


def test_verify_takes_the_captures_of_a_text():
    found = attndsl.verify("q - kv < name", 40, 40, captures={"name": 8})
    assert str(found) == str(attndsl.verify("q - kv < w", 40, 40, w=8))


def test_positions_of_to_flex_keep_their_names_apart():
    captures = {"q_index": torch.tensor([3.0, 5.0]), "kv_offset": torch.tensor(2.0)}
    text = "tensor q_index[heads]: float; param kv_offset: float"
    attention = attndsl.compile(text + "; score = score + q_index[h] * q + kv_offset * kv")
    positions = torch.tensor([7, 4, 1])
    score_mod, _ = attention.to_flex(
        3, 3, heads=2, q_index=positions, kv_offset=torch.tensor(10), captures=captures
    )
    zero = torch.tensor(0)
    found = score_mod(torch.tensor(1.0), zero, torch.tensor(1), torch.tensor(2), torch.tensor(1))
    assert found == 1.0 + 5.0 * 1 + 2.0 * 11


def test_tangents_and_second_derivatives(kernels):
    operands, leaves, captures = _leaves(kernels.device)
    attention = attndsl.compile(TEXT, backend=kernels.backend)
    usual = attndsl.compile(USUAL, backend=kernels.backend)
    tensors = tuple(x.detach() for x in leaves)
    moved = tuple(torch.randn_like(x) for x in tensors)

    def call(program, rename):
        def found(q, key, value, *learned):
            given = {**captures, **dict(zip(LEARNED, learned, strict=True))}
            return program(q, key, value, captures=rename(given))

        return found

    both = call(attention, dict), call(usual, _usual)
    one, other = (torch.func.jvp(each, tensors, moved) for each in both)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    _learn(captures)
    second = []
    for each in both:
        out = each(*operands, *leaves[3:])
        first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    assert all(torch.equal(one, other) for one, other in zip(*second, strict=True))


def test_in_graphs():
    operands, leaves, captures = _leaves()
    _learn(captures)
    attention = attndsl.compile(TEXT)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q, key, value, captures):
        return attention(q, key, value, captures=captures)

    found = layer(*operands, captures)
    wanted = attention(*operands, captures=captures)
    assert torch.equal(found, wanted)
    gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_files_and_the_command(tmp_path, monkeypatch, capsys):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"a": "tensor scale[heads]: float\nscore * scale[h]"}))
    q = torch.randn(1, 2, 8, 4)
    found = attndsl.load(path)["a"](q, q, q, captures={"scale": torch.ones(2)})
    torch.testing.assert_close(found, attndsl.compile("score")(q, q, q))
    for command in (["check"], ["run", "--q-len", "16", "--head-dim", "8", "--backward"]):
        monkeypatch.setattr("sys.argv", ["attndsl", command[0], str(path), *command[1:]])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
    assert "no errors" in capsys.readouterr().out
