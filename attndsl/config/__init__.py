"""Programs in YAML, TOML and JSON files and in mappings, alone or at a key of something larger.

A configuration is ``{name: program}`` or ``{name: {program, params, description}}``. Files are read
without making Python objects of them beyond text and numbers, so that no file, however hostile,
runs or fills anything.

Never imports torch.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndsl.errors import ArgumentError, AttnDSLError, ConfigError
from attndsl.foundation.bounded_io import read_text

from .documents import PlainDocument, shown
from .form import ConfigEntry, read_entries
from .json_toml import read_json, read_toml
from .key_paths import find_place, key_parts, told_place
from .program_places import holds_programs, places_of_programs, speaks_of_programs
from .size_limits import MAX_DEPTH, MAX_DESCRIPTION, MAX_ENTRIES, MAX_KEYS, MAX_NODES

if TYPE_CHECKING:
    from os import PathLike

    from .documents import Document

__all__ = [
    "MAX_DEPTH", "MAX_DESCRIPTION", "MAX_ENTRIES", "MAX_KEYS", "MAX_NODES", "PROGRAM_SUFFIX",
    "SUFFIXES", "ConfigEntry", "key_parts", "parse_document", "read_config", "read_document",
    "why_foreign",
]  # fmt: skip

SUFFIXES = (".yaml", ".yml", ".toml", ".json")
"""Suffixes of configuration files."""
PROGRAM_SUFFIX = ".attn"
"""Suffix of program files."""
_LIKE_TEXT = re.compile(r"[:=] |^\s*\{")


def read_config(
    given: str | PathLike[str] | Mapping[str, Any], key: str | None = None
) -> list[ConfigEntry]:
    """The programs of a file or a mapping, in its order; a program file has one.

    Args:
        given: The path of the file, or the mapping.
        key: Where the programs stand in it, such as ``model.attention``; see :mod:`.key_paths`.

    Raises:
        ArgumentError: ``given`` is neither, or ``key`` is no key.
        ConfigError: The file cannot be read, nothing stands at ``key``, or what stands there is not
            of that form; several of them come as :class:`~attndsl.errors.ProgramErrors`.
    """
    if key is not None:
        key_parts(key)  # Before the file, which may be slow to read.
    if isinstance(given, Mapping):
        document: Document = PlainDocument(None, given)
    else:
        path = _path(given)
        if Path(path).suffix.lower() == PROGRAM_SUFFIX:
            return [_program_of(path, key)]
        document = read_document(path, all_programs=key is None)
    place = find_place(document, key)
    try:
        return read_entries(document, place)
    except AttnDSLError:
        inside = [] if holds_programs(document, place) else places_of_programs(document, place)
        if not inside:
            raise
        raise ConfigError(
            f"{told_place(document, place)} is no mapping of names to programs",
            document.span(place.value) if place.parts else None,
            f"programs stand at {inside[0]}: give that as the key, "
            f"key={inside[0]!r} in Python or --key {shlex.quote(inside[0])}",
        ) from None


def read_document(path: str | PathLike[str], all_programs: bool = False) -> Document:
    """All that the file at ``path`` holds.

    Args:
        path: The file.
        all_programs: Whether it holds programs alone, so that a file of too many is refused early.

    Raises:
        ConfigError: The file cannot be read, or is not of the format that its name says.
    """
    name = os.fspath(path)
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        hint = "name it *.yaml, *.toml or *.json; a file of one program is *.attn"
        if not os.path.exists(path):
            hint += "; a text of one program is for attndsl.compile(text)"
        raise ConfigError(f"{name} is no YAML, TOML or JSON file", hint=hint)
    return parse_document(read_text(path), name, all_programs)


def parse_document(text: str, name: str, all_programs: bool = False) -> Document:
    """``text`` as what a file called ``name`` holds; see :func:`read_document`.

    Raises:
        ConfigError: The text is not of the format that the name says.
    """
    suffix = Path(name).suffix.lower()
    if suffix == ".json":
        return read_json(text, name)
    if suffix == ".toml":
        return read_toml(text, name)
    from .yaml_files import read_yaml  # yaml takes long to import.

    return read_yaml(text, name, all_programs)


def why_foreign(path: str | PathLike[str], key: str | None = None) -> str | None:
    """Reason why the file at ``path``, found in a folder, is taken for other software's.

    None if it is held to the form. A file that cannot be parsed is, if its text speaks of programs.

    Args:
        path: The file.
        key: Where its programs would stand. Whatever stands there is held to the form.

    Raises:
        ArgumentError: ``key`` is no key.
    """
    try:
        text = read_text(path)
    except ConfigError as error:
        return error.message
    try:
        document = read_document(path)
    except ConfigError as error:
        return None if speaks_of_programs(text) else error.message
    root = find_place(document, None)
    if key is None:
        if holds_programs(document, root):
            return None
        elsewhere = places_of_programs(document, root)
        more = f"; some stand at {elsewhere[0]} (--key)" if elsewhere else ""
        return f"no programs stand at its root{more}"
    try:
        find_place(document, key)
    except ConfigError:
        more = "; some programs stand at its root" if holds_programs(document, root) else ""
        return f"nothing stands at {key}{more}"
    return None


def _program_of(path: str | PathLike[str], key: str | None) -> ConfigEntry:
    """A program file's program, with the name of the file.

    Raises:
        ConfigError: The file cannot be read; ``key`` is given.
    """
    name = os.fspath(path)
    if key is not None:
        raise ConfigError(
            f"{name} is a program file, and has no key '{shown(key)}'",
            hint="drop the key: keys are for YAML, TOML and JSON files",
        )
    return ConfigEntry(Path(path).stem, read_text(path), name, file=name)


def _path(given: object) -> str | PathLike[str]:
    """``given`` as a path.

    Raises:
        ArgumentError: It is of another type.
        ConfigError: It is the text of a configuration.
    """
    if not isinstance(given, str | os.PathLike) or isinstance(os.fspath(given), bytes):
        raise ArgumentError(
            f"load() got a {type(given).__name__}",
            hint="pass the path of a YAML, TOML or JSON file, or a mapping",
        )
    name = os.fspath(given)
    like_text = "\n" in name or (_LIKE_TEXT.search(name) and not name.endswith(SUFFIXES))
    if like_text and not os.path.exists(given):
        raise ConfigError(
            "load() takes a path or a mapping, and got a text",
            hint="write it to a file, or read it first: load(yaml.safe_load(text)), "
            "load(tomllib.loads(text)) or load(json.loads(text))",
        )
    return given
