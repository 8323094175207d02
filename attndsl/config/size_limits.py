"""Limits on the size of a configuration, which keep any file from filling or hanging anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import ConfigError

if TYPE_CHECKING:
    from attndsl.source import Span

MAX_ENTRIES = 1000
"""Programs of a configuration, as its schema says."""
MAX_KEYS = 6000
"""Keys within all entries: params, and the words ``program``, ``params`` and ``description``."""
MAX_DESCRIPTION = 4096
"""Characters of a description, as the schema says."""
MAX_DEPTH = 64
"""Mappings and lists within each other, in the whole file."""
MAX_NODES = 20_000
"""Names, texts, numbers, mappings and lists of a YAML file, and as many again by aliases."""


def check_counts(entries: int, keys: int, name: str, at: Span | None = None) -> None:
    """Refuse more entries, or more keys within them, than any model has.

    Raises:
        ConfigError: There are more.
    """
    for count, most, what in ((entries, MAX_ENTRIES, "entries"), (keys, MAX_KEYS, "keys in them")):
        if count > most:
            raise ConfigError(f"{name} has more than {most} {what}", at, "split it")
