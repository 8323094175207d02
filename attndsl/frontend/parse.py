"""Text to surface tree. All syntax errors of a program come at once, one a statement."""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from attndsl.errors import AttnDSLError, LexError, LimitError, ParseError, raise_all
from attndsl.foundation.caches import memoised
from attndsl.source import Span

from . import hints
from . import surface as s
from .limits import MAX_ERRORS, MAX_NESTING
from .statements import split_statements

if TYPE_CHECKING:
    from attndsl.source import Source

_ELSEWHERE = {
    "&&": "write 'and'",
    "||": "write 'or'",
    "!": "write 'not'",
    "?": "write 'x if condition else y'",
    "===": "write '=='",
    "^^": "write 'not ==' of two bools, or '^'",
    "->": "write '=' between a function's head and its body",
    "=>": "write '>=' to compare, or '=' between a name or a function's head and its value",
    "=<": "write '<='",
    "\u2265": "write '>='",
    "\u2264": "write '<='",
    "\u2260": "write '!='",
    "\u2212": "write '-'",
    "\u00d7": "write '*'",
    "\u00b7": "write '*'",
    '"': "text has no meaning in a program; names are written without quotes",
    "'": "text has no meaning in a program; names are written without quotes",
    "{": "only ( ) and [ ] are brackets here",
    "@": "the product q . k is the score itself; there are no other matrix products",
    ".": "names have no parts: write 'exp(x)', not 'math.exp(x)'",
    ":": "it gives types in 'param' and 'tensor' lines, and whole rows in dot(u[q, :], w[kv, :])",
    "\\": "break lines inside brackets instead",
}
_KEYWORDS = {
    "none": "it stands behind '=' in 'param' and 'tensor' lines alone; ask for a name by given(x)",
    "lambda": f"write 'def NAME(x) = ...'; {hints.TRACE}",
    "import": 'write import "FILE.attn" in a line of its own, with a file beside this one',
}
_IN = ("NOT", "IN")
_PARTS = re.compile(r"(\w+)\.(\w+)$")
_SHORT = 120
"""Characters of a statement whose tree is kept. A thousand usual trees take 5 MB, dense ones 40."""


def parse(source: Source) -> s.Tree:
    """The surface tree of ``source``.

    Raises:
        LexError, ParseError, LimitError: What is wrong, where there is one error.
        ProgramErrors: All that is wrong, where there are several.
    """
    spans, errors = split_statements(source)
    statements = []
    for span in spans:
        try:
            statements.append(parse_statement(span.origin()))
        except AttnDSLError as error:
            errors.append(error)
            if len(errors) > MAX_ERRORS:
                break
    raise_all(errors[:MAX_ERRORS])
    return s.Tree(source, tuple(statements))


def parse_statement(span: Span) -> s.Statement:
    """The statement that ``span`` covers."""
    import lark

    text = span.text
    try:
        tree = _remembered(text) if len(text) <= _SHORT else _parser().parse(text)
    except lark.exceptions.UnexpectedCharacters as error:
        raise _bad_character(span, error.pos_in_stream or 0) from None
    except lark.exceptions.UnexpectedToken as error:
        raise _bad_token(span, error) from None
    return _Builder(span.source, span.start).statement(tree)


@memoised("parsers", None)
def _parser() -> Any:
    import lark

    grammar = resources.files("attndsl.grammar").joinpath("attndsl.lark").read_text("utf-8")
    return lark.Lark(grammar, parser="lalr", lexer="basic", maybe_placeholders=False)


@memoised("trees of statements", 1024)
def _remembered(text: str) -> Any:
    """The parser's tree of a statement: a change of one line leaves a program's others as they are.

    Nobody changes such a tree.
    """
    return _parser().parse(text)


def lexer() -> Any:
    """The language's tokens: ``lexer().lex(text)`` yields them, without spaces and comments."""
    return _parser()


def _bad_character(span: Span, offset: int) -> LexError:
    rest = span.text[offset:]
    found = next((k for k in sorted(_ELSEWHERE, key=len, reverse=True) if rest.startswith(k)), None)
    shown = found or rest[0]
    at = Span(span.source, span.start + offset, span.start + offset + len(shown))
    imports = span.text.split()[:1] == ["import"]
    hint = _KEYWORDS["import"] if imports else _ELSEWHERE.get(shown)
    if shown == "." and (parts := _PARTS.search(span.text[:offset] + rest.partition("(")[0])):
        hint = f"names have no parts: write '{parts[2]}(x)', not '{parts[0]}(x)'"
    return LexError(f"'{shown}' is not part of the language", at, hint)


def _bad_token(span: Span, error: Any) -> LexError | ParseError:
    token = error.token
    text = span.text
    if token.type == "FILE":
        return _bad_character(span, token.start_pos)
    if token.type == "$END":
        end = span.start + len(_without_comments(text).rstrip())
        at = Span(span.source, max(span.start, end - 1), end)
        hint = "complete the expression, or put it in brackets to go on in the next line"
        hint = hints.of_end(_without_comments(text)) or hint
        hint = _KEYWORDS["import"] if text.split()[:1] == ["import"] else hint
        return ParseError("the statement ends too early", at, hint)
    start, end = token.start_pos, token.end_pos
    for two in ("&&", "||", "===", "->", "=>", "=<"):
        at = max(0, start - 1)
        if text.startswith(two, at) or text.startswith(two, start):
            place = at if text.startswith(two, at) else start
            where = Span(span.source, span.start + place, span.start + place + len(two))
            return ParseError(f"'{two}' is not part of the language", where, _ELSEWHERE[two])
    hint = (
        _KEYWORDS.get(str(token))
        or hints.of_statement(text, start, str(token))
        or _hint(text, start, str(token))
    )
    if token.type != "NONE" and set(error.expected) == {"NONE"}:
        hint = "a tensor has no default but 'none', with which calls may leave it out"
    where = Span(span.source, span.start + start, span.start + end)
    return ParseError(f"'{str(token)[:40]}' cannot stand here", where, hint)


def _hint(text: str, start: int, token: str) -> str:
    before = text[:start].split()
    if before and (before[-1] in _KEYWORDS or before[0] == "import"):
        return _KEYWORDS.get(before[-1], _KEYWORDS["import"])
    if token == "=":
        return "write '==' to compare; '=' gives a name to a whole expression"
    if token == ":":
        return _ELSEWHERE[":"]
    if token in ("if", "else"):
        return "write 'x if condition else y'"
    if token and (token[0].isalnum() or token[0] == "_" or token == "("):
        return "write an operator between two values, or end the statement with a newline or ';'"
    return "write a value (a name, a number or an expression in brackets) here"


def _without_comments(text: str) -> str:
    return "\n".join(line.partition("#")[0] for line in text.split("\n"))


class _Builder:
    """lark's tree as surface nodes; iterative, since operators nest as deep as the text is long."""

    def __init__(self, source: Source, base: int) -> None:
        self.source = source
        self.base = base

    def span(self, token: Any, last: Any = None) -> Span:
        end = (last or token).end_pos
        return Span(self.source, self.base + token.start_pos, self.base + end)

    def name(self, token: Any) -> s.Name:
        return s.Name(str(token), self.span(token))

    def statement(self, tree: Any) -> s.Statement:
        parts = tree.children
        first = parts[0] if hasattr(parts[0], "start_pos") else None
        if tree.data == "use":
            return s.Import(str(parts[1])[1:-1], self.span(first, parts[1]))
        if tree.data == "param":
            name, dtype = self.name(parts[0]), self.name(parts[1])
            if _is_none(parts[-1]):
                return s.ParamDef(name, dtype, None, name.span.to(self.span(parts[-1])), True)
            default = self.expr(parts[2]) if len(parts) > 2 else None
            return s.ParamDef(
                name, dtype, default, name.span.to(default.span if default else dtype.span)
            )
        if tree.data == "tensor":
            *parts, last = parts
            optional = _is_none(last)
            name, dtype = self.name(parts[0]), self.name(parts.pop() if optional else last)
            dims = tuple(map(self.expr, parts[1].children)) if len(parts) > 1 else ()
            return s.TensorDef(name, dims, dtype, name.span.to(self.span(last)), optional)
        if tree.data == "define":
            names = tuple(map(self.name, parts[1].children)) if len(parts) > 2 else ()
            body = self.expr(parts[-1])
            return s.Define(self.name(parts[0]), names, body, self.span(first).to(body.span))
        value = self.expr(parts[-1])
        if tree.data == "assign":
            return s.Assign(self.name(parts[0]), value, self.span(first).to(value.span))
        return s.Bare(value, value.span)

    def expr(self, root: Any) -> s.Expr:
        built: dict[int, tuple[Any, int]] = {}
        stack = [(root, False)]
        while stack:
            tree, ready = stack.pop()
            subtrees = [t for c in tree.children for t in _subtrees(c)]
            if not ready:
                stack.append((tree, True))
                stack += [(t, False) for t in subtrees]
                continue
            made = self._node(tree, [built[id(t)][0] for t in subtrees])
            depths = [built[id(t)][1] for t in subtrees]
            # The left operand of an operator does not nest: long sums are flat.
            if isinstance(made, s.Binary):
                depth = max(depths[0], depths[1] + 1)
            elif isinstance(made, s.Keyword):
                depth = depths[0]
            else:
                depth = 1 + max(depths, default=0)
            if depth > MAX_NESTING:
                raise LimitError(
                    f"the expression nests deeper than {MAX_NESTING}",
                    made.span,
                    "give an inner part a name in a line of its own",
                )
            built[id(tree)] = made, depth
        found: s.Expr = built[id(root)][0]
        return found

    def _node(self, tree: Any, parts: list[Any]) -> s.Expr | s.Keyword:
        kind, children = tree.data, tree.children
        if kind == "number":
            return s.Number(str(children[0]).replace("_", ""), self.span(children[0]))
        if kind == "name":
            return self.name(children[0])
        if kind == "whole":
            return s.Whole(self.span(children[0]))
        if kind == "unary":
            return s.Unary(str(children[0]), parts[0], self.span(children[0]).to(parts[0].span))
        if kind == "binary":
            span = parts[0].span.to(parts[1].span)
            return s.Binary(str(children[1]), parts[0], parts[1], span)
        if kind == "compare":
            ops = tuple(str(c) for c in children if hasattr(c, "start_pos"))
            return s.Compare(ops, tuple(parts), parts[0].span.to(parts[-1].span))
        if kind == "member":
            return self._member(children, parts)
        if kind == "ternary":
            return s.Ternary(parts[1], parts[0], parts[2], parts[0].span.to(parts[2].span))
        if kind == "group":
            return s.Group(parts[0], self._closed(parts[0].span, ")", back="("))
        start = self.span(children[0])
        if kind == "keyword":
            return s.Keyword(self.name(children[0]), parts[0], start.to(parts[0].span))
        end = self._closed(parts[-1].span if parts else start, ")" if kind == "call" else "]")
        if kind == "index":
            return s.Index(str(children[0]), tuple(parts), start.to(end))
        return s.FunctionCall(str(children[0]), *_by_name(parts, start.to(end)))

    def _member(self, children: list[Any], parts: list[Any]) -> s.Compare:
        """``x in t[i, :]``, a comparison whose second operand is a row of a tensor."""
        element, *places = parts
        name = next(child for child in children if getattr(child, "type", None) == "NAME")
        op = " ".join(str(child) for child in children if getattr(child, "type", None) in _IN)
        start = self.span(name)
        end = self._closed(places[-1].span if places else start, "]")
        row = s.Index(str(name), tuple(places), start.to(end))
        return s.Compare((op,), (element, row), element.span.to(row.span))

    def _closed(self, inner: Span, bracket: str, back: str = "") -> Span:
        """``inner`` widened to the bracket that closes it (and to the one that opens it)."""
        end = _next(self.source.text, bracket, inner.end)
        start = _last(self.source.text, back, inner.start) if back else inner.start
        return Span(self.source, start, end + 1)


def _next(text: str, bracket: str, at: int) -> int:
    """The first place of ``bracket`` from ``at`` on, outside of comments."""
    found = text.find(bracket, at)
    while (comment := text.find("#", at, found)) >= 0:
        at = text.find("\n", comment)
        found = text.find(bracket, at)
    return found


def _last(text: str, bracket: str, at: int) -> int:
    """The last place of ``bracket`` before ``at``, outside of comments."""
    found = text.rfind(bracket, 0, at)
    while (comment := text.find("#", text.rfind("\n", 0, found) + 1, found)) >= 0:
        found = text.rfind(bracket, 0, comment)
    return found


def _by_name(
    parts: list[s.Expr | s.Keyword], span: Span
) -> tuple[tuple[s.Expr, ...], Span, tuple[s.Keyword, ...]]:
    """The arguments of a call: those without a name, where the call stands, those with one."""
    args: list[s.Expr] = []
    named: list[s.Keyword] = []
    for part in parts:
        if isinstance(part, s.Keyword):
            named.append(part)
        elif named:
            raise ParseError(
                f"an argument without a name stands behind '{named[-1].name.name}='",
                part.span,
                "write arguments without a name first, or give this one its name too",
            )
        else:
            args.append(part)
    return tuple(args), span, tuple(named)


def _is_none(child: Any) -> bool:
    return getattr(child, "type", None) == "NONE"


def _subtrees(child: Any) -> list[Any]:
    if hasattr(child, "start_pos"):
        return []
    return list(child.children) if child.data == "arguments" else [child]
