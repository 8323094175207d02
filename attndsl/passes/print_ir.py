"""IR as program text: parsing and checking the text gives back the same nodes.

Shared nodes and deep ones become locals, so that the text is as long as the DAG, not as the tree.
"""

from __future__ import annotations

import math
from itertools import count
from typing import TYPE_CHECKING

from attndsl.ir import FLOAT_UNARY, SCORE, DType, Node, Op, Program, sides, toposort
from attndsl.source import NAME_LENGTH, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .differentiate import Derivative
    from .lowered import Lowered

(_OR, _AND, _NOT, _COMPARE, _BIT_OR, _BIT_XOR, _BIT_AND, _SHIFT, _SUM, _PRODUCT, _UNARY, _POWER,
 _ATOM) = range(13)  # fmt: skip
_MAX_DEPTH = 12
_MOST = 2000
"""Characters of a part."""
_INFIX = {
    Op.OR: ("or", _OR),
    Op.AND: ("and", _AND),
    Op.LT: ("<", _COMPARE),
    Op.LE: ("<=", _COMPARE),
    Op.EQ: ("==", _COMPARE),
    Op.NE: ("!=", _COMPARE),
    Op.BITOR: ("|", _BIT_OR),
    Op.BITXOR: ("^", _BIT_XOR),
    Op.BITAND: ("&", _BIT_AND),
    Op.SHL: ("<<", _SHIFT),
    Op.SHR: (">>", _SHIFT),
    Op.ADD: ("+", _SUM),
    Op.SUB: ("-", _SUM),
    Op.MUL: ("*", _PRODUCT),
    Op.DIV: ("/", _PRODUCT),
    Op.FLOORDIV: ("//", _PRODUCT),
    Op.MOD: ("%", _PRODUCT),
}
_PREFIX = {Op.NOT: ("not ", _NOT), Op.NEG: ("-", _UNARY), Op.BITNOT: ("~", _UNARY)}
_CALLS = {op: op.value for op in FLOAT_UNARY} | {
    op: op.value for op in (Op.MIN, Op.MAX, Op.ABS, Op.SIGN, Op.WHERE)
}


def short_form(lowered: Lowered, most: int = NAME_LENGTH) -> str:
    """A program without a known text, in one line of at most ``most`` characters."""
    return shorten(print_program(lowered.program), most)


def print_program(program: Program) -> str:
    """``program`` as text.

    The language has no literal for the lowest int and for NaN. They stand as expressions that
    simplify to them.
    """
    taken = {p.name for p in program.params} | {t.name for t in program.tensors}
    taken |= set(program.dim_names())
    lines = [_param(p.name, p.dtype, p.default) for p in program.params]
    dims = _Printer([d for t in program.tensors for d in t.dims], taken, share=False)
    for tensor in program.tensors:
        shape = ", ".join(dims.texts[dim][0] for dim in tensor.dims)
        lines.append(f"tensor {tensor.name}[{shape}]: {tensor.dtype.value}")
    parts = [p for p in (program.mask, program.sink, program.dropout, program.score) if p]
    own = program.weights
    if own is not None and program.score is SCORE:
        # Locals read the incoming score, which is the final one only where no line changes it.
        parts, own = [*parts, own], None
    printer = _Printer(parts, taken, share=True)
    lines += printer.lines
    if program.mask is not None:
        lines.append(f"mask = {printer.texts[program.mask][0]}")
    if program.sink is not None:
        lines.append(f"sink = {printer.texts[program.sink][0]}")
    if program.score.op is not Op.SCORE or not (program.mask or program.weights or program.sink):
        lines.append(f"score = {printer.texts[program.score][0]}")
    if program.weights is not None or program.dropout is not None:
        weights = "softmax(score)"
        if own is not None:
            weights = _Printer([own], taken, share=False).texts[own][0]
        elif program.weights is not None:
            weights = printer.texts[program.weights][0]
        if program.dropout is not None:
            weights = f"dropout({weights}, {printer.texts[program.dropout][0]})"
        lines.append(f"weights = {weights}")
    return "\n".join(lines) + "\n"


def print_expression(root: Node, names: Mapping[str, str] | None = None) -> str:
    """``root`` as one expression for people to read, with ``...`` for what would fill pages.

    Args:
        root: The expression.
        names: What some leaves are to be called.
    """
    return _Printer([root], set(), share=False, names=names, most=_MOST).texts[root][0]


def print_derivative(derivative: Derivative) -> str:
    """``derivative`` as lines ``d score / d X = expression``."""
    roots = [derivative.score]
    roots += [root for g in derivative.tensors for root in (g.load, g.factor)]
    roots += [root for p in derivative.products for root in (p.product, p.factor)]
    roots += [g.factor for g in derivative.params]
    printer = _Printer(roots, set(), share=True)
    lines = [*printer.lines, f"d score / d score = {printer.texts[derivative.score][0]}"]
    for gradient in derivative.tensors:
        indices = ", ".join(printer.texts[index][0] for index in gradient.load.args)
        name = f"{gradient.load.value}[{indices}]"
        lines.append(f"d score / d {name} = {printer.texts[gradient.factor][0]}")
    for each in derivative.products:
        shown = printer.texts[each.product][0]
        lines.append(f"d score / d {shown} = {printer.texts[each.factor][0]}")
    for item in derivative.params:
        lines.append(f"d score / d {item.name} = {printer.texts[item.factor][0]}")
    return "\n".join(lines) + "\n"


def _param(name: str, dtype: DType, default: bool | int | float | None) -> str:
    shown = "" if default is None else f" = {_number(default)}"
    return f"param {name}: {dtype.value}{shown}"


def _number(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "(inf - inf)" if math.isnan(value) else repr(value)
    return str(value) if value > -1 << 63 else f"({value + 1} - 1)"


class _Printer:
    """``texts`` has each node's text and how tightly it binds; ``lines`` defines the locals."""

    def __init__(
        self,
        roots: Iterable[Node],
        taken: set[str],
        share: bool,
        names: Mapping[str, str] | None = None,
        most: int | None = None,
    ) -> None:
        self.names = names or {}
        self.texts: dict[Node, tuple[str, int]] = {}
        self.lines: list[str] = []
        roots = list(roots)
        uses: dict[Node, int] = {}
        order = toposort(*roots)
        for item in order:
            for arg in item.args:
                uses[arg] = uses.get(arg, 0) + 1
        depths: dict[Node, int] = {}
        free = (name for number in count() if (name := f"t{number}") not in taken)
        for item in order:
            text, level = self._text(item)
            depth = 1 + max((depths[arg] for arg in item.args), default=0)
            if share and item.args and (uses.get(item, 0) > 1 or depth > _MAX_DEPTH):
                name = next(free)
                self.lines.append(f"{name} = {text}")
                text, level, depth = name, _ATOM, 0
            elif most is not None and len(text) > most:
                text, level = "...", _ATOM
            self.texts[item] = text, level
            depths[item] = depth

    def _at(self, item: Node, level: int) -> str:
        text, own = self.texts[item]
        return text if own >= level else f"({text})"

    def _text(self, item: Node) -> tuple[str, int]:
        op, args = item.op, item.args
        if op is Op.CONST:
            assert isinstance(item.value, bool | int | float)
            text = _number(item.value)
            return text, _UNARY if text.startswith("-") else _ATOM
        if op is Op.SCORE:
            return "score", _ATOM
        if op in (Op.VAR, Op.SIZE, Op.PARAM):
            return self.names.get(str(item.value), str(item.value)), _ATOM
        if op is Op.LOAD:
            return f"{item.value}[{', '.join(self.texts[a][0] for a in args)}]", _ATOM
        if op is Op.IN:
            row = ", ".join([*(self.texts[a][0] for a in args[1:]), ":"])
            return f"{self._at(args[0], _BIT_OR)} in {item.value}[{row}]", _COMPARE
        if op is Op.DOT:
            rows = [
                f"{side.name}[{', '.join([*(self.texts[a][0] for a in side.indices), ':'])}]"
                for side in sides(item)
            ]
            return f"dot({', '.join(rows)})", _ATOM
        if op is Op.CAST:
            return f"{item.dtype.value}({self.texts[args[0]][0]})", _ATOM
        if op in _CALLS:
            return f"{_CALLS[op]}({', '.join(self.texts[a][0] for a in args)})", _ATOM
        if op in _PREFIX:
            symbol, level = _PREFIX[op]
            # A minus before a literal would become part of it.
            literal = args[0].op is Op.CONST
            return f"{symbol}{self._at(args[0], _ATOM if literal else level)}", level
        if op is Op.POW:
            return f"{self._at(args[0], _ATOM)} ** {self._at(args[1], _UNARY)}", _POWER
        symbol, level = _INFIX[op]
        # The language wants bit operators beside a comparison in parentheses.
        left, right = (_SHIFT, _SHIFT) if level == _COMPARE else (level, level + 1)
        return f"{self._at(args[0], left)} {symbol} {self._at(args[1], right)}", level
