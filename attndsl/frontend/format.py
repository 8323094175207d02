"""Canonical layout of a program's text: spacing by the grammar, comments and blank lines kept.

The text is laid out token by token, so that nothing written is lost; parentheses stay as written.

Non-goals: shortening expressions, sorting statements, breaking long lines.
"""

from __future__ import annotations

from typing import Any

from attndsl.errors import ParseError
from attndsl.source import Source, Span

from .parse import lexer, parse

_BINARY = frozenset(
    {
        "OR",
        "AND",
        "COMPARE",
        "SHIFT",
        "PIPE",
        "CARET",
        "AMPERSAND",
        "PRODUCT",
        "EQUAL",
        "IF",
        "ELSE",
    }
)
_NO_SPACE_BEFORE = frozenset({"COMMA", "RPAR", "RSQB"})
_OPENING = frozenset({"LPAR", "LSQB"})
_OPERANDS = frozenset({"NAME", "NUMBER", "RPAR", "RSQB"})


def format_source(text: str, name: str = "<program>") -> str:
    """``text`` laid out canonically; formatting twice changes nothing more.

    Raises:
        AttnDSLError: ``text`` does not parse (nothing is formatted then).
    """
    source = Source(text, name)
    parse(source)
    lines: list[str] = []
    depth = 0
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        code, comment = _split_comment(line)
        # A continuation is indented under its statement; statements are not.
        indent = "    " if depth > 0 and (code.strip() or comment) else ""
        shown = []
        for statement in code.split(";"):  # It stands in no brackets: the text parses.
            laid, depth = _lay_out(statement, depth, source, number)
            if laid:
                shown.append(laid)
        joined = "; ".join(shown)
        if comment:
            joined += ("  " if joined else "") + comment
        lines.append((indent + joined).rstrip() if joined else "")
    return _squeeze(lines)


def _split_comment(line: str) -> tuple[str, str]:
    code, mark, comment = line.partition("#")
    if not mark:
        return code, ""
    comment = comment.strip()
    return code, f"# {comment}" if comment else "#"


def _lay_out(code: str, depth: int, source: Source, number: int) -> tuple[str, int]:
    """Tokens of one line, spaced, and the bracket depth behind them."""
    out = ""
    before: Any = None
    for token in lexer().lex(code):
        kind = token.type
        if before is not None and _space(before, kind, depth > 0):
            out += " "
        out += str(token)
        if kind in _OPENING:
            depth += 1
        elif kind in ("RPAR", "RSQB"):
            depth -= 1
        before = _Seen(kind, _is_unary(before, kind))
    if depth < 0:
        raise ParseError("a bracket has no partner", Span(source, 0, 1), f"look at line {number}")
    return out, depth


class _Seen:
    """The token before: its kind, and whether it was a sign rather than an operator."""

    __slots__ = ("kind", "unary")

    def __init__(self, kind: str, unary: bool) -> None:
        self.kind = kind
        self.unary = unary


def _is_unary(before: _Seen | None, kind: str) -> bool:
    signs = kind in ("PLUS", "MINUS", "TILDE")
    return signs and (before is None or before.kind not in _OPERANDS)


def _space(before: _Seen, kind: str, in_brackets: bool) -> bool:
    """Return True if a space stands between two tokens."""
    if kind in _NO_SPACE_BEFORE or before.kind in _OPENING:
        return False
    if in_brackets and "EQUAL" in (kind, before.kind):
        return False  # An argument with its name.
    if kind == "COLON":
        return bool(before.kind == "COMMA")
    if kind in _OPENING:
        # A call or an index is written without a space, a group after an operator with one.
        return before.kind not in ("NAME",) and not before.unary
    return not before.unary


def _squeeze(lines: list[str]) -> str:
    """Join lines with at most one blank line in a row, and none at the ends."""
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    return "\n".join(kept) + "\n" if kept else ""
