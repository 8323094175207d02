"""What graphs of torch.compile hold of a call."""

import gc
import inspect
import math
from weakref import ref

import pytest
import torch

import attndsl
from attndsl.backends.base import matmul_precision
from attndsl.call.dispatch import get_backend
from attndsl.call.options import CALL_ARGUMENTS
from attndsl.foundation.caches import CACHES, Reason

PROGRAMS = {
    "functions": (
        "mask = causal() and (q - kv) % 7 != 3\nscore = softcap(score, 20.0) + 0.1 * (q - kv)",
        {},
    ),
    "a sink": ("score = score + alibi()\nsink = 0.5 * h + 1", {}),
    "weights": ("weights = dropout(relu(score) / (kv_len + 1), 0.1 + 0.1)", {}),
    "a size of 1": (
        "tensor doc[batch, q_len]: int\ntensor bias[heads, q_len, kv_len]: float\n"
        "mask = doc[b, q] == doc[b, kv]\nscore = score + bias[h, q, kv]",
        {"doc": torch.zeros(1, 8, dtype=torch.int64), "bias": torch.zeros(1, 8, 8)},
    ),
    "left out": ("param width: int = none\nmask = causal()\nmask = q - kv < width", {}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_guards_look_into_no_expression(name):
    """Each guard is looked at in each call. There were four times as many, of every node."""
    text, captures = PROGRAMS[name]
    attention = attndsl.compile(text)
    x = torch.randn(2, 2, 8, 4)
    found = torch._dynamo.explain(lambda x: attention(x, x, x, captures=captures))(x)
    assert found.graph_count == 1
    assert found.out_guards
    # Whether a program has a mask is looked at; what the mask says is not.
    parts = (".score.", ".mask.", ".sink.", ".weights.", ".dropout.")
    names = [guard.name for guard in found.out_guards]
    assert [name for name in names if any(part in name for part in parts)] == []


def test_what_follows_from_shapes_is_found_out_once(monkeypatch):
    """In runs of a graph. Other numbers, shapes, strides and dtypes are other calls."""
    from attndsl.call import torch_ops_impl

    found = []
    real = torch_ops_impl._found_out
    monkeypatch.setattr(
        torch_ops_impl, "_found_out", lambda given: found.append(given) or real(given)
    )
    text = "param c: float; tensor t[heads]: float; mask = causal(); score = c * score + t[h]"
    attention, reference = (attndsl.compile(text, backend=x) for x in ("cpu", "reference"))
    torch._dynamo.reset()

    def compiled(*args):
        return torch.compile(lambda *x: attention(*x[:3], c=x[3], t=x[4]), fullgraph=True,
                             backend="aot_eager", dynamic=False)(*args)  # fmt: skip

    def inputs(length, dtype=torch.float32, turned=False):
        shape = (2, length, 3, 8) if turned else (2, 3, length, 8)
        made = [torch.randn(shape, dtype=dtype) for _ in range(3)]
        made = [x.transpose(1, 2) if turned else x for x in made]
        return [x.detach().requires_grad_() for x in made]

    cases = [
        (inputs(20), 0.5), (inputs(20), 0.5), (inputs(20), 0.0),
        (inputs(21), 0.5), (inputs(20, torch.float64), 0.5), (inputs(20, turned=True), 0.5),
        (inputs(20), 0.5),
    ]  # fmt: skip
    counts = []
    for operands, c in cases:
        t = torch.randn(3, dtype=operands[0].dtype, requires_grad=True)
        found.clear()
        out = compiled(*operands, c, t)
        grads = torch.autograd.grad(out.square().sum(), (*operands, t))
        counts.append(len(found))
        wanted = reference(*operands, c=c, t=t)
        torch.testing.assert_close(out, wanted)
        own = torch.autograd.grad(wanted.square().sum(), (*operands, t))
        for x, y in zip(grads, own, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert counts == [1, 0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("backend", ["triton", "short", "cpu", "reference"])
def test_known_calls_are_bound_to_what_runs_them(backend, monkeypatch):
    """Unless somebody listens, an address is odd, or another kernel was chosen meanwhile."""
    text = "tensor t[heads, q_len]: float; mask = causal(); score = score * t[h, q]"
    attention = attndsl.compile(text, backend=backend)
    own = get_backend(backend)
    bound = []
    for name in ("bound_forward", "bound_backward"):
        real = getattr(own, name)

        def noted(*given, real=real, name=name):
            run = real(*given)
            return lambda *x: bound.append(name) or run(*x)

        monkeypatch.setattr(own, name, noted)
    CACHES.invalidate(Reason.KERNELS)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: attention(*x[:3], t=x[3]), fullgraph=True, backend="aot_eager", dynamic=False
    )

    def ran(odd=-1, learned=False):
        """What was bound in a step, whose operand number ``odd`` has an odd address."""
        bound.clear()
        tensors = []
        for number, shape in enumerate([(1, 2, 20, 8)] * 3 + [(2, 20)]):
            room = torch.randn(math.prod(shape) + 1)
            tensors.append(room[int(number == odd) :][: math.prod(shape)].view(shape))
        operands = [x.requires_grad_(learned or n < 3) for n, x in enumerate(tensors)]
        asked = [x for x in operands if x.requires_grad]
        out = compiled(*operands)
        found = torch.autograd.grad(out.square().sum(), asked)
        ran_bound = bound[:]  # Calls outside of graphs are bound as well.
        wanted = attention(*operands[:3], t=operands[3])
        torch.testing.assert_close(out, wanted)
        others = torch.autograd.grad(wanted.square().sum(), asked)
        for x, y in zip(found, others, strict=True):
            torch.testing.assert_close(x, y)
        return ran_bound

    both = ["bound_forward", "bound_backward"]
    assert [ran() for _ in range(3)] == [[], both, both]
    assert [ran(odd) for odd in (0, 2, 3)] == [[]] * 3
    # The forward is known by now.
    assert [ran(learned=True) for _ in range(2)] == [both[:1], both]
    with torch.profiler.profile(acc_events=True) as seen:
        assert ran() == []
    assert any("attndsl" in event.name for event in seen.events())
    assert ran() == both
    CACHES.invalidate(Reason.KERNELS)
    assert [ran() for _ in range(2)] == [[], both]


@pytest.mark.parametrize("backend", ["triton", "short", "cpu"])
def test_known_calls_keep_no_capture(backend):
    """Nor what a graph makes of one. Gradients of captures are kept by nobody either."""
    text = "tensor t[heads, q_len]: float; score = score * t[h, q]"
    attention = attndsl.compile(text, backend=backend)
    CACHES.invalidate(Reason.KERNELS)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, t: attention(q, q, q, t=t * 2.0), fullgraph=True, backend="aot_eager"
    )
    before = [ref(x) for x in gc.get_objects() if type(x) is torch.Tensor]
    for _ in range(4):
        q, t = torch.randn(1, 2, 20, 8, requires_grad=True), torch.randn(2, 20)
        compiled(q, t).sum().backward()
    del q, t
    gc.collect()
    known = {id(x()) for x in before}
    left = [x.shape for x in gc.get_objects() if type(x) is torch.Tensor and id(x) not in known]
    assert (2, 20) not in [tuple(shape) for shape in left]


@pytest.mark.parametrize("backend", ["triton", "cpu"])
@pytest.mark.parametrize("value", ["tf32", "ieee"])
def test_torchs_newer_setting_of_products_is_taken_too(backend, value):
    """torch refuses to say the older one then."""
    settings = torch.backends.cuda.matmul
    if not hasattr(settings, "fp32_precision"):
        pytest.skip("this torch has the older one alone")
    before = settings.fp32_precision
    attention = attndsl.compile("causal()", backend=backend)
    q = torch.randn(1, 2, 20, 8)
    wanted = attention(q, q, q)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: attention(q, q, q), fullgraph=True, backend="aot_eager")
    try:
        settings.fp32_precision = value
        assert matmul_precision() == {"tf32": "high", "ieee": "highest"}[value]
        with torch.no_grad():
            found = [compiled(q) for _ in range(3)] + [attention(q, q, q)]
    finally:
        settings.fp32_precision = before
    for own in found:
        torch.testing.assert_close(own, wanted)


CONSTANTS = {
    "options": ("mask = causal()", {}, {"scale": 0.3, "q_offset": 2, "kv_offset": 1}),
    "a part": (
        "mask = causal()\nscore = score + 0.1 * h", {},
        {"q_len": 12, "kv_len": 9, "heads": 4, "kv_heads": 4, "h_offset": 2},
    ),
    "a size of 1": (
        "tensor bias[heads, q_len, kv_len]: float\nscore = score + bias[h, q, kv]",
        {"bias": torch.randn(1, 8, 8)}, {},
    ),
    "left out": ("tensor near[heads]: int = none\nmask = q - kv < near[h]", {}, {}),
    "none": ("tensor near[heads]: int = none\nmask = q - kv < near[h]", {"near": None}, {}),
    "given in another order": (
        "tensor a[heads]: float\ntensor ends[batch]: int\n"
        "score = score * a[h]\nmask = kv < ends[b]",
        {"ends": torch.tensor([3, 8]), "a": torch.rand(2)}, {},
    ),
}  # fmt: skip
"""Calls of which a graph knows all but the elements of tensors."""


def _followed(monkeypatch):
    """The calls that Dynamo follows to their end, as they come."""
    from attndsl.call import compile_graphs as graph

    asked = []
    real = graph.arguments_of
    monkeypatch.setattr(graph, "arguments_of", lambda *x: asked.append(real(*x)) or asked[-1])
    return asked


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_a_call_are_not_followed(name, monkeypatch):
    text, captures, options = CONSTANTS[name]
    attention, asked = attndsl.compile(text), _followed(monkeypatch)
    torch._dynamo.reset()
    leaves = [torch.randn(2, 2, 8, 4, requires_grad=True) for _ in range(3)]

    def run(call):
        out, lse = call(*leaves, return_lse=True, captures=captures, **options)
        return out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)

    compiled = torch.compile(
        lambda *x, **options: attention(*x, **options), fullgraph=True, backend="aot_eager"
    )
    for found, wanted in zip(run(compiled), run(attention), strict=True):
        torch.testing.assert_close(found, wanted)
    assert len(asked) == 1
    assert asked[0] is not None


@pytest.mark.parametrize(
    ("text", "change", "options"),
    [
        ("mask = causal()", lambda x: x.mT.contiguous().mT, {}),
        ("weights = dropout(softmax(score), 0.3)", None, {"seed": 3}),
        ("param near: int\nmask = q - kv < near", None, {"near": 3}),
        ("mask = causal()", None, {"q_index": torch.arange(8)}),
    ],
    ids=["last stride", "dropout", "param", "positions"],
)
def test_other_calls_are_followed(text, change, options, monkeypatch):
    attention, asked = attndsl.compile(text), _followed(monkeypatch)
    torch._dynamo.reset()
    x = torch.randn(2, 2, 8, 4)
    x = x if change is None else change(x)
    compiled = torch.compile(
        lambda x: attention(x, x, x, **options), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), attention(x, x, x, **options))
    assert [y for y in asked if y is not None] == []
    guards = torch._dynamo.explain(lambda x: attention(x, x, x, **options))(x).out_guards
    assert len(guards) > 100  # Those of the checks.


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("param near: int = 3\nmask = q - kv < near", {"near": None}, "near is None"),
        ("mask = causal()", {"bias": None}, "no tensor or run-time param 'bias'"),
        (
            "tensor t[heads]: float = none\nscore = score + t[h]",
            {"bias": None, "t": None},
            "'bias'",
        ),
        ("mask = causal()", {"seed": False}, "seed is False"),
        ("mask = causal()", {"kv_len": 2}, "kv_len is 2"),
        ("mask = causal()", {"q_offset": None}, "q_offset is None"),
        ("mask = causal()", {"captures": {"bias": None}}, "'bias'"),
        ("mask = causal()", {"captures": 3}, "captures is a int"),
        (
            "tensor t[heads]: float\nscore = score + t[h]",
            {"captures": {"t": torch.ones(2)}, "t": torch.ones(2)}, "given twice",
        ),
    ],
)  # fmt: skip
def test_graphs_refuse_what_calls_refuse(text, options, words):
    attention = attndsl.compile(text)
    torch._dynamo.reset()
    x = torch.randn(1, 2, 6, 4)
    with pytest.raises(attndsl.AttnDSLError, match=words):
        attention(x, x, x, **options)
    with pytest.raises(attndsl.AttnDSLError, match=words):
        torch.compile(lambda x: attention(x, x, x, **options), backend="aot_eager")(x)


def test_a_graph_is_for_one_program_and_backend():
    """What a program's constants depend on is guarded."""
    torch._dynamo.reset()
    x = torch.randn(1, 2, 6, 4)

    def call(attention, x):
        return attention(x, x, x)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    programs = [
        attndsl.compile("mask = causal()"), attndsl.compile("score = 2 * score"),
        attndsl.compile("mask = causal()", backend="reference"),
        attndsl.compile("mask = causal()", checked=True),
    ]  # fmt: skip
    for _ in range(2):
        for attention in programs:
            torch.testing.assert_close(compiled(attention, x), attention(x, x, x))
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(call.__code__)
    assert len(entries) == len(programs)


def test_constants_know_the_autocast_and_determinism_of_now():
    attention = attndsl.compile("mask = causal()")
    torch._dynamo.reset()
    x = torch.randn(1, 2, 6, 4)
    compiled = torch.compile(
        lambda x: attention(x, x, x), fullgraph=True, backend="aot_eager", dynamic=False
    )
    for kind in (torch.bfloat16, torch.float16):
        assert compiled(x).dtype is torch.float32
        with torch.autocast("cpu", kind):
            assert compiled(x).dtype is kind
            torch.testing.assert_close(compiled(x), attention(x, x, x))
    seen = []

    def backend(graph, inputs):
        seen.extend(node.args[1] for node in graph.graph.nodes if "attndsl" in str(node.target))
        return graph

    told = torch.compile(lambda x: attention(x, x, x), fullgraph=True, backend=backend)
    told(x)
    torch.use_deterministic_algorithms(True)
    try:
        told(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ["deterministic" in what.split("\n")[0] for what in seen] == [False, True]


def test_a_graph_made_outside_refuses_the_context_of_sharded_keys(monkeypatch):
    """No guard of a call of constants looks at what torch's ``context_parallel`` replaces."""
    attention = attndsl.compile("mask = causal()")
    torch._dynamo.reset()
    x = torch.randn(1, 2, 6, 4)
    compiled = torch.compile(lambda x: attention(x, x, x), fullgraph=True, backend="aot_eager")
    compiled(x)

    def ring(*args, **options):
        raise AssertionError

    ring.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ring)
    with pytest.raises(attndsl.AttnDSLError, match="context_parallel"):
        compiled(x)


def test_a_call_leaves_few_guards():
    """Each is looked at in each call.

    There were 203 where Dynamo followed the checks, and 58 where it read the options' defaults.
    """
    attention = attndsl.compile("mask = causal()")
    q, k, v = torch.randn(3, 2, 2, 8, 4)
    found = torch._dynamo.explain(lambda q, k, v: attention(q, k, v))(q, k, v)
    assert found.graph_count == 1
    assert len(found.out_guards) < 30


class Own(torch.Tensor):
    """A tensor as users derive their own."""


@pytest.mark.parametrize("place", range(3))
def test_graphs_take_tensors_of_other_classes(place):
    attention = attndsl.compile("mask = causal()")
    torch._dynamo.reset()
    operands = [*torch.randn(3, 1, 2, 6, 4)]
    wanted = attention(*operands)
    operands[place] = operands[place].as_subclass(Own)
    found = torch.compile(attention, fullgraph=True, backend="eager")(*operands)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), wanted)


def test_a_call_tells_what_it_takes():
    """Dynamo guards each default that a function has, so that these stand elsewhere."""
    shown = inspect.signature(attndsl.Attention.__call__).parameters
    assert [*shown][:4] == ["self", "q", "k", "v"]
    assert shown["q_offset"].default == 0
    assert {*shown} == CALL_ARGUMENTS | {"named"}
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    attention = attndsl.compile("mask = causal()")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        attention(q, k)
    with pytest.raises(TypeError, match="positional arguments but 5 were given"):
        attention(q, k, v, 0.5)
