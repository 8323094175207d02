"""Masks as integer sets: the live pairs of a quasi-affine mask, parametric in everything else.

A mask is quasi-affine where it is made of ``q`` and ``kv`` by sums, integer factors, ``//`` and
``%`` by constants, shifts and bit masks by constants (which are those), ``min``, ``max``, ``abs``,
``where``, comparisons and logic. Whatever does not vary with ``q`` and ``kv`` may stand in it as a
parameter: lengths, run-time ints, entries of tensors looked up by ``b`` and ``h``. Such sets are
decided exactly (W. Pugh, The Omega test, 1991; S. Verdoolaege, isl, 2010).

Non-goals: 64-bit wrap-around (positions are below 2**30), anything about tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attndsl.ir import COMPARISONS, LEAVES, DType, Op, cast, dependencies, param, toposort

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.ir import Node

MAX_COEFFICIENT = 1 << 20
"""Larger constants make sets expensive and come from arithmetic that is no tiling."""
_SUPPORTED = frozenset(
    {
        Op.ADD, Op.SUB, Op.NEG, Op.MIN, Op.MAX, Op.ABS, Op.SIGN, Op.BITNOT, Op.WHERE, Op.AND,
        Op.OR, Op.NOT, Op.LT, Op.LE, Op.EQ, Op.NE,
    }
)  # fmt: skip
_BY_CONSTANT = frozenset(
    {Op.MUL, Op.FLOORDIV, Op.MOD, Op.SHL, Op.SHR, Op.BITAND, Op.BITOR, Op.BITXOR}
)
OFFSETS = {name: param(f"${name}_offset", DType.INT) for name in ("q", "kv")}
"""Run-time shifts of logical positions; names that begin with ``$`` are the kernels' own."""
_MAX_RUNS = 3
"""Runs of ones in a bit mask; each makes a ``//`` and a ``%``."""


def why_not_affine(root: Node) -> str | None:
    """Why ``root`` is no quasi-affine expression, or None where it is one."""
    deps = dependencies(root)
    for item in toposort(root):
        if not deps[item] & {"q", "kv", "score"}:
            continue
        reason = _refusal(item, deps)
        if reason is not None:
            return reason
    return None


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
    if op in _BY_CONSTANT:
        varying = [arg for arg in item.args if arg.op is not Op.CONST]
        ordered = op in (Op.FLOORDIV, Op.MOD, Op.SHL, Op.SHR)
        if len(varying) > 1 or (ordered and varying[0] is not item.args[0]):
            return f"'{op.value}' of two values that are not constant"
        number = int(next(arg.value for arg in item.args if arg.op is Op.CONST))  # type: ignore[arg-type]
        if op in (Op.SHL, Op.SHR):
            return None if number <= 20 else f"a shift by {number}"
        if op in (Op.BITAND, Op.BITOR, Op.BITXOR) and len(_runs(number)) > _MAX_RUNS:
            return f"'{op.value}' with {number}, whose bits are scattered"
        return None if abs(number) <= MAX_COEFFICIENT else f"the constant {number} is too large"
    return f"'{op.value}' is not affine"


@dataclass(slots=True)
class SetBuilder:
    """Turns IR into isl objects over ``[parameters] -> { [q, kv] }``, physical rows counted from 0.

    Args:
        context: The isl context that all objects live in.
        shifted: Whether logical positions are rows plus the run-time offsets.
    """

    context: Any
    shifted: bool
    parameters: dict[str, Node] = field(default_factory=dict)
    """What each isl parameter stands for, in order of first use."""
    _found: dict[Node, Any] = field(default_factory=dict)
    _names: dict[Node, str] = field(default_factory=dict)

    def live(self, mask: Node) -> Any:
        """The isl set of rows and columns where ``mask`` holds, lengths unbounded.

        Raises:
            TypeError: ``mask`` is not quasi-affine (see :func:`why_not_affine`).
        """
        deps = dependencies(mask)
        for item in toposort(mask):
            if not deps[item] & {"q", "kv", "score"} and not self._expands(item):
                if item.dtype is not DType.FLOAT:
                    self._found[item] = self._parameter(item)
                continue
            if all(arg in self._found for arg in item.args):
                self._found[item] = self._build(item)
        if mask not in self._found:
            raise TypeError(f"not quasi-affine: {mask}")
        return self._found[mask]

    def parameter(self, item: Node) -> Any:
        """The isl function whose value is the parameter ``item``."""
        return self._read(self._name(item))

    def _expands(self, item: Node) -> bool:
        """Whether an expression without positions is built of its operands rather than a name."""
        if item.op is Op.CONST:
            return item.dtype is not DType.FLOAT and abs(int(item.value)) <= MAX_COEFFICIENT  # type: ignore[arg-type]
        if item.op in LEAVES or item.op is Op.LOAD:
            return False
        return _refusal(item, {}) is None and all(arg in self._found for arg in item.args)

    def _name(self, item: Node) -> str:
        name = self._names.get(item)
        if name is None:
            stem = str(item.value).strip("$") if item.op in LEAVES else "value"
            name = f"{stem}_{len(self._names)}"
            self._names[item] = name
            self.parameters[name] = cast(item, DType.INT)
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
        if op in _BY_CONSTANT:
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
        for low, high in _runs(number):
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


def _runs(number: int) -> list[tuple[int, int | None]]:
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
