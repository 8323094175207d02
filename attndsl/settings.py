"""Settings from the environment, read when they are needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_FALSE = frozenset({"", "0", "false", "no", "off"})
LOG_LEVELS = ("info", "debug")
"""Values of ``ATTNDSL_LOG``, beside those that say no."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the environment variables."""

    cache_dir: Path
    """``ATTNDSL_CACHE_DIR``: where kernels are kept; by default the user's cache folder."""
    cache: bool
    """``ATTNDSL_CACHE=0`` keeps nothing on disk beyond the process."""
    cache_bytes: int
    """``ATTNDSL_CACHE_MB``: size beyond which the least recently used entries are removed."""
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
        cache_dir=Path(folder).expanduser() if folder else default,
        cache=os.environ.get("ATTNDSL_CACHE", "1").lower() not in _FALSE,
        cache_bytes=_megabytes(os.environ.get("ATTNDSL_CACHE_MB", "256")),
        checked=os.environ.get("ATTNDSL_CHECKED", "0").lower() not in _FALSE,
        verify=asks_to_verify(),
    )


def asks_to_verify() -> bool:
    """``Settings.verify`` alone, since every new kind of call asks, and folders take 40 us."""
    return os.environ.get("ATTNDSL_VERIFY", "0").lower() not in _FALSE


def log_level() -> str:
    """``ATTNDSL_LOG``: what is printed of the log, in lower case; empty for nothing."""
    found = os.environ.get("ATTNDSL_LOG", "").strip().lower()
    return "" if found in _FALSE else found


def _megabytes(text: str) -> int:
    from attndsl.errors import ConfigError

    if not text.isdigit():
        raise ConfigError(
            f"ATTNDSL_CACHE_MB is {text[:40]!r}", hint="write a whole number of megabytes"
        )
    return int(text) << 20
