"""Find references in docstrings and comments that lead nowhere.

Two kinds are resolved:

- Roles such as ``:func:``, as Python would find the name there: in the classes around, in the
  module with its imports, as a module of the package, or as a builtin. ``.name`` and ``..name``
  are what a relative import finds. Members are those of a class's body, what its methods
  assign to ``self``, and what its bases have. Whatever lies in another project is taken as given.
  A template's module is put together of others: there a name may also be one of a template beside
  it, or one that a module of the package around names as a string.
- Names of Python files and pages, such as ``docs/README.md`` or ``layers.py``: a file's path must
  end so. Names within another project's folder are not resolved, nor those in capitals.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import re
import sys
import typing
from typing import TYPE_CHECKING, NamedTuple

from sources import children, docstrings_of, module_of, package_of, parse, statements_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from sources import Sources

ELSEWHERE = sys.stdlib_module_names | {
    "torch",
    "triton",
    "numpy",
    "jax",
    "flash_attn",
    "torchtitan",
}
"""Projects whose names are taken as given."""
_ROLE = re.compile(r":(?:func|class|mod|meth|data|attr|obj|exc|const):`([^`]+)`")
_FILE = re.compile(r"(?<![\w./<>*{}-])[\w./-]*\w\.(?:py|md)\b(?![\w(*-])")
_BASES = {"NamedTuple": tuple, "Enum": enum.Enum, "IntEnum": enum.IntEnum, "Flag": enum.Flag}
_BASES |= dict.fromkeys(("Protocol", "Generic", "ABC", "object"), object)
_NAMED_TUPLE = frozenset({"_replace", "_asdict", "_fields", "_make"})


class Dangling(NamedTuple):
    """A reference that leads nowhere."""

    path: str
    line: int
    target: str


class _Module(NamedTuple):
    """A module, and the statements that bind its names."""

    path: str
    names: dict[str, list[ast.AST]]
    exported: frozenset[str]
    """Names that it makes in other ways, such as ``__getattr__``: its strings in ``__all__``."""


def dangling(sources: Sources, paths: Collection[str]) -> Iterator[Dangling]:
    """All references of ``sources`` that lead nowhere, in a repository of files ``paths``."""
    package = _Package(sources)
    ends = {end for path in paths for end in _ends(path)}
    for path, text in sources.items():
        if ":`" not in text and ".py" not in text and ".md" not in text:
            continue
        for line, passage, scopes in _passages(text):
            for match in _ROLE.finditer(passage):
                if not package.leads(match[1], path, scopes):
                    yield Dangling(path, line + passage.count("\n", 0, match.start()), match[1])
            for match in _FILE.finditer(passage):
                name = match[0].removeprefix("./")
                if name in ends or name.partition(".")[0].isupper():
                    continue
                if name.partition("/")[0] not in ELSEWHERE:
                    yield Dangling(path, line + passage.count("\n", 0, match.start()), name)


def _ends(path: str) -> Iterator[str]:
    parts = path.split("/")
    return ("/".join(parts[place:]) for place in range(len(parts)))


def _passages(text: str) -> Iterator[tuple[int, str, tuple[ast.AST, ...]]]:
    """Docstrings and comments: line, text, and the definitions around, the outermost first."""
    around = _around(text)
    for docstring in docstrings_of(text):
        yield docstring.node.lineno, docstring.text, around.get(docstring.node.lineno, ())
    for line, comment in tokens_of(text).comments:
        yield line, comment, around.get(line, ())


@functools.cache
def _around(text: str) -> dict[int, tuple[ast.AST, ...]]:
    """Classes and functions around each line that any are around."""
    found: dict[int, tuple[ast.AST, ...]] = {}
    for node in statements_of(text):
        # The outer ones come first.
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for line in range(node.lineno, node.end_lineno + 1):
                found[line] = (*found.get(line, ()), node)
    return found


class _Package:
    """The modules of a repository, to find names in."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.modules = {module_of(path): _module(path, text) for path, text in sources.items()}
        self._templates: dict[str, set[str]] = {}

    def leads(self, target: str, path: str, scopes: tuple[ast.AST, ...]) -> bool:
        """Tell whether a role at ``path``, within the definitions ``scopes``, leads somewhere."""
        if target.endswith(">"):
            target = target[target.rindex("<") + 1 : -1]
        target = target.removeprefix("!").removeprefix("~").removesuffix("()")
        if target.startswith("."):
            name = target.lstrip(".")
            up = len(target) - len(name) - 1
            package = package_of(path).split(".")
            return self._has_path(".".join([*package[: len(package) - up], name]))
        first, *rest = target.split(".")
        module = module_of(path)
        if "/templates/" in path and first in self._put_together(module.rpartition(".")[0]):
            return True
        for scope in reversed(scopes):
            if isinstance(scope, ast.ClassDef):
                if self._has_member(module, scope, [first, *rest]):
                    return True
            elif any(self._leads_on(module, node, rest) for node in _bound(scope).get(first, ())):
                return True
        return (
            self._has(module, [first, *rest])
            or self._has_path(target)
            # Tools import each other by their names alone.
            or self._has_path(f"tools.{target}" if path.startswith("tools/") else target)
            or first in ELSEWHERE
            or (hasattr(builtins, first) and _is_python(getattr(builtins, first), rest))
        )

    def _put_together(self, templates: str) -> set[str]:
        """Names that a module of a folder of templates may hold."""
        if templates not in self._templates:
            found: set[str] = set()
            around = templates.rpartition(".")[0]
            for name, module in self.modules.items():
                if name.rpartition(".")[0] == templates:
                    found |= set(module.names)
                elif name.rpartition(".")[0] == around:
                    strings = re.findall(r"\"(\w+)\"", self.sources[module.path])
                    found |= set(strings)
            self._templates[templates] = found
        return self._templates[templates]

    def _has_path(self, dotted: str) -> bool:
        """Tell whether there is a module of this name, or a name in one."""
        parts = dotted.split(".")
        for stop in range(len(parts), 0, -1):
            module = ".".join(parts[:stop])
            if module in self.modules:
                return stop == len(parts) or self._has(module, parts[stop:])
        return False

    def _has(self, module: str, parts: list[str], seen: tuple[object, ...] = ()) -> bool:
        """Tell whether a module has a name, and so on."""
        if module not in self.modules or (module, *parts) in seen:
            return False
        seen = (*seen, (module, *parts))
        first, *rest = parts
        found = self.modules[module]
        if any(
            self._leads_on(module, node, rest, first, seen) for node in found.names.get(first, ())
        ):
            return True
        inner = f"{module}.{first}"
        if inner in self.modules:
            return not rest or self._has(inner, rest, seen)
        return first in found.exported

    def _leads_on(
        self,
        module: str,
        node: ast.AST,
        rest: list[str],
        name: str = "",
        seen: tuple[object, ...] = (),
    ) -> bool:
        """Tell whether what ``node`` binds has the names ``rest`` behind each other."""
        if isinstance(node, ast.ClassDef):
            return not rest or self._has_member(module, node, rest, seen)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return not rest
        if isinstance(node, ast.Import | ast.ImportFrom):
            target = self._imported(module, node, name)
            if target.partition(".")[0] not in ("attndsl", "tools"):
                return True
            if target in self.modules:
                return not rest or self._has(target, rest, seen)
            source, _, last = target.rpartition(".")
            return self._has(source, [last, *rest], seen)
        # Members of a variable are known where its annotation is a class's name.
        return True

    def _imported(self, module: str, node: ast.Import | ast.ImportFrom, name: str) -> str:
        """The dotted name that an import binds ``name`` to."""
        alias = next((each for each in node.names if (each.asname or each.name) == name), None)
        if isinstance(node, ast.Import):
            return alias.name if alias and alias.asname else name
        base = node.module or ""
        if node.level:
            parts = package_of(self.modules[module].path).split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
        return f"{base}.{alias.name if alias else name}"

    def _has_member(
        self, module: str, scope: ast.ClassDef, parts: list[str], seen: tuple[object, ...] = ()
    ) -> bool:
        """Tell whether a class has a member, its own or a base's; what that has is believed."""
        first = parts[0]
        if first in _members(scope):
            inner = next((n for n in scope.body if getattr(n, "name", "") == first), None)
            if isinstance(inner, ast.ClassDef) and parts[1:]:
                return self._has_member(module, inner, parts[1:], seen)
            return True
        return any(self._base_has(module, base, first, seen) for base in scope.bases)

    def _base_has(self, module: str, base: ast.expr, member: str, seen: tuple[object, ...]) -> bool:
        if isinstance(base, ast.Subscript):
            base = base.value
        text = ast.unparse(base)
        last = text.rpartition(".")[2]
        python = _BASES.get(last) or getattr(builtins, last, None)
        if python is not None:
            return hasattr(python, member) or (last == "NamedTuple" and member in _NAMED_TUPLE)
        if last in dir(typing):
            return False
        if self._has(module, text.split("."), seen):
            # A class of another project has any member.
            return self._has(module, [*text.split("."), member], seen)
        return False


@functools.cache
def _module(path: str, text: str) -> _Module:
    tree = parse(text)
    exported = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == "__all__":
                exported = {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    return _Module(path, _bound(tree), frozenset(map(str, exported)))


def _bound(scope: ast.AST) -> dict[str, list[ast.AST]]:
    """Statements that bind names in a scope, those within ``if`` and the like with them."""
    found: dict[str, list[ast.AST]] = {}

    def visit(node: ast.AST) -> None:
        for child in children(node):
            for name in _names(child):
                found.setdefault(name, []).append(child)
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child)

    visit(scope)
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        own = scope.args
        for each in (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg):
            if each is not None:
                found.setdefault(each.arg, []).append(each)
    return found


def _names(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or (
                alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name
            )
    else:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign | ast.For)
            else []
        )
        for target in targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


@functools.cache
def _members(scope: ast.ClassDef) -> frozenset[str]:
    """Names in a class's body, and those that its methods assign to ``self`` or ``cls``."""
    found = set(_bound(scope))
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            found |= {part.value for part in node.args if isinstance(part, ast.Constant)}
    return frozenset(found)


def _is_python(value: object, parts: list[str]) -> bool:
    """Tell whether a builtin has the names ``parts`` behind each other."""
    for part in parts:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True
