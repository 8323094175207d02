"""Plans in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .comm_plan import Figures
    from .row_layouts import Layout

_SHOWN = 16
"""Ranks that lines show one by one."""


def report(layout: Layout, plans: Sequence[tuple[str, Figures]]) -> str:
    """Text on the rows that ranks hold, and on their work and traffic for each program."""
    runs = max(len(layout.runs(rank)) for rank in range(layout.ranks))
    rows = [layout.rows(rank) for rank in range(layout.ranks)]
    held = f"{rows[0]}" if min(rows) == max(rows) else f"{min(rows)} to {max(rows)}"
    lines = [
        f"{layout.length} rows on {layout.ranks} ranks, {held} each: {layout.name}, in chunks of "
        f"{layout.chunk}, up to {runs} runs of rows a rank"
    ]
    if not plans:
        lines.append("no program is planned yet: the first call of each makes its plan")
    for name, figures in plans:
        lines += ["", name, *(f"  {line}" for line in _of_program(layout, figures))]
    return "\n".join(lines)


def _of_program(layout: Layout, figures: Figures) -> list[str]:
    work, fetched = figures.work.tolist(), figures.fetched.tolist()
    mean = max(1e-9, sum(work) / len(work))
    dead = [rank for rank, (w, f) in enumerate(zip(work, fetched, strict=True)) if not w and not f]
    way = {1: "keys travel to the rows that see them", layout.ranks: "ranks exchange heads"}
    received, most = sum(figures.received.tolist()), max(figures.received.tolist())
    share = received / max(1, layout.ranks * figures.gathered)
    lines = [
        "exchange     "
        + way.get(figures.group, f"groups of {figures.group} ranks exchange heads, and fetch keys"),
        f"load         slowest {max(work) / mean:.2f} of the mean; live tiles by rank: "
        + _list(work),
        f"keys fetched {_list(fetched)} of {layout.length}",
        f"bytes        {_bytes(received)} in all, forward and backward, {_bytes(most)} at most a "
        f"rank: {share:.2f} of an all-gather of keys and a reduce-scatter of gradients",
        f"buffer       {_bytes(figures.buffer)} at most a rank, of keys, values and gradients",
    ]
    if dead:
        lines.append(f"dead ranks   {_list(dead)} see no keys")
    return lines


def _list(values: Sequence[int]) -> str:
    shown = " ".join(str(x) for x in values[:_SHOWN])
    more = len(values) - _SHOWN
    return f"{shown} and {more} more, {min(values)} to {max(values)}" if more > 0 else shown


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
