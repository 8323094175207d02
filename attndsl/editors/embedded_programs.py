"""The programs of a file, and where each of their characters stands in it.

A program file is one program. A configuration has several, within quotes, escapes and indentation.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from bisect import bisect_left
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from attndsl.config import MAX_ENTRIES, SUFFIXES, parse_document
from attndsl.config.form import read_right_entries
from attndsl.config.key_paths import DocumentPlace, find_place, key_parts
from attndsl.config.program_places import (
    holds_programs,
    places_of_programs,
    speaks_of_programs,
    surely_holds_programs,
)
from attndsl.errors import AttnDSLError, ConfigError, LimitError, flatten
from attndsl.foundation.caches import memoised
from attndsl.source import Source, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attndsl.config import ConfigEntry
    from attndsl.config.documents import Document
    from attndsl.frontend import Declared

MAX_CONFIG = 1 << 18
"""Characters of a configuration: larger ones would be read for longer than anyone waits."""
_MAX_PLACES = 16
"""Keys of one file at which programs are looked for."""
_TOML_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*+"\s*:|("(?:[^"\\]|\\.)*+")', re.DOTALL)
"""Keys, and other strings."""
_TOML_TEXT = re.compile(  # Comments, and strings.
    r'#[^\n]*+|("""(?:[^"\\]|\\.|"(?!""))*+"{3,5}'
    r"|'''(?:[^']|'(?!''))*+'{3,5}"
    r'|"(?:[^"\\\n]|\\[^\n])*+"'
    r"|'[^'\n]*+')",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:(?P<hex>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|(?P<line>[ \t]*\r?\n\s*)|.)",
    re.DOTALL,
)
_LOW_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
"""The second half of a letter that JSON spells as two."""
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
"""Anchors and tags of YAML."""
_HEAD = re.compile(r"[|>][^\n]*\n")
_BLANKS = " \t\r\n"


class EmbeddedProgram(NamedTuple):
    """One program of a file."""

    name: str
    """Its key; the file's name for a program file."""
    source: Source
    declared: Mapping[str, Declared]
    places: tuple[int, ...] | None = None
    """Offset in the file of each character, and of the end of the last one; None where the program
    is the file."""

    def in_file(self, start: int, end: int) -> tuple[int, int]:
        """Offsets in the file of a range of the program."""
        if self.places is None:
            return start, end
        last = len(self.places) - 1
        first = self.places[min(start, last)]
        if end <= start:
            return first, first
        return first, self.places[min(end, last) - 1] + 1

    def in_program(self, offset: int) -> int | None:
        """Offset in the program of an offset of the file; None if it is outside."""
        if self.places is None:
            return offset
        # Behind the last line end there is the next line of the file.
        last = self.places[-1] - self.source.text.endswith("\n")
        if not self.places[0] <= offset <= last:
            return None
        return bisect_left(self.places, offset)


class Found(NamedTuple):
    """Programs that a file holds, and errors."""

    programs: tuple[EmbeddedProgram, ...]
    errors: tuple[AttnDSLError, ...] = ()
    """Errors of the file itself: it is no YAML, or an entry is not of the form."""


@memoised("programs in files", 8)
def programs_in(text: str, path: str) -> Found:
    """The programs of a file whose text is ``text``. A configuration of other software has none."""
    suffix = PurePath(path).suffix.lower()
    if suffix not in SUFFIXES:
        source = _at_home(Source(text, path, file=path))
        return Found((EmbeddedProgram(PurePath(path).stem, source, {}),))
    if len(text) > MAX_CONFIG:
        return Found((), _too_long(text, path))
    try:
        document = parse_document(text, path)
        keys = _keys(document)
    except ConfigError as error:
        return Found((), (_placed(error, text, path),) if speaks_of_programs(text) else ())
    except RecursionError:
        return Found(())
    programs: list[EmbeddedProgram] = []
    errors: list[AttnDSLError] = []
    for key in keys:
        try:
            entries, wrong = read_right_entries(document, find_place(document, key))
        except AttnDSLError as error:
            errors += flatten(error)
            continue
        errors += wrong
        programs += _located(entries, text, suffix)
    return Found(tuple(programs[:MAX_ENTRIES]), tuple(errors))


def _keys(document: Document) -> list[str | None]:
    """Keys of a document's places with programs; None for its root."""
    root = DocumentPlace(document.root)
    if holds_programs(document, root):
        return [None]
    found: dict[tuple[str, ...], str] = {}
    for key in places_of_programs(document, root):
        try:
            parts, place = key_parts(key), find_place(document, key)
        except AttnDSLError:  # A name that no key can spell.
            continue
        inside = any(parts[: len(outer)] == outer for outer in found)
        # Nobody has said that programs stand there, so that texts of other software are left alone.
        if not inside and surely_holds_programs(document, place):
            found[parts] = key
        if len(found) == _MAX_PLACES:
            break
    return list(found.values())


def _too_long(text: str, path: str) -> tuple[AttnDSLError, ...]:
    if not speaks_of_programs(text[:MAX_CONFIG]):
        return ()
    return (
        LimitError(
            f"the file has more than {MAX_CONFIG} characters, and is not checked here",
            Span(Source(text, path), 0, 1),
            "split it, or run attndsl check on it",
        ),
    )


def _placed(error: ConfigError, text: str, path: str) -> ConfigError:
    """``error`` with the place that the reader of TOML says in words."""
    found = _TOML_PLACE.search(error.message)
    if error.span is not None or found is None:
        return error
    line, column = int(found[1]), int(found[2])
    start = 0
    for _ in range(line - 1):
        start = text.find("\n", start) + 1
    start = min(start + column - 1, len(text))
    return ConfigError(error.message, Span(Source(text, path), start, start + 1), error.hint)


def _located(entries: list[ConfigEntry], text: str, suffix: str) -> Iterator[EmbeddedProgram]:
    """The programs of entries, with their places in the file."""
    literals: dict[str, list[tuple[int, int]]] = {}
    if any(entry.written is None for entry in entries):
        wanted = {entry.text for entry in entries}
        for start, end, decoded in _literals(text, suffix):
            if decoded in wanted:
                literals.setdefault(decoded, []).append((start, end))
    for entry in entries:
        if entry.written is not None:
            start, end = entry.written.start, entry.written.end
        else:
            # Entries come in the order of the file, and so do equal texts.
            known = literals.get(entry.text, [(0, 0)])
            start, end = known.pop(0) if len(known) > 1 else known[0]
        places = _align(entry.text, text, start, end)
        yield EmbeddedProgram(entry.name, _at_home(entry.source), entry.params, places)


def _at_home(source: Source) -> Source:
    """``source`` in its folder, or in none if its file has not been saved yet."""
    return source if os.path.isabs(source.file or "") else replace(source, file=None)


def _literals(text: str, suffix: str) -> Iterator[tuple[int, int, str]]:
    """Place and value of each string in a JSON or TOML text."""
    is_json = suffix == ".json"
    for found in (_JSON_TEXT if is_json else _TOML_TEXT).finditer(text):
        written = found[1]
        if written is None:
            continue
        try:
            said = json.loads(written) if is_json else tomllib.loads(f"x = {written}")["x"]
        except ValueError:
            continue
        yield found.start(), found.end(), said


def _align(text: str, whole: str, start: int, end: int) -> tuple[int, ...]:
    """Offset in ``whole`` of each character of ``text`` and of its end, within ``start:end``.

    Quotes, indentation, line ends that a folded text has as blanks, and escapes are passed over.
    Where a character is not found, it and those after it are said to be where the search ended.
    """
    properties = _PROPERTIES.match(whole, start, end)
    start = start if properties is None else properties.end()
    at = start + _opening(whole, start, end)
    escaped = whole.startswith('"', start)
    places: list[int] = []
    number = 0
    while number < len(text) and at < end:
        here, wanted = whole[at], text[number]
        if escaped and here == "\\" and (escape := _ESCAPE.match(whole, at, end)):
            if escape["line"] is None:
                places.append(at)
                number += 1
            at = escape.end()
            if wanted > "\uffff" and (half := _LOW_HALF.match(whole, at, end)):
                at = half.end()
        elif here == wanted:
            places.append(at)
            at += 1
            number += 1
        elif here in _BLANKS or here in "'\"":
            at += 1
        elif wanted in _BLANKS:
            places.append(at)
            number += 1
        else:
            break
    last = min(at, end)
    places += [last] * (len(text) + 1 - len(places))
    return tuple(places)


def _opening(whole: str, start: int, end: int) -> int:
    """Characters before the text itself: quotes, or the head of a block of YAML."""
    head = _HEAD.match(whole, start, end)
    if head is not None:
        return head.end() - start
    for quotes in ('"""', "'''", '"', "'"):
        if whole.startswith(quotes, start) and end - start >= 2 * len(quotes):
            return len(quotes)
    return 0


def program_at(found: Found, offset: int) -> tuple[EmbeddedProgram, int] | None:
    """The program at an offset of the file, and the offset within it."""
    for program in found.programs:
        within = program.in_program(offset)
        if within is not None:
            return program, within
    return None
