"""Results and tangents of a call made by one kernel in forward mode.

Torch asks a function for its results first, and then for their tangents. In forward mode the inputs
carry their tangents from the beginning, so one kernel makes both. The tangents are kept until torch
asks for them with the very same tensors; for other tensors they are computed as usual.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from attndsl.backends.base import as_fused

from .chunked_autograd import tangents_at

if TYPE_CHECKING:
    from attndsl.backends.base import Backend, Form
    from attndsl.backends.dense.vjp import Tensors
    from attndsl.pipeline import Lowered

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_differentiated = torch._C._functorch.is_gradtrackingtensor
_unwrapped = torch._C._functorch.get_unwrapped


def tangents_of(inputs: Tensors) -> dict[int, torch.Tensor]:
    """Tangents of ``inputs`` by place, each of the innermost level that has one.

    Empty where there is none, or one transform is within another, as with ``vmap`` of tangents.
    """
    found = {}
    for place, each in enumerate(inputs):
        if _is_wrapped(_plain(each)):
            return {}
        if each.is_floating_point():
            moved = forward_ad.unpack_dual(each).tangent  # type: ignore[no-untyped-call]
            if moved is not None:
                found[place] = _plain(moved)
    return {} if any(map(_is_wrapped, found.values())) else found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without what a ``jvp`` (or ``grad``) has put around it."""
    return _unwrapped(tensor) if _is_differentiated(tensor) else tensor


@dataclass(slots=True, eq=False)
class Ahead:
    """Tangents of one call, known before its results; they and those of results are used once."""

    known: dict[int, torch.Tensor]
    """See :func:`tangents_of`."""
    _kept: Tensors = field(default=())
    """Inputs and tangents that ``_found`` was made of: kept, so that no others take their
    memory."""
    _asked: tuple[object, ...] = field(default=())
    """Places of the inputs that have tangents, and the key of each tensor in ``_kept``."""
    _found: Tensors | None = field(default=None)

    def results(
        self, backend: Backend, lowered: Lowered, form: Form, inputs: Tensors
    ) -> Tensors | None:
        """``out`` and ``lse`` of plain ``inputs``; None where tangents cannot come with them."""
        known, self.known = self.known, {}
        fused = as_fused(backend)
        if not known or fused is None:
            return None
        places, tangents = tuple(known), tuple(known.values())
        found = fused.forward_with_tangents(
            lowered, form.call(inputs), tangents_at(form, places, tangents)
        )
        if found is None:
            return None
        out, lse, *moved = found
        self._kept, self._found = (*inputs, *tangents), tuple(moved)
        self._asked = places, *map(_elements, self._kept)
        return out, lse

    def tangents(
        self, inputs: Tensors, places: tuple[int, ...], tangents: Tensors
    ) -> Tensors | None:
        """The results' tangents along those of the inputs at ``places``, if they are known."""
        if self._found is None or self._asked != (places, *map(_elements, (*inputs, *tangents))):
            return None
        found, self._found, self._kept = self._found, None, ()
        return found


def _elements(tensor: torch.Tensor) -> tuple[object, ...]:
    """Address, dtype, shape, strides and version, which tell a tensor's elements from others."""
    # Tensors made in inference mode count no versions.
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version
