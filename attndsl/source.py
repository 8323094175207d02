"""Program text and the places in it that nodes and errors point at."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Source:
    """A program's text and the name that errors call it by (a file, or ``<program>``)."""

    text: str
    name: str = "<program>"
    first_line: int = 1
    """Line number of the text's first line within the file ``name`` (configs embed programs)."""

    def line(self, number: int) -> str:
        """The text of line ``number`` (counted from ``first_line``), without its line ending."""
        lines = self.text.split("\n")
        index = number - self.first_line
        return lines[index].rstrip("\r") if 0 <= index < len(lines) else ""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``start`` to ``end`` (exclusive, offsets into ``source.text``)."""

    source: Source = field(repr=False)
    start: int
    end: int

    @property
    def line(self) -> int:
        """Line number of the first character, counted from ``source.first_line``."""
        return self.source.text.count("\n", 0, self.start) + self.source.first_line

    @property
    def column(self) -> int:
        """Column of the first character, counted from 1."""
        return self.start - (self.source.text.rfind("\n", 0, self.start) + 1) + 1

    @property
    def text(self) -> str:
        """The characters covered."""
        return self.source.text[self.start : self.end]

    def within(self, source: Source) -> Span | None:
        """The same characters of ``source``: where its text is the same, or where they first stand.

        None where ``source`` does not have them.
        """
        if self.source.text == source.text:
            return Span(source, self.start, self.end)
        start = source.text.find(self.text)
        return None if start < 0 else Span(source, start, start + len(self.text))

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of ``other``."""
        return Span(self.source, min(self.start, other.start), max(self.end, other.end))
