"""The simulation of many ranks is what its page shows, and measuring ends whatever happens."""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    shown = page.split(scaling.PREDICTED_BEGIN)[1].split(scaling.PREDICTED_END)[0].strip()
    assert shown == scaling.errors_of_simulation(found)
    told = sys.modules["scaling_told"]
    shown = [row for row in found if row["heads"] == told.SHOWN]
    assert {row["machine"] for row in shown} == {"2 x NVIDIA H200"}  # As the page says.
    slower = [
        (row["program"], row["tokens"]) for row in shown for peer in told.PEERS
        if row.get(f"{peer}_step_ms", row["attndsl_step_ms"]) < row["attndsl_step_ms"]
    ]  # fmt: skip
    assert slower == [("window1024", 8192), ("documents2000", 8192)]
    assert "all cases except `window1024` and `documents2000` at 8,192 tokens" in page
    (window,) = (x for x in shown if (x["program"], x["tokens"]) == slower[0])
    in_graph, flex = window["attndsl_graph_step_ms"], window["torch_flex_step_ms"]
    said = f"then takes {in_graph:.2f} ms, and FlexAttention takes {flex:.2f} ms without a graph"
    assert said in " ".join(page.split())
    drawn = scaling.draw(scaling.best_rows(rows), scaling.RANKS)
    assert scaling.PICTURE.read_text("utf-8") == drawn


def test_the_guide_to_many_gpus_has_the_figures(scaling):
    told, page = sys.modules["scaling_told"], (ROOT / "docs" / "scale.md").read_text("utf-8")
    rows = json.loads(scaling.MEASURED.read_text("utf-8"))["rows"]
    rows = [row for row in told.completed(rows) if row["heads"] == told.SHOWN]
    bound = {("window1024", 8192), ("documents2000", 8192)}
    for tokens, label, is_bound in (
        (8192, "8,192, host-bound cases", True), (8192, "8,192, other cases", False),
        (32768, "32,768", False), (131072, "131,072", False),
    ):  # fmt: skip
        found = [
            told.shares(row) for row in rows
            if row["tokens"] == tokens and ((row["program"], tokens) in bound) == is_bound
        ]  # fmt: skip
        cells = " | ".join(
            f"{min(x[key] for x in found):.0%} to {max(x[key] for x in found):.0%}"
            for key in ("forward_kept", "step_kept")
        )
        assert f"| {label} | {cells} |" in page
    (window,) = (x for x in rows if (x["program"], x["tokens"]) == ("window1024", 8192))
    page = " ".join(page.split())
    in_graphs = told.shares(window)["graph_step_kept"]
    assert f"In CUDA graphs, the window case reaches {in_graphs:.0%} per step." in page
    for peer, name in zip(told.PEERS, ("SDPA ring", "FlexAttention"), strict=True):
        speeds = [
            x[f"{peer}_step_ms"] / x["attndsl_step_ms"] for x in rows if x["program"] == "causal"
        ]
        assert f"{min(speeds):.2f}x to {max(speeds):.2f}x faster than torch's {name}" in page


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


def asked_for(scaling, programs, tokens, heads="4,2", **others):
    return scaling.Asked(tuple(programs), tuple(tokens), heads, **others)


def test_a_part_that_takes_too_long_is_ended(scaling):
    """It has a row that says so, and what follows is measured by other processes."""
    parts = [("causal", 128, "torch_flex"), ("window1024", 128, "attndsl")]
    asked = asked_for(scaling, ["causal"], [128], part_limit=0.2)
    told = list(sys.modules["scaling_run"].measured(2, parts, asked, time.monotonic() + 60))
    assert told == [(parts[0], {"torch_flex_why": "took more than 0.2 s"})]


def test_the_most_important_parts_come_first(scaling):
    asked = asked_for(
        scaling, ["softcap", "causal", "window1024"], [32768, 8192], systems=("attndsl",)
    )
    assert asked.parts() == [
        (*part, "attndsl") for part in (
            ("window1024", 8192), ("causal", 8192), ("window1024", 32768), ("causal", 32768),
            ("softcap", 32768), ("softcap", 8192),
        )
    ]  # fmt: skip
    every = asked_for(scaling, ["causal", "softcap"], [8]).parts()
    systems = ["attndsl", "torch_sdpa", "torch_flex"]
    assert [part[2] for part in every] == [name for name in systems for _ in range(2)]
    with pytest.raises(SystemExit, match="no program zigzag"):
        asked_for(scaling, ["zigzag"], [8]).parts()
    with pytest.raises(SystemExit, match="no system flax"):
        asked_for(scaling, ["causal"], [8], systems=("flax",)).parts()


def test_what_the_results_have_is_left_out(scaling, monkeypatch):
    run, taken = sys.modules["scaling_run"], []
    rows = [
        {"ranks": 2, "program": "causal", "tokens": 8, "heads": "4,2", "attndsl_step_ms": 1.0,
         "torch_flex_why": "took more than 9 s"},
        {"ranks": 2, "program": "softcap", "tokens": 8, "heads": "4,1", "attndsl_step_ms": 1.0},
        {"ranks": 4, "program": "gain", "tokens": 8, "heads": "4,2", "attndsl_step_ms": 1.0},
    ]  # fmt: skip

    def measured(ranks, parts, asked, ended):
        taken.extend(parts)
        yield from ((part, {"x": 1}) for part in list(parts))

    monkeypatch.setattr(run, "measured", measured)
    names, systems = ["causal", "softcap", "gain"], ("attndsl", "torch_flex")
    asked = asked_for(scaling, names, [8], systems=systems, done=run.done_in(rows, "4,2"))
    list(run._all_of(2, asked, time.monotonic() + 60))
    assert taken == [(name, 8, "attndsl") for name in ("softcap", "gain")] + [
        (name, 8, "torch_flex") for name in names
    ]


def test_missing_rows_do_not_replace_the_results(scaling, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scaling.py", "--run", "2", "--missing"])
    with pytest.raises(SystemExit) as ended:
        scaling.read_arguments()
    assert ended.value.code == 2
    assert "name another --output" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["scaling.py", "--run", "2", "--missing", "--output", "a.json"])
    assert scaling.read_arguments().missing


def told_by(script, parts, scaling, limit=5.0):
    """What is found where processes print what ``script`` prints."""
    run = sys.modules["scaling_run"]
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=err, text=True
        )
        try:
            return list(run._told(process, parts, limit, time.monotonic() + 60, err))
        finally:
            process.kill()
            process.communicate()


def test_what_several_ranks_say_of_a_part(scaling):
    """Two ranks say that a part has failed: what the second one says is not of the next part."""
    script = """
print('NCCL version')
print('{"part": ["causal", 8, "attndsl"], "x": 1}')
print('{"part": ["causal", 8, "torch_sdpa"], "why": "a"}')
print('{"part": ["causal", 8, "torch_sdpa"], "why": "b"}')
print('{"part": ["causal", 8, "torch_flex"], "why": "c", "over": true}')
print('{"part": ["gain", 8, "attndsl"], "x": 2}')
"""
    parts = [("causal", 8, x) for x in ("attndsl", "torch_sdpa", "torch_flex")]
    parts.append(("gain", 8, "attndsl"))
    assert told_by(script, parts, scaling) == [
        (parts[0], {"x": 1}), (parts[1], {"torch_sdpa_why": "a"}),
        (parts[2], {"torch_flex_why": "c"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("after", "why"),
    [("import time; time.sleep(60)", "took more than 1 s"), ("", "nothing was printed")],
)
def test_figures_of_ours_stay_where_a_peer_hangs_or_dies(
    scaling, tmp_path, monkeypatch, capsys, after, why
):
    """The result file has them before the peer's part begins."""
    run = sys.modules["scaling_run"]
    found = {"attndsl_forward_ms": 2.0, "attndsl_step_ms": 8.0, "alone_forward_ms": 1.0,
             "alone_step_ms": 4.0, "attndsl_tflops_per_gpu_forward": 90.0,
             "alone_tflops_per_gpu_forward": 100.0}  # fmt: skip
    line = json.dumps({"part": ["causal", 512, "attndsl"], **found})

    def measured(ranks, parts, asked, ended):
        yield from told_by(f"print({line!r}, flush=True)\n{after}", parts, scaling, 1.0)

    monkeypatch.setattr(run, "measured", measured)
    output = tmp_path / "found.json"
    asked = asked_for(scaling, ["causal"], [512], systems=("attndsl", "torch_flex"))
    run.run(asked, [2], {"machine": "none", "versions": {"commit": "abc"}}, output)
    (row,) = json.loads(output.read_text("utf-8"))["rows"]
    assert row["attndsl_step_ms"] == 8.0
    assert row["predicted_step_ms"] > 0
    assert row["torch_flex_why"] == why
    printed = capsys.readouterr().out
    assert "causal attndsl: forward 2.00 ms, step 8.00 ms" in printed
    assert "causal torch_flex: " + why in printed
    assert max(map(len, printed.splitlines())) <= 300


def test_what_torch_cannot_do_is_told_without_processes(scaling, tmp_path, monkeypatch):
    run = sys.modules["scaling_run"]
    monkeypatch.setattr(run, "measured", lambda *_: pytest.fail("a process was started"))
    output = tmp_path / "found.json"
    asked = asked_for(scaling, ["alibi"], [512], systems=("torch_sdpa", "torch_flex"))
    run.run(asked, [2, 4], {"machine": "none", "versions": {"commit": "abc"}}, output)
    rows = json.loads(output.read_text("utf-8"))["rows"]
    assert [row["ranks"] for row in rows] == [2, 4]
    assert "score_mod" in rows[0]["torch_flex_why"]
    assert "no mask but a causal one" in rows[0]["torch_sdpa_why"]


def test_a_prediction_is_the_simulation_of_the_same_call(scaling):
    """Twice the tokens on two GPUs: the tiles are counted here, and bytes by hand."""
    told = sys.modules["scaling_told"]
    row = {"program": "causal", "ranks": 2, "tokens": 8192, "heads": "64,8",
           "alone_forward_ms": 2.0, "alone_step_ms": 7.0}  # fmt: skip
    found = told.prediction(row)
    assert found["predicted_layout"] == "head_tail"
    tiles, alone = 128 * 129 / 2 / 2, 64 * 65 / 2
    keys = 8192 * 8 * 256  # elements that the first rank fetches
    forward = tiles / alone * 2.0 + 2 * keys / 300e9 * 1e3 + 0.02
    step = tiles / alone * 7.0 + (2 + 2 + 4) * keys / 300e9 * 1e3 + 0.04
    assert found["predicted_forward_ms"] == pytest.approx(forward, abs=1e-3)
    assert found["predicted_step_ms"] == pytest.approx(step, abs=1e-3)
    assert found["predicted_megabytes"] == pytest.approx(8 * keys / 1e6, abs=0.1)
    for name in scaling.TEXTS:
        eight = told.prediction({**row, "program": name, "ranks": 8, "heads": "32,8"})
        assert eight["predicted_step_ms"] > eight["predicted_forward_ms"] > 0, name
    named = {**row, "explain": "16384 rows on 2 ranks, 8192 each: contiguous, in chunks of 512"}
    assert told.prediction(named)["predicted_layout"] == "contiguous"
    assert told.prediction(named)["predicted_step_ms"] > found["predicted_step_ms"]
    bare = {name: x for name, x in row.items() if "alone" not in name}
    assert "predicted_step_ms" not in told.prediction(bare)


def test_rows_of_several_runs_are_merged(scaling):
    merged = sys.modules["scaling_told"].merged
    key = {"program": "causal", "heads": "64,8", "ranks": 2, "tokens": 8192}
    first = [
        {**key, "ranks": 4, "attndsl_step_ms": 9.0},
        {**key, "attndsl_step_ms": 1.0, "torch_flex_why": "took more than 9 s"},
    ]
    second = [{**key, "why": "took more than 9 s", "torch_flex_step_ms": 3.0, "tokens": 8192}]
    found = merged([first, second])
    assert [row["ranks"] for row in found] == [2, 4]
    assert found[0] == {**key, "attndsl_step_ms": 1.0, "torch_flex_step_ms": 3.0}
    other = merged([first, [{**key, "heads": "32,8", "why": "no room"}]])
    assert len(other) == 3


def test_merged_rows_have_the_commits_of_their_figures(scaling):
    merged = sys.modules["scaling_told"].merged
    key = {"program": "causal", "heads": "64,8", "ranks": 2, "tokens": 8192}
    both = {**key, "attndsl_step_ms": 1.0, "torch_sdpa_step_ms": 2.0, "commit": "a"}
    ours = {**key, "attndsl_step_ms": 3.0, "commit": "b"}
    (row,) = merged([[both], [ours], [{**key, "why": "took more than 9 s", "commit": "c"}]])
    assert (row["attndsl_step_ms"], row["commit"]) == (3.0, "b")
    assert (row["torch_sdpa_step_ms"], row["torch_sdpa_commit"]) == (2.0, "a")
    theirs = {**key, "torch_sdpa_step_ms": 4.0, "commit": "d"}
    (row,) = merged([[row], [theirs]])
    assert (row["commit"], row["torch_sdpa_commit"]) == ("b", "d")


def test_merged_rows_have_the_machines_of_their_figures(scaling):
    """Rows of before tell of no machine of a peer, which is not that of our figures then."""
    merged = sys.modules["scaling_told"].merged
    key = {"program": "causal", "heads": "64,8", "ranks": 2, "tokens": 8192}
    ours = {**key, "attndsl_step_ms": 1.0, "commit": "a", "machine": "H100"}
    old = {**ours, "torch_sdpa_step_ms": 2.0, "torch_sdpa_commit": "b"}
    (row,) = merged([[old]])
    assert "torch_sdpa_machine" not in row
    theirs = {**key, "torch_sdpa_step_ms": 3.0, "commit": "c", "machine": "H200"}
    for _ in range(2):
        (row,) = merged([[row], [theirs]])
        assert (row["machine"], row["torch_sdpa_machine"]) == ("H100", "H200")


def test_tables_tell_the_error_and_what_is_missing(scaling):
    told = sys.modules["scaling_told"]
    figures = {"attndsl_forward_ms": 2.0, "attndsl_step_ms": 12.0, "alone_forward_ms": 1.0,
               "alone_step_ms": 6.0, "attndsl_tflops_per_gpu_forward": 400.0,
               "alone_tflops_per_gpu_forward": 500.0, "predicted_forward_ms": 1.6,
               "predicted_step_ms": 11.0, "predicted_megabytes": 7.0}  # fmt: skip
    key = {"program": "gain", "heads": told.SHOWN, "ranks": 2, "tokens": 8192}
    rows = [
        {**key, **figures, "torch_flex_step_ms": 20.0, "torch_sdpa_why": "no scores"},
        {**key, "ranks": 8, "why": "CUDA out of memory"},
    ]
    text = told.table_of_measured(rows)
    assert "| gain | 2 | 8,192 | 2.00 | 12.00 | 400 | 200 | 80% | 80% | - | - | 1.67x |" in text
    assert "| gain | 8 | 8,192 | - | - | - | - | - | - | - | - | - |" in text
    far = told.table_of_measured([{**rows[0], "torch_sdpa_step_ms": 150.0}])
    assert "| 80% | 80% | - | 12x | 1.67x |" in far
    assert "- `attndsl` has no figure for gain (8 x 8,192): CUDA out of memory." in text
    assert "- `torch_sdpa` has no figure for gain (2 x 8,192): no scores." in text
    others = [{**x, "heads": "64,8"} for x in rows]
    assert told.table_of_measured(others).count("\n") == 1
    assert "| gain | 64/8 | 2 | 8,192 | 1.60 | 1.25 | 11.00 | 1.09 | 7 | - |" in (
        told.table_of_predicted(others)
    )
    text = told.errors_of_simulation([*rows, {**rows[0], "predicted_step_ms": 10.0}])
    assert text == (
        "On 2 GPUs, a forward pass takes 1.25x to 1.25x the predicted time (0 of 2 within 10%); "
        "a step takes 1.09x to 1.20x the predicted time (1 of 2 within 10%)."
    )
    graphs = {"attndsl_graph_forward_ms": 1.8, "attndsl_graph_step_ms": 10.0,
              "alone_graph_forward_ms": 1.0, "alone_graph_step_ms": 5.0}  # fmt: skip
    assert "| 80% | 80% | 80% | - |" in told.table_of_measured([{**rows[0], **graphs}])
    assert "0.89, 0.80" in told.short_table([{**rows[0], **graphs}])
    short = told.short_table([*rows, {**rows[0], "same_bits": False}])
    assert "other bits" in short.splitlines()[3]
    many = [
        {**rows[0], "program": name, "tokens": tokens, "ranks": ranks}
        for name in scaling.TEXTS for tokens in (8192, 32768, 131072) for ranks in (2, 4, 8)
    ]  # fmt: skip
    assert len(told.short_table(many)) < 12_000


def test_errors_beyond_what_rounding_makes(scaling):
    wrong = sys.modules["scaling_times"].wrong
    assert wrong({"out": 0.003, "dq": 0.004, "dk": 0.004, "dv": 0.01, "dx": 0.02}) is None
    assert "dk by 0.2" in wrong({"out": 0.003, "dk": 0.2})
    assert wrong({"out": float("inf")}) is not None
    assert wrong({"out": float("nan")}) is not None


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


@pytest.fixture
def with_torch(scaling, monkeypatch):
    """This process as the only rank of gloo."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    dist.destroy_process_group()


def test_results_are_compared_by_position(scaling, with_torch, monkeypatch):
    """Of rows in any order, all of them or some; and a wrong one is found."""
    import torch

    import attndsl

    times = sys.modules["scaling_times"]
    attention = attndsl.compile(scaling.TEXTS["gain"])
    places = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    operands = [torch.randn(1, n, 96, 16).requires_grad_() for n in (4, 2, 2)]
    captures = {"x": torch.linspace(0.5, 1.5, 4).requires_grad_()}

    def call(shift=0):
        at = places + shift
        return attention(*operands, **captures, q_index=at, kv_index=places)

    for compared, sample in ((1000, 128), (32, 8)):
        monkeypatch.setattr(times, "COMPARED", compared)
        monkeypatch.setattr(times, "SAMPLE", sample)
        found = times.errors_of(attention, call, operands, captures, places)
        assert list(found) == ["out", "dq", "dk", "dv", "dx"]
        assert max(found.values()) < 1e-5
        bad = times.errors_of(attention, lambda: call(1), operands, captures, places)
        assert min(bad.values()) > 1e-3
    still = [x.detach() for x in operands]
    numbers = {"x": captures["x"].detach()}
    out = times.errors_of(
        attention, lambda: attention(*still, **numbers), still, numbers, torch.arange(96)
    )
    assert list(out) == ["out"]


def test_torch_has_its_best_ring(scaling, monkeypatch):
    """Heads of keys are copied where the ring takes no fewer; the fastest kernel counts."""
    import torch

    peers = sys.modules["scaling_peers"]
    operands = [torch.zeros(1, n, 8, 16) for n in (4, 2, 2)]
    takes_groups = True

    def ring(attention, operands, mesh, kernel, copies):
        if copies == 1 and not takes_groups:
            return {"why": "no groups"}
        return {"torch_sdpa_step_ms": 3.0 if kernel is peers.KERNELS["flash"] else 2.0 * copies}

    assert "no kernel for CPUs" in peers.sdpa(None, operands, None)["why"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peers, "ring", ring)
    found = peers.sdpa(None, operands, None)
    assert (found["torch_sdpa_step_ms"], found["torch_sdpa_kernel"]) == (2.0, "cudnn")
    takes_groups = False
    found = peers.sdpa(None, operands, None)
    assert (found["torch_sdpa_step_ms"], found["torch_sdpa_kernel"]) == (3.0, "flash")
    assert found["torch_sdpa_tried"]["cudnn, 1 of each key head"] == "no groups"
    monkeypatch.setattr(peers, "ring", lambda *_: {"why": "no"})
    assert "flash, 2 of each key head: no" in peers.sdpa(None, operands, None)["why"]


def test_a_ring_that_fails_leaves_sdpa_as_it_was(scaling, with_torch):
    """Torch replaces the function while a ring runs; on CPUs a ring has no kernel."""
    import torch

    import attndsl

    peers = sys.modules["scaling_peers"]
    before = torch.nn.functional.scaled_dot_product_attention
    operands = [torch.randn(1, n, 64, 16).requires_grad_() for n in (4, 2, 2)]
    found = peers.ring(
        attndsl.compile("causal()"), operands, with_torch["cp"], peers.KERNELS["flash"], 2
    )
    assert "Error" in found["why"]
    assert torch.nn.functional.scaled_dot_product_attention is before


def test_the_ring_is_held_to_calls_of_ours(scaling, monkeypatch):
    """Which are refused where torch has replaced its function."""
    import torch

    import attndsl
    from attndsl.errors import UnsupportedError

    peers, functional = sys.modules["scaling_peers"], torch.nn.functional
    attention = attndsl.compile("causal()")
    beside = peers.beside_the_ring(attention)

    def of_a_ring(*operands):
        raise AssertionError

    of_a_ring.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    monkeypatch.setattr(functional, "scaled_dot_product_attention", of_a_ring)
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(UnsupportedError, match="context_parallel"):
        attention(q, q, q)
    assert beside(q, q, q).shape == q.shape
    assert functional.scaled_dot_product_attention is of_a_ring


def test_block_masks_of_some_rows_at_a_time(scaling, monkeypatch):
    """Are those that torch makes at once."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    peers = sys.modules["scaling_peers"]
    length = 1100
    doc = torch.from_numpy(scaling.document_ids(length, 100))
    for name, captures in (("causal", {}), ("window1024", {}), ("documents", {"doc": doc})):
        mask = peers.mask_of(name, captures)
        wanted = create_block_mask(mask, None, None, length, length, "cpu")
        for pairs in (1, 300 * length, peers.PAIRS):
            monkeypatch.setattr(peers, "PAIRS", pairs)
            made = peers.block_mask(mask, None, None, length, length, "cpu")
            assert made.seq_lengths == wanted.seq_lengths
            assert torch.equal(made.to_dense(), wanted.to_dense()), name
            for part in ("kv", "full_kv", "q", "full_q"):
                number = getattr(made, f"{part}_num_blocks")
                assert torch.equal(number, getattr(wanted, f"{part}_num_blocks")), (name, part)


def test_functions_of_flex_mean_what_the_programs_mean(scaling):
    """Masks and scores, dense, for all programs that torch is asked for."""
    import torch

    import attndsl

    peers, refused = sys.modules["scaling_peers"], sys.modules["scaling_run"].REFUSED
    pair = torch.arange(1100)
    at = torch.tensor(0), torch.tensor(1), pair[:, None], pair[None]
    q, k = (torch.randn(1, n, 1100, 16, dtype=torch.float64) for n in (4, 2))
    raw = q[:, 1] @ k[:, 0].transpose(-1, -2) / 4
    for name, text in scaling.TEXTS.items():
        if ("torch_flex", name) in refused:
            continue
        captures = {}
        if name in scaling.MEDIANS:
            captures["doc"] = torch.from_numpy(scaling.document_ids(1100, 100))
        if name == "gain":
            captures["x"] = torch.linspace(0.5, 1.5, 4, dtype=torch.float64)
        attention = attndsl.compile(text)
        mask = peers.mask_of(name, captures)(*at).expand(1100, 1100)
        found = attention.mask(1100, 1100, heads=4, kv_heads=2, **captures)
        assert torch.equal(found.expand(1, 4, 1100, 1100)[0, 1], mask), name
        wanted = attention.scores(20 * q, 20 * k, **captures)[0, 1]
        made = peers.scores(captures).get(name, lambda s, *_: s)(400 * raw, *at)[0]
        torch.testing.assert_close(wanted[mask], made[mask], msg=name)


def run_here(scaling, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    scaling.main()


@pytest.mark.slow
def test_parts_run_on_cpus(scaling, tmp_path, monkeypatch):
    output = tmp_path / "scaling.json"
    names = "causal,documents2000,gain"
    arguments = ["--run", "2", "--tokens", "512", "--heads", "4,2", "--programs", names]
    run_here(scaling, monkeypatch, [*arguments, "--output", str(output)])
    rows = json.loads(output.read_text("utf-8"))["rows"]
    assert [row["program"] for row in rows] == names.split(",")
    for row in rows:
        assert row["attndsl_forward_ms"] > 0, row
        assert row["alone_step_ms"] > 0
        assert row["alone_tflops_per_gpu_forward"] > 0
        assert row["predicted_step_ms"] > 0
        # FlexAttention has no backward on CPUs, and torch's ring has nothing there.
        assert row["torch_flex_forward_ms"] > 0, row
        assert row["torch_flex_errors"]["out"] < 0.01
        assert row["torch_sdpa_why"]
    assert rows[0]["torch_flex_layout"] == "head_tail"
    assert "multiple of twice the ranks" in rows[1]["torch_flex_per_document"]


@pytest.mark.slow
def test_no_process_is_left_of_a_part_that_was_ended(scaling):
    """Torchrun's processes are of sessions of their own."""
    run = sys.modules["scaling_run"]
    parts = [("causal", 512, "attndsl"), ("causal", 1 << 15, "attndsl")]
    asked = asked_for(scaling, ["causal"], [512], part_limit=40.0)
    told = []
    for part, found in run.measured(2, parts, asked, time.monotonic() + 60):
        told.append((part, found))
        asked_at = json.dumps(parts)
    assert "attndsl_step_ms" in told[0][1]
    assert told[1][1]["why"].startswith("took more than 40 s, in ")
    assert ".py:" in told[1][1]["why"]
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [x for x in lines if asked_at.encode() in x]


def test_a_stack_says_where_rank_0_was(scaling, tmp_path):
    """Of the present part alone; garbled ones say nothing."""
    run, path = sys.modules["scaling_run"], tmp_path / "err"
    before = (
        'Timeout (0:00:01)!\nThread 0x01 (most recent call first):\n  File "/a/b.py", line 1 in f\n'
    )
    stack = (
        "Timeout (0:00:02)!\nThread 0x02 (most recent call first):\n"
        '  File "/a/other.py", line 9 in wait\n\nThread 0x03 (most recent call first):\n'
        '  File "/a/one.py", line 3 in inner\n  File "/a/two.py", line 44 in outer\n'
    )
    path.write_text(before + stack)
    with path.open() as err:
        assert run._where(err, len(before)) == ", in one.py:3 inner < two.py:44 outer"
        assert run._where(err, len(before + stack)) == ""
    path.write_text("Timeout (0:00:01)!\nTimeout (0:00:01)!\nThread 0x01 (most\nThread 0x02\n")
    with path.open() as err:
        assert run._where(err, 0) == ""
