"""Which kernels are kept: never one that has not been compiled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import attndsl
from attndsl.backends.kernels import compile as compiling
from attndsl.backends.kernels import modules
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.target import parse_target
from attndsl.errors import BackendError
from attndsl.foundation.caches import CACHES, Reason

CONFIGS = (Config(32, 32, 4, 1), Config(16, 16, 4, 1))


def attend():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 24, 16) for _ in range(3))
    return attndsl.compile("causal()", backend="triton")(q, k, v)


def test_an_interrupted_compilation_leaves_no_kernel(own_cache, monkeypatch):
    build = modules.build

    def interrupted(*rest, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(modules, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attend()

    def small_only(function, arguments, configs, *rest, **options):
        if configs[0] == CONFIGS[0]:
            raise BackendError("too large")
        return build(function, arguments, configs, *rest, **options)

    monkeypatch.setattr(modules, "build", small_only)
    # As another process would: all that is left is in the folder.
    CACHES.invalidate(Reason.BACKENDS)
    small = attend()
    monkeypatch.setattr(modules, "build", build)
    CACHES.invalidate(Reason.BACKENDS)
    assert torch.equal(attend(), small)


def test_a_text_is_run_once_unless_another_tile_size_came_after_it(own_cache, monkeypatch):
    run, build, made = modules.module_of, modules.build, []

    def counting(source, path, key):
        made.append(path)
        return run(source, path, key)

    monkeypatch.setattr(modules, "module_of", counting)
    attend()
    assert len(made) == 1
    CACHES.invalidate(Reason.BACKENDS)
    for path in own_cache.glob("*"):
        path.unlink()

    def spilling(function, arguments, configs, *rest, **options):
        found = build(function, arguments, configs, *rest, **options)
        return Spilling(found.kernel, found.config, found.interpreted, found.constants)

    monkeypatch.setattr(modules, "build", spilling)
    made.clear()
    attend()
    assert made == [made[0]] * 3, "two tile sizes, and the better one again"


class Spilling(compiling.Executable):
    """An executable that spills, the more the later it is tried."""

    @property
    def spills(self) -> int:
        return 9999 + (self.config == CONFIGS[1])


@pytest.mark.parametrize("message", ["PassManager::run failed", "device lost"])
def test_a_pass_that_fails_costs_a_tile_size(monkeypatch, message):
    configs = (Config(128, 64, 4, 3), Config(32, 32, 4, 1))
    kernel = SimpleNamespace(metadata=SimpleNamespace(shared=0))

    def compiled(function, arguments, config, target, shared_memory):
        if config.stages > 1:
            raise RuntimeError(message)
        return kernel

    monkeypatch.setattr(compiling, "compile_kernel", compiled)
    target = parse_target("cuda:90")
    if message == "device lost":
        with pytest.raises(RuntimeError, match="device lost"):
            compiling.build(None, [], configs, target, 1, load=False)
        return
    assert compiling.build(None, [], configs, target, 1, load=False).config is configs[1]
    with pytest.raises(BackendError, match=r"128 x 64 tiles.*PassManager"):
        compiling.build(None, [], configs[:1], target, 1, load=False)
