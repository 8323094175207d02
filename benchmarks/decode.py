"""Few queries over long caches beside torch's attention and FlexAttention.

    python benchmarks/decode.py [--rows "B8 x 32k;window"] [--columns attndsl,auto] [--quick]
                                [--limit SECONDS]

Each row is one shape and program. All columns of a row take turns in one process. ``device`` is the
time of a call within a CUDA graph in microseconds, the median of rounds of at least 3 ms by CUDA
events. Keys and values are copied so often that a graph's calls read twice what the L2 cache holds:
each call reads them from memory. ``eager`` is the time of the same calls as a user makes them.

``tbs`` are terabytes a second of live bytes: the keys and values that some query of the call may
see, the queries, and the output. The row ``ceilings`` has the bandwidth of a copy, measured in the
same run. ``best`` is the time of the best peer over that of attndsl, so below 1 is slower.
``difference`` is the largest relative distance of attndsl's results to those of a peer.

``attndsl`` asks for the kernels for few rows by name, and ``auto`` for whatever calls get.
"""

from __future__ import annotations

import json
import math
import random
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
    chosen_columns,
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
from turns import Run, by_turns

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMNS = ("attndsl", "auto", "sdpa", "flex")
PEERS = ("sdpa", "flex")
COMPILED = ("flex", "attndsl", "auto")
"""Columns whose kernels are compiled; those that take longest first."""
CEILINGS = "ceilings"
WINDOW, CAP, REACH = 1024, 50.0, 4096
TEXTS = {
    "plain": "causal()",
    "window": f"sliding_window({WINDOW})",
    "soft cap": f"mask = causal()\nscore = softcap(score, {CAP})",
    "alibi": "mask = causal()\nscore = score + alibi()",
    "distances": f"""
        tensor near[heads, {REACH}]: float
        mask = causal()
        score = score + where(q - kv < {REACH}, near[h, clamp(q - kv, 0, {REACH - 1})], 0.0)
    """,
    "sinks": "tensor logit[heads]: float\nmask = causal()\nsink = logit[h]",
}
_MEDIAN, _SIGMA, _LEAST, _MOST = 2048, 1.2, 16, 32768
"""Of the log-normal lengths of requests."""


@dataclass(frozen=True)
class Row:
    """One shape and program."""

    name: str
    batch: int
    kv_len: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    q_len: int = 1
    program: str = "plain"
    ragged: bool = False
    """Whether requests have lengths of their own."""


ROWS = (
    Row("B8 x 32k", 8, 32768),
    Row("B1 x 128k", 1, 131072),
    Row("B64 x 4k", 64, 4096),
    Row("B1 x 1k", 1, 1024),
    Row("D64", 8, 32768, dim=64),
    Row("D256", 8, 32768, dim=256),
    Row("8/8 heads", 8, 32768, 8, 8),
    Row("64/8 heads", 8, 32768, 64, 8),
    Row("4 queries", 8, 32768, q_len=4),
    Row("16 queries", 8, 32768, q_len=16),
    Row("window", 1, 131072, program="window"),
    Row("soft cap", 8, 32768, program="soft cap"),
    Row("ALiBi", 8, 32768, program="alibi"),
    Row("distances", 8, 32768, program="distances"),
    Row("sinks", 8, 32768, program="sinks"),
    Row("64 requests", 64, 32768, ragged=True),
)


def lengths_of(row: Row) -> list[int]:
    """Keys of each request, the queries' own included."""
    if not row.ragged:
        return [row.kv_len] * row.batch
    rng = random.Random(0)
    drawn = (round(rng.lognormvariate(math.log(_MEDIAN), _SIGMA)) for _ in range(row.batch))
    return [min(max(length, _LEAST), _MOST, row.kv_len) for length in drawn]


def live_bytes(row: Row) -> int:
    """What a call reads and writes at least."""
    reach = WINDOW + row.q_len - 1 if row.program == "window" else row.kv_len
    keys = sum(min(length, reach) for length in lengths_of(row))
    queries = row.batch * row.heads * row.q_len
    return 2 * row.dim * (2 * row.kv_heads * keys + 2 * queries)


def line_of(row: Row, found: worker.Found, ceilings: Mapping[str, float] | None) -> dict[str, Any]:
    """A row's line, from what its worker found."""
    live = live_bytes(row)
    line: dict[str, Any] = {**asdict(row), "live_bytes": live}
    line |= said_of_columns(COLUMNS, found, live)
    line["difference"] = found.get("difference")
    for kind in ("eager", "device"):
        peers = [line[f"{c}_{kind}"] for c in PEERS if line.get(f"{c}_{kind}") is not None]
        ours = line.get(f"attndsl_{kind}")
        line[f"best_{kind}"] = min(peers) / ours if ours and peers else None
    tbs = line["attndsl_tbs"]
    line["of_copy"] = tbs and ceilings and tbs / (ceilings["copy"] * 1e-12)
    return line


class Bench:
    """Runs one row after the other in a worker."""

    def __init__(self, quick: bool, columns: tuple[str, ...]) -> None:
        """Nothing is made before the first row."""
        self._rounds = QUICK_ROUNDS if quick else ROUNDS
        self._columns = columns

    def warm(self, cell: worker.Cell) -> worker.Found:
        """Run one column of a row once, so that its kernels are cached."""
        return compiled(Calls(named(ROWS, cell["row"]), copies=1), cell["column"])

    def measure(self, cell: worker.Cell) -> worker.Found:
        """Times of all columns of a row, or the bandwidth of a copy."""
        import torch

        torch.cuda.empty_cache()
        if cell["row"] == CEILINGS:
            return ceilings()
        calls = Calls(named(ROWS, cell["row"]))
        with side_stream() as stream:
            found, results = measured(calls, self._columns, self._rounds, stream)
        found["difference"] = difference(results)
        return found


def difference(results: Mapping[str, Any]) -> float | None:
    """Of our output from that of the first peer, as a share of the latter."""
    peer = next((results[column] for column in PEERS if column in results), None)
    if peer is None or "attndsl" not in results:
        return None
    return apart(results["attndsl"], peer)


class Calls(TurningCalls):
    """How each column runs a row."""

    def __init__(self, row: Row, device: str = "cuda", copies: int | None = None) -> None:
        """Make the inputs.

        Args:
            row: The shape and program.
            device: Where to.
            copies: How many caches there are; by default as many as leave none in the L2 cache.
        """
        import torch

        copies = copies_for(live_bytes(row)) if copies is None else copies
        super().__init__(copies)
        torch.manual_seed(0)
        self._row = row
        shape = (row.batch, row.kv_heads, row.kv_len, row.dim)
        kind = {"device": device, "dtype": torch.bfloat16}
        self._q = torch.randn(row.batch, row.heads, row.q_len, row.dim, **kind)
        self._caches = [tuple(torch.randn(shape, **kind) for _ in range(2)) for _ in range(copies)]
        self._lengths = torch.tensor(lengths_of(row), device=device, dtype=torch.int32)
        self._captures = {
            "distances": {"near": torch.randn(row.heads, REACH, device=device)},
            "sinks": {"logit": torch.randn(row.heads, device=device)},
        }.get(row.program, {})

    def _attndsl(self) -> Any:
        return self._program("decode")

    def _auto(self) -> Any:
        return self._program("auto")

    def _program(self, backend: str) -> Any:
        import attndsl

        attention = attndsl.compile(TEXTS[self._row.program], backend=backend)
        starts = self._lengths - self._row.q_len
        return lambda turn: attention(
            self._q, *self._caches[turn], q_offset=starts, kv_lengths=self._lengths,
            **self._captures,
        )  # fmt: skip

    def _sdpa(self) -> Any:
        import torch
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention

        row, mask = self._row, None
        if row.program not in ("plain", "window"):
            raise ValueError("it has no such score")
        keys = torch.arange(row.kv_len, device=self._q.device)
        if row.ragged or row.program == "window":
            positions = (
                self._lengths[:, None] - row.q_len + torch.arange(row.q_len, device=self._q.device)
            )
            mask = keys <= positions[..., None]
            if row.program == "window":
                mask &= positions[..., None] - keys < WINDOW
            mask = mask[:, None]
        elif row.q_len > 1:
            mask = causal_lower_right(row.q_len, row.kv_len)
        return lambda turn: scaled_dot_product_attention(
            self._q, *self._caches[turn], attn_mask=mask, enable_gqa=row.heads != row.kv_heads
        )

    def _flex(self) -> Any:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Each row is compiled anew: what changed since an earlier row in the same process would be
        # taken for a size that changes, and a mask that reads such a number does not compile.
        torch._dynamo.reset()
        row = self._row
        if row.program == "sinks":
            raise ValueError("it has no sinks")
        score, mask = flex_functions(row, self._lengths, self._captures)
        batch = row.batch if row.ragged else None
        blocks = create_block_mask(
            mask, batch, None, row.q_len, row.kv_len, device=self._q.device, _compile=True
        )
        compiled = torch.compile(flex_attention, dynamic=False)
        grouped = row.heads != row.kv_heads
        return lambda turn: compiled(
            self._q, *self._caches[turn], score_mod=score, block_mask=blocks, enable_gqa=grouped
        )


def flex_functions(row: Row, lengths: Any, captures: Mapping[str, Any]) -> tuple[Any, Any]:
    """FlexAttention's score function, or None, and its mask function."""
    import torch

    def distance(b: Any, q: Any, kv: Any) -> Any:
        return lengths[b] - row.q_len + q - kv

    def near(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        back = distance(b, q, kv)
        looked = captures["near"][h, back.clamp(0, REACH - 1)]
        return s + torch.where(back < REACH, looked, 0.0)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        back = distance(b, q, kv)
        return (back >= 0) & (back < WINDOW) if row.program == "window" else back >= 0

    scores = {
        "alibi": lambda s, b, h, q, kv: (
            s - torch.exp2(-8.0 * (h + 1) / row.heads) * distance(b, q, kv)
        ),
        "soft cap": lambda s, b, h, q, kv: CAP * torch.tanh(s / CAP),
        "distances": near,
    }
    return scores.get(row.program), mask


def ceilings() -> dict[str, float]:
    """Bytes a second of a copy, what it reads and what it writes."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times = by_turns({"copy": Run(lambda: target.copy_(source))}, 9)
    return {"copy": 2 * source.numel() / (times["copy"] * 1e-6)}


def main() -> int:
    """Parse the command line, measure, print and write; 1 if a row of ours has no figure."""
    begin = time.monotonic()
    parser = parser_of(__doc__, COLUMNS)
    add_limit(parser)
    options = parser.parse_args()
    columns = chosen_columns(parser, options.columns, COLUMNS)
    if options.worker:
        bench = Bench(options.quick, columns)
        worker.serve(json.loads(options.worker), bench.warm if options.warm else bench.measure)
        return 0
    rows = {row.name: row for row in ROWS}
    names = chosen_rows(parser, options.rows, rows)
    cells = [
        {"row": name, "column": column}
        for column in COMPILED if column in columns for name in names
    ]  # fmt: skip
    compile_first(Path(__file__), cells, options, begin)
    cells = [{"row": name} for name in (CEILINGS, *names)]
    flags = ["--columns", options.columns, *["--quick"] * options.quick]
    rates: dict[str, float] | None = None
    lines: list[dict[str, Any]] = []
    answers = worker.measured(Path(__file__), cells, flags, until=begin + options.limit)
    for number, (cell, found) in enumerate(answers):
        if cell["row"] == CEILINGS:
            rates = None if "why" in found else found
            print(f"[{number}/{len(names)}] {CEILINGS}: {found}", flush=True)
            continue
        lines.append(line_of(rows[cell["row"]], found, rates))
        print(f"[{number}/{len(names)}] {_shown(lines[-1])}", flush=True)
        written = [{"name": CEILINGS, **(rates or {})}, *lines]
        common.write("decode", "cuda", written, options.output)
    common.print_table(lines, [
        "name", *(f"{c}_device" for c in columns), *(f"{c}_tbs" for c in columns), "of_copy",
        *(f"{c}_eager" for c in columns), "best_device", "best_eager", "difference",
    ])  # fmt: skip
    return int(any(line.get("attndsl_device") is None for line in lines))


def _shown(line: Mapping[str, Any]) -> str:
    times = ", ".join(
        f"{c} {line[f'{c}_device']:.1f} us"
        if line.get(f"{c}_device") is not None
        else f"{c}: {line.get(f'{c}_why') or line.get(f'{c}_device_why')}"
        for c in COLUMNS
    )
    return f"{line['name']}: {times}"


if __name__ == "__main__":
    sys.exit(main())
