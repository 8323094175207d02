"""Cut a program's text into statements, and refuse at once a text that is too large or no text.

Statements end at a newline outside brackets or at ``;``; ``#`` comments run to the end of the line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from unicodedata import category

from attndsl.errors import AttnDSLError, LexError, LimitError, ParseError
from attndsl.source import Span

from .limits import MAX_ERRORS, MAX_NESTING, MAX_SOURCE, MAX_STATEMENTS

if TYPE_CHECKING:
    from attndsl.source import Source

_CLOSING = {"(": ")", "[": "]"}
_SPECIAL = re.compile(r"[#()\[\];\n]|[^\t\r -~]")
"""Marks that may end a statement or keep it open, and all that is no printable ASCII."""


def check_text(source: Source) -> None:
    """Refuse a program that is too long.

    Raises:
        LimitError: ``source`` has more characters than programs may have.
    """
    if len(source.text) > MAX_SOURCE:
        raise LimitError(
            f"the program has {len(source.text)} characters; at most {MAX_SOURCE} are allowed",
            Span(source, 0, 1),
            "move tables of numbers into tensors and repeated text into functions",
        )


def split_statements(source: Source) -> tuple[list[Span], list[AttnDSLError]]:
    """Spans of the statements, in order, and the errors found on the way.

    Raises:
        LimitError: The program is too long, too deep or has too many statements.
    """
    check_text(source)
    text, spans, errors = source.text, list[Span](), list[AttnDSLError]()
    opened: list[tuple[str, int]] = []
    start, position, length = 0, 0, len(text)
    broken = False
    while len(errors) < MAX_ERRORS and (found := _SPECIAL.search(text, position)) is not None:
        position = found.start()
        c = text[position]
        if c == "#":
            end = text.find("\n", position)
            end = length if end < 0 else end
            errors += _controls(source, position, end)
            position = end
            continue
        if c in _CLOSING:
            opened.append((c, position))
            if len(opened) > MAX_NESTING:
                raise LimitError(
                    f"brackets nest deeper than {MAX_NESTING}",
                    Span(source, position, position + 1),
                    "give an inner part a name in a line of its own",
                )
        elif c in ")]":
            if opened and _CLOSING[opened[-1][0]] == c:
                opened.pop()
            else:
                errors.append(_unmatched(source, position, opened))
                broken, opened = True, []
        elif c == ";" or (c == "\n" and not opened):
            _finish(source, start, position, broken, spans)
            start, broken, opened = position + 1, False, []
        elif not (c.isprintable() or c in "\t\r\n"):
            errors.append(
                LexError(
                    f"the control character U+{ord(c):04X} is not allowed here",
                    Span(source, position, position + 1),
                    "remove it; only tabs and newlines may separate words",
                )
            )
            broken = True
        position += 1
    if opened:
        bracket, at = opened[-1]
        errors.append(
            ParseError(
                f"'{bracket}' is never closed",
                Span(source, at, at + 1),
                f"add '{_CLOSING[bracket]}' where the part in brackets ends",
            )
        )
        broken = True
    _finish(source, start, length, broken, spans)
    if len(spans) > MAX_STATEMENTS:
        raise LimitError(
            f"the program has {len(spans)} statements; at most {MAX_STATEMENTS} are allowed",
            spans[MAX_STATEMENTS],
            "join statements or move repeated ones into a function",
        )
    return spans, errors


def comment_above(span: Span) -> str:
    """Comment lines right above a statement, joined into one line."""
    lines = span.source.text[: span.start].split("\n")[:-1]
    found: list[str] = []
    while lines and lines[-1].lstrip().startswith("#"):
        found.append(lines.pop().strip().removeprefix("#").strip())
    return " ".join(reversed(found))


def _controls(source: Source, start: int, end: int) -> list[LexError]:
    """An error where a comment would command the terminal that shows it."""
    for at in range(start, end):
        c = source.text[at]
        if category(c) == "Cc" and c not in "\t\r":
            message = f"the control character U+{ord(c):04X} is not allowed in a comment"
            return [LexError(message, Span(source, at, at + 1), "remove it")]
    return []


def _unmatched(source: Source, position: int, opened: list[tuple[str, int]]) -> ParseError:
    c = source.text[position]
    span = Span(source, position, position + 1)
    if opened:
        wanted = _CLOSING[opened[-1][0]]
        return ParseError(f"'{c}' closes '{opened[-1][0]}'", span, f"write '{wanted}' here")
    return ParseError(f"'{c}' has no opening bracket", span, "remove it, or add the bracket")


def _finish(source: Source, start: int, end: int, broken: bool, spans: list[Span]) -> None:
    """Add the statement between two offsets, unless it is blank or already reported."""
    lines = source.text[start:end].split("\n")
    if not broken and any((bare := line.strip()) and not bare.startswith("#") for line in lines):
        spans.append(Span(source, start, end))
