"""``attndsl check``: all errors and warnings of programs, in several formats.

Never imports torch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from attndsl.config import PROGRAM_SUFFIX, SUFFIXES
from attndsl.errors import AttnDSLError, ProgramWarning, counted, flatten, render
from attndsl.pipeline import warnings_of

from .error_formats import Format, github_line
from .file_arguments import find_files, tell_skipped
from .program_inputs import read_programs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attndsl.frontend import Declared

    from .file_arguments import Skipped
    from .program_inputs import NamedProgram


def check(
    arguments: Sequence[str],
    declared: Mapping[str, Declared],
    form: Format,
    key: str | None = None,
    strict: bool = False,
) -> int:
    """Check all programs that ``arguments`` stand for and print the errors and the warnings.

    Args:
        arguments: Files, folders and patterns.
        declared: What the command line declares.
        form: How to print.
        key: Where programs stand in configurations.
        strict: Whether warnings count as errors do.

    Returns:
        1 if there is something that counts, otherwise 0.

    Raises:
        UsageError: An argument stands for no file.
    """
    files = find_files(arguments, (PROGRAM_SUFFIX, *SUFFIXES), key)
    found: list[tuple[str, AttnDSLError]] = []
    checked: list[tuple[str, NamedProgram]] = []
    for file in files.files:
        try:
            programs = read_programs(file, key)
        except AttnDSLError as error:
            found += [(file, each) for each in flatten(error)]
            continue
        for program in programs:
            checked.append((file, program))
            given = program.declared(declared)
            try:
                found += [(file, each) for each in warnings_of(program.source, given)]
            except AttnDSLError as error:
                found += [(file, each) for each in flatten(error)]
    warned = sum(_is_warning(each) for _, each in found)
    wrong = len(found) - warned
    if form is Format.JSON:
        _print_json(checked, found, files.skipped)
    else:
        tell_skipped(files.skipped)
        for file, problem in found:
            print(_line(file, problem) if form is Format.GITHUB else _shown(problem) + "\n")
        said = [counted(wrong, "error") if wrong else "no errors"]
        said += [counted(warned, "warning")] if warned else []
        hint = " (--strict makes the exit code 1)" if warned and not wrong and not strict else ""
        print(f"{counted(len(checked), 'program')}: {', '.join(said)}{hint}")
    return 1 if wrong or (strict and warned) else 0


def _is_warning(problem: AttnDSLError) -> bool:
    return isinstance(problem, ProgramWarning)


def _shown(problem: AttnDSLError) -> str:
    if not _is_warning(problem):
        return render(problem)
    named = type(problem)(f"warning: {problem.message}", problem.span, problem.hint)
    return render(named)


def _line(file: str, problem: AttnDSLError) -> str:
    level = "warning" if _is_warning(problem) else "error"
    return github_line(file, describe(file, problem), level)


def _print_json(
    checked: Sequence[tuple[str, NamedProgram]],
    found: Sequence[tuple[str, AttnDSLError]],
    skipped: Sequence[Skipped],
) -> None:
    described = [(file, each) for file, each in checked if each.description is not None]
    whole = {
        "ok": all(_is_warning(each) for _, each in found),
        "programs": len(checked),
        "errors": [describe(file, each) for file, each in found if not _is_warning(each)],
        "warnings": [describe(file, each) for file, each in found if _is_warning(each)],
        "descriptions": [
            {"file": file, "name": each.name, "description": each.description}
            for file, each in described
        ],
        "skipped": [each._asdict() for each in skipped],
    }
    print(json.dumps(whole, indent=1))


def describe(file: str, error: AttnDSLError) -> dict[str, Any]:
    """``error`` as JSON values; lines and columns count from 1, ends are exclusive."""
    span = error.span
    place: dict[str, Any] = {"line": None, "column": None, "end_line": None, "end_column": None}
    if span is not None:
        covered = span.text
        last = covered.rpartition("\n")[2]
        same_line = "\n" not in covered
        place = {
            "line": span.line,
            "column": span.column,
            "end_line": span.line + covered.count("\n"),
            "end_column": len(last) + (span.column if same_line else 1),
        }
    return {
        "file": file if span is None else span.source.name,
        **place,
        "kind": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
    }
