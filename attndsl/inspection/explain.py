"""The compiler's decisions about a program, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attndsl.backends.base import ForwardMode, as_fused
from attndsl.backends.fast_math import describe_forms
from attndsl.call.dispatch import backend_of
from attndsl.errors import BackendError, UnsupportedError, counted
from attndsl.ir import SCORE, TOKEN, DType, Op, const, dependencies, leaf_names, sides, toposort
from attndsl.passes.differentiate import vjp
from attndsl.passes.print_ir import print_expression
from attndsl.passes.simplify import simplify_node
from attndsl.passes.tiles.plan_text import print_tiles
from attndsl.passes.tiles.sparsity import EVALUATION, SCORES

from .sparsity_summary import saving, smaller_tiles
from .tile_search import count_tiles

if TYPE_CHECKING:
    from attndsl.backends.base import Backend, Call
    from attndsl.ir import Node, ParamDecl, Program, TensorDecl
    from attndsl.pipeline import Lowered

    from .tile_search import TileCounts


@dataclass(frozen=True, slots=True)
class Question:
    """Backend, device, tile size and other settings for which a program is to be explained."""

    backend: str
    """The backend asked for."""
    checked: bool
    device: torch.device
    blocks: tuple[int, int]
    """Queries and keys of a tile."""
    head_dim: int
    absent: tuple[str, ...] = ()
    """Captures that are not there, and that calls may give."""
    doubts: tuple[str, ...] = ()
    """Warnings about a call of these lengths that is probably unintended."""
    lists: tuple[Node, ...] = ()
    """Conditions ``in`` of the program as it is written."""
    verbose: bool = True
    """True for fast forms of functions, tiles of loops, and what runs higher derivatives, too."""


def explain(lowered: Lowered, asked: Question, call: Call | None = None) -> str:
    """A sentence for people, and then lines of plain text.

    These are the program's parts, its captures, gradients and tiles, and the backend. With a
    ``call`` they are also how many tiles are live, and what they cost.
    """
    counts, refusal = None, ""
    if call is not None:
        try:
            counts = count_tiles(lowered, call, *asked.blocks)
        except UnsupportedError as error:
            refusal = f"{error.message}; {error.hint}"
    rows = [saving(lowered, asked.blocks, call, counts), *_parts(lowered, asked)]
    if call is not None:
        rows += _cost(lowered, call, asked.blocks, counts, refusal)
    rows += [f"warning      {doubt}" for doubt in asked.doubts]
    return "\n".join(rows)


def _parts(lowered: Lowered, asked: Question) -> list[str]:
    program, device = lowered.program, asked.device
    rows = ["program"]
    rows.append(f"  score      {_describe(program.score)}")
    rows.append(f"  mask       {_describe(program.mask) if program.mask else 'none: all pairs'}")
    rows.append(f"  weights    {_describe(program.weights) if program.weights else 'softmax'}")
    if program.sink is not None:
        rows.append(f"  sink       {_describe(program.sink)}")
    if program.dropout is not None:
        rows.append(f"  dropout    of the weights, p = {print_expression(program.dropout)}")
    rows += [f"  list       {_list(item)}" for item in asked.lists]
    for tensor in program.tensors:
        rows.append(
            f"  tensor     {tensor.name}: {tensor.dtype.value}, {counted(len(tensor.dims), 'dim')}"
        )
    for param in program.params:
        default = "no default" if param.default is None else f"default {param.default}"
        rows.append(f"  param      {param.name}: {param.dtype.value}, at run time, {default}")
    for name in asked.absent:
        rows.append(f"  absent     {name}: a call that gives it is of another program")
    rows += _gradients(lowered)
    if asked.verbose:
        rows += _forms(lowered)
        rows += _atoms(lowered)
        rows += [f"  {line}" for line in print_tiles(lowered.sparsity, *asked.blocks).split("\n")]
    try:
        where = asked.backend, device, asked.checked
        chosen, reason = backend_of(lowered, *where, torch.bfloat16)
        if asked.verbose:
            rows.append(f"higher       {_higher(chosen, asked.checked)}")
        rows.append(f"backend      {chosen.name} on {device.type}: {reason}")
        in_fp64, _ = backend_of(lowered, *where, torch.float64)
        if in_fp64.name != chosen.name:
            rows.append(f"  in fp64    {in_fp64.name}, whose torch operations run on all devices")
        rows += chosen.describe(lowered, asked.head_dim)
    except BackendError as error:
        rows.append(f"backend      none on {device.type}: {error.message}")
    return rows


_OF_TENSORS = {"b": "batch entry", "h": "head", "hkv": "key head"}
_FOR_EACH = {**_OF_TENSORS, "q": "query", "kv": "key", TOKEN: "query"}
_SEVERAL = {
    "b": "batch entries", "h": "heads", "hkv": "key heads", "q": "queries", "kv": "keys",
    TOKEN: "queries",
}  # fmt: skip


def _list(item: Node) -> str:
    """A condition ``in``: elements of its list, and which rows share one."""
    element, *indices = item.args
    block, of = _block(element)
    looked_for = f"values of {print_expression(element)}"
    if of in ("q", "kv"):
        looked_for = _SEVERAL[of] if block == 1 else f"blocks of {block} {_SEVERAL[of]}"
    each = [_rows_of(index) for index in indices if index.op is not Op.CONST]
    *first, last = each or ["all"]
    whose = f"{', '.join(first)} and {last}" if first else last
    return f"{item.value}: {looked_for}, {'one for each' if each else 'one for'} {whose}"


def _rows_of(index: Node) -> str:
    """The rows that an index tells apart: ``64 queries`` for ``q // 64``."""
    size, name = _block(index)
    if name not in _FOR_EACH:
        return print_expression(index)
    return _FOR_EACH[name] if size == 1 else f"{size} {_SEVERAL[name]}"


def _block(item: Node) -> tuple[int, str]:
    """The size and the variable of ``variable // size``; an empty name for anything else."""
    size, of = 1, item
    if item.op is Op.FLOORDIV and isinstance(item.args[1].value, int):
        of, size = item.args[0], item.args[1].value
    return size, str(of.value) if of.op is Op.VAR else ""


def _gradients(lowered: Lowered) -> list[str]:
    """The inputs that receive gradients, and the parts of the program that mention them."""
    program, derivative = lowered.program, lowered.derivative
    found = {"score": {str(g.load.value) for g in derivative.tensors}}
    found["score"].update(s.name for g in derivative.products for s in sides(g.product))
    found["score"].update(g.name for g in derivative.params)
    for part in ("sink", "weights", "dropout"):
        root = getattr(program, part)
        factors = {} if root is None else vjp(root, const(1.0))
        found[part] = {
            name
            for leaf, factor in factors.items()
            if leaf is not SCORE and simplify_node(factor) is not const(0.0)
            for name in leaf_names(leaf) & _floats(program)
        }
    order = [decl.name for decl in _captures(program)]
    learned = [name for name in order if any(name in names for names in found.values())]
    rows = [f"gradients    {', '.join(['q, k, v', *learned])}"]
    for part, names in found.items():
        if names:
            listed = ", ".join(name for name in order if name in names)
            rows.append(f"  {'by ' + part:<11}{listed}")
    return rows


def _floats(program: Program) -> frozenset[str]:
    """Names of the captures that can have gradients: not those of indices."""
    return frozenset(decl.name for decl in _captures(program) if decl.dtype is DType.FLOAT)


def _captures(program: Program) -> list[TensorDecl | ParamDecl]:
    return [*program.tensors, *program.params]


def _higher(backend: Backend, checked: bool) -> str:
    """The part of the work that runs as torch operations."""
    chunks = "torch operations, some rows of queries at a time"
    if isinstance(backend, ForwardMode):
        kernel = "kernels" if as_fused(backend) is not None else "a triton kernel"
        return f"tangents: {kernel}; second derivatives, vmap, other torch.func: {chunks}"
    if not backend.differentiable:
        return f"tangents, second derivatives, torch.func: {chunks}"
    if checked:
        return "second derivatives: torch's own; no tangents and no torch.func in checked mode"
    return f"second derivatives: torch's own, dense; tangents, torch.func: {chunks}"


def _forms(lowered: Lowered) -> list[str]:
    """Lines on the functions that may take fast forms; none for programs without such functions."""
    derivative = lowered.derivative
    factors = [g.factor for g in derivative.tensors] + [g.factor for g in derivative.params]
    factors += [g.factor for g in derivative.products]
    lines = describe_forms([lowered.program.score, derivative.score, *factors])
    if not lines:
        return []
    if lowered.program.exact:
        return ["functions    exact forms everywhere, as asked for"]
    rows = ["functions    fast forms on NVIDIA GPUs, exact ones elsewhere or with exact=True"]
    return rows + [f"  {line}" for line in lines]


def _describe(root: Node) -> str:
    if root.op is Op.SCORE:
        return "scale * (q . k)"
    found = dependencies(root)[root]
    order = [name for name in ("score", "b", "h", "q", "kv") if name in found]
    count = sum(1 for item in toposort(root) if item.args)
    return f"{counted(count, 'operation')} on {', '.join(order) or 'constants'}"


def _cost(
    lowered: Lowered, call: Call, blocks: tuple[int, int], tiles: TileCounts | None, refusal: str
) -> list[str]:
    """Lines on live tiles at these lengths and their cost, or the reason why these are unknown.

    Work counts two matrix products a visited tile forward, five backward in one pass and seven in
    two, of 2 * block_m * block_n * head_dim operations each.
    """
    q_len, kv_len, batch, heads, head_dim = (
        call.sizes[name] for name in ("q_len", "kv_len", "batch", "heads", "head_dim")
    )
    head = f"at {q_len} queries x {kv_len} keys, {batch} x {heads} heads of {head_dim}"
    if tiles is None:
        return [head, f"  live       not counted: {refusal}"]
    total = max(1, tiles.total)
    visited = (tiles.full + tiles.partial) / total
    product = 2.0 * q_len * kv_len * head_dim * batch * heads
    advice = _advice(lowered)
    smaller = smaller_tiles(lowered, call, blocks, tiles)
    return [
        head,
        f"  live       {visited:.2%} of {tiles.rows} x {tiles.columns} tiles: "
        f"{tiles.full / total:.2%} FULL, {tiles.partial / total:.2%} PARTIAL",
        f"  work       {2 * product * visited / 1e12:.4g} TFLOP forward, "
        f"{7 * product * visited / 1e12:.4g} backward (two passes); "
        f"dense: {2 * product / 1e12:.4g} and {7 * product / 1e12:.4g}",
        *(f"  cheaper    {line}" for line in (*advice, *([smaller] if smaller else []))),
    ]


def _atoms(lowered: Lowered) -> list[str]:
    sparsity = lowered.sparsity
    if sparsity.mask is None:
        return ["tiles        all: there is no mask"]
    rows = ["tiles        the mask's parts, and what decides their tiles"]
    for atom in sparsity.atoms:
        reason = f" ({atom.reason})" if atom.reason else ""
        rows.append(f"  {print_expression(atom.condition)}: {atom.way}{reason}")
    return rows


def _advice(lowered: Lowered) -> list[str]:
    """Changes of the program that would make it cheaper; empty if none is known."""
    sparsity = lowered.sparsity
    lines: list[str] = []
    if sparsity.mask is None:
        return lines
    for atom in sparsity.atoms:
        params = [item for item in toposort(atom.condition) if item.op is Op.PARAM]
        if "not constant" in atom.reason and params:
            names = ", ".join(sorted({str(item.value) for item in params}))
            lines.append(f"bind {names} at compile time: closed forms divide by constants only")
        elif atom.way == EVALUATION and atom.condition.op is not Op.LOAD:
            lines.append(
                f"'{print_expression(atom.condition)}' is evaluated in all undecided tiles: "
                "comparisons of q and kv, or of one lookup each, are decided without"
            )
        elif atom.way == SCORES:
            lines.append("a mask of positions alone would skip tiles; this one needs the scores")
    return lines
