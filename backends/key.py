"""The key under which a generated module is kept: all that its text and compiled form depend on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib import metadata

from attndsl.foundation.caches import memoised

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


@memoised("versions of installed packages", None)
def version_of(distribution: str) -> str:
    """Installed version of ``distribution``, or ``none``."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
