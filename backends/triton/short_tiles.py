"""Tile sizes of the kernels for keys that fit: how many keys, in which pieces, and rows of queries.

Preferences were measured on an H200: see M27 in docs/dev/measured.md.

Non-goals: lengths beyond those that a program can hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import triton

from ..kernels.config import Config
from ..kernels.kernel import Task
from .tiles import NARROW, widths_of

if TYPE_CHECKING:
    from ..kernels.kernel import Job
    from ..kernels.target import Target
    from .tiles import Widths

_PIECES: dict[int, tuple[int, ...]] = {
    16: (16,), 32: (32,), 64: (64,), 80: (64, 16), 96: (64, 32), 128: (128,),
    144: (128, 16), 160: (128, 32), 192: (128, 64), 208: (128, 64, 16), 256: (128, 128),
}  # fmt: skip
"""Pieces of the keys that a program holds, by the number of these keys."""
KEYS = tuple(_PIECES)
KEYS_OF_BACKWARD = tuple(keys for keys in KEYS if keys <= 128)
ROWS = (16, 32, 64)
"""Rows of a query tile, for calls of so many rows; calls of more have several tiles."""
_ROWS_OF_BACKWARD = 32
"""Rows of a query tile where a backward's rows are few."""
_FEW_ROWS = 512
"""Rows up to which a program has so few query tiles that it loads none ahead."""
_WARPS = {16: 1, 32: 2, 64: 4}
"""Warps by rows of a query tile."""
_WARPS_OF_FEW = 2
"""Warps of a backward of 16 rows and 16 keys: see M47 in docs/dev/measured.md."""
_MOST_WIDTH = 256
"""Columns of the widest rows: wider ones leave no room for tiles of queries."""
_MOST_WARPS = 8
_SUMS_OF_WARP = 4096
"""Elements of dK and dV that a warp holds: 128 registers of each thread."""
_MUCH_WORK = 60
"""Instructions a pair beyond which threads hold fewer scores."""
_MOST_BYTES = 128 * 128 * 2 * 2
"""Most bytes of keys and values that a program holds."""
_MOST_BYTES_OF_BACKWARD = 128 * 64 * 2 * 2
"""The same where dK and dV stay in registers."""


class ShortShape(NamedTuple):
    """Rows of a query tile and keys that a kernel's programs hold."""

    rows: int
    """Rows of a query tile, one of :data:`ROWS`."""
    keys: int
    """Keys of a program, one of :data:`KEYS`."""
    long: bool
    """True if there are many query tiles, so that loads of the next one are worth their room."""

    def __str__(self) -> str:
        """Text for names of kernels."""
        return f"{self.rows}x{self.keys}" + "_long" * self.long


def shapes(backward: bool) -> list[ShortShape]:
    """All shapes of a direction."""
    known = KEYS_OF_BACKWARD if backward else KEYS
    lengths = (*ROWS, _FEW_ROWS + 1)
    found = [shape_of(q_len, keys, backward) for keys in known for q_len in lengths]
    return list(dict.fromkeys(found))


def pieces_of(keys: int) -> tuple[int, ...]:
    """In which pieces a program holds ``keys`` keys, which is one of :data:`KEYS`."""
    return _PIECES[keys]


def keys_held(kv_len: int, widths: Widths, backward: bool) -> int | None:
    """Number of keys that a program holds for ``kv_len`` of them; None if it cannot hold them."""
    known = KEYS_OF_BACKWARD if backward else KEYS
    found = next((keys for keys in known if keys >= kv_len > 0), None)
    most = _MOST_BYTES_OF_BACKWARD if backward else _MOST_BYTES
    if found is None or max(widths.d, widths.dv) > _MOST_WIDTH:
        return None
    if found * widths.both * widths.element_bytes > most:
        return None
    return found


def most_keys(widths: Widths, backward: bool) -> int:
    """The most keys that a program holds; 0 where rows are too wide for any."""
    known = KEYS_OF_BACKWARD if backward else KEYS
    return max((keys for keys in known if keys_held(keys, widths, backward)), default=0)


def shape_of(q_len: int, keys: int, backward: bool) -> ShortShape:
    """Rows and keys that programs hold in a call of ``q_len`` rows."""
    long = q_len > _FEW_ROWS
    most = _ROWS_OF_BACKWARD if backward and not long else ROWS[-1]
    return ShortShape(next((rows for rows in ROWS if rows >= min(q_len, most)), most), keys, long)


def configs_of(shape: ShortShape, job: Job, machine: Target) -> tuple[Config, ...]:
    """Candidates of a kernel, in order; one alone for the interpreter."""
    if machine.target is None:
        return (Config(shape.rows, shape.keys, 4, 1),)
    backward, widths = Task.BACKWARD in job.kernel.tasks, widths_of(job.facts)
    found = (_of_backward if backward else _of_forward)(shape, widths)
    if job.work_of_pair > _MUCH_WORK:
        first = found[0]
        found.insert(0, Config(min(first.block_m, 32), shape.keys, first.warps, 1))
    last = found[-1]
    found.append(replace(last, warps=min(_MOST_WARPS, 2 * last.warps), stages=1))
    # Smaller tiles are for rows so wide, or GPUs so small, that larger ones do not fit.
    found += [Config(rows, shape.keys, 4, 1) for rows in (32, 16) if rows < last.block_m]
    if widths.element_bytes > 2 and min(widths.d, widths.dv) <= NARROW:
        # Triton 3.6 reads other elements of such tiles than it should: see ``Tiles``.
        found = [config for config in found if config.warps < _MOST_WARPS]
    return tuple(dict.fromkeys(found))


def _of_forward(shape: ShortShape, widths: Widths) -> list[Config]:
    rows, keys, long = shape
    warps = _WARPS[rows]
    found = [Config(rows, keys, warps, 1)]
    if long:
        found.insert(0, Config(rows, keys, warps, 3))
    elif (rows, keys) == (64, 128) and widths.both <= 128:
        # A fourth program on each processor hides more than what spills costs.
        found.insert(0, Config(rows, keys, warps, 1, most_registers=128))
    return found


def _of_backward(shape: ShortShape, widths: Widths) -> list[Config]:
    rows, keys, long = shape
    least = triton.next_power_of_2(max(1, keys * widths.both // _SUMS_OF_WARP))
    small = min(rows, _ROWS_OF_BACKWARD)
    ahead = 32 < keys <= 64 and widths.both <= 128
    warps = _WARPS_OF_FEW if small == keys == ROWS[0] else max(_WARPS[small], least)
    few = Config(small, keys, warps, 3 if ahead else 1)
    if long and keys <= 32:
        return [Config(rows, keys, max(_WARPS[rows], least), 3), few]
    if long and keys <= 96:
        return [Config(128, keys, _MOST_WARPS, 3), few]
    return [few]
