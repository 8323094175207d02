"""The largest score of each row, by dense arithmetic over some rows at a time.

Kernels do not return it. This takes work proportional to q_len * kv_len, and no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.backends.dense.interpret import evaluate, scope_of

if TYPE_CHECKING:
    from attndsl.backends.base import Call
    from attndsl.pipeline import Lowered

_PAIRS_AT_ONCE = 1 << 24


def row_maxima(lowered: Lowered, call: Call) -> torch.Tensor:
    """Largest score of the live pairs of each row, -inf where there is none.

    Args:
        lowered: The program.
        call: The checked call; its values are not read.

    Returns:
        (B, Hq, Lq), fp32 (fp64 for fp64).
    """
    query, key, program = call.q, call.k, lowered.program
    with torch.no_grad():
        work = torch.float64 if query.dtype is torch.float64 else torch.float32
        batch, heads, q_len, _ = query.shape
        kv_len, group = key.shape[2], heads // key.shape[1]
        found = torch.full((batch, heads, q_len), -torch.inf, dtype=work, device=query.device)
        if kv_len == 0 or found.numel() == 0:
            return found
        keys = key.to(work).repeat_interleave(group, 1).mT
        together = max(1, _PAIRS_AT_ONCE // (batch * heads * kv_len))
        for first in range(0, q_len, together):
            rows = query[:, :, first : first + together].to(work)
            raw = rows @ keys * call.scale
            scope = scope_of(call._replace(q=rows, q_offset=first), raw)
            (score,) = evaluate((program.score,), scope)
            if program.mask is not None:
                (live,) = evaluate((program.mask,), scope)
                score = torch.where(live, score, -torch.inf)
            found[:, :, first : first + together] = score.expand(raw.shape).amax(-1)
        return found
