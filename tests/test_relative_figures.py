"""Figures of other systems in README.md and docs/compared.md, and the README's first program."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from support.scripts import loader

ROOT = Path(__file__).parents[1]


@pytest.fixture
def relative(monkeypatch):
    return loader(monkeypatch, ROOT / "benchmarks")("relative")


def _committed(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def _known(relative):
    """Result files with one row for each line of the tables, of times that are told apart."""
    sizes = {"B": 1, "H": 2, "D": 128}
    versions = {"torch": "1+x", "triton": "2", "cudnn": 91900, "commit": "0123456789"}

    def rows(cases, system, *, S):
        return [
            {**sizes, "S": S, "case": case, "direction": direction, "attndsl_ms": 2.0,
             f"{system}_ms": 2.0 * speed}
            for case in cases
            for direction, speed in (("forward", 3.0), ("backward", 0.5))
        ]  # fmt: skip

    decode = {"name": "x", "program": "plain", "q_len": 1, "ragged": False, "live_bytes": 1 << 20}
    decode |= {"attndsl_device": 2.0, "sdpa_device": 3.0, "flex_device": 5.0}
    decode |= {"attndsl_eager": 2.0, "sdpa_eager": 0.5}
    found = {
        relative.SPARSE: [
            *rows(["causal", "softcap"], "flex", S=8), *rows(["head_gain"], "flex", S=8),
        ],
        relative.DENSE: [
            *rows(["full"], "fa4", S=4096), *rows(["softcap"], "fa4", S=4096),
            *rows(["causal"], "cudnn", S=8192),
        ],
        relative.OTHER: [*rows(["full"], "cudnn", S=512), *rows(["full"], "fa2", S=513)],
        relative.decoding.DECODE: [decode, decode | {"q_len": 4, "sdpa_device": 8.0}],
        relative.decoding.SERVING: [{"flashinfer_device": 3.0, "pages_device": 4.0}],
    }  # fmt: skip
    return {
        name: {"machine": "GPU", "versions": versions, "rows": rows} for name, rows in found.items()
    }


def test_every_line_of_the_tables_is_of_its_own_rows(relative):
    files = _known(relative)
    files[relative.SPARSE]["rows"][-1]["flex_ms"] = 2000.0
    text = relative.everything(files.get)
    assert text.splitlines()[2:15] == [
        "| FlexAttention, 7 masks and scores | 3.00x | 0.50x |",
        "| FlexAttention, learned factor per head | 3.00x | 1000x |",
        "| FlexAttention, decoding, 1 query | 2.50x | - |",
        "| FlexAttention, other decoding | 2.50x | - |",
        "| FlashAttention-4, full and causal | 3.00x | 0.50x |",
        "| FlashAttention-4, soft cap | 3.00x | 0.50x |",
        "| FlashAttention-2, full and causal | 3.00x | 0.50x |",
        "| cuDNN, full and causal | 3.00x | 0.50x |",
        "| cuDNN, 512 tokens, from Python | 3.00x | 0.50x |",
        "| SDPA, decoding, 1 query | 1.50x | - |",
        "| SDPA, decoding, 1024 keys, from Python | 0.25x | - |",
        "| SDPA, other decoding | 4.00x | - |",
        "| FlashInfer, decoding, pages | 0.75x | - |",
    ]
    assert text.endswith(
        "One GPU, bf16, torch 1, Triton 2, cuDNN 9.19. Lengths 4096 to 8192 unless specified; "
        "FlexAttention at length 8, head dim 128. Commits 0123456."
    )
    assert set(relative.headlines(files.get).splitlines()) & set(text.splitlines())
    assert relative.headlines(lambda name: None) == relative.everything(lambda name: None) == ""
    files[relative.OTHER]["machine"] = "another"
    with pytest.raises(ValueError, match="several machines"):
        relative.everything(files.get)


def test_words_beside_the_figures_are_so(relative):
    said = relative.headlines(_committed)
    level = re.search(r"on par with FlashAttention-4 \((\S+)x to (\S+)x\)", said)
    assert 0.9 < float(level[1]) < float(level[2]) < 1.1
    speeds = {line: line.forward(_committed(line.file)["rows"]) for line in relative.LINES}
    counts = {f"{line.other}, {line.what}": len(found) for line, found in speeds.items()}
    assert counts["FlexAttention, 7 masks and scores"] == 7
    assert counts["SDPA, decoding, 1024 keys, from Python"] == 1
    (few,) = (line for line in relative.LINES if "1024 keys" in line.what)
    rows = {row["name"]: row for row in _committed(few.file)["rows"]}
    assert few.forward([rows["B1 x 1k"]]) == speeds[few]
    assert rows["B1 x 1k"]["kv_len"] == 1024
    (plain,) = (x for x in relative.LINES if (x.other, x.what) == ("SDPA", "decoding, 1 query"))
    assert sum(speed < 1 for speed in speeds[plain]) > len(speeds[plain]) / 2
    assert "SDPA is usually a little faster" in (ROOT / "README.md").read_text("utf-8")
    # Losses are shown where they are.
    lost = [
        line for line in relative.LINES if min(speeds[line]) < 0.9 and line.other != "FlashInfer"
    ]
    assert all(line.is_headline for line in lost)


def test_the_comparison_names_the_rows_that_each_system_wins(relative):
    page = " ".join((ROOT / "docs" / "compared.md").read_text("utf-8").split())
    rows = {
        row["name"]: row["flashinfer_device"] / row["pages_device"]
        for row in _committed(relative.decoding.SERVING)["rows"]
        if "flashinfer_device" in row
    }
    ours = {name for name, speed in rows.items() if speed > 1.01}
    assert "faster paged steps with fp8 pages, windows, few keys, and prompt chunks" in page
    assert ours == {"fp8", "window", "B1 x 1k", "chunk"}
    theirs = {name for name, speed in rows.items() if speed < 0.98}
    assert "faster paged steps in large batches, with a soft cap, and with 64 draft tokens" in page
    assert theirs == {
        "soft cap", "causal, 64 drafts", *(f"B32 x 4k, pages of {size}" for size in (1, 16, 128)),
    }  # fmt: skip
    assert "a wheel on PyPI, and a faster backward pass at head dim 128" in page
    backward = [
        row["fa4_ms"] / row["attndsl_ms"]
        for row in _committed(relative.DENSE)["rows"]
        if row["direction"] == "backward" and row["D"] == 128 and row["case"] != "softcap"
        and row.get("fa4_ms")
    ]  # fmt: skip
    assert sum(speed < 1 for speed in backward) > len(backward) / 2


def test_the_readme_shows_what_its_first_program_prints():
    text = (ROOT / "README.md").read_text("utf-8").partition("## A first program")[2]
    kinds = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (python, program), (kind, shown) = kinds[:2]
    assert (python, kind) == ("python", "text")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == shown
