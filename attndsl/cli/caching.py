"""``attndsl cache``: list and empty the kernel cache."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from attndsl.errors import visible
from attndsl.runtime.cache import KernelCache
from attndsl.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.runtime.cache import EntryInfo, Removal

_NAMED = 5
"""Foreign files whose names are printed."""


def open_cache() -> KernelCache:
    """The cache that the environment names."""
    settings = read_settings()
    return KernelCache(settings.cache_dir, settings.cache_bytes, settings.cache)


def list_entries(as_json: bool) -> None:
    """One line an entry, the most recently used first; or JSON."""
    entries = open_cache().entries()
    texts = {e.about.program: e.about.text for e in entries if e.kind == "program" and e.about.text}
    found = [_described(entry, texts) for entry in entries]
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for entry, facts in zip(entries, found, strict=True):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        dims = "/".join(dict.fromkeys(str(n) for n in (facts["head_dim"], facts["value_dim"]) if n))
        words = (facts["kernel"], facts["target"], facts["dtype"], dims and f"D{dims}")
        what = " ".join(word for word in words if word)
        line = f"{entry.key[:16]}  {entry.kind:<9} {entry.bytes:>9}  {used}"
        shown = [line, *(part for part in (what, facts["text"]) if part)]
        print(visible("  ".join(shown)))


def _described(entry: EntryInfo, texts: Mapping[str, str]) -> dict[str, Any]:
    """An entry as JSON values. A kernel's program is as it was written, if its entry is there."""
    about = entry.about
    return {
        "key": entry.key,
        "kind": entry.kind,
        **asdict(about),
        "text": texts.get(about.program, about.text) if about.program else about.text,
        "bytes": entry.bytes,
        "used": datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds"),
    }


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
        print(f"  {visible(kind):<9} {count}, {size} bytes")


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
