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
