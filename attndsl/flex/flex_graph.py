"""Calls within graphs of ``torch.compile``: see :mod:`.dynamo_ops`.

Non-goals: tile maps, which graphs do not take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .compiled_traces import compiled, near
from .dynamo_ops import PairInGraph, allow_views, follow
from .max_scores import find_maxima

if TYPE_CHECKING:
    import torch

    from .tracing import Mod, Trace

_NAME = "attndsl_flex"


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Options of a call in a graph, beside its tensors and functions."""

    scale: float | None
    backend: str
    max_scores: bool


def _attend(
    traced: Trace,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _others: tuple[torch.Tensor, ...],
    *,
    backend: str,
    scale: float | None,
    max_scores: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, the log-sum-exp and the largest scores, empty where they are not asked for."""
    attention = compiled(traced.text, backend)
    named = near(traced.captures, query.device)
    out, lse = attention(query, key, value, scale=scale, return_lse=True, **named)
    if max_scores:
        return out, lse, find_maxima(attention, query, key, scale, named)
    return out, lse, lse.new_empty(0)


OPERATOR = PairInGraph(_NAME, _attend)


def attend_in_graph(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    options: GraphOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The output, the log-sum-exp and the largest scores of a call that Dynamo is following."""
    # Dynamo asks how to follow the operator where it first sees it.
    allow_views(_NAME)
    found = follow(
        OPERATOR, (query, key, value), (), score_mod, mask_mod, options.max_scores,
        backend=options.backend, scale=options.scale, max_scores=options.max_scores,
    )  # fmt: skip
    return found[0], found[1], found[2] if options.max_scores else None
