"""The IR: one frozen, hash-consed node type, and the program made of such nodes.

A node is an operation on the *pair* (query position, key position): it has no shape of its own.
Which of ``b``, ``h``, ``q``, ``kv`` and ``score`` it depends on (:func:`dependencies`) decides the
shape it is computed at. Equal nodes are the same object, so ``is`` compares whole expressions and
every pass may memoise on a node.

Types are strict: both operands of an arithmetic operation have one type (the frontend inserts
``CAST``). Ints are 64-bit two's complement; ``//`` and ``%`` have the meaning of Python, and
give 0 where the divisor is the int 0.
"""

from __future__ import annotations

import enum
import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from attndsl.foundation.caches import memoised
from attndsl.foundation.scalars import number_key

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from attndsl.source import Span

Literal = bool | int | float | str
"""Payload of a node: a constant's value, or the name of a variable, size, param or tensor."""


class DType(enum.Enum):
    """Type of an expression."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"


class Op(enum.Enum):
    """Operations; comments give operand types -> result type (N: all int or all float)."""

    CONST = "const"  # value: the constant
    VAR = "var"  # value in VARS, or TOKEN -> INT
    SIZE = "size"  # value in SIZES, or a dim name that a tensor declaration introduced -> INT
    PARAM = "param"  # value: a name in Program.params -> its dtype
    SCORE = "score"  # the incoming score -> FLOAT
    LOAD = "load"  # value: a name in Program.tensors; args: one INT index a dim -> its dtype
    DOT = "dot"  # value and args: see :func:`contraction` -> FLOAT
    IN = "in"  # value: an INT tensor; args: an INT, one INT index a dim but the last -> BOOL
    ADD = "+"  # N, N -> N
    SUB = "-"  # N, N -> N
    MUL = "*"  # N, N -> N
    NEG = "neg"  # N -> N
    DIV = "/"  # FLOAT, FLOAT -> FLOAT
    FLOORDIV = "//"  # N, N -> N
    MOD = "%"  # N, N -> N, with the divisor's sign
    POW = "**"  # FLOAT, FLOAT -> FLOAT; INT, non-negative INT CONST -> INT
    MIN = "min"  # N, N -> N
    MAX = "max"  # N, N -> N
    ABS = "abs"  # N -> N
    SIGN = "sign"  # N -> N
    BITAND = "&"  # INT, INT -> INT
    BITOR = "|"  # INT, INT -> INT
    BITXOR = "^"  # INT, INT -> INT
    BITNOT = "~"  # INT -> INT
    SHL = "<<"  # INT, INT -> INT; amounts are clamped to 0..63
    SHR = ">>"  # INT, INT -> INT, arithmetic; amounts are clamped to 0..63
    LT = "<"  # N, N -> BOOL
    LE = "<="  # N, N -> BOOL
    EQ = "=="  # same, same -> BOOL
    NE = "!="  # same, same -> BOOL
    AND = "and"  # BOOL, BOOL -> BOOL
    OR = "or"  # BOOL, BOOL -> BOOL
    NOT = "not"  # BOOL -> BOOL
    WHERE = "where"  # BOOL, T, T -> T
    CAST = "cast"  # any -> dtype; to INT truncates towards zero, to BOOL is != 0
    FLOOR = "floor"  # FLOAT -> FLOAT, as all below
    CEIL = "ceil"
    ROUND = "round"  # half to even
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    EXP = "exp"
    EXP2 = "exp2"
    LOG = "log"
    LOG2 = "log2"
    LOG1P = "log1p"
    EXPM1 = "expm1"
    SIN = "sin"
    COS = "cos"
    TAN = "tan"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    SILU = "silu"
    RELU = "relu"
    GELU = "gelu"  # x * (1 + erf(x / sqrt 2)) / 2
    ERF = "erf"
    SOFTPLUS = "softplus"


VARS = ("b", "h", "hkv", "q", "kv")
"""Batch, query head, key-value head, logical query position, logical key position."""

TOKEN = "token"
"""The variable that counts the rows of q of all batch entries. Backends never see it: see
:mod:`attndsl.passes.tokens`."""
TOKENS = "tokens"
"""The size that counts them."""

SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
"""Sizes that every call has."""

LEAVES = frozenset({Op.CONST, Op.VAR, Op.SIZE, Op.PARAM, Op.SCORE})
COMPARISONS = frozenset({Op.LT, Op.LE, Op.EQ, Op.NE})
LOGICAL = frozenset({Op.AND, Op.OR, Op.NOT})
BITWISE = frozenset({Op.BITAND, Op.BITOR, Op.BITXOR, Op.BITNOT, Op.SHL, Op.SHR})
FLOAT_UNARY = frozenset(list(Op)[list(Op).index(Op.FLOOR) :])
NUMERIC = frozenset(
    {Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.FLOORDIV, Op.MOD, Op.MIN, Op.MAX, Op.ABS, Op.SIGN}
)
ARITY = dict.fromkeys(FLOAT_UNARY | {Op.NEG, Op.ABS, Op.SIGN, Op.BITNOT, Op.NOT, Op.CAST}, 1) | {
    Op.WHERE: 3
}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Node:
    """One operation. Made by :func:`node` only, so that equal nodes are identical."""

    op: Op
    dtype: DType
    args: tuple[Node, ...] = ()
    value: Literal | None = None
    span: Span | None = field(default=None, repr=False)
    """Place in the text; not part of a node's identity (the first place wins)."""


@dataclass(frozen=True, slots=True)
class Side:
    """A row of a captured FLOAT tensor: all elements along its last dim."""

    name: str
    indices: tuple[Node, ...]
    """INT, one for each other dim."""


# Interning makes `is` mean equality. The table holds nodes weakly and is invisible otherwise.
_interned: weakref.WeakValueDictionary[tuple[object, ...], Node] = weakref.WeakValueDictionary()
_intern_lock = threading.Lock()


def _begin_anew() -> None:
    """Make the lock anew in a forked process, which lacks the thread that may have held it."""
    global _intern_lock
    _intern_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def node(
    op: Op,
    *args: Node,
    value: Literal | None = None,
    dtype: DType | None = None,
    span: Span | None = None,
) -> Node:
    """The node ``op(args)``, type-checked.

    Args:
        op: The operation.
        *args: Operands, of the types that :class:`Op` states.
        value: Payload of ``CONST``, ``VAR``, ``SIZE``, ``PARAM``, ``LOAD`` and ``DOT``.
        dtype: Result type; needed for ``PARAM``, ``LOAD`` and ``CAST``, derived for the others.
        span: Where it was written.

    Raises:
        TypeError: The operands do not have the types of the operation. (A defect of the caller:
            users' type errors are found by the frontend.)
    """
    return _interned_node(op, args, value, _result_type(op, args, value, dtype), span)


def _interned_node(
    op: Op, args: tuple[Node, ...], value: Literal | None, dtype: DType, span: Span | None
) -> Node:
    key = (op, dtype, args, *number_key(value))
    with _intern_lock:
        found = _interned.get(key)
        if found is None:
            found = _interned[key] = Node(op, dtype, args, value, span)
    return found


def const(value: bool | int | float, span: Span | None = None) -> Node:
    """A constant; its type is the Python value's."""
    return node(Op.CONST, value=value, span=span)


def var(name: str, span: Span | None = None) -> Node:
    """One of :data:`VARS`."""
    return node(Op.VAR, value=name, span=span)


def size(name: str, span: Span | None = None) -> Node:
    """One of :data:`SIZES`, or a declared dim name."""
    return node(Op.SIZE, value=name, span=span)


def param(name: str, dtype: DType, span: Span | None = None) -> Node:
    """A run-time scalar."""
    return node(Op.PARAM, value=name, dtype=dtype, span=span)


def load(name: str, dtype: DType, *indices: Node, span: Span | None = None) -> Node:
    """An element of a captured tensor."""
    return node(Op.LOAD, *indices, value=name, dtype=dtype, span=span)


def contraction(left: Side, right: Side, span: Span | None = None) -> Node:
    """The product of two rows of captured tensors, summed over their last dim.

    Args:
        left: Its indices do not vary with ``kv``.
        right: Its indices do not vary with ``q``.
        span: Where it was written.
    """
    value = ", ".join(f"{side.name}/{len(side.indices)}" for side in (left, right))
    return node(Op.DOT, *left.indices, *right.indices, value=value, span=span)


def member(element: Node, name: str, *indices: Node, span: Span | None = None) -> Node:
    """True where a row of a captured tensor of ints has an element that equals ``element``.

    Args:
        element: An int.
        name: The tensor.
        *indices: The row: one int for each dim but the last.
        span: Where it was written.
    """
    return node(Op.IN, element, *indices, value=name, span=span)


def sides(item: Node) -> tuple[Side, Side]:
    """The two rows of a DOT."""
    (left, count), (right, _) = (part.split("/") for part in str(item.value).split(", "))
    first = int(count)
    return Side(left, item.args[:first]), Side(right, item.args[first:])


def cast(operand: Node, dtype: DType, span: Span | None = None) -> Node:
    """``operand`` as ``dtype``; itself where it has that type."""
    return operand if operand.dtype is dtype else node(Op.CAST, operand, dtype=dtype, span=span)


_OPERANDS = (
    dict.fromkeys(Op, frozenset({DType.INT, DType.FLOAT}))
    | dict.fromkeys(LOGICAL, frozenset({DType.BOOL}))
    | dict.fromkeys(BITWISE, frozenset({DType.INT}))
    | dict.fromkeys(FLOAT_UNARY | {Op.DIV}, frozenset({DType.FLOAT}))
    | dict.fromkeys((Op.EQ, Op.NE), frozenset(DType))
)
"""Types that operations take whose operands are all of one."""


def _result_type(
    op: Op, args: tuple[Node, ...], value: Literal | None, dtype: DType | None
) -> DType:
    if op is Op.CONST:
        return {bool: DType.BOOL, int: DType.INT, float: DType.FLOAT}[type(value)]
    return _type_of(op, tuple([arg.dtype for arg in args]), dtype)


@memoised("types of operations", 1024)
def _type_of(op: Op, types: tuple[DType, ...], dtype: DType | None) -> DType:
    """The result type of an operation, which depends on types alone."""
    if op in (Op.VAR, Op.SIZE):
        return DType.INT
    if op is Op.SCORE:
        return DType.FLOAT
    if op in (Op.DOT, Op.IN):
        if any(t is not DType.INT for t in types):
            raise TypeError(f"{op.name} needs int indices, has {types}")
        return DType.FLOAT if op is Op.DOT else DType.BOOL
    if op in (Op.PARAM, Op.LOAD):
        if dtype is None or any(t is not DType.INT for t in types):
            raise TypeError(f"{op.name} needs a dtype and int indices, has {types}")
        return dtype
    if len(types) != ARITY.get(op, 2):
        raise TypeError(f"{op.name} takes {ARITY.get(op, 2)} operands, has {len(types)}")
    if op is Op.CAST:
        if dtype is None:
            raise TypeError("CAST needs a dtype")
        return dtype
    if op is Op.WHERE:
        if types[0] is not DType.BOOL or types[1] is not types[2]:
            raise TypeError(f"WHERE of {types}")
        return types[1]
    if len(set(types)) != 1 or types[0] not in _OPERANDS[op]:
        raise TypeError(f"{op.name} of {tuple(t.value for t in types)}")
    return DType.BOOL if op in COMPARISONS else types[0]


SCORE = node(Op.SCORE)
"""The incoming score: ``scale * (q . k)`` in a program's score, the final score in its weights."""


def toposort(*roots: Node, known: Container[Node] = ()) -> list[Node]:
    """All nodes below ``roots``, each once, operands first; iterative, so depth is no limit.

    Args:
        *roots: Where to begin.
        known: Nodes to leave out, with what only they are made of.
    """
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, Iterator[Node]]] = []
    for root in roots:
        if root in seen or root in known:
            continue
        seen.add(root)
        stack.append((root, iter(root.args)))
        while stack:
            current, remaining = stack[-1]
            for arg in remaining:
                if arg not in seen and arg not in known:
                    seen.add(arg)
                    stack.append((arg, iter(arg.args)))
                    break
            else:
                order.append(current)
                stack.pop()
    return order


def substitute(root: Node, replacements: Mapping[Node, Node]) -> Node:
    """``root`` with nodes replaced; replacements are not searched again."""
    return substitute_on(root, dict(replacements))


def substitute_on(root: Node, done: dict[Node, Node]) -> Node:
    """Replace nodes as :func:`substitute` does; ``done`` has the replacements, and gets results.

    So the next call with it goes over nodes that are new to it only.
    """
    for current in toposort(root, known=done):
        args = tuple(done[arg] for arg in current.args)
        done[current] = current if args == current.args else rebuild(current, args)
    return done[root]


def rebuild(original: Node, args: tuple[Node, ...]) -> Node:
    """``original`` with other operands of the same types.

    Raises:
        TypeError: The types are others. (A defect of the caller.)
    """
    if [arg.dtype for arg in args] != [arg.dtype for arg in original.args]:
        raise TypeError(f"{original.op.name} of other types than before")
    return _interned_node(original.op, args, original.value, original.dtype, original.span)


_VARIES = {"hkv": frozenset({"h"}), TOKEN: frozenset({"b", "q"})}
"""Variables that these names vary with; every other name varies with itself."""


def dependencies(*roots: Node) -> dict[Node, frozenset[str]]:
    """Per node below ``roots``: which of ``b``, ``h``, ``q``, ``kv``, ``score`` it varies with.

    A DOT counts as one with the score: like it, it is made pair by pair, of products of rows.
    """
    found: dict[Node, frozenset[str]] = {}
    for item in toposort(*roots):
        if item.op is Op.SCORE:
            found[item] = frozenset({"score"})
        elif item.op is Op.VAR:
            found[item] = _VARIES.get(str(item.value)) or frozenset({str(item.value)})
        else:
            own = {"score"} if item.op is Op.DOT else ()
            found[item] = frozenset(own).union(*(found[arg] for arg in item.args))
    return found


def bounds_keys(mask: Node | None) -> bool:
    """Tell whether a condition of ``mask`` compares ``kv`` with ints that something else looks up.

    Such are ``kv < lengths[b]`` and ``first[q] <= kv``: bounds of sequences that lie in a row of
    keys.
    """
    conditions = [] if mask is None else [mask]
    while conditions:
        item = conditions.pop()
        if item.op is Op.AND:
            conditions += item.args
        elif item.op in (Op.LT, Op.LE) and item.args[0].dtype is DType.INT:
            varies = dependencies(item)
            loads = [each for each in varies if each.op is Op.LOAD]
            if loads and "kv" in varies[item] and all("kv" not in varies[each] for each in loads):
                return True
    return False


def mentions(*roots: Node, name: str) -> frozenset[Node]:
    """The nodes below ``roots`` that are, or are made of, the variable ``name`` of :data:`VARS`."""
    found: set[Node] = set()
    for item in toposort(*roots):
        if (item.op is Op.VAR and item.value == name) or not found.isdisjoint(item.args):
            found.add(item)
    return frozenset(found)


def reads_score(root: Node | None) -> bool:
    """Return True if there is an expression and it varies with the incoming score."""
    return root is not None and "score" in dependencies(root)[root]


def leaf_names(root: Node | None) -> frozenset[str]:
    """Names of the tensors and params that an expression mentions; none where there is none."""
    found = () if root is None else toposort(root)
    names = {str(item.value) for item in found if item.op in (Op.LOAD, Op.PARAM, Op.IN)}
    return frozenset(names).union(
        side.name for item in found if item.op is Op.DOT for side in sides(item)
    )


@dataclass(frozen=True, slots=True)
class ParamDecl:
    """A run-time scalar. ``default`` is None where each call must give a value."""

    name: str
    dtype: DType
    default: bool | int | float | None = field(default=None, compare=False)
    span: Span | None = field(default=None, compare=False, repr=False)
    is_position: bool = False
    """True if values are lengths or positions: ints below 2**30 in size."""
    optional: bool = field(default=False, compare=False)
    """True if calls may leave it out. They are calls of another program then, without it."""
    default_key: object = field(init=False, repr=False)
    """The key under which declarations of equal defaults meet."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "default_key", number_key(self.default))


@dataclass(frozen=True, slots=True)
class TensorDecl:
    """A captured tensor; ``dims`` are INT nodes over sizes, params and constants."""

    name: str
    dtype: DType
    dims: tuple[Node, ...]
    span: Span | None = field(default=None, compare=False, repr=False)
    is_position: bool = False
    """True if elements are lengths or positions: ints below 2**30 in size."""
    is_padded: bool = False
    """True if no index of a lookup leaves it, even of the rows and keys that a tile has behind
    those of a call. No program that was written has such tensors."""
    optional: bool = field(default=False, compare=False)
    """True if calls may leave it out; see :class:`ParamDecl`."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that replaces the score."""

    value: Node
    """FLOAT, over the raw score: the lines before are part of it."""
    span: Span | None = field(default=None, compare=False, repr=False)


class Entries(NamedTuple):
    """Names of tensors with a number for each batch entry, in programs of parts, where any are."""

    starts: str | None
    """Tensor of the position of each entry's first query."""
    lengths: str | None
    """Tensor of each entry's number of keys."""


NO_ENTRIES = Entries(None, None)


@dataclass(frozen=True, slots=True)
class Program:
    """A checked program. Bound params are folded in already; all functions are inlined."""

    score: Node
    """FLOAT, over the raw score ``SCORE``."""
    mask: Node | None = None
    """BOOL: whether the pair takes part; None where all do. May depend on ``SCORE`` (raw)."""
    sink: Node | None = None
    """FLOAT, of ``b`` and ``h``: a logit added to the softmax denominator of each row."""
    weights: Node | None = None
    """FLOAT, over the *final* score ``SCORE``: it replaces the softmax; None for softmax."""
    dropout: Node | None = None
    """FLOAT: probability that a weight is dropped (kept ones are divided by 1 - p)."""
    params: tuple[ParamDecl, ...] = ()
    tensors: tuple[TensorDecl, ...] = ()
    exact: bool = False
    """True if functions keep their exact forms where hardware has faster ones."""
    lines: tuple[Line, ...] = ()
    """All score lines in their order, until masks are split from the score; the last one's value is
    ``score``."""
    weights_span: Span | None = field(default=None, compare=False, repr=False)
    """Place of ``weights`` in the text."""
    by_token: bool = False
    """True if it was written with ``token`` or ``tokens``. Their expressions in a call that is no
    part stand in their place: see :mod:`attndsl.passes.tokens`."""
    entries: Entries = NO_ENTRIES
    products: tuple[Node, ...] = field(init=False, compare=False, repr=False)
    """All ``DOT``, found once: graphs of torch.compile guard each node that a trace meets."""
    lists: tuple[Node, ...] = field(init=False, compare=False, repr=False)
    """All ``IN``, found once, operands first."""
    bounded: bool = field(init=False, compare=False, repr=False)
    """True if tensors bound which keys a row sees, as :func:`bounds_keys` says, found once. What is
    not finite then stays with the pairs that take part."""

    def __post_init__(self) -> None:
        items = toposort(*self.roots())
        for name, op in (("products", Op.DOT), ("lists", Op.IN)):
            object.__setattr__(self, name, tuple(item for item in items if item.op is op))
        object.__setattr__(self, "bounded", bounds_keys(self.mask))

    def captures(self) -> tuple[ParamDecl | TensorDecl, ...]:
        """All that calls give it: params, then tensors."""
        return (*self.params, *self.tensors)

    def roots(self) -> tuple[Node, ...]:
        """The expressions present, in a fixed order."""
        parts = (self.score, self.mask, self.sink, self.weights, self.dropout)
        return tuple(part for part in parts if part is not None)

    def dim_names(self) -> tuple[str, ...]:
        """Names of sizes that tensors' declarations introduce, in their order.

        An expression may mention the size of a tensor that the program has no longer.
        """
        names: dict[str, None] = {}
        dims = (dim for tensor in self.tensors for dim in tensor.dims)
        for item in toposort(*dims, *self.roots()):
            if item.op is Op.SIZE and item.value not in SIZES:
                names[str(item.value)] = None
        return tuple(names)
