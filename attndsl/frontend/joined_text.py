"""Several programs as the text of one, with their names kept apart.

Each program's text stays as written but for its names, which are replaced at the places that the
surface tree knows, and for params with a value, in whose place the value stands. The programs'
lines follow one another, so masks are joined by ``and`` and each score line reads the one before.

Non-goals: programs that have a sink or weights each; simpler text than was written.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from attndsl.errors import ArgumentError
from attndsl.source import Source

from . import surface as s
from .check import check
from .declare import Bound, ParamSpec, TensorSpec
from .format import format_source
from .parse import parse
from .program_names import ProgramNames, forms, is_free, names_of
from .reserved_names import is_reserved
from .statements import split_statements

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from attndsl.source import Span

    from .declare import Declared


@dataclass(frozen=True, slots=True)
class JoinPart:
    """One of the programs to join."""

    text: str
    """Checked, with all its imports."""
    declared: Mapping[str, Declared]
    """Declarations of its caller."""
    sink: bool = True
    """True if its sink stays."""
    prefix: str = ""
    """Put before the names of its params, tensors and dims."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One program of several."""

    text: str
    """All of it: nothing need be declared beside it."""
    names: tuple[Mapping[str, str], ...]
    """New names of each program's params and tensors."""


def join_texts(parts: Sequence[JoinPart], share: Collection[str]) -> Joined:
    """The text of one program that does what all ``parts`` do, one after the other.

    Args:
        parts: The programs.
        share: Names of params and tensors that are one capture in all programs that have them.

    Raises:
        ArgumentError: The programs do not go together.
    """
    programs = [_read(number, part) for number, part in enumerate(parts, start=1)]
    _check_single(programs)
    _check_share(programs, share)
    finals = _name_captures(programs, share)
    _name_others(programs, finals, share)
    declared: dict[str, tuple[_RenamedProgram, str]] = {}
    texts = []
    for program in programs:
        again = set()
        for name in [name for name in program.names.captures if name in share]:
            line = _declaration(program, name)
            first, wanted = declared.setdefault(name, (program, line))
            if line != wanted:
                raise ArgumentError(
                    f"'{name}' is shared, and it is '{wanted}' in program {first.number} and "
                    f"'{line}' in program {program.number}",
                    hint="declare it in the same words in both",
                )
            if first is not program:
                again.add(name)
        texts.append(_text(program, again))
    captures = tuple({name: p.values[name] for name in p.names.captures} for p in programs)
    return Joined(format_source("\n\n".join(texts), "<joined>"), captures)


def some_prefixes(count: int) -> tuple[str, ...]:
    """Prefixes for hints."""
    return ("", *(f"p{n}_" for n in range(2, count + 1)))


@dataclass(frozen=True, slots=True)
class _RenamedProgram:
    """A program, and what its names are to be called."""

    number: int
    """Number of the program in errors, from 1."""
    part: JoinPart
    source: Source
    """The text with all its declarations, except for params with a value."""
    tree: s.Tree
    spans: Sequence[Span]
    """Spans of its statements."""
    names: ProgramNames
    bound: Mapping[str, Bound]
    """Params that have a value for good."""
    values: dict[str, str] = field(default_factory=dict)
    """Replacement of each name: another name, or the value of a param."""
    functions: dict[str, str] = field(default_factory=dict)


def _read(number: int, part: JoinPart) -> _RenamedProgram:
    bound = {name: x for name, x in part.declared.items() if isinstance(x, Bound)}
    written = {x.name.name for x in parse(Source(part.text)).statements
               if isinstance(x, s.ParamDef | s.TensorDef)}  # fmt: skip
    lines = [_declared_line(name, x) for name, x in part.declared.items() if name not in written]
    source = Source("\n".join([*filter(None, lines), part.text]), f"<program {number}>")
    tree = parse(source)
    spans, _ = split_statements(source)
    types = {x.name.name: x.dtype.name for x in tree.statements if isinstance(x, s.ParamDef)}
    values = {name: _literal(x.value, types.get(name)) for name, x in bound.items()}
    return _RenamedProgram(
        number, part, source, tree, spans, names_of(tree, spans, bound), bound, values
    )


def _declared_line(name: str, given: Declared) -> str:
    """The statement that declares what ``given`` does; none for a value."""
    if isinstance(given, ParamSpec):
        return f"param {name}: {given.dtype}"
    if isinstance(given, TensorSpec):
        return f"tensor {name}[{', '.join(map(str, given.dims))}]: {given.dtype}"
    return ""


def _literal(value: bool | int | float, dtype: str | None) -> str:
    """``value`` as an operand of anything."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value == -(1 << 63) and isinstance(value, int):
        return f"({value + 1} - 1)"  # It has no literal of its own.
    text = repr(float(value) if dtype == "float" else value)
    return f"({text})" if text.startswith("-") else text


def _check_single(programs: Sequence[_RenamedProgram]) -> None:
    for target, hint in (
        ("sink", "leave one out: attention.without_sink()"),
        ("weights", "write one 'weights' line that does the work of both"),
    ):
        found = [program for program in programs if _lines_of(program, target)]
        if len(found) > 1:
            raise ArgumentError(
                f"{_listed(found)} each have '{target}', and a program has one", hint=hint
            )


def _listed(programs: Sequence[_RenamedProgram]) -> str:
    *rest, last = (str(program.number) for program in programs)
    return f"programs {', '.join(rest)} and {last}"


def _lines_of(program: _RenamedProgram, target: str) -> list[s.Statement]:
    """The lines that give ``target``, as far as they stay."""
    if target == "sink" and not program.part.sink:
        return []
    statements = program.tree.statements
    return [x for x in statements if isinstance(x, s.Assign) and x.name.name == target]


def _check_share(programs: Sequence[_RenamedProgram], share: Collection[str]) -> None:
    for name in share:
        found = [program for program in programs if name in program.names.captures]
        if len(found) < 2:
            known = sorted({name for program in programs for name in program.names.captures})
            close = difflib.get_close_matches(name, known, n=1)
            which = f"only program {found[0].number} has" if found else "no program has"
            raise ArgumentError(
                f"share names '{name}', which {which} as a param or tensor of its calls",
                hint=f"did you mean '{close[0]}'?"
                if close and close[0] != name
                else "name what at least two programs declare",
            )


def _name_captures(programs: Sequence[_RenamedProgram], share: Collection[str]) -> set[str]:
    """Fill in what params and tensors are called, and give these names.

    Raises:
        ArgumentError: Two would have one name.
    """
    owners: dict[str, list[tuple[_RenamedProgram, bool]]] = {}
    for program in programs:
        prefix = program.part.prefix
        for name in program.names.captures:
            shared = name in share
            final = name if shared else prefix + name
            if prefix and is_reserved(final):
                raise ArgumentError(
                    f"the prefix '{prefix}' makes '{final}' of '{name}', which has its own meaning",
                    hint="choose another prefix",
                )
            program.values[name] = final
            owners.setdefault(final, []).append((program, shared))
    clashes = {
        final: [program for program, _ in found]
        for final, found in owners.items()
        if len(found) > 1 and not all(shared for _, shared in found)
    }
    if clashes:
        told = ", ".join(f"'{name}' ({_listed(found)})" for name, found in clashes.items())
        raise ArgumentError(
            f"several programs have a param or tensor of one name: {told}",
            hint="choose prefixes that keep them apart"
            if any(program.part.prefix for program in programs)
            else f"share={tuple(clashes)} makes one capture of each, "
            f"prefixes={some_prefixes(len(programs))} keeps them apart",
        )
    return set(owners)


def _name_others(
    programs: Sequence[_RenamedProgram], finals: Collection[str], share: Collection[str]
) -> None:
    """Fill in what dims, locals and functions are called: what they are, as far as that is free."""
    taken = set(finals)
    everywhere = {*finals, *(name for program in programs for name in program.names.written)}
    for program in programs:
        # Dims of a shared tensor are shared with it.
        shared = [x for name, x in program.names.captures.items() if name in share]
        inside = {dim.name for x in shared if isinstance(x, s.TensorDef) for dim in x.dims
                  if isinstance(dim, s.Name)}  # fmt: skip
        kept = [dim for dim in program.names.dims if dim in inside and dim not in finals]
        program.values.update(zip(kept, kept, strict=True))
        taken.update(kept)
    for program in programs:
        names, others = program.names, [x for x in programs if x is not program]
        for name in (*names.dims, *names.locals, *names.functions):
            if name in program.values:
                continue
            wanted = program.part.prefix + name if name in names.dims else name
            function = name in names.functions
            meant = function and any(name in other.names.foreign for other in others)
            if wanted in taken or meant or is_reserved(wanted):
                if name in names.replaced:
                    raise ArgumentError(
                        f"the function '{name}' of program {program.number} works within the "
                        "prelude's functions there, and other programs mean another by that name",
                        hint="give it another name, and write out the calls that it is meant for",
                    )
                wanted = _fresh(name, program.number, everywhere)
            taken.add(wanted)
            everywhere.add(wanted)
            (program.functions if function else program.values)[name] = wanted


def _fresh(name: str, number: int, everywhere: Collection[str]) -> str:
    candidates = (f"{name}_{n}" for n in count(max(number, 2)))
    return next(x for x in candidates if x not in everywhere and is_free(x))


Edit = tuple[int, int, str]
"""Start, end and new text of a range."""


def _declaration(program: _RenamedProgram, name: str) -> str:
    """The statement that declares the capture ``name``, with the names that it is to have."""
    number = program.tree.statements.index(program.names.captures[name])
    statement, span = program.tree.statements[number], program.spans[number]
    text = program.source.text[span.start : statement.span.end]
    return format_source(_edited(text, _renamed(program, statement), span.start)).strip()


def _text(program: _RenamedProgram, again: Collection[str]) -> str:
    """The program's text, with the names that it is to have.

    Args:
        program: The program.
        again: Captures that a program before declares for it.
    """
    gone = {*again, *program.bound}
    text = program.source.text
    edits: list[Edit] = []
    for statement, span in zip(program.tree.statements, program.spans, strict=True):
        declares = isinstance(statement, s.ParamDef | s.TensorDef) and statement.name.name in gone
        sinks = isinstance(statement, s.Assign) and statement.name.name == "sink"
        if declares or (sinks and not program.part.sink):
            edits.append((span.start, min(span.end + 1, len(text)), ""))
            continue
        edits += _renamed(program, statement)
        if isinstance(statement, s.Bare):
            start = span.end - len(text[span.start : span.end].lstrip())
            edits.append((start, start, f"{_target(program)} = "))
    return _edited(text, edits)


def _target(program: _RenamedProgram) -> str:
    """Name for a program's one expression without a name: ``score`` or ``mask``."""
    return "score" if check(program.tree, program.bound).mask is None else "mask"


def _edited(text: str, edits: Iterable[Edit], base: int = 0) -> str:
    """``text``, which begins at ``base``, after all ``edits``."""
    parts, position = [], 0
    for start, end, new in sorted(edits):
        parts += [text[position : start - base], new]
        position = end - base
    return "".join([*parts, text[position:]])


def _renamed(program: _RenamedProgram, statement: s.Statement) -> list[Edit]:
    """The names of one statement."""
    hidden: Mapping[str, str] = {}
    edits: list[Edit] = []
    if isinstance(statement, s.Define):
        hidden = _parameters(program, statement)
        edits += [_at(x.span, len(x.name), hidden[x.name]) for x in statement.parameters]
        edits.append(_at(statement.name.span, len(statement.name.name),
                         program.functions[statement.name.name]))  # fmt: skip
    elif isinstance(statement, s.ParamDef | s.TensorDef | s.Assign):
        name = statement.name
        edits.append(_at(name.span, len(name.name), program.values.get(name.name, name.name)))
    values = {**program.values, **hidden}
    apart = set(map(id, forms(statement)))
    for item in (item for root in s.expressions(statement) for item in s.walk(root)):
        if isinstance(item, s.Name):
            edits.append(_at(item.span, len(item.name), values.get(item.name, item.name)))
        elif isinstance(item, s.Index):
            new = values.get(item.name, item.name)
            edits.append(_at(item.span, len(item.name), new if new.isidentifier() else item.name))
        elif isinstance(item, s.FunctionCall):
            own = None if id(item) in apart else program.names.functions.get(item.name)
            if own is not None:
                edits.append(_at(item.span, len(item.name), program.functions[item.name]))
                names = _parameters(program, own)
                for each in (keyword.name for keyword in item.keywords):
                    edits.append(_at(each.span, len(each.name), names.get(each.name, each.name)))
    return edits


def _at(span: Span, length: int, new: str) -> Edit:
    return span.start, span.start + length, new


def _parameters(program: _RenamedProgram, function: s.Define) -> dict[str, str]:
    """New names of a function's parameters: none may hide a name that its body means."""
    inserted = {new for old, new in program.values.items() if new != old} | {"inf", "true", "false"}
    names = [x.name for x in function.parameters]
    taken = {*program.names.written, *inserted}
    found = {}
    for name in names:
        found[name] = _fresh(name, 2, taken) if name in inserted else name
        taken.add(found[name])
    return found
