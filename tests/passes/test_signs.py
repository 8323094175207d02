"""Absolute values that a mask makes needless, and those that stay."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attndsl.frontend import read
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.print_ir import print_expression
from attndsl.passes.signs import with_known_signs
from attndsl.passes.simplify import simplify
from attndsl.passes.split_mask import split_mask
from attndsl.pipeline import lower
from attndsl.source import Source

ADDED = "score - 0.5 * float(q - kv)"
AROUND = "score - 0.5 * float(abs(q - kv))"


def score_of(text: str) -> str:
    return print_expression(lower(Source(text), {}).program.score)


@pytest.mark.parametrize(
    "mask",
    [
        "q >= kv",
        "kv <= q",
        "q > kv",
        "q - kv > -1",
        "0 <= q - kv < 9",
        "q >= kv + 3",
        "kv < 9 and (q - kv >= 0 and q < 40)",
        "q - kv == 7",
        "2 * q - kv >= q",
        "not q < kv",
    ],
)
def test_a_distance_that_is_not_negative(mask: str) -> None:
    assert score_of(f"mask = {mask}; score = score - 0.5 * abs(q - kv)") == ADDED
    assert score_of(f"mask = {mask}; score = score - 0.5 * abs(kv - q)") == ADDED
    assert score_of(f"mask = {mask}; score = score - 0.5 * abs(float(q - kv))") == ADDED
    assert score_of(f"score = where({mask}, score - 0.5 * abs(kv - q), -inf)") == ADDED


@pytest.mark.parametrize(
    "mask",
    [
        "q >= kv or kv < 4",
        "q >= kv - 1",
        "q + kv_len - q_len >= kv",
        "q != kv",
        "q < 30",
        "score > 0.0 and kv < 9",
        "float(q) >= kv",
        "abs(q - kv) < 9",
        "4611686018427387904 * q >= 4611686018427387904 * kv",
    ],
)
def test_a_distance_of_either_sign(mask: str) -> None:
    assert score_of(f"mask = {mask}; score = score - 0.5 * abs(q - kv)") == AROUND


def test_without_a_mask() -> None:
    assert score_of("score = score - 0.5 * abs(q - kv)") == AROUND


def test_params_and_tensors_may_wrap() -> None:
    heads = "param n: int; tensor t[heads]: int; "
    for far in ("n", "t[h]"):
        text = f"{heads}mask = q >= {far}; score = score + abs(q - {far}) + n + t[h]"
        assert "abs" in score_of(text)


def test_weights_too() -> None:
    text = "mask = q >= kv; weights = sigmoid(score) / (1 + abs(q - kv))"
    plain = text.replace("abs(q - kv)", "(q - kv)")
    assert lower(Source(text), {}).digest == lower(Source(plain), {}).digest


def test_masks_that_read_the_score() -> None:
    text = "mask = q >= kv; score = score - abs(q - kv); mask = score > -9.0"
    plain = text.replace("abs(q - kv)", "(q - kv)")
    assert lower(Source(text), {}).digest == lower(Source(plain), {}).digest


def test_a_mask_of_positions_stays() -> None:
    program = lower(Source("mask = q >= kv and abs(q - kv) < 9"), {}).program
    assert program.mask is not None
    assert print_expression(program.mask) == "kv <= q and abs(q - kv) < 9"


def test_parts_of_rows_and_columns() -> None:
    placed = lower(Source("mask = q >= kv; score = score - 0.5 * abs(q - kv)"), {}).placed
    assert print_expression(placed.pair) == "score"
    assert placed.row is not None
    assert placed.steepness is not None


NUMBERS = st.integers(-3, 3)
SUMS = st.builds("{} * q + {} * kv + {}".format, NUMBERS, NUMBERS, NUMBERS)
CONDITIONS = st.builds("{} {} {}".format, SUMS, st.sampled_from(["<=", "<", "==", ">", "!="]), SUMS)
MASKS = st.recursive(
    CONDITIONS, lambda x: st.builds("({} {} {})".format, x, st.sampled_from(["and", "or"]), x),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(MASKS, SUMS, SUMS)
def test_live_pairs_keep_their_scores(mask: str, first: str, second: str) -> None:
    text = f"mask = {mask}; score = score + abs({first}) - 0.5 * abs(float({second}))"
    before = simplify(split_mask(read(Source(text), {})))
    after = with_known_signs(before)
    for q, kv in itertools.product(range(-4, 5), repeat=2):
        pair = Environment({"q": q, "kv": kv, "score": 0.25})
        alive = [x.mask is None or evaluate(x.mask, pair) for x in (before, after)]
        assert alive[0] == alive[1]
        if alive[0]:
            assert evaluate(before.score, pair) == evaluate(after.score, pair)


def test_shared_sums_take_no_time() -> None:
    lines = ["x0 = q - kv", *(f"x{n} = x{n - 1} + x{n - 1}" for n in range(1, 60))]
    lines += ["mask = x59 >= 0", "score = score - abs(x59)"]
    start = time.perf_counter()
    lower(Source("\n".join(lines)), {})
    assert time.perf_counter() - start < 5.0


def test_a_distance_of_zero() -> None:
    assert score_of("mask = q == kv; score = score - 0.5 * abs(q - kv)") == ADDED
