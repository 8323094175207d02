"""Measured times of some 60 programs beside what their tiles and operations say they should take.

    python benchmarks/costs.py [--only causal,waves] [--rounds 5] [--tiny]

The programs are those of ``tools/kernel_cases.py``, in bf16 at head dim 64, forward and backward.
The model of a time is

    predicted = launch + lost * (FULL pairs * clocks of a pair + PARTIAL pairs * those and the mask)
    clocks of a pair = products / 4096 + exponentials / 16 + (softmax + program) / 128

``FULL pairs`` and ``PARTIAL pairs`` are those of the tiles of 128 x 128 that the mask leaves. A
multiprocessor of an H100 does 4096 dense bf16 operations of products, 16 exponentials and 128 other
instructions a clock (NVIDIA, "H100 Tensor Core GPU architecture", 2022, and the CUDA programming
guide's table of throughputs). ``program`` is the estimate of ``backends/kernels/cost_model.py``,
counted in PTX. ``lost`` is what the program ``full`` takes in the same run over what the model
says, once for each direction. So a ratio compares a program with ``full``, and ``full`` has 1.

``ratio`` is measured over predicted. Above 1.3 a program costs more than its operations and tiles
say: the script lists these. What the model leaves out may be the reason: kernels that gradients of
captures need beside the usual ones, dropout's numbers, lists of tiles, loads from memory, or
``kernels`` of another family than those of ``full``.

``ms`` is the time of a call within a CUDA graph, and ``eager_ms`` that of the same call as a user
makes it. Where a graph cannot be made, ``ms`` is the latter, and ``why_no_graph`` says why.
``launches_ms`` says which kernels take that time, by torch's profiler.

Kernels are compiled first, by several processes side by side. On a CPU the script runs too, for
tests: there the times say nothing about kernels.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scaling_profile import profiled

import common
import turns
import worker

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from kernel_cases import CASES, HEADS, KV_HEADS, LENGTH, Case

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from attndsl.attention import Attention

HEAD_DIM = 64
LARGE, SMALL = 32, 2
"""Batch entries on a GPU, where kernels are to outlast their launch, and for a test."""
TINY = ("full", "causal", "soft cap")
"""Programs of a test."""
REFERENCE = "full"
OUTLIER = 1.3
DIRECTIONS = ("forward", "backward")
BLOCK = 128
PRODUCTS, EXPONENTIALS, OTHERS = 4096, 16, 128
"""A multiprocessor's operations a clock."""
SOFTMAX = {"forward": 6, "backward": 10}
"""Instructions a pair of plain scores: scale, maximum, sum and rounding; and what dS takes."""
LAUNCH_MS = {"forward": 0.004, "backward": 0.012}
"""Of one kernel and of three within a graph, with what a GPU takes to fill and to empty."""
COMPILE_SECONDS = 90.0
CELL_SECONDS = {"cuda": 20.0, "cpu": worker.CELL_SECONDS}
_PROCESSORS_EACH = 4
_CALLS_OF_GRAPH = 10


class Device(NamedTuple):
    """Where programs run."""

    name: str
    batch: int
    clocks: float
    """Clocks of all multiprocessors in a millisecond."""


def device_of(tiny: bool) -> Device:
    """The GPU; on a CPU, a made-up number of clocks."""
    import torch

    if not torch.cuda.is_available():
        return Device("cpu", SMALL, 1e6)
    found = torch.cuda.get_device_properties(0)
    clock = getattr(found, "clock_rate", 0) or 1_755_000  # In kHz; of an H100 in this place.
    batch = SMALL if tiny else LARGE
    return Device("cuda", batch, float(found.multi_processor_count * clock))


@dataclass(frozen=True)
class Made:
    """A case's program, and what it is called with."""

    case: Case
    attention: Attention
    operands: tuple[torch.Tensor, ...]
    captures: dict[str, Any]
    options: dict[str, Any]

    @property
    def learned(self) -> list[torch.Tensor]:
        """What has gradients besides q, k and v."""
        return [self.captures[name] for name in self.case.learned]

    def call(self) -> torch.Tensor:
        """The output of a call."""
        out: torch.Tensor = self.attention(*self.operands, captures=self.captures, **self.options)
        return out


def made(case: Case, device: Device) -> Made:
    """A case with random operands and captures, in more batch entries than the case has."""
    import torch
    from kernel_calls import options_of

    import attndsl
    from attndsl.inspection.example_captures import make_captures

    generator = torch.Generator().manual_seed(0)
    dim = HEAD_DIM - case.sizes.get("less", 0)
    sizes = sizes_of(case, device.batch)
    attention = attndsl.compile(case.text)
    program = attention.lowered.program
    for decl in program.tensors:
        dims, _ = case.tensors[decl.name]
        names = {str(x.value): n for x, n in zip(decl.dims, dims, strict=True) if x.value}
        sizes |= {name: n for name, n in names.items() if name not in sizes}
    kinds = {"f": torch.bfloat16, "s": torch.float32, "i": torch.int32, "b": torch.bool}
    captures: dict[str, Any] = {
        name: tensor.to(kinds[case.tensors[name][1]])
        for name, tensor in make_captures(program, sizes, device.name, generator).items()
    }
    for name, value in case.params.items():
        is_learned = name in case.learned
        captures[name] = torch.tensor(value, device=device.name) if is_learned else value
    for name in case.learned:
        captures[name].requires_grad_()
    batch, value = device.batch, case.sizes.get("value", dim)
    shapes = (
        (batch, HEADS, sizes["q_len"], dim),
        (batch, KV_HEADS, sizes["kv_len"], dim),
        (batch, KV_HEADS, sizes["kv_len"], value),
    )
    operands = tuple(
        torch.randn(shape, generator=generator).to(device.name, torch.bfloat16).requires_grad_()
        for shape in shapes
    )
    return Made(case, attention, operands, captures, options_of(case, batch, device.name))


def sizes_of(case: Case, batch: int) -> dict[str, int]:
    """The sizes of a case's operands by their names in programs."""
    return {
        "batch": batch, "heads": HEADS, "kv_heads": KV_HEADS,
        "q_len": case.sizes.get("length", LENGTH), "kv_len": case.sizes.get("kv_len", LENGTH),
        "head_dim": HEAD_DIM - case.sizes.get("less", 0),
    }  # fmt: skip


class Work(NamedTuple):
    """What a case takes by the model, but for what ``full`` tells."""

    full: float
    """Pairs of FULL tiles."""
    partial: float
    program: int
    """Instructions that the program adds to a pair, without the mask."""
    mask: int
    ideal_ms: float


def work_of(found: Made, direction: str, device: Device) -> Work:
    """The model's terms."""
    full, partial = live_pairs(found, device.batch)
    program, mask = instructions_of(found, direction)
    dim, value = (1 << (x.shape[-1] - 1).bit_length() for x in found.operands[1:])
    products = 2 * (dim + value) if direction == "forward" else 2 * (3 * dim + 2 * value)
    each = products / PRODUCTS + 1 / EXPONENTIALS + (SOFTMAX[direction] + program) / OTHERS
    clocks = full * each + partial * (each + mask / OTHERS)
    return Work(full, partial, program, mask, clocks / device.clocks)


def live_pairs(found: Made, batch: int) -> tuple[float, float]:
    """Pairs of FULL and of PARTIAL tiles of a call."""
    places = {
        name: value for name, value in found.options.items()
        if name in ("q_offset", "kv_offset", "q_index", "kv_index", "h_offset")
    }  # fmt: skip
    whole = {name: found.options[name] for name in ("q_len", "heads", "kv_heads")
             if name in found.options}  # fmt: skip
    q, k, _ = found.operands
    sizes = sizes_of(found.case, batch)
    tiles = found.attention.tiles(
        q.shape[2], k.shape[2], BLOCK, BLOCK, batch, HEADS, kv_heads=KV_HEADS,
        head_dim=sizes["head_dim"], whole_sizes=whole or None, captures=found.captures,
        device=q.device, **places,
    )  # fmt: skip
    kinds = tiles.kinds
    each = BLOCK * BLOCK * batch * HEADS / (kinds.shape[0] * kinds.shape[1])
    return float((kinds == 2).sum()) * each, float((kinds == 1).sum()) * each


def instructions_of(found: Made, direction: str) -> tuple[int, int]:
    """Instructions that a program adds to a pair without its mask, and those of the mask."""
    import torch

    from attndsl.backends.base import Wants
    from attndsl.backends.emit.facts import facts_of, with_forms, with_gradients
    from attndsl.backends.kernels.cost_model import instructions, work_of_pair
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.kernels.target import parse_target

    lowered = found.attention.lowered
    program = lowered.program
    tensors = {x.name for x in program.tensors}
    call = example_call(lowered, HEAD_DIM, HEAD_DIM, torch.bfloat16, found.captures)
    facts = with_forms(facts_of(program, call), program, parse_target("cuda:90"))
    if direction == "backward":
        learned = frozenset(found.case.learned)
        wants = Wants(tensors=learned & tensors, params=learned - tensors)
        facts = with_gradients(facts, wants)
    mask = 0 if program.mask is None else instructions((program.mask,), facts.names())
    return max(0, work_of_pair(lowered, facts, direction == "backward") - mask), mask


class Families(logging.Handler):
    """Hears from the log which family's kernels run a direction."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: dict[str, str] = {}
        log = logging.getLogger("attndsl")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what a line says."""
        if told := re.search(r": (forward|backward) by (\w+) kernels", record.getMessage()):
            self.found[told[1]] = told[2]


def measure(cell: worker.Cell, tiny: bool) -> worker.Found:
    """Milliseconds of a case's forward and backward, and the model's terms of both."""
    import torch

    device, families = device_of(tiny), Families()
    (case,) = (case for case in CASES if case.name == cell["case"])
    own = made(case, device)
    inputs = [*own.operands, *own.learned]
    stream = None
    if device.name == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # Backwards run on the stream that their forwards ran on.
        out = own.call()
        # Not by the GPU's generator: a graph that could not be made would leave it unusable.
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)

    def forward() -> None:
        with torch.no_grad():
            own.call()

    def backward() -> None:
        torch.autograd.grad(out, inputs, grad, retain_graph=True, allow_unused=True)

    found: worker.Found = {}
    for name, run in zip(DIRECTIONS, (forward, backward), strict=True):
        found[name] = work_of(own, name, device)._asdict()
        found[name] |= times_of(run, cell["rounds"], device, stream)
        found[name]["kernels"] = families.found.get(name)
        if device.name == "cuda":
            found[name]["launches_ms"] = profiled(run)["kernels_ms"]
    logging.getLogger("attndsl").removeHandler(families)
    return found


def times_of(run: Any, rounds: int, device: Device, stream: Any) -> dict[str, Any]:
    """``ms`` of a call; on a GPU ``eager_ms`` too, and why no graph was made if none was."""
    eager = milliseconds(run, rounds, device)
    if device.name != "cuda":
        return {"ms": eager}
    try:
        graph = turns.graph_of(turns.Run(run), stream, _CALLS_OF_GRAPH)
    except Exception as error:
        return {"ms": eager, "eager_ms": eager, "why_no_graph": turns.said_by(error)}
    return {
        "ms": milliseconds(graph.replay, rounds, device) / _CALLS_OF_GRAPH, "eager_ms": eager,
    }  # fmt: skip


def milliseconds(run: Any, rounds: int, device: Device) -> float:
    """Median over rounds of the mean time of a call."""
    if device.name == "cuda":
        return turns.by_turns({"": turns.Run(run)}, rounds)[""] / 1e3
    times = []
    run()
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def warm(names: Sequence[str], tiny: bool) -> None:
    """Compile the kernels of cases side by side, in this process; errors are the cells' to say."""
    import torch

    from attndsl.building.warmup import warm_up

    device = device_of(tiny)

    def run(name: str) -> None:
        (case,) = (case for case in CASES if case.name == name)
        own = made(case, device)
        out = own.call()
        inputs = [*own.operands, *own.learned]
        torch.autograd.grad(out, inputs, torch.zeros_like(out), allow_unused=True)

    warm_up({name: lambda name=name: run(name) for name in names}, torch.device(device.name))


def compile_all(names: Sequence[str], flags: Sequence[str], environ: Mapping[str, str]) -> None:
    """Fill the cache by several processes, which end when the time for compiling does."""
    processes = max(1, (os.cpu_count() or 1) // _PROCESSORS_EACH)
    slices = [names[place::processes] for place in range(processes)]
    each = [["--warm", json.dumps(own), *flags] for own in slices if own]
    worker.side_by_side(Path(__file__), each, environ, COMPILE_SECONDS)


def rows_of(found: Mapping[str, worker.Found]) -> list[dict[str, Any]]:
    """A row for each case and direction, in the order of ``found``.

    Without ``full`` there is no prediction.
    """
    lost = {}
    if (reference := found.get(REFERENCE)) and "why" not in reference:
        for direction in DIRECTIONS:
            own = reference[direction]
            lost[direction] = max(own["ms"] - LAUNCH_MS[direction], 1e-6) / own["ideal_ms"]
    rows = []
    for name, own in found.items():
        for direction in DIRECTIONS:
            row: dict[str, Any] = {"case": name, "direction": direction}
            if "why" in own:
                rows.append(row | {"why": own["why"]})
                continue
            row |= own[direction]
            if direction in lost:
                row["lost"] = lost[direction]
                row["predicted_ms"] = LAUNCH_MS[direction] + lost[direction] * row["ideal_ms"]
                row["ratio"] = row["ms"] / row["predicted_ms"]
            rows.append(row)
    return rows


def outliers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each row that takes more than it should, the largest ratio first."""
    over = [row for row in rows if row.get("ratio", 0.0) > OUTLIER]
    return [
        f"{row['case']}, {row['direction']}: {row['ms']:.3f} ms, {row['ratio']:.2f} times"
        f" the predicted {row['predicted_ms']:.3f}, by {row.get('kernels')} kernels"
        + (" (eager: no graph)" if "why_no_graph" in row else "")
        + "".join(f"; {ms:.3f} in {name}" for name, ms in row.get("launches_ms", {}).items())
        for row in sorted(over, key=lambda row: -row["ratio"])
    ]


def chosen(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The cases to run, ``full`` first."""
    known = [case.name for case in CASES]
    names = options.only.split(",") if options.only else list(TINY) if options.tiny else known
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"there is no case '{unknown[0]}'; there are: {', '.join(known)}")
    return list(dict.fromkeys((REFERENCE, *names)))


def main() -> int:
    """Parse the command line, compile, measure, print and write; 1 if a case has no figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of cases, by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="three programs, two batch entries")
    parser.add_argument("--output", type=Path, help="result file")
    for name in ("--worker", "--warm"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    flags = ["--tiny"] * options.tiny
    if options.warm:
        warm(json.loads(options.warm), options.tiny)
        return 0
    if options.worker:
        worker.serve(json.loads(options.worker), lambda cell: measure(cell, options.tiny))
        return 0
    names, device = chosen(options, parser), device_of(options.tiny).name
    found: dict[str, worker.Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"ATTNDSL_CACHE_DIR": folder, "ATTNDSL_SHIPPED": "0"}
        begin = time.monotonic()
        if device == "cuda":
            compile_all(names, flags, environ)
        print(f"compiled in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        seconds = CELL_SECONDS[device]
        cells = [{"case": name, "rounds": options.rounds} for name in names]
        for cell, own in worker.measured(Path(__file__), cells, flags, seconds, environ):
            found[cell["case"]] = own
            said = own.get("why") or ", ".join(f"{x} {own[x]['ms']:.3f} ms" for x in DIRECTIONS)
            line = f"[{len(found)}/{len(names)}] {cell['case']}: {said}"
            print(line, file=sys.stderr, flush=True)
            common.write("costs", device, rows_of(found), options.output)
    rows = rows_of(found)
    common.print_table(
        rows, ["case", "direction", "kernels", "ms", "predicted_ms", "ratio", "program", "mask"]
    )
    print(*(outliers(rows) or [f"nothing above {OUTLIER}"]), sep="\n")
    return int(any("why" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
