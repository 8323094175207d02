"""A quick start on a Hopper GPU: portable kernels first, Hopper's soon, and the same results."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from attndsl.runtime.dispatch import why_no_hopper_kernels

CODE = """
import time, torch, attndsl
from attndsl.runtime.dispatch import get_backend
q, k, v = (torch.randn(1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
           for _ in range(3))
attention = attndsl.compile("causal()")
compiled = torch.compile(attention, fullgraph=True) if {compiled} else attention
wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
gradients = torch.autograd.grad(wanted.float().square().sum(), (q, k, v))
def names():
    layouts = get_backend("auto")._layouts.values()
    return sorted({{layout.family.name for layout in layouts}})
def step():
    out = compiled(q, k, v)
    found = out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))
    for one, other in zip(found, (wanted, *gradients), strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
step()
assert names() == [], names()
waiting = get_backend("auto")._meanwhile._waiting
end = time.time() + 60
while (names() != ["hopper"] or waiting) and time.time() < end:
    step()
assert (names(), len(waiting)) == (["hopper"], 0)
for _ in range(3):
    step()
print("ok")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_hoppers_kernels_take_over(monkeypatch, tmp_path, compiled):
    if torch.cuda.get_device_capability() != (9, 0) or why_no_hopper_kernels() is not None:
        pytest.skip("no Hopper GPU")
    monkeypatch.setenv("ATTNDSL_QUICK_START", "1")
    for name in ("ATTNDSL_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    code = CODE.format(compiled=compiled)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=150
    )
    assert done.stdout.strip().endswith("ok"), done.stderr[-2000:]
