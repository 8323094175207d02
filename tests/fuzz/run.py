"""Run random programs for as long as you like: ``python tests/fuzz/run.py --count 20000``.

Exits with 1 if a case failed, or if it was interrupted. Each failure is printed with a program that
shows it. The report of an interrupted run has all cases until then.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="reference,cpu", help="names, by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp64", help="fp16, bf16, fp32 or fp64, by commas")
    parser.add_argument("--count", type=int, default=1_000_000, help="programs")
    parser.add_argument("--seed", type=int, help="of the first program; drawn by default")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to shrink a failure")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between lines")
    parser.add_argument("--parts", action="store_true", help="calls are cut into parts")
    parser.add_argument("--ragged", action="store_true", help="lengths of each batch entry")
    parser.add_argument("--serve", action="store_true", help="packed requests over pages")
    parser.add_argument("--graphs", action="store_true", help="calls are graphs of torch.compile")
    parser.add_argument("--sequences", action="store_true", help="calls of one object, on CPUs")
    parser.add_argument("--wrappers", action="store_true", help="flash-attn's, xFormers', torch's")
    parser.add_argument("--nan", action="store_true", help="NaN behind sequences of --wrappers")
    parser.add_argument("--operators", action="store_true", help="how often each stands")
    given = parser.parse_args()
    of_calls = given.graphs or given.sequences
    if given.parts + given.ragged + given.serve + given.wrappers + of_calls > 1:
        parser.error("--parts, --ragged, --serve, --wrappers, and --graphs or --sequences are "
                     "different runs: leave one of them")  # fmt: skip
    if given.nan and not given.wrappers:
        parser.error("--nan is for --wrappers: add these, or leave it out")
    if (given.sequences or given.wrappers) and given.device != "cpu":
        parser.error("--sequences and --wrappers run on CPUs: leave --device out")
    if "reference" in given.backend.split(",") and {"fp16", "bf16"} & {*given.dtype.split(",")}:
        # Expected results are of scores in fp32.
        parser.error("the reference rounds scores of fp16 and bf16, as eager attention does: "
                     "leave it out of --backend, or take fp32 and fp64")  # fmt: skip
    return given


def _signals() -> Callable[[], bool]:
    """Whether the keyboard, or a limit of time (``timeout``), asked to stop.

    An exception between any two instructions would leave queues of workers half made. The second
    interrupt from the keyboard is one all the same.
    """
    caught = []

    def note(number: int, frame: object) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return lambda: bool(caught)


def main() -> int:
    """The number of failures, at most 1."""
    given = _arguments()
    backends = given.backend.split(",")
    if given.device == "cpu" and set(backends) - {"cpu", "reference", "auto"}:
        # Before Triton is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from fuzz.campaign import Plan, run, table
    from fuzz.compare import Place

    seed = random.SystemRandom().randrange(1 << 40) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    places = tuple(
        Place(
            backend,
            _DTYPES[dtype],
            given.device,
            given.parts,
            given.ragged,
            given.serve,
            given.graphs,
            given.sequences,
            given.wrappers,
            given.nan,
        )
        for backend in backends
        for dtype in given.dtype.split(",")
    )
    plan = Plan(places, given.count, seed, given.processes, given.minutes, given.shrink)
    report = run(plan, lambda line: print(line, flush=True), given.every, _signals())
    if given.operators:
        print(", ".join(f"{name} {count}" for name, count in report.operators.most_common()))
    print(table(report))
    return int(bool(report.failures) or report.interrupted)


if __name__ == "__main__":
    # As a script, this folder is on the path and the one that holds the package is not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
