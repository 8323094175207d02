"""Which kernels make which gradients of captured tensors and params, beside the Hopper backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..gradients.shares import share_out
from .distances import with_summed
from .stored import with_stored

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants
    from ..gradients.shares import Shares


def shares_of(lowered: Lowered, call: Call, wants: Wants) -> Shares:
    """As ``share_out``, where the backward adds up diagonals and stores dS for what needs them."""
    found = with_stored(share_out(lowered, call, wants), lowered, call)
    return with_summed(found, lowered, call)
