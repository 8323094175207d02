"""What the compiler made of a program, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import BackendError
from attndsl.ir import Op, dependencies, toposort
from attndsl.runtime.dispatch import choose_backend

if TYPE_CHECKING:
    import torch

    from attndsl.ir import Node
    from attndsl.passes.tiles.plan import LoopPlan
    from attndsl.pipeline import Lowered


def explain(lowered: Lowered, backend: str, checked: bool, device: torch.device) -> str:
    """Lines of plain text: parts, captures, gradients, loops, and the backend for ``device``."""
    program, derivative = lowered.program, lowered.derivative
    rows = ["program"]
    rows.append(f"  score      {_describe(program.score)}")
    rows.append(f"  mask       {_describe(program.mask) if program.mask else 'none: all pairs'}")
    rows.append(f"  weights    {_describe(program.weights) if program.weights else 'softmax'}")
    if program.sink is not None:
        rows.append(f"  sink       {_describe(program.sink)}")
    if program.dropout is not None:
        rows.append("  dropout    of the weights")
    for tensor in program.tensors:
        rows.append(f"  tensor     {tensor.name}: {tensor.dtype.value}, {len(tensor.dims)} dim(s)")
    for param in program.params:
        default = "no default" if param.default is None else f"default {param.default}"
        rows.append(f"  param      {param.name}: {param.dtype.value}, at run time, {default}")
    learned = sorted({str(g.load.value) for g in derivative.tensors})
    learned += [g.name for g in derivative.params]
    rows.append(f"gradients    q, k, v{''.join(', ' + name for name in learned)}")
    rows.append("tiles")
    plan = lowered.plan
    rows.append(f"  forward    {_loop(plan.forward)}")
    rows.append(f"  dQ         {_loop(plan.backward_q)}")
    rows.append(f"  dK, dV     {_loop(plan.backward_kv)}")
    try:
        chosen, reason = choose_backend(backend, device, checked)
        rows.append(f"backend      {chosen.name} on {device.type}: {reason}")
    except BackendError as error:
        rows.append(f"backend      none on {device.type}: {error.message}")
    return "\n".join(rows)


def _describe(root: Node) -> str:
    if root.op is Op.SCORE:
        return "scale * (q . k)"
    found = dependencies(root)[root]
    order = [name for name in ("score", "b", "h", "q", "kv") if name in found]
    count = sum(1 for item in toposort(root) if item.args)
    return f"{count} operation(s) on {', '.join(order) or 'constants'}"


def _loop(loop: LoopPlan) -> str:
    def spans(kind: str) -> str:
        segments = loop.full if kind == "FULL" else loop.partial
        listed = ", ".join(
            f"[{s.start}, {s.stop})" + (f" step {s.step}" if s.step != 1 else "") for s in segments
        )
        return f"{kind} {listed}" if listed else f"no {kind}"

    return f"{spans('FULL')}; {spans('PARTIAL')}"
