"""Keys of a larger configuration, at which programs stand: ``model.attention``.

Dots part names. A name with a dot in it stands in quotes of either kind, as in TOML:
``model."v1.2".attention``. Nothing is escaped. An element of a list is called by its number:
``layers.0``.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from attndsl.errors import ArgumentError, ConfigError

from .documents import shown

if TYPE_CHECKING:
    from .documents import Document

_PART = re.compile(r'"([^"]*)"|\'([^\']*)\'|([^."\'][^.]*)')
_NAMED = 20
"""Names that an error lists."""


class DocumentPlace(NamedTuple):
    """A value within a document, and the names that lead there."""

    value: Any
    parts: tuple[str, ...] = ()


def key_parts(key: str) -> tuple[str, ...]:
    """The names of a key.

    Raises:
        ArgumentError: It is no text, or no names with dots between them.
    """
    if not isinstance(key, str):
        raise ArgumentError(f"key is a {type(key).__name__}", hint="write key='model.attention'")
    found: list[str] = []
    at = 0
    while (match := _PART.match(key, at)) is not None:
        found.append(next(part for part in match.groups() if part is not None))
        at = match.end()
        if at == len(key):
            return tuple(found)
        if key[at] != ".":
            break
        at += 1
    raise ArgumentError(
        f"the key '{shown(key)}' is no names with dots between them",
        hint='write model.attention, or model."v1.2" for a name with a dot in it',
    )


def key_of(parts: tuple[str, ...]) -> str:
    """The key that :func:`key_parts` reads as ``parts``."""
    return ".".join(
        part if part[:1] not in "\"'" and "." not in part else _quoted(part) for part in parts
    )


def _quoted(part: str) -> str:
    return f"'{part}'" if '"' in part else f'"{part}"'


def find_place(document: Document, key: str | None) -> DocumentPlace:
    """Find the place that ``key`` names; the whole document if it is None.

    Raises:
        ArgumentError: ``key`` is no key.
        ConfigError: Nothing stands there; it says what does.
    """
    place = DocumentPlace(document.root)
    for part in () if key is None else key_parts(key):
        place = _inner(document, place, part)
    return place


def told_place(document: Document, place: DocumentPlace) -> str:
    """Name of a place in errors."""
    return f"'{shown(key_of(place.parts))}' in {document.name}" if place.parts else document.name


def _inner(document: Document, place: DocumentPlace, part: str) -> DocumentPlace:
    """Find the place that ``part`` names within ``place``."""
    inner = (*place.parts, part)
    where = told_place(document, place)
    elements = document.elements(place.value)
    if elements is not None:
        if part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(elements):
            return DocumentPlace(elements[int(part)], inner)
        raise ConfigError(
            f"{where} is a list, and has no element '{shown(part)}'",
            document.span(place.value),
            f"its elements are 0 to {len(elements) - 1}" if elements else "it has no elements",
        )
    found = document.named(place.value, part)
    if len(found) > 1:
        raise ConfigError(
            f"the key '{shown(part)}' stands twice in {where}", found[1].span, "rename one of them"
        )
    if found:
        return DocumentPlace(found[0].value, inner)
    names = document.names(place.value)
    if names is None:
        raise ConfigError(
            f"{where} is no mapping, and has no key '{shown(part)}'",
            document.span(place.value),
            f"it holds {document.told(place.value)}",
        )
    raise ConfigError(
        f"{where} has no key '{shown(part)}'", document.span(place.value), _offer(part, names)
    )


def _offer(part: str, names: list[str]) -> str:
    close = difflib.get_close_matches(part[:40], [name[:80] for name in names], n=1)
    more = ", ..." if len(names) > _NAMED else ""
    listed = ", ".join(shown(key_of((name,))) for name in names[:_NAMED]) or "none"
    meant = f"did you mean '{shown(key_of((close[0],)))}'? " if close else ""
    return f"{meant}its keys are: {listed}{more}"
