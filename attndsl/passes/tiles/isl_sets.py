"""Masks as integer sets: the live pairs of a quasi-affine mask, parametric in everything else.

A mask is quasi-affine where it is made of ``q`` and ``kv`` by sums, integer factors, ``//`` and
``%`` by constants, shifts and bit masks by constants (which are those), ``min``, ``max``, ``abs``,
``where``, comparisons and logic. Whatever does not vary with ``q`` and ``kv`` may stand in it as a
parameter: lengths, run-time ints, entries of tensors looked up by ``b`` and ``h``. Such sets are
decided exactly (W. Pugh, The Omega test, 1991; S. Verdoolaege, isl, 2010).

Non-goals: wrap-around (``affine.py`` keeps it out), anything about tiles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attndsl.ir import COMPARISONS, LEAVES, DType, Op, cast, param, toposort

from .affine import BY_CONSTANT, bit_runs, symbols_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.ir import Node

OFFSETS = {name: param(f"${name}_offset", DType.INT) for name in ("q", "kv")}
"""Run-time shifts of logical positions; names that begin with ``$`` are the kernels' own."""
MAX_DIVISIONS, MAX_CONDITIONS, MAX_FACTOR = 8, 512, 1 << 17
"""Rounded divisions of a convex piece of a set of pairs, conditions of all pieces of a set, and
factors and divisors in them: see M23 in docs/dev/measured.md."""
MAX_NESTED = 5
"""Remainders of remainders: each level doubles the time of single operations of isl, and more."""
_FACTOR = re.compile(r"(?<!\w)(\d+)\*?(?=[A-Za-z(])|(?:/|mod )(\d+)")
"""Factors and divisors in isl's text of a set. Constants that are added do not matter."""


class TooComplicated(Exception):
    """A set that isl might take long to go on with."""


def divisions_of(found: Any) -> int:
    """The most rounded divisions that one convex piece of a set has."""
    import islpy

    return max((x.dim(islpy.dim_type.div) for x in found.get_basic_sets()), default=0)


def bounded(found: Any, most: int = MAX_DIVISIONS) -> Any:
    """``found``, a set or a function, whose pieces have at most ``most`` divisions.

    isl's count of operations bounds the number of pieces. What it does within one piece, it does
    not count: the time of that grows exponentially with the piece's divisions and with the length
    of its numbers, and nothing can interrupt it. So whatever isl has made is looked at before isl
    gets it again.

    Raises:
        TooComplicated: It has more of them, too many conditions, or too large factors.
    """
    import islpy

    domains = [found]
    if isinstance(found, islpy.PwAff):
        pieces = found.get_pieces()
        domains = [domain for domain, _ in pieces]
        if any(value.dim(islpy.dim_type.div) > most for _, value in pieces):
            raise TooComplicated
    conditions = sum(x.n_constraint() for domain in domains for x in domain.get_basic_sets())
    if conditions > MAX_CONDITIONS or max(map(divisions_of, domains), default=0) > most:
        raise TooComplicated
    text = found.to_str()  # None where that takes one operation too many.
    if text is None or any(int(a or b) > MAX_FACTOR for a, b in _FACTOR.findall(text)):
        raise TooComplicated
    return found


@dataclass(slots=True)
class SetBuilder:
    """Turns IR into isl objects over ``[parameters] -> { [q, kv] }``, physical rows counted from 0.

    Args:
        context: The isl context that all objects live in.
        shifted: Whether logical positions are rows plus the run-time offsets.
        cut: What stands for some symbols (see :class:`~.affine.Guard`).
    """

    context: Any
    shifted: bool
    cut: Mapping[Node, Node]
    parameters: dict[str, Node] = field(default_factory=dict)
    """The symbol of each isl parameter, in order of first use."""
    _found: dict[Node, Any] = field(default_factory=dict)
    _names: dict[Node, str] = field(default_factory=dict)

    def live(self, mask: Node) -> Any:
        """The isl set of rows and columns where ``mask`` holds, lengths unbounded.

        Raises:
            TypeError: ``mask`` is not quasi-affine (see :mod:`.affine`).
            TooComplicated: isl might take long.
        """
        named = symbols_of(mask).named
        nested: dict[Node, int] = {}
        for item in toposort(mask):
            own = item.op is Op.MOD and item not in named
            nested[item] = max((nested[arg] for arg in item.args), default=0) + own
            if nested[item] > MAX_NESTED:
                raise TooComplicated
            if item in named:
                if item.dtype is not DType.FLOAT:
                    self._found[item] = self._parameter(item)
                continue
            if all(arg in self._found for arg in item.args):
                self._found[item] = bounded(self._build(item))
        if mask not in self._found:
            raise TypeError(f"not quasi-affine: {mask}")
        return self._found[mask]

    def parameter(self, item: Node) -> Any:
        """The isl function whose value is the parameter ``item``."""
        return self._read(self._name(item))

    def _name(self, item: Node) -> str:
        name = self._names.get(item)
        if name is None:
            named = item.op in LEAVES and item.op is not Op.CONST
            stem = str(item.value).strip("$") if named else "value"
            name = f"{stem}_{len(self._names)}"
            self._names[item] = name
            self.parameters[name] = cast(self.cut.get(item, item), DType.INT)
        return name

    def _parameter(self, item: Node) -> Any:
        value = self._read(self._name(item))
        return value.ne_set(self._number(0)) if item.dtype is DType.BOOL else value

    def _read(self, text: str) -> Any:
        import islpy

        names = [name for name in self._names.values() if name in text]
        return islpy.PwAff.read_from_str(
            self.context, f"[{', '.join(names)}] -> {{ [q, kv] -> [({text})] }}"
        )

    def _number(self, value: int) -> Any:
        return self._read(str(value))

    def _everything(self) -> Any:
        import islpy

        return islpy.Set.read_from_str(self.context, "{ [q, kv] }")

    def _build(self, item: Node) -> Any:
        op = item.op
        args = [self._found[arg] for arg in item.args]
        if op is Op.CONST:
            if item.dtype is DType.BOOL:
                everything = self._everything()
                return everything if item.value else everything.subtract(everything)
            return self._number(int(item.value))  # type: ignore[arg-type]
        if op is Op.VAR:
            position = self._read(str(item.value))
            if not self.shifted:
                return position
            return position.add(self.parameter(OFFSETS[str(item.value)]))
        if op in COMPARISONS:
            return self._compare(item, *args)
        if op in BY_CONSTANT:
            return self._by_constant(item, *args)
        if op is Op.WHERE:
            return self._where(item.dtype, *args)
        if op is Op.CAST:
            if item.dtype is item.args[0].dtype:
                return args[0]
            if item.dtype is DType.BOOL:
                return args[0].ne_set(self._number(0))
            return self._where(DType.INT, args[0], self._number(1), self._number(0))
        if op is Op.POW:
            return args[0] if item.args[1].value == 1 else self._number(1)
        if op is Op.SIGN:
            zero, one = self._number(0), self._number(1)
            above = self._where(DType.INT, args[0].gt_set(zero), one, zero)
            return self._where(DType.INT, args[0].lt_set(zero), one.neg(), above)
        return _SIMPLE[op](*args)

    def _compare(self, item: Node, a: Any, b: Any) -> Any:
        if item.args[0].dtype is DType.BOOL:
            same = a.intersect(b).union(a.complement().intersect(b.complement()))
            return same if item.op is Op.EQ else same.complement()
        return {Op.LT: a.lt_set, Op.LE: a.le_set, Op.EQ: a.eq_set, Op.NE: a.ne_set}[item.op](b)

    def _where(self, dtype: DType, condition: Any, yes: Any, no: Any) -> Any:
        if dtype is DType.BOOL:
            return condition.intersect(yes).union(no.subtract(condition))
        return yes.intersect_domain(condition).union_add(
            no.intersect_domain(condition.complement())
        )

    def _by_constant(self, item: Node, a: Any, b: Any) -> Any:
        op = item.op
        number_left = item.args[0].op is Op.CONST
        value = b if number_left else a
        number = int(item.args[0 if number_left else 1].value)  # type: ignore[arg-type]
        if op is Op.MUL:
            return value.scale_val(self._val(number))
        if op is Op.FLOORDIV:
            return self._divide(value, number)
        if op is Op.MOD:
            if number == 0:
                return self._number(0)
            return value.sub(self._divide(value, number).scale_val(self._val(number)))
        if op is Op.SHL:
            return value.scale_val(self._val(1 << max(number, 0)))
        if op is Op.SHR:
            return self._divide(value, 1 << max(number, 0))
        kept = self._masked(value, number)
        if op is Op.BITAND:
            return kept
        # x | m = x + m - (x & m);  x ^ m = x + m - 2 (x & m).
        total = value.add(self._number(number))
        return total.sub(kept) if op is Op.BITOR else total.sub(kept.scale_val(self._val(2)))

    def _masked(self, value: Any, number: int) -> Any:
        total = self._number(0)
        for low, high in bit_runs(number):
            part = self._divide(value, 1 << low)
            if high is not None:
                size = 1 << (high - low)
                part = part.sub(self._divide(part, size).scale_val(self._val(size)))
            total = total.add(part.scale_val(self._val(1 << low)))
        return total

    def _divide(self, value: Any, number: int) -> Any:
        if number == 0:
            return self._number(0)
        if number < 0:
            value, number = value.neg(), -number
        return value.scale_down_val(self._val(number)).floor()

    def _val(self, number: int) -> Any:
        import islpy

        return islpy.Val.int_from_si(self.context, number)


_SIMPLE: dict[Op, Callable[..., Any]] = {
    Op.ADD: lambda a, b: a.add(b),
    Op.SUB: lambda a, b: a.sub(b),
    Op.NEG: lambda a: a.neg(),
    Op.MIN: lambda a, b: a.min(b),
    Op.MAX: lambda a, b: a.max(b),
    Op.ABS: lambda a: a.max(a.neg()),
    Op.BITNOT: lambda a: a.neg().add_constant_val(_minus_one(a)),
    Op.AND: lambda a, b: a.intersect(b),
    Op.OR: lambda a, b: a.union(b),
    Op.NOT: lambda a: a.complement(),
}


def _minus_one(value: Any) -> Any:
    import islpy

    return islpy.Val.int_from_si(value.get_ctx(), -1)
