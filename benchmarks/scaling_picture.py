"""The picture docs/scale.svg: simulated efficiency by number of ranks."""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, LEFT, TOP, PANEL = 660, 56, 60, 220
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c959f")
"""Okabe and Ito's, which the colour-blind tell apart."""


def draw(rows: list[dict[str, Any]], ranks: tuple[int, ...]) -> str:
    """An SVG of the ``efficiency`` of each program.

    Args:
        rows: A program and a number of ranks each.
        ranks: The numbers, from left to right.
    """
    names = list(dict.fromkeys(row["program"] for row in rows))
    step = (WIDTH - LEFT - 190) / max(1, len(ranks) - 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + PANEL + 50}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#57606a">',
        f"<title>{escape('Simulated efficiency by number of GPUs')}</title>",
        "<style>@media(prefers-color-scheme:dark){svg{fill:#9198a1}path[fill]{stroke:#30363d}}</style>",
        f'<text x="{LEFT}" y="24" font-size="15">Simulated, not measured: 8,192 tokens per GPU, '
        "no overlap</text>",
    ]
    for percent in (0, 25, 50, 75, 100):
        y = TOP + PANEL * (1 - percent / 100)
        parts.append(f'<path d="M{LEFT} {y:g}H{WIDTH - 180}" stroke="#d0d7de" fill="none"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end">{percent}%</text>')
    for number, count in enumerate(ranks):
        x = LEFT + number * step
        y = TOP + PANEL + 22
        parts.append(f'<text x="{x:g}" y="{y}" text-anchor="middle">{count:,}</text>')
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        points = [
            (LEFT + ranks.index(row["ranks"]) * step, TOP + PANEL * (1 - row["efficiency"]))
            for row in rows if row["program"] == name
        ]  # fmt: skip
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 16 + 20 * number
        parts.append(f'<path d="M{WIDTH - 165} {y - 4}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{WIDTH - 140}" y="{y}">{escape(name)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP + PANEL + 44}">GPUs</text></svg>')
    return "\n".join(parts) + "\n"
