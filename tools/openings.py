"""Docstrings that open with neither a noun phrase nor an imperative."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from sources import docstrings_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sources import Sources

ODD = re.compile(
    r"(What|Whether|Which|Of|As|Where|How|When|Why|Who|Whom|Whose|Those|That|Beside|Besides)\b"
)
"""Words that open no noun phrase and no imperative."""


class Opening(NamedTuple):
    """The first line of an odd docstring, and where it stands."""

    path: str
    line: int
    text: str
    of_attribute: bool


def odd_openings(sources: Sources) -> Iterator[Opening]:
    """All odd ones, those of strings under attributes with them."""
    for path, text in sources.items():
        for docstring in docstrings_of(text):
            words = docstring.text.lstrip()
            if ODD.match(words):
                first = words.splitlines()[0]
                yield Opening(path, docstring.node.lineno, first, docstring.of_attribute)


def number_of_docstrings(sources: Sources) -> int:
    """All docstrings, those of attributes with them."""
    return sum(len(docstrings_of(text)) for text in sources.values())
