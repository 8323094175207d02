"""Description in words of the family of kernels that runs a program's calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.errors import UnsupportedError
from attndsl.ir import Op, const
from attndsl.passes.differentiate import vjp

from ..base import Wants
from ..kernels.example import example_call
from ..kernels.kernel import Task, kernels_of

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Backend, Call
    from ..kernels.kernel import Family


_NONE = "none"


def describe_kernels(
    backend: Backend, families: tuple[Family, ...], lowered: Lowered, head_dim: int
) -> list[str]:
    """A line for each direction in bf16, then one for each reason why a call runs otherwise.

    They say what the first family answers for such calls, as it does when they are made, and call
    families of kernels by the names of their backends. One family alone is not described. The first
    lines are of families that take few keys.

    Args:
        backend: Of the families; needs no GPU.
        families: The first family runs what it can; the last one runs all else.
        lowered: The program.
        head_dim: Head dim of q, k and v.
    """
    call = example_call(lowered, head_dim, head_dim, torch.bfloat16, {})
    try:
        backend.check(lowered, call)
    except UnsupportedError as refusal:
        return [f"  refused    {refusal.message}"]
    limited = [family for family in families if _limits(family, Task.FORWARD, 64)]
    families = tuple(family for family in families if family not in limited)
    rows = [row for family in limited for row in _of_limited(family, lowered, call)]
    rows += _described(families, lowered, call)
    if lowered.program.bounded:
        rows.append(f"  repair     {families[-1].name} kernels, of tiles that are not finite")
    return rows


def _limits(family: Family, task: Task, head_dim: int) -> str:
    """Most rows and keys that the kernels of a task take, in words; empty for any number."""
    rows, keys = family.most_queries(task), family.most_keys(task, head_dim)
    told = [] if rows is None else [f"up to {rows} rows of queries"]
    if keys is not None:
        told.append((f"up to {keys} keys" if keys else _NONE) + f" at head dim {head_dim}")
    return ", ".join(told)


def _of_limited(family: Family, lowered: Lowered, call: Call) -> list[str]:
    """Lines on the rows or keys that a family's kernels take, and on why others run some calls."""
    rows, head_dim = [], call.q.shape[3]
    for task in (Task.FORWARD, Task.BACKWARD):
        if not kernels_of(family, task):
            continue
        told = _limits(family, task, head_dim)
        refused = family.why_not(lowered, call, Task.FORWARD, None, None)
        if refused is not None:
            told = f"{_NONE}: {refused}"
        rows.append(f"  {task.direction:<10} {family.name} kernels, {told}")
        some = () if told.startswith(_NONE) else _other_calls(lowered, call, task)
        for condition, other, wants in some:
            alike = other.q.dtype is call.q.dtype and not other.deterministic
            if not alike or not (wants.tensors or wants.params):
                continue
            lines = family.plan_gradients(lowered, other, wants).lines
            refused = family.why_not(lowered, other, task, None, lines)
            if refused is not None:
                rows.append(f"    {condition}: others ({refused})")
    return rows


def _described(families: tuple[Family, ...], lowered: Lowered, call: Call) -> list[str]:
    """The lines of families whose kernels go along any number of keys."""
    first, last, head_dim = families[0], families[-1], call.q.shape[3]
    if first is last:
        return []
    rows = []
    for task in (Task.FORWARD, Task.FORWARD_TANGENT, Task.BACKWARD):
        kind = task.direction
        if not kernels_of(first, task):
            rows.append(f"  {kind:<10} {last.name} kernels")
            continue
        refused = first.why_not(lowered, call, task, None, None)
        if refused is not None:
            rows.append(f"  {kind:<10} {last.name} kernels at head dim {head_dim}: {refused}")
            continue
        most = first.most_head_dim(task)
        rows.append(f"  {kind:<10} {first.name} kernels, head dims up to {most}")
        said: set[str | None] = {None}
        for condition, other, wants in _other_calls(lowered, call, task):
            own = wants
            if task is Task.FORWARD_TANGENT:
                condition = condition.replace("gradients", "tangents")
            else:
                own = first.plan_gradients(lowered, other, wants).lines
            refused = first.why_not(lowered, other, task, None, own)
            if refused not in said:
                said.add(refused)
                rows.append(f"    {condition}: {last.name} kernels ({refused})")
    return rows


def _other_calls(lowered: Lowered, call: Call, task: Task) -> list[tuple[str, Call, Wants]]:
    """Calls that users may make instead of ``call``, and what is different.

    Gradients of what a sink mentions are made apart, but its tangents are not.
    """
    single = {name: getattr(call, name).float() for name in ("q", "k", "v")}
    half = {name: getattr(call, name).half() for name in ("q", "k", "v")}
    found = [
        ("in fp16", call._replace(**half), Wants()),
        ("in fp32", call._replace(**single), Wants()),
    ]
    tensors = frozenset(str(gradient.load.value) for gradient in lowered.derivative.tensors)
    params = frozenset(gradient.name for gradient in lowered.derivative.params)
    sink = lowered.program.sink if task is Task.FORWARD_TANGENT else None
    for root in (lowered.program.weights, sink):
        leaves = {} if root is None else vjp(root, const(1.0))
        tensors |= {str(leaf.value) for leaf in leaves if leaf.op is Op.LOAD}
        params |= {str(leaf.value) for leaf in leaves if leaf.op is Op.PARAM}
    if tensors or params:
        names = ", ".join([*sorted(tensors), *sorted(params)])
        learned = Wants(tensors=tensors, params=params)
        found.append((f"with gradients of {names}", call, learned))
        found.append((f"with gradients of {names} in fp16", call._replace(**half), learned))
    found.append(("with out_dtype=torch.float32", call._replace(wide=True), Wants()))
    fixed = call._replace(deterministic=True)
    found.append(("with deterministic=True", fixed, Wants()))
    if tensors or params:
        found.append((f"with deterministic=True and gradients of {names}", fixed, learned))
    return found
