"""Types that names must have where a program uses them without declaring them.

A name beside positions is an int: ``q - kv < window``. Only texts are read, so that this works for
programs with errors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attndsl import ir
from attndsl.errors import ProgramWarning
from attndsl.foundation.scalars import as_int
from attndsl.ir import DType

from . import builtin_functions
from . import surface as s
from .declare import Bound, ParamSpec, TensorSpec
from .prelude import prelude_function
from .reserved_names import CONSTANTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from attndsl.ir import Node

    from .declare import Declared

_BITS = frozenset({"&", "|", "^", "<<", ">>"})
_SAME = frozenset({"min", "max", "clamp", "abs"})
"""Functions whose result has the type of their arguments."""
_INTS = frozenset({*ir.VARS, *ir.SIZES, ir.TOKEN, ir.TOKENS})
_RESULTS = {"mask": DType.BOOL, "score": DType.FLOAT, "sink": DType.FLOAT, "weights": DType.FLOAT}

Types = dict[str, DType | None]


class Wanted:
    """Uses of the undeclared names of a program, read at the first question."""

    def __init__(self, statements: Sequence[s.Statement], declared: Mapping[str, Declared]) -> None:
        self._statements = statements
        self._declared = declared
        self._found: dict[str, set[DType]] | None = None

    def types(self, name: str) -> set[DType]:
        """The types that uses of ``name`` need; empty where any would do."""
        if self._found is None:
            kinds = {x.value: x for x in DType}
            declared = {
                key: kinds.get(x.dtype)
                for key, x in self._declared.items()
                if isinstance(x, ParamSpec | TensorSpec)
            }
            self._found = _TypeReader(self._statements, declared).wants
        return self._found.get(name, set())

    def number(self, name: str, value: bool | int | float) -> bool | int | float:
        """A value that is given to ``name``: a whole float is an int where positions are."""
        number = as_int(value) if isinstance(value, float) else None
        if number is None or not -(1 << 63) <= number < 1 << 63:
            return value
        return number if self.types(name) == {DType.INT} else value


def fractions(
    tree: s.Tree, declared: Mapping[str, Declared], mask: Node
) -> Iterator[ProgramWarning]:
    """A warning for each number that is given where the mask has positions, and that is not whole.

    Args:
        tree: A program without errors.
        declared: What its caller declares.
        mask: Its mask.
    """
    typed = {x.name.name for x in tree.statements if isinstance(x, s.ParamDef)}
    numbers = {x.value for x in ir.toposort(mask) if x.op is ir.Op.CONST}
    wanted = Wanted(tree.statements, declared)
    for name, given in declared.items():
        if not isinstance(given, Bound) or name in typed or given.value not in numbers:
            continue
        fraction = isinstance(given.value, float) and given.value % 1 != 0
        if fraction and math.isfinite(given.value) and wanted.types(name) == {DType.INT}:
            yield ProgramWarning(
                f"'{name}' {given.origin} as {given.value}, where the mask compares positions: its "
                "tiles have no closed form",
                given.span,
                f"pass a whole number, such as {math.ceil(given.value)}",
            )


def likely(wants: Iterable[DType]) -> DType:
    """The type of a declaration that serves all uses: an int may stand for a float too."""
    found = set(wants)
    return next((x for x in (DType.INT, DType.BOOL) if x in found), DType.FLOAT)


class _TypeReader:
    def __init__(self, statements: Sequence[s.Statement], declared: Types) -> None:
        self.definitions = {x.name.name: x for x in statements if isinstance(x, s.Define)}
        self.results: Types = {}
        self.parameters: dict[str, list[DType | None]] = {}
        self.wants: dict[str, set[DType]] = {}
        kinds = {x.value: x for x in DType}
        names = dict(declared)
        for statement in statements:
            if isinstance(statement, s.ParamDef | s.TensorDef):
                names[statement.name.name] = kinds.get(statement.dtype.name)
        typed = []
        for statement in statements:
            for root in s.expressions(statement):
                types = self.types(root, names)
                typed.append((statement, root, types))
                if isinstance(statement, s.Assign) and statement.name.name not in _RESULTS:
                    names[statement.name.name] = types[id(root)]
        for statement, root, types in reversed(typed):
            if not isinstance(statement, s.Define):
                self.want(root, self._of_root(statement), types, self.wants)

    def _of_root(self, statement: s.Statement) -> DType | None:
        if isinstance(statement, s.TensorDef):
            return DType.INT
        if not isinstance(statement, s.Assign):
            return None
        name = statement.name.name
        if name in _RESULTS:
            return _RESULTS[name]
        return likely(self.wants[name]) if self.wants.get(name) else None

    def types(self, root: s.Expr, names: Types) -> dict[int, DType | None]:
        """The type of each expression of ``root``, operands first; None where it is not known."""
        found: dict[int, DType | None] = {}
        for item in reversed(list(s.walk(root))):
            found[id(item)] = self._type(item, [found[id(x)] for x in s.operands(item)], names)
        return found

    def _type(self, item: s.Expr, below: list[DType | None], names: Types) -> DType | None:
        if isinstance(item, s.Number):
            return DType.INT if item.text.isdigit() else DType.FLOAT
        if isinstance(item, s.Name):
            if item.name in _INTS:
                return DType.INT
            if item.name in CONSTANTS:
                return CONSTANTS[item.name].dtype
            return DType.FLOAT if item.name == "score" else names.get(item.name)
        if isinstance(item, s.Index):
            return names.get(item.name)
        if isinstance(item, s.Compare):
            return DType.BOOL
        if isinstance(item, s.Binary) and item.op in ("and", "or", "/"):
            return DType.FLOAT if item.op == "/" else DType.BOOL
        if isinstance(item, s.Unary) and item.op == "not":
            return DType.BOOL
        if isinstance(item, s.Ternary):
            return _joined([below[1], below[2]])
        if isinstance(item, s.FunctionCall):
            return self._result(item, below)
        return _joined(below)

    def _result(self, call: s.FunctionCall, below: list[DType | None]) -> DType | None:
        own = self.definitions.get(call.name)
        if own is None and call.name in builtin_functions.NAMES:
            if call.name in ("int", "float", "bool"):
                return DType(call.name)
            if call.name in _SAME:
                return _joined(below)
            return _joined(below[1:]) if call.name == "where" else DType.FLOAT
        definition = own or prelude_function(call.name)
        if definition is None:
            return None
        if call.name not in self.results:
            self.results[call.name] = None
            names = _arguments(definition, call, below)
            self.results[call.name] = self.types(definition.body, names)[id(definition.body)]
        return self.results[call.name]

    def want(
        self,
        root: s.Expr,
        wanted: DType | None,
        types: Mapping[int, DType | None],
        wants: dict[str, set[DType]],
    ) -> None:
        """Add the types as which the names of ``root`` are used to ``wants``, the root first."""
        ahead: dict[int, DType | None] = {id(root): wanted}
        for item in s.walk(root):
            here = ahead[id(item)]
            if isinstance(item, s.Name):
                if here is not None:
                    wants.setdefault(item.name, set()).add(here)
                continue
            below = s.operands(item)
            for at, each in enumerate(below):
                others = [types[id(x)] for x in below if x is not each]
                ahead[id(each)] = self._wanted(item, at, others, here, types)

    def _wanted(
        self,
        item: s.Expr,
        at: int,
        others: list[DType | None],
        here: DType | None,
        types: Mapping[int, DType | None],
    ) -> DType | None:
        """The type that operand ``at`` of ``item`` must have, beside ``others``."""
        if isinstance(item, s.Compare):
            return _joined([x for x in others if x is not None])
        if isinstance(item, s.Index):
            return DType.INT
        if isinstance(item, s.Ternary):
            return DType.BOOL if at == 0 else here
        if isinstance(item, s.Unary):
            return DType.BOOL if item.op == "not" else here
        if isinstance(item, s.Binary):
            return _of_binary(item, at, others[0] if others else None, here)
        return self._of_call(item, at, here, types) if isinstance(item, s.FunctionCall) else here

    def _of_call(
        self, call: s.FunctionCall, at: int, here: DType | None, types: Mapping[int, DType | None]
    ) -> DType | None:
        own = self.definitions.get(call.name)
        if own is None and call.name in builtin_functions.NAMES:
            if call.name == "where" and at == 0:
                return DType.BOOL
            if call.name in ("int", "float", "bool"):
                return None
            return here if call.name in _SAME or call.name == "where" else DType.FLOAT
        definition = own or prelude_function(call.name)
        if definition is None:
            return None
        if call.name not in self.parameters:
            self.parameters[call.name] = []
            names = _arguments(definition, call, [types[id(x)] for x in s.operands(call)])
            found: dict[str, set[DType]] = {}
            self.want(definition.body, here, self.types(definition.body, names), found)
            self.parameters[call.name] = [
                likely(found[x.name]) if x.name in found else None for x in definition.parameters
            ]
        kinds = self.parameters[call.name]
        if at >= len(call.args):
            name = call.keywords[at - len(call.args)].name.name
            at = next((i for i, x in enumerate(definition.parameters) if x.name == name), at)
        return kinds[at] if at < len(kinds) else None


def _of_binary(item: s.Binary, at: int, other: DType | None, here: DType | None) -> DType | None:
    if item.op in ("and", "or"):
        return DType.BOOL
    if item.op in _BITS:
        return DType.INT
    if item.op in ("/", "**"):
        return DType.FLOAT
    if item.op in ("//", "%"):
        return other
    if item.op == "*" and not isinstance(item.left if at else item.right, s.Number):
        # A ratio of positions, such as q * ratio < kv, may be a fraction.
        return other if other is DType.FLOAT else here if here is DType.FLOAT else None
    return other if other is DType.FLOAT else here


def _arguments(definition: s.Define, call: s.FunctionCall, below: list[DType | None]) -> Types:
    """The types of the parameters of a function where it is called."""
    names: Types = dict(zip((x.name for x in definition.parameters), below, strict=False))
    for keyword, found in zip(call.keywords, below[len(call.args) :], strict=True):
        names[keyword.name.name] = found
    return names


def _joined(found: list[DType | None]) -> DType | None:
    """The type of what numbers of these types make together."""
    if DType.FLOAT in found:
        return DType.FLOAT
    return found[0] if found and len(set(found)) == 1 else None
