"""Proposals for a place of a program: names, functions and words, with their meanings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from attndsl.frontend import surface as s
from attndsl.frontend.hints import USUAL_INDEX
from attndsl.frontend.statements import comment_above
from attndsl.frontend.vocabulary import Kind
from attndsl.ir import DType, TensorDecl

from .builtin_docs import all_meanings
from .hover import bindings, draft_of, told_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.frontend.error_recovery import Draft

    from .builtin_docs import Meaning
    from .embedded_programs import EmbeddedProgram
    from .hover import Binding

_MOST = 500
"""Names of a program."""
_AFTER_TYPE = re.compile(r"^\s*(?:param|tensor)\s+\w+\s*(?:\[[^\]]*\])?\s*:\s*\w*$")
_NEW_NAME = re.compile(r"^\s*(?:param|tensor|def)\s+\w*$")
_IN_DIMS = re.compile(r"^\s*tensor\s+\w+\s*\[[^\]]*$")
_WORDS_OF_SIZES = frozenset({"batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"})
_TARGETS = frozenset({"mask", "score", "sink", "weights"})
_RANKS = {
    Kind.VARIABLE: 1, Kind.TARGET: 1, Kind.PRELUDE: 2, Kind.FUNCTION: 3, Kind.WORD: 4,
    Kind.DECLARATION: 4, Kind.CONSTANT: 4, Kind.TYPE: 4,
}  # fmt: skip


class Proposal(NamedTuple):
    """Something that may be written."""

    label: str
    kind: str
    """A kind of :class:`~attndsl.frontend.vocabulary.Kind` or of a binding."""
    detail: str
    """Its signature."""
    markdown: str
    insert: str
    """A snippet: ``$1`` and ``${1:name}`` are places to fill in."""
    rank: int = 0
    """The smaller ones come first."""


def proposals_at(program: EmbeddedProgram, offset: int) -> list[Proposal]:
    """Proposals for ``offset`` of a program, where the beginning of a word may stand already."""
    text = program.source.text
    before = text[text.rfind("\n", 0, offset) + 1 : offset].rpartition(";")[2]
    if "#" in before or '"' in before or _NEW_NAME.match(before):
        return []
    if _AFTER_TYPE.match(before):
        return [_of_meaning(m) for m in all_meanings() if m.kind is Kind.TYPE]
    draft = draft_of(program)
    own = list(_own(draft))
    known = {each.label for each in own}
    own += [
        Proposal(name, "param", told_value(given), "", name)
        for name, given in program.declared.items()
        if name not in known
    ]
    if _IN_DIMS.match(before):
        sizes = [_of_meaning(m) for m in all_meanings() if m.name in _WORDS_OF_SIZES]
        return [*(x for x in own if x.kind in ("size", "param")), *sizes]
    taken = {x.label for x in own}
    starts = re.match(r"^\s*\w*$", before) is not None
    words = [_of_meaning(m, starts) for m in all_meanings() if m.name not in taken]
    return [*own, *(x for x in words if starts or x.kind != Kind.DECLARATION.value)]


def _own(draft: Draft) -> Iterator[Proposal]:
    """The names that the program binds."""
    for bound in list(bindings(draft).values())[:_MOST]:
        yield _of_binding(bound, draft)


def _of_binding(bound: Binding, draft: Draft) -> Proposal:
    statement, name = bound.statement, bound.name
    written = statement.span.source.text[statement.span.start : statement.span.end]
    detail = " ".join(written.split())[:120]
    insert = name
    value = draft.values.names.get(name)
    if isinstance(statement, s.Define) and bound.kind == "function":
        parameters = tuple(each.name for each in statement.parameters)
        insert, detail = _call(name, parameters), f"{name}({', '.join(parameters)})"
    elif isinstance(value, TensorDecl):
        places = ", ".join(f"${{{n}:{_index(dim)}}}" for n, dim in enumerate(_dims(statement), 1))
        insert = f"{name}[{places}]"
    elif value is not None and bound.kind == "local":
        detail = f"{value.dtype.value}: {detail}"
    return Proposal(name, bound.kind, detail, comment_above(statement.span), insert)


def _dims(statement: s.Statement) -> list[str]:
    dims = statement.dims if isinstance(statement, s.TensorDef) else ()
    return [dim.name if isinstance(dim, s.Name) else "" for dim in dims]


def _index(dim: str) -> str:
    return USUAL_INDEX.get(dim, "i")


def _of_meaning(meaning: Meaning, starts: bool = False) -> Proposal:
    insert = meaning.name
    if meaning.kind in (Kind.FUNCTION, Kind.PRELUDE):
        insert = _call(meaning.name, meaning.parameters)
    elif starts and meaning.name in _TARGETS:
        insert = f"{meaning.name} = "
    elif meaning.name in _STATEMENTS:
        insert = _STATEMENTS[meaning.name]
    code = meaning.definition or meaning.form
    markdown = f"{meaning.said}\n\n```attn\n{code}\n```" if meaning.definition else meaning.said
    return Proposal(
        meaning.name, meaning.kind.value, meaning.form, markdown, insert, _RANKS[meaning.kind]
    )


_TYPES = ",".join(dtype.value for dtype in reversed(DType))
_STATEMENTS = {
    "param": f"param ${{1:name}}: ${{2|{_TYPES}|}}",
    "tensor": f"tensor ${{1:name}}[${{2:batch, kv_len}}]: ${{3|{_TYPES}|}}",
    "def": "def ${1:name}(${2:x}) = $0",
    "import": 'import "${1:file}.attn"',
}


def _call(name: str, parameters: tuple[str, ...]) -> str:
    """A call as a snippet, in which brackets of an argument's own stay as they are."""
    places = ", ".join(f"${{{number}:{each}}}" for number, each in enumerate(parameters, 1) if each)
    return f"{name}({places})"
