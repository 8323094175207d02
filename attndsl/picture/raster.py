"""PNG and PDF pictures, by matplotlib, which is imported when the first one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.source import shorten

from .text_picture import ascii_only
from .vector import DEAD, INK, KIND_COLOURS, ODD, PAPER, SCALE

if TYPE_CHECKING:
    from os import PathLike

    from .data import PictureData

_SIDE = 3.6
"""Inches of a panel."""


def png(data: PictureData, path: str | PathLike[str]) -> None:
    """Write ``data`` as a PNG file; see :func:`by_matplotlib`."""
    by_matplotlib(data, path, "png")


def by_matplotlib(data: PictureData, path: str | PathLike[str], kind: str) -> None:
    """Write ``data`` as a file of ``kind``, ``png`` or ``pdf``.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ArgumentError: The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"{kind.upper()} pictures need matplotlib, which cannot be imported: {error}",
            hint="pip install 'attndsl[plot]', or write .svg, .html or .txt, which need nothing",
        ) from error
    count = 2 + data.shows_scores + (data.curve is not None)
    # A figure of its own, not pyplot's: nothing of the program's state is touched.
    figure = Figure(figsize=(count * (_SIDE + 0.9), _SIDE + 1.4), dpi=150, layout="constrained")
    _draw(data, figure, count)
    # No time of writing, so that equal pictures are equal files.
    metadata = {"CreationDate": None} if kind == "pdf" else None
    try:
        figure.savefig(path, format=kind, metadata=metadata)
    except OSError as error:
        raise ArgumentError(
            f"cannot write {path}: {error.strerror or error}",
            hint="give a file in a folder that exists and may be written to",
        ) from error


def _draw(data: PictureData, figure: Any, count: int) -> None:
    from matplotlib.colors import ListedColormap

    figure.set_facecolor(PAPER)
    # Not mathematics, whatever signs the program's text has.
    title = ascii_only(shorten(data.title, 35 * count))
    figure.suptitle(title, parse_math=False, fontsize=10)
    axes = figure.subplots(1, count)
    right, bottom = data.kv_offset + data.kv_len, data.q_offset + data.q_len
    how: dict[str, Any] = {
        "extent": (data.kv_offset, right, bottom, data.q_offset),
        "interpolation": "nearest",
        "aspect": "auto",
    }
    tiles = data.kinds.repeat_interleave(data.block_m, 0)[: data.q_len]
    tiles = tiles.repeat_interleave(data.block_n, 1)[:, : data.kv_len]
    kinds: dict[str, Any] = {"cmap": ListedColormap(KIND_COLOURS), "vmin": 0, "vmax": 2, **how}
    axes[0].set_title("pairs kept", fontsize=9)
    pairs = ListedColormap([PAPER, INK])
    axes[0].imshow(data.mask.numpy(), cmap=pairs, vmin=0, vmax=1, **how)
    axes[0].imshow(tiles.numpy(), alpha=0.4, **kinds)
    axes[1].set_title("tiles", fontsize=9)
    axes[1].imshow(tiles.numpy(), **kinds)
    if data.shows_scores:
        low, high = data.score_range or (0.0, 0.0)
        odd = data.mask & ~data.score.isfinite()
        finite = data.score.where(data.score.isfinite(), float("nan"))
        axes[2].set_title(f"score of a raw score of {data.raw_score:g}", fontsize=9)
        # Scores that are not finite are left out of the second image, and show the first.
        axes[2].imshow(odd.numpy(), cmap=ListedColormap([DEAD, ODD]), vmin=0, vmax=1, **how)
        image = axes[2].imshow(
            finite.numpy(), cmap=ListedColormap(SCALE), vmin=low, vmax=high, **how
        )
        figure.colorbar(image, ax=axes[2])
    for panel in axes[: 2 + data.shows_scores]:
        panel.set_xlabel("key position")
        panel.set_ylabel("query position")
    if data.curve is not None:
        panel = axes[-1]
        panel.set_title(data.curve.caption, fontsize=9)
        shown = data.curve.value.where(data.curve.live, float("nan"))
        panel.plot(data.curve.raw.numpy(), shown.numpy(), color=KIND_COLOURS[2])
        panel.grid(visible=True, color=DEAD)
        panel.set_xlabel("raw score")
        panel.set_ylabel(data.curve.what)
    figure.supxlabel("\n".join((data.summary, data.place, *data.remarks)), fontsize=8)
