"""Tangents of calls by kernels, where a backend has one for them.

A call and its tangents are functions like any other of :mod:`.checkpointing`: kernels on plain
tensors, and torch operations (:mod:`.chunked_autograd`) wherever somebody looks into them, as
further derivatives, ``vmap`` and tracers do. Where tangents are known before the results
(:mod:`.fused_jvp`), a backend may have one kernel for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.autograd import forward_ad

from attndsl.backends.base import ForwardMode, as_fused
from attndsl.backends.log_sum import public_lse

from .checkpointing import Pushed, recomputed
from .chunked_autograd import attend_in_chunks, flattened, tangent_in_chunks, tangents_at
from .fused_jvp import Ahead, tangents_of

if TYPE_CHECKING:
    from attndsl.backends.base import Backend, Call, Form
    from attndsl.backends.dense.vjp import Tensors
    from attndsl.pipeline import Lowered

    from .checkpointing import Function

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_modes = torch._C._len_torch_dispatch_stack


def has_tangents() -> bool:
    """Return True if forward mode is on, by dual tensors or ``torch.func.jvp``."""
    return forward_ad._current_level >= 0


def attend_with_tangents(
    backend: Backend, lowered: Lowered, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``attend_in_chunks``, or the kernels of a ``backend`` that has tangents."""
    if not isinstance(backend, ForwardMode):
        return attend_in_chunks(lowered, call)
    form, tensors = flattened(call)
    ahead = None
    if as_fused(backend) is not None and _modes() == 0:
        ahead = Ahead(tangents_of(tensors))
    out, lse = recomputed(_Whole(backend, lowered, form, ahead), *tensors)
    return out, public_lse(lse)


@dataclass(frozen=True, slots=True)
class _Whole:
    """``out`` and ``lse`` of a call."""

    pushes_results: ClassVar[bool] = True
    backend: Backend
    lowered: Lowered
    form: Form
    ahead: Ahead | None = None

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        call = self.form.call(inputs)
        if _is_seen(inputs):
            return _as_of_kernels(attend_in_chunks(self.lowered, call))
        if self.ahead is not None:
            found = self.ahead.results(self.backend, self.lowered, self.form, inputs)
            if found is not None:
                return found
        return self.backend.forward(self.lowered, call)

    def pushed(self, moved: tuple[int, ...]) -> Function:
        return _WholeTangent(self, moved)


@dataclass(frozen=True, slots=True)
class _WholeTangent:
    """Tangents of a call's results, from its inputs and results."""

    pushes_results: ClassVar[bool] = False
    whole: _Whole
    moved: tuple[int, ...]

    def __call__(self, *args: torch.Tensor) -> Tensors:
        whole, count = self.whole, len(args) - len(self.moved)
        *inputs, out, lse = args[:count]
        tangents = args[count:]
        if _is_seen(args):
            # In terms of the inputs alone: further derivatives by the results are 0.
            return _as_of_kernels(
                tangent_in_chunks(whole.lowered, whole.form, tuple(inputs), self.moved, tangents)
            )
        if whole.ahead is not None:
            found = whole.ahead.tangents(tuple(inputs), self.moved, tangents)
            if found is not None:
                return found
        moved = tangents_at(whole.form, self.moved, tangents)
        call = whole.form.call(inputs)
        assert isinstance(whole.backend, ForwardMode)
        return whole.backend.tangent(whole.lowered, call, moved, out, lse)

    def pushed(self, moved: tuple[int, ...]) -> Function:
        return Pushed(self, moved)


def _as_of_kernels(found: tuple[torch.Tensor, torch.Tensor]) -> Tensors:
    """Results of torch operations with the log-sum-exp in two parts."""
    out, lse = found
    return out, torch.stack((lse, torch.zeros_like(lse)))


def _is_seen(inputs: Tensors) -> bool:
    """Return True if a transform or a dispatch mode looks into operations on ``inputs``."""
    return _modes() > 0 or any(map(_is_wrapped, inputs))
