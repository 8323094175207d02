"""Times of calls on several ranks, and whether their results are those of one process."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPEATS = 10
LEAST = 3
"""Repeats, where calls are long."""
ROW = 8
"""Calls in a row, which a GPU does without waiting for the host."""
CALLS_OF_GRAPH = 4
LONG = 0.2
"""Seconds of calls in a row, at most, where one of them is shorter."""
BUDGET = 3.0
"""Seconds of all repeats, if that makes :data:`LEAST`."""
COMPARED = 32768
"""Tokens of each rank, at most, all rows of which are compared."""
SAMPLE = 128
"""Rows at the beginning, in the middle and at the end of a rank's, where not all are compared."""
ERRORS = {"out": 0.02, "dq": 0.05, "dk": 0.05, "dv": 0.05, "dx": 0.05}
"""Of results in bf16, relative to one process's, at most."""


def device() -> str:
    """Where tensors of this process are."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def most(values: Sequence[float]) -> list[float]:
    """The greatest of each over the ranks."""
    told = torch.tensor([*values], dtype=torch.float64, device=device())
    dist.all_reduce(told, dist.ReduceOp.MAX)
    found: list[float] = told.tolist()
    return found


def step_of(call: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """A forward and a backward."""
    grads: list[torch.Tensor] = []

    def step() -> None:
        out = call()
        if not grads:
            grads.append(torch.ones_like(out))
        out.backward(grads[0])

    return step


def times(name: str, call: Callable[[], torch.Tensor], backward: bool = True) -> dict[str, float]:
    """Medians of the forward, and of forward and backward, of the slowest rank.

    Of calls in a row, as layers of a model make them, and of single ones (``lone``), for which
    the GPU waits until the host has prepared them.
    """
    with torch.no_grad():
        forward = _medians(call)
    both = _medians(step_of(call)) if backward else ()
    keys = ("forward_ms", "lone_forward_ms", "step_ms", "lone_step_ms")[: 2 + len(both)]
    found = most([*forward, *both])
    return {f"{name}_{key}": x for key, x in zip(keys, found, strict=True)}


def graph_times(name: str, call: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Medians of the forward, and of forward and backward, in CUDA graphs, of the slowest rank.

    A graph has several calls in a row. Nothing waits for the host, whose share is small where calls
    are long: those have no figures here.
    """
    found = []
    with torch.no_grad():
        (seconds,) = most([_timed(call, 1)])
        if not torch.cuda.is_available() or seconds > LONG / ROW:
            return {}
        found.append(_median_of_graph(call, seconds))
    found.append(_median_of_graph(step_of(call), seconds))
    keys = ("graph_forward_ms", "graph_step_ms")
    return {f"{name}_{key}": x for key, x in zip(keys, most(found), strict=True)}


def _median_of_graph(call: Callable[[], Any], seconds: float) -> float:
    """Milliseconds of one of several calls that a graph makes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A thread of NCCL's asks for the state of events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS_OF_GRAPH):
            call()
    return _median(graph.replay, 1, CALLS_OF_GRAPH * seconds) / CALLS_OF_GRAPH


def _medians(call: Callable[[], Any]) -> tuple[float, float]:
    """Of one of several calls in a row, and of single ones; long calls are as long either way."""
    _timed(call, 1)  # It may compile.
    # All ranks make as many calls: a call waits for the others.
    (seconds,) = most([_timed(call, 1)])
    gpu = torch.cuda.is_available()
    number = max(1, min(ROW, int(LONG / max(1e-6, seconds)))) if gpu else 1
    alone = _median(call, 1, seconds)
    return (alone if number == 1 else _median(call, number, seconds)), alone


def _median(call: Callable[[], Any], number: int, seconds: float) -> float:
    """Milliseconds of one of ``number`` calls in a row, each of which takes about ``seconds``."""
    if torch.cuda.is_available():
        repeats = max(LEAST, min(REPEATS, math.floor(BUDGET / max(1e-6, number * seconds))))
    else:
        repeats = 2
    _timed(call, number)
    return 1e3 * statistics.median(_timed(call, number) for _ in range(repeats)) / number


def _timed(call: Callable[[], Any], number: int) -> float:
    """Seconds of ``number`` calls, that all ranks begin together."""
    gpu = torch.cuda.is_available()
    dist.barrier()
    if gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(number):
        call()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def errors_of(
    attention: Any, call: Callable[[], torch.Tensor], operands: Sequence[torch.Tensor],
    captures: dict[str, Any], places: torch.Tensor,
) -> dict[str, float]:  # fmt: skip
    """How far results of a rank's shard are from those of calls that have all keys, the worst.

    Each rank makes such a call for its own rows, or for some of many rows, by their positions.
    Then gradients of other rows are none, so that those of keys are comparable too: they are added
    up over the ranks. Captures' gradients are added up likewise, also those of ``call``.

    Args:
        attention: The program, which means what ``call`` computes.
        call: The output of this rank's rows.
        operands: Of this rank, as ``call`` has them.
        captures: Of the program, by name.
        places: (rows,) the positions of this rank's rows.

    Returns:
        By name of a result the norm of the difference for that of the result. The output alone,
        if ``operands`` need no gradients.
    """
    q, k, v = operands
    rows = q.shape[2]
    picked = torch.arange(rows, device=q.device)
    if rows > COMPARED:
        picked = picked.unfold(0, SAMPLE, (rows - SAMPLE) // 2).flatten()
    grad = torch.zeros_like(q[..., : v.shape[-1]])
    grad[:, :, picked] = torch.randn_like(grad[:, :, picked])
    learned = {n: x for n, x in captures.items() if x.requires_grad}
    order = torch.argsort(_gathered(places, 0))
    whole = [_gathered(x.detach(), 2)[:, :, order].requires_grad_() for x in (k, v)]
    own = q.detach()[:, :, picked].requires_grad_()
    out = call()
    wanted_out = attention(own, *whole, **captures, q_index=places[picked])
    pairs = {"out": (out[:, :, picked], wanted_out)}
    if out.requires_grad:
        found = list(torch.autograd.grad(out, (q, k, v, *learned.values()), grad))
        leaves = (own, *whole, *learned.values())
        wanted = list(torch.autograd.grad(wanted_out, leaves, grad[:, :, picked]))
        wanted[1:] = [_summed(x) for x in wanted[1:]]
        found[3:] = [_summed(x) for x in found[3:]]
        pairs["dq"] = (found[0][:, :, picked], wanted[0])
        for name, x, y in zip(("dk", "dv"), found[1:3], wanted[1:3], strict=True):
            pairs[name] = (x, y[:, :, places])
        for name, x, y in zip(learned, found[3:], wanted[3:], strict=True):
            pairs[f"d{name}"] = (x, y)
    errors = most([_error(x.detach().float(), y.detach().float()) for x, y in pairs.values()])
    return dict(zip(pairs, errors, strict=True))


def _summed(x: torch.Tensor) -> torch.Tensor:
    """Over the ranks, in fp32."""
    total = x.float()
    dist.all_reduce(total)
    return total


def _gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format)
             for _ in range(dist.get_world_size())]  # fmt: skip
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Infinite where anything is no number."""
    error = float((found - wanted).norm() / wanted.norm())
    return error if math.isfinite(error) else math.inf


def wrong(errors: dict[str, float]) -> str | None:
    """What is too far from one process's, in words."""
    bad = {name: x for name, x in errors.items() if not x <= ERRORS[name]}
    if not bad:
        return None
    told = ", ".join(f"{name} by {x:.2g}" for name, x in bad.items())
    return f"results differ from one process's: {told} of their norm"
