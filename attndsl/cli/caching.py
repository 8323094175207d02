"""``attndsl cache``: list and empty the kernel cache. Never imports torch."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from attndsl.errors import visible
from attndsl.runtime.cache import KernelCache
from attndsl.settings import read_settings

if TYPE_CHECKING:
    from attndsl.runtime.cache import Removal

_NAMED = 5
"""Foreign files whose names are printed."""


def open_cache() -> KernelCache:
    """The cache that the environment names."""
    settings = read_settings()
    return KernelCache(settings.cache_dir, settings.cache_bytes, settings.cache)


def list_entries() -> None:
    """One line an entry, the most recently used first."""
    for entry in open_cache().entries():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{entry.key[:16]}  {entry.kind:<9} {entry.bytes:>9}  {used}")


def print_path() -> None:
    """The cache's folder."""
    print(visible(str(open_cache().folder)))


def print_stats() -> None:
    """Entries and bytes by kind."""
    cache = open_cache()
    entries = cache.entries()
    counts = Counter(entry.kind for entry in entries)
    print(f"folder   {visible(str(cache.folder))}")
    print(f"enabled  {'yes' if read_settings().cache else 'no (ATTNDSL_CACHE=0)'}")
    print(f"limit    {cache.limit} bytes")
    print(f"entries  {len(entries)}, {sum(entry.bytes for entry in entries)} bytes")
    for kind, count in sorted(counts.items()):
        size = sum(entry.bytes for entry in entries if entry.kind == kind)
        print(f"  {kind:<9} {count}, {size} bytes")


def clear() -> None:
    """Remove all entries."""
    cache = open_cache()
    _print_removal(cache, cache.clear())


def prune(megabytes: int | None) -> None:
    """Remove the least recently used entries beyond a size."""
    cache = open_cache()
    _print_removal(cache, cache.prune(None if megabytes is None else megabytes << 20))


def _print_removal(cache: KernelCache, done: Removal) -> None:
    folder = visible(str(cache.folder))
    noun = "entry" if done.entries == 1 else "entries"
    print(f"removed {done.entries} {noun}, {done.bytes} bytes, from {folder}")
    if done.foreign:
        names = ", ".join(map(visible, done.foreign[:_NAMED]))
        more = ", ..." if len(done.foreign) > _NAMED else ""
        verb = "was" if len(done.foreign) == 1 else "were"
        print(f"{len(done.foreign)} not of the cache {verb} left alone: {names}{more}")
