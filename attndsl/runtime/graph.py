"""Calls in graphs of ``torch.compile`` and ``torch.export``, and on tensors without data.

Apart from eager calls, since it needs parts of torch that take seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx.experimental import symbolic_shapes

from attndsl.errors import UnsupportedError

from .distributed import refuse_context_parallel
from .higher import is_transformed
from .operator import operands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.backends.base import Call


def attend_in_graph(
    spec: str,
    backend: str,
    checked: bool,
    call: Call,
    scale: float | None,
    drawn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` through the operator.

    Args:
        spec: The program.
        backend: The backend asked for.
        checked: Whether to run in checked mode.
        call: The checked call; its own scale is not used.
        scale: Factor of q . k, or None for the default.
        drawn: A seed that replaces the call's.

    Raises:
        UnsupportedError: A transform of ``torch.func`` in a graph, or torch's ``context_parallel``.
    """
    refuse_context_parallel()
    if torch.compiler.is_dynamo_compiling() and _is_transformed_now():
        # The operator would drop tangents without a word.
        raise UnsupportedError(
            "graphs of torch.compile have no tangents and no torch.func transforms of a call",
            hint="take the transform outside of torch.compile",
        )
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.attndsl.forward(
        *operands(spec, backend, checked, call, scale, drawn, _varying)
    )
    return found


def maxima_in_graph(spec: str, backend: str, call: Call, scale: float | None) -> torch.Tensor:
    """The largest score of each row through an operator; not differentiable.

    Args:
        spec: The program.
        backend: The backend asked for.
        call: The checked call, of tensors that need no gradient; its own scale is not used.
        scale: Factor of q . k, or None for the default.

    Returns:
        (B, Hq, Lq), fp32 (fp64 for fp64).
    """
    given = operands(spec, backend, False, call, scale, None, _varying)
    found: torch.Tensor = torch.ops.attndsl.row_maxima(*given)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_transformed_now() -> bool:
    """Dynamo enters transforms as it goes."""
    return is_transformed()


def _varying(numbers: Sequence[float]) -> torch.Tensor | None:
    """``numbers`` (n,) in fp64 on the CPU, or None where the graph has them all as constants.

    An operator's ``float`` is a constant of the graph, so that another number compiles another
    graph; what is made of tensors is not. Constants stay numbers: a tensor of the CPU keeps torch
    from using CUDA graphs.
    """
    if all(map(symbolic_shapes.has_static_value, numbers)):
        return None
    # torch.compile turns sums with open numbers into sums of tensors; not so torch.tensor.
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.stack([zero + number for number in numbers])
