"""The place of a call in a larger call, from its own arguments, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Part
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from attndsl.foundation.caches import memoised
from attndsl.foundation.scalars import as_int
from attndsl.ir import Op, toposort

from .value_checks import check_rows_within

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Program

    from .options import Location

INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_GIVEN = ("batch", "heads", "kv_heads", "q_len", "kv_len")
_OWN_NUMBERS = (*_GIVEN, "h_offset", "b_offset")
_INT_FIELDS = (*_OWN_NUMBERS, "q_offset", "kv_offset")


def is_plain(location: Location) -> bool:
    """Return True if only positions are given, by one number or index for all batch entries."""
    return (
        location.q_len is None and location.kv_len is None and location.heads is None
        and location.kv_heads is None and location.batch is None and location.kv_lengths is None
        and type(location.h_offset) is int and location.h_offset == 0
        and type(location.b_offset) is int and location.b_offset == 0
        and not is_by_entry(location.q_offset) and not is_by_entry(location.kv_offset)
    )  # fmt: skip


def with_ints(location: Location) -> Location:
    """``location``, whose whole numbers of other types are ints."""
    given = {name: getattr(location, name) for name in _INT_FIELDS}
    ints = {name: plain_int(value) for name, value in given.items()}
    changed = {name: value for name, value in ints.items() if value is not given[name]}
    return replace(location, **changed) if changed else location


@dataclass(frozen=True, slots=True)
class CallSizes:
    """Sizes of a call that has no tensors yet."""

    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 1
    """Query heads."""
    kv_heads: int | None = None
    """Key heads; None for as many as query heads."""
    head_dim: int = 64
    """Head dim of q and k."""

    def with_ints(self) -> CallSizes:
        """The same, whose whole numbers of other types are ints."""
        return CallSizes(*(plain_int(getattr(self, field.name)) for field in fields(self)))


def sizes_of_whole(given: Mapping[str, int] | None) -> dict[str, Any]:
    """Sizes of a whole call by their names at a call, where these say sizes of a part.

    Raises:
        ArgumentError: There is no such name.
    """
    found = {} if given is None else dict(given)
    for name in found:
        if name not in _GIVEN:
            raise ArgumentError(f"whole_sizes has {name!r}", hint=f"it has {', '.join(_GIVEN)}")
    return found


@memoised("uses of lengths in captures", 256)
def has_rows(program: Program) -> bool:
    """Return True if a tensor has a dim ``q_len`` or ``kv_len``: a part may have its own share."""
    dims = [dim for decl in program.tensors for dim in decl.dims]
    return any(dim.op is Op.SIZE and dim.value in ("q_len", "kv_len") for dim in dims)


def is_by_entry(offset: object) -> bool:
    """Return True if an offset has an element for each batch entry."""
    return isinstance(offset, torch.Tensor) and offset.dim() == 1


def part_of(
    program: Program, location: Location, sizes: Mapping[str, int]
) -> tuple[dict[str, int], Part]:
    """The whole's sizes, and which part of it a call is (:func:`.sub_calls.with_shares`).

    Args:
        program: The program.
        location: What the call says.
        sizes: Those of its tensors.

    Raises:
        ArgumentError: What cannot be, or what is missing, and what to pass.
    """
    given = {name: getattr(location, name) for name in _GIVEN}
    for name in _OWN_NUMBERS:
        _own_number(name, getattr(location, name))
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
    counted = _counted(location)
    return found, Part(
        location.b_offset, location.h_offset, counted, kv_lengths=location.kv_lengths,
        packed=location.packed,
    )  # fmt: skip


def _counted(location: Location) -> frozenset[str]:
    return frozenset(
        name for name, length in (("q", location.q_len), ("kv", location.kv_len))
        if length is not None
    )  # fmt: skip


def plain_int(value: Any) -> Any:
    """``value`` as an int where it is a whole number of another type; otherwise as it is."""
    if type(value) is int or value is None or isinstance(value, torch.Tensor | torch.SymInt):
        return value
    number = as_int(value)
    return value if number is None else number


def _own_number(name: str, value: Any) -> int | torch.SymInt | None:
    """A number that says which part a call is; None for a size that it does not say.

    Raises:
        ArgumentError: It is no int, or negative.
    """
    if type(value) is int and value >= 0:
        return value
    if value is None and name in _GIVEN:
        return None
    number = plain_int(value)
    if not isinstance(number, int | torch.SymInt) or isinstance(number, bool):
        raise ArgumentError(f"{name} is {value!r}", hint="pass an int")
    if number < 0:
        raise ArgumentError(f"{name} is {value}", hint="pass 0 or more")
    return number


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
    """Return True if expressions of a program, or sizes of its tensors, mention key heads."""
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
        indexed = getattr(location, f"{name}_index") is not None
        if not indexed and not isinstance(offset, torch.Tensor):
            check_rows_within(name, offset, own[length], sizes[length])
        # Indices may name a row several times.
        elif own[length] > sizes[length] and (not indexed or sizes[length] == 0):
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
    if not isinstance(lengths, torch.Tensor) or lengths.dtype not in INTS:
        raise DTypeError("kv_lengths is no int tensor", hint=_lengths_hint(batch, device))
    if tuple(lengths.shape) != (batch,):
        raise ShapeError(
            f"kv_lengths has shape {tuple(lengths.shape)}", hint=_lengths_hint(batch, device)
        )
    if lengths.device != device:
        raise DeviceError(f"kv_lengths is on {lengths.device}", hint=_lengths_hint(batch, device))


def _lengths_hint(batch: int, device: torch.device) -> str:
    return f"pass ({batch},) ints on {device}, the number of keys of each batch entry"
