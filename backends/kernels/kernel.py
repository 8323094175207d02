"""Records of a kernel, of the jobs that one call runs of it, and of a family of kernels.

A family has one table of kernels. A kernel is one entry of it: everything that other modules know
of it stands in its record. Running a call, showing a text, compiling for a GPU that is not there,
tuning and explaining all start from the same jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attndsl.passes.tiles.tile_plan import LoopPlan

from ..emit.facts import with_forms
from .cost_model import work_of_mask, work_of_pair, work_of_score

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from attndsl.passes.tiles.tile_plan import Direction
    from attndsl.pipeline import Lowered

    from ..base import Backward, BoundBackward, BoundForward, Call, CallGradients, Wants
    from ..emit.facts import KernelFacts
    from ..emit.template import Products
    from ..gradients.gradient_plan import GradientPlan
    from .compile import Argument
    from .config import Config
    from .jvp_call import Moving
    from .launch_spec import LaunchSpec
    from .target import Target


class Task:
    """Purpose that kernels are launched for. A call runs all kernels of a task.

    Equal to itself alone. Gradients of captures that have kernels of their own have tasks of their
    own (``triton/captures``).
    """

    FORWARD: ClassVar[Task]
    """Output and log-sum-exp."""
    BACKWARD: ClassVar[Task]
    """Gradients of q, k and v, and those of captures that are sums along rows and columns."""
    TANGENT: ClassVar[Task]
    """Tangents of output and log-sum-exp, from both."""
    FORWARD_TANGENT: ClassVar[Task]
    """Output and log-sum-exp together with their tangents."""
    REPAIR: ClassVar[Task]
    """Tiles of output and log-sum-exp that are not finite again, by live pairs alone."""
    REPAIR_GRADIENTS: ClassVar[Task]
    """The same of the gradients of q, k and v."""

    __slots__ = ("direction", "name")

    def __init__(self, name: str, direction: str | None = None) -> None:
        """``direction`` is its name for users, if that is another one."""
        self.name = name
        self.direction = direction or name

    def __repr__(self) -> str:
        """The name."""
        return f"Task({self.name!r})"


Task.FORWARD = Task("forward")
Task.BACKWARD = Task("backward")
Task.TANGENT = Task("tangent")
Task.FORWARD_TANGENT = Task("forward_tangent", "tangent")
Task.REPAIR = Task("repair")
Task.REPAIR_GRADIENTS = Task("repair gradients")


def task_named(name: str) -> Task:
    """The task that users call ``forward``, ``backward`` or ``tangent``."""
    for task in (Task.FORWARD, Task.BACKWARD, Task.TANGENT):
        if task.name == name:
            return task
    raise ValueError(f"{name!r} is not a valid Task")


REPAIRS = frozenset({Task.REPAIR, Task.REPAIR_GRADIENTS})
"""Tasks that nearly all calls launch in vain."""


def _one_part(job: Job, config: Config) -> int:
    return 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Kernel:
    """One kernel of a family."""

    name: str
    """Unique in its family; ``tune`` prints it."""
    family: str
    """By which users know the family (``Family.name``)."""
    tasks: frozenset[Task]
    entry: str
    """The function in a generated module that is launched."""
    text: Callable[[Job, Config, LoopPlan, Products], str]
    """The module with these tile sizes."""
    configs: Callable[[Job, Target], tuple[Config, ...]]
    """Tile sizes to try, in order of preference."""
    arguments: Callable[[Any, KernelFacts, Config], list[Argument]]
    """Types of all arguments of the entry."""
    loop: Direction | None = None
    """Its loop in plans of tiles; None where it visits tiles in a way of its own."""
    loop_name: str = ""
    """Name of the loop in templates."""
    templates: tuple[str, ...] = ()
    """Files that its module is made of, by their stems, where all its modules are made of the
    same."""
    derives: bool = True
    """True if it computes derivatives of the score."""
    waves: tuple[int, ...] = ()
    """Work tiles of the heads that go together, for each that runs at a time: first choice first.
    Empty where programs do not take a tile of one head."""
    parts_of_lists: Callable[[Job, Config], int] = _one_part
    """Number of parts of a work tile's rows whose tiles the lists tell apart."""
    more_configs: Callable[[tuple[Config, ...], Job], tuple[Config, ...]] | None = None
    """Tile sizes that ``tune`` tries besides, from the usual ones."""
    most_work: int | None = None
    """Instructions a pair beyond which another family runs the call; None for any number."""
    most_work_of_score: int | None = None
    """The same, for the instructions that read the score."""
    most_work_of_mask: int | None = None
    """The same, of a mask that FULL tiles do not do; None where it counts as all else."""

    @property
    def task(self) -> Task:
        """Task of a kernel that has just one."""
        (task,) = self.tasks
        return task

    def work_tiles(self, config: Config, sizes: tuple[int, ...]) -> int:
        """Number of work tiles of a call: those of its rows, or of its keys if these own tiles.

        ``sizes`` are those of :class:`~.launch_spec.LaunchSpec`.
        """
        batch, heads, kv_heads, q_len, kv_len = sizes
        assert self.loop is not None
        if self.loop.own == "kv":
            return -(-kv_len // config.block_n) * batch * kv_heads
        return -(-q_len // config.block_m) * batch * heads


def _always(job: Job) -> bool:
    return True


@dataclass(frozen=True, slots=True, eq=False)
class FixedKernel:
    """A kernel beside a backward's, whose text is the same for all programs."""

    name: str
    function: Any
    constants: Callable[[Job], Mapping[str, int | bool]]
    """Constants of the function, besides the one that tells if there is a gradient of lse."""
    configs: Callable[[Job, Target], tuple[Config, ...]]
    applies: Callable[[Job], bool] = _always
    """Return True for jobs that need it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel of one call: the kernel, the program, and all else that the module depends on."""

    kernel: Kernel
    lowered: Lowered
    facts: KernelFacts

    def on(self, machine: Target) -> Job:
        """The job with the fast forms that ``machine`` has."""
        return replace(self, facts=with_forms(self.facts, self.lowered.program, machine.target))

    def plan(self, config: Config) -> LoopPlan:
        """The plan of the kernel's loop with these tile sizes; empty if it has none.

        Nothing is listed for a repair, nor for few tiles: a list takes longer than most of them do.
        """
        facts = self.facts
        if self.kernel.loop is None:
            return LoopPlan()
        if facts.takes_turns:
            return self.lowered.sparsity.loop_in_turn(
                self.kernel.loop, config.block_m, config.block_n, facts.shifted, facts.indexed,
                facts.wide, config.peeled,
            )  # fmt: skip
        return self.lowered.sparsity.loop(
            self.kernel.loop, config.block_m, config.block_n, facts.shifted, facts.indexed,
            facts.wide,
            bounded=facts.pages is not None or facts.few_tiles or bool(self.kernel.tasks & REPAIRS),
        )  # fmt: skip

    @property
    def work(self) -> str:
        """Kind of the loop: ``dense``, ``masked``, ``short`` or ``short partial``.

        That of a repair counts as dense: large tiles make few programs, which end at once.
        """
        if self.kernel.loop is None or self.kernel.tasks & REPAIRS:
            return "dense"
        facts = self.facts
        return self.lowered.sparsity.work(self.kernel.loop, facts.shifted, facts.indexed)

    @property
    def work_of_pair(self) -> int:
        """Instructions that a pair takes besides products (:mod:`.cost_model`)."""
        return work_of_pair(self.lowered, self.facts, self.kernel.derives)

    @property
    def work_of_mask(self) -> int:
        """Instructions that FULL tiles do not take."""
        return work_of_mask(self.lowered, self.facts)

    @property
    def is_busy(self) -> bool:
        """Return True if a pair takes more work than the kernel is for."""
        kernel, of_mask = self.kernel, self.work_of_mask
        apart = kernel.most_work_of_mask is not None and of_mask > 0
        work = work_of_pair(self.lowered, self.facts, kernel.derives, with_mask=not apart)
        return any(
            most is not None and found > most
            for most, found in (
                (kernel.most_work, work),
                (kernel.most_work_of_mask, of_mask),
                (kernel.most_work_of_score, work_of_score(self.lowered, self.facts)),
            )
        )

    def text(self, config: Config, machine: Target) -> str:
        """The module with these tile sizes, without a head."""
        return self.kernel.text(self, config, self.plan(config), machine.products(self.facts))


class Family(Protocol):
    """A table of kernels, and how calls of theirs are launched."""

    name: str
    kernels: tuple[Kernel, ...]
    fixed: tuple[FixedKernel, ...]
    """Kernels beside those of ``Task.BACKWARD``."""
    tells_places: bool
    """True if :meth:`places` has values, as in at most one family of a backend."""
    checks_results: bool
    """True if kernels say which of their results are not finite. Forwards of programs whose keys
    are bounded store NaN as the rest of such a row's log-sum-exp, and backwards make
    :attr:`~..base.CallGradients.checks`."""
    isolates: bool
    """True if forwards keep values that are not finite to live pairs: then nothing repairs them."""
    marks_entries: bool
    """True if forwards make results NaN of batch entries with a wrong number of keys or offset."""

    def why_no_device(self, device: torch.device) -> str | None:
        """Reason why the kernels cannot run on ``device``, or None."""

    def why_not(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> str | None:  # fmt: skip
        """Reason why these kernels do not run ``task``, or None. The family has its kernels.

        A tangent is along what ``wanted`` names.
        """

    def most_head_dim(self, task: Task) -> int:
        """The largest head dim that the kernels of a task have tile sizes for."""

    def most_keys(self, task: Task, head_dim: int) -> int | None:
        """Most keys that the kernels of a task take in half precision; None for any number."""

    def most_queries(self, task: Task) -> int | None:
        """Most rows of queries that the kernels of a task take; None for any number."""

    def places(self, call: Call) -> tuple[object, ...]:
        """Values of positions that a layout depends on."""

    def plan_key(self, call: Call) -> tuple[object, ...]:
        """Key of the plan of gradients besides :func:`..gradients.gradient_plan.key_of`."""

    def plan_gradients(self, lowered: Lowered, call: Call, wanted: Wants) -> GradientPlan:
        """Plan of gradients and their kernels, if this family's backward runs."""

    def readable(self, grad_out: torch.Tensor, wanted: Wants) -> torch.Tensor:
        """The output's gradient, or a copy that the kernels can read."""

    def jobs(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> tuple[Job, ...]:  # fmt: skip
        """Jobs that ``task`` of a call runs."""

    def layout(
        self,
        layout: LaunchSpec,
        jobs: tuple[Job, ...],
        call: Call,
        more: Mapping[str, torch.Tensor],
    ) -> LaunchSpec:
        """``layout`` with what the family's launches need besides.

        Args:
            layout: With the kernels of ``jobs``.
            jobs: Of one task.
            call: A call of the signature.
            more: What kernels read besides: ``do``, or the tangents of ``q``, ``k`` and ``v``.
        """

    def forward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch ``Task.FORWARD``: output and log-sum-exp."""

    def backward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call, backward: Backward
    ) -> tuple[CallGradients, Callable[[], torch.Tensor]]:
        """Launch ``Task.BACKWARD``: gradients, and what gives delta (batch, heads, padded rows)."""

    def bound_forward(self, layout: LaunchSpec, lowered: Lowered, call: Call) -> BoundForward:
        """See :meth:`attndsl.backends.base.Backend.bound_forward`; there is at least one row."""

    def bound_backward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call, backward: Backward
    ) -> BoundBackward:
        """See :meth:`attndsl.backends.base.Backend.bound_backward`.

        No gradient of a capture is wanted, and ``grad_out`` is what :meth:`readable` gives.
        """

    def movable(self, moving: Moving) -> Moving:
        """``moving``, with copies of tangents that the kernels cannot read."""

    def tangents(
        self, layout: LaunchSpec, moving: Moving, results: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Launch ``Task.TANGENT``, which takes the results, or ``Task.FORWARD_TANGENT``.

        Args:
            layout: With its kernel.
            moving: Of :meth:`movable`, with at least one row of queries.
            results: Output and log-sum-exp of ``Task.FORWARD``; None where the kernel makes them.

        Returns:
            Output, log-sum-exp, and their tangents.
        """


def kernels_of(family: Family, task: Task) -> tuple[Kernel, ...]:
    """The kernels that ``task`` runs, in the order of their launches."""
    return tuple(kernel for kernel in family.kernels if task in kernel.tasks)


def jobs_of(family: Family, task: Task, lowered: Lowered, facts: KernelFacts) -> tuple[Job, ...]:
    """The jobs of a task whose modules all depend on ``facts``."""
    return tuple(Job(kernel, lowered, facts) for kernel in kernels_of(family, task))


def first_with(families: Sequence[Family], task: Task) -> Family | None:
    """The first of ``families`` that has kernels for ``task``, or None."""
    return next((family for family in families if kernels_of(family, task)), None)


def plan_of(
    families: tuple[Family, ...], lowered: Lowered, call: Call, wanted: Wants
) -> GradientPlan:
    """Plan of gradients and their kernels, by the first family whose backward runs."""
    plan = None
    for family in families:
        plan = family.plan_gradients(lowered, call, wanted)
        if family.why_not(lowered, call, Task.BACKWARD, None, plan.lines) is None:
            break
    assert plan is not None
    return plan
