"""Launch of the kernel that makes a map of a list of keys."""

from __future__ import annotations

import torch
import triton

from ..device.list_map import attention_list_map
from ..kernels.device import on_device

_ELEMENTS = 1024
"""Elements that a program looks at together."""


def launch_list_map(listed: torch.Tensor, width: int, shift: int) -> torch.Tensor:
    """Bools (..., width): True where a row of ``listed``, ints (..., n), has ``place - shift``.

    Elements whose place is outside mark nothing.
    """
    *leading, number = listed.shape
    found = torch.zeros((*leading, width), dtype=torch.bool, device=listed.device)
    if not listed.numel():
        return found
    rows = listed.reshape(-1, number)
    columns = min(_ELEMENTS, triton.next_power_of_2(number))
    together = _ELEMENTS // columns
    marks, steps = found.view(torch.int8), rows.stride()
    sizes = rows.shape[0], number, width, shift
    with on_device(listed.device):
        grid = (triton.cdiv(rows.shape[0], together),)
        attention_list_map[grid](rows, marks, *steps, *sizes, ROWS=together, COLUMNS=columns)
    return found
