"""The chart docs/speed.svg: TFLOP/s by length, beside other systems, from committed results.

python benchmarks/speed.py           # print its figures
python benchmarks/speed.py --write   # draw docs/speed.svg

Causal attention with head dim 128 in bf16 is the one case that all systems run at several lengths.
Operations are counted as in FlashAttention-2 (arXiv 2307.08691, section 4.1): the forward has
4 x length^2 x head dim x heads x batch, of which a causal mask leaves half, and the backward has
2.5 times as many.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from typing import Any

from chart import COLOURS, DARK, LIGHT
from table import COLUMNS, DIRECTIONS, ROOT, SHAPE, conditions, load

import common

OUTPUT = ROOT / "docs" / "speed.svg"
CASE, HEAD_DIM = "causal", 128
MAIN, OTHERS = "attention", ("other_shapes", "sparse_attention")
"""Result files. A length is of the first file that has it, and a bar of the first one that has the
system at the shape of that length."""
SYSTEMS = ("attndsl", "fa4", "cudnn", "flex")
OPERATIONS = {"forward": 2.0, "backward": 5.0}
"""Of a causal mask, per batch entry, head, pair of all pairs and element of the head dim."""

TITLE = "Speed of causal attention, TFLOP/s by length"
WIDTH, MARGIN, HEAD = 660, 20, 92
LEFT, HEIGHT, PANEL_GAP = 44, 170, 76
BAR, BAR_GAP = 24, 2
STEP = 200


@dataclass(frozen=True, slots=True)
class Bar:
    """One system at one length."""

    system: str
    tflops: float
    file: str
    """The result file, without its ending."""


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn: bars by direction and length, and what stands beside them in words."""

    bars: dict[str, dict[int, tuple[Bar, ...]]]
    sizes: dict[int, str]
    """Batch and heads at each length."""
    conditions: str
    notes: tuple[str, ...]


def chart(files: dict[str, dict[str, Any]]) -> Chart:
    """The figures of result files, by name.

    Raises:
        ValueError: The first file has no causal rows with this head dim.
    """
    rows = {name: [row for row in files[name]["rows"] if _drawn(row)] for name in files}
    at: dict[int, tuple[int, ...]] = {}
    for found in rows.values():
        for row in found:
            at.setdefault(row["S"], tuple(row[key] for key in SHAPE))
    if not rows[MAIN]:
        raise ValueError(f"{MAIN}.json has no rows of {CASE} with head dim {HEAD_DIM}")
    bars = {
        direction: {length: _bars(rows, at[length], direction) for length in sorted(at)}
        for direction in DIRECTIONS
    }
    notes = [
        f"bf16, head dim {HEAD_DIM}. Below each length: batch x heads.",
        "A system without a bar was not measured at that length.",
    ]
    elsewhere = {
        bar.file
        for lengths in bars.values()
        for found in lengths.values()
        for bar in found
        if bar.file != found[0].file
    }
    notes += [_beside(rows, at, name) for name in sorted(elsewhere)]
    sizes = {length: f"{shape[0]} x {shape[1]}" for length, shape in at.items()}
    return Chart(bars, sizes, conditions(files[MAIN]), tuple(notes))


def svg(found: Chart) -> str:
    """The chart as a drawing, the same bytes for the same figures."""
    most = max(bar.tflops for bar in _all(found))
    top = STEP * -(-int(most + 1) // STEP)
    parts, y = _legend(), HEAD
    for direction in found.bars:
        parts += _panel(direction, found, y, top)
        y += HEIGHT + PANEL_GAP
    for note in (*found.notes, found.conditions):
        parts.append(_text(MARGIN, y, note, "f"))
        y += 16
    said = " ".join(_sentence(found, direction) for direction in found.bars)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'width="{WIDTH}" height="{y}" role="img" aria-labelledby="title desc">',
        f'<title id="title">{TITLE}</title>',
        f'<desc id="desc">{escape(said, quote=False)}</desc>',
        "<style>",
        _style(LIGHT),
        "".join(f".{name}{{fill:{colour}}}" for name, colour in COLOURS.items()),
        "text{font:12px sans-serif}.t{font:600 16px sans-serif}.h{font:600 13px sans-serif}",
        ".n{font:10px sans-serif}.o{font:600 10px sans-serif}.f{font:11px sans-serif}",
        # A figure stays readable where a line of the grid runs through it.
        ".n,.o{paint-order:stroke;stroke-width:3px}",
        ".e{text-anchor:end}.m{text-anchor:middle}",
        f"@media (prefers-color-scheme:dark){{{_style(DARK)}}}",
        "</style>",
        f'<rect class="back" width="{WIDTH}" height="{y}"/>',
        _text(MARGIN, MARGIN + 8, TITLE, "t"),
        _text(MARGIN, MARGIN + 28, "Higher is faster.", "f"),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def text(found: Chart) -> str:
    """The figures as a table of plain text."""
    lines = [TITLE]
    for direction, lengths in found.bars.items():
        names = "".join(f"{COLUMNS[system]:>16}" for system in SYSTEMS)
        lines += ["", f"{direction:<10}{names}"]
        for length, bars in lengths.items():
            at = {bar.system: f"{bar.tflops:.0f}" for bar in bars}
            cells = "".join(f"{at.get(system, '-'):>16}" for system in SYSTEMS)
            lines.append(f"{length:<10}{cells}    ({found.sizes[length]})")
    return "\n".join([*lines, "", *found.notes, found.conditions, ""])


def committed() -> Chart:
    """The chart of the committed files.

    Raises:
        ValueError: One of them is missing.
    """
    files = {}
    for name in (MAIN, *OTHERS):
        results = load(name)
        if results is None:
            raise ValueError(f"there is no benchmarks/results/{name}.json")
        files[name] = results
    return chart(files)


def main() -> int:
    """Print the figures, or draw them; 1 if a result file is missing."""
    return common.print_or_draw(__file__, __doc__, OUTPUT, committed, text, svg)


def _drawn(row: dict[str, Any]) -> bool:
    return row["case"] == CASE and row["D"] == HEAD_DIM and row["H"] == row["Hkv"]


def _bars(
    rows: dict[str, list[dict[str, Any]]], shape: tuple[int, ...], direction: str
) -> tuple[Bar, ...]:
    found = []
    for system in SYSTEMS:
        for name, each in rows.items():
            times = [
                row.get(f"{system}_ms")
                for row in each
                if tuple(row[key] for key in SHAPE) == shape and row["direction"] == direction
            ]
            if times and times[0] is not None:
                found.append(Bar(system, tflops(shape, direction, times[0]), name))
                break
    return tuple(found)


def tflops(shape: tuple[int, ...], direction: str, ms: float) -> float:
    """TFLOP/s of a causal call of ``shape`` (batch, heads, key heads, length, head dim)."""
    batch, heads, _, length, dim = shape
    return OPERATIONS[direction] * batch * heads * length * length * dim / ms / 1e9


def _beside(
    rows: dict[str, list[dict[str, Any]]], at: dict[int, tuple[int, ...]], name: str
) -> str:
    """What attndsl does in the run of a file that only another system's bars are taken from."""
    times = {
        (length, row["direction"]): tflops(shape, row["direction"], row["attndsl_ms"])
        for length, shape in at.items()
        for row in rows[name]
        if tuple(row[key] for key in SHAPE) == shape
    }
    (length,) = {length for length, _ in times}
    forward, backward = (times[length, direction] for direction in DIRECTIONS)
    return (
        f"FlexAttention is of another run: attndsl has {forward:.0f} forward and {backward:.0f} "
        "backward there."
    )


def _all(found: Chart) -> list[Bar]:
    return [bar for lengths in found.bars.values() for bars in lengths.values() for bar in bars]


def _legend() -> list[str]:
    parts, x = [], MARGIN
    for system in SYSTEMS:
        parts.append(f'<rect class="{system}" x="{x}" y="{MARGIN + 38}" width="12" height="12"/>')
        parts.append(_text(x + 17, MARGIN + 48, COLUMNS[system], ""))
        x += 40 + 8 * len(COLUMNS[system])
    return parts


def _panel(direction: str, found: Chart, y: int, top: int) -> list[str]:
    lengths, bottom, scale = found.bars[direction], y + 20 + HEIGHT, HEIGHT / top
    parts = [_text(MARGIN, y + 6, direction, "h")]
    for mark in range(0, top + 1, STEP):
        at = bottom - mark * scale
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - MARGIN}"/>')
        parts.append(_text(LEFT - 6, at + 4, f"{mark}", "f e"))
    room = (WIDTH - MARGIN - LEFT) / len(lengths)
    for place, (length, bars) in enumerate(lengths.items()):
        middle = LEFT + (place + 0.5) * room
        x = middle - (len(bars) * (BAR + BAR_GAP) - BAR_GAP) / 2
        for bar in bars:
            height = bar.tflops * scale
            kind = "o m" if bar.system == SYSTEMS[0] else "n m"
            parts += [
                f'<rect class="{bar.system}" x="{x:.1f}" y="{bottom - height:.1f}" '
                f'width="{BAR}" height="{height:.1f}"/>',
                _text(x + BAR / 2, bottom - height - 4, f"{bar.tflops:.0f}", kind),
            ]
            x += BAR + BAR_GAP
        parts.append(_text(middle, bottom + 17, f"{length}", "m"))
        parts.append(_text(middle, bottom + 32, found.sizes[length], "f m"))
    return parts


def _sentence(found: Chart, direction: str) -> str:
    """The figures of a direction in words, for who cannot see the bars."""
    parts = []
    for length, bars in found.bars[direction].items():
        each = ", ".join(f"{COLUMNS[bar.system]} {bar.tflops:.0f}" for bar in bars)
        parts.append(f"length {length}: {each}")
    return f"{direction.capitalize()}, {'; '.join(parts)}."


def _text(x: float, y: float, words: str, kinds: str) -> str:
    kind = f' class="{kinds}"' if kinds else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(words, quote=False)}</text>'


def _style(colours: dict[str, str]) -> str:
    return (
        "text,.attndsl{{fill:{ink}}}.f{{fill:{faint}}}.back{{fill:{back}}}.grid{{stroke:{grid}}}"
        ".n,.o{{stroke:{back}}}"
    ).format(**colours)


if __name__ == "__main__":
    sys.exit(main())
