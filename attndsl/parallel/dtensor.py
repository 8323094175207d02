"""Calls of DTensors: each process computes the part of the whole call that its shards are.

Batch entries and heads are independent of each other, so that a process needs its own shards alone,
and which part of the whole these are. Both follow from the mesh and the placements. Outputs have
those of q. No operator of ours is told to torch's sharding propagation: a rule of placements says
nothing of where a shard begins, and a program needs to know that.

Gradients have placements too. What is sharded like q has gradients that are sharded like q. Of what
each process has whole, each finds the summands of its own part (``Partial``).

Non-goals: shards of the rows, of the keys or of the head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from attndsl.call.argument_checks import autocast, check_names, check_operands, is_wide
from attndsl.call.options import Location
from attndsl.errors import ArgumentError, ShapeError, UnsupportedError
from attndsl.ir import Op
from attndsl.passes.sub_program import VARIABLE_OF, other_lookup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from attndsl.ir import Program, TensorDecl

_Placements = tuple[Placement, ...]

BATCH, HEADS = 0, 1
"""The dims that may be sharded."""
_SPLIT = {"batch": BATCH, "heads": HEADS, "kv_heads": HEADS}
"""Sizes that a process may have a part of, and the dim of q, or of k, that has it."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Placements of a call on a mesh, and the part of it that this process has."""

    mesh: DeviceMesh
    q: _Placements
    kv: _Placements
    """Placements that k and v are brought to."""
    sizes: Mapping[str, int]
    """``batch``, ``heads`` and ``kv_heads`` of the whole call."""
    b: range
    """Batch entries of this process."""
    h: range
    """Its query heads."""
    hkv: range
    """The key heads that its k and v hold; more than its query heads need where they are whole."""

    def mesh_dims(self, name: str) -> tuple[int, ...]:
        """The dims of the mesh that a size of ``_SPLIT`` is sharded over."""
        return _along(self.kv if name == "kv_heads" else self.q, _SPLIT[name])

    def of_gradient(self, placements: _Placements) -> _Placements:
        """Placements of the gradient of what has ``placements``.

        Processes with the same part of the call find the same; the others each find summands.
        """
        return tuple(
            Partial() if kept.is_replicate() and not of_q.is_replicate() else kept
            for kept, of_q in zip(placements, self.q, strict=True)
        )


def attend_shards(
    attention: Callable[..., Any],
    program: Program,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    captures: Mapping[str, Any],
    location: Location,
    options: Mapping[str, Any],
) -> Any:
    """The call of ``attention`` whose q is a DTensor.

    Args:
        attention: Takes this process's part of the call.
        program: Its program.
        operands: q, k and v, of the whole call's shapes.
        captures: Tensors and params. A tensor that is no DTensor is the whole one, equal on all
            processes, and so is its gradient.
        location: As of the call.
        options: ``scale``, ``return_lse``, ``deterministic``, ``seed`` and ``out_dtype`` of the
            call, the same on all processes.

    Returns:
        ``out``, or ``(out, lse)``: DTensors of q's mesh and placements.

    Raises:
        UnsupportedError: Placements for which a process would need more than its shards.
        ArgumentError: Operands that are no DTensors or lie on other meshes, sizes and offsets that
            follow from the mesh, or dropout without a seed.
        AttnDSLError: As of any call.
    """
    q, k, v = (autocast(x) for x in operands)
    _check_operands(q, k, v)
    check_names(program, captures)
    _check_options(program, location, options)
    shards = shards_of(q, k, v)
    # Each process takes part in all redistributions, whatever its part is.
    own = _local(q, shards.q)
    keys, values = (_local(_placed(x, shards.kv), shards.of_gradient(shards.kv)) for x in (k, v))
    given = {name: _replicated(name, x, shards) for name, x in captures.items()
             if name not in {decl.name for decl in program.tensors}}  # fmt: skip
    for decl in program.tensors:
        given[decl.name] = _capture(decl, program, captures[decl.name], shards)
    options = {**options, "seed": _replicated("seed", options["seed"], shards)}
    places = _places(location, shards)
    found: Any
    if len(shards.b) == 0 or len(shards.h) == 0:
        wide = is_wide("out_dtype", options["out_dtype"], q.dtype)
        found = _nothing(own, (keys, values, *given.values()), v.shape[3], wide)
        found = found if options["return_lse"] else found[0]
    else:
        keys, values = _needed_heads(keys, shards), _needed_heads(values, shards)
        found = attention(own, keys, values, captures=given, **options, **places)
    if options["return_lse"]:
        return tuple([_sharded(x, q, shards) for x in found])
    return _sharded(found, q, shards)


def shards_of(q: DTensor, k: DTensor, v: DTensor) -> Shards:
    """Shards of a call of checked operands on their mesh.

    k and v follow q: their shards of the batch are q's, and so are those of the heads, where each
    shard of key heads is what the groups of a shard of query heads have. Otherwise all key heads
    are on all processes.

    Raises:
        ArgumentError: This process is not on the mesh.
    """
    mesh, placements = q.device_mesh, tuple(q.placements)
    place = mesh.get_coordinate()
    if place is None:
        raise ArgumentError(
            "this process is not on q's mesh", hint="call on the processes of the mesh alone"
        )
    sizes = {"batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1]}
    kept = _kept_heads(placements, k, v, mesh, sizes)
    kv = tuple(
        Replicate() if of_q.is_shard(HEADS) and number not in kept else of_q
        for number, of_q in enumerate(placements)
    )
    return Shards(
        mesh,
        placements,
        kv,
        sizes,
        part_along(sizes["batch"], mesh.shape, place, _along(placements, BATCH)),
        part_along(sizes["heads"], mesh.shape, place, _along(placements, HEADS)),
        part_along(sizes["kv_heads"], mesh.shape, place, _along(kv, HEADS)),
    )


def part_along(
    size: int, mesh_shape: Sequence[int], place: Sequence[int], mesh_dims: Sequence[int]
) -> range:
    """Range of ``size`` elements that a process has, by torch's rule for shards.

    Args:
        size: How many there are.
        mesh_shape: Of the mesh.
        place: Coordinates of the process.
        mesh_dims: The dims of the mesh that the elements are sharded over, in ascending order.
    """
    start, count = 0, size
    for dim in mesh_dims:
        chunk = -(-count // mesh_shape[dim])
        first = min(place[dim] * chunk, count)
        start, count = start + first, min(chunk, count - first)
    return range(start, start + count)


def _along(placements: Sequence[Placement], dim: int) -> tuple[int, ...]:
    return tuple(number for number, kept in enumerate(placements) if kept.is_shard(dim))


def _kept_heads(
    placements: _Placements, k: DTensor, v: DTensor, mesh: DeviceMesh, sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The dims of the mesh that key heads stay sharded over."""
    along = _along(k.placements, HEADS)
    of_q = _along(placements, HEADS)
    ranks = tuple(mesh.shape[dim] for dim in along)
    fits = (
        along == _along(v.placements, HEADS)
        and along == of_q[: len(along)]
        and _same_groups(sizes["heads"] // sizes["kv_heads"], sizes["kv_heads"], ranks)
    )
    return along if fits else ()


def _same_groups(group: int, kv_heads: int, ranks: tuple[int, ...]) -> bool:
    """Return True if each shard of key heads is that of the groups of its shard of query heads."""
    if not ranks:
        return True
    chunk = -(-kv_heads // ranks[0])
    if -(-group * kv_heads // ranks[0]) != group * chunk:
        return False
    counts = {min(chunk, kv_heads), kv_heads % chunk if chunk else 0} - {0}
    return all(_same_groups(group, count, ranks[1:]) for count in counts)


def _needed_heads(keys: torch.Tensor, shards: Shards) -> torch.Tensor:
    """The key heads of this process's query heads, as many query heads for each."""
    group = shards.sizes["heads"] // shards.sizes["kv_heads"]
    together = gcd(group, shards.h.start, len(shards.h))
    wanted = [head // group - shards.hkv.start for head in shards.h[::together]]
    if wanted == list(range(keys.shape[1])):
        return keys
    if wanted == list(range(wanted[0], wanted[0] + len(wanted))):
        return keys.narrow(1, wanted[0], len(wanted))
    return torch.cat([keys.narrow(1, head, 1) for head in wanted], 1)


def _places(location: Location, shards: Shards) -> dict[str, Any]:
    """Arguments that place this process's part of a call within the whole call."""
    found: dict[str, Any] = {"q_len": location.q_len, "kv_len": location.kv_len}
    for name in ("q_offset", "kv_offset", "kv_lengths"):
        value = _replicated(name, getattr(location, name), shards)
        if isinstance(value, torch.Tensor) and value.shape == (shards.sizes["batch"],):
            value = value.narrow(0, shards.b.start, len(shards.b))
        found[name] = value
    for name in ("q_index", "kv_index"):
        found[name] = _replicated(name, getattr(location, name), shards)
    if shards.mesh_dims("heads"):
        found |= {name: shards.sizes[name] for name in ("heads", "kv_heads")}
        found["h_offset"] = shards.h.start
    if shards.mesh_dims("batch"):
        found |= {"batch": shards.sizes["batch"], "b_offset": shards.b.start}
    return found


def _capture(decl: TensorDecl, program: Program, value: Any, shards: Shards) -> Any:
    """This process's share of a captured tensor, or all of it."""
    if not isinstance(value, torch.Tensor):
        return value
    for size, dim in zip(value.shape, decl.dims, strict=False):
        whole = shards.sizes.get(str(dim.value)) if dim.op is Op.SIZE else None
        if whole is not None and size != whole:
            raise ShapeError(
                f"{decl.name} has shape {tuple(value.shape)}, and {dim.value} is {whole}",
                hint="pass the whole tensor, or a DTensor that is sharded like q",
            )
    if not isinstance(value, DTensor):
        return _replicated(decl.name, value, shards)
    _check_placements(decl.name, value, shards.mesh)
    kept = [dim for dim in range(value.dim()) if _is_share(decl, program, dim, value, shards)]
    placements = tuple(
        of_dim if any(of_dim.is_shard(dim) for dim in kept) else Replicate()
        for of_dim in value.placements
    )
    return _local(_placed(value, placements), shards.of_gradient(placements))


def _is_share(decl: TensorDecl, program: Program, dim: int, value: DTensor, shards: Shards) -> bool:
    """Return True if the shard along ``dim`` has all that this process's part looks up."""
    along = _along(value.placements, dim)
    name = str(decl.dims[dim].value) if dim < len(decl.dims) else ""
    if not along or decl.dims[dim].op is not Op.SIZE or name not in _SPLIT:
        return False
    # Where key heads are sharded less than query heads, some of a shard's are not needed.
    same = along == shards.mesh_dims(name) and (
        name == "batch" or along == shards.mesh_dims("heads")
    )
    return same and other_lookup(program, decl.name, dim, VARIABLE_OF[name]) is None


def _replicated(name: str, value: Any, shards: Shards) -> Any:
    """Plain tensor or number of ``value``, the same on all processes."""
    if not isinstance(value, torch.Tensor):
        return value
    everywhere = tuple(Replicate() for _ in shards.q)
    if isinstance(value, DTensor):
        _check_placements(name, value, shards.mesh)
        return _local(_placed(value, everywhere), shards.of_gradient(everywhere))
    if not value.requires_grad:
        return value
    # The backward adds up what the processes find.
    spread = DTensor.from_local(value, shards.mesh, everywhere, run_check=False)
    return _local(spread, shards.of_gradient(everywhere))


def _placed(value: DTensor, placements: _Placements) -> DTensor:
    return value if tuple(value.placements) == placements else value.redistribute(
        placements=placements
    )  # fmt: skip


def _local(value: DTensor, of_gradient: _Placements) -> torch.Tensor:
    """This process's part of ``value``, whose gradient has the given placements."""
    found = value.to_local(grad_placements=of_gradient)
    return found.wait() if isinstance(found, AsyncCollectiveTensor) else found


def _sharded(own: torch.Tensor, q: DTensor, shards: Shards) -> DTensor:
    """A result of all processes from ``own`` part of it."""
    if all(
        shards.sizes[name] % prod([shards.mesh.shape[dim] for dim in shards.mesh_dims(name)]) == 0
        for name in ("batch", "heads")
    ):
        return DTensor.from_local(own, shards.mesh, shards.q, run_check=False)
    shape = torch.Size((*q.shape[:3], *own.shape[3:]))
    strides = list(q.stride())
    order = sorted(range(q.dim()), key=lambda dim: -strides[dim])
    stride, step = [1] * len(shape), 1
    for dim in reversed(order if len(shape) == q.dim() else range(len(shape))):
        stride[dim] = step
        step *= max(1, shape[dim])
    return DTensor.from_local(
        own, shards.mesh, shards.q, run_check=False, shape=shape, stride=tuple(stride)
    )


def _nothing(
    q: torch.Tensor, others: Sequence[Any], width: int, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of a process that has no heads or entries: its gradients are zeros.

    They are gradients all the same, which the other processes wait for.
    """
    inputs = [x for x in (q, *others) if isinstance(x, torch.Tensor) and x.requires_grad]
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    zero = torch.zeros((), dtype=kind, device=q.device)
    for x in inputs:
        zero = zero + x.reshape(-1)[:0].sum().to(kind)
    lse = torch.zeros(q.shape[:3], dtype=kind, device=q.device) + zero
    out = torch.zeros((*q.shape[:3], width), dtype=kind, device=q.device) + zero
    return out if wide else out.to(q.dtype), lse


def _check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
            raise ArgumentError(
                f"q is a DTensor, and {name} is a plain tensor",
                hint=f"make {name} a DTensor of q's mesh, as DTensor.from_local({name}, mesh, ...)",
            )
    check_operands(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert isinstance(q, DTensor)
        assert isinstance(x, DTensor)
        _check_placements(name, x, q.device_mesh)
        for kept in x.placements:
            _check_shard(name, kept)


def _check_placements(name: str, value: DTensor, mesh: DeviceMesh) -> None:
    """Refuse DTensors of other meshes, partial sums, and shards in another order."""
    if value.device_mesh != mesh:
        raise ArgumentError(
            f"{name} lies on another mesh than q",
            hint=f"distribute {name} over q's mesh, with Replicate() along dims that it is not "
            f"sharded over",
        )
    if any(kept.is_partial() for kept in value.placements):
        raise UnsupportedError(
            f"{name} is Partial: its processes have summands of it",
            hint=f"take the sum first: {name}.redistribute(placements=...) with Replicate() or "
            f"Shard(...) there",
        )
    several = any(len(_along(value.placements, dim)) > 1 for dim in range(value.dim()))
    order = getattr(value._spec, "shard_order", None) if several else None
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order or ()):
        raise UnsupportedError(
            f"{name} is sharded over dims of the mesh in another order than theirs",
            hint=f"bring {name} into the usual order: {name}.redistribute(placements=...)",
        )


def _check_shard(name: str, kept: Placement) -> None:
    """Refuse shards of q, k and v of which a process would need others."""
    if kept.is_replicate() or kept.is_shard(BATCH) or kept.is_shard(HEADS):
        return
    if kept.is_shard(2) and name == "q":
        raise UnsupportedError(
            "q is sharded along its rows (Shard(2))",
            hint="call with this process's rows, as plain tensors: q.to_local(), k and v by "
            "full_tensor(grad_placements=[Partial()]), and q_offset and q_len, which say which "
            "rows these are",
        )
    what = "the head dim" if kept.is_shard(3) else "its rows" if kept.is_shard(2) else "parts"
    raise UnsupportedError(
        f"{name} is sharded along {what} ({kept})",
        hint=f"gather it: {name}.redistribute(placements=...) with Replicate() there, or "
        f"Shard(0) for batch entries, Shard(1) for heads",
    )


def _check_options(program: Program, location: Location, options: Mapping[str, Any]) -> None:
    default = Location()
    for name in ("heads", "kv_heads", "batch", "h_offset", "b_offset"):
        if getattr(location, name) != getattr(default, name):
            raise ArgumentError(
                f"{name} is given, and q is a DTensor",
                hint=f"drop {name}: a DTensor is the whole, and its mesh says which part is here",
            )
    if program.dropout is not None and options["seed"] is None:
        raise ArgumentError(
            "the program has dropout, and processes draw seeds of their own",
            hint="pass seed=..., the same number on all processes",
        )
