"""Interval arithmetic of a mask over a tile: may it hold somewhere, must it hold everywhere.

Interval arithmetic turns the mask into two BOOL expressions over the bounds of ``q`` and ``kv`` in
a tile, and over the least and the greatest value that an expression of ``q`` alone (or of ``kv``
alone) takes in the tile's rows (or columns). ``doc[b, q] == doc[b, kv]``, ``offsets[seg[q]]`` or
``q % 128`` are such: one value a row, computed as it stands, so nothing need be known about it.

Sound always: a live pair makes ``may`` true, a dead one makes ``must`` false. Comparisons are
written so that a NaN bound decides nothing. Integers wrap at 64 bits. Where arithmetic might wrap,
bounds decide only if its operands are small enough. Float bounds are widened by more than the
difference between two roundings of one expression.

Non-goals: exactness where one name occurs in several atoms (see ``closed_form.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, cast, const, dependencies, node, param, toposort
from attndsl.passes.int_ranges import INT64, exact_range, fits, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.ir import Node
    from attndsl.passes.int_ranges import Range

    from .cells import Cell

_WIDENING = 2.0**-18
_FALSE = const(False)
SCORE_DEPENDENT = "it depends on the score"
_POSITIONS = {"q": "row", "kv": "column"}
_INCREASING = frozenset(
    {
        Op.EXP, Op.EXP2, Op.EXPM1, Op.TANH, Op.SIGMOID, Op.SOFTPLUS, Op.ERF, Op.RELU, Op.FLOOR,
        Op.CEIL, Op.ROUND,
    }
)  # fmt: skip
_LOSSY = frozenset({Op.MUL, Op.FLOORDIV, Op.MOD, Op.SHR, Op.BITAND})
"""Operations whose bounds, of both positions together, are far from what they take."""
_EXACT_FLOAT = frozenset({Op.NEG, Op.MIN, Op.MAX, Op.ABS, Op.RELU, Op.FLOOR, Op.CEIL, Op.ROUND})


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a mask by intervals."""

    may: Node
    """BOOL: false only where no pair of the tile is live."""
    must: Node
    """BOOL: true only where every pair of the tile is live."""
    rows: tuple[Node, ...]
    """INT or FLOAT expressions of ``q`` (and ``b``, ``h``); the n-th one's least and greatest value
    in a tile are the params ``$row{n}_low`` and ``$row{n}_high``."""
    columns: tuple[Node, ...]
    """The same of ``kv``, ``$column{n}_low`` and ``$column{n}_high``."""
    opaque: tuple[str, ...]
    """Reasons why parts of the mask are undecided wherever they are evaluated."""
    cells: tuple[Cell, ...] = ()
    """Conditions of both positions; the n-th one's least and greatest value in a tile are the BOOL
    params ``$cell{n}_low`` and ``$cell{n}_high``."""
    sure: Node = _FALSE
    """BOOL: true only where some pair of the tile is live if :attr:`may` is true, and some is dead
    if :attr:`must` is false."""


def bound_mask(mask: Node, cells: Mapping[Node, Cell] = MappingProxyType({})) -> Bounds:
    """Bounds of a BOOL expression; see :class:`Bounds` for the names that they use.

    Args:
        mask: The expression.
        cells: Conditions below it that are evaluated by cells.
    """
    return _Bounder(mask, cells).bounds()


def position_bounds(name: str) -> tuple[Node, Node]:
    """The params that hold the least and the greatest ``q`` or ``kv`` of a tile."""
    return param(f"${name}_low", DType.INT), param(f"${name}_high", DType.INT)


_SMALL = 1 << 31
"""Bounds may be of use where operands of integer arithmetic are below this in magnitude."""
_INTS = 2.0**62
"""Floats whose magnitude is at most this become ints by truncation."""


def _clipped(found: Range, limit: int) -> Range:
    """Part of ``found`` within ``limit`` in magnitude; ``found`` itself where there is none."""
    low, high = max(found[0], -limit), min(found[1], limit - 1)
    return (low, high) if low <= high else found


def _wrapping(computed: list[Node], known: dict[Node, Range]) -> frozenset[Node]:
    """The operations among ``computed`` that may wrap where their operands are in ``known``."""
    wrapping = set()
    values = dict(known)
    for item in computed:
        exact = exact_range(item, values)
        if not fits(exact, INT64):
            wrapping.add(item)
        values[item] = exact if fits(exact, INT64) else INT64
    return frozenset(wrapping)


Pair = tuple["Node", "Node"]
"""(low, high) of a number, (must, may) of a BOOL: BOOLs are numbers 0 and 1 here."""


class _Bounder:
    def __init__(self, mask: Node, cells: Mapping[Node, Cell]) -> None:
        self.mask = mask
        self.cells = cells
        self.used: list[Cell] = []
        """The cells that bounds read."""
        self.deps: Mapping[Node, frozenset[str]] = dependencies(mask)
        self.values: dict[str, list[Node]] = {"q": [], "kv": []}
        self.opaque: dict[str, None] = {}
        self.found: dict[Node, Pair] = {}
        self.unknown: set[Node] = set()
        """Numbers without bounds."""
        self.small: list[Node] = []
        """BOOLs over the bounds: whether no arithmetic on them can wrap."""

    def bounds(self) -> Bounds:
        needed = self._needed()
        wrapping, limit, operands = self._limit(needed)
        for item in toposort(self.mask):
            if item in needed:
                if item in self.cells:
                    bounds = self._cell(item)
                else:
                    bounds = self._unknown(item) if item in wrapping else self._bound(item)
                self.found[item] = bounds
                if item in operands:
                    self._require(bounds, const(-limit), const(limit - 1))
        must, may = self.found[self.mask]
        sure = self._sure()
        for small in self.small:
            must, may, sure = _and(must, small), _or(may, _not(small)), _and(sure, small)
        rows, columns = (tuple(self.values[position]) for position in ("q", "kv"))
        return Bounds(may, must, rows, columns, tuple(self.opaque), tuple(self.used), sure)

    def _needed(self) -> set[Node]:
        """Nodes whose bounds come into it: nothing below a summarised value does."""
        needed: set[Node] = set()
        stack = [self.mask]
        while stack:
            item = stack.pop()
            if item not in needed:
                needed.add(item)
                if item in self.cells:
                    continue
                if len(self._positions(item)) == 2 or self._linear(item):
                    stack += item.args
        return needed

    def _limit(self, needed: set[Node]) -> tuple[frozenset[Node], int, frozenset[Node]]:
        """Find how small operands of integer arithmetic must be for its bounds not to wrap.

        Returns:
            The operations that may wrap even then, the limit of the operands' magnitude (a power of
            two), and the operands that may be beyond it.
        """
        order = [n for n in toposort(self.mask) if n in needed and n.dtype is DType.INT]
        computed = [n for n in order if self._computed(n)]
        args = {arg for n in computed for arg in n.args if arg.dtype is DType.INT}
        operands = args.difference(computed)
        full = ranges(tuple(order), {})

        def wrapping(limit: int) -> frozenset[Node]:
            return _wrapping(computed, {n: _clipped(full[n], limit) for n in operands})

        fewest, limit = wrapping(_SMALL), 1 << 63
        while wrapping(limit) != fewest:
            limit >>= 1
        beyond = frozenset(n for n in operands if _clipped(full[n], limit) != full[n])
        return fewest, limit, beyond

    def _computed(self, item: Node) -> bool:
        """Return True if the bounds of an INT node are computed from those of its operands."""
        if not item.args or not self._positions(item):
            return False
        return len(self._positions(item)) == 2 or self._linear(item)

    def _cell(self, item: Node) -> Pair:
        stem = f"$cell{len(self.used)}"
        self.used.append(self.cells[item])
        return param(f"{stem}_low", DType.BOOL), param(f"{stem}_high", DType.BOOL)

    def _sure(self) -> Node:
        """See :attr:`Bounds.sure`.

        ``and`` and ``or`` are sure where one operand decides nothing and the other one is sure, or
        where both are sure and go by different positions.
        """
        found: dict[Node, Node] = {}
        for item in toposort(self.mask):
            if item not in self.found or item.dtype is not DType.BOOL:
                continue
            must, may = self.found[item]
            if self._exact(item):
                found[item] = const(True)
            elif item.op is Op.NOT and item.args[0] in found:
                found[item] = found[item.args[0]]
            elif item.op in (Op.AND, Op.OR) and all(arg in found for arg in item.args):
                left, right = (found[arg] for arg in item.args)
                either = _or(
                    _and(self._neutral(item, 0), right), _and(self._neutral(item, 1), left)
                )
                if not self._positions(item.args[0]) & self._positions(item.args[1]):
                    either = _or(either, _and(left, right))
                found[item] = _or(_or(must, _not(may)), either)
            else:
                found[item] = _or(must, _not(may))
        return found[self.mask]

    def _neutral(self, item: Node, place: int) -> Node:
        """Condition that an operand of ``and`` or ``or`` leaves the result to the other one."""
        must, may = self.found[item.args[place]]
        return must if item.op is Op.AND else _not(may)

    def _exact(self, item: Node) -> bool:
        """Return True if pairs of the tile attain the bounds of a condition."""
        if item in self.cells or len(self._positions(item)) < 2:
            return True
        if item.op not in (Op.LT, Op.LE) or item.args[0].dtype is not DType.INT:
            return False
        return self._attained(*item.args)

    def _attained(self, a: Node, b: Node) -> bool:
        """Return True if pairs of the tile attain all four pairs of the bounds of two INTs."""
        if self._positions(a) & self._positions(b) or self.unknown.intersection((a, b)):
            return False
        return all(
            len(self._positions(arg)) < 2
            or (arg.op in (Op.ADD, Op.SUB) and self._attained(*arg.args))
            for arg in (a, b)
        )

    def _require(self, bounds: Pair, low: Node, high: Node) -> None:
        """Let bounds decide only where ``bounds`` lie from ``low`` to ``high``."""
        self.small += [node(Op.LE, low, bounds[0]), node(Op.LE, bounds[1], high)]

    def _positions(self, item: Node) -> frozenset[str]:
        """``q`` and ``kv`` as far as ``item`` varies with them; both where it needs the score."""
        found = self.deps[item] & {"q", "kv", "score"}
        return frozenset(("q", "kv")) if "score" in found else found

    def _bound(self, item: Node) -> Pair:
        positions = self._positions(item)
        if not positions:
            return item, item
        if len(positions) == 1:
            (position,) = positions
            if item.op is Op.VAR:
                return position_bounds(position)
            if not self._linear(item):
                return self._summary(item, position)
        args = [self.found[arg] for arg in item.args]
        varying = [arg for arg in item.args if self.deps[arg] & {"q", "kv"}]
        rule = _RULES.get(item.op)
        if rule is not None and not self.unknown.intersection(item.args):
            if item.op is Op.CAST and item.args[0].dtype is DType.FLOAT and item.dtype is DType.INT:
                # What is not below 2**63 becomes another int on each machine.
                self._require(args[0], const(-_INTS), const(_INTS))
            result = rule(item, *args)
            if result is not None:
                if item.op in _LOSSY and len(varying) > (item.op is Op.MUL):
                    self.opaque[_why(item, self.deps[item])] = None
                widen = item.dtype is DType.FLOAT and item.op not in _EXACT_FLOAT
                return _widened(result) if widen else result
        return self._unknown(item)

    def _linear(self, item: Node) -> bool:
        """Return True if interval arithmetic on ``item`` loses nothing: sums of one position."""
        if item.dtype is not DType.INT:
            return False
        if item.op in (Op.ADD, Op.SUB, Op.MUL):
            varying = [arg for arg in item.args if self.deps[arg] & {"q", "kv"}]
            return len(varying) == 1 and (varying[0].op is Op.VAR or self._linear(varying[0]))
        return item.op is Op.NEG and (item.args[0].op is Op.VAR or self._linear(item.args[0]))

    def _summary(self, item: Node, position: str) -> Pair:
        number = cast(item, DType.INT) if item.dtype is DType.BOOL else item
        values = self.values[position]
        if number not in values:
            values.append(number)
        stem = f"${_POSITIONS[position]}{values.index(number)}"
        low, high = (param(f"{stem}_{end}", number.dtype) for end in ("low", "high"))
        if item.dtype is DType.BOOL:
            return cast(low, DType.BOOL), cast(high, DType.BOOL)
        # A looked-up float is the same wherever it is loaded; a computed one may be rounded apart.
        exact = item.dtype is DType.INT or item.op is Op.LOAD
        return (low, high) if exact else _widened((low, high))

    def _unknown(self, item: Node) -> Pair:
        if not self.unknown.intersection(item.args):
            self.opaque[_why(item, self.deps[item])] = None
        if item.dtype is DType.BOOL:
            return const(False), const(True)
        self.unknown.add(item)
        return item, item


def _why(item: Node, deps: frozenset[str]) -> str:
    if "score" in deps:
        return SCORE_DEPENDENT
    if item.op is Op.LOAD:
        return f"{item.value}[...] is looked up by both positions"
    return f"'{item.op.value}' of both positions"


def _not(a: Node) -> Node:
    return node(Op.NOT, a)


def _and(a: Node, b: Node) -> Node:
    return node(Op.AND, a, b)


def _or(a: Node, b: Node) -> Node:
    return node(Op.OR, a, b)


def _least(*items: Node) -> Node:
    result = items[0]
    for item in items[1:]:
        result = node(Op.MIN, result, item)
    return result


def _greatest(*items: Node) -> Node:
    result = items[0]
    for item in items[1:]:
        result = node(Op.MAX, result, item)
    return result


def _widened(pair: Pair) -> Pair:
    low, high = pair
    slack = [
        node(Op.ADD, node(Op.MUL, node(Op.ABS, end), const(_WIDENING)), const(1e-30))
        for end in pair
    ]
    return node(Op.SUB, low, slack[0]), node(Op.ADD, high, slack[1])


def _less(item: Node, a: Pair, b: Pair) -> Pair:
    return node(Op.LT, a[1], b[0]), _not(node(Op.LE, b[1], a[0]))


def _less_equal(item: Node, a: Pair, b: Pair) -> Pair:
    return node(Op.LE, a[1], b[0]), _not(node(Op.LT, b[1], a[0]))


def _equal(item: Node, a: Pair, b: Pair) -> Pair:
    if item.args[0].dtype is DType.BOOL:
        both = _and(a[0], b[0]), _and(a[1], b[1])
        neither = _and(_not(a[1]), _not(b[1])), _and(_not(a[0]), _not(b[0]))
        return _or(both[0], neither[0]), _or(both[1], neither[1])
    single = _and(node(Op.EQ, a[0], a[1]), node(Op.EQ, b[0], b[1]))
    apart = _or(node(Op.LT, a[1], b[0]), node(Op.LT, b[1], a[0]))
    return _and(single, node(Op.EQ, a[0], b[0])), _not(apart)


def _not_equal(item: Node, a: Pair, b: Pair) -> Pair:
    must, may = _equal(item, a, b)
    return _not(may), _not(must)


def _multiply(item: Node, a: Pair, b: Pair) -> Pair:
    if a[0] is a[1] or b[0] is b[1]:
        (low, high), factor = (b, a[0]) if a[0] is a[1] else (a, b[0])
        ends = [node(Op.MUL, low, factor), node(Op.MUL, high, factor)]
    else:
        ends = [node(Op.MUL, x, y) for x in a for y in b]
    return _least(*ends), _greatest(*ends)


def _by_fixed(item: Node, a: Pair, b: Pair) -> Pair | None:
    """``//``, ``/``, ``<<`` and ``>>``: monotone in the first operand where the second is fixed."""
    if b[0] is not b[1]:
        return None
    ends = [node(item.op, end, b[0]) for end in a]
    return _least(*ends), _greatest(*ends)


def _modulo(item: Node, a: Pair, b: Pair) -> Pair | None:
    if b[0] is not b[1] or item.dtype is not DType.INT:
        return None
    divisor = b[0]
    quotients = [node(Op.FLOORDIV, end, divisor) for end in a]
    same = node(Op.EQ, *quotients)
    zero, one = const(0), const(1)
    lowest = _least(node(Op.ADD, divisor, one), zero)
    highest = _greatest(node(Op.SUB, divisor, one), zero)
    return (
        node(Op.WHERE, same, node(Op.MOD, a[0], divisor), lowest),
        node(Op.WHERE, same, node(Op.MOD, a[1], divisor), highest),
    )


def _absolute(item: Node, a: Pair) -> Pair:
    zero = const(0) if item.dtype is DType.INT else const(0.0)
    negated = [node(Op.NEG, end) for end in a]
    return _greatest(a[0], negated[1], zero), _greatest(negated[0], a[1])


def _where(item: Node, condition: Pair, yes: Pair, no: Pair) -> Pair:
    must, may = condition
    if item.dtype is DType.BOOL:
        return (
            _or(_and(must, yes[0]), _or(_and(_not(may), no[0]), _and(yes[0], no[0]))),
            _or(_and(may, yes[1]), _and(_not(must), no[1])),
        )
    either = _least(yes[0], no[0]), _greatest(yes[1], no[1])
    low, high = (
        node(Op.WHERE, must, yes[end], node(Op.WHERE, may, either[end], no[end])) for end in (0, 1)
    )
    return low, high


def _cast(item: Node, a: Pair) -> Pair:
    source = item.args[0].dtype
    if item.dtype is not DType.BOOL:
        # Rounding and truncation are monotone; BOOLs are ordered (must, may).
        return cast(a[0], item.dtype), cast(a[1], item.dtype)
    zero = const(0) if source is DType.INT else const(0.0)
    return _not_equal(node(Op.NE, item.args[0], zero), a, (zero, zero))


def _increasing(item: Node, a: Pair) -> Pair:
    return node(item.op, a[0]), node(item.op, a[1])


def _bit_and(item: Node, a: Pair, b: Pair) -> Pair | None:
    """Bounds of ``&`` with 2**k - 1, which is ``% 2**k``."""
    for value, mask in ((a, item.args[1]), (b, item.args[0])):
        bits = mask.value if mask.op is Op.CONST else None
        if isinstance(bits, int) and bits > 0 and bits & bits + 1 == 0:
            size = const(bits + 1)
            return _modulo(item, value, (size, size))
    return None


_RULES: dict[Op, Callable[..., Pair | None]] = {
    Op.ADD: lambda i, a, b: (node(Op.ADD, a[0], b[0]), node(Op.ADD, a[1], b[1])),
    Op.SUB: lambda i, a, b: (node(Op.SUB, a[0], b[1]), node(Op.SUB, a[1], b[0])),
    Op.NEG: lambda i, a: (node(Op.NEG, a[1]), node(Op.NEG, a[0])),
    Op.BITNOT: lambda i, a: (node(Op.BITNOT, a[1]), node(Op.BITNOT, a[0])),
    Op.MUL: _multiply,
    Op.FLOORDIV: lambda i, a, b: _by_fixed(i, a, b) if i.dtype is DType.INT else None,
    Op.DIV: _by_fixed,
    Op.SHL: _by_fixed,
    Op.SHR: _by_fixed,
    Op.MOD: _modulo,
    Op.BITAND: _bit_and,
    Op.MIN: lambda i, a, b: (_least(a[0], b[0]), _least(a[1], b[1])),
    Op.MAX: lambda i, a, b: (_greatest(a[0], b[0]), _greatest(a[1], b[1])),
    Op.ABS: _absolute,
    Op.SIGN: _increasing,
    Op.LT: _less,
    Op.LE: _less_equal,
    Op.EQ: _equal,
    Op.NE: _not_equal,
    Op.AND: lambda i, a, b: (_and(a[0], b[0]), _and(a[1], b[1])),
    Op.OR: lambda i, a, b: (_or(a[0], b[0]), _or(a[1], b[1])),
    Op.NOT: lambda i, a: (_not(a[1]), _not(a[0])),
    Op.WHERE: _where,
    Op.CAST: _cast,
    **dict.fromkeys(_INCREASING, _increasing),
}
"""Bounds of an operation from bounds of its operands; None if there are none."""
