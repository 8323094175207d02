"""Python time of an eager call whose kernel is cached: everything but the launch itself.

    python benchmarks/call_overhead.py [--quick] [--output FILE]

The Triton backend runs with kernels that do nothing, so that a machine without a GPU measures the
same path: arguments, signature, output allocation, autograd. Microseconds a call, the least of many
rounds, since what else a machine does can only add.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

import attndsl
from attndsl.backends.kernels.compile import Executable

import common

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("score", {}),
    "causal window": ("causal() and q - kv < window", {"window": 1024}),
    "run-time param": ("param cap: float\nscore = softcap(score, cap)", {}),
    "captured tensor": ("tensor gain[heads]: float\nscore = gain[h] * score", {}),
}
CALLS, ROUNDS = 500, 40


class Launches:
    """Stands in for launches, and counts them."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, programs: int, stream: int, arguments: Sequence[object]) -> None:
        """Launch nothing."""
        self.number += 1


def microseconds(
    call: Callable[[], object], calls: int, launches: Launches, kernels: int = 1
) -> float:
    """Time of one call; each has to launch so many kernels."""
    for _ in range(200):
        call()
    rounds = []
    for _ in range(ROUNDS):
        before, begin = launches.number, time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - begin) / calls * 1e6)
        assert launches.number - before == calls * kernels
    return min(rounds)


def rows(calls: int, launches: Launches) -> list[dict[str, Any]]:
    """One row a program: without gradients, with them to come, and with the backward."""
    found = []
    arguments = {"run-time param": {"cap": 30.0}, "captured tensor": {"gain": torch.ones(8)}}
    for name, (text, bound) in PROGRAMS.items():
        attention = attndsl.compile(text, backend="triton", **bound)
        given = arguments.get(name, {})
        q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
        plain = microseconds(lambda: attention(q, k, v, **given), calls, launches)  # noqa: B023
        learned = q.clone().requires_grad_()
        grad = microseconds(lambda: attention(learned, k, v, **given), calls, launches)  # noqa: B023
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        step = microseconds(lambda: _step(attention, inputs, given, q), calls, launches, 4)  # noqa: B023
        found.append(
            {"program": name, "call_us": plain, "with_grad_us": grad, "with_backward_us": step}
        )
    return found


def _step(
    attention: attndsl.Attention, inputs: list[torch.Tensor], given: dict[str, Any],
    grad_out: torch.Tensor,
) -> None:  # fmt: skip
    torch.autograd.grad(attention(*inputs, **given), inputs, grad_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--quick", action="store_true", help="few calls")
    options = parser.parse_args()
    torch.set_num_threads(1)
    launches = Launches()
    Executable.launch = launches  # type: ignore[method-assign,assignment]
    found = rows(20 if options.quick else CALLS, launches)
    common.write("call_overhead", "cpu", found, options.output)
    common.print_table(found, list(found[0]))


if __name__ == "__main__":
    main()
