"""Programs from program files, configurations and standard input. Never imports torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from attndsl.config import PROGRAM_SUFFIX, SUFFIXES, read_config
from attndsl.errors import ConfigError, visible
from attndsl.foundation import bounded_io
from attndsl.foundation.scalars import read_number
from attndsl.frontend.declare import Absent, Bound, TensorSpec
from attndsl.source import Source

from .usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attndsl.frontend.declare import Declared

_TENSOR = re.compile(r"\s*([A-Za-z_]\w*)\s*\[([^\]]*)\]\s*(?::\s*(int|float|bool))?\s*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_DIGITS = 18
"""Digits of an int that fits 64 bits in any case; the program's own reader refuses longer ones."""
_SHOWN = 60
_NAMED = 20
"""Programs of a configuration whose names an error gives."""
_OTHERS = {
    ".md": "Markdown", ".markdown": "Markdown", ".rst": "reStructuredText", ".html": "HTML",
    ".ipynb": "a notebook", ".py": "Python",
}  # fmt: skip
"""The kinds of files whose suffix is never a program's."""


@dataclass(frozen=True, slots=True)
class NamedProgram:
    """One program, from whatever file."""

    name: str
    """Its name within a configuration file; the file's own name otherwise."""
    source: Source
    params: Mapping[str, Bound | Absent] = field(default_factory=dict)
    """Values that the configuration binds."""
    description: str | None = None
    """The configuration's description of it, for people."""

    def declared(self, more: Mapping[str, Declared]) -> dict[str, Declared]:
        """Its bound params, and ``more`` from the command line, which comes first."""
        return {**self.params, **more}


def is_config(file: str) -> bool:
    """Return True if ``file`` is read as a configuration rather than as one program."""
    return Path(file).suffix.lower() in SUFFIXES


def read_text(file: str) -> Source:
    """The text of a program file, or of standard input for ``-``.

    Raises:
        ConfigError: It cannot be read, or its name says that it holds something else.
    """
    if file == "-":
        return Source(bounded_io.read_standard_input(), "<stdin>")
    other = _OTHERS.get(Path(file).suffix.lower())
    if other is not None:
        raise ConfigError(
            f"{visible(file)} is {other} and no program",
            hint=f"write the program to a file *{PROGRAM_SUFFIX}, or give its text to standard "
            "input",
        )
    return Source(bounded_io.read_text(file), file, file=file)


def read_programs(file: str, key: str | None = None) -> list[NamedProgram]:
    """All programs of ``file``.

    Args:
        file: A program file, a configuration, or ``-``.
        key: Where the programs stand in a configuration; of no matter to other files.

    Raises:
        ConfigError: It cannot be read, nothing stands at ``key``, or that is no configuration of
            the documented form.
    """
    if not is_config(file):
        source = read_text(file)
        return [NamedProgram(source.name, source)]
    return [NamedProgram(e.name, e.source, e.params, e.description) for e in read_config(file, key)]


def check_key(file: str, key: str | None) -> None:
    """Refuse a key of a file that has none.

    Raises:
        UsageError: ``file`` is no configuration.
    """
    if key is not None and not is_config(file):
        raise UsageError(
            f"--key is given, and {file} is no configuration",
            hint=f"configurations are {', '.join(f'*{suffix}' for suffix in SUFFIXES)}",
        )


def read_program(file: str, name: str | None, key: str | None = None) -> NamedProgram:
    """The one program of ``file``, or its program ``name``.

    Raises:
        ConfigError: The file cannot be read, or nothing stands at ``key``.
        UsageError: It has several programs and ``name`` is None, or none of that name; ``key`` is
            given, and the file is no configuration.
    """
    check_key(file, key)
    programs = read_programs(file, key)
    names = ", ".join(visible(program.name) for program in programs[:_NAMED]) or "none"
    names += ", ..." if len(programs) > _NAMED else ""
    if name is not None and is_config(file):
        for program in programs:
            if program.name == name:
                return program
        raise UsageError(f"{file} has no program '{name}'", hint=f"its programs are: {names}")
    if len(programs) != 1:
        raise UsageError(
            f"{file} has {len(programs)} programs", hint=f"choose one with --name: {names}"
        )
    return programs[0]


def read_declarations(params: Iterable[str], tensors: Iterable[str]) -> dict[str, Declared]:
    """Read declarations such as ``-p window=1024`` and ``-t 'gain[heads]: float'``.

    Raises:
        UsageError: One of them is not of that form.
    """
    found: dict[str, Declared] = {}
    for text in params:
        name, value = read_assignment(text, "-p")
        found[name] = Bound(value, "is bound by -p")
    for text in tensors:
        match = _TENSOR.fullmatch(text)
        if match is None:
            raise UsageError(
                f"-t {text[:_SHOWN]!r} is no tensor", hint="write -t 'gain[heads]: float'"
            )
        dims = tuple(_dim(dim) for dim in match[2].split(",") if dim.strip())
        found[match[1]] = TensorSpec(dims, match[3] or "float")
    return found


def read_assignment(text: str, option: str) -> tuple[str, bool | int | float]:
    """``name=number`` as a pair.

    Raises:
        UsageError: It is not of that form.
    """
    name, _, written = (part.strip() for part in text.partition("="))
    value = read_number(written)
    if value is None or not _NAME.fullmatch(name):
        raise UsageError(
            f"{option} {text[:_SHOWN]!r} gives no name a number", hint=f"write {option} window=1024"
        )
    return name, value


def read_sizes(written: Iterable[str]) -> dict[str, int]:
    """Read sizes of dims such as ``--dim n=8``.

    Raises:
        UsageError: One of them is not of that form.
    """
    found = {}
    for text in written:
        name, value = read_assignment(text, "--dim")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"--dim {text[:_SHOWN]!r} gives no size", hint=f"write --dim {name}=8")
        found[name] = value
    return found


def _dim(text: str) -> str | int:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else text
