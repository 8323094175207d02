"""The tokens of a file's programs with their kinds, for editors that colour what servers tell them.

So programs are coloured in editors without a grammar for them, and in configurations wherever they
stand.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import TYPE_CHECKING

from attndsl.frontend.limits import MAX_SOURCE
from attndsl.frontend.vocabulary import Kind, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .embedded_programs import Found
    from .text_positions import TextPositions

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


def colours_in(found: Found, lines: TextPositions) -> list[int]:
    """Five numbers a token, as the protocol has them: places are told from the token before."""
    data: list[int] = []
    line = offset = 0
    for start, end, kind in islice(_coloured(found), _MOST):
        written = lines.text[start:end]
        if start < offset or "\n" in written or "\r" in written:
            continue
        # Units are counted from the token before, since a line may be as long as the file.
        shift = bisect_right(lines.starts, start) - 1 - line
        begin = lines.starts[line + shift] if shift else offset
        by = lines.units(lines.text[begin:start])
        data += [shift, by, lines.units(written), kind, 0]
        line, offset = line + shift, start
    return data


def _coloured(found: Found) -> Iterator[tuple[int, int, int]]:
    """Tokens in the order of the file."""
    programs = sorted(found.programs, key=lambda program: program.in_file(0, 0))
    for program in programs:
        if len(program.source.text) > MAX_SOURCE:
            continue
        for token in tokens(program.source.text):
            kind = _KINDS.get(token.kind)
            if kind is not None and token.text not in _PUNCTUATION:
                yield (*program.in_file(token.start, token.end), LEGEND.index(kind))
