"""``attndsl cache``: what the kernel cache holds, and how to empty it. Never imports torch."""

from __future__ import annotations

import time
from collections import Counter

from attndsl.runtime.cache import KernelCache
from attndsl.settings import read_settings


def open_cache() -> KernelCache:
    """The cache that the environment names."""
    settings = read_settings()
    return KernelCache(settings.cache_dir, settings.cache_bytes, settings.cache)


def list_entries() -> None:
    """One line an entry, the most recently used first."""
    for entry in open_cache().entries():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{entry.key[:16]}  {entry.kind:<9} {entry.bytes:>9}  {used}")


def print_stats() -> None:
    """Entries and bytes by kind."""
    cache = open_cache()
    entries = cache.entries()
    counts = Counter(entry.kind for entry in entries)
    print(f"folder   {cache.folder}")
    print(f"enabled  {'yes' if read_settings().cache else 'no (ATTNDSL_CACHE=0)'}")
    print(f"limit    {cache.limit} bytes")
    print(f"entries  {len(entries)}, {sum(entry.bytes for entry in entries)} bytes")
    for kind, count in sorted(counts.items()):
        size = sum(entry.bytes for entry in entries if entry.kind == kind)
        print(f"  {kind:<9} {count}, {size} bytes")


def clear() -> None:
    """Remove all entries."""
    print(f"removed {open_cache().clear()} entries")


def prune(megabytes: int | None) -> None:
    """Remove the least recently used entries beyond a size."""
    limit = None if megabytes is None else megabytes << 20
    print(f"removed {open_cache().prune(limit)} entries")
