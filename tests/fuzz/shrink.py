"""Smaller cases that fail as a case does: statements, nodes, sizes and options go one by one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from .expressions import KV, Q
from .generate import trimmed
from .inputs import dim_size
from .program import (
    Apply,
    Given,
    Invoke,
    Kind,
    Layout,
    Line,
    Literal,
    Local,
    Masked,
    Name,
    Positions,
    Target,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .program import Case, Expr

_LITERALS = {
    Kind.BOOL: (Literal(True), Literal(False)),
    Kind.INT: (Literal(0), Literal(1), Q, KV),
    Kind.FLOAT: (Literal(1.0), Literal(0.5)),
}


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """The smallest case found within ``seconds`` for which ``fails`` holds, as for ``case``."""
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for candidate in candidates(case):
            if time.monotonic() > end:
                return case
            if fails(candidate):
                case, progress = candidate, True
                break
    return case


def candidates(case: Case) -> Iterator[Case]:
    """Cases that are simpler by one step, the largest steps first."""
    yield from _without_lines(case)
    yield from _simpler_call(case)
    yield from _smaller(case)
    for at, line in enumerate(case.lines):
        for value in _simpler(line.value):
            changed = Line(line.target, value, line.name)
            lines = (*case.lines[:at], changed, *case.lines[at + 1 :])
            yield trimmed(replace(case, lines=lines))
    yield from _simpler_captures(case)


def _without_lines(case: Case) -> Iterator[Case]:
    for at, line in enumerate(case.lines):
        rest = (*case.lines[:at], *case.lines[at + 1 :])
        if line.target is Target.LOCAL:
            here = Local(line.name, line.value.kind)
            if any(item == here for other in rest for item in walk(other.value)):
                yield _inlined(case, at)
                continue
        if rest:
            yield trimmed(replace(case, lines=rest))


def _inlined(case: Case, at: int) -> Case:
    """Without the local of a line; the score that it reads may be another one then."""
    gone = case.lines[at]
    here = Local(gone.name, gone.value.kind)
    lines = [
        Line(line.target, _replaced(line.value, here, gone.value), line.name)
        for number, line in enumerate(case.lines)
        if number != at
    ]
    return trimmed(replace(case, lines=tuple(lines)))


def _replaced(item: Expr, old: Expr, new: Expr) -> Expr:
    if item == old:
        return new
    if not item.args:
        return item
    return replace(item, args=tuple(_replaced(arg, old, new) for arg in item.args))


def _simpler_call(case: Case) -> Iterator[Case]:
    if case.positions != Positions():
        yield replace(case, positions=Positions())
        yield replace(case, positions=replace(case.positions, as_tensors=False))
        names = ("q_index", "kv_index", "q_starts", "kv_lengths")
        # Packed requests have all of theirs.
        for name in () if case.positions.counts else names:
            yield replace(case, positions=replace(case.positions, **{name: None}))
        for name in ("q_offset", "kv_offset"):
            yield replace(case, positions=replace(case.positions, **{name: 0}))
    if case.scale is not None:
        yield replace(case, scale=None)
    if case.lse:
        yield replace(case, lse=False)
    if case.dropout is not None:
        yield replace(case, dropout=None)
    for at, values in enumerate(case.inputs):
        for simpler in (replace(values, layout=Layout.PLAIN), replace(values, learned=False)):
            if simpler != values:
                yield replace(case, inputs=(*case.inputs[:at], simpler, *case.inputs[at + 1 :]))


def _smaller(case: Case) -> Iterator[Case]:
    """With smaller sizes."""
    sizes = case.sizes
    if sizes.heads != sizes.kv_heads:
        yield replace(case, sizes=replace(sizes, heads=sizes.kv_heads))
    if sizes.kv_heads > 1:
        group = sizes.heads // sizes.kv_heads
        yield replace(case, sizes=replace(sizes, heads=group, kv_heads=1))
        yield replace(case, sizes=replace(sizes, heads=2 * group, kv_heads=2))
    for name in ("batch", "q_len", "kv_len", "head_dim", "value_dim"):
        size = getattr(sizes, name)
        # Kernels have a least head dim.
        for less in (1, 2, 4, 16) if name.endswith("dim") else (1, 2, size // 2, size - 1):
            if 0 < less < size:
                yield _indexed(replace(case, sizes=replace(sizes, **{name: less})))
    for at, (name, size) in enumerate(case.dims):
        for less in {1, size - 1}:
            if 0 < less < size:
                yield replace(case, dims=(*case.dims[:at], (name, less), *case.dims[at + 1 :]))


def _indexed(case: Case) -> Case:
    """With positions of as many rows, keys and batch entries as it has."""
    at, sizes = case.positions, case.sizes
    q_index = None if at.q_index is None else at.q_index[: sizes.q_len]
    kv_index = None if at.kv_index is None else at.kv_index[: sizes.kv_len]
    q_starts, lengths = at.q_starts, at.kv_lengths
    return replace(
        case,
        positions=replace(
            at,
            q_index=q_index,
            kv_index=kv_index,
            q_starts=None if q_starts is None else q_starts[: sizes.batch],
            counts=at.counts and at.counts[: sizes.batch],
            kv_lengths=lengths
            and tuple(min(length, sizes.kv_len) for length in lengths[: sizes.batch]),
        ),
    )


def _simpler(item: Expr) -> Iterator[Expr]:
    """``item`` with one node replaced by an operand or a leaf."""
    for child in _below(item):
        if child.kind is item.kind:
            yield child
    if isinstance(item, Invoke) and not item.function.prelude:
        body = item.function.body
        for parameter, arg in zip(item.function.parameters, item.args, strict=True):
            body = _replaced(body, parameter, arg)
        yield body
    if not isinstance(item, Masked):
        for leaf in _LITERALS[item.kind]:
            if leaf != item and not (isinstance(item, Literal) and isinstance(leaf, Name)):
                if isinstance(item, Literal) and item in _LITERALS[item.kind]:
                    break
                yield leaf
    for at, arg in enumerate(item.args):
        for simpler in _simpler(arg):
            yield replace(item, args=(*item.args[:at], simpler, *item.args[at + 1 :]))


def _below(item: Expr) -> list[Expr]:
    """Operands, and what those of another type are made of."""
    found = list(item.args)
    for arg in item.args:
        if arg.kind is not item.kind or isinstance(arg, Apply):
            found.extend(arg.args)
    return found


def _simpler_captures(case: Case) -> Iterator[Case]:
    for at, tensor in enumerate(case.tensors):
        values = tensor.values
        others = [replace(values, layout=Layout.PLAIN), replace(values, learned=False)]
        plain = {Kind.INT: "int64", Kind.FLOAT: "float32", Kind.BOOL: "bool"}[tensor.kind]
        others.append(replace(values, dtype=plain))
        changed = [replace(tensor, values=x) for x in others if x != values]
        for number, dim in enumerate(tensor.dims):
            if isinstance(dim, Apply):
                size = Literal(dim_size(case, dim))
                dims = (*tensor.dims[:number], size, *tensor.dims[number + 1 :])
                changed.append(replace(tensor, dims=dims))
        for other in changed:
            yield trimmed(
                replace(case, tensors=(*case.tensors[:at], other, *case.tensors[at + 1 :]))
            )
    for at, param in enumerate(case.params):
        if param.given not in (Given.NUMBER, Given.BOUND):
            simpler = replace(param, given=Given.NUMBER)
            yield replace(case, params=(*case.params[:at], simpler, *case.params[at + 1 :]))
