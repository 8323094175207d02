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
RANKS = 2


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo")
def test_gradients_are_those_of_one_process(tmp_path):
    spec = importlib.util.spec_from_file_location("ranks", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model, batch = script.Model(), torch.randn(4, 7, script.WIDTH)
    torch.save((model.state_dict(), batch), tmp_path / "inputs")
    expected = script.gradients(model, batch)
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, tmp_path, str(rank), str(RANKS)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        for process in processes:
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
    assert {name for name, grad in expected.items() if grad.abs().max() > 0} == set(expected)
    for rank in range(RANKS):
        for way, found in torch.load(tmp_path / f"rank{rank}").items():
            assert found.keys() == expected.keys(), way
            for name, grad in expected.items():
                torch.testing.assert_close(
                    found[name], grad, msg=lambda m, n=name, w=way: w + n + m
                )
