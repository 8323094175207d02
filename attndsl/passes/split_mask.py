"""Move ``where(c, s, -inf)`` at the root of a score into the mask.

A pair whose score is -inf takes no part in the softmax, so saying it by the mask means the same and
lets sparsity be derived from it. Only the root is looked at, through nested ``where``.

Non-goals: -inf that arises from arithmetic, and programs whose weights are not the softmax (there
-inf is a score like any other).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from attndsl.ir import Node, Op, node

if TYPE_CHECKING:
    from attndsl.ir import Program


def split_mask(program: Program) -> Program:
    """``program`` with the conditions of a masked score taken into its mask."""
    if program.weights is not None:
        return program
    score, mask = program.score, program.mask
    while score.op is Op.WHERE:
        condition, yes, no = score.args
        if _is_minus_infinity(no):
            score, kept = yes, condition
        elif _is_minus_infinity(yes):
            score, kept = no, node(Op.NOT, condition)
        else:
            break
        mask = kept if mask is None else node(Op.AND, mask, kept)
    return replace(program, score=score, mask=mask)


def _is_minus_infinity(item: Node) -> bool:
    return item.op is Op.CONST and item.value == -math.inf
