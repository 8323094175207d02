"""Calls that Hopper's kernels do not run, and the reasons why."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import leaf_names

from ..emit.dropout_offsets import why_pairs
from ..emit.facts import facts_of, with_gradients
from ..kernels.kernel import Job, Task
from ..kernels.target import machine_of
from .capture_sums import learned_parts
from .kernels import KERNELS
from .launch import descriptor_strides
from .tile_shapes import block_width
from .tile_sizes import CANDIDATES

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants
    from ..kernels.kernel import Kernel

_DTYPES = (torch.float16, torch.bfloat16)
_TARGET = machine_of("cuda:90")


def why_not(
    lowered: Lowered,
    call: Call,
    task: Task,
    grad_out: torch.Tensor | None = None,
    wants: Wants | None = None,
) -> str | None:
    """Reason why another family runs this forward, tangent or backward, or None.

    A tangent is along what ``wants`` names.
    """
    dropout = lowered.program.dropout
    if call.wide and task is not Task.BACKWARD:
        return f"the Hopper {task.direction} kernel stores its output in the dtype of q, k and v"
    if call.q.dtype not in _DTYPES:
        return f"the Hopper kernels support fp16 and bf16, not {call.q.dtype}"
    width = max(block_width(call.q.shape[3]), block_width(call.v.shape[3]))
    if width > (most := most_head_dim(task)):
        return f"the Hopper {task.direction} kernel supports head dims up to {most}"
    if task is Task.FORWARD_TANGENT:
        if lowered.program.weights is not None or dropout is not None:
            return "the Hopper tangent kernel supports only softmax weights, without dropout"
        if wants is not None and (wants.tensors or wants.params):
            return "the Hopper tangent kernel does not compute tangents of captures"
    if task is Task.BACKWARD:
        if dropout is not None and width > 128:
            return "the Hopper backward kernel supports dropout at head dims up to 128"
        if call.deterministic:
            unordered = _why_no_turns(lowered, call, width)
            if unordered is not None:
                return unordered
        if wants is not None and (wants.tensors or wants.params):
            if lowered.program.weights is not None:
                return "the Hopper backward kernel computes no gradients of captures in `weights`"
            names = wants.tensors | wants.params
            if dropout is not None and names & leaf_names(dropout):
                return "gradients of a dropout probability are summed pair by pair"
            learned = learned_parts(lowered, names)
            if isinstance(learned, str):
                return learned
            if learned.row and wants.partial:
                return "gradients of terms per row need the results over all keys"
            if width > 128:
                return "gradients of captures are summed only at head dims up to 128"
            if learned.factor and call.q.dtype is torch.float16:
                return "gradients of a factor need a wider range than that of fp16"
    if call.draws is not None and (drawn := why_pairs(call)) is not None:
        return drawn
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        return "there is nothing to compute"
    rows = call.q.new_empty((1, 1, 2, call.v.shape[3]))
    for tensor in (call.q, call.k, call.v, rows if grad_out is None else grad_out):
        if descriptor_strides(tensor) is None:
            return "the tensor memory accelerator needs row sizes that are multiples of 16 bytes"
    return _why_busy(lowered, call, task, wants)


def _why_no_turns(lowered: Lowered, call: Call, width: int) -> str | None:
    """Reason why work tiles of a backward do not take turns at sums of dQ, or None."""
    if width > 128:
        return "the Hopper backward kernel sums dQ in a fixed order only at head dims up to 128"
    facts = replace(facts_of(lowered.program, call), takes_turns=True)
    job = Job(_kernel(Task.BACKWARD), lowered, facts).on(_TARGET)
    for config in job.kernel.configs(job, _TARGET):
        listed = job.plan(config).listed
        if listed is not None:
            return (
                "the Hopper backward kernel sums dQ in a fixed order only for closed-form masks: "
                f"{listed}"
            )
    return None


def _why_busy(lowered: Lowered, call: Call, task: Task, wants: Wants | None) -> str | None:
    """Reason why another family runs a program with so much work a pair, or None."""
    facts = facts_of(lowered.program, call)
    if wants is not None:
        facts = with_gradients(facts, wants)
    if not Job(_kernel(task), lowered, facts).on(_TARGET).is_busy:
        return None
    return "the Hopper kernels would spill registers with this much work per pair"


def _kernel(task: Task) -> Kernel:
    """The one kernel that each task has here."""
    return next(kernel for kernel in KERNELS if task in kernel.tasks)


def most_head_dim(task: Task) -> int:
    """The largest head dim that the kernel of a task has configs for."""
    return max(CANDIDATES[task])
