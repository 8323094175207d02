"""Forward mode by a kernel: what it finds, and which calls it runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import attndsl
from attndsl.backends.emit.tangent_programs import moved_name, with_tangents
from attndsl.backends.engine.backend import GeneratedBackend
from attndsl.call import chunked_autograd
from attndsl.call.dispatch import get_backend
from attndsl.pipeline import lower
from attndsl.source import Source

ALL = ("q", "k", "v")
HALF_TOLERANCE = {torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Of the root of the mean square: weights and their tangents are rounded once each for a product,
and Triton's interpreter truncates them to bf16."""
CASES = {
    "full": ("score", {}, {}),
    "causal": ("causal()", {}, {"moved": ALL}),
    "of q": ("causal()", {}, {"moved": ("q",)}),
    "of k": ("causal()", {}, {"moved": ("k",)}),
    "of v": ("causal()", {}, {"moved": ("v",)}),
    "window": ("causal() and q - kv < 9", {}, {"lengths": (70, 45)}),
    "documents": (
        "tensor doc[batch, kv_len]: int; mask = q >= kv and doc[b, q] == doc[b, kv]",
        {"doc": lambda b, h, m, n: torch.arange(n).div(17, rounding_mode="floor").expand(b, n)},
        {"lengths": (66, 66)},
    ),
    "softcap": ("mask = causal(); score = softcap(score, 2.0)", {}, {}),
    "alibi": ("mask = causal(); score = score + alibi()", {}, {}),
    "gain": (
        "tensor gain[heads]: float; mask = causal(); score = gain[h] * score",
        {"gain": lambda b, h, m, n: torch.rand(h) + 0.5},
        {},
    ),
    "bias alone": (
        "tensor bias[heads, q_len, kv_len]: float; score = score + bias[h, q, kv]",
        {"bias": lambda b, h, m, n: torch.randn(h, m, n)},
        {"moved": ("bias",)},
    ),
    "table": (
        "tensor rel[n]: float; score = score * rel[q - kv + kv_len] + rel[0]",
        {"rel": lambda b, h, m, n: torch.randn(m + n)},
        {"lengths": (37, 53)},
    ),
    "param": (
        "param cap: float; mask = causal(); score = cap * tanh(score / cap)",
        {"cap": lambda b, h, m, n: torch.tensor(1.5)},
        {},
    ),
    "sink": (
        "tensor s[heads]: float; mask = causal() and kv < q; sink = 2 * s[h] * s[h]",
        {"s": lambda b, h, m, n: torch.randn(h)},
        {},
    ),
    "sink and score": (
        "tensor s[heads]: float; param x: float; mask = causal(); score = score * s[h]; "
        "sink = x * s[h]",
        {"s": lambda b, h, m, n: torch.randn(h), "x": lambda b, h, m, n: torch.tensor(0.5)},
        {"moved": ("s", "x")},
    ),
    "dead rows": (
        # Slopes that are NaN or infinite at dead pairs.
        "tensor gain[heads]: float; mask = kv < q - 1; score = score * gain[h] * log(q - kv - 1.0) "
        "* sqrt(q - kv - 2.0) + rsqrt(q - kv - 1.0)",
        {"gain": lambda b, h, m, n: torch.rand(h) + 0.5},
        {"filter": True},
    ),
    "weights": (
        "tensor gain[heads]: float; mask = causal(); weights = sigmoid(score * gain[h]) / kv_len",
        {"gain": lambda b, h, m, n: torch.rand(h) + 0.5},
        {},
    ),
    "dropout": (
        "param p: float; mask = causal(); weights = dropout(softmax(score), p / 4)",
        {"p": lambda b, h, m, n: torch.tensor(1.5)},
        {"options": {"seed": 5}},
    ),
    "shapes": ("causal()", {}, {"lengths": (37, 53), "heads": (4, 2), "dims": (9, 21)}),
    "no keys": ("causal()", {}, {"lengths": (5, 0)}),
    "no queries": ("causal()", {}, {"lengths": (0, 5)}),
    "offset": ("causal()", {}, {"options": {"q_offset": 7}}),
}
SLOW = ("alibi", "of k", "sink and score", "offset")
"""Little of them is not in others."""


@pytest.fixture(params=["triton-interpreted", pytest.param("triton", marks=pytest.mark.gpu),
                        pytest.param("hopper", marks=pytest.mark.gpu)])  # fmt: skip
def there(request, kernels_ran):
    """A backend with a kernel for tangents, a device, and how often that kernel ran."""
    if request.param == "triton-interpreted":
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled here")
        return SimpleNamespace(backend="triton", device="cpu", ran=kernels_ran)
    return SimpleNamespace(backend=request.param, device="cuda", ran=kernels_ran)


@pytest.fixture
def kernels_ran(monkeypatch):
    """Whether each call of the kernel found something."""
    ran = []
    tangent, both = GeneratedBackend.tangent, GeneratedBackend.forward_with_tangents

    def counted(self, *arguments):
        ran.append(tangent(self, *arguments))
        return ran[-1]

    def counted_both(self, *arguments):
        found = both(self, *arguments)
        ran.extend([] if found is None else [found[2:]])
        return found

    monkeypatch.setattr(GeneratedBackend, "tangent", counted)
    monkeypatch.setattr(GeneratedBackend, "forward_with_tangents", counted_both)
    return ran


def _pushed(attention, inputs, tangents, options, with_lse):
    """Tangents of out and lse along those given."""

    def function(*moved):
        given = {**inputs, **dict(zip(tangents, moved, strict=True))}
        q, k, v = (given.pop(name) for name in ALL)
        found = attention(q, k, v, return_lse=with_lse, **given, **options)
        return found if with_lse else (found,)

    return torch.func.jvp(
        function, tuple(inputs[name] for name in tangents), tuple(tangents.values())
    )[1]


def _wide(tensors):
    return {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}


def _check(there, text, inputs, tangents, options=None):
    """Compare with the reference's tangents in fp64."""
    with_lse = "weights" not in text or "softmax" in text
    found, golden = (
        _pushed(attndsl.compile(text, backend=backend), *given, options or {}, with_lse)
        for backend, given in (
            (there.backend, (inputs, tangents)),
            ("reference", (_wide(inputs), _wide(tangents))),
        )
    )
    dtype = inputs["q"].dtype
    assert there.ran
    assert [x.dtype for x in found] == [dtype, torch.float32][: len(found)]
    for one, exact in zip(found, golden, strict=True):
        assert one.shape == exact.shape
        if exact.numel() == 0:
            continue
        assert one.isfinite().all()
        assert exact.isfinite().all()
        error = (one.double() - exact).square().mean().sqrt()
        on_gpu = 2e-5 if there.device == "cuda" else 4e-6
        allowed = HALF_TOLERANCE.get(one.dtype, on_gpu)
        assert error <= allowed * exact.square().mean().sqrt() + 1e-7


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_tangents_equal_those_of_the_reference(name, there):
    text, captures, how = CASES[name]
    heads, kv_heads = how.get("heads", (2, 2))
    dim, value_dim = how.get("dims", (16, 16))
    q_len, kv_len = how.get("lengths", (36, 36))
    inputs = {
        "q": torch.randn(1, heads, q_len, dim),
        "k": torch.randn(1, kv_heads, kv_len, dim),
        "v": torch.randn(1, kv_heads, kv_len, value_dim),
    }
    inputs |= {key: make(1, heads, q_len, kv_len) for key, make in captures.items()}
    inputs = {key: x.to(there.device) for key, x in inputs.items()}
    floats = [key for key, x in inputs.items() if x.is_floating_point()]
    tangents = {key: torch.randn_like(inputs[key]) for key in how.get("moved", floats)}
    _check(there, text, inputs, tangents, how.get("options"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype, there):
    """Captures keep their own dtype; the tangents of out come in that of q."""
    bias = torch.randn(40, 40, device=there.device)
    inputs = {name: torch.randn(1, 2, 40, 16, device=there.device, dtype=dtype) for name in ALL}
    inputs["bias"] = bias
    tangents = {name: torch.randn_like(x) for name, x in inputs.items()}
    text = "tensor bias[q_len, kv_len]: float; mask = causal(); score = score + bias[q, kv]"
    _check(there, text, inputs, tangents)


def test_tangents_of_any_strides(there):
    """Transposed, expanded, with a last stride other than 1, and zeros of no memory."""
    inputs = {name: torch.randn(2, 1, 40, 16, device=there.device) for name in ALL}
    inputs["bias"] = torch.randn(40, 40, device=there.device)
    text = "tensor bias[q_len, kv_len]: float; mask = causal(); score = score + bias[q, kv]"
    for q, k, v, bias in (
        (
            torch.randn(2, 40, 1, 16).transpose(1, 2),
            torch.randn(2, 1, 16, 40).mT,
            torch.randn(2, 1, 40, 32)[..., ::2],
            torch.randn(40, 40).T,
        ),
        (
            torch.randn(16).expand(2, 1, 40, 16),
            torch.zeros(()).expand(2, 1, 40, 16),
            torch.ones(()).expand(2, 1, 40, 16),
            torch.randn(40).expand(40, 40),
        ),
    ):
        given = {"q": q, "k": k, "v": v, "bias": bias}
        _check(there, text, inputs, {name: x.to(there.device) for name, x in given.items()})
    zeros = torch._efficientzerotensor((2, 1, 40, 16), device=there.device)
    _check_dual(there, inputs, text, torch.randn_like(inputs["q"]), zeros)


def _check_dual(there, inputs, text, q, k):
    """As ``_check``, with dual tensors."""
    found = []
    for backend, given, along in (
        (there.backend, inputs, (q, k)),
        ("reference", _wide(inputs), (q.double(), torch.zeros_like(q).double())),
    ):
        attention = attndsl.compile(text, backend=backend)
        with forward_ad.dual_level():
            duals = (forward_ad.make_dual(given[n], x) for n, x in zip("qk", along, strict=True))
            out = attention(*duals, given["v"], bias=given["bias"])
            found.append(forward_ad.unpack_dual(out).tangent)
    torch.testing.assert_close(found[0].double(), found[1], atol=1e-4, rtol=1e-4)


def test_a_program_may_use_the_name_of_a_tangent(there):
    text = (
        "tensor x[heads]: float; tensor moved_x[heads]: float; param moved_moved_x: float; "
        "mask = causal(); score = score * x[h] + moved_x[h] * moved_moved_x * kv"
    )
    program = lower(Source(text), {}).program
    found = with_tangents(program, {"x", "moved_x"})
    assert len({decl.name for decl in found.tensors}) == 4
    assert moved_name(program, "x") == "moved_x_"
    inputs = {name: torch.randn(1, 2, 9, 16, device=there.device) for name in ALL}
    inputs |= {name: torch.rand(2, device=there.device) + 0.5 for name in ("x", "moved_x")}
    inputs["moved_moved_x"] = torch.tensor(0.1, device=there.device)
    tangents = {n: torch.randn_like(inputs[n]) for n in ("x", "moved_x", "moved_moved_x")}
    _check(there, text, inputs, tangents)


def _count(monkeypatch, module, name):
    """How often a function is called from now on."""
    calls = []
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *rest: calls.append(name) or function(*rest))
    return calls


def test_what_does_not_move_is_not_multiplied(there, monkeypatch):
    """Nothing of it reaches the kernel, not as zeros either."""
    q, k, v = (torch.randn(1, 2, 9, 16, device=there.device) for _ in ALL)
    given = []
    tangent = GeneratedBackend.tangent

    def seen(self, lowered, call, moved, *rest):
        given.append(moved)
        return tangent(self, lowered, call, moved, *rest)

    monkeypatch.setattr(GeneratedBackend, "tangent", seen)
    attention = attndsl.compile("causal()", backend=there.backend)
    torch.func.jvp(lambda k: attention(q, k, v), (k,), (q,))
    assert given
    assert all(x.q is None and x.v is None and x.k is not None for x in given)


def test_a_tangent_takes_one_forward_and_no_torch_operations(there, monkeypatch):
    chunks = _count(monkeypatch, chunked_autograd, "dense_pairs")
    backend = get_backend(there.backend)
    forwards = []
    forward = type(backend).forward
    monkeypatch.setattr(
        type(backend), "forward", lambda self, *rest: forwards.append(1) or forward(self, *rest)
    )
    q, k, v = (torch.randn(1, 2, 9, 16, device=there.device) for _ in ALL)
    attention = attndsl.compile("causal()", backend=there.backend)
    torch.func.jvp(lambda q: attention(q, k, v), (q,), (k,))
    assert forwards == [1]
    assert not chunks


def _loss(attention):
    return lambda q, k, gain: attention(q, k, k, gain=gain).sin().sum()


@pytest.mark.parametrize("way", ["grad of jvp", "jvp of grad", "jvp of jvp", "hessian", "jacfwd",
                                 "vmap of jvp", "jvp of vmap"])  # fmt: skip
def test_other_transforms_with_it(way, there):
    """Torch operations make whatever the kernel does not."""
    text = "tensor gain[heads]: float; mask = causal(); score = score * gain[h]; sink = gain[h]"
    given = (
        *(torch.randn(1, 2, 5, 4, device=there.device) for _ in "qk"),
        torch.rand(2, device=there.device) + 0.5,
    )
    along = tuple(torch.randn_like(x) for x in given)
    found = []
    for backend, wide in ((there.backend, False), ("reference", True)):
        loss = _loss(attndsl.compile(text, backend=backend))
        primals, tangents = (
            tuple(x.double() for x in each) if wide else each for each in (given, along)
        )

        def pushed(*primals, loss=loss, tangents=tangents):
            return torch.func.jvp(loss, primals, tangents)[1]

        if way == "grad of jvp":
            parts = torch.func.grad(pushed, argnums=(0, 1, 2))(*primals)
        elif way == "jvp of grad":
            gradients = torch.func.grad(loss, argnums=(0, 1, 2))
            parts = torch.func.jvp(gradients, primals, tangents)[1]
        elif way == "jvp of jvp":
            parts = (torch.func.jvp(pushed, primals, tangents)[1],)
        elif way == "hessian":
            parts = (torch.func.hessian(loss, argnums=2)(*primals),)
        elif way == "jacfwd":
            parts = torch.func.jacfwd(loss, argnums=(0, 2))(*primals)
        else:
            many = [tuple(torch.stack((x, 2 * x)) for x in each) for each in (primals, tangents)]
            if way == "vmap of jvp":
                each = torch.vmap(lambda p, t, f=loss: torch.func.jvp(f, p, t)[1])
                parts = (each(*many),)
            else:
                parts = (torch.func.jvp(torch.vmap(loss), *many)[1],)
        found.append(tuple(part.double() for part in parts))
    torch.testing.assert_close(*found, atol=2e-4, rtol=2e-4)


def test_tangents_are_differentiable_by_autograd(there):
    """Leaves of the outer level, as in a penalty on a directional derivative."""
    q, k = (torch.randn(1, 2, 5, 4, device=there.device) for _ in "qk")
    found = []
    for backend, wide in ((there.backend, False), ("reference", True)):
        leaf, other = ((x.double() if wide else x.clone()) for x in (q, k))
        leaf.requires_grad_()
        attention = attndsl.compile("causal()", backend=backend)
        moved = torch.func.jvp(lambda q, f=attention, k=other: f(q, k, k), (leaf,), (other,))[1]
        found.append(torch.autograd.grad(moved.square().sum(), leaf)[0].double())
    torch.testing.assert_close(*found, atol=2e-4, rtol=2e-4)


def test_contractions_are_left_to_torch_operations(there):
    text = "tensor u[kv_len, 4]: float; score = score + dot(u[q, :], u[kv, :])"
    q, k, v = (torch.randn(1, 2, 9, 16, device=there.device) for _ in ALL)
    u = torch.randn(9, 4, device=there.device)
    found = []
    for backend in (there.backend, "reference"):
        attention = attndsl.compile(text, backend=backend)
        moved = torch.func.jvp(lambda u, f=attention: f(q, k, v, u=u), (u,), (u.cos(),))[1]
        found.append(moved)
    assert not there.ran
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_explain_names_the_kernel():
    def line(text, backend):
        rows = attndsl.compile(text, backend=backend).explain().split("\n")
        return next((row for row in rows if row.startswith("higher")), "")

    if torch.cuda.is_available():
        pytest.skip("the triton backend takes no CPU tensors here")
    assert "tangents: a triton kernel" in line("causal()", "triton")
    assert "a triton kernel" not in line("causal()", "cpu")
    dots = "tensor u[kv_len, 4]: float; score = score + dot(u[q, :], u[kv, :])"
    assert "a triton kernel" not in line(dots, "triton")


class _Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_modes_and_tracers_see_torch_operations(there):
    """A kernel launched past torch would be nothing to them, and wrong in what is traced."""
    q, k, v = (torch.randn(1, 2, 9, 16, device=there.device) for _ in ALL)
    attention = attndsl.compile("causal()", backend=there.backend)
    wanted = torch.func.jvp(lambda q: attention(q, k, v), (q,), (k,))[1]
    assert len(there.ran) == 1
    with _Operations() as operations:
        found = torch.func.jvp(lambda q: attention(q, k, v), (q,), (k,))[1]
    assert operations.seen > 5
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    push = torch.func.linearize(lambda q: attention(q, k, v), q)[1]
    torch.testing.assert_close(push(k), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(push(2 * k), 2 * wanted, atol=1e-4, rtol=1e-4)
    assert len(there.ran) == 1
