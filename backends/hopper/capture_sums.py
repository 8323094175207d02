"""Gradients of what a score's parts mention, from sums over whole heads, rows and columns.

Of ``inner * (scale * q . k)`` a kernel need not add up the derivative by ``inner`` pair by pair:
sum(slope * scale * q . k) is scale * sum(K * dK), with dK before the scale, which it has anyway.
What is added to a column gets the column's sum of the score's gradient. What is added to a row gets
none but from the log-sum-exp and the sink, since a softmax does not change with it (unless the
results are of more keys than the call has, see ``Wants.partial``). All sums are in a fixed order.

Non-goals: what stands inside a function of the score, or varies with the distance from the query
(:mod:`.features.diagonals`); the portable kernels add that up pair by pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from attndsl.ir import Op, const, dependencies, leaf_names, node, substitute, toposort
from attndsl.passes.differentiate import vjp
from attndsl.passes.split_score import AWAY

from ..log_sum import log_sum
from ..tiled.capture_gradients import CaptureSums
from ..tiled.step_plan import QueryStep
from ..tiled.tile_expressions import Expressions
from .tile_shapes import block_width

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.passes.split_score import Placed
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants
    from ..emit.facts import KernelFacts

_TINY = 2.0**-64
"""Stand-in for a factor of 0 in slopes: else the factor's derivative would vanish with them."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The parts of a score that mention something whose gradient is wanted."""

    factor: bool = False
    column: bool = False
    row: bool = False


class Statistics(NamedTuple):
    """Statistics of rows and columns, from a backward."""

    lse: torch.Tensor
    """See :mod:`..log_sum`."""
    delta: torch.Tensor
    """(batch, heads, q_len or more) fp32, rowsum(dO * O) - dlse."""
    dlse: torch.Tensor | None
    """(batch, heads, q_len), the gradient of lse, if there is one."""
    factors: torch.Tensor | None
    """(batch, heads, parts) fp32, sums of K * dK before the scale, if factors learn."""
    columns: torch.Tensor | None
    """(batch, heads, kv_len) fp32, columns' sums of dS, if columns learn."""


def learned_parts(lowered: Lowered, names: frozenset[str]) -> Learned | str:
    """Parts of the score that mention ``names``, or why no sums give their gradients.

    Args:
        lowered: The program.
        names: Tensors and params.
    """
    placed = lowered.placed
    if names & leaf_names(placed.pair):
        return "gradients inside a function of the score are summed pair by pair"
    found = Learned(
        *(bool(names & leaf_names(part)) for part in (placed.inner, placed.column, placed.row))
    )
    if found.factor and lowered.program.bounded:
        # Keys that no pair is live of may be NaN, and K * dK has all keys.
        return "gradients of a factor are summed pair by pair if the mask bounds the keys"
    if found.factor and slope_for_factor(placed) is None:
        return "the score's derivative does not contain the whole factor"
    if found.column:
        assert placed.column is not None
        if not dependencies(placed.slope)[placed.slope] <= {"b", "h"}:
            return "gradients of terms per key are summed pair by pair with a function of the score"
        factors = vjp(placed.column, const(1.0))
        wanted = [factor for leaf, factor in factors.items() if str(leaf.value) in names]
        if AWAY in toposort(*wanted):
            return "gradients that vary with distance are summed pair by pair"
    return found


def learned_in_kernel(lowered: Lowered, facts: KernelFacts) -> Learned:
    """The parts that a backward kernel makes sums for; none in other kernels."""
    found = learned_parts(lowered, frozenset((*facts.tensor_gradients, *facts.param_gradients)))
    assert isinstance(found, Learned)
    return found


def holds_score_gradient(lowered: Lowered, call: Call) -> bool:
    """Return True if the backward's dS in shared memory, used for dQ, is that of final scores.

    If the score has a derivative, the kernel multiplies it in before. In fp16 small gradients are
    zeros. With wide heads another kernel runs.
    """
    program = lowered.program
    if program.weights is not None or program.dropout is not None:
        return False
    if lowered.placed.slope is not const(1.0):
        return False
    if call.q.dtype is not torch.bfloat16:
        return False
    return max(block_width(call.q.shape[3]), block_width(call.v.shape[3])) <= 128


def slope_for_factor(placed: Placed) -> Node | None:
    """The score's derivative with a factor of 0 as one that is tiny; None where it has none."""
    inner = placed.inner
    assert inner is not None
    if inner.op is Op.DIV and inner.args[0] is const(1.0):
        return placed.slope
    if inner not in toposort(placed.slope):
        return None
    is_zero = node(Op.EQ, inner, const(0.0))
    return substitute(placed.slope, {inner: node(Op.WHERE, is_zero, const(_TINY), inner)})


def gradients_of_parts(
    lowered: Lowered, call: Call, learned: Learned, wants: Wants, statistics: Statistics
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of tensors and of params, by name.

    Args:
        lowered: The program.
        call: As of the backward.
        learned: Of ``wants``.
        wants: Tensors and params that :func:`learned_parts` has no objection to.
        statistics: What the backward has made.
    """
    lse, delta, dlse, factors, columns = statistics
    sums, expressions, placed = CaptureSums(call, wants), Expressions(call), lowered.placed
    _, batch, heads, q_len = lse.shape
    nothing = delta[:, :, :1, None]
    head = QueryStep((0, batch), (0, heads), (0, 1), ())
    if factors is not None:
        assert placed.inner is not None
        tile = expressions.tile(head, (0, 1), nothing)
        (inner,) = tile.evaluate(placed.inner)
        inner = torch.where(inner == 0, _TINY, inner.double())
        total = factors.sum(2, dtype=torch.float64)[:, :, None, None]
        sums.add(sums.of(placed.inner), total * call.scale / inner, tile)
    if columns is not None:
        tile = expressions.tile(head, (0, call.k.shape[2]), nothing)
        sums.add(sums.of(placed.column), columns[:, :, None, :], tile)
    sink = lowered.program.sink
    if learned.row and (dlse is not None or sink is not None):
        tile = expressions.tile(QueryStep((0, batch), (0, heads), (0, q_len), ()), (0, 1), nothing)
        rows = torch.zeros_like(lse[0]) if dlse is None else dlse.to(lse.dtype)
        if sink is not None:
            (logit,) = tile.evaluate(sink)
            rows = rows + torch.exp(log_sum(lse).taken_off(logit)[..., 0]) * delta[..., :q_len]
        rows = torch.where(lse[0] == -torch.inf, 0.0, rows)
        sums.add(sums.of(placed.row), rows[..., None], tile)
    return sums.tensors(), sums.params()
