"""``attndsl fmt --upgrade``: texts of version 0.1 in program files and configurations. No torch.

A file that others of the same command import is read with them: what a name in it means is theirs
to say. Nothing is written before all programs are read without errors.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attndsl.config import PROGRAM_SUFFIX, SUFFIXES
from attndsl.editors.embedded_programs import programs_in
from attndsl.errors import ConfigError, raise_all
from attndsl.frontend.legacy_calls import inserted
from attndsl.frontend.upgrade import upgrade_of, upgraded

from .file_arguments import find_files, tell_skipped
from .fmt_command import Change, finish
from .program_inputs import is_config, read_text
from .usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from attndsl.editors.embedded_programs import EmbeddedProgram, Found
    from attndsl.frontend.legacy_calls import Insertion
    from attndsl.frontend.upgrade import Upgrade
    from attndsl.source import Source

_PLAIN = re.compile(r"[^'\n]*")
"""A text that may stand in single quotes as it is."""
Edit = tuple[int, str]
"""A place, and the text to put in there."""


@dataclass(slots=True)
class _File:
    """One of the files, and its new text."""

    name: str
    source: Source
    found: Found | None
    """The programs of a configuration."""
    edits: dict[Edit, None] = field(default_factory=dict)
    """Edits in the order of the text; an alias of YAML is the program that it names."""


def upgrade_files(arguments: Sequence[str], check: bool, diff: bool) -> int:
    """Rewrite files of version 0.1 in place, and standard input and pipes to standard output.

    Args:
        arguments: Program files and configurations, folders and patterns of them; ``-`` is standard
            input.
        check: Change nothing; name the files that would change.
        diff: Change nothing; print the changes.

    Returns:
        1 if ``check`` or ``diff`` is set and a file would change, else 0.

    Raises:
        UsageError: An argument stands for no file, or an imported file would change and is not
            among them.
        ConfigError: A file cannot be read or written, or its form has no place for the new text.
        AttnDSLError: A program does not parse, or may be of either version. Entries of
            configurations with errors are left alone, and told of when the others are written.
    """
    found, skipped = find_files(arguments, (PROGRAM_SUFFIX, *SUFFIXES))
    # In a larger configuration programs are found without its key.
    larger = [each.file for each in skipped if _has_programs(each.file)]
    tell_skipped([each for each in skipped if each.file not in larger])
    files = {_real(name): _file(name) for name in [*found, *larger]}
    imported: set[str] = set()
    alone: list[tuple[str, Upgrade]] = []
    for place, file in files.items():
        for program in _programs(file):
            upgrade = upgrade_of(program.source if program else file.source)
            others = [x for x in upgrade.sources if x != upgrade.sources[0]]
            imported |= {_real(x.file) for x in others if x.file is not None}
            if program is None:
                alone.append((place, upgrade))
            else:
                _note(file, _in_file(program, upgrade.of(program.source)))
            for other in others:
                _note_import(files, file, other, upgrade.of(other))
    for place, upgrade in alone:
        if place not in imported:
            file = files[place]
            _note(file, (x.edit for x in upgrade.of(file.source)))
    changes = [Change(file.name, file.source, _new(file)) for file in files.values()]
    code = finish(changes, check, diff, ("upgrade", "upgraded"))
    raise_all([error for file in files.values() if file.found for error in file.found.errors])
    return code


def _real(name: str) -> str:
    return name if name == "-" else os.path.realpath(name)


def _has_programs(name: str) -> bool:
    """Return True if a file found in a folder is a configuration with programs."""
    if not is_config(name):
        return False
    try:
        return bool(programs_in(read_text(name).text, os.path.abspath(name)).programs)
    except ConfigError:
        return False


def _file(name: str) -> _File:
    source = read_text(name)
    if not is_config(name):
        return _File(name, source, None)
    return _File(name, source, programs_in(source.text, os.path.abspath(name)))


def _programs(file: _File) -> tuple[EmbeddedProgram | None, ...]:
    """The programs of a configuration; None for a file that is one."""
    return (None,) if file.found is None else file.found.programs


def _note(file: _File, edits: Iterable[Edit]) -> None:
    file.edits |= dict.fromkeys(edits)


def _in_file(program: EmbeddedProgram, found: Iterable[Insertion]) -> Iterable[Edit]:
    for each in found:
        start = each.span.start
        # Behind the last character of a call, where the text may end in a quote.
        behind = each.text == ")"
        at = program.in_file(start - 1, start)[1] if behind else program.in_file(start, start)[0]
        yield at, each.text


def _note_import(
    files: dict[str, _File], importer: _File, source: Source, found: Sequence[Insertion]
) -> None:
    if not found:
        return
    assert source.file is not None
    file = files.get(_real(source.file))
    if file is None:
        raise UsageError(
            f"{source.name} has calls of version 0.1 and is not among the files",
            hint=f"{importer.name} imports it: name it too",
        )
    _note(file, (each.edit for each in found))


def _new(file: _File) -> str:
    """The new text of a file.

    Raises:
        ConfigError: The form of a configuration has no place for it.
    """
    text = inserted(file.source.text, file.edits)
    if file.found is None or not file.edits or _holds(file, text):
        return text
    # A text without quotes ends at a comma in YAML's lists and mappings of one line.
    for program in file.found.programs:
        assert program.places is not None
        start, end = program.in_file(0, len(program.source.text))
        changed = upgraded(program.source) != program.source.text
        written = file.source.text[start:end]
        if changed and _PLAIN.fullmatch(written) and file.source.text[start - 1] not in "\"'":
            file.edits = dict.fromkeys([(start, "'"), *file.edits, (end, "'")])
    text = inserted(file.source.text, file.edits)
    if not _holds(file, text):
        raise ConfigError(
            f"{file.name} has no place for the new text of its programs",
            hint="write its programs as blocks ('program: |'), or change them by hand: "
            "softcap(score, 50.0), score + alibi()",
        )
    return text


def _holds(file: _File, text: str) -> bool:
    """Tell whether a configuration with a new text holds its programs, as they are meant."""
    assert file.found is not None
    after = programs_in(text, os.path.abspath(file.name))
    held = [(x.name, x.source.text) for x in after.programs]
    wanted = [(x.name, upgraded(x.source)) for x in file.found.programs]
    return held == wanted and len(after.errors) == len(file.found.errors)
