"""The simulation of many ranks is what its page shows, and measuring ends whatever happens."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "scaling", module)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_results(scaling):
    rows = json.loads(scaling.SIMULATED.read_text("utf-8"))["rows"]
    page = scaling.PAGE.read_text("utf-8")
    shown = page.split(scaling.BEGIN)[1].split(scaling.END)[0].strip()
    assert shown == scaling.table(rows)
    plans = json.loads(scaling.PLANNED.read_text("utf-8"))["rows"]
    assert page.split(scaling.PLANS_BEGIN)[1].split(scaling.PLANS_END)[0].strip() == (
        scaling.table_of_plans(plans)
    )
    found = json.loads(scaling.MEASURED.read_text("utf-8"))["rows"]
    shown = page.split(scaling.MEASURED_BEGIN)[1].split(scaling.MEASURED_END)[0].strip()
    assert shown == scaling.table_of_measured(found)
    drawn = scaling.draw(scaling.best_rows(rows), scaling.RANKS)
    assert scaling.PICTURE.read_text("utf-8") == drawn


def test_the_results_are_those_of_this_code(scaling):
    rows = json.loads(scaling.SIMULATED.read_text("utf-8"))["rows"]
    old = {(row["program"], row["ranks"], row["layout"]): row for row in rows}
    names = ("causal", "window1024", "documents2000")
    found = list(scaling.simulated(8, names))
    assert len(found) == 7
    for row in found:
        kept = old[row["program"], 8, row["layout"]]
        assert {**row, "plan_ms": 0} == {**kept, "plan_ms": 0}


def test_plans_are_timed(scaling):
    rows = scaling.plans((2, 8), 1 << 14, 1)
    layouts = {(row["program"], row["ranks"]): row["layout"] for row in rows}
    assert layouts["causal", 8] == "head_tail"
    assert layouts["window1024", 2] == "contiguous"
    assert all(row["plan_ms"] > 0 and row["buffer_gb"] > 0 for row in rows)


def test_documents_are_what_the_program_says(scaling):
    import torch

    import attndsl

    ids = scaling.document_ids(4096, 200)
    assert (ids[1:] >= ids[:-1]).all()
    made = scaling.reach_of_documents(4096, 200)
    doc = torch.from_numpy(ids)
    found = attndsl.compile(scaling.DOCUMENTS).reach(4096, 4096, doc=doc)
    assert made.work.tolist() == found.work.tolist()
    assert made.ranges(9) == found.ranges(9)


def test_a_part_that_takes_too_long_is_ended(scaling):
    """It has a row that says so, and what follows is measured by other processes."""
    arguments = SimpleNamespace(heads="4,2", profile=False, part_limit=0.2)
    parts = [("causal", 128), ("window1024", 128)]
    told = list(scaling.measured(2, parts, arguments, time.monotonic() + 60))
    assert told == [(("causal", 128), {"why": "took more than 0.2 s"})]


def test_the_most_important_parts_come_first(scaling):
    arguments = SimpleNamespace(programs="softcap,causal,window1024", tokens="32768,8192")
    assert scaling.asked(arguments) == [
        ("window1024", 8192), ("causal", 8192), ("window1024", 32768), ("causal", 32768),
        ("softcap", 32768), ("softcap", 8192),
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="no program zigzag"):
        scaling.asked(SimpleNamespace(programs="zigzag", tokens="8"))


def test_communication_that_nothing_hides(monkeypatch):
    """Two calls: NCCL alone for 3 of its 8 us, and nothing for 2 of 20."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scaling_profile

    runs = [("a", 0, 5), ("ncclX", 3, 8), ("b", 10, 20), ("ncclX", 12, 15), ("a", 11, 13)]
    events = [{"cat": "kernel", "name": n, "ts": a, "dur": b - a} for n, a, b in runs]
    events += [{"cat": "cpu_op", "name": "a", "ts": 0, "dur": 90}, {"name": "no category"}]
    found = scaling_profile.times_of(events, 2)
    assert found["nccl_ms"] == pytest.approx(4e-3)
    assert found["exposed_ms"] == pytest.approx(1.5e-3)
    assert found["idle_ms"] == pytest.approx(1e-3)
    assert next(iter(found["kernels_ms"])) == "b"


def test_operations_are_those_of_live_tiles(scaling):
    import torch

    import attndsl

    flops = sys.modules["scaling_parts"].forward_flops
    full, causal = attndsl.compile("score"), attndsl.compile("causal()")
    assert flops(full, 512, (4, 16), None) == 2 * (2 * 512 * 512 * 16) * 4
    assert flops(full, 512, (4, 128), None) == 8 * flops(full, 512, (4, 16), None)
    assert flops(causal, 512, (4, 16), None) == flops(full, 512, (4, 16), None) * 10 / 16
    apart = torch.arange(512) // 128
    documents = attndsl.compile(scaling.DOCUMENTS)
    assert flops(documents, 512, (4, 16), apart) == flops(full, 512, (4, 16), None) / 4


@pytest.mark.slow
def test_parts_run_on_cpus(scaling, tmp_path, monkeypatch):
    output = tmp_path / "scaling.json"
    names = "causal,documents2000,gain,unknown"
    arguments = ["--run", "2", "--tokens", "256", "--heads", "4,2", "--programs", names]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments, "--output", str(output)])
    scaling.main()
    rows = json.loads(output.read_text("utf-8"))["rows"]
    assert [row["program"] for row in rows] == names.split(",")
    for row in rows[:3]:
        assert row["attndsl_forward_ms"] > 0, row
        assert row["alone_step_ms"] > 0
        assert row["alone_tflops_per_gpu_forward"] > 0
    assert "torch_forward_ms" in rows[0] or "torch_why" in rows[0]
    assert "unknown" in rows[3]["why"]
