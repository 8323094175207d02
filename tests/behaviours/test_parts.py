"""A part of a call means what the whole means."""

from __future__ import annotations

import pytest
import torch
from parts import PROGRAMS, SPLITS, make_case, part_of_whole, parts_of, results, whole_of


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("split", SPLITS)
def test_parts_equal_the_whole(backend, split):
    for name in PROGRAMS:
        torch.manual_seed(0)
        case = make_case(name, backend)
        whole = results(part_of_whole(whole_of(case), case, split), case.leaves())
        for shares in (False, True):
            found = results(parts_of(case, split, shares), case.leaves())
            for key, value in whole.items():
                torch.testing.assert_close(
                    found[key], value, rtol=1e-9, atol=1e-9,
                    msg=lambda text, at=(name, shares, key): f"{at}: {text}",
                )  # fmt: skip
