"""The vocabulary of the language, for those who colour programs or help to write them.

Words, symbols and the forms of numbers and names are read from the grammar itself. Names are those
of the tables that the checker uses, so that what is shown cannot fall behind what is understood.
"""

from __future__ import annotations

import enum
import re
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from attndsl import ir
from attndsl.foundation.caches import memoised

from . import absent_names, builtin_functions, contraction
from .prelude import prelude_names
from .reserved_names import ALWAYS, CONSTANTS, TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Kind(enum.Enum):
    """Kind of a part of a program's text."""

    COMMENT = "comment"
    FILE = "file"
    """A file name in quotes, in an import."""
    NUMBER = "number"
    DECLARATION = "declaration"
    """A word that a statement begins with."""
    WORD = "word"
    """``and``, ``if`` and the others."""
    TYPE = "type"
    CONSTANT = "constant"
    VARIABLE = "variable"
    """The score, an index or a size of every call."""
    TARGET = "target"
    """A part of the program that a statement sets."""
    FUNCTION = "function"
    PRELUDE = "prelude"
    NAME = "name"
    """Any other name."""
    SYMBOL = "symbol"
    OTHER = "other"
    """A character that is no part of the language."""


class Token(NamedTuple):
    """A part of a text, without blanks."""

    kind: Kind
    start: int
    text: str

    @property
    def end(self) -> int:
        """Offset of the end, exclusive."""
        return self.start + len(self.text)


class Terminals(NamedTuple):
    """Single tokens as the grammar has them."""

    words: tuple[str, ...]
    symbols: tuple[str, ...]
    """The longest first."""
    patterns: Mapping[str, str]
    """Regular expressions of the others, by their names in the grammar."""


FORMS_OF_WEIGHTS = ("softmax", "dropout")
_REGEX = re.compile(r"^([A-Z]+)(?:\.\d+)?: /(.+)/$", re.MULTILINE)
_LITERAL = re.compile(r'"([^"\s]+)"')


@memoised("terminals of the grammar", None)
def terminals() -> Terminals:
    """The terminals of ``grammar/attndsl.lark``."""
    text = resources.files("attndsl.grammar").joinpath("attndsl.lark").read_text("utf-8")
    rules = "\n".join(line for line in text.split("\n") if not line.startswith("//"))
    patterns = dict(_REGEX.findall(rules))
    literals = set(_LITERAL.findall(_REGEX.sub("", rules)))
    words = sorted(literal for literal in literals if literal.isidentifier())
    symbols = sorted(literals.difference(words), key=lambda symbol: (-len(symbol), symbol))
    return Terminals(tuple(words), tuple(symbols), patterns)


@memoised("words that begin statements", None)
def declarations() -> tuple[str, ...]:
    """Words that statements begin with."""
    text = resources.files("attndsl.grammar").joinpath("attndsl.lark").read_text("utf-8")
    rule = text[text.index("\nstart:") : text.index("\nparameters:")]
    found = re.findall(r'[:|] "(\w+)"', rule)
    return tuple(sorted({*found, *({"import"} if "IMPORT FILE" in rule else ())}))


@memoised("meanings of words", None)
def kinds() -> Mapping[str, Kind]:
    """All words and names that mean something before a program binds any, and what they are.

    ``int``, ``float`` and ``bool`` are types here, and functions where a bracket follows.
    """
    builtin = {*builtin_functions.NAMES, *FORMS_OF_WEIGHTS, contraction.NAME, absent_names.NAME}
    groups = (
        (prelude_names(), Kind.PRELUDE),
        (builtin, Kind.FUNCTION),
        ((dtype.value for dtype in ir.DType), Kind.TYPE),
        (CONSTANTS, Kind.CONSTANT),
        (TARGETS, Kind.TARGET),
        (ALWAYS - CONSTANTS.keys(), Kind.VARIABLE),
        (terminals().words, Kind.WORD),
        (declarations(), Kind.DECLARATION),
    )
    return {name: kind for names, kind in groups for name in names}


@memoised("patterns of words", None)
def _pattern() -> re.Pattern[str]:
    found = terminals()
    names = {"COMMENT": Kind.COMMENT, "FILE": Kind.FILE, "NUMBER": Kind.NUMBER, "NAME": Kind.NAME}
    parts = [f"(?P<{kind.value}>{found.patterns[name]})" for name, kind in names.items()]
    symbols = "|".join(re.escape(symbol) for symbol in (*found.symbols, ";"))
    return re.compile("|".join([*parts, f"(?P<symbol>{symbols})", r"(?P<other>[^ \t\r\n])"]))


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a whole text, right or wrong, comments included; in linear time."""
    known = kinds()
    for found in _pattern().finditer(text):
        kind, written = Kind(found.lastgroup), found[0]
        if kind is Kind.NAME:
            kind = known.get(written, Kind.NAME)
            if kind is Kind.TYPE and text.startswith("(", found.end()):
                kind = Kind.FUNCTION
        yield Token(kind, found.start(), written)
