"""The key under which a generated module is kept: all that its text and compiled form depend on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

FORMAT_VERSION = 3
"""Changes whenever entries written before can no longer be read."""


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
        inside = [other for other in roots.values() if other != root and root in other.parents]
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".lark", ".attn") and not _is_within(path, inside):
                digest.update(f"{name}/{path.relative_to(root).as_posix()}".encode() + b"\0")
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_within(path: Path, folders: list[Path]) -> bool:
    return any(folder in path.parents for folder in folders)


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
