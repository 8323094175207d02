"""Checked mode: results and gradients that are not finite, and what made the first of them.

What is looked at is the first row of the output, or the first element of a gradient, that is not
finite. It is traced to an input that was not finite, to one operation of the program at one pair
(:mod:`.nan_origin`), or to a product or sum of the attention itself that overflows. -inf as a score
is a mask and no finding, and so is a log-sum-exp of -inf.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import AttnDSLError, NonFiniteError
from attndsl.ir import Op, const
from attndsl.passes.differentiate import vjp

from ..base import Backward, Wants
from ..log_sum import public_lse
from .adjoints import adjoints
from .interpret import evaluate, gated
from .nan_origin import PairPlace, first_wrong, number, origin_of, scope_at, slope_origin
from .row_blocks import dense_pairs, own_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.ir import Node, Program
    from attndsl.pipeline import Lowered

    from ..base import Call
    from .adjoints import Adjoints
    from .interpret import LeafValues
    from .nan_origin import Origin
    from .row_blocks import Dense

_is_batched = torch._C._functorch.is_batchedtensor
_is_legacy = torch._C._functorch.is_legacy_batchedtensor
_BEFORE = "it was not finite before the call: look at what made it"


def check_results(
    program: Program, call: Call, dense: Dense, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Refuse an output or a log-sum-exp with rows that are not finite.

    Raises:
        NonFiniteError: Says what made the first such row.
    """
    whole = public_lse(lse)
    wrong = ~out.isfinite().all(-1) | whole.isnan() | (whole == torch.inf)
    if not bool(wrong.any()):
        return
    b, h, row = (int(i) for i in wrong.nonzero()[0])
    place = PairPlace(b, h, row)
    key_head = h // max(1, call.q.shape[1] // max(1, call.k.shape[1]))
    _check_values(call, b, key_head, place, dense)
    live = torch.ones_like(dense.score[b, h, row], dtype=torch.bool)
    if dense.live is not None:
        live = dense.live.expand(dense.score.shape)[b, h, row]
    score = dense.score[b, h, row]
    if program.weights is None:
        scores = live & (score.isnan() | (score == torch.inf))
        if bool(scores.any()):
            raise _of_pair(program.score, dense.scope, _at(place, scores), call)
    else:
        weights = live & ~own_weights(program.weights, dense)[b, h, row].isfinite()
        if bool(weights.any()):
            final = replace(dense.scope, score=dense.score)
            raise _of_pair(program.weights, final, _at(place, weights), call, dense.scope, program)
    if program.sink is not None:
        (sink,) = evaluate((program.sink,), scope_at(dense.scope, place))
        if bool(sink.isnan() | (sink == torch.inf)):
            raise _of_pair(program.sink, dense.scope, place, call)
    raise NonFiniteError(
        f"the output overflows {_name(out.dtype)} ({place})",
        hint="values or weights are too large for it: scale them, or use another dtype",
    )


def check_gradient(
    lowered: Lowered, call: Call, dense: Dense, backward: Backward, name: str, grad: torch.Tensor
) -> None:
    """Refuse the gradient ``grad`` of the input ``name``, if it is not finite.

    Args:
        lowered: The program.
        call: Its call, whose results are finite.
        dense: Its pairs.
        backward: The results, and the gradients that came in.
        name: ``q``, ``k``, ``v`` or a capture.
        grad: Its gradient.

    Raises:
        NonFiniteError: Says what made it so.
    """
    at = first_wrong(grad)
    if at is None:
        return
    value = number(grad[at])
    for what, given in (
        ("the gradient of the output", backward.grad_out),
        ("the gradient of the log-sum-exp", backward.grad_lse),
        ("q", call.q), ("k", call.k), ("v", call.v),
    ):  # fmt: skip
        place = None if given is None else first_wrong(given)
        if given is not None and place is not None:
            raise NonFiniteError(
                f"{what} is {number(given[place])} at {list(place)}, so that the gradient of "
                f"'{name}' is {value} at {list(at)}",
                hint=f"{_BEFORE}; rows that are masked out count too, since 0 times nan is nan",
            )
    found = _slope(lowered, dense, adjoints(lowered.program, call, dense, backward))
    if found is not None:
        origin, pair = found
        raise NonFiniteError(
            f"{origin.told} ({pair}), so that the gradient of '{name}' is {value} at {list(at)}",
            origin.item.span,
            origin.hint,
        )
    raise NonFiniteError(
        f"the gradient of '{name}' is {value} at {list(at)}: what it is a sum of is finite, and "
        f"{_name(grad.dtype)} overflows",
        hint="scale the loss, or keep what it is the gradient of in another dtype",
    )


class Watched:
    """A differentiable call in checked mode: each gradient is looked at when torch has it.

    Torch's graph holds it, so that it holds no tensor of that graph.
    """

    def __init__(
        self, lowered: Lowered, call: Call, pointing: Callable[[AttnDSLError], AttnDSLError]
    ) -> None:
        self._lowered = lowered
        self._call = detached(call)
        self._pointing = pointing
        self._results: Backward | None = None

    def inputs(self, call: Call) -> Call:
        """``call`` with inputs whose gradients are looked at."""
        names = ("q", "k", "v")
        q, k, v = (self._input(n, x) for n, x in zip(names, (call.q, call.k, call.v), strict=True))
        return call._replace(
            q=q,
            k=k,
            v=v,
            tensors={n: self._input(n, x) for n, x in call.tensors.items()},
            params={
                n: self._input(n, x) if isinstance(x, torch.Tensor) else x
                for n, x in call.params.items()
            },
        )

    def results(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` and ``lse``, whose gradients are kept for those of the inputs."""
        both: tuple[torch.Tensor, torch.Tensor] = _WatchedResults.apply(self, out, lse)  # type: ignore[no-untyped-call]
        return both

    def keep(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
    ) -> None:
        """The gradients of the results, which come before those of the inputs."""
        given = torch.zeros_like(out) if grad_out is None else _alone(grad_out)
        self._results = Backward(
            out, lse, given, None if grad_lse is None else _alone(grad_lse)[0], Wants()
        )

    def _input(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if not value.requires_grad:
            return value
        found = value.view_as(value)
        found.register_hook(lambda grad: self._look(name, grad))  # type: ignore[no-untyped-call]
        return found

    def _look(self, name: str, grad: torch.Tensor) -> None:
        # Gradients of many directions at once show no values.
        if _is_batched(grad) or _is_legacy(grad) or bool(grad.isfinite().all()):
            return
        assert self._results is not None
        lowered, call = self._lowered, self._call
        with torch.no_grad():
            dense = dense_pairs(lowered.program, call)
            try:
                check_gradient(lowered, call, dense, self._results, name, grad.detach())
            except AttnDSLError as error:
                raise self._pointing(error) from None


def _alone(x: torch.Tensor) -> torch.Tensor:
    # Those of many directions at once cannot be detached, and need not be.
    return x.detach() if x.requires_grad else x


def detached(call: Call) -> Call:
    """``call`` of tensors that know no graph."""

    def one(x: Any) -> Any:
        return x.detach() if isinstance(x, torch.Tensor) else x

    return call._replace(
        q=one(call.q),
        k=one(call.k),
        v=one(call.v),
        tensors={name: one(x) for name, x in call.tensors.items()},
        params={name: one(x) for name, x in call.params.items()},
    )


class _WatchedResults(torch.autograd.Function):
    """Both results as they are; tells their gradients to whoever watches."""

    @staticmethod
    def forward(
        ctx: Any, watched: Watched, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.watched = watched
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        out, lse = (x.detach() for x in ctx.saved_tensors)
        ctx.watched.keep(out, lse, grad_out, grad_lse)
        return None, grad_out, grad_lse


def _slope(lowered: Lowered, dense: Dense, found: Adjoints) -> tuple[Origin, PairPlace] | None:
    """The operation whose derivative is not finite, and where; None where there is none."""
    program, derivative = lowered.program, lowered.derivative
    factors = [derivative.score, *(g.factor for g in derivative.tensors)]
    factors += [g.factor for g in derivative.params]
    factors += [g.factor for g in derivative.products]
    for root, seed, scope, slopes in (
        (program.sink, found.sink, dense.scope, _slopes(program.sink)),
        (program.weights, found.own, found.final, _slopes(program.weights)),
        (program.dropout, found.dropout, dense.scope, _slopes(program.dropout)),
        (program.score, found.score, dense.scope, factors),
    ):
        if root is None or seed is None:
            continue
        for slope in slopes:
            (factor,) = evaluate((slope,), scope)
            at = first_wrong(gated(seed, seed * factor))
            if at is None:
                continue
            b, h, row, key = at
            place = PairPlace(b, h, row, key if seed.shape[3] > 1 else None)
            one = scope_at(scope, place)
            index = tuple(min(i, size - 1) for i, size in zip(at, seed.shape, strict=True))
            origin = slope_origin(root, one, seed[index])
            if origin is not None:
                return origin, place
    return None


def _slopes(root: Node | None) -> list[Node]:
    return [] if root is None else list(vjp(root, const(1.0)).values())


def _of_pair(
    root: Node,
    scope: LeafValues,
    place: PairPlace,
    call: Call,
    raw: LeafValues | None = None,
    program: Program | None = None,
) -> NonFiniteError:
    """The error of a value of ``root`` that is not finite at a pair.

    ``raw`` and ``program`` are those whose final score is the score of ``scope``.
    """
    origin = origin_of(root, scope_at(scope, place))
    if origin.item.op is Op.SCORE and raw is not None and program is not None:
        origin = origin_of(program.score, scope_at(raw, place))
    if origin.item.op is Op.SCORE:
        return _of_raw(call, place)
    return NonFiniteError(f"{origin.told} ({place})", origin.item.span, origin.hint)


def _of_raw(call: Call, place: PairPlace) -> NonFiniteError:
    """The error of a raw score that is not finite."""
    key_head = place.h // max(1, call.q.shape[1] // max(1, call.k.shape[1]))
    assert place.key is not None
    for name, rows, at in (
        ("q", call.q, (place.b, place.h, place.row)),
        ("k", call.k, (place.b, key_head, place.key)),
    ):
        dim = first_wrong(rows[at])
        if dim is not None:
            value = number(rows[at][dim])
            return NonFiniteError(f"{name} is {value} at {[*at, *dim]} ({place})", hint=_BEFORE)
    return NonFiniteError(
        f"the raw score, scale * (q . k), overflows {_name(call.q.dtype)} ({place})",
        hint="q and k are too large for it: normalise them, or use another dtype",
    )


def _check_values(call: Call, b: int, key_head: int, place: PairPlace, dense: Dense) -> None:
    """Refuse values that are not finite, of any key."""
    at = first_wrong(call.v[b, key_head])
    if at is None:
        return
    key, dim = at
    hint = _BEFORE
    live = dense.live
    if live is not None and not bool(live.expand(dense.score.shape)[b, place.h, place.row, key]):
        hint = (
            "that key is masked out, and 0 times nan is nan all the same: fill such rows of v "
            "with zeros"
        )
    value = number(call.v[b, key_head, key, dim])
    raise NonFiniteError(f"v is {value} at {[b, key_head, key, dim]} ({place})", hint=hint)


def _at(row: PairPlace, wrong: torch.Tensor) -> PairPlace:
    return replace(row, key=int(wrong.nonzero()[0]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
