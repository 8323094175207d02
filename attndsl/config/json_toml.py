"""JSON and TOML texts as documents, read without making objects beyond text and numbers."""

from __future__ import annotations

import json
import math
import re
import tomllib

from attndsl.errors import ConfigError
from attndsl.source import Source, Span

from .documents import DocumentMapping, PlainDocument, Unusable, shown
from .size_limits import MAX_DEPTH

_JSON_TOKENS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_TOML_TOKENS = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5})?'
    r"|'''(?:[^']|'(?!''))*+(?:'{3,5})?"
    r'|"(?:[^"\\\n]|\\[^\n])*+"?'
    r"|'[^'\n]*+'?|#[^\n]*+|[\[\]{}.,=\n]",
    re.DOTALL,
)


def read_json(text: str, name: str) -> PlainDocument:
    """The document that a JSON text is.

    Raises:
        ConfigError: It is none, or nests too deeply.
    """
    check_nesting(text, name, _JSON_TOKENS)
    try:
        root = json.loads(
            text, object_pairs_hook=DocumentMapping, parse_constant=_constant, parse_float=_float
        )
    except json.JSONDecodeError as error:
        at = Span(Source(text, name), min(error.pos, max(len(text) - 1, 0)), error.pos + 1)
        raise ConfigError(f"not JSON: {error.msg}", at) from None
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    return PlainDocument(name, root)


def read_toml(text: str, name: str) -> PlainDocument:
    """The document that a TOML text is.

    Raises:
        ConfigError: It is none, or nests too deeply.
    """
    # Python's reader takes quadratic time for keys of many parts.
    check_nesting(text, name, _TOML_TOKENS)
    try:
        root = tomllib.loads(text, parse_float=_float)
    except ValueError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from None
    return PlainDocument(name, root)


def check_nesting(text: str, name: str, tokens: re.Pattern[str]) -> None:
    """Refuse brackets and keys with dots that nest too deeply, before a parser does.

    Args:
        text: The file's text.
        name: Its name.
        tokens: Matches strings and comments as a whole, brackets, and where keys with dots end.
    """
    depth = dots = 0
    for match in tokens.finditer(text):
        token = match[0]
        if token in "[]{},=\n":
            depth += (token in "[{") - (token in "]}")
            dots = 0
        dots += token == "."
        if max(depth, dots) > MAX_DEPTH:
            raise too_deep(Span(Source(text, name), match.start(), match.end()))


def too_deep(at: Span) -> ConfigError:
    """The error of a file that nests too deeply at ``at``."""
    return ConfigError(
        "the file nests too deeply", at, f"keep it within {MAX_DEPTH} mappings and lists"
    )


def _constant(constant: str) -> Unusable:
    return Unusable(f"'{constant}' is not JSON", "write a number")


def _float(text: str) -> float | Unusable:
    value = float(text)
    if math.isinf(value) and "inf" not in text:
        return Unusable(f"{shown(text)} is too large for a float", "write a smaller one")
    return value
