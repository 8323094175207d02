"""Ways to follow the row max: not at all, to the end, or with tiles that keep it.

Kernels that keep it may have their FULL tiles by halves.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attndsl.ir import Op
from attndsl.passes.magnitude import magnitude

from ...fast_math import APPROX
from ..tile_shapes import widest
from .feature import Feature

if TYPE_CHECKING:
    from ...emit.template import Flags
    from .feature import ModuleSpec

_MOST_EXPONENT = {"bf16": 80.0, "fp16": 10.0}
"""In weights 2^x, and 2^-x, by dtype. Sums of 2^32 weights 2^80, of values up to 2^15, fit fp32."""
_MIXED = {64: 3, 128: 2, 256: 0}
"""Number of weights in 16, of bounded scores, that are made of multiplications, by head dim: see M3
in docs/dev/measured.md."""


def _is_bounded(spec: ModuleSpec) -> bool:
    """Return True if weights of all scores fit as they are, in base 2, with no row max taken off.

    Tangents are multiplied with weights before these are rounded, and fp16 has no room for more.
    """
    placed, dtype = spec.lowered.placed, spec.facts.dtype
    if spec.lowered.program.weights is not None or placed.column is not None:
        return False
    if spec.has_tangents and dtype != "bf16":
        return False
    exponent = placed.outer * magnitude(placed.pair) * math.log2(math.e)
    return exponent <= _MOST_EXPONENT[dtype]


def _flags_of_max(spec: ModuleSpec) -> Flags:
    placed, weights = spec.lowered.placed, spec.lowered.program.weights
    mixed = not spec.has_tangents and _is_bounded(spec) and spec.facts.forms == APPROX
    if spec.has_tangents:
        # As above: sums relative to a smaller maximum need the room of bf16.
        lazy = spec.facts.dtype == "bf16"
    else:
        # If exponents need more than a multiplication, a branch costs more than it saves: see M1 in
        # docs/dev/measured.md.
        lazy = weights is None and placed.pair.op is Op.SCORE and placed.column is None
    return {"MIXED": _MIXED[widest(spec.facts)] if mixed else 0, "LAZY": lazy}


def _has_fixed_max(spec: ModuleSpec) -> bool:
    full = spec.is_listed or bool(spec.loop.full)
    found = spec.is_forward and not spec.has_tangents and spec.config.persistent and full
    found = found and spec.lowered.program.weights is None and not _is_bounded(spec)
    return found and spec.facts.dtype == "bf16"


def _is_halved(spec: ModuleSpec) -> bool:
    # The next tile's k has to come while one is read.
    return _has_fixed_max(spec) and spec.config.stages > 1 and comes_by_halves(spec)


def comes_by_halves(spec: ModuleSpec) -> bool:
    """Return True if a forward with a fixed maximum has the scores of FULL tiles half by half.

    Products of D128 take longer than their exponentials. A soft cap needs twice as many
    exponentials. Work tiles with few tiles wait when they begin. See M2 in docs/dev/measured.md.
    """
    placed = spec.lowered.placed
    plain = placed.pair.op is Op.SCORE and placed.column is None
    plain = plain and spec.lowered.program.dropout is None and not spec.facts.pair_tiles
    return plain and widest(spec.facts) <= 64 and not spec.is_listed and not spec.loop.short


BOUNDED = Feature("BOUNDED", _is_bounded, _flags_of_max)
FIXED_MAX = Feature("FIXED_MAX", _has_fixed_max)
HALVES = Feature("HALVED", _is_halved, template="forward_halves")
