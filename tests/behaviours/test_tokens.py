"""``token`` counts the rows of q of all batch entries, in whole calls, in parts and in graphs."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl import errors
from attndsl.passes.tokens import expanded, mentions_tokens
from attndsl.serialise import lowered_from_json, lowered_to_json

BATCH, HEADS, LENGTH, DIM, EXTENT = 2, 2, 7, 8, 4
BY_TOKEN = """
tensor rel[tokens, heads, extent]: float
mask = causal()
score = score + where(q - kv < extent, rel[token, h, clamp(q - kv, 0, extent - 1)], 0.0)
"""
BY_ROW = BY_TOKEN.replace("tokens", "batch, q_len").replace("token", "b, q")


@pytest.fixture(scope="module")
def case():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM, generator=generator).unbind()
    rel = torch.randn(BATCH, LENGTH, HEADS, EXTENT, generator=generator)
    return q, k, v, rel, attndsl.compile(BY_ROW)(q, k, v, rel=rel)


def packed(rel):
    return rel.reshape(-1, HEADS, EXTENT)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_whole_call(case, backend):
    q, k, v, rel, wanted = case
    attention = attndsl.compile(BY_TOKEN, backend=backend)
    torch.testing.assert_close(attention(q, k, v, rel=packed(rel)), wanted)
    with pytest.raises(errors.ShapeError, match="which is 14 in this call"):
        attention(q, k, v, rel=packed(rel)[:5])


@pytest.mark.parametrize("offset", [3, torch.tensor(3), torch.tensor([3, 3])])
def test_a_part_has_tensors_of_its_own_rows(case, offset):
    q, k, v, rel, wanted = case
    found = attndsl.compile(BY_TOKEN)(q[:, :, 3:], k, v, q_offset=offset, rel=packed(rel[:, 3:]))
    torch.testing.assert_close(found, wanted[:, :, 3:])


def test_calls_of_one_program_at_several_places(case):
    q, k, v, rel, wanted = case
    attention = attndsl.compile(BY_TOKEN)
    for first in (0, 3, 4, 3, 0):
        found = attention(q[:, :, first:], k, v, q_offset=first, rel=packed(rel[:, first:]))
        torch.testing.assert_close(found, wanted[:, :, first:])


def test_rows_in_any_order(case):
    q, k, v, rel, wanted = case
    order = torch.tensor([5, 1, 2])
    found = attndsl.compile(BY_TOKEN)(
        q[:, :, order], k, v, q_index=order, rel=packed(rel[:, order])
    )
    torch.testing.assert_close(found, wanted[:, :, order])


def test_a_part_of_a_whole_means_the_whole(case):
    q, k, v, rel, wanted = case
    attention = attndsl.compile(BY_TOKEN)
    found = attention(q[:, :, 3:], k, v, q_offset=3, q_len=LENGTH, rel=packed(rel))
    torch.testing.assert_close(found, wanted[:, :, 3:])
    found = attention(
        q[1:, :, 3:], k[1:], v[1:], q_offset=3, q_len=LENGTH, batch=2, b_offset=1, rel=packed(rel)
    )
    torch.testing.assert_close(found, wanted[1:, :, 3:])


def test_gradients_and_graphs(case):
    q, k, v, rel, wanted = case
    leaf, other = (rel[:, 4:].clone().requires_grad_() for _ in range(2))
    attention = attndsl.compile(BY_TOKEN)
    out = attention(q[:, :, 4:], k, v, q_offset=4, rel=packed(leaf))
    out.square().sum().backward()
    rows = torch.cat((rel[:, :4], other), 1)
    attndsl.compile(BY_ROW)(q, k, v, rel=rows)[:, :, 4:].square().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)
    graph = torch.compile(
        lambda q, rel: attention(q, k, v, q_offset=4, rel=rel), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(graph(q[:, :, 4:], packed(rel[:, 4:])), wanted[:, :, 4:])


def test_a_number_that_no_tensor_has():
    attention = attndsl.compile("token % 3 == kv % 3 and tokens > 5")
    rows = torch.arange(2 * 4).view(2, 1, 4, 1)
    assert torch.equal(
        attention.mask(4, 6, batch=2).expand(2, 1, 4, 6), rows % 3 == torch.arange(6) % 3
    )


def test_lowered_programs_keep_both_forms():
    lowered = attndsl.compile(BY_TOKEN).lowered
    assert mentions_tokens(lowered.written)
    assert not mentions_tokens(lowered.program)
    assert lowered.program.by_token
    again = lowered_from_json(lowered_to_json(lowered))
    assert (again.program, again.by_token) == (lowered.program, lowered.by_token)
    plain = attndsl.compile("causal()").lowered
    assert plain.written is plain.program
    assert expanded(plain.program) is plain.program


@pytest.mark.parametrize("text", ["tensor token[heads]: float", "tokens = 3", "param token: int"])
def test_the_names_are_taken(text):
    with pytest.raises(errors.AttnDSLError, match="token"):
        attndsl.compile(text + "\nmask = causal()")
