"""Compile kernels for a GPU that is not there: for checks, and to read their resources."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from triton.backends.compiler import GPUTarget

from attndsl.ir import SIZES, DType

from ..base import Call
from .arguments import arguments_of, block_widths
from .compile import build, load_module
from .generate import generate_backward, generate_forward
from .library import row_statistics
from .specialise import specialise, with_gradients
from .tiles import candidates, shared_memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.pipeline import Lowered

    from ..base import Wants
    from .specialise import Specialisation
    from .tiles import Config


@dataclass(frozen=True, slots=True)
class CrossCompiled:
    """One kernel compiled for a target."""

    name: str
    config: Config
    shared: int
    """Bytes of shared memory."""
    kernel: Any
    """Triton's compiled kernel; ``kernel.asm`` has each stage."""


def parse_target(text: str) -> GPUTarget:
    """``cuda:90`` or ``hip:gfx942`` as Triton's target."""
    backend, _, arch = text.partition(":")
    return GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)


def example_call(
    lowered: Lowered,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    captures: Mapping[str, Any],
) -> Call:
    """A small call on the CPU with the program's captures, for looking at its kernels.

    Args:
        lowered: The program.
        head_dim: Head dim of q and k.
        value_dim: Head dim of v.
        dtype: dtype of q, k and v.
        captures: Values of tensors and params; others are made up.
    """
    sizes = dict.fromkeys((*SIZES, *lowered.program.dim_names()), 2) | {"head_dim": head_dim}
    q, k = (torch.empty(2, 2, 2, head_dim, dtype=dtype) for _ in range(2))
    v = torch.empty(2, 2, 2, value_dim, dtype=dtype)
    kinds = {DType.FLOAT: torch.float32, DType.INT: torch.int32, DType.BOOL: torch.bool}
    numbers = {DType.FLOAT: 1.0, DType.INT: 1, DType.BOOL: True}
    tensors = {
        decl.name: captures.get(
            decl.name, torch.zeros((2,) * len(decl.dims), dtype=kinds[decl.dtype])
        )
        for decl in lowered.program.tensors
    }
    params = {
        decl.name: captures.get(decl.name, numbers[decl.dtype]) for decl in lowered.program.params
    }
    return Call(q, k, v, head_dim**-0.5, sizes, tensors, params)


def kernel_source(lowered: Lowered, call: Call, direction: str, wants: Wants) -> str:
    """Text of the module that ``call`` would use, ``forward`` or ``backward``."""
    special = specialise(lowered.program, call)
    if direction == "forward":
        return generate_forward(lowered, special)
    special = with_gradients(special, call, wants.tensors, wants.params)
    return generate_backward(lowered, special)


def cross_compile(
    lowered: Lowered,
    special: Specialisation,
    target: str,
    configs: dict[str, tuple[Config, ...]] | None = None,
) -> list[CrossCompiled]:
    """All kernels of one specialisation, each with the first config that fits ``target``.

    Args:
        lowered: The program.
        special: Dtypes, head dims, kinds; its gradients say what the backward adds up.
        target: ``cuda:80``, ``cuda:90``, ``cuda:100``, ``hip:gfx942`` ...
        configs: Candidates by kernel, in place of the table's.

    Raises:
        BackendError: No config of a kernel fits.
    """
    shared = shared_memory_of(target)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        modules = {}
        for kind, text in (
            ("forward", generate_forward(lowered, special)),
            ("backward", generate_backward(lowered, special)),
        ):
            path = Path(folder) / f"{kind}.py"
            path.write_text(text, "utf-8")
            modules[kind] = load_module(path, kind)
        functions = {
            "forward": modules["forward"].attention_forward,
            "row_statistics": row_statistics,
            "backward_kv": modules["backward"].attention_backward_kv,
            "backward_q": modules["backward"].attention_backward_q,
        }
        for name, function in functions.items():
            more = {"ROWS": 64, "HAS_DLSE": True} if name == "row_statistics" else {}
            arguments = arguments_of(function, special, "ieee", upcast=False, more=more)
            chosen = (configs or {}).get(name) or candidates(
                "backward_q" if name == "row_statistics" else name,
                *block_widths(special),
                4 if special.dtype == "fp32" else 2,
                shared,
            )
            built = build(function, arguments, chosen, parse_target(target), shared, load=False)
            kernel = built.kernel
            found.append(CrossCompiled(name, built.config, kernel.metadata.shared, kernel))
    return found
