"""What judges results notices one wrong row among many, and one wrong element.

A result of 16,384 rows with a wrong one has the mean error of a right one.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import conftest
import pytest
import torch
from conftest import DTYPES

import attndsl
from attndsl import cli
from attndsl.backends.tiled.cpu import CPUBackend
from attndsl.cli import run_command
from attndsl.errors import PlanError
from attndsl.inspection import reference_check, tile_search
from attndsl.inspection.reference_check import Case

TEXT = "tensor gain[heads, kv_len]: float; mask = q + 40 > kv; score = score * gain[h, kv]"
SIZES = {"small": (2, 24, 24), "large": (1, 16_384, 48)}
"""Heads of q, rows of q and rows of k."""
ROWS = {"out", "lse", "dq"}
"""Results with a row for each query."""


def zeroed(x, row, stale):
    x[row] = 0


def of_the_neighbour(x, row, stale):
    x[row] = x[row - 1]


def stale(x, row, stale):
    x[row - 7 : row + 1] = stale[row - 7 : row + 1]


def not_a_number(x, row, stale):
    x[row] = torch.nan


def infinite(x, row, stale):
    x[row] = torch.inf


def of_other_sign(x, row, stale):
    x[row].neg_()


def larger(x, row, stale):
    x[row].mul_(1.5)


CHANGES = (zeroed, of_the_neighbour, stale, not_a_number, infinite, of_other_sign, larger)


@pytest.fixture(scope="module", params=[(d, s) for s in SIZES for d in DTYPES], ids="-".join)
def judged(request):
    """A call with right results, those of other operands, and what both are held to."""
    dtype, (heads, q_len, kv_len) = DTYPES[request.param[0]], SIZES[request.param[1]]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    attention = attndsl.compile(TEXT)
    three = [
        (draw(1, heads, q_len, 16), draw(1, 1, kv_len, 16), draw(1, 1, kv_len, 16)) for _ in "ab"
    ]
    gain, grads = draw(heads, kv_len), (draw(1, heads, q_len, 16), draw(1, heads, q_len).float())
    right, other = (
        Case(operands, {"gain": gain}, {}, ("gain",), True, *grads) for operands in three
    )
    reference = attndsl.compile(TEXT, backend="reference")
    exact = reference_check._run(reference, right, True)[0]
    return SimpleNamespace(
        dtype=dtype, attention=attention, case=right,
        found=reference_check.results(attention, right), stale=reference_check.results(attention,
        other),
        exact=exact, usual=reference_check.results(reference, right),
        spread=reference_check.spreads_of(reference, right, dtype),
    )  # fmt: skip


def changed(judged, name, change):
    """The results, with one row or element of ``name`` wrong."""
    value, stale = (x[name][0, -1].clone() for x in (judged.found, judged.stale))
    # Where many keys share the row, so that it is no larger than others.
    row = 15 if name in ROWS else len(value) // 2
    change(value, row, stale)
    whole = judged.found[name].clone()
    whole[0, -1] = value
    return {**judged.found, name: whole}


def in_own_names(results):
    """Names of results as the tests have them."""
    return {name.removeprefix("d"): x for name, x in results.items() if name != "dgain"}


def held_by_tests(judged, found):
    three = (in_own_names(x) for x in (judged.exact, judged.usual, found))
    conftest.close(*three, judged.dtype, spread=in_own_names(judged.spread))


def names_that_fail(judged, found):
    checks = reference_check.held_to_reference(
        judged.attention, judged.case, found, lambda line: None
    )
    return [check.name for check in checks if not check.ok]


def test_right_results_pass(judged, monkeypatch):
    kept(judged, monkeypatch)
    held_by_tests(judged, judged.found)
    assert names_that_fail(judged, judged.found) == []


@pytest.mark.parametrize("change", CHANGES)
def test_the_tests_notice_one_row(judged, change):
    for name in ("out", "dq", "dk", "dv"):
        with pytest.raises(AssertionError):
            held_by_tests(judged, changed(judged, name, change))


def test_the_tests_notice_one_row_without_the_programs_formulas(judged):
    for change in CHANGES[:-1]:
        results = (judged.exact, judged.usual, changed(judged, "out", change))
        three = [*map(in_own_names, results)]
        with pytest.raises(AssertionError):
            conftest.close(*three, judged.dtype)


@pytest.mark.parametrize("change", CHANGES)
def test_compare_notices_one_row(judged, change, monkeypatch):
    kept(judged, monkeypatch)
    for name in ("out", "dq", "dk", "dv"):
        assert names_that_fail(judged, changed(judged, name, change)) == [name]


@pytest.mark.parametrize("change", [zeroed, of_the_neighbour, not_a_number])
def test_one_log_sum_exp_is_noticed(judged, change, monkeypatch):
    kept(judged, monkeypatch)
    found = changed(judged, "lse", lambda x, row, stale: change(x, row, stale))
    assert names_that_fail(judged, found) == ["lse"]
    with pytest.raises(AssertionError):
        held_by_tests(judged, found)


def kept(judged, monkeypatch):
    """From now on the reference's results are those that are known already."""
    monkeypatch.setattr(reference_check, "_run", lambda *_: (judged.exact, {}))
    monkeypatch.setattr(reference_check, "results", lambda *_: judged.usual)
    monkeypatch.setattr(reference_check, "spreads_of", lambda *_: judged.spread)


def test_the_element_is_named(judged, monkeypatch):
    kept(judged, monkeypatch)
    found = changed(judged, "dv", lambda x, row, stale: x[row, 3].add_(100.0))
    checks = reference_check.held_to_reference(
        judged.attention, judged.case, found, lambda line: None
    )
    (check,) = (check for check in checks if not check.ok)
    row = judged.found["dv"].shape[2] // 2
    assert check.note.startswith(f"1 element is too far off: [0, 0, {row}, 3] by ")
    assert check.of_allowed > 1


def test_a_call_with_a_row_of_zeros(monkeypatch):
    attention, q = attndsl.compile("q - kv < 800"), torch.randn(1, 1, 4096, 8)
    k, right = torch.randn(1, 1, 64, 8), CPUBackend.forward
    assert attndsl.compare(attention, q, k, k).ok

    def forward(self, lowered, call):
        out, lse = right(self, lowered, call)
        out[0, 0, 700] = 0
        return out, lse

    monkeypatch.setattr(CPUBackend, "forward", forward)
    found = attndsl.compare(attention, q, k, k)
    # A backward takes rowsum(dO * O) from the output.
    assert {row.name for row in found.rows if not row.ok} == {"out", "dq", "dk"}


def test_a_run_with_a_row_of_zeros(monkeypatch, tmp_path, capsys):
    file, right = tmp_path / "a.attn", run_command.results
    file.write_text("causal()")

    def wrong(attention, case):
        found = right(attention, case)
        found["out"][0, 0, 700] = 0
        return found

    monkeypatch.setattr(run_command, "results", wrong)
    monkeypatch.setattr(run_command, "_CPU_SECONDS", 0.0)
    sizes = ["--q-len", "2048", "--kv-len", "64", "--heads", "1", "--batch", "1"]
    monkeypatch.setattr(sys, "argv", ["attndsl", "run", str(file), "--device", "cpu", *sizes])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert "[0, 0, 700, " in capsys.readouterr().out


@pytest.mark.parametrize("lengths", [(24, 24), (16_384, 256)])
@pytest.mark.parametrize("kind", [tile_search.EMPTY, tile_search.FULL])
def test_verify_notices_one_tile(lengths, kind, monkeypatch):
    right, size = tile_search.find_tiles, {"block_m": 8, "block_n": 8}
    assert attndsl.verify("q - kv < 9", *lengths, directions=["forward"], **size).live

    def wrong(*arguments):
        found = right(*arguments)
        kinds = found.kinds.clone()
        kinds[0, 0, 2, 1] = kind  # PARTIAL by the mask.
        return replace(found, kinds=kinds)

    monkeypatch.setattr(tile_search, "find_tiles", wrong)
    with pytest.raises(PlanError, match=r"tile \(2, 1\)"):
        attndsl.verify("q - kv < 9", *lengths, directions=["forward"], **size)


def test_products_of_less_precision_may_be_further_off():
    """Triton's kernels use TF32 where torch is told to, on GPUs."""
    attention, q = attndsl.compile("causal()"), torch.randn(1, 1, 24, 16)
    case = Case((q, q, q), {}, {}, grad_out=torch.randn(1, 1, 24, 16))
    before = torch.get_float32_matmul_precision()
    found = []
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            found.append(reference_check.spreads_of(attention, case, torch.float32))
    finally:
        torch.set_float32_matmul_precision(before)
    for name, exact in found[0].items():
        assert exact.norm() * 100 < found[1][name].norm() < found[2][name].norm(), name
    assert torch.equal(
        found[0]["dv"], reference_check.spreads_of(attention, case, torch.float32)["dv"]
    )
