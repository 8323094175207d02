"""Random programs against the oracle: a few of them at each place, the same ones every time.

``make fuzz`` runs fresh ones. On GPUs ATTNDSL_FUZZ_COUNT, ATTNDSL_FUZZ_SEED and
ATTNDSL_FUZZ_PROCESSES say how many programs, from which seed, by how many processes.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzz import oracle
from fuzz.campaign import Plan, case_of, run, scale_of, table, try_seed
from fuzz.compare import Place, Verdict
from fuzz.generate import generate
from fuzz.operations import OPERATIONS
from fuzz.program import everything
from fuzz.text import text
from support.fork_server import run_python, run_script

import attndsl
from attndsl.backends.dense import interpret
from attndsl.ir import Op
from attndsl.serving import ragged_batch

SEED = 5
SCRIPT = Path(__file__).with_name("run.py")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACES = [
    (Place("reference"), 30),
    (Place("cpu"), 60),
    (Place("cpu", "float32"), 30),
    (Place("reference", parts=True), 40),
    (Place("cpu", parts=True), 40),
    (Place("reference", ragged=True), 30),
    (Place("cpu", ragged=True), 50),
    (Place("reference", served=True), 40),
    (Place("cpu", served=True), 60),
    (Place("cpu", graphs=True), 8),
]


def _holds(plan):
    report = run(plan)
    told = "\n\n".join(failure.reproduction for failure in report.failures)
    assert not report.failures, f"{table(report)}\n\n{told}"
    return report


@pytest.mark.parametrize(("place", "count"), PLACES, ids=lambda x: getattr(x, "backend", str(x)))
def test_random_programs(place, count):
    report = _holds(Plan((place,), count, SEED))
    # Cases that say nothing must stay few.
    assert report.traits["useful"] > 0.7 * count


@pytest.mark.skipif(not INTERPRETED, reason="kernels run on the GPU here")
@pytest.mark.parametrize("backend", ["triton", "short"])
def test_random_programs_in_interpreted_kernels(backend):
    _holds(Plan((Place(backend, "float32"),), 5, SEED))


@pytest.mark.skipif(not INTERPRETED, reason="kernels run on the GPU here")
@pytest.mark.filterwarnings("ignore:All-NaN")  # The interpreter's, of rows that do not exist.
@pytest.mark.parametrize("seed", [50862, 50699])
def test_scores_that_end_with_the_last_row(seed):
    """``log(18 - q)`` with 2 rows from 16 on, and 91 keys in two pieces, of which the first one had
    no mask: rows that do not exist made NaN of dK."""
    place = Place("short", "float32")
    assert re.search(r"- q\)", text(case_of(seed, place)))
    assert try_seed(seed, place).outcome.verdict is Verdict.GOOD


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("backend", ["auto", "triton", "short"])
def test_random_programs_on_the_gpu(backend, dtype):
    count, seed, processes = (
        int(os.environ.get(f"ATTNDSL_FUZZ_{name}", default))
        for name, default in (("COUNT", 20), ("SEED", SEED), ("PROCESSES", 1))
    )
    _holds(Plan((Place(backend, dtype, "cuda"),), count, seed, processes))


@pytest.mark.parametrize("seed", [8591, 10276, 13908])
def test_flat_functions_are_held_to_the_derivatives_of_torch(seed):
    """``tanh`` and ``sigmoid`` near 1: 1 - y * y of a rounded y has few right digits left."""
    assert try_seed(seed, Place("cpu", "float32")).outcome.verdict is Verdict.GOOD


def test_a_tensor_without_a_size_ends_no_run():
    """Of lengths that are a step's, a declared dim can be less than 0."""
    outcome = try_seed(883077, Place("cpu", served=True)).outcome
    assert (outcome.verdict, outcome.reason) == (
        Verdict.UNFIT, "a tensor that would have fewer than no elements"
    )  # fmt: skip


def test_a_tensor_that_is_too_large_ends_no_run(monkeypatch):
    monkeypatch.setattr(oracle, "MOST_ELEMENTS", 1)
    outcome = try_seed(1, Place("cpu")).outcome
    assert (outcome.verdict, outcome.reason) == (Verdict.UNFIT, "a tensor that is too large")


def test_a_defect_is_found_and_shrunk(monkeypatch):
    """``%`` that rounds towards 0, as in C, is found, and what is left of a program shows it."""
    monkeypatch.setitem(interpret.RULES, Op.MOD, lambda item, args, scope: torch.fmod(*args))
    place = Place("reference")
    for seed in range(1180, 1380):
        if "%" not in text(case_of(seed, place)):
            continue
        found = try_seed(seed, place, shrinking=60)
        if found.outcome.verdict.failed:
            break
    assert found.outcome.verdict in (Verdict.WRONG, Verdict.CRASHED)
    program = found.reproduction.split('"""')[1].strip()
    assert "%" in program
    assert len(program.splitlines()) <= 3
    # Without the defect, the printed program gives what it must.
    wanted = found.reproduction.split("must be ")[-1].split()[0]
    run_alone = run_python(found.reproduction)
    assert run_alone.returncode == 0, run_alone.stderr
    assert wanted[:4] in run_alone.stdout


def test_a_token_that_is_off_by_one_is_found(monkeypatch):
    real = ragged_batch.Packed

    def off(starts, *rest):
        return real(starts + 1, *rest)

    monkeypatch.setattr(ragged_batch, "Packed", off)
    report = run(Plan((Place("cpu", served=True),), 60, SEED, shrinking=0.0))
    assert any("token" in failure.reproduction for failure in report.failures)
    assert any("Served(attn" in failure.reproduction for failure in report.failures)


def test_a_reference_that_rounds_scores_is_refused():
    done = run_script(SCRIPT, "--dtype", "fp32,bf16", "--count", "1")
    assert done.returncode == 2
    assert "leave it out of --backend" in done.stderr


def test_an_interrupted_run_says_what_it_found():
    command = [sys.executable, str(SCRIPT), "--seed", "7", "--processes", "2", "--every", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = iter(process.stdout.readline, "")
        # The first line comes before the workers, the second one when there are cases.
        assert next(lines) == "seed 7\n"
        assert " cases, 0 failures, " in next(lines)
        process.terminate()
        rest = "".join(lines)
    assert process.returncode == 1
    assert re.search(r"^\d+ cases in \d+ s, interrupted$", rest, re.MULTILINE), rest
    assert "programs judged: " in rest


def test_programs_are_valid_and_cover_the_language():
    words = set()
    for seed in range(SEED, SEED + 80):
        case = generate(random.Random(seed))
        attndsl.compile(
            text(case), **{p.name: p.value for p in case.params if p.given.name == "BOUND"}
        )
        words |= {x.operation.word for x in everything(case) if hasattr(x, "operation")}
    assert scale_of(Place("cpu")).most < scale_of(Place("auto", device="cuda")).most
    missing = {x.word for x in OPERATIONS} - words
    assert len(missing) < 0.1 * len({x.word for x in OPERATIONS}), missing
