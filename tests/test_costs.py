"""The model of ``benchmarks/costs.py``: its terms, what it predicts, and a run on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.scripts import loader

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def costs(monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    return loader(monkeypatch, FOLDER)("costs")


def case_of(costs, name):
    return next(case for case in costs.CASES if case.name == name)


def work(costs, name, direction="forward"):
    device = costs.Device("cpu", 2, 1e6)
    return costs.work_of(costs.made(case_of(costs, name), device), direction, device)


def test_pairs_are_those_of_live_tiles(costs):
    all_pairs = 2 * costs.HEADS * 1024**2
    full, causal = work(costs, "full"), work(costs, "causal")
    assert (full.full, full.partial) == (all_pairs, 0)
    # Of 8 x 8 tiles 28 lie below the diagonal and 8 on it.
    assert (causal.full, causal.partial) == (all_pairs * 28 / 64, all_pairs * 8 / 64)
    part = work(costs, "offset")
    assert part.full + part.partial < all_pairs / 2


def test_a_call_takes_what_its_operations_take(costs):
    assert work(costs, "powers").ideal_ms > 1.5 * work(costs, "full").ideal_ms
    assert work(costs, "waves", "backward").program > work(costs, "waves").program
    assert work(costs, "causal").mask > 0
    assert work(costs, "full", "backward").ideal_ms > 1.5 * work(costs, "full").ideal_ms


def test_every_case_can_be_made_in_more_batch_entries(costs):
    for name in ("documents", "offsets of entries", "padded bias", "learned dropout", "value dim"):
        found = costs.made(case_of(costs, name), costs.Device("cpu", 4, 1e6))
        assert found.call().shape[0] == 4


def told(ms, ideal):
    each = {"full": 1.0, "partial": 0.0, "program": 0, "mask": 0, "ideal_ms": ideal, "ms": ms}
    return dict.fromkeys(("forward", "backward"), each)


def test_what_takes_more_than_its_share_is_an_outlier(costs):
    found = {"full": told(2.0, 1.0), "dear": told(9.0, 3.0), "fair": told(6.0, 3.0)}
    rows = costs.rows_of({**found, "broken": {"why": "a fault"}})
    ratios = {(row["case"], row["direction"]): row.get("ratio") for row in rows}
    assert ratios["full", "forward"] == pytest.approx(1.0)
    assert ratios["fair", "backward"] == pytest.approx(1.0, rel=0.01)
    assert ratios["dear", "forward"] == pytest.approx(1.5, rel=0.01)
    assert ratios["broken", "forward"] is None
    assert [line.split(",")[0] for line in costs.outliers(rows)] == ["dear", "dear"]
    # Without the reference nothing is predicted.
    assert not any("ratio" in row for row in costs.rows_of({"fair": found["fair"]}))


def test_a_run_on_a_cpu(costs, monkeypatch, tmp_path, capsys):
    path = tmp_path / "costs.json"
    arguments = ["costs.py", "--tiny", "--rounds", "1", "--only", "causal", "--output", str(path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert costs.main() == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["direction"]) for row in rows] == [
        (case, direction) for case in ("full", "causal") for direction in costs.DIRECTIONS
    ]
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert "causal" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["costs.py", "--only", "nothing"])
    with pytest.raises(SystemExit):
        costs.main()
