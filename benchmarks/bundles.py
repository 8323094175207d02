"""The first forward and backward of fresh processes with a bundle: seconds, and what is compiled.

    python benchmarks/bundles.py model.yaml --bundle bundle [--digest SHA256] [--head-dim 128]

``attndsl build`` makes the bundle elsewhere, for this GPU, this Triton and the same sources. Each
program runs in fresh processes, whose caches (attndsl's and Triton's) are empty: with the bundle
and without it. Seconds go from torch and the CUDA context, which are there, to the output and to
the gradients. The first include the import of attndsl and of Triton and the loading of the program,
which are also given alone. The package's bytecode is there. ``compiled`` counts the kernels that
Triton compiled and what a C compiler made. Outputs and gradients are held to the reference backend.

Exit status: 1 if a process with the bundle compiled anything, or a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common

CHILD = """
import json, sys, time
import torch
given = json.loads(sys.argv[1])
batch, heads, kv_heads, length, dim = given["shape"]
dtype = getattr(torch, given["dtype"])
torch.manual_seed(0)
q = torch.randn(batch, heads, length, dim, device="cuda", dtype=dtype)
k, v = (torch.randn(batch, kv_heads, length, dim, device="cuda", dtype=dtype) for _ in range(2))
if given["backward"]:
    q, k, v = (x.requires_grad_() for x in (q, k, v))
torch.cuda.synchronize()
begin = time.perf_counter()
import attndsl
import triton
imports = time.perf_counter() - begin
counts = {"kernels": 0, "libraries": 0}

def counting(module, name, what):
    original = getattr(module, name)
    def count(*arguments, **more):
        counts[what] += 1
        return original(*arguments, **more)
    setattr(module, name, count)

counting(triton, "compile", "kernels")
counting(triton.runtime.build, "_build", "libraries")
attn = attndsl.load(given["file"], key=given["key"])[given["name"]]
load = time.perf_counter() - begin - imports
out = attn(q, k, v)
torch.cuda.synchronize()
forward = time.perf_counter() - begin
backward, grads = None, ()
if given["backward"]:
    begin = time.perf_counter()
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    torch.cuda.synchronize()
    backward = time.perf_counter() - begin
compiled = dict(counts)
exact = attndsl.load(given["file"], key=given["key"], backend="reference")[given["name"]]
wide = [x.detach().double().requires_grad_(given["backward"]) for x in (q, k, v)]
golden = exact(*wide)
others = torch.autograd.grad(golden.sum(), wide) if given["backward"] else ()
errors = [
    float((a.double() - b).abs().mean() / b.abs().mean().clamp_min(1e-12))
    for a, b in zip((out, *grads), (golden, *others))
]
print(json.dumps({"imports": imports, "load": load, "forward": forward, "backward": backward,
                  "compiled": compiled, "errors": errors, "card": torch.cuda.get_device_name(),
                  "torch": torch.__version__, "triton": triton.__version__}))
"""
MOST_ERROR = 0.02
"""Mean error by mean magnitude, which rounding to bf16 keeps far below."""


def run(given: dict, bundle: str) -> dict:
    """What a fresh process with empty caches says."""
    with tempfile.TemporaryDirectory() as folder:
        environment = common.with_bytecode() | {
            "ATTNDSL_CACHE_DIR": f"{folder}/attndsl", "TRITON_CACHE_DIR": f"{folder}/triton",
            "ATTNDSL_BUNDLES": bundle, "ATTNDSL_SHIPPED": "0",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-P", "-c", CHILD, json.dumps(given)], env=environment, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"{given['name']}: the process failed\n{done.stderr[-3000:]}")
    told = [line for line in done.stderr.splitlines() if "CacheWarning" in line]
    return json.loads(done.stdout.splitlines()[-1]) | {"told": told}


def row(found: list[dict]) -> dict:
    """Medians over processes; the most of what was compiled, and the worst error."""

    def median(name: str) -> float | None:
        values = [x[name] for x in found if x[name] is not None]
        return round(statistics.median(values), 3) if values else None

    return {
        "imports_s": median("imports"),
        "load_s": median("load"),
        "forward_s": median("forward"),
        "backward_s": median("backward"),
        "compiled": max(sum(x["compiled"].values()) for x in found),
        "error": round(max(max(x["errors"]) for x in found), 5),
        "told": found[0]["told"],
        "card": found[0]["card"],
        "torch": found[0]["torch"],
        "triton": found[0]["triton"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the configuration that the bundle was built of")
    parser.add_argument("--key", help="where its programs stand")
    parser.add_argument("--name", action="append", help="of programs; all if it is not given")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--digest", help="that it has to have")
    parser.add_argument("--shape", default="1,16,16,4096", help="batch, heads, key heads, length")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-backward", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, help="result file")
    arguments = parser.parse_args()

    import torch

    import attndsl

    if not torch.cuda.is_available():
        sys.exit("bundles: no GPU is here; attndsl build needs none, and this does")
    bundle = str(arguments.bundle.resolve()) + (f"@{arguments.digest}" if arguments.digest else "")
    programs = attndsl.load(arguments.file, key=arguments.key)
    shape = [*map(int, arguments.shape.split(",")), arguments.head_dim]
    rows, failed = [], False
    for name in arguments.name or programs:
        given = {
            "file": str(arguments.file.resolve()), "key": arguments.key, "name": name,
            "shape": shape, "dtype": arguments.dtype, "backward": not arguments.no_backward,
        }  # fmt: skip
        for what, path in (("bundle", bundle), ("compiled here", "")):
            found = row([run(given, path) for _ in range(arguments.runs)])
            rows.append({"program": name, "with": what, "shape": arguments.shape,
                         "head_dim": arguments.head_dim, **found})  # fmt: skip
            failed |= found["error"] > MOST_ERROR or (what == "bundle" and found["compiled"] > 0)
            print(
                f"{name:<16} {what:<14} forward {found['forward_s']} s, backward "
                f"{found['backward_s']} s, {found['compiled']} compiled, error {found['error']}, "
                f"{found['card']}, torch {found['torch']}, triton {found['triton']}",
                *found["told"],
                sep="\n    ",
                flush=True,
            )
            common.write("bundles", "cuda", rows, arguments.output)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
