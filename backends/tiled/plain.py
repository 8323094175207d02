"""Spans of plain scores by torch's own attention for CPUs, which is faster than its parts.

torch adds a mask to scores. So a NaN of a dead pair would spread, and such spans are left to
:mod:`.cpu`.

Non-goals: scores that the program changes, weights of its own, dropout, gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attndsl.ir import SCORE, reads_score

from .torch_tiles import work_dtype

if TYPE_CHECKING:
    from attndsl.ir import Node, Program

    from ..base import Call
    from .cpu import Place
    from .plan import Span, Step
    from .torch_tiles import Expressions


def is_plain(program: Program, call: Call) -> bool:
    """Whether torch's own attention makes all that a span of the forward needs."""
    return (
        program.score is SCORE and program.weights is None and program.dropout is None
        and not reads_score(program.mask) and call.q.device.type == "cpu"
        and call.q.shape[3] == call.v.shape[3]
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The rows of a step whose scores are plain."""

    mask: Node | None
    call: Call
    step: Step
    place: Place
    expressions: Expressions

    def attend(
        self, span: Span, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Output and log-sum-exp of a span, or None where a dead pair may have spoiled them.

        Args:
            span: Of the keys.
            queries: (matrices, group * rows, dim).
            keys: (matrices, width, dim).
            values: The same.

        Returns:
            (matrices, group * rows, dim) and (matrices, group * rows, 1).
        """
        bias, live = self._bias(span)
        part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1),
            attn_mask=bias, scale=self.call.scale,
        )  # fmt: skip
        part, lse = part.squeeze(1), lse.squeeze(1).unsqueeze(-1)
        if bias is not None and math.isnan(float(lse.sum())):
            return None
        if live is not None:
            # Of rows without a live pair torch says 0.
            lse = torch.where(live, lse, -torch.inf)
        return part, lse

    def _bias(self, span: Span) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the mask adds to a span's scores, (1 or matrices, 1, group * rows, width).

        And which rows (1 or matrices, group * rows, 1) have a live pair; None where all have.
        """
        if self.mask is None or not span.partial:
            return None, None
        lives: list[torch.Tensor] = []
        for columns in span.partial:
            tile = self.expressions.tile(self.step, columns, self.expressions.nothing)
            lives += tile.evaluate(self.mask)
        batch, heads, rows = self.place.shape
        if all(live.shape[0] == live.shape[1] == 1 for live in lives):
            batch = heads = 1
        shape = (batch, heads, rows, span.width)
        bias = torch.zeros(shape, dtype=work_dtype(self.call), device=self.call.q.device)
        for columns, live in zip(span.partial, lives, strict=True):
            start = columns[0] - span.columns[0]
            part = bias[..., start : start + columns[1] - columns[0]]
            part.masked_fill_(~live, -torch.inf)
        if span.full:
            return self._by_matrices(bias), None
        some = bias.amax(-1, keepdim=True) == 0.0
        return self._by_matrices(bias), self._by_matrices(some).squeeze(1)

    def _by_matrices(self, found: torch.Tensor) -> torch.Tensor:
        """(1 or matrices, 1, group * rows, width) of (1 or batch, 1 or heads, rows, width)."""
        number = self.place.matrices.stop - self.place.matrices.start
        batch, heads, rows = self.place.shape
        if found.shape[0] == found.shape[1] == 1:
            found, number = found.expand(1, batch * heads // number, rows, -1), 1
        return found.reshape(number, 1, -1, found.shape[-1])
