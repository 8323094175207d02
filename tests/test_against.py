"""benchmarks/against.py: its rows, its columns on a CPU, and what it says of records."""

import itertools
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from support.fork_server import run_script
from support.scripts import loader

import attndsl

FOLDER = Path(__file__).parents[1] / "benchmarks"
SHAPE = {"batch": 3, "heads": 4, "kv_heads": 2, "q_len": 50, "kv_len": 50, "dim": 8}


@pytest.fixture
def script(monkeypatch):
    """``script(name)``: a benchmark as a module."""
    return loader(monkeypatch, FOLDER)


def _row(script, program, **more):
    size = 7 if program in ("window", "prefix", "documents", "sink window") else 0
    given = {**SHAPE, "program": program, "size": size, "dtype": "fp32", **more}
    return script("against_rows").Row("small", **given)


def test_there_are_seventy_rows_and_thirty_drawn_ones(script):
    rows = script("against_rows")
    assert len(rows.FIXED) == 70
    assert len(rows.drawn(0)) == 30
    assert len(rows.every_row(0)) == 100 + len(rows.TINY)
    programs = {row.program for row in rows.FIXED}
    assert programs == set(rows.PROGRAMS) - {"prefix"}
    assert {row.q_len for row in rows.FIXED if row.decodes} == {1, 8, 64}


def test_a_seed_draws_the_same_rows_twice_and_another_one_others(script):
    rows = script("against_rows")
    assert rows.drawn(5) == rows.drawn(5)
    first, second = ({row.name.partition(": ")[2] for row in rows.drawn(n)} for n in (5, 6))
    assert len(first & second) < 3


def test_drawn_rows_are_within_their_ranges(script):
    rows = script("against_rows")
    every = [row for seed in range(60) for row in rows.drawn(seed)]
    assert {row.program for row in every} == set(rows.PROGRAMS)
    assert {row.heads // row.kv_heads for row in every} == set(range(1, 9))
    assert 0.1 < sum(row.dtype == "fp16" for row in every) / len(every) < 0.3
    for row in (*every, *rows.FIXED):
        assert row.work <= rows.MOST_WORK
        assert not row.decodes or row.live_bytes <= rows.MOST_CACHE
        assert row.heads % row.kv_heads == 0
    for row in every:
        assert row.dim in {32, 40, 64, 72, 80, 96, 112, 128, 192, 256}
        assert 4 <= row.heads <= 64
        assert row.kv_len % 2 == 1
        assert row.decodes or (row.q_len >= 64 and row.batch * row.q_len <= rows.MOST_TOKENS)
        assert row.q_len <= row.kv_len or row.program == "full"
        assert 0 < row.size < row.kv_len or "{size}" not in rows._TEXTS[row.program]


@pytest.mark.parametrize(
    "program", ["full", "causal", "window", "prefix", "documents", "padding", "t5", "sink window"]
)
def test_the_work_of_a_row_is_that_of_its_live_pairs(script, program):
    row = _row(script, program)
    captures = script("against_peers").captures_of(row, "cpu")
    ones, eye = torch.zeros(3, 4, 50, 8), torch.eye(50).expand(3, 2, 50, 50)
    zeros = {name: torch.zeros_like(x) if x.is_floating_point() else x
             for name, x in captures.items()}  # fmt: skip
    weights = attndsl.compile(row.text)(ones, ones[:, :2], eye, **zeros)
    assert row.work == pytest.approx(4.0 * 8 * int((weights > 0).sum()))


def test_peers_by_default_are_those_with_such_a_call(script):
    columns_of = script("against_rows").columns_of
    sdpa = ("cudnn", "fa2", "efficient")
    expected = {
        "full": (*sdpa, "fa4"), "causal": (*sdpa, "fa4"), "padding": sdpa,
        "window": ("flex", "flex_flash", "fa4"), "sink": ("fa4",),
        "documents": ("flex", "flex_flash", "fa4_varlen"), "t5": ("flex", "flex_flash"),
    }  # fmt: skip
    for program, peers in expected.items():
        assert columns_of(_row(script, program), None) == ("attndsl", *peers), program
    decoding = _row(script, "causal", q_len=1, decodes=True)
    assert columns_of(decoding, None) == ("attndsl", *sdpa, "fa4", "flashinfer")
    assert columns_of(decoding, ["flex"]) == ("attndsl", "flex")


@pytest.mark.parametrize(
    ("program", "decodes"),
    [*((program, False) for program in (
        "full", "causal", "window", "prefix", "documents", "padding", "soft cap", "alibi", "t5",
    )), *((program, True) for program in ("causal", "window", "soft cap", "alibi"))],
)  # fmt: skip
def test_flex_attention_gets_the_same_programs(script, program, decodes):
    peers = script("against_peers")
    # All buckets of T5 are met at this length.
    row = _row(script, program, q_len=5 if decodes else 300, kv_len=300, decodes=decodes)
    sides = peers.Sides(row, "cpu")
    ours = sides.of("attndsl")
    q, k, v = ours.inputs[0]
    score, mask = peers.flex_functions(row, sides._captures)
    b, h = torch.arange(3)[:, None, None, None], torch.arange(4)[:, None, None]
    rows, keys = torch.arange(row.q_len)[:, None], torch.arange(300)
    dense = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    dense = dense if score is None else score(dense, b, h, rows, keys)
    if mask is not None:
        dense = dense.masked_fill(~mask(b, h, rows, keys), -torch.inf)
    expected = dense.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(ours.function(q, k, v), expected, atol=1e-5, rtol=1e-5)


def _eager(peers, sides, column, direction):
    return peers.prepared(sides.of(column), direction, "eager", None).results


@pytest.mark.parametrize("program", ["full", "causal", "padding"])
def test_sdpa_runs_the_same_rows(script, program):
    peers = script("against_peers")
    sides = peers.Sides(_row(script, program), "cpu")
    for direction in ("forward", "backward"):
        ours, theirs = (_eager(peers, sides, x, direction) for x in ("attndsl", "fa2"))
        assert len(ours) == (1 if direction == "forward" else 3)
        assert peers.differences(ours, theirs) < 1e-5
        assert peers.differences(ours, [x + 0.1 for x in theirs]) > 0.02
        assert peers.differences(ours, [x * math.nan for x in theirs]) is None
    drafts = peers.Sides(_row(script, "causal", q_len=3, decodes=True), "cpu", copies=3)
    ours, theirs = (_eager(peers, drafts, x, "forward") for x in ("attndsl", "fa2"))
    assert peers.differences(ours, theirs) < 1e-5
    with pytest.raises(ValueError, match="no such score"):
        peers.Sides(_row(script, "alibi"), "cpu").of("cudnn")


def test_each_kernel_of_sdpa_is_its_own_in_compiled_functions(script):
    """Neither the guards of torch.compile nor its caches hold such a setting."""
    sides = script("against_peers").Sides(_row(script, "causal"), "cpu")
    traced = {column: sides.of(column).traced for column in ("fa2", "cudnn")}
    assert traced["fa2"](*sides._inputs[0]).shape == (3, 4, 50, 8)
    with pytest.raises(RuntimeError, match="No viable backend"):
        traced["cudnn"](*sides._inputs[0])


def _dense(q, k, v, *, causal=False, window_size=(None, None), softcap=0.0, learnable_sink=None):
    """FlashAttention-4's function for (batch, rows, heads, dim); causal is to the lower right."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    behind = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    left, right = window_size
    alive = (behind >= 0) if causal or right == 0 else torch.ones_like(behind, dtype=torch.bool)
    if left is not None:
        alive &= behind <= left
    scores = scores.masked_fill(~alive, -torch.inf)
    if learnable_sink is not None:
        sink = learnable_sink[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2), None


def _varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    parts = [
        _dense(*(x[None, start:end] for x in (q, k, v)), causal=causal)[0][0]
        for start, end in itertools.pairwise(cu_seqlens_q.tolist())
    ]
    return torch.cat(parts)


class _Pages:
    """FlashInfer's wrapper for pages of (kv heads, rows, dim)."""

    def __init__(self, room, layout, backend):
        assert layout == "HND"

    def plan(
        self, starts, pages, table, last, *sizes, causal, window_left, logits_soft_cap, **kind
    ):
        assert causal
        assert pages.diff().eq(1).all()
        assert table.tolist() == list(range(len(table)))
        self._starts, self._last = starts, last
        self._cap = logits_soft_cap or 0.0
        self._window = (window_left, 0) if window_left >= 0 else (None, None)

    def run(self, q, pages):
        each = [
            _dense(
                q[self._starts[n] : self._starts[n + 1]][None],
                *(x[n : n + 1, :, : self._last[n]].transpose(1, 2) for x in pages),
                causal=True, softcap=self._cap, window_size=self._window,
            )[0][0]
            for n in range(len(self._last))
        ]  # fmt: skip
        return torch.cat(each)


@pytest.fixture
def kits(monkeypatch):
    """Packages that are only where a GPU is, as plain functions of torch."""
    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func, cute.flash_attn_varlen_func = _dense, _varlen
    pages = types.ModuleType("flashinfer")
    pages.BatchPrefillWithPagedKVCacheWrapper = _Pages
    for name, module in (("flash_attn.cute", cute), ("flash_attn", types.ModuleType("flash_attn")),
                         ("flashinfer", pages)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("kits")
@pytest.mark.parametrize(
    ("column", "program"),
    [*(("fa4", x) for x in ("full", "causal", "window", "soft cap", "sink", "sink window")),
     ("fa4_varlen", "documents")],
)  # fmt: skip
def test_flash_attention_4_runs_the_same_rows(script, column, program):
    peers = script("against_peers")
    sides = peers.Sides(_row(script, program, dim=32), "cpu")
    for direction in ("forward", "backward"):
        ours, theirs = (_eager(peers, sides, x, direction) for x in ("attndsl", column))
        assert peers.differences(ours, theirs) < 1e-5, direction


@pytest.mark.usefixtures("kits")
@pytest.mark.parametrize(("column", "program"), [("fa4", "causal"), ("fa4_varlen", "documents")])
def test_flash_attention_4_has_no_gradients_at_some_head_dims(script, column, program):
    peers = script("against_peers")
    sides = peers.Sides(_row(script, program, dim=40), "cpu")
    ours, theirs = (_eager(peers, sides, x, "forward") for x in ("attndsl", column))
    assert peers.differences(ours, theirs) < 1e-5
    with pytest.raises(ValueError, match="multiples of 32"):
        _eager(peers, sides, column, "backward")


@pytest.mark.usefixtures("kits")
@pytest.mark.parametrize("program", ["causal", "window", "soft cap"])
def test_peers_decode_the_same_rows(script, program):
    peers = script("against_peers")
    sides = peers.Sides(_row(script, program, q_len=3, decodes=True), "cpu", copies=2)
    ours = _eager(peers, sides, "attndsl", "forward")
    for column in ("fa4", "flashinfer"):
        assert peers.differences(ours, _eager(peers, sides, column, "forward")) < 1e-5, column
    assert not torch.equal(ours[0], sides.of("attndsl").function(*sides._inputs[0]))


def test_kits_that_are_not_there_are_named(script):
    sides = script("against_peers").Sides(_row(script, "causal", q_len=1, decodes=True), "cpu")
    for column in ("fa4", "flex_flash", "flashinfer"):
        with pytest.raises(ImportError, match="flash"):
            sides.of(column)


def _record(name="a", direction="forward", difference=0.001, **times):
    """A record of the mode ``device``."""
    apart = {peer: difference for peer in times if peer != "attndsl"}
    return {"name": name, "direction": direction, "us": {"device": times}, "why": {"device": {}},
            "difference": {"device": apart}}  # fmt: skip


def test_losses_are_found(script):
    against = script("against")
    records = [
        _record("won", attndsl=10.0, cudnn=20.0, fa4=40.0),
        _record("close", attndsl=10.0, cudnn=9.85, fa4=40.0),
        _record("lost", attndsl=10.0, cudnn=9.0, fa4=8.0),
    ]
    found = against.figures(records)
    assert [(one.name, one.peer) for one in against.lost(found)] == [
        ("lost", "fa4"), ("lost", "cudnn"),
    ]  # fmt: skip
    assert [one.peer for one in against.fastest(found)] == ["cudnn", "cudnn", "fa4"]
    assert against.speeds(records) == [2.0, 0.985, 0.8]
    assert against.status(records) == 0
    said = against.report(records, ["later"])
    assert f"device, forward, cudnn: {(2.0 * 0.985 * 0.9) ** (1 / 3):.3f} of 3 rows, 1 lost" in said
    assert "LOST lost, forward, device: 10.0 us, fa4 8.0 us (0.800x)" in said
    assert "LOST close" not in said
    assert "difference won, forward, device: cudnn 0.1%, fa4 0.1%" in said
    assert "LEFT later" in said
    assert said.endswith("1 of 3 comparisons with the fastest peer lost by more than 2%; "
                         "1 rows left")  # fmt: skip


@pytest.mark.parametrize("difference", [0.05, None])
def test_wrong_results_count_nowhere_and_are_an_error(script, difference):
    against = script("against")
    records = [_record("a", attndsl=10.0, fa4=20.0), _record("b", attndsl=10.0, fa4=5.0)]
    records[1]["difference"]["device"]["fa4"] = difference
    assert against.status(records) == 1
    assert [one.name for one in against.figures(records)] == ["a"]
    assert "WRONG b, forward, device: fa4, " in against.report(records, [])
    # Where attndsl's own differ from those of its first mode, no figure of the mode counts.
    records[1]["difference"]["device"] = {"fa4": 0.001, "attndsl": difference}
    assert [one.name for one in against.figures(records)] == ["a"]
    with pytest.raises(ValueError, match="wrong or missing"):
        against.section({"rows": records})


def test_rows_without_a_figure_of_ours_are_an_error_and_those_of_peers_are_told(script):
    against, rows = script("against"), script("against_rows")
    records = against.records_of(rows.TINY[0], {"why": "it hangs"})
    assert [record["direction"] for record in records] == ["forward", "backward"]
    assert against.status(records) == 1
    assert "NOT MEASURED tiny: causal B2 H4/2 S40 D16 fp32, backward: it hangs" in against.report(
        records, []
    )
    records = [_record(fa4=3.0)]
    records[0]["why"]["device"]["attndsl"] = "no kernel"
    assert against.unmeasured(records) == ["a, forward, device: no kernel"]
    records = [_record(attndsl=3.0), _record("b", attndsl=3.0)]
    for record in records:
        record["why"]["device"]["fa4"] = "no module"
    said = against.report(records, [])
    assert "no figure of fa4, 2 times: no module" in said
    assert "NO PEER a, forward" in said
    assert against.status(records) == 0


def _results(records):
    versions = {"torch": "2", "triton": "3", "cudnn": 91900, "commit": "0123456789"}
    return {"machine": "GPU", "versions": versions, "seed": 4, "rows": records}


def test_the_page_has_a_section_once_there_is_a_file(script, monkeypatch):
    table = script("table")
    section = table.summary.AGAINST
    records = [_record("drawn 4.0: x", attndsl=10.0, fa4=8.0), _record(attndsl=10.0, fa4=20.0)]
    files = {"against": None}
    load = table.load
    monkeypatch.setattr(table, "load", lambda name: files[name] if name in files else load(name))
    assert section not in dict(table.sections())
    files["against"] = _results(records)
    text = dict(table.sections())[section]
    assert text.startswith(
        "## Every peer, at fixed and drawn shapes\n\n`against.json`: 2 shapes, 1 drawn by seed "
        "4; one GPU; torch 2, Triton 3, cuDNN 9.19; commit 0123456. "
    )
    assert "| device | forward | FA-4 | 1.26x | 2 | 1 |" in text
    assert "The fastest peer wins 1 of 2 comparisons:" in text
    assert "| drawn 4.0: x | forward | device | 10.0 | FA-4 | 8.0 | 0.80x |" in text
    files["against"] = _results(records[1:])
    assert dict(table.sections())[section].endswith("The fastest peer wins 0 of 1 comparisons.")
    assert script("against").answer(records) == (
        "geometric mean 1.26x the speed of the fastest peer (2 cases); a peer is more than 2% "
        "faster in 1"
    )


def test_tiny_rows_are_measured_on_a_cpu(tmp_path):
    output = tmp_path / "against.json"
    options = ("--device", "cpu", "--rows", "^tiny", "--quick", "--output", output)
    options += ("--processes", "0", "--seed", "3")
    late = run_script(FOLDER / "against.py", *options, "--limit", "0")
    assert late.returncode == 0, late.stderr
    assert late.stdout.count("LEFT tiny: ") == 4
    assert len(json.loads(output.read_text())["left"]) == 4
    done = run_script(FOLDER / "against.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[4/4, " in done.stderr
    found = json.loads(output.read_text())
    assert (found["seed"], found["modes"], found["left"]) == (3, ["eager"], [])
    assert found["machine"]
    assert "commit" in found["versions"]
    assert len(found["rows"]) == 7
    for row in found["rows"]:
        assert row["us"]["eager"].keys() == {"attndsl", "fa2"}
        assert row["difference"]["eager"]["fa2"] < 1e-4
        assert "No viable backend" in row["why"]["eager"]["cudnn"]
    again = run_script(FOLDER / "against.py", *options, "--resume")
    assert again.returncode == 0
    assert "[1/" not in again.stderr


def test_a_wrong_row_makes_a_run_fail(script, monkeypatch, tmp_path, capsys):
    against = script("against")
    ways = ("forward", "backward")
    found = {way: {k: v for k, v in _record(attndsl=1.0, fa2=2.0).items() if k != "direction"}
             for way in ways}  # fmt: skip

    def measured(script, cells, *rest, **more):
        return ((cell, found) for cell in cells)

    monkeypatch.setattr(against.worker, "measured", measured)
    monkeypatch.setattr("sys.argv", [
        "against.py", "--device", "cpu", "--rows", "^tiny.*S40", "--processes", "0", "--output",
        str(tmp_path / "found.json"),
    ])  # fmt: skip
    for way in ways:
        found[way].pop("name")
    assert against.main() == 0
    found["backward"]["difference"]["device"]["fa2"] = 0.5
    assert against.main() == 1
    assert (
        "WRONG tiny: causal B2 H4/2 S40 D16 fp32, backward, device: fa2" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "nothing such"], "no row has"), (["--rows", "("], "--rows ("),
        (["--peers", "fa9"], "there is no 'fa9'"), (["--modes", "graph"], "there is no 'graph'"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named(options, message):
    done = run_script(FOLDER / "against.py", "--device", "cpu", *options)
    assert done.returncode == 2
    assert message in done.stderr
