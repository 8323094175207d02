"""Program text and the places in it that nodes and errors point at."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import PurePath

NAME_LENGTH = 60
"""Characters of a program's text that stand for its name."""
_FILES = frozenset({".attn", ".yaml", ".yml", ".toml", ".json", ".py"})


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a text that stands in another text too: there it was written."""

    start: int
    """Offset of the part's first character. The part ends where the next one begins."""
    source: Source
    offset: int
    """Offset in ``source`` of the part's first character."""


@dataclass(frozen=True, slots=True)
class Source:
    """A program's text and the name that errors call it by (a file, or ``<program>``)."""

    text: str
    name: str = "<program>"
    first_line: int = 1
    """Line number of the text's first line within the file ``name`` (configs embed programs)."""
    key: str = ""
    """The program's own name, where ``name`` is not: its key in a configuration."""

    @property
    def label(self) -> str:
        """The program's name for people, or empty: not that of a file, which may have several."""
        if self.key:
            return self.key
        is_file = "/" in self.name or "\\" in self.name or PurePath(self.name).suffix in _FILES
        return "" if is_file or self.name.startswith("<") else self.name

    file: str | None = None
    """Path of the file that holds the text, which may import others beside that file."""
    pieces: tuple[TextPiece, ...] = field(default=(), repr=False)
    """Parts of a text with imports, each with the place where it was written."""

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

        Blanks between them do not count. None where ``source`` does not have them, or has them
        within longer names and numbers only.
        """
        if self.source.text == source.text:
            return Span(source, self.start, self.end).origin()
        tokens = re.findall(r"[\w.]+|[^\w.\s]", self.text)
        if not tokens:
            return None
        # Another program may have written the same expression with other blanks.
        pattern = r"\s*".join(re.escape(token) for token in tokens)
        before = r"(?<![\w.])" if re.match(r"[\w.]", tokens[0]) else ""
        after = r"(?![\w.])" if re.match(r"[\w.]", tokens[-1]) else ""
        found = re.search(before + pattern + after, source.text)
        return None if found is None else Span(source, found.start(), found.end()).origin()

    def origin(self) -> Span:
        """The same characters where they were written, which may be an imported file."""
        pieces = self.source.pieces
        if not pieces:
            return self
        number = bisect_right(pieces, self.start, key=lambda piece: piece.start) - 1
        piece = pieces[number]
        shift = piece.offset - piece.start
        next_start = pieces[number + 1].start if number + 1 < len(pieces) else self.end
        return Span(piece.source, self.start + shift, min(self.end, next_start) + shift)

    def line_from(self, other: Span) -> str:
        """``line 3``, or ``line 3 of FILE`` where that is not the file of ``other``."""
        of = "" if self.source.name == other.source.name else f" of {self.source.name}"
        return f"line {self.line}{of}"

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of ``other``."""
        return Span(self.source, min(self.start, other.start), max(self.end, other.end))


def shorten(program: str, most: int) -> str:
    """``program`` in one line of at most ``most`` characters, without comments or declarations.

    Control characters, which XML cannot hold and terminals obey, are replaced.
    """
    parts: list[str] = []
    depth = 0
    for line in program.splitlines():
        for piece in line.partition("#")[0].split(";"):
            code = " ".join(piece.split())
            # Within brackets a statement goes on.
            if depth > 0 and parts:
                parts[-1] += f" {code}" if code else ""
            elif code:
                parts.append(code)
            depth += sum(code.count(c) for c in "([") - sum(code.count(c) for c in ")]")
    said = [part for part in parts if part.split()[:1] not in (["param"], ["tensor"])]
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in "; ".join(said))
    return shown if len(shown) <= most else shown[: max(0, most - 3)] + "..."
