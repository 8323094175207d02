"""Calls that evaluate a part of the score once for each distance, and look it up for each pair.

A backend makes the values first, in fp32, and then runs another program, which has them as a
captured tensor (:mod:`attndsl.passes.look_up_distance`). The gradient of that tensor is what the
part's own captures get theirs from: torch adds it up, on one number for each distance.

Non-goals: tangents, second derivatives, calls over pages, and positions that are looked up. All of
these evaluate the part for each pair.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.ir import SCORE
from attndsl.passes.look_up_distance import MARGIN, distance_lookup
from attndsl.passes.print_ir import print_expression
from attndsl.pipeline import MADE, lower_program

from ..base import Wants
from .capture_gradients import CaptureSums
from .step_plan import QueryStep
from .tile_expressions import Expressions

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.passes.look_up_distance import DistanceLookup
    from attndsl.pipeline import Lowered

    from ..base import Backward, Call, CallGradients
    from .tile_expressions import Tile

LEAST_PAIRS = 16
"""Pairs of a head for each distance."""
LEAST_WORK = 10
"""Instructions a pair that a lookup has to save, as :mod:`..kernels.cost_model` counts them. Those
of KERPLE save 13, a third of its backward kernel's (docs/dev/kernels.md), those of a quotient 2."""


class LeastSavings(NamedTuple):
    """Work that a lookup has to save, of all pairs and of a pair of a backward."""

    of_call: float
    """Operations of all pairs."""
    of_gradients: int
    """Instructions a pair of a backward, which sums the gradients of all values by distance."""


ON_CPUS = LeastSavings(1e8, LEAST_WORK)
ON_GPUS = LeastSavings(1e9, 20)
"""An H200 takes 90 us for so many operations, and the host of a call with a lookup as long. With
KERPLE's logarithm, which saves 13, backwards take longer: see M73 in docs/dev/measured.md."""


class DistanceLookups:
    """The lookups of a backend's programs.

    ``make_values`` makes values as :func:`empty_values` has room, and ``work_of`` returns the work
    of an expression for a pair, exact or not. For ``summed`` see :class:`DistanceLookup`.
    """

    def __init__(
        self,
        make_values: Callable[[DistanceLookup, Call], torch.Tensor],
        work_of: Callable[..., int],
        summed: Callable[[Lowered, frozenset[str]], frozenset[str]],
        least: LeastSavings,
    ) -> None:
        self._make_values, self._work_of, self._summed = make_values, work_of, summed
        self._least = least

    def of(self, lowered: Lowered, call: Call) -> DistanceLookup | None:
        """The lookup that pays for ``call``, or None."""
        program, q = lowered.program, call.q
        if program.score is SCORE or call.indexed or program.products:
            return None
        (batch, heads, q_len, _), kv_len = q.shape, call.k.shape[2]
        pairs = batch * heads * q_len * kv_len
        if not pairs or pairs < LEAST_PAIRS * batch * heads * (q_len + kv_len):
            return None
        found = self._lookup_of(lowered)
        return None if found is None or not self._pays(found, pairs) else found

    def _pays(self, found: DistanceLookup, pairs: int) -> bool:
        return found.saved * pairs >= self._least.of_call

    def of_backward(self, lowered: Lowered, call: Call, wanted: Wants) -> DistanceLookup | None:
        """The lookup that pays for a backward of ``call``, or None.

        Gradients that are sums along rows come with that of q. They would become sums by distance.
        """
        found = self.of(lowered, call)
        if found is None or found.saved < self._least.of_gradients:
            return None
        learned = found.learned & (wanted.tensors | wanted.params)
        return None if learned and learned.isdisjoint(found.summed) else found

    def call(self, found: DistanceLookup, call: Call, made: bool = True) -> Call:
        """The call of the program that looks up; if not ``made``, with but room for the values."""
        program = found.lowered.program
        make_values = self._make_values if made else empty_values
        values = make_values(found, call_of_values(call))
        tensors = {**call.tensors, found.tensor: values}
        start = call.k.shape[2] + MARGIN + call.kv_offset - call.q_offset
        params = {**call.params, found.start: start}
        # A call of another program has another signature.
        return call._replace(
            tensors={decl.name: tensors[decl.name] for decl in program.tensors},
            params={decl.name: params[decl.name] for decl in program.params},
            signature=None,
        )

    def backward(
        self, found: DistanceLookup, call: Call, backward: Backward, run: Callable[..., Any]
    ) -> CallGradients:
        """Gradients of the whole program by ``run``, a backend's method, of that which looks up."""
        wanted = backward.wanted
        own = backward._replace(wanted=wants_of_lookup(found, wanted))
        made: CallGradients = run(found.lowered, self.call(found, call), own)
        if names := found.learned & (wanted.tensors | wanted.params):
            tensors = names.intersection(call.tensors)
            sums = CaptureSums(call, Wants(tensors=tensors, params=names - tensors))
            seed = made.tensors[found.tensor].reshape(*box_of(found, call), -1, 1)
            sums.add(sums.of_score(found.values.derivative), seed, _tile_of(found, call))
            made = made.plus(sums.tensors(), sums.params())
        of_whole = {name: x for name, x in made.tensors.items() if name != found.tensor}
        return made._replace(tensors=of_whole)

    def described(self, lowered: Lowered) -> list[str]:
        """A line on the part that is looked up by distance, and in which calls, if there is one."""
        if lowered.program.score is SCORE or (found := self._lookup_of(lowered)) is None:
            return []
        part, pairs = print_expression(found.values.program.score), self._least.of_call
        where = "" if found.saved >= self._least.of_gradients else ", in forwards alone"
        return [
            f"  by distance from {pairs / found.saved / 1e6:.1f} million pairs of all heads on, "
            f"evaluated once for each distance and looked up{where}: {part}"
        ]

    def _lookup_of(self, lowered: Lowered) -> DistanceLookup | None:
        key = (self._work_of, lowered.digest, lowered.program.exact)
        made: tuple[DistanceLookup | None] = MADE.get_or_make(key, partial(self._made, lowered))
        return made[0]

    def _made(self, lowered: Lowered) -> tuple[DistanceLookup | None]:
        work_of = partial(self._work_of, exact=lowered.program.exact)
        found = distance_lookup(lowered.program, lower_program, work_of, LEAST_WORK)
        summed = frozenset[str]() if found is None else self._summed(lowered, found.learned)
        return (found and replace(found, summed=summed),)


def call_of_values(call: Call) -> Call:
    """``call`` for the program of the values, which draws nothing."""
    return call._replace(signature=None, draws=None, room=None, tiles=None)


def empty_values(found: DistanceLookup, call: Call) -> torch.Tensor:
    """Room for values by distance, fp32 (fp64 for fp64), of the dims that the lookup declares.

    Index 0 is the distance ``q_offset - kv_offset - kv_len - MARGIN``; each next is one more.
    """
    number = call.q.shape[2] + call.k.shape[2] + 2 * MARGIN
    shape = (*(call.q.shape["bh".index(name)] for name in found.along), number)
    dtype = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    return torch.empty(shape, dtype=dtype, device=call.q.device)


def evaluated_values(found: DistanceLookup, call: Call) -> torch.Tensor:
    """The values by distance, by operations of torch."""
    room = empty_values(found, call)
    (values,) = _tile_of(found, call).evaluate(found.values.program.score)
    room.copy_(values.reshape(room.shape))
    return room


def box_of(found: DistanceLookup, call: Call) -> tuple[int, int]:
    """Numbers of batch entries and heads that values by distance tell apart."""
    batch, heads = call.q.shape[:2]
    return batch if "b" in found.along else 1, heads if "h" in found.along else 1


def _tile_of(found: DistanceLookup, call: Call) -> Tile:
    """The distances of the values of ``call``."""
    first = -call.k.shape[2] - MARGIN
    return tile_of_distances(call, box_of(found, call), first, call.q.shape[2] + MARGIN - first)


def tile_of_distances(call: Call, box: tuple[int, int], first: int, number: int) -> Tile:
    """A tile as if each distance were a query, and its key the position 0.

    ``box`` has numbers of batch entries and heads, ``first`` is a row of ``call`` less one of keys.
    """
    batch, heads = box
    rows = torch.arange(first, first + number, device=call.q.device)
    as_queries = call._replace(
        q=call.q.new_empty((batch, heads, number, 1)),
        k=call.k.new_empty((batch, min(heads, call.k.shape[1]), 1, 1)),
        q_offset=0, kv_offset=0, q_index=rows + call.q_offset - call.kv_offset,
    )  # fmt: skip
    step = QueryStep((0, batch), (0, heads), (0, number), ())
    expressions = Expressions(as_queries)
    return expressions.tile(step, (0, 1), expressions.nothing)


def wants_of_lookup(found: DistanceLookup, wanted: Wants) -> Wants:
    """Gradients to ask the program that looks up for, of what is wanted of the whole."""
    program = found.lowered.program
    tensors = wanted.tensors & {decl.name for decl in program.tensors}
    if not found.learned.isdisjoint(wanted.tensors | wanted.params):
        tensors |= {found.tensor}
    names = {decl.name for decl in program.params}
    return replace(wanted, tensors=tensors, params=wanted.params & names)
