"""Packed requests over pages beside the same requests over dense caches.

    python benchmarks/serving.py [--rows "B32 x 4k, pages of 16;tree"] [--quick] [--limit SECONDS]

Each row is one step. All columns of a row take turns in one process. ``pages`` is ``serve`` with
the kernels that read pages. ``planned`` is a further layer of the same step, whose plan exists.
``gathered`` is what ``serve`` does by default. ``dense`` is a call over a cache that is not in
pages: the kernels for few rows, and at the row ``chunk`` those of a plain forward. Dense columns
hold the same keys, in bf16. ``flashinfer`` is FlashInfer's paged prefill wrapper (backend fa2),
where the package is there. It plans on the host, outside of what is timed, and runs no tree.

``device`` is the time of a call within a CUDA graph in microseconds, the median of rounds of at
least 3 ms by CUDA events. Keys and values are copied so often that a graph's calls read twice what
the L2 cache holds. ``eager`` is the time of the same calls as a user makes them. ``tbs`` are
terabytes a second of live bytes, in the pages' dtype. ``of_dense`` is the time of ``dense`` over
that of ``pages``, so below 1 is slower. ``difference`` is the largest relative distance of results
to those of ``gathered``.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import worker
from columns import (
    QUICK_ROUNDS,
    ROUNDS,
    TurningCalls,
    add_limit,
    apart,
    chosen_rows,
    compile_first,
    compiled,
    copies_for,
    measured,
    named,
    parser_of,
    said_of_columns,
    side_stream,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMNS = ("pages", "planned", "gathered", "dense", "flashinfer")
COMPILED = ("flashinfer", "pages", "gathered", "dense")
"""Columns whose kernels are compiled; those that take longest first."""
WINDOW, CAP = 1024, 50.0
MOST_FEW = 64
"""Queries of a request that kernels for few rows run."""
TREE = """
tensor context[batch]: int
tensor ancestor[tokens, n]: bool
mask = kv < context[b] or ancestor[token, max(kv - context[b], 0)]
"""
TEXTS = {
    "plain": "causal()",
    "window": f"sliding_window({WINDOW})",
    "soft cap": f"mask = causal()\nscore = softcap(score, {CAP})",
    "tree": TREE,
}


@dataclass(frozen=True)
class Row:
    """One step of requests of one length."""

    name: str
    batch: int
    kv_len: int
    page: int = 16
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    q_len: int = 1
    program: str = "plain"
    fp8: bool = False


ROWS = (
    *(Row(f"B32 x 4k, pages of {page}", 32, 4096, page) for page in (1, 16, 128)),
    *(Row(f"B1 x 128k, pages of {page}", 1, 131072, page) for page in (16, 128)),
    Row("B1 x 1k", 1, 1024),
    Row("window", 1, 131072, program="window"),
    Row("soft cap", 8, 32768, program="soft cap"),
    Row("fp8", 1, 262144, heads=32, kv_heads=4, fp8=True),
    Row("causal, 64 drafts", 1, 16384 + 64, q_len=64),
    Row("tree", 1, 16384 + 64, q_len=64, program="tree"),
    Row("chunk", 1, 16384 + 2048, q_len=2048),
)


def live_bytes(row: Row) -> int:
    """What a call reads and writes at least."""
    keys = min(row.kv_len, WINDOW + row.q_len - 1) if row.program == "window" else row.kv_len
    of_keys = (1 if row.fp8 else 2) * 2 * row.kv_heads * keys
    return row.batch * row.dim * (of_keys + 4 * row.heads * row.q_len)


class Calls(TurningCalls):
    """How each column runs a row."""

    def __init__(self, row: Row, device: str = "cuda", copies: int | None = None) -> None:
        """Make the inputs; ``copies`` is how many caches there are."""
        import torch

        import attndsl

        copies = copies_for(live_bytes(row)) if copies is None else copies
        super().__init__(copies)
        torch.manual_seed(0)
        self._row = row
        kind = {"device": device, "dtype": torch.bfloat16}
        tokens, each = row.batch * row.q_len, -(-row.kv_len // row.page)
        self._q = torch.randn(tokens, row.heads, row.dim, **kind)
        self._starts = torch.arange(row.batch + 1, device=device).int() * row.q_len
        lengths = torch.full((row.batch,), row.kv_len, dtype=torch.int32, device=device)
        self._lengths = lengths
        self._captures: dict[str, Any] = {}
        if row.program == "tree":
            ancestor = torch.rand(tokens, row.q_len, device=device) < 0.3
            self._captures = {"context": lengths - row.q_len, "ancestor": ancestor}
        shape = (row.batch * each, row.page, row.kv_heads, row.dim)
        self._caches = []
        for _ in range(copies):
            pools = [torch.randn(shape, **kind) for _ in range(2)]
            if row.fp8:
                pools = [x.to(torch.float8_e4m3fn) for x in pools]
            table = torch.randperm(shape[0], device=device).view(row.batch, each).int()
            self._caches.append(attndsl.PagedCache(*pools, table, lengths))

    def first(self, column: str) -> Any:
        """A column's output for the first cache, (tokens, heads, dim)."""
        found = super().first(column)
        return found.transpose(1, 2).flatten(0, 1) if column == "dense" else found

    def _pages(self) -> Any:
        return self._served("decode")

    def _planned(self) -> Any:
        import attndsl

        attention = attndsl.compile(TEXTS[self._row.program], backend="decode")
        plans = [
            attention.plan(cache, self._starts, len(self._q), most_queries=self._row.q_len)
            for cache in self._caches
        ]
        return lambda turn: attention.serve(
            self._q, self._caches[turn], self._starts, plan=plans[turn], **self._captures
        )

    def _gathered(self) -> Any:
        return self._served("auto")

    def _served(self, backend: str) -> Any:
        import attndsl

        attention = attndsl.compile(TEXTS[self._row.program], backend=backend)
        return lambda turn: attention.serve(
            self._q, self._caches[turn], self._starts, most_queries=self._row.q_len,
            **self._captures,
        )  # fmt: skip

    def _flashinfer(self) -> Any:
        import flashinfer
        import torch

        row = self._row
        if row.program == "tree":
            message = "a tree would be a mask of bits for all pairs"
            raise NotImplementedError(message)
        room = torch.empty(1 << 28, dtype=torch.uint8, device=self._q.device)
        each = -(-row.kv_len // row.page)
        ends = torch.arange(row.batch + 1, device=self._q.device).int() * each
        last = torch.full_like(ends[1:], row.kv_len - (each - 1) * row.page)
        wrappers = []
        for cache in self._caches:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "NHD", backend="fa2")
            wrapper.plan(
                self._starts, ends, cache.table.flatten(), last, row.heads, row.kv_heads, row.dim,
                row.page, causal=True, q_data_type=self._q.dtype,
                kv_data_type=cache.k_pages.dtype,
                window_left=WINDOW - 1 if row.program == "window" else -1,
                logits_soft_cap=CAP if row.program == "soft cap" else None,
            )  # fmt: skip
            wrappers.append(wrapper)
        caches = [(cache.k_pages, cache.v_pages) for cache in self._caches]
        return lambda turn: wrappers[turn].run(self._q, caches[turn])

    def _dense(self) -> Any:
        import torch

        import attndsl

        row = self._row
        many = row.q_len > MOST_FEW
        attention = attndsl.compile(TEXTS[row.program], backend="auto" if many else "decode")
        caches = []
        for cache in self._caches:
            pools = (cache.k_pages, cache.v_pages)
            rows = [x[cache.table.long()].flatten(1, 2)[:, : row.kv_len] for x in pools]
            caches.append([x.to(torch.bfloat16).transpose(1, 2).contiguous() for x in rows])
        q = self._q.view(row.batch, row.q_len, row.heads, row.dim).transpose(1, 2).contiguous()
        if many:
            return lambda turn: attention(q, *caches[turn], q_offset=row.kv_len - row.q_len)
        starts = self._lengths - row.q_len
        return lambda turn: attention(
            q, *caches[turn], q_offset=starts, kv_lengths=self._lengths, **self._captures
        )


class Bench:
    """Runs one row after the other in a worker."""

    def __init__(self, quick: bool) -> None:
        """Nothing is made before the first row."""
        self._rounds = QUICK_ROUNDS if quick else ROUNDS

    def warm(self, cell: worker.Cell) -> worker.Found:
        """Run one column of a row once, so that its kernels are cached."""
        return compiled(Calls(named(ROWS, cell["row"]), copies=1), cell["column"])

    def measure(self, cell: worker.Cell) -> worker.Found:
        """Times of all columns of a row."""
        import torch

        torch.cuda.empty_cache()
        row = named(ROWS, cell["row"])
        with side_stream() as stream:
            return found_of(Calls(row), self._rounds, stream)


def found_of(calls: Calls, rounds: int, stream: Any) -> worker.Found:
    """Times of all columns and how far their results are apart; graphs are made on ``stream``."""
    found, results = measured(calls, COLUMNS, rounds, stream)
    found["difference"] = difference(results)
    return found


def difference(results: Mapping[str, Any]) -> float | None:
    """The largest relative distance of a column's output to that of gathered keys."""
    wanted = results.get("gathered")
    others = [x for name, x in results.items() if name != "gathered"]
    if wanted is None or not others:
        return None
    return max(apart(x, wanted) for x in others)


def line_of(row: Row, found: worker.Found) -> dict[str, Any]:
    """A row's line, from what its worker found."""
    live = live_bytes(row)
    line: dict[str, Any] = {**asdict(row), "live_bytes": live}
    line |= said_of_columns(COLUMNS, found, live)
    ours, dense = line.get("pages_device"), line.get("dense_device")
    line["of_dense"] = dense / ours if ours and dense else None
    line["difference"] = found.get("difference")
    return line


def main() -> int:
    """Parse the command line, measure, print and write; 1 if a row of ours has no figure."""
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
    cells = [{"row": name, "column": column} for column in COMPILED for name in names]
    compile_first(Path(__file__), cells, options, begin)
    lines: list[dict[str, Any]] = []
    cells = [{"row": name} for name in names]
    answers = worker.measured(
        Path(__file__), cells, ["--quick"] * options.quick, until=begin + options.limit
    )
    for cell, found in answers:
        lines.append(line_of(rows[cell["row"]], found))
        print(lines[-1], flush=True)
        common.write("serving", "cuda", lines, options.output)
    common.print_table(lines, [
        "name", *(f"{c}_device" for c in COLUMNS), *(f"{c}_tbs" for c in COLUMNS), "of_dense",
        *(f"{c}_eager" for c in COLUMNS), "difference",
    ])  # fmt: skip
    return int(any(line.get("pages_device") is None for line in lines))


if __name__ == "__main__":
    sys.exit(main())
