"""Which calls the portable kernels run in place of Hopper's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.ir import leaf_names

from ..emit.draws import why_pairs
from .arguments import descriptor_strides
from .blocks import block_width
from .busy import why_busy
from .distances import among
from .kernels import HopperKernels
from .learned import learned_parts
from .tiles import CANDIDATES

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants

_DTYPES = (torch.float16, torch.bfloat16)


def why_portable(
    lowered: Lowered,
    call: Call,
    kind: str,
    grad_out: torch.Tensor | None = None,
    wants: Wants | None = None,
) -> str | None:
    """Why the portable kernels run this forward, tangent or backward, or None.

    A tangent is along what ``wants`` names.
    """
    dropout = lowered.program.dropout
    if call.wide and kind != "backward":
        return f"the Hopper {kind} stores its output in the dtype of q, k and v"
    if call.q.dtype not in _DTYPES:
        return f"the Hopper kernels compute in fp16 and bf16, not {call.q.dtype}"
    width = max(block_width(call.q.shape[3]), block_width(call.v.shape[3]))
    if width > max_head_dim(kind):
        return f"the Hopper {kind} takes head dims up to {max_head_dim(kind)}"
    if kind == "tangent":
        if lowered.program.weights is not None or dropout is not None:
            return "the Hopper tangent has the weights of a softmax, without dropout"
        if wants is not None and (wants.tensors or wants.params):
            return "tangents of captures are looked up pair by pair"
    if kind == "backward":
        if dropout is not None and width > 128:
            return "the Hopper backward has dropout at head dims up to 128"
        if call.deterministic:
            return "the Hopper backward adds up dQ in no fixed order"
        if wants is not None and (wants.tensors or wants.params):
            if lowered.program.weights is not None:
                return "gradients of captures in weights are added up pair by pair"
            names = wants.tensors | wants.params
            if dropout is not None and names & leaf_names(dropout):
                return "gradients of what decides on dropout are added up pair by pair"
            learned = learned_parts(lowered, names - among(lowered, call, names))
            if isinstance(learned, str):
                return learned
            if learned.row and wants.partial:
                return "gradients of a row's part are known where the results are of all keys"
            if width > 128:
                return "gradients of captured tensors are added up at head dims up to 128"
            if learned.factor and call.q.dtype is torch.float16:
                return "gradients of a factor need slopes of a wider range than fp16 has"
    if call.draws is not None and (drawn := why_pairs(call)) is not None:
        return drawn
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        return "nothing is to be computed"
    rows = call.q.new_empty((1, 1, 2, call.v.shape[3]))
    for tensor in (call.q, call.k, call.v, rows if grad_out is None else grad_out):
        if descriptor_strides(tensor) is None:
            return "the tensor memory accelerator takes rows of multiples of 16 bytes"
    return why_busy(lowered, call, kind, wants)


def max_head_dim(kind: str) -> int:
    """The largest head dim that all Hopper kernels of a forward or backward have configs for."""
    return min(max(CANDIDATES[direction]) for direction in HopperKernels.directions[kind])
