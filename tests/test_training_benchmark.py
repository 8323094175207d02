"""``benchmarks/training.py`` on a CPU: all ways train the same model, and rows are complete."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from support.scripts import loader
from torch._dynamo.utils import counters

FOLDER = Path(__file__).parents[1] / "benchmarks"
# Torch warns of its own parts, and of FlexAttention that is not compiled.
pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = ("gpt1k", "vit", "bert", "dit")


@pytest.fixture
def training(monkeypatch):
    return loader(monkeypatch, FOLDER)("training")


@pytest.mark.parametrize("model", MODELS)
def test_all_ways_have_one_loss(training, model):
    torch._dynamo.reset()
    counters.clear()
    rows = training.measure({"model": model, "rounds": 0}, True)["rows"]
    losses = {row["attention"]: row.get("loss", row.get("why")) for row in rows}
    assert losses["attndsl"] == pytest.approx(losses["sdpa"], rel=2e-3)
    # Embedding, loss, and one layer for each way: not one for each layer.
    assert counters["stats"]["unique_graphs"] <= 2 + len(training.WAYS)


def test_padded_keys_are_no_part_of_the_result(training):
    part = training.part_of("bert", True)
    q, k, v = (torch.randn(part.batch, part.heads, part.length, 16) for _ in range(3))
    wanted = training.by_sdpa(part, "cpu")(q, k, v)
    torch.testing.assert_close(training.by_attndsl(part, "cpu")(q, k, v), wanted)
    torch.testing.assert_close(training.by_flex(part, "cpu")(q, k, v), wanted)
    assert training.lengths_of(part, "cpu")[0] == part.length // 2
    v[0, :, part.length // 2 :] = 1e6
    torch.testing.assert_close(training.by_attndsl(part, "cpu")(q, k, v)[0], wanted[0])


def test_sizes_are_those_of_the_models(training):
    rows = {name: part.length for name, part in training.PARTS.items()}
    assert rows == {"gpt1k": 1024, "gpt4k": 4096, "vit": 197, "bert": 512, "dit": 1024}
    with torch.device("meta"):
        models = {name: training.MODELS[x.kind](x) for name, x in training.PARTS.items()}
    millions = {
        name: sum(x.numel() for x in model.parameters()) / 1e6 for name, model in models.items()
    }
    assert 123 < millions["gpt1k"] < 126
    assert 85 < millions["vit"] < 88
    assert 107 < millions["bert"] < 111
    assert 127 < millions["dit"] < 134


def test_a_run_writes_a_row_for_each_way(training, monkeypatch, tmp_path, capsys):
    path = tmp_path / "training.json"
    arguments = ["--only", "vit", "--tiny", "--rounds", "1", "--output", str(path)]
    monkeypatch.setattr("sys.argv", ["training.py", *arguments])
    assert training.main() == 0
    rows = {row["attention"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == set(training.WAYS)
    assert rows["sdpa"]["ratio"] == 1
    assert rows["attndsl"]["step_ms"] > 0
    assert "FlexAttention does not" in rows["flex"]["why"]
    assert "attndsl" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["training.py", "--only", "nothing"])
    with pytest.raises(SystemExit):
        training.main()


def test_a_model_that_fails_has_a_row_that_says_why(training):
    assert training.rows_of("dit", {"why": "a fault"}) == [{"model": "dit", "why": "a fault"}]


def test_a_run_on_a_gpu_ends_in_time(training):
    now = time.monotonic()
    assert training.seconds_for("cuda", now) == training.PART_SECONDS
    assert 10 < training.seconds_for("cuda", now - training.ALL_SECONDS + 30) <= 30
    assert training.seconds_for("cuda", now - training.ALL_SECONDS) == 0
    assert training.seconds_for("cpu", now - 1e6) > 0
