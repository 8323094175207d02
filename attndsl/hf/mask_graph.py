"""Attentions whose mask is made within the same graph of ``torch.compile``.

Dynamo follows the mask's function, and its graph is traced into a program where the operator below
is run (:mod:`attndsl.flex.dynamo_ops`), which is joined with the rest of the composed program
there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from attndsl.flex.dynamo_ops import PairInGraph, allow_views, follow

from .model_programs import MASK_PREFIX, composed

if TYPE_CHECKING:
    from attndsl.flex.tracing import Trace

    from .attention_calls import ModelCall
    from .mask_programs import Mask

_NAME = "attndsl_hf"
_NUMBERS = (bool, int, float)
Given = tuple[tuple[str, ...], tuple[tuple[str, Any], ...], tuple[str, ...]]
"""Names of the call's other tensors, its numbers by name, and which of both say where it lies."""


def _attend(
    traced: Trace,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: tuple[torch.Tensor, ...],
    *,
    implementation: tuple[str, str],
    scale: float | None,
    given: Given,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output; transformers wants no other results."""
    known: Any = AttentionInterface()  # type: ignore[no-untyped-call]
    adapter = known[implementation[0]].__self__
    tensors, numbers, located = given
    captures = {**dict(numbers), **dict(zip(tensors, others, strict=True))}
    location = {name: captures.pop(name) for name in located}
    captures |= {f"{MASK_PREFIX}{name}": tensor for name, tensor in traced.captures.items()}
    attention = composed(adapter.own, traced.text)
    out = attention(query, key, value, scale=scale, captures=captures, **location)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    return out, lse, lse.new_empty(0)


OPERATOR = PairInGraph(_NAME, _attend)


def attend_in_graph(implementation: tuple[str, str], mask: Mask, call: ModelCall) -> torch.Tensor:
    """(batch, heads, length, dim).

    Args:
        implementation: The name under which transformers knows the adapter, and its meaning.
        mask: With a function.
        call: With all captures but those of the mask's function.
    """
    allow_views(_NAME)
    given = {**call.captures, **call.location}
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    numbers = tuple((name, x) for name, x in given.items() if isinstance(x, _NUMBERS))
    found = follow(
        OPERATOR, (call.query, call.key, call.value), tuple(tensors.values()), None, mask.function,
        False, implementation=implementation, scale=call.scale,
        given=(tuple(tensors), numbers, tuple(call.location)),
    )  # fmt: skip
    return found[0]
