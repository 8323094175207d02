"""Spans of keys that the CPU backend visits for each box of query rows, by the kinds of tiles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndsl.foundation.caches import BoundedCache
from attndsl.foundation.scalars import number_key
from attndsl.ir import Op, toposort

from .tile_kinds import tile_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.pipeline import Lowered

    from ..base import Call

Range = tuple[int, int]
BLOCK_M = 128
"""Query rows of a tile."""
BLOCK_N = 64
"""Keys of a tile; small, since it is by tiles that dead pairs are left out."""
SPAN = 1024
"""Most keys whose scores are made at once for a whole tile of rows; a multiple of BLOCK_N."""
_FEW_PAIRS = 1 << 13
"""Most pairs of a head whose tiles are all taken for PARTIAL ones. Each length of a growing cache
has a plan of its own, and to find kinds of tiles takes longer than a few keys too many."""
_FEW_NUMBERS = 1 << 19
"""Most numbers of the keys of such a call."""
_SPARE = 32
"""Tiles (of one head each) whose work costs about what one more step costs."""
_APART = 8
"""FULL tiles that are a span of their own beside others: torch's kernel takes 512 keys at once."""
_LIVE = re.compile(rb"[\x01\x02]+")
_PARTIAL = re.compile(rb"\x01+")
_FULL = re.compile(rb"\x02+")
_MAX_PLANS = 32
_KEPT_STEPS = 1 << 12
"""Steps of the longest one that is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Most keys and pairs that a step may take at once."""

    keys: int
    """Most keys of a span of a whole tile of rows. Fewer rows have longer spans: see M33 in
    docs/dev/measured.md."""
    pairs: int
    """Most pairs of a span, of all the step's heads (as far as one kv head's queries allow)."""
    full_apart: bool = False
    """True if many FULL tiles in a row are a span of their own, without a limit."""


CPU = Limits(SPAN, 1 << 19)
DEVICE = Limits(SPAN, 1 << 22)
"""Limits for other devices than CPUs, where the number of operations that are started counts."""
PLAIN = Limits(SPAN, 1 << 24, full_apart=True)
"""Limits for torch's own attention, which keeps no scores. The bias of a span that a mask decides
takes memory, and the number of heads that run side by side decides the time. See M50 in
docs/dev/measured.md."""


def limits_of(call: Call, plain: bool) -> Limits:
    """Limits of steps that keep scores, or of ``plain`` ones."""
    if plain:
        return PLAIN
    return CPU if call.q.device.type == "cpu" else DEVICE


@dataclass(frozen=True, slots=True)
class KeySpan:
    """Keys ``columns[0] <= row < columns[1]``; ``partial`` are those where the mask decides."""

    columns: Range
    partial: tuple[Range, ...]

    @property
    def width(self) -> int:
        """Number of keys."""
        return self.columns[1] - self.columns[0]

    @property
    def full(self) -> bool:
        """True if some keys are live for all rows of the step."""
        return sum(stop - start for start, stop in self.partial) < self.width

    def parts(self) -> Iterator[KeySpan]:
        """The same keys in spans of a length for which scores may be kept."""
        first, last = self.columns
        for start in range(first, last, SPAN):
            stop = min(start + SPAN, last)
            partial = ((max(start, a), min(stop, b)) for a, b in self.partial)
            yield KeySpan((start, stop), tuple((a, b) for a, b in partial if a < b))


@dataclass(frozen=True, slots=True)
class QueryStep:
    """Query rows of a box of heads, and the spans of keys that they meet."""

    batches: Range
    heads: Range
    """Query heads: all of them if there are several batches; else whole groups, or part of one."""
    rows: Range
    spans: tuple[KeySpan, ...]


class Plans:
    """Makes plans; remembers those that depend on nothing but numbers."""

    def __init__(self) -> None:
        self._kept: BoundedCache[list[QueryStep]] = BoundedCache(
            "plans of steps by mask, numbers", _MAX_PLANS
        )

    def of(self, lowered: Lowered, call: Call, limits: Limits) -> list[QueryStep]:
        """The steps that cover all live pairs of ``call``; rows without any may be in none."""
        numbers = numbers_of(lowered, call)
        if numbers is None:
            return make_plan(lowered, call, limits)
        key = (limits, numbers)
        steps = self._kept.get(key)
        if steps is None:
            steps = make_plan(lowered, call, limits)
            if len(steps) <= _KEPT_STEPS:
                self._kept.put(key, steps)
        return steps


def numbers_of(lowered: Lowered, call: Call) -> object | None:
    """Numbers that live pairs of ``call`` depend on; None if these include tensors' elements."""
    mask = lowered.program.mask
    numbers = (call.q_offset, call.kv_offset, *call.params.values())
    if call.tiles is not None or call.q_index is not None or call.kv_index is not None:
        return None
    if not all(isinstance(number, bool | int | float) for number in numbers):
        return None
    if mask is not None and any(item.op is Op.LOAD for item in toposort(mask)):
        return None
    shapes = (*call.q.shape[:3], *call.k.shape[1:3], call.q.shape[3])
    keys = map(number_key, numbers)
    return lowered.digest, call.q.device.type, *shapes, *call.sizes.items(), *keys


def make_plan(lowered: Lowered, call: Call, limits: Limits) -> list[QueryStep]:
    """The steps that cover all live pairs of ``call``; rows without any may be in none."""
    batch, heads, q_len, _ = call.q.shape
    kv_heads, kv_len = call.k.shape[1:3]
    if 0 in (batch, heads, q_len, kv_len):
        return []
    group = heads // kv_heads
    tiles = -(-q_len // BLOCK_M)
    mask = lowered.program.mask
    few = q_len * kv_len <= _FEW_PAIRS and call.k.numel() <= _FEW_NUMBERS and call.tiles is None
    if mask is None or few:
        kind = b"\x02" if mask is None else b"\x01"
        table = [[[kind * -(-kv_len // BLOCK_N)]]] * tiles
    else:
        kinds = tile_kinds(lowered, call, BLOCK_M, BLOCK_N).to("cpu")
        table = [
            [[bytes(row) for row in each] for each in kinds[:, :, number].tolist()]
            for number in range(tiles)
        ]
    return [
        step
        for number, rows in enumerate(table)
        for box, row in _boxes(rows, batch, heads, group)
        for step in _split(
            box,
            number,
            _spans(row, kv_len, _longest_span(number, call, limits), limits),
            call,
            limits,
        )
    ]


@dataclass(frozen=True, slots=True)
class _Box:
    batches: Range
    heads: Range


def _longest_span(number: int, call: Call, limits: Limits) -> int:
    """Keys that a span of tile row ``number`` may have."""
    _, heads, q_len, _ = call.q.shape
    rows = q_len - number * BLOCK_M
    if rows >= BLOCK_M:
        return limits.keys
    # Those of torch's own attention have a bias for each pair.
    pairs = CPU.pairs if limits.full_apart else limits.pairs
    return max(limits.keys, pairs // (rows * heads) // BLOCK_N * BLOCK_N)


def _spans(row: bytes, kv_len: int, longest: int, limits: Limits) -> tuple[KeySpan, ...]:
    """The spans of a row of tile kinds."""
    tiles = longest // BLOCK_N
    found = []
    for live in _LIVE.finditer(row):
        pieces = _pieces(row, *live.span(), tiles) if limits.full_apart else [(*live.span(), tiles)]
        for start, stop, most in pieces:
            for first in range(start, stop, most):
                last = min(first + most, stop)
                partial = tuple(
                    (part.start() * BLOCK_N, min(part.end() * BLOCK_N, kv_len))
                    for part in _PARTIAL.finditer(row, first, last)
                )
                found.append(KeySpan((first * BLOCK_N, min(last * BLOCK_N, kv_len)), partial))
    return tuple(found)


def _pieces(row: bytes, first: int, last: int, tiles: int) -> Iterator[tuple[int, int, int]]:
    """Parts of a run of live tiles, and of how many tiles their spans are at most.

    A run of ``tiles`` or fewer is one part. Of others, FULL tiles in a row are parts of their own.
    """
    start = first
    if last - first > tiles:
        for full in _FULL.finditer(row, first, last):
            if full.end() - full.start() < _APART:
                continue
            if start < full.start():
                yield start, full.start(), tiles
            yield *full.span(), full.end() - full.start()
            start = full.end()
    if start < last:
        yield start, last, tiles


def _boxes(
    rows: list[list[bytes]], batch: int, heads: int, group: int
) -> Iterator[tuple[_Box, bytes]]:
    """Heads that share a row of kinds, or that are so cheap that they may.

    Args:
        rows: One row of kinds per batch entry and head, or one for all where that is the length.
        batch: Number of batch entries.
        heads: Number of query heads.
        group: Query heads of a kv head.
    """
    if len(rows) == 1 and len(rows[0]) == 1:
        yield _Box((0, batch), (0, heads)), rows[0][0]
        return
    whole: list[bytes] = []
    entries = rows * batch if len(rows) == 1 else rows
    for b, entry in enumerate(entries):
        runs = list(_merged(entry, 1 if len(entry) == heads else heads))
        if len(runs) == 1:
            whole.append(runs[0][1])
            continue
        yield from _whole(whole, b, heads)
        whole = []
        for run, row in runs:
            for part in _aligned(run[0], run[1], group):
                yield _Box((b, b + 1), part), row
    yield from _whole(whole, len(entries), heads)


def _whole(rows: list[bytes], stop: int, heads: int) -> Iterator[tuple[_Box, bytes]]:
    """Boxes of the batch entries before ``stop``, each of one row for all heads."""
    first = stop - len(rows)
    for (start, end), row in _merged(rows, heads):
        yield _Box((first + start, first + end), (0, heads)), row


def _merged(rows: list[bytes], heads: int) -> Iterator[tuple[Range, bytes]]:
    """Runs of neighbouring rows, of ``heads`` heads each, whose union wastes less than a step."""
    start, union, live = 0, b"", 0
    for place, row in enumerate(rows):
        own = len(row) - row.count(0)
        if place == start:
            union, live = row, own
            continue
        if row == union:
            live += own
            continue
        both = bytes(a if a == b else 1 for a, b in zip(union, row, strict=True))
        wide = (len(both) - both.count(0)) * (place + 1 - start)
        if (wide - live - own) * heads <= _SPARE:
            union, live = both, live + own
        else:
            yield (start, place), union
            start, union, live = place, row, own
    if rows:
        yield (start, len(rows)), union


def _aligned(start: int, stop: int, group: int) -> Iterator[Range]:
    """``start .. stop`` cut so that each part is whole groups or lies in one."""
    while start < stop:
        end = min(stop, (start // group + 1) * group)
        if start % group == 0 and stop - start >= group:
            end = stop // group * group
        yield start, end
        start = end


def _split(
    box: _Box, number: int, spans: tuple[KeySpan, ...], call: Call, limits: Limits
) -> Iterator[QueryStep]:
    """Steps of ``box`` with a limited number of pairs a span, as far as groups of heads allow."""
    if not spans:
        return
    heads, q_len, group = call.q.shape[1], call.q.shape[2], call.q.shape[1] // call.k.shape[1]
    rows = (number * BLOCK_M, min((number + 1) * BLOCK_M, q_len))
    kept = (span.width for span in spans if span.partial or not limits.full_apart)
    room = limits.pairs // ((rows[1] - rows[0]) * max(kept, default=limits.keys))
    (first, last), (low, high) = box.batches, box.heads
    if room >= heads and last - first > 1:
        for b in range(first, last, room // heads):
            yield QueryStep((b, min(b + room // heads, last)), box.heads, rows, spans)
        return
    several = high - low if high - low < group else max(group, room // group * group)
    for b in range(first, last):
        for h in range(low, high, several):
            yield QueryStep((b, b + 1), (h, min(h + several, high)), rows, spans)
