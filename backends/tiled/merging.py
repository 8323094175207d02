"""Results over parts of a row's keys, put together (online softmax, arXiv 1805.02867)."""

from __future__ import annotations

import torch


def merge_(
    total: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> torch.Tensor:
    """Take the output and the log-sum-exp of other keys into ``total``, in place.

    Args:
        total: Output over the keys so far.
        lse: Their log-sum-exp, of the same dims, the last one 1.
        part: Output over other keys.
        part_lse: Their log-sum-exp.

    Returns:
        The log-sum-exp of all these keys.
    """
    both = torch.logaddexp(lse, part_lse)
    shift = finite(both)
    total.mul_(torch.exp(lse - shift)).addcmul_(part, torch.exp(part_lse - shift))
    return both


def finite(x: torch.Tensor) -> torch.Tensor:
    """What to subtract from exponents, so that exp(-inf - x) is 0 also where x is -inf."""
    return x.clamp_min(torch.finfo(x.dtype).min)
