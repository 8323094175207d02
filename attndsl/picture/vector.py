"""SVG pictures, by hand: nothing to install, and nothing that reaches outside the picture.

Pictures are put into notebooks' pages, so there are no ids, no styles and no scripts in them, and
they bring a background of their own. Colours are told apart by the colour-blind too: those of kinds
are Okabe and Ito's, those of scores are viridis.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import torch

from attndsl.source import shorten

if TYPE_CHECKING:
    from .curve import Curve
    from .data import PictureData

KIND_COLOURS = ("#e8eaed", "#e69f00", "#0072b2")
"""Colours of EMPTY, PARTIAL and FULL."""
SCALE = (
    "#440154", "#481a6c", "#472f7d", "#414487", "#39568c", "#31688e", "#2a788e", "#23888e",
    "#1f988b", "#22a884", "#35b779", "#54c568", "#7ad151", "#a5db36", "#d2e21b", "#fde725",
)  # fmt: skip
"""Colours of scores, from the least to the greatest."""
INK, PAPER, DEAD, ODD = "#1b1f24", "#ffffff", "#e8eaed", "#cc79a7"
_FAINT = "#57606a"

_SIDE = 256
"""Pixels of a panel's longer side, and the most cells that are drawn along it."""
_LEAST = 24
_RIGHT, _TOP, _BOTTOM, _GAP = 20, 66, 44, 24
_BAR = 96
"""Room for the scale of scores."""
_LETTER = 6.5
"""Pixels of a letter or digit, at most, at the size of labels."""
_SHADES = 4
_LEAST_TILE = 3
"""Pixels of a tile, below which neither its edges nor its colour over the pairs can be seen."""
_LEAST_CURVE = 120
"""Pixels of a curve's sides, at least: a few queries make panels flat."""


def svg(data: PictureData) -> str:
    """``data`` as a stand-alone SVG: pairs with their tiles, tiles, and scores if they change."""
    longest = max(data.q_len, data.kv_len)
    width = max(_LEAST, round(_SIDE * data.kv_len / longest))
    height = max(_LEAST, round(_SIDE * data.q_len / longest))
    left = _row_label_width(data) + 30
    # Narrow panels have room for their captions too.
    step = left + max(width, 110) + _GAP
    axes = _axes(data, width, height)
    panels = [
        ("mask", "pairs kept", _mask(data, width, height) + axes, step),
        ("tiles", "tiles", _tiles(data, width, height, 1.0) + axes, step),
    ]
    if data.shows_scores:
        caption = f"score of a raw score of {data.raw_score:g}"
        panels.append(("score", caption, _scores(data, width, height) + axes, step + _BAR))
    tall = height
    if data.curve is not None:
        tall, across = max(height, _LEAST_CURVE), max(width, _LEAST_CURVE)
        room = max(across + _BAR, _letters(data.curve.caption)) + left
        panels.append(("curve", data.curve.caption, _curve(data.curve, across, tall), room))
    legend, legend_width = _legend(data)
    notes = [data.place, *data.remarks, *_cell_note(data)]
    total = max(
        sum(room for *_, room in panels) + _RIGHT,
        left + _RIGHT + max(legend_width, *(_letters(note) for note in notes)),
    )
    foot = _TOP + tall + _BOTTOM
    total_height = foot + 30 + 16 * len(notes)
    # A letter of this font is 0.6 of its size wide.
    title = shorten(data.title, int((total - left - _RIGHT) / 7.9))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {total} {total_height}" '
        f'width="{total}" height="{total_height}" font-family="sans-serif" font-size="11">',
        f"<title>{_safe(shorten(data.title, 400))}</title>",
        f"<desc>{_safe(data.summary)}</desc>",
        f'<rect width="{total}" height="{total_height}" fill="{PAPER}"/>',
        _text(left, 24, title, INK, 'font-family="monospace" font-size="13"'),
    ]
    x = left
    for name, caption, inside, room in panels:
        parts.append(f'<g data-panel="{name}" transform="translate({x},{_TOP})">')
        parts.append(_text(0, -10, caption, INK, 'font-weight="bold"'))
        parts += [*inside, "</g>"]
        x += room
    parts.append(f'<g data-panel="legend" transform="translate({left},{foot + 10})">')
    parts += legend
    for number, note in enumerate(notes):
        parts.append(_text(0, 26 + 16 * number, note, _FAINT))
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _mask(data: PictureData, width: int, height: int) -> list[str]:
    cells = _cells(data)
    share = _means(data.mask.to(torch.float64), cells)
    levels = (share * _SHADES).ceil().to(torch.int64)
    colours = {
        level: f'stroke="{INK}" stroke-opacity="{level / _SHADES:g}"'
        for level in range(1, _SHADES + 1)
    }
    return [
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        *_raster(levels, colours, *_shape(data), f'width="{width}" height="{height}"'),
        *_tiles(data, width, height, 0.4),
    ]


def _tiles(data: PictureData, width: int, height: int, opacity: float) -> list[str]:
    """Kinds of tiles, and their edges unless they are too near each other."""
    rows, columns = data.q_len / data.block_m, data.kv_len / data.block_n
    visible = min(width / columns, height / rows) >= _LEAST_TILE
    parts = []
    if opacity == 1:
        # EMPTY tiles of the mask stay white: a wash of grey would look like live pairs.
        parts.append(f'<rect width="{width}" height="{height}" fill="{KIND_COLOURS[0]}"/>')
    if visible or opacity == 1:
        colours = {
            kind: f'stroke="{KIND_COLOURS[kind]}" stroke-opacity="{opacity:g}"' for kind in (1, 2)
        }
        sides = f'width="{width}" height="{height}"'
        parts += _raster(data.kinds.to(torch.int64), colours, rows, columns, sides)
    if visible:
        lines = "".join(
            f"M{_px(j * width / columns)} 0V{height}" for j in range(1, data.kinds.shape[1])
        )
        lines += "".join(
            f"M0 {_px(i * height / rows)}H{width}" for i in range(1, data.kinds.shape[0])
        )
        if lines:
            parts.append(
                f'<path d="{lines}" stroke="{_FAINT}" stroke-opacity="0.6" stroke-width="0.5" '
                f'fill="none"/>'
            )
    return parts


def _scores(data: PictureData, width: int, height: int) -> list[str]:
    cells = _cells(data)
    finite = data.score.isfinite()
    odd = _means((data.mask & ~finite).to(torch.float64), cells) > 0
    low, high = data.score_range or (0.0, 0.0)
    # Halved, so that no difference of two finite scores overflows.
    span = high / 2 - low / 2
    place = (data.score.nan_to_num(0.0, 0.0, 0.0) / 2 - low / 2) / (span or 1.0)
    share = _means(finite.to(torch.float64), cells)
    mean = _means(torch.where(finite, place, 0.0), cells) / share
    levels = (mean * len(SCALE)).floor().clamp(0, len(SCALE) - 1).nan_to_num(-1.0).to(torch.int64)
    levels = levels.masked_fill(share == 0, -1).masked_fill(odd, len(SCALE))
    colours = {level: f'stroke="{colour}"' for level, colour in enumerate((*SCALE, ODD))}
    parts = [
        f'<rect width="{width}" height="{height}" fill="{DEAD}"/>',
        *_raster(levels, colours, *_shape(data), f'width="{width}" height="{height}"'),
    ]
    if data.score_range is not None:
        step = height / len(SCALE)
        for level, colour in enumerate(SCALE):
            parts.append(
                f'<rect x="{width + 12}" y="{_px(height - (level + 1) * step)}" width="12" '
                f'height="{_px(step)}" fill="{colour}" shape-rendering="crispEdges"/>'
            )
        parts.append(_text(width + 28, 9, f"{high:.4g}", INK))
        parts.append(_text(width + 28, height, f"{low:.4g}", INK))
    return parts


def _curve(curve: Curve, width: int, height: int) -> list[str]:
    """A line for each run of finite values, and thin ones where the two axes are."""
    ends = curve.ends
    # Halved, so that no difference of two finite values overflows.
    low, high = (-0.5, 0.5) if ends is None else (ends[0] / 2, ends[1] / 2)
    if low == high:
        room = max(0.5, abs(low) / 8)
        low, high = low - room, high + room
    up = height - (curve.value / 2 - low) / (high - low) * height
    across = torch.linspace(0.0, width, up.numel(), dtype=torch.float64, device="cpu")
    parts, pen = [], "M"
    drawn = curve.live & up.isfinite()
    for x, y, there in zip(across.tolist(), up.tolist(), drawn.tolist(), strict=True):
        if there:
            parts.append(f"{pen}{_px(x)} {_px(y)}")
        pen = "L" if there else "M"
    zero = height + low / (high - low) * height
    lines = f"M{_px(width / 2)} 0V{height}" + f"M0 {_px(zero)}H{width}" * (0 <= zero <= height)
    reach = float(curve.raw[-1])
    marks = (("start", 0.0, -reach), ("middle", width / 2, 0.0), ("end", float(width), reach))
    return [
        f'<rect width="{width}" height="{height}" fill="{PAPER}" stroke="{_FAINT}"/>',
        f'<path d="{lines}" stroke="{DEAD}" fill="none"/>',
        f'<path d="{"".join(parts)}" stroke="{KIND_COLOURS[2]}" stroke-width="2" fill="none"/>',
        *(_text(_px(x), height + 15, f"{n:g}", _FAINT, f'text-anchor="{anchor}"')
          for anchor, x, n in marks),
        _text(_px(width / 2), height + 30, "raw score", INK, 'text-anchor="middle"'),
        *([] if ends is None else [
            _text(width + 6, 9, f"{ends[1]:.4g}", INK),
            _text(width + 6, height, f"{ends[0]:.4g}", INK),
        ]),
    ]  # fmt: skip


def _axes(data: PictureData, width: int, height: int) -> list[str]:
    parts = [
        f'<rect width="{width}" height="{height}" fill="none" stroke="{_FAINT}" stroke-width="1"/>'
    ]
    room = _letters(str(data.kv_offset + data.kv_len)) + 10
    for index in _ticks(data.kv_len, width, room):
        x = _px(width * index / data.kv_len)
        parts.append(f'<path d="M{x} {height}v4" stroke="{_FAINT}" fill="none"/>')
        label = str(data.kv_offset + index)
        parts.append(_text(x, height + 15, label, _FAINT, 'text-anchor="middle"'))
    for index in _ticks(data.q_len, height, 18):
        y = height * index / data.q_len
        parts.append(f'<path d="M0 {_px(y)}h-4" stroke="{_FAINT}" fill="none"/>')
        label = str(data.q_offset + index)
        parts.append(_text(-6, _px(y + 4), label, _FAINT, 'text-anchor="end"'))
    parts.append(_text(_px(width / 2), height + 30, "key position", INK, 'text-anchor="middle"'))
    # Where the panel is flat it begins at the panel's end, so as not to run into the caption.
    anchor, y = ("middle", height / 2) if height >= 90 else ("start", height)
    turn = f"translate(-{_row_label_width(data) + 14},{_px(y)}) rotate(-90)"
    more = f'text-anchor="{anchor}" transform="{turn}"'
    parts.append(_text(0, 0, "query position" if height >= 90 else "query", INK, more))
    return parts


def _row_label_width(data: PictureData) -> int:
    ends = (data.q_offset, data.q_offset + data.q_len)
    return max(_letters(str(end)) for end in ends) + 6


def _legend(data: PictureData) -> tuple[list[str], int]:
    """Its elements, and its width."""
    rows = [
        (colour, f"{count} {name}")
        for (name, count), colour in zip(data.counts.items(), reversed(KIND_COLOURS), strict=True)
    ]
    rows.append((INK, data.live))
    odd = int((data.mask & ~data.score.isfinite()).sum())
    if data.shows_scores and odd:
        rows.append((ODD, f"{odd} scores that are not finite"))
    parts = []
    x = 0
    for colour, label in rows:
        parts.append(f'<rect x="{x}" y="-10" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 16, 0, label, INK))
        x += 30 + _letters(label)
    return parts, x


def _cell_note(data: PictureData) -> list[str]:
    by_row, by_column = _cells(data)
    if by_row == by_column == 1:
        return []
    return [f"each cell is the mean of {by_row} x {by_column} pairs (queries x keys)"]


def _cells(data: PictureData) -> tuple[int, int]:
    """Queries and keys of a cell."""
    return -(-data.q_len // _SIDE), -(-data.kv_len // _SIDE)


def _shape(data: PictureData) -> tuple[float, float]:
    """Cells drawn down and across."""
    by_row, by_column = _cells(data)
    return data.q_len / by_row, data.kv_len / by_column


def _means(values: torch.Tensor, cells: tuple[int, int]) -> torch.Tensor:
    """Means of ``values`` (q_len, kv_len) over each cell, the last ones cut off."""
    for dim, size in enumerate(cells):
        if size > 1:
            place = torch.arange(values.shape[dim], device="cpu") // size
            shape = list(values.shape)
            shape[dim] = int(place[-1]) + 1
            total = torch.zeros(shape, dtype=torch.float64, device="cpu").index_add_(
                dim, place, values
            )
            count = place.bincount()
            values = total / (count[:, None] if dim == 0 else count)
    return values


def _raster(
    levels: torch.Tensor, colours: dict[int, str], rows: float, columns: float, sides: str
) -> list[str]:
    """A path for each colour, of strokes along rows; levels without a colour are left out.

    ``rows`` and ``columns`` are fractions where the last cells are cut off.
    """
    paths: dict[int, list[str]] = {level: [] for level in colours}
    for y, row in enumerate(levels.tolist()):
        ends: dict[int, int] = {}
        for level, x, count in _runs(row):
            if level in paths:
                # Relative moves within a row: shorter than the absolute ones.
                start = f"m{x - ends[level]} 0" if level in ends else f"M{x} {y}"
                paths[level].append(f"{start}h{count}")
                ends[level] = x + count
    # A stroke of width 1 lies half a cell below and above its line.
    return [
        f'<svg {sides} viewBox="0 -0.5 {columns:.8g} {rows:.8g}" preserveAspectRatio="none" '
        f'fill="none" stroke-width="1" shape-rendering="crispEdges">',
        *(f'<path {colours[level]} d="{"".join(path)}"/>' for level, path in paths.items() if path),
        "</svg>",
    ]


def _runs(row: list[int]) -> list[tuple[int, int, int]]:
    """Equal neighbours together: value, first place, count."""
    found = []
    place = 0
    for value, equal in groupby(row):
        count = sum(1 for _ in equal)
        found.append((value, place, count))
        place += count
    return found


def _ticks(length: int, pixels: int, room: int) -> range:
    """Positions of labels: a power of two apart, and at least ``room`` pixels."""
    step = 1
    while pixels * step < room * length:
        step *= 2
    return range(0, length, step)


def _letters(shown: str) -> int:
    """Pixels that ``shown`` needs at the size of labels."""
    return round(_LETTER * len(shown))


def _text(x: object, y: object, shown: str, colour: str, more: str = "") -> str:
    more = f" {more}" if more else ""
    return f'<text x="{x}" y="{y}" fill="{colour}"{more}>{_safe(shown)}</text>'


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _safe(shown: str) -> str:
    return escape(shown, {'"': "&quot;", "'": "&apos;"})
