"""Facts on a name in a program: its meaning, its type, and the place of its definition."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from attndsl import ir
from attndsl.errors import AttnDSLError
from attndsl.foundation.caches import memoised
from attndsl.frontend import Absent, Bound
from attndsl.frontend import surface as s
from attndsl.frontend.error_recovery import Draft, read_draft
from attndsl.frontend.hints import USUAL_INDEX
from attndsl.frontend.prelude import prelude_span
from attndsl.frontend.program_imports import SUFFIX
from attndsl.frontend.statements import comment_above
from attndsl.frontend.vocabulary import Kind, tokens
from attndsl.ir import DType, Node, Op, Program, TensorDecl
from attndsl.passes.differentiate import differentiate
from attndsl.passes.print_ir import print_expression
from attndsl.passes.simplify import simplify, simplify_derivative
from attndsl.passes.split_mask import split_mask

from .builtin_docs import meaning_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.frontend import Declared
    from attndsl.frontend.vocabulary import Token
    from attndsl.source import Source, Span

    from .embedded_programs import EmbeddedProgram as FileProgram

_MOST_NODES = 300
"""The most nodes of a score whose derivative is shown."""
_MOST_SHOWN = 600
"""Characters of a text or a derivative that is shown."""
_ORDER = ("b", "h", "q", "kv", "score")


class Binding(NamedTuple):
    """A name that a program binds."""

    name: str
    kind: str
    """``param``, ``tensor``, ``function``, ``local``, ``size`` or ``parameter``."""
    span: Span
    """Place of the name where it is bound."""
    statement: s.Statement


class Definition(NamedTuple):
    """Place of the definition of a name."""

    path: str
    text: str | None
    """Text of the file, if it is known already; None for the file that is open."""
    start: int
    end: int


class Note(NamedTuple):
    """Markdown on a name, and the offsets of the name."""

    start: int
    end: int
    markdown: str


def draft_of(program: FileProgram) -> Draft:
    """Draft of a program: all that can be read of it, whatever is wrong with it."""
    return read_draft(program.source, dict(program.declared))


def bindings(draft: Draft) -> dict[str, Binding]:
    """The names that a program binds, by name; of two bindings the first counts."""
    found: dict[str, Binding] = {}
    for statement in draft.statements:
        for each in _bound_by(statement):
            found.setdefault(each.name, each)
    # A dim's name may be that of a param that is declared later.
    for statement in draft.statements:
        if isinstance(statement, s.TensorDef):
            for dim in statement.dims:
                if isinstance(dim, s.Name) and meaning_of(dim.name) is None:
                    found.setdefault(dim.name, Binding(dim.name, "size", dim.span, statement))
    return found


def _bound_by(statement: s.Statement) -> Iterator[Binding]:
    kinds = {s.ParamDef: "param", s.TensorDef: "tensor", s.Define: "function", s.Assign: "local"}
    kind = kinds.get(type(statement))
    if kind is None or isinstance(statement, s.Import | s.Bare):
        return
    name = statement.name
    meaning = meaning_of(name.name)
    if kind == "local" and meaning is not None and meaning.kind in (Kind.TARGET, Kind.VARIABLE):
        return
    yield Binding(name.name, kind, name.span, statement)


def token_at(text: str, offset: int) -> Token | None:
    """The token of ``text`` at ``offset``, or right before it, with its place in ``text``."""
    start = text.rfind("\n", 0, offset) + 1
    stop = text.find("\n", offset)
    line = text[start : len(text) if stop < 0 else stop]
    for token in tokens(line):
        if token.start <= offset - start <= token.end and token.kind is not Kind.SYMBOL:
            return token._replace(start=start + token.start)
    return None


def note_at(program: FileProgram, offset: int) -> Note | None:
    """Note that hovering at ``offset`` of a program shows; None for no note."""
    token = token_at(program.source.text, offset)
    if token is None or token.kind in (Kind.COMMENT, Kind.NUMBER, Kind.OTHER):
        return None
    draft = draft_of(program)
    if token.kind is Kind.FILE:
        return None
    statement = _statement_at(draft, program.source, token.start)
    parameter = _parameter(statement, token.text)
    if parameter is not None:
        said = f"A parameter of `{parameter.statement.name.name}`."  # type: ignore[union-attr]
        return Note(token.start, token.end, said)
    bound = bindings(draft).get(token.text)
    if bound is not None:
        parts = [_of_binding(bound, draft)]
        if token.text in program.declared and bound.kind in ("param", "tensor"):
            parts.append(told_value(program.declared[token.text]))
        return Note(token.start, token.end, "\n\n".join(parts))
    if token.text in program.declared:
        return Note(token.start, token.end, told_value(program.declared[token.text]))
    meaning = meaning_of(token.text)
    if meaning is None:
        return None
    parts = [_code(meaning.definition or meaning.form), meaning.said]
    parts += _of_part(token, statement, draft)
    return Note(token.start, token.end, "\n\n".join(filter(None, parts)))


def definition_at(program: FileProgram, offset: int) -> Definition | None:
    """Place of the definition of the name at ``offset`` of a program; None if none is known."""
    token = token_at(program.source.text, offset)
    if token is None or token.kind in (Kind.COMMENT, Kind.NUMBER, Kind.OTHER):
        return None
    draft = draft_of(program)
    statement = _statement_at(draft, program.source, token.start)
    if token.kind is Kind.FILE:
        imports = isinstance(statement, s.Import)
        return _imported(statement.file, program.source) if imports else None  # type: ignore[union-attr]
    parameter = _parameter(statement, token.text)
    bound = parameter or bindings(draft).get(token.text)
    if bound is not None:
        span = bound.span
        own = span.source == program.source
        return Definition(span.source.name, None if own else span.source.text, span.start, span.end)
    given = program.declared.get(token.text)
    place = given.span if isinstance(given, Bound | Absent) else None
    if place is not None:
        return Definition(place.source.name, place.source.text, place.start, place.end)
    span_in_prelude = prelude_span(token.text)
    if span_in_prelude is None:
        return None
    path = resources.files("attndsl.grammar").joinpath("prelude.attn")
    start = span_in_prelude.start + span_in_prelude.text.index(token.text)
    return Definition(str(path), span_in_prelude.source.text, start, start + len(token.text))


def told_value(given: Declared) -> str:
    """Sentence on a configuration's value for a name, or on its leaving the name out."""
    if isinstance(given, Bound):
        return f"The configuration binds it to `{str(given.value).lower()}`."
    return "The configuration leaves it out."


def _imported(file: str, source: Source) -> Definition | None:
    """The file that an import reads, if it is there. Nothing is read of it."""
    parts = PurePosixPath(file)
    if source.file is None or parts.suffix != SUFFIX or parts.is_absolute() or ".." in parts.parts:
        return None
    path = os.path.normpath(os.path.join(os.path.dirname(source.file), file))
    return Definition(path, "", 0, 0) if os.path.isfile(path) else None


def _statement_at(draft: Draft, source: Source, offset: int) -> s.Statement | None:
    for statement in draft.statements:
        span = statement.span
        if span.source == source and _first(statement) <= offset <= span.end:
            return statement
    return None


def _first(statement: s.Statement) -> int:
    """Offset at which a statement begins, its first word included."""
    span = statement.span
    before = span.source.text[: span.start].rstrip()
    for word in ("param", "tensor", "def", "import"):
        if before.endswith(word):
            return len(before) - len(word)
    return span.start


def _parameter(statement: s.Statement | None, name: str) -> Binding | None:
    if isinstance(statement, s.Define):
        for each in statement.parameters:
            if each.name == name:
                return Binding(name, "parameter", each.span, statement)
    return None


def _code(text: str) -> str:
    return f"```attn\n{text[:_MOST_SHOWN]}\n```"


def _of_binding(bound: Binding, draft: Draft) -> str:
    """Markdown on a name that the program binds."""
    span = bound.statement.span
    text = span.source.text[_first(bound.statement) : span.end]
    value = draft.values.names.get(bound.name)
    parts = [_code(text), comment_above(bound.statement.span)]
    if bound.kind == "size":
        parts.append(f"`{bound.name}` is a size that the tensor brings: an `int`.")
    elif isinstance(value, TensorDecl):
        parts.append(f"A tensor of `{value.dtype.value}`, read as {_element(value)}.")
        parts.append(_by_capture(bound.name, draft))
    elif isinstance(value, Node):
        parts.append(_typed(value))
        parts.append(_by_score(value) if bound.kind == "local" else _by_capture(bound.name, draft))
    return "\n\n".join(filter(None, parts))


def _element(tensor: TensorDecl) -> str:
    names = [USUAL_INDEX.get(print_expression(dim), "...") for dim in tensor.dims]
    return f"`{tensor.name}[{', '.join(names)}]`"


def _typed(value: Node) -> str:
    """The type of an expression, and what it depends on."""
    found = ir.dependencies(value)[value]
    varies = ", ".join(f"`{name}`" for name in _ORDER if name in found)
    reads = ", ".join(f"`{name}`" for name in sorted(ir.leaf_names(value)) if name != "$before")
    said = f"`{value.dtype.value}`, "
    said += f"depends on {varies}" if varies else "the same for all pairs"
    return f"{said}; reads {reads}." if reads and value.op is not Op.PARAM else f"{said}."


def _of_part(token: Token, statement: s.Statement | None, draft: Draft) -> list[str]:
    """Paragraphs on mask, score, sink or weights at a place; none for other words."""
    values = draft.values
    if not isinstance(statement, s.Assign):
        return []
    if token.text == "score":
        is_target = statement.name.span.start == token.start
        before = [
            line for line in values.lines
            if line.span is not None and line.span.source == statement.span.source
            and line.span.start < statement.span.start + is_target
        ]  # fmt: skip
        if not before:
            return []
        return ["Here: " + _typed(before[-1].value), _by_score(before[-1].value)]
    value = values.parts.get(token.text)
    if value is None or statement.name.span.start != token.start:
        return []
    which = "All mask lines" if token.text == "mask" else "Here"
    final = "final" if token.text == "weights" else "raw"
    return [f"{which}: {_typed(value)}", _by_score(value, final)]


def _by_score(value: Node, which: str = "raw") -> str:
    """The derivative of a number by the score, in words."""
    if value.dtype is not DType.FLOAT or "score" not in ir.dependencies(value)[value]:
        return ""
    found = _derivatives(value)
    return f"Its derivative by the {which} score: `{found[0]}`" if found else ""


def _by_capture(name: str, draft: Draft) -> str:
    """The derivatives of the final score by a captured name."""
    lines = draft.values.lines
    if not lines or name not in ir.leaf_names(lines[-1].value):
        return ""
    found = [x for x in _derivatives(lines[-1].value)[1:] if x.startswith((f"d score / d {name} ",
             f"d score / d {name}["))]  # fmt: skip
    return _code("\n".join(found)) if found else ""


@memoised("derivatives in words", 64)
def _derivatives(value: Node) -> tuple[str, ...]:
    """The derivative of ``value`` by the score, and those by captures as lines."""
    if len(ir.toposort(value)) > _MOST_NODES:
        return ()
    try:
        program = simplify(split_mask(Program(score=value)))
        found = simplify_derivative(differentiate(program))
    except AttnDSLError:
        return ()
    by_tensors = (
        f"d score / d {_shown(each.load)} = {_shown(each.factor)}" for each in found.tensors
    )
    by_params = (f"d score / d {each.name} = {_shown(each.factor)}" for each in found.params)
    return (_shown(found.score), *by_tensors, *by_params)


def _shown(value: Node) -> str:
    return print_expression(value)[:_MOST_SHOWN]
