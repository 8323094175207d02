"""What ``scaling.py --run`` has measured: beside what the simulation says, and as tables."""

from __future__ import annotations

import re
from typing import Any

import torch
from scaling_programs import (
    HEAD_DIM,
    HOST,
    LATENCY,
    MEDIANS,
    NETWORK,
    TEXTS,
    TILE,
    document_ids,
    reach_of_documents,
)

import attndsl
from attndsl.parallel import Machine, Shape
from attndsl.parallel.comm_plan import figures_of
from attndsl.parallel.cp_plan import CallShape, plan_call, sight_of, weighed
from attndsl.parallel.plan_costs import costs_of
from attndsl.parallel.row_layouts import choose_layout, chunk_size
from attndsl.parallel.workload import demand_from

BACKWARD = 2.5
"""Operations of a backward for each of a forward."""
PEERS = ("torch_sdpa", "torch_flex")
HELD = r".* each: (\w+), in chunks"
"""The layout that ``explain`` names."""
KEY = ("program", "heads", "ranks", "tokens")
"""What tells rows apart."""
SHOWN = "32,8"
"""Heads of the rows that the page shows. The result file has rows of others too."""


def prediction(row: dict[str, Any]) -> dict[str, Any]:
    """What the simulation says of a measured row: the same program, ranks, tokens and layout.

    A live tile takes what it takes in ``alone``, the call of one GPU's own tokens in the same
    processes. Bytes and the journeys of an exchange are those of the simulation, and all are waited
    for. So the error is that of balance, links and overlap, and of a kernel that is faster or
    slower per tile in a longer sequence.

    Args:
        row: With ``alone_forward_ms`` and ``alone_step_ms``; without, only bytes are predicted.
    """
    name, ranks, tokens = row["program"], row["ranks"], row["tokens"]
    heads, kv_heads = map(int, row["heads"].split(","))
    length, chunk = tokens * ranks, chunk_size(tokens * ranks, ranks)
    shape = Shape(1, heads, kv_heads, HEAD_DIM, HEAD_DIM)
    # The layout is that of ContextParallel's own speeds, and times are those of the simulation.
    plans, speeds = Machine(), Machine(link=HOST if ranks <= 8 else NETWORK, latency=LATENCY)
    attention, captures = attndsl.compile(TEXTS[name]), _captures(name, length, heads)
    sight = sight_of(attention, length, chunk, shape, captures)
    held = re.match(HELD, row.get("explain", ""))
    layout = choose_layout(
        held[1] if held else "auto", length, ranks, [weighed(sight, shape, plans)]
    )
    asked = CallShape(shape, "auto", False)
    group = plan_call(attention, layout, 0, captures, asked, plans, sight).figures.group
    costs = costs_of(speeds, shape)
    own = _reach(attention, name, tokens, heads)
    demand = demand_from(_reach(attention, name, length, heads), chunk, 0.0, costs.key * TILE)
    figures = figures_of(layout, demand, group, costs, LATENCY)
    found: dict[str, Any] = {
        "predicted_layout": layout.name,
        "predicted_megabytes": round(int(figures.received.max()) / 1e6, 1),
    }
    if "alone_step_ms" not in row:
        return found
    tiles = int(own.work.sum()) / own.maps
    journeys = LATENCY if int(figures.received.sum()) else 0.0
    # Of keys a forward brings the part that is no gradient and not fetched again; of rows a half.
    keys = figures.fetched * costs.journey // group
    forth = figures.fetched * costs.key_bytes // group + (figures.received - keys) / 2
    for part, number, brought in (("forward", 1, forth), ("step", 2, figures.received)):
        work = figures.work * (row[f"alone_{part}_ms"] / 1e3 / tiles)
        seconds = float((work + brought / speeds.link).max()) + number * journeys
        found[f"predicted_{part}_ms"] = round(1e3 * seconds, 3)
    return found


def _captures(name: str, length: int, heads: int) -> dict[str, Any]:
    if name in MEDIANS:
        return {"doc": torch.from_numpy(document_ids(length, MEDIANS[name]))}
    return {"x": torch.ones(heads)} if "x[heads]" in TEXTS[name] else {}


def _reach(attention: Any, name: str, length: int, heads: int) -> Any:
    """Which tiles are live, of 128 x 128 however long the sequence is."""
    if name in MEDIANS:
        return reach_of_documents(length, MEDIANS[name])
    return attention.reach(
        length, length, TILE, TILE, heads=heads, captures=_captures(name, length, heads)
    )


def completed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows, each with what the simulation says where the result file does not have it yet."""
    return [
        row if "attndsl_step_ms" not in row or "predicted_step_ms" in row
        else {**row, **prediction(row)}
        for row in rows
    ]  # fmt: skip


def shares(row: dict[str, Any]) -> dict[str, float]:
    """Figures of each GPU, and what is left of those of one GPU that attends to its own tokens.

    Returns:
        ``forward`` and ``backward``, TFLOP/s; ``forward_kept``, ``step_kept``;
        ``graph_forward_kept`` and ``graph_step_kept``, of calls in CUDA graphs, where these have
        figures; and ``forward_error``, ``step_error``: measured for predicted, less 1.
    """
    ahead, step = row["attndsl_forward_ms"], row["attndsl_step_ms"]
    rate, alone = (row[f"{x}_tflops_per_gpu_forward"] for x in ("attndsl", "alone"))
    work = ahead * rate / (row["alone_forward_ms"] * alone)
    in_graphs = {
        f"graph_{part}_kept":
            row[f"alone_graph_{part}_ms"] * work / row[f"attndsl_graph_{part}_ms"]
        for part in ("forward", "step")
        if {f"attndsl_graph_{part}_ms", f"alone_graph_{part}_ms"} <= {*row}
    }  # fmt: skip
    return in_graphs | {
        "forward": rate, "backward": BACKWARD * rate * ahead / max(1e-9, step - ahead),
        "forward_kept": rate / alone, "step_kept": row["alone_step_ms"] * work / step,
        "forward_error": ahead / row["predicted_forward_ms"] - 1,
        "step_error": step / row["predicted_step_ms"] - 1,
    }  # fmt: skip


def table_of_measured(rows: list[dict[str, Any]]) -> str:
    """Figures of the rows that the page shows, in Markdown, and why some are missing.

    A backward has as many times a forward's operations on one GPU as on several.
    """
    rows = [row for row in completed(rows) if row["heads"] == SHOWN]
    lines = [
        "| program | GPUs | tokens per GPU | forward, ms | step, ms | forward, TFLOP/s per GPU "
        "| backward, TFLOP/s per GPU | forward efficiency | step efficiency "
        "| step efficiency in CUDA graphs | step vs. SDPA ring | step vs. FlexAttention |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        head = f"| {row['program']} | {row['ranks']} | {row['tokens']:,} |"
        if "attndsl_step_ms" not in row:
            lines.append(f"{head} - | - | - | - | - | - | - | - | - |")
            continue
        found, step = shares(row), row["attndsl_step_ms"]
        kept = [found.get(x) for x in ("forward_kept", "step_kept", "graph_step_kept")]
        cells = [
            f"{row['attndsl_forward_ms']:.2f}", f"{step:.2f}",
            f"{found['forward']:.0f}", f"{found['backward']:.0f}",
            *("-" if x is None else f"{x:.0%}" for x in kept),
            *(_faster(row.get(f"{x}_step_ms"), step) for x in PEERS),
        ]  # fmt: skip
        lines.append(f"{head} {' | '.join(cells)} |")
    return "\n".join([*lines, *_reasons(rows)])


def table_of_predicted(rows: list[dict[str, Any]]) -> str:
    """All rows beside what the simulation says, in Markdown."""
    lines = [
        "| program | heads | GPUs | tokens per GPU | forward predicted, ms | measured / predicted "
        "| step predicted, ms | measured / predicted | MB received | exposed in a step, ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in completed(rows):
        if "attndsl_step_ms" not in row:
            continue
        found, exposed = shares(row), row.get("attndsl_step_profile", {}).get("exposed_ms")
        lines.append(
            f"{_head(row)} {row['predicted_forward_ms']:.2f} | {1 + found['forward_error']:.2f} | "
            f"{row['predicted_step_ms']:.2f} | {1 + found['step_error']:.2f} | "
            f"{row['predicted_megabytes']:,.0f} | "
            f"{'-' if exposed is None else f'{exposed:.2f}'} |"
        )
    return "\n".join(lines)


def _faster(theirs: float | None, ours: float) -> str:
    """A cell with the speed of a step relative to torch's."""
    if theirs is None:
        return "-"
    return f"{theirs / ours:.2f}x" if theirs < 10 * ours else f"{theirs / ours:.0f}x"


def _in_graphs(found: dict[str, float]) -> str:
    """What is left of a forward and of a step of one GPU's, all of them in CUDA graphs."""
    kept = [found[key] for key in ("graph_forward_kept", "graph_step_kept") if key in found]
    return ", ".join(f"{x:.2f}" for x in kept) or "-"


def _head(row: dict[str, Any]) -> str:
    heads = row["heads"].replace(",", "/")
    kind = re.search(r"NVIDIA (\S+)", row.get("machine", ""))
    gpus = f"{row['ranks']} {kind[1]}" if kind else row["ranks"]
    return f"| {row['program']} | {heads} | {gpus} | {row['tokens']:,} |"


def errors_of_simulation(rows: list[dict[str, Any]]) -> str:
    """Errors of the simulation in all rows, by number of GPUs."""
    rows = completed(rows)
    lines = []
    timed = [row for row in rows if "attndsl_step_ms" in row]
    for ranks in sorted({row["ranks"] for row in timed}):
        texts = []
        for part, name in (("forward", "forward pass"), ("step", "step")):
            found = [shares(x)[f"{part}_error"] for x in timed if x["ranks"] == ranks]
            near = sum(abs(x) <= 0.1 for x in found)
            texts.append(
                f"a {name} takes {1 + min(found):.2f}x to {1 + max(found):.2f}x the predicted time "
                f"({near} of {len(found)} within 10%)"
            )
        lines.append(f"On {ranks} GPUs, {'; '.join(texts)}.")
    return "\n".join(lines)


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    """Why there are no figures: each reason once, with the programs that it is of."""
    whose: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for system in ("", *PEERS):
            why = row.get(f"{system}_why" if system else "why")
            if why is not None:
                text = f"{row['program']} ({row['ranks']} x {row['tokens']:,})"
                whose.setdefault((system or "attndsl", why), []).append(text)
    lines = [
        f"- `{system}` has no figure for {', '.join(texts)}: {why.rstrip('.')}."
        for (system, why), texts in whose.items()
    ]
    return ["", *lines] if lines else []


def short_table(rows: list[dict[str, Any]]) -> str:
    """One line for each row, in characters, for the end of what a run prints."""
    lines = [
        f"{'program':14} {'heads':6} {'gpus':>4} {'tokens':>7} {'fwd ms':>8} {'step ms':>8} "
        f"{'of one':>11} {'in graphs':>11} {'of predicted':>12} {'sdpa':>8} {'flex':>8}"
    ]
    for row in completed(rows):
        line = f"{row['program']:14} {row['heads']:6} {row['ranks']:4} {row['tokens']:7}"
        peers = " ".join(f"{_peer(row, system):>8}" for system in PEERS)
        if "attndsl_step_ms" in row:
            found = shares(row)
            kept = f"{found['forward_kept']:.2f} {found['step_kept']:.2f}"
            told = f"{1 + found['forward_error']:.2f} {1 + found['step_error']:.2f}"
            bits = "" if row.get("same_bits", True) else " other bits"
            line += (
                f" {row['attndsl_forward_ms']:8.2f} {row['attndsl_step_ms']:8.2f} {kept:>11} "
                f"{_in_graphs(found):>11} {told:>12} {peers}{bits}"
            )
        else:
            line += f" {'-':>8} {'-':>8} {'-':>11} {'-':>11} {'-':>12} {peers} "
            line += row.get("why", "")[:50]
        lines.append(line.rstrip())
    reasons = [f"{x[:150]}" for x in _reasons(rows) if x]
    return "\n".join([*lines, *reasons[:12]])


def _peer(row: dict[str, Any], system: str) -> str:
    """Milliseconds of a step, or a word for why there are none."""
    if f"{system}_step_ms" in row:
        return f"{row[f'{system}_step_ms']:.2f}"
    return "why" if f"{system}_why" in row else "-"


def merged(files: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of several runs, in order: figures of a part are those of the last run that has any.

    ``commit`` and ``machine`` are those of our own figures, and a peer has its own, such as
    ``torch_sdpa_commit``. A row that was merged before keeps a peer's as they are.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for rows in files for row in rows):
        key = tuple(row[x] for x in KEY)
        of_peers = {
            f"{x}_{name}": row[name]
            for x in PEERS if f"{x}_step_ms" in row and f"{x}_commit" not in row
            for name in ("commit", "machine") if name in row
        }  # fmt: skip
        before = found.get(key, {})
        whole = before | of_peers | row
        if "attndsl_step_ms" in before and "attndsl_step_ms" not in row:
            whole |= {name: before[name] for name in ("commit", "machine") if name in before}
        for step, why in (
            ("attndsl_step_ms", "why"),
            *((f"{x}_step_ms", f"{x}_why") for x in PEERS),
        ):
            if step in whole:
                whole.pop(why, None)
        found[key] = whole
    order = [*TEXTS]
    return sorted(
        found.values(),
        key=lambda x: (x["ranks"], x["tokens"], x["heads"], order.index(x["program"])),
    )
