"""Names that have their own meaning in every program, so that none can bind them.

Non-goals: names of functions, which a program may bind and so replace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl import ir

if TYPE_CHECKING:
    from attndsl.ir import Node

CONSTANTS: dict[str, Node] = {
    "inf": ir.const(float("inf")),
    "pi": ir.const(3.141592653589793),
    "e": ir.const(2.718281828459045),
    "true": ir.const(True),
    "false": ir.const(False),
}
ALWAYS = frozenset({*ir.VARS, *ir.SIZES, ir.TOKEN, ir.TOKENS, *CONSTANTS, "score"})
"""Names that stand for a value. A line may say what ``score`` is; none of the others is bound."""
TARGETS = frozenset({"mask", "score", "sink", "weights"})
"""Parts of the program that a statement sets, rather than a name of its own."""
WORDS = frozenset(
    {"import", "param", "tensor", "def", "if", "else", "and", "or", "not", "in", "none"}
)
"""Names that the grammar has for itself."""


def is_reserved(name: str) -> bool:
    """Return True if no program may bind ``name``."""
    return name in ALWAYS or name in TARGETS or name in WORDS
