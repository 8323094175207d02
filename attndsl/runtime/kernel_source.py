"""The text of generated kernels, for people to read."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import torch

from attndsl.backends.base import UNWRITTEN, Wants
from attndsl.backends.engine.families import GENERATED, why_not_loaded
from attndsl.backends.tiled.contractions import Wide, why_tiles
from attndsl.call.argument_checks import check_rows, learned, some_captures
from attndsl.call.dispatch import get_backend
from attndsl.errors import ArgumentError, BackendError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Scalar, Written
    from attndsl.pipeline import Lowered

_DIRECTIONS = ("forward", "backward", "tangent")


def check_head_dims(*dims: object) -> None:
    """Refuse a value that is no head dim.

    Raises:
        ArgumentError: One of ``dims`` is no positive int.
    """
    for dim in dims:
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
            raise ArgumentError(f"{dim!r} is no head dim", hint="pass a positive int, such as 64")


def device_of(name: str | torch.device) -> torch.device:
    """The device that a user names.

    Raises:
        ArgumentError: There is none of that name.
    """
    try:
        return torch.device(name)
    except (RuntimeError, TypeError, ValueError):
        raise ArgumentError(
            f"there is no device {name!r}", hint="use 'cpu', 'cuda' or 'cuda:0'"
        ) from None


def source_of(
    lowered: Lowered,
    backend: str,
    direction: str,
    head_dim: int,
    value_dim: int | None,
    dtype: torch.dtype,
    captures: Mapping[str, torch.Tensor | Scalar],
    written: Written = UNWRITTEN,
) -> str:
    """Text of the kernels that ``backend`` has for calls of this kind; needs no GPU.

    Args:
        lowered: The program.
        backend: One of :data:`~attndsl.backends.engine.families.GENERATED`.
        direction: ``forward``, ``backward`` or ``tangent``: along q, k, v and, in portable kernels,
            captures that require gradients; Hopper's makes the results too.
        head_dim: Head dim of q and k.
        value_dim: Head dim of v; ``head_dim`` for None.
        dtype: dtype of q, k and v.
        captures: Values of tensors and params; others are made up.
        written: The program as the text shows it.

    Raises:
        ArgumentError: There is no such direction, or ``backend`` has no generated kernels.
        ShapeError, DTypeError, ArgumentError: Captures that no call takes.
        UnsupportedError: Its kernels cannot run such calls.
        BackendError: They cannot be loaded here.
    """
    if direction not in _DIRECTIONS:
        raise ArgumentError(
            f"there is no direction {direction!r}", hint=f"use {', '.join(map(repr, _DIRECTIONS))}"
        )
    if value_dim is None:
        value_dim = head_dim
    check_head_dims(head_dim, value_dim)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype is {dtype!r}", hint="pass one of torch's, as torch.bfloat16")
    captures = some_captures(lowered.program, captures, head_dim)
    if backend not in GENERATED:
        close = difflib.get_close_matches(str(backend), GENERATED, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"use one of {', '.join(GENERATED)}"
        raise ArgumentError(f"no kernels are generated for backend {backend!r}", hint=hint)
    from attndsl.backends.kernels.example import example_call

    call = example_call(lowered, head_dim, value_dim, dtype, captures)
    check_rows(lowered.program, call.tensors)
    if lowered.contractions is not None:
        if direction == "tangent":
            raise UnsupportedError(
                "no kernel is generated for tangents of programs with contractions",
                hint="they are torch operations, some rows of queries at a time",
            )
        refused = why_tiles(lowered, call)
        if refused is not None:
            raise UnsupportedError(
                f"no kernels are generated for this program: {refused}",
                hint="calls of it run as torch operations, tile by tile",
            )
        lowered, call = (wide := Wide(lowered, call)).lowered, wide.call
    wants = Wants(tensors=learned(call.tensors), params=learned(call.params))
    missing = why_not_loaded(backend)
    if missing is not None:
        raise BackendError(
            f"the {backend.capitalize()} kernels cannot be loaded: {missing}",
            hint="use backend='triton' for the text of the portable kernels",
        )
    chosen = get_backend(backend)
    chosen.check(lowered, call)
    return chosen.source(lowered, call, direction, wants, written)
