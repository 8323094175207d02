"""One sequence on many GPUs: simulated to 1,024 ranks, and measured where there are GPUs.

python benchmarks/scaling.py --simulate           # print plans, loads, bytes and predicted times
python benchmarks/scaling.py --simulate --write   # write results, the table and docs/scale.svg
python benchmarks/scaling.py --plans              # how long plans take at a million tokens
python benchmarks/scaling.py --plans --write      # write results and their table
python benchmarks/scaling.py --run 2,4,8          # measure on GPUs of this host, part by part
python benchmarks/scaling.py --merge A B --write  # add the result files of runs, write the table

The simulation takes the time of a live tile from the committed results of one H200, and speeds of
links as stated below. It has no overlap: all bytes are waited for. ``--run`` starts processes that
measure one part after the other, ends them where a part takes too long, goes on with the next part,
and writes figures when they come. A part is a program, a number of tokens, and ours or one of
torch's two ways (``--systems``). ``--missing`` leaves out what the results have. ``--profile`` adds
what each GPU's time goes to. ``alone`` is a call of a GPU's own number of tokens: less work for a
causal mask, so compare operations a second.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scaling_parts import Part, measure_all
from scaling_picture import draw
from scaling_programs import (
    DOCUMENTS,
    HEAD_DIM,
    HEADS,
    HOST,
    KV_HEADS,
    LATENCY,
    MEDIANS,
    NETWORK,
    PROGRAMS,
    RANKS,
    TEXTS,
    TILE,
    TOKENS,
    document_ids,
    reach_of_documents,
)
from scaling_run import SYSTEMS, Asked, done_in, run
from scaling_told import errors_of_simulation, merged, table_of_measured, table_of_predicted

import attndsl
from attndsl.parallel import Machine, Shape
from attndsl.parallel.plan_costs import costs_of
from attndsl.parallel.row_layouts import choose_layout, chunk_size, fetched_by, load_of
from attndsl.parallel.workload import demand_from

from common import RESULTS, machine, put_results, versions

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "results" / "scaling.md", ROOT / "docs" / "scale.svg"
SIMULATED, MEASURED = RESULTS / "scaling_simulated.json", RESULTS / "scaling.json"
PLANNED = RESULTS / "scaling_plans.json"
BEGIN, END = "<!-- simulated: begin -->", "<!-- simulated: end -->"
MEASURED_BEGIN, MEASURED_END = "<!-- measured: begin -->", "<!-- measured: end -->"
PREDICTED_BEGIN, PREDICTED_END = "<!-- predicted: begin -->", "<!-- predicted: end -->"
PLANS_BEGIN, PLANS_END = "<!-- plans: begin -->", "<!-- plans: end -->"
TILES = "sparse_attention.json"
"""The result file with the times of tiles."""
FIXED = ("contiguous", "head_tail")
LAYOUTS = ("contiguous", "head_tail", "balanced")
SHOWN = (8, 64, 1024)
"""Numbers of ranks that the page shows. The result file and the picture have others too."""


def seconds_of_tiles() -> dict[str, float]:
    """By case: seconds of a live tile of one head, forward and backward, as measured."""
    found = json.loads((RESULTS / TILES).read_text("utf-8"))
    times: dict[str, dict[str, float]] = {}
    for row in found["rows"]:
        if (row["S"], row["B"], row["D"], row["dtype"]) == (8192, 2, HEAD_DIM, "bf16"):
            maps = row["B"] * row["H"]
            times.setdefault(row["case"], {})[row["direction"]] = row["attndsl_ms"] / 1e3 / maps
    seconds = {}
    for name, program in PROGRAMS.items():
        if name == "block_diffusion":
            continue
        if program.case == "documents1000":
            ids = torch.arange(8192) // 1000
            reach = attndsl.compile(DOCUMENTS).reach(8192, 8192, TILE, TILE, doc=ids)
        else:
            reach = attndsl.compile(program.text).reach(8192, 8192, TILE, TILE, heads=1)
        seconds[program.case] = sum(times[program.case].values()) / int(reach.work.sum())
    return seconds


def simulated(
    ranks: int, names: tuple[str, ...] = tuple(PROGRAMS), tiles: dict[str, float] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of one number of ranks: a program and a layout each.

    Chunks are swapped for documents alone: other masks are even by fixed layouts.
    """
    length, tiles = TOKENS * ranks, seconds_of_tiles() if tiles is None else tiles
    link = HOST if ranks <= 8 else NETWORK
    shape = Shape(1, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM)
    costs = costs_of(Machine(link=link), shape)
    for name in names:
        if name == "block_diffusion" and ranks > 256:
            continue  # Its closed form needs more than 32 bits at that length.
        program = PROGRAMS[name]
        if name in MEDIANS:
            reach = reach_of_documents(length, MEDIANS[name])
        else:
            # A number: half of kv_len has no closed form.
            known = {"n": length // 2} if name == "block_diffusion" else {}
            attention = attndsl.compile(program.text, **known)
            reach = attention.reach(length, length, TILE, TILE, heads=1)
        demand = demand_from(
            reach, chunk_size(length, ranks), tiles[program.case] * HEADS, costs.key * TILE
        )
        for layout in LAYOUTS if name in MEDIANS else FIXED:
            started = time.perf_counter()
            found = choose_layout(layout, length, ranks, [demand])
            planned = time.perf_counter() - started
            work, fetched = load_of(found, demand), fetched_by(found, demand)
            seconds = work * demand.tile + fetched * costs.key + 2 * LATENCY
            yield {
                "program": name, "ranks": ranks, "layout": layout, "chunk": found.chunk,
                "imbalance": round(float(work.max() / work.mean()), 3),
                "fetched": round(float(fetched.mean() / max(1, length - TOKENS)), 4),
                "megabytes": round(float(fetched.max()) * costs.journey / 1e6, 1),
                "milliseconds": round(float(seconds.max()) * 1e3, 3),
                "efficiency": round(float(work.mean() * demand.tile / seconds.max()), 3),
                "runs": max(len(found.runs(rank)) for rank in range(ranks)),
                "plan_ms": round(planned * 1e3, 1),
            }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The layout of each program that is fastest, by number of ranks, in Markdown."""
    lines = [
        "| program | GPUs | layout | slowest / mean | keys fetched | MB at most | step, ms "
        "| efficiency |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in (row for row in best_rows(rows) if row["ranks"] in SHOWN):
        lines.append(
            f"| {row['program']} | {row['ranks']:,} | {row['layout']} | {row['imbalance']:.2f} | "
            f"{row['fetched']:.1%} | {row['megabytes']:,.0f} | {row['milliseconds']:.1f} | "
            f"{row['efficiency']:.0%} |"
        )
    return "\n".join(lines)


def best_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each program and number of ranks the row of the fastest layout, the first among equals."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        key = row["program"], row["ranks"]
        if key not in best or row["milliseconds"] < best[key]["milliseconds"]:
            best[key] = row
    return [best[name, ranks] for name in PROGRAMS for ranks in RANKS if (name, ranks) in best]


def plans(
    ranks: tuple[int, ...] = (8, 64, 1024), length: int = 1 << 20, repeats: int = 5
) -> list[dict[str, Any]]:
    """How long plans of a million tokens take, and the largest buffer of a rank.

    A plan is all that a rank computes for a batch: what rows see, who holds them, which exchange
    costs least, its own routes, and digests of tensors for ranks to compare. Times are those of
    the processor, the least of ``repeats``: the first one of a program also finds its closed form,
    which later plans have.
    """
    from attndsl.parallel.cp_plan import CallShape as Asked
    from attndsl.parallel.cp_plan import plan_call, sight_key, sight_of, weighed

    rows = []
    shape, speeds = Shape(1, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM), Machine()
    for name in ("causal", "window1024", "block_diffusion", "documents2000"):
        half = {"n": length // 2} if name == "block_diffusion" else {}
        attention = attndsl.compile(PROGRAMS[name].text, **half)
        doc = torch.from_numpy(document_ids(length, 2000)) if name in MEDIANS else None
        given = {} if doc is None else {"doc": doc}
        for number in ranks:
            chunk, times = chunk_size(length, number), []
            for _ in range(repeats):
                started = time.process_time()
                sight = sight_of(attention, length, chunk, shape, given)
                sight_key(attention, chunk, shape, given)
                reached = time.process_time()
                demand = weighed(sight, shape, speeds)
                layout = choose_layout("auto", length, number, [demand])
                chosen = time.process_time()
                asked = Asked(shape, "auto", False)
                sight_key(attention, chunk, shape, given)
                plan = plan_call(attention, layout, number // 2, given, asked, speeds, sight)
                ended = time.process_time()
                times.append((reached - started, chosen - reached, ended - chosen))
            reach, choice, routes = (round(min(x) * 1e3, 1) for x in zip(*times, strict=True))
            rows.append({
                "program": name, "ranks": number, "layout": layout.name,
                "group": plan.figures.group, "reach_ms": reach, "layout_ms": choice,
                "routes_ms": routes, "plan_ms": round(min(map(sum, times)) * 1e3, 1),
                "buffer_gb": round(plan.figures.buffer / 1e9, 2),
            })  # fmt: skip
    return rows


def table_of_plans(rows: list[dict[str, Any]]) -> str:
    """Times and buffers of plans, in Markdown."""
    lines = [
        "| program | GPUs | layout | plan, ms | buffer, GB |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    lines += [
        f"| {row['program']} | {row['ranks']:,} | {row['layout']} | {row['plan_ms']:.1f} | "
        f"{row['buffer_gb']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, and do what they say."""
    arguments = read_arguments()
    if arguments.parts:
        heads, kv_heads = map(int, arguments.heads.split(","))
        measure_all([
            Part(name, tokens, system, (heads, kv_heads), arguments.profile)
            for name, tokens, system in json.loads(arguments.parts)
        ], arguments.patience)  # fmt: skip
    elif arguments.plans:
        torch.set_num_threads(1)
        found = plans()
        print(table_of_plans(found))
        if arguments.write:
            keep(PLANNED, "scaling_plans", f"{machine('cpu')}, one thread", found)
            put(table_of_plans(found), PLANS_BEGIN, PLANS_END)
    elif arguments.measured or arguments.merge:
        write_measured([Path(x) for x in arguments.merge or ()], arguments.write)
    elif arguments.run:
        gpus = torch.cuda.device_count()
        head = {
            "benchmark": "scaling",
            "machine": f"{gpus} x {machine('cuda')}" if gpus else machine("cpu"),
            "date": datetime.date.today().isoformat(), "versions": versions(),
        }  # fmt: skip
        programs, systems = arguments.programs.split(","), arguments.systems.split(",")
        tokens = tuple(map(int, arguments.tokens.split(",")))
        known = json.loads(MEASURED.read_text("utf-8"))["rows"] if arguments.missing else ()
        asked = Asked(
            tuple(programs), tokens, arguments.heads, tuple(systems), arguments.profile,
            arguments.limit, arguments.part_limit, done_in(known, arguments.heads),
        )  # fmt: skip
        run(asked, list(map(int, arguments.run.split(","))), head, Path(arguments.output))
    else:
        tiles = seconds_of_tiles()
        rows = [row for ranks in RANKS for row in simulated(ranks, tiles=tiles)]
        print(table(rows))
        if arguments.write:
            write(rows)


def read_arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--measured", action="store_true", help="the table of what was measured")
    parser.add_argument("--merge", nargs="+", help="result files of runs, to add to the results")
    parser.add_argument("--run", help="numbers of GPUs, such as 2,4,8")
    parser.add_argument("--tokens", default="8192,32768,131072", help="of each GPU")
    parser.add_argument("--heads", default="64,8", help="query heads and key heads")
    parser.add_argument("--programs", default=",".join(TEXTS))
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="ours, and torch's own two")
    parser.add_argument("--profile", action="store_true", help="also what each GPU's time goes to")
    parser.add_argument("--missing", action="store_true",
                        help="only what the committed results have no figures of")  # fmt: skip
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds in all")
    parser.add_argument("--part-limit", type=float, default=300.0, help="seconds of a part")
    parser.add_argument("--output", default=str(MEASURED), help="the result file of --run")
    parser.add_argument("--parts", help=argparse.SUPPRESS)
    parser.add_argument("--patience", type=float, default=300.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.missing and Path(given.output).resolve() == MEASURED.resolve():
        parser.error("--missing would leave the results with the rows that it measures: "
                     "name another --output, and --merge it")  # fmt: skip
    return given


def write_measured(files: list[Path], writes: bool) -> None:
    """Print the table of what was measured, with the rows of ``files``; and write both."""
    data = [json.loads(path.read_text("utf-8")) for path in (MEASURED, *files)]
    rows = merged([x["rows"] for x in data]) if files else data[0]["rows"]
    text, errors = table_of_measured(rows), errors_of_simulation(rows)
    print(text, table_of_predicted(rows), errors, sep="\n\n")
    if writes:
        if files:
            MEASURED.write_text(json.dumps({**data[-1], "rows": rows}, indent=1) + "\n", "utf-8")
        put(text, MEASURED_BEGIN, MEASURED_END)
        put(errors, PREDICTED_BEGIN, PREDICTED_END)


def write(rows: list[dict[str, Any]]) -> None:
    """The results of the simulation, the table of the page, and its picture."""
    keep(SIMULATED, "scaling_simulated", "none: simulated", rows)
    PICTURE.write_text(draw(best_rows(rows), RANKS), "utf-8")
    put(table(rows), BEGIN, END)


def keep(path: Path, benchmark: str, where: str, rows: list[dict[str, Any]]) -> None:
    """Write results."""
    data = {
        "benchmark": benchmark, "machine": where, "date": datetime.date.today().isoformat(),
        "versions": versions(), "rows": rows,
    }  # fmt: skip
    put_results(path, data)


def put(text: str, begin: str, end: str) -> None:
    """Write a table into the page."""
    before, rest = PAGE.read_text("utf-8").split(begin)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}", "utf-8")


if __name__ == "__main__":
    main()
