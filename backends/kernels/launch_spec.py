"""Layout that all calls of one signature share: kernels that are ready, sizes and strides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..gradients.row_col_sums import Lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ..emit.facts import KernelFacts
    from ..memory_order import ResultOrders
    from .compile import Executable
    from .kernel import Family
    from .tile_lists import ListKernels

NO_LINES = Lines()


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Executables, strides, sizes and tile lists that all calls of one signature share."""

    family: Family
    facts: KernelFacts
    executables: Mapping[str, Executable]
    """By name of the kernel."""
    strides: tuple[int, ...]
    """Batch, head and row strides of q, k and v."""
    orders: ResultOrders
    """Memory orders of the results."""
    sizes: tuple[int, ...]
    """batch, heads, kv_heads, q_len, kv_len."""
    lists: Mapping[str, ListKernels]
    """The kernels that list the tiles, for each kernel whose tiles are listed."""
    heads_per_wave: Mapping[str, int]
    """Heads whose tiles run side by side, for each kernel whose programs take a tile of one."""
    work_tiles: Mapping[str, int]
    """Number of the call's work tiles, for the same kernels."""
    rows: torch.Tensor
    """(2, batch, heads, q_len) fp32, one element of memory. Room for log-sum-exps is made like it,
    in half the time that sizes and a dtype take (M29), but in bound calls: see
    :mod:`.bound_calls`."""
    lines: Lines = NO_LINES
    """Terms that the kernels of a backward add up along rows and columns."""
    grad_strides: tuple[int, ...] = ()
    """Batch, head and row strides of the output's gradient, in a backward."""
    part_tiles: int = 0
    """Query tiles that a program takes, where those that share keys are parted so."""
