"""Scaled dot product attention over lengths, head dims, dtypes, alignments, dropout and scales."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

Q_LENGTHS = (4, 8, 64, 128, 143, 256, 312, 512, 1024, 2048)
KV_LENGTHS = (4, 8, 64, 65, 128, 256, 408, 587, 1024, 2048)
HEAD_DIMS = (8, 9, 16, 21, 32, 57, 64, 72, 96, 128, 160, 192, 203, 256)
HALVES = (torch.float16, torch.bfloat16, torch.float32)


class Case(NamedTuple):
    batch: int
    q_len: int
    kv_len: int
    dim: int
    causal: bool
    dropout: float
    by_dim: bool
    """Whether the scale is 1 / head_dim."""
    dtype: torch.dtype
    heads: int = 2


def _compare(against_torch, case, device="cpu"):
    query, key, value = (
        torch.randn(case.batch, case.heads, length, case.dim, device=device)
        for length in (case.q_len, case.kv_len, case.kv_len)
    )
    against_torch(
        case.dtype, query=query, key=key, value=value, is_causal=case.causal,
        dropout_p=case.dropout, scale=1 / case.dim if case.by_dim else None,
    )  # fmt: skip


CASES = st.builds(
    Case,
    st.sampled_from((1, 2)),
    st.sampled_from(Q_LENGTHS[:7]),
    st.sampled_from(KV_LENGTHS[:7]),
    st.sampled_from(HEAD_DIMS),
    st.booleans(),
    st.sampled_from((0.0, 0.22, 0.48)),
    st.booleans(),
    st.sampled_from((*HALVES, torch.float64)),
    st.sampled_from((1, 3)),
)


@given(CASES)
@example(Case(1, 4, 4, 8, False, 0.0, False, torch.float64, 1))
@example(Case(1, 4, 408, 9, True, 0.48, True, torch.float32, 1))
@example(Case(1, 312, 4, 256, True, 0.22, False, torch.float32, 1))
@example(Case(2, 143, 65, 203, True, 0.0, True, torch.bfloat16, 3))
@example(Case(2, 143, 65, 57, False, 0.22, True, torch.float16, 3))
@example(Case(12, 267, 1, 8, False, 0.0, True, torch.float64, 3))
@example(Case(2, 1030, 267, 16, True, 0.0, False, torch.float64, 1))
@settings(
    max_examples=25, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_a_sample_of_the_grid(against_torch, case):
    _compare(against_torch, case)


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", HALVES, ids=["fp16", "bf16", "fp32"])
def test_every_length_and_head_dim(against_torch, dtype, dim, device):
    """A third of all pairs of lengths, another one with the next head dim or dtype.

    So each pair runs with 14 of 42. The rest of the grid comes in turns, by numbers of no common
    factor. All pairs with all dims were a sixth of all compilations of the suite on a GPU.
    """
    others = tuple(product((False, True), (0.0, 0.22, 0.48), (False, True), (1, 8)))
    turn = (HEAD_DIMS.index(dim) + HALVES.index(dtype)) % 3
    pairs = list(product(Q_LENGTHS, KV_LENGTHS))[turn::3]
    for number, (q_len, kv_len) in enumerate(pairs):
        own = number + number // 11 + 5 * HEAD_DIMS.index(dim)
        causal, dropout, by_dim, batch = others[own % len(others)]
        if device == "cpu":
            batch, dropout = 1, dropout if max(q_len, kv_len) <= 512 else 0.0
        _compare(
            against_torch, Case(batch, q_len, kv_len, dim, causal, dropout, by_dim, dtype), device
        )


@pytest.mark.slow
@pytest.mark.parametrize("length", [267, 1030])
@pytest.mark.parametrize("batch", [2, 12])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dim", [8, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_doubles_on_the_cpu(against_torch, length, batch, heads, dim, causal):
    case = Case(batch, length, length, dim, causal, 0.0, False, torch.float64, heads)
    _compare(against_torch, case)
