"""Lookups by one position are found whole, and nothing else is."""

from __future__ import annotations

import pytest

from attndsl.ir import Op, dependencies, substitute, toposort
from attndsl.passes.gather import lookups
from attndsl.pipeline import lower
from attndsl.source import Source

DOCUMENTS = "tensor doc[batch, kv_len]: int; mask = q >= kv and doc[b, q] == doc[b, kv]"
NESTED = """
tensor seg[q_len]: int
tensor start[segments]: int
tensor bias[q_len, kv_len]: float
mask = q - start[seg[q]] >= kv - start[seg[kv]] and seg[q] == seg[kv]
score = score * start[seg[kv]] + bias[q, seg[kv]]
"""
ALL = (DOCUMENTS, NESTED, "tensor on[kv_len]: bool; mask = on[kv]", "score + q - kv", "causal()")


def roots_of(text):
    program = lower(Source(text), {}).program
    return tuple(root for root in (program.mask, program.score) if root is not None)


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize(("variable", "other"), [("q", "kv"), ("kv", "q")])
def test_no_lookup_by_one_position_is_left(text, variable, other):
    roots = roots_of(text)
    found = lookups(roots, variable)
    for part in found:
        varies = dependencies(part)[part]
        assert variable in varies
        assert not varies & {other, "score"}
        assert any(item.op is Op.LOAD for item in toposort(part))
    left = tuple(substitute(root, dict(found)) for root in roots)
    back = {own: part for part, own in found.items()}
    assert tuple(substitute(root, back) for root in left) == roots
    varies = dependencies(*left)
    loads = [item for item in toposort(*left) if item.op is Op.LOAD]
    assert all(varies[item] & {"q", "kv", "score"} != {variable} for item in loads)


def test_a_part_is_as_large_as_it_can_be():
    roots = roots_of(NESTED)
    (segment, distance) = lookups(roots[:1], "q")
    assert segment.op is Op.LOAD
    # seg[q] has uses of its own beside the one in here.
    assert distance.op is Op.SUB
    assert lookups(roots_of("score + q - kv"), "q") == {}
    assert lookups((None, *roots), "kv") == lookups(roots, "kv")


def test_params_are_numbered_in_order_of_use():
    found = lookups(roots_of(NESTED), "kv")
    assert [own.value for own in found.values()] == [f"$kv_part{n}" for n in range(len(found))]
    assert all(own.op is Op.PARAM and own.dtype is part.dtype for part, own in found.items())


@pytest.mark.parametrize("variable", ["q", "kv"])
def test_what_kernels_give_expressions_is_no_part_of_a_lookup(variable):
    """ALiBi counts from a place that only the score's own function is given."""
    text = f"tensor t[heads, kv_len]: float; score = score + alibi() + t[h, {variable}]"
    placed = lower(Source(text), {}).placed
    found = lookups((placed.row, placed.column), variable)
    assert [part.op for part in found] == [Op.LOAD]
