"""The functions of ``grammar/prelude.attn``, read when a program first calls one."""

from __future__ import annotations

from importlib import resources

from attndsl.foundation.caches import memoised
from attndsl.source import Source, Span

from . import surface as s
from .parse import parse_statement
from .statements import comment_above, split_statements


@memoised("places in the prelude", None)
def _spans() -> dict[str, Span]:
    text = resources.files("attndsl.grammar").joinpath("prelude.attn").read_text("utf-8")
    spans, errors = split_statements(Source(text, "prelude.attn"))
    assert not errors, errors
    found = {}
    for span in spans:
        head = span.text[span.text.index("def ") :]
        found[head[4 : head.index("(")].strip()] = span
    return found


def prelude_names() -> tuple[str, ...]:
    """Names of all prelude functions, in the order of the file."""
    return tuple(_spans())


def prelude_span(name: str) -> Span | None:
    """Span of the definition of ``name`` in the file of the prelude, or None."""
    return _spans().get(name)


def prelude_comment(name: str) -> str:
    """Comment above the definition of ``name``, in one line."""
    return comment_above(_spans()[name])


@memoised("functions of the prelude", None)
def prelude_function(name: str) -> s.Define | None:
    """The definition of ``name``, or None."""
    span = _spans().get(name)
    if span is None:
        return None
    statement = parse_statement(span)
    assert isinstance(statement, s.Define), name
    return statement
