"""Errors for calls with arguments of such types that they could not even be looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .argument_checks import autocast, check_operands
from .distributed_checks import is_dtensor
from .resolve import bound

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .attention_base import Compiled


def refuse_call(
    attention: Compiled,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    given: Mapping[str, Any],
) -> None:
    """Raise an error about the first wrong argument of a call, if there is one.

    A call asks for the attributes of its tensors and looks up its options. Where that fails, its
    arguments are looked at one by one, so that usual calls need not be.

    Args:
        attention: What was called.
        operands: q, k and v.
        given: Captures and options.

    Raises:
        AttnDSLError: Names the argument and describes its value.
    """
    q, k, v = map(autocast, operands)
    if is_dtensor(q):
        return
    check_operands(q, k, v)
    bound(attention, (q, k, v), given, attention._captures_of(given))
