"""Lists of tiles that later calls read again: of the layers behind, of the backward, of the next.

A list follows from the mask, from sizes, and from the values of the tensors that the mask reads.
Torch counts the changes of a tensor in its version, so a list holds for as long as the tensor lives
and its version stays. docs/guide.md says which changes torch does not count.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attndsl.foundation.caches import CACHES, CacheStatistics, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

_MOST_LISTS = 64
"""A training step of two kinds of layers reads six."""
_MOST_BYTES = 1 << 26
"""Most bytes of lists of tiles. Finding larger ones takes little beside the attention that reads
them, and memory that is kept is missing elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """The lists of one place."""

    versions: tuple[int, ...]
    """Versions of the tensors that the mask reads, as the lists were begun."""
    lists: list[Any]
    """Arguments of kernels; empty once a tensor that the mask reads is gone."""
    size: int
    """Bytes."""
    watched: tuple[weakref.ref[Any], ...]
    """References that empty ``lists`` when a tensor goes."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class KeptLists:
    """Lists by the values that they follow from: a cache whose entries go when tensors do."""

    name: str
    """Name of the cache, as of a :class:`~attndsl.foundation.caches.BoundedCache`."""
    made: int = 0
    """Number of times that lists were made so far."""
    _found: OrderedDict[Hashable, _Kept] = field(default_factory=OrderedDict)
    """The most recently used ones stand last."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _seen_capture: bool = False
    _evictions: int = 0

    def __post_init__(self) -> None:
        CACHES.register(self)

    def of(
        self,
        place: Hashable,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        make: Callable[[], list[Any]],
    ) -> list[Any]:
        """The lists that ``make`` makes, or those that it made before.

        Args:
            place: What the lists follow from besides ``tensors``: kernels, the stream on which
                these run, sizes and numbers.
            tensors: Those that the mask reads.
            device: Where the lists lie. Its current stream is that of ``place``.
            make: Launches the kernels that make the lists.
        """
        # A view counts changes with the tensor that it is a view of.
        owners = [x if x._base is None else x._base for x in tensors]
        if not self._may_keep(owners, device):
            return self.anew(make)
        key = (
            device,
            place,
            *(
                (id(owner), x.data_ptr(), x.dtype, x.shape, x.stride())
                for owner, x in zip(owners, tensors, strict=True)
            ),
        )
        # Before the lists are begun: a change meanwhile makes them old.
        versions = tuple(x._version for x in tensors)
        with self._lock:
            kept = self._found.get(key)
            if kept is not None and kept.versions == versions and (lists := kept.lists[:]):
                self._found.move_to_end(key)
                return lists
        lists = self.anew(make)
        size = sum(x.nbytes for x in lists if isinstance(x, torch.Tensor))
        held = lists[:]
        # Until all of these go, no id and no address comes again. What is called then knows the
        # lists alone, so that no cycle keeps them.
        watched = tuple(
            weakref.ref(x, _emptying(held))
            for x in (*owners, *(tensor.untyped_storage() for tensor in tensors))
        )
        self._keep(key, _Kept(versions, held, size, watched))
        return lists

    def anew(self, make: Callable[[], list[Any]]) -> list[Any]:
        """Make lists by ``make``, for this call alone."""
        self.made += 1
        return make()

    def _may_keep(self, tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
        """Return True if changes of ``tensors`` are seen, and ``device`` memory is no graph's."""
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                self._seen_capture = True
                return False
            # Replays write tensors, and no version says so.
            if tensors and (
                self._seen_capture or torch.cuda.graph.default_capture_stream is not None
            ):
                return False
        if not tensors:
            return True
        # What serves models writes tensors by kernels of its own, and fused optimizers write those
        # that learn. Cached tensors are results of the graphs that torch.compile replays.
        return not torch.is_inference_mode_enabled() and not any(
            x.requires_grad or x.is_inference() or torch._C._is_cached_tensor(x)  # type: ignore[attr-defined]
            for x in tensors
        )

    def _keep(self, key: Hashable, kept: _Kept) -> None:
        with self._lock:
            self._found.pop(key, None)
            for gone in [place for place, other in self._found.items() if not other.lists]:
                del self._found[gone]
            if kept.size > _MOST_BYTES:
                return
            self._found[key] = kept
            while len(self._found) > _MOST_LISTS or self._size() > _MOST_BYTES:
                self._found.popitem(last=False)
                self._evictions += 1

    def invalidate(self, reason: Reason) -> None:
        """Drop all lists for a reset: nothing else makes them wrong but what is watched."""
        if reason is Reason.RESET:
            with self._lock:
                self._found.clear()

    def statistics(self) -> CacheStatistics:
        """Figures as they are now."""
        return CacheStatistics(
            self.name, _MOST_LISTS, len(self), self.made, self._evictions, frozenset()
        )

    def after_fork(self) -> None:
        """Make the lock anew in a forked process: another thread may have held it."""
        self._lock = threading.Lock()

    def _size(self) -> int:
        return sum(kept.size for kept in self._found.values())

    def __len__(self) -> int:
        """Number of entries whose lists are kept."""
        return sum(bool(kept.lists) for kept in self._found.values())


def _emptying(lists: list[Any]) -> Callable[[object], None]:
    def empty(_: object) -> None:
        lists.clear()

    return empty
