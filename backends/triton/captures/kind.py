"""A kind of gradients of captures as data, and the backward that its kernels follow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...base import Wants
from ...gradients.gradient_plan import GradientKind
from ...kernels.arguments import capture_arguments, origin, plain_arguments
from ...kernels.device import on_device, stream_of
from ...kernels.kernel import Kernel, Task
from ...memory_order import strides
from ..generate import extra_text

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from attndsl.pipeline import Lowered

    from ...base import Call, CallGradients
    from ...emit.facts import KernelFacts
    from ...gradients.gradient_plan import GradientShare
    from ...kernels.compile import Executable
    from ...kernels.launch_spec import LaunchSpec
    from ..generate_gradients import Sums
    from ..tiles import Tiles


@dataclass(frozen=True, slots=True)
class BackwardState:
    """A backward call, whose attention kernels have run."""

    lowered: Lowered
    call: Call
    lse: torch.Tensor
    """(batch, heads, q_len) fp32, natural logarithm; -inf in rows with no live pair."""
    delta: torch.Tensor
    """(batch, heads, padded rows) fp32, see ``library.statistics_rows``."""
    grad_out: torch.Tensor
    """With last stride 1."""
    layout: Callable[..., LaunchSpec]
    """Function from (lowered, call, task, grad_out, wanted) to the kernels of that task."""

    @property
    def is_empty(self) -> bool:
        """True if there are no pairs."""
        return not self.lse.numel() or not self.call.k.shape[2]

    def layout_of(self, task: Task, wants: Wants | None = None) -> LaunchSpec:
        """The kernels of ``task``."""
        return self.layout(self.lowered, self.call, task, self.grad_out, wants)

    def kernel_of(
        self, kernel: Kernel, share: GradientShare | None = None
    ) -> tuple[LaunchSpec, Executable]:
        """The compiled kernel, for the tensors of a share, and its layout."""
        layout = self.layout_of(kernel.task, None if share is None else _wants(share))
        return layout, layout.executables[kernel.name]

    def launch(
        self, kernel: Executable, programs: int, layout: LaunchSpec, own: list[Any], last: list[Any]
    ) -> None:
        """Launch ``kernel``.

        Args:
            kernel: One of ``layout``.
            programs: How many run.
            layout: Of the call.
            own: Arguments between the positions' origins and what the program adds.
            last: Arguments after what the program adds.
        """
        call = self.call
        device = self.lse.device
        with on_device(device):
            kernel.launch(
                programs, stream_of(device),
                [
                    call.q, call.k, call.v, self.grad_out, self.lse, self.delta, *layout.strides,
                    *strides(self.grad_out)[:3], call.scale, *layout.sizes,
                    origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
                    *own, *capture_arguments(layout.facts, call), *last,
                ],
            )  # fmt: skip


def own_kernel(
    name: str, entry: str, sums: Sums, tiles: Tiles, templates: tuple[str, ...]
) -> Kernel:
    """A kernel that makes dS again and adds up ``sums``, and has a task of its own."""
    return Kernel(
        name=name, family="triton", tasks=frozenset({Task(name)}), entry=entry,
        text=partial(extra_text, sums), configs=tiles.configs, arguments=plain_arguments,
        templates=templates,
    )  # fmt: skip


def _no_more(facts: KernelFacts, lowered: Lowered, call: Call) -> KernelFacts:
    return facts


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OwnKernels(GradientKind):
    """A kind of gradients, and the kernels that make them after the attention kernels."""

    kernels: tuple[Kernel, ...]
    make: Callable[[BackwardState, GradientShare, CallGradients], CallGradients]
    """The results with the gradients of a share, for which it launches these."""
    needed: Callable[[Lowered, GradientShare], tuple[Kernel, ...]] | None = None
    """Kernels that a share needs; None for all."""
    names_captures: bool = True
    """True if kernels depend on which captures have gradients, all of them tensors."""
    facts: Callable[[KernelFacts, Lowered, Call], KernelFacts] = _no_more
    """Facts with what its kernels depend on besides."""

    def launched(self, lowered: Lowered, share: GradientShare) -> list[tuple[Task, Wants | None]]:
        """The tasks of a share, and the gradients that their kernels are made for."""
        kernels = self.kernels if self.needed is None else self.needed(lowered, share)
        return [(x.task, _wants(share) if self.names_captures else None) for x in kernels]


def _wants(share: GradientShare) -> Wants:
    return Wants(q=False, k=False, v=False, tensors=share.names)
