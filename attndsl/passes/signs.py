"""Absolute values whose sign the mask tells: under ``q >= kv``, ``abs(q - kv)`` is ``q - kv``.

The score of a pair that the mask leaves out is never used. So an expression may take what the mask
says of positions for granted, and a distance comes apart into a row's and a column's part.

Non-goals: masks of positions, which stay as they are; facts of params, tensors and the score;
facts that follow from several conditions.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from attndsl.ir import DType, Node, Op, cast, node, reads_score, substitute, toposort

from .int_ranges import INT64, POSITION_LIMIT, fits
from .simplify import simplify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.ir import Program

_MOST_FACTS = 64
_MOST_TERMS = 64
"""The most terms of a sum: shared sums of shared sums may have very many."""
_Sum = dict[Node | None, int]
"""Multiples of positions and sizes, and under None a number."""


def with_known_signs(program: Program) -> Program:
    """``program`` without the absolute values that its mask makes needless.

    Its lines are joined already (:func:`.split_mask.split_mask`).
    """
    mask = program.mask
    roots = [root for root in (program.score, program.weights) if root is not None]
    sizes = [item for item in toposort(*roots) if item.op is Op.ABS]
    if not sizes or mask is None:
        return program
    facts = list(islice(_facts(mask), _MOST_FACTS))
    known = {item: plain for item in sizes if (plain := _plain(item, facts)) is not None}
    if not known:
        return program
    return simplify(
        replace(
            program,
            score=substitute(program.score, known),
            weights=program.weights and substitute(program.weights, known),
            # A mask that reads the score has lines of it in it.
            mask=substitute(mask, known) if reads_score(mask) else mask,
        )
    )


def _facts(mask: Node) -> Iterator[_Sum]:
    """Sums that are not negative for any pair that the mask keeps.

    They are made without absolute values, which may so go from the mask too.
    """
    stack = [mask]
    seen: set[Node] = set()
    while stack:
        item = stack.pop()
        if item in seen:
            continue
        seen.add(item)
        if item.op is Op.AND:
            stack += item.args
        elif item.op in (Op.LE, Op.LT, Op.EQ) and item.args[0].dtype is DType.INT:
            small, large = map(_sum_of, item.args)
            if small is None or large is None:
                continue
            yield _difference(large, small, less=item.op is Op.LT)
            if item.op is Op.EQ:
                yield _difference(small, large)


def _plain(item: Node, facts: list[_Sum]) -> Node | None:
    """``item``, an absolute value, without its ``abs``; None where nothing tells."""
    (inside,) = item.args
    whole = inside.args[0] if inside.op is Op.CAST else inside
    found = _sum_of(whole) if whole.dtype is DType.INT else None
    if found is None:
        return None
    if any(_exceeds(found, fact) for fact in facts):
        return inside
    if any(_exceeds(_difference({}, found), fact) for fact in facts):
        # Not the negation of a float, where 0 would become -0.
        turned = (
            node(Op.SUB, *whole.args[::-1], span=item.span)
            if whole.op is Op.SUB
            else node(Op.NEG, whole, span=item.span)
        )
        return cast(turned, item.dtype, item.span)
    return None


def _exceeds(found: _Sum, fact: _Sum) -> bool:
    """Tell whether ``found`` is ``fact`` and a number that is not negative."""
    rest = _difference(found, fact)
    return rest.pop(None, 0) >= 0 and not any(rest.values())


def _difference(a: _Sum, b: _Sum, less: bool = False) -> _Sum:
    """``a - b``, or with ``less`` one less."""
    found = {name: a.get(name, 0) - b.get(name, 0) for name in {*a, *b}}
    if less:
        found[None] = found.get(None, 0) - 1
    return found


def _sum_of(root: Node) -> _Sum | None:
    """``root`` as multiples of positions and sizes; None for others, and if it might wrap."""
    total: _Sum = {}
    stack = [(1, root)]
    for _ in range(_MOST_TERMS):
        if not stack:
            break
        factor, item = stack.pop()
        numbers = [int(arg.value) for arg in item.args if arg.op is Op.CONST]  # type: ignore[arg-type]
        if item.op is Op.CONST:
            total[None] = total.get(None, 0) + factor * int(item.value)  # type: ignore[arg-type]
        elif item.op in (Op.VAR, Op.SIZE):
            total[item] = total.get(item, 0) + factor
        elif item.op in (Op.ADD, Op.SUB):
            sign = factor if item.op is Op.ADD else -factor
            stack += [(factor, item.args[0]), (sign, item.args[1])]
        elif item.op is Op.NEG:
            stack.append((-factor, item.args[0]))
        elif item.op is Op.MUL and len(numbers) == 1:
            (other,) = (arg for arg in item.args if arg.op is not Op.CONST)
            stack.append((factor * numbers[0], other))
        else:
            return None
    largest = sum(abs(x) * (1 if name is None else POSITION_LIMIT) for name, x in total.items())
    return None if stack or not fits((-largest, largest), INT64) else total
