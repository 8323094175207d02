"""``attndsl run --decode``: a few rows at the end of a cache of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .usage_errors import UsageError

if TYPE_CHECKING:
    from .run_command import Shapes

ROOM = 4096
"""Keys of a cache where neither the room nor lengths are given."""
_MOST_ENTRIES = 4096


def shapes_of(shapes: Shapes, room: int | None, lengths: str | None, backward: bool) -> Shapes:
    """``shapes`` of a call that decodes.

    Args:
        shapes: Those of a call from position 0.
        room: Keys that the cache has room for; by default as many as the longest entry has.
        lengths: Numbers of keys by commas; by default each entry fills the room. Empty where the
            call does not decode.
        backward: Whether gradients are asked for.

    Raises:
        UsageError: What cannot be, and what to give instead.
    """
    if lengths == "":
        raise UsageError("--lengths are those of a cache", hint="add --decode")
    if backward:
        raise UsageError("decoding has no backward", hint="leave --backward or --decode out")
    if lengths is None:
        room = ROOM if room is None else room
        return replace(shapes, kv_len=room, lengths=(room,) * shapes.batch)
    keys = _numbers(lengths)
    if shapes.batch not in (1, len(keys)):
        raise UsageError(
            f"there are {len(keys)} lengths and {shapes.batch} batch entries",
            hint=f"leave --batch out, or give {shapes.batch} lengths",
        )
    room = max(keys) if room is None else room
    return replace(shapes, batch=len(keys), kv_len=room, lengths=keys)


def _numbers(lengths: str) -> tuple[int, ...]:
    parts = [part.strip() for part in lengths.split(",")]
    if len(parts) > _MOST_ENTRIES or not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(
            f"--lengths {lengths[:60]!r} are no whole numbers by commas",
            hint="write --lengths 100,2000,37",
        )
    return tuple(map(int, parts))
