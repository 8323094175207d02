"""Run the benchmarks that this machine can run, or those named (``make bench``).

python benchmarks/run.py [NAME ...]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
HELPERS = (
    "bundles", "chart", "columns", "commits", "common", "comparison", "decode_chart", "decoding",
    "exponentials", "run", "scaling", "scaling_parts", "scaling_peers", "scaling_picture",
    "scaling_profile", "scaling_programs", "scaling_run", "scaling_times", "scaling_told", "speed",
    "summary", "table", "turns", "worker",
)  # fmt: skip
"""Modules, and scripts that do nothing without arguments."""
ON_GPUS = (
    "attention", "costs", "decode", "gallery_times", "gradients", "gpt", "huggingface_speed",
    "layouts", "lists", "odd_shapes", "serving", "short", "short_tune", "training",
)  # fmt: skip
EVERYWHERE = tuple(
    path.stem
    for path in sorted(FOLDER.glob("*.py"))
    if path.stem not in HELPERS and path.stem not in ON_GPUS
)


def main() -> int:
    """Run them one after the other; 1 if one fails."""
    import torch

    names = sys.argv[1:] or [*EVERYWHERE, *(ON_GPUS if torch.cuda.is_available() else ())]
    unknown = [name for name in names if name not in (*EVERYWHERE, *ON_GPUS)]
    if unknown:
        known = ", ".join((*EVERYWHERE, *ON_GPUS))
        print(f"there is no benchmark '{unknown[0]}'; there are: {known}", file=sys.stderr)
        return 2
    if not sys.argv[1:] and not torch.cuda.is_available():
        print(f"no CUDA device here: leaving out {', '.join(ON_GPUS)}\n")
    failed = 0
    for name in names:
        print(f"== {name}", flush=True)
        failed |= subprocess.run([sys.executable, FOLDER / f"{name}.py"]).returncode != 0
        print(flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
