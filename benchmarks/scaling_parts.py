"""One part of ``scaling.py --run``: this rank's share of it, in the processes of torchrun."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from scaling_profile import profiled
from torch.distributed.device_mesh import init_device_mesh

import attndsl
from attndsl.parallel import ContextParallel, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEAD_DIM = 128
TILE = 128
REPEATS = 10
COMPARED = 32768
"""Tokens of each rank, at most, whose whole is also computed on one GPU."""
TORCH_ERROR = 0.02
"""Of torch's output in bf16, relative to one process's, at most."""
ROW = 8
"""Calls in a row, which a GPU does without waiting for the host."""


@dataclass(frozen=True)
class Part:
    """What is measured."""

    name: str
    text: str
    tokens: int
    """Of each rank."""
    heads: tuple[int, int]
    """Of queries and of keys."""
    ids: Callable[[int], Any] | None = None
    """Documents' numbers, from a length."""
    profile: bool = False


def measure_all(parts: Sequence[Part]) -> None:
    """Time programs, ours and torch's own; rank 0 prints a line of JSON for each."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh("cuda" if gpu else "cpu", (ranks,), mesh_dim_names=("cp",))
    for part in parts:
        try:
            found = measure(part, mesh)
        except torch.OutOfMemoryError as error:
            # All ranks have as much of everything.
            found = {"why": str(error).splitlines()[0][:200]}
        if rank == 0:
            print(json.dumps(found), flush=True)
        if gpu:
            torch.cuda.empty_cache()
        dist.barrier()
    dist.destroy_process_group()


def measure(part: Part, mesh: Any) -> dict[str, Any]:
    """Time one program."""
    gpu, ranks = torch.cuda.is_available(), mesh.size()
    kind, length = "cuda" if gpu else "cpu", part.tokens * ranks
    heads, kv_heads = part.heads
    width = HEAD_DIM if gpu else 16
    attention = attndsl.compile(part.text)
    captures: dict[str, Any] = {}
    if part.ids is not None:
        captures["doc"] = torch.from_numpy(part.ids(length)).int().to(kind)
    if "x[heads]" in part.text:
        captures["x"] = torch.linspace(0.5, 1.5, heads, device=kind).requires_grad_()
    cp = ContextParallel(mesh["cp"], reduce=True)
    shape = Shape(1, heads, kv_heads, width, width)
    started = time.perf_counter()
    cp.plan(length, attention, shape=shape, captures=captures)
    found = {"plan_ms": 1e3 * (time.perf_counter() - started)}
    torch.manual_seed(mesh.get_local_rank())
    rows = len(cp.positions())
    operands = [
        torch.randn(1, n, rows, width, device=kind, dtype=torch.bfloat16).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    call = cp(attention)
    own = {n: x[:rows] if n == "doc" else x for n, x in captures.items()}
    for name, one in (
        ("attndsl", lambda: call(*operands, **captures)),
        ("alone", lambda: attention(*operands, **own)),
    ):
        found |= _times(name, one)
        if part.profile and gpu:
            found |= _profiles(name, one)
    if part.tokens <= COMPARED:
        found |= _compared(cp, attention, operands, captures)
    if gpu and part.name == "causal":  # On CPUs torch leaves shards alone.
        found |= _torchs(mesh["cp"], operands)
    for name, size, given, among in (
        ("attndsl", length, captures, ranks), ("alone", rows, own, 1)
    ):  # fmt: skip
        flops = forward_flops(attention, size, (heads, width), given.get("doc"))
        found[f"{name}_tflops_per_gpu_forward"] = flops / among / found[f"{name}_forward_ms"] / 1e9
    found["explain"] = cp.explain()
    return found


def _compared(
    cp: ContextParallel, attention: Any, operands: list[torch.Tensor], captures: dict[str, Any]
) -> dict[str, Any]:
    """Whether outputs are the bits of one GPU, and how far gradients are from its, of all ranks."""
    whole = [cp.unshard(x, 2).requires_grad_() for x in operands]
    grad = cp.unshard(torch.randn_like(operands[0]), 2)
    out = attention(*whole, **captures)
    grads = torch.autograd.grad(out, whole, grad)
    found = cp(attention)(*operands, **captures)
    own = torch.autograd.grad(found, operands, cp.shard(grad, 2))
    same = torch.equal(found, cp.shard(out, 2))
    wanted = [cp.shard(x, 2).float() for x in grads]
    errors = [float((x - y).norm() / y.norm()) for x, y in zip(own, wanted, strict=True)]
    told = torch.tensor([1.0 - same, *errors], device=operands[0].device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    differs, *errors = told.tolist()
    return {"same_bits": not differs, "errors_of_dq_dk_dv": errors}


def forward_flops(
    attention: Any, length: int, sizes: tuple[int, int], doc: torch.Tensor | None
) -> float:
    """Operations of the two products of a forward of one batch entry, in live tiles.

    Args:
        attention: The program.
        length: Rows and keys.
        sizes: Query heads, and the head dim of queries and of values.
        doc: What the mask looks up, if anything.
    """
    heads, width = sizes
    captures = {} if doc is None else {"doc": doc.cpu()}
    reach = attention.reach(length, length, TILE, TILE, captures=captures)
    return 4 * width * TILE * TILE * heads * int(reach.work.sum()) / reach.maps


def _torchs(mesh: Any, operands: list[torch.Tensor]) -> dict[str, Any]:
    """Torch's own context parallel: causal attention of its ring; or why not.

    Its output is held to attention in one process: where torch does not see the calls, each rank
    attends to its own rows alone, and is fast.
    """
    from torch.distributed.tensor.experimental import context_parallel

    batch, heads, rows, width = operands[0].shape
    length = rows * mesh.size()
    try:
        # Its ring takes as many heads of keys as of queries. Buffers are sharded in place.
        whole = [operands[0].new_empty(batch, heads, length, width).normal_() for _ in operands]
        for x in whole:
            dist.broadcast(x, 0, mesh.get_group())
        with torch.no_grad():
            wanted = functional.scaled_dot_product_attention(*whole, is_causal=True)
        places = torch.arange(length, device=operands[0].device)
        buffers = [*whole, places]
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2, 0], no_restore_buffers=set(buffers)
        ):
            own = [x.detach().requires_grad_() for x in whole]

            def call() -> torch.Tensor:
                # Torch replaces the function by its name.
                return functional.scaled_dot_product_attention(*own, is_causal=True)

            with torch.no_grad():
                out, wanted = call().float(), wanted[:, :, places].float()
            error = torch.tensor(float((out - wanted).norm() / wanted.norm()), device=out.device)
            dist.all_reduce(error, dist.ReduceOp.MAX)
            if not float(error) < TORCH_ERROR:
                return {"torch_why": f"its output differs by {float(error):.2g} from one process's"}
            return {"torch_error": float(error), **_times("torch", call)}
    except Exception as error:
        return {"torch_why": (str(error).splitlines() or [type(error).__name__])[0][:200]}


def _profiles(name: str, call: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """What this rank's GPU did in a forward, and in a forward and backward."""
    with torch.no_grad():
        forward = profiled(call)
    return {f"{name}_forward_profile": forward, f"{name}_step_profile": profiled(_step(call))}


def _step(call: Callable[[], torch.Tensor]) -> Callable[[], None]:
    grads: list[torch.Tensor] = []

    def step() -> None:
        out = call()
        if not grads:
            grads.append(torch.ones_like(out))
        out.backward(grads[0])

    return step


def _times(name: str, call: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Medians of the forward, and of forward and backward, of the slowest rank.

    Of calls in a row, as layers of a model make them, and of single ones (``lone``), for which
    the GPU waits until the host has prepared them.
    """
    with torch.no_grad():
        forward = [_median(call, number) for number in (ROW, 1)]
    both = [_median(_step(call), number) for number in (ROW, 1)]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    told = torch.tensor([*forward, *both], device=kind)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    keys = "forward_ms", "lone_forward_ms", "step_ms", "lone_step_ms"
    return {f"{name}_{key}": x for key, x in zip(keys, told.tolist(), strict=True)}


def _median(call: Callable[[], Any], number: int) -> float:
    """Milliseconds of one of ``number`` calls in a row, after runs that compile."""
    gpu = torch.cuda.is_available()
    repeats = REPEATS if gpu else 2
    times = []
    for turn in range(repeats + 2):
        dist.barrier()
        if gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(number):
            call()
        if gpu:
            torch.cuda.synchronize()
        if turn >= 2:
            times.append(1e3 * (time.perf_counter() - started) / number)
    return statistics.median(times)
