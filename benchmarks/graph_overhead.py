"""Host time of attention in layers of torch.compile, beside torch's own: all but the kernels.

    python benchmarks/graph_overhead.py [--quick] [--output FILE]

Layers of ``benchmarks/training.py``, so small that their arithmetic takes little, compiled by
Inductor for a CPU, 6 in a row as in a model. The Triton backend runs with kernels that do nothing,
so that a machine without a GPU measures the path that one with a GPU has: guards, the operator, the
look-up of what is known of a call, allocation. torch's own attention computes its 16 rows.

The ways take turns. ``forward_us`` and ``backward_us`` are the lower quartile over rounds of a
layer's time in microseconds, ``above_us`` is what both take beyond torch's own. ``guards`` is how
many values torch looks at before it runs the graph of a layer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import training
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import attndsl
from attndsl.backends.kernels.compile import Executable

import common

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpt import Attend

LAYERS, ROUNDS = 6, 200
SMALL = {"width": 64, "heads": 2, "batch": 1, "outputs": 16, "layers": LAYERS}
MODELS = {"gpt": "gpt1k", "bert": "bert"}
"""A program without captures, and one that captures a tensor."""
LENGTH = 16


def attndsl_for(part: training.Part) -> Attend:
    """Attention whose kernels are those of Triton."""
    if part.kind == "gpt":
        attend: Attend = attndsl.compile("causal()", backend="triton")
        return attend
    text = "tensor lengths[batch]: int; mask = valid_keys(lengths)"
    padded, lengths = attndsl.compile(text, backend="triton"), training.lengths_of(part, "cpu")
    return lambda q, k, v: padded(q, k, v, lengths=lengths)


class Layers:
    """A few layers, each compiled once for all."""

    def __init__(self, part: training.Part) -> None:
        self.blocks = training.blocks_of(part, training.gpt.Block)
        self.x = torch.randn(part.batch, LENGTH, part.width, requires_grad=True)

    def compiled(self, attend: Attend) -> tuple[Callable[..., Any], Callable[[], int]]:
        """A layer of this attention, and the number of its guards once it has run."""

        def layer(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = block(x, attend)
            return found

        # Graphs are kept by code: each way has its own.
        layer.__code__ = layer.__code__.replace()

        def guards() -> int:
            (entry,) = _debug_get_cache_entry_list(layer.__code__)
            return str(entry.guard_manager).count("GuardManager: source")

        return torch.compile(layer, fullgraph=True), guards

    def times(self, layer: Callable[..., Any]) -> tuple[float, float]:
        """Seconds of all layers forward and backward."""
        begin = time.perf_counter()
        y = self.x
        for block in self.blocks:
            y = layer(block, y)
        middle = time.perf_counter()
        y.sum().backward()  # type: ignore[no-untyped-call]
        return middle - begin, time.perf_counter() - middle


def rows_of(name: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each way of one model."""
    part = replace(training.PARTS[MODELS[name]], **SMALL, size=LENGTH)
    layers = Layers(part)
    ways = {"sdpa": training.by_sdpa(part, "cpu"), "attndsl": attndsl_for(part)}
    made = {way: layers.compiled(attend) for way, attend in ways.items()}
    spent: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for place in range(-3, rounds):  # The first three compile.
        for way, (layer, _) in made.items():
            found = layers.times(layer)
            spent[way] += [found] if place >= 0 else []
    rows: list[dict[str, Any]] = []
    for way, all_times in spent.items():
        forward, backward = (
            statistics.quantiles(each, n=4)[0] / LAYERS * 1e6
            for each in zip(*all_times, strict=True)
        )
        rows.append({"model": name, "attention": way, "guards": made[way][1](),
                     "forward_us": forward, "backward_us": backward})  # fmt: skip
    own = {row["attention"]: row["forward_us"] + row["backward_us"] for row in rows}
    return [{**row, "above_us": own[row["attention"]] - own["sdpa"]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--quick", action="store_true", help="few rounds of one model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    Executable.launch = lambda *arguments: None  # type: ignore[method-assign,assignment]
    rounds = 5 if options.quick else ROUNDS
    found = [row for name in list(MODELS)[: 1 if options.quick else None]
             for row in rows_of(name, rounds)]  # fmt: skip
    common.write("graph_overhead", "cpu", found, options.output)
    common.print_table(found, list(found[0]))


if __name__ == "__main__":
    main()
