"""Made-up captures."""

from __future__ import annotations

import torch

from attndsl.inspection.example_captures import make_captures, make_for_picture
from attndsl.pipeline import lower
from attndsl.source import Source

SIZES = {"batch": 2, "heads": 3, "kv_heads": 3, "q_len": 200, "kv_len": 300, "head_dim": 16}
ROWS = """
tensor x[heads, q_len, r]: float
tensor y[kv_len, r]: float
tensor z[n, s]: float
tensor i[kv_len, n]: int
score = score + dot(x[h, q, :], y[kv, :]) + z[i[kv, 0], 1]
"""


def test_rows_that_dot_takes_are_no_longer_than_kernels_take():
    program = lower(Source(ROWS), {}).program
    made = make_captures(program, SIZES, "cpu", torch.Generator())
    shapes = {name: tuple(x.shape) for name, x in made.items()}
    assert shapes == {"x": (3, 200, 64), "y": (300, 64), "z": (300, 300), "i": (300, 300)}
    made = make_captures(program, {**SIZES, "r": 5, "s": 7}, "cpu", torch.Generator())
    assert made["x"].shape == (3, 200, 5)
    assert made["z"].shape == (300, 7)


def test_ids_are_numbered_by_their_names_or_their_positions():
    """Others are in no order."""
    text = """
tensor doc_of[n]: int
tensor by_position[kv_len]: int
tensor other[n]: int
score = score + doc_of[q % n] + by_position[kv] + other[kv % n]
"""
    program = lower(Source(text), {}).program
    made = make_for_picture(program, {**SIZES, "n": 300}, seed=1).tensors
    rising = {name: bool((x.diff() >= 0).all()) for name, x in made.items()}
    assert rising == {"doc_of": True, "by_position": True, "other": False}
