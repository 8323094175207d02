"""Log-sum-exps of rows in two parts: what forwards leave for backwards.

A tensor (2, batch, heads, rows) has the log-sum-exp of each row and 0; or of rows far from
0, the greatest score and what is to be added. Weights are ``exp(score - lse)``; a score of -1e9 and
its row's log-sum-exp, -1e9 + log(n), are one number of fp32, so that such a row's weights would
be 1 in place of 1 / n: see M38 in docs/dev/measured.md. Rows with no live pair have -inf and 0.
Users get the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FAR = 1024.0
"""Up to this size, one number of fp32 is exact enough: weights are off by 2 ** -14 of them."""


class LogSumParts(NamedTuple):
    """The two parts of rows' log-sum-exps, of the same shape."""

    shift: torch.Tensor
    rest: torch.Tensor

    def taken_off(self, score: torch.Tensor) -> torch.Tensor:
        """``score - lse``, exact where both are about the same; -inf in rows with no live pair."""
        return (score - self.without_dead()) - self.rest

    def without_dead(self) -> torch.Tensor:
        """The shifts, infinite for rows with no live pair: ``exp(score - inf)`` is 0."""
        return torch.where(self.shift == -torch.inf, torch.inf, self.shift)

    def of_sink(self, sink: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The weight of a sink in each row times ``factor``; 0 where no pair is live.

        There nothing reads the sink or the factor, which may be NaN.
        """
        weighted = torch.exp(self.taken_off(sink)) * factor
        return torch.where(self.shift == -torch.inf, 0.0, weighted)

    def plus(self, more: torch.Tensor) -> torch.Tensor:
        """Both parts with ``more`` added to each row that has live pairs, without rounding.

        A sum and what rounding takes from it: D. Knuth, The Art of Computer Programming, 4.2.2.
        """
        whole = self.shift + more
        own = whole - more
        lost = (self.shift - own) + (more - (whole - own))
        dead = self.shift == -torch.inf
        return torch.stack((
            torch.where(dead, self.shift, whole),
            torch.where(whole.isfinite(), self.rest + lost, self.rest),
        ))  # fmt: skip

    def merged(self, other: LogSumParts) -> tuple[LogSumParts, torch.Tensor, torch.Tensor]:
        """Log-sums over the keys of both, and the shares of the keys of each (arXiv 1805.02867)."""
        shift = torch.maximum(self.shift, other.shift)
        top = shift.clamp_min(torch.finfo(shift.dtype).min)  # exp(-inf - top) is 0.
        own = torch.exp((self.shift - top) + self.rest)
        others = torch.exp((other.shift - top) + other.rest)
        total = own + others
        total = torch.where(total == 0.0, 1.0, total)
        return LogSumParts(shift, torch.log(total)), own / total, others / total


def log_sum(lse: torch.Tensor) -> LogSumParts:
    """The parts of ``lse`` (2, ...), each with a last dim of 1 more."""
    return LogSumParts(*lse.unsqueeze(-1))


def settled(lse: torch.Tensor) -> torch.Tensor:
    """``lse`` (2, ...) with the whole in one part where that is exact enough.

    So a backward from a log-sum-exp that a user gives has the bits of one from what forwards leave.
    """
    whole = public_lse(lse)
    near = whole.abs() <= FAR
    return torch.stack((torch.where(near, whole, lse[0]), torch.where(near, 0.0, lse[1])))


def of_one_number(lse: torch.Tensor) -> torch.Tensor:
    """Log-sum-exps (...) as (2, ...), exact enough unless :func:`is_far`."""
    found = lse.new_zeros((2, *lse.shape))
    found[0] = lse
    return found


def public_lse(lse: torch.Tensor) -> torch.Tensor:
    """``lse`` (2, batch, heads, rows) as users get it: (batch, heads, rows)."""
    return lse[0] + lse[1]


def is_far(lse: torch.Tensor) -> bool:
    """Tell whether a finite number of ``lse`` is larger than ``FAR``. Waits for the device."""
    size = lse.abs()
    return bool(((size > FAR) & (size < torch.inf)).any())
