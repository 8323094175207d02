"""Random programs whose calls are cut into parts, held to the oracle of the whole."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.parts import SPLITS, Case, Sizes, parts_of

if TYPE_CHECKING:
    import torch

    import attndsl

_POSITIONS = ("q_offset", "kv_offset", "q_index", "kv_index")


@dataclass(frozen=True, slots=True)
class InParts:
    """Calls ``attention`` by parts, and gives what a call in one piece would."""

    attention: attndsl.Attention
    seed: int
    """Decides how calls are cut."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        """As of ``attention``."""
        return_lse = arguments.pop("return_lse", False)
        lowered = self.attention.lowered
        names = {decl.name for decl in (*lowered.program.tensors, *lowered.program.params)}
        captures = {name: value for name, value in arguments.items() if name in names}
        options = {name: value for name, value in arguments.items() if name not in names}
        sizes = Sizes(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
        case = Case(lowered, self.attention, sizes, q, k, v, captures, options)
        draw = random.Random(self.seed)
        if sizes.batch == 0:
            return self.attention(q, k, v, return_lse=return_lse, **arguments)
        split = draw.choice(self._splits(case))
        out, lse = parts_of(case, split, draw.random() < 0.5, block=max(1, sizes.q_len // 3))
        return (out, lse) if return_lse else out

    def _splits(self, case: Case) -> list[str]:
        """Those that leave some rows to each part, and that know where rows and keys lie."""
        sizes, program = case.sizes, case.lowered.program
        found = [split for split in SPLITS if split in ("heads", "groups", "batch")]
        if not any(name in case.options for name in _POSITIONS):
            found += ["rows"] * (sizes.q_len > 3) + ["odd rows"] * (sizes.q_len > 6)
            found += ["keys"] * (sizes.kv_len > 3 and program.sink is None)
        return found
