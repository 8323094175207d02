"""Python texts of the working tree or of a commit, and what the counters share to read them."""

from __future__ import annotations

import ast
import functools
import io
import os
import subprocess
import tarfile
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("attndsl", "backends")
_PLACES = {"backends": "attndsl.backends", "grammar": "attndsl.grammar"}
"""Packages that lie beside ``attndsl/`` and are parts of it."""

Sources = Mapping[str, str]
"""Texts of Python files, by their path from the root of the repository."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Docstring(NamedTuple):
    """A string that documents a module, a class, a function, or the attribute before it."""

    node: ast.Expr
    text: str
    owner: Documented
    """The module, class or function whose body the string is in."""
    of_attribute: bool


class Tokens(NamedTuple):
    """A text in tokens."""

    number: int
    """Names, operators, numbers and strings."""
    comments: tuple[tuple[int, str], ...]
    """Line and text of each comment."""
    lines: frozenset[int]
    """Lines that hold a token or a part of one, comments left out."""


def read_commit(commit: str | None, folders: Sequence[str] = FOLDERS) -> dict[str, str]:
    """Python files of ``folders`` at ``commit``, or of the working tree if None.

    Raises:
        subprocess.CalledProcessError: git knows no such commit, or no such folder in it.
    """
    if commit is None:
        paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
        return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}
    packed = _git("archive", commit, *folders)
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            text = archive.extractfile(member) if member.name.endswith(".py") else None
            if text is not None:
                found[member.name] = text.read().decode("utf-8")
    return found


def read_file(commit: str | None, path: str) -> str:
    """One file at ``commit`` or of the working tree; empty where there is none."""
    if commit is None:
        return (ROOT / path).read_text("utf-8") if (ROOT / path).is_file() else ""
    try:
        return _git("show", f"{commit}:{path}").decode("utf-8")
    except subprocess.CalledProcessError:
        return ""


def list_paths(commit: str | None) -> frozenset[str]:
    """Paths of all files at ``commit``; of the working tree, not ``build/`` and hidden folders."""
    if commit is not None:
        return frozenset(_git("ls-tree", "-r", "--name-only", commit).decode().splitlines())
    found = set()
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if not name.startswith(".") and name != "build"]
        found |= {Path(folder, name).relative_to(ROOT).as_posix() for name in files}
    return frozenset(found)


def lines_of(sources: Sources) -> int:
    """Lines of all files."""
    return sum(text.count("\n") for text in sources.values())


@functools.cache
def parse(text: str) -> ast.Module:
    """The syntax tree of a text."""
    return ast.parse(text)


@functools.cache
def statements_of(text: str) -> tuple[ast.AST, ...]:
    """The module and all statements of a text, without what stands in expressions."""
    return tuple(_statements(parse(text)))


@functools.cache
def tokens_of(text: str) -> Tokens:
    """The tokens of a text."""
    counted = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    number, comments, lines = 0, [], set()
    depth, first = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # From Python 3.12 on an f-string is many tokens.
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            first = first if depth else token.start[0]
            depth += 1
        elif kind == "FSTRING_END":
            depth -= 1
            if not depth:
                number += 1
                lines.update(range(first, token.end[0] + 1))
        elif token.type == tokenize.COMMENT:
            comments.append((token.start[0], token.string))
        elif token.type in counted and not depth:
            number += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return Tokens(number, tuple(comments), frozenset(lines))


@functools.cache
def docstrings_of(text: str) -> tuple[Docstring, ...]:
    """All docstrings of a text, in the order of the tree, and the strings under attributes."""
    found = []
    for owner in statements_of(text):
        if not isinstance(owner, Documented):
            continue
        before: ast.stmt | None = None
        for node in owner.body:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
                and (before is None or isinstance(before, ast.Assign | ast.AnnAssign))
            ):
                found.append(Docstring(node, node.value.value, owner, before is not None))
            before = node
    return tuple(found)


def module_of(path: str) -> str:
    """The dotted name of the module in the file at ``path``."""
    first, *parts = path.removesuffix(".py").split("/")
    parts = parts[:-1] if parts and parts[-1] == "__init__" else parts
    return ".".join([_PLACES.get(first, first), *parts])


def package_of(path: str) -> str:
    """The package that relative imports of the file at ``path`` start from."""
    module = module_of(path)
    return module if path.endswith("/__init__.py") else module.rpartition(".")[0]


@functools.cache
def functions_of(text: str) -> dict[str, Definition]:
    """Each function of the host by its qualified name; device code has limits of its own."""
    found = {}

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in children(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                within = (*names, child.name)
                if not isinstance(child, ast.ClassDef) and not is_device_code(child):
                    found[".".join(within)] = child
                visit(child, within)
            else:
                visit(child, names)

    visit(parse(text), ())
    return found


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The statements within a statement, handlers and cases, but not what is deeper."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(node, field, ())
        yield from inner


def is_device_code(function: Definition) -> bool:
    """Tell whether Triton or Gluon compiles ``function``."""
    decorators = {ast.unparse(each).partition("(")[0] for each in function.decorator_list}
    return bool(decorators & {"triton.jit", "gluon.jit"})


def lines_of_function(function: Definition) -> int:
    """Lines from ``def`` on, without the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def parameters_of(function: Definition) -> int:
    """Named parameters, without ``self``, ``cls`` and autograd's ``ctx``."""
    own = [*function.args.posonlyargs, *function.args.args]
    implied = bool(own) and own[0].arg in ("self", "cls", "ctx")
    return len(own) - implied + len(function.args.kwonlyargs)


def over(
    sources: Sources, measure: Callable[[Definition], int], most: int
) -> Iterator[tuple[str, int]]:
    """Each function of the host over a limit as ``FILE:NAME``, and what ``measure`` says of it."""
    for path, text in sources.items():
        for name, function in functions_of(text).items():
            if measure(function) > most:
                yield f"{path}:{name}", measure(function)


def table(columns: Mapping[str, Mapping[str, object]]) -> str:
    """Figures beside each other: one row each, one column a commit."""
    rows = [["", *columns]]
    # A column may lack a row: folders come and go.
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        rows.append([name, *(str(column.get(name, "-")) for column in columns.values())])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in children(node):
        yield from _statements(child)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout
