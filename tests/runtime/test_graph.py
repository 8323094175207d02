"""What graphs of torch.compile hold of a call."""

import pytest
import torch

import attndsl

PROGRAMS = {
    "functions": (
        "mask = causal() and (q - kv) % 7 != 3\nscore = softcap(20.0) + 0.1 * (q - kv)",
        {},
    ),
    "a sink": ("score = alibi()\nsink = 0.5 * h + 1", {}),
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
    from attndsl.runtime import operator

    found = []
    real = operator._found_out
    monkeypatch.setattr(operator, "_found_out", lambda given: found.append(given) or real(given))
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
