"""Short and odd shapes beside cuDNN, FlashAttention-2 and FlexAttention, and what the GPU allows.

    python benchmarks/short.py [--rows "ViT-B;diffusion, cross"] [--quick] [--limit SECONDS]

Several processes compile the kernels of all rows first. Then one process measures them.
Each row is one shape and program, each direction a line. All columns of a row take turns in one
process. ``eager`` is the time of a call as a user makes it, ``device`` that of the same call within
a CUDA graph, both in microseconds: medians of rounds of at least 3 ms by CUDA events.

``best`` is the time of the best peer over that of attndsl, so below 1 is slower. Peers are cuDNN
and FlashAttention-2, and FlexAttention where neither has such a score or mask. ``limit_us`` is the
largest of three times: bytes (each input read once, each output written once) over the bandwidth of
a copy, products of live pairs over the rate of a large matrix product, exponentials of live pairs
over the rate of a kernel of nothing else. The row ``ceilings`` has these rates as measured in the
same run. Where data stay in caches, kernels may be faster than their bytes allow. ``difference`` is
the largest relative distance of attndsl's results to those of a peer, so that no figure is that of
a wrong result.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import worker
from columns import add_limit, chosen_rows, compile_first, named, parser_of
from turns import Run, by_turns, graph_of, said_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

COLUMNS = ("attndsl", "cudnn", "fa2", "flex")
COMPILED = ("flex", "attndsl")
"""Columns whose kernels are compiled here; those that take longest first."""
DIRECTIONS = ("forward", "backward")
CEILINGS = "ceilings"
ENOUGH, ENOUGH_OF_SMALL, SMALL_US = 1.05, 0.97, 5.0
"""What ``best`` is to be, and for rows that take the device less than 5 us."""
WINDOW, CAP = 256, 50.0
TEXTS = {
    "full": "score",
    "causal": "causal()",
    "window": f"sliding_window({WINDOW})",
    "alibi": "mask = causal()\nscore = score + alibi()",
    "soft cap": f"mask = causal()\nscore = softcap(score, {CAP})",
    "padding": "tensor lengths[batch]: int\nmask = valid_keys(lengths)",
}
_ROUNDS, _QUICK_ROUNDS = 15, 3
_CALLS_OF_GRAPH = 10


@dataclass(frozen=True)
class Row:
    """One shape and program."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    program: str = "full"
    dtype: str = "bf16"


ROWS = (
    Row("ViT-B", 128, 12, 12, 197, 197, 64),
    Row("ViT-L", 32, 16, 16, 577, 577, 64),
    Row("BERT 128", 128, 12, 12, 128, 128, 64),
    Row("BERT 512", 32, 12, 12, 512, 512, 64),
    Row("diffusion, cross", 8, 8, 8, 4096, 77, 64),
    Row("SDXL self", 8, 20, 20, 1024, 1024, 64),
    Row("Swin", 1024, 8, 8, 49, 49, 32),
    Row("GPT-2", 16, 12, 12, 1024, 1024, 64, "causal"),
    Row("small", 4, 8, 8, 512, 512, 128, "causal"),
    Row("Llama", 4, 32, 8, 2048, 2048, 128, "causal"),
    Row("MLA", 2, 16, 16, 4096, 4096, 192, "causal"),
    Row("DiT", 4, 16, 16, 4096, 4096, 72),
    Row("D32", 8, 32, 32, 2048, 2048, 32, "causal"),
    Row("D96", 2, 32, 32, 4096, 4096, 96, "causal"),
    Row("D256", 2, 8, 4, 4096, 4096, 256, "causal"),
    Row("patches of 16", 2048, 8, 8, 16, 16, 32),
    Row("sentences", 256, 12, 12, 64, 64, 32, "padding"),
    Row("cross, 32 keys", 16, 16, 16, 1024, 32, 64),
    Row("cross, 1024 keys", 8, 16, 16, 256, 1024, 128),
    Row("window", 8, 12, 12, 2048, 2048, 64, "window"),
    Row("ALiBi", 16, 16, 16, 512, 512, 64, "alibi"),
    Row("soft cap", 4, 16, 16, 1024, 1024, 128, "soft cap"),
    Row("BERT, padded", 64, 12, 12, 384, 384, 64, "padding", "fp16"),
    Row("fp16", 32, 16, 16, 256, 256, 128, "causal", "fp16"),
    Row("D256, short", 8, 8, 8, 512, 512, 256),
    Row("one request", 1, 8, 8, 2048, 2048, 128, "causal"),
)


def lengths_of(row: Row) -> list[int]:
    """Valid keys of each batch entry of a padded row: from half of the keys to all."""
    return [row.kv_len - entry * 37 % (row.kv_len // 2 + 1) for entry in range(row.batch)]


def live_pairs(row: Row) -> int:
    """Pairs that take part, of all batch entries and heads."""
    if row.program == "padding":
        return row.heads * row.q_len * sum(lengths_of(row))
    if row.program == "full":
        pairs = row.q_len * row.kv_len
    else:
        reach = WINDOW if row.program == "window" else row.q_len
        pairs = sum(
            max(0, min(q + 1, row.kv_len) - max(0, q + 1 - reach)) for q in range(row.q_len)
        )
    return row.batch * row.heads * pairs


def needs_of(row: Row, direction: str) -> dict[str, float]:
    """Bytes, operations of products, and exponentials of one call, at least."""
    queries = row.batch * row.heads * row.q_len
    keys = row.batch * row.kv_heads * row.kv_len
    pairs = live_pairs(row)
    if direction == "forward":
        # q and the output, k and v, lse.
        moved = 2 * row.dim * (2 * queries + 2 * keys) + 4 * queries
        return {"copy": moved, "products": 2 * 2 * pairs * row.dim, "exponentials": pairs}
    # q, the output, its gradient and dQ; k, v, dK and dV; lse.
    moved = 2 * row.dim * (4 * queries + 4 * keys) + 4 * queries
    return {"copy": moved, "products": 5 * 2 * pairs * row.dim, "exponentials": pairs}


def limit_us(row: Row, direction: str, ceilings: Mapping[str, float]) -> float:
    """The time that no kernel is below, from what a GPU does in a second."""
    return 1e6 * max(need / ceilings[what] for what, need in needs_of(row, direction).items())


def lines_of(row: Row, found: worker.Found, ceilings: Mapping[str, float] | None) -> list[Any]:
    """The lines of a row, one a direction, from what its worker found."""
    lines = []
    for direction in DIRECTIONS:
        line: dict[str, Any] = {**asdict(row), "direction": direction}
        own: dict[str, dict[str, Any]] = found.get(direction, {})
        for column in COLUMNS:
            given = own.get(column, {"why": found.get("why", "nothing was measured")})
            line |= {f"{column}_{what}": value for what, value in given.items()}
        line["difference"] = found.get("difference", {}).get(direction)
        for kind in ("eager", "device"):
            times = {c: line.get(f"{c}_{kind}") for c in COLUMNS}
            line[f"best_{kind}"] = _best(times)
        if ceilings is not None:
            line["limit_us"] = limit_us(row, direction, ceilings)
            device = line.get("attndsl_device")
            line["of_limit"] = device and line["limit_us"] / device
        lines.append(line)
    return lines


def _best(times: Mapping[str, float | None]) -> float | None:
    """The best peer's time over ours."""
    usual = [times[column] for column in ("cudnn", "fa2") if times[column] is not None]
    peers = usual or [times["flex"]]
    ours = times["attndsl"]
    return None if ours is None or peers == [None] else min(peers) / ours


def summary(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Geometric means, and the lines that are behind."""
    said, lines = [], list(lines)
    for direction in DIRECTIONS:
        own = [line for line in lines if line["direction"] == direction]
        for kind in ("eager", "device"):
            found = [line[f"best_{kind}"] for line in own if line[f"best_{kind}"] is not None]
            if not found:
                continue
            mean = math.exp(statistics.fmean(map(math.log, found)))
            behind = [line["name"] for line in own if _is_behind(line, kind)]
            rest = f"; behind: {', '.join(behind)}" if behind else ""
            said.append(f"{direction}, {kind}: {mean:.3f} of {len(found)} rows{rest}")
        unknown = [line["name"] for line in own if line["best_device"] is None]
        if unknown:
            said.append(f"{direction}, not compared: {', '.join(unknown)}")
    return said


def _is_behind(line: Mapping[str, Any], kind: str) -> bool:
    best = line[f"best_{kind}"]
    if best is None:
        return False
    times = [line.get(f"{column}_device") for column in COLUMNS]
    small = min((time for time in times if time is not None), default=math.inf) < SMALL_US
    return bool(best < (ENOUGH_OF_SMALL if small else ENOUGH))


class Bench:
    """Runs one row after the other in a worker."""

    def __init__(self, quick: bool) -> None:
        """Nothing is made before the first row."""
        self._rounds = _QUICK_ROUNDS if quick else _ROUNDS

    def warm(self, cell: worker.Cell) -> worker.Found:
        """Run one column of a row once in both directions, so that its kernels are cached."""
        try:
            Calls(named(ROWS, cell["row"])).of(cell["column"])
        except Exception as error:
            return {"why": said_by(error)}
        return {}

    def measure(self, cell: worker.Cell) -> worker.Found:
        """Times of all columns of a row, or the ceilings."""
        import torch

        torch.cuda.empty_cache()
        if cell["row"] == CEILINGS:
            return ceilings()
        calls = Calls(named(ROWS, cell["row"]))
        runs: dict[str, dict[str, Run]] = {direction: {} for direction in DIRECTIONS}
        found: worker.Found = {direction: {} for direction in DIRECTIONS}
        results: dict[str, list[Any]] = {}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for column in COLUMNS:
                try:
                    own, results[column] = calls.of(column)
                except Exception as error:
                    why = said_by(error)
                    for direction in DIRECTIONS:
                        found[direction][column] = {"why": why}
                    continue
                for direction, run in own.items():
                    runs[direction][column] = run
            for direction in DIRECTIONS:
                times = self._times(runs[direction], stream)
                found[direction] |= times
        found["difference"] = _differences(results)
        return found

    def _times(self, runs: Mapping[str, Run], stream: Any) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {column: {} for column in runs}
        for column, us in by_turns(runs, self._rounds).items():
            found[column]["eager"] = us
        graphs = {}
        for column, run in runs.items():
            try:
                graphs[column] = Run(graph_of(run, stream, _CALLS_OF_GRAPH).replay)
            except Exception as error:
                found[column]["device_why"] = said_by(error)
        for column, us in by_turns(graphs, self._rounds).items():
            found[column]["device"] = us / _CALLS_OF_GRAPH
        return found


class Calls:
    """How each column runs a row."""

    def __init__(self, row: Row, device: str = "cuda") -> None:
        """Make the inputs."""
        import torch

        torch.manual_seed(0)
        self._row = row
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[row.dtype]

        def draw(heads: int, length: int) -> Any:
            return torch.randn(row.batch, heads, length, row.dim, device=device, dtype=dtype)

        self._leaves = [
            draw(row.heads, row.q_len).requires_grad_(),
            draw(row.kv_heads, row.kv_len).requires_grad_(),
            draw(row.kv_heads, row.kv_len).requires_grad_(),
        ]
        self._grad = draw(row.heads, row.q_len)
        self._lengths = torch.tensor(lengths_of(row), device=device, dtype=torch.int32)

    def of(self, column: str) -> tuple[dict[str, Run], list[Any]]:
        """A column's runs by direction, and its results.

        Raises:
            Exception: Whatever the column says of a call that it does not run.
        """
        import torch

        call, within = getattr(self, f"_{column}")()

        def forward() -> Any:
            with torch.no_grad():
                return call()

        with within():
            out = call()
            results = [forward()]

        def backward() -> Any:
            return torch.autograd.grad(out, self._leaves, self._grad, retain_graph=True)

        results += backward()
        return {"forward": Run(forward, within), "backward": Run(backward)}, results

    def tune(self) -> Any:
        """Measure and choose the tile sizes of attndsl's kernels; returns what was measured."""
        return self._attention().tune(*self._leaves, **self._captures())

    def _attention(self) -> Any:
        import attndsl

        return attndsl.compile(TEXTS[self._row.program])

    def _captures(self) -> dict[str, Any]:
        return {"lengths": self._lengths} if self._row.program == "padding" else {}

    def _attndsl(self) -> Run:
        attention, given = self._attention(), self._captures()
        return Run(lambda: attention(*self._leaves, **given))

    def _cudnn(self) -> Run:
        return self._sdpa("CUDNN_ATTENTION")

    def _fa2(self) -> Run:
        return self._sdpa("FLASH_ATTENTION")

    def _sdpa(self, kernel: str) -> Run:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        row, mask = self._row, None
        if row.program not in ("full", "causal", "padding"):
            raise ValueError("it has no such score or mask")
        if row.program == "padding":
            keys = torch.arange(row.kv_len, device=self._lengths.device)
            mask = (keys < self._lengths[:, None])[:, None, None, :]
            mask = mask.expand(-1, 1, row.q_len, -1).contiguous()
        causal, grouped = row.program == "causal", row.heads != row.kv_heads
        return Run(
            lambda: scaled_dot_product_attention(
                *self._leaves, attn_mask=mask, is_causal=causal, enable_gqa=grouped
            ),
            lambda: sdpa_kernel([getattr(SDPBackend, kernel)]),
        )

    def _flex(self) -> Run:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Flex compiles once for each shape and program, more often than the limit expects.
        torch._dynamo.config.cache_size_limit = 512
        # A backward is run many times.
        torch._functorch.config.donated_buffer = False
        row = self._row
        score, mask = flex_functions(row.program, row.heads, self._lengths)
        batch = row.batch if row.program == "padding" else None
        blocks = mask and create_block_mask(
            mask, batch, None, row.q_len, row.kv_len, device=self._lengths.device, _compile=True
        )
        compiled = torch.compile(flex_attention, dynamic=False)
        grouped = row.heads != row.kv_heads
        return Run(
            lambda: compiled(*self._leaves, score_mod=score, block_mask=blocks, enable_gqa=grouped)
        )


def flex_functions(program: str, heads: int, lengths: Any) -> tuple[Any, Any]:
    """FlexAttention's score and mask functions of a program; None for neither."""
    import torch

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    scores = {
        "alibi": lambda s, b, h, q, kv: s - torch.exp2(-8.0 * (h + 1) / heads) * (q - kv),
        "soft cap": lambda s, b, h, q, kv: CAP * torch.tanh(s / CAP),
    }
    masks = {
        "full": None,
        "window": lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW),
        "padding": lambda b, h, q, kv: kv < lengths[b],
    }
    return scores.get(program), masks.get(program, causal)


def _differences(results: Mapping[str, list[Any]]) -> dict[str, float]:
    """Of our output and gradients from those of the first peer, as shares of the latter."""
    peer = next((results[column] for column in COLUMNS[1:] if column in results), None)
    if peer is None or "attndsl" not in results:
        return {}
    parts = [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(results["attndsl"], peer, strict=True)
    ]
    return {"forward": parts[0], "backward": max(parts[1:])}


def ceilings() -> dict[str, float]:
    """What this GPU does in a second: bytes of a copy, operations of a product, exponentials."""
    import torch

    from exponentials import REPEATS, exponentials

    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    some = torch.rand(1 << 20, device="cuda")
    runs = {
        "copy": Run(lambda: target.copy_(source)),
        "products": Run(lambda: a @ b),
        "exponentials": Run(lambda: exponentials(some)),
    }
    work = {"copy": 2 * source.numel(), "products": 2 * 8192**3,
            "exponentials": some.numel() * REPEATS}  # fmt: skip
    return {name: work[name] / (us * 1e-6) for name, us in by_turns(runs, 9).items()}


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
    cells = [{"row": name} for name in (CEILINGS, *names)]
    rates: dict[str, float] | None = None
    lines: list[dict[str, Any]] = []
    answers = worker.measured(
        Path(__file__), cells, ["--quick"] * options.quick, until=begin + options.limit
    )
    for number, (cell, found) in enumerate(answers):
        if cell["row"] == CEILINGS:
            rates = None if "why" in found else found
            print(f"[{number}/{len(names)}] {CEILINGS}: {found}", flush=True)
            continue
        for line in lines_of(rows[cell["row"]], found, rates):
            lines.append(line)
            print(f"[{number}/{len(names)}] {_shown(line)}", flush=True)
        written = [{"name": CEILINGS, **(rates or {})}, *lines]
        common.write("short", "cuda", written, options.output)
    print(f"measured in {time.monotonic() - begin:.0f} s")
    common.print_table(lines, [
        "name", "direction", *(f"{c}_eager" for c in COLUMNS), *(f"{c}_device" for c in COLUMNS),
        "best_eager", "best_device", "limit_us", "of_limit", "difference",
    ])  # fmt: skip
    print("\n".join(summary(lines)))
    return int(any(line.get("attndsl_device") is None for line in lines))


def _shown(line: Mapping[str, Any]) -> str:
    times = ", ".join(
        f"{c} {line[f'{c}_eager']:.1f}" if line.get(f"{c}_eager") is not None
        else f"{c}: {line.get(f'{c}_why')}"
        for c in COLUMNS
    )  # fmt: skip
    return f"{line['name']} {line['direction']}: {times}"


if __name__ == "__main__":
    sys.exit(main())
