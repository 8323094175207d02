"""Draw docs/pictures.svg: attention weights of a few programs, queries down, keys across.

python docs/pictures.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

import attndsl

LENGTH, CELL = 32, 6
SIDE = LENGTH * CELL
GAP, HEAD = 28, 46
LEVELS = 12
HEADS, SHOWN = 8, 2
TITLE = "Attention weights of six programs: queries down, keys across"
LIGHT = {"back": "#ffffff", "ink": "#1b1f24", "faint": "#57606a", "dead": "#f3f5f8",
         "edge": "#c9d1d9", "live": "#1f5fbf"}  # fmt: skip
DARK = {"back": "#0d1117", "ink": "#e6edf3", "faint": "#9198a1", "dead": "#161b22",
        "edge": "#30363d", "live": "#6cb0ff"}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One program and what its picture needs."""

    title: str
    program: str
    captures: dict[str, Any] = field(default_factory=dict)


PANELS = (
    Panel("Sliding window", "causal() and q - kv < 8"),
    Panel("Prefix LM", "q >= kv or kv < 10"),
    Panel(
        "Packed documents",
        "q >= kv and doc[q] == doc[kv]",
        {"doc": torch.repeat_interleave(torch.arange(4), torch.tensor([9, 5, 12, 6]))},
    ),
    Panel("ALiBi, head 3 of 8", "mask = causal(); score = score + alibi()"),
    Panel("Neighbourhoods, 8 x 4 grid", "natten2d(8, 4, 3, 3)"),
    Panel("Block diffusion", "block_diffusion(16, 4)"),
)


def weights(panel: Panel) -> torch.Tensor:
    """One head's weights where all raw scores are equal, each row divided by its largest."""
    attention = attndsl.compile(panel.program, backend="reference", **panel.captures)
    zeros = torch.zeros(1, HEADS, LENGTH, 1, dtype=torch.float64)
    units = torch.eye(LENGTH, dtype=torch.float64).expand(1, HEADS, -1, -1)
    found = attention(zeros, zeros, units)[0, SHOWN]
    return found / found.amax(-1, keepdim=True)


def runs(levels: list[int]) -> list[tuple[int, int, int]]:
    """Equal neighbours of a row together: first, one past the last, level."""
    found: list[tuple[int, int, int]] = []
    for place, level in enumerate(levels):
        if found and found[-1][2] == level:
            found[-1] = (found[-1][0], place + 1, level)
        else:
            found.append((place, place + 1, level))
    return found


def draw(panel: Panel, x: int, y: int) -> list[str]:
    """SVG of one panel."""
    lines = panel.program.split("; ")
    top = 30 if len(lines) == 1 else 24
    parts = [
        f'<g transform="translate({x},{y})">',
        f'<text y="12" class="t">{escape(panel.title)}</text>',
        *(
            f'<text y="{top + 11 * number}" class="p">{escape(line)}</text>'
            for number, line in enumerate(lines)
        ),
        f'<g transform="translate(0,{HEAD - 6})">',
        f'<rect width="{SIDE}" height="{SIDE}" class="b"/>',
        # Edges on whole pixels: between smoothed ones the background would show as a line.
        '<g class="w" shape-rendering="crispEdges">',
    ]
    for row, values in enumerate(weights(panel).tolist()):
        levels = [1 + round(w * (LEVELS - 1)) if w > 0 else 0 for w in values]
        parts += [
            f'<rect x="{first * CELL}" y="{row * CELL}" width="{(last - first) * CELL}" '
            f'height="{CELL}" fill-opacity="{level / LEVELS:.2f}"/>'
            for first, last, level in runs(levels)
            if level
        ]
    return [*parts, "</g></g></g>"]


def picture() -> str:
    """The whole SVG."""
    across = 3
    down = -(-len(PANELS) // across)
    width, height = across * (SIDE + GAP) + GAP, down * (SIDE + HEAD + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{TITLE}</title>",
        "<style>.t{font:600 13px sans-serif}.p{font:10px monospace}",
        _style(LIGHT),
        f"@media (prefers-color-scheme:dark){{{_style(DARK)}}}</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
    ]
    for place, panel in enumerate(PANELS):
        row, column = divmod(place, across)
        parts += draw(panel, GAP + column * (SIDE + GAP), GAP + row * (SIDE + HEAD + GAP))
    return "\n".join([*parts, "</svg>", ""])


def _style(colours: dict[str, str]) -> str:
    return (
        ".back{{fill:{back}}}.t{{fill:{ink}}}.p{{fill:{faint}}}"
        ".b{{fill:{dead};stroke:{edge}}}.w{{fill:{live}}}"
    ).format(**colours)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), "utf-8")
