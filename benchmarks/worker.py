"""Measurements in a process of their own, one cell after the other.

A cell is what is measured at once: a dict that JSON can say. A worker that dies or hangs costs the
cell that it was at, and another one goes on with the rest.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

Cell = dict[str, Any]
Found = dict[str, Any]
"""What was measured, or ``why`` nothing was."""
CELL_SECONDS = 150.0
"""Longest a cell may take, compilation included."""
OUT_OF_TIME = "the limit of time was reached before"
REPLACE = 75
"""Exit code of a worker that has said all, and can measure no more."""


def serve(cells: Sequence[Cell], measure: Callable[[Cell], Found]) -> None:
    """The worker: measure ``cells`` in their order and say what was found."""
    import torch

    for cell in cells:
        _say(start=cell)
        try:
            found = measure(cell)
        except Exception as error:  # A cell that fails must not end the others.
            found = {"why": f"{type(error).__name__}: {str(error)[:300]}"}
        _say(cell=cell, found=found)
        if "why" in found and torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:  # A kernel's fault stays with the process until its end.
                sys.exit(REPLACE)


def measured(
    script: Path, cells: Sequence[Cell], flags: Sequence[str] = (), seconds: float = CELL_SECONDS,
    environ: Mapping[str, str] = os.environ, until: float = math.inf,
) -> Iterator[tuple[Cell, Found]]:  # fmt: skip
    """Each cell and what was found; workers are replaced until every cell has an answer.

    A worker is ``script --worker CELLS`` with ``flags``, which calls :func:`serve`. At the time
    ``until``, by ``time.monotonic``, it is ended, and the cells that are left are told so.
    """
    left = list(cells)
    while left:
        if time.monotonic() >= until:
            yield from ((cell, {"why": OUT_OF_TIME}) for cell in left)
            return
        worker = subprocess.Popen(
            [sys.executable, str(script), "--worker", json.dumps(left), *flags],
            stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        lines: queue.Queue[str | None] = queue.Queue()
        pump = threading.Thread(target=_pump, args=(worker, lines), daemon=True)
        pump.start()
        why = None
        while left and why is None:
            try:
                line = lines.get(timeout=min(seconds, max(0.0, until - time.monotonic())))
            except queue.Empty:
                if time.monotonic() < until:
                    why = f"no answer within {seconds:.0f} s"
                break
            if line is None:
                if worker.wait() == REPLACE:
                    break
                why = f"the process ended with code {worker.returncode}"
            elif line.startswith('{"cell"'):
                message = json.loads(line)
                left = left[1:]
                yield message["cell"], message["found"]
        worker.kill()
        worker.wait()
        pump.join()
        if left and why is not None:
            yield left[0], {"why": why}
            left = left[1:]


def warmed(
    script: Path, cells: Sequence[Cell], flags: Sequence[str], processes: int, until: float
) -> int:  # fmt: skip
    """Have several workers answer ``cells`` side by side, so that what these compile is cached.

    Args:
        script: As of :func:`measured`, like the others.
        cells: Each worker has every so manyth of them, in their order.
        flags: The same for all.
        processes: How many workers there are.
        until: When they end.

    Returns:
        How many cells have an answer that is more than why there is none.
    """
    # The workers are as many as there are processors: none needs processes of its own.
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    parts = [part for number in range(processes) if (part := cells[number::processes])]

    def answered(part: Sequence[Cell]) -> int:
        answers = measured(script, part, flags, environ=environ, until=until)
        return sum("why" not in found for _, found in answers)

    with ThreadPoolExecutor(max(1, len(parts))) as pool:
        return sum(pool.map(answered, parts))


def side_by_side(
    script: Path, each: Sequence[Sequence[str]], environ: Mapping[str, str], seconds: float
) -> None:  # fmt: skip
    """Run ``script`` once with each of some lists of arguments, all at once, and end what is late.

    What they print is dropped: those who measure afterwards say what fails.
    """
    running = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments], env=environ,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for arguments in each
    ]  # fmt: skip
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _say(**message: Any) -> None:
    """One JSON line to the parent."""
    print(json.dumps(message), flush=True)


def _pump(worker: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            lines.put(line)
    lines.put(None)
