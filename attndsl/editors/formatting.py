"""Programs in the canonical layout, within the file that holds them.

Non-goals: the layout of a configuration around its programs; texts in quotes, whose escapes would
have to be written anew. Of a configuration, blocks of YAML (``program: |``) are laid out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from attndsl.errors import AttnDSLError
from attndsl.frontend.format import format_source
from attndsl.frontend.limits import MAX_SOURCE

from .embedded_programs import programs_in

if TYPE_CHECKING:
    from .embedded_programs import EmbeddedProgram, Found

_BLOCK = re.compile(r"[|][+-]?[ \t]*(?:#[^\n]*)?\n(?=( +)\S)")
"""The head of a block without an indentation of its own, and the indentation that it has."""


class Edit(NamedTuple):
    """A range of a file, and the text to put there."""

    start: int
    end: int
    text: str


def edits_of(text: str, path: str) -> list[Edit]:
    """Edits that lay out a file's programs. Programs with errors of syntax stay as they are."""
    found = programs_in(text, path)
    edits: list[Edit] = []
    for program in found.programs:
        laid = _laid_out(program.source.text)
        if laid == program.source.text:
            continue
        if program.places is None:
            return [Edit(0, len(text), laid)]
        edits += _in_block(text, program, laid)
    edits = list(dict.fromkeys(edits))  # An alias is the program that it names.
    return edits if _leaves_the_rest(text, path, found, edits) else []


def _laid_out(text: str) -> str:
    """``text`` in the canonical layout, or as it is if it has errors of syntax."""
    if len(text) > MAX_SOURCE:
        return text
    try:
        return format_source(text)
    except AttnDSLError:
        return text


def _in_block(text: str, program: EmbeddedProgram, laid: str) -> list[Edit]:
    """The edit of a program that is a block of YAML; none for other texts."""
    assert program.places is not None
    first = program.places[0]
    line_start = text.rfind("\n", 0, first) + 1
    head_start = text.rfind("|", 0, line_start)
    head = _BLOCK.match(text, head_start) if head_start >= 0 else None
    if head is None or head.end() != line_start or not program.source.text.endswith("\n"):
        return []
    indent = head[1]
    end = program.places[len(program.source.text) - 1] + 1
    rows = [indent + row if row else "" for row in laid.rstrip("\n").split("\n")]
    # Blank lines at the end of a kept block (`|+`) are the file's own.
    return [Edit(line_start, end, "\n".join(rows) + "\n")]


def _leaves_the_rest(text: str, path: str, found: Found, edits: list[Edit]) -> bool:
    """Return True if ``edits`` leave the file the same programs in canonical layout, and no others.

    Any other outcome would change what somebody has written, so nothing is edited then.
    """
    if not edits:
        return True
    parts, end = [], 0
    for edit in sorted(edits):
        if edit.start < end:
            return False
        parts += [text[end : edit.start], edit.text]
        end = edit.end
    after = programs_in("".join([*parts, text[end:]]), path)
    if after.errors != found.errors or len(after.programs) != len(found.programs):
        return False
    return all(
        (new.name, new.declared) == (old.name, old.declared)
        and new.source.text in (old.source.text, _laid_out(old.source.text))
        for new, old in zip(after.programs, found.programs, strict=True)
    )
