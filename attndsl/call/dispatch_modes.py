"""Calls while a dispatch mode is on: selective checkpointing, counters of operations, tracers.

Such a mode sees operators alone. A kernel launched past torch would be nothing to it, and a backend
made of torch operations a crowd of small ones, so calls then go by way of the operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Backend

from .autograd import modes_on
from .chunked_autograd import is_transformed
from .op_encoding import packed
from .torch_ops import tell_counters
from .torch_ops_impl import operands, through_operator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Backward, Call, CallGradients, Form
    from attndsl.backends.dense.vjp import Tensors
    from attndsl.pipeline import Lowered

    from .torch_ops_impl import OperatorCall


def seen_by_modes(backend: Backend, request: OperatorCall, call: Call) -> Backend:
    """``backend``, by way of the operators where a mode is on that they are to be shown to.

    Args:
        backend: What runs.
        request: The program.
        call: The call, before it was put into the program's terms.
    """
    if modes_on() == 0 or is_transformed():
        return backend
    tell_counters()
    return ThroughOperators(backend, request, call)


class ThroughOperators(Backend):
    """A backend by way of ``attndsl::forward`` and ``attndsl::backward``."""

    differentiable = False
    """Torch does not look into an operator."""
    has_events = True
    """True: the operators record the events."""

    def __init__(self, backend: Backend, request: OperatorCall, call: Call) -> None:
        """See :func:`seen_by_modes`."""
        self.name = backend.name
        self._backend = backend
        self._request = request
        # The operators take a part as it was given; its positions are copies, since what changes
        # in place before the backward must not change what that computes.
        self._part: tuple[Form, Tensors] | None = None
        if call.part is not None:
            form, tensors = call.flatten()
            positions = tensors[len(tensors) - len(form.positions) :]
            self._part = form, tuple(x.clone() for x in positions)

    def why_not(self, device: torch.device) -> str | None:
        """See :class:`~attndsl.backends.base.Backend`."""
        return self._backend.why_not(device)

    def check(self, lowered: Lowered, call: Call) -> None:
        """See :class:`~attndsl.backends.base.Backend`."""
        self._backend.check(lowered, call)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        with torch.no_grad():  # Derivatives are those of the call, not of the operator.
            call = self._given(call)
            found: tuple[torch.Tensor, torch.Tensor] = torch.ops.attndsl.forward(
                *packed(operands(self._request, call, call.scale))
            )
        return found

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients:
        """See :class:`~attndsl.backends.base.Backend`."""
        call = self._given(call)
        with torch.no_grad():
            return through_operator(operands(self._request, call, call.scale), call, backward)

    def _given(self, call: Call) -> Call:
        """``call`` as it was before a part was put into its program's terms."""
        if self._part is None:
            return call
        form, positions = self._part
        found: Mapping[str, Any] = {**call.tensors, **call.params}
        captures = (found[name] for name in form.captures)
        given = form.call((call.q, call.k, call.v, *captures, *positions))
        return given._replace(scale=call.scale, seed=call.seed, wide=call.wide)
