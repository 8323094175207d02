"""A program and one call of it, as records: what the generator makes and everything else reads.

These trees belong to the fuzzer alone. The text that the compiler reads is printed from them
(:mod:`text`), and the oracle interprets them (:mod:`oracle`), so that nothing of the compiler
stands between a program and its expected results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .operations import Operation


class Kind(Enum):
    """The language's types."""

    INT = "int"
    FLOAT = "float"
    BOOL = "bool"


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation on operands."""

    operation: Operation
    args: tuple[Expr, ...]

    @property
    def kind(self) -> Kind:
        return self.operation.gives


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, ``true`` or ``false``, or a constant such as ``pi``."""

    value: bool | int | float
    args: tuple[()] = ()

    @property
    def kind(self) -> Kind:
        return {bool: Kind.BOOL, int: Kind.INT, float: Kind.FLOAT}[type(self.value)]


@dataclass(frozen=True, slots=True)
class Name:
    """A variable, a size, a param, the score so far, or an argument of a function."""

    name: str
    kind: Kind
    args: tuple[()] = ()


@dataclass(frozen=True, slots=True)
class Local:
    """A name that an earlier line binds."""

    name: str
    kind: Kind
    args: tuple[()] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """An element of a captured tensor."""

    tensor: str
    kind: Kind
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Dot:
    """The product of two rows; the first ``split`` of the indices choose the left row."""

    left: str
    right: str
    split: int
    args: tuple[Expr, ...]
    kind: Kind = Kind.FLOAT


@dataclass(frozen=True, slots=True)
class Member:
    """``x in tensor[..., :]``: the first argument is x, the others choose the row."""

    tensor: str
    args: tuple[Expr, ...]
    turned: bool = False
    """True for ``not in``."""
    kind: Kind = Kind.BOOL


@dataclass(frozen=True, slots=True)
class Invoke:
    """A call of a function of the program, or of the prelude."""

    function: Function
    args: tuple[Expr, ...]

    @property
    def kind(self) -> Kind:
        return self.function.body.kind


@dataclass(frozen=True, slots=True)
class Masked:
    """``where(condition, score, -inf)`` at the root of a score line: a mask in the score."""

    args: tuple[Expr, Expr]
    """The condition, and the score where it holds."""
    turned: bool = False
    """Whether it is written ``where(not condition, -inf, score)``."""
    kind: Kind = Kind.FLOAT


Expr = Apply | Literal | Name | Local | Load | Dot | Member | Invoke | Masked


@dataclass(frozen=True, slots=True)
class Function:
    """``def name(parameters) = body``; one of the prelude is not printed."""

    name: str
    parameters: tuple[Name, ...]
    body: Expr
    prelude: bool = False


class Target(Enum):
    """What a line gives."""

    LOCAL = "local"
    MASK = "mask"
    SCORE = "score"
    SINK = "sink"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Line:
    """``name = value``; only a local line has a name of its own."""

    target: Target
    value: Expr
    name: str = ""


class Given(Enum):
    """How a call gives a param."""

    NUMBER = "a number at the call"
    TENSOR = "a 0-d tensor"
    LEARNED = "a 0-d tensor that requires grad"
    DEFAULT = "its default"
    BOUND = "a number at compile()"


@dataclass(frozen=True, slots=True)
class Param:
    """A scalar of the program and its value in the call."""

    name: str
    kind: Kind
    value: bool | int | float
    given: Given


class Layout(Enum):
    """How a tensor lies in memory."""

    PLAIN = "contiguous"
    GUARDED = "between other elements of a larger buffer"
    PADDED = "rows that are further apart than they are long"
    SWAPPED = "its first two dims in the other order (q, k and v: heads and lengths)"
    COLUMNS = "a last stride other than 1"
    EXPANDED = "a first stride of 0"


@dataclass(frozen=True, slots=True)
class Values:
    """How a tensor's elements are drawn: multiples of 1 / ``step`` between two ints."""

    dtype: str
    """A dtype's name in torch."""
    low: int
    high: int
    step: int
    seed: int
    layout: Layout = Layout.PLAIN
    learned: bool = False
    """Whether it requires grad."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A captured tensor."""

    name: str
    kind: Kind
    dims: tuple[Expr, ...]
    values: Values


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of q (batch, heads, q_len, head_dim), k, and v (batch, kv_heads, kv_len, value_dim)."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int

    def named(self) -> dict[str, int]:
        """Those that a program can read."""
        names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Positions:
    """Logical positions of rows: offsets, or an index that replaces the offset."""

    q_offset: int = 0
    kv_offset: int = 0
    as_tensors: bool = False
    """Whether offsets are 0-d tensors."""
    q_index: tuple[int, ...] | None = None
    kv_index: tuple[int, ...] | None = None
    q_starts: tuple[int, ...] | None = None
    """The first position of each batch entry, in place of ``q_offset``."""
    kv_lengths: tuple[int, ...] | None = None
    """Keys of each batch entry; there is room for more."""
    counts: tuple[int, ...] | None = None
    """Of served entries: how many of the last rows are tokens."""
    page: int = 1
    """Keys of a page of served entries."""


@dataclass(frozen=True, slots=True)
class Case:
    """A program, and one call of it with gradients."""

    lines: tuple[Line, ...]
    sizes: Sizes
    inputs: tuple[Values, Values, Values]
    """Of q, k and v; their dtype is that of the run."""
    params: tuple[Param, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    functions: tuple[Function, ...] = ()
    dims: tuple[tuple[str, int], ...] = ()
    """Sizes that tensors name."""
    positions: Positions = field(default=Positions())
    scale: float | None = None
    lse: bool = False
    """Whether the call returns the log-sum-exp, which then has a gradient too."""
    dropout: float | None = None
    """Probability with which weights are dropped."""
    seed: int = 0
    """Of dropout and of the gradient that flows back."""

    @property
    def own_weights(self) -> bool:
        """Whether the program has weights of its own in place of the softmax."""
        return any(line.target is Target.WEIGHTS for line in self.lines)


def walk(root: Expr) -> list[Expr]:
    """``root`` and all below it, bodies of functions that it calls too."""
    found: list[Expr] = []
    left = [root]
    while left:
        item = left.pop()
        found.append(item)
        left.extend(item.args)
        if isinstance(item, Invoke):
            left.append(item.function.body)
    return found


def everything(case: Case) -> list[Expr]:
    """All expressions of a program."""
    roots = [line.value for line in case.lines]
    roots += [dim for tensor in case.tensors for dim in tensor.dims]
    return [item for root in roots for item in walk(root)]
