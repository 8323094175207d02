"""Statements of a correct program that change nothing: names that no result reads.

Non-goals: values that make no difference, such as a term times 0; functions, which serve several
programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import ProgramWarning, UnusedWarning

from .. import surface as s
from ..reachable_names import is_target

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = "write 'score' if that is meant"


def unused(tree: s.Tree) -> Iterator[ProgramWarning]:
    """Locals, params and tensors that nothing reads, in the order of the text; or an empty text."""
    if not tree.statements:
        yield ProgramWarning("the program is empty, so it is plain attention", None, _PLAIN)
    reached = _reached(tree)
    targets = any(is_target(statement) for statement in tree.statements)
    for statement in tree.statements:
        if not isinstance(statement, s.Assign | s.ParamDef | s.TensorDef):
            continue
        name, span = statement.name.name, statement.name.span
        if name in reached or is_target(statement):
            continue
        if isinstance(statement, s.Assign):
            hint = f"use it, as in 'mask = {name}', or remove the line" if targets else None
            hint = hint or "write 'mask = ...' or 'score = ...'"
            yield UnusedWarning(f"nothing reads '{name}'", span, hint)
            continue
        kind = "param" if isinstance(statement, s.ParamDef) else "tensor"
        yield UnusedWarning(f"nothing reads the {kind} '{name}'", span, "use it, or remove it")


def _reached(tree: s.Tree) -> set[str]:
    """Names that the results read, by way of other names and functions too."""
    readers: dict[str, set[str]] = {}
    results: set[str] = set()
    for statement in tree.statements:
        read = s.names_in(statement)
        if is_target(statement):
            results |= read
        elif not isinstance(statement, (s.Import, s.Bare)):
            readers.setdefault(statement.name.name, set()).update(read)
    found: set[str] = set()
    ahead = list(results)
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += readers.get(name, ())
    return found
