"""Arguments of Hopper kernels: their types for the compiler, and descriptors for a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.arguments import capture_types, template_argument
from ..triton.compile import Argument

if TYPE_CHECKING:
    import torch

    from ..triton.specialise import Specialisation
    from ..triton.tiles import Config

_BYTES = 16
"""Addresses and strides that the tensor memory accelerator takes are multiples of this."""
ROWS_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
"""Of rows of q, k, v and the output in shared memory."""


def block_width(head_dim: int) -> int:
    """Columns of a tile that holds rows of ``head_dim`` elements; the rest is zeros."""
    return max(64, 1 << (head_dim - 1).bit_length())


def forward_blocks(special: Specialisation, config: Config) -> dict[str, tuple[int, int]]:
    """Rows and columns of the block of each descriptor."""
    d, dv = block_width(special.head_dim), block_width(special.value_dim)
    rows = config.block_m // config.consumers
    return {
        "q_desc": (rows, d),
        "k_desc": (config.block_n, d),
        "v_desc": (config.block_n, dv),
        "o_desc": (rows, dv),
    }


def forward_arguments(function: Any, special: Specialisation, config: Config) -> list[Argument]:
    """Types of all arguments of ``attention_forward``, by their names."""
    blocks = forward_blocks(special, config)
    constants: dict[str, int | str | None] = {
        "D": block_width(special.head_dim),
        "DV": block_width(special.value_dim),
        "Q_KIND": special.q_kind,
        "KV_KIND": special.kv_kind,
    } | dict.fromkeys(("BLOCK_M", "BLOCK_N", "STAGES", "CONSUMERS", "REGISTERS"))
    captures = capture_types(special)
    found = []
    for name in function.arg_names:
        if name in constants:
            found.append(Argument(name, "constexpr", constants[name]))
        elif name in blocks:
            rows, columns = blocks[name]
            kind = f"tensordesc<{special.dtype}[1, 1, {rows}, {columns}],{ROWS_LAYOUT!r}>"
            found.append(Argument(name, kind))
        else:
            found.append(captures.get(name) or template_argument(name, special))
    return found


def descriptor(
    tensor: torch.Tensor, steps: tuple[int, ...], block: tuple[int, int]
) -> TensorDescriptor:
    """Of ``tensor`` (batch, heads, length, head dim), for blocks of one head's rows.

    Args:
        tensor: What to describe.
        steps: Its strides, from :func:`descriptor_strides`.
        block: Rows and columns.
    """
    return TensorDescriptor(tensor, list(tensor.shape), list(steps), [1, 1, *block], ROWS_LAYOUT)


def descriptor_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides as the hardware wants them; None if it cannot read ``tensor``."""
    unit = _BYTES // tensor.element_size()
    if tensor.data_ptr() % _BYTES or (tensor.shape[3] > 1 and tensor.stride(3) != 1):
        return None
    steps = []
    for dim in range(3):
        # The stride of a dim of size 1 is never used, but has to be a possible one.
        step = tensor.stride(dim) if tensor.shape[dim] > 1 else unit
        if step <= 0 or step % unit or step * tensor.element_size() >= 1 << 40:
            return None
        steps.append(step)
    return (*steps, 1)
