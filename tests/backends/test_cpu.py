"""The CPU backend against the reference: values, every gradient, skipped tiles, memory."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
from support.cpu_programs import OWN_WEIGHTS, PROGRAMS
from torch.utils._python_dispatch import TorchDispatchMode

import attndsl
from attndsl.backends.base import Backward, Call, Wants
from attndsl.backends.dense.interpret import RULES
from attndsl.backends.dense.reference import ReferenceBackend
from attndsl.backends.tiled import backward_steps, cpu, span_scores, step_plan
from attndsl.backends.tiled.cpu import CPUBackend
from attndsl.backends.tiled.sdpa_causal import Triangles
from attndsl.backends.tiled.sdpa_spans import Biases, SpanAttention
from attndsl.backends.tiled.tile_expressions import Tile
from attndsl.backends.tiled.tile_kinds import tile_kinds
from attndsl.call.autograd import attend
from attndsl.call.bind import bind
from attndsl.call.options import CallOptions, Location
from attndsl.errors import UnsupportedError
from attndsl.ir import SCORE, Op, Program, const, node
from attndsl.pipeline import lower_program

BACKEND = CPUBackend()
PLACE = SimpleNamespace(device="cpu", shape=(2, 4, 37, 8))
ALL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Bound:
    """A program on a backend, called as :class:`attndsl.Attention` is."""

    def __init__(self, text, backend=BACKEND, **declared):
        self.lowered = attndsl.compile(text, backend="reference", **declared).lowered
        self.backend = backend

    def call(
        self, q, k, v, *, scale=None, q_offset=0, kv_offset=0, q_index=None, kv_index=None, seed=0,
        **captures,
    ):  # fmt: skip
        return bind(
            self.lowered.program, (q, k, v), captures,
            Location(q_offset, kv_offset, q_index, kv_index), CallOptions(scale, seed),
        )  # fmt: skip

    def __call__(self, q, k, v, *, return_lse=False, **arguments):
        call = self.call(q, k, v, **arguments)
        self.backend.check(self.lowered, call)
        out, lse = attend(self.backend, self.lowered, call, True)
        return (out, lse) if return_lse else out


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles, spans and steps at lengths that the reference does in no time."""
    for name, value in {
        "BLOCK_M": 8, "BLOCK_N": 4, "SPAN": 12, "_SPARE": 0, "_FEW_PAIRS": 0, "_APART": 2,
        "CPU": step_plan.Limits(12, 256), "PLAIN": step_plan.Limits(12, 512, True),
    }.items():  # fmt: skip
        monkeypatch.setattr(step_plan, name, value)
    monkeypatch.setattr(BACKEND, "_plans", step_plan.Plans())


def compare(check, text, inputs, **declared):
    """Hold one program to the tolerance method; exactly, in fp64."""
    oracle = Bound(text, ReferenceBackend(), **declared)
    golden = check.run(oracle, inputs.to(torch.float64))
    dtype = inputs.q.dtype
    found = check.run(Bound(text, **declared), inputs.to(dtype))
    if dtype is torch.float64:
        for name, exact in golden.items():
            torch.testing.assert_close(found[name], exact, atol=1e-10, rtol=1e-10, msg=name)
        return
    spread = check.spread_of(text, inputs, dtype, **declared)
    check.close(golden, check.run(oracle, inputs.to(dtype)), found, dtype, spread=spread)


def leaf(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def documents(*shape):
    return torch.randint(0, 3, shape).sort(-1).values


def inputs_of(check, case, dtype):
    text, shapes, options, sizes = case
    captures = {name: leaf(*shape, dtype=torch.float32) for name, shape in shapes.items()}
    with_lse = "weights" not in text or "softmax" in text
    return check.inputs(
        PLACE, dtype, captures=captures, options=options, with_lse=with_lse, **sizes
    )


@pytest.mark.parametrize("name", [*PROGRAMS, *OWN_WEIGHTS])
def test_programs_in_many_small_tiles(check, small_tiles, name):
    case = (PROGRAMS | OWN_WEIGHTS)[name]
    inputs = inputs_of(check, case, torch.float64)
    compare(check, case[0], inputs)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize(
    "name", ["causal", "softcap", "bias", "diagonal", "sink", "dropout", "grouped", "sigmoid"]
)
def test_dtypes(check, name, dtype):
    case = (PROGRAMS | OWN_WEIGHTS)[name]
    if dtype in (torch.float64, torch.float32):
        compare(check, case[0], inputs_of(check, case, dtype))
        return
    oracle, attention = Bound(case[0], ReferenceBackend()), Bound(case[0])
    draws = []
    # Gradients of four numbers do not tell how large errors are.
    for _ in range(8):
        inputs = inputs_of(check, case, dtype)
        draws.append(
            (
                check.run(oracle, inputs.to(torch.float64)),
                check.run(oracle, inputs.to(dtype)),
                check.run(attention, inputs.to(dtype)),
                check.spread_of(case[0], inputs, dtype),
            )
        )
    *three, spread = map(check.pooled, zip(*draws, strict=True))
    check.close(*three, dtype, spread=spread)


@pytest.mark.parametrize("spare", [0, 8, 10**9])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_documents_that_differ_by_batch_and_head(check, small_tiles, monkeypatch, spare, kv_heads):
    monkeypatch.setattr(step_plan, "_SPARE", spare)
    text = "mask = causal() and doc[b, h, q] == doc[b, h, kv]; score = score * g[h] + b"
    captures = {"doc": documents(3, 6, 37), "g": leaf(6, dtype=torch.float32)}
    captures["doc"][1] = captures["doc"][1, :1]
    inputs = check.inputs(
        PLACE, torch.float32, batch=3, heads=6, kv_heads=kv_heads, captures=captures, with_lse=True
    )
    declared = {"doc": attndsl.tensor("batch", "heads", "q_len", dtype="int")}
    compare(check, text, inputs, g=attndsl.tensor("heads"), **declared)


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_heads(check, rows):
    captures = {"t": leaf(4, 37, dtype=torch.float64)}
    text = "tensor t[heads, n]: float; score = score * t[h, q] + t[h, kv]"
    inputs = check.inputs(
        PLACE, torch.float64, q_len=rows, kv_len=37, captures=captures, with_lse=True
    )
    compare(check, text, inputs)


def test_lengths_of_a_batch(check, small_tiles):
    captures = {"length": torch.tensor([0, 37, 5, 1, 20])}
    text = "tensor length[batch]: int; mask = kv < length[b] and q < length[b]"
    inputs = check.inputs(PLACE, torch.float64, batch=5, captures=captures, with_lse=True)
    compare(check, text, inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"q_offset": torch.tensor(7), "kv_offset": torch.tensor(3, dtype=torch.int32)},
        {"q_index": torch.randint(0, 60, (37,)), "kv_index": torch.randperm(60)[:37].int()},
        {"q_index": torch.arange(37).flip(0), "kv_offset": 4},
    ],
    ids=["tensors", "random", "reversed"],
)
def test_positions_of_the_call(check, small_tiles, options):
    text = "mask = q >= kv; score = score + t[h, q] * t[h, kv]"
    captures = {"t": leaf(4, 60, dtype=torch.float64)}
    inputs = check.inputs(PLACE, torch.float64, captures=captures, options=options, with_lse=True)
    compare(check, text, inputs, t=attndsl.tensor("heads", "n"))


@pytest.mark.parametrize("length", [1, 3, 8, 143, 277, 312])
def test_odd_lengths_in_tiles_of_the_real_size(check, length):
    for text in ("causal() and q - kv < 100", "score + 0.01 * (kv - q)"):
        inputs = check.inputs(
            PLACE, torch.float32, q_len=length, kv_len=length + length % 5, with_lse=True
        )
        compare(check, text, inputs)


def test_several_spans_of_the_real_size(check):
    inputs = check.inputs(
        PLACE, torch.float32, batch=1, heads=2, q_len=150, kv_len=4500, with_lse=True,
        options={"q_offset": 4350},
    )  # fmt: skip
    compare(check, "mask = causal() and (q - kv < 90 or kv < 2100)", inputs)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty_calls(sizes):
    batch, heads, q_len, kv_len = sizes
    q, k, v = (leaf(batch, heads, *x) for x in ((q_len, 4), (kv_len, 4), (kv_len, 5)))
    leaves = (q, k, v, leaf(3), leaf())
    program = Bound(
        "tensor t[3]: float; param a: float; mask = q >= kv; score = score * a + t[kv]; sink = t[0]"
    )
    out, lse = program(q, k, v, t=leaves[3], a=leaves[4], return_lse=True)
    assert out.shape == (batch, heads, q_len, 5)
    assert (out == 0).all()
    assert lse.shape == (batch, heads, q_len)
    assert (lse == -torch.inf).all()
    grads = torch.autograd.grad(out.sum(), leaves)
    for grad, given in zip(grads, leaves, strict=True):
        assert grad.shape == given.shape
        assert (grad == 0).all()


def test_empty_captures_read_zero():
    q, t = leaf(1, 2, 5, 4), leaf(0)
    program = Bound("tensor t[pages]: float; score = score + t[kv]")
    out = program(q, q, q, t=t)
    torch.testing.assert_close(out, Bound("score")(q, q, q))
    assert torch.autograd.grad(out.sum(), t)[0].shape == (0,)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        lambda x: x[:1, :1].expand(x.shape),
        lambda x: torch.cat([x, x], 2)[:, :, ::2],
    ],
    ids=["transposed", "padded", "expanded", "every other row"],
)
def test_strides(check, small_tiles, layout):
    inputs = check.inputs(PLACE, torch.float64, kv_heads=2)
    q, k, v = (layout(x).detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    grad = layout(inputs.grad_out)
    for backend in (BACKEND, ReferenceBackend()):
        out = Bound("mask = causal(); score = score + alibi()", backend)(q, k, v)
        found = (out, *torch.autograd.grad(out, (q, k, v), grad))
        if backend is BACKEND:
            mine = found
    for one, other in zip(mine, found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


GRADCHECKED = {
    "relative": ("mask = q >= kv; score = sin(score) * score + (q - kv)", ""),
    "captures": ("score = tanh(score * g[h]) + t[q - kv + 8] + t[kv]; mask = q >= kv", "gt"),
    "params": ("score = a * softcap(score, 2.0)", "a"),
    "sink": ("mask = kv < q; score = score * a; sink = g[h] * g[h] + a", "ga"),
    "sigmoid": ("mask = kv < q; score = a * score; weights = sigmoid(score - g[h]) ** 2 * a", "ga"),
    "dropout": ("score = score * g[h]; weights = dropout(softmax(score), 0.4)", "g"),
}


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradcheck(small_tiles, name):
    text, names = GRADCHECKED[name]
    known = {"g": leaf(2), "t": leaf(16), "a": leaf()}
    values = {key: known[key] for key in names}
    program = Bound(text, **values)
    own = program.lowered.program.weights is not None

    def function(q, k, v, *rest):
        captures = dict(zip(values, rest, strict=True))
        out, lse = program(q, k, v, return_lse=True, seed=3, **captures)
        return out if own else (out, torch.where(lse.isinf(), 0.0, lse))

    leaves = [leaf(1, 2, 8, 4) for _ in range(3)]
    assert torch.autograd.gradcheck(function, [*leaves, *values.values()])


def test_only_wanted_gradients_are_given():
    program = Bound("tensor t[heads]: float; score = score * t[h]")
    q, t = leaf(1, 2, 9, 4), leaf(2)
    call = program.call(q, q, q, t=t)
    out, lse = BACKEND.forward(program.lowered, call)
    backward = Backward(out, lse, torch.ones_like(out), None, Wants(False, True, False))
    found = BACKEND.backward(program.lowered, call, backward)
    assert found.q is None
    assert found.v is None
    assert found.k.shape == q.shape
    assert dict(found.tensors) == {}
    backward = backward._replace(wanted=Wants(False, False, False, frozenset("t")))
    found = BACKEND.backward(program.lowered, call, backward)
    assert found.tensors["t"].abs().min() > 0


def test_programs_without_the_score_give_zero_gradients(small_tiles):
    q, k, v = (leaf(1, 2, 9, 4) for _ in range(3))
    grads = torch.autograd.grad(Bound("score = 0.1 * kv")(q, k, v).sum(), (q, k))
    assert all((grad == 0).all() for grad in grads)


POISONED = [
    "mask = score > 0.1; score = log(score - 0.05)",
    "where(score > 0.5, log(score - 0.25), 2 * score)",
    "where(score > 0.5, 1 / max(score - 0.3, 0.0), score)",
]


@pytest.mark.parametrize("text", POISONED, ids=range(3))
def test_what_is_not_used_never_poisons_gradients(check, small_tiles, text):
    inputs = check.inputs(PLACE, torch.float64)
    compare(check, text, inputs)
    assert all(
        x.isfinite().all() for x in check.run(Bound(text), inputs.to(torch.float64)).values()
    )


def test_nan_at_masked_out_pairs_stays_there(small_tiles):
    q, k, v = (leaf(2, 2, 21, 4) for _ in range(3))
    bias = torch.randn(21, 21, dtype=torch.float64)
    dead = torch.ones_like(bias, dtype=torch.bool).triu(1)
    poisoned = torch.where(dead, torch.nan, bias).requires_grad_()
    program = Bound("mask = causal(); score = score + t[q, kv]", t=poisoned)
    found = torch.autograd.grad(program(q, k, v, t=poisoned).sum(), (q, k, v, poisoned))
    clean = bias.requires_grad_()
    expected = torch.autograd.grad(program(q, k, v, t=clean).sum(), (q, k, v, clean))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    padded = k.detach().clone()
    padded[:, :, 13:] = torch.nan
    short = Bound("kv < 13")
    torch.testing.assert_close(short(q, padded, v), short(q, k, v))


def test_dead_pairs_of_an_infinite_gradient_give_nothing(small_tiles):
    q, k, v = (leaf(1, 1, 20, 4) for _ in range(3))
    seed = torch.ones(1, 1, 20, 4, dtype=torch.float64)
    seed[:, :, 4] = torch.inf
    (dk,) = torch.autograd.grad(Bound("causal()")(q, k, v), k, seed)
    assert dk[:, :, 5:].isfinite().all()


@pytest.mark.parametrize("kinds", [0, 1])
def test_tile_kinds_decide_what_is_visited(check, small_tiles, monkeypatch, kinds):
    """All PARTIAL: the same result. All EMPTY: nothing is looked at."""
    inputs = check.inputs(PLACE, torch.float64)
    program = Bound("causal() and q - kv < 9")
    expected = check.run(program, inputs.to(torch.float64))

    def constant(lowered, call, block_m, block_n):
        tiles = (-(-call.q.shape[2] // block_m), -(-call.k.shape[2] // block_n))
        return torch.full((1, 1, *tiles), kinds, dtype=torch.int8)

    monkeypatch.setattr(step_plan, "tile_kinds", constant)
    monkeypatch.setattr(BACKEND, "_plans", step_plan.Plans())
    for name, value in check.run(program, inputs.to(torch.float64)).items():
        torch.testing.assert_close(value, expected[name] * kinds, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("spare", [0, 5, 10**9])
def test_boxes_cover_every_head_once(monkeypatch, spare):
    monkeypatch.setattr(step_plan, "_SPARE", spare)
    draw = random.Random(5)
    for _ in range(200):
        batch, group, kv_heads = (draw.choice(some) for some in ([1, 2, 5], [1, 2, 3], [1, 2, 4]))
        heads = group * kv_heads
        entry = [
            bytes(draw.choice([0, 1, 2]) for _ in range(2)) for _ in range(draw.choice([1, heads]))
        ]
        rows = [draw.choice([entry, entry[::-1]]) for _ in range(draw.choice([1, batch]))]
        seen = {}
        for box, row in step_plan._boxes(rows, batch, heads, group):
            (b0, b1), (h0, h1) = box.batches, box.heads
            assert b1 - b0 == 1 or (h0, h1) == (0, heads)
            whole = h0 % group == 0 and h1 % group == 0
            assert whole or h0 // group == (h1 - 1) // group
            for b in range(b0, b1):
                for h in range(h0, h1):
                    assert (b, h) not in seen
                    seen[b, h] = row
        assert len(seen) == batch * heads
        for (b, h), row in seen.items():
            own = rows[b % len(rows)][h % len(entry)]
            assert all(x == y or x == 1 for x, y in zip(row, own, strict=True))


def test_repeats_are_bitwise_equal():
    text = "mask = causal(); score = score + t[q - kv] * g[h]"
    q, k, v = (leaf(2, 4, 400, 16, dtype=torch.float32) for _ in range(3))
    t, g = leaf(500, dtype=torch.float32), leaf(4, dtype=torch.float32)
    program = Bound(text, t=t, g=g)
    first, *others = (
        torch.autograd.grad(program(q, k, v, t=t, g=g).square().sum(), (q, k, v, t, g))
        for _ in range(4)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_autocast_leaves_the_arithmetic_alone():
    q = torch.randn(1, 2, 40, 16)
    program = Bound("causal()")
    with torch.autocast("cpu", torch.bfloat16):
        found = program(q, q, q)
    assert torch.equal(found, program(q, q, q))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation gave."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("text", ["causal()", "mask = q - kv < 4000; score = score + alibi()"])
def test_memory_is_linear_in_the_length(text):
    """8k x 8k pairs are 256 MiB in fp32; the largest tensor stays with the largest step's."""
    q, k, v = (torch.randn(1, 1, 8192, 8) for _ in range(3))
    program = Bound(text)
    call = program.call(q, k, v)
    with Largest() as largest:
        out, lse = BACKEND.forward(program.lowered, call)
        BACKEND.backward(program.lowered, call, Backward(out, lse, out, None, Wants()))
    assert largest.bytes <= 32 << 20


def test_refusals():
    q = torch.randn(1, 1, 2, 4)
    call = Bound("score").call(q, q, q)
    for program, words in (
        (Program(score=SCORE, sink=const(1.0), weights=node(Op.SIGMOID, SCORE)), "sink"),
        (Program(score=SCORE, dropout=node(Op.SIGMOID, SCORE)), "dropout"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            BACKEND.check(lower_program(program), call)
    assert BACKEND.why_not(torch.device("cpu")) is None


def test_plans_are_remembered_by_all_that_they_depend_on(monkeypatch):
    made = []

    def counted(lowered, call, block_m, block_n):
        made.append(call)
        return tile_kinds(lowered, call, block_m, block_n)

    monkeypatch.setattr(step_plan, "tile_kinds", counted)
    monkeypatch.setattr(step_plan, "_FEW_PAIRS", 0)
    backend = CPUBackend()
    q, k, v = (leaf(1, 2, 20, 4) for _ in range(3))
    window = Bound("param w: int\nmask = 0 <= q - kv and q - kv < w", backend)
    documents = Bound("tensor doc[kv_len]: int\nmask = doc[q] == doc[kv]", backend)
    numbers = [{"w": 3}, {"w": 4}, {"w": 3, "q_offset": 2}, {"w": 3, "kv_offset": 2}]
    for number in (*numbers, *numbers):
        window(q, k, v, **number)
    assert len(made) == len(numbers)
    window(q, k[:, :, :-1], v[:, :, :-1], w=3)
    assert len(made) == len(numbers) + 1
    doc = torch.arange(20)
    first = documents(q, k, v, doc=doc)
    doc.zero_()
    assert not first.equal(documents(q, k, v, doc=doc))
    assert len(made) == len(numbers) + 3
    offset = torch.tensor(2)
    window(q, k, v, w=3, q_offset=offset)
    window(q, k, v, w=3, q_offset=offset.add_(5))
    assert len(made) == len(numbers) + 5


def test_a_growing_cache_is_not_analysed(monkeypatch):
    def refuse(*_):
        raise AssertionError("kinds of tiles")

    monkeypatch.setattr(step_plan, "tile_kinds", refuse)
    attention, reference = (
        attndsl.compile("causal() and q - kv < 100", backend=name) for name in ("cpu", "reference")
    )
    k, v = torch.randn(2, 1, 2, 300, 16)
    q = torch.randn(1, 2, 1, 16)
    monkeypatch.setattr(BACKEND, "_plans", step_plan.Plans())
    for length in (1, 2, 63, 64, 65, 250, 300):
        # A cache with room for more: keys of a head lie apart from those of the next.
        found, wanted = (
            run(q, k[:, :, :length], v[:, :, :length], q_offset=length - 1, return_lse=True)
            for run in (attention, reference)
        )
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("rows", "heads", "widths"),
    [(1, 8, [4096]), (16, 8, [4096]), (16, 16, [2048] * 2), (128, 8, [1024] * 4), (512, 1, [1024])],
)
def test_few_rows_have_long_spans(rows, heads, widths):
    lowered = attndsl.compile("score").lowered
    q, kv = torch.empty(1, heads, rows, 8), torch.empty(1, heads, 4096, 8)
    call = Call(q, kv, kv, 1.0, {})
    steps = step_plan.make_plan(lowered, call, step_plan.CPU)
    assert {span.width for step in steps for span in step.spans} == set(widths)
    assert len(steps[0].spans) >= len(widths)
    pairs = (
        (step.rows[1] - step.rows[0]) * (step.heads[1] - step.heads[0]) * span.width
        for step in steps
        for span in step.spans
    )
    assert max(pairs) <= step_plan.CPU.pairs


@pytest.mark.parametrize(
    ("text", "spans"),
    [("causal()", 0), ("mask = causal(); score = softcap(score, 15.0)", 1),
     ("mask = causal(); score = score + alibi(); weights = sigmoid(score)", 1)],
)  # fmt: skip
def test_forwards_of_few_rows_make_scores_of_long_spans(monkeypatch, text, spans):
    """At once; torch's own attention makes those of plain scores."""
    made = []
    real = span_scores.Scorer.span
    monkeypatch.setattr(span_scores.Scorer, "span", lambda *x: made.append(x[2].width) or real(*x))
    q, kv = torch.randn(1, 8, 1, 16), torch.randn(1, 2, 16384, 16)
    attndsl.compile(text)(q, kv, kv, q_offset=16383)
    assert made == [16384] * spans


@pytest.mark.parametrize("length", [700, 3000])
def test_a_span_has_a_short_bias_or_none(length):
    """So that memory does not grow with the product of lengths."""
    program, q = Bound("causal() and kv != 5"), torch.empty(1, 1, length, 8)
    found = [
        [(span.columns, span.partial) for span in step.spans]
        for step in step_plan.make_plan(program.lowered, program.call(q, q, q), step_plan.PLAIN)
    ]
    # Rows that are no whole tile have longer ones, of as many pairs.
    whole = found[: length // 128]
    assert all(not partial or b - a <= 1024 for step in whole for (a, b), partial in step)
    for number, step in enumerate(found):
        stop = min(128 * (number + 1), length)
        keys = [key for (a, b), _ in step for key in range(a, b)]
        assert keys == list(range(stop))
    # A tile of few keys at either end, and all keys between them at once.
    if length == 3000:
        assert [columns for columns, _ in found[20]] == [(0, 64), (64, 2560), (2560, 2688)]


@pytest.mark.parametrize("backward", [False, True])
def test_long_spans_give_what_the_reference_does(backward):
    q = torch.randn(2, 4, 3, 16, requires_grad=backward)
    k, v = (torch.randn(2, 2, 3000, 16, requires_grad=backward) for _ in range(2))
    doc = (torch.arange(3000) // 700).expand(2, -1).int()
    text = "tensor doc[batch, kv_len]: int\nmask = doc[b, kv] != 2 and kv % 5 != q % 5"
    results = []
    for name in ("cpu", "reference"):
        out, lse = attndsl.compile(text, backend=name)(q, k, v, doc=doc, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)) if backward else ()
        results.append((out, lse, *grads))
    torch.testing.assert_close(*results)


def test_plans_of_one_mask_at_several_sizes_of_a_capture():
    """A kept plan is of its own numbers: the mask speaks of the tensor's size, not its elements."""
    text = "tensor t[n]: float\nmask = kv < n\nscore = score + t[0]"
    q, k, v = (torch.randn(1, 1, 300, 8) for _ in range(3))
    cpu, reference = (attndsl.compile(text, backend=name) for name in ("cpu", "reference"))
    for count in (8, 200, 8):
        t = torch.zeros(count)
        torch.testing.assert_close(cpu(q, k, v, t=t), reference(q, k, v, t=t))


MASKS = {
    "none": "score",
    "causal": "causal()",
    "by head": "q - kv < 6 * (h + 1) and q >= kv",
    "by entry": "q >= kv and kv != 2 * b",
    "dead rows": "kv > q + 3",
    "sink": "mask = q >= kv + 2\nsink = 0.3 * h",
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)])
def test_plain_scores_are_torchs_own_attention(monkeypatch, small_tiles, name, heads):
    """Of the same results as scores that are not known to be plain, dead rows included."""
    torch.manual_seed(0)
    operands = [
        torch.randn(2, n, 37, 8, dtype=torch.float64, requires_grad=True)
        for n in (*heads, heads[1])
    ]
    monkeypatch.setattr(Triangles, "of", lambda *_: None)  # Steps, for causal calls too.
    calls = []
    real = SpanAttention.backward
    monkeypatch.setattr(SpanAttention, "backward", lambda *x: calls.append(x) or real(*x))

    def run(loss):
        out, lse = Bound(MASKS[name])(*operands, return_lse=True, scale=-0.4)
        return out, lse, *torch.autograd.grad(loss(out, lse), operands)

    def of_output(out, lse):
        return out.square().sum()

    def of_both(out, lse):
        return out.square().sum() + lse.clamp_min(-9.0).square().sum()

    found = [run(of_output)]
    assert calls
    calls.clear()
    # Torch's own backward knows no gradient of lse.
    found.append(run(of_both))
    assert not calls
    monkeypatch.setattr(cpu, "is_plain", lambda program, call: False)
    usual = [run(of_output), run(of_both)]
    for one, other in zip(found, usual, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_dead_keys_that_are_no_numbers_change_nothing(monkeypatch, value):
    """torch adds a mask to scores, and a sum with NaN is NaN. So is a product of 0 and infinity."""
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    attention = Bound("kv < 5")
    wanted = attention(q, k, v)
    spoilt = k.clone()
    spoilt[:, :, 5:] = value
    torch.testing.assert_close(attention(q, spoilt, v), wanted)
    # dQ is a product with all keys. What comes of it in dK and dV is what comes without torch's.
    inputs = [x.requires_grad_() for x in (q, spoilt, v)]

    def grads():
        return torch.autograd.grad(attention(*inputs).square().sum(), inputs)

    found = grads()
    monkeypatch.setattr(cpu, "is_plain", lambda program, call: False)
    for one, other in zip(found, grads(), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert all(x.isfinite().all() for x in found[1:])


def test_spans_that_end_alike_share_a_bias(monkeypatch):
    """Those of a causal mask are longer from step to step; each takes the end of a longer one."""
    made = []
    real = Biases._made
    monkeypatch.setattr(Biases, "_made", lambda *x: made.append(x) or real(*x))
    monkeypatch.setattr(Triangles, "of", lambda *_: None)
    q, k, v = (torch.randn(1, 2, 2000, 8) for _ in range(3))
    out = Bound("causal()")(q, k, v)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, wanted)
    # One of the first step, whose rows see no key all. One of the next seven. From the ninth on
    # keys that all rows see lie apart, and the rest is as of the first. The last one has 80 rows.
    assert len(made) == 3


@pytest.mark.parametrize(
    ("text", "rows", "width", "forward", "backward"),
    [
        ("causal()", 1, 8, "SingleCall Triangle RowSteps", "Triangle RowSteps"),
        ("causal()", 200, 8, "Triangle RowSteps", "Triangle RowSteps"),
        ("causal() and q - kv < 40", 200, 8, "RowSteps", "RowSteps"),
        ("causal()", 200, 5, "RowSteps", "RowSteps"),
        ("mask = causal(); score = softcap(score, 2.0)", 1, 8, "RowSteps", "RowSteps"),
    ],
)
def test_choices(text, rows, width, forward, backward):
    """Torch's own attention first; steps make what it does not, and what it may have spoiled."""
    program, q, v = Bound(text), torch.randn(1, 2, rows, 8), torch.randn(1, 2, rows, width)
    call = program.call(q, q, v)
    out, lse = BACKEND.forward(program.lowered, call)
    given = Backward(out, lse, torch.ones_like(out), None, Wants(True, True, True))
    for wanted, more in ((forward, ()), (backward, (given,))):
        found = list(BACKEND.choose(program.lowered, call, *more))
        assert [type(strategy).__name__ for strategy in found] == wanted.split()
        assert found[-1].plain == ("softcap" not in text and width == 8)


@pytest.mark.parametrize("first", [0, 64, 1000])
def test_parts_of_a_span_are_its_keys(first):
    columns = (first, first + 2500)
    partial = ((first, first + 64), (first + 960, first + 1088), (first + 2432, first + 2500))
    parts = list(step_plan.KeySpan(columns, partial).parts())
    assert [part.width for part in parts] == [1024, 1024, 452]
    keys = [key for part in parts for key in range(*part.columns)]
    assert keys == list(range(*columns))
    decided = [key for part in parts for some in part.partial for key in range(*some)]
    assert decided == [key for some in partial for key in range(*some)]
    assert all(a < b for part in parts for a, b in part.partial)


def test_what_varies_with_rows_alone_is_evaluated_once(monkeypatch, small_tiles):
    """And is right in each of the tiles, of boxes of heads and batch entries too."""
    text = "tensor t[batch, heads, n]: int\nmask = t[b, h, q // 3] >= kv // 2 and q >= kv"
    q, k, v = (torch.randn(2, 4, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    t = torch.randint(0, 20, (2, 4, 14))
    divided = []
    real = RULES[Op.FLOORDIV]
    monkeypatch.setitem(RULES, Op.FLOORDIV, lambda *x: divided.append(x) or real(*x))
    results = []
    for backend in ("cpu", "reference"):
        for where in ({}, {"q_offset": 2}, {"q_index": torch.arange(40).flip(0)}):
            divided.clear()
            out = attndsl.compile(text, backend=backend)(q, k, v, t=t, **where)
            grads = torch.autograd.grad(out.square().sum(), (q, k, v))
            # Of a forward and of a backward, and of their kinds of tiles.
            assert len(divided) <= 8
            results.append((out, *grads))
    for one, other in zip(results[:3], results[3:], strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_no_account_are_zero(dtype):
    """In place of subnormal numbers, which take CPUs many times as long."""
    tiny, program = torch.finfo(dtype).tiny, attndsl.compile("2 * score").lowered.program
    least = 0.8 * math.log(tiny)
    powers = torch.tensor([0.0, -1.0, least + 1, least - 1, 1.2 * least, -torch.inf, torch.nan])
    powers = powers.to(dtype)
    wanted = powers.exp()
    wanted[3:6] = 0.0
    found = span_scores.exp_(program, powers.clone())
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0, equal_nan=True)
    of_plain = span_scores.exp_(attndsl.compile("causal()").lowered.program, powers.clone())
    assert torch.equal(of_plain[:6], powers.exp()[:6])


@pytest.mark.parametrize("slope", [0.5, 3.0])
def test_no_weight_of_a_steep_score_is_subnormal(monkeypatch, slope):
    """Forwards and gradients stay those of the reference."""
    seen = []
    real_bmm, real_exp = torch.bmm, backward_steps.exp_

    def seen_bmm(left, *more, **options):
        seen.append(left.clone())
        return real_bmm(left, *more, **options)

    def seen_exp(program, powers):
        seen.append(real_exp(program, powers).clone())
        return powers

    monkeypatch.setattr(torch, "bmm", seen_bmm)
    monkeypatch.setattr(backward_steps, "exp_", seen_exp)
    text = f"mask = causal(); score = score - {slope} * (q - kv)"
    q, k, v = (torch.randn(1, 2, 300, 8, requires_grad=True) for _ in range(3))
    results = []
    for backend in ("cpu", "reference"):
        out = attndsl.compile(text, backend=backend)(q, k, v)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        if backend == "cpu":
            weights = [x for x in seen if x.shape[-1] > 8]
            seen.clear()
    assert len(weights) >= 6
    tiny = torch.finfo(torch.float32).tiny
    assert not any(((x.abs() < tiny) & (x != 0)).any() for x in weights)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("causal() and q - kv < 40", True),
        ("q - kv < 40 * (h + 1) and kv <= q", True),
        ("causal() and q // 40 == kv // 40", False),
        ("causal() and score > 0", False),
    ],
)
def test_tiles_of_a_diagonal_share_their_live_pairs(monkeypatch, small_tiles, text, shared):
    """Where the mask depends on distances alone; results are those of the reference."""
    found = []
    real = Tile.evaluate
    monkeypatch.setattr(Tile, "evaluate", lambda *x: found.append(x[1:]) or real(*x))
    q, k, v = (torch.randn(1, 2, 160, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    results, masks = [], 0
    for backend in ("cpu", "reference"):
        attention = attndsl.compile(text, backend=backend)
        for where in ({}, {"q_offset": 3}, {"q_index": torch.arange(160).flip(0)}):
            found.clear()
            out = attention(q, k, v, **where)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
            if backend == "cpu" and not where:
                masks = sum(roots == (attention.lowered.program.mask,) for roots in found)
    # A forward and a backward: 20 rows of tiles, with several tiles each that the mask decides.
    assert (masks < 40) == shared, masks
    for one, other in zip(results[:3], results[3:], strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y)


def test_tiles_of_one_call_are_not_kept_for_others():
    """Those of another mask are wrong for the call that is given them alone."""
    attention, other = attndsl.compile("q >= kv"), attndsl.compile("q - kv == 1024")
    q = torch.randn(1, 1, 1536, 8)
    tiles = other.tiles(1536, 1536)
    reference = attndsl.compile("q >= kv", backend="reference")(q, q, q)
    for given in (tiles, None, tiles, None):
        found = attention(q, q, q, tiles=given)
        right = torch.allclose(found, reference, atol=1e-5)
        assert right == (given is None)
