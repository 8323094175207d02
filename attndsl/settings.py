"""Settings from the environment, read when they are needed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attndsl.errors import ConfigError

_FALSE = frozenset({"", "0", "false", "no", "off"})
_TRUE = frozenset({"1", "true", "yes", "on"})
LOG_LEVELS = ("info", "debug")
"""Values of ``ATTNDSL_LOG``, beside those that say no."""

_BUNDLES = "ATTNDSL_BUNDLES"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BundlePlace(NamedTuple):
    """Path of a bundle of compiled kernels, and the digest that it has to have."""

    path: Path
    digest: str | None = None
    """The digest that it has to have, or None for any."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the environment variables."""

    cache_dir: Path
    """``ATTNDSL_CACHE_DIR``: where kernels are kept; by default the user's cache folder."""
    cache: bool
    """``ATTNDSL_CACHE=0`` keeps nothing on disk beyond the process."""
    cache_bytes: int
    """``ATTNDSL_CACHE_MB``: size beyond which the least recently used entries are removed."""
    bundles: tuple[BundlePlace, ...]
    """``ATTNDSL_BUNDLES``: bundles of compiled kernels that calls look into before they compile."""
    checked: bool
    """``ATTNDSL_CHECKED=1``: out-of-range lookups of live pairs are errors (reference backend)."""
    verify: bool
    """``ATTNDSL_VERIFY=1``: the first call of each kind checks its tile plan pair by pair."""


def read_settings() -> Settings:
    """The settings as the environment is now."""
    import platformdirs

    folder = os.environ.get("ATTNDSL_CACHE_DIR")
    default = platformdirs.user_cache_path("attndsl", appauthor=False)
    return Settings(
        cache_dir=Path(os.path.expanduser(folder)) if folder else default,
        cache=_switch("ATTNDSL_CACHE", True),
        cache_bytes=_megabytes(os.environ.get("ATTNDSL_CACHE_MB") or "256"),
        bundles=read_bundles(),
        checked=_switch("ATTNDSL_CHECKED", False),
        verify=asks_to_verify(),
    )


def asks_to_verify() -> bool:
    """``Settings.verify`` alone, since calls ask, and folders take 40 us."""
    return "ATTNDSL_VERIFY" in os.environ and _switch("ATTNDSL_VERIFY", False)


def asks_for_shipped() -> bool:
    """``ATTNDSL_SHIPPED=0`` leaves the kernels that came with this package unused."""
    return _switch("ATTNDSL_SHIPPED", True)


def _switch(name: str, default: bool) -> bool:
    """Return True if a variable of the environment is on; an empty one is not set.

    Raises:
        ConfigError: It is neither on nor off.
    """
    text = os.environ.get(name, "").lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE if text else default
    raise ConfigError(f"{name} is {text[:40]!r}", hint="write 1 or 0")


def read_bundles() -> tuple[BundlePlace, ...]:
    """``Settings.bundles`` alone: paths, each with ``@DIGEST`` behind it or without.

    Raises:
        ConfigError: What stands behind ``@`` begins like a digest and is none.
    """
    return tuple(
        _bundle_place(part) for part in os.environ.get(_BUNDLES, "").split(os.pathsep) if part
    )


def add_bundle(path: str | os.PathLike[str], digest: str | None = None) -> None:
    """Have this process, and those that it starts, look into one more bundle.

    Packages that bring kernels call this when they are imported. It adds to the environment
    variable ``ATTNDSL_BUNDLES``. Calls that have their kernels already do not look again.

    Args:
        path: The bundle's folder.
        digest: The digest that it has to have: the one that ``attndsl build`` printed.

    Raises:
        ConfigError: ``digest`` is none, or ``path`` cannot stand in the variable.
    """
    folder = os.path.abspath(os.fspath(path))
    if os.pathsep in folder:
        raise ConfigError(
            f"the path of a bundle holds {os.pathsep!r}: {folder}",
            hint="put the bundle where no part of its path has this character",
        )
    if digest is not None:
        _check_digest(digest)
    # What stands behind the last @ is no digest if a / ends it.
    end = "" if "@" not in os.path.basename(folder) else os.sep
    added = f"{folder}{end}" if digest is None else f"{folder}@{digest}"
    before = os.environ.get(_BUNDLES, "")
    if added not in before.split(os.pathsep):
        os.environ[_BUNDLES] = f"{before}{os.pathsep}{added}" if before else added


def _bundle_place(text: str) -> BundlePlace:
    path, at, digest = text.rpartition("@")
    # A path may hold @ itself, as in /opt/node@20/lib.
    if not at or os.sep in digest:
        return BundlePlace(Path(os.path.expanduser(text)))
    _check_digest(digest)
    return BundlePlace(Path(os.path.expanduser(path)), digest)


def _check_digest(text: str) -> None:
    if not _DIGEST.fullmatch(text):
        raise ConfigError(
            f"{text[:80]!r} is no digest of a bundle",
            hint="write the 64 letters and digits that attndsl build prints: /path/bundle@DIGEST; "
            "a path with @ in its last part ends with /",
        )


def log_level() -> str:
    """``ATTNDSL_LOG``: what is printed of the log, in lower case; empty for nothing."""
    found = os.environ.get("ATTNDSL_LOG", "").strip().lower()
    return "" if found in _FALSE else found


def _megabytes(text: str) -> int:
    if not text.isdigit():
        raise ConfigError(
            f"ATTNDSL_CACHE_MB is {text[:40]!r}", hint="write a whole number of megabytes"
        )
    return int(text) << 20
