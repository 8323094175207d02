"""Tile sizes: candidates in order of preference, fastest first, smallest last.

Preferences come from ``benchmarks/results`` (one H200) and from the peers' published defaults; a
candidate whose estimated shared memory exceeds the device's is left out, and the caller goes on to
the next one where a compiled candidate still needs more than there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..emit.facts import block_widths
from ..kernels.config import INTERPRETED, Config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..emit.facts import KernelFacts
    from ..kernels.kernel import Job
    from ..kernels.target import Target

_FALL_BACK = (Config(32, 32, 4, 1), Config(32, 16, 4, 1), Config(16, 16, 4, 1))
NARROW = 16
"""Head dims of so many columns."""
_FEW_ELEMENTS = (Config(64, 64, 4, 2), Config(64, 32, 4, 2))
_OF_MUCH_WORK = ((200, 8),)

Row = tuple[Config, ...]


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of rows, and bytes of elements, that a kernel holds in shared memory."""

    d: int
    """Head dim of q and k, rounded up to a power of two."""
    dv: int
    """Head dim of v, likewise."""
    element_bytes: int
    """Bytes of an element of q, k and v."""

    @property
    def both(self) -> int:
        """Columns of a row of keys with its values."""
        return self.d + self.dv


def widths_of(facts: KernelFacts) -> Widths:
    """Widths of a kernel with ``facts``."""
    return Widths(*block_widths(facts), 4 if facts.dtype == "fp32" else 2)


def _of_query_tile(config: Config, widths: Widths) -> int:
    """Bytes of a kernel that owns a tile of queries, and goes along the keys."""
    elements = config.block_m * widths.both + config.stages * config.block_n * widths.both
    return elements * widths.element_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Tile sizes of one kernel, by the kind of its loop and by the wider head dim."""

    dense: Mapping[int, Row]
    masked: Mapping[int, Row] = field(default_factory=dict)
    """A masked program has two loops, FULL and PARTIAL, and needs more registers."""
    short: Mapping[int, Row] = field(default_factory=dict)
    """Short loops are mostly beginnings and ends: two small programs on one processor hide each
    other's."""
    short_partial: Mapping[int, Row] = field(default_factory=dict)
    """Without FULL tiles, the mask is the larger part of the work."""
    shared_bytes: Callable[[Config, Widths], int] = _of_query_tile
    """Estimated shared memory: pipelined tiles per stage, resident ones once."""
    of_much_work: tuple[tuple[int, int], ...] = _OF_MUCH_WORK
    """(instructions, scores): with more instructions a pair, threads hold at most so many scores.
    The first that applies counts. Then smaller tiles compile in a fraction of the time, spill less,
    and are mostly faster: see M15 in docs/dev/measured.md."""
    owns_keys: bool = False
    whole_diagonals: bool = False
    """True if the rows of a tile must be a multiple of its columns."""

    def configs(self, job: Job, machine: Target) -> Row:
        """Configurations of a job, in order; one alone for the interpreter."""
        if machine.target is None:
            return INTERPRETED
        widths = widths_of(job.facts)
        return self.candidates(widths, machine.shared, job.work, job.work_of_pair)

    def candidates(
        self, widths: Widths, shared_memory: int, work: str = "dense", of_pair: int = 0
    ) -> Row:
        """Configs worth compiling, in order.

        Args:
            widths: Of the rows.
            shared_memory: Bytes that one program may use.
            work: What a program's loop is like: ``dense``, ``masked``, ``short`` (the tiles do not
                grow with the length), or ``short partial`` (and few of them are FULL).
            of_pair: Instructions that a pair takes besides products (:mod:`..kernels.cost_model`).
        """
        width = max(64, widths.d, widths.dv)
        # An fp32 element takes the room of two: the table's row for twice the width fits.
        row = min(512, width * (2 if widths.element_bytes > 2 else 1))
        preferred = self._preferred(work, row)
        most = preferred[0].elements
        most = next((most for least, most in self.of_much_work if of_pair > least), most)
        if preferred[0].elements > most:
            preferred = (*preferred, *_FEW_ELEMENTS)
            preferred = tuple(config for config in preferred if config.elements <= most)
        preferred = tuple(dict.fromkeys((*preferred, *_FALL_BACK)))
        if widths.element_bytes > 2 and min(widths.d, widths.dv) <= NARROW:
            preferred = tuple(config for config in preferred if not self._misread(config))
        if self.whole_diagonals:
            preferred = tuple(c for c in preferred if c.block_m % c.block_n == 0)
        fitting = (c for c in preferred if self.shared_bytes(c, widths) <= shared_memory)
        return tuple(fitting) or (preferred[-1],)

    def _preferred(self, work: str, row: int) -> Row:
        tables = {
            "dense": (self.dense,),
            "masked": (self.masked, self.dense),
            "short": (self.short, self.masked, self.dense),
            "short partial": (self.short_partial, self.short, self.masked, self.dense),
        }
        return next(table[row] for table in tables[work] if row in table)

    def _misread(self, config: Config) -> bool:
        """Return True if Triton 3.6 would read past shared memory's end, or other than the operand.

        It does in products in three parts (``tf32x3``) of 64 rows by 16 columns that eight warps
        share (``Invalid __shared__ read`` of compute-sanitizer; dK at head dim 16, wrong or a
        fault).
        """
        rows = config.block_n if self.owns_keys else config.block_m
        return config.warps == 8 and rows < 128


def _of_forward(config: Config, widths: Widths) -> int:
    # Products of fp32 in three parts keep q twice.
    kept = 2 if widths.element_bytes > 2 else 1
    keys = config.stages * config.block_n * widths.both
    return (kept * config.block_m * widths.d + keys) * widths.element_bytes


def _of_key_tile(config: Config, widths: Widths) -> int:
    rows = (config.block_n + config.stages * config.block_m) * widths.both
    return (rows + config.block_m * config.block_n) * widths.element_bytes


def _of_tangents(config: Config, widths: Widths) -> int:
    keys = config.stages * config.block_n * widths.both
    return 2 * (config.block_m * widths.d + keys) * widths.element_bytes


def pair_bytes(config: Config, widths: Widths) -> int:
    """Bytes of a kernel that loads tiles of queries and keys, and holds neither."""
    rows = config.stages * (config.block_m + config.block_n)
    return rows * widths.both * widths.element_bytes


FORWARD = Tiles(
    dense={
        64: (Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
        128: (Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 64, 4, 2)),
        256: (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(64, 32, 4, 2)),
        512: (Config(64, 32, 8, 2), Config(32, 32, 8, 1)),
    },
    short={
        64: (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
        128: (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    },
    short_partial={
        64: (Config(64, 32, 4, 3), Config(64, 64, 4, 2)),
        128: (Config(64, 32, 4, 3), Config(64, 64, 4, 2)),
    },
    shared_bytes=_of_forward,
    of_much_work=((240, 8), (80, 32)),
)
BACKWARD_KV = Tiles(
    dense={
        64: (Config(128, 64, 4, 2), Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
        128: (Config(64, 128, 8, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 1)),
        256: (Config(32, 64, 8, 2), Config(32, 64, 8, 1), Config(32, 32, 4, 1)),
        512: (Config(32, 32, 8, 1),),
    },
    masked={
        64: (Config(64, 128, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
        128: (
            Config(64, 128, 8, 3),
            Config(64, 128, 8, 2),
            Config(64, 64, 4, 2),
            Config(64, 64, 4, 1),
        ),
    },
    short={
        64: (Config(32, 64, 4, 3), Config(64, 64, 4, 2)),
        128: (Config(32, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 1)),
    },
    shared_bytes=_of_key_tile,
    owns_keys=True,
)
BACKWARD_Q = Tiles(
    dense={
        64: (Config(128, 64, 8, 2), Config(64, 64, 4, 2)),
        128: (Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 64, 4, 2)),
        256: (Config(64, 32, 8, 2), Config(64, 32, 8, 1), Config(32, 32, 4, 1)),
        512: (Config(32, 32, 8, 1),),
    },
    masked={64: (Config(128, 64, 4, 2), Config(128, 64, 8, 3), Config(64, 64, 4, 2))},
    short={
        64: (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
        128: (Config(64, 64, 4, 2), Config(64, 32, 4, 3), Config(64, 64, 4, 1)),
    },
    short_partial={
        64: (Config(64, 32, 4, 3), Config(64, 64, 4, 2)),
        128: (Config(64, 32, 4, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 1)),
    },
)
# There are two tiles of each of q, k and v, and two of the scores. Only D 128 was measured: see M11
# in docs/dev/measured.md.
TANGENT = Tiles(
    dense={
        64: (
            Config(128, 64, 8, 3),
            Config(128, 128, 8, 2),
            Config(64, 64, 4, 3),
            Config(64, 64, 4, 2),
        ),
        128: (
            Config(128, 64, 8, 2),
            Config(128, 32, 8, 3),
            Config(64, 32, 4, 3),
            Config(64, 32, 4, 2),
        ),
        256: (Config(128, 32, 8, 1), Config(64, 16, 4, 2), Config(32, 32, 4, 1)),
        512: (Config(32, 32, 8, 1),),
    },
    short={
        64: (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
        128: (Config(64, 32, 4, 3), Config(64, 32, 4, 2)),
    },
    shared_bytes=_of_tangents,
)
