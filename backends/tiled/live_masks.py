"""Live pairs of tiles, found once for all tiles that have the same.

Where a mask depends on the distance ``q - kv`` alone, as causal masks and windows do, the tiles of
a diagonal have the same live pairs. A call has many such tiles and few diagonals: see M46 in
docs/dev/measured.md.

Non-goals: which tiles there are (:mod:`.step_plan`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.foundation.caches import memoised
from attndsl.ir import reads_score
from attndsl.passes.distance import meets_distances_alone

if TYPE_CHECKING:
    import torch

    from attndsl.ir import Node

    from ..base import Call
    from .step_plan import QueryStep, Range
    from .tile_expressions import Expressions

_KEPT = 16
"""Tiles of a call that are kept."""


class LiveMasks:
    """The live pairs of a call's tiles."""

    def __init__(self, mask: Node | None, call: Call, expressions: Expressions) -> None:
        """Take a mask; with None all pairs are live, and nobody asks."""
        self._mask, self._expressions = mask, expressions
        self._on_diagonals = (
            mask is not None and call.q_index is None and call.kv_index is None
            and is_by_distance(mask)
        )  # fmt: skip
        self._kept: dict[object, torch.Tensor] = {}

    def key(self, step: QueryStep, *columns: Range) -> tuple[object, ...] | None:
        """Key that tiles with the same live pairs share; None unless distances decide them."""
        if not self._on_diagonals:
            return None
        first = step.rows[0]
        places = tuple((start - first, stop - first) for start, stop in columns)
        return step.batches, step.heads, step.rows[1] - first, places

    def of(
        self, step: QueryStep, columns: Range, score: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The tile of ``step`` at ``columns``, bool, each of four dims of full size or 1.

        It is not to be written to. A mask that reads the ``score`` needs it.
        """
        assert self._mask is not None
        key = self.key(step, columns)
        found = None if key is None else self._kept.get(key)
        if found is None:
            score = self._expressions.nothing if score is None else score
            (found,) = self._expressions.tile(step, columns, score).evaluate(self._mask)
            if key is not None and len(self._kept) < _KEPT:
                self._kept[key] = found
        return found


@memoised("uses of distances in masks", 256)
def is_by_distance(mask: Node) -> bool:
    """Return True if pairs of one distance are all live or all dead. To find out takes 0.1 ms."""
    return not reads_score(mask) and meets_distances_alone(mask)
