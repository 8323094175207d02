"""Times of every program of the gallery (docs/gallery.md), forward and backward.

    python benchmarks/gallery_times.py [--rows "causal;alibi"] [--processes 8] [--output FILE]

Shapes are those of the gallery's times: batch 2, 16 heads, length 8192, head dim 128, bf16. Values
of params and tensors are those with which the gallery counts tiles; others are made up.
``forward_ms`` is a call without gradients, ``backward_ms`` the gradients of q, k and v, both the
median of rounds by CUDA events. ``difference`` is the relative distance of the output to that of
the reference backend at 512 rows. Several processes compile the kernels of all programs first.
``--missing`` goes on with the file of a run that was cut, on the same kind of GPU; each row says
its commit. ``--tiny`` is for tests: few rows, on any device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import worker
from turns import Run, by_turns, said_by

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCS = Path(__file__).parents[1] / "docs"
BATCH, HEADS, LENGTH, DIM = 2, 16, 8192, 128
CHECKED = 512
"""Rows at which results are held to the reference backend."""
TINY, TINY_DIM = 32, 16
ROUNDS = 5
WARM_SECONDS = 90.0
"""For compiling side by side. A program that takes longer is compiled where it is measured, so that
it costs its own row and no other."""


def entries() -> dict[str, Any]:
    """Programs of the gallery, by the headings of its sections."""
    sys.path.insert(0, str(DOCS))
    import gallery

    return {e.heading: e for e in (*gallery.prelude_entries(), *gallery.example_entries())}


class Case:
    """A program at one length: its operands and captures."""

    def __init__(self, entry: Any, length: int, dim: int, device: str) -> None:
        """Make the inputs, which need gradients."""
        import torch

        import attndsl
        from attndsl.inspection.example_captures import make_for_picture

        torch.manual_seed(0)
        self.attention = attndsl.compile(entry.text)
        self.reference = attndsl.compile(entry.text, backend="reference")
        setting = {**entry.setting.drawn, **(entry.setting.counted if length == LENGTH else {})}
        given = {n: x(length) if callable(x) else x for n, x in setting.items()}
        sizes = {
            "batch": BATCH, "heads": HEADS, "kv_heads": HEADS, "q_len": length, "kv_len": length,
            "head_dim": dim,
        }  # fmt: skip
        program = self.attention.lowered.program
        made = make_for_picture(program, sizes, 0, given)
        captures: Mapping[str, Any] = {**made.tensors, **made.params, **given}
        self.captures = {
            name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in captures.items()
        }
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.operands = [
            torch.randn(BATCH, HEADS, length, dim, device=device, dtype=dtype).requires_grad_()
            for _ in range(3)
        ]

    def difference(self) -> float:
        """Of the output from the reference backend's, as a share of that."""
        import torch

        with torch.no_grad():
            out = self.attention(*self.operands, captures=self.captures).double()
            wide = [x.double() for x in self.operands]
            wanted = self.reference(*wide, captures=self.captures)
        return float((out - wanted).norm() / wanted.norm().clamp_min(1e-12))

    def step(self) -> None:
        """One forward without gradients, and one with all of them."""
        import torch

        with torch.no_grad():
            self.attention(*self.operands, captures=self.captures)
        out = self.attention(*self.operands, captures=self.captures)
        torch.autograd.grad(out, self.operands, torch.ones_like(out))

    def times(self, rounds: int) -> dict[str, float]:
        """Milliseconds of the forward and of the backward."""
        import torch

        def forward() -> Any:
            with torch.no_grad():
                return self.attention(*self.operands, captures=self.captures)

        out = self.attention(*self.operands, captures=self.captures)
        grad = torch.randn_like(out)

        def backward() -> Any:
            return torch.autograd.grad(out, self.operands, grad, retain_graph=True)

        runs = {"forward_ms": forward, "backward_ms": backward}
        if out.is_cuda:
            found = by_turns({name: Run(call) for name, call in runs.items()}, rounds)
            return {name: us / 1e3 for name, us in found.items()}
        return {name: _by_clock(call) for name, call in runs.items()}


def _by_clock(call: Any) -> float:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def measured(entry: Any, tiny: bool) -> dict[str, Any]:
    """What the row of a program says besides its name; or why it says nothing."""
    device = "cpu" if tiny else "cuda"
    checked = TINY if tiny else CHECKED
    try:
        dim = TINY_DIM if tiny else DIM
        difference = Case(entry, checked, dim, device).difference()
        times = Case(entry, TINY if tiny else LENGTH, dim, device).times(ROUNDS)
    except Exception as error:  # One program must not end the others.
        return {"why": said_by(error)}
    return {**times, "difference": difference}


def warm(entry: Any, tiny: bool) -> dict[str, Any]:
    """Nothing: the calls that are timed have been made once."""
    device, dim = ("cpu", TINY_DIM) if tiny else ("cuda", DIM)
    Case(entry, TINY if tiny else LENGTH, dim, device).step()
    Case(entry, TINY if tiny else CHECKED, dim, device).difference()
    return {}


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, print and write; 1 if a program has no figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", help="headings of the gallery, by semicolons; all by default")
    parser.add_argument("--tiny", action="store_true", help="few rows, on a CPU")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--missing", action="store_true", help="go on with the file of --output")
    parser.add_argument("--processes", type=int, default=8, help="that compile first; 8")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    found = entries()
    if options.worker:
        cells = json.loads(options.worker)
        does = warm if options.warm else measured
        worker.serve(cells, lambda cell: does(found[cell["row"]], options.tiny))
        return 0
    names = options.rows.split(";") if options.rows else list(found)
    if unknown := [name for name in names if name not in found]:
        parser.error(f"there is no row {unknown[0]!r}; there are: {'; '.join(found)}")
    import torch

    if not options.tiny and not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device; --tiny needs none")
    rows = common.rows_with_figures("gallery_times", options.output) if options.missing else []
    known = {row["name"] for row in rows}
    cells = [{"row": name} for name in names if name not in known]
    flags = ["--tiny"] * options.tiny
    until = time.monotonic() + WARM_SECONDS
    worker.warmed(Path(__file__), cells, [*flags, "--warm"], options.processes, until)
    for cell, row in worker.measured(Path(__file__), cells, flags):
        rows.append({
            "name": cell["row"], "text": found[cell["row"]].text, **row, "commit": common.commit(),
        })  # fmt: skip
        print(f"[{len(rows)}/{len(names)}] {rows[-1]['name']}: {row}", flush=True)
        common.write("gallery_times", "cpu" if options.tiny else "cuda", rows, options.output)
    common.print_table(rows, ["name", "forward_ms", "backward_ms", "difference", "why"])
    return int(any("why" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
