"""Tangents, second derivatives and torch.func: every program, without a length x length tensor."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import attndsl
from attndsl.call import chunked_autograd
from attndsl.errors import ArgumentError, UnsupportedError

WIDE = torch.float64
HEADS, LENGTH, DIM = 2, 4, 2


def _per_head():
    return torch.rand(HEADS, dtype=WIDE) + 0.5


def _number():
    return torch.tensor(1.5, dtype=WIDE)


PROGRAMS = {
    "causal": ("causal()", {}),
    "slopes": (
        "tensor slope[heads]: float; mask = causal(); score = score + slope[h] * (kv - q)",
        {"slope": _per_head},
    ),
    "softcap": ("param cap: float; score = cap * tanh(score / cap)", {"cap": _number}),
    "bias": (
        "tensor bias[heads, q_len, kv_len]: float; score = score + bias[h, q, kv]",
        {"bias": lambda: torch.randn(HEADS, LENGTH, LENGTH, dtype=WIDE)},
    ),
    "table": (
        "tensor rel[2 * q_len]: float; score = score * rel[q - kv + q_len] + rel[0]",
        {"rel": lambda: torch.randn(2 * LENGTH, dtype=WIDE)},
    ),
    "sink": ("tensor gain[heads]: float; mask = causal(); sink = 2 * gain[h]", {"gain": _per_head}),
    # Dead rows, and slopes that are NaN or infinite at dead pairs.
    "dead": (
        "tensor gain[heads]: float; mask = kv < q - 1; "
        "score = score * gain[h] * log(q - kv - 1.0) * sqrt(q - kv - 2.0) + rsqrt(q - kv - 1.0)",
        {"gain": _per_head},
    ),
    "branch": (
        "param x: float; score = where(q > kv, score * sqrt(x * (q - kv)), log(1 + exp(score)))",
        {"x": _number},
    ),
    "weights": (
        "tensor gain[heads]: float; mask = causal(); weights = sigmoid(score * gain[h]) / kv_len",
        {"gain": _per_head},
    ),
    "dropout": (
        "param p: float; mask = causal(); weights = dropout(softmax(score), p / 4)",
        {"p": _number},
    ),
}


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    return request.param


def _draw(*shape):
    return torch.randn(*shape, dtype=WIDE)


def _case(name, backend, kv_heads=1):
    """A function of tensors, ``out`` and finite ``lse``, and leaves for it."""
    text, makers = PROGRAMS[name]
    attention = attndsl.compile(text, backend=backend)
    options = {"seed": 5} if "dropout" in text else {}
    with_lse = "weights" not in text

    def function(q, k, v, *captures):
        given = dict(zip(makers, captures, strict=True))
        if not with_lse:
            return (attention(q, k, v, **given, **options),)
        out, lse = attention(q, k, v, return_lse=True, **given, **options)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    tensors = (
        _draw(1, HEADS, LENGTH, DIM),
        _draw(1, kv_heads, LENGTH, DIM),
        _draw(1, kv_heads, LENGTH, 3),
        *(make() for make in makers.values()),
    )
    return function, tuple(x.requires_grad_() for x in tensors)


@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_in_both_modes(name, backend):
    function, leaves = _case(name, backend)
    assert gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_second_derivatives(name, backend):
    function, leaves = _case(name, backend)
    assert gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_element_of_the_second_derivatives(name, backend):
    function, leaves = _case(name, backend)
    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True, atol=1e-4)


@pytest.mark.parametrize("name", ["dead"])
def test_tangents_of_a_gradient(name, backend):
    function, leaves = _case(name, backend)
    assert gradgradcheck(
        function, leaves, fast_mode=True, check_fwd_over_rev=True, check_rev_over_rev=False,
        check_undefined_grad=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_backends_agree_on_second_derivatives(name):
    """Chunks after kernels, against torch's own derivative of the dense reference."""
    found = []
    for backend in ("reference", "cpu"):
        torch.manual_seed(0)
        function, leaves = _case(name, backend)
        total = sum(part.sin().sum() for part in function(*leaves))
        first = torch.autograd.grad(total, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(part.sin().sum() for part in first), leaves))
    assert all(part.isfinite().all() for part in found[1])
    torch.testing.assert_close(found[1], found[0], atol=1e-10, rtol=1e-10)


def test_kernels_have_second_derivatives(place):
    attention = attndsl.compile("causal() and q - kv < 7", backend=place.backend)
    oracle = attndsl.compile("causal() and q - kv < 7", backend="reference")
    kind = torch.float16 if place.backend == "hopper" else torch.float32
    leaves = [
        torch.randn(1, h, 20, 16, dtype=kind, device=place.device).requires_grad_()
        for h in (2, 1, 1)
    ]
    found = []
    for run in (attention, oracle):
        first = torch.autograd.grad(run(*leaves).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    loose = 0.1 if kind is torch.float16 else 2e-2
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= loose * other.abs().max()


TEXT = (
    "tensor gain[heads]: float; mask = causal() and kv < q; score = score * gain[h]; sink = gain[h]"
)


@pytest.fixture
def func(backend):
    """A program as a function of q, k, v and gain; its loss; and what torch says by itself."""
    attention = attndsl.compile(TEXT, backend=backend)
    oracle = attndsl.compile(TEXT, backend="reference")

    def function(q, k, v, gain):
        return attention(q, k, v, gain=gain)

    def expected(*inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = oracle(*leaves[:3], gain=leaves[3])
        return torch.autograd.grad(out.square().sum(), leaves)

    return SimpleNamespace(
        out=function,
        loss=lambda *inputs: function(*inputs).square().sum(),
        oracle=lambda q, k, v, gain: oracle(q, k, v, gain=gain),
        expected=expected,
        one=(*(_draw(1, h, LENGTH, DIM) for h in (HEADS, 1, 1)), _per_head()),
        many=(
            *(_draw(3, 1, h, LENGTH, DIM) for h in (HEADS, 1, 1)),
            torch.rand(3, HEADS, dtype=WIDE),
        ),
    )


ALL = (0, 1, 2, 3)


def _stacked(parts):
    return tuple(torch.stack(each) for each in zip(*parts, strict=True))


def test_func_grad(func):
    found = torch.func.grad(func.loss, argnums=ALL)(*func.one)
    torch.testing.assert_close(found, func.expected(*func.one))


def test_func_vmap(func):
    found = torch.vmap(func.out)(*func.many)
    wanted = torch.stack([func.oracle(*each) for each in zip(*func.many, strict=True)])
    torch.testing.assert_close(found, wanted)


def test_func_vmap_over_some_arguments(func):
    q, _, v, gain = func.one
    keys = func.many[1]
    found = torch.vmap(func.out, in_dims=(None, 0, None, None), out_dims=1)(q, keys, v, gain)
    wanted = torch.stack([func.oracle(q, each, v, gain) for each in keys], 1)
    torch.testing.assert_close(found, wanted)


def test_func_gradients_of_and_under_vmap(func):
    wanted = _stacked([func.expected(*each) for each in zip(*func.many, strict=True)])
    found = torch.vmap(torch.func.grad(func.loss, argnums=ALL))(*func.many)
    torch.testing.assert_close(found, wanted)
    total = torch.func.grad(lambda *x: torch.vmap(func.loss)(*x).sum(), argnums=ALL)
    torch.testing.assert_close(total(*func.many), wanted)
    leaves = [x.clone().requires_grad_() for x in func.many]
    found = torch.autograd.grad(torch.vmap(func.loss)(*leaves).sum(), leaves)
    torch.testing.assert_close(found, wanted)


def test_func_jacobians_and_hessian(func):
    forward = torch.func.jacfwd(func.out, argnums=(0, 3))(*func.one)
    torch.testing.assert_close(torch.func.jacrev(func.out, argnums=(0, 3))(*func.one), forward)
    found = torch.func.hessian(func.loss, argnums=(0, 3))(*func.one)
    q, k, v, gain = func.one
    wanted = torch.autograd.functional.hessian(
        lambda q, gain: func.oracle(q, k, v, gain).square().sum(), (q, gain)
    )
    torch.testing.assert_close(found, wanted)


def test_a_gradient_that_is_zero_still_varies(func):
    """At the minimum of a squared error the Hessian is J^T J, though all gradients are 0."""
    q, *rest = func.one
    target = func.out(q, *rest).detach()

    def loss(q):
        return (func.out(q, *rest) - target).square().sum() / 2

    jacobian = torch.func.jacrev(lambda q: func.out(q, *rest))(q).reshape(q.numel(), q.numel())
    assert jacobian.abs().max() > 1e-3
    for hessian in (torch.func.hessian(loss)(q), torch.autograd.functional.hessian(loss, q)):
        torch.testing.assert_close(hessian.reshape(jacobian.shape), jacobian.T @ jacobian)


def test_third_derivatives(func):
    found = []
    for run in (func.out, func.oracle):
        leaves = [x.clone().requires_grad_() for x in func.one]
        total = run(*leaves).sin().sum()
        for _ in range(3):
            parts = torch.autograd.grad(total, leaves, create_graph=True)
            total = sum(part.sin().sum() for part in parts)
        found.append(total)
    torch.testing.assert_close(*found)


def test_dual_tensors_of_half_types(place):
    """The tangents come in the dtypes of out and lse, and follow those in fp64."""
    q, k, v, moved = (torch.randn(1, 2, 9, 16, device=place.device) for _ in range(4))
    attention = attndsl.compile("causal()", backend=place.backend)
    oracle = attndsl.compile("causal()", backend="reference")
    half = [x.to(torch.bfloat16) for x in (q, k, v, moved)]
    with forward_ad.dual_level():
        results = attention(forward_ad.make_dual(half[0], half[3]), *half[1:3], return_lse=True)
        found = [forward_ad.unpack_dual(x).tangent for x in results]
    wide = [x.double() for x in half]
    _, wanted = torch.func.jvp(
        lambda q: oracle(q, *wide[1:3], return_lse=True), (wide[0],), (wide[3],)
    )
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32]
    if place.backend in ("triton", "hopper"):
        # Kernels round the operands of products too.
        error = (found[0].double() - wanted[0]).square().mean().sqrt()
        assert error <= 2**-7 * wanted[0].square().mean().sqrt()
    else:
        # Rounded once, at the end.
        torch.testing.assert_close(found[0].double(), wanted[0], atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(found[1].double(), wanted[1], atol=1e-4, rtol=1e-4)


def test_positions_and_seeds_may_be_tensors(monkeypatch):
    """In several chunks, each with its own rows of an index and of dropout."""
    monkeypatch.setattr(chunked_autograd, "CPU_PAIRS", 1)
    index = torch.tensor([3, 0, 2, 1])
    text = "mask = causal(); weights = dropout(softmax(score), 0.3)"
    attention = attndsl.compile(text, backend="cpu")
    q, k, v = (_draw(2, HEADS, LENGTH, DIM) for _ in range(3))
    for options in (
        {"q_index": index},
        {"q_offset": 1, "kv_index": index},
        {"q_offset": torch.tensor(2)},
    ):
        for seed in (3, torch.tensor(3)):

            def run(q, given=options, seed=seed):
                return attention(q, k, v, **given, seed=seed)

            out, moved = torch.func.jvp(run, (q,), (k,))
            torch.testing.assert_close(out, run(q))
            step = 1e-6
            slope = (run(q + step * k) - run(q - step * k)) / (2 * step)
            torch.testing.assert_close(moved, slope, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 4), (4, 0), (0, 0), (1, 3)])
def test_lengths(q_len, kv_len, backend):
    attention = attndsl.compile("causal()", backend=backend)
    q, k = _draw(1, 2, q_len, 3), _draw(1, 2, kv_len, 3)
    out, moved = torch.func.jvp(lambda q: attention(q, k, k), (q,), (q,))
    assert out.shape == moved.shape == q.shape
    assert torch.func.grad(lambda k: attention(q, k, k).sum())(k).isfinite().all()


class _Sizes(TorchDispatchMode):
    """Elements of the largest tensor made, and the most that were alive at once."""

    def __init__(self):
        super().__init__()
        self.largest = self.alive = self.most = 0

    def _free(self, count):
        self.alive -= count

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor) and not each._is_view():
                count = each.untyped_storage().nbytes() // each.element_size()
                self.largest = max(self.largest, count)
                self.alive += count
                self.most = max(self.most, self.alive)
                weakref.finalize(each, self._free, count)
        return result


@pytest.mark.parametrize("way", ["second", "tangent", "func"])
def test_memory_is_that_of_a_chunk(way, monkeypatch):
    length = 2048
    monkeypatch.setattr(chunked_autograd, "CPU_PAIRS", 1 << 16)
    attention = attndsl.compile(
        "param gain: float; mask = causal(); score = score + gain * kv", backend="cpu"
    )
    leaves = [torch.randn(1, 1, length, 4).requires_grad_() for _ in range(3)]
    gain = torch.tensor(3.0, requires_grad=True)

    def total(q):
        return attention(q, leaves[1], leaves[2], gain=gain).square().sum()

    with _Sizes() as sizes:
        if way == "second":
            (first,) = torch.autograd.grad(total(leaves[0]), leaves[0], create_graph=True)
            torch.autograd.grad(first.square().sum(), (*leaves, gain))
        elif way == "tangent":
            torch.func.jvp(total, (leaves[0],), (leaves[1],))
        else:
            torch.func.grad(total)(leaves[0])
    # The kernels' spans are of a size of their own.
    assert sizes.largest < length * length // 8
    # Alive at once are 77 tensors of a chunk; a graph of all pairs has as many matrices.
    assert sizes.most < 2 * length * length


def test_other_faces_of_calls():
    """What calls a program for the user, under the transform of gradients of each sample."""
    attention = attndsl.nn.MultiheadAttention(8, 2, batch_first=True)
    state = dict(attention.named_parameters())
    x = torch.randn(3, 5, 8)

    def loss(state, x):
        out, _ = torch.func.functional_call(attention, state, (x[None],) * 3)
        return out.square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(state, x)
    for sample in range(3):
        wanted = torch.autograd.grad(loss(state, x[sample]), list(state.values()))
        for name, each in zip(state, wanted, strict=True):
            torch.testing.assert_close(found[name][sample], each, atol=1e-4, rtol=1e-4)

    q, bias = torch.randn(1, 2, 5, 4), torch.randn(5, 5)
    found, wanted = (
        torch.func.jvp(
            lambda q, bias, sdpa=sdpa: sdpa(q, q, q, attn_mask=bias),
            (q, bias),
            (q.cos(), bias.cos()),
        )
        for sdpa in (attndsl.scaled_dot_product_attention, _plain_sdpa)
    )
    torch.testing.assert_close(found, wanted)


def _plain_sdpa(q, k, v, attn_mask):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + attn_mask, -1) @ v


def test_checked_mode_says_that_it_cannot():
    attention = attndsl.compile("causal()", checked=True)
    q = _draw(1, 1, 4, 2)
    with pytest.raises(UnsupportedError, match="checked mode looks at values"):
        torch.func.grad(lambda q: attention(q, q, q).sum())(q)


def test_dropout_under_vmap():
    attention = attndsl.compile("weights = dropout(softmax(score), 0.5)")
    q = _draw(1, 1, 6, 4).expand(3, 1, 1, 6, 4)
    with pytest.raises(ArgumentError, match="draws a seed"):
        torch.vmap(lambda q: attention(q, q, q))(q)
    same = torch.vmap(lambda q: attention(q, q, q), randomness="same")(q)
    assert (same == same[0]).all()
    different = torch.vmap(lambda q: attention(q, q, q), randomness="different")(q)
    assert (different[1] != different[0]).any()
    seeded = torch.vmap(lambda q: attention(q, q, q, seed=1))(q)
    torch.testing.assert_close(seeded[2], attention(q[0], q[0], q[0], seed=1))


def test_graphs_refuse_second_derivatives():
    attention = attndsl.compile("causal()")
    q = _draw(1, 1, 4, 2).requires_grad_()
    compiled = torch.compile(lambda q: attention(q, q, q), backend="eager")
    (first,) = torch.autograd.grad(compiled(q).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad((first + q).sum(), q)


def test_explain_says_what_runs_them(backend):
    text = attndsl.compile("causal()", backend=backend).explain()
    (line,) = [line for line in text.split("\n") if line.startswith("higher")]
    assert "second derivatives" in line
    assert "some rows of queries at a time" in line
    assert ("dense" in line) == (backend == "reference")
