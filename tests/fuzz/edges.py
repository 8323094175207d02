"""Scores that have no value beyond the last row or key of a call.

Tiles hold rows and keys that do not exist. What a score makes of them must reach nothing: NaN times
0 is NaN in a matrix product. Most random expressions are finite there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .expressions import KV, SCORE, Q, apply, as_float
from .generate import trimmed
from .program import Line, Literal, Name, Target

if TYPE_CHECKING:
    import random

    from .program import Case, Expr

_SHARE = 0.12
"""Of the cases."""


def edged(rng: random.Random, case: Case) -> Case:
    """``case``, now and then with a first score line that ends with the last row or key."""
    if rng.random() >= _SHARE:
        return case
    positions, sizes = case.positions, case.sizes
    if rng.random() < 0.6:
        row, name, length = Q, "q_len", sizes.q_len
        offset, index = positions.q_offset, positions.q_index
    else:
        row, name, length = KV, "kv_len", sizes.kv_len
        offset, index = positions.kv_offset, positions.kv_index
    if not length:
        return case
    beyond: Expr = Name(name, row.kind)
    if index is not None or offset:
        last = offset + length if index is None else max(index) + 1
        beyond = Literal(last) if last >= 0 else apply("-", Literal(-last))
    # 1 at the last one, 0 at the next.
    left = as_float(apply("-", beyond, row))
    word = rng.choice(("log", "log2", "rsqrt", "/"))
    edge = apply("/", Literal(1.0), left) if word == "/" else apply(word, left)
    line = Line(Target.SCORE, apply(rng.choice("+-*"), SCORE, edge))
    lines = case.lines
    if rng.random() < 0.5:
        # A mask's code would keep what is beyond from all results.
        lines = tuple(each for each in lines if each.target is not Target.MASK)
    return trimmed(replace(case, lines=(line, *lines)))
