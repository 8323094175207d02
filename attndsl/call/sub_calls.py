"""Parts of larger calls, in terms of their programs.

One rule: names of a program mean in a part what they mean in the whole. Sizes are the whole's, and
positions, heads and batch entries count in it (docs/language.md, "Parts of a call").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Call, Draws
from attndsl.errors import ArgumentError, ShapeError, UnsupportedError
from attndsl.foundation.caches import memoised
from attndsl.ir import TOKENS, Op, size, toposort
from attndsl.passes.sub_program import (
    SIZE_OF,
    VARIABLE_OF,
    Changes,
    Start,
    Tokens,
    localised_program,
    other_lookup,
    plain_lookups,
)
from attndsl.pipeline import lower_program

from .call_slice import is_by_entry
from .list_maps import with_maps
from .remade_programs import remade

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.backends.base import Part
    from attndsl.ir import Program, TensorDecl
    from attndsl.passes.sub_program import Localised
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
        part: What :func:`.call_slice.part_of` found.
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
    if not _is_declared(decl, dim):
        if count == own:
            raise ArgumentError(
                f"{decl.name} has {count} elements along dim {dim}, which the program looks up by "
                f"'{variable}'; the whole call has {whole} of these, and its part {own}",
                hint=f"pass the whole tensor, or declare that dim as {name}",
            )
        return
    if count != own:
        raise ShapeError(
            f"{decl.name} has {count} elements along dim {dim}, which is declared as {name}; "
            f"the whole call has {whole} of these, and its part {own}",
            hint=f"pass the whole tensor, or the part's own {own} elements of it",
        )
    other = other_lookup(program, decl.name, dim, variable)
    if other is not None:
        raise ArgumentError(
            f"{decl.name} has {count} elements along dim {dim}, the part's own of {whole}, and "
            f"the program looks up others than '{variable}'",
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
    tensors, less = dict(call.tensors), set()
    for name, dim, start, count in _narrowings(program, call, part, own_sizes(call)):
        if tensors[name].shape[dim] != count:
            tensors[name] = tensors[name].narrow(dim, start, count)
            less.add((name, dim))
    shares, own_now = part.shares.union(less), part.narrowed.union(less)
    return call._replace(tensors=tensors, part=replace(part, shares=shares, narrowed=own_now))


def gradients_of_wholes(
    program: Program, call: Call, found: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients of captures as they were before :func:`narrowed`: zeros for all other rows.

    Args:
        program: The program.
        call: A call of it, as :func:`narrowed` returned it.
        found: Gradients of its captures, by name.
    """
    part, wholes = call.part, dict(found)
    if part is None or not part.narrowed:
        return wholes
    plain = _plain_lookups(program)
    for name, dim, start, count in _narrowings(program, call, part, own_sizes(call)):
        if name in wholes and (name, dim) in part.narrowed:
            shape = list(wholes[name].shape)
            shape[dim] = call.sizes[SIZE_OF[plain[name, dim] or ""]]
            whole = wholes[name].new_zeros(shape)
            whole.narrow(dim, start, count).copy_(wholes[name])
            wholes[name] = whole
    return wholes


def _narrowings(
    program: Program, call: Call, part: Part, own: Mapping[str, int]
) -> tuple[tuple[str, int, int, int], ...]:
    """See :class:`Terms`; of tensors that are whole, or have been narrowed already."""
    plain, sizes = _plain_lookups(program), call.sizes
    starts = {"batch": part.b_offset, "heads": part.h_offset}
    if part.packed is not None and part.packed.requests is not None:
        # Which requests these are, the host does not know.
        del starts["batch"]
    if _group(sizes) == _group(own):
        starts["kv_heads"] = part.h_offset // _group(own)
    found = []
    for decl in program.tensors:
        for dim, count in enumerate(call.tensors[decl.name].shape):
            size_name = SIZE_OF.get(plain.get((decl.name, dim)) or "")
            if size_name not in starts or sizes[size_name] == own[size_name]:
                continue
            # A dim of another name is that name's size too, in all tensors.
            if decl.dims[dim].op is not Op.SIZE or decl.dims[dim].value != size_name:
                continue
            if count == sizes[size_name] or (decl.name, dim) in part.shares:
                found.append((decl.name, dim, starts[size_name], own[size_name]))
    return tuple(found)


_kept_lookups = memoised("plain lookups of captures by program", 256)(plain_lookups)


def _plain_lookups(program: Program) -> Mapping[tuple[str, int], str | None]:
    """See :func:`~attndsl.passes.sub_program.plain_lookups`; graphs are warned of caches."""
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


@dataclass(frozen=True, slots=True)
class Terms:
    """Rules that turn a part's calls of one signature into calls for backends, without wholes."""

    lowered: Lowered
    """The program in the part's own terms."""
    sizes: Mapping[str, int]
    narrowed: tuple[tuple[str, int, int, int], ...]
    """Tensors' names, dims, and which rows the part has along these: the first, and how many."""
    captures: tuple[tuple[str, str], ...]
    """Names of captures that the program has now, and what of a call is given by them."""
    moved: frozenset[str]
    """Sides among ``q`` and ``kv`` whose positions the program makes of rows itself."""
    draws: Draws | None
    by_offset: tuple[bool, bool]
    """Flags for queries and for keys: True if dropout counts them from the call's offset on."""

    def applied(self, call: Call) -> Call:
        """``call``, a checked one of the program as it was, as one of the program as it is."""
        found: dict[str, Any] = {**call.tensors, **call.params}
        for name, dim, start, count in self.narrowed:
            if found[name].shape[dim] != count:
                found[name] = found[name].narrow(dim, start, count)
        for name, given in self.captures:
            value = _GIVEN[given](call)
            found[name] = narrow(value) if isinstance(value, torch.Tensor) else value
        program, moved = self.lowered.program, self.moved
        return Call(
            call.q,
            call.k,
            call.v,
            call.scale,
            self.sizes,
            {decl.name: found[decl.name] for decl in program.tensors},
            {decl.name: found[decl.name] for decl in program.params},
            0 if "q" in moved else call.q_offset,
            0 if "kv" in moved else call.kv_offset,
            None if "q" in moved else call.q_index,
            None if "kv" in moved else call.kv_index,
            call.seed,
            call.deterministic,
            call.tiles,
            call.signature,
            call.wide,
            self._draws(call),
        )

    def _draws(self, call: Call) -> Draws | None:
        """Numbering of dropout's rows in ``call``; None where it is that of a call of its own."""
        draws = self.draws
        if draws is None:
            return None
        starts: dict[str, Any] = {}
        if self.by_offset[0]:
            starts["q_start"] = call.q_offset
        if self.by_offset[1]:
            starts["kv_start"] = call.kv_offset
        draws = replace(draws, **starts) if starts else draws
        return None if draws == Draws(call.q.shape[1]) else draws


def _of_part(name: str, call: Call) -> Any:
    return getattr(call.part, name)


def _of_packed(name: str, call: Call) -> Any:
    assert call.part is not None
    return getattr(call.part.packed, name)


_GIVEN: Mapping[str, Callable[[Call], Any]] = {
    "q_offset": attrgetter("q_offset"),
    "kv_offset": attrgetter("kv_offset"),
    "q_index": attrgetter("q_index"),
    "kv_index": attrgetter("kv_index"),
    "kv_lengths": partial(_of_part, "kv_lengths"),
    "token_starts": partial(_of_packed, "starts"),
    "token_positions": partial(_of_packed, "positions"),
    "requests": partial(_of_packed, "requests"),
}
"""Functions from a call to the value of a capture of :class:`Terms`, by the value's name."""


_MADE = {"q_offset": "first_query", "token_starts": "first_token", "kv_lengths": "length"}
"""Fields of :class:`~attndsl.backends.paged_requests.Requests` that follow from a packed call's
starts and lengths, by the call's name for each."""


def made_captures(terms: Terms) -> tuple[tuple[str, str], ...]:
    """See :class:`attndsl.backends.paged_requests.Pages`, of a packed call of all requests."""
    return tuple((name, _MADE[given]) for name, given in terms.captures if given in _MADE)


def with_narrow_positions(call: Call) -> Call:
    """A packed call whose offsets and lengths need not be converted, without ``q_index``."""
    part = call.part
    assert part is not None
    assert part.packed is not None
    assert part.kv_lengths is not None
    assert isinstance(call.q_offset, torch.Tensor)
    packed = part.packed._replace(starts=narrow(part.packed.starts), positions=None)
    part = replace(part, packed=packed, kv_lengths=narrow(part.kv_lengths))
    return call._replace(q_offset=narrow(call.q_offset), part=part)


def terms_of(lowered: Lowered, call: Call) -> Terms:
    """Rules that turn calls of the signature of ``call``, which is a part, into calls for backends.

    Args:
        lowered: The program.
        call: A checked call of it.

    Raises:
        UnsupportedError: Dropout that cannot count in the whole.
    """
    part = call.part
    assert part is not None
    assert not lowered.program.lists, "lists are maps here: see list_maps"
    own = own_sizes(call)
    _check_probability(lowered.program, part)
    changes = _changes(lowered, call, part, own)
    moved, found = _lowered(lowered, changes)
    group = _group(call.sizes)
    values = {
        **{name: call.sizes[name] for name in changes.sizes},
        "b_offset": part.b_offset,
        "h_offset": part.h_offset,
        "group": group,
        "hkv_offset": part.h_offset // group,
    }
    captures = {} if part.kv_lengths is None else {"kv_lengths": "kv_lengths"}
    if part.packed is not None:
        values[TOKENS] = part.packed.tokens
        captures["token_starts"] = "token_starts"
        if changes.requests:
            captures["requests"] = "requests"
            captures["q_starts"] = "q_offset"
    for name, start in (("q", changes.q), ("kv", changes.kv)):
        if start is Start.NUMBER:
            values[f"{name}_start"] = getattr(call, f"{name}_offset")
        elif start in _CAPTURES:
            what, given = _CAPTURES[start]
            captures[f"{name}_{what}"] = given.format(name)
    sizes = {found.names[what]: value for what, value in values.items() if what in found.names}
    draws, by_offset = None, (False, False)
    if moved.program.dropout is not None:
        draws, by_offset = _draws(call, part, changes)
    return Terms(
        moved,
        {**call.sizes, **own, **sizes},
        tuple(x for x in _narrowings(lowered.program, call, part, own) if x[:2] in part.shares),
        tuple((found.names[what], given) for what, given in captures.items()),
        frozenset(n for n, s in (("q", changes.q), ("kv", changes.kv)) if s is not Start.CALL),
        draws,
        by_offset,
    )


_CAPTURES = {
    Start.SCALAR: ("start", "{}_offset"),
    Start.ENTRIES: ("starts", "{}_offset"),
    Start.ROWS: ("positions", "{}_index"),
    Start.TOKENS: ("positions", "token_positions"),
}
"""Suffix of the program's capture after ``q_`` or ``kv_``, and the call's value for it."""


def localised(lowered: Lowered, call: Call) -> tuple[Lowered, Call]:
    """A program and a call of it as backends get them; see :func:`terms_of`."""
    lowered, call = with_maps(lowered, call)
    if call.part is None:
        return lowered, call
    terms = terms_of(lowered, call)
    return terms.lowered, terms.applied(call)


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


def narrow(positions: torch.Tensor) -> torch.Tensor:
    """Positions in 32 bits, of which kernels and sets know that they are small."""
    return positions if positions.dtype is torch.int32 else positions.to(torch.int32)


def _changes(lowered: Lowered, call: Call, part: Part, own: Mapping[str, int]) -> Changes:
    """Differences in meaning of the program's names between the part and a call of its own."""
    program, packed = lowered.written, part.packed
    tokens = (
        Tokens.PACKED
        if packed is not None
        else Tokens.POSITIONS
        if "q" in part.counted
        else Tokens.ROWS
    )
    by_row = lowered.by_token is not None and tokens is Tokens.ROWS
    larger = {name for name in VARIABLE_OF if call.sizes[name] != own[name]}
    shared = {decl.dims[dim].value for decl in program.tensors for name, dim in part.shares
              if decl.name == name}  # fmt: skip
    return Changes(
        sizes=frozenset(larger),
        replicated=_group(call.sizes) != _group(own),
        q=(
            _start(call.q_offset, call.q_index, "q_len" in shared or by_row)
            if packed is None or packed.positions is None
            else Start.TOKENS
        ),
        kv=_start(call.kv_offset, call.kv_index, "kv_len" in shared or part.kv_lengths is not None),
        lengths=part.kv_lengths is not None,
        requests=packed is not None and packed.requests is not None,
        tokens=tokens,
        shares=part.shares,
    )


def _start(offset: int | torch.Tensor, index: torch.Tensor | None, by_row: bool) -> Start:
    """Rule from rows to positions; ``by_row`` where the program looks something up by rows."""
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


def _draws(call: Call, part: Part, changes: Changes) -> tuple[Draws, tuple[bool, bool]]:
    """Numbering of dropout's rows, and whether it starts at offsets; see :class:`Terms`."""
    starts: list[int | None] = []
    by_offset = []
    for name, start in (("q", changes.q), ("kv", changes.kv)):
        offset, index = getattr(call, f"{name}_offset"), getattr(call, f"{name}_index")
        counted = name in part.counted
        if counted and start not in (Start.CALL, Start.NUMBER):
            raise UnsupportedError(
                f"dropout counts the whole's rows ({name}_len is given), and which these are is "
                f"said by batch entry, or by a tensor beside a capture of the part's own rows",
                hint="pass the captures whole, and offsets as one number",
            )
        by_tensor = index is not None or isinstance(offset, torch.Tensor)
        starts.append(None if counted and by_tensor else 0)
        by_offset.append(counted and not by_tensor)
    draws = Draws(call.sizes["heads"], part.b_offset, part.h_offset, *starts)
    return draws, (by_offset[0], by_offset[1])


def _localised(program: Program, changes: Changes) -> tuple[Lowered | None, Localised]:
    found = localised_program(program, changes)
    return (None if found.program == program else lower_program(found.program)), found


def _lowered(lowered: Lowered, changes: Changes) -> tuple[Lowered, Localised]:
    moved, found = remade(_localised, lowered.written, changes)
    return (lowered if moved is None else moved), found
