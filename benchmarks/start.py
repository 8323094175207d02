"""From the start of a process to its first output and its first step, less ``import torch``.

    python benchmarks/start.py [--device cuda] [--programs "causal;window"] [--runs 2]

Each figure is the median over fresh processes. "cold" begins with empty caches (attndsl's, Triton's
and Inductor's), "warm" has them filled by the process before; neither has kernels of attndsl's
wheel. Inputs require gradients: a step is the forward and the backward of one call. On GPUs
FlexAttention, compiled, does the same beside it. Making the CUDA context is part of every figure,
and also given on its own.

Both systems are measured at the same time, each on its own half of the processors (``processors``),
so that a run takes four minutes. With fewer than 16 processors one follows the other.
The package's bytecode is there, as where pip has installed it. What would begin after ``--seconds``
is left out, and its row says so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import common

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Program(NamedTuple):
    """One program: for attndsl, and as FlexAttention's functions."""

    text: str
    mask: str = "q >= kv"
    """FlexAttention's, of b, h, q and kv."""
    score: str = "score"


PROGRAMS = {
    "causal": Program("causal()"),
    "window": Program("causal() and q - kv < 256", "(q >= kv) & (q - kv < 256)"),
    "soft cap": Program(
        "mask = causal()\nscore = softcap(score, 50.0)", score="50.0 * torch.tanh(score / 50.0)"
    ),
    "ALiBi": Program(
        "mask = causal()\nscore = score + alibi()",
        score="score - torch.exp2(-2.0 * (h + 1)) * (q - kv)",
    ),
    "documents": Program(
        "tensor doc[batch, kv_len]: int\nmask = causal() and doc[b, q] == doc[b, kv]",
        "(q >= kv) & (doc[b, q] == doc[b, kv])",
    ),
}
SHAPE = (1, 4, 1024, 64)
SYSTEMS = ("attndsl", "flex")
STATES = ("cold", "warm")
PROCESS_SECONDS = 60.0
"""Longest a process may take."""
_FOR_TWO = 16
"""Processors from which two systems share them."""

HEAD = """
import os, time
if {processors}:
    os.sched_setaffinity(0, {processors})
begin = time.time()
import torch
imported = time.time()
q, k, v = (
    torch.randn({shape}, device="{device}", dtype={dtype}, requires_grad=True) for _ in range(3)
)
doc = (torch.arange({length}, device="{device}", dtype=torch.int32) // 100)[None]
context = time.time()
"""
BODIES = {
    "attndsl": """
import attndsl
attention = attndsl.compile({text!r})
out = attention(q, k, v, **({{"doc": doc}} if "doc" in {text!r} else {{}}))
""",
    "flex": """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
blocks = create_block_mask(
    lambda b, h, q, kv: {mask}, 1 if "doc" in {mask!r} else None, None, {length}, {length},
    device="{device}",
)
out = torch.compile(flex_attention)(
    q, k, v, {score} block_mask=blocks
)
""",
}
TAIL = """
out.sum().item()
first = time.time()
out.sum().backward()
q.grad.sum().item()
print(imported - begin, context - imported, first, time.time())
"""


def code_of(program: Program, system: str, device: str, processors: Sequence[int] = ()) -> str:
    """What one process runs, on these processors or on all; it prints four times."""
    score = f"lambda score, b, h, q, kv: {program.score}," if program.score != "score" else ""
    return (HEAD + BODIES[system] + TAIL).format(
        shape=SHAPE,
        length=SHAPE[2],
        device=device,
        dtype=torch_dtype(device),
        text=program.text,
        mask=program.mask,
        score=score,
        processors=list(processors),
    )


def torch_dtype(device: str) -> str:
    """As Python text."""
    return "torch.bfloat16" if device.startswith("cuda") else "torch.float32"


class Lane(NamedTuple):
    """Where and how the processes of one system run, one after the other."""

    system: str
    device: str
    runs: int
    processors: tuple[int, ...] = ()
    """Those that it has for itself; empty for all."""
    end: float = float("inf")
    """Until when processes begin, by ``time.monotonic``."""


def measure(program: Program, lane: Lane, folder: Path) -> dict[str, float]:
    """One process: milliseconds to its first output and step, and of their parts.

    Raises:
        RuntimeError: It failed, or there was no time left.
    """
    if time.monotonic() > lane.end:
        raise RuntimeError("no time was left")
    caches = ("ATTNDSL_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    env = common.with_bytecode() | {name: str(folder / name.lower()) for name in caches}
    env["ATTNDSL_SHIPPED"] = "0"
    code = code_of(program, lane.system, lane.device, lane.processors)
    begin = time.time()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env=env, capture_output=True, text=True, timeout=PROCESS_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"no answer within {PROCESS_SECONDS:.0f} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
        raise RuntimeError(said[-1])
    torch_s, context_s, first, end = map(float, done.stdout.split())
    return {
        "first_output_ms": (first - begin - torch_s) * 1e3,
        "first_step_ms": (end - begin - torch_s) * 1e3,
        "backward_ms": (end - first) * 1e3,
        "context_ms": context_s * 1e3,
        "import_torch_ms": torch_s * 1e3,
    }


def row(name: str, lane: Lane) -> list[dict[str, Any]]:
    """Cold and warm rows of one program on one system, with the runs that there was time for."""
    found: dict[str, list[dict[str, float]]] = {state: [] for state in STATES}
    why = None
    for _ in range(lane.runs):
        try:
            with tempfile.TemporaryDirectory() as folder:
                for state in found:
                    found[state].append(measure(PROGRAMS[name], lane, Path(folder)))
        except RuntimeError as error:
            why = str(error)
            break
    rows = []
    for state, measured in found.items():
        own: dict[str, Any] = {
            "program": name, "system": lane.system, "device": lane.device, "cache": state,
            "processors": len(lane.processors) or os.cpu_count(), "runs": len(measured),
        }  # fmt: skip
        if measured:
            own |= {each: statistics.median(run[each] for run in measured) for each in measured[0]}
        if why is not None:
            own["why"] = why
        rows.append(own)
    return rows


def lanes_of(options: argparse.Namespace) -> list[Lane]:
    """One for each system, with half of the processors each where there are enough."""
    end = time.monotonic() + options.seconds
    runs = {"attndsl": options.runs, "flex": options.flex_runs}
    systems = ("attndsl", "flex") if options.device.startswith("cuda") else ("attndsl",)
    able = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    half = len(able) // 2
    shares = {"attndsl": tuple(able[:half]), "flex": tuple(able[half:])}
    shared = len(systems) > 1 and len(able) >= _FOR_TWO
    return [
        Lane(system, options.device, runs[system], shares[system] if shared else (), end)
        for system in systems if runs[system]
    ]  # fmt: skip


def measure_all(
    names: Sequence[str], lanes: Sequence[Lane], done: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Rows of all programs; ``done`` gets those of a program and a system as they come.

    Lanes with processors of their own run side by side, others in turn.
    """
    lock = threading.Lock()

    def run(lane: Lane) -> None:
        for name in names:
            rows = row(name, lane)
            with lock:
                done(rows)

    with ThreadPoolExecutor(len(lanes) if all(x.processors for x in lanes) else 1) as pool:
        for _ in pool.map(run, lanes):
            pass


def main() -> int:
    """Measure, print and write; 1 if a row has no figure."""
    import torch

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=default)
    parser.add_argument("--programs", default=";".join(PROGRAMS), help="names, by semicolons")
    parser.add_argument("--runs", type=int, default=2, help="of attndsl")
    parser.add_argument("--flex-runs", type=int, default=1, help="of FlexAttention")
    parser.add_argument("--seconds", type=float, default=300.0, help="within which all begins")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    names = options.programs.split(";")
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        parser.error(f"no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    found: list[dict[str, Any]] = []

    def done(rows: list[dict[str, Any]]) -> None:
        found.extend(rows)
        found.sort(key=lambda each: (names.index(each["program"]), SYSTEMS.index(each["system"])))
        for each in rows:
            said = each.get("why") or f"{each['first_step_ms']:.0f} ms"
            print(f"{each['program']}, {each['system']}, {each['cache']}: {said}", file=sys.stderr)
        file = f"start_{options.device.partition(':')[0]}"
        common.write(file, options.device, found, options.output)

    common.with_bytecode()  # Before lanes run side by side.
    measure_all(names, lanes_of(options), done)
    common.print_table(found, list(dict.fromkeys(name for each in found for name in each)))
    return int(any("first_step_ms" not in each for each in found))


if __name__ == "__main__":
    sys.exit(main())
