"""The text of a module without what is not needed: comments, blank lines and layout stay.

A comment belongs to the statement below it. What was under a condition that holds moves to the
left. Lists of names and of arguments are laid out again if they get shorter.
"""

from __future__ import annotations

import ast
import re
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Protocol

from .syntax import arguments_of, children, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .syntax import Branch

_WIDTH = 100
_STEP = "    "
_ATOMS = (ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.Subscript)


class Needed(Protocol):
    """Parts of a module that are needed."""

    names: set[str]
    """Needed names of those that the module defines or imports."""
    statements: dict[ast.stmt, int]
    """Statements of functions, and the last branch that is needed, of those that have branches."""

    def branches(self, node: ast.If, function: str) -> list[Branch]:
        """The branches that may be taken, with what is left to decide."""
        ...

    def decided(self, node: ast.IfExp, function: str) -> bool | ast.expr:
        """Decide the condition: True, False, or the part of it that is left."""
        ...

    def shortened(self) -> list[str]:
        """The functions whose parameters are not all needed."""
        ...

    def parameters(self, function: str) -> list[ast.arg] | None:
        """The parameters that are needed; None for all."""
        ...

    def arguments(self, node: ast.AST, function: str) -> list[ast.expr | ast.keyword] | None:
        """The arguments that are needed of what may be a call; None for all."""
        ...


class Pruning:
    """Writes the needed parts of a module's text."""

    def __init__(self, text: str, needed: Needed) -> None:
        self._text = text + "\n"
        self._lines = text.split("\n")
        self._starts = [0, *accumulate(len(line) + 1 for line in self._lines)]
        self._needed = needed
        # Most lines need no look at their trees.
        words = "|".join(["if", *needed.shortened()])
        self._may_change = re.compile(rf"\b(?:{words})\b").search
        self._function = ""
        self._shift = 0

    def text_of(self, tree: ast.Module) -> str:
        """Text of the needed parts of the module ``tree``."""
        found: list[str] = []
        previous = blanks = 0
        apart = False
        for item in tree.body:
            first = _first_line(item)
            above = self._lines[previous:first]
            previous = item.end_lineno or 0
            blanks = max(blanks, _leading_blanks(above))
            names = names_of(item)
            if names and not any(name in self._needed.names for name in names):
                continue
            block = isinstance(item, ast.FunctionDef | ast.ClassDef)
            found += [""] * (2 if block or apart else min(blanks, 1)) * bool(found)
            found += [line.rstrip() for line in above[_leading_blanks(above) :]]
            found += self._item(item, first)
            apart, blanks = block, 0
        return "\n".join(found) + "\n"

    def _item(self, item: ast.stmt, first: int) -> list[str]:
        lines = self._lines[first : item.end_lineno]
        if isinstance(item, ast.FunctionDef):
            return self._device_function(item, first)
        if isinstance(item, ast.Import | ast.ImportFrom):
            return self._import(item, lines)
        if isinstance(item, ast.Assign):
            self._function, self._shift = "", 0
            return self._changed(first, (item.end_lineno or 1) - 1, [item])
        return lines

    def _import(self, item: ast.Import | ast.ImportFrom, lines: list[str]) -> list[str]:
        stays = [name in self._needed.names for name in names_of(item)]
        if all(stays):
            return lines
        names = [
            f"{alias.name} as {alias.asname}" if alias.asname else alias.name
            for alias in compress(item.names, stays)
        ]
        if isinstance(item, ast.Import):
            return [f"import {', '.join(names)}"]
        line = f"from {'.' * item.level}{item.module or ''} import {', '.join(names)}"
        if len(line) <= _WIDTH:
            return [line]
        return [line.partition(" import ")[0] + " import (", *_filled(names, _STEP), ")"]

    def _device_function(self, node: ast.FunctionDef, first: int) -> list[str]:
        self._function, self._shift = node.name, 0
        begin = node.lineno - 1
        end = self._header_end(node.args.args[-1] if node.args.args else None, begin)
        header = self._lines[begin : end + 1]
        stays = self._needed.parameters(node.name)
        if stays is not None and len(stays) < len(node.args.args):
            names = [self._segment(argument) for argument in stays]
            header = _laid_out(f"def {node.name}(", names, "):", "")
        body, _ = self._block(node.body, end + 1)
        return [*self._lines[first:begin], *header, *(body or [f"{_STEP}pass"])]

    def _header_end(self, last: ast.expr | ast.arg | None, line: int) -> int:
        """The line with the colon behind ``last``, the last thing before it."""
        place = line if last is None else (last.end_lineno or 1) - 1
        while not self._lines[place].partition("#")[0].rstrip().endswith(":"):
            place += 1
        return place

    def _block(self, body: list[ast.stmt], previous: int) -> tuple[list[str], bool]:
        """Lines of statements from line ``previous`` on, and whether they end in a ``return``."""
        found: list[str] = []
        blank = False
        for statement in body:
            above = self._lines[previous : statement.lineno - 1]
            previous = statement.end_lineno or 0
            blank = blank or _leading_blanks(above) > 0
            lines, ended = self._statement(statement)
            if not lines:
                continue
            found += [""] * (blank and bool(found))
            found += self._moved(above[_leading_blanks(above) :])
            found += lines
            blank = False
            if ended:
                return found, True
        return found, False

    def _statement(self, statement: ast.stmt) -> tuple[list[str], bool]:
        if isinstance(statement, ast.If):
            return self._if(statement)
        is_doc = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if statement not in self._needed.statements and not is_doc:
            return [], False
        if isinstance(statement, ast.For | ast.While):
            last = statement.iter if isinstance(statement, ast.For) else statement.test
            end = self._header_end(last, statement.lineno - 1)
            header = self._changed(statement.lineno - 1, end, [last])
            body, _ = self._block(statement.body, end + 1)
            return [*header, *(body or [self._pass(statement)])], False
        lines = self._changed(statement.lineno - 1, (statement.end_lineno or 1) - 1, [statement])
        return lines, isinstance(statement, ast.Return)

    def _if(self, node: ast.If) -> tuple[list[str], bool]:
        branches = self._needed.branches(node, self._function)
        if branches and branches[0].test is True:
            shift = self._shift
            self._shift += branches[0].body[0].col_offset - node.col_offset
            taken = self._block(branches[0].body, self._header_of(branches[0]) + 1)
            self._shift = shift
            return taken
        if node not in self._needed.statements:
            return [], False
        found: list[str] = []
        ends = []
        for branch in branches[: self._needed.statements[node] + 1]:
            found += self._condition(branch, "elif" if found else "if")
            body, ended = self._block(branch.body, self._header_of(branch) + 1)
            found += body or [self._pass(node)]
            ends.append(ended)
        return found, all(ends) and branches[len(ends) - 1].test is True

    def _pass(self, above: ast.stmt) -> str:
        return (above.col_offset - self._shift) * " " + f"{_STEP}pass"

    def _header_of(self, branch: Branch) -> int:
        """The line above the branch's own lines."""
        if branch.whole is not None:
            return self._header_end(branch.whole, branch.line)
        line = branch.line
        while not self._lines[line].lstrip().startswith("else:"):
            line -= 1
        return line

    def _condition(self, branch: Branch, word: str) -> list[str]:
        """The lines of a branch before its statements, which begin with ``word`` or ``else``."""
        indent = branch.column * " "
        if isinstance(branch.test, bool):
            return self._moved([f"{indent}else:"])
        if branch.test is not branch.whole:
            return self._moved([f"{indent}{word} {self._written(branch.test)}:"])
        lines = self._changed(branch.line, self._header_of(branch), [branch.test])
        return [re.sub(r"^( *)(?:el)?if\b", rf"\1{word}", lines[0]), *lines[1:]]

    def _written(self, test: ast.expr, inner: bool = False) -> str:
        """Text of the rest of a condition."""
        if isinstance(test, ast.BoolOp):
            word = " or " if isinstance(test.op, ast.Or) else " and "
            text = word.join(self._written(value, True) for value in test.values)
            return f"({text})" if inner else text
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            text = self._written(test.operand, True)
            plain = isinstance(test.operand, (*_ATOMS, ast.BoolOp))
            return f"not {text}" if plain else f"not ({text})"
        text = _joined(self._segment(test))
        return f"({text})" if isinstance(test, ast.IfExp) else text

    def _moved(self, lines: Iterable[str]) -> list[str]:
        blank = self._shift * " "
        return [line.removeprefix(blank).rstrip() for line in lines]

    def _changed(self, first: int, last: int, nodes: Sequence[ast.AST]) -> list[str]:
        """Lines from ``first`` to ``last``, without the parts that ``nodes`` there do not need."""
        lines = self._lines[first : last + 1]
        if any(map(self._may_change, lines)):
            edits: list[tuple[int, int, str]] = []
            for node in nodes:
                self._collect(node, edits)
            text = self._apply(self._starts[first], self._starts[last + 1] - 1, edits)
            lines = text.split("\n")
        return self._moved(lines)

    def _apply(self, start: int, end: int, edits: list[tuple[int, int, str]]) -> str:
        parts = []
        for begin, stop, new in sorted(edits):
            parts += [self._text[start:begin], new]
            start = stop
        return "".join([*parts, self._text[start:end]])

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.arg | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._place(node.lineno - 1, node.col_offset),
            self._place(node.end_lineno - 1, node.end_col_offset),
        )

    def _place(self, line: int, column: int) -> int:
        """Offset in the text of a line's column, which Python counts in bytes."""
        text = self._lines[line]
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return self._starts[line] + column

    def _segment(self, node: ast.AST) -> str:
        """The text of an expression, without the parts that it does not need."""
        edits: list[tuple[int, int, str]] = []
        self._collect(node, edits)
        return self._apply(*self._span(node), edits)

    def _collect(self, node: ast.AST, edits: list[tuple[int, int, str]]) -> None:
        """Note what becomes of the text of ``node``, from left to right."""
        if isinstance(node, ast.Name | ast.Constant):
            return
        if isinstance(node, ast.IfExp):
            taken = self._needed.decided(node, self._function)
            if isinstance(taken, bool):
                branch = node.body if taken else node.orelse
                edits.append((*self._without_parentheses(node, branch), self._segment(branch)))
                return
            if taken is not node.test:
                self._collect(node.body, edits)
                edits.append((*self._span(node.test), self._written(taken)))
                self._collect(node.orelse, edits)
                return
        stays = self._needed.arguments(node, self._function)
        if stays is not None and len(stays) < len(arguments_of(node)):
            self._collect_arguments(node, stays, edits)
            return
        for child in children(node):
            self._collect(child, edits)

    def _without_parentheses(self, node: ast.IfExp, branch: ast.expr) -> tuple[int, int]:
        """The place of ``node``, with parentheses that ``branch`` does not need there."""
        start, end = self._span(node)
        around = self._text[start - 2 : start], self._text[end : end + 1]
        if isinstance(branch, _ATOMS) and around[1] == ")" and re.match(r"[\s(=,\[]\(", around[0]):
            return start - 1, end + 1
        return start, end

    def _collect_arguments(
        self, node: ast.AST, stays: list[ast.expr | ast.keyword], edits: list[tuple[int, int, str]]
    ) -> None:
        """Note a call's arguments again, of which some stay."""
        whole = node.elts[1] if isinstance(node, ast.Tuple) else node
        start, end = self._span(whole)
        if isinstance(whole, ast.Call):
            start = self._text.index("(", self._span(whole.func)[1])
        line = self._text.rfind("\n", 0, start) + 1
        before = self._text[line:start]
        rest = self._text[end : self._text.index("\n", end)]
        indent = before[: len(before) - len(before.lstrip())]
        texts = [_joined(self._segment(argument)) for argument in stays]
        if isinstance(whole, ast.Tuple) and len(texts) == 1:
            texts[0] += ","
        lines = _laid_out("(", texts, ")", indent, len(before) - self._shift, len(rest))
        edits.append((start, end, "\n".join(lines)))


def _laid_out(
    before: str, parts: list[str], after: str, indent: str, used: int = 0, rest: int = 0
) -> list[str]:
    """``parts`` in parentheses: in the line, or in lines of their own if it gets too long.

    ``used`` and ``rest``: characters of the line before and behind.
    """
    line = f"{before}{', '.join(parts)}{after}"
    if used + len(line) + rest <= _WIDTH:
        return [line]
    return [before, *_filled(parts, indent + _STEP), indent + after]


def _filled(parts: Sequence[str], indent: str) -> list[str]:
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 2 <= _WIDTH:
            lines[-1] += f" {part},"
        else:
            lines.append(f"{indent}{part},")
    return lines


def _joined(text: str) -> str:
    """An expression in one line."""
    if "\n" not in text:
        return text
    text = re.sub(r"([(\[])\s*\n\s*", r"\1", text)
    text = re.sub(r",?\s*\n\s*([)\]])", r"\1", text)
    return re.sub(r"\s*\n\s*", " ", text)


def _first_line(item: ast.stmt) -> int:
    above = item.decorator_list if isinstance(item, ast.FunctionDef | ast.ClassDef) else []
    return min([item.lineno, *(node.lineno for node in above)]) - 1


def _leading_blanks(lines: list[str]) -> int:
    return next((number for number, line in enumerate(lines) if line.strip()), len(lines))
