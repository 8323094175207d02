"""What pages say of decoding and of serving is what their result files say."""

import itertools
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from support.scripts import loader

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def script(monkeypatch):
    """``script(name)``: a file of benchmarks/ as a module."""
    return loader(monkeypatch, ROOT / "benchmarks")


def _results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def _rows(name):
    rows = _results(name)["rows"]
    return {row["name"]: row for row in rows if row["name"] != "ceilings"}


def _page(name):
    return " ".join((ROOT / name).read_text("utf-8").split())


def _row(name, **given):
    """A row of benchmarks/decode.py: 1 us and 2 TB/s of attndsl, unless ``given`` says more."""
    row = {
        "name": name, "batch": 8, "kv_len": 32768, "heads": 32, "kv_heads": 8, "dim": 128,
        "q_len": 1, "program": "plain", "ragged": False, "live_bytes": 1 << 30, "of_copy": 0.5,
        "best_eager": 0.25, "attndsl_device": 100.0, "attndsl_tbs": 2.0, "attndsl_eager": 200.0,
    }  # fmt: skip
    return row | given


KNOWN = [
    {"name": "ceilings", "copy": 4e12},
    _row("B8 x 32k", sdpa_device=200.0, sdpa_tbs=1.0, flex_device=50.0, flex_tbs=4.0),
    _row("one", sdpa_device=50.0, sdpa_tbs=4.0, sdpa_eager=123.4, flex_why="MemoryError: no"),
    _row("16", q_len=16, sdpa_device=700.0, sdpa_tbs=0.3, flex_why="RuntimeError: x"),
    _row("cap", program="soft cap", attndsl_device=110.0,
         sdpa_why="ValueError: it has no such score", flex_why="no answer within 150 s"),
    _row("small", program="window", live_bytes=1 << 20, attndsl_device=9.04,
         sdpa_why="OutOfMemoryError: x", flex_device_why="y"),
]  # fmt: skip


def _known():
    versions = {"torch": "1", "triton": "2", "cudnn": 91900, "commit": "0123456789"}
    return {"benchmark": "decode", "machine": "A & B", "date": "2000-01-01", "versions": versions,
            "rows": KNOWN}  # fmt: skip


def test_the_chart_is_that_of_the_result_file(script):
    chart = script("decode_chart")
    now = chart.svg(chart.committed())
    assert chart.OUTPUT.read_text("utf-8") == now, "run benchmarks/decode_chart.py --write"
    assert "](decode.svg)" in (ROOT / "docs" / "serving.md").read_text("utf-8")


def test_every_row_and_system_is_drawn_or_said(script):
    chart = script("decode_chart")
    found = chart.committed()
    rows, lines = _rows("decode"), [line for group in found.groups.values() for line in group]
    assert sorted(line.name for line in lines) == sorted(rows)
    notes = " ".join(found.notes)
    for line in lines:
        for system, name in chart.decoding.SYSTEMS.items():
            row, drawn = rows[line.name], [bar for bar in line.bars if bar.system == system]
            if row.get(f"{system}_device") is None:
                assert not drawn
                assert re.search(rf"{name} at [^;.]*\b{line.name}\b", notes)
            else:
                assert (drawn[0].tbs, drawn[0].us) == (
                    row[f"{system}_tbs"],
                    row[f"{system}_device"],
                )
    assert "17.5x (window)" in notes


def test_bars_are_as_long_as_their_bandwidth(script):
    chart = script("decode_chart")
    found = chart.chart(_known())
    root = ET.fromstring(chart.svg(found))
    bars = [each.attrib for each in root.iter(f"{SVG}rect") if each.get("x") == str(chart.LEFT)]
    assert [bar["class"] for bar in bars] == [
        "attndsl", "sdpa", "flex", "attndsl", "sdpa", "attndsl", "sdpa", "attndsl", "attndsl",
    ]  # fmt: skip
    full = chart.RIGHT - chart.LEFT
    lengths = [float(bar["width"]) / full for bar in bars]
    assert lengths == pytest.approx([0.5, 0.25, 1, 0.5, 1, 0.5, 0.075, 0.5, 0.5], abs=1e-3)
    lines = [each.get("d") for each in root.iter(f"{SVG}path") if each.get("class") == "copy"]
    assert all(line.startswith(f"M{chart.RIGHT}.0 ") for line in lines[1:])
    assert len(lines) == 1 + len(found.groups) == 4
    assert found.notes[1:] == (
        "Calls of 1 MB wait for more than memory: small.",
        "A copy writes half of its bytes, decoding next to none.",
        "Faster than SDPA: 7.0x (16).",
        "No such score, or no sinks: SDPA at cap.",
        "No answer in time: FlexAttention at cap.",
        "Out of memory: SDPA at small.",
        "Not measured, since the benchmark failed: FlexAttention at one, 16 and small.",
    )
    assert "one: attndsl 2.00, SDPA 4.00." in root.find(f"{SVG}desc").text
    assert "one         B8 x 32k" in chart.text(found)
    with pytest.raises(ValueError, match="no bandwidth of a copy, or no rows"):
        chart.chart(_known() | {"rows": KNOWN[1:]})
    with pytest.raises(ValueError, match="no bandwidth of a copy, or no rows"):
        chart.chart(_known() | {"rows": KNOWN[:1]})
    with pytest.raises(ValueError, match="no time of attndsl at 'x'"):
        chart.chart(_known() | {"rows": [KNOWN[0], _row("x", attndsl_device=None)]})


def test_a_missing_file_is_named(script, monkeypatch, capsys):
    chart = script("decode_chart")
    monkeypatch.setattr(chart, "load", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["decode_chart.py"])
    assert chart.main() == 1
    assert "there is no benchmarks/results/decode.json" in capsys.readouterr().err


@pytest.mark.parametrize("committed", [True, False])
def test_no_text_of_the_chart_covers_another(script, committed):
    chart = script("decode_chart")
    root = ET.fromstring(chart.svg(chart.committed() if committed else chart.chart(_known())))
    sizes = {"t": 16, "h": 13, "n": 11, "o": 11, "f": 11}
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


def test_colours_are_seen_on_both_backgrounds(script):
    """WCAG 2.2 wants a contrast of 3 for graphics (1.4.11)."""
    chart = script("decode_chart")

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for theme, colour in itertools.product((chart.LIGHT, chart.DARK), chart.COLOURS.values()):
        low, high = sorted((luminance(colour), luminance(theme["back"])))
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_tables_say_why_a_time_is_missing(script):
    decoding = script("decoding")
    text = decoding.decode_tables(_known())
    assert "A copy reaches 4.00 TB/s" in text
    assert "one A & B; torch 1, Triton 2, cuDNN 9.19; commit 0123456." in text
    head = "8 x 32768, 32/8 heads, D128, "
    assert f"| one | {head}1 query | 100 | 50 | failed | 2 | 4 | - | 0.5 |" in text
    assert f"| cap | {head}1 query | 110 | cannot | slow | 2 | - | - | 0.5 |" in text
    assert f"| small | {head}1 query | 9.04 | memory | failed | 2 | - | - | 0.5 |" in text
    assert f"| one | {head}1 query | 200 | 123 | failed | 0.25 |" in text
    assert decoding.decode_tables(None) == decoding.serving_tables(None) == ""
    with pytest.raises(ValueError, match="it has to have all rows"):
        decoding.points(_known() | {"rows": KNOWN[:1]})
    with pytest.raises(ValueError, match="of several machines"):
        decoding.points(_known(), _known() | {"machine": "C"})
    assert decoding.points(_known(), None).startswith("attndsl on one A & B:\n\n- Decoding with")
    assert decoding.points(None) == decoding.of_memory(None, {}) == ""


def test_sentences_say_what_the_rows_say(script):
    decoding = script("decoding")
    assert decoding.plain_decoding(KNOWN) == (
        "0.50x to 2.00x the speed of SDPA, geometric mean 1.00x over 2 shapes (SDPA is faster in "
        "1); 0.50x the speed of FlexAttention (FlexAttention is faster in 1)"
    )
    assert decoding.masked_decoding(KNOWN) == (
        "7.00x the speed of SDPA (1 case); no figure for FlexAttention"
    )
    assert decoding.scores(KNOWN) == "0.91x the speed of the plain program (1 case)"
    assert decoding.bandwidth(KNOWN) == (
        "0.50x the bandwidth of a copy (4 cases); `small` reads 1 MB in 9.0 us"
    )
    assert decoding.eager_decoding(KNOWN) == (
        "0.25x the speed of the faster of SDPA and FlexAttention (2 cases)"
    )
    served = [
        {"of_dense": 0.5, "gathered_device": 8.0, "pages_device": 2.0},
        {"of_dense": None, "gathered_why": "x", "pages_device": 2.0},
    ]
    assert decoding.beside_dense(served) == "0.50x the speed of a dense cache (1 case)"
    assert decoding.beside_gathered(served).startswith("4.00x the speed of gathering keys")


def test_pages_say_in_words_what_the_figures_say(script):
    """What stands beside the tables, and is not written by a script."""
    decode, serving = _rows("decode"), _rows("serving")
    plain = [row for row in decode.values() if row["q_len"] == 1 and row["program"] == "plain"
             and not row["ragged"]]  # fmt: skip
    assert len(plain) == 8
    ahead = [row["sdpa_device"] < row["attndsl_device"] for row in plain]
    page = _page("docs/serving.md")
    assert "**SDPA** is slightly faster in most plain decoding cases." in page
    assert sum(ahead) > len(ahead) / 2
    assert all(row["sdpa_device"] > 0.85 * row["attndsl_device"] for row in plain)
    few = decode["B1 x 1k"]
    assert few["sdpa_eager"] < few["attndsl_eager"] / 2
    assert few["sdpa_device"] > 0.85 * few["attndsl_device"]
    wanted = "is faster than bf16 pages, especially for 1024 keys and for a window. fp8 pages are"
    assert wanted in page
    dense = {name: row["of_dense"] for name, row in serving.items() if row["of_dense"]}
    assert {name for name, ratio in dense.items() if ratio > 0.99} == {"fp8"}
    assert sorted(dense, key=dense.get)[:2] == ["B1 x 1k", "window"]
    eager = {name for name in dense
             if serving[name]["dense_eager"] > serving[name]["pages_eager"]}  # fmt: skip
    assert eager >= {"B1 x 1k", "window", "fp8"}
    assert "From Python, pages are faster for 1024 keys and for a window" in page
    other = {name: row["flashinfer_device"] / row["pages_device"]
             for name, row in serving.items() if "flashinfer_device" in row}  # fmt: skip
    assert set(serving) - set(other) == {"tree"}
    assert "is slower for 1024 keys, a window, fp8 and especially a prompt chunk." in page
    assert "It matches attndsl for one long request, and is faster in the other cases" in page
    assert "in the other cases, especially for 64 drafts." in page
    slower = {"B1 x 1k", "window", "fp8", "chunk"}
    assert {name for name, ratio in other.items() if ratio > 1.01} == slower
    equal = {name for name, ratio in other.items() if 0.98 < ratio < 1.01}
    assert equal == {"B1 x 128k, pages of 16", "B1 x 128k, pages of 128"}
    assert min(other, key=other.get) == "causal, 64 drafts"
    assert max(other, key=other.get) == "chunk"
    assert "pages of 1 cost no more than pages of 16" in page
    one, sixteen = (serving[f"B32 x 4k, pages of {size}"]["pages_device"] for size in (1, 16))
    assert one <= sixteen
    gathered = {name: row["gathered_device"] / row["pages_device"] for name, row in serving.items()}
    assert min(gathered, key=gathered.get) == "chunk"
    assert max(gathered, key=gathered.get) == "window"


ON_H100 = ("gallery_times",)
"""Result files that were measured on an H100. All others of GPUs are an H200's."""


def test_pages_name_what_is_not_measured_and_the_machines(script):
    page = _page("docs/results/decoding.md")
    assert {row.name for row in script("serving").ROWS} == set(_rows("serving"))
    without = {name for name, row in _rows("serving").items() if "flashinfer_device" not in row}
    assert without == {"tree"}
    assert "FlashInfer has no time in the row `tree`." in page
    graphless = {name for name, row in _rows("serving").items() if not row.get("planned_device")}
    assert graphless == {"chunk"}
    assert "`planned` has no CUDA graph time in the row `chunk`." in page
    assert {row.name for row in script("decode").ROWS} == set(_rows("decode"))
    why = {name: row.get("flex_why", "") for name, row in _rows("decode").items()}
    assert [name for name, said in why.items() if "InductorError" in said] == ["64 requests"]
    assert "FlexAttention has no time in the row `64 requests`" in page
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        machine = json.loads(path.read_text("utf-8"))["machine"]
        if "NVIDIA" in machine:
            assert ("H100" in machine) == (path.stem in ON_H100), path.stem
    assert "H100" not in _page("README.md").partition("## A first")[0]
    for name in ("docs/benchmarks.md", "docs/versions.md"):
        assert re.search(r"gallery .{,30}H100, (and )?all .{,40}H200", _page(name)), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_row_compiles_flex_attention_anew(script, monkeypatch):
    """Dynamo takes a number that has changed for one that changes, which some masks cannot be."""
    from torch.nn.attention import flex_attention as flex

    made = flex.create_block_mask

    def by_dynamo_alone(*args, _compile, **named):
        return torch.compile(made, backend="eager")(*args, **named)

    monkeypatch.setattr(flex, "create_block_mask", by_dynamo_alone)
    decode = script("decode")
    for q_len in (1, 4):
        row = decode.Row("small", 1, 256, 2, 1, 8, q_len)
        assert callable(decode.Calls(row, "cpu", 1)._flex())
