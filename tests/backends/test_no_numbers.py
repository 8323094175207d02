"""Operands of NaN and infinity: results are the reference's, and are never invented."""

from __future__ import annotations

import pytest
import torch

import attndsl

TEXTS = ("score", "causal()", "kv < 9", "score = softcap(score, 9.0)")


def operands(what: str, rows: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8).to(dtype) for n in (rows, keys, keys))
    if what == "a row of q":
        q[0, 0, 0] = torch.nan
    elif what == "a key":
        k[0, 0, -1] = torch.nan
    elif what == "all keys":
        k[:] = torch.nan
    elif what == "a value":
        v[0, 0, 0] = torch.nan
    elif what == "scores of -inf":
        q[0, 0, 0] = torch.inf
        k = -k.abs() - 0.1
    elif what == "scores of 0":
        q = torch.zeros_like(q)
    return [q, k, v]


@pytest.mark.parametrize("keys", [1, 3, 7, 8, 15, 16, 17, 70])
@pytest.mark.parametrize(
    "what", ["a row of q", "a key", "all keys", "a value", "scores of -inf", "scores of 0"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_results_are_those_of_the_reference(what, keys, dtype):
    """torch's own attention says 0 of a row of NaN that has few keys."""
    for text in TEXTS:
        for rows in (1, 3, 150):
            given = operands(what, rows, keys, dtype)
            offset = keys - rows if "causal" in text else 0
            results = [
                attndsl.compile(text, backend=backend)(*given, q_offset=offset, return_lse=True)
                for backend in ("cpu", "reference")
            ]
            for ours, wanted in zip(*results, strict=True):
                torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_row_of_zeros_changes_no_bits_of_others():
    """Its log-sum-exp is 0, as that of rows that torch has taken for ones without keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 150, 16) for _ in range(3))
    zero = q.clone()
    zero[0, 0, 0] = 0.0
    found = [attndsl.compile("causal()", backend="cpu")(x, k, v) for x in (q, zero)]
    assert torch.equal(found[0][:, 1:], found[1][:, 1:])
    assert torch.equal(found[0][0, 0, 1:], found[1][0, 0, 1:])
    torch.testing.assert_close(found[1][0, 0, 0], v[0, 0, 0])
