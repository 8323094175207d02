"""``attndsl check``: all the errors of programs, as text or as JSON. Never imports torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from attndsl.errors import AttnDSLError, ProgramErrors, render
from attndsl.pipeline import check as check_program

from .inputs import read_programs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attndsl.frontend import Declared


def check(files: Sequence[str], declared: Mapping[str, Declared], as_json: bool) -> int:
    """Check all programs of ``files`` and print the errors; 1 if there are any, otherwise 0."""
    found: list[tuple[str, AttnDSLError]] = []
    count = 0
    for file in files:
        try:
            programs = read_programs(file)
        except AttnDSLError as error:
            found += [(file, each) for each in flatten(error)]
            continue
        for program in programs:
            count += 1
            try:
                check_program(program.source, program.declared(declared))
            except AttnDSLError as error:
                found += [(file, each) for each in flatten(error)]
    if as_json:
        errors = [describe(file, each) for file, each in found]
        print(json.dumps({"ok": not found, "programs": count, "errors": errors}, indent=1))
    else:
        for _, each in found:
            print(render(each) + "\n")
        wrong = f"{len(found)} error{'s' * (len(found) != 1)}" if found else "no errors"
        print(f"{count} program{'s' * (count != 1)}: {wrong}")
    return 1 if found else 0


def flatten(error: AttnDSLError) -> tuple[AttnDSLError, ...]:
    """The errors that ``error`` stands for."""
    return error.errors if isinstance(error, ProgramErrors) else (error,)


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
