"""Gradients from sums along rows and columns, which the attention kernels make.

Rows and columns are few beside pairs, so that torch adds up what meets in one element, in a fixed
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..tiled.capture_gradients import CaptureSums
from ..tiled.step_plan import QueryStep
from ..tiled.tile_expressions import Expressions
from .gradient_terms import ONE, terms_of

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from attndsl.pipeline import Lowered

    from ..base import Call, Wants
    from .gradient_terms import Term


@dataclass(frozen=True, slots=True)
class Lines:
    """The terms that an attention kernel's sums are of."""

    rows: tuple[Term, ...] = ()
    """Terms that vary with no key: sums of the pass that makes dQ."""
    columns: tuple[Term, ...] = ()
    """Terms that vary with the key, not with the query: sums of the pass that makes dK and dV."""


def lines_among(lowered: Lowered, names: Collection[str]) -> Lines:
    """The terms of the tensors and params ``names``."""
    terms = terms_of(lowered, names)
    rows, columns = (tuple(x for x in terms if x.along == a) for a in ("row", "column"))
    return Lines(rows, columns)


def line_gradients(
    call: Call,
    wants: Wants,
    lines: Lines,
    row_sums: torch.Tensor | None,
    column_sums: torch.Tensor | None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of the tensors and of the params in ``wants``, by name.

    Args:
        call: As of the backward.
        wants: All that ``lines`` are of; what they lack has a gradient of zero.
        lines: Terms, in the order of their sums.
        row_sums: (terms, batch, heads, q_len) fp32, or None where there is nothing to add.
        column_sums: (terms, batch, heads, kv_len) fp32, likewise.
    """
    sums, expressions = CaptureSums(call, wants), Expressions(call)
    batch, heads, q_len, _ = call.q.shape
    nothing = call.q.new_empty((batch, heads, 1, 1))
    if row_sums is not None and lines.rows:
        tile = expressions.tile(QueryStep((0, batch), (0, heads), (0, q_len), ()), (0, 1), nothing)
        for term, found in zip(lines.rows, row_sums.double(), strict=True):
            sums.add(((term.leaf, ONE),), found[..., None], tile)
    if column_sums is not None and lines.columns:
        step = QueryStep((0, batch), (0, heads), (0, 1), ())
        tile = expressions.tile(step, (0, call.k.shape[2]), nothing)
        for term, found in zip(lines.columns, column_sums.double(), strict=True):
            sums.add(((term.leaf, ONE),), found[:, :, None, :], tile)
    return sums.tensors(), sums.params()
