"""Parts of larger calls: what a call says of the whole, checked, and put into its program.

One rule: names of a program mean in a part what they mean in the whole. Sizes are the whole's, and
positions, heads and batch entries count in it (docs/language.md, "Parts of a call").

Non-goals: putting parts together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Draws, Part
from attndsl.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
)
from attndsl.ir import Op, toposort
from attndsl.passes.localise import (
    VARIABLE_OF,
    Changes,
    Start,
    localised_program,
    other_lookup,
)
from attndsl.pipeline import lower_program

from .values import check_rows_within

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Call
    from attndsl.ir import Program
    from attndsl.passes.localise import Localised
    from attndsl.pipeline import Lowered

INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
LOCATION = (
    "q_offset", "kv_offset", "q_index", "kv_index", "q_len", "kv_len", "heads", "kv_heads", "batch",
    "h_offset", "b_offset", "kv_lengths",
)  # fmt: skip
"""Arguments of a call that say where it lies in a larger one."""
_GIVEN = ("batch", "heads", "kv_heads", "q_len", "kv_len")


@dataclass(frozen=True, slots=True)
class Location:
    """Where in a larger call a call's rows, keys, heads and batch entries lie, as it says itself.

    See :meth:`attndsl.Attention.__call__` for each.
    """

    q_offset: int | torch.Tensor = 0
    kv_offset: int | torch.Tensor = 0
    q_index: torch.Tensor | None = None
    kv_index: torch.Tensor | None = None
    q_len: int | None = None
    kv_len: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    batch: int | None = None
    h_offset: int = 0
    b_offset: int = 0
    kv_lengths: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing but positions is said, by one number or index for all batch entries."""
        return (
            self.q_len is None and self.kv_len is None and self.heads is None
            and self.kv_heads is None and self.batch is None and self.kv_lengths is None
            and type(self.h_offset) is int and self.h_offset == 0
            and type(self.b_offset) is int and self.b_offset == 0
            and not is_by_entry(self.q_offset) and not is_by_entry(self.kv_offset)
        )  # fmt: skip

    def numbers(self, program: Program) -> tuple[object, ...]:
        """Values that make calls of ``program`` have different signatures.

        Raises:
            ArgumentError: One that is no int.
        """
        for name in (*_GIVEN, "h_offset", "b_offset"):
            _check_int(name, getattr(self, name))
        by_row = has_rows(program) or self.kv_lengths is not None
        offsets = (self.q_offset, self.kv_offset) if by_row else ()
        return (
            self.q_len, self.kv_len, self.heads, self.kv_heads, self.batch, self.h_offset,
            self.b_offset, *(x if isinstance(x, int) else None for x in offsets),
        )  # fmt: skip


def sizes_of_whole(given: Mapping[str, int] | None) -> dict[str, int]:
    """Sizes of a whole call by their names at a call, where these say sizes of a part.

    Raises:
        ArgumentError: There is no such name.
    """
    found = {} if given is None else dict(given)
    for name in found:
        if name not in _GIVEN:
            raise ArgumentError(f"whole_sizes has {name!r}", hint=f"it has {', '.join(_GIVEN)}")
    return found


@lru_cache(maxsize=256)
def has_rows(program: Program) -> bool:
    """Whether numbers of queries or keys are dims of tensors, of which a part may have its own."""
    dims = [dim for decl in program.tensors for dim in decl.dims]
    return any(dim.op is Op.SIZE and dim.value in ("q_len", "kv_len") for dim in dims)


WHOLE = Location()
"""Of a call that is no part."""


def is_by_entry(offset: object) -> bool:
    """Whether an offset has an element for each batch entry."""
    return isinstance(offset, torch.Tensor) and offset.dim() == 1


def part_of(
    program: Program, location: Location, sizes: Mapping[str, int]
) -> tuple[dict[str, int], Part]:
    """The whole's sizes, and which part of it a call is; see :func:`with_shares` for the rest.

    Args:
        program: The program.
        location: What the call says.
        sizes: Those of its tensors.

    Raises:
        ArgumentError: What cannot be, or what is missing, and what to pass.
    """
    given = {name: getattr(location, name) for name in _GIVEN}
    for name in (*_GIVEN, "h_offset", "b_offset"):
        _check_int(name, getattr(location, name))
    for offset, whole in (("h_offset", "heads"), ("b_offset", "batch")):
        start = getattr(location, offset)
        if given[whole] is None and start != 0:
            raise ArgumentError(
                f"{offset} is {start}, and {whole} is not given",
                hint=f"pass {whole}=..., their number in the whole call",
            )
        if given[whole] is not None and start + sizes[whole] > given[whole]:
            raise ArgumentError(
                f"{whole} is {given[whole]}, and the call has {sizes[whole]} from {offset}={start}",
                hint=f"{whole} is their number in the whole call: {start + sizes[whole]} or more",
            )
    found = {**sizes, **{name: value for name, value in given.items() if value is not None}}
    found["kv_heads"] = _kv_heads(program, location, sizes)
    _check_lengths(location, found, sizes)
    if location.kv_lengths is not None:
        _check_kv_lengths(location)
    return found, Part(location.b_offset, location.h_offset, _counted(location), frozenset(),
                       location.kv_lengths)  # fmt: skip


def _counted(location: Location) -> frozenset[str]:
    return frozenset(
        name for name, length in (("q", location.q_len), ("kv", location.kv_len))
        if length is not None
    )  # fmt: skip


def _check_int(name: str, value: object) -> None:
    if value is None and name in _GIVEN:
        return
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
        raise ArgumentError(f"{name} is {value!r}", hint="pass an int")
    if value < 0:
        raise ArgumentError(f"{name} is {value}", hint="pass 0 or more")


def _kv_heads(program: Program, location: Location, sizes: Mapping[str, int]) -> int:
    """The whole's number of key heads, where the groups of heads fit into each other."""
    heads, kv_heads = location.heads, location.kv_heads
    own = sizes["heads"] // sizes["kv_heads"]
    if heads is None:
        if kv_heads is not None and kv_heads != sizes["kv_heads"]:
            raise ArgumentError(
                f"kv_heads is {kv_heads}, and heads is not given",
                hint="pass heads=..., the number of query heads in the whole call",
            )
        return sizes["kv_heads"]
    if kv_heads is None:
        if heads % own or mentions_key_heads(program):
            if heads == sizes["heads"]:
                return sizes["kv_heads"]
            raise ArgumentError(
                f"heads is {heads}, and kv_heads is not given",
                hint="pass kv_heads=..., the number of key heads in the whole call",
            )
        kv_heads = heads // own
    if kv_heads == 0 or heads % kv_heads:
        raise ArgumentError(
            f"heads is {heads} and kv_heads is {kv_heads}",
            hint="the number of query heads is a multiple of that of key heads",
        )
    group = heads // kv_heads
    if group % own or location.h_offset % own:
        raise ArgumentError(
            f"the call has {own} query heads for each key head from head {location.h_offset} on, "
            f"and the whole call has {group}",
            hint="cut between groups of heads, or so that each key head's part of a group is whole",
        )
    return kv_heads


def mentions_key_heads(program: Program) -> bool:
    """Whether a program speaks of key heads, in expressions or in the sizes of tensors."""
    dims = [dim for decl in program.tensors for dim in decl.dims]
    return any(
        (item.op is Op.VAR and item.value == "hkv")
        or (item.op is Op.SIZE and item.value == "kv_heads")
        for item in toposort(*program.roots(), *dims)
    )


def _check_lengths(location: Location, sizes: Mapping[str, int], own: Mapping[str, int]) -> None:
    for name, length in (("q", "q_len"), ("kv", "kv_len")):
        if getattr(location, length) is None:
            continue
        rows = "queries" if name == "q" else "keys"
        offset = getattr(location, f"{name}_offset")
        if getattr(location, f"{name}_index") is None and isinstance(offset, int | torch.SymInt):
            check_rows_within(name, offset, own[length], sizes[length])
        elif own[length] > sizes[length] and is_by_entry(offset):
            raise ArgumentError(
                f"{length} is {sizes[length]}, and the call has {own[length]} {rows}",
                hint=f"{length} is their number in the whole call",
            )


def _check_kv_lengths(location: Location) -> None:
    for name in ("kv_len", "kv_index"):
        if getattr(location, name) is not None:
            raise ArgumentError(
                f"kv_lengths and {name} are both given",
                hint=f"drop {name}, or say in the mask which keys there are"
                if name == "kv_index"
                else "drop kv_len: each batch entry's own length is its kv_len",
            )


def check_lengths(lengths: object, batch: int, device: torch.device) -> None:
    """Refuse what are no numbers of keys of ``batch`` entries.

    Raises:
        DTypeError, ShapeError, DeviceError: Says which, and what to pass.
    """
    hint = f"pass ({batch},) ints on {device}, the number of keys of each batch entry"
    if not isinstance(lengths, torch.Tensor) or lengths.dtype not in INTS:
        raise DTypeError("kv_lengths is no int tensor", hint=hint)
    if tuple(lengths.shape) != (batch,):
        raise ShapeError(f"kv_lengths has shape {tuple(lengths.shape)}", hint=hint)
    if lengths.device != device:
        raise DeviceError(f"kv_lengths is on {lengths.device}", hint=hint)


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
        part: What :func:`part_of` found.
        tensors: The program's.
        sizes: The whole's.
        own: Those of the call's tensors.

    Raises:
        ShapeError: A dim that is neither.
        ArgumentError: A share that the program looks up by more than its own rows.
    """
    shares = set()
    for decl in program.tensors:
        for number, (dim, size) in enumerate(zip(decl.dims, tensors[decl.name].shape, strict=True)):
            name = str(dim.value)
            if dim.op is not Op.SIZE or name not in VARIABLE_OF or size == sizes[name]:
                continue
            if size != own[name]:
                raise ShapeError(
                    f"{decl.name} has {size} elements along dim {number}, which is declared as "
                    f"{name}; the whole call has {sizes[name]}, and its part {own[name]}",
                    hint=f"pass the whole tensor, or the part's own {own[name]} elements of it",
                )
            other = other_lookup(program, decl.name, number, VARIABLE_OF[name])
            if other is not None:
                raise ArgumentError(
                    f"{decl.name} has the part's {size} of {sizes[name]} elements along dim "
                    f"{number}, and the program looks up others there than '{VARIABLE_OF[name]}'",
                    other.span,
                    hint="pass the whole tensor",
                )
            shares.add((decl.name, number))
    return replace(part, shares=frozenset(shares)) if shares else part


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
    own = {"batch": call.q.shape[0], "heads": call.q.shape[1], "kv_heads": call.k.shape[1],
           "q_len": call.q.shape[2], "kv_len": call.k.shape[2]}  # fmt: skip
    changes = _changes(lowered.program, call, part, own)
    moved, found = _lowered(lowered, changes)
    names = found.names
    values = {
        **{name: call.sizes[name] for name in changes.sizes},
        "b_offset": part.b_offset,
        "h_offset": part.h_offset,
        "group": max(1, call.sizes["heads"] // max(1, call.sizes["kv_heads"])),
    }
    values["hkv_offset"] = part.h_offset // values["group"]
    more: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, start in (("q", changes.q), ("kv", changes.kv)):
        if start is Start.CALL:
            continue
        offset, index = getattr(call, f"{name}_offset"), getattr(call, f"{name}_index")
        options |= {f"{name}_offset": 0, f"{name}_index": None}
        if start in (Start.NUMBER, Start.SCALAR):
            values[f"{name}_start"] = more[f"{name}_start"] = offset
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


def _narrow(positions: torch.Tensor) -> torch.Tensor:
    """Positions in 32 bits, of which kernels and sets know that they are small."""
    return positions if positions.dtype is torch.int32 else positions.to(torch.int32)


def _changes(program: Program, call: Call, part: Part, own: Mapping[str, int]) -> Changes:
    """What the program's names mean otherwise in the part than in a call of its own."""
    larger = {name for name in VARIABLE_OF if call.sizes[name] != own[name]}
    group = max(1, call.sizes["heads"] // max(1, call.sizes["kv_heads"]))
    shared = {decl.dims[dim].value for decl in program.tensors for name, dim in part.shares
              if decl.name == name}  # fmt: skip
    return Changes(
        sizes=frozenset(larger),
        replicated=group != max(1, own["heads"] // max(1, own["kv_heads"])),
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
    return Start.CALL if offset == 0 else Start.NUMBER


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
