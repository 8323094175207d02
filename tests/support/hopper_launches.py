"""Hopper's launches on a machine without a GPU: kernels that are never compiled, and what they get.

Tests have them by the fixture ``functions``.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import triton
from support.jobs import configs_of, task_of
from triton.backends.nvidia import driver as nvidia

from attndsl.backends.base import Call
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.hopper.descriptor_types import blocks_of
from attndsl.backends.kernels.compile import Executable
from attndsl.backends.kernels.modules import Modules, PreparedKernels
from attndsl.runtime.program_store import default_cache

if TYPE_CHECKING:
    import pytest

    from attndsl.backends.engine.backend import GeneratedBackend
    from attndsl.backends.hopper.tile_shapes import Block
    from attndsl.backends.kernels.kernel import Task

OTHERS = {
    "forward": 10, "forward_tangent": 11, "backward_kv": 20, "prepare_backward": 16,
    "dq_from_sums": 8, "sum_of_heads": 13,
}  # fmt: skip
"""How many run-time arguments kernels have besides descriptors."""
SCRATCH = dict.fromkeys(
    ("global_scratch_size", "global_scratch_align", "profile_scratch_size",
     "profile_scratch_align"), 0,
)  # fmt: skip


class CFunctions:
    """Stand in for Triton's C module: remember launches and what tensor maps are made of."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.encoded: list[tuple[Any, ...]] = []

    def launch(self, *arguments: Any) -> None:
        self.launched.append(arguments)

    def fill_tma_descriptor(self, *arguments: Any) -> object:
        self.encoded.append(plain(arguments))
        return ("map", *self.encoded[-1])

    fill_tma_descriptor_tiled = fill_tma_descriptor

    def build_signature_metadata(self, types: list[str]) -> tuple[str, ...]:
        return tuple(types)


def plain(value: Any) -> Any:
    """Lists and tuples alike, which C functions take as one."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def remembering(monkeypatch: pytest.MonkeyPatch) -> CFunctions:
    """The installed Triton's launcher, on top of C functions that only remember."""
    found = CFunctions()
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=found))
    if hasattr(nvidia, "make_launcher"):
        monkeypatch.setattr(nvidia, "library_dirs", list)
        monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: found)
    else:
        monkeypatch.setattr(nvidia, "PyKernelArg", lambda **fields: tuple(fields.items()))
    return found


def kernel_of(name: str, blocks: dict[str, Block], **metadata: Any) -> SimpleNamespace:
    """As Triton compiles one with these descriptors, whose launcher is the installed Triton's."""
    signature = {name: block.type for name, block in blocks.items()}
    signature |= {f"number{place}": "i32" for place in range(OTHERS[name])}
    signature["BLOCK_M"] = "constexpr"
    metas = [
        {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": list(block.shape),
         "fp4_padded": False}
        for block in blocks.values()
    ]  # fmt: skip
    fields = {"tensordesc_meta": metas, "num_ctas": 1, "instrumentation_mode": ""} | SCRATCH
    fields |= {"launch_cooperative_grid": False, "launch_pdl": False} | metadata
    source = SimpleNamespace(
        signature=signature, constants={}, fn=SimpleNamespace(arg_names=list(signature))
    )
    run = nvidia.CudaLauncher(source, SimpleNamespace(**fields))
    return SimpleNamespace(
        name=name, run=run, src=source, metadata=SimpleNamespace(**fields), function=77,
        packed_metadata=(8, 1, 4096),
    )  # fmt: skip


def backend_of(
    monkeypatch: pytest.MonkeyPatch, built: list[Task] | None = None, persistent: bool = False
) -> GeneratedBackend:
    """A backend whose kernels are never compiled, but launched as if they were."""

    def prepare(self, jobs, fixed, device, has_dlse):
        (job,) = jobs
        name, facts = job.kernel.name, job.facts
        if built is not None:
            built.extend(job.kernel.tasks)
        config = replace(configs_of(job.lowered, facts, name)[0], persistent=persistent)
        blocks = blocks_of(task_of(name), facts, config)
        executables = {name: Executable(kernel_of(name, blocks), config, False, (64,))}
        for each in fixed:
            executables[each.name] = Executable(kernel_of(each.name, {}), None, False, (64,))
        return PreparedKernels(executables, frozenset())

    monkeypatch.setattr(Modules, "prepare", prepare)
    return generated_backend(("hopper", "triton"), default_cache())


def call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    names = ("batch", "heads", "q_len", "head_dim")
    sizes = dict(zip(names, q.shape, strict=True)) | {"kv_heads": k.shape[1], "kv_len": k.shape[2]}
    return Call(q, k, v, 0.125, sizes)


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k = torch.randn(2, 50, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    return torch.randn(2, 4, 40, 64, dtype=torch.bfloat16), k, torch.randn_like(k)


def without_addresses(launches: list[tuple[Any, ...]], known: set[int]) -> list[Any]:
    """Numbers as large as addresses are left out, but for ``known`` ones."""

    def strip(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(strip, value))
        address = isinstance(value, int) and value > 1 << 32 and value not in known
        return "address" if address else value

    return [strip(plain(launch)) for launch in launches]
