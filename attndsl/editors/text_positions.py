"""Places in a text as editors count them: lines, and units of an encoding within a line."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

_END_OF_LINE = re.compile(r"\r\n|\n|\r")


class Point(NamedTuple):
    """A place between two characters; both numbers count from 0."""

    line: int
    character: int


class Range(NamedTuple):
    """A part of a text, its end exclusive."""

    start: Point
    end: Point


@dataclass(frozen=True)
class TextPositions:
    """A text whose places can be told."""

    text: str
    starts: tuple[int, ...]
    """Offset at which each line begins."""
    encoding: str = "utf-16"
    """Encoding whose units count: ``utf-8``, ``utf-16`` or ``utf-32``."""

    def point(self, offset: int) -> Point:
        """The place of a character of the text."""
        offset = max(0, min(offset, len(self.text)))
        line = bisect_right(self.starts, offset) - 1
        return Point(line, self.units(self.text[self.starts[line] : offset]))

    def range(self, start: int, end: int) -> Range:
        """The places of two characters of the text."""
        return Range(self.point(start), self.point(end))

    def offset(self, point: Point) -> int:
        """The character at a place; the nearest one, if the text has no such place."""
        if point.line < 0:
            return 0
        if point.line >= len(self.starts):
            return len(self.text)
        start = self.starts[point.line]
        after = self.starts[point.line + 1] if point.line + 1 < len(self.starts) else None
        line = self.text[start:after].rstrip("\r\n")
        if self.encoding == "utf-32" or line.isascii():
            return start + max(0, min(point.character, len(line)))
        units = 0
        for number, character in enumerate(line):
            if units >= point.character:
                return start + number
            units += self.units(character)
        return start + len(line)

    def units(self, text: str) -> int:
        """Length of ``text`` in units."""
        if self.encoding == "utf-32" or text.isascii():
            return len(text)
        if self.encoding == "utf-8":
            return len(text.encode("utf-8", "surrogatepass"))
        return len(text.encode("utf-16-le", "surrogatepass")) // 2


def lines_of(text: str, encoding: str = "utf-16") -> TextPositions:
    """The lines of ``text``."""
    ends = (found.end() for found in _END_OF_LINE.finditer(text))
    return TextPositions(text, (0, *ends), encoding)
