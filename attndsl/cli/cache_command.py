"""``attndsl cache``: list and empty the kernel cache."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndsl.errors import ConfigError, visible
from attndsl.runtime.bundle_store import (
    import_bundle,
    imported_places,
    remove_imported,
    shipped_bundle,
)
from attndsl.runtime.bundles import is_digest, open_bundle
from attndsl.runtime.disk_cache import KernelCache
from attndsl.runtime.owned_folder import open_folder
from attndsl.settings import read_settings

from .usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.runtime.bundles import Bundle
    from attndsl.runtime.disk_cache import CacheRemoval, EntryInfo

_NAMED = 5
"""Foreign files whose names are printed."""


def open_cache() -> KernelCache:
    """The cache that the environment names."""
    settings = read_settings()
    return KernelCache(settings.cache_dir, settings.cache_bytes, settings.cache)


def list_entries(as_json: bool) -> None:
    """One line an entry: of the cache the most recently used first, then of bundles; or JSON.

    The hundreds that came with attndsl are one line, and all of them in JSON.
    """
    entries = open_cache().entries()
    bundles = _bundles()
    of_bundles = {bundle.folder: bundle.entries() for bundle in bundles}
    everything = [*entries, *(entry for found in of_bundles.values() for entry in found)]
    texts = {
        e.about.program: e.about.text for e in everything if e.kind == "program" and e.about.text
    }
    if as_json:
        found = [_described(entry, texts, None) for entry in entries]
        for bundle in bundles:
            found += [_described(e, texts, bundle) for e in of_bundles[bundle.folder]]
        if (own := shipped_bundle().bundle) is not None:
            found += [_described(e, texts, own) for e in own.entries()]
        print(json.dumps(found, indent=1))
        return
    for entry in entries:
        _print_entry(entry, _described(entry, texts, None))
    for bundle in bundles:
        why = bundle.why_not()
        line = f"bundle {bundle.folder}: {', '.join(bundle.targets)}, digest {bundle.digest}"
        print(visible(line + (f"; not used: {why}" if why else "")))
        for entry in of_bundles[bundle.folder]:
            _print_entry(entry, _described(entry, texts, bundle))
    if (shipped := shipped_bundle()).bundle is not None:
        print(visible(f"shipped {shipped.folder}: {describe_shipped()}"))


def describe_shipped() -> str:
    """Kernels that came with attndsl, and why they are not used, in a line."""
    found = shipped_bundle()
    if (bundle := found.bundle) is None:
        return f"not used: {found.why_not}"
    line = f"{len(bundle.keys())} entries, {bundle.size} bytes, for {', '.join(bundle.targets)}"
    whys = (f"not used: {found.why_not}" if found.why_not else None, bundle.why_no_launchers())
    return "; ".join([line, *filter(None, whys)])


def _bundles() -> list[Bundle]:
    """Bundles of the environment and imported ones; says which cannot be read."""
    settings = read_settings()
    found = []
    for place in (*settings.bundles, *imported_places(settings.cache_dir)):
        try:
            found.append(open_bundle(*place))
        except ConfigError as error:
            print(visible(error.message), file=sys.stderr)
    return found


def _print_entry(entry: EntryInfo, facts: Mapping[str, Any]) -> None:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)) if entry.used else "bundle"
    dims = "/".join(dict.fromkeys(str(n) for n in (facts["head_dim"], facts["value_dim"]) if n))
    words = (facts["kernel"], facts["target"], facts["dtype"], dims and f"D{dims}")
    what = " ".join(word for word in words if word)
    line = f"{entry.key[:16]}  {entry.kind:<9} {entry.bytes:>9}  {used:<16}"
    shown = [line, *(part for part in (what, facts["text"]) if part)]
    print(visible("  ".join(shown)))


def _described(entry: EntryInfo, texts: Mapping[str, str], bundle: Bundle | None) -> dict[str, Any]:
    """An entry as JSON values. A kernel's program is as it was written, if its entry is there."""
    about = entry.about
    used = datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds")
    return {
        "key": entry.key,
        "kind": entry.kind,
        **asdict(about),
        "text": texts.get(about.program, about.text) if about.program else about.text,
        "bytes": entry.bytes,
        "used": None if bundle is not None else used,
        "bundle": None if bundle is None else str(bundle.folder),
    }


def import_from(bundle: str, digest: str | None) -> None:
    """Copy a bundle into the cache and say what it is."""
    if digest is not None and not is_digest(digest):
        raise UsageError(
            f"--digest {digest[:80]!r} is no digest",
            hint="write the 64 letters and digits that attndsl build prints",
        )
    cache = open_cache()
    found = import_bundle(Path(bundle), cache, digest)
    own = found.bundle
    versions = f"attndsl {own.versions.attndsl}, triton {own.versions.triton}"
    done = "imported" if found.new else "there already"
    print(f"{done}: {len(own.keys())} entries, {own.size} bytes, for {', '.join(own.targets)}, "
          f"{versions}")  # fmt: skip
    print(f"digest: {own.digest}")
    for reason in (own.why_not(), own.why_no_launchers()):
        if reason is not None:
            print(f"note: it does not fit this environment: {reason}", file=sys.stderr)


def print_path() -> None:
    """The cache's folder."""
    print(visible(str(open_cache().folder)))


def print_stats() -> None:
    """Entries and bytes by kind."""
    cache = open_cache()
    entries = cache.entries()
    counts = Counter(entry.kind for entry in entries)
    print(f"folder   {visible(str(cache.folder))}")
    print(f"enabled  {_state(cache.folder)}")
    print(f"limit    {cache.limit} bytes")
    bundles = _bundles()
    if bundles:
        print(f"bundles  {len(bundles)}, {sum(bundle.size for bundle in bundles)} bytes")
    print(f"shipped  {visible(describe_shipped())}")
    print(f"entries  {len(entries)}, {sum(entry.bytes for entry in entries)} bytes")
    for kind, count in sorted(counts.items()):
        size = sum(entry.bytes for entry in entries if entry.kind == kind)
        print(f"  {visible(kind):<9} {count}, {size} bytes")


def _state(folder: Path) -> str:
    """``yes`` if entries are kept in ``folder``, otherwise ``no`` and the reason."""
    if not read_settings().cache:
        return "no (ATTNDSL_CACHE=0)"
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        return f"no: {visible(str(there))} is no folder (ATTNDSL_CACHE_DIR may name another one)"
    if not os.access(there, os.W_OK):
        return (
            f"no: {visible(str(there))} cannot be written (ATTNDSL_CACHE_DIR may name another one)"
        )
    try:
        open_folder(folder).close()
    except ConfigError as error:
        return f"no: {visible(error.message)}"
    except FileNotFoundError:
        pass  # It is made by the first call.
    return "yes"


def clear() -> None:
    """Remove all entries."""
    cache = open_cache()
    _print_removal(cache, cache.clear())
    count, size = remove_imported(cache.folder)
    if count:
        print(f"removed {count} imported bundle{'s' * (count != 1)}, {size} bytes")


def prune(megabytes: int | None) -> None:
    """Remove the least recently used entries beyond a size."""
    cache = open_cache()
    _print_removal(cache, cache.prune(None if megabytes is None else megabytes << 20))


def _print_removal(cache: KernelCache, done: CacheRemoval) -> None:
    folder = visible(str(cache.folder))
    noun = "entry" if done.entries == 1 else "entries"
    print(f"removed {done.entries} {noun}, {done.bytes} bytes, from {folder}")
    if done.foreign:
        names = ", ".join(map(visible, done.foreign[:_NAMED]))
        more = ", ..." if len(done.foreign) > _NAMED else ""
        verb = "was" if len(done.foreign) == 1 else "were"
        print(f"{len(done.foreign)} not of the cache {verb} left alone: {names}{more}")
