"""Shapes of the kernels for few rows: which rows are one tile, and how keys are shared out.

The sizes are those of a search on an H100 (``docs/dev/kernels.md``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attndsl.ir import Op, mentions

from ..emit.facts import FP8_TYPE, block_widths
from ..kernels.config import Config
from .tiles import widths_of

if TYPE_CHECKING:
    from attndsl.ir import Node, Program

    from ..emit.facts import KernelFacts
    from ..kernels.kernel import Job
    from ..kernels.target import Target

LEAST_ROWS = 16
"""Rows of the smallest product on tensor cores."""
MOST_QUERIES = 64
"""Most queries of a call, and of a request whose keys are shared out. With more, tiles of other
families are full enough."""
_MOST_MEMBERS = 64
"""Heads of the largest tile."""
_MOST_LINES = 128
"""Rows of the largest tile. Each tile of rows reads all keys: see M48 in docs/dev/measured.md."""
_USUAL_LINES, _WIDE_COLUMNS = 64, 256
"""Rows where numbers have 8 bits, which are widened in registers, or more than 16, and where keys
and values have more columns together: registers or shared memory are too few for more rows."""
PROGRAMS = 128
"""Programs that share a batch entry of few units: about as many as a GPU has processors."""
_PROGRAMS_TWICE = 2 * PROGRAMS
"""The same where two programs fit a processor: one computes while the other waits for its loads.
With half of them 128k keys of one request take 149 us in place of 129: see M48."""
_NARROW_PROGRAMS = 4 * PROGRAMS
"""The same of programs of :data:`_NARROW_WARPS`: four of them fit a processor. Steps of one request
have them too, since a request's bits must not depend on how many others a step has."""
LEAST_PARTS, MOST_PARTS = 16, 128
"""Parts of one unit, if it has so many tiles. More than the first only where there are few units:
they take longer to merge, and write more."""
_WIDE_PARTS = 8
"""Least parts of tiles whose parts have more than :data:`_FEW_SUMS` sums: see M48 and M76."""
_FEW_SUMS = 2048
"""Most sums of parts that are quick to merge: 16 rows of 128 columns."""
PARTS_OF_GROUP = 8
"""Parts that are merged with each other before others. A program with several parts has whole
groups, and leaves in memory what a group has: storing each part would cost B16 x 10k 5%."""
_EVEN_PARTS = 2 * PARTS_OF_GROUP
"""Numbers of parts that several programs can share evenly are multiples of this."""
_TILES_OF_PART = ((_FEW_SUMS, 1), (2 * _FEW_SUMS, 2))
_TILES_OF_LARGE_PART = 8
"""Least tiles of keys of a part, by the sums that it has at most. Where keys are few, one tile more
takes 0.8 us (1,024 keys: 7.9, 8.7 and 10.9 us with 1, 2 and 4 on an H100, D128, 16 rows), but parts
of many sums take longer to merge: see M76 in docs/dev/measured.md."""
MANY_TILES = 4
"""Least tiles that a program takes where a unit has more parts than :data:`LEAST_PARTS`."""
_ROWS_OF_SEVERAL = 32
"""Rows of the largest tiles whose programs may have several parts."""
_MOST_SUMS = 4096
"""Sums of a part beyond which a program has one part: those of the parts before take as many
registers."""
_MOST_SUMS_OF_WARP = 512
"""Sums of a warp up to which groups are merged in registers: 16 of a thread."""
LEAST_TILES = 64
"""Least tiles that a program takes where a call has as many tiles of rows as programs run at a
time: its own then follow each other without a break."""
_FEW = 1.5
"""Ratio of the programs that run at a time to those of a call from which a program has one part."""
_PROGRAMS_OF_LONG = 4
"""Programs that share the keys of one tile of rows there, if some rows may have many more keys than
others."""
COUNTS_OF_GRAPHS = 1 << 22
"""Numbers that launches of CUDA graphs count in: a hundred graphs of 32 layers with 1,280 each."""
TOKENS_AT_ONCE = REQUESTS_AT_ONCE = 32
"""Tokens that a program clears if they are no request's, and requests that it asks together."""
_MERGED_NUMBERS = 8192
"""Sums that are merged together: 64 registers of a thread of 4 warps, and 128 of 2 warps."""
_STAGE_BYTES = 32768
"""Bytes of keys and values loaded together; three stages of two programs fit a processor."""
_STAGES = (3, 2)
_STAGES_OF_PAGES = (5, 3, 2)
"""Triton shares stages out among loads that wait for each other, those of page numbers and those of
rows. Of 3 stages rows have 1: the next tile is loaded when this one has been read. Of 5 they have
2, as many as rows of a dense cache have of 3. Masks that are looked up are slower with 5: see M41
in docs/dev/measured.md."""
_WARPS = 4
_WIDE_WARPS = 8
"""Warps of tiles with more than :data:`_WIDE_ROWS` rows."""
_WIDE_ROWS = 64
_NARROW_WARPS = 2
"""Warps of kernels for pages with few rows of :data:`_NARROW_COLUMNS`, and nothing else to load.
Four programs of 2 warps and 3 stages fit a processor, and load as much ahead as two of 4 warps and
5 stages. They look each page up half as often. See M44 in docs/dev/measured.md."""
_NARROW_COLUMNS = range(129, 257)
"""Columns of keys and values together. With more, 2 warps have too few registers; with fewer a tile
has more keys, and 2 warps take longer: see M44."""


class DecodeShape(NamedTuple):
    """Rows of one tile: heads that share keys, times queries."""

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
    DecodeShape(group, queries)
    for group in _powers(_MOST_MEMBERS)
    for queries in _powers(_MOST_LINES // group)
)


def shape_of(q_len: int, members: int, element_bytes: int, columns: int) -> DecodeShape:
    """The tile of rows of a call.

    Args:
        q_len: Rows of the call, or of a request.
        members: Heads of a tile.
        element_bytes: Of keys.
        columns: Of a key and a value together.
    """
    group = _power(members)
    wide = element_bytes == 2 and columns <= _WIDE_COLUMNS
    return DecodeShape(group, min(_power(q_len), (_MOST_LINES if wide else _USUAL_LINES) // group))


def members_of(heads_of_key: int, together: bool) -> int:
    """Number of heads that share keys and are rows of one tile.

    Args:
        heads_of_key: Query heads that share a head of keys.
        together: Whether all of them have the same live tiles.
    """
    if not together:
        return 1
    return next(
        heads_of_key // parts
        for parts in range(1, heads_of_key + 1)
        if heads_of_key % parts == 0 and heads_of_key // parts <= _MOST_MEMBERS
    )


class Sharing(NamedTuple):
    """Number of programs that share keys, and least number of parts that they make."""

    programs: int
    """Programs that share a batch entry of few units."""
    least: int
    """Parts of one unit, if it has so many tiles, and of those that are merged at once: their loads
    wait for memory together."""
    tiles: int = 1
    """Least tiles of a part."""
    several: bool = False
    """True if a program may have several parts. Parts of more rows would be stored through shared
    memory that tiles of keys need."""

    @property
    def even(self) -> int:
        """Divisor of numbers of parts above the least."""
        return _EVEN_PARTS if self.several else 1

    @property
    def most_in_one(self) -> int:
        """Parts that one program merges alone. Of more, several programs merge a group each."""
        return 2 * self.least

    def counts_of(self, parts: int) -> int:
        """Number of counters of one unit's programs, where ``parts`` of them share its keys."""
        if parts > self.most_in_one:
            return 1 + -(-parts // PARTS_OF_GROUP)
        return int(parts > 1)

    def lines_at_once(self, shape: DecodeShape, width: int) -> int:
        """Rows that are merged together, of so many columns: a power of two."""
        numbers = _MERGED_NUMBERS * warps_of(shape) // _WARPS
        return max(1, min(shape.lines, numbers // (self.least * width)))


def sharing_of(shape: DecodeShape, program: Program, facts: KernelFacts) -> Sharing:
    """Numbers of programs and parts by which a kernel's programs share keys."""
    sums = shape.rows * block_widths(facts)[1]
    tiles = next((number for most, number in _TILES_OF_PART if sums <= most), _TILES_OF_LARGE_PART)
    if shape.rows > _WIDE_ROWS:
        return Sharing(PROGRAMS, _WIDE_PARTS, tiles)
    narrow = facts.pages is not None and _is_narrow(shape, program, facts)
    several = shape.rows <= _ROWS_OF_SEVERAL and sums <= _MOST_SUMS
    least = LEAST_PARTS if sums <= _FEW_SUMS else _WIDE_PARTS
    return Sharing(_NARROW_PROGRAMS if narrow else _PROGRAMS_TWICE, least, tiles, several)


def most_parts(kv_len: int, units: int, config: Config, sharing: Sharing) -> int:
    """The most parts that the keys of one tile of rows have.

    Args:
        kv_len: Keys of the call.
        units: Tiles of rows that a batch entry has at least.
        config: The kernel's.
        sharing: The kernel's.
    """
    tiles = -(-kv_len // config.block_n)
    most = min(sharing.programs // units, tiles // MANY_TILES, MOST_PARTS)
    most = max(sharing.least, most // sharing.even * sharing.even)
    return max(1, min(most, -(-tiles // sharing.tiles)))


def folds_groups(shape: DecodeShape, width: int, warps: int) -> bool:
    """Return True if a program that has all parts of a unit merges their groups in registers.

    It needs registers for three sums of all its rows. Others leave groups in memory.
    """
    return shape.rows * width <= _MOST_SUMS_OF_WARP * warps


class UnitPrograms(NamedTuple):
    """Number of programs that share a unit's parts, and of tiles that each takes at least."""

    number: int
    least_tiles: int


def joins_parts(sharing: Sharing, batch: int, units: int) -> bool:
    """Return True if programs may have several parts in a call of so many units a batch entry.

    A kernel for one part is shorter, which a call of a few microseconds shows.
    """
    return sharing.several and batch > 1 and batch * units * sharing.least > sharing.programs


def programs_of(sharing: Sharing, parts: int, units: int, tiles: int | None) -> UnitPrograms:
    """Programs that share the parts of each of a call's units, in one that :func:`joins_parts`.

    There are as many as run at a time, so that each loads its keys without a break. See M66 in
    docs/dev/measured.md.

    Args:
        sharing: The kernel's.
        parts: The most that a unit has.
        units: Tiles of rows of all batch entries.
        tiles: The most live tiles that a unit may have where others may have fewer, or None.
    """
    most = sharing.programs
    if units < most:
        groups = -(-parts // PARTS_OF_GROUP)
        each = PARTS_OF_GROUP * -(-groups // max(1, most // units))
        number = -(-parts // each)
        return UnitPrograms(number, 1) if _FEW * units * number >= most else UnitPrograms(parts, 1)
    number = 1 if tiles is None else min(_PROGRAMS_OF_LONG, -(-tiles // LEAST_TILES))
    return UnitPrograms(max(1, min(number, parts)), LEAST_TILES)


def warps_of(shape: DecodeShape) -> int:
    """Warps of kernels that are not narrow."""
    return _WIDE_WARPS if shape.rows > _WIDE_ROWS else _WARPS


def is_looked_up(part: Node | None) -> bool:
    """Return True if a pair's mask, or another part, is read from memory by the key's number."""
    if part is None:
        return False
    return any(item.op in (Op.LOAD, Op.DOT) for item in mentions(part, name="kv"))


def _is_narrow(shape: DecodeShape, program: Program, facts: KernelFacts) -> bool:
    """Return True if a kernel for pages has :data:`_NARROW_WARPS`."""
    pages, widths = facts.pages, widths_of(facts)
    if pages is None or pages.dtype == FP8_TYPE or widths.element_bytes != 2:
        return False
    if shape.rows != LEAST_ROWS or widths.both not in _NARROW_COLUMNS:
        return False
    return not any(map(is_looked_up, (program.mask, program.score, program.weights)))


def configs_of(shape: DecodeShape, job: Job, machine: Target) -> tuple[Config, ...]:
    """Candidates of a kernel, in order; one alone for the interpreter."""
    if machine.target is None:
        return (Config(shape.queries, 16, warps_of(shape), 1),)
    widths = widths_of(job.facts)
    pages = job.facts.pages
    bytes_of = 1 if pages is not None and pages.dtype == FP8_TYPE else widths.element_bytes
    most = max(16, min(128, _STAGE_BYTES // (widths.both * bytes_of)))
    keys = 1 << (most.bit_length() - 1)
    program = job.lowered.program
    narrow = _is_narrow(shape, program, job.facts)
    usual = pages is None or narrow or is_looked_up(program.mask)
    stages = _STAGES if usual else _STAGES_OF_PAGES
    warps = _NARROW_WARPS if narrow else warps_of(shape)
    found = [
        *(Config(shape.queries, keys, warps, number) for number in stages),
        *(Config(shape.queries, max(16, keys // 2), warps, number) for number in stages),
        Config(shape.queries, 16, warps_of(shape), 1),
    ]
    return tuple(dict.fromkeys(found))
