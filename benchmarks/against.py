"""attndsl against every peer at a hundred shapes, thirty of which nobody can have tuned for.

    python benchmarks/against.py [--rows REGEX] [--seed N] [--modes eager,device] [--peers fa4]
                                 [--quick] [--limit SECONDS] [--resume]

Rows are the fixed ones of ``against_rows.py`` and those that ``--seed`` draws. Several processes
compile the kernels of all rows first. Then one process measures them, all columns of a row by
turns, forward and backward; decoding rows have no backward pass. Times are microseconds of a call:
``eager`` as a user makes it, ``device`` within a CUDA graph of several calls, ``graph`` in a graph
of one call, replayed from Python, ``compiled`` as a function of torch.compile. FlexAttention is
compiled in all modes.

A row is lost if a peer is more than 2% faster. ``difference`` is the relative distance of results,
of each mode, from attndsl's in the first mode; beyond two percent it is WRONG, and the figure
counts nowhere. The result file is written after each row. ``--resume`` goes on with one of the same
commit, machine, seed, modes and peers.

Exit status: 1 if a result is wrong, or attndsl has no figure in a row that was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

from against_rows import COLUMNS, MODES, ON_CPUS, OURS, add_options, columns_of, every_row, named_of
from decoding import conditions, count

import common
import worker
from columns import add_limit, compile_first

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from against_rows import Row

    Record = Mapping[str, Any]

NAME = "against"
MARGIN, BOUND = 1.02, 0.02
"""The margin by which a peer wins; the largest distance of results that are the same."""
COMPILED = ("flex_flash", "flex", "fa4", "fa4_varlen", "flashinfer", OURS)
"""Columns whose kernels are compiled here; those that take longest first."""
TITLES = {
    "cudnn": "cuDNN", "fa2": "FA-2", "efficient": "SDPA, memory-efficient", "fa4": "FA-4",
    "fa4_varlen": "FA-4, varlen", "flashinfer": "FlashInfer", "flex": "FlexAttention",
    "flex_flash": "FlexAttention, FLASH",
}  # fmt: skip
_PACKAGES = ("flash-attn-4", "flashinfer-python")
_SECONDS = 240.0
"""Longest a row may take."""
_SAME = ("benchmark", "machine", "seed", "modes", "peers", "quick")
"""Entries that a file shares with the run that goes on with it, beside its commit."""


class Figure(NamedTuple):
    """Times of attndsl and of one peer in one mode, in microseconds."""

    name: str
    direction: str
    mode: str
    peer: str
    ours: float
    theirs: float

    @property
    def speed(self) -> float:
        """Speed of attndsl over the peer's."""
        return self.theirs / self.ours

    @property
    def is_lost(self) -> bool:
        """True if the peer is ahead by more than the margin."""
        return self.ours > MARGIN * self.theirs


class Wrong(NamedTuple):
    """Results that are not those of attndsl in its first mode."""

    name: str
    direction: str
    mode: str
    column: str
    difference: float | None


def records_of(row: Row, found: worker.Found) -> list[dict[str, Any]]:
    """A record for each direction of a row, from what its worker found."""
    shape = {"name": row.name, **asdict(row)}
    if "why" in found:
        return [{**shape, "direction": way, "why_not": found["why"]} for way in row.directions]
    return [{**shape, "direction": way, **found[way]} for way in row.directions]


def wrong(records: Iterable[Record]) -> list[Wrong]:
    """All results beyond the bound, and those that are no numbers."""
    return [
        Wrong(record["name"], record["direction"], mode, column, difference)
        for record in records
        for mode, columns in record.get("difference", {}).items()
        for column, difference in columns.items()
        if difference is None or difference > BOUND
    ]


def figures(records: Sequence[Record]) -> list[Figure]:
    """All comparisons of right results."""
    bad = {each[:4] for each in wrong(records)}
    found = []
    for record in records:
        for mode, times in record.get("us", {}).items():
            where = (record["name"], record["direction"], mode)
            if OURS not in times or (*where, OURS) in bad:
                continue
            found += [
                Figure(*where, peer, times[OURS], time)
                for peer, time in times.items()
                if peer != OURS and (*where, peer) not in bad
            ]
    return found


def lost(found: Iterable[Figure]) -> list[Figure]:
    """Comparisons that a peer wins, the worst first."""
    return sorted((one for one in found if one.is_lost), key=lambda one: one.speed)


def fastest(found: Iterable[Figure]) -> list[Figure]:
    """The fastest peer of each row, direction and mode."""
    best: dict[tuple[str, str, str], Figure] = {}
    for one in found:
        best[one[:3]] = min(one, best.get(one[:3], one), key=lambda each: each.theirs)
    return list(best.values())


def means(found: Iterable[Figure]) -> dict[tuple[str, str, str], list[Figure]]:
    """The figures of each mode, direction and peer."""
    parts: dict[tuple[str, str, str], list[Figure]] = {}
    for one in found:
        parts.setdefault((one.mode, one.direction, one.peer), []).append(one)
    return dict(sorted(parts.items(), key=lambda part: (MODES.index(part[0][0]), *part[0])))


def unmeasured(records: Iterable[Record]) -> list[str]:
    """Rows without a figure of attndsl, with the reason."""
    found = []
    for record in records:
        where = f"{record['name']}, {record['direction']}"
        if "why_not" in record:
            found.append(f"{where}: {record['why_not']}")
        for mode, times in record.get("us", {}).items():
            if OURS not in times:
                found.append(f"{where}, {mode}: {record['why'][mode].get(OURS, 'no reason')}")
    return found


def status(records: Sequence[Record]) -> int:
    """The exit status of a run."""
    return int(bool(wrong(records) or unmeasured(records)))


def report(records: Sequence[Record], left: Sequence[str]) -> str:
    """All that a run has to say."""
    found = figures(records)
    losses = lost(found)
    lines = [
        f"{mode}, {direction}, {peer}: {_mean(part):.3f} of {len(part)} rows, "
        f"{sum(one.is_lost for one in part)} lost"
        for (mode, direction, peer), part in means(found).items()
    ]
    for record in records:
        for mode, columns in record.get("difference", {}).items():
            said = ", ".join(f"{name} {_percent(each)}" for name, each in columns.items())
            lines.append(f"difference {record['name']}, {record['direction']}, {mode}: {said}")
    lines += [f"LOST {_told(one)}" for one in losses]
    lines += [
        f"WRONG {one.name}, {one.direction}, {one.mode}: {one.column}, {_percent(one.difference)}"
        for one in wrong(records)
    ]
    lines += [f"NOT MEASURED {each}" for each in unmeasured(records)]
    lines += [f"NO PEER {each}" for each in _alone(records)]
    reasons = Counter(
        (column, why)
        for record in records
        for columns in record.get("why", {}).values()
        for column, why in columns.items()
        if column != OURS
    )
    lines += [f"no figure of {name}, {n} times: {why}" for (name, why), n in reasons.items()]
    lines += [f"LEFT {name}" for name in left]
    rows = {one[:3] for one in losses}
    lines.append(
        f"{len(rows)} of {len(fastest(found))} comparisons with the fastest peer lost by more than "
        f"{100 * (MARGIN - 1):.0f}%; {len(left)} rows left"
    )
    return "\n".join(lines)


def _mean(found: Sequence[Figure]) -> float:
    return geometric_mean([one.speed for one in found])


def _percent(difference: float | None) -> str:
    return "no number" if difference is None else f"{100 * difference:.2g}%"


def _told(one: Figure) -> str:
    return (
        f"{one.name}, {one.direction}, {one.mode}: {one.ours:.1f} us, {one.peer} {one.theirs:.1f} "
        f"us ({one.speed:.3f}x)"
    )


def _alone(records: Sequence[Record]) -> Iterator[str]:
    """Records that no peer could be compared with, so that nothing says that they are right."""
    for record in records:
        columns = {c for each in record.get("difference", {}).values() for c in each} - {OURS}
        if "why_not" not in record and not columns:
            yield f"{record['name']}, {record['direction']}"


def section(results: Mapping[str, Any] | None) -> str:
    """The tables of docs/results, from the result file; nothing where there is none.

    Raises:
        ValueError: A result is wrong, or attndsl has no figure somewhere.
    """
    if results is None:
        return ""
    records = results["rows"]
    if status(records):
        raise ValueError(f"{NAME}.json has wrong or missing results of attndsl")
    found = figures(records)
    names = {record["name"] for record in records}
    best = fastest(found)
    losses = lost(best)
    head = (
        f"`{NAME}.json`: {len(names)} shapes, "
        f"{sum(name.startswith('drawn ') for name in names)} drawn by seed {results['seed']}; one "
        f"{conditions(results)} A speed below 1 means that attndsl is slower. A row is lost if a "
        "peer is more "
        f"than {100 * (MARGIN - 1):.0f}% faster."
    )
    table = [["mode", "direction", "peer", "geometric mean", "rows", "lost"]]
    table += [
        [mode, direction, TITLES[peer], f"{_mean(part):.2f}x", str(len(part)),
         str(sum(one.is_lost for one in part))]
        for (mode, direction, peer), part in means(found).items()
    ]  # fmt: skip
    said = f"The fastest peer wins {len(losses)} of {len(best)} comparisons"
    if not losses:
        return f"{head}\n\n{_lines(table)}\n\n{said}."
    rows = [["lost row", "direction", "mode", "attndsl, us", "fastest peer", "us", "speed"]]
    rows += [
        [one.name, one.direction, one.mode, f"{one.ours:.1f}", TITLES[one.peer],
         f"{one.theirs:.1f}", f"{one.speed:.2f}x"]
        for one in losses
    ]  # fmt: skip
    return f"{head}\n\n{_lines(table)}\n\n{said}:\n\n{_lines(rows)}"


def _lines(table: list[list[str]]) -> str:
    cells = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def speeds(records: Sequence[Record]) -> list[float]:
    """Speeds of attndsl on the device over those of the fastest peer."""
    return [one.speed for one in fastest(figures(records)) if one.mode == "device"]


def answer(records: Sequence[Record]) -> str:
    """A sentence for docs/benchmarks.md."""
    found = speeds(records)
    behind = sum(speed * MARGIN < 1 for speed in found)
    return (
        f"geometric mean {geometric_mean(found):.2f}x the speed of the fastest peer "
        f"({count(found)}); a peer is more than {100 * (MARGIN - 1):.0f}% faster in {behind}"
    )


def _head(options: argparse.Namespace, modes: Sequence[str]) -> dict[str, Any]:
    """Entries of a result file beside its rows."""
    versions = common.versions()
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "benchmark": NAME, "machine": common.machine(options.device),
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "versions": versions,
        "seed": options.seed, "modes": list(modes), "peers": options.peers,
        "quick": options.quick,
    }  # fmt: skip


def kept(path: Path, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records of a run of the same kind that was cut; those that failed are measured again."""
    if not path.exists():
        return []
    old = json.loads(path.read_text("utf-8"))
    if old["versions"] != head["versions"] or any(old.get(x) != head[x] for x in _SAME):
        return []
    return [record for record in old["rows"] if "why_not" not in record]


def _options() -> tuple[argparse.Namespace, tuple[str, ...], dict[str, Row]]:
    """The command line, the modes, and the rows that it chooses."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", metavar="REGEX", help="rows whose names it is found in")
    add_options(parser)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--resume", action="store_true", help="go on with the result file")
    parser.add_argument("--output", type=Path, default=common.RESULTS / f"{NAME}.json")
    add_limit(parser)
    options = parser.parse_args()
    able = ON_CPUS if options.device == "cpu" else MODES
    modes = named_of(parser, options.modes, able) or (("eager",) if able is ON_CPUS else MODES)
    named_of(parser, options.peers, COLUMNS[1:])
    pattern = options.rows or ("^tiny" if able is ON_CPUS else "^(?!tiny)")
    try:
        rows = {n: row for n, row in every_row(options.seed).items() if re.search(pattern, n)}
    except re.error as error:
        parser.error(f"--rows {pattern}: {error}")
    if not rows:
        parser.error(f"no row has {pattern!r} in its name")
    return options, modes, rows


def main() -> int:
    """Parse the command line, measure, print and write."""
    begin = time.monotonic()
    options, modes, rows = _options()
    # FlashAttention-4 otherwise compiles anew in each process.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    head = _head(options, modes)
    records = kept(options.output, head) if options.resume else []
    done = {record["name"] for record in records}
    todo = [name for name in rows if name not in done]
    script = Path(__file__).with_name("against_peers.py")
    flags = ["--seed", str(options.seed), "--modes", ",".join(modes), "--device", options.device]
    flags += ["--peers", options.peers] if options.peers else []
    peers = options.peers and options.peers.split(",")
    cells = [
        {"row": name, "column": column}
        for column in COMPILED for name in todo if column in columns_of(rows[name], peers)
    ]  # fmt: skip
    compile_first(script, cells, options, begin, flags)
    flags += ["--quick"] * options.quick
    left: list[str] = []
    answers = worker.measured(
        script, [{"row": name} for name in todo], flags, _SECONDS, until=begin + options.limit
    )
    for number, (cell, found) in enumerate(answers, 1):
        name = cell["row"]
        if found.get("why") == worker.OUT_OF_TIME:
            left.append(name)
        else:
            records += records_of(rows[name], found)
        common.put_results(options.output, {**head, "left": left, "rows": records})
        own = [record for record in records if record["name"] == name]
        print(f"[{number}/{len(todo)}, {time.monotonic() - begin:.0f} s] {_progress(name, own)}",
              file=sys.stderr, flush=True)  # fmt: skip
    print(report(records, left))
    return status(records)


def _progress(name: str, records: Sequence[Record]) -> str:
    """A line of a row: the fastest peer of each direction and mode, and what went wrong."""
    parts = [
        f"{one.direction} {one.mode} {one.ours:.1f} us, {one.peer} {one.theirs:.1f}"
        for one in fastest(figures(records))
    ]
    parts += [f"WRONG {one.column} {one.direction} {one.mode}" for one in wrong(records)]
    parts += [record["why_not"] for record in records if "why_not" in record]
    return f"{name}: {'; '.join(parts) or 'no comparison'}"


if __name__ == "__main__":
    sys.exit(main())
