"""Times of several calls that take turns on one GPU: by events, eager and in CUDA graphs."""

from __future__ import annotations

import math
import statistics
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    Call = Callable[[], Any]

_ROUND_MS = 3.0


class Run(NamedTuple):
    """What is timed, and what it runs within: entering that is no part of a call."""

    call: Call
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def by_turns(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Microseconds of a call of each: medians of rounds in which all take turns."""
    import torch

    calls = {}
    for name, run in runs.items():
        _batch_ms(run, 5)
        calls[name] = max(3, math.ceil(_ROUND_MS / max(_batch_ms(run, 5), 1e-4)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            torch.cuda.synchronize()
            times[name].append(1e3 * _batch_ms(run, calls[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def _batch_ms(run: Run, calls: int) -> float:
    """Milliseconds of one of ``calls`` calls."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with run.within():
        begin.record()
        for _ in range(calls):
            run.call()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


def graph_of(run: Run, stream: Any, calls: int) -> Any:
    """A CUDA graph of ``calls`` calls. Backwards run on the stream that their forwards ran on."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with run.within(), torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run.call()
    return graph


def said_by(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
