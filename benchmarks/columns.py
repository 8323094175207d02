"""Rows of calls over long caches, whose columns take turns in one process.

Keys and values are copied so often that the calls of a CUDA graph read twice what the L2 cache
holds: each call reads them from memory.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import worker
from turns import Run, by_turns, graph_of, said_by

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

ROUNDS, QUICK_ROUNDS = 15, 3
_CACHE_BYTES = 1 << 27
"""Twice the L2 cache of an H200, and a little more."""
_MOST_COPIES, _LEAST_CALLS = 64, 10
_WARMING = 0.6
"""The most of a limit that compiling may take."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Row = TypeVar("_Row", bound=_Named)


def named(rows: Iterable[_Row], name: str) -> _Row:
    """The row of that name."""
    return next(row for row in rows if row.name == name)


def copies_for(live_bytes: int) -> int:
    """How many caches take turns, so that none stays in the L2 cache.

    Args:
        live_bytes: What a call reads and writes at least.
    """
    return max(1, min(_MOST_COPIES, -(-_CACHE_BYTES // live_bytes)))


class TurningCalls:
    """How each column runs a row: each call with the next one of some caches.

    A column ``name`` is a method ``_name``, which gives a function of a cache's number.
    """

    def __init__(self, copies: int) -> None:
        """Nothing is made yet; ``copies`` is how many caches there are."""
        self._copies = copies
        self.number = -(-_LEAST_CALLS // copies) * copies
        """Calls of a graph: whole turns of the caches."""
        self._turn = 0
        self._functions: dict[str, Any] = {}

    def of(self, column: str) -> Run:
        """A column's call.

        Raises:
            Exception: Whatever the column says of a call that it does not run.
        """
        function = self._functions[column] = getattr(self, f"_{column}")()

        def call() -> Any:
            self._turn = (self._turn + 1) % self._copies
            return function(self._turn)

        call()
        return Run(call)

    def first(self, column: str) -> Any:
        """A column's output for the first cache."""
        return self._functions[column](0)


@contextmanager
def side_stream() -> Iterator[Any]:
    """A stream on which graphs are made, behind all that has been asked for, without gradients."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        yield stream


def measured(
    calls: TurningCalls, columns: Sequence[str], rounds: int, stream: Any
) -> tuple[worker.Found, dict[str, Any]]:
    """Times of all columns in microseconds, and their outputs; graphs are made on ``stream``."""
    runs: dict[str, Run] = {}
    results: dict[str, Any] = {}
    found: worker.Found = {}
    for column in columns:
        try:
            runs[column] = calls.of(column)
            results[column] = calls.first(column)
        except Exception as error:
            found[column] = {"why": said_by(error)}
            runs.pop(column, None)
    found |= {column: {"eager": us} for column, us in by_turns(runs, rounds).items()}
    graphs = {}
    for column, run in runs.items():
        try:
            graphs[column] = Run(graph_of(run, stream, calls.number).replay)
        except Exception as error:
            found[column]["device_why"] = said_by(error)
    for column, us in by_turns(graphs, rounds).items():
        found[column]["device"] = us / calls.number
    return found, results


def apart(found: Any, wanted: Any) -> float:
    """The distance of an output from another one, as a share of the latter."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def said_of_columns(columns: Sequence[str], found: worker.Found, live_bytes: int) -> dict[str, Any]:
    """What a row's line says of each column, from what its worker found."""
    line: dict[str, Any] = {}
    for column in columns:
        given = found.get(column, {"why": found.get("why", "nothing was measured")})
        line |= {f"{column}_{what}": value for what, value in given.items()}
        device = line.get(f"{column}_device")
        line[f"{column}_tbs"] = device and live_bytes / device * 1e-6
    return line


def parser_of(description: str, columns: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The options of a benchmark of rows.

    Args:
        description: Its first line counts.
        columns: Those that one may choose among, if one may.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rows", help="names, by semicolons; all by default")
    if columns:
        parser.add_argument("--columns", default=",".join(columns), help="names, by commas")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def add_limit(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark that compiles side by side first, and may end early."""
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS",
                        help="end by then; rows that were not reached say so")  # fmt: skip
    parser.add_argument("--processes", type=int, default=min(32, os.cpu_count() or 1),
                        help="processes that compile side by side first; 0 for none")  # fmt: skip
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)


def compile_first(
    script: Path, cells: Sequence[worker.Cell], options: argparse.Namespace, begin: float,
    flags: Sequence[str] = (),
) -> None:  # fmt: skip
    """Have ``--processes`` workers compile what ``cells`` need, and say how many of them did.

    Args:
        script: Its workers with ``--warm`` answer a cell once it has been compiled.
        cells: Those that take longest first.
        options: Of :func:`add_limit`.
        begin: When the limit began.
        flags: Of all workers.
    """
    if options.processes:
        until = begin + _WARMING * options.limit
        number = worker.warmed(script, cells, [*flags, "--warm"], options.processes, until)
        took = time.monotonic() - begin
        print(f"compiled in {took:.0f} s: {number} of {len(cells)}", flush=True)


def compiled(calls: TurningCalls, column: str) -> worker.Found:
    """What a worker with ``--warm`` answers: a column has run once, or why it has not.

    Many such workers share a GPU, so that none keeps memory.
    """
    import torch

    found: worker.Found = {}
    try:
        with side_stream():
            calls.of(column)
    except Exception as error:
        found = {"why": said_by(error)}
    del calls
    torch.cuda.empty_cache()
    return found


def chosen_columns(
    parser: argparse.ArgumentParser, written: str, known: Collection[str]
) -> tuple[str, ...]:
    """The columns that ``--columns`` names; ends with an error where one of them is unknown."""
    columns = tuple(written.split(","))
    if unknown := [name for name in columns if name not in known]:
        parser.error(f"there is no column {unknown[0]!r}; there are: {', '.join(known)}")
    return columns


def chosen_rows(
    parser: argparse.ArgumentParser, written: str | None, known: Mapping[str, Any]
) -> list[str]:
    """The rows that ``--rows`` names; ends with an error where one is unknown, or without a GPU."""
    names = written.split(";") if written else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no row {unknown[0]!r}; there are: {'; '.join(known)}")
    import torch

    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    return names
