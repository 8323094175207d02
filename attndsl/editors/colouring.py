"""The tokens of a file's programs with their kinds, for editors that colour what servers tell them.

So programs are coloured in editors without a grammar for them, and in configurations wherever they
stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.frontend.vocabulary import Kind, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .embedded import Found
    from .lines import Lines

_KINDS = {
    Kind.COMMENT: "comment",
    Kind.FILE: "string",
    Kind.NUMBER: "number",
    Kind.DECLARATION: "keyword",
    Kind.WORD: "keyword",
    Kind.TYPE: "type",
    Kind.CONSTANT: "enumMember",
    Kind.VARIABLE: "parameter",
    Kind.TARGET: "property",
    Kind.FUNCTION: "function",
    Kind.PRELUDE: "function",
    Kind.NAME: "variable",
    Kind.SYMBOL: "operator",
}
LEGEND = tuple(sorted(set(_KINDS.values())))
"""Names of the protocol, by the numbers that stand for them."""
_MOST = 50_000
"""Tokens of a file."""
_PUNCTUATION = frozenset("()[],;:")


def colours_in(found: Found, lines: Lines) -> list[int]:
    """Five numbers a token, as the protocol has them: places are told from the token before."""
    data: list[int] = []
    line = character = 0
    for start, end, kind in _coloured(found):
        first, last = lines.range(start, end)
        if first.line != last.line or len(data) >= 5 * _MOST or first < (line, character):
            continue
        shift = first.character - (character if first.line == line else 0)
        data += [first.line - line, shift, last.character - first.character, kind, 0]
        line, character = first
    return data


def _coloured(found: Found) -> Iterator[tuple[int, int, int]]:
    """Tokens in the order of the file."""
    programs = sorted(found.programs, key=lambda program: program.in_file(0, 0))
    for program in programs:
        for token in tokens(program.source.text):
            kind = _KINDS.get(token.kind)
            if kind is not None and token.text not in _PUNCTUATION:
                yield (*program.in_file(token.start, token.end), LEGEND.index(kind))
