"""Shapes of the kernels for few rows: which rows are one tile, and how keys are shared out.

The sizes are those of a search on an H100 (``docs/kernels.md``).

Non-goals: which calls have so few rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attndsl.ir import Op, mentions

from ..emit.facts import FP8_TYPE
from ..kernels.config import Config
from .tiles import widths_of

if TYPE_CHECKING:
    from attndsl.ir import Node

    from ..emit.facts import KernelFacts
    from ..kernels.kernel import Job
    from ..kernels.machine import Machine

LEAST_ROWS = 16
"""Rows of the smallest product on tensor cores."""
MOST_ROWS = 64
"""Rows of the largest tile."""
PROGRAMS = 128
"""Of one batch entry, where they are few: about as many as a GPU has processors."""
_PROGRAMS_OF_PAGES = 2 * PROGRAMS
"""The same where a program looks up where keys lie: two of a processor wait for each other's loads.
With half of them 128k keys took 295 us in place of 228 (H100, D128, one request)."""
LEAST_PARTS, MOST_PARTS = 16, 128
"""Of one unit, if it has so many tiles. More than the first only where there are few units: they
take longer to merge, and write more."""
TILES_OF_PART = 1
"""That a program takes at least. Where keys are few each more takes 0.8 us (1,024 keys: 7.9, 8.7
and 10.9 us with 1, 2 and 4 on an H100, D128), and where they are many it changes nothing."""
MANY_TILES = 4
"""Of a program where a unit has more parts than :data:`LEAST_PARTS`."""
PARTS_AT_ONCE = 16
"""Of those that are merged, so that their loads wait for memory together."""
TOKENS_AT_ONCE = REQUESTS_AT_ONCE = 32
"""Tokens that a program clears if they are no request's, and requests that it asks together."""
_MERGED_NUMBERS = 8192
"""Sums that are merged together: 64 registers of a thread."""
_STAGE_BYTES = 32768
"""Of keys and values that are loaded together; three stages of two programs fit a processor."""
_STAGES_OF_PAGES = (5, 3, 2)
"""Triton shares stages out among loads that wait for each other, those of page numbers and those of
rows. Of 3 stages rows have 1: the next tile is loaded when this one has been read. Of 5 they have
2, as many as rows of a dense cache have of 3. Masks that are looked up are slower with 5: see M41
in docs/measured.md."""
_WARPS = 4


class Shape(NamedTuple):
    """Which rows are one tile."""

    group: int
    """Heads that share keys, rounded up to a power of two."""
    queries: int
    """A power of two."""

    @property
    def rows(self) -> int:
        """Rows of the tile, some of which may be none of the call's."""
        return max(LEAST_ROWS, self.lines)

    @property
    def lines(self) -> int:
        """Rows that may be the call's."""
        return self.group * self.queries

    def __str__(self) -> str:
        """For names of kernels."""
        return f"{self.group}x{self.queries}"


def _power(least: int) -> int:
    """The least power of two that is as large. That of Triton takes microseconds of a call."""
    return 1 << (least - 1).bit_length()


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


SHAPES = tuple(
    Shape(group, queries) for group in _powers(MOST_ROWS) for queries in _powers(MOST_ROWS // group)
)


def shape_of(q_len: int, members: int) -> Shape:
    """The tile of ``members`` heads in a call of ``q_len`` rows."""
    group = _power(members)
    return Shape(group, min(_power(q_len), MOST_ROWS // group))


def members_of(heads_of_key: int, together: bool) -> int:
    """How many heads that share keys are rows of one tile.

    Args:
        heads_of_key: Query heads that share a head of keys.
        together: Whether all of them have the same live tiles.
    """
    if not together:
        return 1
    return next(
        heads_of_key // parts
        for parts in range(1, heads_of_key + 1)
        if heads_of_key % parts == 0 and heads_of_key // parts <= MOST_ROWS
    )


def programs_of(facts: KernelFacts) -> int:
    """Programs of one batch entry, where they are few."""
    return PROGRAMS if facts.pages is None else _PROGRAMS_OF_PAGES


def most_parts(kv_len: int, units: int, config: Config, programs: int = PROGRAMS) -> int:
    """The most programs that share the keys of one tile of rows.

    Args:
        kv_len: Keys of the call.
        units: Tiles of rows that a batch entry has at least.
        config: The kernel's.
        programs: Of one batch entry, where they are few.
    """
    tiles = -(-kv_len // config.block_n)
    most = max(LEAST_PARTS, min(programs // units, tiles // MANY_TILES, MOST_PARTS))
    return max(1, min(most, -(-tiles // TILES_OF_PART)))


def lines_at_once(shape: Shape, width: int) -> int:
    """Rows that are merged together, of so many columns: a power of two."""
    return max(1, min(shape.lines, _MERGED_NUMBERS // (PARTS_AT_ONCE * width)))


def is_looked_up(mask: Node | None) -> bool:
    """Whether a pair's mask is read from memory, by the number of the key."""
    if mask is None:
        return False
    return any(item.op in (Op.LOAD, Op.DOT) for item in mentions(mask, name="kv"))


def configs_of(shape: Shape, job: Job, machine: Machine) -> tuple[Config, ...]:
    """Candidates of a kernel, in order; one alone for the interpreter."""
    if machine.target is None:
        return (Config(shape.queries, 16, _WARPS, 1),)
    widths = widths_of(job.facts)
    pages = job.facts.pages
    bytes_of = 1 if pages is not None and pages.dtype == FP8_TYPE else widths.element_bytes
    most = max(16, min(128, _STAGE_BYTES // (widths.both * bytes_of)))
    keys = 1 << (most.bit_length() - 1)
    usual = pages is None or is_looked_up(job.lowered.program.mask)
    stages = (3, 2) if usual else _STAGES_OF_PAGES
    found = [
        *(Config(shape.queries, keys, _WARPS, number) for number in stages),
        *(Config(shape.queries, max(16, keys // 2), _WARPS, number) for number in stages),
        Config(shape.queries, 16, _WARPS, 1),
    ]
    return tuple(dict.fromkeys(found))
