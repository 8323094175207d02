"""How fast ``examples/serve`` serves, and whether its bytes are those of the plain model.

    python benchmarks/serve_example.py [--device cuda] [--requests 64] [--rounds 3] [--output FILE]

On a GPU: steps launched from Python and steps that are one CUDA graph, by turns, with kernels that
read pages; and the plain model, one request at a time. On a CPU: steps alone, and the plain model.
``same`` counts requests whose bytes are those of the plain model. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import common

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "serve"))
import serve

from model import Decoder, plain

WAYS = {
    "cpu": {"steps": ("auto", False)},
    "cuda": {"steps": ("decode", False), "graphs": ("decode", True)},
}
"""By device: backend, and whether steps are a graph."""
DTYPES = {"cpu": torch.float64, "cuda": torch.float32}
"""Kernels compute in fp32. In fp64 sums in another order choose no other byte."""
RESULTS = {"cpu": "serve_example_cpu", "cuda": "serve_example"}


def prompts_of(requests: int) -> list[tuple[bytes, int]]:
    """Prompts of 1 to 59 bytes, and how many are to be written behind each, 4 to 49."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int) -> list[int]:
        return [int(x) for x in torch.randint(low, high, (count,), generator=generator)]

    lengths, counts = draw(1, 60, requests), draw(4, 50, requests)
    return [(bytes(draw(97, 123, n)), m) for n, m in zip(lengths, counts, strict=True)]


def timed(run: Any, device: str) -> tuple[Any, float]:
    """What ``run`` gives, and seconds until a device has done it."""
    begin = time.perf_counter()
    found = run()
    if device != "cpu":
        torch.cuda.synchronize()
    return found, time.perf_counter() - begin


def measure(device: str, requests: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each way, and one for the plain model."""
    torch.manual_seed(0)
    model = Decoder().to(device, DTYPES[device]).eval()
    prompts = prompts_of(requests)
    engines: dict[str, list[serve.Engine]] = {}
    for name, (backend, graphs) in WAYS[device].items():
        # Kernels are compiled, and graphs recorded, before the clock runs.
        engines[name] = [serve.Engine(model, backend, graphs) for _ in range(rounds + 1)]
        engines[name][0].run(prompts)
    plain(model, *prompts[0])
    wanted: list[bytes] = []
    seconds: dict[str, list[float]] = {}
    served: dict[str, list[bytes]] = {}
    for turn in range(1, rounds + 1):
        for name, own in engines.items():
            served[name], taken = timed(partial(own[turn].run, prompts), device)
            seconds.setdefault(name, []).append(taken)
        wanted, taken = timed(lambda: [plain(model, *prompt) for prompt in prompts], device)
        seconds.setdefault("plain", []).append(taken)
    count = sum(map(len, wanted))
    rows = []
    for name, found in seconds.items():
        middle = statistics.median(found)
        row: dict[str, Any] = {"way": name, "requests": requests, "bytes": count}
        row["bytes_per_second"] = count / middle
        if name != "plain":
            steps = engines[name][-1].steps
            row |= {"steps": steps, "steps_per_second": steps / middle}
            row |= {"tokens": engines[name][-1].tokens, "drafts": engines[name][-1].accepted}
            row["same"] = sum(a == b for a, b in zip(served[name], wanted, strict=True))
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print rows and write them; 1 if a request has other bytes than the plain model's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(WAYS), default="cpu")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="result file")
    given = parser.parse_args(arguments)
    rows = measure(given.device, given.requests, given.rounds)
    common.write(RESULTS[given.device], given.device, rows, given.output)
    common.print_table(rows, ["way", "bytes_per_second", "steps_per_second", "same"])
    return int(any(row.get("same", given.requests) != given.requests for row in rows))


if __name__ == "__main__":
    sys.exit(main())
