"""IR expressions as Triton source: one local a line for shared values, the rest inline.

The text reads ``head``, ``sizes`` and ``given``, the parts of the scope (:mod:`..device.records`).
It is independent of the tile's orientation: what records hold are scalars, ``q`` and ``kv``
broadcast against each other (one is a column, the other a row), ``score`` has the shape of the
tile. Floats are fp32; ints are 32 bits where :mod:`attndsl.passes.int_ranges` proves that exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attndsl.ir import COMPARISONS, SIZES, DType, Node, Op, dependencies, mentions, toposort, var
from attndsl.passes.index_bounds import stays_inside
from attndsl.passes.int_ranges import INT32, fits, ranges
from attndsl.passes.trig_ranges import small_angles

from ..fast_math import FORMS, fast_nodes
from .leaf_names import made_field
from .operand_kinds import (
    AND,
    ATOM,
    COMPARE,
    INFIX,
    PRODUCT,
    SHIFT,
    SUM,
    UNARY,
    Operand,
    OperandKind,
    has_fraction,
    is_small_power,
    known_value,
    number,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.passes.evaluate import Value

    from .leaf_names import CaptureFacts, LeafNames

_POSITIONS = ("q", "kv")
_SHIFTS = {"$q_offset": "shift.q", "$kv_offset": "shift.kv"}
_VARY_BY_PAIR = frozenset({"q", "kv"})
_LEAST_BLOCK = 32
"""Keys of a block from which on each row of a tile looks up a block's element once."""
_MAX_INLINE = 6
"""Operators that one line may nest before a local is introduced."""

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
_OF_SMALL_ANGLES = {Op.SIN: "sin_cody_waite", Op.COS: "cos_cody_waite", Op.TAN: "tan_cody_waite"}
_FLOAT_TWO = {Op.FLOORDIV: "float_floordiv", Op.MOD: "float_mod"}


@dataclass(frozen=True, slots=True)
class Printed:
    """Lines that define locals, and one expression text a root."""

    lines: tuple[str, ...]
    results: tuple[str, ...]
    terms: tuple[str, ...]
    """The results as terms of a sum."""
    values: tuple[str, ...]
    """The results as Triton values, which Python numbers are not."""
    helpers: frozenset[str]
    """Library functions used."""


def print_expressions(roots: tuple[Node, ...], names: LeafNames) -> Printed:
    """``roots`` as Triton source over the names of the kernel templates."""
    printer = Printer(roots, names)
    return Printed(
        tuple(printer.lines),
        tuple(printer.operands[root].text for root in roots),
        tuple(printer.at(root, SUM) for root in roots),
        tuple(printer.value(root) for root in roots),
        frozenset(printer.helpers),
    )


def element_offset(
    indices: Sequence[str | None], stride: str, name: str, wide: bool, unit_dims: frozenset[int]
) -> str:
    """Offset of an element of ``name``, given its index texts, in ``given.{stride}{n}_{name}``.

    Dims without a text are left out.
    """
    terms = []
    for dim, index in enumerate(indices):
        if index is None:
            continue
        factor = f"{index}.to(tl.int64)" if wide else index
        terms.append(factor if dim in unit_dims else f"{factor} * given.{stride}{dim}_{name}")
    return " + ".join(terms) if terms else "0"


def _is_name(text: str) -> bool:
    """Return True if ``text`` is the name of a local or of a record's field."""
    return text.replace(".", "").isidentifier()


class Printer:
    """Prints nodes in topological order.

    Bools are blocks, but where ``names.scalar``: Triton spreads no bool scalar over a tile. An int
    has 64 bits wherever its range does not fit 32.
    """

    def __init__(self, roots: tuple[Node, ...], names: LeafNames) -> None:
        self.names = names
        self.lines: list[str] = []
        self.helpers: set[str] = set()
        self.deps = dependencies(*roots)
        self.ranges = ranges(roots, names.int_bits, names.from_zero)
        self.small_angles = small_angles(roots, names.int_bits, names.from_zero, names.reach)
        self.forms = FORMS[names.forms]
        self.fast = fast_nodes(roots) if self.forms else frozenset()
        self.operands: dict[Node, Operand] = {}
        self.depths: dict[Node, int] = {}
        self._known: dict[Node, Value] = {}
        self._own: set[str] = set()
        self._shape = "[]" if names.scalar else "[1, 1]"
        if not names.scalar:
            self._spread_tile_params(roots)
            if names.packed_heads:
                for item in mentions(*roots, name="h"):
                    self.deps[item] |= {"q"}
        order = toposort(*roots)
        for item in order:
            value = known_value(item, names.head_dim, self._known)
            if value is not None:
                self._known[item] = value
        uses: dict[Node, int] = {}
        for item in order:
            for arg in item.args:
                uses[arg] = uses.get(arg, 0) + 1
        for item in order:
            self._print(item, uses.get(item, 0))

    def _print(self, item: Node, uses: int) -> None:
        if item in self._known:
            self.operands[item], self.depths[item] = number(self._known[item], self._shape), 1
            return
        found = self._operand(item)
        depth = 1 + max((self.depths[arg] for arg in item.args), default=0)
        own = self.names.locals.get(item) if item.args else None
        if item.op is Op.LOAD or own or (item.args and (uses > 1 or depth > _MAX_INLINE)):
            stem = f"{item.value}_" if item.op is Op.LOAD else "x"
            found, depth = replace(found, text=self._local(stem, found.text, own), level=ATOM), 0
        self.operands[item] = found
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

    def factor(self, item: Node) -> str:
        """Text of ``item`` as a factor of a product."""
        return self.at(item, PRODUCT + 1)

    def at(self, item: Node, level: int) -> str:
        """Text of ``item`` as an operand that binds at least as tightly as ``level``."""
        own = self.operands[item]
        return own.text if own.level >= level else f"({own.text})"

    def value(self, item: Node) -> str:
        """Text of ``item`` as a Triton value, where a Python number will not do."""
        own = self.operands[item]
        if own.kind is OperandKind.NUMBER:
            kind = "float32" if item.dtype is DType.FLOAT else f"int{own.bits}"
            return f"tl.full({self._shape}, {own.text}, tl.{kind})"
        return own.text

    def _text(self, item: Node) -> str:
        """Text of ``item`` as an argument: a Python number takes the type of what it meets."""
        return self.operands[item].text

    def _is_number(self, item: Node) -> bool:
        return self.operands[item].kind is OperandKind.NUMBER

    def _block(self, item: Node) -> str:
        """Text of ``item`` as an argument that has the dims of a tile, or is a Python number."""
        if self.names.scalar or self.operands[item].kind is not OperandKind.SCALAR:
            return self._text(item)
        return self._call("as_block", self._text(item)).text

    def _call(
        self, name: str, *args: str, kind: OperandKind = OperandKind.BLOCK, bits: int = 32
    ) -> Operand:
        if not name.startswith("tl."):
            self.helpers.add(name)
        return Operand(f"{name}({', '.join(args)})", ATOM, kind, bits)

    def _kind(self, item: Node) -> OperandKind:
        """Kind of an operation's result: the highest of its operands, and at least SCALAR."""
        return max(OperandKind.SCALAR, *(self.operands[arg].kind for arg in item.args))

    def _bits(self, item: Node) -> int:
        """Width of an operation's result: of its operands, or 64 where its values need them."""
        ints = (self.operands[arg].bits for arg in item.args if arg.dtype is DType.INT)
        return max(64 if not fits(self.ranges[item]) else 32, *ints)

    def _operand(self, item: Node) -> Operand:
        if not item.args:
            return self._leaf(item)
        if item.op is Op.LOAD:
            return self._load(item)
        if item.op is Op.WHERE:
            texts = map(self._text, item.args)
            bits = self._bits(item) if item.dtype is DType.INT else 32
            return self._call("tl.where", *texts, kind=self._kind(item), bits=bits)
        if item.op is Op.CAST:
            return self._cast(item)
        if item.op is Op.NOT:
            return Operand(f"~{self.at(item.args[0], UNARY)}", UNARY, self._kind(item))
        if item.dtype is DType.INT:
            return self._integer(item)
        if item.op in INFIX:
            return self._infix(item)
        return self._float(item)

    def _leaf(self, item: Node) -> Operand:
        varies = bool(self.deps[item] & {"q", "kv", "score"})
        kind = OperandKind.BLOCK if varies and not self.names.scalar else OperandKind.SCALAR
        name = str(item.value)
        if item.op is Op.VAR:
            return Operand(name if name in _POSITIONS else f"head.{name}", ATOM, kind)
        if item.op is Op.SIZE:
            return Operand(f"sizes.{name}" if name in SIZES else f"given.n_{name}", ATOM, kind)
        if item.op is Op.PARAM:
            if item.dtype is DType.BOOL and not self.names.scalar:
                kind = OperandKind.BLOCK
            bits = 32 if item.dtype is not DType.INT or fits(self.ranges[item]) else 64
            text = _SHIFTS.get(name) or (name[1:] if name.startswith("$") else f"p_{name}")
            return Operand(text, ATOM, kind, bits)
        return self._load(item) if item.op is Op.LOAD else Operand("score", ATOM, kind)

    def _float(self, item: Node) -> Operand:
        """A function of floats."""
        op, args, kind = item.op, item.args, self._kind(item)
        if op is Op.NEG:
            return Operand(f"-{self.at(args[0], UNARY)}", UNARY, kind)
        if op is Op.ABS:
            return self._call("tl.abs", self._text(args[0]), kind=kind)
        if op is Op.SIGN:
            return self._call("sign", self._text(args[0]), kind=kind)
        if op in (Op.MIN, Op.MAX):
            name = "tl.minimum" if op is Op.MIN else "tl.maximum"
            texts = (*map(self._text, args), "propagate_nan=tl.PropagateNan.ALL")
            return self._call(name, *texts, kind=kind)
        if op is Op.POW and (chain := self._small_power(item)) is not None:
            return chain
        if op is Op.POW:
            # Functions of Triton's own take no Python numbers.
            blocks = (self.value(x) if self._is_number(x) else self._block(x) for x in args)
            return self._call("power", *blocks)
        if op in _FLOAT_TWO:
            return self._call(_FLOAT_TWO[op], *map(self._block, args))
        if item in self.small_angles:
            name = _OF_SMALL_ANGLES[op]
        else:
            name = self.forms[op].function if item in self.fast else _CALLS[op]
        return self._call(name, self._text(args[0]), kind=kind)

    def _infix(self, item: Node) -> Operand:
        symbol, level = INFIX[item.op]
        left, right = item.args
        # Comparisons do not chain here, and the others associate to the left.
        first = self.at(left, level + 1 if level == COMPARE else level)
        second, kind = self.at(right, level + 1), self._kind(item)
        wide = self._wide_side(item)
        if wide is left:
            first = self._call("saturated", self._text(left)).text
        elif wide is not None:
            second = self._call("saturated", self._text(right)).text
        if item.op in COMPARISONS and kind is not OperandKind.BLOCK:
            kind = OperandKind.SCALAR if self.names.scalar else OperandKind.BLOCK
            if not self.names.scalar and self._is_number(left):
                second = self._block(right)
            elif not self.names.scalar:
                first = self._block(left)
        return Operand(f"{first} {symbol} {second}", level, kind)

    def _wide_side(self, item: Node) -> Node | None:
        """The operand of a comparison that alone would have all pairs compare in 64 bits.

        It is the same for a row, a column or more. Saturated to 32 bits it compares alike with
        the other operand, which does not reach the ends of these: see M52 in docs/dev/measured.md.
        """
        if item.op not in COMPARISONS or self.names.scalar or not self.deps[item] >= _VARY_BY_PAIR:
            return None
        for wide, narrow in (item.args, item.args[::-1]):
            if (
                wide.dtype is narrow.dtype is DType.INT and not self._is_number(wide)
                and self.operands[wide].bits == 64 and self.operands[narrow].bits == 32
                and not self.deps[wide] >= _VARY_BY_PAIR
                and fits(self.ranges[narrow], (INT32[0] + 1, INT32[1] - 1))
            ):  # fmt: skip
                return wide
        return None

    def _cast(self, item: Node) -> Operand:
        operand = item.args[0]
        if item.dtype is DType.BOOL:
            kind = OperandKind.SCALAR if self.names.scalar else OperandKind.BLOCK
            return Operand(f"{self._block(operand)} != 0", COMPARE, kind)
        kind = self._kind(item)
        if item.dtype is DType.FLOAT:
            return Operand(f"{self._converted(operand)}.to(tl.float32)", ATOM, kind)
        bits = 32 if operand.dtype is DType.BOOL else 64
        return Operand(f"{self._converted(operand)}.to(tl.int{bits})", ATOM, kind, bits)

    def _wide(self, item: Node) -> str:
        """Text of an int that is no Python number, in 64 bits."""
        own = self.operands[item]
        return own.text if own.bits == 64 else f"({own.text}).to(tl.int64)"

    def _converted(self, item: Node) -> str:
        """Text of what ``.to`` may follow."""
        return (
            self.value(item)
            if self.operands[item].kind is OperandKind.NUMBER
            else self.at(item, ATOM)
        )

    def indices(
        self, load: Node, but: int = -1, unit_dims: frozenset[int] = frozenset()
    ) -> list[str | None]:
        """Index texts of ``load``: locals, clamped into the tensor where they might leave it.

        None along dim ``but``; maybe sums along ``unit_dims``, which nothing is to follow.
        """
        capture = self.names.captures[str(load.value)]
        texts: list[str | None] = []
        for dim, arg in enumerate(load.args):
            if dim == but:
                texts.append(None)
                continue
            # Where no index has the dims of a tile, the constant gives them to what is read.
            plain = self._is_number(arg) and self._kind(load) is OperandKind.BLOCK
            if capture.is_padded:
                # Steps from one address to the next: each row of a tile keeps its own, and fewer
                # registers spill than of sums (docs/dev/kernels.md).
                texts.append(self.at(arg, SUM if dim in unit_dims else ATOM))
            elif self._is_inside(load, dim, capture):
                texts.append(
                    self._text(arg) if plain and not capture.wide else self._converted(arg)
                )
            else:
                index = self._text(arg) if plain else self.value(arg)
                text = f"tl.minimum(tl.maximum({index}, 0), given.size{dim}_{capture.name} - 1)"
                if not capture.wide and not fits(self.ranges[arg]):
                    text += ".to(tl.int32)"
                texts.append(self._local("i", text))
        return texts

    def _is_inside(self, load: Node, dim: int, capture: CaptureFacts) -> bool:
        """Return True if no value of an index of ``load`` that is read leaves the tensor."""
        arg = load.args[dim]
        if stays_inside(arg, capture.dims[dim], self.ranges[arg]):
            return True
        # A tile has rows that are none of the call's; lookups of pairs alone leave them out.
        return (
            bool(capture.exact)
            and self._is_guarded(load)
            and arg.op is Op.VAR
            and arg.value == capture.exact[dim]
        )

    def _is_guarded(self, load: Node) -> bool:
        """Return True if ``load`` reads nothing for dead pairs."""
        return {"q", "kv"} <= self.deps[load] or "score" in self.deps[load]

    def _local(self, stem: str, text: str, own: str | None = None) -> str:
        name = own if own and own not in self._own else f"{stem}{len(self.lines)}"
        self._own.add(name)
        self.lines.append(f"{name} = {text}")
        return name

    def _load(self, item: Node) -> Operand:
        capture = self.names.captures[str(item.value)]
        if capture.name in self.names.made:
            return Operand(f"given.{made_field(capture.name)}", ATOM, OperandKind.SCALAR)
        guarded = self._is_guarded(item)
        if (place := self._block_of_keys(item)) is not None:
            text = self._load_of_blocks(item, *place)
        else:
            wide, unit_dims = capture.wide, capture.unit_dims
            indices = self.indices(item, unit_dims=frozenset() if wide else unit_dims)
            offset = element_offset(indices, "stride", capture.name, wide, unit_dims)
            # Clamped indices keep all other pairs inside the tensor, and a margin those of a tile.
            guard = ", mask=live, other=0" if guarded and not capture.is_padded else ""
            text = f"tl.load(given.t_{capture.name} + {offset}{guard})"
        kind = OperandKind.BLOCK if guarded else OperandKind.SCALAR
        if item.args:
            kind = max(kind, self._kind(item))
        if capture.dtype is DType.FLOAT:
            return Operand(f"{text}.to(tl.float32)", ATOM, kind)
        if capture.dtype is DType.BOOL:
            block = text if self.names.scalar else self._call("as_block", text).text
            kind = OperandKind.SCALAR if self.names.scalar else OperandKind.BLOCK
            return Operand(f"{block} != 0", COMPARE, kind)
        text = f"{text}.to(tl.int32)" if capture.bits < 32 else text
        return Operand(text, ATOM, kind, max(32, capture.bits))

    def _block_of_keys(self, item: Node) -> tuple[int, int] | None:
        """The dim along which ``item`` looks up blocks of keys, and the keys of a block."""
        dims = [dim for dim, arg in enumerate(item.args) if "kv" in self.deps[arg]]
        if self.names.first_key is None or len(dims) != 1 or not self._is_guarded(item):
            return None
        index = item.args[dims[0]]
        if index.op not in (Op.FLOORDIV, Op.SHR) or "score" in self.deps[item]:
            return None
        (of, by), size = index.args, 0
        if of is var("kv") and by.op is Op.CONST and isinstance(by.value, int):
            size = 1 << min(by.value, 31) if index.op is Op.SHR else by.value
        return (dims[0], size) if size >= _LEAST_BLOCK and size & (size - 1) == 0 else None

    def _load_of_blocks(self, item: Node, dim: int, size: int) -> str:
        """Text of what ``item`` looks up: for each row of a tile once a block of keys."""
        capture, first_key = self.names.captures[str(item.value)], self.names.first_key
        assert first_key is not None
        name, unit_dims = capture.name, capture.unit_dims
        offset = element_offset(self.indices(item, dim), "stride", name, capture.wide, unit_dims)
        step = "1" if dim in unit_dims else f"given.stride{dim}_{name}"
        row, count = f"given.t_{name} + {offset}", f"given.size{dim}_{name}"
        return self._call("load_of_blocks", row, "kv", first_key, count, step, str(size)).text

    def _integer(self, item: Node) -> Operand:
        op, args, kind, bits = item.op, item.args, self._kind(item), self._bits(item)
        if op in (Op.SHL, Op.SHR):
            return self._shift(item)
        if op is Op.POW:
            return self._whole_power(item)
        # One operand of 64 bits makes the operation one of 64 bits.
        widened = None
        if all(self.operands[arg].bits < bits for arg in args):
            widened = next(arg for arg in args if not self._is_number(arg))
        if op in INFIX:
            symbol, level = INFIX[op]
            left, right = (
                self._wide(arg) if arg is widened else self.at(arg, own)
                for arg, own in zip(args, (level, level + 1), strict=True)
            )
            return Operand(f"{left} {symbol} {right}", level, kind, bits)
        texts = [self._wide(arg) if arg is widened else self._text(arg) for arg in args]
        if op in (Op.FLOORDIV, Op.MOD):
            return self._divide(item, texts[0], texts[1], bits)
        if op in (Op.MIN, Op.MAX):
            name = "tl.minimum" if op is Op.MIN else "tl.maximum"
            return self._call(name, *texts, kind=kind, bits=bits)
        if op in (Op.ABS, Op.SIGN):
            name = "tl.abs" if op is Op.ABS else "sign"
            return self._call(name, *texts, kind=kind, bits=bits)
        symbol = {Op.NEG: "-", Op.BITNOT: "~"}[op]
        return Operand(f"{symbol}({texts[0]})", UNARY, kind, bits)

    def _divide(self, item: Node, a: str, b: str, bits: int) -> Operand:
        dividend, divisor = (self.ranges[arg] for arg in item.args)
        kind = self._kind(item)
        by = self._known.get(item.args[1], 0)
        if isinstance(by, int) and by > 0 and by & (by - 1) == 0:
            # Rounded down and with the divisor's sign, for negative numbers too.
            if item.op is Op.MOD:
                return Operand(f"({a}) & {by - 1}", AND, kind, bits)
            return Operand(f"({a}) >> {by.bit_length() - 1}", SHIFT, kind, bits)
        if dividend[0] >= 0 and divisor[0] > 0:
            symbol = "//" if item.op is Op.FLOORDIV else "%"
            return Operand(f"({a}) {symbol} ({b})", PRODUCT, kind, bits)
        # Of 64 bits it is a subroutine on GPUs: see M40 in docs/dev/measured.md.
        name = "int_floordiv" if item.op is Op.FLOORDIV else "int_mod"
        if kind is OperandKind.BLOCK:
            a, b = (
                self._call("as_block", text).text
                if self.operands[arg].kind is OperandKind.SCALAR and not self.names.scalar
                else text
                for text, arg in zip((a, b), item.args, strict=True)
            )
        return self._call(name, a, b, kind=kind, bits=bits)

    def _shift(self, item: Node) -> Operand:
        value, amount = item.args
        symbol = "<<" if item.op is Op.SHL else ">>"
        wide = not fits(self.ranges[item]) or not fits(self.ranges[value])
        top = 63 if wide else 31
        low, high = self.ranges[amount]
        known = self._known.get(amount)
        if known is not None:
            by = str(max(0, min(int(known), top)))
        else:
            by = self._text(amount)
            if low < 0 or high > top:
                by = f"tl.minimum(tl.maximum({by}, 0), {top})"
            by = f"({by}).to(tl.int64)" if wide and self.operands[amount].bits < 64 else by
            by = f"({by})"
        # Of two operands one of 64 bits will do.
        plain = not wide or self._is_number(value)
        text = f"({self._text(value) if plain else self._wide(value)}) {symbol} {by}"
        bits = 64 if wide else max(self.operands[arg].bits for arg in item.args)
        return Operand(text, SHIFT, self._kind(item), bits)

    def _whole_power(self, item: Node) -> Operand:
        base, exponent = item.args[0], self._known[item.args[1]]
        assert isinstance(exponent, int)
        bits = self._bits(item)
        text = self._text(base) if bits < 64 else self._wide(base)
        return replace(self._powers(item, text, exponent), bits=bits)

    def _powers(self, item: Node, square: str, exponent: int) -> Operand:
        """A power, 1 or more, by squaring: D. Knuth, The Art of Computer Programming, 4.6.3."""
        if not _is_name(square):
            square = self._local("x", square)
        factors = []
        while True:
            if exponent & 1:
                factors.append(square)
            exponent >>= 1
            if not exponent:
                break
            square = self._local("x", f"{square} * {square}")
        level = PRODUCT if len(factors) > 1 else ATOM
        return Operand(" * ".join(factors), level, self._kind(item))

    def _small_power(self, item: Node) -> Operand | None:
        """Products, roots and reciprocals in place of a general power."""
        base = item.args[0]
        if base in self._known:
            return None
        kind, value = self._kind(item), self._known.get(item.args[1])
        if value in (1.0, 2.0, 3.0):
            assert isinstance(value, float)
            self._share(base)
            return Operand(" * ".join([self.factor(base)] * int(value)), PRODUCT, kind)
        if value == 0.5:
            return self._call("tl.sqrt", self._text(base), kind=kind)
        if value == -1.0:
            return Operand(f"1.0 / {self.factor(base)}", PRODUCT, kind)
        if isinstance(value, float) and is_small_power(value):
            found = self._powers(item, self._text(base), int(abs(value)))
            return found if value > 0 else Operand(f"1.0 / ({found.text})", PRODUCT, kind)
        if isinstance(value, float) and has_fraction(value):
            return self._call("fractional_power", self._block(base), self._block(item.args[1]))
        return None

    def _share(self, item: Node) -> None:
        """Give ``item`` a local, since its text is about to be repeated."""
        own = self.operands[item]
        if item.args and not _is_name(own.text):
            self.operands[item] = replace(own, text=self._local("x", own.text), level=ATOM)
            self.depths[item] = 0
