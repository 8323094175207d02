"""The language for Pygments, which finds this lexer by its entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygments.lexer import Lexer
from pygments.token import (
    Comment,
    Error,
    Keyword,
    Name,
    Number,
    Operator,
    Punctuation,
    String,
    Whitespace,
)

from attndsl.frontend.vocabulary import Kind, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORD_OPERATORS = frozenset({"and", "or", "not", "in"})
_PUNCTUATION = frozenset("()[],:;")
_TYPES = {
    Kind.COMMENT: Comment.Single,
    Kind.FILE: String,
    Kind.NUMBER: Number,
    Kind.DECLARATION: Keyword.Declaration,
    Kind.WORD: Keyword,
    Kind.TYPE: Keyword.Type,
    Kind.CONSTANT: Keyword.Constant,
    Kind.VARIABLE: Name.Variable,
    Kind.TARGET: Name.Builtin.Pseudo,
    Kind.FUNCTION: Name.Builtin,
    Kind.PRELUDE: Name.Function,
    Kind.NAME: Name,
    Kind.SYMBOL: Operator,
    Kind.OTHER: Error,
}


class AttnLexer(Lexer):  # type: ignore[misc]
    """Programs of attndsl."""

    name = "attndsl"
    aliases = ("attn", "attndsl")
    filenames = ("*.attn",)
    mimetypes = ("text/x-attndsl",)

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, object, str]]:
        """The tokens of ``text`` and the blanks between them: all of its characters."""
        end = 0
        for token in tokens(text):
            if token.start > end:
                yield end, Whitespace, text[end : token.start]
            kind = _TYPES[token.kind]
            if token.kind is Kind.NUMBER:
                kind = Number.Integer if token.text.replace("_", "").isdigit() else Number.Float
            elif token.text in _WORD_OPERATORS:
                kind = Operator.Word
            elif token.text in _PUNCTUATION:
                kind = Punctuation
            yield token.start, kind, token.text
            end = token.end
        if end < len(text):
            yield end, Whitespace, text[end:]
