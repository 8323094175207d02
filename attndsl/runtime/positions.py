"""Positions that are tensors, apart from their call: what a backward reads again.

``save_for_backward`` keeps them, so that torch notices where one is changed before the backward.
A seed is none of them: a call has a copy of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.backends.base import Call
    from attndsl.backends.dense.pulled import Tensors

FIELDS = ("q_offset", "kv_offset", "q_index", "kv_index")
"""Fields of a call that may hold them."""


def without_positions(call: Call) -> tuple[Call, tuple[str, ...], Tensors]:
    """``call`` without its positions that are tensors, the fields that held them, and these."""
    if (
        call.q_index is None and call.kv_index is None
        and type(call.q_offset) is int and type(call.kv_offset) is int
    ):  # fmt: skip
        return call, (), ()
    names = tuple(name for name in FIELDS if isinstance(getattr(call, name), torch.Tensor))
    found = tuple(getattr(call, name) for name in names)
    plain = {name: None if name.endswith("index") else 0 for name in names}
    return replace(call, **plain), names, found  # type: ignore[arg-type]


def with_positions(call: Call, names: tuple[str, ...], found: Sequence[torch.Tensor]) -> Call:
    """What :func:`without_positions` took apart."""
    return replace(call, **dict(zip(names, found, strict=True))) if names else call  # type: ignore[arg-type]
