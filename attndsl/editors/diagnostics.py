"""Problems of a file at their places: errors, and warnings about probably unintended text.

Non-goals: what calls get wrong; programs of files other than the one that is open.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from attndsl.errors import AttnDSLError, ProgramWarning, flatten
from attndsl.foundation.caches import memoised
from attndsl.frontend import Absent, Bound
from attndsl.frontend import surface as s
from attndsl.frontend.error_recovery import statements_of
from attndsl.pipeline import warnings_of
from attndsl.source import Source, Span

from .embedded_programs import programs_in

if TYPE_CHECKING:
    from attndsl.frontend import Declared

    from .embedded_programs import EmbeddedProgram

MOST_SECONDS = 2.0
"""Time for all programs of a file; those after that are left for the command line."""
_MOST = 500
"""Errors of a file."""
_COLUMN = 80
_BOUND = "<param> "
"""Prefix of the names of params that a configuration binds, in place of the names of files."""


class Level(Enum):
    """Severity of a problem."""

    ERROR = "error"
    WARNING = "warning"
    """The program is valid but probably unintended."""
    REMARK = "remark"
    """A remark about the check itself."""


class FileProblem(NamedTuple):
    """One error or warning of a file."""

    start: int
    end: int
    message: str
    """The message, with the hint on a line of its own."""
    kind: str
    """Name of the error's class."""
    elsewhere: Span | None = None
    """Its place, if that is in another file, which this one imports."""
    level: Level = Level.ERROR


def problems_in(text: str, path: str) -> list[FileProblem]:
    """All that is wrong with the file at ``path`` whose text is ``text``, in order."""
    found = programs_in(text, path)
    problems = [_of_file(error, text) for error in found.errors]
    end = time.monotonic() + MOST_SECONDS
    for program in found.programs:
        many = len(problems) >= _MOST
        if many or time.monotonic() > end:
            start, stop = program.in_file(0, 1)
            why = f"there are {len(problems)} errors" if many else "checks took too long"
            message = f"{why}: programs from '{program.name}' on are not checked"
            hint = f"run attndsl check {os.path.basename(path)}"
            problems.append(
                FileProblem(
                    start, stop, f"{message}\nhint: {hint}", "LimitError", None, Level.REMARK
                )
            )
            break
        problems += [_of_program(error, program) for error in _errors_of(program)]
    return sorted(problems, key=lambda problem: problem[:3])


def _errors_of(program: EmbeddedProgram) -> tuple[AttnDSLError, ...]:
    # The file moves around what it binds, so that places in it are no part of what is remembered.
    declared = tuple(
        (name, replace(given, span=Span(Source("", _BOUND + name), 0, 0)))
        if isinstance(given, Bound | Absent)
        else (name, given)
        for name, given in program.declared.items()
    )
    if "import" in program.source.text:  # Other files may change meanwhile.
        return _check(program.source, declared)
    return _remembered(program.source, declared)


def _check(source: Source, declared: tuple[tuple[str, Declared], ...]) -> tuple[AttnDSLError, ...]:
    """The errors, or the warnings of a program without errors."""
    try:
        found = warnings_of(source, dict(declared))
    except AttnDSLError as error:
        return tuple(_without_frames(each) for each in flatten(error))
    # A file that somebody has just made is empty.
    return found if source.text.strip() else ()


def _without_frames(error: AttnDSLError) -> AttnDSLError:
    """``error`` without what raised it: those frames hold all trees and nodes of the program."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


_remembered = memoised("problems of programs by source, declared", 2048)(_check)
"""Memoised :func:`_check`: a change of one program in a file leaves the others as they are."""


def _told(error: AttnDSLError, where: str = "") -> str:
    hint = f"\nhint: {error.hint}" if error.hint else ""
    return f"{where}{error.message}{hint}"


def _of_file(error: AttnDSLError, text: str) -> FileProblem:
    start, end = 0, _first_line(text)
    if error.span is not None:  # What lacks at the end of a file is said of its last character.
        start = min(error.span.start, max(0, len(text) - 1))
        end = min(max(error.span.end, start), len(text))
    return FileProblem(start, end, _told(error), type(error).__name__)


def _first_line(text: str) -> int:
    end = text.find("\n", 0, _COLUMN)
    return min(len(text), _COLUMN) if end < 0 else end


def _of_program(error: AttnDSLError, program: EmbeddedProgram) -> FileProblem:
    found = _placed(error, program)
    return found._replace(level=Level.WARNING) if isinstance(error, ProgramWarning) else found


def _placed(error: AttnDSLError, program: EmbeddedProgram) -> FileProblem:
    kind, span = type(error).__name__, error.span
    if span is None:
        return FileProblem(
            *program.in_file(0, _first_line(program.source.text)), _told(error), kind
        )
    if span.source == program.source:
        return FileProblem(*program.in_file(span.start, span.end), _told(error), kind)
    if span.source.name.startswith(_BOUND):
        return _of_param(error, program.declared[span.source.name.removeprefix(_BOUND)], program)
    where = f"{os.path.basename(span.source.name)}:{span.line}:{span.column}: "
    place = _import_of(span.source.file, program.source)
    return FileProblem(*program.in_file(*place), _told(error, where), kind, span)


def _of_param(error: AttnDSLError, given: Declared, program: EmbeddedProgram) -> FileProblem:
    """An error of a value that the configuration binds, where it does so if that is known."""
    kind = type(error).__name__
    at = given.span if isinstance(given, Bound | Absent) else None
    if at is not None:
        return FileProblem(at.start, at.end, _told(error), kind)
    return FileProblem(*program.in_file(0, _first_line(program.source.text)), _told(error), kind)


def _import_of(file: str | None, source: Source) -> tuple[int, int]:
    """The import in ``source`` that reads ``file``, or its first one, which may lead there."""
    imports = [x for x in statements_of(source) if isinstance(x, s.Import)]
    if not imports:
        return 0, _first_line(source.text)
    folder = os.path.dirname(source.file or "")
    wanted = os.path.normpath(file or "")
    for each in imports:
        if os.path.normpath(os.path.join(folder, each.file)) == wanted:
            return each.span.start, each.span.end
    return imports[0].span.start, imports[0].span.end
