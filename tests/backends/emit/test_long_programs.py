"""Kernels of programs as long as the language allows."""

from __future__ import annotations

import pytest

import attndsl

CHAIN = "a0 = score * 0.001\n" + "\n".join(f"a{i} = a{i - 1} * a{i - 1}" for i in range(1, 600))
LONG = "w" * 90


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "text",
    [
        f"{CHAIN}\nscore = score + a599",
        f"param {LONG}: float\nscore = score * {LONG}",
        f"tensor {LONG}_{LONG}[heads]: float\nscore = score * {LONG}_{LONG}[h]",
    ],
    ids=["chain", "param", "tensor"],
)
def test_long_chains_and_long_names_have_kernels(text: str, direction: str) -> None:
    found = attndsl.compile(text).source(direction, backend="triton")
    compile(found, "module", "exec")
