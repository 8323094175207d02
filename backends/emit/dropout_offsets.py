"""Dropout draws in kernels where a call's pairs are a part of the whole that dropout counts.

Dropout draws for blocks of rows and keys (:mod:`..dense.philox`). A part that begins with whole
blocks draws as fast as a call of its own: a head's words are others, and nothing else. A part that
begins within a block, or of which only the device knows where it begins, draws for each pair alone,
which takes tens of times as many operations. Only portable kernels do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dense import philox
from .module_lines import scope_function

if TYPE_CHECKING:
    from ..base import Call

BLOCK, ROW, POSITION = "block", "row", "position"
"""Kinds of numbering of a part's rows, or keys: from a whole block on, from a number on, or by each
row's logical position."""
PARAMETERS = ("draws_row", "draws_key", "draws_head", "draws_heads")
"""Kernel arguments of parts' draws, all int32."""
Kinds = tuple[str, str]
"""Kinds of numbering of the rows and of the keys."""


def kinds_of_draws(call: Call) -> Kinds | None:
    """Kinds of the rows and keys that dropout counts; None where they are those of q and k."""
    draws = call.draws
    if draws is None:
        return None
    return _kind(draws.q_start, philox.ROWS), _kind(draws.kv_start, philox.KEYS)


def _kind(start: int | None, block: int) -> str:
    if start is None:
        return POSITION
    return ROW if start % block else BLOCK


def why_pairs(call: Call) -> str | None:
    """Reason why a call's numbers are drawn for each pair alone, or None where they are not."""
    kinds = kinds_of_draws(call)
    if kinds is None or kinds == (BLOCK, BLOCK):
        return None
    if POSITION in kinds:
        return "the device alone knows which rows and keys of the whole dropout draws for"
    return (
        f"dropout draws for blocks of {philox.ROWS} rows and {philox.KEYS} keys, and the part "
        "begins within one"
    )


def draws_arguments(call: Call) -> list[int]:
    """Values of :data:`PARAMETERS`."""
    draws, kinds = call.draws, kinds_of_draws(call)
    assert draws is not None
    starts = [draws.q_start or 0, draws.kv_start or 0]
    if kinds == (BLOCK, BLOCK):
        # Places: see backends.philox.
        starts = [8 * (starts[0] // philox.ROWS), 8 * (starts[1] // philox.KEYS)]
    head = draws.b_offset * draws.heads + draws.h_offset
    # Counters are words of 32 bits, and kernels take signed ones.
    return [*starts, (head + (1 << 31)) % (1 << 32) - (1 << 31), draws.heads]


def number_of_head(kinds: Kinds | None) -> str:
    """Number of a head among all that dropout counts."""
    if kinds is None:
        return "head.b * sizes.heads + head.h"
    return "head.b * given.draws_heads + head.h + given.draws_head"


def kept_function(kinds: Kinds | None) -> str:
    """``kept_of_tile``, which calls the function of ``dropout`` that draws as ``kinds`` says."""
    function, more = "kept_pairs", ""
    if kinds == (BLOCK, BLOCK):
        function, more = "kept_pairs_of_part", "given.draws_row, given.draws_key, "
    elif kinds is not None:
        function = "kept_single_pairs"
        by_position = ", ".join(str(kind == POSITION) for kind in kinds)
        more = f"q, kv, (given.draws_row, given.draws_key), {by_position}, "
    return scope_function(
        "kept_of_tile",
        "row, column, p, q, kv",
        "Which pairs of a tile dropout keeps, as int8 (ROWS, COLUMNS).",
        [
            f"number = {number_of_head(kinds)}",
            f"return {function}(row, column, p, number, given.seed, {more}ROWS, COLUMNS)",
        ],
        "ROWS: tl.constexpr, COLUMNS: tl.constexpr",
    )


def drop_function(kinds: Kinds | None) -> str:
    """``drop_of_item``: what decides which pairs of a head are kept, of parts of whole blocks."""
    function, more = "drop_of_head", ""
    if kinds is not None:
        function, more = "drop_of_part", ", given.draws_row, given.draws_key"
    return scope_function(
        "drop_of_item",
        "",
        "What decides which pairs of a head are kept.",
        [
            "chance = drop_probability(scope)",
            f"number = {number_of_head(kinds)}",
            f"return {function}(chance, number, given.seed{more})",
        ],
    )
