"""Names of a program's own locals in texts that people read."""

from __future__ import annotations

import ast
import io
import tokenize

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attndsl
from attndsl.backends.emit.local_names import placeholders, with_names
from attndsl.ir import Op, const, node, var

Q, KV = var("q"), var("kv")
ITEMS = [node(Op.ADD, Q, const(number)) for number in range(6)]
NAMES = st.sampled_from(
    ["a", "b", "b_", "live", "q", "tl", "for", "match", "range", "_own0", "_own1", "_own2"]
)
MODULE = """\
import triton.language as tl

def mask_of_pair(q, live):
    _own0 = q + 1
    _own2 = _own0 + 2
    b = _own2
    return live & (b > _own0)
"""


def names_in(text: str) -> list[str]:
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in found if token.type == tokenize.NAME]


@given(st.lists(NAMES, min_size=3, max_size=6, unique=True))
def test_no_two_names_of_a_module_become_one(wanted: list[str]) -> None:
    names = dict(zip(ITEMS, wanted, strict=False))
    text = with_names(MODULE, names)
    ast.parse(text)
    pairs = set(zip(names_in(MODULE), names_in(text), strict=True))
    assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
    changed = {old: new for old, new in pairs if old != new}
    assert changed.keys() <= {"_own0", "_own2"}
    for old, new in changed.items():
        assert new.rstrip("_") == wanted[int(old[-1])].rstrip("_")


@pytest.mark.parametrize(
    ("wish", "name"),
    [
        ("distance", "distance"), ("q", "q_"), ("tl", "tl_"), ("live", "live_"), ("b", "b_"),
        ("range", "range_"), ("for", "for_"), ("mask_of_pair", "mask_of_pair_"),
    ],
)  # fmt: skip
def test_a_name_that_is_taken_gets_a_longer_one(wish: str, name: str) -> None:
    text = with_names(MODULE, {ITEMS[0]: wish, ITEMS[1]: "other", ITEMS[2]: "last"})
    assert f"    {name} = q + 1\n    last = {name} + 2\n" in text
    assert "other" not in text


def test_expressions_of_one_name_are_one_local() -> None:
    found = placeholders({Q: "a", KV: "b", ITEMS[0]: "a"})
    assert found == {Q: "_own0", KV: "_own1", ITEMS[0]: "_own0"}


def test_locals_have_lines_and_names() -> None:
    attention = attndsl.compile(
        "distance = q - kv\nnear = distance < 128\nmask = near and distance >= 0\n"
        "fade = 0.1 * distance\nscore = score - fade"
    )
    for backend in ("triton", "hopper"):
        text = attention.source(backend=backend)
        assert "    distance = q - kv\n    near = distance < 128\n" in text
        assert "_own" not in text
    assert "    fade = 0.1 * distance.to(tl.float32)\n    return score - fade\n" in (
        attention.source(backend="triton")
    )
    assert "    distance = q - kv\n" in attention.source("backward")


def test_locals_of_looked_up_values_have_names_in_hopper_kernels_too() -> None:
    attention = attndsl.compile(
        "tensor doc[batch, kv_len]: int\nsame = doc[b, q] == doc[b, kv]\nmask = causal() and same"
    )
    for backend in ("triton", "hopper"):
        assert "    same = " in attention.source(backend=backend)


def test_names_of_locals_are_no_part_of_what_is_compiled() -> None:
    one = attndsl.compile("near = q - kv < 8\nmask = near and q >= kv\nscore = tanh(score)")
    two = attndsl.compile("tl = q - kv < 8\nmask = tl and q >= kv\nscore = tanh(score)")
    assert one.lowered.digest == two.lowered.digest
    first, second = one.source().split("\n"), two.source().split("\n")
    differing = [
        (x, y) for x, y in zip(first, second, strict=True) if x != y and not x.startswith("# ")
    ]
    assert differing == [
        ("    near = q - kv < 8", "    tl_ = q - kv < 8"),
        ("    return near & (kv <= q)", "    return tl_ & (kv <= q)"),
    ]
