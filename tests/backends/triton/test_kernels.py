"""Which kernels are kept: never one that has not been compiled."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.backends.triton import kernels
from attndsl.backends.triton.tiles import Config
from attndsl.errors import BackendError
from attndsl.runtime.dispatch import get_backend

CONFIGS = (Config(32, 32, 4, 1), Config(16, 16, 4, 1))


def attend():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 24, 16) for _ in range(3))
    return attndsl.compile("causal()", backend="triton")(q, k, v)


def test_an_interrupted_compilation_leaves_no_kernel(own_cache, monkeypatch):
    build = kernels.build

    def interrupted(*rest, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attend()

    def small_only(function, arguments, configs, *rest, **options):
        if configs[0] == CONFIGS[0]:
            raise BackendError("too large")
        return build(function, arguments, configs, *rest, **options)

    monkeypatch.setattr(kernels, "build", small_only)
    # As another process would: all that is left is in the folder.
    get_backend.cache_clear()
    small = attend()
    monkeypatch.setattr(kernels, "build", build)
    get_backend.cache_clear()
    assert torch.equal(attend(), small)
