"""Calls that differ in elements and addresses alone, bound to what runs them.

A graph of torch makes such a call between other work, when no code of it is in the processor's
caches: see M54 in docs/dev/measured.md. So all that they have in common is found out once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..base import bound_call
from .arguments import capture_arguments
from .device import stream_if_current
from .triton_launcher import direct_launch, why_wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.pipeline import Lowered

    from ..base import Backward, BoundBackward, BoundForward, Call, CallGradients
    from .compile import Executable
    from .kernel import Family
    from .launch_spec import LaunchSpec


Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes a tensor of a size, strides and a dtype on the current device, without filling it.

Torch's own functions take tuples, and no subclass of these such as ``torch.Size``."""
NewTensor = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Arguments of an :data:`Allocator`."""


def allocator(kind: str) -> Allocator:
    """The allocator of a kind of device, such as ``cuda``.

    It is the function by which Inductor's code makes all its tensors, so that it lies in the
    processor's caches: see M56 in docs/dev/measured.md.
    """
    found: Allocator | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    return partial(_empty_strided, kind) if found is None else found


def _empty_strided(
    kind: str, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=kind)


def rows_of(layout: LaunchSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and strides of log-sum-exps: (2, batch, heads, q_len), contiguous."""
    batch, heads, _, q_len, _ = layout.sizes
    return (2, batch, heads, q_len), (batch * heads * q_len, heads * q_len, q_len, 1)


@dataclass(frozen=True, slots=True)
class LastArguments:
    """The last arguments of a launch: numbers, and captured tensors in their places."""

    values: list[object]
    """None where a captured tensor is, whose memory nothing here keeps."""
    places: tuple[tuple[int, int], ...] = ()
    """Places of captures among the values, and their numbers among the call's captures."""

    def now(self, captures: Sequence[torch.Tensor]) -> list[object]:
        """These of a call with other captures."""
        if not self.places:
            return self.values
        values = [*self.values]
        for place, number in self.places:
            values[place] = captures[number]
        return values


def last_arguments(
    layout: LaunchSpec, call: Call, numbers: Sequence[object]
) -> LastArguments | None:
    """``numbers``, and what the program adds for ``call``; None where that is made anew each time.

    A capture without elements is replaced by a zero.
    """
    added = capture_arguments(layout.facts, call)
    tensors = [place for place, value in enumerate(added) if isinstance(value, torch.Tensor)]
    names = [capture.name for capture in layout.facts.captures] if tensors else []
    if len(names) != len(tensors) or any(
        added[place] is not call.tensors[name] for place, name in zip(tensors, names, strict=True)
    ):
        return None
    own = [*call.tensors]
    places = [
        (len(numbers) + place, own.index(name)) for place, name in zip(tensors, names, strict=True)
    ]
    for place in tensors:
        added[place] = None
    return LastArguments([*numbers, *added], tuple(places))


class KernelLaunch:
    """A kernel's launch, the rest of whose arguments is bound."""

    __slots__ = ("_kernel", "_last", "_run", "index", "new")

    def __init__(
        self, kernel: Executable, grid: tuple[int, int, int], last: LastArguments,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Bind ``kernel`` to run ``grid`` on ``device``, with the ``last`` arguments."""
        self._kernel, self._last = kernel, last  # The code is unloaded with its kernel.
        self.index, self.new = device.index, allocator(device.type)
        if kernel.interpreted or why_wrapped(kernel.kernel) is not None:
            self._run = partial(_launch, kernel, grid)
        else:
            self._run = partial(
                _launch_direct, direct_launch(kernel.kernel, kernel.constants, grid[1:]), grid[0]
            )

    def run(
        self, stream: int, tensors: Sequence[torch.Tensor], captures: Sequence[torch.Tensor]
    ) -> None:
        """Launch the kernel with ``tensors`` first."""
        self._run(stream, tensors, self._last.now(captures))


def _launch(
    kernel: Executable, grid: tuple[int, int, int], stream: int, tensors: Sequence[torch.Tensor],
    last: Sequence[object],
) -> None:  # fmt: skip
    """Launch through Triton's Python; the interpreter has no other way."""
    kernel.launch_grid(grid, stream, [*tensors, *last])


def _launch_direct(
    run: Callable[[int, int, Sequence[object]], None], programs: int, stream: int,
    tensors: Sequence[torch.Tensor], last: Sequence[object],
) -> None:  # fmt: skip
    # The launcher asks the driver about each tensor, and takes an address as it is.
    run(programs, stream, [*[x.data_ptr() for x in tensors], *last])


@dataclass(frozen=True, slots=True)
class OneKernelForward:
    """See :meth:`attndsl.backends.base.Backend.bound_forward`; it launches one kernel."""

    launch: KernelLaunch
    out: NewTensor
    lse: NewTensor

    def __call__(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the forward."""
        q, k, v, *captures = operands
        launch = self.launch
        if (stream := stream_if_current(launch.index)) is None:
            with torch.cuda.device(q.device):
                return self(operands)
        out, lse = launch.new(*self.out), launch.new(*self.lse)
        launch.run(stream, (q, k, v, out, lse, *self.workspace(stream, lse)), captures)
        return out, lse

    def workspace(self, stream: int, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Further tensors that the kernel takes; ``lse`` in the places of those it does not use."""
        return ()


def bound_forward(family: Family, layout: LaunchSpec, lowered: Lowered, call: Call) -> BoundForward:
    """The family's forward, of calls like ``call``."""
    return bound_call(partial(family.forward, layout), lowered, call)


def bound_backward(
    family: Family, layout: LaunchSpec, lowered: Lowered, call: Call
) -> BoundBackward:
    """The family's backward, of calls like ``call``."""

    def gradients(lowered: Lowered, call: Call, backward: Backward) -> CallGradients:
        return family.backward(layout, lowered, call, backward)[0]

    return bound_call(gradients, lowered, call)
