"""Plain-text pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.passes.tiles.tile_plan import EMPTY, FULL, PARTIAL
from attndsl.source import shorten

if TYPE_CHECKING:
    from .data import PictureData

_CHARACTERS = {EMPTY: ".", PARTIAL: "+", FULL: "#"}


def text(data: PictureData) -> str:
    """``data`` in plain ASCII, one character a tile: ``.`` EMPTY, ``+`` PARTIAL, ``#`` FULL."""
    rows = [str(data.q_offset + i * data.block_m) for i in range(data.kinds.shape[0])]
    columns = [str(data.kv_offset + j * data.block_n) for j in range(data.kinds.shape[1])]
    width = max(map(len, rows))
    # Labels of columns as dense as they can be without touching.
    step = 1 + max(map(len, columns))
    labels = "".join(label.ljust(step) for label in columns[::step]).rstrip()
    marks = "".join("|".ljust(step) for _ in columns[::step]).rstrip()
    lines = [ascii_only(shorten(data.title, 100)), data.place, ""]
    lines += [f"{'':{width}} {labels}", f"{'':{width}} {marks}"]
    for label, kinds in zip(rows, data.kinds.tolist(), strict=True):
        lines.append(f"{label:>{width}} " + "".join(_CHARACTERS[kind] for kind in kinds))
    lines += ["", "rows are queries, columns are keys; # FULL, + PARTIAL, . EMPTY", data.summary]
    lines += data.remarks
    if data.shows_scores:
        ends = data.score_range
        span = "nowhere finite" if ends is None else f"{ends[0]:.4g} to {ends[1]:.4g}"
        lines.append(f"scores of live pairs, from a raw score of {data.raw_score:g}: {span}")
    if data.curve is not None:
        lines.append(data.curve.line)
    return "\n".join(lines) + "\n"


def ascii_only(shown: str) -> str:
    """``shown`` with a ``?`` for every character that is not ASCII."""
    return shown.encode("ascii", "replace").decode()
