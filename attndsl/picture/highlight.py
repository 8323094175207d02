"""Programs as HTML, for notebooks: comments, words, names of the language and numbers stand out."""

from __future__ import annotations

import re
from html import escape

from attndsl.frontend.expressions import ALWAYS
from attndsl.frontend.functions import NAMES
from attndsl.frontend.prelude import prelude_names

_WORDS = frozenset({"param", "tensor", "def", "and", "or", "not", "if", "else", "none"})
_PARTS = frozenset({"mask", "sink", "weights", "softmax", "dropout", "dot", "given"})
_TOKEN = re.compile(
    r"(?P<comment>#[^\n]*)|(?P<number>(?:\d[\w.]*|\.\d[\w.]*))|(?P<name>[A-Za-z_]\w*)", re.ASCII
)
_STYLES = {
    "comment": "color:#6e7781;font-style:italic",
    "number": "color:#bc4c00",
    "word": "font-weight:bold",
    "known": "color:#1f6feb",
}
"""Colours that can be read on white and on black."""


def highlighted(program: str) -> str:
    """``program`` as a ``<pre>`` element, which says the same without its colours."""
    known = {*ALWAYS, *NAMES, *prelude_names(), *_PARTS}
    parts, end = [], 0
    for found in _TOKEN.finditer(program):
        kind, shown = found.lastgroup or "", found[0]
        if kind == "name":
            kind = "word" if shown in _WORDS else "known" if shown in known else ""
        parts.append(escape(_plain(program[end : found.start()])))
        text = escape(_plain(shown))
        parts.append(f'<span style="{_STYLES[kind]}">{text}</span>' if kind else text)
        end = found.end()
    parts.append(escape(_plain(program[end:])))
    return f'<pre style="margin:0;line-height:1.3">{"".join(parts)}</pre>'


def _plain(text: str) -> str:
    """``text`` with a stand-in for characters that do not show."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
