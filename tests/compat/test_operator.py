"""The operators keep what they promise to torch, whatever the layout of their inputs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import attndsl
from attndsl.call.bind import bind
from attndsl.call.op_encoding import (
    AskedGradients,
    EncodedCall,
    heading,
    of_gradients,
    packed,
    parts_of_gradients,
    unpacked,
)
from attndsl.call.options import Location
from attndsl.call.torch_ops_impl import OperatorCall, location_of, operands
from attndsl.runtime.program_store import make_spec

TEXT = """
tensor gain[heads]: float
tensor bias[heads, q_len, kv_len]: float
tensor doc[batch, kv_len]: int
param shift: float
param near: int
param on: bool
mask = doc[b, kv] < 3 and abs(q - kv) < near
score = score * gain[h] + bias[h, q, kv] + where(on, shift, 0)
"""


def _contiguous(*shape):
    return torch.randn(shape)


def _permuted(batch, heads, length, dim):
    return torch.randn(batch, length, heads, dim).transpose(1, 2)


def _expanded(batch, heads, length, dim):
    return torch.randn(1, 1, length, dim).expand(batch, heads, -1, -1)


def _offset(batch, heads, length, dim):
    return torch.randn(batch, heads, length + 2, dim + 3)[:, :, 1:-1, 2 : dim + 2]


def _last(batch, heads, length, dim):
    return torch.randn(batch, heads, dim, length).mT


LAYOUTS = {
    "mixed": (_permuted, _expanded, _offset),
    "contiguous": (_contiguous,) * 3,
    "permuted": (_permuted,) * 3,
    "expanded": (_expanded,) * 3,
    "offset": (_offset,) * 3,
    "last stride": (_last,) * 3,
}
"""Of q, k and v; those of one layout are slow tests."""
EACH_LAYOUT = [
    pytest.param(name, marks=[pytest.mark.slow] if name != "mixed" else []) for name in LAYOUTS
]


def _leaves(args, learned):
    """``args`` with leaves for tensors: what was copied is none."""

    def leaf(x):
        return x.detach().requires_grad_(learned and x.requires_grad)

    return torch.utils._pytree.tree_map_only(torch.Tensor, leaf, args)


def _call(layout, kv_heads=2, **options):
    """A call of everything, and its leaves."""
    attention = attndsl.compile(TEXT)
    shapes = ((2, 4, 7, 8), (2, kv_heads, 9, 8), (2, kv_heads, 9, 6))
    q, k, v = (
        make(*shape).requires_grad_() for make, shape in zip(LAYOUTS[layout], shapes, strict=True)
    )
    captures = {
        "gain": torch.rand(4).requires_grad_(),
        "bias": torch.randn(4, 7, 1).expand(-1, -1, 9).requires_grad_(),
        "doc": torch.randint(4, (2, 9)),
        "shift": torch.tensor(0.5, requires_grad=True),
        "near": 5,
        "on": True,
    }
    leaves = [q, k, v, *(captures[name] for name in ("gain", "bias", "shift"))]
    return attention(q, k, v, return_lse=True, **captures, **options), leaves


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_forward_and_backward(recorder, layout):
    with recorder:
        (out, lse), leaves = _call(layout)
        torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    forward, backward = recorder.calls
    assert forward[0] is torch.ops.attndsl.forward.default
    assert backward[0] is torch.ops.attndsl.backward.default
    assert any(x.requires_grad for x in forward[1][0][:3])
    opcheck(forward[0], _leaves(forward[1], learned=True))
    # Operators have no second derivatives.
    opcheck(backward[0], _leaves(backward[1], learned=False))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"q_offset": 3, "scale": 0.2}, marks=pytest.mark.slow),
        {"q_offset": torch.tensor(2), "kv_index": torch.arange(9) * 2, "deterministic": True},
    ],
)
def test_positions_and_options(recorder, options):
    with recorder:
        _call("permuted", kv_heads=4, **options)
    opcheck(*recorder.calls[0])


@pytest.mark.parametrize("seed", [7, torch.tensor(7)])
def test_dropout(recorder, seed):
    attention = attndsl.compile("param p: float; weights = dropout(softmax(score), p)")
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    with recorder:
        out = attention(q, q, q, p=0.4, seed=seed)
    opcheck(*recorder.calls[0])
    assert torch.equal(out, attention(q, q, q, p=0.4, seed=seed))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_mode_sees_one_operator_and_changes_nothing(recorder, backend):
    """Nor are other derivatives lost: those of second order are as without."""
    attention = attndsl.compile("tensor g[heads]: float; mask = causal(); score = score * g[h]")
    attention = attndsl.compile(attention.text, backend=backend)
    leaves = [torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3)]
    leaves = [x.requires_grad_() for x in (*leaves, torch.rand(2, dtype=torch.float64))]

    def run():
        out, lse = attention(*leaves[:3], g=leaves[3], return_lse=True)
        first = torch.autograd.grad(out.sin().sum() + lse.sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)
        return out, lse, *first, *second

    expected = run()
    with recorder:
        found = run()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    names = {function.__name__ for function, _ in recorder.calls}
    assert names == {"forward.default", "backward.default"}


def test_transforms_go_on_under_a_mode():
    attention = attndsl.compile("causal()")
    q = torch.randn(3, 1, 2, 4, 4, dtype=torch.float64)

    def loss(q):
        return attention(q, q, q).sin().sum()

    expected = torch.vmap(torch.func.grad(loss))(q)
    with FlopCounterMode(display=False):
        found = torch.vmap(torch.func.grad(loss))(q)
    torch.testing.assert_close(found, expected)


def test_importing_attndsl_makes_the_operators_known():
    """After torch here, as everywhere; before it in a process that did not import torch yet.

    Nothing is left of the way that it comes about, and looking for torch does not import it.
    """
    script = (
        "import attndsl, sys, importlib.util\n"
        "assert importlib.util.find_spec('torch').origin.endswith('__init__.py')\n"
        "assert importlib.util.find_spec('no_such_module') is None\n"
        "assert 'torch' not in sys.modules\n"
        "import torch, importlib.machinery\n"
        "assert torch.ops.attndsl.forward.default and torch.ops.attndsl.backward.default\n"
        "assert 'attndsl.attention' not in sys.modules\n"
        "assert not any('attndsl' in type(f).__module__ for f in sys.meta_path)\n"
        "assert type(torch.__loader__) is importlib.machinery.SourceFileLoader\n"
        "assert torch.__spec__.loader is torch.__loader__\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=120)


def test_operators_take_negative_views():
    """Kernels read memory, where such a view has the other sign."""
    attention = attndsl.compile("mask = causal()")
    x = torch.randn(1, 2, 5, 4)
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg()
    torch.testing.assert_close(view, x)
    given = packed(EncodedCall(attention._spec, "cpu", False, view, view, view))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            out, _ = torch.ops.attndsl.forward(*given)
            torch.testing.assert_close(out, attention(x, x, x))
    leaves = [view.detach().requires_grad_() for _ in range(3)]
    given = packed(EncodedCall(attention._spec, "cpu", False, *leaves))
    out, lse = torch.ops.attndsl.forward(*given)
    grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    own = [x.clone().requires_grad_() for _ in range(3)]
    out, lse = attention(*own, return_lse=True)
    for found, wanted in zip(grads, torch.autograd.grad(out.sum() + lse.sum(), own), strict=True):
        torch.testing.assert_close(found, wanted)


def test_every_operand_comes_back():
    """From the arguments that stand for it."""
    q, k, v, a, b, c, d, e, f, g = torch.randn(10, 2)
    given = EncodedCall(
        '{"text": "a\\nb"}', "cpu", True, q, k, v, [a, b], [c], [False, True, False], [4, 1],
        [0.5, -0.0], d, 3, 5, e, f, 7, True, g, True, [8, -1, 2, 2, 3, 0, 1, 0, 1], a,
    )  # fmt: skip
    found = unpacked(*packed(given))
    assert found._asdict().keys() == given._asdict().keys()
    for name, wanted in given._asdict().items():
        own = getattr(found, name)
        if isinstance(wanted, torch.Tensor):
            assert own is wanted, name
        elif name in ("tensors", "given"):
            assert [id(x) for x in own] == [id(x) for x in wanted], name
        else:
            plain = list(own) if isinstance(wanted, list) else own
            assert repr(plain) == repr(wanted), name
    few = EncodedCall("spec", "auto", False, q, k, v)
    assert unpacked(*packed(few))[:3] == few[:3]
    assert unpacked(*packed(few))[6:] == ([], [], (), [], [], *few[11:20], [], None)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"q_offset": 3},
        {"heads": 8, "kv_heads": 4, "h_offset": 4},
        {"batch": 5, "b_offset": 3},
        {"q_len": 20, "q_offset": 4},
        {"kv_len": 30, "kv_offset": 9, "q_offset": 2},
        {"q_len": 20, "kv_len": 30, "q_index": torch.arange(7) * 2},
        {"q_len": 20, "q_offset": torch.tensor([3, 5])},
    ],
)
def test_a_part_lies_where_it_lay(given):
    program = attndsl.compile("causal()").lowered.program
    tensors = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
    call = bind(program, tensors, {}, Location(**given))
    asked = operands(OperatorCall(make_spec("causal()", {}), "cpu", False), call, None)
    found = bind(program, tensors, {}, location_of(unpacked(*packed(asked))))
    assert (found.sizes, found.part) == (call.sizes, call.part)
    places = [
        [getattr(each, name) for name in ("q_offset", "kv_offset", "q_index", "kv_index")]
        for each in (found, call)
    ]
    torch.testing.assert_close(*places)


@hypothesis_given(text=st.text(), backend=st.text(alphabet="ab|%' \\\n25C"))
def test_what_is_constant_is_one_line_of_any_program(text, backend):
    """Inductor writes it into comments, whose code it writes between three quotes."""
    x = torch.zeros(1)
    spec = make_spec(text, {})
    call = packed(EncodedCall(spec, backend, False, x, x, x))
    head = heading(call.what)
    assert (head.spec, head.backend) == (spec, backend)
    gradients = of_gradients(call, [x, x, x], AskedGradients([True, False]))
    _, asked, _, rest = parts_of_gradients(gradients.tensors, gradients.what)
    assert rest == call.what
    assert asked.wants == [True, False]
    assert gradients.what.isascii()
    assert not set("\n\r\\'") & set(gradients.what)


class _Call(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, q, k, v):
        return self.attention(q, k, v, return_lse=True)


def test_exported_programs_under_vmap():
    attention = attndsl.compile("mask = causal()\nscore = score + 0.1 * (q - kv)")
    q, k, v = torch.randn(3, 3, 2, 2, 5, 4)
    exported = torch.export.export(_Call(attention), (q[0], k[0], v[0])).module()
    found = torch.vmap(exported, in_dims=(0, None, 1))(q, k[0], v.transpose(0, 1))
    each = [attention(q[i], k[0], v[i], return_lse=True) for i in range(3)]
    for own, wanted in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(own, torch.stack(wanted))


def test_operators_have_no_tangents():
    """Torch took them to be zero."""
    attention = attndsl.compile("mask = causal()")
    q, k, v = torch.randn(3, 2, 2, 5, 4)
    exported = torch.export.export(_Call(attention), (q, k, v)).module()
    words = "have no tangents"
    with pytest.raises(attndsl.errors.UnsupportedError, match=words):
        torch.func.jvp(lambda q: exported(q, k, v)[0], (q,), (k,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, k)
        with pytest.raises(attndsl.errors.UnsupportedError, match=words):
            exported(dual, k, v)
        # One that is on and has no part in a call changes nothing.
        torch.testing.assert_close(exported(q, k, v)[0], attention(q, k, v))
