"""A torch operator for calls of shared rows in graphs of torch.compile.

Documents decide which keys travel, and a graph cannot know that they have changed. So the graph
calls this operator, and what it does follows from the documents of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import ArgumentError

from .attention_module import composed
from .shared_batches import HOMES

if TYPE_CHECKING:
    from attndsl.attention import Attention as Program

    from .shared_batches import SharedRows

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor document, str text, int[] window, float? scale, "
    "int home) -> (Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor[] inputs, Tensor[] results, Tensor?[] grads, Tensor document, str text, int[] window, "
    "float? scale, int home) -> (Tensor, Tensor, Tensor)"
)


def _called(text: str, window: list[int], home: int) -> tuple[Program, SharedRows]:
    rows = HOMES.get(home)
    if rows is None:
        raise ArgumentError(
            "the trainer of this graph is gone, and the graph does not know which rows it has",
            hint="keep the trainer, or compile the model again with another one",
        )
    return composed(text, (window[0], window[1])), rows


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document: torch.Tensor, text: str,
    window: list[int], scale: float | None, home: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    program, rows = _called(text, window, home)
    has_lse = program.lowered.program.weights is None
    out, lse = rows.attend(program, (q, k, v), document, scale, has_lse)
    return out.contiguous(), _no_lse(q) if lse is None else lse.contiguous()


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document: torch.Tensor, text: str,
    window: list[int], scale: float | None, home: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    program, _ = _called(text, window, home)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    if program.lowered.program.weights is not None:
        return out, _no_lse(q)
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_lse_dtype(q))


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    """Empty tensor in place of the log-sum-exp, for weights that are no softmax."""
    return q.new_empty((0,), dtype=_lse_dtype(q))


def _backward(
    inputs: list[torch.Tensor], results: list[torch.Tensor], grads: list[torch.Tensor | None],
    document: torch.Tensor, text: str, window: list[int], scale: float | None, home: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    program, rows = _called(text, window, home)
    (out, lse), (grad_out, grad_lse) = results, grads
    assert grad_out is not None
    found = rows.gradients(program, inputs, (out, lse), (grad_out, grad_lse), document, scale)
    return tuple(x.contiguous() for x in found)


def _fake_backward(
    inputs: list[torch.Tensor], results: list[torch.Tensor], *rest: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.rest = inputs[4:]


def _gradients(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, document, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    found = _call_backward([q, k, v], [out, lse], [grad_out, grad_lse], document, *ctx.rest)
    return *found, *[None] * 5


attend_in_graph = torch.library.custom_op(
    "attndsl::titan_attend", _forward, mutates_args=(), schema=_SCHEMA
)
"""The output (batch, rows, heads, value dim), and the log-sum-exp (batch, heads, rows)."""
_call_backward = torch.library.custom_op(
    "attndsl::titan_attend_backward", _backward, mutates_args=(), schema=_BACKWARD_SCHEMA
)
attend_in_graph.register_fake(_fake)
_call_backward.register_fake(_fake_backward)
attend_in_graph.register_autograd(_gradients, setup_context=_keep)
