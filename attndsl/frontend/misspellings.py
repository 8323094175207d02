"""Names that differ by a slip of the keys: ``casual`` for ``causal``, ``Score`` for ``score``.

Non-goals: other words that look alike. ``window`` is no ``in_window``, and ``cap`` no ``clamp``.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHORTEST = 4
"""Letters of a name that may have a slip: most names of fewer letters are others."""
_LONG = 8
"""Letters from which a name may have more than one."""
_LIKE = 0.85
"""Least likeness of a name to the one it may be a slip of, from 0 to 1."""
_SHOWN = 100
"""Letters of a name that are compared."""


def meant(name: str, names: Iterable[str]) -> str | None:
    """The first of the names that ``name`` may be a slip of, or None."""
    lowered: dict[str, str] = {}
    for each in names:
        lowered.setdefault(each.lower(), each)
    written = name[:_SHOWN].lower()
    if written in lowered:
        return lowered[written]
    if len(written) < _SHORTEST:
        return None
    for each, found in lowered.items():
        if len(each) >= _SHORTEST and _is_slip(written, each):
            return found
    if len(written) < _LONG:
        return None
    close = difflib.get_close_matches(written, list(lowered), 1, _LIKE)
    return lowered[close[0]] if close else None


def _is_slip(a: str, b: str) -> bool:
    """Tell whether one letter is wrong, missing or too many, or two letters have changed places."""
    if abs(len(a) - len(b)) > 1:
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if start is None:
        return True
    a, b = a[start:], b[start:]
    if a[2:] == b[2:] and a[:2] == b[1::-1]:
        return True
    return a[len(a) >= len(b) :] == b[len(b) >= len(a) :]
