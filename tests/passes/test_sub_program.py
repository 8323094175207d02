"""Programs for parts of calls."""

from __future__ import annotations

import pytest

from attndsl.ir import size, toposort
from attndsl.passes.print_ir import print_expression
from attndsl.passes.sub_program import Changes, Start, localised_program, plain_lookups
from attndsl.pipeline import lower
from attndsl.source import Source

HEADS = Changes(frozenset({"heads", "kv_heads"}))
CASES = {
    "heads": ("score + h * heads", HEADS, "score + float((h + h_offset) * whole_heads)"),
    "key heads": ("score + hkv", HEADS, "score + float(hkv + hkv_offset)"),
    "split groups": (
        "score + hkv",
        Changes(frozenset({"heads"}), replicated=True),
        "score + float((h + h_offset) // group)",
    ),
    "entries": ("score + b", Changes(frozenset({"batch"})), "score + float(b + b_offset)"),
    "lengths": (
        "score + q_len - kv_len",
        Changes(frozenset({"q_len"}), lengths=True),
        "score + float(whole_q_len) - float(kv_lengths[b])",
    ),
    "positions": ("score + q", Changes(frozenset({"q_len"})), "score + float(q)"),
    "a number": ("score + q", Changes(q=Start.NUMBER), "score + float(q + q_start)"),
    "by entry": ("score + kv", Changes(kv=Start.ENTRIES), "score + float(kv + kv_starts[b])"),
    "by row": ("score + q", Changes(q=Start.ROWS), "score + float(q_positions[q])"),
}


def _program(text):
    return lower(Source(text), {}).program


@pytest.mark.parametrize("name", CASES)
def test_expressions(name):
    text, changes, wanted = CASES[name]
    found = localised_program(_program(text), changes).program
    assert print_expression(found.score) == wanted


def test_shares_are_looked_up_by_the_parts_own_rows():
    text = "tensor t[heads, q_len]: float\nscore = score * t[h, q] + h * q"
    shares = frozenset({("t", 0), ("t", 1)})
    changes = Changes(frozenset({"heads", "q_len"}), q=Start.NUMBER, shares=shares)
    found = localised_program(_program(text), changes).program
    assert print_expression(found.score) == (
        "score * t[h, q] + float((h + h_offset) * (q + q_start))"
    )
    assert found.tensors[0].dims == (size("heads"), size("q_len"))
    one = localised_program(_program(text), Changes(changes.sizes, q=Start.NUMBER)).program
    assert one.tensors[0].dims == (size("whole_heads"), size("whole_q_len"))


def test_lengths_are_part_of_the_mask():
    found = localised_program(_program("causal()"), Changes(lengths=True)).program
    assert print_expression(found.mask) == "kv < kv_lengths[b] and kv <= q"
    found = localised_program(_program("score"), Changes(lengths=True)).program
    assert print_expression(found.mask) == "kv < kv_lengths[b]"
    room = "tensor t[batch, kv_len]: float\nscore = score + t[b, kv] * kv_len"
    found = localised_program(_program(room), Changes(lengths=True)).program
    assert found.tensors[0].dims == (size("batch"), size("kv_len"))


def test_names_that_a_program_has():
    text = "tensor whole_heads[h_offset]: float\nscore = score * whole_heads[0] + h * h_offset"
    found = localised_program(_program(text), HEADS)
    assert found.names["h_offset"] == "h_offset_"
    assert found.names["heads"] == "whole_heads_"
    assert size("h_offset") in toposort(*found.program.roots())


def test_what_is_not_mentioned_changes_nothing():
    program = _program("mask = q >= kv; score = 2 * score")
    changes = Changes(frozenset({"heads", "kv_heads", "batch", "q_len", "kv_len"}))
    assert localised_program(program, changes).program == program


def test_plain_lookups():
    program = _program(
        "tensor t[heads, n]: float\ntensor u[batch, kv_len]: int\ntensor w[heads, 4]: float\n"
        "tensor x[heads, 4]: float\n"
        "score = score + t[h, u[b, q]] + t[h, u[b, kv]] + dot(w[h, :], x[hkv, :])"
    )
    assert plain_lookups(program) == {
        ("t", 0): "h", ("t", 1): None, ("u", 0): "b", ("u", 1): None, ("w", 0): "h",
        ("x", 0): "hkv",
    }  # fmt: skip
