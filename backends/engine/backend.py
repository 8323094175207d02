"""The backend of generated kernels: the first family without an objection runs a task."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from attndsl.errors import UnsupportedError
from attndsl.foundation.caches import CACHES, BoundedCache, Reason, memoised
from attndsl.foundation.logs import LOG, tell_once
from attndsl.ir import NO_ENTRIES

from ..base import UNWRITTEN, Backend, CallGradients, Wants, name_of_call
from ..gradients.gradient_plan import key_of
from ..gradients.gradient_terms import names_by_distance
from ..gradients.row_col_sums import line_gradients, lines_among
from ..gradients.sink_gradients import add_sink_gradients
from ..kernels.call_signature import signature_of
from ..kernels.device import outside_of_graphs
from ..kernels.jvp_call import moving_of
from ..kernels.kernel import Job, Task, first_with, jobs_of, kernels_of, plan_of, task_named
from ..kernels.launch_spec import NO_LINES, LaunchSpec
from ..kernels.modules import Modules
from ..kernels.target import current_machine
from ..kernels.tile_order import heads_per_wave
from ..memory_order import empty_like, result_orders, strides, wide_dtype
from ..tiled.distance_lookups import ON_GPUS, DistanceLookups, call_of_values, wants_of_lookup
from ..triton.captures import extra_tasks, run_extra
from ..triton.captures.kind import BackwardState
from ..triton.family import MAX_HEAD_DIM
from ..triton.nan_repair import repair_gradients, repair_results, rows_alone
from ..triton.serve_launch import bits_of_pages, kinds_of_pages, page_facts
from ..triton.values_by_distance import VALUES, launch_values, work_by_distance
from .describe import describe_kernels
from .families import make_families, name_of
from .kernel_listing import source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.pipeline import Lowered

    from ..base import Backward, BoundBackward, BoundForward, Call, Tangents, Written
    from ..cache_entries import Store
    from ..gradients.gradient_plan import GradientPlan
    from ..kernels.config import Config
    from ..kernels.jvp_call import Moving
    from ..kernels.kernel import Family
    from ..paged_requests import ChunkResults, Pages
    from ..triton.serve_launch import PagesLayout, Serve

_MAX_LAYOUTS = 4096
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class GeneratedBackend(Backend):
    """Generates, compiles and launches kernels; keeps them in memory and in a store."""

    differentiable = False
    contracts = False
    reads_windows = True
    binds = True

    def __init__(
        self, name: str, families: tuple[Family, ...], store: Store, pages: Serve | None = None
    ) -> None:
        """A backend of ``families``; the last one runs all calls. ``pages`` reads pages."""
        self.name = name
        self.families = families
        self._placed = next((family for family in families if family.tells_places), None)
        self.fused = first_with(families, Task.FORWARD_TANGENT) is not None
        self._pages = pages
        self._lookups = DistanceLookups(
            lambda found, own: launch_values(self._layout(found.values, own, VALUES), found, own),
            work_by_distance,
            names_by_distance,
            ON_GPUS,
        )
        self.modules = Modules(store)
        self._plans: BoundedCache[GradientPlan] = BoundedCache(
            "plans of gradients by program, operands, wanted gradients", _MAX_LAYOUTS
        )
        self._layouts: BoundedCache[LaunchSpec] = BoundedCache(
            "layouts by signature", _MAX_LAYOUTS, Reason.KERNELS
        )
        self._as_given: BoundedCache[LaunchSpec] = BoundedCache(
            "layouts for gradients as given by signature, alignment", _MAX_LAYOUTS, Reason.KERNELS
        )
        self._steps: BoundedCache[PagesLayout] = BoundedCache(
            "layouts of pages by signature, kinds of pages", _MAX_LAYOUTS, Reason.KERNELS
        )

    @property
    def kernels_built(self) -> int:
        """Kernels compiled (or taken into the interpreter) by this object so far."""
        return self.modules.built

    def why_not(self, device: torch.device) -> str | None:
        """Reason why the backend cannot run on ``device``, or None."""
        # The last family runs wherever another one does.
        asked = self.families[:-1] or self.families
        refusals = (family.why_no_device(device) for family in asked)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def check(self, lowered: Lowered, call: Call) -> None:
        """Refuse by name what these kernels cannot do: the limits are the last family's."""
        last = self.families[-1].name
        if call.q.dtype not in _DTYPES:
            raise UnsupportedError(
                f"the {last} backend computes in fp16, bf16 and fp32, not {call.q.dtype}",
                hint="convert q, k and v, or use backend='auto': it runs fp64 by torch operations",
            )
        for name, width in (("q", call.q.shape[-1]), ("v", call.v.shape[-1])):
            if not 1 <= width <= MAX_HEAD_DIM:
                raise UnsupportedError(
                    f"the {last} backend takes head dims from 1 to {MAX_HEAD_DIM}, "
                    f"and {name} has {width}",
                    hint="use backend='reference'",
                )

    def start(self, lowered: Lowered, call: Call, wanted: Wants) -> None:
        """See :class:`~attndsl.backends.base.Backend`."""
        device = call.q.device
        if call.q.numel() == 0 or current_machine(device).target is None:
            return
        both = (True, True)
        if (found := self._lookups.of(lowered, call)) is not None:
            own = call_of_values(call)
            self.modules.start(self._jobs(found.values, own, VALUES, None, None), (), device, False)
            looks_up = self._lookups.of_backward(lowered, call, wanted) is not None
            if not looks_up:
                self._start(lowered, call, wanted, (False, True))
            own = self._lookups.call(found, call, made=False)
            lowered, call, wanted = found.lowered, own, wants_of_lookup(found, wanted)
            both = (True, looks_up)
        self._start(lowered, call, wanted, both)

    def _start(
        self, lowered: Lowered, call: Call, wanted: Wants, directions: tuple[bool, bool]
    ) -> None:
        """Begin to compile the kernels of the forward, of the backward, or of both."""
        device, (forward, backward) = call.q.device, directions
        tasks: list[tuple[Task, torch.Tensor | None, Wants | None]] = []
        if forward:
            tasks.append((Task.FORWARD, None, None))
        # What will come back is like the output, as far as anybody knows.
        grad_out = empty_like(call.q, call.v.shape[-1])
        bounded = lowered.program.bounded
        if backward:
            plan = self._plan(lowered, call, wanted)
            tasks.append((Task.BACKWARD, grad_out, plan.lines))
            tasks += [(task, grad_out, own) for task, own in extra_tasks(lowered, plan)]
            if bounded:
                tasks.append((Task.REPAIR_GRADIENTS, grad_out, rows_alone(plan.lines)))
        isolates = forward and self._family(lowered, call, Task.FORWARD, None, None).isolates
        if forward and bounded and not isolates:
            tasks.append((Task.REPAIR, None, None))
        for task, gradient, wants in tasks:
            family = self._family(lowered, call, task, gradient, wants)
            jobs = family.jobs(lowered, call, task, gradient, wants)
            fixed = family.fixed if task is Task.BACKWARD else ()
            self.modules.start(jobs, fixed, device, False)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        q = call.q
        if q.numel() == 0:
            lse = q.new_empty((2, *q.shape[:3]), dtype=torch.float32)
            return empty_like(q, call.v.shape[-1], wide_dtype(call.wide)), lse
        if (found := self._lookups.of(lowered, call)) is not None:
            return self.forward(found.lowered, self._lookups.call(found, call))
        layout = self._layout(lowered, call, Task.FORWARD)
        out, lse = layout.family.forward(layout, lowered, call)
        if lowered.program.bounded and not layout.family.isolates:
            repairs = self._layout(lowered, call, Task.REPAIR)
            repair_results(repairs, lowered, call, (out, lse), layout.family.checks_results)
        return out, lse

    def bound_forward(self, lowered: Lowered, call: Call) -> BoundForward:
        """See :class:`~attndsl.backends.base.Backend`."""
        if call.q.numel() == 0 or self._lookups.of(lowered, call) is not None:
            return super().bound_forward(lowered, call)
        layout = self._layout(lowered, call, Task.FORWARD)
        if lowered.program.bounded and not layout.family.isolates:
            return super().bound_forward(lowered, call)
        return layout.family.bound_forward(layout, lowered, call)

    def bound_backward(self, lowered: Lowered, call: Call, backward: Backward) -> BoundBackward:
        """See :class:`~attndsl.backends.base.Backend`."""
        _, lse, grad_out, grad_lse, wanted = backward
        read = [family.readable(grad_out, wanted) for family in self.families]
        if (
            wanted.tensors or wanted.params or lse.numel() == 0 or lowered.program.bounded
            or grad_out.dtype is not call.q.dtype or any(x is not grad_out for x in read)
            or self._lookups.of_backward(lowered, call, wanted) is not None
        ):  # fmt: skip
            return super().bound_backward(lowered, call, backward)
        has_dlse = grad_lse is not None
        layout = self._layout(lowered, call, Task.BACKWARD, grad_out, wanted, has_dlse)
        return layout.family.bound_backward(layout, lowered, call, backward)

    def marks_entries(self, lowered: Lowered, call: Call) -> bool:
        """See :class:`~attndsl.backends.base.Backend`."""
        if lowered.program.entries == NO_ENTRIES or call.q.numel() == 0:
            return False
        return self._family(lowered, call, Task.FORWARD, None, None).marks_entries

    def why_not_pages(self, lowered: Lowered, call: Call, pages: Pages) -> str | None:
        """See :class:`~attndsl.backends.base.ReadsPages`."""
        if self._pages is None:
            return f"the {self.name} backend reads no pages"
        return self._pages.why_not_pages(lowered, call, pages)

    def bound_serve(
        self, lowered: Lowered, call: Call, pages: Pages
    ) -> Callable[[Call, Pages, ChunkResults | None], tuple[torch.Tensor, torch.Tensor]]:
        """See :class:`~attndsl.backends.base.ReadsPages`."""
        assert self._pages is not None
        signature = signature_of(lowered, call, Task.FORWARD, None)
        key: tuple[object, ...] = (signature, bits_of_pages(pages))
        if call.signature is None:
            key = (*key, page_facts(pages), kinds_of_pages(pages))
        launch = self._steps.get(key)
        if launch is None:
            jobs = self._pages.jobs_of_pages(lowered, call, pages)
            layout = self._layout_of(self._pages, jobs, call, False)
            launch = self._pages.layout_of_pages(layout, lowered, call, pages)
            self._steps.put(key, launch)
        return partial(self._pages.serve, launch, lowered)

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients:
        """See :class:`~attndsl.backends.base.Backend`."""
        _, lse, grad_out, _, wanted = backward
        lookup = self._lookups.of_backward(lowered, call, wanted) if lse.numel() else None
        if lookup is not None:
            return self._lookups.backward(lookup, call, backward, self.backward)
        if grad_out.dtype is not call.q.dtype:  # An operand of products, as they take it.
            grad_out = grad_out.to(call.q.dtype)
            backward = backward._replace(grad_out=grad_out)
        bounded = lowered.program.bounded and lse.numel() > 0
        plan = None
        if wanted.tensors or wanted.params:
            plan = self._plan(lowered, call, wanted)
            backward = backward._replace(wanted=plan.lines)
        found, made = self._gradients(lowered, call, backward)
        if plan is None and not bounded:
            return found
        delta, grad_out = made(), self.families[-1].readable(grad_out, wanted)
        state = BackwardState(lowered, call, lse, delta, grad_out, self._layout)
        if bounded:
            rows = rows_alone(backward.wanted)
            repair_gradients(state.layout_of(Task.REPAIR_GRADIENTS, rows), state, rows, found)
        if plan is None:
            return found
        found = run_extra(state, plan, found)
        if lowered.program.sink is None:
            return found
        return add_sink_gradients(lowered, call, lse, delta, wanted, found)

    def _gradients(
        self, lowered: Lowered, call: Call, backward: Backward
    ) -> tuple[CallGradients, Callable[[], torch.Tensor]]:
        """Launch a backward: return gradients and a function for delta, as a family does."""
        _, lse, given, grad_lse, wanted = backward
        if lse.numel() == 0:
            return _no_gradients(call, wanted), lambda: lse
        has_dlse = grad_lse is not None
        key = (
            *self._key(lowered, call, Task.BACKWARD, given, wanted, has_dlse),
            given.data_ptr() % 16,
        )
        layout = self._as_given.get(key)
        if layout is None:
            grad_out = given
            for family in self.families:
                grad_out = family.readable(grad_out, wanted)
            layout = self._layout(lowered, call, Task.BACKWARD, grad_out, wanted, has_dlse)
            if grad_out is given:
                self._as_given.put(key, layout)
            else:
                backward = backward._replace(grad_out=grad_out)
        return layout.family.backward(layout, lowered, call, backward)

    def tangent(
        self, lowered: Lowered, call: Call, moved: Tangents, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.ForwardMode`."""
        if lse.numel() == 0:
            return torch.zeros_like(out), torch.zeros_like(lse)
        family = first_with(self.families, Task.TANGENT)
        assert family is not None
        moving = family.movable(moving_of(lowered, call, moved))
        layout = self._tangent_layout(family, moving, Task.TANGENT)
        return family.tangents(layout, moving, (out, lse))[2:]

    def forward_with_tangents(
        self, lowered: Lowered, call: Call, moved: Tangents
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """See :class:`~attndsl.backends.base.FusedForwardMode`."""
        task, wanted = Task.FORWARD_TANGENT, Wants(tensors=frozenset(moved.captures))
        family = first_with(self.families, task)
        if family is None or family.why_not(lowered, call, task, None, wanted) is not None:
            return None
        moving = family.movable(moving_of(lowered, call, moved))
        return family.tangents(self._tangent_layout(family, moving, task), moving, None)

    def runner(self, lowered: Lowered, call: Call, direction: str) -> tuple[Backend, Lowered, Call]:
        """See :class:`~attndsl.backends.base.Backend`."""
        given = {**call.params, **call.tensors}
        learns = frozenset(x for x in given if getattr(given[x], "requires_grad", False))
        if direction == "forward":
            found = self._lookups.of(lowered, call)
        else:
            found = self._lookups.of_backward(lowered, call, Wants(tensors=learns))
        if found is None:
            return super().runner(lowered, call, direction)
        own = self._lookups.call(found, call)
        own.tensors[found.tensor].requires_grad_(not learns.isdisjoint(found.learned))
        return self.runner(found.lowered, own, direction)

    def choices(
        self, lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None,
        wants: Wants | None,
    ) -> Mapping[str, tuple[Config, ...]]:  # fmt: skip
        """See :class:`~attndsl.runtime.tuning.Tunable`."""
        machine = current_machine(call.q.device)
        found = {}
        for job in self._jobs(lowered, call, task_named(kind), grad_out, wants):
            job = job.on(machine)
            configs = job.kernel.configs(job, machine)
            more = job.kernel.more_configs
            found[job.kernel.name] = (*configs, *(() if more is None else more(configs, job)))
        return found

    def choose(
        self, lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None,
        wants: Wants | None, kernel: str, config: Config,
    ) -> None:  # fmt: skip
        """See :class:`~attndsl.runtime.tuning.Tunable`."""
        jobs = self._jobs(lowered, call, task_named(kind), grad_out, wants)
        (job,) = (job for job in jobs if job.kernel.name == kernel)
        self.modules.choose(job, config, call.q.device)
        CACHES.invalidate(Reason.KERNELS)

    def describe(self, lowered: Lowered, head_dim: int) -> list[str]:
        """See :class:`~attndsl.backends.base.Backend`."""
        lines = describe_kernels(self, self.families, lowered, head_dim)
        return [*lines, *self._lookups.described(lowered)]

    def source(
        self, lowered: Lowered, call: Call, direction: str, wants: Wants,
        written: Written = UNWRITTEN,
    ) -> str:  # fmt: skip
        """See :class:`~attndsl.backends.base.Backend`."""
        return source_of(self.families, lowered, call, direction, wants, written)

    def _jobs(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> tuple[Job, ...]:  # fmt: skip
        """Jobs that a forward or backward runs itself."""
        if wanted is not None:
            wanted = self._plan(lowered, call, wanted).lines
        family = self._family(lowered, call, task, grad_out, wanted)
        return family.jobs(lowered, call, task, grad_out, wanted)

    def _plan(self, lowered: Lowered, call: Call, wanted: Wants) -> GradientPlan:
        """Plan of gradients: the kernels that make each of them."""
        own = tuple(family.plan_key(call) for family in self.families)
        key = (key_of(lowered, call, wanted), own)
        plan = self._plans.get(key)
        if plan is None:
            plan = plan_of(self.families, lowered, call, wanted)
            self._plans.put(key, plan)
        return plan

    def _family(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> Family:  # fmt: skip
        """The first family that runs a task of a call."""
        return next(
            family
            for family in self.families
            if kernels_of(family, task)
            and family.why_not(lowered, call, task, grad_out, wanted) is None
        )

    def _tell_family(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> None:  # fmt: skip
        """Log which family's kernels run a task, and what the families before it object."""
        said = []
        for family in self.families:
            refused = "none for it"
            if kernels_of(family, task):
                reason = family.why_not(lowered, call, task, grad_out, wanted)
                if reason is None:
                    break
                refused = reason
            said.append(f"; no {family.name} kernels: {refused}")
        tell_once(
            f"{name_of_call(lowered, call)}: {task.direction} by {family.name} kernels"
            + "".join(said)
        )

    def _layout(
        self,
        lowered: Lowered,
        call: Call,
        task: Task,
        grad_out: torch.Tensor | None = None,
        wanted: Wants | None = None,
        has_dlse: bool = False,
    ) -> LaunchSpec:
        """Layout that calls of this signature share: kernels, strides and sizes."""
        key = self._key(lowered, call, task, grad_out, wanted, has_dlse)
        layout = self._layouts.get(key)
        if layout is None:
            family = self._family(lowered, call, task, grad_out, wanted)
            if LOG.isEnabledFor(logging.INFO):
                self._tell_family(lowered, call, task, grad_out, wanted)
            # Calls that one family tells apart by their places may be one to this family.
            own = (key[:3], family.name, family.places(call))
            layout = self._layouts.get(own)
            if layout is None:
                layout = self._made(family, lowered, call, task, grad_out, wanted, has_dlse)
                if self._placed is not None and family is not self._placed:
                    self._layouts.put(own, layout)
            self._layouts.put(key, layout)
        return layout

    def _made(
        self, family: Family, lowered: Lowered, call: Call, task: Task,
        grad_out: torch.Tensor | None, wanted: Wants | None, has_dlse: bool,
    ) -> LaunchSpec:  # fmt: skip
        """Make the layout of calls like this one, with the kernels of a family."""
        jobs = family.jobs(lowered, call, task, grad_out, wanted)
        more = {} if grad_out is None else {"do": grad_out}
        layout = self._layout_of(family, jobs, call, has_dlse)
        if grad_out is not None:
            layout = replace(layout, grad_strides=strides(grad_out)[:3])
        return family.layout(layout, jobs, call, more)

    def _key(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None, has_dlse: bool,
    ) -> tuple[object, ...]:  # fmt: skip
        """Key of a layout; last, values by which one family tells calls apart."""
        placed = self._placed
        places = () if placed is None else placed.places(call)
        return signature_of(lowered, call, task, grad_out), wanted, has_dlse, places

    def _tangent_layout(self, family: Family, moving: Moving, task: Task) -> LaunchSpec:
        """Layout for a kernel of tangents; see :meth:`_layout`."""
        lowered, call = moving.lowered, moving.call
        key = (*signature_of(lowered, call, task, None), *moving.signature())
        layout = self._layouts.get(key)
        if layout is None:
            jobs = jobs_of(family, task, lowered, moving.facts())
            layout = self._layout_of(family, jobs, call, False)
            layout = family.layout(layout, jobs, call, moving.operands)
            self._layouts.put(key, layout)
        return layout

    def _layout_of(
        self, family: Family, jobs: tuple[Job, ...], call: Call, has_dlse: bool
    ) -> LaunchSpec:
        """Layout with all fields that every family's launches need."""
        lowered, facts, device = jobs[0].lowered, jobs[0].facts, call.q.device
        is_backward = Task.BACKWARD in jobs[0].kernel.tasks
        fixed = family.fixed if is_backward else ()
        prepared = self.modules.prepare(jobs, fixed, device, has_dlse)
        steps = tuple(s for t in (call.q, call.k, call.v) for s in strides(t)[:3])
        batch, heads, q_len, _ = call.q.shape
        own = {job.kernel.name: job for job in jobs}
        configs = {name: prepared.executables[name].config for name in own}
        lists = {
            name: self.modules.tile_lists(job, configs[name], device)
            for name, job in own.items()
            if name in prepared.listed
        }
        if lists and LOG.isEnabledFor(logging.INFO):
            reason = next(own[name].plan(configs[name]).listed for name in lists)
            tell_once(f"{name_of_call(lowered, call)}: tiles by lists: {reason}")
        names = {*facts.tensor_gradients, *facts.param_gradients}
        masked, in_turn = lowered.program.mask is not None, facts.takes_turns
        sizes = (batch, heads, call.k.shape[1], q_len, call.k.shape[2])
        of_heads = {name: job.kernel for name, job in own.items() if job.kernel.waves}
        owners = (batch, heads, heads, *sizes[3:]) if facts.heads_apart else sizes
        return LaunchSpec(
            family=family,
            facts=facts,
            executables=prepared.executables,
            strides=steps,
            orders=result_orders(call.q, call.k, call.v),
            sizes=sizes,
            lists=lists,
            heads_per_wave={
                name: heads_per_wave(call, kernel, configs[name], masked, in_turn)
                for name, kernel in of_heads.items()
            },
            work_tiles={
                name: kernel.work_tiles(configs[name], owners) for name, kernel in of_heads.items()
            },
            rows=_number_on(device).expand(2, batch, heads, q_len),
            lines=lines_among(lowered, names) if is_backward else NO_LINES,
        )


def generated_backend(names: tuple[str, ...], store: Store) -> GeneratedBackend:
    """The backend of families by their names, which :func:`~.families.families_of` gives."""
    families, pages = make_families(names)
    return GeneratedBackend(name_of(names), families, store, pages)


@memoised("numbers that rows take their kind from", None)
def _number_on(device: torch.device) -> torch.Tensor:
    make = partial(torch.empty, (), dtype=torch.float32, device=device)
    return outside_of_graphs(make, device)


def _no_gradients(call: Call, wanted: Wants) -> CallGradients:
    """Zeros: there are no rows of queries."""
    kind = wide_dtype(wanted.wide)
    dq, dk, dv = (empty_like(x, dtype=kind).zero_() for x in (call.q, call.k, call.v))
    found = CallGradients(
        dq if wanted.q else None, dk if wanted.k else None, dv if wanted.v else None
    )
    if wanted.tensors or wanted.params:
        found = found.plus(*line_gradients(call, wanted, NO_LINES, None, None))
    return found
