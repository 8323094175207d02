"""What calls of a program take, as records and as the signature that completion reads."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import pytest
import torch

import attndsl
from attndsl.inspection.call_inputs import Param, Tensor

TEXT = """
tensor doc[batch, kv_len]: int
tensor table[heads, 2 * kv_len, n]: float
tensor scale[heads]: float
tensor lambda[heads]: bool
param window: int = 8
param cap: float
param both: bool
mask = causal() and q - kv < window and doc[b, q] == doc[b, kv] and (both or lambda[h])
score = softcap(score, cap) * scale[h] + table[h, q - kv + kv_len, kv % n] + gain[h] + steep + depth
"""
GAIN = torch.ones(4)
STEEP = torch.tensor(2.0)


@pytest.fixture(scope="module")
def attention():
    return attndsl.compile(TEXT, gain=GAIN, steep=STEEP, depth=3)


def test_params(attention):
    found = {param.name: param for param in attention.params}
    assert list(found) == ["steep", "window", "cap", "both"]  # No depth: it is part of the program.
    assert found["window"] == Param("window", "int", 8)
    assert found["both"] == Param("both", "bool", None)
    assert found["steep"].default is STEEP
    assert [p.name for p in attention.params if p.required] == ["cap", "both"]


def test_tensors(attention):
    found = {tensor.name: tensor for tensor in attention.tensors}
    assert list(found) == ["gain", "doc", "table", "scale", "lambda"]
    assert found["doc"] == Tensor("doc", "int", ("batch", "kv_len"))
    assert found["table"].dims == ("heads", "2 * kv_len", "n")
    assert found["gain"].default is GAIN
    assert [t.name for t in attention.tensors if t.required] == ["doc", "table", "scale", "lambda"]
    assert repr(found["gain"]) == "Tensor(name='gain', dtype='float', dims=('gain_dim0',))"
    assert {found["gain"], found["doc"]}  # They can be keys.


def test_records_do_not_change(attention):
    with pytest.raises(AttributeError):
        attention.params[0].name = "other"
    assert attndsl.compile("causal()").params == attndsl.compile("causal()").tensors == ()


def test_the_signature_is_that_of_the_programs_calls(attention):
    found = inspect.signature(attention)
    names = list(found.parameters)
    assert names[:3] == ["q", "k", "v"]
    assert names[3:9] == ["gain", "doc", "table", "steep", "window", "cap"]
    # `scale` is an option of every call, and no keyword can be `lambda`: see `captures`.
    assert found.parameters["scale"].annotation == "float | None"
    assert "lambda" not in found.parameters
    assert "captures" in found.parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in found.parameters.values())
    empty = inspect.Parameter.empty
    defaults = {name: found.parameters[name].default for name in names}
    assert defaults["doc"] is defaults["cap"] is defaults["both"] is empty
    assert (defaults["window"], defaults["gain"], defaults["steep"]) == (8, ..., ...)
    assert found.parameters["doc"].annotation == "torch.Tensor"
    assert found.parameters["cap"].annotation == "float | torch.Tensor"


def test_what_the_signature_binds_a_call_takes():
    text = "tensor gain[heads]: float; param w: int = 4; mask = q - kv < w; score = gain[h] * score"
    attention = attndsl.compile(text)
    q = torch.randn(1, 4, 8, 4)
    bound = inspect.signature(attention).bind(q, q, q, gain=GAIN, q_offset=2)
    wanted = attention(q, q, q, gain=GAIN, q_offset=2)
    assert torch.equal(attention(*bound.args, **bound.kwargs), wanted)
    for wrong in ({}, {"gain": GAIN, "v": q}, {"gain": GAIN, "window": 3}):
        with pytest.raises(TypeError):
            inspect.signature(attention).bind(q, q, q, **wrong)
    rest = inspect.signature(functools.partial(attention, gain=GAIN))
    assert rest.parameters["gain"].default is GAIN


def test_all_options_of_calls_are_there():
    options = inspect.signature(attndsl.Attention.__call__).parameters
    found = inspect.signature(attndsl.compile("causal()")).parameters
    assert list(found) == [name for name in options if name not in ("self", "named")]


@pytest.mark.parametrize("again", [copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_it_too(attention, again):
    assert str(inspect.signature(again(attention))) == str(inspect.signature(attention))


def test_the_class_has_the_signature_of_a_class():
    assert "spec" in inspect.signature(attndsl.Attention).parameters
    assert callable(attndsl.compile("causal()"))
