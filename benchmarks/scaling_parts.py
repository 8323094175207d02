"""Parts of ``scaling.py --run``: this rank's share of them, in the processes of torchrun."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from scaling_peers import flex, sdpa
from scaling_profile import profiled
from scaling_programs import MEDIANS, TEXTS, TILE, document_ids
from scaling_times import COMPARED, errors_of, graph_times, step_of, times, wrong
from torch.distributed.device_mesh import init_device_mesh

import attndsl
from attndsl.parallel import ContextParallel, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEAD_DIM = 128


@dataclass(frozen=True)
class Part:
    """What is measured."""

    name: str
    """Of a program."""
    tokens: int
    """Of each rank."""
    system: str
    heads: tuple[int, int]
    """Of queries and of keys."""
    profile: bool = False


def measure_all(parts: Sequence[Part], patience: float) -> None:
    """Time parts one after the other; rank 0 prints a line of JSON for each.

    Args:
        parts: What is timed.
        patience: Seconds after which rank 0 prints where it is.
    """
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh("cuda" if gpu else "cpu", (ranks,), mesh_dim_names=("cp",))
    for part in parts:
        if rank == 0:  # Stacks of several processes would lie within each other.
            faulthandler.dump_traceback_later(patience)
        try:
            found = measure(part, mesh)
        except torch.OutOfMemoryError as error:
            # All ranks have as much of everything.
            found = {"why": str(error).splitlines()[0][:200]}
        except Exception as error:
            # The others may wait for this rank: the processes end, and other ones go on.
            lines = str(error).splitlines() or [""]
            _say(part, {"why": f"{type(error).__name__}: {lines[0][:250]}", "over": True})
            traceback.print_exc()
            sys.exit(1)
        if rank == 0:
            _say(part, found)
        if gpu:
            torch.cuda.empty_cache()
        dist.barrier()
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def _say(part: Part, found: dict[str, Any]) -> None:
    key = part.name, part.tokens, part.system
    print(json.dumps({"part": key, **found}), flush=True)


def measure(part: Part, mesh: Any) -> dict[str, Any]:
    """Time one program of one system."""
    gpu, length = torch.cuda.is_available(), part.tokens * mesh.size()
    kind = "cuda" if gpu else "cpu"
    heads, kv_heads = part.heads
    width = HEAD_DIM if gpu else 16
    attention = attndsl.compile(TEXTS[part.name])
    captures: dict[str, Any] = {}
    if part.name in MEDIANS:
        captures["doc"] = torch.from_numpy(document_ids(length, MEDIANS[part.name])).int().to(kind)
    if "x[heads]" in TEXTS[part.name]:
        captures["x"] = torch.linspace(0.5, 1.5, heads, device=kind).requires_grad_()
    torch.manual_seed(mesh.get_local_rank())
    operands = [
        torch.randn(1, n, part.tokens, width, device=kind, dtype=torch.bfloat16).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    if part.system == "torch_sdpa":
        return sdpa(attention, operands, mesh["cp"])
    if part.system == "torch_flex":
        return flex(part.name, attention, operands, captures, mesh["cp"])
    return _ours(part, attention, operands, captures, mesh["cp"])


def _ours(
    part: Part, attention: Any, operands: list[torch.Tensor], captures: dict[str, Any], mesh: Any
) -> dict[str, Any]:
    """Ours, and a call of one GPU's own tokens."""
    (_, heads, rows, width), kv_heads = operands[0].shape, operands[1].shape[1]
    ranks = mesh.size()
    length = rows * ranks
    cp = ContextParallel(mesh, reduce=True)
    shape = Shape(1, heads, kv_heads, width, width)
    started = time.perf_counter()
    cp.plan(length, attention, shape=shape, captures=captures)
    found: dict[str, Any] = {"plan_ms": 1e3 * (time.perf_counter() - started)}
    call = cp(attention)
    own = {n: x[:rows] if n == "doc" else x for n, x in captures.items()}
    if rows <= COMPARED:
        found |= _compared(cp, attention, operands, captures)
    else:
        found |= _sampled(cp, attention, operands, captures)
    for name, one in (
        ("attndsl", lambda: call(*operands, **captures)),
        ("alone", lambda: attention(*operands, **own)),
    ):
        found |= times(name, one)
        # A graph would keep the plan of these documents: calls refuse that.
        if part.name not in MEDIANS:
            found |= graph_times(name, one)
        if part.profile and torch.cuda.is_available():
            found |= _profiles(name, one)
    for name, size, given, among in (
        ("attndsl", length, captures, ranks), ("alone", rows, own, 1)
    ):  # fmt: skip
        flops = forward_flops(attention, size, (heads, width), given.get("doc"))
        found[f"{name}_tflops_per_gpu_forward"] = flops / among / found[f"{name}_forward_ms"] / 1e9
    found["explain"] = cp.explain()
    return found


def _sampled(
    cp: ContextParallel, attention: Any, operands: list[torch.Tensor], captures: dict[str, Any]
) -> dict[str, Any]:
    """How far some rows' results are from those of one process; all of them have no room.

    Raises:
        ArithmeticError: They are too far.
    """
    places = cp.positions().to(operands[0].device)
    # Gradients of captures are those of all ranks already.
    still = {n: x.detach() for n, x in captures.items()}

    def call() -> torch.Tensor:
        found: torch.Tensor = cp(attention)(*operands, **still)
        return found

    errors = errors_of(attention, call, operands, still, places)
    why = wrong(errors)
    if why:
        raise ArithmeticError(why)
    return {"sampled_errors": errors}


def _compared(
    cp: ContextParallel, attention: Any, operands: list[torch.Tensor], captures: dict[str, Any]
) -> dict[str, Any]:
    """Whether outputs are the bits of one GPU, and how far gradients are from its, of all ranks.

    Raises:
        ArithmeticError: They are too far.
    """
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
    why = wrong(dict(zip(("dq", "dk", "dv"), errors, strict=True)))
    if why:
        raise ArithmeticError(why)
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


def _profiles(name: str, call: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """What the GPUs did in a forward, and in a forward and backward: rank 0's, and the others'."""
    with torch.no_grad():
        forward = profiled(call)
    found: dict[str, Any] = {}
    for what, own in (("forward", forward), ("step", profiled(step_of(call)))):
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, own)
        found |= {f"{name}_{what}_profile": each[0], f"{name}_{what}_profiles_of_others": each[1:]}
    return found
