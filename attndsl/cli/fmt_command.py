"""``attndsl fmt``: program files in the canonical layout. Never imports torch."""

from __future__ import annotations

import difflib
import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attndsl.config import PROGRAM_SUFFIX
from attndsl.errors import ConfigError, visible
from attndsl.frontend.format import format_source

from .file_arguments import find_files, tell_skipped
from .program_inputs import is_config, read_text
from .usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from attndsl.source import Source


def format_files(arguments: Sequence[str], check: bool, diff: bool) -> int:
    """Format program files in place, and standard input and pipes to standard output.

    Args:
        arguments: Program files, and folders and patterns of them; ``-`` is standard input.
        check: Change nothing; name the files that would change.
        diff: Change nothing; print the changes.

    Returns:
        1 if ``check`` or ``diff`` is set and a file would change, else 0.

    Raises:
        UsageError: A configuration file, whose own layout would be lost. An argument stands for no
            file.
        ConfigError: A file cannot be written; it is as it was.
        AttnDSLError: A program with errors; it and those after it are left alone.
    """
    files, skipped = find_files(arguments, (PROGRAM_SUFFIX,))
    tell_skipped(skipped)
    for file in files:
        if is_config(file):
            raise UsageError(
                f"{file} is a configuration file, whose own layout 'fmt' does not know",
                hint="format program files (*.attn); 'attndsl check' reads configurations",
            )
    sources = ((file, read_text(file)) for file in files)
    changes = (
        Change(file, source, format_source(source.text, source.name)) for file, source in sources
    )
    return finish(changes, check, diff, ("reformat", "reformatted"))


class Change(NamedTuple):
    """A file, its present text and the new one."""

    file: str
    source: Source
    """The present text."""
    text: str


def finish(changes: Iterable[Change], check: bool, diff: bool, words: tuple[str, str]) -> int:
    """Write new texts, or with ``check`` or ``diff`` say what is new.

    Args:
        changes: One of each file, made when the ones before are written.
        check: Change nothing; name the files that would change.
        diff: Change nothing; print the changes.
        words: What is done to a file, and what then has been done.

    Returns:
        1 if ``check`` or ``diff`` is set and a file would change, else 0.

    Raises:
        ConfigError: A file cannot be written; it is as it was.
    """
    changed = 0
    verb, done = words
    for file, source, text in changes:
        if (file == "-" or not Path(file).is_file()) and not (check or diff):
            _print_program(text, source.name)
            continue
        if text == source.text:
            continue
        changed += 1
        if diff:
            rows = difflib.unified_diff(
                source.text.splitlines(keepends=True),
                text.splitlines(keepends=True),
                source.name,
                f"{source.name} ({done})",
            )
            for row in rows:
                print(visible(row.removesuffix("\n")))
        elif check:
            print(f"would {verb} {visible(source.name)}")
        else:
            _replace(file, text)
            print(f"{done} {visible(source.name)}")
    return 1 if changed and (check or diff) else 0


def _print_program(text: str, name: str) -> None:
    """``text`` as it is: elsewhere letters may be escaped, which would make another program."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"cannot write {name} in {encoding}, which has no {text[error.start]!a}",
            hint="set PYTHONIOENCODING=utf-8",
        ) from None
    print(text, end="")


def _replace(file: str, text: str) -> None:
    """Write ``text`` beside ``file`` and put it in its place, so that it is whole at any time."""
    place = Path(file).resolve()
    made = None
    try:
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=".attndsl-", delete=False) as new:
            made = new.name
            # Bytes, so that the file's line ends are what the formatter says they are.
            new.write(text.encode("utf-8"))
        shutil.copymode(place, made)
        os.replace(made, place)
    except OSError as error:
        if made is not None:
            Path(made).unlink(missing_ok=True)
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error
