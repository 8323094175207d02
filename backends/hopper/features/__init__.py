"""Features that a Hopper kernel may have beside its loop: their table, one module each.

Each says when kernels have it, and what they have for it: constants, device code, arguments, shared
memory, and the gradients of captures that come of it. Device code lies in ``templates/``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .bias import BIAS
from .diagonals import DIAGONALS
from .dropout import DROPOUT
from .ordered_dq import TURNS
from .persistence import PERSISTENCE
from .row_max import BOUNDED, FIXED_MAX, HALVES
from .stored_ds import STORED_DS
from .sums import CHECKS, COLUMN_SUMS, FACTOR_SUMS
from .tangents import TANGENTS
from .tile_skipping import SKIPS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .feature import Buffer, Feature

FEATURES: tuple[Feature, ...] = (
    BIAS, STORED_DS, PERSISTENCE, COLUMN_SUMS, FACTOR_SUMS, DIAGONALS, DROPOUT, BOUNDED, FIXED_MAX,
    HALVES, SKIPS, TANGENTS, TURNS, CHECKS,
)  # fmt: skip
"""Their order is that of the kernel's arguments."""
BY_FLAG: Mapping[str, Feature] = {feature.flag: feature for feature in FEATURES}
BUFFERS: Mapping[str, Buffer] = {
    x.name: x for feature in FEATURES for x in (*feature.stores, *feature.sums)
}
"""Buffers by the arguments' names."""
