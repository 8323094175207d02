"""Names of a program's own locals in texts that people read.

Names mean nothing to a kernel, and programs that differ in them share one. So a compiled text
numbers its locals. In a text for people each local of the program that is left in it has a line of
its own, and its name where nothing else in the module has that. Printers do not know what else
there is: they write placeholders, which become names once the module is complete.
"""

from __future__ import annotations

import builtins
import io
import keyword
import re
import tokenize
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node

_PLACEHOLDER = re.compile(r"\b_own\d+\b")
"""Locals of printers and names of templates have no digits right after a leading ``_own``."""
_OF_PYTHON = frozenset((*keyword.kwlist, *keyword.softkwlist, *dir(builtins)))


def placeholders(names: Mapping[Node, str]) -> dict[Node, str]:
    """Placeholders of the locals that are to have ``names``. Equal names are one local."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names.values()))}
    return {item: f"_own{numbers[name]}" for item, name in names.items()}


def with_names(text: str, names: Mapping[Node, str]) -> str:
    """``text`` of a module with ``names`` in place of their placeholders.

    A name that something else in the module has, or Python, ends in as many ``_`` as it takes.
    """
    wanted = dict.fromkeys(names.values())
    there = {
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.NAME
    }
    taken = there | _OF_PYTHON
    found = {}
    for number, wish in enumerate(wanted):
        place, name = f"_own{number}", wish
        if place not in there:
            continue
        while name in taken:
            name += "_"
        taken.add(name)
        found[place] = name
    return _PLACEHOLDER.sub(lambda match: found.get(match.group(), match.group()), text)
