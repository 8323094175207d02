"""Sequences of calls of one object: a few dozen, the same ones every time, and faults they find."""

from __future__ import annotations

import random

import pytest
from fuzz import layouts, sequences, wrappers
from fuzz.campaign import Plan, run, table, try_seed
from fuzz.compare import Place, Verdict
from support.fork_server import run_python

from attndsl.backends.tiled import sdpa, step_plan

SEED = 7
CPU = Place("cpu", sequences=True)


@pytest.mark.parametrize(
    ("place", "count"),
    [
        (CPU, 25),
        (Place("cpu", "bfloat16", sequences=True), 12),
        (Place("reference", sequences=True), 10),
        (Place("auto", wrappers=True), 12),
        (Place("cpu", graphs=True, sequences=True), 1),
    ],
    ids=["cpu", "cpu bf16", "reference", "wrappers", "graphs"],
)
def test_sequences_of_calls(place, count):
    report = run(Plan((place,), count, SEED))
    told = "\n\n".join(failure.reproduction for failure in report.failures)
    assert not report.failures, f"{table(report)}\n\n{told}"
    good = report.verdicts[place.backend, place.dtype, Verdict.GOOD.value]
    assert good >= 0.7 * count


def _merged(value):
    return type(value), value


def test_a_key_that_merges_zeros_is_found_and_shrunk(monkeypatch):
    """0.0 after -0.0, or the reverse: the plan of one is used for the other."""
    assert try_seed(234, CPU).outcome.verdict is Verdict.GOOD
    monkeypatch.setattr(step_plan, "number_key", _merged)
    found = try_seed(234, CPU, shrinking=8)
    assert found.outcome.verdict is Verdict.WRONG
    assert found.reproduction.count("# Call ") == 2
    assert "-0.0" in found.reproduction
    alone = run_python(found.reproduction)  # The printed program runs by itself.
    assert alone.returncode == 0, alone.stderr


def test_a_lost_stride_is_found(monkeypatch):
    """An output whose last stride is not 1, which torch's kernel writes as if it were."""
    assert try_seed(797, CPU).outcome.verdict is Verdict.GOOD
    monkeypatch.setattr(sdpa, "rows_apart", lambda x: x)
    monkeypatch.setattr(sdpa, "rows_contiguous", lambda x, dtype=None: x)
    assert try_seed(797, CPU, shrinking=0).outcome.verdict is Verdict.WRONG


def test_layouts_cover_the_kinds():
    rng = random.Random(SEED)
    drawn = [layouts.draw(rng, (2, 1, 5, 4), signed=True) for _ in range(300)]
    assert any(x.strides[1] > 1 << 30 for x in drawn)
    assert any(x.strides[2] == 0 for x in drawn)
    assert any(x.strides[3] == 0 for x in drawn)
    assert any(x.length < 40 and 0 not in x.strides for x in drawn)
    assert any(x.negative for x in drawn)
    assert any(x.offset % 2 for x in drawn)
    assert any(x.strides[3] > x.strides[2] > 0 for x in drawn)


def test_the_same_seed_is_the_same_sequence():
    assert sequences.draw(SEED, CPU) == sequences.draw(SEED, CPU)


def test_a_leak_of_rows_in_no_sequence_is_found(monkeypatch):
    """NaN of rows behind the last sequence, where keys are all that lie in memory."""
    whole = "flash_attn_func(q_[None], k_[None], v_[None], causal=causal)[0][:n]"
    monkeypatch.setattr(wrappers, "CALLS", {"func": wrappers.CALLS["func"]})
    place = Place("auto", wrappers=True, nan=True)
    assert not run(Plan((place,), 6, SEED)).failures
    monkeypatch.setattr(wrappers, "CALLS", {"func": whole})
    failures = run(Plan((place,), 6, SEED)).failures
    assert len(failures) == 6
    assert "out[" in failures[0].reproduction
    assert " is nan" in failures[0].reproduction
