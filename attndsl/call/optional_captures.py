"""Choice of a call's program in a text: captures may be absent, or have size 1 along a dim.

A text declares with ``= none`` what calls may leave out. And a captured tensor may have size 1 in
place of a declared size. Each such call is a call of another program of the same text
(:class:`attndsl.pipeline.Variant`), so that what comes after knows of neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.ir import SIZES, Op
from attndsl.passes.broadcast import fixed_dims
from attndsl.passes.evaluate import Environment, evaluate

from .options import LOCATION, WHOLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Scalar
    from attndsl.ir import Node, Program
    from attndsl.passes.broadcast import Dims

    from .options import Location

    Captures = Mapping[str, torch.Tensor | Scalar]
    Known = Mapping[str, int | None]

_OF_WHOLE = tuple(name for name in SIZES if name in LOCATION)


def optional_names(program: Program) -> tuple[str, ...]:
    """The captures that calls may leave out."""
    return tuple(x.name for x in program.captures() if x.optional)


def absent_names(optional: tuple[str, ...], captures: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in ``optional`` that a call leaves out, or gives as None."""
    return tuple([name for name in optional if captures.get(name) is None])


def sizes_of_operands(q: Any, k: Any) -> dict[str, int | None]:
    """The sizes that q and k tell; none where they are not what a call takes."""
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in (q, k)):
        return {}
    return {
        "batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1], "q_len": q.shape[2],
        "kv_len": k.shape[2], "head_dim": q.shape[3],
    }  # fmt: skip


def dims_of_one(program: Program, captures: Captures, own: Known, whole: Location = WHOLE) -> Dims:
    """Dims along which a captured tensor has size 1 and the declared size is larger.

    Args:
        program: The program of the call.
        captures: The call's.
        own: Sizes of the call's tensors by name; None, or no entry, for what captures tell.
        whole: Where the call lies in a larger one, which has other sizes.
    """
    pairs = [(decl, captures.get(decl.name)) for decl in program.tensors]
    given = [
        (decl, value)
        for decl, value in pairs
        if isinstance(value, torch.Tensor) and value.dim() == len(decl.dims)
    ]
    if not any(1 in value.shape for _, value in given):
        return ()
    told = {name: size for name, size in own.items() if size is not None}
    for decl, value in given:
        for dim, count in zip(decl.dims, value.shape, strict=True):
            name = str(dim.value)
            # Of sizes that only captures tell, one is told by a tensor of size 1 at last.
            if dim.op is Op.SIZE and (name not in told or (own.get(name) is None and count != 1)):
                told[name] = count
    numbers = {x.name: captures.get(x.name, x.default) for x in program.params}
    known = {n: x for n, x in numbers.items() if isinstance(x, int | float | torch.SymInt)}
    in_whole = [(name, getattr(whole, name)) for name in _OF_WHOLE]
    known |= {**told, **{name: count for name, count in in_whole if count is not None}}
    environment = Environment(known)
    fixed = fixed_dims(program)
    found = []
    for decl, value in given:
        for number, (dim, count) in enumerate(zip(decl.dims, value.shape, strict=True)):
            if count != 1 or (decl.name, number) in fixed:
                continue
            if _is_larger(dim, told, environment):
                found.append((decl.name, number))
    return tuple(found)


def _is_larger(dim: Node, told: Mapping[str, int], known: Environment) -> bool:
    """Return True if a dim is declared as more than 1 in this call.

    A part may have one of its own. A part may also have none, of a whole that has some.
    """
    if dim.op is Op.SIZE:
        name = str(dim.value)
        if name not in SIZES or told.get(name, 1) != 0:
            return name in SIZES and told.get(name, 1) > 1
    try:
        return bool(evaluate(dim, known) > 1)
    except KeyError:
        return False
