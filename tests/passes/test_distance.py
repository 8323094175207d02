"""What varies with the distance alone is recognised in each of its forms, and nothing else is."""

from __future__ import annotations

import pytest

from attndsl.ir import Op, toposort
from attndsl.passes.distance import meets_distances_alone, varies_with_distance_alone
from attndsl.pipeline import lower
from attndsl.source import Source

DISTANCES = (
    "q - kv", "kv - q", "q - kv + kv_len", "2 * (q - kv) + h", "q + 3 - (kv - b)", "abs(kv - q)",
    "min(q - kv, 5)", "where(q - kv < 3, 1, q - kv)", "(q - kv) * (q - kv)", "(q - kv) // 4",
    "-(kv - q)", "q - 2 * kv + kv", "int(q >= kv)", "int(kv + 3 < q - h)", "int(2 * q != 2 * kv)",
)  # fmt: skip
OTHERS = (
    "q", "kv", "q + kv", "q - 2 * kv", "q // 4 - kv // 4", "q * kv", "h", "abs(q) - kv",
    "int(q > 2 * kv)", "int(q + kv == 4)",
)  # fmt: skip


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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("score = score * (q - kv) + h", True),
        ("score = tanh(score)", True),
        ("tensor t[n]: float; score = score + t[q - kv]", True),
        ("score = score + (q - kv)", True),
        ("score = score + q", False),
        ("score = score * q - kv", False),
        ("tensor t[n, n]: float; score = score + t[q - kv, kv]", False),
    ],
)
def test_what_has_the_score_too(text, found):
    root = lower(Source(text), {}).program.score
    assert meets_distances_alone(root) == found
    assert not varies_with_distance_alone(root)
