"""Transforms of ``torch.func`` and refusals in graphs of torch.compile: nothing is dropped."""

from __future__ import annotations

import pytest
import torch
from support.graph_errors import shown
from torch.autograd import forward_ad

import attndsl
from attndsl import scaled_dot_product_attention

GAIN = attndsl.compile("tensor gain[heads]: float; mask = causal(); score = score * gain[h]")


def _loss(x, gain):
    return GAIN(x, x, x, gain=gain).sin().sum()


def _jvp(x, gain):
    return torch.func.jvp(_loss, (x, gain), (x.cos(), gain.sin()))


def _dual(x, gain):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(_loss(forward_ad.make_dual(x, x.cos()), gain)).tangent


TRANSFORMS = {
    "jvp": _jvp,
    "grad": torch.func.grad(_loss, argnums=(0, 1)),
    "vmap": lambda x, gain: torch.vmap(_loss, in_dims=(0, None))(x[:, None], gain),
    "sdpa": lambda x, gain: torch.func.grad(
        lambda x: scaled_dot_product_attention(x, x, x, x[0, 0, :, 0] > 0).sum()
    )(x),
}


def _inputs():
    return torch.randn(3, 2, 5, 8), torch.rand(2)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_in_a_whole_graph_are_refused(graphs, name):
    """Torch by itself would give tangents of zero."""
    words = r"no tangents and no torch\.func transforms of a call"
    with pytest.raises(Exception, match=shown(words, "UnsupportedError")):
        graphs(TRANSFORMS[name], "eager")(*_inputs())


# Beside a transform Dynamo tries what it is not made for, and warns of it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("function", [TRANSFORMS["vmap"], _jvp, _dual], ids=["vmap", "jvp", "dual"])
@pytest.mark.slow
def test_tangents_and_batches_without_a_whole_graph(function):
    inputs = _inputs()
    torch._dynamo.reset()
    found = torch.compile(function, backend="eager")(*inputs)
    torch.testing.assert_close(found, function(*inputs))


REFUSALS = {
    "shape": (
        lambda x: GAIN(x, x[:, :, :3], x, gain=x[0, :, 0, 0]),
        r"k is \(3, 2, 3, 8\)",
        "ShapeError",
    ),
    "missing": (lambda x: GAIN(x, x, x), "the call lacks 'gain'", "ArgumentError"),
    "dtype": (
        lambda x: scaled_dot_product_attention(x, x.double(), x),
        r"key is torch\.float64",
        "DTypeError",
    ),
    "mask": (
        lambda x: scaled_dot_product_attention(x, x, x, x[0, :, :3, 0]),
        r"attn_mask has shape \(2, 3\)",
        "ShapeError",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_in_a_graph_say_what_is_wrong(graphs, name):
    call, message, kind = REFUSALS[name]
    with pytest.raises(Exception, match=shown(message, kind)):
        graphs(call, "eager")(_inputs()[0])
    with pytest.raises(attndsl.AttnDSLError, match=message):
        torch.compile(call, backend="eager")(_inputs()[0])
