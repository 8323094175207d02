"""The largest score of each row of a traced program's call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.call.bind import bind
from attndsl.call.compile_graphs import maxima_in_graph
from attndsl.call.options import CallOptions
from attndsl.call.row_max import row_maxima
from attndsl.call.torch_ops_impl import OperatorCall

from .compiled_traces import spec_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.attention import Attention


def find_maxima(
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float | None,
    captures: Mapping[str, Any],
) -> torch.Tensor:
    """Largest score of the live pairs of each row, -inf where there is none.

    Args:
        attention: The program.
        query: (B, Hq, Lq, D).
        key: (B, Hkv, Lk, D).
        scale: Factor of the raw score; 1 / sqrt(D) by default.
        captures: The program's tensors and params.

    Returns:
        (B, Hq, Lq), fp32 (fp64 for fp64).
    """
    given = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in captures.items()}
    query, key, lowered = query.detach(), key.detach(), attention.lowered
    call = bind(lowered.program, (query, key, key), given, options=CallOptions(scale))
    if torch.compiler.is_compiling():
        request = OperatorCall(spec_of(attention.text), attention.backend, False)
        return maxima_in_graph(request, call, scale)
    return row_maxima(lowered, call)
