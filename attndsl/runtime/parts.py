"""Parts of larger calls, in terms of their programs.

One rule: names of a program mean in a part what they mean in the whole. Sizes are the whole's, and
positions, heads and batch entries count in it (docs/language.md, "Parts of a call").

Non-goals: putting parts together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Draws
from attndsl.errors import ArgumentError, ShapeError, UnsupportedError
from attndsl.ir import Op, size, toposort
from attndsl.passes.localise import (
    SIZE_OF,
    VARIABLE_OF,
    Changes,
    Start,
    localised_program,
    other_lookup,
    plain_lookups,
)
from attndsl.pipeline import lower_program

from .location import is_by_entry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Call, Part
    from attndsl.ir import Program, TensorDecl
    from attndsl.passes.localise import Localised
    from attndsl.pipeline import Lowered


def with_shares(
    program: Program,
    part: Part,
    tensors: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    own: Mapping[str, int],
) -> Part:
    """``part`` with the dims of ``tensors`` that have its own rows alone.

    The size of a dim tells which it is: that of the whole, or that of the part.

    Args:
        program: The program.
        part: What :func:`.location.part_of` found.
        tensors: The program's.
        sizes: The whole's.
        own: Those of the call's tensors.

    Raises:
        ShapeError: A dim that is neither.
        ArgumentError: A share that the program looks up by more than its own rows, or that is not
            declared to be one.
    """
    plain = _plain_lookups(program)
    shares = set()
    for decl in program.tensors:
        for dim, count in enumerate(tensors[decl.name].shape):
            name = _size_along(decl, dim, plain)
            if name is None or count == sizes[name]:
                continue
            _check_share(program, decl, dim, count, (name, sizes[name], own[name]))
            if _is_declared(decl, dim):
                shares.add((decl.name, dim))
    return replace(part, shares=frozenset(shares)) if shares else part


def _size_along(
    decl: TensorDecl, dim: int, plain: Mapping[tuple[str, int], str | None]
) -> str | None:
    """The size that a dim is declared as, or that the variable counts which looks it up."""
    if _is_declared(decl, dim):
        return str(decl.dims[dim].value)
    return SIZE_OF.get(plain.get((decl.name, dim)) or "")


def _is_declared(decl: TensorDecl, dim: int) -> bool:
    return decl.dims[dim].op is Op.SIZE and decl.dims[dim].value in VARIABLE_OF


def _check_share(
    program: Program, decl: TensorDecl, dim: int, count: int, expected: tuple[str, int, int]
) -> None:
    """Refuse ``count`` elements along a dim where the whole call and its part have other numbers.

    ``expected`` is the size by name, in the whole, and in the part.
    """
    name, whole, own = expected
    variable = VARIABLE_OF[name]
    has = f"{decl.name} has {count} elements along dim {dim}"
    numbers = f"the whole call has {whole} of these, and its part {own}"
    if not _is_declared(decl, dim):
        if count == own:
            raise ArgumentError(
                f"{has}, which the program looks up by '{variable}'; {numbers}",
                hint=f"pass the whole tensor, or declare that dim as {name}",
            )
        return
    if count != own:
        raise ShapeError(
            f"{has}, which is declared as {name}; {numbers}",
            hint=f"pass the whole tensor, or the part's own {own} elements of it",
        )
    other = other_lookup(program, decl.name, dim, variable)
    if other is not None:
        raise ArgumentError(
            f"{has}, the part's own of {whole}, and the program looks up others than '{variable}'",
            other.span,
            hint="pass the whole tensor",
        )


def narrowed(program: Program, call: Call) -> Call:
    """``call`` with the part's own heads and batch entries alone in its tensors, where it can be.

    Plain variables look these up, as in a call of its own, and kernels know what they are.
    """
    part = call.part
    if part is None:
        return call
    plain, own = _plain_lookups(program), own_sizes(call)
    starts = {"batch": part.b_offset, "heads": part.h_offset}
    if _group(call.sizes) == _group(own):
        starts["kv_heads"] = part.h_offset // _group(own)
    tensors, shares = dict(call.tensors), set(part.shares)
    for decl in program.tensors:
        for dim, count in enumerate(tensors[decl.name].shape):
            name = SIZE_OF.get(plain.get((decl.name, dim)) or "")
            if name in starts and count == call.sizes[name] != own[name]:
                tensors[decl.name] = tensors[decl.name].narrow(dim, starts[name], own[name])
                shares.add((decl.name, dim))
    return replace(call, tensors=tensors, part=replace(part, shares=frozenset(shares)))


_kept_lookups = lru_cache(maxsize=256)(plain_lookups)


def _plain_lookups(program: Program) -> Mapping[tuple[str, int], str | None]:
    """See :func:`~attndsl.passes.localise.plain_lookups`; graphs are warned of caches."""
    if torch.compiler.is_dynamo_compiling():
        return plain_lookups(program)
    return _kept_lookups(program)


def own_sizes(call: Call) -> dict[str, int]:
    """The sizes of the call's tensors that a whole may have more of."""
    return {
        "batch": call.q.shape[0],
        "heads": call.q.shape[1],
        "kv_heads": call.k.shape[1],
        "q_len": call.q.shape[2],
        "kv_len": call.k.shape[2],
    }


def _group(sizes: Mapping[str, int]) -> int:
    """Query heads for each key head."""
    return max(1, sizes["heads"] // max(1, sizes["kv_heads"]))


def localised(lowered: Lowered, call: Call) -> tuple[Lowered, Call]:
    """A program and a call of it as backends get them, which know of no wholes.

    Args:
        lowered: The program.
        call: Its checked call.

    Raises:
        UnsupportedError: Dropout that cannot count in the whole.
    """
    part = call.part
    if part is None:
        return lowered, call
    own = own_sizes(call)
    _check_probability(lowered.program, part)
    changes = _changes(lowered.program, call, part, own)
    moved, found = _lowered(lowered, changes)
    names = found.names
    values = {
        **{name: call.sizes[name] for name in changes.sizes},
        "b_offset": part.b_offset,
        "h_offset": part.h_offset,
        "group": _group(call.sizes),
    }
    values["hkv_offset"] = part.h_offset // values["group"]
    more: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, start in (("q", changes.q), ("kv", changes.kv)):
        if start is Start.CALL:
            continue
        offset, index = getattr(call, f"{name}_offset"), getattr(call, f"{name}_index")
        options |= {f"{name}_offset": 0, f"{name}_index": None}
        if start is Start.NUMBER:
            values[f"{name}_start"] = offset
        elif start is Start.SCALAR:
            is_tensor = isinstance(offset, torch.Tensor)
            more[f"{name}_start"] = _narrow(offset) if is_tensor else offset
        elif start is Start.ENTRIES:
            more[f"{name}_starts"] = _narrow(offset)
        else:
            more[f"{name}_positions"] = _narrow(index)
    if part.kv_lengths is not None:
        more["kv_lengths"] = _narrow(part.kv_lengths)
    given = {names[what]: value for what, value in more.items() if what in names}
    program = moved.program
    sizes = {**call.sizes, **own}
    sizes |= {names[what]: value for what, value in values.items() if what in names}
    captures = {**call.tensors, **call.params, **given}
    return moved, replace(
        call,
        sizes=sizes,
        tensors={decl.name: captures[decl.name] for decl in program.tensors},
        params={decl.name: captures[decl.name] for decl in program.params},
        draws=None if program.dropout is None else _draws(call, part, changes, own),
        part=None,
        **options,
    )


def _check_probability(program: Program, part: Part) -> None:
    """Refuse dropout whose probability each batch entry would have its own of."""
    p = program.dropout
    if p is not None and part.kv_lengths is not None and size("kv_len") in toposort(p):
        raise UnsupportedError(
            "the probability of 'dropout' depends on kv_len, of which kv_lengths gives each batch "
            "entry its own",
            p.span,
            "write it in terms of params and other sizes",
        )


def _narrow(positions: torch.Tensor) -> torch.Tensor:
    """Positions in 32 bits, of which kernels and sets know that they are small."""
    return positions if positions.dtype is torch.int32 else positions.to(torch.int32)


def _changes(program: Program, call: Call, part: Part, own: Mapping[str, int]) -> Changes:
    """What the program's names mean otherwise in the part than in a call of its own."""
    larger = {name for name in VARIABLE_OF if call.sizes[name] != own[name]}
    shared = {decl.dims[dim].value for decl in program.tensors for name, dim in part.shares
              if decl.name == name}  # fmt: skip
    return Changes(
        sizes=frozenset(larger),
        replicated=_group(call.sizes) != _group(own),
        q=_start(call.q_offset, call.q_index, "q_len" in shared),
        kv=_start(call.kv_offset, call.kv_index, "kv_len" in shared or part.kv_lengths is not None),
        lengths=part.kv_lengths is not None,
        shares=part.shares,
    )


def _start(offset: int | torch.Tensor, index: torch.Tensor | None, by_row: bool) -> Start:
    """How positions follow from rows; ``by_row`` where the program looks something up by rows."""
    if index is not None:
        return Start.ROWS if by_row else Start.CALL
    if is_by_entry(offset):
        return Start.ENTRIES
    if not by_row:
        return Start.CALL
    if isinstance(offset, torch.Tensor):
        return Start.SCALAR
    if offset == 0:
        return Start.CALL
    # Sizes are not negative, and are taken not to be.
    return Start.NUMBER if offset > 0 else Start.SCALAR


def _draws(call: Call, part: Part, changes: Changes, own: Mapping[str, int]) -> Draws | None:
    """How dropout counts; None where that is as in a call of its own."""
    starts: dict[str, int | None] = {}
    for name, start in (("q", changes.q), ("kv", changes.kv)):
        offset, index = getattr(call, f"{name}_offset"), getattr(call, f"{name}_index")
        if name not in part.counted:
            starts[name] = 0
        elif start is Start.CALL:
            starts[name] = offset if index is None and isinstance(offset, int) else None
        elif start is Start.NUMBER:
            starts[name] = offset
        else:
            raise UnsupportedError(
                f"dropout counts the whole's rows ({name}_len is given), and which these are is "
                f"said by batch entry, or by a tensor beside a capture of the part's own rows",
                hint="pass the captures whole, and offsets as one number",
            )
    heads = call.sizes["heads"]
    found = Draws(heads, part.b_offset, part.h_offset, starts["q"], starts["kv"])
    return None if found == Draws(own["heads"]) else found


@lru_cache(maxsize=256)
def _localised(program: Program, changes: Changes) -> tuple[Lowered | None, Localised]:
    found = localised_program(program, changes)
    return (None if found.program == program else lower_program(found.program)), found


def _lowered(lowered: Lowered, changes: Changes) -> tuple[Lowered, Localised]:
    moved, found = _localised(lowered.program, changes)
    return (lowered if moved is None else moved), found
