"""The GPU that kernels are made for: the one that is there, or one by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from ..base import matmul_precision
from ..device.library import row_statistics
from ..emit.template import Products
from .compile import is_interpreted
from .config import shared_memory_of

if TYPE_CHECKING:
    from ..emit.facts import KernelFacts

INTERPRETER = "interpreter"
"""Name of what is no GPU."""


@dataclass(frozen=True, slots=True)
class Target:
    """Target that kernels are compiled for, and its shared memory."""

    target: GPUTarget | None
    """None for the interpreter."""
    shared: int
    """Bytes of shared memory that one program may use."""

    @property
    def name(self) -> str:
        """Name in the keys of caches."""
        target = self.target
        return INTERPRETER if target is None else f"{target.backend}:{target.arch}"

    def products(self, facts: KernelFacts) -> Products:
        """Precision of kernels' products: fp32 as torch's own matrix products are set."""
        return Products(
            precision_of(facts.dtype, self.target), self.target is None and facts.dtype == "bf16"
        )


def current_target() -> GPUTarget | None:
    """The GPU that kernels are compiled for; None for the interpreter."""
    if is_interpreted(row_statistics):
        return None
    target: GPUTarget = triton.runtime.driver.active.get_current_target()
    return target


def current_machine(device: torch.device) -> Target:
    """Machine that kernels for tensors on ``device`` are compiled for."""
    target = current_target()
    if target is None:
        return Target(None, shared_memory_of(""))
    if device.type == "cuda" and torch.version.hip is None:
        # Torch keeps what Triton asks the driver for each time, which takes a millisecond.
        own: Any = torch.cuda.get_device_properties(device)
        return Target(target, int(own.shared_memory_per_block_optin))
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return Target(target, int(properties["max_shared_mem"]))


def machine_of(name: str) -> Target:
    """``cuda:90`` or ``hip:gfx942``, which need not be present."""
    return Target(parse_target(name), shared_memory_of(name))


def parse_target(text: str) -> GPUTarget:
    """``cuda:90`` or ``hip:gfx942`` as Triton's target."""
    backend, _, arch = text.partition(":")
    return GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)


def precision_of(dtype: str, target: GPUTarget | None) -> str:
    """Input precision of fp32 products: as torch's own matrix products are set."""
    if dtype != "fp32" or target is None or target.backend != "cuda":
        return "ieee"
    return "tf32x3" if matmul_precision() == "highest" else "tf32"
