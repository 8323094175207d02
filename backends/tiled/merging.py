"""Results over parts of a row's keys, put together (online softmax, arXiv 1805.02867)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..log_sum import LogSum


def merge_(total: torch.Tensor, lse: LogSum, part: torch.Tensor, part_lse: LogSum) -> LogSum:
    """Take the output and the log-sum-exp of other keys into ``total``, in place.

    Args:
        total: Output over the keys so far.
        lse: Their log-sum-exp, of the same dims, the last one 1.
        part: Output over other keys.
        part_lse: Their log-sum-exp.

    Returns:
        The log-sum-exp of all these keys.
    """
    both, own, other = lse.merged(part_lse)
    total.mul_(own).addcmul_(part, other)
    return both
