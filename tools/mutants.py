"""Small defects of Python sources: a comparison that is off by one, an operand that is not asked.

Only what functions of the host do is changed. Messages, annotations, representations and device
code stay as they are: the first three decide no result, and kernels have mutations of their own
(``tests/support/mutation.py``).
"""

from __future__ import annotations

import ast
import difflib
import random
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("attndsl", "backends")
TEMPLATES = "templates"
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
DEVICE = ("triton.jit", "gluon.jit", "triton.constexpr_function", "gluon.constexpr_function")
TELLING = ("__repr__", "__str__", "_repr_html_")
"""Functions that only people read."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    path: str
    """The path of the file, from the root."""
    line: int
    kind: str
    start: int
    """The start of the changed part, in bytes; it ends before ``end``."""
    end: int
    new: str

    @property
    def name(self) -> str:
        """The same in each run over the same sources."""
        return f"{self.path}:{self.line}:{self.start}-{self.end}:{self.kind}"

    def applied(self, text: str) -> str:
        """The file's ``text`` with the change."""
        data = text.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

    def diff(self, text: str) -> str:
        """The change as a patch."""
        lines = (each.splitlines(keepends=True) for each in (text, self.applied(text)))
        return "".join(difflib.unified_diff(*lines, self.path, self.path, n=2))


def sources() -> list[str]:
    """Paths of the product's files, from the root."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    names = (path.relative_to(ROOT) for path in found)
    return sorted(name.as_posix() for name in names if TEMPLATES not in name.parts)


def drawn(seed: int, count: int, only: Iterable[str] = ()) -> list[Mutant]:
    """Some mutants of the product, drawn from all; each kind is as likely as another.

    Args:
        seed: Of the draw.
        count: How many.
        only: Beginnings of paths; files of others are left out.
    """
    chosen = tuple(only) or FOLDERS
    paths = [path for path in sources() if path.startswith(chosen)]
    by_kind: dict[str, list[Mutant]] = {}
    for path in paths:
        for mutant in mutants_of(path, (ROOT / path).read_text("utf-8")):
            by_kind.setdefault(mutant.kind, []).append(mutant)
    generator = random.Random(seed)
    for kind in sorted(by_kind):
        generator.shuffle(by_kind[kind])
    found: list[Mutant] = []
    while len(found) < count and any(by_kind.values()):
        for kind in sorted(by_kind):
            if by_kind[kind] and len(found) < count:
                found.append(by_kind[kind].pop())
    return found


def mutants_of(path: str, text: str) -> list[Mutant]:
    """All mutants of one file."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _reached(ast.parse(text)):
        for kind, new in _changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            found.append(Mutant(path, node.lineno, kind, start, end, new))
    return found


def _reached(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """Expressions and statements within functions, but for those that decide no result."""

    def visit(node: ast.AST, inside: bool) -> Iterator[ast.expr | ast.stmt]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name in TELLING or any(map(_is_device, node.decorator_list)):
                return
            for statement in node.body:
                yield from visit(statement, True)
            return
        # Before Python 3.12, nodes within an f-string do not know where they stand.
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _only_for_types(node):
            return
        if inside and isinstance(node, ast.expr | ast.stmt):
            yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, inside)

    yield from visit(tree, False)


def _is_device(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).partition("(")[0] in DEVICE


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """Kinds of changes, and the text that stands there then."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", _with(node, ops=[COMPARISONS[type(op)]()])
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "connective", f"({_with(node, op=other)})"
            yield "operand dropped", f"({_joined(node, values[:-1])})"
            yield "operand dropped", f"({_joined(node, values[1:])})"
        case ast.BinOp(left=left, op=op) if type(op) in OPERATORS:
            yield "arithmetic", f"({_with(node, op=OPERATORS[type(op)]())})"
            if isinstance(op, ast.Add | ast.Sub | ast.Mult):
                yield "operand dropped", f"({ast.unparse(left)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negation", f"({ast.unparse(operand)})"
        case ast.IfExp(test=test):
            opposite = ast.UnaryOp(ast.Not(), test)
            yield "negation", f"({_with(node, test=opposite)})"
        case ast.Constant(value=bool() as value):
            yield "constant", str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", repr(value + 1)
        case ast.Call(args=[first, second, *rest]) if _may_swap(first, second):
            yield "arguments", _with(node, args=[second, first, *rest])
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement", "pass"


def _with(node: ast.AST, **fields: object) -> str:
    changed = copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return ast.unparse(changed)


def _joined(node: ast.BoolOp, values: list[ast.expr]) -> str:
    return ast.unparse(values[0]) if len(values) == 1 else _with(node, values=values)


def _may_swap(first: ast.expr, second: ast.expr) -> bool:
    kinds = ast.Name | ast.Attribute | ast.Subscript
    return (
        isinstance(first, kinds) and isinstance(second, kinds)
        and ast.unparse(first) != ast.unparse(second)
    )  # fmt: skip
