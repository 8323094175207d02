"""A small call of a program, for looking at its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.ir import SIZES, DType
from attndsl.passes.fold_dots import contracted

from ..base import Call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.pipeline import Lowered


def example_call(
    lowered: Lowered, head_dim: int, value_dim: int, dtype: torch.dtype, captures: Mapping[str, Any]
) -> Call:
    """A small call on the CPU with the program's captures, for looking at its kernels.

    Args:
        lowered: The program.
        head_dim: Head dim of q and k.
        value_dim: Head dim of v.
        dtype: dtype of q, k and v.
        captures: Values of tensors and params; others are made up. Rows of contractions have
            ``dtype`` then.
    """
    sizes = dict.fromkeys((*SIZES, *lowered.program.dim_names()), 2) | {"head_dim": head_dim}
    q, k = (torch.empty(2, 2, 2, head_dim, dtype=dtype) for _ in range(2))
    v = torch.empty(2, 2, 2, value_dim, dtype=dtype)
    kinds = {DType.FLOAT: torch.float32, DType.INT: torch.int32, DType.BOOL: torch.bool}
    numbers = {DType.FLOAT: 1.0, DType.INT: 1, DType.BOOL: True}
    # They stand behind those of q and k where they have their dtype.
    rows = contracted(lowered.program)
    tensors = {
        decl.name: captures.get(
            decl.name,
            torch.zeros(
                (2,) * len(decl.dims), dtype=dtype if decl.name in rows else kinds[decl.dtype]
            ),
        )
        for decl in lowered.program.tensors
    }
    params = {
        decl.name: captures.get(decl.name, numbers[decl.dtype]) for decl in lowered.program.params
    }
    return Call(q, k, v, head_dim**-0.5, sizes, tensors, params)
