"""Tiled attention in plain torch, for CPUs: memory proportional to the lengths, dead tiles skipped.

What is computed is what :mod:`..dense.reference` defines, in fp32 for half types (fp64 for fp64).

Plain scores are torch's own attention: a single call (:mod:`.sdpa_single`), the squares of a causal
mask (:mod:`.sdpa_causal`), or span by span (:mod:`.sdpa_spans`).

All else goes by steps. A *step* is one tile row of queries for a box of heads; its *spans* are
slices of consecutive keys that cover every tile of that row with a live pair (see
:mod:`.step_plan`). One matrix product serves a whole span of all the heads of a step, so that
Python's and torch's cost a call is spread over many pairs, and the scores of a step at a time are
what fits into a cache.

Determinism: every sum is made in one order that depends on shapes and tile kinds alone.

Non-goals: checked mode, second derivatives (:mod:`attndsl.call.chunked_autograd` has those).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from attndsl.ir import dependencies

from ..base import Backend
from ..dense.reference import check_meaning
from .backward_steps import StepGradients
from .distance_lookups import ON_CPUS, DistanceLookups, evaluated_values
from .forward_steps import StepOutputs
from .sdpa import is_plain, is_plain_backward
from .sdpa_causal import Triangles
from .sdpa_single import single_call
from .step_plan import Plans, limits_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ..base import Backward, Call, CallGradients
    from .step_plan import QueryStep

_UNCHANGED: AbstractContextManager[object] = nullcontext()


def _work_of(part: Node, exact: bool) -> int:
    """Work of an expression for a pair: each operation of torch counts as three instructions."""
    varies = dependencies(part)
    return 3 * sum(bool(x.args) and {"q", "kv"} <= varies[x] for x in varies)


class Strategy(Protocol):
    """A way to make one call. Each method gives None where torch may have spoiled the results."""

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See :meth:`attndsl.backends.base.Backend.forward`."""

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients | None:
        """See :meth:`attndsl.backends.base.Backend.backward`."""


class RowSteps(NamedTuple):
    """Step by step, which makes every call."""

    steps: list[QueryStep]
    plain: bool
    """True if torch's own attention makes the spans whose results it does not spoil."""

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Strategy`."""
        return StepOutputs(lowered, call, self.steps, self.plain).results()

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients:
        """See :class:`Strategy`."""
        return StepGradients(lowered, call, backward, self.steps, self.plain).gradients()


class CPUBackend(Backend):
    """Runs every program wherever torch runs, in memory proportional to the lengths."""

    name = "cpu"
    differentiable = False
    any_length = True

    def __init__(self) -> None:
        self._plans = Plans()
        self._triangles = Triangles()
        self._lookups = DistanceLookups(evaluated_values, _work_of, lambda _, names: names, ON_CPUS)

    def why_not(self, device: torch.device) -> str | None:
        """None: it is made of torch operations, and runs wherever they do."""
        return None

    def check(self, lowered: Lowered, call: Call) -> None:
        """Refuse what has no meaning; see :func:`~..dense.reference.check_meaning`."""
        check_meaning(lowered.program)

    def describe(self, lowered: Lowered, head_dim: int) -> list[str]:
        """A line on what is looked up by distance."""
        return self._lookups.described(lowered)

    def choose(
        self, lowered: Lowered, call: Call, backward: Backward | None = None
    ) -> Iterator[Strategy]:
        """Strategies for a forward, or for a ``backward``, in the order to try them.

        The last one always has a result.
        """
        plain = is_plain(lowered.program, call)
        if backward is None:
            single = single_call(lowered, call) if plain else None
            if single is not None:
                yield single
        else:
            plain = plain and is_plain_backward(backward)
        triangle = self._triangles.of(lowered, call) if plain else None
        if triangle is not None:
            yield triangle
        yield RowSteps(self._plans.of(lowered, call, limits_of(call, plain)), plain)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        with _without_grad(), _without_autocast(call.q.device.type):
            if (found := self._lookups.of(lowered, call)) is not None:
                return self.forward(found.lowered, self._lookups.call(found, call))
            for strategy in self.choose(lowered, call):
                results = strategy.forward(lowered, call)
                if results is not None:
                    return results
        raise AssertionError("the last strategy has results")

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients:
        """See :class:`~attndsl.backends.base.Backend`."""
        with torch.no_grad(), _without_autocast(call.q.device.type):
            lookup = self._lookups.of_backward(lowered, call, backward.wanted)
            if lookup is not None:
                return self._lookups.backward(lookup, call, backward, self.backward)
            for strategy in self.choose(lowered, call, backward):
                found = strategy.backward(lowered, call, backward)
                if found is not None:
                    return found
        raise AssertionError("the last strategy has results")


def _without_grad() -> AbstractContextManager[object]:
    # To turn off what is off takes 3 us.
    return torch.no_grad() if torch.is_grad_enabled() else _UNCHANGED


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    """Autocast would round the products' operands, which are of the dtype to compute in."""
    # To turn off what is not on takes 10 us.
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _UNCHANGED
