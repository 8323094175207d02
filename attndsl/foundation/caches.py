"""The caches of a process: three kinds, one owner that lists and empties them.

A :class:`BoundedCache` keeps values by keys. :func:`memoised` keeps results of a function by its
arguments. :class:`RecentEntries` are tried one after another. All have a name, a bound and reasons
for which they are emptied, and all register with :data:`CACHES`. Keys of numbers are made by
:func:`attndsl.foundation.scalars.number_key`: a raw float is no key, since 0.0 equals -0.0, and 1
equals True.
"""

from __future__ import annotations

import os
import threading
import weakref
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")


class Reason(Enum):
    """Reasons for which caches are emptied."""

    RESET = "all caches are reset"
    """Every cache is emptied: by tests, and by who measures a first call."""
    BACKENDS = "backends are other objects"
    """Tests make new backends."""
    KERNELS = "other kernels are chosen"
    """Tuning has chosen another configuration."""


class CacheStatistics(NamedTuple):
    """Figures of one cache, or of all caches that share a name."""

    name: str
    bound: int | None
    """Most entries of one cache; None where it has as many as there are devices or types."""
    entries: int
    misses: int
    """Look-ups that found nothing. Look-ups that find something are not counted: each would take
    longer."""
    evictions: int
    """Entries that had to go for others."""
    reasons: frozenset[Reason]
    """Reasons for which it is emptied, besides a reset."""


class HoldsLock(Protocol):
    """Interface of an object that has a lock."""

    def after_fork(self) -> None:
        """Make locks anew in a forked process: another thread may have held one."""


class Cache(HoldsLock, Protocol):
    """Interface of a cache to its owner."""

    def invalidate(self, reason: Reason) -> None:
        """Drop all entries, if this is one of the cache's reasons."""

    def statistics(self) -> CacheStatistics:
        """Figures as they are now."""


class Owner:
    """The owner of all caches of a process."""

    def __init__(self) -> None:
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._after_fork)

    def register(self, cache: Cache) -> None:
        """Take a cache on for as long as others hold it."""
        with self._lock:
            self._caches.add(cache)

    def at_fork(self, holder: HoldsLock) -> None:
        """Have a holder of locks that is no cache make its locks anew in forked processes, too."""
        with self._lock:
            self._holders.add(holder)

    def invalidate(self, reason: Reason) -> None:
        """Empty the caches that have this reason; all for :attr:`Reason.RESET`."""
        for cache in self._all():
            cache.invalidate(reason)

    def statistics(self) -> list[CacheStatistics]:
        """Figures of all caches, by name; those of one name are added up."""
        found: dict[str, CacheStatistics] = {}
        for cache in self._all():
            own = cache.statistics()
            if (other := found.get(own.name)) is not None:
                own = own._replace(
                    entries=own.entries + other.entries, misses=own.misses + other.misses,
                    evictions=own.evictions + other.evictions,
                )  # fmt: skip
            found[own.name] = own
        return [found[name] for name in sorted(found)]

    def _all(self) -> list[Cache]:
        with self._lock:
            return list(self._caches)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        for holder in (*self._all(), *self._holders):
            holder.after_fork()


CACHES = Owner()
"""The owner of all caches of this process."""


class BoundedCache(Generic[Value]):
    """A cache by keys, of at most ``bound`` entries.

    Entries are kept in two generations. A look-up takes one ``get`` of a dict for an entry of the
    younger one, and no lock. Where this is full, it becomes the older one, and what was the older
    one is dropped: so the entries that go are those not used for the longest time, by half a bound.
    """

    __slots__ = (
        "__weakref__", "_evictions", "_lock", "_misses", "_older", "bound", "name", "reasons",
        "recent",
    )  # fmt: skip

    def __init__(self, name: str, bound: int, *reasons: Reason) -> None:
        """Make an empty cache that its owner knows.

        Args:
            name: The name that statistics show: what is kept, in the plural.
            bound: Most entries, 2 or more.
            *reasons: Reasons for which it is emptied, besides a reset.
        """
        self.name, self.bound, self.reasons = name, bound, frozenset(reasons)
        self.recent: dict[Hashable, Value] = {}
        """The younger generation, for callers that have no time for a call of :meth:`get`."""
        self._older: dict[Hashable, Value] = {}
        self._lock = threading.Lock()
        self._misses = self._evictions = 0
        CACHES.register(self)

    def get(self, key: Hashable) -> Value | None:
        """The value of ``key``; None where there is none."""
        found = self.recent.get(key)
        return found if found is not None else self._older_one(key)

    def _older_one(self, key: Hashable) -> Value | None:
        found = self._older.get(key)
        if found is None:
            self._misses += 1
        else:
            self.put(key, found)
        return found

    def put(self, key: Hashable, value: Value) -> None:
        """Keep ``value``, which is not None, under ``key``."""
        with self._lock:
            self._make_room(key)
            self.recent[key] = value

    def get_or_make(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``, made by ``make`` where there is none.

        Two threads may both make one; both get that of the first.
        """
        found = self.get(key)
        if found is None:
            made = make()
            with self._lock:
                self._make_room(key)
                found = self.recent.setdefault(key, made)
        return found

    def _make_room(self, key: Hashable) -> None:
        """Begin another generation if this one is full."""
        self._older.pop(key, None)
        if len(self.recent) >= max(1, self.bound // 2) and key not in self.recent:
            self._evictions += len(self._older)
            self._older, self.recent = self.recent, {}

    def invalidate(self, reason: Reason) -> None:
        """Drop all entries, if ``reason`` is one of the cache's, or a reset."""
        if reason is Reason.RESET or reason in self.reasons:
            with self._lock:
                self.recent, self._older = {}, {}

    def statistics(self) -> CacheStatistics:
        """Figures as they are now."""
        return CacheStatistics(
            self.name, self.bound, len(self), self._misses, self._evictions, self.reasons
        )

    def after_fork(self) -> None:
        """Make the lock anew in a forked process: another thread may have held it."""
        self._lock = threading.Lock()

    def values(self) -> list[Value]:
        """All values, the most recently used ones last."""
        return [*self._older.values(), *self.recent.values()]

    def __len__(self) -> int:
        return len(self.recent) + len(self._older)

    def __contains__(self, key: Hashable) -> bool:
        return key in self.recent or key in self._older


class RecentEntries(Generic[Value]):
    """A few values that are tried one after another, the most recently used ones first."""

    __slots__ = ("__weakref__", "bound", "each", "name", "reasons")

    def __init__(self, name: str, bound: int, *reasons: Reason) -> None:
        """Begin without values; the arguments are those of :class:`BoundedCache`."""
        self.name, self.bound, self.reasons = name, bound, frozenset(reasons)
        self.each: tuple[Value, ...] = ()
        """The values. Two threads may lose one of each other's, which is only found later."""
        CACHES.register(self)

    def use(self, value: Value) -> None:
        """Put ``value`` before the others."""
        others = [x for x in self.each if x is not value]
        self.each = value, *others[: self.bound - 1]

    def invalidate(self, reason: Reason) -> None:
        """Drop all values, if ``reason`` is one of these, or a reset."""
        if reason is Reason.RESET or reason in self.reasons:
            self.each = ()

    def statistics(self) -> CacheStatistics:
        """Figures as they are now; nothing is counted."""
        return CacheStatistics(self.name, self.bound, len(self.each), 0, 0, self.reasons)

    def after_fork(self) -> None:
        """Have no lock."""


class _Results:
    """Registration of a function whose results are kept."""

    __slots__ = ("__weakref__", "_cached", "name", "reasons")

    def __init__(self, name: str, cached: Any, reasons: tuple[Reason, ...]) -> None:
        self.name, self._cached, self.reasons = name, cached, frozenset(reasons)
        CACHES.register(self)

    def invalidate(self, reason: Reason) -> None:
        if reason is Reason.RESET or reason in self.reasons:
            self._cached.cache_clear()

    def statistics(self) -> CacheStatistics:
        told = self._cached.cache_info()
        gone = max(0, told.misses - told.currsize)
        return CacheStatistics(
            self.name, told.maxsize, told.currsize, told.misses, gone, self.reasons
        )

    def after_fork(self) -> None:
        pass


def memoised(
    name: str, bound: int | None = 1024, *reasons: Reason
) -> Callable[[Callable[Parameters, Value]], Callable[Parameters, Value]]:
    """Keep results of a function by its arguments, as :func:`functools.lru_cache` does.

    Args:
        name: The name that statistics show: what is kept, in the plural.
        bound: Most results; None where arguments are few by nature, such as devices.
        *reasons: Reasons for which they are dropped, besides a reset.
    """

    def around(function: Callable[Parameters, Value]) -> Callable[Parameters, Value]:
        cached: Any = lru_cache(maxsize=bound)(function)
        cached.registration = _Results(name, cached, reasons)
        found: Callable[Parameters, Value] = cached
        return found

    return around
