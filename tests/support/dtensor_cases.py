"""Calls of DTensors held to the same calls in one process; runs in processes of its own.

Each process makes the whole's inputs from one seed, calls with them, distributes them, and calls
with DTensors. Outputs, log-sum-exps and gradients, gathered, equal the whole's.
"""

from __future__ import annotations

import faulthandler
import json
import os
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.graph_errors import shown
from support.shard_work import start_processes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

import attndsl
from attndsl.parallel import ContextParallel, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Case = Callable[["Place"], None]

R, B, H = Replicate(), Shard(0), Shard(1)
"""Placements of q, k and v: whole, by batch entries, by heads."""
SEED = 11


@dataclass(frozen=True)
class Place:
    """Where cases run: meshes of all processes, and how exactly results agree."""

    one: DeviceMesh
    """All processes in a row."""
    grid: DeviceMesh | None
    """The same as (2, 2), named batch and heads; None with two processes."""
    backend: str = "cpu"
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    head_dim: int | None = None
    """Instead of a case's own."""

    @property
    def two(self) -> DeviceMesh:
        """Two processes in a row."""
        return self.one if self.grid is None else self.grid["heads"]


@dataclass(frozen=True)
class Spec:
    """A call: sizes, captures of the whole, and how all is placed."""

    text: str
    q: tuple[Placement, ...] = (H,)
    k: tuple[Placement, ...] | None = None
    """Those of q by default; also of v."""
    captures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    placed: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    """Of captures; others are given as plain tensors."""
    shape: tuple[int, int, int, int] = (2, 8, 24, 8)
    kv_heads: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    lse: bool = True


def compare(place: Place, mesh: DeviceMesh, spec: Spec, call: Any = None) -> dict[str, DTensor]:
    """Hold a call of DTensors to the whole; the gradients that it found, by name.

    Args:
        place: Where.
        mesh: Of the DTensors.
        spec: The call.
        call: Takes the call of DTensors in place of the compiled program.
    """
    torch.manual_seed(SEED)
    attention = attndsl.compile(spec.text, backend=place.backend)
    device = mesh.device_type
    batch, heads, length, dim = spec.shape
    dim = place.head_dim or dim

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.to(device).requires_grad_(x.is_floating_point())

    whole = {
        "q": leaf(torch.randn(batch, heads, length, dim).to(place.dtype)),
        "k": leaf(torch.randn(batch, spec.kv_heads, length + 8, dim).to(place.dtype)),
        "v": leaf(torch.randn(batch, spec.kv_heads, length + 8, dim).to(place.dtype)),
    }
    wide = torch.float64 if place.dtype is torch.float64 else torch.float32
    whole |= {
        name: leaf(x.to(wide) if x.is_floating_point() else x.clone())
        for name, x in spec.captures.items()
    }
    grad_out = torch.randn(batch, heads, length, dim).to(place.dtype).to(device)
    grad_lse = torch.randn(batch, heads, length).to(device)
    placements = {"q": spec.q, "k": spec.k or spec.q, "v": spec.k or spec.q, **spec.placed}
    spread = {}
    for name, x in whole.items():
        own = x.detach().clone()
        if name in placements:
            own = distribute_tensor(own, mesh, placements[name])
        spread[name] = own.requires_grad_(x.requires_grad)

    def run(function: Any, given: Mapping[str, torch.Tensor]) -> Any:
        rest = {name: x for name, x in given.items() if name not in "qkv"}
        found = function(
            given["q"], given["k"], given["v"], return_lse=spec.lse, **rest, **spec.options
        )
        return found if spec.lse else (found, None)

    out, lse = run(attention, whole)
    product = (out * grad_out).sum() + (0.0 if lse is None else (lse * grad_lse).sum())
    product.backward()
    found, found_lse = run(call or attention, spread)
    assert isinstance(found, DTensor)
    assert found.placements == tuple(spec.q)
    assert found.shape == out.shape
    assert found.to_local().shape == distribute_tensor(out.detach(), mesh, spec.q).to_local().shape
    outs, grads = [found], [distribute_tensor(grad_out, mesh, spec.q)]
    _same(place, "out", found, out)
    if lse is not None:
        assert found_lse.placements == tuple(spec.q)
        _same(place, "lse", found_lse, lse)
        outs.append(found_lse)
        grads.append(distribute_tensor(grad_lse.to(lse.dtype), mesh, spec.q))
    torch.autograd.backward(outs, grads)
    for name, x in whole.items():
        if x.requires_grad:
            assert x.grad is not None, name
            assert spread[name].grad is not None, name
            _same(place, f"gradient of {name}", spread[name].grad, x.grad)
    return {name: x.grad for name, x in spread.items()}


def _same(place: Place, name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    full = found.full_tensor() if isinstance(found, DTensor) else found
    full, wanted = full.detach(), wanted.detach()
    assert full.shape == wanted.shape, (name, full.shape, wanted.shape)
    scale = 1.0 + float(torch.where(wanted.isfinite(), wanted, 0.0).abs().max())
    torch.testing.assert_close(
        full, wanted, rtol=place.tolerance, atol=place.tolerance * scale,
        msg=lambda text: f"{name}: {text}",
    )  # fmt: skip


def floats(*shape: int) -> torch.Tensor:
    """A learned capture, the same in all processes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


ALIBI = "mask = causal(); score = score + alibi()"
SLOPES = "tensor slope[heads]: float\nmask = causal(); score = score + slope[h] * (kv - q)"
SINKS = "tensor logit[heads]: float\nmask = causal(); sink = logit[h]"
DROPOUT = "mask = causal(); score = score + 0.1 * h\nweights = dropout(softmax(score), 0.4)"
BIAS = "tensor bias[heads, q_len, kv_len]: float\nscore = score + bias[h, q, kv]"
GROUPS = (
    "tensor gain[kv_heads]: float\ntensor slope[heads]: float\n"
    "mask = q + 8 >= kv; score = score * gain[hkv] + slope[h] * hkv * (kv - q) / kv_heads"
)
LENGTHS = "tensor lengths[batch]: int\nmask = kv < lengths[b] and q + 8 >= kv"
ENTRIES = "tensor shift[batch, heads]: float\nscore = score * (1 + 0.1 * b) + shift[b, h] * kv"


def alibi(place: Place) -> None:
    for mesh in (place.one, place.two):
        found = compare(place, mesh, Spec(ALIBI))
        assert all(found[name].placements == (H,) for name in "qkv")


def soft_cap(place: Place) -> None:
    compare(place, place.two, Spec("mask = causal(); score = softcap(score, 2.0)"))


def reference(place: Place) -> None:
    compare(Place(place.one, place.grid, "reference"), place.two, Spec(SLOPES, captures={
        "slope": floats(8)}, placed={"slope": (B,)}))  # fmt: skip


def learned_slopes(place: Place) -> None:
    for mesh in (place.one, place.two):
        for placed in ({"slope": (R,)}, {"slope": (B,)}, {}):
            spec = Spec(SLOPES, captures={"slope": floats(8)}, placed=placed)
            found = compare(place, mesh, spec)["slope"]
            if placed:
                assert found.placements == ((Partial(),) if placed["slope"] == (R,) else (B,))


def a_parameter(place: Place) -> None:
    slope = torch.nn.Parameter(
        distribute_tensor(floats(4).to(place.two.device_type), place.two, [R])
    )
    attention = attndsl.compile(SLOPES, backend=place.backend)
    q = distribute_tensor(torch.ones(1, 4, 8, 8, dtype=place.dtype).cumsum(2).to(
        place.two.device_type), place.two, [H])  # fmt: skip
    attention(q, q, q, slope=slope).sum().backward()
    own = slope.detach().full_tensor().requires_grad_()
    full = q.full_tensor()
    attention(full, full, full, slope=own).sum().backward()
    _same(place, "slope", slope.grad, own.grad)


def sinks(place: Place) -> None:
    for placed in ((R,), (B,)):
        compare(place, place.one, Spec(SINKS, captures={"logit": floats(8)},
                                       placed={"logit": placed}))  # fmt: skip


def dropout(place: Place) -> None:
    for options in ({"seed": 5}, {"seed": torch.tensor(5, device=place.one.device_type)}):
        compare(place, place.one, Spec(DROPOUT, options=options, lse=False))
    compare(place, place.two, Spec(DROPOUT, (B,), options={"seed": 7}, lse=False))


def groups(place: Place) -> None:
    captures = {"gain": floats(4), "slope": floats(8)}
    for placed in ({"gain": (R,)}, {"gain": (B,), "slope": (B,)}):
        compare(place, place.two, Spec(GROUPS, captures=captures, placed=placed))


def fewer_key_heads(place: Place) -> None:
    for kv_heads in (1, 2):
        captures = {"gain": floats(kv_heads), "slope": floats(8)}
        placed = {"gain": (R,), "slope": (B,)}
        found = compare(place, place.one, Spec(GROUPS, k=(R,), captures=captures, placed=placed,
                                               kv_heads=kv_heads))  # fmt: skip
        assert found["k"].placements == (Partial(),)
    # A shard of the key heads that is not what a shard of query heads needs is gathered.
    captures = {"gain": floats(2), "slope": floats(8)}
    placed = {"gain": (B,), "slope": (R,)}
    compare(place, place.one, Spec(GROUPS, captures=captures, placed=placed, kv_heads=2))


def uneven(place: Place) -> None:
    """Shards of other sizes, cuts within groups, and processes without any head."""
    for heads, kv_heads in ((5, 5), (6, 3), (6, 2), (1, 1), (9, 3)):
        captures = {"gain": floats(kv_heads), "slope": floats(heads)}
        for k, gain in (((H,), (B,)), ((R,), (R,))):
            placed = {"gain": gain, "slope": (B,)}
            compare(place, place.one, Spec(
                GROUPS, k=k, captures=captures, placed=placed, kv_heads=kv_heads,
                shape=(2, heads, 12, 8)))  # fmt: skip
    captures = {"lengths": torch.tensor([7, 20, 1])}
    compare(place, place.two, Spec(LENGTHS, (B,), captures=captures, shape=(3, 2, 12, 8),
                                   kv_heads=2, placed={"lengths": (B,)}))  # fmt: skip


def batch(place: Place) -> None:
    captures = {"lengths": torch.tensor([7, 20, 1, 32])}
    for placed in ({}, {"lengths": (R,)}, {"lengths": (B,)}):
        compare(place, place.one, Spec(LENGTHS, (B,), captures=captures, placed=placed,
                                       shape=(4, 4, 24, 8)))  # fmt: skip
    # k and v follow q.
    found = compare(place, place.two, Spec(ENTRIES, (B,), (R,), {"shift": floats(2, 8)}))
    assert found["k"].placements == (R,)


def pair_bias(place: Place) -> None:
    captures = {"bias": floats(8, 24, 32)}
    for placed in ({"bias": (R,)}, {"bias": (B,)}, {"bias": (Shard(1),)}, {}):
        compare(place, place.two, Spec(BIAS, captures=captures, placed=placed))


def other_lookups(place: Place) -> None:
    """A shard that the program looks up by more than its own heads is gathered."""
    text = "tensor t[heads]: float\nscore = score + t[(h + 1) % heads] * kv"
    for placed in ((R,), (B,)):
        compare(place, place.one, Spec(text, captures={"t": floats(8)}, placed={"t": placed}))


def positions(place: Place) -> None:
    options = {"q_offset": 8, "q_len": 32, "kv_len": 32}
    compare(place, place.two, Spec("causal_lower_right()", options=options))
    lengths = torch.tensor([9, 30], device=place.one.device_type)
    options = {"q_offset": lengths - 1, "kv_lengths": lengths}
    for given in ((H,), (B,)):
        compare(place, place.two, Spec("causal() and kv != 3 * b", given, options=options))


def params(place: Place) -> None:
    text = "param gain: float; mask = causal(); score = gain * score + alibi()"
    for placed in ({}, {"gain": (R,)}):
        compare(place, place.two, Spec(text, captures={"gain": torch.tensor(0.7)}, placed=placed))


def nothing_sharded(place: Place) -> None:
    found = compare(place, place.two, Spec(ALIBI, (R,)))
    assert found["q"].placements == (R,)


def torchs_arguments(place: Place) -> None:
    """Those of scaled_dot_product_attention, with masks of several shapes."""
    functional = torch.nn.functional.scaled_dot_product_attention
    for shape in ((24, 32), (2, 1, 24, 32), (8, 24, 32), (2, 8, 24, 32), (2, 1, 1, 32)):
        for placements in ((H,), (B,)):
            for sharded in (False, True):
                _torchs_arguments(place, functional, shape, placements, sharded)
    q = distribute_tensor(torch.ones(1, 4, 8, 8, device=place.two.device_type), place.two, [H])
    with pytest.raises(attndsl.AttnDSLError, match="needs a seed"):
        attndsl.scaled_dot_product_attention(q, q, q, dropout_p=0.1)


def _torchs_arguments(
    place: Place, functional: Any, shape: tuple[int, ...], placements: tuple[Placement, ...],
    sharded: bool,
) -> None:  # fmt: skip
    torch.manual_seed(SEED)
    device = place.two.device_type
    wide = torch.float64 if place.dtype is torch.float64 else place.dtype
    mask = torch.randn(shape, device=device).to(wide)
    q = torch.randn(2, 8, 24, 8, device=device).to(place.dtype)
    k = torch.randn(2, 8, 32, 8, device=device).to(place.dtype)
    wanted = functional(q, k, k, attn_mask=mask)
    (dim,) = (kept.dim + len(shape) - 4 for kept in placements)
    if sharded:
        kept = Shard(dim) if dim >= 0 and shape[dim] > 1 else R
        mask = distribute_tensor(mask, place.two, [kept])
    q, k = (distribute_tensor(x, place.two, placements) for x in (q, k))
    found = attndsl.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    assert found.placements == placements
    _same(place, f"{shape}", found, wanted)


def two_dims(place: Place) -> None:
    grid = place.grid
    captures = {"shift": floats(4, 8)}
    for placed in ({}, {"shift": (B, R)}, {"shift": (B, H)}, {"shift": (R, H)}, {"shift": (R, R)}):
        found = compare(place, grid, Spec(ENTRIES, (B, H), captures=captures, placed=placed,
                                          shape=(4, 8, 12, 8)))  # fmt: skip
        if "shift" in placed:
            (first, second) = placed["shift"]
            assert found["shift"].placements == (
                B if first == B else Partial(), H if second == H else Partial()
            )  # fmt: skip
    captures = {"gain": floats(2), "slope": floats(8)}
    # Heads over both dims, of which there are only two for keys.
    for k in ((H, R), (R, R), (H, H), (R, H)):
        placed = {"gain": (B, R), "slope": (B, B)}
        compare(place, grid, Spec(GROUPS, (H, H), k, captures, placed, kv_heads=2))
    compare(place, grid, Spec(ALIBI, (R, H)))
    compare(place, grid, Spec(DROPOUT, (B, H), options={"seed": 3}, lse=False))


def compiled(place: Place) -> None:
    """In one graph each, gradients too."""
    mesh = place.one if place.grid is None else place.grid
    q = (H,) if place.grid is None else (B, H)
    captures = {"shift": floats(3, 9)}
    spec = Spec(ENTRIES, q, (R,) * len(q), captures, {"shift": (R,) * len(q)}, (3, 9, 12, 8), 3)
    attention = attndsl.compile(spec.text, backend=place.backend)
    compare(place, mesh, spec, torch.compile(attention, fullgraph=True, backend="aot_eager"))
    whole = torch.randn(2, 8, 24, 8, generator=torch.Generator().manual_seed(SEED))
    whole = whole.to(place.one.device_type, place.dtype)
    part = distribute_tensor(whole, place.one, [H])
    sdpa = torch.compile(attndsl.scaled_dot_product_attention, backend="aot_eager")
    _same(place, "sdpa", sdpa(part, part, part, is_causal=True),
          attndsl.scaled_dot_product_attention(whole, whole, whole, is_causal=True))  # fmt: skip
    rows = distribute_tensor(whole, place.one, [Shard(2)])
    with pytest.raises(Exception, match="q is sharded along its rows"):
        sdpa(rows, rows, rows, is_causal=True)


def refusals(place: Place) -> None:
    attention = attndsl.compile(SLOPES, backend=place.backend)
    mesh, device = place.two, place.one.device_type
    whole = torch.randn(2, 4, 16, 8, dtype=place.dtype, device=device)
    by_heads = distribute_tensor(whole, mesh, [H])
    slope = torch.ones(4, device=device)

    def spread(placement: Placement) -> DTensor:
        return distribute_tensor(whole, mesh, [placement])

    def refused(match: str, q: Any, k: Any, v: Any, **rest: Any) -> None:
        with pytest.raises(attndsl.AttnDSLError, match=match) as refusal:
            attention(q, k, v, **{"slope": slope, **rest})
        assert refusal.value.hint

    rows, dims = spread(Shard(2)), spread(Shard(3))
    refused("q_offset and q_len", rows, rows, rows)
    refused("k is sharded along its rows", by_heads, rows, rows)
    refused("sharded along the head dim", dims, dims, dims)
    partial = DTensor.from_local(whole, mesh, [Partial()])
    refused("q is Partial", partial, by_heads, by_heads)
    refused("v is a plain tensor", by_heads, by_heads, whole)
    refused("q is a plain tensor", whole, by_heads, by_heads)
    refused("slope is a DTensor", whole, whole, whole, slope=distribute_tensor(slope, mesh, [R]))
    refused("drop heads", by_heads, by_heads, by_heads, heads=8)
    refused("drop h_offset", by_heads, by_heads, by_heads, h_offset=2)
    refused("pass the whole tensor", by_heads, by_heads, by_heads, slope=slope[:2])
    if place.grid is not None:
        other = distribute_tensor(slope, place.grid, [R, R])
        refused("another mesh", by_heads, by_heads, by_heads, slope=other)
    lse = torch.zeros(2, 4, 16, device=device)
    with pytest.raises(attndsl.AttnDSLError, match="q is a DTensor, which only calls take"):
        attention.backward(*[by_heads] * 4, lse, by_heads, slope=slope)
    room = torch.empty_like(whole)
    attention(whole, whole, whole, out=room, slope=slope)  # One that looks alike is none of these.
    for q, k, where, match in (
        (by_heads, by_heads, room, "out is given, and q is a DTensor"),
        (whole, by_heads, room, "k is a DTensor, and q is a plain tensor"),
        (whole, whole, by_heads, "out is a DTensor"),
    ):
        with pytest.raises(attndsl.AttnDSLError, match=match):
            attention(q, k, k, out=where, slope=slope)
    dropped = attndsl.compile(DROPOUT, backend=place.backend)
    with pytest.raises(attndsl.AttnDSLError, match="the same number on all processes"):
        dropped(by_heads, by_heads, by_heads)


def context_parallel(place: Place) -> None:
    """Torch's own, which replaces torch's attention and no other."""
    q = torch.randn(1, 2, 32, 8, dtype=place.dtype, device=place.one.device_type)
    attention = attndsl.compile("causal()", backend=place.backend)
    results = attention(q, q, q, return_lse=True)
    calls = (
        lambda: attndsl.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda: attention(q, q, q),
        lambda: torch.compile(attention, backend="eager", fullgraph=True)(q, q, q),
        lambda: attention.backward(q, q, q, *results, q),
    )
    for call in calls:  # Checks of arguments are kept by shapes and graphs, and this is none.
        call()
    with torch_context_parallel(place.one, buffers=[q.clone()], buffer_seq_dims=[2]):
        for call in calls:
            words = shown("context_parallel has sharded the rows", "UnsupportedError")
            with pytest.raises(Exception, match=words):
                call()
    for call in calls:
        call()


def sequence_in_a_graph(place: Place) -> None:
    """A rank's calls of a sequence go into a CUDA graph, those of a second stream too."""
    rows = 8192
    cp = ContextParallel(place.one, "contiguous", reduce=True, machine=Machine(call=1e-12))
    attention = attndsl.compile("tensor x[heads]: float\nmask = sliding_window(700)\n"
                                "score = score * x[h]", backend=place.backend)  # fmt: skip
    cp.plan(rows * place.one.size(), attention)
    leaves = [
        torch.randn(1, n, rows, 64, dtype=place.dtype, device="cuda", requires_grad=True)
        for n in (4, 2, 2)
    ]
    leaves.append(torch.linspace(0.5, 1.0, 4, device="cuda", requires_grad=True))
    grad = torch.ones_like(leaves[0])

    def step() -> list[torch.Tensor]:
        out = cp(attention)(*leaves[:3], x=leaves[3])
        return [out, *torch.autograd.grad(out, leaves, grad)]

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step()
    for number in range(3):
        with torch.no_grad():
            for x in leaves:
                x.add_(0.1 * number)
        graph.replay()
        for one, other in zip(found, step(), strict=True):
            torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
    k, v = (cp.unshard(x, 2) for x in leaves[1:3])
    wanted = attention(leaves[0], k, v, x=leaves[3], q_index=cp.positions().to("cuda"))
    torch.testing.assert_close(found[0], wanted, atol=0.02, rtol=0.02)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        alibi, soft_cap, reference, learned_slopes, a_parameter, sinks, dropout, groups,
        fewer_key_heads, uneven, batch, pair_bias, other_lookups, positions, params,
        nothing_sharded, torchs_arguments, two_dims, compiled, refusals, context_parallel,
    )
}  # fmt: skip
GPU_CASES: dict[str, Case] = CASES | {"sequence_in_a_graph": sequence_in_a_graph}


def work(rank: int, world: int, folder: str, names: list[str], gpus: bool) -> None:
    """Run cases as one of ``world`` processes; what failed is written to ``folder``.

    ``RANK.log`` there says how far a process came, and where it stood when a signal ended it.
    """
    # Never closed: a process may fault while it ends.
    log = os.open(Path(folder, f"{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    faulthandler.enable(log)
    torch.set_num_threads(1)
    kind = "cuda" if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if gpus else "gloo", store=dist.FileStore(os.path.join(folder, "store"), world),
        rank=rank, world_size=world, timeout=timedelta(seconds=300 if gpus else 60),
        device_id=torch.device("cuda", rank) if gpus else None,
    )  # fmt: skip
    one = init_device_mesh(kind, (world,))
    grid = init_device_mesh(kind, (2, 2), mesh_dim_names=("batch", "heads")) if world == 4 else None
    place = Place(one, grid, "auto", torch.bfloat16, 0.03, 64) if gpus else Place(one, grid)
    found = {}
    for name in names:
        os.write(log, f"{name}\n".encode())
        try:
            GPU_CASES[name](place)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        # Where one process failed, the others go on with the next case together.
        dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(found), "utf-8")
    os.write(log, b"all cases ran\n")
    dist.destroy_process_group()
    os.write(log, b"the group is gone\n")


def run_all(world: int, folder: Path, names: list[str], gpus: bool = False) -> dict[str, str]:
    """What went wrong in each case, by its name; nothing where all was well.

    Raises:
        AssertionError: A process ended without a result. The message says how far each one came.
    """
    try:
        start_processes(work, (world, str(folder), names, gpus), world)
    except torch.multiprocessing.ProcessExitedException as error:
        logs = [
            f"process {path.stem}:\n{path.read_text('utf-8')}"
            for path in sorted(Path(folder).glob("*.log"))
        ]
        raise AssertionError("\n".join([str(error), *logs])) from error
    results = [json.loads(Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(world)]
    return {name: "\n".join(filter(None, (one[name] for one in results))) for name in names}
