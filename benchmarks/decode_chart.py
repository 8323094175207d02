"""The chart docs/decode.svg: bandwidth of decoding beside SDPA and FlexAttention.

python benchmarks/decode_chart.py           # print its figures
python benchmarks/decode_chart.py --write   # draw docs/decode.svg

A bar has the terabytes a second of live bytes of one system at one row of decode.json, and a line
the bandwidth of a copy. So a system that reads keys that no query may see has a short bar.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any

import decoding
from chart import COLOURS as OTHERS
from chart import DARK, LIGHT
from table import ROOT, conditions, load

import common

OUTPUT = ROOT / "docs" / "decode.svg"
COLOURS = {"sdpa": "#cc79a7", "flex": OTHERS["flex"]}
"""Of Okabe and Ito's palette, with a contrast of 3 to both backgrounds."""
TITLE = "Decoding: TB/s of live keys and values"
MEANING = "Longer is faster. Calls in CUDA graphs, nothing in the L2 cache."
OWN = "attndsl"
GROUPS = ("One query, plain scores", "More queries", "Windows, scores, sinks, lengths of requests")
ABSENT = {
    "cannot": "No such score, or no sinks",
    "slow": "No answer in time",
    "memory": "Out of memory",
    decoding.FAILED: "Not measured, since the benchmark failed",
}
"""What notes say for the word of a reason."""
FAR = 3.0
"""Quotient from which on a time is said in words too."""

WIDTH, MARGIN, HEAD = 460, 16, 108
LEFT, RIGHT, TBS = 96, 356, 400
"""Where bars begin, where the longest one ends, and where figures end. Times end at the margin."""
BAR, BAR_GAP, ROW_GAP, GROUP_GAP = 13, 2, 11, 34
LINE = 66
"""Letters of a note in one line."""
LABELS = 28
"""Height of a row's two labels."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One system at one row."""

    system: str
    tbs: float
    us: float


@dataclass(frozen=True, slots=True)
class Line:
    """One row, with a bar for each system that was measured."""

    name: str
    size: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn: rows by group, the bandwidth of a copy, and what stands beside them."""

    groups: dict[str, tuple[Line, ...]]
    copy: float
    notes: tuple[str, ...]
    conditions: str


def chart(results: dict[str, Any]) -> Chart:
    """The figures of a result file of benchmarks/decode.py.

    Raises:
        ValueError: It has no bandwidth of a copy, or no time of ours.
    """
    copy, rows = decoding.copy_tbs(results), decoding.calls(results["rows"])
    if copy is None or not rows:
        raise ValueError("decode.json has no bandwidth of a copy, or no rows")
    for row in rows:
        if row.get(f"{OWN}_device") is None:
            raise ValueError(f"decode.json has no time of attndsl at {row['name']!r}")
    groups = {
        group: tuple(_line(row) for row in rows if _group(row) == group)
        for group in GROUPS
        if any(_group(row) == group for row in rows)
    }
    return Chart(groups, copy, tuple(_notes(rows)), conditions(results))


def svg(found: Chart) -> str:
    """The chart as a drawing, the same bytes for the same figures."""
    parts, y = _legend(found), HEAD
    for group, lines in found.groups.items():
        parts.append(_text(MARGIN, y, group, "h"))
        bars, end = [], y + 14
        for row in lines:
            bars += _bars(row, end, found)
            end += _height(row) + ROW_GAP
        parts += [*_grid(found, y + 9, end - ROW_GAP + 5), *bars]
        y = end - ROW_GAP + GROUP_GAP
    y -= 10
    parts += [_text(_x(mark, found), y, f"{mark}", "f m") for mark in _marks(found)]
    y += 30
    for note in (*found.notes, found.conditions):
        for line in wrap(note, LINE):
            parts.append(_text(MARGIN, y, line, "f"))
            y += 15
        y += 3
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'width="{WIDTH}" height="{y}" role="img" aria-labelledby="title desc">',
        f'<title id="title">{TITLE}</title>',
        f'<desc id="desc">{escape(_said(found), quote=False)}</desc>',
        "<style>",
        _style(LIGHT),
        "".join(f".{name}{{fill:{colour}}}" for name, colour in COLOURS.items()),
        "text{font:12px sans-serif}.t{font:600 16px sans-serif}.h{font:600 13px sans-serif}",
        ".n{font:11px sans-serif}.o{font:600 11px sans-serif}.f{font:11px sans-serif}",
        ".e{text-anchor:end}.m{text-anchor:middle}",
        f"@media (prefers-color-scheme:dark){{{_style(DARK)}}}",
        "</style>",
        f'<rect class="back" width="{WIDTH}" height="{y}"/>',
        _text(MARGIN, MARGIN + 8, TITLE, "t"),
        _text(MARGIN, MARGIN + 28, MEANING, "f"),
        _text(TBS, HEAD, "TB/s", "f e"),
        _text(WIDTH - MARGIN, HEAD, "us", "f e"),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def text(found: Chart) -> str:
    """The figures as a table of plain text."""
    names = "".join(f"{name:>26}" for name in decoding.SYSTEMS.values())
    lines = [TITLE, "", f"{'':<24}{names}"]
    for line in (line for lines in found.groups.values() for line in lines):
        words = {bar.system: f"{bar.tbs:.2f}, {_us(bar.us)} us" for bar in line.bars}
        cells = "".join(f"{words.get(system, '-'):>26}" for system in decoding.SYSTEMS)
        lines.append(f"{line.name:<12}{line.size:<12}{cells}")
    copy = f"A copy: {found.copy:.2f}."
    return "\n".join([*lines, "", copy, *found.notes, found.conditions, ""])


def committed() -> Chart:
    """The chart of the committed file.

    Raises:
        ValueError: It is missing.
    """
    results = load(decoding.DECODE)
    if results is None:
        raise ValueError("there is no benchmarks/results/decode.json")
    return chart(results)


def main() -> int:
    """Print the figures, or draw them; 1 if the result file is missing."""
    return common.print_or_draw(__file__, __doc__, OUTPUT, committed, text, svg)


def _group(row: decoding.Row) -> str:
    if row["ragged"] or row["program"] != decoding.PLAIN:
        return GROUPS[2]
    return GROUPS[0] if row["q_len"] == 1 else GROUPS[1]


def _line(row: decoding.Row) -> Line:
    bars = tuple(
        Bar(system, row[f"{system}_tbs"], row[f"{system}_device"])
        for system in decoding.SYSTEMS
        if row.get(f"{system}_device") is not None
    )
    size = f"B{row['batch']} x {row['kv_len'] // 1024}k"
    # Some rows have their size for a name. Requests of their own lengths have no one size.
    return Line(row["name"], "" if row["ragged"] or size == row["name"] else size, bars)


def _notes(rows: list[decoding.Row]) -> list[str]:
    notes = [
        "B8 x 32k: batch 8, 32768 keys. If not named, 32/8 heads, dim 128.",
        *_few(rows),
        "A copy writes half of its bytes, decoding next to none.",
    ]
    for system in COLOURS:
        far = [f"{quotient:.1f}x ({at})" for at, quotient in _far(rows, system)]
        if far:
            notes.append(f"Faster than {decoding.SYSTEMS[system]}: {_listed(far)}.")
    return [*notes, *_missing(rows)]


def _missing(rows: list[decoding.Row]) -> list[str]:
    """Why bars are not there."""
    notes = []
    for word, said in ABSENT.items():
        parts = []
        for system in COLOURS:
            absent = [row for row in rows if row.get(f"{system}_device") is None]
            names = [row["name"] for row in absent if decoding.word(row, system) == word]
            if names:
                parts.append(f"{decoding.SYSTEMS[system]} at {_listed(names)}")
        if parts:
            notes.append(f"{said}: {'; '.join(parts)}.")
    return notes


def _far(rows: list[decoding.Row], system: str) -> list[tuple[str, float]]:
    """Rows at which a system takes far longer than attndsl, and how many times as long."""
    found = [
        (row["name"], row[f"{system}_device"] / row[f"{OWN}_device"])
        for row in rows
        if row.get(f"{system}_device")
    ]
    return [(name, quotient) for name, quotient in found if quotient >= FAR]


def _few(rows: list[decoding.Row]) -> list[str]:
    few = [row for row in rows if row["live_bytes"] < decoding.FEW_BYTES]
    if not few:
        return []
    most = max(row["live_bytes"] for row in few) / 1e6
    names = _listed([row["name"] for row in few])
    return [f"Calls of {most:.0f} MB wait for more than memory: {names}."]


def _listed(names: list[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _height(line: Line) -> int:
    return max(len(line.bars) * (BAR + BAR_GAP) - BAR_GAP, LABELS if line.size else 0)


def _top(found: Chart) -> float:
    """What the longest bar has."""
    lines = (line for lines in found.groups.values() for line in lines)
    return max(found.copy, *(bar.tbs for line in lines for bar in line.bars))


def _marks(found: Chart) -> range:
    return range(int(_top(found)) + 1)


def _x(tbs: float, found: Chart) -> float:
    return LEFT + tbs / _top(found) * (RIGHT - LEFT)


def _bars(line: Line, y: int, found: Chart) -> list[str]:
    parts = [_text(LEFT - 8, y + 10.5, line.name, "e")]
    if line.size:
        parts.append(_text(LEFT - 8, y + 25, line.size, "f e"))
    for bar in line.bars:
        kind = "o e" if bar.system == OWN else "n e"
        parts += [
            f'<rect class="{bar.system}" x="{LEFT}" y="{y}" '
            f'width="{_x(bar.tbs, found) - LEFT:.1f}" height="{BAR}"/>',
            _text(TBS, y + 10.5, f"{bar.tbs:.2f}", kind),
            _text(WIDTH - MARGIN, y + 10.5, _us(bar.us), kind),
        ]
        y += BAR + BAR_GAP
    return parts


def _grid(found: Chart, top: int, bottom: int) -> list[str]:
    lines = [("grid", mark) for mark in _marks(found)]
    return [
        f'<path class="{kind}" d="M{_x(at, found):.1f} {top}V{bottom}"/>'
        for kind, at in (*lines, ("copy", found.copy))
    ]


def _legend(found: Chart) -> list[str]:
    parts, x, y = [], float(MARGIN), MARGIN + 40
    for system, name in decoding.SYSTEMS.items():
        parts.append(f'<rect class="{system}" x="{x}" y="{y}" width="12" height="12"/>')
        parts.append(_text(x + 17, y + 10, name, ""))
        x += 36 + 7.2 * len(name)
    parts.append(f'<path class="copy" d="M{x + 6} {y}v12"/>')
    parts.append(_text(x + 17, y + 10, f"a copy: {found.copy:.2f}", ""))
    return parts


def _said(found: Chart) -> str:
    """The figures in words, for who cannot see the bars."""
    parts = [f"A copy: {found.copy:.2f}."]
    for line in (line for lines in found.groups.values() for line in lines):
        each = ", ".join(f"{decoding.SYSTEMS[bar.system]} {bar.tbs:.2f}" for bar in line.bars)
        parts.append(f"{line.name}: {each}.")
    return " ".join([*parts, *found.notes])


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _text(x: float, y: float, words: str, kinds: str) -> str:
    kind = f' class="{kinds}"' if kinds else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(words, quote=False)}</text>'


def _style(colours: dict[str, str]) -> str:
    return (
        "text,.attndsl{{fill:{ink}}}.f{{fill:{faint}}}.back{{fill:{back}}}.grid{{stroke:{grid}}}"
        ".copy{{stroke:{faint};stroke-width:2;stroke-dasharray:4 3}}"
    ).format(**colours)


if __name__ == "__main__":
    sys.exit(main())
