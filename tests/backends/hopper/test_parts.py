"""Kernels' texts for a part of a call, run as Python: what the whole would give."""

from __future__ import annotations

import pytest
import torch
from support import backward_text
from support.forward_text import (
    PERSISTENT,
    SEED,
    SMALL,
    WIDTH,
    Inputs,
    OfPart,
    inputs_of,
    run_forward,
)
from support.gluon_machine import Pointer, number
from support.kernel_text import Run

from attndsl.backends.base import Part
from attndsl.backends.dense.philox import kept_at
from attndsl.backends.emit.dropout_offsets import BLOCK, drop_function
from attndsl.call.sub_calls import localised

B, H, ROWS, KEYS = 1, 4, 33, 50
"""The first entry and the first head of the part, its queries and its keys."""


def part_of(arguments, **location) -> OfPart:
    """A part of 2 of 3 batch entries and 4 of 8 heads. ``location`` changes the example call."""

    def in_part(lowered, call):
        batch, heads, _, _ = call.q.shape
        sizes = {**call.sizes, "batch": 3 * batch, "heads": 2 * heads, "kv_heads": 2 * heads}
        sizes["q_len"] = 5 * call.q.shape[2]
        lengths = location.get("kv_lengths")
        part = Part(batch, heads, frozenset("q"), kv_lengths=lengths)
        positions = {"q_offset": location.get("q_offset", 16)}
        return localised(lowered, call._replace(sizes=sizes, part=part, **positions))

    numbers = {"whole_batch": 3, "whole_heads": 8, "whole_kv_heads": 8, "whole_q_len": 100}
    numbers |= {"b_offset": B, "h_offset": H, "hkv_offset": H}
    named = {f"n_{name}": number(value) for name, value in numbers.items()}
    return OfPart(in_part, {**named, **arguments})


def positions_of(name: str, values: list[int]) -> dict[str, object]:
    data = torch.tensor(values, dtype=torch.int32)
    return {f"t_{name}": Pointer(data), f"size0_{name}": number(len(values))}


def dense(inputs: Inputs, score: torch.Tensor, live: torch.Tensor, kept=1.0) -> torch.Tensor:
    weights = score.masked_fill(~live, float("-inf")).softmax(-1).nan_to_num()
    return weights * kept @ inputs.v.float()


def raw(inputs: Inputs) -> torch.Tensor:
    return inputs.q.float() @ inputs.k.float().mT * WIDTH**-0.5


@pytest.mark.parametrize("config", [SMALL, PERSISTENT], ids=["a program a tile", "persistent"])
def test_entries_of_their_own_positions_and_lengths(config):
    inputs = inputs_of("causal", ROWS, KEYS, 4, WIDTH)
    starts, lengths = [20, -3], [41, 29]
    arguments = positions_of("q_starts", starts) | positions_of("kv_lengths", lengths)
    of_batch = torch.zeros(2, dtype=torch.int32)
    part = part_of(arguments, q_offset=of_batch, kv_lengths=of_batch)
    text = "mask = causal() and kv >= kv_len // 8\nscore = score + alibi() + 0.1 * b"
    out, _ = run_forward(text, inputs, config, part=part)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    q = torch.arange(ROWS)[:, None] + torch.tensor(starts)[:, None, None, None]
    kv, length = torch.arange(KEYS), torch.tensor(lengths)[:, None, None, None]
    slopes = torch.exp2(-8 * (h + H + 1) / 8)
    score = raw(inputs) - slopes * (q - kv) + 0.1 * (b + B)
    live = (q >= kv) & (kv >= length // 8) & (kv < length)
    wanted = dense(inputs, score, live.expand(score.shape))
    assert torch.allclose(out.float(), wanted, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize("config", [SMALL, PERSISTENT], ids=["a program a tile", "persistent"])
def test_a_part_draws_what_the_whole_draws(config):
    inputs = inputs_of("causal", ROWS, KEYS, 4, WIDTH)
    names = ("draws_row", "draws_key", "draws_head", "draws_heads")
    arguments = dict(zip(names, (8, 0, B * 8 + H, 8), strict=True))
    part = part_of(arguments)
    text = "mask = causal()\nweights = dropout(softmax(score), 0.4)"
    out, _ = run_forward(text, inputs, config, Run(origins=(16, 0)), part)
    numbers = (torch.arange(2)[:, None] + B) * 8 + torch.arange(4) + H
    kept = kept_at(SEED, torch.tensor(0.4), numbers, (16, 16 + ROWS), (0, KEYS))
    q, kv = torch.arange(16, 16 + ROWS)[:, None], torch.arange(KEYS)
    score = raw(inputs)
    wanted = dense(inputs, score, (q >= kv).expand(score.shape), kept / 0.6)
    assert torch.allclose(out.float(), wanted, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize("config", [backward_text.CONFIG, backward_text.PERSISTENT])
def test_gradients_of_a_part_are_of_what_the_whole_draws(monkeypatch, config):
    places = {"draws_row": 8, "draws_key": 16, "draws_head": B * 8 + H, "draws_heads": 8}

    def kept(name, shape):
        numbers = torch.arange(shape[1])[None] + B * 8 + H
        ranges = (16, 16 + shape[2]), (256, 256 + shape[3])
        return kept_at(backward_text.SEED, torch.tensor(0.4), numbers, *ranges) / 0.6

    def drawn(text):
        numbers = "\n".join(f"{name} = {value}" for name, value in places.items())
        texts = (drop_function(kinds).split("\n") for kinds in (None, (BLOCK, BLOCK)))
        whole, part = ("\n".join(lines[-2:]) for lines in texts)
        assert whole in text
        text = text.replace("dropout_tile import drop_of_head", "dropout_tile import drop_of_part")
        return f"{text.replace(whole, part.replace('given.draws', 'draws'))}\n{numbers}\n"

    monkeypatch.setattr(backward_text, "kept", kept)
    tensors = backward_text.inputs_of(70, 37, 1)
    leaves = [x.float().requires_grad_() for x in tensors[:3]]
    out, _ = backward_text.attention_of("dropout", *leaves)
    expected = torch.autograd.grad(out, leaves, tensors[3].float())
    found = backward_text.run_backward("dropout", tensors, config, Run(0, 1, drawn))
    for value, wanted in zip(found, expected, strict=True):
        scale = 1 + float(wanted.abs().max())
        torch.testing.assert_close(value, wanted, atol=4e-3 * scale, rtol=0)
