"""Steps of few tokens: rows that a request has no token for read none that is not there."""

import pytest
import torch
from support.serving import Shape, make_step, one_by_one

import attndsl


@pytest.mark.parametrize("counts", [(1, 0), (0, 1), (1, 0, 0), (1, 1)])
@pytest.mark.parametrize("most", [None, 1, 3])
def test_requests_without_queries_beside_the_only_ones(counts, most):
    attention = attndsl.compile("causal()")
    step = make_step((5, 4, 9)[: len(counts)], counts, Shape(spare=0))
    found = attention.serve(step.q, step.cache, step.starts, most_queries=most, return_lse=True)
    for one, other in zip(found, one_by_one(attention, step), strict=True):
        torch.testing.assert_close(one, other)
