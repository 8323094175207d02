"""The digest of this package's own sources, as this process has imported them.

Modules are imported when they are first needed, and files may change meanwhile: an upgrade, a
checkout. So the package's first import notes what tells each file from another one: when it was
changed, its size, its inode. Contents are read when the digest is first asked for. What was noted
still holds then, or nobody knows what this process has imported, and nothing that it makes may be
kept for others.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from .caches import memoised

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SUFFIXES = (".py", ".lark", ".attn")


class _Stamp(NamedTuple):
    """A file, and what another one in its place or another text would change."""

    path: str
    changed_ns: int
    bytes: int
    inode: int


def _roots() -> Mapping[str, str] | None:
    """The folders of the package's text, by the names that they have in a checkout.

    There ``backends`` and ``grammar`` lie beside the package, and inside it where it is installed.
    The names are the same, so that bundles of one serve the other.
    """
    found = {"attndsl": os.path.dirname(os.path.dirname(os.path.realpath(__file__)))}
    for part in ("backends", "grammar"):
        spec = find_spec(f"attndsl.{part}")
        if spec is None or spec.origin is None:
            return None
        found[part] = os.path.dirname(os.path.realpath(spec.origin))
    return found


def _stamps(roots: Mapping[str, str] | None) -> Mapping[str, _Stamp] | None:
    """The package's files by name, sorted; None where they are no files, as in a zip."""
    if roots is None:
        return None
    found: dict[str, _Stamp] = {}
    try:
        for name, root in roots.items():
            others = {other for other in roots.values() if other != root}
            # Hundreds of folders of compiled kernels, with no text.
            others.add(os.path.join(root, "shipped"))
            for stamp in sorted(_within(root, others)):
                found[name + stamp.path[len(root) :].replace(os.sep, "/")] = stamp
    except OSError:
        return None
    return found


def _within(folder: str, others: set[str]) -> Iterator[_Stamp]:
    """Files of the package's own text in ``folder`` and within, but not within ``others``."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.path not in others:
                    yield from _within(entry.path, others)
            elif entry.name.endswith(_SUFFIXES):
                found = entry.stat()
                yield _Stamp(entry.path, found.st_mtime_ns, found.st_size, found.st_ino)


_ROOTS = _roots()
_IMPORTED = _stamps(_ROOTS)
"""The files when this process first imported the package."""


def sources_changed() -> bool:
    """Tell whether the files differ from what this process has imported, or cannot be seen."""
    return _IMPORTED is None or _stamps(_ROOTS) != _IMPORTED


@memoised("fingerprints of sources", None)
def source_fingerprint() -> str:
    """SHA-256 over the package's own source files that this process has imported.

    Where nobody can say any more what these were, digits that no other process has.
    """
    digest = hashlib.sha256()
    try:
        for name, stamp in (_IMPORTED or {}).items():
            digest.update(name.encode() + b"\0")
            # Strings: a Path for each file took as long as to read them.
            with open(stamp.path, "rb") as file:
                digest.update(file.read())
    except OSError:
        return os.urandom(digest.digest_size).hex()
    return os.urandom(digest.digest_size).hex() if sources_changed() else digest.hexdigest()
