"""What of the program's expressions an owning tile computes once, before its loop.

Values of one row (or column) of the owning tile alone, and of (b, h) alone: lookups, divisions and
functions that every tile of the loop would compute again. Compilers move arithmetic out of loops by
themselves, but not loads.

Non-goals: what varies along the loop.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attndsl.ir import BITWISE, FLOAT_UNARY, DType, Op, dependencies, param, toposort
from attndsl.passes.widths import ranges

from .device_functions import parameters, program_function
from .expression import print_expressions

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from .specialise import Specialisation

_WORTH = FLOAT_UNARY | BITWISE | {Op.LOAD, Op.FLOORDIV, Op.MOD, Op.POW, Op.DIV}
_MAX_VALUES = 6
"""Each is kept in registers through the loop."""


@dataclass(frozen=True, slots=True)
class Hoisted:
    """Values that are computed before a loop."""

    replacements: dict[Node, Node] = field(default_factory=dict)
    """Each value, and the param that stands for it inside the loop."""
    names: list[str] = field(default_factory=list)
    """What the values are called in kernels."""
    int_bits: dict[str, int] = field(default_factory=dict)
    call: list[str] = field(default_factory=list)
    """Lines of the kernel that compute them."""
    functions: list[str] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)


def hoist(lowered: Lowered, special: Specialisation, own: str) -> Hoisted:
    """What the kernel computes once whose owning tiles count ``own`` (``q`` or ``kv``)."""
    program = lowered.program
    roots = [r for r in (program.mask, program.score, lowered.derivative.score) if r is not None]
    values = _values(roots, own)
    if not values:
        return Hoisted()
    names = [f"own{number}" for number in range(len(values))]
    known = special.names()
    found = ranges(tuple(values), known.int_bits, known.from_zero)
    bits = {
        f"${name}": max(abs(end) for end in found[value]).bit_length() + 1
        for name, value in zip(names, values, strict=True)
        if value.dtype is DType.INT
    }
    printed = print_expressions(tuple(values), known)
    arguments = f"b, h, hkv, {own}, batch, heads, kv_heads, q_len, kv_len"
    function = program_function(
        "own_values",
        arguments,
        special,
        "What of the program depends on the owning tile alone.",
        [*printed.lines, f"return {', '.join(printed.results)}"],
        True,
    )
    given = textwrap.wrap(", ".join([arguments, *parameters(special)]) + ",", 88)
    return Hoisted(
        {v: param(f"${n}", v.dtype) for n, v in zip(names, values, strict=True)},
        names,
        bits,
        [f"{', '.join(names)} = own_values(", *(f"    {line}" for line in given), ")"],
        [function],
        set(printed.helpers),
    )


def _values(roots: list[Node], own: str) -> list[Node]:
    deps = dependencies(*roots)
    worth: dict[Node, bool] = {}
    for item in toposort(*roots):
        worth[item] = item.op in _WORTH or any(worth[arg] for arg in item.args)
    values: dict[Node, None] = {}
    stack = list(reversed(roots))
    while stack:
        item = stack.pop()
        if worth[item] and not deps[item] & {"q", "kv", "score"} - {own}:
            values[item] = None
        else:
            stack += reversed(item.args)
    return list(values)[:_MAX_VALUES]
