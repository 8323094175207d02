"""The chart of docs/benchmarks.md, from the committed results of benchmarks/attention.py.

python benchmarks/chart.py           # print it as text
python benchmarks/chart.py --write   # draw docs/benchmarks.svg

A bar is the time of another system divided by attndsl's, for every case alike: what a window or a
document mask leaves has no agreed number of operations, so TFLOP/s would leave out half of the
cases, and milliseconds of different shapes cannot share a scale. The scale is logarithmic and bars
start at 1, so that twice as fast and half as fast are equally long.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from html import escape

from comparison import Group, Section, ratios, sections
from table import COLUMNS, DIRECTIONS, RESULTS, ROOT

import common

OUTPUT = ROOT / "docs" / "benchmarks.svg"
# Of Okabe and Ito's palette, those with a contrast of 3 to both backgrounds.
COLOURS = {"flex": "#d55e00", "cudnn": "#009e73", "fa4": "#0072b2"}
LIGHT = {"back": "#ffffff", "ink": "#1b1f24", "faint": "#57606a", "grid": "#d0d7de"}
DARK = {"back": "#0d1117", "ink": "#e6edf3", "faint": "#9198a1", "grid": "#30363d"}

TITLE = "Speed of attndsl beside other attention kernels"
MEANING = "Their time divided by attndsl's: above 1 attndsl is faster, below 1 it is slower."
NOTE = "A system is left out where it cannot run a case. A broken bar is longer than the scale."
LONGEST = 8.0
"""Ratio at which the scale ends, so that one far figure does not flatten all others."""

WIDTH, MARGIN = 900, 24
RIVAL_X, FIRST_X, PANEL, ROOM = 150, 240, 310, 40
PANEL_GAP = WIDTH - MARGIN - FIRST_X - 2 * PANEL
ROW, BAR, CASE_GAP = 15, 11, 4
TEXT_WIDTH = 23


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic scale between two ticks, each numbered by ``tick``."""

    first: int
    last: int

    @classmethod
    def over(cls, ratios: list[float]) -> Scale:
        """The shortest scale with all of ``ratios``, and with ticks on both sides of 1."""
        first, last = -1, 1
        while tick(first) > min(ratios):
            first -= 1
        while tick(last) < max(ratios):
            last += 1
        return cls(first, last)

    def place(self, ratio: float) -> float:
        """Where ``ratio`` lies, 0 at the first tick, 1 at the last."""
        low, high = math.log(tick(self.first)), math.log(tick(self.last))
        return (math.log(ratio) - low) / (high - low)

    def labelled(self) -> list[float]:
        """Ticks that have room for a number; 1 is always one of them."""
        step = 1 + (self.last - self.first) // 9
        return [tick(n) for n in range(self.first, self.last + 1) if n % step == 0]


def tick(number: int) -> float:
    """Powers of two and the numbers halfway between them: 0.75, 1, 1.5, 2, 3, 4 for -1 to 4."""
    return 2.0 ** (number // 2) * (1.5 if number % 2 else 1.0)


def svg(found: list[Section]) -> str:
    """The chart as a drawing, the same bytes for the same results."""
    scale, parts, y = _scale(found), [], MARGIN + 60
    for section in found:
        parts.append(_text(MARGIN, y, section.heading, "h"))
        y += 22
        for group in section.groups:
            parts += [f'<g transform="translate(0,{y})">', *_panels(group, scale), "</g>"]
            y += _bottom(group) + 34
        parts.append(_text(MARGIN, y - 6, section.conditions, "f"))
        y += 32
    height = y - 14
    summary = [f"{section.heading}. {_ranges(section)} {section.conditions}" for section in found]
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="title desc">',
        f'<title id="title">{TITLE}</title>',
        f'<desc id="desc">{escape(" ".join([MEANING, *summary]), quote=False)}</desc>',
        "<style>",
        _style(LIGHT),
        "".join(f".{column}{{fill:{colour}}}" for column, colour in COLOURS.items()),
        "text{font:11px sans-serif}.t{font:600 16px sans-serif}.h{font:600 14px sans-serif}",
        ".s{font:600 11.5px sans-serif}.e{text-anchor:end}.m{text-anchor:middle}",
        # A figure stays readable where a line of the grid runs through it.
        ".v{paint-order:stroke;stroke-width:3px}.break{stroke-width:3px}",
        f"@media (prefers-color-scheme:dark){{{_style(DARK)}}}",
        "</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
        _text(MARGIN, MARGIN, TITLE, "t"),
        _text(MARGIN, MARGIN + 18, MEANING, "f"),
        _text(MARGIN, MARGIN + 33, NOTE, "f"),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def text(found: list[Section]) -> str:
    """The chart in ASCII, no line over 100 characters."""
    scale, lines = _scale(found), [TITLE, MEANING, NOTE]
    for section in found:
        lines += ["", section.heading]
        for group in section.groups:
            heads = [f"{name:<{TEXT_WIDTH + 11}}" for name in DIRECTIONS.values()]
            lines += ["", group.size, f"{'':33}{''.join(heads)}".rstrip()]
            for row in group.rows:
                cells = "".join(f"{_figure(r):>6} {_bar(r, scale)}   " for r in row.ratios)
                lines.append(f"{row.case:<19}{COLUMNS[row.column]:<13} {cells}".rstrip())
        lines += ["", section.conditions]
    return "\n".join([*lines, ""])


def main() -> int:
    """Print the chart, or draw it; 1 if the results do not allow it."""
    return common.print_or_draw(__file__, __doc__, OUTPUT, lambda: sections(RESULTS), text, svg)


def _scale(found: list[Section]) -> Scale:
    return Scale.over([min(ratio, LONGEST) for ratio in ratios(found)])


def _ranges(section: Section) -> str:
    """The lowest and the highest figure of each system, for who cannot see the bars."""
    rows = [row for group in section.groups for row in group.rows]
    parts = []
    for column in section.columns:
        for place, direction in enumerate(DIRECTIONS.values()):
            measured = [row.ratios[place] for row in rows if row.column == column]
            found = sorted(ratio for ratio in measured if ratio is not None)
            if found:
                ends = " to ".join(dict.fromkeys(_figure(ratio) for ratio in (found[0], found[-1])))
                parts.append(f"{COLUMNS[column]}, {direction}: {ends}.")
    return " ".join(parts)


def _offsets(group: Group) -> list[int]:
    """The top of each row, with room between cases."""
    tops, y = [], 12
    for place, row in enumerate(group.rows):
        if place and row.case != group.rows[place - 1].case:
            y += CASE_GAP
        tops.append(y)
        y += ROW
    return tops


def _bottom(group: Group) -> int:
    return _offsets(group)[-1] + ROW


def _panels(group: Group, scale: Scale) -> list[str]:
    tops, bottom, case = _offsets(group), _bottom(group), None
    parts = [_text(MARGIN, 0, group.size, "s")]
    for row, top in zip(group.rows, tops, strict=True):
        if row.case != case:
            parts.append(_text(MARGIN, top + 10, row.case, ""))
        case = row.case
        parts.append(_text(RIVAL_X, top + 10, COLUMNS[row.column], "f"))
    for place, direction in enumerate(DIRECTIONS.values()):
        left = FIRST_X + place * (PANEL + PANEL_GAP)
        parts.append(_text(left + PANEL, 0, direction, "s e"))
        for mark in scale.labelled():
            x, kind = _x(left, scale, mark), "one" if mark == 1 else "grid"
            parts.append(f'<path class="{kind}" d="M{x:.1f} 9V{bottom}"/>')
            parts.append(_text(x, bottom + 12, f"{mark:g}", "f m"))
        for row, top in zip(group.rows, tops, strict=True):
            parts += _mark(row.column, row.ratios[place], left, top, scale)
    return parts


def _mark(column: str, ratio: float | None, left: int, top: int, scale: Scale) -> list[str]:
    one = _x(left, scale, 1)
    if ratio is None:
        return [_text(one + 5, top + 10, _figure(ratio), "v")]
    most = tick(scale.last)
    end = _x(left, scale, min(ratio, most))
    figure = (end + 4, "v") if ratio >= 1 else (end - 4, "v e")
    parts = [
        f'<rect class="{column}" x="{min(one, end):.1f}" y="{top + 1}" '
        f'width="{abs(end - one):.1f}" height="{BAR}"/>',
        _text(figure[0], top + 10, _figure(ratio), figure[1]),
    ]
    if ratio > most:
        parts.append(f'<path class="break" d="M{end - 16:.1f} {top + 1 + BAR}l6 -{BAR}"/>')
    return parts


def _x(left: int, scale: Scale, ratio: float) -> float:
    return left + ROOM + scale.place(ratio) * (PANEL - 2 * ROOM)


def _text(x: float, y: float, words: str, kinds: str) -> str:
    kind = f' class="{kinds}"' if kinds else ""
    return f'<text x="{x:.1f}" y="{y}"{kind}>{escape(words, quote=False)}</text>'


def _style(colours: dict[str, str]) -> str:
    return (
        "text{{fill:{ink}}}.f{{fill:{faint}}}.back{{fill:{back}}}.grid{{stroke:{grid}}}"
        ".one{{stroke:{ink}}}.v,.break{{stroke:{back}}}"
    ).format(**colours)


def _bar(ratio: float | None, scale: Scale) -> str:
    one = scale.place(1)
    shown = 1.0 if ratio is None else min(ratio, tick(scale.last))
    length = (scale.place(shown) - one) * TEXT_WIDTH
    left, right = "#" * round(-length), "#" * round(length)
    before = round(one * TEXT_WIDTH)
    return f"{left:>{before}}|{right:<{TEXT_WIDTH - before}}"


def _figure(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.3g}"


if __name__ == "__main__":
    sys.exit(main())
