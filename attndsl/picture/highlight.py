"""Programs as HTML, for notebooks: comments, words, names of the language and numbers stand out."""

from __future__ import annotations

from html import escape

from attndsl.frontend.vocabulary import Kind, tokens

_COMMENT = "color:#6e7781;font-style:italic"
_NUMBER = "color:#bc4c00"
_WORD = "font-weight:bold"
_KNOWN = "color:#1f6feb"
_STYLES = {
    Kind.COMMENT: _COMMENT,
    Kind.NUMBER: _NUMBER,
    Kind.DECLARATION: _WORD,
    Kind.WORD: _WORD,
} | dict.fromkeys(
    (Kind.TYPE, Kind.CONSTANT, Kind.VARIABLE, Kind.TARGET, Kind.FUNCTION, Kind.PRELUDE), _KNOWN
)
"""Colours that can be read on white and on black."""


def highlighted(program: str) -> str:
    """``program`` as a ``<pre>`` element, which says the same without its colours."""
    parts, end = [], 0
    for token in tokens(program):
        parts.append(escape(_plain(program[end : token.start])))
        text, style = escape(_plain(token.text)), _STYLES.get(token.kind)
        parts.append(f'<span style="{style}">{text}</span>' if style else text)
        end = token.end
    parts.append(escape(_plain(program[end:])))
    return f'<pre style="margin:0;line-height:1.3">{"".join(parts)}</pre>'


def _plain(text: str) -> str:
    """``text`` with a stand-in for characters that do not show."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
