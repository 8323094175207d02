"""Sets that isl is not given again: each limit alone is enough."""

from __future__ import annotations

import islpy
import pytest

from attndsl.passes.tiles.isl_sets import (
    MAX_CONDITIONS,
    MAX_DIVISIONS,
    MAX_FACTOR,
    TooComplicated,
    bounded,
)

PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29)


def divided(number: int) -> str:
    return " and ".join(f"q mod {prime} <= kv" for prime in PRIMES[:number])


def points(conditions: int) -> str:
    return " or ".join(f"(q = {3 * n} and kv = {n * n})" for n in range(conditions // 2))


@pytest.mark.parametrize(
    ("most", "more"),
    [
        (divided(MAX_DIVISIONS), divided(MAX_DIVISIONS + 1)),
        (points(MAX_CONDITIONS), points(MAX_CONDITIONS + 2)),
        (f"q <= {MAX_FACTOR} kv", f"q <= {MAX_FACTOR + 1} kv"),
    ],
    ids=["divisions", "conditions", "factors"],
)
def test_sets_are_bounded(most: str, more: str) -> None:
    found = islpy.Set(f"{{ [q, kv] : {most} }}")
    assert bounded(found) is found
    with pytest.raises(TooComplicated):
        bounded(islpy.Set(f"{{ [q, kv] : {more} }}"))
