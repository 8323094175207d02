"""What measured tile sizes would bring the rows of ``short.py``, beside those that are chosen.

    python benchmarks/short_tune.py [--rows "ViT-B;BERT 128"] [--limit SECONDS]

A call's tile sizes come from tables, and ``Attention.tune`` measures others. Each line is the
device time of a row in one direction within a CUDA graph, in microseconds, with the sizes that are
chosen and with those that ``tune`` finds. ``gain`` is the former over the latter: above 1.05 the
tables want another entry. ``sizes`` has each size that was tried, with the time of a call.

Several processes compile all sizes first. Each row has backends and a cache of its own, since what
``tune`` chooses for one row would serve others.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import worker
from columns import add_limit, chosen_rows, compile_first, named, parser_of
from short import DIRECTIONS, ROWS, Calls
from turns import Run, by_turns, graph_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from short import Row

ENOUGH = 1.05
"""What ``gain`` is to be at most."""
_ROUNDS, _QUICK_ROUNDS = 15, 3
_CALLS_OF_GRAPH = 10


class Bench:
    """Tunes one row after the other in a worker."""

    def __init__(self, quick: bool) -> None:
        """Nothing is made before the first row."""
        self._rounds = _QUICK_ROUNDS if quick else _ROUNDS

    def warm(self, cell: worker.Cell) -> worker.Found:
        """Compile all sizes of a row."""
        with fresh_kernels():
            calls = Calls(named(ROWS, cell["row"]))
            calls.of("attndsl")
            calls.tune()
        return {}

    def measure(self, cell: worker.Cell) -> worker.Found:
        """Times of a row by direction, before and after it was tuned."""
        import torch

        torch.cuda.empty_cache()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with fresh_kernels(), torch.cuda.stream(stream):
            calls = Calls(named(ROWS, cell["row"]))
            runs, _ = calls.of("attndsl")
            chosen = self._times(runs, stream)
            measurements = calls.tune().measurements
            tuned = self._times(runs, stream)
        sizes = [
            {"kernel": each.kernel, "size": each.config, "ms": each.milliseconds, "why": each.why}
            for each in measurements
        ]
        return {"chosen": chosen, "tuned": tuned, "sizes": sizes}

    def _times(self, runs: Mapping[str, Run], stream: Any) -> dict[str, float]:
        graphs = {
            direction: Run(graph_of(run, stream, _CALLS_OF_GRAPH).replay)
            for direction, run in runs.items()
        }
        times = by_turns(graphs, self._rounds)
        return {direction: us / _CALLS_OF_GRAPH for direction, us in times.items()}


@contextmanager
def fresh_kernels() -> Iterator[None]:
    """Backends that know no kernels, and a cache that has none."""
    from attndsl.foundation.caches import CACHES, Reason

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"ATTNDSL_CACHE_DIR": folder, "ATTNDSL_SHIPPED": "0"}
        CACHES.invalidate(Reason.BACKENDS)
        yield
    CACHES.invalidate(Reason.BACKENDS)


def lines_of(row: Row, found: worker.Found) -> list[dict[str, Any]]:
    """The lines of a row, one a direction, from what its worker found."""
    lines = []
    for direction in DIRECTIONS:
        line: dict[str, Any] = {**asdict(row), "direction": direction}
        if "why" in found:
            line["why"] = found["why"]
        else:
            line["chosen_us"] = found["chosen"][direction]
            line["tuned_us"] = found["tuned"][direction]
            line["gain"] = line["chosen_us"] / line["tuned_us"]
            line["sizes"] = [
                each for each in found["sizes"]
                if each["kernel"].startswith("forward") == (direction == "forward")
            ]  # fmt: skip
        lines.append(line)
    return lines


def summary(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The largest gain, the rows that gain too much, and those without a figure."""
    known = [line for line in lines if "gain" in line]
    said = []
    if known:
        most = max(known, key=lambda line: float(line["gain"]))
        said.append(
            f"{len(known)} lines; the most is gained by {_shown(most)}; "
            f"{sum(line['gain'] > ENOUGH for line in known)} gain more than {ENOUGH}"
        )
        said += [_shown(line) for line in known if line["gain"] > ENOUGH]
    said += [_shown(line) for line in lines if "gain" not in line]
    return said


def _shown(line: Mapping[str, Any]) -> str:
    name = f"{line['name']} {line['direction']}"
    if "gain" not in line:
        return f"{name}: {line['why']}"
    return f"{name}: {line['chosen_us']:.1f} -> {line['tuned_us']:.1f} us, {line['gain']:.3f}"


def main() -> int:
    """Parse the command line, measure, print and write; 1 if a line has no figure."""
    begin = time.monotonic()
    parser = parser_of(__doc__)
    add_limit(parser)
    options = parser.parse_args()
    if options.worker:
        bench = Bench(options.quick)
        worker.serve(json.loads(options.worker), bench.warm if options.warm else bench.measure)
        return 0
    rows = {row.name: row for row in ROWS}
    names = chosen_rows(parser, options.rows, rows)
    cells = [{"row": name} for name in names]
    compile_first(Path(__file__), cells, options, begin)
    lines: list[dict[str, Any]] = []
    flags = ["--quick"] * options.quick
    for cell, found in worker.measured(
        Path(__file__), cells, flags, until=begin + options.limit
    ):  # fmt: skip
        for line in lines_of(rows[cell["row"]], found):
            lines.append(line)
            print(_shown(line), flush=True)
        common.write("short_tune", "cuda", lines, options.output)
    print("\n".join(summary(lines)))
    return int(any("gain" not in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
