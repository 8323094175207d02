"""Quasi-affine masks, and their symbols besides positions.

Integer sets (``isl_sets.py``) know no wrap-around, while the language's ints are 64 bits that wrap.
So positions and sizes are below 2**30, each symbol is taken to fit 32 bits, and a mask whose
integers may need more than 64 bits then is not quasi-affine. A symbol that may have more bits is
cut off where only comparisons read it, since it compares alike. Any other such symbol is guarded.

Needs no isl.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndsl.ir import (
    COMPARISONS,
    LEAVES,
    DType,
    Op,
    const,
    dependencies,
    leaf_names,
    node,
    toposort,
)
from attndsl.passes.int_ranges import INT32, INT64, exact_range, fits, ranges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node
    from attndsl.passes.int_ranges import Range

MAX_COEFFICIENT = 1 << 20
"""Larger constants make sets expensive and come from arithmetic that is no tiling."""
_SUPPORTED = frozenset(
    {
        Op.ADD, Op.SUB, Op.NEG, Op.MIN, Op.MAX, Op.ABS, Op.SIGN, Op.BITNOT, Op.WHERE, Op.AND,
        Op.OR, Op.NOT, Op.LT, Op.LE, Op.EQ, Op.NE,
    }
)  # fmt: skip
BY_CONSTANT = frozenset(
    {Op.MUL, Op.FLOORDIV, Op.MOD, Op.SHL, Op.SHR, Op.BITAND, Op.BITOR, Op.BITXOR}
)
"""Operations that are quasi-affine where one operand is a constant."""
MAX_RUNS = 3
"""Runs of ones in a bit mask; each makes a ``//`` and a ``%``."""
_VARYING = frozenset({"q", "kv", "score"})


def why_not_affine(root: Node) -> str | None:
    """Reason why ``root`` is no quasi-affine expression, or None where it is one."""
    deps = dependencies(root)
    for item in toposort(root):
        if not deps[item] & _VARYING:
            continue
        reason = _refusal(item, deps)
        if reason is not None:
            return reason
    return "its integers may need more than 64 bits" if symbols_of(root).wraps else None


@dataclass(frozen=True, slots=True)
class Symbols:
    """The facts that sets know about the expressions in a mask."""

    named: frozenset[Node]
    """Expressions without positions that sets take as they are. Sets build all others."""
    values: Mapping[Node, Range]
    """The range that each INT expression is taken to have."""
    wraps: bool
    """True if an integer that sets build may need more than 64 bits."""


def symbols_of(root: Node) -> Symbols:
    """The symbols of ``root``, which is quasi-affine except that its integers may wrap."""
    deps = dependencies(root)
    named: set[Node] = set()
    values: dict[Node, Range] = {}
    wraps = False
    for item in toposort(root):
        exact = exact_range(item, values) if item.dtype is DType.INT else INT32
        if deps[item] & _VARYING:
            wraps = wraps or not fits(exact, INT64)
        elif not (_expands(item) and fits(exact, INT64)):
            named.add(item)
            if item.op is not Op.CONST and not fits(exact):
                exact = INT32
        if item.dtype is DType.INT:
            values[item] = exact if fits(exact, INT64) else INT64
    return Symbols(frozenset(named), values, wraps)


@dataclass(frozen=True, slots=True)
class Guard:
    """Cuts and conditions that make the symbols of a mask fit 32 bits."""

    cut: Mapping[Node, Node]
    """Replacements of symbols that only comparisons read: their values, cut off to 32 bits."""
    within: Node | None
    """BOOL: true if the other symbols fit 32 bits; None where their widths say so."""


def guard_of(mask: Node, wide: frozenset[str]) -> Guard:
    """The guard of a quasi-affine mask.

    Args:
        mask: BOOL.
        wide: Names of the int params and int tensors that may have more than 32 bits.
    """
    symbols = symbols_of(mask)
    built = [item for item in toposort(mask) if item not in symbols.named]
    cut: dict[Node, Node] = {}
    within: Node | None = None
    for item in toposort(mask):
        if item not in symbols.named or item.dtype is not DType.INT:
            continue
        bits = dict.fromkeys(leaf_names(item) - wide, 32)
        readers = [reader for reader in built if item in reader.args]
        if not readers or fits(ranges((item,), bits)[item]):
            continue
        low, high = (const(end) for end in INT32)
        if all(_compares_alike(reader, item, symbols) for reader in readers):
            cut[item] = node(Op.MIN, node(Op.MAX, item, low), high)
        elif item.op is not Op.CONST:
            inside = node(Op.AND, node(Op.LE, low, item), node(Op.LE, item, high))
            within = inside if within is None else node(Op.AND, within, inside)
    return Guard(cut, within)


def _compares_alike(reader: Node, item: Node, symbols: Symbols) -> bool:
    """Return True if ``reader`` compares ``item`` with a value strictly within 32 bits."""
    if reader.op not in COMPARISONS:
        return False
    low, high = INT32
    others = [symbols.values[arg] for arg in reader.args if arg is not item]
    return len(others) == 1 and fits(others[0], (low + 1, high - 1))


def _expands(item: Node) -> bool:
    """Return True if sets can build an expression without positions of its operands."""
    if item.op is Op.CONST:
        return item.dtype is not DType.FLOAT and abs(int(item.value)) <= MAX_COEFFICIENT  # type: ignore[arg-type]
    return item.op not in LEAVES and item.op is not Op.LOAD and _refusal(item, {}) is None


def _refusal(item: Node, deps: Mapping[Node, frozenset[str]]) -> str | None:
    op = item.op
    if op is Op.SCORE:
        return "it depends on the score"
    if op is Op.LOAD:
        return f"{item.value}[...] is looked up by position"
    if item.dtype is DType.FLOAT or any(arg.dtype is DType.FLOAT for arg in item.args):
        return "it computes with floats"
    if op is Op.VAR or op in _SUPPORTED or op is Op.CAST:
        return None
    if op is Op.POW:
        return None if item.args[1].value in (0, 1) else "a power of a position"
    if op in BY_CONSTANT:
        varying = [arg for arg in item.args if arg.op is not Op.CONST]
        ordered = op in (Op.FLOORDIV, Op.MOD, Op.SHL, Op.SHR)
        if len(varying) > 1 or (ordered and varying[0] is not item.args[0]):
            return f"'{op.value}' of two values that are not constant"
        number = int(next(arg.value for arg in item.args if arg.op is Op.CONST))  # type: ignore[arg-type]
        if op in (Op.SHL, Op.SHR):
            return None if number <= 20 else f"a shift by {number}"
        if op in (Op.BITAND, Op.BITOR, Op.BITXOR) and len(bit_runs(number)) > MAX_RUNS:
            return f"'{op.value}' with {number}, whose bits are scattered"
        return None if abs(number) <= MAX_COEFFICIENT else f"the constant {number} is too large"
    return f"'{op.value}' is not affine"


def bit_runs(number: int) -> list[tuple[int, int | None]]:
    """Runs of ones of a 64-bit integer as bit ranges [low, high); None: up to the sign."""
    runs: list[tuple[int, int | None]] = []
    bit = 0
    while bit < 64:
        if not number >> bit & 1:
            bit += 1
            continue
        low = bit
        while bit < 64 and number >> bit & 1:
            bit += 1
        runs.append((low, None if bit == 64 else bit))
    return runs
