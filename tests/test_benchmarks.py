"""What benchmarks compare is the same thing, and a row that fails costs itself alone."""

import dataclasses
import itertools
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from support.fork_server import run_script
from support.scripts import loader

import attndsl
from attndsl.backends.tiled.contractions import why_tiles
from attndsl.call.attention_base import located_call

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """``script(name)``: a benchmark as a module."""
    return loader(monkeypatch, FOLDER)


CASES = [
    "full", "causal", "causal_where", "window1024", "prefix1024", "documents1000",
    "neighbourhood128x6", "alibi", "softcap", "head_gain",
    "pair_bias", "pair_mask",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_flex_attention_gets_the_same_program(script, case):
    attention = script("attention")
    assert list(attention.CASES) == CASES
    heads, length = 2, 2100
    q, k, v = (torch.randn(1, heads, length, 4) for _ in range(3))
    captures = {
        "documents1000": {"doc": (torch.arange(length) // 1000).int()},
        "head_gain": {"gain": torch.randn(heads)},
        "pair_bias": {"bias": torch.randn(heads, length, length)},
        "pair_mask": {"allowed": torch.rand(length, length) < torch.arange(1, 1 + length)[:, None]},
    }.get(case, {})
    score, mask = attention.flex_functions(attention.CASES[case].flex, heads, captures)
    b, h = torch.tensor(0), torch.arange(heads)[:, None, None]
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
    dense = q[0] @ k[0].mT / 2
    if score is not None:
        dense = score(dense, b, h, rows, columns)
    if mask is not None:
        dense = torch.where(mask(b, h, rows, columns), dense, -torch.inf)
    expected = torch.softmax(dense, -1) @ v[0]
    compiled = attndsl.compile(attention.CASES[case].program, backend="reference")
    found = compiled(q, k, v, **captures)[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_sdpa_runs_only_what_it_can(script):
    attention = script("attention")
    able = {name for name, case in attention.CASES.items() if case.is_causal is not None}
    assert able == {"full", "causal", "causal_where"}
    bench = attention.Bench(quick=True)
    assert bench._why_not("cudnn", "alibi")
    assert bench._why_not("cudnn", "causal") is None
    assert bench._why_not("attndsl", "alibi") is None


def test_shapes_of_the_command_line_and_of_the_grid(script):
    attention = script("attention")
    assert attention.parse_shape("1x16x4096x128") == (1, 16, 16, 4096, 128)
    assert attention.parse_shape("2x32/8x8192x64") == (2, 32, 8, 8192, 64)
    for text in ("1x16x4096", "1xax4096x64", "1x32/5x4096x64", "0x1x1x1"):
        with pytest.raises(ValueError, match=text):
            attention.parse_shape(text)
    shapes = attention.grid()
    assert len(set(shapes)) == 36
    assert {(heads // kv_heads, dim) for _, heads, kv_heads, _, dim in shapes} == {
        (group, dim) for group in (1, 4) for dim in (64, 128, 256)
    }
    assert all(heads * dim == 2048 for _, heads, _, _, dim in shapes)
    bench = attention.Bench(quick=True)
    assert bench._why_not("deterministic", "causal", "forward")
    assert bench._why_not("deterministic", "causal", "backward") is None


WORKER = """
import json, os, sys, time
cells = json.loads(sys.argv[sys.argv.index("--worker") + 1])
for cell in cells:
    print(json.dumps({"start": cell}), flush=True)
    if cell["column"] == "dies":
        os._exit(9)
    if cell["column"] == "hangs":
        time.sleep(60)
    faulty = cell["column"] == "faulty"
    found = {"why": "a fault"} if faulty else {"ms": 1.0}
    print(json.dumps({"cell": cell, "found": found}), flush=True)
    if faulty:
        sys.exit(75)
"""


def test_a_cell_that_dies_or_hangs_costs_itself_alone(script, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    columns = ["a", "dies", "b", "hangs", "c", "faulty", "d"]
    cells = [{"column": column} for column in columns]
    answers = script("worker").measured(worker, cells, seconds=1.5)
    found = {cell["column"]: result for cell, result in answers}
    assert list(found) == columns
    assert {name for name, result in found.items() if "ms" in result} == set("abcd")
    assert found["dies"] == {"why": "the process ended with code 9"}
    assert found["hangs"] == {"why": "no answer within 2 s"}
    assert found["faulty"] == {"why": "a fault"}


def test_cells_that_are_not_reached_in_time_say_so(script, tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    worker = script("worker")
    cells = [{"column": column} for column in ("a", "hangs", "b")]
    begin = time.monotonic()
    found = [result for _, result in worker.measured(path, cells, until=begin + 1.5)]
    assert time.monotonic() - begin < 20
    assert found == [{"ms": 1.0}, {"why": worker.OUT_OF_TIME}, {"why": worker.OUT_OF_TIME}]


def test_cells_are_answered_side_by_side(script, tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    cells = [{"column": column} for column in ("a", "b", "dies", "c", "faulty")]
    assert script("worker").warmed(path, cells, [], 3, math.inf) == 3
    assert script("worker").warmed(path, cells, [], 8, math.inf) == 3


def test_results_are_written_row_by_row(script, tmp_path):
    common = script("common")
    path = tmp_path / "sub" / "name.json"
    for rows in ([{"a": 1}], [{"a": 1}, {"a": None}]):
        common.write("name", "cpu", rows, path)
        assert json.loads(path.read_text())["rows"] == rows
    assert [each.name for each in path.parent.iterdir()] == ["name.json"]


def test_every_benchmark_can_be_run(script):
    run = script("run")
    assert {"frontend", "start"} <= set(run.EVERYWHERE)
    described = (FOLDER.parent / "docs" / "benchmarks.md").read_text("utf-8")
    for name in (*run.EVERYWHERE, *run.ON_GPUS):
        assert (FOLDER / f"{name}.py").exists(), name
        assert f"| `{name}.py` |" in described
    done = run_script(FOLDER / "run.py", "atention")
    assert done.returncode == 2
    assert "there is no benchmark 'atention'" in done.stderr


@pytest.mark.slow
def test_start_is_measured_in_processes_of_its_own(script, tmp_path):
    start = script("start")
    for name in start.PROGRAMS:
        rows = start.row(name, start.Lane("attndsl", "cpu", 1))
        assert [row["cache"] for row in rows] == ["cold", "warm"]
        assert all(row["first_step_ms"] > row["first_output_ms"] > 0 for row in rows)


def test_flex_attention_starts_with_the_programs_of_attndsl(script):
    start = script("start")
    for program in start.PROGRAMS.values():
        code = start.code_of(program, "flex", "cuda")
        compile(code, "start", "exec")
        mask = eval(f"lambda b, h, q, kv, doc: {program.mask}")
        shape, (batch, heads, length) = (1, 4, 40, 40), (1, 4, 40)
        doc = (torch.arange(length) // 7)[None]
        b, h, q, kv = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
        attention = attndsl.compile(program.text)
        given = {"doc": doc.int()} if "doc" in program.text else {}
        raw = torch.randn(shape)
        scores = eval(f"lambda score, b, h, q, kv: {program.score}", {"torch": torch})
        expected = scores(raw, b, h, q, kv).masked_fill(~mask(b, h, q, kv, doc), -math.inf)
        v = torch.eye(length).expand(batch, heads, length, length)
        found = attention(raw, torch.eye(length).expand_as(raw), v, scale=1.0, **given)
        torch.testing.assert_close(found, expected.softmax(-1))


def test_the_overhead_of_calls_is_measured(tmp_path):
    output = tmp_path / "found.json"
    done = run_script(FOLDER / "call_overhead.py", "--quick", "--output", output)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert len(done.stdout.splitlines()) == len(rows) + 1
    assert all(
        value > 0 for row in rows for key, value in row.items() if key.endswith(("us", "ms"))
    )


def test_the_overhead_of_compiled_layers_is_measured(tmp_path):
    output = tmp_path / "found.json"
    done = run_script(FOLDER / "graph_overhead.py", "--quick", "--output", output)
    assert done.returncode == 0, done.stderr
    plain, own = json.loads(output.read_text())["rows"]
    assert (plain["attention"], own["attention"]) == ("sdpa", "attndsl")
    assert 0 < own["guards"] - plain["guards"] < 60
    assert min(row[f"{way}_us"] for row in (plain, own) for way in ("forward", "backward")) > 0


def test_gradients_are_measured_for_programs_that_have_them(script):
    gradients = script("gradients")
    for name, case in gradients.CASES.items():
        attention = attndsl.compile(case.program)
        learned = {str(item.load.value) for item in attention.lowered.derivative.tensors}
        learned |= {"s"} if name == "sinks" else set()
        assert learned == set(case.sizes(4, 16)), name


def test_every_row_of_gradients_is_measured(script):
    gradients = script("gradients")
    for name in gradients.NAMES:
        row = gradients.measure(name, (1, 2, 16, 8), with_flex=False, device="cpu")
        assert row["case"] == name
        assert row["cost"] == row["with_ms"] / row["without_ms"]
        assert ("copy_ms" in row) == (name == "full_bias")


@pytest.mark.parametrize(("name", "first"), [("gradients", "gain"), ("odd_shapes", "full")])
def test_a_case_that_is_not_there_is_named(name, first):
    done = run_script(FOLDER / f"{name}.py", "--cases", "gian")
    assert done.returncode == 2
    assert f"there is no case gian; there are: {first}" in done.stderr


def test_odd_shapes_differ_from_even_ones_in_what_they_say(script):
    for what, (odd, even) in script("odd_shapes").PAIRS.items():
        assert str(next(a for a, b in zip(odd, even, strict=True) if a != b)) in what
        assert all(a <= b for a, b in zip(odd, even, strict=True))


def test_odd_shapes_cost_at_most_15_percent():
    """As measured: length 2047 beside 2048, head dim 72 beside 80, key length 4095 beside 4096."""
    results = json.loads((FOLDER / "results/odd_shapes.json").read_text("utf-8"))
    assert {row["what"] for row in results["rows"]} == {
        "length 2047", "head dim 72", "key length 4095",
    }  # fmt: skip
    for row in results["rows"]:
        assert row["odd_ms"] <= 1.15 * row["even_ms"], row


SVG = "{http://www.w3.org/2000/svg}"
FILES = ("attention", "sparse_attention")


def _result(rows, machine="GPU"):
    """A result file of ``rows``: case, direction, columns."""
    shape = {"dtype": "bf16", "B": 2, "H": 32, "Hkv": 8, "S": 16384, "D": 128}
    versions = {"torch": "1", "triton": "2", "cudnn": 91900, "commit": "0123456789"}
    return {
        "machine": machine,
        "date": "2000-01-01",
        "versions": versions,
        "rows": [shape | {"case": c, "direction": d} | columns for c, d, columns in rows],
    }


def _times(**columns):
    return {f"{name}_ms": value for name, value in columns.items()}


KNOWN = [
    ("neighbourhood128x6", "forward", _times(attndsl=2.0, flex=4.0, cudnn=1.0)),
    ("neighbourhood128x6", "backward", _times(attndsl=2.0, flex=2.0, cudnn=3.0)),
    ("softcap", "forward", _times(attndsl=4.0, flex=3.0, cudnn=None)),
    ("softcap", "backward", _times(attndsl=None, flex=3.0, cudnn=None)),
]


def _section(comparison, path, rows, machine="GPU"):
    path.write_text(json.dumps(_result(rows, machine)))
    return comparison.read(path, ("flex", "cudnn"))


def test_the_chart_is_that_of_the_result_files(script):
    chart = script("chart")
    now = chart.svg(chart.sections(chart.RESULTS))
    assert chart.OUTPUT.read_text("utf-8") == now, "run benchmarks/chart.py --write"
    assert "](benchmarks.svg)" in chart.OUTPUT.with_suffix(".md").read_text("utf-8")


def test_bars_are_as_long_as_their_ratios_say(script, tmp_path):
    chart, comparison = script("chart"), script("comparison")
    section = _section(comparison, tmp_path / "known.json", KNOWN)
    assert [(row.case, row.column, row.ratios) for row in section.groups[0].rows] == [
        ("neighbourhood128x6", "flex", (2.0, 1.0)),
        ("neighbourhood128x6", "cudnn", (0.5, 1.5)),
        ("softcap", "flex", (0.75, None)),
    ]
    # From half to twice, so that 1 is in the middle of each panel.
    half = (chart.PANEL - 2 * chart.ROOM) / 2
    lines = [chart.FIRST_X + chart.PANEL / 2, chart.WIDTH - chart.MARGIN - chart.PANEL / 2]
    root = ET.fromstring(chart.svg([section]))
    bars = [each.attrib for each in root.iter(f"{SVG}rect") if each.get("class") != "back"]
    found = [(bar["class"], float(bar["x"]), float(bar["width"])) for bar in bars]
    part, slack = {0.75: 0.41504, 1.5: 0.58496}, 0.11
    expected = [
        ("flex", lines[0], half),
        ("cudnn", lines[0] - half, half),
        ("flex", lines[0] - part[0.75] * half, part[0.75] * half),
        ("flex", lines[1], 0.0),
        ("cudnn", lines[1], part[1.5] * half),
    ]
    assert [name for name, _, _ in found] == [name for name, _, _ in expected]
    for (_, *numbers), (_, *wanted) in zip(found, expected, strict=True):
        assert numbers == pytest.approx(wanted, abs=slack)
    figures = [
        each.text for each in root.iter(f"{SVG}text") if "v" in each.get("class", "").split()
    ]
    assert figures == ["2.00", "0.50", "0.75", "1.00", "1.50", "-"]


def test_a_bar_that_is_longer_than_the_scale_is_broken(script, tmp_path):
    chart, comparison = script("chart"), script("comparison")
    rows = [
        ("softcap", "forward", _times(attndsl=1.0, flex=7.5, cudnn=None)),
        ("softcap", "backward", _times(attndsl=1.0, flex=700.0, cudnn=None)),
    ]
    section = _section(comparison, tmp_path / "far.json", rows)
    root = ET.fromstring(chart.svg([section]))
    one, other = (
        float(each.get("width")) for each in root.iter(f"{SVG}rect") if each.get("class") != "back"
    )
    longest = math.log(chart.LONGEST)
    assert one / other == pytest.approx(math.log(7.5) / longest, abs=0.01)
    assert [each.get("class") for each in root.iter(f"{SVG}path")].count("break") == 1
    assert {"7.50", "700"} <= {each.text for each in root.iter(f"{SVG}text")}
    bars = [len(part) for part in re.findall(r"#+", chart.text([section]))]
    assert len(bars) == 2
    assert bars[0] in (bars[1], bars[1] - 1)


def _of_speed(case, system, length, ms, direction="forward", **sizes):
    shape = {"B": 1, "H": 2, "Hkv": 2, "S": length, "D": 128} | sizes
    times = {"attndsl_ms": 1.0, f"{system}_ms": ms}
    return {"case": case, "direction": direction, "dtype": "bf16", **shape, **times}


def test_the_chart_of_speed_is_that_of_the_result_files(script):
    speed = script("speed")
    assert speed.OUTPUT.read_text("utf-8") == speed.svg(speed.committed()), (
        "run benchmarks/speed.py --write"
    )
    assert "](speed.svg)" in (speed.OUTPUT.parent / "benchmarks.md").read_text("utf-8")


def test_bars_of_speed(script):
    speed = script("speed")
    rows = [_of_speed("causal", "fa4", 1000, 2.0, d) for d in ("forward", "backward")]
    ignored = [
        _of_speed("full", "fa4", 1000, 9.0), _of_speed("causal", "fa4", 1000, 9.0, D=64),
        _of_speed("causal", "fa4", 1000, 9.0, Hkv=1),
    ]  # fmt: skip
    other = [_of_speed("causal", "cudnn", 500, None, d) for d in ("forward", "backward")]
    flex = [_of_speed("causal", "flex", 1000, 4.0, d) for d in ("forward", "backward")]
    flex = [row | {"attndsl_ms": 0.5} for row in flex]
    found = speed.chart({
        "attention": _result([]) | {"rows": [*ignored, *rows]},
        "other_shapes": _result([]) | {"rows": other},
        "sparse_attention": _result([]) | {"rows": flex},
    })  # fmt: skip
    # 1 x 2 heads x 1000^2 pairs, 2 products of 2 x 128 operations, half of the pairs, in 1 ms.
    plain = 2 * 1000**2 * 4 * 128 / 2 / 1e9
    at = {bar.system: bar.tflops for bar in found.bars["forward"][1000]}
    assert at == pytest.approx({"attndsl": plain, "fa4": plain / 2, "flex": plain / 4})
    back = {bar.system: bar.tflops for bar in found.bars["backward"][1000]}
    assert back["attndsl"] == pytest.approx(2.5 * plain)
    assert [bar.system for bar in found.bars["forward"][500]] == ["attndsl"]
    assert found.sizes == {500: "1 x 2", 1000: "1 x 2"}
    assert f"attndsl has {2 * plain:.0f} forward and {5 * plain:.0f} backward" in found.notes[-1]
    root = ET.fromstring(speed.svg(found))
    bars = [each.attrib for each in root.iter(f"{SVG}rect") if each.get("width") == str(speed.BAR)]
    heights = [float(bar["height"]) for bar in bars if float(bar["x"]) > speed.WIDTH / 2]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert heights[0] == pytest.approx(4 * heights[2], abs=0.2)
    assert "length 1000: attndsl" in root.find(f"{SVG}desc").text
    with pytest.raises(ValueError, match="no rows of causal"):
        speed.chart({name: _result([]) for name in ("attention", *speed.OTHERS)})


def test_texts_of_the_chart_of_speed_do_not_cover_another(script):
    speed = script("speed")
    root = ET.fromstring(speed.svg(speed.committed()))
    sizes = {"t": 16, "h": 13, "n": 10, "o": 10, "f": 11}
    assert all(f"{size}px sans-serif}}" in root.find(f"{SVG}style").text for size in sizes.values())
    boxes = []
    for each in root.findall(f"{SVG}text"):
        kinds = each.get("class", "").split()
        size = next((sizes[kind] for kind in kinds if kind in sizes), 12)
        width, x, y = len(each.text) * size * 0.6, float(each.get("x")), float(each.get("y"))
        x -= width if "e" in kinds else width / 2 if "m" in kinds else 0
        boxes.append((each.text, (x, y - 0.75 * size, x + width, y + 0.2 * size)))
    width, height = map(float, root.get("viewBox").split()[2:])
    for words, (left, top, right, bottom) in boxes:
        assert 0 <= left <= right <= width, words
        assert 0 <= top <= bottom <= height, words
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (one, other)


def test_the_chart_as_text(script, tmp_path):
    chart, comparison = script("chart"), script("comparison")
    section = _section(comparison, tmp_path / "known.json", KNOWN)
    lines = chart.text([section]).splitlines()
    rows = [line.split() for line in lines if "|" in line]
    assert [row[:3] for row in rows] == [
        ["neighbourhood128x6", "FlexAttention", "2.00"],
        ["neighbourhood128x6", "cuDNN", "0.50"],
        ["softcap", "FlexAttention", "0.75"],
    ]
    assert [row[3:] for row in rows] == [
        ["|" + "#" * 12, "1.00", "|"],
        ["#" * 12 + "|", "1.50", "|" + "#" * 7],
        ["#" * 5 + "|", "-", "|"],
    ]
    assert lines[-1] == "GPU; torch 1, Triton 2, cuDNN 9.19; commit 0123456."
    whole = chart.text(chart.sections(chart.RESULTS))
    assert whole.isascii()
    assert max(map(len, [*lines, *whole.splitlines()])) <= 100


@pytest.mark.parametrize("ratio", [0.003, 0.74, 1.0, 1.01, 3.1, 400.0])
def test_the_scale_holds_every_ratio_and_numbers_1(script, ratio):
    chart = script("chart")
    scale = chart.Scale.over([ratio])
    assert 0 <= scale.place(ratio) <= 1
    assert scale.place(0.75) >= 0
    assert scale.place(1.5) <= 1
    labels = scale.labelled()
    assert 1 in labels
    assert 2 <= len(labels) <= 10


def _boxes(root):
    """What each text covers, with letters as wide as those of a wide font: words, box."""
    style = root.find(f"{SVG}style").text
    sizes = {"t": 16, "h": 14, "s": 11.5}
    assert all(f".{name}{{font:600 {size}px" in style for name, size in sizes.items())
    for group in (root, *root.iter(f"{SVG}g")):
        down = float(re.search(r",(\d+)", group.get("transform", ",0"))[1])
        for text in group.findall(f"{SVG}text"):
            kinds = text.get("class", "").split()
            size = next((sizes[kind] for kind in kinds if kind in sizes), 11)
            width = len(text.text) * size * 0.6
            x, y = float(text.get("x")), float(text.get("y")) + down
            x -= width if "e" in kinds else width / 2 if "m" in kinds else 0
            yield text.text, (x, y - 0.75 * size, x + width, y + 0.2 * size)


@pytest.mark.parametrize("committed", [True, False])
def test_the_chart_is_well_formed_and_no_text_covers_another(script, tmp_path, committed):
    chart, comparison = script("chart"), script("comparison")
    name = "A & B <GPU>"
    known = [_section(comparison, tmp_path / "known.json", KNOWN, name)] * 2
    root = ET.fromstring(chart.svg(chart.sections(chart.RESULTS) if committed else known))
    assert root.get("role") == "img"
    labels = [root.find(f"{SVG}*[@id='{each}']") for each in root.get("aria-labelledby").split()]
    assert [label.tag for label in labels] == [f"{SVG}title", f"{SVG}desc"]
    assert "FlexAttention, forward: " in labels[1].text
    if not committed:
        assert "FlexAttention, forward: 0.75 to 2.00." in labels[1].text
        assert f"{name}; torch 1, Triton 2, cuDNN 9.19; commit 0123456." in labels[1].text
    boxes = list(_boxes(root))
    assert len(boxes) > 30
    width, height = map(float, root.get("viewBox").split()[2:])
    for words, (left, top, right, bottom) in boxes:
        assert 0 <= left <= right <= width, words
        assert 0 <= top <= bottom <= height, words
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (one, other)


def _luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
def test_the_chart_is_readable_on_both_backgrounds(script, theme):
    # WCAG 2.2: 4.5 for text (1.4.3), 3 for graphics (1.4.11).
    chart, comparison = script("chart"), script("comparison")
    colours = getattr(chart, theme)
    least = {colours["ink"]: 4.5, colours["faint"]: 4.5} | dict.fromkeys(chart.COLOURS.values(), 3)
    for colour, contrast in least.items():
        low, high = sorted((_luminance(colour), _luminance(colours["back"])))
        assert (high + 0.05) / (low + 0.05) >= contrast, colour
    assert set(chart.COLOURS) == {name for each in comparison.SOURCES.values() for name in each}


def _with(key, value):
    """A change of the file's last row: ``key`` becomes ``value``, or goes where that is ``...``."""

    def change(path):
        results = json.loads(path.read_text("utf-8"))
        last = results["rows"][-1]
        results["rows"][-1] = {k: v for k, v in {**last, key: value}.items() if v is not ...}
        path.write_text(json.dumps(results))

    return change


def _nothing_in_common(path):
    path.write_text(
        json.dumps(_result([("full", "forward", _times(attndsl=1, fa4=None, cudnn=None))]))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "there is no benchmarks/results/attention.json"),
        (_with("fa4_ms", ...), "attention.json: no column 'fa4_ms' at "),
        (_with("attndsl_ms", ...), "attention.json: no column 'attndsl_ms' at "),
        (_with("case", ...), "attention.json is no result file of benchmarks/attention.py"),
        (_with("fa4_ms", "fast"), "attention.json is no result file of benchmarks/attention.py"),
        (_with("fa4_ms", -3.5), "attention.json: 'fa4_ms' is -3.5, which is no time"),
        (_with("cudnn_ms", float("nan")), "attention.json: 'cudnn_ms' is nan, which is no time"),
        (lambda path: path.write_text("{"), "attention.json is no JSON"),
        (lambda path: path.write_text("[]"), "attention.json is no result file"),
        (_nothing_in_common, "attndsl and another system have no case in common"),
    ],
)
def test_results_that_cannot_be_drawn_are_named(tmp_path, change, message):
    folder = tmp_path / "benchmarks"
    (folder / "results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for name in (
        "against.py",
        "against_rows.py",
        "chart.py",
        "columns.py",
        "common.py",
        "comparison.py",
        "decoding.py",
        "relative.py",
        "summary.py",
        "table.py",
        "turns.py",
        "worker.py",
        *(f"results/{n}.json" for n in FILES),
    ):
        shutil.copy(FOLDER / name, folder / name)
    command, drawn = [sys.executable, folder / "chart.py"], tmp_path / "docs" / "benchmarks.svg"
    done = subprocess.run([*command, "--write"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    before = drawn.read_bytes()
    assert before == (FOLDER.parent / "docs" / "benchmarks.svg").read_bytes()
    change(folder / "results" / "attention.json")
    for options in ([], ["--write"]):
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stdout == ""
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert drawn.read_bytes() == before


def test_the_summary_says_what_the_files_say(script):
    summary = script("summary")
    row = {"direction": "forward", "S": 8}
    rows = [
        row | {"case": "full", "attndsl_ms": 2.0, "fa4_ms": 3.0},
        row | {"case": "causal", "attndsl_ms": 2.0, "fa4_ms": 1.0},
        row | {"case": "causal", "attndsl_ms": 2.0, "fa4_ms": None},
        row | {"case": "softcap", "attndsl_ms": 2.0, "fa4_ms": 9.0},
        row | {"case": "full", "attndsl_ms": 2.0, "fa4_ms": 8.0, "direction": "backward"},
    ]
    where, other = ("attention", summary.BESIDE_FA4), ("fa4", "FA-4")
    both = summary.against("Full", where, other, "forward", ("full", "causal"))
    assert both.text == "Full, forward"
    assert both.answer(rows) == "0.50x to 1.50x the speed of FA-4"
    assert summary.wins(both, rows) == "**1 of 2**"
    cap = summary.against("Cap", where, other, "forward", ("softcap",), 8)
    assert (cap.answer(rows), summary.wins(cap, rows)) == ("4.50x the speed of FA-4", "0 of 1")
    longer = summary.against("Cap", where, other, "forward", ("softcap",), 9)
    assert longer.answer(rows) == "not measured"
    text = summary.summary(lambda name: {"rows": rows} if name == "attention" else None)
    assert "sparse_attention" not in text
    lines = [line.split(" | ") for line in text.splitlines()]
    assert {len(line) for line in lines} == {4}
    assert lines[2][:3] == ["| Full and causal, forward", "0.50x to 1.50x the speed of "
                            "FlashAttention-4", "**1 of 2**"]  # fmt: skip
    for question in summary.QUESTIONS:
        assert (FOLDER / "results" / f"{question.file}.json").exists()


def test_the_page_names_all_that_others_win(script):
    """By hand beside the table: each question at which another system wins, and that system."""
    summary, table = script("summary"), script("table")
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text("utf-8")
    part = page.partition("\n## Where other systems win\n")[2].partition("\n## ")[0]
    said = {cells[0]: cells[1] for cells in _cells(part)[2:]}
    answers = {}
    for question in summary.QUESTIONS:
        rows = table.load(question.file)["rows"]
        if summary.wins(question, rows).startswith("**"):
            answers[question.text] = question.answer(rows)
    assert list(said) == list(answers)
    for text, winner in said.items():
        assert winner in answers[text], text
    # What the words of the table say in figures.
    rows = {name: table.load(name)["rows"] for name in ("attention", "short", "serving")}
    gaps = [
        row["fa4_ms"] / row["attndsl_ms"]
        for row in rows["attention"]
        if row.get("fa4_ms") and row["case"] != "softcap" and row["direction"] == "backward"
    ]
    assert min(gaps) > 0.94
    short = [row for row in rows["short"] if row.get("direction")]
    behind = {row["name"] for row in short if row["best_device"] < 1}
    assert behind == {"BERT 128", "fp16"}
    assert {row["direction"] for row in short if row["best_device"] < 1} == {"forward"}
    ahead = [row["flashinfer_device"] < row["pages_device"] for row in rows["serving"]
             if row.get("flashinfer_device") and not row["fp8"]]  # fmt: skip
    assert sum(ahead) > len(ahead) / 2
    for kind in ("device", "eager"):
        lost = [row for row in short if row[f"best_{kind}"] < 1]
        assert all(row[f"cudnn_{kind}"] < row[f"attndsl_{kind}"] for row in lost)


def _cells(text):
    """The cells of a table, a list a line."""
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_every_section_of_results_has_a_question_and_is_on_its_page(script):
    table = script("table")
    summary = table.summary
    for section, text in table.sections():
        assert text.startswith(f"## {section.heading}\n\n"), section
        assert re.search(r"^`\w+\.json`: .*; commit [0-9a-f]{7}\.", text, re.MULTILINE), section
    asked = {question.section for question in summary.QUESTIONS}
    assert {section for section, _ in table.sections()} - asked == {summary.PORTABLE}
    assert asked <= {section for section, _ in table.sections()}
    for path, text in table.pages().items():
        files = re.findall(r"^`(\w+)\.json`: (.*)$", text, re.MULTILINE)
        assert len(files) >= 2, path
        for name, head in files:
            results = table.load(name)
            versions = results["versions"]
            assert f"{results['machine']}; torch {versions['torch']}, Triton" in head
            assert f"; commit {versions['commit'][:7]}." in head


def test_every_row_of_layouts_is_measured(script):
    layouts = script("layouts")
    assert len(layouts.cases(quick=False)) == 2 * len(layouts.cases(quick=True)) == 8
    rows = layouts.measure(layouts.Case("causal", 1, 2, 16, 8), 1, device="cpu")
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert list(row) == layouts.COLUMNS
        assert row["cost"] == row["views_ms"] / row["contiguous_ms"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_lists_are_measured_beside_those_that_are_kept(script):
    lists = script("lists")
    step, forward, backward = lists.rows(lists.TINY, 1)
    assert step["made"] == {"kept": 0, "anew": 3 * lists.TINY.layers, "new": 2}
    assert forward["made"] == {"kept": 0, "anew": 1}
    assert backward["made"] == {"kept": 0, "anew": 2}
    assert forward["difference"] < 1e-5
    assert forward["ahead"] == forward["flex_ms"] / forward["kept_ms"]
    assert step["cost"] == step["anew_ms"] / step["kept_ms"]


def test_a_training_step_is_measured(script, monkeypatch):
    gpt = script("gpt")
    # What compiling finds is tested elsewhere, and takes half a minute.
    monkeypatch.setattr(gpt.torch, "compile", lambda function: function)
    sizes = gpt.Sizes(layers=1, width=16, heads=2, batch=2, length=8, vocabulary=11)
    rows = gpt.measure(sizes, ["attndsl", "sdpa"], 1, "cpu")
    assert [row["attention"] for row in rows] == ["attndsl", "sdpa"]
    assert all(row["step_ms"] > 0 and row["peak_gb"] is None for row in rows)


def test_the_model_of_the_defaults_has_124_million_parameters(script):
    gpt = script("gpt")
    with gpt.torch.device("meta"):
        model = gpt.GPT(gpt.Sizes(12, 768, 12, 16, 1024, 50257))
    assert round(sum(x.numel() for x in model.parameters()) / 1e6) == 124


SIDE = """
import json, sys, attndsl
for cell in json.loads(sys.argv[2]):
    if cell["case"] == attndsl.FAILS and "--quick" not in sys.argv:
        sys.exit(3)
    slow = attndsl.SLOW * (1 + (cell["direction"] == "backward"))
    print(json.dumps({"start": cell}))
    print(json.dumps({"cell": cell, "found": {"ms": slow}}))
"""


def test_commits_take_turns(script, tmp_path, monkeypatch, capsys):
    commits = script("commits")
    folders = []
    for name, slow, fails in (("old", 2.0, None), ("new", 1.5, "alibi")):
        package = tmp_path / name / "attndsl"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"SLOW, FAILS = {slow}, {fails!r}")
        folders.append(str(package.parent))
    monkeypatch.setattr(commits, "WORKER", tmp_path / "worker.py")
    commits.WORKER.write_text(SIDE)
    monkeypatch.setattr(commits.common, "machine", lambda _: "a machine")
    output = tmp_path / "found.json"
    arguments = [*folders, "--cases", "causal,alibi", "--shapes", "1x2x16x8", "--output", output]
    monkeypatch.setattr(sys, "argv", ["commits.py", *map(str, arguments)])
    assert commits.main() == 1
    rows = json.loads(output.read_text())["rows"]
    assert [(r["case"], r["direction"], r["before_ms"], r["after_ms"]) for r in rows] == [
        ("causal", "forward", 2.0, 1.5), ("causal", "backward", 4.0, 3.0),
        ("alibi", "forward", 2.0, None), ("alibi", "backward", 4.0, None),
    ]  # fmt: skip
    assert rows[0]["change"] == 0.75
    assert (rows[0]["before"], rows[0]["after"], rows[0]["spread"]) == ("old", "new", 0.0)
    said = capsys.readouterr().out
    turns = re.findall(r"round (\d) of 3: (\w+)", said)
    assert [name for number, name in turns if number == "2"] == ["after", "before"]
    assert [name for number, name in turns if number == "3"] == ["before", "after"]
    assert "after, alibi forward: the process ended with code 3" in said
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--rounds", "0"])
    with pytest.raises(SystemExit):
        commits.main()
    assert "--rounds is 0" in capsys.readouterr().err


def test_commits_need_packages(script, tmp_path, monkeypatch, capsys):
    commits = script("commits")
    monkeypatch.setattr(sys, "argv", ["commits.py", str(tmp_path), str(tmp_path)])
    with pytest.raises(SystemExit):
        commits.main()
    assert "has no package attndsl" in capsys.readouterr().err


def test_short_rows_are_what_they_should_be(script):
    short = script("short")
    assert len({row.name for row in short.ROWS}) == len(short.ROWS) >= 25
    assert {row.program for row in short.ROWS} == set(short.TEXTS)
    assert {row.dtype for row in short.ROWS} == {"bf16", "fp16"}
    assert {min(row.dim for row in short.ROWS), max(row.dim for row in short.ROWS)} == {32, 256}
    assert all(row.heads % row.kv_heads == 0 for row in short.ROWS)


@pytest.mark.parametrize("name", ["full", "causal", "window", "alibi", "soft cap", "padding"])
def test_short_programs_are_those_of_flex_attention(script, monkeypatch, name):
    short = script("short")
    row = short.Row("small", 3, 4, 2, 300, 290, 8, name)
    q, k, v = (torch.randn(3, heads, n, 8) for heads, n in ((4, 300), (2, 290), (2, 290)))
    lengths = torch.tensor(short.lengths_of(row), dtype=torch.int32)
    score, mask = short.flex_functions(name, 4, lengths)
    b, h = torch.arange(3)[:, None, None, None], torch.arange(4)[:, None, None]
    rows, keys = torch.arange(300)[:, None], torch.arange(290)
    dense = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    dense = dense if score is None else score(dense, b, h, rows, keys)
    alive = torch.ones(3, 4, 300, 290, dtype=torch.bool)
    if mask is not None:
        alive &= mask(b, h, rows, keys)
    assert short.live_pairs(row) == int(alive.sum())
    weights = dense.masked_fill(~alive, -torch.inf).softmax(-1).nan_to_num()
    given = {"lengths": lengths} if name == "padding" else {}
    found = attndsl.compile(short.TEXTS[name])(q, k, v, **given)
    torch.testing.assert_close(found, weights @ v.repeat_interleave(2, 1), atol=1e-5, rtol=1e-5)


def test_columns_of_short_rows_agree(script):
    short = script("short")
    for program in ("full", "causal"):
        calls = short.Calls(short.Row("small", 2, 4, 2, 40, 40, 16, program), "cpu")
        results = {column: calls.of(column)[1] for column in ("attndsl", "fa2")}
        assert [len(found) for found in results.values()] == [4, 4]
        assert 0 < max(short._differences(results).values()) < 0.02
    with pytest.raises(ValueError, match="no such score"):
        short.Calls(short.Row("small", 2, 4, 2, 40, 40, 16, "alibi"), "cpu").of("cudnn")


def test_limits_of_short_rows(script):
    short = script("short")
    row = short.Row("even", 2, 4, 2, 100, 50, 64)
    needs = short.needs_of(row, "forward")
    # q and the output, k and v, in bytes; lse.
    assert needs["copy"] == 2 * 64 * (2 * 800 + 2 * 200) + 4 * 800
    assert needs["products"] == 4 * 64 * 2 * 4 * 100 * 50
    assert needs["exponentials"] == 2 * 4 * 100 * 50
    rates = {"copy": 1e12, "products": 1e12, "exponentials": 1e9}
    assert short.limit_us(row, "forward", rates) == pytest.approx(40.0)
    assert short.limit_us(row, "backward", {**rates, "products": 1e11}) == pytest.approx(256.0)


def test_what_short_rows_say(script):
    short = script("short")
    row = short.Row("even", 2, 4, 2, 100, 50, 64)
    rates = {"copy": 1e12, "products": 1e12, "exponentials": 1e9}

    def found(ours, cudnn, flex):
        columns = {
            "attndsl": {"eager": 2 * ours, "device": ours}, "fa2": {"why": "a reason"},
            "cudnn": {"eager": 2 * cudnn, "device": cudnn} if cudnn else {"why": "another"},
            "flex": {"eager": 2 * flex, "device": flex},
        }  # fmt: skip
        return {"forward": columns, "backward": columns, "difference": {"forward": 0.001}}

    lines = short.lines_of(row, found(80.0, 100.0, 40.0), rates)
    assert [line["direction"] for line in lines] == ["forward", "backward"]
    assert lines[0]["best_eager"] == lines[0]["best_device"] == 1.25
    assert lines[0]["of_limit"] == 0.5
    assert lines[0]["fa2_why"] == "a reason"
    lines += short.lines_of(row, found(80.0, None, 40.0), rates)
    # Three percent are allowed to rows below 5 us.
    lines += short.lines_of(row, found(4.1, 4.0, 4.0), None)
    said = short.summary(lines)
    mean = (1.25 * 0.5 * 4.0 / 4.1) ** (1 / 3)
    assert said[0] == f"forward, eager: {mean:.3f} of 3 rows; behind: even"
    failed = short.lines_of(row, {"why": "no answer within 150 s"}, rates)
    assert failed[0]["attndsl_why"] == "no answer within 150 s"
    assert short.summary(failed) == [
        "forward, not compared: even", "backward, not compared: even",
    ]  # fmt: skip


def test_what_tuned_rows_say(script):
    short = script("short_tune")
    row = script("short").Row("even", 2, 4, 2, 100, 50, 64)
    sizes = [
        {"kernel": kernel, "size": "128 x 64", "ms": 0.01, "why": ""}
        for kernel in ("forward_128", "backward_kv")
    ]
    found = {
        "chosen": {"forward": 10.0, "backward": 21.0}, "sizes": sizes,
        "tuned": {"forward": 10.0, "backward": 18.0},
    }  # fmt: skip
    lines = short.lines_of(row, found)
    assert [line["gain"] for line in lines] == [1.0, pytest.approx(7 / 6)]
    assert [line["sizes"] for line in lines] == [[sizes[0]], [sizes[1]]]
    lines += short.lines_of(row, {"why": "a reason"})
    assert short.summary(lines) == [
        "2 lines; the most is gained by even backward: 21.0 -> 18.0 us, 1.167; "
        "1 gain more than 1.05",
        "even backward: 21.0 -> 18.0 us, 1.167",
        "even forward: a reason",
        "even backward: a reason",
    ]


def test_each_tuned_row_starts_with_what_the_tables_choose(script, monkeypatch):
    from attndsl.call.dispatch import get_backend
    from attndsl.runtime.program_store import default_cache

    monkeypatch.setenv("ATTNDSL_CACHE_DIR", "a name that is not used")
    short = script("short_tune")
    backends, folders = [], []
    for _ in range(2):
        with short.fresh_kernels():
            backends.append(get_backend("cpu"))
            assert get_backend("cpu") is backends[-1]
            folders.append(default_cache())
    assert backends[0] is not backends[1]
    assert folders[0] is not folders[1]


class Clock:
    """Stands in for a GPU's events, streams and graphs: each call takes as long as it says."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = Clock.now

        def synchronize(self):
            assert self.at is not None

        def elapsed_time(self, other):
            return other.at - self.at


def test_calls_take_turns(script, monkeypatch):
    turns = script("turns")
    monkeypatch.setattr(torch.cuda, "Event", Clock.Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    order = []

    def run(name, took):
        def call():
            Clock.now += took
            if order[-1:] != [name]:
                order.append(name)

        return turns.Run(call)

    found = turns.by_turns({"slow": run("slow", 2.0), "fast": run("fast", 0.5)}, 3)
    assert found == {"slow": pytest.approx(2000.0), "fast": pytest.approx(500.0)}
    assert order == ["slow", "fast"] * 4


def test_decode_rows_are_what_they_should_be(script):
    decode = script("decode")
    assert len({row.name for row in decode.ROWS}) == len(decode.ROWS)
    assert {row.program for row in decode.ROWS} == set(decode.TEXTS)
    assert {row.q_len for row in decode.ROWS} == {1, 4, 16}
    assert {row.dim for row in decode.ROWS} == {64, 128, 256}
    assert all(row.heads % row.kv_heads == 0 for row in decode.ROWS)


def test_live_bytes_of_decode_rows(script):
    decode = script("decode")
    plain = decode.Row("one", 2, 1000, 4, 2, 64, 3)
    # k and v of 2 heads, q and the output of 4; 2 bytes each.
    assert decode.live_bytes(plain) == 2 * 64 * (2 * 2 * 2 * 1000 + 2 * 2 * 4 * 3)
    window = decode.Row("two", 1, 5000, 1, 1, 64, 4, "window")
    assert decode.live_bytes(window) == 2 * 64 * (2 * 1027 + 2 * 4)
    ragged = decode.Row("three", 500, 32768, ragged=True)
    lengths = decode.lengths_of(ragged)
    assert min(lengths) >= 16
    assert max(lengths) <= 32768
    assert 1600 < statistics.median(lengths) < 2600
    assert decode.copies_for(decode.live_bytes(decode.ROWS[0])) == 1
    assert decode.copies_for(decode.live_bytes(decode.Row("small", 1, 1024))) == 32


@pytest.mark.parametrize("program", ["plain", "window", "soft cap", "alibi", "distances", "sinks"])
@pytest.mark.parametrize("ragged", [False, True])
def test_columns_of_decode_rows_agree(script, monkeypatch, program, ragged):
    """``auto`` on a CPU beside torch's attention, and FlexAttention's functions beside both."""
    decode = script("decode")
    monkeypatch.setattr(decode, "WINDOW", 9)
    monkeypatch.setattr(decode, "_MEDIAN", 30)
    monkeypatch.setitem(decode.TEXTS, "window", "sliding_window(9)")
    row = decode.Row("one", 3, 60, 4, 2, 16, 2, program, ragged)
    calls = decode.Calls(row, "cpu", 2)
    assert calls.number == 10
    calls.of("auto")
    found = calls.first("auto").double()
    k, v = (x.double().repeat_interleave(2, 1) for x in calls._caches[0])
    b, h = torch.arange(3)[:, None, None, None], torch.arange(4)[:, None, None]
    rows, keys = torch.arange(2)[:, None], torch.arange(60)
    score, mask = decode.flex_functions(row, calls._lengths, calls._captures)
    dense = calls._q.double() @ k.mT * 0.25
    dense = dense if score is None else score(dense, b, h, rows, keys)
    dense = dense.masked_fill(~mask(b, h, rows, keys), -torch.inf)
    if program == "sinks":
        sinks = calls._captures["logit"].double()[:, None, None].expand(3, 4, 2, 1)
        weights = torch.cat((dense, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = dense.softmax(-1)
    wanted = weights.nan_to_num() @ v
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)
    if program in ("plain", "window") and min(decode.lengths_of(row)) > 1:
        calls.of("sdpa")
        torch.testing.assert_close(calls.first("sdpa").double(), wanted, atol=0.02, rtol=0.02)
        results = {"attndsl": found, "sdpa": calls.first("sdpa")}
        assert 0 < decode.difference(results) < 0.02
    elif program == "sinks":
        for column, match in (("sdpa", "no such score"), ("flex", "no sinks")):
            with pytest.raises(ValueError, match=match):
                calls.of(column)


def test_what_decode_rows_say(script):
    decode = script("decode")
    row = decode.Row("one", 1, 1000, 1, 1, 64)
    found = {
        "attndsl": {"eager": 20.0, "device": 10.0}, "auto": {"eager": 30.0, "device": 40.0},
        "sdpa": {"eager": 25.0, "device": 9.0}, "flex": {"why": "a reason"}, "difference": 0.001,
    }  # fmt: skip
    line = decode.line_of(row, found, {"copy": 1e12})
    assert line["best_eager"] == 1.25
    assert line["best_device"] == 0.9
    assert line["flex_why"] == "a reason"
    assert line["flex_tbs"] is None
    assert line["attndsl_tbs"] == pytest.approx(decode.live_bytes(row) / 10e-6 * 1e-12)
    assert line["of_copy"] == pytest.approx(line["attndsl_tbs"])
    failed = decode.line_of(row, {"why": "no answer within 150 s"}, None)
    assert failed["attndsl_why"] == "no answer within 150 s"
    assert failed["best_device"] is failed["of_copy"] is None


def test_rows_of_serving_are_what_they_should_be(script):
    serving = script("serving")
    assert len({row.name for row in serving.ROWS}) == len(serving.ROWS)
    assert {row.program for row in serving.ROWS} == set(serving.TEXTS)
    assert {row.page for row in serving.ROWS} == {1, 16, 128}
    row = serving.Row("one", 2, 1000, 16, 4, 2, 64, 3)
    # k and v of 2 heads, q and the output of 4; 2 bytes each.
    assert serving.live_bytes(row) == 2 * 64 * (2 * 2 * 2 * 1000 + 2 * 2 * 4 * 3)
    fp8 = serving.Row("two", 1, 5000, heads=1, kv_heads=1, dim=64, program="window", fp8=True)
    assert serving.live_bytes(fp8) == 64 * (2 * 1024 + 4)
    assert serving.copies_for(serving.live_bytes(serving.Row("small", 1, 1024))) == 32


def test_rows_of_the_cpu_agree_with_sdpa(script, monkeypatch, capsys, tmp_path):
    cpu = script("cpu")
    small = [dataclasses.replace(case, length=200) for case in cpu.CASES]
    monkeypatch.setattr(cpu, "CASES", small)
    monkeypatch.setattr(cpu, "LENGTHS", range(20, 30))
    monkeypatch.setattr("sys.argv", ["cpu.py", "--quick", "--output", str(tmp_path / "cpu.json")])
    cpu.main()
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [*(case.name for case in small), "growing cache"]
    assert all(row["attndsl_ms"] > 0 and row["difference"] < 1e-4 for row in rows)
    assert "documents1000" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="times are those of a made-up clock")
@pytest.mark.parametrize("program", ["plain", "window", "soft cap", "tree", "chunk"])
def test_columns_of_serving_rows_agree(script, monkeypatch, program):
    serving = script("serving")
    monkeypatch.setattr("columns.by_turns", lambda runs, rounds: dict.fromkeys(runs, 20.0))
    monkeypatch.setattr("columns.graph_of", lambda run, stream, calls: run._replace())
    monkeypatch.setattr("columns.Run.replay", property(lambda run: run.call), raising=False)
    fp8 = program == "soft cap"
    row = serving.Row("one", 2, 37, 4, 4, 2, 16, 3, program, fp8)
    if program == "chunk":
        row = serving.Row("one", 1, 90, 4, 4, 2, 16, 70)
    found = serving.found_of(serving.Calls(row, "cpu", 2), 1, None)
    line = serving.line_of(row, found)
    assert line["difference"] < 0.02
    assert line["of_dense"] == 1.0
    assert line["pages_device"] == 2.0
    assert "flashinfer" in line["flashinfer_why"]
    assert line["pages_tbs"] == pytest.approx(serving.live_bytes(row) / 2.0 * 1e-6)


def test_accuracy_of_fp8_is_measured_and_shown(script, tmp_path):
    fp8 = script("fp8")
    assert fp8.main(["--lengths", "100", "--output", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert {row["pages"] for row in rows} == set(fp8.KINDS)
    assert all(row["error"] < 1e-3 for row in rows if row["pages"] == "bf16")
    assert all(1e-3 < row["error"] < 0.2 for row in rows if row["pages"] != "bf16")
    page = " ".join((FOLDER.parent / "docs" / "serving.md").read_text("utf-8").split())
    kept = json.loads((FOLDER / "results" / "fp8.json").read_text())["rows"]
    assert {row["length"] for row in kept} == {4096, 32768, 131072}
    assert "Errors do not grow from 4096 to 131072 keys." in page
    best, others = fp8.KINDS[-1], fp8.KINDS[1:-1]
    for row in kept:
        if row["pages"] != "bf16" and row["length"] > 4096:
            (short,) = (
                x["error"] for x in kept
                if x["length"] == 4096 and all(x[n] == row[n] for n in ("program", "data", "pages"))
            )  # fmt: skip
            assert row["error"] < 1.05 * short, row
    best_errors = [row["error"] for row in kept if row["pages"] == best]
    least, most = f"{min(best_errors):.2g}", f"{max(best_errors):.2g}"
    worst = max(row["error"] for row in kept if row["pages"] in others)
    said = f"With scales per position and head, relative errors are {least} to {most}."
    assert f"{said} With other scales, they reach {worst:.2g}." in page


def test_a_gpu_rounds_pages_of_fp8_as_a_cpu_does():
    """What docs/serving.md says of accuracy on a GPU."""
    on_cpu, on_gpu = (
        json.loads((FOLDER / "results" / f"{name}.json").read_text())
        for name in ("fp8", "fp8_cuda")
    )
    assert on_gpu["machine"] == "NVIDIA H200"
    wide = []
    for one, other in zip(on_cpu["rows"], on_gpu["rows"], strict=True):
        told = ("length", "program", "data", "pages")
        assert [one[name] for name in told] == [other[name] for name in told]
        if one["pages"] != "bf16":
            assert other["error"] == pytest.approx(one["error"], rel=0.01)
        elif one["data"] != "needle":
            wide.append(other["error"])
        assert other.get("found", 1.0) == 1.0
    assert [f"{x:.2g}" for x in (min(wide), max(wide))] == ["0.0013", "0.0015"]
    page = " ".join((FOLDER.parent / "docs" / "serving.md").read_text("utf-8").split())
    assert "are within 1% of those on a CPU; with bf16 pages, they are 0.0013 to 0.0015." in page


def test_what_is_said_of_the_example_of_an_engine():
    found = json.loads((FOLDER / "results" / "serve_example.json").read_text())
    assert found["machine"] == "NVIDIA H200"
    rows = {row["way"]: row for row in found["rows"]}
    assert rows["steps"]["same"] == rows["graphs"]["same"] == rows["plain"]["requests"] == 64
    page = " ".join((FOLDER.parent / "docs" / "serving.md").read_text("utf-8").split())
    steps, graphs, plain = (rows[way]["bytes_per_second"] for way in ("steps", "graphs", "plain"))
    said = f"generates {steps:,.0f} bytes per second from Python and {graphs:,.0f} with CUDA graphs"
    assert f"{said}. Plain torch, one request at a time, generates {plain:.0f}." in page


def test_the_example_of_an_engine_is_timed(script, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.path", list(sys.path))
    example, path = script("serve_example"), tmp_path / "found.json"
    assert example.main(["--requests", "3", "--rounds", "1", "--output", str(path)]) == 0
    steps, plain = json.loads(path.read_text())["rows"]
    assert (steps["way"], plain["way"]) == ("steps", "plain")
    assert steps["same"] == 3
    assert steps["bytes"] == sum(count for _, count in example.prompts_of(3))
    assert min(steps["steps_per_second"], plain["bytes_per_second"]) > 0


def test_programs_of_the_gallery_are_timed(script, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    times = script("gallery_times")
    entries = times.entries()
    for name in ("softcap", "packed_documents.py"):
        row = times.measured(entries[name], tiny=True)
        assert row["difference"] < 1e-5
        assert row["forward_ms"] > 0
        assert row["backward_ms"] > 0
    broken = dataclasses.replace(entries["softcap"], text="score = softcap()")
    assert "softcap" in times.measured(broken, tiny=True)["why"]


def test_kernels_take_the_products_of_rows_of_the_gallery(script, monkeypatch):
    """Torch operations would take minutes at the gallery's length."""
    monkeypatch.setattr("sys.path", list(sys.path))
    times = script("gallery_times")
    found = []
    for name, entry in times.entries().items():
        if attndsl.compile(entry.text).lowered.contractions is None:
            continue
        case = times.Case(entry, times.LENGTH, times.DIM, "cpu")
        captures = {"captures": case.captures}
        assert why_tiles(*located_call(case.attention, tuple(case.operands), captures)) is None
        found.append(name)
    assert "latent.py" in found


def test_a_run_of_the_gallery_that_was_cut_goes_on(script, tmp_path, capsys):
    file = tmp_path / "times.json"
    rows = [{"name": "causal", "forward_ms": 1.0}, {"name": "alibi", "why": "time was up"}]
    file.write_text(json.dumps({"rows": rows}))
    found = script("gallery_times").main(
        ["--tiny", "--missing", "--rows", "causal", "--output", str(file)]
    )
    assert found == 0
    assert "causal" in capsys.readouterr().out
    assert json.loads(file.read_text()) == {"rows": rows}  # Nothing was measured.
    assert script("common").rows_with_figures("x", file) == rows[:1]
    assert script("common").rows_with_figures("x", tmp_path / "none.json") == []


def test_lists_of_keys_are_measured_and_checked(script, tmp_path, capsys):
    key_lists = script("key_lists")
    path = tmp_path / "key_lists.json"
    assert key_lists.main(["--device", "cpu", "--quick", "--output", str(path)]) == 0
    rows, told = json.loads(path.read_text())["rows"], capsys.readouterr().out
    assert [row["case"] for row in rows] == [case.name for case in key_lists.TINY]
    for row in rows:
        assert row["error"] < 1e-5
        assert min(row["forward_ms"], row["given_ms"]) > 0
    assert all(f"'{row['program']}'" in told for row in rows)


def test_lists_of_keys_that_come_out_wrong_are_an_error(script, monkeypatch):
    key_lists = script("key_lists")
    monkeypatch.setattr(key_lists, "error_of", lambda *_: math.nan)
    assert key_lists.main(["--device", "cpu", "--quick", "--cases", "tokens"]) == 1


def test_lists_of_keys_have_the_pairs_that_they_list(script):
    key_lists = script("key_lists")
    for case in key_lists.TINY:
        chosen = key_lists.lists_of(case, "cpu")
        live = key_lists.map_of(case, chosen)
        assert live.sum() == (chosen >= 0).sum()
        rows = chosen.flatten(0, -2)
        assert all(len(set(row.tolist()) - {-1}) == (row >= 0).sum() for row in rows)
        ends = torch.arange(1, chosen.shape[-2] + 1)[:, None] * case.queries
        assert not case.causal or (chosen * case.keys < ends).all()
