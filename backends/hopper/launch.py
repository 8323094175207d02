"""Launching a kernel without Triton's Python around it, and its descriptors encoded once.

Triton encodes the tensor map of each descriptor at each launch (see M17 in docs/dev/measured.md).
This module keeps tensor maps by address, and calls the C function beneath with exactly what Triton
would pass to it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attndsl.errors import LaunchWarning
from attndsl.foundation.caches import BoundedCache, Reason

from ..kernels.triton_launcher import direct_launch, tensor_map_encoders, why_wrapped
from .tile_shapes import ADDRESS_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from ..kernels.compile import Executable
    from .tile_shapes import Block

_MAX_MAPS = 4096
"""Some 600 bytes each. A training step has four a layer in its forward, six in its backward."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of a kernel: its executable, the function that runs it, encoders of its arguments."""

    executable: Executable
    """Kept, since the code is unloaded with it."""
    run: Callable[[int, int, Sequence[object]], None]
    """Takes the number of programs, the stream, and the arguments but for trailing constants."""
    encoders: Mapping[str, Callable[[TensorDescriptor], Sequence[object]]]
    """Encoders of descriptors, by argument. Empty if the kernel takes descriptors."""


def launch_of(executable: Executable) -> Launch:
    """The quickest way to launch ``executable`` that this Triton has.

    Warns:
        LaunchWarning: It is Triton's own; says why.
    """
    why = why_wrapped(executable.kernel)
    if why is None:
        run = direct_launch(executable.kernel, executable.constants)
        return Launch(executable, run, tensor_map_encoders(executable.kernel))
    warnings.warn(
        f"kernel {executable.kernel.name} is launched by Triton's own Python, which takes some "
        f"10 us longer a call: {why}",
        LaunchWarning,
        stacklevel=2,
    )
    return Launch(executable, executable.launch, {})


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Descriptor of a tensor, and of all others of its dtype, shape, strides and alignment."""

    attributes: dict[str, Any]
    """Attributes of the descriptor, without the tensor."""
    encode: Callable[[TensorDescriptor], Sequence[object]] | None
    """See :attr:`Launch.encoders`."""

    def descriptor(self, tensor: torch.Tensor) -> TensorDescriptor:
        """The descriptor of ``tensor``; the checks of the first one are not made again."""
        found = object.__new__(TensorDescriptor)
        found.__dict__.update(self.attributes, base=tensor)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """Views of several tensors, in the order of a kernel's arguments. Equal to itself alone."""

    each: tuple[View, ...] = ()
    seen: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] = tuple
    """Function from a launch's tensors to the tensors that the kernel sees, one for each view."""


class RowStatistics(NamedTuple):
    """Rows of a backward in one piece of memory, fp32: see ``library.row_statistics``."""

    batch: int = 0
    heads: int = 0
    padded: int = 0
    """Rows of a head for which there are numbers."""

    @property
    def number(self) -> int:
        """Number of rows of all heads, padded."""
        return self.batch * self.heads * self.padded

    @property
    def dq_programs(self) -> int:
        """Number of programs of ``sums.dq_from_sums``: two for 64 rows."""
        return self.number // 32

    def parts(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Shifts and rests of log-sum-exps, and delta, each flat."""
        number = self.number
        return memory[:number], memory[number : 2 * number], memory[2 * number : 3 * number]

    def seen(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """``given``, the last of which is that memory, with rests and delta in place of it."""
        return (*given[:-1], *self.parts(given[-1])[1:])


def view(
    tensor: torch.Tensor,
    steps: tuple[int, ...],
    block: Block,
    encode: Callable[[TensorDescriptor], Sequence[object]] | None,
) -> View:
    """The view of ``tensor`` by blocks.

    Args:
        tensor: What to describe.
        steps: Its strides, for (batch, heads, length, head dim) from ``descriptor_strides``.
        block: What to move at once.
        encode: What the kernel gets in place of a descriptor; None where it gets that.
    """
    found = TensorDescriptor(
        tensor, list(tensor.shape), list(steps), list(block.shape), block.layout
    )
    return View({name: value for name, value in vars(found).items() if name != "base"}, encode)


class TensorMaps:
    """Arguments that kernels get in place of descriptors, by view and address.

    A tensor map is a function of address, shape, strides, dtype and block alone, and a view is all
    of these but the address; whether the memory was freed and used again meanwhile is no matter.
    """

    def __init__(self) -> None:
        # Views go with the layouts of kernels that others replace.
        self._found: BoundedCache[tuple[object, ...]] = BoundedCache(
            "tensor maps by view, address", _MAX_MAPS, Reason.KERNELS
        )
        self._together: BoundedCache[tuple[object, ...]] = BoundedCache(
            "tensor maps of launches by views, addresses", _MAX_MAPS, Reason.KERNELS
        )

    def of(self, view: View, tensor: torch.Tensor) -> Sequence[object]:
        """The arguments by which a kernel sees ``tensor``."""
        if view.encode is None:
            return (view.descriptor(tensor),)
        key = view, tensor.data_ptr()
        found = self._found.recent.get(key) or self._found.get(key)
        if found is None:
            found = tuple(view.encode(view.descriptor(tensor)))
            self._found.put(key, found)
        return found

    def together(self, views: Views, *tensors: torch.Tensor) -> tuple[object, ...]:
        """The arguments by which a kernel sees what ``views`` make of ``tensors``.

        A training step has the same addresses again and again, and looks them up once a kernel.
        """
        key = (views, *[tensor.data_ptr() for tensor in tensors])
        found = self._together.recent.get(key)
        if found is None and views.each[0].encode is not None:
            found = self._together.get(key)
        if found is None:
            parts = map(self.of, views.each, views.seen(tensors))
            found = tuple(argument for part in parts for argument in part)
            if all(each.encode is not None for each in views.each):
                self._together.put(key, found)
        return found

    def __len__(self) -> int:
        """Number of tensor maps that are kept, one for each view and address."""
        return len(self._found)


def descriptor_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides as the hardware wants them; None if it cannot read ``tensor``."""
    unit = ADDRESS_BYTES // tensor.element_size()
    if tensor.data_ptr() % ADDRESS_BYTES or (tensor.shape[3] > 1 and tensor.stride(3) != 1):
        return None
    steps = []
    for dim in range(3):
        # The stride of a dim of size 1 is never used, but has to be a possible one.
        step = tensor.stride(dim) if tensor.shape[dim] > 1 else unit
        if step <= 0 or step % unit or step * tensor.element_size() >= 1 << 40:
            return None
        steps.append(step)
    return (*steps, 1)
