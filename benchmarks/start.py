"""From the start of a process to its first output, less ``import torch``; with and without caches.

    python benchmarks/start.py [--device cuda] [--runs 3]

Each figure is the median over fresh processes. "cold" begins with empty caches (attndsl's, Triton's
and Inductor's), "warm" has them filled by the process before. On GPUs FlexAttention, compiled, does
the same beside it. Making the CUDA context is part of every figure, and also given on its own.
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
from typing import Any

import common

PROGRAM = "causal() and q - kv < 256"
SHAPE = (1, 4, 1024, 64)

HEAD = """
import time
begin = time.time()
import torch
imported = time.time()
q, k, v = (torch.randn({shape}, device="{device}", dtype={dtype}) for _ in range(3))
context = time.time()
"""
BODIES = {
    "attndsl": """
import attndsl
out = attndsl.compile("{program}")(q, k, v)
""",
    "flex": """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
blocks = create_block_mask(
    lambda b, h, q, kv: (q >= kv) & (q - kv < 256), None, None, q.shape[2], q.shape[2],
    device="{device}",
)
out = torch.compile(flex_attention)(q, k, v, block_mask=blocks)
""",
}
TAIL = """
out.sum().item()
print(imported - begin, context - imported, time.time())
"""


def measure(body: str, device: str, folder: Path) -> dict[str, float]:
    """One process: milliseconds to its first output, and of its parts."""
    dtype = "torch.bfloat16" if device.startswith("cuda") else "torch.float32"
    code = (HEAD + BODIES[body] + TAIL).format(
        shape=SHAPE, device=device, dtype=dtype, program=PROGRAM
    )
    caches = ("ATTNDSL_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    env = os.environ | {name: str(folder / name.lower()) for name in caches}
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    torch_s, context_s, end = map(float, done.stdout.split())
    return {
        "first_output_ms": (end - begin - torch_s) * 1e3,
        "context_ms": context_s * 1e3,
        "import_torch_ms": torch_s * 1e3,
    }


def row(body: str, device: str, runs: int) -> list[dict[str, Any]]:
    """Cold and warm rows of one system."""
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            for state in found:
                found[state].append(measure(body, device, Path(folder)))
    return [
        {"system": body, "device": device, "cache": state}
        | {name: statistics.median(each[name] for each in each_run) for name in each_run[0]}
        for state, each_run in found.items()
    ]


def main() -> None:
    """Measure, print and write."""
    import torch

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=default)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for body in ("attndsl", "flex") if options.device.startswith("cuda") else ("attndsl",):
        rows += row(body, options.device, options.runs)
        name = f"start_{options.device.partition(':')[0]}"
        common.write(name, options.device, rows, options.output)
    common.print_table(rows, list(rows[0]))


if __name__ == "__main__":
    main()
