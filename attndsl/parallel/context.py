"""One sequence on many ranks: each holds some rows of everything, and calls take these.

Non-goals: decoding; rings, which merge partial results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attndsl.errors import ArgumentError, AttnDSLError, ShapeError, UnsupportedError
from attndsl.runtime.arguments import joined
from attndsl.runtime.values import plain_number

from .agreement import FAILED, agree, digest
from .calls import Sharded
from .costs import Machine, Shape
from .exchange import all_to_all
from .layouts import LAYOUTS, choose_layout, chunk_size
from .planning import EXCHANGES, Asked, demand_of, mask_names, plan_call, seen_by
from .report import report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup

    from .layouts import Layout
    from .planning import Plan
    from .sharded import Program

_MAX_PLANS = 1024
_MIX = 0x9E3779B97F4A7C15
"""An odd number, so that seeds of different layers differ (Knuth's multiplicative hashing)."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What :meth:`ContextParallel.shard` has decided."""

    layout: Layout
    made_for: object
    """The programs and sizes of the layout; None where nothing was asked."""
    seed: int | None
    rows: int
    """Of this rank."""
    length: int
    token: str
    """What tells layouts apart. Graphs take numbers that change for variables, but no strings."""


class ContextParallel:
    """Calls of a sequence whose rows several ranks hold.

    Each rank fetches the keys that its rows can see, to where they lie in the whole sequence, and
    makes ordinary calls. Results are those of one process. Which rank holds which rows, and who
    sends what, follows from the masks alone.

    Args:
        mesh: A mesh of one dim, such as ``mesh["cp"]``, or a process group. Its ranks hold parts of
            the same sequences.
        layout: ``contiguous``; ``head_tail``, a piece of both ends for each rank; ``balanced``,
            chunks swapped until the slowest rank is fastest; or ``auto``, the fastest of these.
        exchange: ``gather``: keys travel to the rows that see them; ``heads``: each rank computes
            some heads of all rows; ``auto``: what takes least, also a mixture.
        reduce: Whether gradients of captured tensors are added up over the ranks. Leave it to data
            parallelism over all ranks where there is one (FSDP2 over ``("dp", "cp")``).
        check: ``plans``: ranks compare what they plan, when they plan. ``calls``: they also compare
            each call, which waits for all of them: to find out why a run stands still.
        machine: Speeds that plans are made for.

    Raises:
        ArgumentError: An argument that cannot be.
    """

    def __init__(
        self,
        mesh: DeviceMesh | ProcessGroup,
        layout: str = "auto",
        *,
        exchange: str = "auto",
        reduce: bool = False,
        check: str = "plans",
        machine: Machine | None = None,
    ) -> None:
        for name, value, known in (
            ("layout", layout, LAYOUTS), ("exchange", exchange, EXCHANGES),
            ("check", check, ("plans", "calls")),
        ):  # fmt: skip
            if value not in known:
                raise ArgumentError(f"{name} is {value!r}", hint=f"it is one of {', '.join(known)}")
        self._group, self._device = _group_of(mesh)
        self._layout, self._exchange, self._reduce = layout, exchange, bool(reduce)
        self._check, self._machine = check, Machine() if machine is None else machine
        self._rank = dist.get_rank(self._group)
        self._ranks = dist.get_world_size(self._group)
        self._batch: Batch | None = None
        self._plans: dict[Any, Plan] = {}

    @property
    def rank(self) -> int:
        """Of this process among those of the sequence."""
        return self._rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._ranks

    def __call__(self, attention: Program) -> Sharded:
        """``attention`` for calls with this rank's rows of q, k and v."""
        return Sharded(self, attention)

    def plan(
        self,
        length: int,
        programs: Sequence[Program | Sharded] | Program | Sharded = (),
        *,
        shape: Shape | None = None,
        seed: int | None = None,
        captures: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Decide who holds which rows of sequences of ``length``; all ranks come here together.

        Args:
            length: Rows of the whole sequence.
            programs: The model's programs, one for each layer, that ``auto`` and ``balanced``
                are made for together: compiled ones, or those of :meth:`__call__`.
            shape: Sizes of the calls, to weigh work against bytes, and for masks that mention
                them; by default those of :class:`Shape`.
            seed: Of this batch's dropout, the same on all ranks; see :meth:`seed`.
            captures: What the masks read, by name: each program takes those that it declares.
            **named: The same, by keywords.

        Raises:
            ArgumentError: On all ranks, where they do not say the same; ``auto`` without programs.
            AttnDSLError: What a program says of its captures.
        """
        some: list[Any] = [*programs] if isinstance(programs, list | tuple) else [programs]
        models = [x.attention if isinstance(x, Sharded) else x for x in some]
        given = joined(captures or {}, named)
        shape = Shape() if shape is None else shape
        problem: AttnDSLError | None = None
        made: Batch | None = None
        try:
            made = self._planned(length, models, shape, given, seed)
        except AttnDSLError as error:
            problem = error
        fields = {
            "length": length, "layout": self._layout,
            "list of programs": [x.made_of.spec for x in models], "sizes": shape,
            "exchange": self._exchange, "seed": seed,
            "plan": None if made is None else made.layout.owner.tolist(),
            FAILED: None if problem is None else str(problem),
        }  # fmt: skip
        _agreed(fields, self._group, self._device, problem)
        assert made is not None
        if self._batch is None or made.token != self._batch.token:
            self._plans.clear()
        # Tensors may have changed behind torch's back: each batch reads them anew.
        self._plans = {key: x for key, x in self._plans.items() if not x.seen.tensors}
        self._batch = made

    def _planned(
        self, length: int, models: Sequence[Any], shape: Shape, given: Mapping[str, Any],
        seed: int | None,
    ) -> Batch:  # fmt: skip
        if not isinstance(length, int) or length < self._ranks:
            raise ArgumentError(
                f"the sequence has {length!r} rows for {self._ranks} ranks",
                hint="each rank holds one or more",
            )
        if not models and self._layout in ("auto", "balanced"):
            raise ArgumentError(
                f"layout is {self._layout!r}, and no programs are given to choose it for",
                hint="pass programs=[...], those of the model's layers; or "
                "layout='contiguous' for windows, 'head_tail' for causal masks",
            )
        counted: dict[str, list[Any]] = {}
        for model in models:
            defaults = model.made_of.defaults
            own, found = model.variant({**defaults, **_fitting(model, given)})
            entry = counted.setdefault(
                repr((own.made_of.spec, _numbers(own, found))), [own, found, 0]
            )
            entry[2] += 1
        made_for = length, shape, tuple((name, x[2]) for name, x in counted.items())
        old = self._batch
        looked_up = any(seen_by(own, found).tensors for own, found, _ in counted.values())
        if old is not None and old.made_for == made_for and not looked_up:
            return replace(old, seed=seed)
        chunk = chunk_size(length, self._ranks)
        demands = [] if self._layout in ("contiguous", "head_tail") else [
            demand_of(own, length, chunk, shape, found, self._machine, weight)
            for own, found, weight in counted.values()
        ]  # fmt: skip
        layout = choose_layout(self._layout, length, self._ranks, demands)
        token = f"{layout.name} {length} {digest(layout.owner.tolist())}"
        return Batch(layout, made_for, seed, layout.rows(self._rank), length, token)

    @overload
    def shard(
        self, values: torch.Tensor, dims: int = 1, programs: Any = (), **sizes: Any
    ) -> torch.Tensor: ...
    @overload
    def shard(
        self, values: Mapping[str, Any], dims: Mapping[str, int], programs: Any = (), **sizes: Any
    ) -> dict[str, Any]: ...
    def shard(
        self, values: Any, dims: Any = 1, programs: Any = (), **sizes: Any
    ) -> Any:  # fmt: skip
        """This rank's rows of ``values``, whole tensors that all ranks have.

        Shift labels before: the next token of a rank's last row may be another rank's.

        Args:
            values: A tensor, or tensors by name.
            dims: The dim of its rows, or such a dim by name; others stay whole.
            programs: As of :meth:`plan`, which is called with them and the length.
            **sizes: The other arguments of :meth:`plan`.

        Returns:
            A tensor, or a dict of all values.

        Raises:
            ShapeError: Tensors of different lengths.
            ArgumentError, AttnDSLError: As of :meth:`plan`.
        """
        if isinstance(values, torch.Tensor):
            return self.shard({"": values}, {"": dims}, programs, **sizes)[""]
        lengths = {name: values[name].shape[dim] for name, dim in dims.items()}
        if len(set(lengths.values())) != 1:
            raise ShapeError(
                f"values to shard have lengths {lengths}", hint="shard tensors of one sequence"
            )
        length = next(iter(lengths.values()))
        if programs or sizes or self._batch is None or self._batch.layout.length != length:
            self.plan(length, programs, **sizes)
        runs = self.now().layout.runs(self._rank)
        return {
            name: torch.cat([x.narrow(dims[name], a, b - a) for a, b in runs], dims[name])
            if name in dims else x
            for name, x in values.items()
        }  # fmt: skip

    def positions(self, device: torch.device | str | None = None) -> torch.Tensor:
        """(rows,) int64, the logical positions of this rank's rows, as for rotary embeddings."""
        runs = self.now().layout.runs(self._rank)
        return torch.cat([torch.arange(a, b, device=device) for a, b in runs])

    def unshard(self, values: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The whole tensor of which each rank gives its rows, on all ranks; no gradients pass.

        Args:
            values: This rank's rows.
            dim: The dim that they lie along.

        Raises:
            ShapeError: Not this rank's number of rows.
        """
        layout = self.now().layout
        rows = [layout.rows(rank) for rank in range(self._ranks)]
        if values.shape[dim] != rows[self._rank]:
            raise ShapeError(
                f"there are {values.shape[dim]} rows along dim {dim}, and this rank holds "
                f"{rows[self._rank]}",
                hint="pass what follows from this rank's shards",
            )
        own = values.detach().movedim(dim, 0).contiguous()
        each, flat = own[0].numel(), own.reshape(-1)
        sizes = [n * each for n in rows]
        found = all_to_all(
            flat.repeat(self._ranks), sizes, [flat.numel()] * self._ranks, self._group
        )
        parts = []
        for rank, part in enumerate(torch.split(found, sizes)):
            shape, row = part.view(rows[rank], *own.shape[1:]), 0
            for start, stop in layout.runs(rank):
                parts.append((start, shape[row : row + stop - start]))
                row += stop - start
        parts.sort(key=lambda item: item[0])
        return torch.cat([x for _, x in parts]).movedim(0, dim)

    def seed(self, number: int) -> int:
        """A seed of dropout for layer ``number``, the same on all ranks.

        Raises:
            ArgumentError: :meth:`plan` or :meth:`shard` got no seed.
        """
        seed = self.now().seed
        if seed is None:
            raise ArgumentError(
                "this batch has no seed", hint="pass seed=... to shard, the same on all ranks"
            )
        return (seed * 6364136223846793005 + (number + 1) * _MIX) % (1 << 62)

    def explain(self) -> str:
        """What each planned program makes ranks do, as text: the same on all ranks."""
        layout = self.now().layout
        plans = [(name, plan.figures) for (name, *_), plan in self._plans.items()]
        return report(layout, plans)

    @property
    def group(self) -> ProcessGroup:
        """The ranks of the sequence."""
        return self._group

    @property
    def reduces(self) -> bool:
        """Whether gradients of captured tensors are added up."""
        return self._reduce

    @property
    def exchange(self) -> str:
        """As given."""
        return self._exchange

    def now(self) -> Batch:
        """What :meth:`plan` has decided.

        Raises:
            ArgumentError: It has not been called.
        """
        if self._batch is None:
            raise ArgumentError(
                "nothing says which rank holds which rows", hint="call shard or plan first"
            )
        return self._batch

    def plan_for(
        self, attention: Program, captures: Mapping[str, Any], asked: Asked, seed: Any
    ) -> Plan:
        """The plan of a call: one of before, or a new one that all ranks agree on."""
        batch = self.now()
        key = (
            attention.name,
            attention.made_of.spec,
            batch.token,
            asked,
            _numbers(attention, captures),
        )
        known = self._plans.get(key)
        if torch.compiler.is_compiling():
            if known is None or known.seen.tensors:
                raise UnsupportedError(
                    f"a graph of torch.compile calls {attention.name!r}, which is not planned, or "
                    "whose mask looks tensors up",
                    hint="make one call of each program outside of the graph after shard; "
                    "leave calls whose masks look tensors up outside",
                )
            return known
        fresh = known is None or not known.seen.is_same(captures)
        if not fresh and self._check == "plans":
            assert known is not None
            return known
        problem: AttnDSLError | None = None
        found = known
        try:
            if fresh:
                found = plan_call(
                    attention, batch.layout, self._rank, captures, asked, self._machine
                )
        except AttnDSLError as error:
            problem = error
        fields = {
            "program": attention.made_of.spec, "layout": batch.token, "shape of q, k and v": asked,
            "set of params": _numbers(attention, captures),
            "mask": [_digestible(captures[n]) for n in mask_names(attention) if n in captures],
            "seed": seed if isinstance(seed, int) else type(seed),
            FAILED: None if problem is None else str(problem),
        }  # fmt: skip
        _agreed(fields, self._group, self._device, problem)
        assert found is not None
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = found
        return found


def _numbers(program: Program, captures: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Captures that are numbers, as Python's own: NumPy's are as good."""
    found = []
    for decl in program.lowered.program.params:
        x = captures.get(decl.name, decl.default)
        if not isinstance(x, torch.Tensor):
            plain = isinstance(x, bool | int | float)
            found.append((decl.name, x if plain else plain_number(decl.dtype, x)))
    return tuple(found)


def _digestible(value: Any) -> object:
    return digest(value) if isinstance(value, torch.Tensor) else value


def _fitting(program: Program, captures: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``captures`` that ``program`` declares."""
    found = program.lowered.program
    names = {x.name for x in found.params} | {x.name for x in found.tensors}
    return {name: x for name, x in captures.items() if name in names}


def _group_of(mesh: Any) -> tuple[ProcessGroup, torch.device]:
    """The group, and the device of its collectives."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ArgumentError(
                f"the mesh has {mesh.ndim} dims", hint='pass one of them, such as mesh["cp"]'
            )
        group = mesh.get_group()
    elif isinstance(mesh, dist.ProcessGroup):
        group = mesh
    else:
        raise ArgumentError(
            f"mesh is a {type(mesh).__name__}",
            hint='pass a DeviceMesh of one dim, such as mesh["cp"], or a process group',
        )
    on_gpu = "nccl" in dist.get_backend(group)
    kind = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
    return group, torch.device(kind)


def _agreed(
    fields: Mapping[str, object], group: ProcessGroup, device: torch.device,
    problem: AttnDSLError | None,
) -> None:  # fmt: skip
    """Agree, and raise this rank's own problem where it has one."""
    try:
        agree(fields, group, device)
    except ArgumentError:
        if problem is not None:
            raise problem from None
        raise
