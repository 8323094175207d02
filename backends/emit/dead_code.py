"""Reduction of a generated module's text to the parts that its entries need.

A template has the code of every program under conditions. This pass decides conditions that the
module's constants decide. Then it follows what the entries need: statements, functions, parameters,
records, constants and imports. All else goes. What is left computes the same in the same order.

Device code is simple: one statement a line, no nested functions, no recursion, parameters without
defaults, and each constant is assigned once. A call has no effect if it makes a record, whose name
begins with a capital, or if its name is in ``_PURE``.

Non-goals: names and fields of records, entries' parameters, what a value comes to at run time, and
how the text is written (``pruning.py``).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from .conditions import decide
from .parsing import parsing
from .pruning import Pruning
from .syntax import (
    arguments_of,
    branches_of,
    called_function,
    children,
    defined,
    names_of,
    reads,
    stored,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from .conditions import Values
    from .syntax import Branch

_PURE = {
    "arange", "cdiv", "constexpr", "exp2", "full", "log", "log2", "maximum", "minimum",
    "num_programs", "permute", "program_id", "range", "reshape", "slice", "static_range", "to",
    "to_tensor", "where", "zeros",
}  # fmt: skip
"""Functions of the language, and methods, that only make a value."""
_PURE_OF_LIBRARY = {
    "count_up", "float", "head_of", "place_of_item", "places_of", "positions", "range", "rows_of",
    "shift_of", "slot_of",
}  # fmt: skip
"""The same, of the library and of Python."""


def only_needed(text: str, entries: Collection[str]) -> str:
    """``text`` of a module without what its ``entries`` do not need.

    Args:
        text: A filled template.
        entries: Names of the functions that are launched. They keep their parameters.
    """
    tree = parsing(partial(ast.parse, text))
    needs = _Needs(tree, text.split("\n"))
    for entry in entries:
        needs.pin(entry)
    needs.follow()
    return Pruning(text, needs).text_of(tree)


@dataclass(eq=False)
class _DeviceFunction:
    """A device function, and facts known of its names."""

    node: ast.FunctionDef
    parameters: list[str]
    locals: set[str]
    values: Values
    """Constants of the module that its conditions may ask for."""
    constants: set[str]
    """Parameters that are constants."""
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    """Statements without effects, by the locals that they define."""
    within: dict[ast.stmt, tuple[ast.stmt, int]] = field(default_factory=dict)
    """Compound statement around each statement, and the index of its branch there."""
    needed: set[str] = field(default_factory=set)
    """Parameters and locals."""


class _Needs:
    """Follows needs from the entries on; holds what :class:`Pruning` asks for."""

    def __init__(self, tree: ast.Module, lines: list[str]) -> None:
        self.values: Values = {}
        """Constants of the module whose values are literals."""
        self.names: set[str] = set()
        """Names of the module that are needed."""
        self.statements: dict[ast.stmt, int] = {}
        """Statements that are needed, and the last branch that is, of those that have branches."""
        self._lines = lines
        self._items: dict[str, ast.stmt] = {}
        self._branches: dict[ast.If, list[Branch]] = {}
        self._known: dict[ast.AST, Values] = {}
        self._functions: dict[str, _DeviceFunction] = {}
        self._effects: dict[str, bool] = {}
        self._pinned: set[str] = set()
        self._waiting: dict[tuple[str, str], list[tuple[ast.AST, _DeviceFunction]]] = {}
        self._new: list[tuple[_DeviceFunction, str]] = []
        """Needed locals whose own needs are not followed yet."""
        for item in tree.body:
            for name in names_of(item):
                self._items[name] = item
            match item:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[value])):
                    try:
                        self.values[name] = ast.literal_eval(value)
                    except ValueError:
                        continue

    def pin(self, name: str) -> None:
        """Need a function with all its parameters."""
        if name in self._pinned:
            return
        self._pinned.add(name)
        function = self._need_function(name)
        for parameter in function.parameters:
            self._need_local(function, parameter)

    def follow(self) -> None:
        """Need what the locals need that are needed, and so on.

        One after the other rather than one within the other: a chain of locals may be as long as
        a program, and Python's stack is not.
        """
        while self._new:
            self._follow_local(*self._new.pop())

    def branches(self, node: ast.If, function: str) -> list[Branch]:
        """The branches of a statement that may be taken, with what is left to decide."""
        if node not in self._branches:
            known = self._functions[function]
            found = self._branches[node] = []
            values = self._values_at(node, known)
            for branch in branches_of(node):
                test = branch.whole is None or decide(branch.whole, values)
                if test is not False:
                    found.append(replace(branch, test=test))
                    self._note_known(branch.body, test, values, known)
                if test is True:
                    break
                if isinstance(test, ast.Name) and test.id in known.constants:
                    values = {**values, test.id: False}
        return self._branches[node]

    def _values_at(self, node: ast.AST, function: _DeviceFunction) -> Values:
        return self._known.get(node, function.values)

    def _note_known(
        self, body: list[ast.stmt], test: bool | ast.expr, values: Values, function: _DeviceFunction
    ) -> None:
        """Note for conditions in ``body`` what ``test`` and the values there tell of constants."""
        parts = test.values if isinstance(test, ast.BoolOp) else [test]
        if not (isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or)):
            names = {part.id for part in parts if isinstance(part, ast.Name)}
            values = {**values, **dict.fromkeys(names & function.constants, True)}
        if values is not function.values and values != function.values:
            for statement in body:
                for part in ast.walk(statement):
                    if isinstance(part, ast.If | ast.IfExp):
                        self._known[part] = values

    def decided(self, node: ast.IfExp, function: str) -> bool | ast.expr:
        """Decide an expression's condition, in a function or in none: True, False or its rest."""
        if not function:
            return decide(node.test, self.values)
        return decide(node.test, self._values_at(node, self._functions[function]))

    def shortened(self) -> list[str]:
        """The functions whose parameters are not all needed."""
        functions = self._functions.items()
        return [name for name, own in functions if not own.needed.issuperset(own.parameters)]

    def parameters(self, function: str) -> list[ast.arg] | None:
        """The parameters that are needed; None for all."""
        known = self._functions.get(function)
        if known is None or function in self._pinned:
            return None
        return [a for a in known.node.args.args if a.arg in known.needed]

    def arguments(self, node: ast.AST, function: str) -> list[ast.expr | ast.keyword] | None:
        """The arguments of a call in ``function`` that are needed; None for all."""
        name = called_function(node) if function else None
        if name is None or name in self._functions[function].locals or name in self._pinned:
            return None
        called = self._functions.get(name)
        if called is None:
            return None
        return [
            argument
            for parameter, argument in _placed(arguments_of(node), called.parameters)
            if parameter in called.needed
        ]

    def _need_name(self, name: str) -> None:
        """Need a name of the module, or one of Python."""
        item = self._items.get(name)
        if item is None or name in self.names:
            return
        if isinstance(item, ast.FunctionDef):
            self.pin(name)
            return
        self.names.add(name)
        if not isinstance(item, ast.Import | ast.ImportFrom):
            self._visit_outside(item)

    def _visit_outside(self, node: ast.AST) -> None:
        """Need everything that the module itself reads, outside functions."""
        if isinstance(node, ast.Name):
            self._need_name(node.id)
        if isinstance(node, ast.IfExp):
            taken = decide(node.test, self.values)
            if isinstance(taken, bool):
                self._visit_outside(node.body if taken else node.orelse)
                return
        for child in ast.iter_child_nodes(node):
            self._visit_outside(child)

    def _function(self, name: str) -> _DeviceFunction:
        if name not in self._functions:
            node = self._items[name]
            assert isinstance(node, ast.FunctionDef)
            given = node.args
            rare = (given.posonlyargs, given.kwonlyargs, given.vararg, given.kwarg, given.defaults)
            assert not any(rare), f"{name} has parameters of a kind that device code does not have"
            parameters = [argument.arg for argument in given.args]
            assigned = set(stored(node.body))
            names = assigned.union(parameters)
            values = {key: value for key, value in self.values.items() if key not in names}
            constants = {
                argument.arg
                for argument in given.args
                if isinstance(argument.annotation, ast.Attribute)
                and argument.annotation.attr == "constexpr"
                and argument.arg not in assigned
            }
            self._functions[name] = _DeviceFunction(node, parameters, names, values, constants)
        return self._functions[name]

    def _need_function(self, name: str) -> _DeviceFunction:
        function = self._function(name)
        if name not in self.names:
            self.names.add(name)
            for decorator in function.node.decorator_list:
                self._visit_outside(decorator)
            self._enter(function, function.node.body, None)
        return function

    def _enter(
        self, function: _DeviceFunction, body: list[ast.stmt], above: tuple[ast.stmt, int] | None
    ) -> None:
        """Need the statements of ``body`` that have effects, and note what others define."""
        live = list(self._live(function, body))
        overwritten = _overwritten(live)
        for number, statement in enumerate(live):
            if above is not None:
                function.within[statement] = above
            bodies = self._bodies(function, statement)
            for place, inner in enumerate(bodies):
                self._enter(function, inner, (statement, place))
            if self._has_effect(function, statement):
                self._need_statement(function, statement, max(len(bodies) - 1, 0))
                continue
            if number in overwritten:
                continue
            for name in defined(statement):
                function.definitions.setdefault(name, []).append(statement)
                if name in function.needed:
                    self._need_statement(function, statement)

    def _live(self, function: _DeviceFunction, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """The statements of ``body`` that are reached."""
        for statement in body:
            if isinstance(statement, ast.If):
                branches = self.branches(statement, function.node.name)
                if branches and branches[0].test is True:
                    ended = False
                    for inner in self._live(function, branches[0].body):
                        yield inner
                        ended = isinstance(inner, ast.Return)
                    if ended:
                        return
                    continue
                if not branches:
                    continue
            yield statement
            if isinstance(statement, ast.Return):
                return

    def _bodies(self, function: _DeviceFunction, statement: ast.stmt) -> list[list[ast.stmt]]:
        if isinstance(statement, ast.If):
            return [branch.body for branch in self.branches(statement, function.node.name)]
        return [statement.body] if isinstance(statement, ast.For | ast.While) else []

    def _has_effect(self, function: _DeviceFunction, statement: ast.stmt) -> bool:
        """Return True if a statement, without those under it, does more than define locals."""
        match statement:
            case ast.If():
                tests = (branch.test for branch in self.branches(statement, function.node.name))
                return not all(isinstance(x, bool) or self._is_pure(x, function) for x in tests)
            case ast.For(target=ast.Name(), iter=value, orelse=[]):
                return not self._is_pure(value, function)
            case ast.Assign(targets=[target], value=value) if _is_names(target):
                return not self._is_pure(value, function)
            case ast.AugAssign(target=ast.Name(), value=value):
                return not self._is_pure(value, function)
            case ast.AnnAssign(target=ast.Name(), value=ast.expr() as value):
                return not self._is_pure(value, function)
            case ast.Expr(value=ast.Constant()):
                return False
            case ast.Expr(value=value):
                return not self._is_pure(value, function)
            case ast.Pass():
                return False
        return True

    def _is_pure(self, node: ast.AST, function: _DeviceFunction) -> bool:
        """Return True if computing an expression has no effect."""
        if isinstance(node, ast.Name | ast.Constant):
            return True
        if isinstance(node, ast.IfExp):
            taken = self.decided(node, function.node.name)
            if isinstance(taken, bool):
                return self._is_pure(node.body if taken else node.orelse, function)
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) if name in function.locals:
                    return False
                case ast.Name(id=name) if isinstance(self._items.get(name), ast.FunctionDef):
                    if self._does(name):
                        return False
                case ast.Name(id=name):
                    if name not in _PURE_OF_LIBRARY and not name[0].isupper():
                        return False
                case ast.Attribute(attr=name):
                    if name not in _PURE and not name.endswith("Layout"):
                        return False
                case _:
                    return False
        return all(self._is_pure(child, function) for child in children(node))

    def _does(self, name: str) -> bool:
        """Return True if a function of the module has an effect."""
        if name not in self._effects:
            function = self._function(name)
            self._effects[name] = any(self._acts(function, function.node.body))
        return self._effects[name]

    def _acts(self, function: _DeviceFunction, body: list[ast.stmt]) -> Iterator[bool]:
        for statement in self._live(function, body):
            if isinstance(statement, ast.Return):
                yield statement.value is not None and not self._is_pure(statement.value, function)
            else:
                yield self._has_effect(function, statement)
            for inner in self._bodies(function, statement):
                yield from self._acts(function, inner)

    def _need_local(self, function: _DeviceFunction, name: str) -> None:
        if name not in function.needed:
            function.needed.add(name)
            self._new.append((function, name))

    def _follow_local(self, function: _DeviceFunction, name: str) -> None:
        if name in function.parameters:
            number = function.parameters.index(name)
            annotation = function.node.args.args[number].annotation
            if annotation is not None:
                self._visit_outside(annotation)
            for argument, caller in self._waiting.pop((function.node.name, name), []):
                self._visit(argument, caller)
        for statement in function.definitions.get(name, []):
            self._need_statement(function, statement)

    def _need_statement(
        self, function: _DeviceFunction, statement: ast.stmt, branch: int = 0
    ) -> None:
        """Need a statement with its branches up to ``branch``."""
        before = self.statements.get(statement, -1)
        if branch <= before:
            return
        self.statements[statement] = branch
        if statement in function.within:
            self._need_statement(function, *function.within[statement])
        match statement:
            case ast.If():
                branches = self.branches(statement, function.node.name)
                for tested in branches[before + 1 : branch + 1]:
                    if isinstance(tested.test, ast.expr):
                        self._visit(tested.test, function)
            case ast.For(iter=value):
                self._visit(value, function)
            case ast.While(test=value):
                self._visit(value, function)
            case ast.AugAssign(target=target, value=value):
                self._visit(value, function)
                if isinstance(target, ast.Name):
                    self._need_local(function, target.id)
            case _:
                self._visit(statement, function)

    def _visit(self, node: ast.AST, function: _DeviceFunction) -> None:
        """Need the names that an expression or a simple statement reads."""
        if isinstance(node, ast.Name):
            if node.id not in function.locals:
                self._need_name(node.id)
            elif isinstance(node.ctx, ast.Load):
                self._need_local(function, node.id)
            return
        if isinstance(node, ast.IfExp):
            taken = self.decided(node, function.node.name)
            if isinstance(taken, bool):
                self._visit(node.body if taken else node.orelse, function)
            else:
                for part in (taken, node.body, node.orelse):
                    self._visit(part, function)
            return
        called = called_function(node)
        if called is not None and called not in function.locals:
            item = self._items.get(called)
            if isinstance(item, ast.FunctionDef):
                self._visit_call(node, called, function)
                return
        for child in children(node):
            self._visit(child, function)

    def _has_comment(self, node: ast.AST) -> bool:
        """Return True if arguments have comments, which a new layout of them would lose."""
        assert isinstance(node, ast.expr)
        above = slice(node.lineno - 1, (node.end_lineno or 1) - 1)
        return any("#" in line for line in self._lines[above])

    def _visit_call(self, node: ast.AST, name: str, caller: _DeviceFunction) -> None:
        function = self._need_function(name)
        arguments = arguments_of(node)
        starred = any(isinstance(argument, ast.Starred) for argument in arguments)
        if starred or self._has_comment(node):
            self.pin(name)
        for parameter, argument in _placed(arguments, function.parameters):
            if not self._is_pure(argument, caller):
                self._need_local(function, parameter)
            if parameter in function.needed:
                self._visit(argument, caller)
            else:
                self._waiting.setdefault((name, parameter), []).append((argument, caller))


def _placed(
    arguments: list[ast.expr | ast.keyword], parameters: list[str]
) -> Iterator[tuple[str, ast.expr | ast.keyword]]:
    """The arguments of a call, by the names of the function's parameters."""
    for number, argument in enumerate(arguments):
        if isinstance(argument, ast.keyword):
            yield str(argument.arg), argument
        else:
            yield parameters[min(number, len(parameters) - 1)], argument


def _overwritten(live: list[ast.stmt]) -> set[int]:
    """The statements, by number, whose local one below assigns before any may read it."""
    found: set[int] = set()
    assigned: dict[str, int] = {}
    for number, statement in enumerate(live):
        if not isinstance(statement, ast.Assign):
            continue
        for name in defined(statement):
            before = assigned.pop(name, None)
            if before is not None and not any(
                reads(other, name) for other in live[before + 1 : number + 1]
            ):
                found.add(before)
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]):
                assigned[name] = number
    return found


def _is_names(target: ast.expr) -> bool:
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return all(isinstance(part, ast.Name) for part in parts)
