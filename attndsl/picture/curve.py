"""The curve of a score against the raw score, for programs that bend it: soft caps, relu, ..."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.backends.dense.interpret import evaluate
from attndsl.ir import SCORE, const, reads_score, substitute

if TYPE_CHECKING:
    from attndsl.backends.dense.interpret import LeafValues
    from attndsl.pipeline import Lowered

_RANGES = (10.0, 30.0, 100.0, 300.0, 1000.0)
"""Raw scores on either side of 0: the first range in which the curve bends is shown."""
_BEND = 0.04
"""Distance of a curve from the line between its ends, over its height, that can be seen."""
_SAMPLES = 257
"""Odd, so that 0 is one of them."""
_NAMED = 5
"""Samples that text output has."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Curve of the score, or the weight, over the raw score at one pair of positions."""

    what: str
    """``score``, or ``weight`` where the program has weights of its own."""
    raw: torch.Tensor
    """float64 (n,): raw scores, from the least to the greatest."""
    value: torch.Tensor
    """float64 (n,)."""
    live: torch.Tensor
    """Bool (n,): false where the mask, which may read the score, leaves the pair out."""
    q: int
    """Logical position of the query."""
    kv: int

    @property
    def caption(self) -> str:
        """Text that names the value drawn, and the pair of positions."""
        return f"{self.what} of a raw score, at q = {self.q}, kv = {self.kv}"

    @property
    def ends(self) -> tuple[float, float] | None:
        """Least and greatest finite value; None where there is none."""
        finite = self.value[self.live & self.value.isfinite()]
        return (float(finite.min()), float(finite.max())) if finite.numel() else None

    @property
    def line(self) -> str:
        """A few of its values, as text."""
        step = (self.raw.numel() - 1) // (_NAMED - 1)
        samples = (x[::step].tolist() for x in (self.raw, self.value, self.live))
        shown = (
            f"{raw:g} -> " + (f"{value:.4g}" if live else "left out")
            for raw, value, live in zip(*samples, strict=True)
        )
        return f"{self.caption}: {', '.join(shown)}"


def curve_of(lowered: Lowered, scope: LeafValues, pairs: torch.Tensor) -> Curve | None:
    """The curve of one head, at a pair that takes part if there is one.

    None where the program adds to the raw score, if anything: that is a straight line.

    Args:
        lowered: The program.
        scope: Leaves of one head of one batch entry, in fp64.
        pairs: Bool (q_len, kv_len): which pairs take part.
    """
    program = lowered.program
    if program.weights is None and lowered.derivative.score is const(1.0):
        return None
    row, column = _place(pairs)
    variables = dict(scope.variables)
    variables["q"] = variables["q"][:, :, row : row + 1]
    variables["kv"] = variables["kv"][..., column : column + 1]
    at = replace(scope, variables=variables)
    root, what = program.score, "score"
    if program.weights is not None:
        root, what = substitute(program.weights, {SCORE: program.score}), "weight"
    mask = program.mask
    roots = (root, const(True) if mask is None or not reads_score(mask) else mask)

    q, kv = (int(variables[name].flatten()[0]) for name in ("q", "kv"))

    def curve(end: float) -> Curve:
        raw = torch.linspace(-end, end, _SAMPLES, dtype=torch.float64, device="cpu")
        found = evaluate(roots, replace(at, score=raw.reshape(1, 1, 1, -1)))
        value, live = (x.flatten().expand(raw.shape) for x in found)
        return Curve(what, raw, value, live, q, kv)

    curves = [curve(end) for end in _RANGES]
    return next((found for found in curves if _bends(found.value)), curves[0])


def _place(pairs: torch.Tensor) -> tuple[int, int]:
    """A live pair: of the last query that sees a key, the one in the middle of its keys."""
    rows = pairs.any(1).nonzero().flatten()
    if not rows.numel():
        return pairs.shape[0] - 1, 0
    row = int(rows[-1])
    keys = pairs[row].nonzero().flatten()
    return row, int(keys[keys.numel() // 2])


def _bends(values: torch.Tensor) -> bool:
    """Return True if ``values`` (n,) are not all finite, or bend visibly from a line."""
    finite = values[values.isfinite()]
    if finite.numel() < values.numel():
        return True
    line = torch.linspace(0.0, 1.0, values.numel(), dtype=torch.float64, device="cpu")
    away = (values - torch.lerp(values[0], values[-1], line)).abs().max()
    return bool(away > _BEND * (values.max() - values.min()))
