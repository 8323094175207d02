"""Traces of functions that read what a walk does not compare are not kept."""

import builtins
import functools
import math
import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from attndsl.flex.closures import reach
from attndsl.flex.trace_cache import TraceCache

CPU = torch.device("cpu")
LENGTHS = {"b": (0, 0), "h": (0, 1), "q": (0, 11), "kv": (0, 11)}
TABLE, DOC = torch.arange(12.0), torch.arange(12) // 5


def texts(*steps):
    """What a cache gives for a function after each step, which may give another one."""
    traces = TraceCache()
    for step in steps:
        yield str(traces.trace(None, step(), torch.float32, CPU, LENGTHS)).strip()


class Named(int):
    def __repr__(self):
        return "Named"


class Worded(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


def _reaching():
    def mask(b, h, q, kv):
        return q - kv < mask.reach

    return mask


def _attribute_of_a_helper(size):
    _helper.reach = size
    return lambda b, h, q, kv: _helper(q, kv)


def _helper(q, kv):
    return q - kv < _helper.reach


def _attribute_of_a_function(size, mask=_reaching()):  # noqa: B008
    mask.reach = size
    return mask


def _partial(factor, b, h, q, kv):
    return q - kv < factor * PARTIAL.times


PARTIAL = functools.partial(_partial, 1)


def _attribute_of_a_partial(size):
    PARTIAL.times = size
    return PARTIAL


def _strides(size):
    tensor = torch.ones(3, size)[:, :1]
    return lambda b, h, q, kv: q - kv < tensor.stride(0)


def _requires_grad(size):
    tensor = torch.ones(3, requires_grad=size == 5)
    return lambda b, h, q, kv: q - kv < (5 if tensor.requires_grad else 9)


def _attribute_of_a_tensor(size):
    tensor = torch.ones(3)
    tensor.reach = tensor.exp = size
    return lambda b, h, q, kv: q - kv < tensor.reach


def _attribute_over_a_method(size):
    tensor = torch.ones(3)
    tensor.exp = lambda: size
    return lambda b, h, q, kv: q - kv < tensor.exp()


def _subclass_of_int(size):
    number = Named(size)
    return lambda b, h, q, kv: q - kv < number


def _subclass_of_str(size):
    word = Worded("a" * size)
    return lambda b, h, q, kv: q - kv < len(word)


def _key_of_a_dict(size):
    sizes = {Named(size): 0}
    return lambda b, h, q, kv: q - kv < next(iter(sizes)) + 0


def _name_in_builtins(size):
    builtins.REACH_OF_A_TEST = size
    return lambda b, h, q, kv: q - kv < REACH_OF_A_TEST  # noqa: F821


def _globals(size):
    globals()["REACH"] = size
    return lambda b, h, q, kv: q - kv < globals()["REACH"]


def _getattr(size):
    _helper.reach = size
    return lambda b, h, q, kv: q - kv < getattr(_helper, "re" + "ach")


def _operator(size):
    _helper.reach = size
    return lambda b, h, q, kv: q - kv < operator.attrgetter("reach")(_helper)


def _class_of_exec(size):
    names = {}
    exec(f"class C:\n w = {size}\ndef mask(b, h, q, kv): return q - kv < C.w", names)
    return names["mask"]


def _imported(size):
    math.REACH_OF_A_TEST = size

    def mask(b, h, q, kv):
        from math import REACH_OF_A_TEST

        return q - kv < REACH_OF_A_TEST

    return mask


def _said_to_be_of_torch(size):
    globals()["REACH"] = size

    def mask(b, h, q, kv):
        return q - kv < REACH  # noqa: F821

    mask.__module__ = "torch.nn.functional"
    return mask


def _matched(size):
    owner = SimpleNamespace(reach=size)

    def mask(b, h, q, kv):
        match owner:
            case SimpleNamespace(reach=found):
                return q - kv < found

    return mask


def _documented(size):
    _helper.__doc__ = str(size)
    return lambda b, h, q, kv: q - kv < int(_helper.__doc__)


@pytest.mark.parametrize(
    "make",
    [
        _attribute_of_a_function, _attribute_of_a_helper, _attribute_of_a_partial, _strides,
        _requires_grad, _attribute_of_a_tensor, _attribute_over_a_method, _subclass_of_int,
        _subclass_of_str, _key_of_a_dict, _name_in_builtins, _globals, _getattr, _operator,
        _class_of_exec, _imported, _said_to_be_of_torch, _matched, _documented,
    ],
)  # fmt: skip
def test_what_is_not_compared_is_read_anew(make):
    def at(size):
        return lambda: make(size)

    try:
        assert list(texts(at(5), at(9), at(5))) == [f"mask = q - kv < {n}" for n in (5, 9, 5)]
    finally:
        for module in (builtins, math):
            vars(module).pop("REACH_OF_A_TEST", None)


@pytest.mark.parametrize(
    ("asks", "context"),
    [
        (torch.is_grad_enabled, torch.no_grad),
        (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu")),
        (torch.is_inference_mode_enabled, torch.inference_mode),
    ],
)
def test_torch_s_state_is_read_anew(asks, context):
    def mask(b, h, q, kv):
        return q - kv < (9 if asks() else 5)

    def within():
        for _ in range(2):
            with context():
                yield str(traces.trace(None, mask, torch.float32, CPU, LENGTHS)).strip()
            yield str(traces.trace(None, mask, torch.float32, CPU, LENGTHS)).strip()

    traces = TraceCache()
    found = list(within())
    assert found[:2] == found[2:]
    assert set(found) == {"mask = q - kv < 5", "mask = q - kv < 9"}


def test_numbers_are_compared_by_type_and_bits():
    def of(number):
        return lambda: lambda b, h, q, kv: torch.where(q > kv, number, 1.0) / 1.0 < kv

    found = list(texts(of(0.0), of(-0.0), of(0), of(False)))
    assert [text.count("-0.0") for text in found] == [0, 1, 0, 0]
    again = list(texts(of(True), of(1), of(1.0)))
    assert again[1:] == list(texts(of(1), of(1.0)))


def test_a_number_too_long_to_be_written_is_compared():
    def of(number):
        return lambda: lambda b, h, q, kv: q - kv < number % 7

    assert list(texts(of(10**5000), of(10**5000 + 1)))[1].endswith(str((10**5000 + 1) % 7))


def test_tensors_made_within_are_made_anew_under_modes():
    def score(score, b, h, q, kv):
        return score * torch.tensor(0.1) + torch.tensor([0.5, 1.5])[h]

    traces = TraceCache()

    def trace():
        return traces.trace(score, None, torch.float32, CPU, LENGTHS)

    (kept,) = trace().captures.values()
    assert next(iter(trace().captures.values())) is kept
    with torch.inference_mode():
        assert next(iter(trace().captures.values())).is_inference()
    with FakeTensorMode():
        assert type(next(iter(trace().captures.values()))) is FakeTensor
    first = str(trace())
    torch.set_default_dtype(torch.float64)
    try:
        assert "0.1 " in str(trace())
        assert "0.1 " not in first
    finally:
        torch.set_default_dtype(torch.float32)
    torch.func.grad(lambda x: (trace(), x.sum())[1])(torch.ones(2))
    assert next(iter(trace().captures.values())) is kept


def window(size):
    return lambda b, h, q, kv: (q >= kv) & (q - kv < size)


def rescaled(function):
    @functools.wraps(function)
    def score(score, b, h, q, kv):
        return function(score * 0.5, b, h, q, kv)

    return score


def many(score, b, h, q, kv):
    import torch.nn.functional as nn

    total = score.clone()
    for n in range(3):
        total = total + nn.softplus(score) * [0.1, 0.2, 0.3][n]
    total += TABLE[kv].to(score.dtype) + min(math.sqrt(4.0), 1.0) + float("inf") * 0
    return torch.where((q >= kv).logical_and(DOC[q] == DOC[kv]), F.relu(total), -torch.inf)


@rescaled
def decorated(score, b, h, q, kv):
    return score.clamp_(min=torch.finfo(torch.float32).min) + TABLE[q - kv]


@pytest.mark.parametrize(
    "mod",
    [
        window(3), many, decorated, noop_mask, and_masks(window(3), window(4)), operator.ge,
        or_masks(noop_mask, window(4)), functools.partial(window, 1), {"a": (window(3), 2.5)},
    ],
)  # fmt: skip
def test_ordinary_functions_are_kept(mod):
    assert not reach(mod).opaque


def test_functions_of_transformers_are_kept():
    masks = pytest.importorskip("transformers.masking_utils")
    for mod in (
        masks.causal_mask_function,
        masks.sliding_window_causal_mask_function(4),
        masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        masks.and_masks(masks.packed_sequence_mask_function(DOC), masks.causal_mask_function),
        masks.padding_mask_function(torch.ones(1, 12, dtype=torch.bool)),
    ):
        assert not reach(mod).opaque
