"""One call of a program of :mod:`.sdpa_programs`, eager or in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Call
from attndsl.backends.memory_order import rows_contiguous
from attndsl.call.distributed_checks import is_dtensor
from attndsl.call.dropout_seed import draw_seed, seed_argument

from .dtensor_sdpa import attend_shards
from .sdpa_programs import program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sdpa_programs import CaptureForm

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class MaskCapture:
    """A captured tensor, and what it is to the program."""

    form: CaptureForm
    tensor: torch.Tensor


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    reach: str,
    captures: Sequence[MaskCapture] = (),
    dropout_p: float = 0.0,
    scale: float | None = None,
    drawn: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of checked operands.

    Args:
        q: (B, Hq, Lq, D).
        k: (B, Hkv, Lk, D); Hq is a multiple of Hkv.
        v: (B, Hkv, Lk, Dv).
        reach: Which keys a query may see; a key of :data:`.sdpa_programs.REACH`.
        captures: Masks and biases.
        dropout_p: Probability with which a weight is dropped.
        scale: Factor of q . k; 1 / sqrt(D) by default.
        drawn: Seed of dropout, of :func:`~attndsl.call.dropout_seed.draw_seed`; drawn here by
            default.

    Returns:
        (B, Hq, Lq, Dv) in q's dtype.
    """
    key = tuple([capture.form.key for capture in captures])
    in_graph = torch.compiler.is_compiling() or type(q) not in _PLAIN
    tensors = {capture.form.name: capture.tensor for capture in captures}
    if in_graph and is_dtensor(q):
        if torch.compiler.is_compiling():
            from .sdpa_graph import attend_shards_apart

            apart: torch.Tensor = attend_shards_apart(
                (q, k, v), reach, key, tensors, dropout_p, scale
            )
            return apart
        return attend_shards((q, k, v), reach, key, tensors, dropout_p, scale)
    # A number that a graph leaves open makes an open condition, which chooses no program.
    dropout = True if dropout_p > 0 else False  # noqa: SIM210
    if not dropout:
        drawn = None
    elif drawn is None:
        drawn = draw_seed(q.device)
    if in_graph:
        # They import torch.compile, which eager calls never need.
        from attndsl.call.compile_graphs import attend_in_graph
        from attndsl.call.torch_ops_impl import OperatorCall

        from .sdpa_graph import program_spec

        call = Call(
            rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), 0.0, {}, tensors,
            {"dropout_p": float(dropout_p)} if dropout else {},
            seed=0 if drawn is None else drawn,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        request = OperatorCall(program_spec(reach, key, dropout), "auto", False)
        return attend_in_graph(request, call, scale)[0]
    attention = program(reach, key, dropout)
    arguments: dict[str, Any] = dict(tensors)
    if drawn is not None:
        arguments |= {"seed": seed_argument(drawn), "dropout_p": dropout_p}
    out: torch.Tensor = attention(q, k, v, scale=scale, **arguments)
    return out
