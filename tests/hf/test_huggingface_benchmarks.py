"""The page's table is that of the result file, and the benchmarks of models run."""

import json
from pathlib import Path

import pytest
from support.scripts import loader

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    return loader(monkeypatch, FOLDER)


def test_the_table_of_the_page_is_that_of_the_file(script, tmp_path):
    huggingface = script("huggingface")
    rows = json.loads((FOLDER / "results" / "huggingface.json").read_text())["rows"]
    page = huggingface.PAGE.read_text("utf-8")
    within = page.split(huggingface.BEGIN)[1].split(huggingface.END)[0]
    assert within.strip() == huggingface.table(rows).strip()
    assert f"transformers {rows[0]['transformers']}" in page
    copied = tmp_path / "page.md"
    copied.write_text(page, "utf-8")
    huggingface.write_page(copied)
    assert copied.read_text("utf-8") == page


def test_the_file_has_all_families_and_says_what_the_tests_say(script):
    huggingface = script("huggingface")
    rows = json.loads((FOLDER / "results" / "huggingface.json").read_text())["rows"]
    assert [row["family"] for row in rows] == list(huggingface.hf_models.FAMILIES)
    for row in rows:
        assert max(row["logits"], row["gradients"]) < 3e-5
        assert row["fullgraph"] is True
        assert row["generate"] is (
            True if row["family"] in huggingface.hf_models.GENERATES else None
        )


@pytest.mark.slow
def test_a_family_is_measured(script, tmp_path):
    script("huggingface").main(["--families", "BERT", "--output", str(tmp_path / "found.json")])
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["calls"] == ["plain", "padded right", "padded left"]
    assert row["logits"] < 3e-5
    assert row["generate"] is None


@pytest.mark.slow
def test_tokens_a_second_are_measured(script, tmp_path):
    script("huggingface_speed").main([
        "--tiny", "--device", "cpu", "--backend", "aot_eager", "--contexts", "20", "30",
        "--batches", "1", "2", "--tokens", "48", "--turns", "3",
        "--output", str(tmp_path / "found.json"),
    ])  # fmt: skip
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["implementation"] for row in rows] == [
        *("attndsl", "sdpa", "eager") * 2, *("attndsl", "sdpa") * 2
    ]  # fmt: skip
    assert all(row["difference"] < 1e-4 for row in rows)
    assert all(row["tokens_per_s"] > 0 for row in rows)
