"""Tile sizes of the kernels for keys that fit: how many keys, in which pieces, and rows of queries.

Preferences were measured on an H200: see M27 in docs/measured.md.

Non-goals: lengths beyond those that a program can hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton

from ..kernels.config import Config
from ..kernels.kernel import Task
from .tiles import widths_of

if TYPE_CHECKING:
    from ..kernels.kernel import Job
    from ..kernels.machine import Machine
    from .tiles import Widths

_PIECES: dict[int, tuple[int, ...]] = {
    16: (16,), 32: (32,), 64: (64,), 80: (64, 16), 96: (64, 32), 128: (128,),
    144: (128, 16), 160: (128, 32), 192: (128, 64), 208: (128, 64, 16), 256: (128, 128),
}  # fmt: skip
"""How many keys a program holds, and in which pieces."""
KEYS = tuple(_PIECES)
KEYS_OF_BACKWARD = tuple(keys for keys in KEYS if keys <= 128)
ROWS = (16, 32, 64)
"""Rows of a query tile, for calls of so many rows; calls of more have several tiles."""
_FEW_ROWS = 512
_WARPS = {16: 1, 32: 2, 64: 4, 128: 8}
_MOST_WARPS = 8
_SUMS_OF_WARP = 4096
"""Elements of dK and dV that a warp holds: 128 registers of each thread."""
_MUCH_WORK = 60
"""Instructions a pair beyond which threads hold fewer scores."""
_MOST_BYTES = 128 * 128 * 2 * 2
"""Of keys and values that a program holds."""
_MOST_BYTES_OF_BACKWARD = 128 * 64 * 2 * 2
"""The same where dK and dV stay in registers."""


class Shape(NamedTuple):
    """What a kernel's programs hold, and go along."""

    rows: int
    """Rows of a query tile, one of :data:`ROWS`."""
    keys: int
    """Keys of a program, one of :data:`KEYS`."""
    long: bool
    """Whether there are many query tiles, so that loads of the next one are worth their room."""

    def __str__(self) -> str:
        """For names of kernels."""
        return f"{self.rows}x{self.keys}" + "_long" * self.long


def shapes(backward: bool) -> list[Shape]:
    """All of a direction."""
    return [
        Shape(rows, keys, long)
        for rows in ROWS
        for keys in (KEYS_OF_BACKWARD if backward else KEYS)
        for long in (False, True)
        if rows == ROWS[-1] or not long
    ]


def pieces_of(keys: int) -> tuple[int, ...]:
    """In which pieces a program holds ``keys`` keys, which is one of :data:`KEYS`."""
    return _PIECES[keys]


def keys_held(kv_len: int, widths: Widths, backward: bool) -> int | None:
    """How many keys a program holds for ``kv_len`` of them; None where they are too many."""
    known = KEYS_OF_BACKWARD if backward else KEYS
    found = next((keys for keys in known if keys >= kv_len > 0), None)
    most = _MOST_BYTES_OF_BACKWARD if backward else _MOST_BYTES
    if found is None or found * widths.both * widths.element_bytes > most:
        return None
    return found


def most_keys(widths: Widths, backward: bool) -> int:
    """The most keys that a program holds; 0 where rows are too wide for any."""
    known = KEYS_OF_BACKWARD if backward else KEYS
    return max((keys for keys in known if keys_held(keys, widths, backward)), default=0)


def shape_of(q_len: int, keys: int) -> Shape:
    """What programs hold in a call of ``q_len`` rows."""
    rows = next((rows for rows in ROWS if rows >= q_len), ROWS[-1])
    return Shape(rows, keys, q_len > _FEW_ROWS)


def configs_of(shape: Shape, job: Job, machine: Machine) -> tuple[Config, ...]:
    """Candidates of a kernel, in order; one alone for the interpreter."""
    if machine.target is None:
        return (Config(shape.rows, shape.keys, 4, 1),)
    of_task = _of_backward if Task.BACKWARD in job.kernel.tasks else _of_forward
    found = of_task(shape, widths_of(job.facts))
    if job.work_of_pair > _MUCH_WORK:
        first = found[0]
        fewer = Config(min(first.block_m, 32), shape.keys, first.warps, 1)
        found = [fewer, *found]
    last = found[-1]
    found.append(Config(last.block_m, last.block_n, min(_MOST_WARPS, 2 * last.warps), 1))
    return tuple(dict.fromkeys(found))


def _of_forward(shape: Shape, widths: Widths) -> list[Config]:
    rows, keys, long = shape
    warps = _WARPS[rows]
    found = [Config(rows, keys, warps, 1)]
    if long:
        found.insert(0, Config(rows, keys, warps, 3))
    elif (rows, keys) == (64, 128) and widths.both <= 128:
        # A fourth program on each processor hides more than what spills costs.
        found.insert(0, Config(rows, keys, warps, 1, most_registers=128))
    return found


def _of_backward(shape: Shape, widths: Widths) -> list[Config]:
    rows, keys, long = shape
    least = triton.next_power_of_2(max(1, keys * widths.both // _SUMS_OF_WARP))
    small = min(rows, 32)
    ahead = 32 < keys <= 64 and widths.both <= 128
    few = Config(small, keys, max(_WARPS[small], least), 3 if ahead else 1)
    if not long:
        return [few]
    if keys <= 32:
        return [Config(rows, keys, max(_WARPS[rows], least), 3), few]
    return [Config(128, keys, _MOST_WARPS, 3), few] if keys <= 96 else [few]
