"""The key under which a generated module is kept: all that its text and compiled form depend on."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT_VERSION = 3
"""Changes whenever entries written before can no longer be read."""
_SUFFIXES = (".py", ".lark", ".attn")


@dataclass(frozen=True, slots=True)
class KernelKey:
    """Key of one cache entry. Equal keys mean an entry that can be used as it stands."""

    program: str
    """Digest of the renumbered IR: renaming a local or reformatting the text keeps it."""
    kind: str
    """``forward`` or ``backward``."""
    facts: str
    """Canonical text of dtypes, head dims and shape classes (``emit.facts``)."""
    options: str
    """Canonical text of the options that change code: dot precision, interpreter."""
    target: str
    """Architecture, such as ``cuda:90``."""
    triton: str
    """Version of triton. No kernel depends on that of torch."""
    attndsl: str
    """Version of this package."""
    fingerprint: str
    """Digest of this package's own sources, so that a development tree never uses stale kernels."""
    format: int = FORMAT_VERSION
    """Version of the layout of entries."""

    def digest(self) -> str:
        """64 hex digits: a name for files."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@cache
def source_fingerprint() -> str:
    """SHA-256 over the package's own source files: names and contents.

    The same in a checkout, where ``backends`` and ``grammar`` lie beside the package, as where they
    are installed inside it: bundles of one serve the other.
    """
    backends = Path(__file__).resolve().parent
    package = Path(_package_file()).resolve().parent
    grammar = package / "grammar" if (package / "grammar").is_dir() else package.parent / "grammar"
    roots = {"attndsl": package, "backends": backends, "grammar": grammar}
    digest = hashlib.sha256()
    for name, root in roots.items():
        others = {str(other) for other in roots.values()} - {str(root)}
        for path in sorted(_sources(str(root), others)):
            # Strings: a Path for each file took as long as to read them.
            digest.update(f"{name}{path[len(str(root)) :].replace(os.sep, '/')}".encode() + b"\0")
            with open(path, "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()


def _sources(folder: str, others: set[str]) -> Iterator[str]:
    """Files of the package's own text in ``folder`` and within, but not within ``others``."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.path not in others:
                    yield from _sources(entry.path, others)
            elif entry.name.endswith(_SUFFIXES):
                yield entry.path


@cache
def version_of(distribution: str) -> str:
    """Installed version of ``distribution``, or ``none``."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _package_file() -> str:
    import attndsl

    return str(attndsl.__file__)
