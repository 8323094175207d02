"""Random expressions: every operator, lookups of all kinds, and values that stay small."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .operations import OPERATIONS, PROMOTE, Form, operation
from .prelude import ALIBI, MASKS, SOFTCAP
from .program import (
    Apply,
    Dot,
    Expr,
    Function,
    Given,
    Invoke,
    Kind,
    Layout,
    Literal,
    Load,
    Local,
    Member,
    Name,
    Param,
    Tensor,
    Values,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .program import Sizes

INT, FLOAT, BOOL = Kind.INT, Kind.FLOAT, Kind.BOOL
Q, KV, B, H, HKV = (Name(name, INT) for name in ("q", "kv", "b", "h", "hkv"))
SCORE = Name("score", FLOAT)
SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
_INT_DTYPES = ("int64", "int32", "int32", "int16", "int8", "uint8")
_FLOAT_DTYPES = ("float32", "float32", "float32", "float16", "bfloat16", "float64")
_FAVOURITE = 0.25
_LISTS = 0.3
"""Share of names that are one of the program's favourites."""
_POSITIVE = ("sqrt", "rsqrt", "log", "log2")


def apply(word: str, *args: Expr) -> Apply:
    """The operation of that word on ``args``, ints made floats where it needs floats."""
    kinds = tuple(arg.kind for arg in args)
    numbers = {kind for kind in kinds if kind is not BOOL}
    wide = word == "/" or numbers == {INT, FLOAT}
    wide = wide or not any(x.word == word and x.takes == kinds for x in OPERATIONS)
    if wide:
        args = tuple(as_float(arg) if arg.kind is INT else arg for arg in args)
    return Apply(operation(word, *(arg.kind for arg in args)), args)


def as_float(item: Expr) -> Expr:
    """``item`` where a float is needed."""
    return item if item.kind is FLOAT else Apply(PROMOTE, (item,))


def between(low: Expr, value: Expr, high: Expr) -> Apply:
    """``low <= value < high``."""
    return Apply(operation("<=", *(x.kind for x in (low, value, high)), form=Form.BETWEEN),
                 (low, value, high))  # fmt: skip


@dataclass(slots=True)
class Names:
    """What expressions may name, and what they declared on the way."""

    params: list[Param] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    dims: dict[str, int] = field(default_factory=dict)
    locals: list[Local] = field(default_factory=list)
    arguments: list[Name] = field(default_factory=list)
    scored: set[str] = field(default_factory=set)
    """Locals that read the score."""
    score: bool = False
    """Whether the score may be read here."""
    row: bool = False
    """Whether only ``b`` and ``h`` may be (in a sink)."""


class Expressions:
    """Draws expressions of one program.

    Each program has a few favourite names, so that some programs speak of one name in several
    places (A. Groce, C. Zhang, E. Eide, Y. Chen, J. Regehr, Swarm Testing, ISSTA 2012).
    """

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        self.rng = rng
        self.sizes = sizes
        self.names = Names()
        names = [Q, KV, B, H, HKV, HKV, *(Name(name, INT) for name in (*SIZES, "kv_heads"))]
        self.favourites = rng.sample(names, 3)
        apart = random.Random(repr(rng.getstate()[1][:2]))
        self.lists = apart.random() < _LISTS
        """True if the program may have lists. Nothing is drawn for that: programs of seeds that
        tests name stay as they are."""

    def pick(self, *choices: tuple[int, Callable[[], Expr]]) -> Expr:
        """One of the choices, by their weights."""
        weights = [weight for weight, _ in choices]
        return self.rng.choices([make for _, make in choices], weights)[0]()

    def of(self, kind: Kind, depth: int) -> Expr:
        """An expression of that kind, at most ``depth`` operations deep."""
        return {INT: self.int, FLOAT: self.float, BOOL: self.bool}[kind](depth)

    # Leaves.

    def _known(self, kind: Kind) -> list[Expr]:
        found: list[Expr] = [
            local for local in self.names.locals
            if local.kind is kind and (self.names.score or local.name not in self.names.scored)
        ]  # fmt: skip
        if self.names.row:
            found = []
        return found + [x for x in self.names.arguments if x.kind is kind] * 3

    def position(self) -> Expr:
        """``q`` or ``kv``, or what stands for them in a sink."""
        return self.rng.choice((B, H) if self.names.row else (Q, KV))

    def literal(self) -> Literal:
        """An int, seldom a large one."""
        some = self.rng.random()
        if some < 0.85:
            return Literal(self.rng.choice((0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 16, -1, -2, -3)))
        if some < 0.98:
            return Literal(self.rng.choice((31, 32, 33, 52, 63, 64, 100, -17, 1000, 4096)))
        return Literal(self.rng.choice((2**31 - 1, 2**31, 2**40, -(2**33), 2**62, 2**63 - 1)))

    def number(self) -> Literal:
        """A float."""
        return Literal(self.rng.choice((0.5, 1.5, 0.25, 2.0, 1.0, 3.0, -0.75, 0.1, -1.0, 0.0)))

    def _int_leaf(self) -> Expr:
        known = self._known(INT)
        if known and self.rng.random() < 0.3:
            return self.rng.choice(known)
        heads = (B, H) if self.names.row else (B, H, HKV)
        if self.rng.random() < _FAVOURITE:
            found = self.rng.choice(self.favourites)
            return found if not self.names.row or found not in (Q, KV, HKV) else B
        return self.pick(
            (8, self.position),
            (2, lambda: self.rng.choice(heads)),
            (3, self.literal),
            (2, lambda: Name(self.rng.choice(SIZES), INT)),
            (2, lambda: self.param(INT)),
        )

    def param(self, kind: Kind) -> Name:
        """A param of that kind, one that there is or a new one."""
        known = [p for p in self.names.params if p.kind is kind]
        if known and self.rng.random() < 0.6:
            return Name(self.rng.choice(known).name, kind)
        if len(self.names.params) >= 4:
            return Name(known[0].name, kind) if known else self.param_of(kind)
        return self.param_of(kind)

    def param_of(self, kind: Kind) -> Name:
        """A new param."""
        rng, name = self.rng, f"p{len(self.names.params)}"
        value: bool | int | float = rng.random() < 0.6
        forms = [Given.NUMBER, Given.NUMBER, Given.TENSOR, Given.DEFAULT, Given.BOUND]
        if kind is INT:
            value = rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 11, 17, -1, -4, 40))
        elif kind is FLOAT:
            value = rng.choice((0.5, 1.5, 2.0, 0.25, -0.5, 0.1, 1.0, 3.0))
            forms += [Given.LEARNED] * 3
        self.names.params.append(Param(name, kind, value, rng.choice(forms)))
        return Name(name, kind)

    # Tensors.

    def _dim(self) -> tuple[Expr, int]:
        """A dim of a tensor, and its size."""
        rng, sizes = self.rng, self.sizes.named()
        some = rng.random()
        if some < 0.6:
            name = rng.choice(("batch", "heads", "heads", "kv_heads", "q_len", "kv_len", "kv_len"))
            return Name(name, INT), sizes[name]
        if some < 0.8:
            name = rng.choice("nm")
            size = self.names.dims.setdefault(name, rng.choice((1, 2, 3, 4, 5, 7, 9)))
            return Name(name, INT), size
        if some < 0.9:
            return (found := Literal(rng.choice((1, 2, 3, 6, 8, 16)))), found.value
        factor = rng.choice((2, 3))
        name = rng.choice(("kv_len", "q_len", "heads"))
        twice = apply("*", Literal(factor), Name(name, INT))
        if rng.random() < 0.5:
            return apply("-", twice, Literal(1)), max(0, factor * sizes[name] - 1)
        return twice, factor * sizes[name]

    def tensor(self, kind: Kind) -> Tensor:
        """A tensor of that kind, one that there is or a new one."""
        known = [t for t in self.names.tensors if t.kind is kind and not t.name.startswith("w")]
        if known and (self.rng.random() < 0.5 or len(self.names.tensors) >= 5):
            return self.rng.choice(known)
        rank = self.rng.choice((1, 1, 1, 2, 2, 2, 3, 4))
        dims = [self._dim() for _ in range(rank)]
        for at, (dim, size) in enumerate(dims):
            if size <= 0 and self.sizes.named().get(getattr(dim, "name", ""), 1) != 0:
                dims[at] = Literal(2), 2
        found = Tensor(
            f"t{len(self.names.tensors)}", kind, tuple(d for d, _ in dims), self.values(kind)
        )
        self.names.tensors.append(found)
        return found

    def values(self, kind: Kind) -> Values:
        """Elements of a captured tensor."""
        rng = self.rng
        layout = rng.choice((Layout.PLAIN, Layout.PLAIN, Layout.GUARDED, Layout.GUARDED, *Layout))
        seed = rng.randrange(1 << 20)
        if kind is BOOL:
            return Values("bool", 0, 1, 1, seed, layout)
        if kind is INT:
            dtype = rng.choice(_INT_DTYPES)
            low, high = rng.choice(((0, 3), (0, 3), (0, 1), (0, 9), (-3, 6), (0, 40)))
            return Values(dtype, max(0, low) if dtype == "uint8" else low, high, 1, seed, layout)
        learned = rng.random() < 0.6
        return Values(rng.choice(_FLOAT_DTYPES), -16, 16, 8, seed, layout, learned)

    def _index(self, dim: Expr, depth: int) -> Expr:
        """An index of a dim: one that fits, one that may not, or any."""
        own = {
            "batch": B, "heads": H, "kv_heads": HKV, "q_len": Q, "kv_len": KV,
        }.get(dim.name if isinstance(dim, Name) else "")  # fmt: skip
        if self.names.row and own in (Q, KV, HKV):
            own = None
        return self.pick(
            (6 if own is not None else 0, lambda: own or B),
            (2, self.position),
            (2, lambda: self.rng.choice((B, H) if self.names.row else (B, H, HKV))),
            (1, lambda: apply("-", self.position(), self.position())),
            (1, lambda: apply("+", apply("-", self.position(), self.position()), dim)),
            (1, lambda: apply("%", self.position(), dim)),
            (1, self.literal),
            (2 if depth > 0 else 0, lambda: self.int(depth - 1)),
        )

    def load(self, kind: Kind, depth: int) -> Expr:
        """An element of a tensor of that kind."""
        tensor = self.tensor(kind)
        scored, self.names.score = self.names.score, False
        indices = tuple(self._index(dim, min(depth - 1, 1)) for dim in tensor.dims)
        self.names.score = scored
        return Load(tensor.name, kind, indices)

    def dot(self) -> Expr:
        """A product of rows, chosen by q on one side and by kv on the other, or by neither."""
        rows, indices = [], []
        width = Name(self.rng.choice("rs"), INT)
        self.names.dims.setdefault(width.name, self.rng.choice((1, 2, 3, 5, 8)))
        for position, length in ((Q, "q_len"), (KV, "kv_len")):
            choices = [("batch", B), ("heads", H), ("kv_heads", HKV), (length, position)]
            weights = (0.5, 0.45, 0.4, 0.9)
            used = [c for c, w in zip(choices, weights, strict=True) if self.rng.random() < w]
            if self.rng.random() < 0.08 and used:
                used[0] = used[0][0], self.rng.choice((B, H, HKV))
            values = replace(self.values(FLOAT), low=-8, high=8)
            dims = (*(Name(name, INT) for name, _ in used), width)
            rows.append(Tensor(f"w{len(self.names.tensors)}", FLOAT, dims, values))
            self.names.tensors.append(rows[-1])
            indices.append(tuple(index for _, index in used))
        if self.rng.random() < 0.3:
            rows.reverse()
            indices.reverse()
        left, right = rows
        return Dot(left.name, right.name, len(indices[0]), (*indices[0], *indices[1]))

    def _may_list(self) -> bool:
        return self.lists and not self.names.row and not self.names.arguments

    def member(self) -> Expr:
        """A look for what one position tells in a list that the other one chooses."""
        rng = self.rng
        own, other, length = (Q, KV, "q_len") if rng.random() < 0.85 else (KV, Q, "kv_len")
        choices = [("batch", B), ("heads", H), ("kv_heads", HKV), (length, own)]
        used = [c for c, w in zip(choices, (0.5, 0.3, 0.3, 0.6), strict=True) if rng.random() < w]
        dims = [Name(name, INT) for name, _ in used]
        indices = [index for _, index in used]
        by_row = own not in indices
        if not by_row and rng.random() < 0.3:
            indices[-1] = apply("//", own, Literal(rng.choice((2, 4, 8))))
        if rng.random() < 0.1:
            dims.append(Name("n", INT))
            indices.append(Literal(rng.choice((0, 1, 7))))
            self.names.dims.setdefault("n", rng.choice((1, 2, 3, 5)))
        size = rng.choice((1, 2, 4, 8, 16, 3))
        element = self.pick(
            (6, lambda: apply("//", other, Literal(size))),
            (4, lambda: other),
            (1, lambda: apply("%", other, Literal(size + 1))),
            (1, lambda: apply(">>", other, Literal(rng.choice((0, 1, 3))))),
            (1, lambda: apply("-", other, Literal(size))),
            (1, lambda: apply("min", other, Literal(2 * size))),
            (1, lambda: apply("+", apply("*", other, Literal(3)), H)),
            (1 if by_row else 0, lambda: apply("-", Q, KV)),
        )
        width = Name(rng.choice("yz"), INT)
        self.names.dims.setdefault(width.name, rng.choice((0, 1, 2, 3, 5, 9, 20)))
        low, high = rng.choice(((0, 3), (-2, 9), (-3, 40), (0, 12)))
        dtype = rng.choice([x for x in _INT_DTYPES if x != "uint8" or low >= 0])
        values = replace(self.values(INT), dtype=dtype, low=low, high=high)
        found = Tensor(f"t{len(self.names.tensors)}", INT, (*dims, width), values)
        self.names.tensors.append(found)
        return Member(found.name, (element, *indices), rng.random() < 0.2)

    # Ints.

    def int(self, depth: int) -> Expr:
        """An int."""
        if depth <= 0:
            return self._int_leaf()
        less = depth - 1
        return self.pick(
            (5, self._int_leaf),
            (5, lambda: self.load(INT, less)),
            (8, lambda: self._two(("+", "-", "-", "*"), self.int, less)),
            (6, lambda: apply(self.rng.choice(("//", "%")), self.int(less), self._divisor())),
            (1, lambda: self._two(("//", "%"), self.int, less)),
            (3, lambda: self._two(("min", "max"), self.int, less)),
            (2, lambda: apply("clamp", self.int(less), self.literal(), self._int_leaf())),
            (4, lambda: apply(self.rng.choice(("abs", "sign", "~", "-", "+")), self.int(less))),
            (3, lambda: self._two(("&", "|", "^"), self.int, less)),
            (3, lambda: self._shift(less)),
            (2, lambda: apply("**", self.int(less), Literal(self.rng.choice((0, 1, 2, 2, 3))))),
            (2, lambda: self._choice(INT, less)),
            (2, lambda: apply("int", self.bool(less))),
            (1, lambda: apply("int", self.tame(less))),
            (1, lambda: self._invoke(INT, less)),
        )

    def _two(self, words: tuple[str, ...], make: Callable[[int], Expr], depth: int) -> Expr:
        return apply(self.rng.choice(words), make(depth), make(self.rng.randint(0, depth)))

    def _divisor(self) -> Expr:
        if self.rng.random() < 0.75:
            return Literal(self.rng.choice((2, 2, 3, 4, 5, 8, 16, 7, -2, -3, 1, 0)))
        return self._int_leaf()

    def _shift(self, depth: int) -> Expr:
        amount = Literal(self.rng.choice((0, 1, 1, 2, 3, 3, 5, 12, 31, 51, 63, 64, 70, -1)))
        by = amount if self.rng.random() < 0.7 else self._int_leaf()
        return apply(self.rng.choice(("<<", ">>", ">>")), self.int(depth), by)

    def _choice(self, kind: Kind, depth: int) -> Expr:
        form = Form.TERNARY if self.rng.random() < 0.4 else Form.CALL
        word = "if" if form is Form.TERNARY else "where"
        args = self.bool(depth), self.of(kind, depth), self.of(kind, self.rng.randint(0, depth))
        return Apply(operation(word, BOOL, kind, kind), args)

    def _invoke(self, kind: Kind, depth: int) -> Expr:
        """A call of a function of the program's own, one that there is or a new one."""
        known = [f for f in self.names.functions if f.body.kind is kind]
        if self.names.arguments or self.names.row:
            return self.of(kind, depth)
        if not known or self.rng.random() < 0.4:
            known = [self._function(kind)]
        function = self.rng.choice(known)
        args = tuple(self.of(x.kind, depth) for x in function.parameters)
        return Invoke(function, args)

    def _function(self, kind: Kind) -> Function:
        count = self.rng.choice((0, 1, 1, 2, 2, 3))
        names, rng = self.names, self.rng
        parameters = tuple(
            Name(name, rng.choice((INT, INT, FLOAT, BOOL))) for name in ("x", "y", "z")[:count]
        )
        before = names.locals, names.score
        names.arguments, names.locals, names.score = list(parameters), [], False
        body = self.of(kind, 2)
        names.arguments, (names.locals, names.score) = [], before
        while isinstance(body, Apply) and body.operation is PROMOTE:
            body = Apply(operation("float", INT), body.args)
        found = Function(f"f{len(names.functions)}", parameters, body)
        names.functions.append(found)
        return found

    # Bools.

    def bool(self, depth: int) -> Expr:
        """A bool."""
        known = self._known(BOOL)
        less = depth - 1
        if depth <= 0:
            if known and self.rng.random() < 0.5:
                return self.rng.choice(known)
            return self.pick(
                (8, lambda: self._compare(self._int_leaf(), self._int_leaf())),
                (2, lambda: self.param(BOOL)),
                (1, lambda: Literal(self.rng.random() < 0.5)),
            )
        return self.pick(
            (9, lambda: self._compare(self.int(less), self.int(self.rng.randint(0, less)))),
            (3, lambda: self._compare(self.tame(less), self._threshold())),
            (2, lambda: between(self._int_leaf(), self.int(less), self._int_leaf())),
            (6, lambda: self._two(("and", "or", "and", "or", "&", "|", "^"), self.bool, less)),
            (3, lambda: apply(self.rng.choice(("not", "not", "~")), self.bool(less))),
            (1, lambda: self._two(("==", "!="), self.bool, less)),
            (4, lambda: self.load(BOOL, less)),
            (10 if self._may_list() else 0, self.member),
            (1, lambda: apply("bool", self.int(less))),
            (1, lambda: self._choice(BOOL, less)),
            (3 if not self.names.row else 1, lambda: self._prelude_mask(less)),
            (1, lambda: self._invoke(BOOL, less)),
        )

    def _compare(self, a: Expr, b: Expr) -> Expr:
        words = ("<", "<=", ">", ">=", ">=", "<=", "==", "!=")
        return apply(self.rng.choice(words), a, b)

    def _threshold(self) -> Expr:
        return self.pick((3, self.number), (1, lambda: self.param(FLOAT)), (1, self._int_leaf))

    def _prelude_mask(self, depth: int) -> Expr:
        if self.names.row:
            return self._compare(self._int_leaf(), self.literal())
        function = self.rng.choice(MASKS)
        args = tuple(
            Literal(self.rng.choice((1, 2, 3, 4, 5, 8))) if self.rng.random() < 0.7
            else self.int(min(depth, 1))
            for _ in function.parameters
        )  # fmt: skip
        return Invoke(function, args)

    # Floats.

    def float(self, depth: int) -> Expr:
        """A float, not necessarily a small one."""
        known, less = self._known(FLOAT), depth - 1
        if known and self.rng.random() < 0.25:
            return self.rng.choice(known)
        if depth <= 0:
            return self.pick(
                (3, lambda: as_float(self._int_leaf())),
                (2, self.number),
                (2, lambda: self.param(FLOAT)),
                (2 if self.names.score else 0, lambda: SCORE),
            )
        return self.pick(
            (5, lambda: self.load(FLOAT, less)),
            (3 if self.names.score else 0, lambda: SCORE),
            (2, lambda: self.param(FLOAT)),
            (3, lambda: as_float(self.int(less))),
            (7, lambda: self._two(("+", "-", "*", "*"), self.float, less)),
            (3, lambda: self._ratio(less)),
            (3, lambda: self._two(("min", "max"), self.float, less)),
            (2, lambda: apply("clamp", self.float(less), self.number(), self._threshold())),
            (6, lambda: self._function_of(less)),
            (2, lambda: self._root(less)),
            (2, lambda: apply(self.rng.choice(("abs", "sign", "-", "relu")), self._real(less))),
            (1, lambda: apply(self.rng.choice(("floor", "ceil", "round")), self._real(less))),
            (1, lambda: apply(self.rng.choice(("%", "//")), self._real(less), Literal(1.5))),
            (2, lambda: self._power(less)),
            (3, lambda: self._choice(FLOAT, less)),
            (1, lambda: apply("float", self.bool(less))),
            (1, lambda: self._invoke(FLOAT, less)),
            (1 if self._may_dot() else 0, self.dot),
        )

    def _may_dot(self) -> bool:
        return not (self.names.row or self.names.arguments) and len(self.names.tensors) < 5

    def _real(self, depth: int) -> Expr:
        return as_float(self.float(depth))

    def _ratio(self, depth: int) -> Expr:
        below = self.pick(
            (3, lambda: apply("+", apply("abs", self.float(depth - 1)), Literal(1.0))),
            (2, lambda: apply("max", self._int_leaf(), Literal(self.rng.choice((1, 3))))),
            (2, lambda: Literal(self.rng.choice((2.0, 4.0, 3.0, 8)))),
        )
        return apply("/", self.float(depth), below)

    def _function_of(self, depth: int) -> Expr:
        words = ("sin", "cos", "tanh", "sigmoid", "erf", "gelu", "silu", "softplus", "tanh")
        if self.rng.random() < 0.8:
            return apply(self.rng.choice(words), self._real(depth))
        words = ("exp", "exp2", "expm1", "tan")
        return apply(self.rng.choice(words), self.tame(depth))

    def _root(self, depth: int) -> Expr:
        """A function that has no value everywhere, beside what keeps it from there."""
        word, inner = self.rng.choice(_POSITIVE), self._real(depth)
        if self.rng.random() < 0.5:
            return apply(word, apply("+", apply("abs", inner), Literal(0.5)))
        if self.rng.random() < 0.3:
            return apply("log1p", apply("abs", inner))
        condition = apply(">", inner, Literal(0.25))
        return Apply(operation("where", BOOL, FLOAT, FLOAT),
                     (condition, apply(word, inner), self.number()))  # fmt: skip

    def _power(self, depth: int) -> Expr:
        base = self.tame(depth)
        if self.rng.random() < 0.6:
            return apply("**", base, Literal(self.rng.choice((2, 3, 2.0, 1, 0, 1.0))))
        base = apply("+", apply("abs", base), Literal(0.5))
        exponents = (Literal(0.5), Literal(-1), Literal(1.5))
        by = self.rng.choice(exponents) if self.rng.random() < 0.6 else self.tame(depth - 1)
        return apply("**", base, by)

    def tame(self, depth: int) -> Expr:
        """A float of a few units at most."""
        return self.pick(
            (4, lambda: self.load(FLOAT, depth)),
            (3, lambda: apply(self.rng.choice(("tanh", "sin", "cos", "sigmoid", "erf")),
                              self._real(depth))),
            (3, lambda: apply("*", self.number(), apply("%", self.int(depth), Literal(5)))),
            (2, lambda: apply("clamp", self._real(depth), Literal(-2), Literal(3))),
            (2, lambda: apply("/", apply("-", self.position(), self.position()), Literal(8.0))),
            (2, self.number),
            (2, lambda: self.param(FLOAT)),
            (1 if self.names.score else 0, lambda: SCORE),
            (1 if self._may_dot() else 0, self.dot),
        )  # fmt: skip

    def prelude_score(self) -> Expr:
        """The score with a bias of the prelude, or a score that the prelude limits."""
        if self.rng.choice((ALIBI, SOFTCAP)) is ALIBI:
            return apply("+", SCORE, Invoke(ALIBI, ()))
        above = apply("+", SCORE, Literal(0.5))
        limited, limit = self.rng.choice(((SCORE, 2.0), (above, 5), (SCORE, 20.0)))
        return Invoke(SOFTCAP, (limited, Literal(limit)))
