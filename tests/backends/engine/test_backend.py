"""Which family of kernels runs what: the first without an objection."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attndsl
from attndsl.backends.base import Backward, Call, Wants
from attndsl.backends.engine.backend import GeneratedBackend
from attndsl.backends.engine.kernel_listing import source_of
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.triton.family import Portable
from attndsl.backends.triton.kernels import FORWARD
from attndsl.errors import UnsupportedError
from attndsl.runtime.disk_cache import KernelCache

TEXT = "tensor gain[heads]: float; mask = causal(); score = gain[h] * score"
LOWERED = attndsl.compile(TEXT).lowered
SIZES = {"batch": 1, "heads": 2, "kv_heads": 2, "kv_len": 24, "head_dim": 16}


class OneQuery(Portable):
    """As a family of kernels for one query would be: one entry, and what it does not run."""

    name = "one query"
    kernels = (replace(FORWARD, family="one query"),)

    def __init__(self):
        self.ran = []

    def why_not(self, lowered, call, task, grad_out, wanted):
        return None if call.q.shape[2] == 1 else "there are several queries"

    def forward(self, layout, lowered, call):
        self.ran.append(call.q.shape[2])
        return super().forward(layout, lowered, call)


@pytest.fixture
def store(tmp_path):
    return KernelCache(tmp_path)


@pytest.fixture
def backend(store):
    return GeneratedBackend("triton", (OneQuery(), Portable()), store)


def call_of(q_len, device):
    torch.manual_seed(0)
    q = torch.randn(1, 2, q_len, 16, device=device)
    k = torch.randn(1, 2, 24, 16, device=device)
    gain = torch.tensor([0.5, 2.0], device=device)
    return Call(q, k, k, 0.25, {**SIZES, "q_len": q_len}, {"gain": gain}, q_offset=24 - q_len)


def expected_of(call):
    attention = attndsl.compile(TEXT, backend="reference")
    gain, offset = call.tensors["gain"], call.q_offset
    return attention(call.q, call.k, call.v, scale=0.25, gain=gain, q_offset=offset)


def test_the_first_family_without_an_objection_runs(backend, store, device):
    for q_len in (1, 5, 1, 5):
        call = call_of(q_len, device)
        out, _ = backend.forward(LOWERED, call)
        torch.testing.assert_close(out, expected_of(call), atol=2e-3, rtol=2e-3)
    assert backend.families[0].ran == [1, 1]
    # Each family has a module of its own, though the text is one.
    assert len(store.entries()) == 2


def test_another_family_has_the_kernels_that_the_first_lacks(backend, device):
    call = call_of(1, device)
    out, lse = backend.forward(LOWERED, call)
    wants = Wants(tensors=frozenset({"gain"}))
    found = backend.backward(LOWERED, call, Backward(out, lse, torch.ones_like(out), None, wants))
    assert found.q.shape == call.q.shape
    assert found.tensors["gain"].shape == (2,)
    assert backend._family(LOWERED, call, Task.FORWARD, None, None).name == "one query"
    assert backend._family(LOWERED, call, Task.BACKWARD, out, wants).name == "triton"


def test_texts_are_of_the_first_family_or_refused(backend):
    call = example_call(LOWERED, 16, 16, torch.float32, {})
    with pytest.raises(UnsupportedError, match="several queries") as refusal:
        source_of(backend.families, LOWERED, call, "forward", Wants())
    assert "backend='triton'" in str(refusal.value)
    one = call._replace(q=call.q[:, :, :1], k=call.k, v=call.v)
    text = source_of(backend.families, LOWERED, one, "forward", Wants())
    assert text.count("one query forward: ") == 1
    text = text.replace("one query forward: ", "triton forward: ")
    assert text == source_of((Portable(),), LOWERED, one, "forward", Wants())


def test_families_are_described_where_there_are_several(backend):
    lines = backend.describe(LOWERED, 16)
    assert lines[0].strip().startswith("forward")
    assert "triton kernels at head dim 16: there are several queries" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "tangent    triton kernels", "backward   triton kernels"
    ]  # fmt: skip
    assert GeneratedBackend("triton", (Portable(),), None).describe(LOWERED, 16) == []


def test_tile_sizes_are_those_of_the_family_that_runs(backend, device):
    found = backend.choices(LOWERED, call_of(1, device), "forward", None, None)
    assert list(found) == ["forward"]
    with pytest.raises(ValueError, match="backwards"):
        backend.choices(LOWERED, call_of(1, device), "backwards", None, None)
