"""Flexible attention 5: block structure comes from the program, and takes no memory to speak of."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attndsl

WINDOW = "q >= kv and q - kv < 1000"


class _Largest(TorchDispatchMode):
    """Remembers how much memory the largest tensor made has."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [
            x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, torch.Tensor)
        ]
        self.bytes = max(self.bytes, *sizes, 0)
        return result


def test_no_call_makes_anything_of_one_byte_a_pair(check, kernels):
    text = "(q + kv) % 3 == 0 or q - kv > 7 and kv % 5 < 3"
    # The CPU backend works in buffers of a fixed size, larger than those of interpreted kernels.
    length = 2048 if kernels.backend == "cpu" else 256
    inputs = check.inputs(kernels, torch.float32, batch=1, heads=1, q_len=length, dim=16)
    attention = attndsl.compile(text, backend=kernels.backend)
    with _Largest() as seen:
        check.run(attention, inputs.to(torch.float32))
    assert 0 < seen.bytes < length * length // 2


@pytest.mark.gpu
def test_8k_by_8k_takes_no_memory_of_that_order():
    q, k, v = (torch.randn(1, 1, 8192, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    attention = attndsl.compile(WINDOW, backend="triton")
    q.requires_grad_()
    attention(q, k, v).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8192 * 8192 // 4


def test_what_was_made_once_serves_other_keys_and_values(counted, device):
    from attndsl.backends.base import Call
    from attndsl.pipeline import lower
    from attndsl.source import Source

    lowered = lower(Source("q >= kv and q - kv < 20"), {})
    length = 48
    steps = torch.arange(length, device=device)
    away = steps[:, None] - steps
    live = (away >= 0) & (away < 20)
    sizes = {
        "batch": 1,
        "heads": 2,
        "kv_heads": 2,
        "q_len": length,
        "kv_len": length,
        "head_dim": 16,
    }
    for _ in range(2):
        q, k, v = (torch.randn(1, 2, length, 16, device=device) for _ in range(3))
        out, _ = counted.forward(lowered, Call(q, k, v, 0.25, sizes))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, live, scale=0.25)
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    assert counted.kernels_built == 1


MASKS = {
    "window": ("0 <= q - kv and q - kv < 16", lambda q, kv: (q >= kv) & (q - kv < 16)),
    "dilated": ("q >= kv and (q - kv) % 3 == 0", lambda q, kv: (q >= kv) & ((q - kv) % 3 == 0)),
    "blocks": ("q // 10 == kv // 10", lambda q, kv: q // 10 == kv // 10),
    "ends": ("kv < 4 or kv >= kv_len - 4", lambda q, kv: (kv < 4) | (kv >= kv.numel() - 4)),
    "anti": ("q + kv >= 40", lambda q, kv: q + kv >= 40),
    "bits": ("((q ^ kv) & 8) == 0", lambda q, kv: ((q ^ kv) & 8) == 0),
    "prefix": ("q >= kv or kv < 10", lambda q, kv: (q >= kv) | (kv < 10)),
    "far": ("abs(q - kv) > 30", lambda q, kv: (q - kv).abs() > 30),
}


@pytest.mark.few_when_interpreted(name=["window", "anti", "bits"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_against_brute_force(check, place, name):
    """No live pair is skipped and no dead one taken, whatever the block structure found."""
    text, live = MASKS[name]
    inputs = check.inputs(
        place, torch.float32, batch=1, heads=1, q_len=77, kv_len=83, with_lse=True
    )
    check(place, text, inputs, lambda s, e: (s, live(e.q, e.kv)))
