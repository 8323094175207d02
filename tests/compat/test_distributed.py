"""Two processes with half of a batch each, whole and sharded: the gradients of one with all."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

SCRIPT = Path(__file__).with_name("ranks.py")
pytestmark = pytest.mark.skipif(
    not distributed.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.fixture
def script():
    """``ranks.py`` as a module."""
    spec = importlib.util.spec_from_file_location("ranks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compare(ways, expected):
    assert set(ways) == {"ddp", "fsdp"}
    for way, found in ways.items():
        assert found.keys() == expected.keys(), way
        for name, grad in expected.items():
            assert grad.abs().max() > 0, name
            torch.testing.assert_close(found[name], grad, msg=lambda m, n=name, w=way: w + n + m)


def test_wrapped_in_one_process(script):
    model, batch = script.Model(), torch.randn(4, 7, script.WIDTH)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        found = script.parallel(model.state_dict(), batch, 1)
    finally:
        distributed.destroy_process_group()
    _compare(found, script.gradients(model, batch))


@pytest.mark.slow
def test_gradients_are_those_of_one_process(script, tmp_path):
    ranks = 2
    model, batch = script.Model(), torch.randn(4, 7, script.WIDTH)
    torch.save((model.state_dict(), batch), tmp_path / "inputs")
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, tmp_path, str(rank), str(ranks)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for process in processes:
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
    for rank in range(ranks):
        _compare(torch.load(tmp_path / f"rank{rank}"), script.gradients(model, batch))
