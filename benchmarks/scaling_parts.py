"""One part of ``scaling.py --run``: this rank's share of it, in the processes of torchrun."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attndsl
from attndsl.parallel import ContextParallel, Shape

HEAD_DIM = 128
TILE = 128
REPEATS = 10
Ids = Callable[[int, int], Any]


def measure(part: dict[str, Any], text: str, median: int | None, ids: Ids) -> None:
    """Time one program, ours and torch's own; rank 0 prints a line of JSON.

    Args:
        part: The row's ``program``, ``ranks``, ``tokens`` of each rank, and ``heads``.
        text: The program.
        median: Of documents' lengths; None where it has none.
        ids: Documents' numbers, from a length and a median.
    """
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = "cuda" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(kind, (ranks,), mesh_dim_names=("cp",))
    heads, kv_heads = (int(x) for x in part["heads"].split(","))
    length = part["tokens"] * ranks
    width = HEAD_DIM if gpu else 16
    attention = attndsl.compile(text)
    captures: dict[str, Any] = {}
    if median is not None:
        captures["doc"] = torch.from_numpy(ids(length, median)).int().to(kind)
    if "x[heads]" in text:
        captures["x"] = torch.linspace(0.5, 1.5, heads, device=kind).requires_grad_()
    cp = ContextParallel(mesh["cp"], reduce=True)
    shape = Shape(1, heads, kv_heads, width, width)
    started = time.perf_counter()
    cp.plan(length, attention, shape=shape, captures=captures)
    planned = time.perf_counter() - started
    torch.manual_seed(rank)
    rows = len(cp.positions())
    operands = [
        torch.randn(1, n, rows, width, device=kind, dtype=torch.bfloat16).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    call = cp(attention)
    found = {"plan_ms": planned * 1e3, **_times("attndsl", lambda: call(*operands, **captures))}
    own = {n: x[:rows] if n == "doc" else x for n, x in captures.items()}
    found |= _times("alone", lambda: attention(*operands, **own))
    if gpu and part["program"] == "causal":  # On CPUs torch leaves shards alone.
        found |= _torchs(mesh["cp"], operands)
    for name, size, given, among in (
        ("attndsl", length, captures, ranks), ("alone", rows, own, 1)
    ):  # fmt: skip
        flops = forward_flops(attention, size, (heads, width), given.get("doc"))
        found[f"{name}_tflops_per_gpu_forward"] = flops / among / found[f"{name}_forward_ms"] / 1e9
    found["explain"] = cp.explain()
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


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
    """Torch's own context parallel: causal attention of its ring; or why not."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    batch, heads, rows, width = operands[0].shape
    try:
        # Its ring takes as many heads of keys as of queries. Buffers are sharded in place.
        whole = [
            operands[0].new_zeros(batch, heads, rows * mesh.size(), width).normal_()
            for _ in operands
        ]
        with context_parallel(
            mesh, buffers=whole, buffer_seq_dims=[2] * len(whole), no_restore_buffers=set(whole)
        ):
            own = [x.detach().requires_grad_() for x in whole]
            return _times("torch", lambda: sdpa(*own, is_causal=True))
    except Exception as error:
        return {"torch_why": str(error).splitlines()[0][:200]}


def _times(name: str, call: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Medians of the forward, and of forward and backward, of the slowest rank."""

    def step() -> None:
        out = call()
        out.backward(torch.ones_like(out))

    with torch.no_grad():
        forward = _median(call)
    both = _median(step)
    told = torch.tensor([forward, both], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return {f"{name}_forward_ms": float(told[0]), f"{name}_step_ms": float(told[1])}


def _median(call: Callable[[], Any]) -> float:
    """Milliseconds, after runs that compile."""
    gpu = torch.cuda.is_available()
    repeats = REPEATS if gpu else 2
    times = []
    for number in range(repeats + 2):
        dist.barrier()
        if gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if gpu:
            torch.cuda.synchronize()
        if number >= 2:
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)
