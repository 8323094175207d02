"""Checked mode says what made a result or a gradient that is not finite."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import attndsl
from attndsl.errors import NonFiniteError

B, H, G, LQ, LK, D = 2, 4, 2, 6, 7, 4
INF, NAN = torch.inf, torch.nan


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, LQ, D), (B, G, LK, D), (B, G, LK, D))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def caught(text, three=None, *, backward=False, **arguments):
    """The error of a call in checked mode, or of its backward."""
    attention = attndsl.compile(text, checked=True, name="my.attn")
    three = [x.requires_grad_() for x in (inputs() if three is None else three)]
    if not backward:
        with pytest.raises(NonFiniteError) as error:
            attention(*three, **arguments)
        return error.value
    out = attention(*three, **arguments)
    with pytest.raises(NonFiniteError) as error:
        out.sum().backward()
    return error.value


def fine(text, three=None, **arguments):
    """A call in checked mode with its backward; both are those of the unchecked one."""
    three = [x.requires_grad_() for x in (inputs() if three is None else three)]
    grads = []
    for checked in (True, False):
        attention = attndsl.compile(text, checked=checked, backend="reference")
        out = attention(*three, **arguments)
        grads.append([out, *torch.autograd.grad(out.square().sum(), three)])
    for found, wanted in zip(*grads, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("lines", "arguments", "line", "part", "words", "hint"),
    [
        (
            "mask = causal()\nscore = 2 * score\nscore = score + log(score - 50.0)",
            {}, 3, "log(score - 50.0)", "is nan: log of -", "log(max(x, 1e-6))",
        ),
        (
            "mask = causal()\nscore = score / (q - kv)",
            {}, 2, "score / (q - kv)", " / 0.0 (batch 0, head 0, query row ", "a divisor of 0",
        ),
        ("score = exp(900.0 * score)", {}, 1, "exp(900.0 * score)", "is inf: exp of ", "clamp"),
        (
            "weights = sqrt(score)", {}, 1, "sqrt(score)", "is nan: sqrt of -", "sqrt(max(x, 0.0))",
        ),
        (
            "tensor s[heads]: float\nsink = log2(s[h])", {"s": torch.tensor([1.0, 1.0, -4.0, 1.0])},
            2, "log2(s[h])", "is nan: log2 of -4.0 (batch 0, head 2, query row 0)", "log2(max",
        ),
        (
            "param low: float; param high: float\nscore = min(score, low) + max(score, high)",
            {"low": INF, "high": INF}, 2, "high", "param 'high' is inf", "pass a finite",
        ),
        (
            "tensor bias[heads, kv_len]: float\nscore = score + bias[h, kv - 9]",
            {"bias": torch.tensor([NAN] + [0.0] * 6).expand(4, 7), "kv_offset": 9},
            2, "bias[h, kv - 9]", "tensor 'bias' is nan at [0, 0]", "before the call",
        ),
        (
            "tensor u[q_len, r]: float; tensor w[kv_len, r]: float\n"
            "score = score + dot(u[q, :], w[kv, :])",
            {"u": torch.ones(6, 3), "w": torch.ones(7, 3).index_fill_(0, torch.tensor([5]), NAN)},
            2, "dot(u[q, :], w[kv, :])", "tensor 'w' is nan at [5, 0]", "before the call",
        ),
    ],
)  # fmt: skip
def test_what_an_operation_makes(lines, arguments, line, part, words, hint):
    error = caught(lines, **arguments)
    assert words in error.message
    assert hint in error.hint
    assert (error.span.source.name, error.span.text) == ("my.attn", part)
    if part != "high":  # A name first stands where it is declared.
        assert error.span.line == line


def test_the_first_row_and_its_first_pair_are_named():
    text = "mask = kv >= 2 and q >= 3 and b == 1\nscore = score + log(float(q - 4))"
    error = caught(text)
    assert error.message == (
        "log(float(q - 4)) is nan: log of -1.0 (batch 1, head 0, query row 3, key row 2)"
    )
    # In row 4 it is -inf, which masks pairs.
    fine("mask = kv >= 2 and q >= 4\nscore = score + log(float(q - 4))")


def test_infinities_of_nan_are_told_with_it():
    error = caught("param cap: float\nscore = cap * tanh(score / cap)", cap=INF)
    assert "is nan: inf * " in error.message
    assert "and param 'cap' is inf" in error.message
    error = caught("score = log(0.0 * score * score) - log(0.0 * score * score + 0.0)")
    assert "is nan: -inf - -inf, and log(" in error.message
    assert "is -inf: log of " in error.message


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("score = where(q >= kv, score, -inf)", {}),
        ("score = score + log(float(kv))", {}),
        (
            "tensor bias[q_len, kv_len]: float; score = score + bias[q, kv]",
            {"bias": torch.zeros(6, 7).masked_fill(torch.ones(6, 7).triu(1).bool(), -INF)},
        ),
        (
            "tensor bias[q_len, kv_len]: float; mask = kv < 5; score = score + bias[q, kv]",
            {"bias": torch.full((6, 7), NAN).index_fill_(1, torch.arange(5), 0.0)},
        ),
        ("mask = kv < 5; score = score + where(kv < 5, 0.0, log(score - 50.0))", {}),
        ("mask = false", {}),
        ("mask = q > 3 and score > log(score - 50.0) or kv == 0", {}),
        ("tensor s[heads]: float; mask = causal(); sink = s[h]", {"s": torch.full((4,), -INF)}),
        ("score = tanh(exp(900.0 * score))", {}),
        ("mask = kv > 2; weights = exp(where(kv > q, score, -inf))", {}),
        ("weights = dropout(softmax(score), 0.5)", {"seed": 1}),
    ],
)
def test_masks_and_dead_pairs_are_no_findings(text, arguments):
    fine(text, **arguments)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_inputs_that_are_not_finite_are_named(value):
    shown = str(value)
    for number, name, place in (
        (0, "q", (1, 3, 4, 2)),
        (1, "k", (1, 1, 2, 0)),
        (2, "v", (0, 1, 3, 1)),
    ):
        three = inputs()
        three[number][place] = value
        error = caught("mask = kv <= q + 1", three)
        assert error.message.startswith(f"{name} is {shown} at {list(place)} (batch ")
        assert error.span is None


def test_values_of_masked_keys_count():
    three = inputs()
    three[2][1, 0, 6, 2] = NAN
    error = caught("mask = kv < 6", three)
    assert error.message == "v is nan at [1, 0, 6, 2] (batch 1, head 0, query row 0)"
    assert "fill such rows of v with zeros" in error.hint


def test_keys_that_are_masked_out_count_in_gradients_alone():
    three = inputs()
    three[1][1, 0, 6, 2] = NAN
    error = caught("mask = kv < 6", three, backward=True)
    assert error.message.startswith("k is nan at [1, 0, 6, 2], so that the gradient of 'q' is nan")
    assert "masked out" in error.hint


def test_products_that_overflow():
    three = [x * 300 for x in inputs(torch.float16)]
    error = caught("score = 0.001 * score", three)
    assert error.message.startswith("the raw score, scale * (q . k), overflows float16 (batch 0")
    error = caught("weights = 3000.0 + relu(score)", [*inputs(torch.float16)[:2], three[2]])
    assert error.message.startswith("the output overflows float16 (batch 0, head 0, query row 0)")


@pytest.mark.parametrize(
    ("text", "learned", "part", "words"),
    [
        (
            "tensor x[heads]: float\nscore = score + sqrt(x[h])",
            {"x": torch.tensor([4.0, 1.0, 0.0, 1.0])}, "sqrt(x[h])",
            "the derivative of sqrt(x[h]) by x[h] is ",
        ),
        (
            "mask = causal()\nscore = score + sqrt(score - score)", {}, "sqrt(score - score)",
            ": sqrt of 0.0, where the gradient is ",
        ),
        (
            "tensor s[heads]: float\nsink = s[h] ** 0.5",
            {"s": torch.tensor([4.0, 0.0, 1.0, 1.0])}, "s[h] ** 0.5",
            "(batch 0, head 1, query row 0), so that the gradient of 's' is -inf at [1]",
        ),
        (
            "param p: float\nweights = dropout(softmax(score), sqrt(p))",
            {"p": torch.tensor(0.0)}, "sqrt(p)", "so that the gradient of 'p' is ",
        ),
        (
            "tensor t[heads]: float\nweights = sigmoid(score) * sqrt(t[h])",
            {"t": torch.tensor([4.0, 1.0, 1.0, 0.0])}, "sqrt(t[h])",
            "(batch 0, head 3, query row 0, key row 0)",
        ),
        (
            "tensor u[kv_len, r]: float; tensor w[q_len, r]: float\n"
            "mask = kv > 1\nscore = score + sqrt(dot(w[q, :], u[kv, :]))",
            {"u": torch.zeros(7, 3), "w": torch.ones(6, 3)}, "sqrt(dot(w[q, :], u[kv, :]))",
            "(batch 0, head 0, query row 0, key row 2)",
        ),
    ],
)  # fmt: skip
def test_derivatives_that_are_not_finite(text, learned, part, words):
    learned = {name: x.requires_grad_() for name, x in learned.items()}
    seed = {"seed": 3} if "dropout" in text else {}
    error = caught(text, backward=True, **learned, **seed)
    assert words in error.message
    assert error.span.text == part
    assert error.span.source.name == "my.attn"


def test_a_backward_from_given_results_says_so_too():
    x = torch.tensor([4.0, 1.0, 0.0, 1.0])
    attention = attndsl.compile(
        "tensor x[heads]: float\nscore = score + sqrt(x[h])", checked=True, name="my.attn"
    )
    q, k, v = inputs()
    out, lse = attention(q, k, v, x=x, return_lse=True)
    found = attention.backward(q, k, v, out, lse, torch.ones_like(out), x=x)
    assert found.q.isfinite().all()
    with pytest.raises(NonFiniteError) as error:
        attention.backward(q, k, v, out, lse, out, x=x, wants_captures=["x"])
    assert error.value.span.source.name == "my.attn"


def test_the_gradients_that_come_in_are_named():
    attention = attndsl.compile("causal()", checked=True)
    three = [x.requires_grad_() for x in inputs()]
    out, lse = attention(*three, return_lse=True)
    grad, grad_lse = torch.ones_like(out), torch.ones_like(lse)
    grad[1, 2, 3, 0] = NAN
    with pytest.raises(NonFiniteError, match=r"the gradient of the output is nan at \[1, 2, 3, 0"):
        torch.autograd.grad(out, three, grad, retain_graph=True)
    grad_lse[0, 1, 2] = INF
    with pytest.raises(NonFiniteError, match=r"the log-sum-exp is inf at \[0, 1, 2\]"):
        torch.autograd.grad(lse, three, grad_lse, retain_graph=True)
    # What came before does not count.
    assert torch.autograd.grad(lse, three[0], torch.ones_like(lse))[0].isfinite().all()


def test_sums_that_overflow():
    attention = attndsl.compile("score", checked=True)
    three = [x.requires_grad_() for x in inputs(torch.float16)]
    out = attention(*three)
    with pytest.raises(NonFiniteError, match=r"the gradient of 'v' is .* float16 overflows"):
        torch.autograd.grad(out, three[2], torch.full_like(out, 60000.0))


def test_errors_point_into_the_callers_text_though_another_wrote_it_first():
    first = attndsl.compile("score = score + rsqrt(score - score)", name="first.attn")
    second = "mask = q >= kv\nscore =    score + rsqrt(score - score)"
    assert first.text != second
    error = caught(second)
    assert (error.span.source.name, error.span.line, error.span.column) == ("my.attn", 2, 20)
    learned = "tensor x[heads]: float\nscore = score + sqrt(x[h])"
    attndsl.compile(learned.replace("\n", ";   "), name="first.attn")
    error = caught(learned, backward=True, x=torch.zeros(4, requires_grad=True))
    assert (error.span.source.name, error.span.line, error.span.column) == ("my.attn", 2, 17)


def test_parts_and_offsets_name_rows_of_the_call():
    text = "mask = causal()\nscore = score + log(float(6 - h) + 0.5)"
    part = {"heads": 8, "kv_heads": 4, "h_offset": 4, "q_len": 64, "q_offset": 40}
    fine(text)
    error = caught(text, **part)
    assert "log of -0.5 (batch 0, head 3, query row 0, key row 0)" in error.message
    assert error.span.line == 2
    entries = {"kv_lengths": torch.tensor([3, 7]), "q_offset": torch.tensor([2, 6])}
    error = caught("mask = causal()\nscore = score - log(float(kv_len) - 5.5)", **entries)
    assert "log of -2.5 (batch 0, head 0, query row 0, key row 0)" in error.message


def test_in_graphs_of_torch_compile():
    attention = attndsl.compile("mask = causal()\nscore = score + log(score - 50.0)", checked=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v):
        return attention(q, k, v)

    with pytest.raises(NonFiniteError, match=r"log\(score - 50.0\) is nan"):
        call(*inputs())


def test_second_derivatives_go_on():
    attention = attndsl.compile("mask = causal(); score = softcap(score, 3.0)", checked=True)
    plain = attndsl.compile(attention.text, backend="reference")
    found = []
    for each in (attention, plain):
        three = [x.double().requires_grad_() for x in inputs()]
        out = each(*three)
        (first,) = torch.autograd.grad(out.square().sum(), three[0], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), three))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted)


def test_many_directions_at_once_go_on():
    attention = attndsl.compile("causal()", checked=True)
    q, k, v = (x.requires_grad_() for x in inputs())
    out = attention(q, k, v)
    grads = torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)])
    (found,) = torch.autograd.grad(out, q, grads, is_grads_batched=True)
    torch.testing.assert_close(found[1], 2 * found[0])


@pytest.mark.parametrize("backward", [True, False])
def test_no_tensor_is_kept(backward):
    attention = attndsl.compile("causal()", checked=True)
    q, k, v = (x.requires_grad_() for x in inputs())
    gone = weakref.ref(q)
    gc.disable()
    try:
        out = attention(q, k, v)
        if backward:
            out.sum().backward()
        del out, q, k, v
        assert gone() is None
    finally:
        gc.enable()
