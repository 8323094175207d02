"""Results that what is not finite has spoilt, made again by live pairs alone.

Kernels multiply whole tiles, in which the weight of a dead pair is 0, and 0 * NaN is NaN. Where
tensors bound which keys a row sees (``Program.bounded``), that of one sequence must not reach
another, nor that of rows that belong to none. So behind the kernels of such a call others run, of
the portable family. A program of theirs ends at once if the whole result is finite: a sum of it
tells, or of what the kernels that made it say. It ends too if its own tile is finite. Otherwise the
tile is made again, with zeros for rows that are not finite, and weights of NaN for their live
pairs. Nothing waits for the device, and nothing is copied. See M63 in docs/dev/measured.md.

Scores, log-sum-exps and gradients of captures need no such kernel: they are made pair by pair, and
dead pairs are left out by a choice, not by a product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..kernels.device import on_device, stream_of
from ..memory_order import wide_dtype
from .family import BackwardLaunches, launch_forward

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, CallGradients, Wants
    from ..kernels.launch_spec import LaunchSpec
    from .captures.kind import BackwardState


def repair_results(
    layout: LaunchSpec, lowered: Lowered, call: Call, results: tuple[torch.Tensor, torch.Tensor],
    is_checked: bool,
) -> None:  # fmt: skip
    """Make tiles of output and log-sum-exp again that are not finite.

    Args:
        layout: The task's.
        lowered: The program.
        call: As of the forward.
        results: Those of the forward, which are written to.
        is_checked: Whether the forward was of a family that ``checks_results``.
    """
    check = results[1][1] if is_checked else results[0]
    launch_forward("repair", layout, lowered, call, results, [_sum(check)])


def repair_gradients(
    layout: LaunchSpec, state: BackwardState, wanted: Wants, found: CallGradients
) -> None:
    """Make tiles of the gradients of q, k and v again that are not finite.

    Args:
        layout: The task's.
        state: What the kernels of the backward have left.
        wanted: Which gradients these have made.
        found: The gradients, which are written to.
    """
    call, orders, device = state.call, layout.orders, state.lse.device
    rows = (state.grad_out, state.lse, state.lse, state.delta)
    with on_device(device):
        run = BackwardLaunches(layout, state.lowered, call, rows, stream_of(device))
        if (wanted.k or wanted.v) and call.k.shape[2]:
            # What is not wanted is zeros, which stay as they are.
            kind = wide_dtype(wanted.wide)
            dk = orders.k.empty(call.k, kind).zero_() if found.k is None else found.k
            dv = orders.v.empty(call.v, kind).zero_() if found.v is None else found.v
            steps = [*_rows_apart(dk), *_rows_apart(dv)]
            check = _sum(dk) + _sum(dv) if found.checks is None else _sum(found.checks[1])
            run.launch("repair_kv", [dk, dv], steps, check)
        if found.q is not None:
            check = _sum(found.q if found.checks is None else found.checks[0])
            run.launch("repair_q", [found.q], _rows_apart(found.q), check)


def rows_alone(wanted: Wants) -> Wants:
    """``wanted`` without gradients of captures, as kernels of that task are asked for it."""
    return replace(wanted, tensors=frozenset(), params=frozenset(), features=())


def _sum(result: torch.Tensor) -> torch.Tensor:
    """The sum of all elements, which is finite only if all of them are."""
    return result.sum(dtype=torch.float32)


def _rows_apart(result: torch.Tensor) -> list[int]:
    """Steps of a result by batch entry, head and row, in rows."""
    return [step // result.shape[3] for step in result.stride()[:3]]
