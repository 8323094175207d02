"""Random masks as trees: their text, their values by numpy, and smaller ones.

A tree is a tuple: an operation and its operands. Numpy's int64 wraps as the language's ints do, so
values need no code of the package. Division by 0 gives 0, and shifts are by 0 to 63 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping

Tree = tuple[Any, ...]
Array = Any
"""A numpy array of (batch, heads, queries, keys), each of full size or 1."""
EXTREMES = (
    2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, -(2**47), 2**62, -(2**62), 2**63 - 1,
    -(2**63),
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, 5, 7, 8, 13, 16, 30, 32, 50, 64, 100, 128, -1, -4, -30)
DIVISORS = (1, 2, 3, 4, 5, 7, 8, 10, 16, 32, 33, 64, 100, 128, -3)
DECLARED = {
    "n": "param n: int",
    "p": "param p: float",
    "ids": "tensor ids[m]: int",
    "rows": "tensor rows[batch, m]: int",
    "ends": "tensor ends[batch]: int",
    "widths": "tensor widths[heads]: int",
    "starts": "tensor starts[s]: int",
    "flags": "tensor flags[m]: bool",
    "on": "tensor on[heads]: bool",
    "values": "tensor values[m]: float",
    "blocks": "tensor blocks[r, c]: bool",
}
DIMS = {
    "ids": "m", "rows": "bm", "ends": "b", "widths": "h", "starts": "s", "flags": "m", "on": "h",
    "values": "m", "blocks": "rc",
}  # fmt: skip
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


class Masks:
    """Trees from a source of chance."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.wild = dice.random() < 0.2
        """Whether constants near 2**63, shifts and products of positions occur."""
        self.lookups = dice.random() < 0.5

    def condition(self, depth: int) -> Tree:
        """A BOOL tree."""
        pick = self.dice.random()
        if depth > 0 and pick < 0.55:
            return self._joined(depth - 1)
        if self.lookups and pick < 0.8:
            return self._looked_up()
        operation = self.dice.choice(_COMPARISONS)
        if pick > 0.93:
            return (operation, self._float(), self._float())
        size = self.dice.choice((1, 1, 2))
        return (operation, self.integer(size), self.integer(self.dice.choice((0, 1))))

    def integer(self, depth: int) -> Tree:
        """An INT tree."""
        if depth == 0 or self.dice.random() < 0.25:
            return self._leaf()
        operation = self.dice.choice(
            ("+", "-", "-", "//", "%", "abs", "min", "max", "*", "where", "&", ">>", "neg", "sign")
        )
        if self.wild and self.dice.random() < 0.3:
            operation = self.dice.choice(("<<", "^", "|", "product", "far", "quotient", "rest"))
        a, b = self.integer(depth - 1), self.integer(depth - 1)
        number = ("int", self.dice.choice(DIVISORS))
        if operation in ("//", "%"):
            return (operation, a, number)
        if operation in ("quotient", "rest"):
            return ("//" if operation == "quotient" else "%", a, b)
        if operation in ("&", "|", "^"):
            return (operation, a, ("int", self.dice.choice((1, 3, 7, 8, 12, 16, 48, 255))))
        if operation in ("<<", ">>"):
            return (operation, a, ("int", self.dice.choice((1, 3, 5, 20, 31, 62))))
        if operation in ("abs", "neg", "sign"):
            return (operation, a)
        if operation == "*":
            return ("*", ("int", self.dice.choice((2, 3, -1, 64, 1 << 20))), a)
        if operation == "product":
            return ("*", a, b)
        if operation == "far":
            return ("+", a, ("int", self.dice.choice(EXTREMES[:-1])))
        if operation == "where":
            return ("where", ("<", self._leaf(), self._leaf()), a, b)
        return (operation, a, b)

    def _leaf(self) -> Tree:
        position = self.dice.choice(
            (("q",), ("kv",), ("-", ("q",), ("kv",)), ("-", ("kv",), ("q",)), ("q",), ("kv",))
        )
        others: tuple[Tree, ...] = (
            ("int", self.dice.choice(NUMBERS)), ("n",), ("n",), ("q_len",), ("kv_len",), ("b",),
            ("h",), ("+", ("q",), ("n",)), ("-", ("kv",), ("n",)),
        )  # fmt: skip
        if self.lookups:
            others += (("load", "ends", ("b",)), ("load", "widths", ("h",)), self._row(("q",)))
        return position if self.dice.random() < 0.6 else self.dice.choice(others)

    def _row(self, position: Tree) -> Tree:
        if self.dice.random() < 0.3:
            return ("load", "rows", ("b",), position)
        found: Tree = ("load", "ids", position)
        if self.dice.random() < 0.2:
            found = ("load", "starts", found)
        return found

    def _looked_up(self) -> Tree:
        kind = self.dice.randrange(6)
        if kind == 0:
            return ("load", "flags", self.dice.choice((("q",), ("kv",))))
        if kind == 1:
            return ("load", "on", ("h",))
        if kind == 2:
            size = ("int", self.dice.choice((4, 16, 32)))
            return ("load", "blocks", ("//", ("q",), size), ("//", ("kv",), size))
        if kind == 3:
            left: Tree = ("-", ("q",), ("load", "starts", ("load", "ids", ("q",))))
            right: Tree = ("-", ("kv",), ("load", "starts", ("load", "ids", ("kv",))))
            return (self.dice.choice(_COMPARISONS), left, right)
        row = self.dice.choice((self._row, lambda p: ("load", "ids", p)))
        return (self.dice.choice(("==", "==", "<=", "!=")), row(("q",)), row(("kv",)))

    def _float(self) -> Tree:
        kind = self.dice.randrange(4)
        if kind == 0:
            return ("load", "values", self.dice.choice((("q",), ("kv",))))
        if kind == 1:
            return ("p",)
        if kind == 2:
            return ("*.", ("float", ("-", ("q",), ("kv",))), ("number", 0.25))
        return ("+.", ("load", "values", self.dice.choice((("q",), ("kv",)))), ("number", 0.5))

    def _joined(self, depth: int) -> Tree:
        operation = self.dice.choice(("and", "and", "or", "not"))
        if operation == "not":
            return ("not", self.condition(depth))
        return (operation, self.condition(depth), self.condition(depth))


_PREFIX = {"abs": "abs", "min": "min", "max": "max", "where": "where", "sign": "sign",
           "float": "float"}  # fmt: skip


def text_of(tree: Tree) -> str:
    """A program of one mask, with the declarations that it needs."""
    names = [name for name in DECLARED if name in _names(tree)]
    return "\n".join([*(DECLARED[name] for name in names), f"mask = {_text(tree)}"])


def _names(tree: Tree) -> set[str]:
    own = {tree[1]} if tree[0] == "load" else {tree[0]}
    return own.union(*(_names(part) for part in tree[1:] if isinstance(part, tuple)))


def _text(tree: Tree) -> str:
    operation, *parts = tree
    if operation in ("int", "number"):
        (value,) = parts
        return f"({value})" if value < 0 else str(value)
    if operation == "load":
        name, *indices = parts
        return f"{name}[{', '.join(map(_index, DIMS[name], indices))}]"
    if not parts:
        return str(operation)
    texts = [_text(part) for part in parts]
    if operation in _PREFIX:
        return f"{operation}({', '.join(texts)})"
    if operation in ("not", "neg"):
        return f"({'not ' if operation == 'not' else '-'}{texts[0]})"
    return f"({texts[0]} {operation.rstrip('.')} {texts[1]})"


def _index(dim: str, index: Tree) -> str:
    return _text(index) if dim in "bh" else f"min(max({_text(index)}, 0), {dim} - 1)"


def _divide(a: Array, b: Array) -> Array:
    safe = np.where((b == 0) | (b == -1), 1, b)
    return np.where(b == 0, 0, np.where(b == -1, -a, a // safe))


def _modulo(a: Array, b: Array) -> Array:
    safe = np.where((b == 0) | (b == -1), 1, b)
    return np.where((b == 0) | (b == -1), 0, a % safe)


_RULES: dict[str, Callable[..., Array]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "neg": lambda a: -a,
    "+.": lambda a, b: a + b, "*.": lambda a, b: a * b,
    "//": _divide, "%": _modulo, "min": np.minimum, "max": np.maximum, "abs": np.abs,
    "sign": np.sign, "where": np.where, "float": lambda a: a.astype(np.float32),
    "&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor,
    "<<": lambda a, b: np.left_shift(a, np.clip(b, 0, 63)),
    ">>": lambda a, b: np.right_shift(a, np.clip(b, 0, 63)),
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal,
    "!=": np.not_equal, "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
}  # fmt: skip


def value_of(tree: Tree, leaves: Mapping[str, Array]) -> Array:
    """What a tree is at every pair.

    Args:
        tree: The tree.
        leaves: Variables, sizes and params as arrays of four dims, tensors by their names.
    """
    operation, *parts = tree
    if operation == "int":
        return np.full((1, 1, 1, 1), parts[0], np.int64)
    if operation == "number":
        return np.full((1, 1, 1, 1), parts[0], np.float32)
    if operation == "load":
        name, *indices = parts
        table = leaves[name]
        places = [value_of(index, leaves) for index in indices]
        kept = [np.clip(p, 0, size - 1) for p, size in zip(places, table.shape, strict=True)]
        return table[tuple(kept)]
    if not parts:
        return leaves[operation]
    with np.errstate(all="ignore"):
        return _RULES[operation](*(value_of(part, leaves) for part in parts))


_BOOLS = frozenset((*_COMPARISONS, "and", "or", "not"))
_FLOATS = frozenset(("float", "number", "p", "+.", "*."))


def kind_of(tree: Tree) -> str:
    """``bool``, ``float`` or ``int``."""
    if tree[0] == "load":
        return {"flags": "bool", "on": "bool", "blocks": "bool", "values": "float"}.get(
            tree[1], "int"
        )
    return "bool" if tree[0] in _BOOLS else "float" if tree[0] in _FLOATS else "int"


def smaller(tree: Tree) -> Iterator[Tree]:
    """Trees of the same kind with one part left out or made plain."""
    kind = kind_of(tree)
    for part in tree[1:]:
        if isinstance(part, tuple) and kind_of(part) == kind:
            yield part
    if kind == "int" and tree not in (("q",), ("kv",), ("int", 0)):
        yield ("int", 0)
        if len(tree) > 1 and tree[0] != "int":
            yield from (("q",), ("kv",))
    for place, part in enumerate(tree):
        if isinstance(part, tuple):
            for less in smaller(part):
                yield (*tree[:place], less, *tree[place + 1 :])
