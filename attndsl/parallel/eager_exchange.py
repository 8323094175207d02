"""Keys fetched and gradients returned outside of graphs, with as little to do as can be.

What travels does so while calls that see this rank's own keys alone compute; these read k and v
where they lie. Other calls read islands: keys of several ranks, each at its place. Gradients of
keys are added up without a buffer of the whole sequence. :mod:`.collectives` does the same by
operations that graphs and autograd know.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed import ProcessGroup

    from .comm_plan import Island, RowRun, Run, Table

    Pair = list[torch.Tensor]
    """Of keys and of values."""
    Grads = list[tuple[Run, torch.Tensor]]
    """Gradients of keys, and the positions of these."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WORD = torch.int64


def is_eager(*tensors: torch.Tensor) -> bool:
    """Return True for tensors with data of their own, outside of graphs of torch.compile."""
    return not torch.compiler.is_compiling() and all(type(x) in _PLAIN for x in tensors)


class _Trip:
    """Rows of keys and of values, or of their gradients, that ranks send in one collective."""

    def __init__(
        self, like: Pair, leaving: Sequence[int], arriving: Sequence[int], kind: torch.dtype
    ) -> None:
        """Make room.

        Args:
            like: (B, heads, any, width), two of one dtype, of numbers or of words.
            leaving: By rank: how many rows of both go there.
            arriving: By rank: how many come from there.
            kind: Of the numbers. Ranks whose rows lie otherwise have no words.
        """
        self._like, self._leaving, self._arriving = like, leaving, arriving
        self._kind = kind
        each = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in like)
        numbers = each * (like[0].element_size() // kind.itemsize)
        self._splits = [numbers * n for n in arriving], [numbers * n for n in leaving]
        self._sent, self._found = (
            like[0].new_empty(each * sum(rows)) for rows in (leaving, arriving)
        )
        self._work: dist.Work | None = None

    def rooms(self) -> Iterator[tuple[int, Pair]]:
        """The buffers to fill, by the rank that they go to."""
        return self._blocks(self._sent, self._leaving)

    def begin(self, group: ProcessGroup) -> None:
        """Send, and go on."""
        found, sent = (x.view(self._kind) for x in (self._found, self._sent))
        self._work = dist.all_to_all_single(found, sent, *self._splits, group=group, async_op=True)

    def arrived(self) -> dict[int, Pair]:
        """Received tensors by the rank that sent them. Work that follows waits for them."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return dict(self._blocks(self._found, self._arriving))

    def _blocks(self, flat: torch.Tensor, rows: Sequence[int]) -> Iterator[tuple[int, Pair]]:
        at = 0
        for rank, number in enumerate(rows):
            if not number:
                continue
            found = []
            for x in self._like:
                shape = (x.shape[0], x.shape[1], number, x.shape[3])
                size = shape[0] * shape[1] * shape[2] * shape[3]
                found.append(flat.narrow(0, at, size).view(shape))
                at += size
            yield rank, found


class Fetch:
    """The keys and values that this rank's calls see; what it lacks is on its way."""

    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, table: Table, group: ProcessGroup,
        kept: Sequence[torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Begin to send and to receive.

        Args:
            k: (B, key heads, rows of this rank, D).
            v: (B, key heads, rows, Dv).
            table: Of this rank.
            group: The ranks.
            kept: What :meth:`end` gave of an earlier one, which fetches nothing again.
        """
        self._table = table
        self._own = [_heads(x, table.share, table.group) for x in (k, v)]
        whole = _units((k, v)) if kept is None else [k, v]
        self._units = [_heads(x, table.share, table.group) for x in whole]
        self._islands: list[Pair] | None = None
        self._trip: _Trip | None = None
        if kept is not None:
            self._islands = [list(pair) for pair in zip(kept[::2], kept[1::2], strict=True)]
        elif table.travels:
            self._trip = _Trip(self._units, table.sent, table.received, k.dtype)
            copies = _Copies()
            for rank, rooms in self._trip.rooms():
                for x, room in zip(whole, rooms, strict=True):
                    rows = _heads(x, rank % table.group, table.group)
                    _pack(rows, table.sends[rank], room, copies)
            copies.make()
            self._trip.begin(group)

    def of(self, part: RowRun) -> Pair:
        """Keys and values of ``part``; if it sees those of others, what follows waits for them."""
        number = part.keys[1] - part.keys[0]
        if part.island < 0:
            return [x.narrow(2, part.own, number) for x in self._own]
        if self._islands is None:
            arrived = {} if self._trip is None else self._trip.arrived()
            self._islands = [self._filled(island, arrived) for island in self._table.islands]
        start = part.keys[0] - self._table.islands[part.island].keys[0]
        return [x.narrow(2, start, number) for x in self._islands[part.island]]

    def end(self) -> Pair:
        """Let what follows wait until all has been sent; the islands' keys and values."""
        if self._trip is not None:
            self._trip.arrived()
        return [x for pair in self._islands or () for x in pair]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and of values."""
        return self._own[0].dtype

    @property
    def value_dim(self) -> int:
        """Columns of values."""
        return self._own[1].shape[3]

    def like(self, dtype: torch.dtype) -> Pair:
        """Empty tensors with as many heads of keys and values as this rank's calls see."""
        return [x.new_empty((*x.shape[:2], 0, x.shape[3]), dtype=dtype) for x in self._own]

    def _filled(self, island: Island, arrived: dict[int, Pair]) -> Pair:
        """The keys of an island, with zeros where no row sees a key and no rank sent it."""
        first, stop = island.keys
        found = [x.new_empty((*x.shape[:2], stop - first, x.shape[3])) for x in self._units]
        filled, copies = first, _Copies()
        for low, high, source, at in island.pieces:
            pair = self._units if source == self._table.rank else arrived[source]
            for room, x in zip(found, pair, strict=True):
                if filled < low:
                    room.narrow(2, filled - first, low - filled).zero_()
                copies.add(room.narrow(2, low - first, high - low), x.narrow(2, at, high - low))
            filled = high
        copies.make()
        if filled < stop:
            for room in found:
                room.narrow(2, filled - first, stop - filled).zero_()
        return [x.view(own.dtype) for x, own in zip(found, self._own, strict=True)]


class FetchedGradients:
    """Gradients of keys and values, by the calls that computed them."""

    def __init__(self, table: Table, group: ProcessGroup) -> None:
        """Start without gradients, on a rank with this table in that group."""
        self._table, self._group = table, group
        self._grads: tuple[Grads, Grads] = ([], [])
        self._trip: _Trip | None = None

    def add(self, part: RowRun, pair: Sequence[torch.Tensor]) -> None:
        """Take the gradients of the keys and values of ``part``, which no other part needs."""
        for some, grad in zip(self._grads, pair, strict=True):
            some.append((part.keys, grad))

    def send(self, like: Pair) -> None:
        """Send others their gradients: calls that see their keys have been made.

        Args:
            like: Keys and values of this rank, as many heads of them as it computes; in the dtype
                of the sums.
        """
        table = self._table
        if not table.travels:
            return
        self._trip = _Trip(like, table.received, table.sent, like[0].dtype)
        for rank, rooms in self._trip.rooms():
            for some, room in zip(self._grads, rooms, strict=True):
                at = 0
                for run in table.reads[rank]:
                    _put(some, run, room.narrow(2, at, run[1] - run[0]))
                    at += run[1] - run[0]
        self._trip.begin(self._group)

    def returned(self, like: Pair, dtype: torch.dtype) -> Pair:
        """Gradients of this rank's keys and values, from those of all ranks that saw them.

        This rank's come first and then those of the others in their order, so that sums are the
        same whichever comes first. They are rounded once.

        Args:
            like: As of :meth:`send`, which comes before.
            dtype: Of the results.
        """
        arrived = {} if self._trip is None else self._trip.arrived()
        return [
            self._total(grads, {rank: pair[place] for rank, pair in arrived.items()}, x, dtype)
            for place, (grads, x) in enumerate(zip(self._grads, like, strict=True))
        ]

    def _total(
        self, own: Grads, arrived: dict[int, torch.Tensor], like: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The sum of what this rank has computed for its own rows and what has arrived, by rank."""
        table = self._table
        others: list[Grads] = [[] for _ in range(table.group)]
        for rank, rows in arrived.items():
            at = 0
            for start, stop in table.sends[rank]:
                some = rows.narrow(2, at, stop - start)
                others[rank % table.group].append(((start, stop), some))
                at += stop - start
        whole = self._whole(own)
        if whole is not None:
            for (start, stop), some in others[0]:
                whole.narrow(2, start, stop - start).add_(some)
            return whole.to(dtype)
        shape = (like.shape[0], like.shape[1] * table.group, table.rows, like.shape[3])
        found = like.new_empty(shape, dtype=dtype)
        for share, theirs in enumerate(others):
            mine = self._by_rows(own) if share == table.share else []
            _put([*mine, *theirs], (0, table.rows), _heads(found, share, table.group))
        return found

    def _whole(self, grads: Grads) -> torch.Tensor | None:
        """Sum of this rank's gradients of its own rows, in place of one call's gradients.

        None if no call has gradients of all these rows.
        """
        table = self._table
        if table.group != 1 or len(table.held) != 1:
            return None
        (run,) = table.held
        for number, (keys, grad) in enumerate(grads):
            if keys[0] <= run[0] and run[1] <= keys[1] and 0 not in grad.stride():
                found = grad.narrow(2, run[0] - keys[0], run[1] - run[0])
                _add([*grads[:number], *grads[number + 1 :]], run, found)
                return found
        return None

    def _by_rows(self, grads: Grads) -> Grads:
        """``grads`` by this rank's rows in place of positions."""
        found, at = [], 0
        for start, stop in self._table.held:
            for keys, grad in grads:
                low, high = max(start, keys[0]), min(stop, keys[1])
                if low < high:
                    rows = grad.narrow(2, low - keys[0], high - low)
                    found.append(((at + low - start, at + high - start), rows))
            at += stop - start
        return found


def _heads(x: torch.Tensor, share: int, shares: int) -> torch.Tensor:
    """A part of the heads of ``x``."""
    if shares == 1:
        return x
    count = x.shape[1] // shares
    return x.narrow(1, share * count, count)


class _Copies:
    """Copies of some rows to others' places, all of them in one call of torch."""

    def __init__(self) -> None:
        """Begin with no copies."""
        self._rooms: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []

    def add(self, room: torch.Tensor, rows: torch.Tensor) -> None:
        """Remember to copy ``rows`` to ``room``."""
        self._rooms.append(room)
        self._rows.append(rows)

    def add_words(self, room: torch.Tensor, rows: torch.Tensor) -> None:
        """Do as :meth:`add`, by words where rows of one dtype have these; see :func:`_units`."""
        a, b = _words(room), _words(rows)
        if a is None or b is None or room.dtype is not rows.dtype:
            self.add(room, rows)
        else:
            self.add(a, b)

    def make(self) -> None:
        """Make them."""
        if self._rooms:
            torch._foreach_copy_(self._rooms, self._rows)


def _pack(x: torch.Tensor, runs: Sequence[Run], room: torch.Tensor, copies: _Copies) -> None:
    """Put some rows of ``x`` into ``room``, one run after the other."""
    at = 0
    for start, stop in runs:
        copies.add(room.narrow(2, at, stop - start), x.narrow(2, start, stop - start))
        at += stop - start


def _units(pair: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Keys and values as words of 8 bytes, if both have these; otherwise as they are.

    Torch copies some rows of each head element by element, and its GPU kernel for that moves as
    many elements a second whatever their size is.
    """
    found = [y for x in pair if (y := _words(x)) is not None]
    return found if len(found) == len(pair) else list(pair)


def _words(x: torch.Tensor) -> torch.Tensor | None:
    """``x`` (four dims) as words; None where rows do not begin and end at such."""
    batch, heads, rows, last = x.stride()
    per = _WORD.itemsize // x.element_size()
    if per < 2 or last != 1 or x.data_ptr() % _WORD.itemsize or x.is_neg():
        return None
    if batch % per or heads % per or rows % per or x.shape[3] % per or x.storage_offset() % per:
        return None
    return x.view(_WORD)


def _put(grads: Grads, run: Run, room: torch.Tensor) -> None:
    """Put the sum of all gradients of the keys of ``run`` into ``room``; zeros where none is.

    Each row is written once, and rounded to the dtype of ``room`` once.
    """
    copies = _Copies()
    ends = {x for keys, _ in grads for x in keys if run[0] < x < run[1]}
    for low, high in pairwise(sorted({*run} | ends)):
        place = room.narrow(2, low - run[0], high - low)
        some = [
            grad.narrow(2, low - keys[0], high - low)
            for keys, grad in grads if keys[0] <= low and high <= keys[1]
        ]  # fmt: skip
        if not some:
            place.zero_()
            continue
        total = some[0]
        if len(some) > 1:
            total = total + some[1]
        for more in some[2:]:
            total.add_(more)
        copies.add_words(place, total)
    copies.make()


def _add(grads: Grads, run: Run, room: torch.Tensor) -> None:
    """Add all gradients of the keys of ``run`` to ``room``."""
    for keys, grad in grads:
        low, high = max(run[0], keys[0]), min(run[1], keys[1])
        if low < high:
            rows = grad.narrow(2, low - keys[0], high - low)
            room.narrow(2, low - run[0], high - low).add_(rows)
