"""Programs from program files, configurations and standard input. Never imports torch."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from attndsl.config import MAX_FILE, read_config
from attndsl.errors import ConfigError
from attndsl.frontend.declare import Bound, TensorSpec
from attndsl.source import Source

from .usage import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attndsl.frontend.declare import Declared

CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
_TENSOR = re.compile(r"\s*([A-Za-z_]\w*)\s*\[([^\]]*)\]\s*(?::\s*(int|float|bool))?\s*")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class NamedProgram:
    """One program, from whatever file."""

    name: str
    """Its name within a configuration file; the file's own name otherwise."""
    source: Source
    params: Mapping[str, Bound] = field(default_factory=dict)
    """Values that the configuration binds."""

    def declared(self, more: Mapping[str, Declared]) -> dict[str, Declared]:
        """Its bound params, and ``more`` from the command line, which comes first."""
        return {**self.params, **more}


def is_config(file: str) -> bool:
    """Whether ``file`` is read as a configuration rather than as one program."""
    return Path(file).suffix.lower() in CONFIG_SUFFIXES


def read_text(file: str) -> Source:
    """The text of a program file, or of standard input for ``-``.

    Raises:
        ConfigError: It cannot be read.
    """
    if file == "-":
        if sys.stdin is None:
            raise ConfigError("cannot read <stdin>: it is closed")
        try:
            return Source(sys.stdin.read(MAX_FILE + 1), "<stdin>")
        except UnicodeDecodeError as error:
            raise ConfigError(f"<stdin> is not UTF-8 text: {error.reason}") from error
    try:
        with Path(file).open(encoding="utf-8", newline="") as stream:
            text = stream.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error.reason}") from error
    return Source(text, file)


def read_programs(file: str) -> list[NamedProgram]:
    """All programs of ``file``.

    Raises:
        ConfigError: It cannot be read, or is no configuration of the documented form.
    """
    if not is_config(file):
        source = read_text(file)
        return [NamedProgram(source.name, source)]
    return [
        NamedProgram(e.name, Source(e.text, e.source_name, e.first_line), e.params)
        for e in read_config(file)
    ]


def read_program(file: str, name: str | None) -> NamedProgram:
    """The one program of ``file``, or its program ``name``.

    Raises:
        ConfigError: The file cannot be read.
        UsageError: It has several programs and ``name`` is None, or none of that name.
    """
    programs = read_programs(file)
    names = ", ".join(program.name for program in programs) or "none"
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
    """What ``-p window=1024`` and ``-t 'gain[heads]: float'`` declare.

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
            raise UsageError(f"-t {text!r} is no tensor", hint="write -t 'gain[heads]: float'")
        dims = tuple(_dim(dim) for dim in match[2].split(",") if dim.strip())
        found[match[1]] = TensorSpec(dims, match[3] or "float")
    return found


def read_assignment(text: str, option: str) -> tuple[str, bool | int | float]:
    """``name=number`` as a pair.

    Raises:
        UsageError: It is not of that form.
    """
    name, _, written = (part.strip() for part in text.partition("="))
    value: bool | int | float | None = {"true": True, "false": False}.get(written.lower())
    for kind in (int, float):
        if value is None:
            try:
                value = kind(written)
            except ValueError:
                continue
    if value is None or not _NAME.fullmatch(name):
        raise UsageError(
            f"{option} {text!r} gives no name a number", hint=f"write {option} window=1024"
        )
    return name, value


def _dim(text: str) -> str | int:
    text = text.strip()
    return int(text) if text.isdigit() else text
