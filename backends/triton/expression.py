"""IR expressions as Triton source: one local a line for shared values, the rest inline.

The text is independent of the tile's orientation: ``b``, ``h``, ``hkv`` are scalars, ``q`` and
``kv`` broadcast against each other (one is a column, the other a row), ``score`` has the shape of
the tile. Floats are fp32; ints are 32 bits where :mod:`attndsl.passes.widths` proves that exact.

Non-goals: choosing what to hoist out of loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndsl.ir import COMPARISONS, DType, Node, Op, dependencies, toposort
from attndsl.passes.widths import INT32, fits, ranges

from ..forms import EXACT, FORMS, fast_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping

_ATOM, _UNARY, _PRODUCT, _SUM, _SHIFT, _AND, _XOR, _OR, _COMPARE = range(9, 0, -1)
_MAX_INLINE = 6
"""Operators that one line may nest before a local is introduced."""

_INFIX = {
    Op.ADD: ("+", _SUM),
    Op.SUB: ("-", _SUM),
    Op.MUL: ("*", _PRODUCT),
    Op.DIV: ("/", _PRODUCT),
    Op.BITAND: ("&", _AND),
    Op.BITOR: ("|", _OR),
    Op.BITXOR: ("^", _XOR),
    Op.AND: ("&", _AND),
    Op.OR: ("|", _OR),
    Op.LT: ("<", _COMPARE),
    Op.LE: ("<=", _COMPARE),
    Op.EQ: ("==", _COMPARE),
    Op.NE: ("!=", _COMPARE),
}
_CALLS = {
    Op.FLOOR: "tl.floor",
    Op.CEIL: "tl.ceil",
    Op.SQRT: "tl.sqrt",
    Op.RSQRT: "tl.rsqrt",
    Op.EXP: "tl.exp",
    Op.EXP2: "tl.exp2",
    Op.LOG: "tl.log",
    Op.LOG2: "tl.log2",
    Op.SIN: "sin",
    Op.COS: "cos",
    Op.ERF: "tl.erf",
    Op.SIGMOID: "tl.sigmoid",
    Op.ROUND: "round_half_even",
    Op.LOG1P: "log1p",
    Op.EXPM1: "expm1",
    Op.TAN: "tan",
    Op.TANH: "tanh",
    Op.SILU: "silu",
    Op.RELU: "relu",
    Op.GELU: "gelu",
    Op.SOFTPLUS: "softplus",
}
_FLOAT_TWO = {Op.FLOORDIV: "float_floordiv", Op.MOD: "float_mod", Op.POW: "power"}


@dataclass(frozen=True, slots=True)
class Capture:
    """How a captured tensor is reached in a kernel."""

    name: str
    dtype: DType
    rank: int
    bits: int
    """Bits of an element."""
    wide: bool
    """Whether offsets within the tensor need 64 bits."""
    unit_dims: frozenset[int] = frozenset()
    """Dims whose stride is 1."""
    in_range: frozenset[int] = frozenset()
    """Dims whose size is that of the variable ``b``, ``h`` or ``hkv`` itself."""
    exact: tuple[str, ...] = ()
    """The variable of each dim, where all its values are known to be in range."""


@dataclass(frozen=True, slots=True)
class Names:
    """What leaves are called, and what is known of them."""

    captures: Mapping[str, Capture]
    int_bits: Mapping[str, int]
    """Bits of int params and int tensors."""
    head_dim: int
    from_zero: bool = False
    """Whether logical positions are row numbers."""
    scalar: bool = False
    """Whether values are scalars, as in loop bounds, rather than parts of a tile."""
    forms: str = EXACT
    """Which set of fast forms functions may take (``..forms``)."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Lines that define locals, and one expression text a root."""

    lines: tuple[str, ...]
    results: tuple[str, ...]
    terms: tuple[str, ...]
    """The results as terms of a sum."""
    helpers: frozenset[str]
    """Library functions used."""


def print_expressions(roots: tuple[Node, ...], names: Names) -> Printed:
    """``roots`` as Triton source over the names of the kernel templates."""
    printer = Printer(roots, names)
    results = tuple(printer.texts[root][0] for root in roots)
    terms = tuple(printer.at(root, _SUM) for root in roots)
    return Printed(tuple(printer.lines), results, terms, frozenset(printer.helpers))


def element_offset(
    indices: list[str], stride: str, name: str, wide: bool, unit_dims: frozenset[int]
) -> str:
    """Offset of an element of ``name``, given its index texts, in ``{stride}{n}_{name}``."""
    terms = []
    for dim, index in enumerate(indices):
        factor = f"{index}.to(tl.int64)" if wide else index
        terms.append(factor if dim in unit_dims else f"{factor} * {stride}{dim}_{name}")
    return " + ".join(terms) if terms else "0"


class Printer:
    """Prints nodes in topological order; ``texts`` has each one's text and precedence."""

    def __init__(self, roots: tuple[Node, ...], names: Names) -> None:
        self.names = names
        self.lines: list[str] = []
        self.helpers: set[str] = set()
        self.deps = dependencies(*roots)
        self.ranges = ranges(roots, names.int_bits, names.from_zero)
        self.forms = FORMS[names.forms]
        self.fast = fast_nodes(roots) if self.forms else frozenset()
        if not names.scalar:
            self._spread_tile_params(roots)
        self.texts: dict[Node, tuple[str, int]] = {}
        self.depths: dict[Node, int] = {}
        order = toposort(*roots)
        uses: dict[Node, int] = {}
        for item in order:
            for arg in item.args:
                uses[arg] = uses.get(arg, 0) + 1
        for item in order:
            text, level = self._text(item)
            depth = 1 + max((self.depths[arg] for arg in item.args), default=0)
            if item.op is Op.LOAD:
                text, level, depth = self._local(f"{item.value}_", text), _ATOM, 0
            elif item.args and (uses.get(item, 0) > 1 or depth > _MAX_INLINE):
                text, level, depth = self._local("x", text), _ATOM, 0
            self.texts[item] = text, level
            self.depths[item] = depth

    def _spread_tile_params(self, roots: tuple[Node, ...]) -> None:
        """Params of tiles are tiles themselves, though they mention no position.

        Bounds of many tiles at once, and what has been looked up (:mod:`attndsl.passes.gather`).
        """
        spread: dict[Node, frozenset[str]] = {}
        for item in toposort(*roots):
            found = frozenset[str]().union(*(spread.get(arg, frozenset()) for arg in item.args))
            if item.op is Op.PARAM and str(item.value).startswith("$"):
                if str(item.value).startswith("$pair_part"):
                    found = frozenset({"q", "kv"})
                else:
                    found = frozenset({"kv" if str(item.value).startswith("$kv_part") else "q"})
            if found:
                spread[item] = found
                self.deps[item] |= found

    def operand(self, item: Node) -> str:
        """Text of ``item`` as a factor of a product."""
        return self.at(item, _PRODUCT + 1)

    def at(self, item: Node, level: int) -> str:
        """Text of ``item`` as an operand that binds at least as tightly as ``level``."""
        text, own = self.texts[item]
        return text if own >= level else f"({text})"

    def _call(self, name: str, *args: str) -> tuple[str, int]:
        if not name.startswith("tl."):
            self.helpers.add(name)
        return f"{name}({', '.join(args)})", _ATOM

    def _value(self, item: Node) -> str:
        """Text of an operand that must be a Triton value rather than a Python number."""
        shape = "[]" if self.names.scalar else "[1, 1]"
        if item.op is Op.SIZE and item.value == "head_dim":
            return f"tl.full({shape}, {self.names.head_dim}, tl.int32)"
        if item.op is Op.CONST:
            kind = {
                DType.FLOAT: "float32",
                DType.INT: "int32" if fits(self.ranges.get(item, (0, 0))) else "int64",
            }
            return f"tl.full({shape}, {self.texts[item][0]}, tl.{kind.get(item.dtype, 'int1')})"
        return self.texts[item][0]

    def _block(self, item: Node) -> str:
        """Text of an operand that must have the dims of a tile: a bool scalar cannot be spread."""
        varies = self.deps[item] & {"q", "kv", "score"}
        if self.names.scalar or item.op is Op.CONST or varies:
            return self._value(item)
        return self._call("as_block", self.texts[item][0])[0]

    def _text(self, item: Node) -> tuple[str, int]:
        op, args = item.op, item.args
        if op is Op.CONST:
            return self._constant(item)
        if op is Op.VAR:
            return str(item.value), _ATOM
        if op is Op.SIZE:
            return self._size(str(item.value))
        if op is Op.PARAM:
            name = str(item.value)
            return (name[1:] if name.startswith("$") else f"p_{name}"), _ATOM
        if op is Op.SCORE:
            return "score", _ATOM
        if op is Op.LOAD:
            return self._load(item)
        if op is Op.WHERE:
            return self._call("tl.where", *(self.texts[arg][0] for arg in args))
        if op is Op.CAST:
            return self._cast(item)
        if op is Op.NOT:
            return f"~{self.at(args[0], _UNARY)}", _UNARY
        if item.dtype is DType.INT or (args[0].dtype is DType.INT and op not in _INFIX):
            return self._integer(item)
        if op in _INFIX:
            return self._infix(item)
        if op is Op.NEG:
            return f"-{self.at(args[0], _UNARY)}", _UNARY
        if op is Op.ABS:
            return self._call("tl.abs", self._value(args[0]))
        if op is Op.SIGN:
            return self._call("sign", self._value(args[0]))
        if op in (Op.MIN, Op.MAX):
            name = "tl.minimum" if op is Op.MIN else "tl.maximum"
            return self._call(
                name, *(self._value(a) for a in args), "propagate_nan=tl.PropagateNan.ALL"
            )
        if op is Op.POW and (chain := self._small_power(item)) is not None:
            return chain
        if op in _FLOAT_TWO:
            return self._call(_FLOAT_TWO[op], *(self._block(a) for a in args))
        name = self.forms[op].function if item in self.fast else _CALLS[op]
        return self._call(name, self._value(args[0]))

    def _infix(self, item: Node) -> tuple[str, int]:
        symbol, level = _INFIX[item.op]
        left, right = item.args
        # Comparisons do not chain here, and the others associate to the left.
        first = self.at(left, level + 1 if level == _COMPARE else level)
        if item.op in COMPARISONS and not self.deps[item] & {"q", "kv", "score"}:
            first = self._block(left)
        return f"{first} {symbol} {self.at(right, level + 1)}", level

    def _constant(self, item: Node) -> tuple[str, int]:
        value = item.value
        if isinstance(value, bool):
            shape = "[]" if self.names.scalar else "[1, 1]"
            return f"tl.full({shape}, {value}, tl.int1)", _ATOM
        if isinstance(value, int):
            if not fits((value, value)):
                return f"tl.full([], {value}, tl.int64)", _ATOM
            return str(value), _ATOM if value >= 0 else _UNARY
        assert isinstance(value, float)
        if math.isnan(value) or math.isinf(value):
            return f'float("{value}")', _ATOM
        return repr(value), _UNARY if math.copysign(1.0, value) < 0 else _ATOM

    def _size(self, name: str) -> tuple[str, int]:
        if name == "head_dim":
            return str(self.names.head_dim), _ATOM
        builtin = name in ("batch", "heads", "kv_heads", "q_len", "kv_len")
        return (name if builtin else f"n_{name}"), _ATOM

    def _cast(self, item: Node) -> tuple[str, int]:
        operand = item.args[0]
        if item.dtype is DType.BOOL:
            return f"{self._block(operand)} != 0", _COMPARE
        target = {
            (DType.FLOAT, DType.BOOL): "float32",
            (DType.FLOAT, DType.INT): "float32",
            (DType.INT, DType.BOOL): "int32",
            (DType.INT, DType.FLOAT): "int64",
        }[item.dtype, operand.dtype]
        number = operand.op is Op.CONST or (operand.op is Op.SIZE and operand.value == "head_dim")
        text = self._value(operand) if number else self.at(operand, _ATOM)
        return f"{text}.to(tl.{target})", _ATOM

    def indices(self, load: Node) -> list[str]:
        """Index texts of ``load``: locals, clamped into the tensor where they might leave it."""
        capture = self.names.captures[str(load.value)]
        texts = []
        for dim, arg in enumerate(load.args):
            if dim in capture.in_range and arg.op is Op.VAR and arg.value in ("b", "h", "hkv"):
                texts.append(self.texts[arg][0])
                continue
            if capture.exact and arg.op is Op.VAR and arg.value == capture.exact[dim]:
                texts.append(self._value(arg))
                continue
            text = f"tl.minimum(tl.maximum({self._value(arg)}, 0), size{dim}_{capture.name} - 1)"
            if not capture.wide and not fits(self.ranges[arg]):
                text += ".to(tl.int32)"
            texts.append(self._local("i", text))
        return texts

    def _local(self, stem: str, text: str) -> str:
        name = f"{stem}{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def _load(self, item: Node) -> tuple[str, int]:
        capture = self.names.captures[str(item.value)]
        offset = element_offset(
            self.indices(item), "stride", capture.name, capture.wide, capture.unit_dims
        )
        pair = {"q", "kv"} <= self.deps[item] or "score" in self.deps[item]
        # Dead pairs read nothing; clamped indices keep all others inside the tensor.
        guard = ", mask=live, other=0" if pair else ""
        text = f"tl.load(t_{capture.name} + {offset}{guard})"
        if capture.dtype is DType.FLOAT:
            return f"{text}.to(tl.float32)", _ATOM
        if capture.dtype is DType.BOOL:
            block = text if self.names.scalar else self._call("as_block", text)[0]
            return f"{block} != 0", _COMPARE
        return f"{text}.to(tl.int32)" if capture.bits < 32 else text, _ATOM

    def _integer(self, item: Node) -> tuple[str, int]:
        op, args = item.op, item.args
        texts = [self._value(arg) for arg in args]
        if not fits(self.ranges[item], INT32):
            # The operation itself must run in 64 bits, whatever its operands came in.
            texts[0] = f"({texts[0]}).to(tl.int64)"
        a, b = texts[0], texts[-1]
        if op in _INFIX:
            symbol, level = _INFIX[op]
            if not fits(self.ranges[item], INT32):
                return f"{a} {symbol} {self.at(args[1], level + 1)}", level
            return self._infix(item)
        if op in (Op.FLOORDIV, Op.MOD):
            return self._divide(item, a, b)
        if op in (Op.MIN, Op.MAX):
            return self._call("tl.minimum" if op is Op.MIN else "tl.maximum", a, b)
        if op in (Op.SHL, Op.SHR):
            return self._shift(item, a, b)
        if op is Op.POW:
            assert isinstance(args[1].value, int)
            return " * ".join([f"({a})"] * args[1].value) if args[1].value else "1", _PRODUCT
        if op is Op.SIGN:
            return self._call("sign", a)
        if op is Op.ABS:
            return self._call("tl.abs", a)
        symbol = {Op.NEG: "-", Op.BITNOT: "~"}[op]
        return f"{symbol}({a})", _UNARY

    def _divide(self, item: Node, a: str, b: str) -> tuple[str, int]:
        dividend, divisor = (self.ranges[arg] for arg in item.args)
        number = item.args[1].value if item.args[1].op is Op.CONST else 0
        if isinstance(number, int) and number > 0 and number & (number - 1) == 0:
            # Rounded down and with the divisor's sign, for negative numbers too.
            if item.op is Op.MOD:
                return f"({a}) & {number - 1}", _AND
            return f"({a}) >> {number.bit_length() - 1}", _SHIFT
        if dividend[0] >= 0 and divisor[0] > 0:
            symbol = "//" if item.op is Op.FLOORDIV else "%"
            return f"({a}) {symbol} ({b})", _PRODUCT
        name = "int_floordiv" if item.op is Op.FLOORDIV else "int_mod"
        varies = [bool(self.deps[arg] & {"q", "kv", "score"}) for arg in item.args]
        if any(varies):
            a, b = (
                text if own or arg.op is Op.CONST else self._call("as_block", text)[0]
                for text, own, arg in zip((a, b), varies, item.args, strict=True)
            )
        return self._call(name, a, b)

    def _shift(self, item: Node, a: str, b: str) -> tuple[str, int]:
        symbol = "<<" if item.op is Op.SHL else ">>"
        amount = self.ranges[item.args[1]]
        wide = not fits(self.ranges[item]) or not fits(self.ranges[item.args[0]])
        top = 63 if wide else 31
        if amount[0] < 0 or amount[1] > top:
            b = f"tl.minimum(tl.maximum({b}, 0), {top})"
        if wide:
            b = (
                f"({b}).to(tl.int64)"
                if item.args[1].op is not Op.CONST
                else f"tl.full([], {b}, tl.int64)"
            )
        return f"({a}) {symbol} ({b})", _SHIFT

    def _small_power(self, item: Node) -> tuple[str, int] | None:
        """Products, roots and reciprocals in place of a general power."""
        base, exponent = item.args
        if exponent.op is not Op.CONST or base.op is Op.CONST:
            return None
        text = self.at(base, _PRODUCT + 1)
        value = exponent.value
        if value in (1.0, 2.0, 3.0):
            self._share(base)
            text = self.at(base, _PRODUCT + 1)
            return " * ".join([text] * int(value)), _PRODUCT
        if value == 0.5:
            return self._call("tl.sqrt", self._value(base))
        if value == -1.0:
            return f"1.0 / {text}", _PRODUCT
        return None

    def _share(self, item: Node) -> None:
        """Give ``item`` a local, since its text is about to be repeated."""
        text, _ = self.texts[item]
        if item.args and not text.isidentifier():
            self.texts[item] = self._local("x", text), _ATOM
            self.depths[item] = 0
