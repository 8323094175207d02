"""Count what makes the kernels hard to change, at any commit.

``python tools/counts.py da52182 HEAD`` prints one column a commit; without commits it counts the
working tree. Commits are read with ``git archive``; nothing is checked out.

What is counted, all of it in ``backends/``:

- *Device functions* are those decorated with ``triton.jit`` or ``gluon.jit``. *Entries* are
  those that are launched: functions of templates called ``attention_...`` or as ``ENTRIES`` says,
  and ``FIXED_ENTRIES``.
- A *parameter* is a name in such a function's signature. A *hook* (a line ``#: name``, which text
  replaces) in a signature stands for any number of parameters and counts as one, in its own row.
- A *line that only passes arguments* is a line of a template that lies within the parentheses of a
  signature or a call, begins and ends no such parentheses that go on over other lines, and holds
  arguments, with whatever expressions they are, or a hook. A hook within the tuple that a call's
  results go to counts too.
- A *table of kernels* is a name of a module or a class whose value is a dict keyed by names of
  kernels, or a tuple, list or set of nothing else.
- An *import across families* is a name that a module of one family of kernels imports from another.
  A module's family is the folder or file name in its path that ``FAMILIES`` lists.
- *Ways to unpack a call* are listed by hand in ``UNPACKINGS``. One counts if the function exists
  and makes a call from its fields.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import tokenize
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from sources import is_device_code, lines_of, parse, read_commit, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sources import Sources

FAMILIES = {"triton": "portable", "portable": "portable", "hopper": "hopper"}
"""The family of kernels that a folder or a file belongs to, by its name."""
KERNEL_NAMES = frozenset(
    ("forward", "backward", "backward_q", "backward_kv", "tangent", "forward_tangent", "distances",
     "pairs", "stored", "scattered", "scatter_bounds", "scatter_sums", "scatter_together")
)  # fmt: skip
ENTRIES = frozenset(
    ("distances", "pairs", "stored", "scattered", "summarise", "classify", "refine", "list_tiles")
)
FIXED_ENTRIES = frozenset(
    (
        "row_statistics",
        "prepare_backward",
        "dq_from_sums",
        "sum_of_heads",
        "attention_append",
        "find_chunks",
        "gather_chunk_keys",
        "move_chunk_rows",
    )
)
"""Entries that lie outside templates, since their text is the same for all programs."""
UNPACKINGS = (
    ("attndsl/call/autograd.py", "_restore"),
    ("attndsl/call/double_backward.py", "_call"),
    ("attndsl/call/chunked_autograd.py", "Packed.call"),
    ("attndsl/call/torch_ops_impl.py", "_call"),
    ("attndsl/call/prepared.py", "PreparedCall.call"),
)
"""Functions that put a call together from what another one took apart: file and name."""
_HOOK = re.compile(r"\s*#: (\w+)\s*$")


class Function(NamedTuple):
    """A device function."""

    path: str
    name: str
    parameters: int
    """Names in its signature, without hooks."""
    hooks: int
    """Hooks in its signature."""


def of_backends(sources: Sources) -> dict[str, str]:
    """The files of ``backends/``."""
    return {path: text for path, text in sources.items() if path.startswith("backends/")}


def templates(sources: Sources) -> dict[str, str]:
    """The files that lie in a folder ``templates``."""
    return {
        path: text
        for path, text in of_backends(sources).items()
        if "templates" in PurePosixPath(path).parts
    }


def device_functions(sources: Sources) -> list[Function]:
    """All device functions of ``backends/``, in the order of their files."""
    found = []
    for path, text in of_backends(sources).items():
        lines = text.splitlines()
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.FunctionDef) and is_device_code(node):
                signature = lines[node.lineno - 1 : node.body[0].lineno - 1]
                hooks = sum(_HOOK.match(line) is not None for line in signature)
                found.append(Function(path, node.name, _parameters(node.args), hooks))
    return found


def entries(functions: Sequence[Function]) -> list[Function]:
    """Those of ``functions`` that are launched."""
    return [
        function
        for function in functions
        if function.name in FIXED_ENTRIES
        or (
            "templates" in PurePosixPath(function.path).parts
            and (function.name in ENTRIES or function.name.startswith("attention_"))
        )
    ]


def hook_names(sources: Sources) -> set[str]:
    """Names of the hooks of all templates, ``begin`` not among them: it only ends the header."""
    found = set()
    for text in templates(sources).values():
        matches = (_HOOK.match(line) for line in text.splitlines())
        found |= {match.group(1) for match in matches if match}
    return found - {"begin"}


def passing_lines(text: str) -> int:
    """Lines of a template that only pass arguments."""
    inside: dict[int, bool] = {}
    borders = set()
    # Inner parentheses come after those around them.
    for first, last, of_call in sorted(_parentheses(text), key=lambda item: (item[0], -item[1])):
        borders |= {first, last}
        inside |= dict.fromkeys(range(first + 1, last), of_call)
    found = 0
    for number, line in enumerate(text.splitlines(), 1):
        if number in borders or number not in inside or not line.strip():
            continue
        hook = _HOOK.match(line) is not None
        found += hook or (inside[number] and not line.lstrip().startswith("#"))
    return found


def kernel_tables(sources: Sources) -> list[str]:
    """Tables of facts about kernels, as ``FILE:NAME``."""
    found = []
    for path, text in sources.items():
        for scope in _scopes(parse(text)):
            for node in scope.body:
                if isinstance(node, ast.Assign):
                    name, value = ast.unparse(node.targets[0]), node.value
                elif isinstance(node, ast.AnnAssign) and node.value is not None:
                    name, value = ast.unparse(node.target), node.value
                else:
                    continue
                if _is_kernel_table(value):
                    found.append(f"{path}:{name}")
    return found


def kernel_comparisons(sources: Sources) -> int:
    """Comparisons with a kernel's name."""
    found = 0
    for text in sources.values():
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.Compare):
                constants = (part for part in ast.walk(node) if isinstance(part, ast.Constant))
                found += any(part.value in KERNEL_NAMES for part in constants)
    return found


def unpackings(sources: Sources) -> list[str]:
    """The ways to unpack a call that there are, as ``FILE:NAME``."""
    found = []
    for path, name in UNPACKINGS:
        function = _functions_of(sources.get(path, "")).get(name)
        if function is not None and _called(function) & {"Call", "replace"}:
            found.append(f"{path}:{name}")
    return found


def family_imports(sources: Sources) -> int:
    """Names that one family of kernels imports from another."""
    found = 0
    for path, text in of_backends(sources).items():
        own = _family(PurePosixPath(path).with_suffix("").parts)
        if own is None:
            continue
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    other = _family([*_target(path, node), alias.name])
                    found += other not in (None, own)
    return found


def count(sources: Sources) -> dict[str, int | str]:
    """All figures, by what they are figures of."""
    backends, texts = of_backends(sources), templates(sources)
    functions = device_functions(sources)
    launched = entries(functions)
    called = [function for function in functions if function not in launched]
    in_templates = [function for function in functions if function.path in texts]
    passing = sum(passing_lines(text) for text in texts.values())
    filled = sum(bool(line.strip()) for text in texts.values() for line in text.splitlines())
    return {
        "backends: modules": len(backends),
        "backends: lines": lines_of(backends),
        "templates: files": len(texts),
        "templates: lines": lines_of(texts),
        "templates: lines that only pass arguments": passing,
        "templates: their share of non-blank lines": f"{100 * passing / max(1, filled):.1f}%",
        "templates: names of hooks": len(hook_names(sources)),
        **_figures("device functions", called),
        **_figures("entries", launched),
        **_figures("device functions and entries of templates", in_templates),
        "tables of kernels": len(kernel_tables(sources)),
        "comparisons with a kernel's name": kernel_comparisons(sources),
        "ways to unpack a call": len(unpackings(sources)),
        "imports across families": family_imports(sources),
    }


def _figures(name: str, functions: Sequence[Function]) -> dict[str, int | str]:
    numbers = [function.parameters for function in functions] or [0]
    return {
        name: len(functions),
        f"{name}: parameters": sum(numbers),
        f"{name}: hooks in signatures": sum(function.hooks for function in functions),
        f"{name}: parameters, median": f"{statistics.median(numbers):g}",
        f"{name}: parameters, most": max(numbers),
    }


def _parameters(arguments: ast.arguments) -> int:
    named = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    return named + (arguments.vararg is not None) + (arguments.kwarg is not None)


def _parentheses(text: str) -> Iterator[tuple[int, int, bool]]:
    """All brackets that go on over several lines.

    Of each: its first line, its last one, and whether it is of a signature or a call.
    """
    skipped = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    opened = []
    before = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in skipped:
            continue
        if token.string in ("(", "[", "{"):
            of_call = token.string == "(" and before is not None and _can_be_called(before)
            opened.append((token.start[0], of_call))
        elif token.string in (")", "]", "}"):
            first, of_call = opened.pop()
            if first != token.start[0]:
                yield first, token.start[0], of_call
        before = token


def _can_be_called(token: tokenize.TokenInfo) -> bool:
    words = ("import", "return", "in", "and", "or", "not", "if", "else", "assert", "is")
    if token.type == tokenize.NAME:
        return token.string not in words
    return token.string in (")", "]")


def _scopes(tree: ast.Module) -> list[ast.Module | ast.ClassDef]:
    return [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]


def _is_kernel_table(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):
        # None stands before another table that is unpacked into this one.
        names = [key for key in value.keys if key is not None]
    elif isinstance(value, (ast.Tuple, ast.List, ast.Set)):
        names = value.elts
    else:
        return False
    return len(names) > 1 and all(
        isinstance(name, ast.Constant) and name.value in KERNEL_NAMES for name in names
    )


def _functions_of(text: str) -> dict[str, ast.FunctionDef]:
    """A file's functions by their names, those of methods behind their class's."""
    found: dict[str, ast.FunctionDef] = {}
    for scope in _scopes(parse(text)):
        prefix = f"{scope.name}." if isinstance(scope, ast.ClassDef) else ""
        functions = (node for node in scope.body if isinstance(node, ast.FunctionDef))
        found |= {prefix + node.name: node for node in functions}
    return found


def _called(function: ast.FunctionDef) -> set[str]:
    """What ``function`` calls by a name alone."""
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {target.id for target in calls if isinstance(target, ast.Name)}


def _family(parts: Sequence[str]) -> str | None:
    return next((FAMILIES[part] for part in parts if part in FAMILIES), None)


def _target(path: str, node: ast.ImportFrom) -> list[str]:
    """Parts of the name of the module that ``node``, in the file at ``path``, imports from.

    Modules of other projects have none.
    """
    own = (node.module or "").split(".") if node.module else []
    if node.level:
        return [*PurePosixPath(path).parts[: -node.level], *own]
    return own if own[0] == "attndsl" else []


def main(arguments: Sequence[str] | None = None, echo: Callable[[str], object] = print) -> None:
    """Print the table of the commits named on the command line."""
    parser = argparse.ArgumentParser(description="Count what makes the kernels hard to change.")
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="the working tree if none")
    parser.add_argument("--names", action="store_true", help="list tables and ways to unpack too")
    options = parser.parse_args(arguments)
    found = {name: read_commit(name) for name in options.commits} or {"now": read_commit(None)}
    echo(table({name: count(sources) for name, sources in found.items()}))
    if options.names:
        for name, sources in found.items():
            echo("\n".join([f"\n{name}:", *kernel_tables(sources), *unpackings(sources)]))


if __name__ == "__main__":
    main()
