"""What kernels of earlier calls are used again for."""

import pytest
import torch

import attndsl

TEXT = "tensor gain[heads]: float; mask = q >= kv and q - kv < 9; score = gain[h] * score"


@pytest.mark.parametrize("name", ["q_offset", "kv_offset"])
def test_offsets_of_a_call_are_not_those_of_the_one_before(name, device):
    q, gain = torch.randn(1, 2, 40, 16, device=device), torch.rand(2, device=device)
    attention = attndsl.compile(TEXT, backend="triton")
    reference = attndsl.compile(TEXT, backend="reference")
    for offset in (0, 2, 1, 0, 5):
        found = attention(q, q, q, gain=gain, **{name: offset})
        wanted = reference(q, q, q, gain=gain, **{name: offset})
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
