"""Attention weights as a dense tensor, for ``need_weights`` of torch's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.backends.dense.philox import keep_factor, kept
from attndsl.call.argument_checks import without_autocast

from .sdpa_programs import POSITION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sdpa_call import MaskCapture


def dense_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    reach: str,
    captures: Sequence[MaskCapture],
    dropout_p: float,
    drawn: torch.Tensor | None,
) -> torch.Tensor:
    """The weights that :func:`~.sdpa_call.attend` gives the values, dropped pairs included.

    Takes memory for every pair, as its result does.

    Args:
        q: (B, H, Lq, D).
        k: (B, H, Lk, D).
        reach: ``all`` or ``causal``.
        captures: Masks and biases.
        dropout_p: Probability with which a weight is dropped.
        drawn: The seed, where ``dropout_p`` is not 0.

    Returns:
        (B, H, Lq, Lk) in q's dtype; 0 in rows that see no key.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q.device):
        score = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
        if reach == "causal":
            q_len, kv_len = score.shape[-2:]
            seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril()
            score = score.masked_fill(~seen, -torch.inf)
        for capture in captures:
            mask = capture.tensor[
                tuple(slice(None) if dim in capture.form.dims else None for dim in POSITION)
            ]
            if capture.form.kind == "live":
                score = score.masked_fill(~mask, -torch.inf)
            elif capture.form.kind == "dead":
                score = score.masked_fill(mask, -torch.inf)
            else:
                score = score + mask.to(wide)
        blind = (score == -torch.inf).all(-1, keepdim=True)
        weights = torch.softmax(score.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        if dropout_p:
            assert drawn is not None
            p = torch.tensor(dropout_p, dtype=weights.dtype, device=q.device)
            weights = weights * keep_factor(kept(drawn, p, score.shape), p)
    return weights.to(q.dtype)
