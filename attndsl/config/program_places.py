"""Places of programs in a configuration, as far as these can be seen from outside.

A text is not marked as a program, and other software has mappings of texts too. So these are
guesses, by what programs look like; nothing is held to the form here.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from attndsl.errors import ConfigError

from .key_paths import DocumentPlace, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .documents import Document, Item

_LIKE_PROGRAM = re.compile(
    r"\bkv\b|^\s*\w+\(|\b(?:q|score)\s*[-+*/%<>=!]|\b(?:mask|weights|sink)\s*="
)
"""Pattern that texts of programs contain, and few others."""
_SPEAKS_OF_PROGRAMS = re.compile(r"\bprogram\b[\"']?\s*[:=]|\bkv\b")
"""Pattern that a file with programs contains, for files that cannot be parsed."""
_LIKENESS = 0.8
_MAX_DEPTH = 8
"""The most keys on the path of a place that is looked for."""
_MAX_LOOKS = 2000
"""Mappings and lists that are looked into for places."""


def holds_programs(document: Document, place: DocumentPlace) -> bool:
    """Return True if the mapping at ``place`` looks like programs by name, right or wrong.

    It does if one of its entries has a ``program``, or if all are texts or have something like it,
    and one text looks like a program.
    """
    try:
        items = document.items(place.value) or []
        named = [_has_program(document, item) for item in items]
        texts = [document.text(item.value) for item in items]
    except ConfigError:
        return False
    if any(each == 1.0 for each in named):
        return True
    pairs = zip(named, texts, strict=True)
    if not all(likeness >= _LIKENESS or text is not None for likeness, text in pairs):
        return False
    return any(each >= _LIKENESS for each in named) or any(
        text is not None and _LIKE_PROGRAM.search(text.text) is not None for text in texts
    )


def surely_holds_programs(document: Document, place: DocumentPlace) -> bool:
    """Return True if the mapping at ``place`` is almost surely not of other software.

    It has programs under ``program``, or all its entries are texts that look like programs.
    """
    if not holds_programs(document, place):
        return False
    items = document.items(place.value) or []
    texts = [document.text(item.value) for item in items]
    return any(_has_program(document, item) == 1.0 for item in items) or all(
        text is not None and _LIKE_PROGRAM.search(text.text) is not None for text in texts
    )


def speaks_of_programs(text: str) -> bool:
    """Return True if a file's text looks like one that holds programs."""
    return _SPEAKS_OF_PROGRAMS.search(text) is not None


def places_of_programs(document: Document, outer: DocumentPlace) -> list[str]:
    """Keys of the places within ``outer`` that hold programs, those outside first."""
    return [
        key_of(place.parts)
        for place in _places(document, outer)
        if place is not outer and holds_programs(document, place)
    ]


def _places(document: Document, outer: DocumentPlace) -> Iterator[DocumentPlace]:
    """The mappings within ``outer``, those outside before those within."""
    waiting = [outer]
    seen: set[int] = set()
    for place in waiting:  # It grows meanwhile.
        if id(place.value) in seen or len(seen) == _MAX_LOOKS:
            continue
        seen.add(id(place.value))
        try:
            items = document.items(place.value)
        except ConfigError:
            continue
        if items is not None:
            yield place
        if len(place.parts) < _MAX_DEPTH:
            waiting += _inner(document, place, items)


def _inner(
    document: Document, place: DocumentPlace, items: list[Item] | None
) -> Iterator[DocumentPlace]:
    if items is None:
        elements = document.elements(place.value) or ()
        for number, element in enumerate(elements[:_MAX_LOOKS]):
            yield DocumentPlace(element, (*place.parts, str(number)))
    for item in items or ():
        if item.name is not None:
            yield DocumentPlace(item.value, (*place.parts, item.name))


def _has_program(document: Document, item: Item) -> float:
    """Greatest similarity to ``program`` of an entry's keys that hold texts, from 0 to 1."""
    items = document.items(item.value) or ()
    names = [
        inner.name[:20]
        for inner in items
        if inner.name is not None and document.text(inner.value) is not None
    ]
    likeness = (difflib.SequenceMatcher(None, name, "program").ratio() for name in names)
    return max(likeness, default=0.0)
