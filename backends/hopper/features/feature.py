"""A feature of Hopper kernels as data, and what a kernel's text is made for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...kernels.kernel import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from attndsl.passes.tiles.tile_plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ...base import Call, CallGradients
    from ...emit.facts import KernelFacts
    from ...emit.template import Flags
    from ...gradients.gradient_plan import GradientPlan
    from ...kernels.config import Config
    from ..tile_shapes import Block

    Collect = Callable[
        [Lowered, Call, frozenset[str], Mapping[str, torch.Tensor], CallGradients], CallGradients
    ]
    """Results with the gradients of the named captures, from buffers by their names."""


@dataclass(frozen=True, slots=True)
class OwnTiles:
    """Rules by which consumers leave out tiles of their work tile."""

    skips: bool = False
    """True if they leave out any."""
    loop: LoopPlan | None = None
    """The plan of one consumer's rows, if it has a closed form and differs from the tile's."""
    parts: int = 1
    """Number of consumers whose tiles the lists of tiles tell apart."""


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """Program, facts, task, loop and config that one module is generated for."""

    lowered: Lowered
    facts: KernelFacts
    task: Task
    """``FORWARD``, ``FORWARD_TANGENT`` or ``BACKWARD``."""
    loop: LoopPlan
    """The plan of its loop."""
    config: Config
    own: OwnTiles

    @property
    def is_forward(self) -> bool:
        """Return True if a work tile is one of queries."""
        return self.task is not Task.BACKWARD

    @property
    def has_tangents(self) -> bool:
        """Return True for the forward that makes tangents as well."""
        return self.task is Task.FORWARD_TANGENT

    @property
    def loop_name(self) -> str:
        """Name of the loop in templates."""
        return "forward" if self.is_forward else "kv_pass"

    @property
    def is_listed(self) -> bool:
        """Return True if the loop's tiles are listed."""
        return self.loop.listed is not None


@dataclass(frozen=True, slots=True)
class Texts:
    """Device functions that a program has for a feature."""

    functions: Sequence[str] = ()
    helpers: frozenset[str] = frozenset()
    """The library functions that they use."""


def _no_flags(spec: ModuleSpec) -> Flags:
    return {}


def _no_lines(spec: ModuleSpec) -> Sequence[str]:
    return ()


def _no_texts(spec: ModuleSpec) -> Texts:
    return Texts()


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a backward writes beside dQ, dK and dV: an argument of its kernel."""

    name: str
    """The argument."""
    type: str
    """Triton's name of the argument's type; of no matter where the kernel sees blocks."""
    empty: Callable[[Call, Config], torch.Tensor]
    """The memory as a launch needs it."""
    block: Callable[[KernelFacts, Config], Block] | None = None
    """Block that the kernel stores at once, by a descriptor of the rows of all but the last dim;
    None where it takes the address."""


def _no_bytes(task: Task, facts: KernelFacts, config: Config) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Feature:
    """Condition under which kernels have a feature, and the code and memory they have for it.

    Features for gradients of captures say as well whose gradients come of them (``takes``), and
    how (``collect``): plans of gradients have their flags, and facts have these of a plan.
    """

    flag: str
    """The constant that says so in device code."""
    applies: Callable[[ModuleSpec], bool]
    """The condition, which looks at program and facts alone if there are buffers."""
    flags: Callable[[ModuleSpec], Flags] = _no_flags
    """Further constants, of kernels without it as well."""
    template: str | None = None
    """The file of its device code."""
    imports: Callable[[ModuleSpec], Sequence[str]] = _no_lines
    """Import statements, each a line."""
    functions: Callable[[ModuleSpec], Texts] = _no_texts
    arguments: Callable[[ModuleSpec], Sequence[str]] = _no_lines
    """Arguments of the kernel between its operands and its sizes."""
    shared_bytes: Callable[[Task, KernelFacts, Config], int] = _no_bytes
    """Bytes of a kernel's shared memory."""
    configs: Callable[[tuple[Config, ...]], tuple[Config, ...]] | None = None
    """Configs that suit kernels with it, from those of kernels without."""
    stores: tuple[Buffer, ...] = ()
    """Buffers of a backward that are such arguments."""
    sums: tuple[Buffer, ...] = ()
    """Buffers of a backward whose arguments stand before the program's, as fields of its record."""
    takes: Callable[[GradientPlan, Lowered, Call], GradientPlan] | None = None
    """The plan, in which the feature takes over gradients from kernels of their own."""
    collect: Collect | None = None
    """The results with the gradients that come of it."""


def has_flag(flag: str) -> Callable[[ModuleSpec], bool]:
    """Condition of a feature that plans of gradients ask for."""
    return lambda spec: flag in spec.facts.features


@dataclass(frozen=True, slots=True)
class FeatureParts:
    """Parts that features add to one module."""

    flags: Mapping[str, bool | float | str] = field(default_factory=dict)
    templates: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    texts: Texts = field(default_factory=Texts)
    arguments: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    """Arguments that stand before those of the program, as fields of its record."""


def parts_of(features: Sequence[Feature], spec: ModuleSpec) -> FeatureParts:
    """Parts that ``features`` add to the module of ``spec``, in their order."""
    found = [feature for feature in features if feature.applies(spec)]
    flags: dict[str, bool | float | str] = {}
    for feature in features:
        flags |= {feature.flag: feature in found, **feature.flags(spec)}
    texts = [feature.functions(spec) for feature in found]
    return FeatureParts(
        flags,
        tuple(feature.template for feature in found if feature.template is not None),
        tuple(line for feature in found for line in feature.imports(spec)),
        Texts(
            [text for own in texts for text in own.functions],
            frozenset[str]().union(*(own.helpers for own in texts)),
        ),
        tuple(
            name
            for feature in found
            for name in (*feature.arguments(spec), *(buffer.name for buffer in feature.stores))
        ),
        tuple(x.name for feature in found for x in feature.sums if not spec.is_forward),
    )
