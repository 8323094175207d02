"""One sequence on many ranks: each holds some rows of everything, and calls take these.

Non-goals: decoding; rings, which merge partial results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attndsl.call.argument_checks import joined
from attndsl.errors import ArgumentError, ShapeError, UnsupportedError
from attndsl.runtime.program_store import read_spec

from .collectives import all_to_all
from .cp_call import Sharded
from .cp_plan import (
    EXCHANGES,
    CallShape,
    PlanKey,
    numbers_of,
    plan_call,
    sight_key,
    sight_of,
    weighed,
)
from .plan_checks import length_along, length_of, program_of, programs_of, seed_of, shape_of
from .plan_costs import Machine, Shape
from .plan_report import report
from .rank_consensus import agree, digest
from .row_layouts import LAYOUTS, choose_layout, chunk_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup

    from .cp_attention import ShardedProgram
    from .cp_plan import Plan, Sight
    from .row_layouts import Layout

_MAX_PLANS = 1024
_MIX = 0x9E3779B97F4A7C15
"""An odd number, so that seeds of different layers differ (Knuth's multiplicative hashing)."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Layout of a batch, its sizes and its seed, as :meth:`ContextParallel.shard` has decided."""

    layout: Layout
    made_for: object
    """The programs and sizes of the layout; None where nothing was asked."""
    seed: int | None
    rows: int
    """Rows of this rank."""
    length: int
    token: str
    """Key that tells layouts apart. Graphs take numbers that change for variables, but no
    strings."""
    sights: Mapping[object, Sight]
    """Keys seen by the programs that the layout was chosen for; calls need not find these again."""


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
        self._plans: dict[PlanKey, Plan] = {}
        # Whether shard has given rows of this plan, and whether a call has taken them.
        self._given, self._taken = False, False
        # The layout of the latest call, and the seed of the latest draw: a checkpoint may make
        # them again.
        self._called: str | None = None
        self._drawn: int | None = None

    @property
    def rank(self) -> int:
        """Number of this process among those that share the sequence, from 0 on."""
        return self._rank

    @property
    def ranks(self) -> int:
        """Number of processes that share the sequence."""
        return self._ranks

    def __call__(self, attention: ShardedProgram) -> Sharded:
        """``attention`` for calls with this rank's rows of q, k and v.

        Raises:
            ArgumentError: It is no compiled program.
        """
        return Sharded(self, program_of(attention))

    def plan(
        self,
        length: int,
        programs: Sequence[ShardedProgram | Sharded] | ShardedProgram | Sharded = (),
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
        self._given = False
        self._decide(length, programs, shape, seed, captures, named)

    def _decide(
        self, length: Any, programs: Any, shape: Any, seed: Any, captures: Any,
        named: Mapping[str, Any], problem: Exception | None = None,
    ) -> None:  # fmt: skip
        """Plan together. Whatever a rank finds wrong by itself, all ranks are told here."""
        made: Batch | None = None
        fields: dict[str, object] = {}
        try:
            if problem is None:
                rows, models = length_of(length, self._ranks), programs_of(programs)
                sizes, number = shape_of(shape), seed_of(seed)
                made = self._planned(rows, models, sizes, joined(captures or {}, named), number)
                self._check_taken(made)
                fields = {
                    "length": rows, "layout": self._layout,
                    "list of programs": [x.made_of.spec for x in models], "sizes": sizes,
                    "exchange": self._exchange, "seed": number, "set of masks": [*made.sights],
                    "machine": self._machine, "plan": made.layout.owner.tolist(),
                }  # fmt: skip
        except Exception as error:
            problem = error
        agree("a plan", fields, problem, self._group, self._device)
        assert made is not None
        if self._batch is None or made.token != self._batch.token:
            self._plans.clear()
        # Tensors may have changed behind torch's back: each batch reads them anew.
        self._plans = {key: x for key, x in self._plans.items() if not x.seen.tensors}
        self._batch, self._given, self._taken = made, False, False

    def _check_taken(self, made: Batch) -> None:
        """Refuse another layout while no call has taken the rows of this one."""
        waiting = self._given and not self._taken
        if waiting and self._batch is not None and made.token != self._batch.token:
            raise ArgumentError(
                "shard chooses another layout, and no call has taken the rows of the shard before: "
                "calls would take these rows for those of the new layout",
                hint="shard a batch after the forward and backward of the one before; if its rows "
                "are no longer wanted, call plan(...) first",
            )

    def _planned(
        self, length: int, models: Sequence[Any], shape: Shape, given: Mapping[str, Any],
        seed: int | None,
    ) -> Batch:  # fmt: skip
        if not models and self._layout in ("auto", "balanced"):
            raise ArgumentError(
                f"layout is {self._layout!r}, and no programs are given to choose it for",
                hint="pass programs=[...], those of the model's layers; or "
                "layout='contiguous' for windows, 'head_tail' for causal masks",
            )
        chunk = chunk_size(length, self._ranks)
        # Fixed layouts ask nothing of the masks.
        asked = self._layout not in ("contiguous", "head_tail")
        counted: dict[object, list[Any]] = {}
        for model in models:
            own, found = model.variant({**model.made_of.defaults, **_fitting(model, given)})
            mask = sight_key(own, chunk, shape, found) if asked else own.made_of.spec
            counted.setdefault((mask, numbers_of(own, found)), [own, found, mask, 0])[3] += 1
        made_for = length, shape, tuple((key, x[3]) for key, x in counted.items())
        old = self._batch
        if old is not None and old.made_for == made_for:
            return replace(old, seed=seed)
        sights: dict[object, Sight] = {}
        demands = []
        for own, found, mask, weight in counted.values() if asked else ():
            if mask not in sights:
                sights[mask] = sight_of(own, length, chunk, shape, found)
            demands.append(weighed(sights[mask], shape, self._machine, weight))
        layout = choose_layout(self._layout, length, self._ranks, demands)
        token = f"{layout.name} {length} {digest(layout.owner.tolist())}"
        rows = layout.rows(self._rank)
        return Batch(layout, made_for, seed, rows, length, token, sights)

    @overload
    def shard(
        self, values: torch.Tensor, dims: int = 1, programs: Any = (), **sizes: Any
    ) -> torch.Tensor: ...
    @overload
    def shard(
        self, values: Mapping[str, Any], dims: Mapping[str, int], programs: Any = (), **sizes: Any
    ) -> dict[str, Any]: ...
    def shard(self, values: Any, dims: Any = 1, programs: Any = (), **sizes: Any) -> Any:
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
            ArgumentError: No tensors, or dims that they do not have; another layout than that of
                the shard before, whose rows no call has taken.
            AttnDSLError: As of :meth:`plan`.
        """
        if isinstance(values, torch.Tensor):
            return self.shard({"": values}, {"": dims}, programs, **sizes)[""]
        length, problem = 0, None
        try:
            length = length_along(values, dims)
        except Exception as error:
            problem = error
        no_programs = isinstance(programs, list | tuple) and not programs
        plans = not no_programs or bool(sizes) or self._batch is None
        if problem is not None and not plans:
            raise problem
        if plans or self._batch is None or self._batch.layout.length != length:
            shape, seed, captures = (sizes.pop(x, None) for x in ("shape", "seed", "captures"))
            self._decide(length, programs, shape, seed, captures, sizes, problem)
        self._given = True
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
        """The whole tensor, on every rank, from each rank's rows. It is not differentiable.

        Args:
            values: This rank's rows.
            dim: The dim that they lie along.

        Raises:
            ShapeError: Not this rank's number of rows.
        """
        layout = self.now().layout
        self._taken = True
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
            ArgumentError: :meth:`plan` or :meth:`shard` got no seed; a checkpoint draws again, and
                the seed is another one since.
            UnsupportedError: A CUDA graph is captured, whose replays would all draw the same.
        """
        seed = self.now().seed
        if self._is_captured():
            raise UnsupportedError(
                "a CUDA graph would draw the dropout of this batch at each replay",
                hint="leave calls with dropout outside, or capture with seed=... as a tensor "
                "that you write before each replay, the same on all ranks",
            )
        if seed is None:
            raise ArgumentError(
                "this batch has no seed", hint="pass seed=... to shard, the same on all ranks"
            )
        if not torch.compiler.is_compiling():
            if not _in_backward():
                self._drawn = seed
            elif self._drawn is not None and self._drawn != seed:
                raise ArgumentError(
                    f"a backward draws again for a call of an earlier shard, whose seed was "
                    f"{self._drawn}, and the seed is {seed} since",
                    hint="shard the next batch after the backward of this one",
                )
        return (seed * 6364136223846793005 + (number + 1) * _MIX) % (1 << 62)

    def explain(self) -> str:
        """Text on the layout and on ranks' work for each planned program: the same on all ranks."""
        layout = self.now().layout
        plans = [(plan.name, plan.figures) for plan in self._plans.values()]
        return report(layout, plans)

    @property
    def group(self) -> ProcessGroup:
        """The ranks of the sequence."""
        return self._group

    @property
    def reduces(self) -> bool:
        """True if gradients of captured tensors are added up over the ranks."""
        return self._reduce

    @property
    def exchange(self) -> str:
        """Exchange as given: ``gather``, ``heads`` or ``auto``."""
        return self._exchange

    def now(self) -> Batch:
        """Batch that :meth:`plan` has decided on.

        Raises:
            ArgumentError: It has not been called.
        """
        if self._batch is None:
            raise ArgumentError(
                "nothing says which rank holds which rows", hint="call shard or plan first"
            )
        return self._batch

    def plan_for(
        self, attention: ShardedProgram, captures: Mapping[str, Any], key: PlanKey, seed: Any
    ) -> Plan:
        """The plan of a call: one of before, or a new one that all ranks agree on.

        Args:
            attention: In which nothing is optional.
            captures: Of the call.
            key: From :meth:`key_of`.
            seed: Of the call.
        """
        batch = self.now()
        known = self._plans.get(key)
        if torch.compiler.is_compiling():
            self._taken = True
            if known is None or known.seen.tensors:
                raise UnsupportedError(
                    f"a graph of torch.compile calls {attention.name!r}, which is not planned, or "
                    "whose mask looks tensors up",
                    hint="make one call of each program outside of the graph after shard; "
                    "leave calls whose masks look tensors up outside",
                )
            return known
        if self._is_captured() and (known is None or known.seen.tensors):
            raise UnsupportedError(
                f"a CUDA graph captures a call of {attention.name!r}, which is not planned, or "
                "whose mask looks tensors up: replays would go by the plan of these tensors",
                hint="make one call of each program before the capture; leave calls whose masks "
                "look tensors up outside",
            )
        self._take(batch)
        fresh = known is None or not known.seen.is_same(captures)
        if not fresh and self._check == "plans":
            assert known is not None
            return known
        problem: Exception | None = None
        found = known
        fields: dict[str, object] = {}
        try:
            mask = sight_key(attention, batch.layout.chunk, key.asked.shape, captures)
            if fresh:
                found = plan_call(
                    attention, batch.layout, self._rank, captures, key.asked, self._machine,
                    batch.sights.get(mask),
                )  # fmt: skip
            fields = {
                "program": key.spec, "layout": batch.token, "shape of q, k and v": key.asked,
                "set of params": key.numbers, "mask": mask,
                "seed": seed if isinstance(seed, int) else type(seed),
            }  # fmt: skip
        except Exception as error:
            problem = error
        agree("a call", fields, problem, self._group, self._device)
        assert found is not None
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = found
        return found

    def is_planned(self, key: PlanKey, plan: Plan, captures: Mapping[str, Any]) -> bool:
        """Return True if a call may go by ``plan``, as an earlier one with the same ``key`` did.

        If so, it takes the rows.
        """
        batch = self.now()
        if (
            self._check != "plans" or self._plans.get(key) is not plan or key.token != batch.token
            or not plan.seen.is_same(captures) or (plan.seen.tensors and self._is_captured())
        ):  # fmt: skip
            return False
        self._take(batch)
        return True

    def key_of(
        self, attention: ShardedProgram, captures: Mapping[str, Any], asked: CallShape
    ) -> PlanKey:
        """Key that tells plans of this layout apart, but for tensors of masks.

        Raises:
            AttnDSLError: A param that is no number.
        """
        numbers = numbers_of(attention, captures)
        return PlanKey(attention.made_of.spec, self.now().token, asked, numbers)

    def _is_captured(self) -> bool:
        """Return True while a CUDA graph is captured. Graphs of torch.compile cannot ask."""
        return (
            not torch.compiler.is_compiling() and self._device.type == "cuda"
            and torch.cuda.is_current_stream_capturing()
        )  # fmt: skip

    def _take(self, batch: Batch) -> None:
        """A call takes rows: those of ``batch``, unless a checkpoint makes an earlier call again.

        Raises:
            ArgumentError: It does so, and the layout is another one since.
        """
        if not _in_backward():
            self._taken, self._called = True, batch.token
        elif self._called is not None and self._called != batch.token:
            raise ArgumentError(
                "a backward makes a call again whose rows are of an earlier shard, and the layout "
                "is another one since",
                hint="shard the next batch after the backward of this one",
            )

    def refuse(self, attention: ShardedProgram, problem: Exception) -> NoReturn:
        """Raise the error of a call, and tell the ranks that plan such a call now.

        Raises:
            Exception: ``problem``.
        """
        text = read_spec(attention.made_of.spec).text
        known = any(read_spec(key.spec).text == text for key in self._plans)
        first = self._batch is not None and not known
        if not torch.compiler.is_compiling() and (first or self._check == "calls"):
            agree("a call", {}, problem, self._group, self._device)
        raise problem


def _in_backward() -> bool:
    """Return True while autograd runs a backward, as where a checkpoint recomputes a forward."""
    return torch._C._current_graph_task_id() != -1


def _fitting(program: ShardedProgram, captures: Mapping[str, Any]) -> dict[str, Any]:
    """The ``captures`` that ``program`` declares."""
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
