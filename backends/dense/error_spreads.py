"""The errors that rounding may leave in each element of a call's results and gradients.

A *spread* is the root of the sum of squares of the errors that single roundings make in an element,
to first order. By N. J. Higham and T. Mary, A new approach to probabilistic rounding error
analysis, SIAM Journal on Scientific Computing 41 (2019), A2815, the error of n independent
roundings of mean 0 is within a small multiple of that. N times a rounding's size is the bound of
the worst case alone (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition,
section 3.1). What is squared is what is added up: P * V in a row of the output, dS * K in one of
dQ. So each row is held to its own size.

Counted are the roundings of eager attention, which no backend has more of, and one more:

- Raw scores, weights P, dW = dO V^T and dS are rounded to the call's dtype. A number too small for
  it is off by half of the least one that it has (Higham, section 2.1).
- Sums of n products have an error of sqrt(n) units of fp32, in whatever order they are taken.
- delta = rowsum(dO * O) is that of a rounded O (FlashAttention-2, arXiv 2307.08691, section 3.1).
  All pairs of a row share its error, whose square is therefore weighted by P in place of P squared:
  by Jensen's inequality no sum over the row's pairs has a larger one.
- What the program makes of a raw score errs as it does in the working dtype, and as it changes
  where the raw score is off by its rounding. A pair that this masks or revives may be there or not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import SCORE, Op, const, node
from attndsl.passes.differentiate import vjp

from ..base import Backward, matmul_precision
from ..log_sum import public_lse
from .adjoints import adjoints
from .interpret import evaluate
from .reference import GradientSums
from .row_blocks import attend_pairs, dense_pairs, group, own_weights, ungroup, where_live

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ..base import Call
    from .interpret import LeafValues
    from .row_blocks import Dense

_PAIRS_AT_ONCE = 1 << 20
"""Pairs that are looked at together, with some thirty values for each."""
_OPERANDS = {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}
"""Roundings of operands, by how torch multiplies matrices of fp32: none, to TF32, to bf16."""
_SHIFTS = (-2.0, 2.0)
"""Shifts of raw scores, in units of the scores' own errors, that show what depends on them."""


@dataclass(frozen=True, slots=True)
class _Precision:
    """Sizes of roundings."""

    stored: float
    """To the dtype of a call, relative."""
    least: float
    """To that dtype, of a number that is too small for it."""
    work: float
    """In sums, relative."""
    operand: float
    """In each number that is multiplied, relative; 0 where products take all that is stored."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> _Precision:
        stored = torch.finfo(dtype)
        work = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32)
        operand = _OPERANDS[matmul_precision()] if dtype is torch.float32 else 0.0
        least = stored.smallest_normal * stored.eps / 2
        return cls(max(stored.eps / 2, operand), least, work.eps / 2, operand)

    def of_product(self, terms: int) -> float:
        """Square of the error of a sum of products, relative to the sum of their squares."""
        return self.work**2 * terms + 2 * self.operand**2

    def square(self, terms: int) -> float:
        """The square of the relative error of a stored value that is a sum of so many terms."""
        return self.stored**2 + self.work**2 * max(1, terms)

    def stored_square(self, value: torch.Tensor, terms: int = 1) -> torch.Tensor:
        """The square of the error of ``value``, if it is stored and not 0."""
        square = self.square(terms) * value.square() + self.least**2
        return torch.where(value == 0, 0.0, square)


def spreads(
    lowered: Lowered, call: Call, dtype: torch.dtype, results: Backward | None = None
) -> dict[str, torch.Tensor]:
    """The spread of each element of a call's results, but for the rounding of the result itself.

    Args:
        lowered: The program, as backends get it.
        call: Its call, as backends get it, in fp64.
        dtype: In which it is to run.
        results: Gradients of the results in fp64, and which others are wanted; ``out`` and ``lse``
            are not read. None where there is no backward.

    Returns:
        fp64, by name: ``out``, ``lse`` and, with a backward, ``dq``, ``dk``, ``dv``, and ``d`` and
        the name of each tensor and param that is wanted. Infinite where the results are.
    """
    batch, heads, q_len, _ = call.q.shape
    step = max(1, _PAIRS_AT_ONCE // max(1, batch * heads * call.k.shape[2]))
    rows: dict[str, list[torch.Tensor]] = {"out": [], "lse": [], "dq": []}
    sums: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for first in range(0, max(1, q_len), step):
            pairs = _Pairs(lowered, call, dtype, slice(first, first + step))
            found = {"out": pairs.out_spread(), "lse": pairs.lse_spread}
            if results is not None:
                found |= _GradientErrors(pairs, results).spreads()
            for name, value in found.items():
                if name in rows:
                    rows[name].append(value)
                else:
                    sums[name] = torch.hypot(sums.get(name, value.new_zeros(())), value)
        found = {name: torch.cat(parts, 2) for name, parts in rows.items() if parts} | sums
        return {name: torch.nan_to_num(x, torch.inf, torch.inf) for name, x in found.items()}


def _rows_of(call: Call, rows: slice) -> Call:
    """The call of some rows of q."""
    if call.q_index is not None:
        return call._replace(q=call.q[:, :, rows], q_index=call.q_index[rows])
    return call._replace(q=call.q[:, :, rows], q_offset=call.q_offset + rows.start)


class _Pairs:
    """All pairs of some rows of q, and squares of the errors of their scores and weights."""

    def __init__(self, lowered: Lowered, whole: Call, dtype: torch.dtype, rows: slice) -> None:
        batch, heads, q_len, _ = whole.q.shape
        kv_heads, kv_len = whole.k.shape[1:3]
        self.rows, self.pairs_of_call = rows, batch * heads * q_len * kv_len
        self.terms = max(kv_len, q_len * (heads // max(1, kv_heads)))
        """The length of the longest sum of a result's element, but for those of captures."""
        self.lowered, self.program = lowered, lowered.program
        self.call = call = _rows_of(whole, rows)
        self.precision = _Precision.of(dtype)
        self.dense = dense_pairs(self.program, call, rows.start)
        self.out, self.log_sum = attend_pairs(self.program, call, self.dense)
        self.lse = public_lse(self.log_sum)
        score = self.dense.score
        self.slopes = evaluate((lowered.derivative.score,), self.dense.scope)[0]
        self.slope_change = torch.zeros_like(self.slopes)
        """Squares of the changes of the score's derivative that rounding may make."""
        root = self.program.weights
        if root is not None:
            self.weights = own_weights(root, self.dense)
        else:
            denominator = torch.where(self.lse == -torch.inf, torch.inf, self.lse).unsqueeze(-1)
            self.weights = torch.exp(score - denominator)
        self.score_square = self._usual_square(dtype)
        changes = torch.zeros_like(score)
        raw, error = self.dense.scope.score, self._raw_error()
        for factor in _SHIFTS:
            other = self._moved(raw + factor * error)
            square = _square_of_difference(other.score, score)
            self.score_square = torch.maximum(self.score_square, square)
            if root is not None:
                change = (own_weights(root, other) - self.weights).square()
            else:
                flips = (other.score == -torch.inf) != (score == -torch.inf)
                change = torch.exp(torch.maximum(other.score, score) - denominator).square()
                change = torch.where(flips, change, 0.0)
            changes = torch.maximum(changes, change)
            (slopes,) = evaluate((lowered.derivative.score,), other.scope)
            change = torch.nan_to_num((slopes - self.slopes).square(), torch.inf)
            self.slope_change = torch.maximum(self.slope_change, change)
        self.lse_spread = self._lse_spread(changes)
        square = changes + self.precision.stored_square(self.weights, self.terms)
        if root is not None:
            square = square + self.slope_of_weights().square() * self.score_square
        else:
            square = square + self.weights.square() * self.score_square
        self.weight_square = square

    def _raw_error(self) -> torch.Tensor:
        call, raw = self.call, self.dense.scope.score
        sums = ungroup(group(call.q.square(), call) @ call.k.square().mT, call) * call.scale**2
        square = self.precision.of_product(call.q.shape[3]) * sums
        return (square + self.precision.stored_square(raw)).sqrt()

    def _moved(self, raw: torch.Tensor) -> Dense:
        """The pairs with other raw scores."""
        scope, live = replace(self.dense.scope, score=raw), None
        if self.program.mask is not None:
            (live,) = evaluate((self.program.mask,), scope)
        (score,) = evaluate((self.program.score,), scope)
        score = where_live(live, score, -torch.inf).expand(raw.shape)
        return replace(self.dense, scope=scope, live=live, score=score)

    def _usual_square(self, dtype: torch.dtype) -> torch.Tensor:
        """Squares of the errors that final scores have in the working dtype, 0 at dead pairs."""
        call, score = self.call, self.dense.score
        small = call._replace(q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype))
        square = _square_of_difference(
            dense_pairs(self.program, small, self.rows.start).score, score
        )
        live = score.isfinite()
        # The error of one pair may be small by chance.
        square = square + square.sum(-1, True) / live.sum(-1, True).clamp(min=1)
        square = square + (4 * self.precision.work) ** 2 * score.square()
        return torch.where(live, square, 0.0)

    def _lse_spread(self, changes: torch.Tensor) -> torch.Tensor:
        """The spread of the log-sum-exp, which kernels hold as a maximum and a sum's logarithm."""
        lse, score = self.lse, self.dense.score
        if self.program.weights is not None or not score.shape[-1]:
            return torch.zeros_like(lse)
        square = (self.weights.square() * self.score_square + changes).sum(-1)
        size = torch.where(score.isfinite(), score.abs(), 0.0).amax(-1) + lse.abs() + 1
        work = self.precision.work * (8 + score.shape[-1] ** 0.5)
        return torch.where(lse == -torch.inf, 0.0, square.sqrt() + work * size)

    def slope_of_weights(self) -> torch.Tensor:
        """Derivatives of the program's own weights by the score."""
        assert self.program.weights is not None
        slopes = vjp(self.program.weights, const(1.0))
        scope = replace(self.dense.scope, score=self.dense.score)
        (slope,) = evaluate((slopes.get(SCORE, const(0.0)),), scope)
        return where_live(self.dense.live, slope, 0.0).expand(self.dense.score.shape)

    def kept(self, squares: torch.Tensor) -> torch.Tensor:
        """``squares`` of weights, of those that dropout keeps."""
        return squares if self.dense.keep is None else squares * self.dense.keep.square()

    def out_spread(self) -> torch.Tensor:
        """The spread of the output."""
        squares = group(self.kept(self.weight_square), self.call) @ self.call.v.square()
        return ungroup(squares, self.call).sqrt() + self.lse_spread.unsqueeze(-1) * self.out.abs()


class _GradientErrors:
    """Squares of the errors of the gradients of scores, and of the program's other values."""

    def __init__(self, pairs: _Pairs, results: Backward) -> None:
        call, dense, precision = pairs.call, pairs.dense, pairs.precision
        grad_out = results.grad_out[:, :, pairs.rows]
        grad_lse = None if results.grad_lse is None else results.grad_lse[:, :, pairs.rows]
        results = Backward(pairs.out, pairs.log_sum, grad_out, grad_lse, results.wanted)
        self.pairs, self.results = pairs, results
        self.found = found = adjoints(pairs.program, call, dense, results)
        rows = group(grad_out, call)
        d_kept = ungroup(rows @ call.v.mT, call)
        sums = ungroup(rows.square() @ call.v.square().mT, call)
        square = precision.stored_square(d_kept) + precision.of_product(call.v.shape[3]) * sums
        d_square = pairs.kept(square)
        d_weights = d_kept if dense.keep is None else d_kept * dense.keep
        self.sink: torch.Tensor | None = None
        self.own = where_live(dense.live, d_square, 0.0)
        rounding = precision.square(pairs.terms)
        if pairs.program.weights is None:
            delta, delta_square = self._delta(d_weights)
            weights, relative = pairs.weights, pairs.lse_spread.square().unsqueeze(-1) + rounding
            square = (pairs.weight_square + relative * weights.square()) * (d_weights - delta) ** 2
            square = square + weights.square() * d_square + weights * delta_square
            if found.sink is not None:
                share = torch.where(delta == 0, 0.0, found.sink / delta).square()
                self.sink = share * (relative * delta.square() + delta_square)
        else:
            relative = pairs.score_square + rounding
            slope = pairs.slope_of_weights().square()
            square = slope * (d_square + relative * d_weights.square())
        self.score = where_live(dense.live, square, 0.0)
        self.dropout: torch.Tensor | None = None
        if found.dropout is not None:
            square = pairs.weights.square() * d_square + pairs.weight_square * d_weights.square()
            self.dropout = pairs.kept(square)

    def _delta(self, d_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """rowsum(dO * O) less the gradient of the lse, and the square of its error."""
        pairs, grad_lse = self.pairs, self.results.grad_lse
        products = self.results.grad_out * pairs.out
        delta = products.sum(-1)
        square = pairs.precision.square(products.shape[-1]) * products.square().sum(-1)
        square = square + (pairs.weight_square * d_weights.square()).sum(-1)
        square = square + (pairs.lse_spread * delta).square()
        if grad_lse is not None:
            delta = delta - grad_lse
            square = square + (pairs.precision.work * grad_lse).square()
        return delta.unsqueeze(-1), square.unsqueeze(-1)

    def spreads(self) -> dict[str, torch.Tensor]:
        """The spreads of all gradients, by name."""
        pairs, call = self.pairs, self.pairs.call
        raw = group(self._raw_square(), call)
        kept = group(pairs.kept(pairs.weight_square), call)
        return {
            "dq": ungroup(raw @ call.k.square(), call).sqrt(),
            "dk": (raw.mT @ group(call.q, call).square()).sqrt(),
            "dv": (kept.mT @ group(self.results.grad_out, call).square()).sqrt(),
            **self._of_captures(),
        }

    def _raw_square(self) -> torch.Tensor:
        """Squares of errors of the raw scores' gradients."""
        pairs, score = self.pairs, self.found.score
        square = _times(self.score, pairs.slopes.square())
        square = square + _times(score.square(), pairs.slope_change)
        stored = pairs.precision.stored_square(_times(score, pairs.slopes), pairs.terms)
        return (square + stored) * pairs.call.scale**2

    def _of_captures(self) -> dict[str, torch.Tensor]:
        """Spreads of the gradients of captured tensors and params, which are sums in fp32."""
        pairs, program, found = self.pairs, self.pairs.program, self.found
        sums = _SquareSums(pairs.call, self.results.wanted, torch.float64)
        terms = pairs.precision.work**2 * pairs.pairs_of_call
        for root, value, square, scope in (
            (program.score, found.score, self.score, pairs.dense.scope),
            (program.sink, found.sink, self.sink, pairs.dense.scope),
            (program.weights, found.own, self.own, found.final),
            (program.dropout, found.dropout, self.dropout, pairs.dense.scope),
        ):
            if root is not None and value is not None and square is not None:
                sums.add_root(root, square + terms * value.square(), scope)
        named = {**sums.tensors, **sums.params}
        return {f"d{name}": total.sqrt() for name, total in named.items()}


class _SquareSums(GradientSums):
    """Squares of errors of gradients: they add up as gradients do, with squares of all factors."""

    def add_leaf(self, leaf: Node, factor: Node, seed: torch.Tensor, scope: LeafValues) -> None:
        super().add_leaf(leaf, node(Op.MUL, factor, factor), seed, scope)

    @staticmethod
    def rows_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.square()


def _times(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Their product, but 0 where ``value`` is: a zero gradient stays zero."""
    return torch.where(value == 0, 0.0, value * factor)


def _square_of_difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    both = one.isfinite() & other.isfinite()
    return torch.where(both, one.to(other.dtype) - other, 0.0).square()
