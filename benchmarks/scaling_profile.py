"""What the GPU of a rank does while calls run: kernels, communication alone, and nothing at all."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CALLS = 4
SHOWN = 8
"""Kernels that a row names."""
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that are work of a GPU."""


def profiled(call: Callable[[], Any]) -> dict[str, Any]:
    """Times of a call among several in a row, on this rank's GPU; see :func:`times_of`."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return times_of(events, CALLS)


def times_of(events: Iterable[dict[str, Any]], calls: int) -> dict[str, Any]:
    """Milliseconds a call, of ``calls``, from the events of a trace.

    Returns:
        ``nccl_ms``: kernels of NCCL; ``exposed_ms``: while no other kernel ran; ``idle_ms``: while
        none ran, between the first and the last one; ``kernels_ms``: by name, the longest ones.
    """
    work: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    names: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in KINDS:
            start, time = float(event["ts"]), float(event["dur"])
            work["nccl" in event["name"].lower()].append((start, start + time))
            names[event["name"][:60]] += round(time / calls)
    others, everything = _length(work[False]), _length(work[False] + work[True])
    ends = [x for some in work.values() for run in some for x in run]
    span = max(ends) - min(ends) if ends else 0.0
    scale = 1e-3 / calls
    return {
        "nccl_ms": _length(work[True]) * scale,
        "exposed_ms": (everything - others) * scale,
        "idle_ms": (span - everything) * scale,
        "kernels_ms": {name: time / 1e3 for name, time in names.most_common(SHOWN)},
    }


def _length(runs: list[tuple[float, float]]) -> float:
    """How much lies in any of ``runs``."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(runs):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
