"""Which kernels run a program's calls on a Hopper GPU, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attndsl.errors import UnsupportedError
from attndsl.ir import Op, const
from attndsl.passes.differentiate import vjp

from ..base import Wants
from ..triton.cross import example_call
from .kernels import HopperKernels
from .portable import max_head_dim, why_portable
from .shares import shares_of

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Backend, Call


def describe_kernels(backend: Backend, lowered: Lowered, head_dim: int) -> list[str]:
    """A line for each direction in bf16, then one for each reason why a call runs otherwise.

    They say what ``why_portable`` answers for such calls, as it does when they are made, and call
    both families of kernels by the names of their backends.

    Args:
        backend: The Hopper backend; needs no GPU.
        lowered: The program.
        head_dim: Head dim of q, k and v.
    """
    call = example_call(lowered, head_dim, head_dim, torch.bfloat16, {})
    try:
        backend.check(lowered, call)
    except UnsupportedError as refusal:
        return [f"  refused    {refusal.message}"]
    rows = []
    for kind in HopperKernels.directions:
        refused = why_portable(lowered, call, kind)
        if refused is not None:
            rows.append(f"  {kind:<10} triton kernels at head dim {head_dim}: {refused}")
            continue
        rows.append(f"  {kind:<10} hopper kernels, head dims up to {max_head_dim(kind)}")
        said: set[str | None] = {None}
        for condition, other, wants in _other_calls(lowered, call, kind):
            own = wants
            if kind == "tangent":
                condition = condition.replace("gradients", "tangents")
            else:
                own = shares_of(lowered, other, wants).lines
            refused = why_portable(lowered, other, kind, wants=own)
            if refused not in said:
                said.add(refused)
                rows.append(f"    {condition}: triton kernels ({refused})")
    return rows


def _other_calls(lowered: Lowered, call: Call, kind: str) -> list[tuple[str, Call, Wants]]:
    """Calls that users may make instead of ``call``, and what is different.

    Gradients of what a sink mentions are made apart, but its tangents are not.
    """
    single = {name: getattr(call, name).float() for name in ("q", "k", "v")}
    half = {name: getattr(call, name).half() for name in ("q", "k", "v")}
    found = [
        ("in fp16", replace(call, **half), Wants()),
        ("in fp32", replace(call, **single), Wants()),
    ]
    tensors = frozenset(str(gradient.load.value) for gradient in lowered.derivative.tensors)
    params = frozenset(gradient.name for gradient in lowered.derivative.params)
    sink = lowered.program.sink if kind == "tangent" else None
    for root in (lowered.program.weights, sink):
        leaves = {} if root is None else vjp(root, const(1.0))
        tensors |= {str(leaf.value) for leaf in leaves if leaf.op is Op.LOAD}
        params |= {str(leaf.value) for leaf in leaves if leaf.op is Op.PARAM}
    if tensors or params:
        names = ", ".join([*sorted(tensors), *sorted(params)])
        learned = Wants(tensors=tensors, params=params)
        found.append((f"with gradients of {names}", call, learned))
        found.append((f"with gradients of {names} in fp16", replace(call, **half), learned))
    found.append(("with out_dtype=torch.float32", replace(call, wide=True), Wants()))
    found.append(("with deterministic=True", replace(call, deterministic=True), Wants()))
    return found
