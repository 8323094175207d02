"""What varies with the distance alone is recognised in each of its forms, and nothing else is."""

from __future__ import annotations

import pytest

from attndsl.ir import Op, toposort
from attndsl.passes.distance import varies_with_distance_alone
from attndsl.pipeline import lower
from attndsl.source import Source

DISTANCES = (
    "q - kv", "kv - q", "q - kv + kv_len", "2 * (q - kv) + h", "q + 3 - (kv - b)", "abs(kv - q)",
    "min(q - kv, 5)", "where(q - kv < 3, 1, q - kv)", "(q - kv) * (q - kv)", "(q - kv) // 4",
    "-(kv - q)", "q - 2 * kv + kv",
)  # fmt: skip
OTHERS = ("q", "kv", "q + kv", "q - 2 * kv", "q // 4 - kv // 4", "q * kv", "h", "abs(q) - kv")


def index_of(text):
    program = lower(Source(f"tensor t[n]: float; score = score + t[{text}]"), {}).program
    (load,) = (item for item in toposort(program.score) if item.op is Op.LOAD)
    return load.args[0], program.score


@pytest.mark.parametrize("text", DISTANCES)
def test_distances(text):
    index, score = index_of(text)
    assert varies_with_distance_alone(index)
    assert not varies_with_distance_alone(index, score)


@pytest.mark.parametrize("text", OTHERS)
def test_others(text):
    assert not varies_with_distance_alone(index_of(text)[0])
