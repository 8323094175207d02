"""From the start of a process to its first output and its first step, less ``import torch``.

    python benchmarks/start.py [--device cuda] [--programs "causal;window"] [--runs 3]

Each figure is the median over fresh processes. "cold" begins with empty caches (attndsl's, Triton's
and Inductor's), "warm" has them filled by the process before. Inputs require gradients: a step is
the forward and the backward of one call. On GPUs FlexAttention, compiled, does the same beside it.
Making the CUDA context is part of every figure, and also given on its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import common


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
        "mask = causal()\nscore = softcap(50.0)", score="50.0 * torch.tanh(score / 50.0)"
    ),
    "ALiBi": Program(
        "mask = causal()\nscore = alibi()", score="score - torch.exp2(-2.0 * (h + 1)) * (q - kv)"
    ),
    "documents": Program(
        "tensor doc[batch, kv_len]: int\nmask = causal() and doc[b, q] == doc[b, kv]",
        "(q >= kv) & (doc[b, q] == doc[b, kv])",
    ),
}
SHAPE = (1, 4, 1024, 64)
SYSTEMS = ("attndsl", "flex")

HEAD = """
import time
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


def code_of(program: Program, system: str, device: str) -> str:
    """What one process runs; it prints four times."""
    score = f"lambda score, b, h, q, kv: {program.score}," if program.score != "score" else ""
    return (HEAD + BODIES[system] + TAIL).format(
        shape=SHAPE,
        length=SHAPE[2],
        device=device,
        dtype=torch_dtype(device),
        text=program.text,
        mask=program.mask,
        score=score,
    )


def torch_dtype(device: str) -> str:
    """As Python text."""
    return "torch.bfloat16" if device.startswith("cuda") else "torch.float32"


def measure(program: Program, system: str, device: str, folder: Path) -> dict[str, float]:
    """One process: milliseconds to its first output and step, and of their parts."""
    caches = ("ATTNDSL_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    env = os.environ | {name: str(folder / name.lower()) for name in caches}
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-P", "-c", code_of(program, system, device)],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    torch_s, context_s, first, end = map(float, done.stdout.split())
    return {
        "first_output_ms": (first - begin - torch_s) * 1e3,
        "first_step_ms": (end - begin - torch_s) * 1e3,
        "context_ms": context_s * 1e3,
        "import_torch_ms": torch_s * 1e3,
    }


def row(name: str, system: str, device: str, runs: int) -> list[dict[str, Any]]:
    """Cold and warm rows of one program on one system."""
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            for state in found:
                found[state].append(measure(PROGRAMS[name], system, device, Path(folder)))
    return [
        {"program": name, "system": system, "device": device, "cache": state}
        | {each: statistics.median(run[each] for run in measured) for each in measured[0]}
        for state, measured in found.items()
    ]


def main() -> None:
    """Measure, print and write."""
    import torch

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=default)
    parser.add_argument("--programs", default=";".join(PROGRAMS), help="names, by semicolons")
    parser.add_argument("--runs", type=int, default=3, help="of attndsl")
    parser.add_argument("--flex-runs", type=int, default=1, help="of FlexAttention")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    names = options.programs.split(";")
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        parser.error(f"no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    rows: list[dict[str, Any]] = []
    for name in names:
        for system in SYSTEMS if options.device.startswith("cuda") else SYSTEMS[:1]:
            runs = options.runs if system == "attndsl" else options.flex_runs
            rows += row(name, system, options.device, runs)
            print(f"{name}, {system}: {rows[-2]['first_step_ms']:.0f} ms", file=sys.stderr)
            file = f"start_{options.device.partition(':')[0]}"
            common.write(file, options.device, rows, options.output)
    common.print_table(rows, list(rows[0]))


if __name__ == "__main__":
    main()
