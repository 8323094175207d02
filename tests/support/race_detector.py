"""Streams of a GPU that nobody has: which operations could run at the same time on the same bytes.

Each stream has a vector clock. An operation may read a byte if its stream has seen when that was
written. It may write one if its stream has seen all reads and writes of it so far (C. Flanagan and
S. Freund, FastTrack, PLDI 2009, without its shorter clocks). Operations run on the CPU, in order.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attndsl.parallel import eager_exchange, side_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAMS = 3


class Stream:
    """Stands in for a stream."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock = np.zeros(STREAMS, np.int64)

    def wait_stream(self, other: Stream) -> None:
        """What follows here comes after what was asked of ``other``."""
        self.clock = np.maximum(self.clock, other.clock)


class _Memory:
    """By byte: which stream has written it last and when, and when each has read it last."""

    def __init__(self, size: int, stream: Stream | None) -> None:
        self.writer = np.full(size, 0 if stream is None else stream.number)
        self.written = np.full(size, 0 if stream is None else stream.clock[stream.number])
        self.read = np.zeros((STREAMS, size), np.int64)


class Detector(TorchDispatchMode):
    """Notes in ``races`` what could go wrong on a GPU with these streams."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.network = map(Stream, range(STREAMS))
        self.current = self.first
        self.races: set[str] = set()
        self.operations = [0] * STREAMS
        # Storages are held, so that no other one gets the place of one.
        self._known: dict[int, tuple[Any, _Memory]] = {}

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Ask work of ``stream``."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema, name, stream = function._schema, str(function), self.current
        stream.clock[stream.number] += 1
        self.operations[stream.number] += 1
        written = {
            id(x)
            for place, spec in enumerate(schema.arguments)
            if spec.alias_info is not None and spec.alias_info.is_write
            for x in tree_leaves(args[place] if place < len(args) else kwargs.get(spec.name))
        }
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        alike = [x.alias_info is not None for x in schema.returns]
        is_view = any(alike) and not written
        if not is_view and "empty" not in name:
            for x in given:
                self.use(x, name, id(x) in written)
        found = function(*args, **kwargs)
        if not any(alike):
            for x in tree_leaves(found):
                if isinstance(x, torch.Tensor):
                    self._of(x, stream)
        return found

    def use(self, x: torch.Tensor, what: str, writes: bool) -> None:
        """The current stream reads ``x``, or writes it."""
        own, places, stream = self._of(x), _places(x), self.current
        if (stream.clock[own.writer[places]] < own.written[places]).any():
            self.races.add(f"{what}: another stream may not have written yet")
        if writes:
            if (stream.clock[:, None] < own.read[:, places]).any():
                self.races.add(f"{what}: another stream may not have read yet")
            own.writer[places] = stream.number
            own.written[places] = stream.clock[stream.number]
        else:
            own.read[stream.number][places] = stream.clock[stream.number]

    def _of(self, x: torch.Tensor, maker: Stream | None = None) -> _Memory:
        """Of what has not been made here, all is there for all."""
        storage = x.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._known[storage._cdata] = storage, _Memory(storage.nbytes(), maker)
        return known[1]


def _places(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Which bytes of its storage ``x`` has."""
    size = x.element_size()
    found = np.array([x.storage_offset() * size])
    for number, step in zip((*x.shape, size), (*(s * size for s in x.stride()), 1), strict=True):
        found = (found[:, None] + np.arange(number) * step).ravel()
    return found


@contextmanager
def detecting(arriving: bool = True) -> Iterator[Detector]:
    """Ranks' calls are asked of streams of a detector, and so is what travels between them.

    If not ``arriving``, nobody waits for that.
    """
    found = Detector()
    begin, arrived = eager_exchange._Trip.begin, eager_exchange._Trip.arrived

    def beginning(trip: Any, group: Any) -> None:
        found.network.wait_stream(found.current)
        with found.on(found.network):
            begin(trip, group)
            # The collective's schema does not say that it writes.
            found.use(trip._found, "arrival", True)

    def waiting(trip: Any) -> Any:
        if trip._work is not None and arriving:
            found.current.wait_stream(found.network)
        return arrived(trip)

    with (
        mock.patch.object(side_stream, "streams_of", return_value=(found.first, found.second)),
        mock.patch.object(torch.cuda, "stream", found.on),
        mock.patch.object(eager_exchange._Trip, "begin", beginning),
        mock.patch.object(eager_exchange._Trip, "arrived", waiting),
        found,
    ):
        yield found
