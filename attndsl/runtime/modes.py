"""Calls while a dispatch mode is on: selective checkpointing, counters of operations, tracers.

Such a mode sees operators alone. A kernel launched past torch would be nothing to it, and a backend
made of torch operations a crowd of small ones, so calls then go by way of the operators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Gradients
from attndsl.operators import tell_counters

from .higher import is_transformed
from .operator import operands
from .positions import FIELDS

if TYPE_CHECKING:
    from attndsl.backends.base import Backend, Call, Wants
    from attndsl.pipeline import Lowered

modes_on = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are on."""


def seen_by_modes(backend: Backend, spec: str, asked: str, checked: bool, call: Call) -> Backend:
    """``backend``, by way of the operators where a mode is on that they are to be shown to.

    Args:
        backend: What runs.
        spec: The program.
        asked: The backend asked for.
        checked: Whether to run in checked mode.
        call: The call, before it was put into the program's terms.
    """
    if modes_on() == 0 or is_transformed():
        return backend
    tell_counters()
    return ThroughOperators(backend, spec, asked, checked, call)


class ThroughOperators:
    """A backend by way of ``attndsl::forward`` and ``attndsl::backward``."""

    differentiable = False
    """Torch does not look into an operator."""

    def __init__(self, backend: Backend, spec: str, asked: str, checked: bool, call: Call) -> None:
        """As of :func:`seen_by_modes`."""
        self.name = backend.name
        self._backend = backend
        self._program = spec, asked, checked
        # The operators take a part as it was given.
        self._part = None if call.part is None else _without_operands(call)

    def why_not(self, device: torch.device) -> str | None:
        """See :class:`~attndsl.backends.base.Backend`."""
        return self._backend.why_not(device)

    def check(self, lowered: Lowered, call: Call) -> None:
        """See :class:`~attndsl.backends.base.Backend`."""
        self._backend.check(lowered, call)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        with torch.no_grad():  # Derivatives are those of the call, not of the operator.
            found: tuple[torch.Tensor, torch.Tensor] = torch.ops.attndsl.forward(*self._args(call))
        return found

    def backward(
        self,
        lowered: Lowered,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        wants: Wants,
    ) -> Gradients:
        """See :class:`~attndsl.backends.base.Backend`."""
        call = self._given(call)
        given = [name for name, x in call.params.items() if isinstance(x, torch.Tensor)]
        asked = [wants.q, wants.k, wants.v, *(name in wants.tensors for name in call.tensors)]
        asked += [name in wants.params for name in given]
        with torch.no_grad():
            parts = torch.ops.attndsl.backward(
                out, lse, grad_out, grad_lse, asked, wants.wide, wants.partial, *self._args(call)
            )
        q, k, v, *rest = (x if want else None for x, want in zip(parts, asked, strict=True))
        found = {n: x for n, x in zip((*call.tensors, *given), rest, strict=True) if x is not None}
        return Gradients(
            q,
            k,
            v,
            {n: x for n, x in found.items() if n in call.tensors},
            {n: x for n, x in found.items() if n in call.params},
        )

    def _given(self, call: Call) -> Call:
        """``call`` as it was before a part was put into its program's terms."""
        part = self._part
        if part is None:
            return call
        return replace(
            part, q=call.q, k=call.k, v=call.v, scale=call.scale, seed=call.seed, wide=call.wide,
            tensors={name: call.tensors[name] for name in part.tensors},
            params={name: call.params[name] for name in part.params},
        )  # fmt: skip

    def _args(self, call: Call) -> tuple[object, ...]:
        call = self._given(call)
        drawn = call.seed if isinstance(call.seed, torch.Tensor) else None
        return operands(*self._program, call, call.scale, drawn)


def _without_operands(call: Call) -> Call:
    """A part's ``call`` without what a backward gets again; its positions are copies.

    What changes in place before the backward must not change what that computes.
    """
    part = call.part
    assert part is not None
    lengths = part.kv_lengths
    copies: dict[str, Any] = {
        name: value.clone()
        for name in FIELDS
        if isinstance(value := getattr(call, name), torch.Tensor)
    }
    nothing = torch.empty(0)
    return replace(
        call,
        q=nothing,
        k=nothing,
        v=nothing,
        tensors=dict.fromkeys(call.tensors, nothing),
        params=dict.fromkeys(call.params, 0),
        part=replace(part, kv_lengths=None if lengths is None else lengths.clone()),
        **copies,
    )
