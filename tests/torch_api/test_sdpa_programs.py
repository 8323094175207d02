"""The programs that torch's arguments become, in every backend."""

from __future__ import annotations

import pytest
import torch

from attndsl.torch_api.sdpa_graph import program_spec
from attndsl.torch_api.sdpa_programs import POSITION, program_text

FULL = tuple(POSITION)
FORMS = {
    "nothing": ("all", (), False),
    "causal": ("causal", (), False),
    "lower right": ("causal_lower_right", (), False),
    "padding": ("causal", (("padding", "live", ("batch", "kv_len")),), False),
    "two masks": (
        "all", (("pairs", "dead", ("q_len", "kv_len")), ("padding", "bias", ("batch", "kv_len"))),
        False,
    ),
    "sparse bias": ("all", (("bias", "sparse bias", ("batch", "q_len", "kv_len")),), False),
    "bias": ("causal", (("bias", "bias", FULL),), False),
    "bias by row": ("all", (("bias", "sparse bias", ("heads", "q_len")),), False),
    "dropout": ("causal", (("padding", "live", FULL),), True),
    "range": (
        "range", (("first_key", "bound", ("q_len",)), ("end_key", "bound", ("q_len",))), False,
    ),
}  # fmt: skip


def _captures(place, captures, dropout, learned):
    sizes = dict(zip(FULL, place.shape, strict=False)) | {"kv_len": place.shape[2]}
    found = {"dropout_p": 0.3} if dropout else {}
    start = torch.arange(sizes["q_len"], device=place.device) // 7 * 7
    for name, kind, dims in captures:
        value = torch.randn([sizes[dim] for dim in dims], device=place.device)
        if kind in ("live", "dead"):
            value = value < 1 if kind == "live" else value > 1
        elif kind == "bound":
            value = start if name == "first_key" else start + 7
        else:
            value = value.masked_fill(value < -1.5, -torch.inf)
            value[..., 2:3, :] = -torch.inf if dims == FULL else 0.5
            value.requires_grad_(learned)
        found[name] = value
    return found


@pytest.mark.few_when_interpreted(name=["nothing", "sparse bias", "range"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form(check, place, name):
    reach, captures, dropout = FORMS[name]
    inputs = check.inputs(
        place, torch.float32, captures=_captures(place, captures, dropout, True),
        options={"seed": 11} if dropout else {},
    )  # fmt: skip
    check(place, program_text(reach, captures, dropout), inputs)


def test_texts():
    assert program_text("all", (), False) == "score"
    assert program_text("causal", FORMS["padding"][1], True).splitlines() == [
        "tensor padding[batch, kv_len]: bool",
        "param dropout_p: float",
        "mask = causal() and padding[b, kv]",
        "weights = dropout(softmax(score), dropout_p)",
    ]
    assert "score" in program_spec("all", (), False)
