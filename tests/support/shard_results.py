"""Gradients that ranks find from given results, as jobs of a process group of 2 or 4.

They are those that autograd finds by what it has kept of the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import attndsl
from attndsl.parallel import ContextParallel, Machine

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

B, H, HKV, L, D = 2, 4, 4, 512, 8
PROGRAMS = {
    "window": "causal() and q - kv < 100",
    "documents": "tensor document[batch, q_len]: int\nmask = document[b, q] == document[b, kv]",
    "sigmoid": "mask = causal()\nweights = sigmoid(score)",
}


def _check(cp: ContextParallel, text: str, both: bool) -> None:
    attention = attndsl.compile(text)
    drawn = torch.Generator().manual_seed(5)
    whole = [torch.randn(B, n, L, D, generator=drawn) for n in (H, HKV, HKV)]
    document = (torch.rand(B, L, generator=drawn) < 4 / L).cumsum(1)
    captures = {"document": document} if "document" in text else {}
    cp.plan(L, attention, captures=captures)
    own = [cp.shard(x, 2).requires_grad_() for x in whole]
    call = cp(attention)
    found = call(*own, scale=0.3, return_lse=both, captures=captures)
    results = list(found) if both else [found]
    grads = [torch.randn(x.shape, generator=drawn) for x in results]
    wanted = torch.autograd.grad(results, own, grads)
    with torch.no_grad():
        given = call.gradients(
            [x.detach() for x in own], [x.detach() for x in results], grads, scale=0.3,
            captures=captures,
        )  # fmt: skip
    for x, y in zip(given, wanted, strict=True):
        torch.testing.assert_close(x, y)


def given_results(group: ProcessGroup) -> None:
    """Of all exchanges, with keys that are kept and keys that are fetched again."""
    for exchange in ("gather", "heads"):
        for kept in (0, 1 << 40):
            machine = Machine(kept=kept)
            cp = ContextParallel(group, "head_tail", exchange=exchange, machine=machine)
            for name, text in PROGRAMS.items():
                _check(cp, text, both=name != "sigmoid")


JOBS: dict[str, Any] = {"given_results": given_results}
