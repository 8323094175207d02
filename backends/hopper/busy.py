"""Programs with so much work a pair that the kernels for Hopper are of no use to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton.backends.compiler import GPUTarget

from ..emit.facts import facts_of, with_forms, with_gradients
from ..kernels.pair_work import work_of_pair

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants

MOST_WORK = {"forward": 55, "tangent": 130, "backward": 200}
"""Instructions a pair. Beyond, the work of a pair is many times the work of its products, which the
Hopper kernels overlap it with. Their text repeats that work some ten times for 64 pairs a thread.
They spill hundreds of registers and compile for minutes: see M16 in docs/measured.md."""
_TARGET = GPUTarget("cuda", 90, 32)


def why_busy(lowered: Lowered, call: Call, kind: str, wants: Wants | None) -> str | None:
    """Why the portable kernels run a forward, tangent or backward of such a program, or None."""
    facts = with_forms(facts_of(lowered.program, call), lowered.program, _TARGET)
    if wants is not None:
        facts = with_gradients(facts, wants)
    if work_of_pair(lowered, facts, kind != "forward") <= MOST_WORK[kind]:
        return None
    return "the Hopper kernels would spill registers with so much work for each pair"
