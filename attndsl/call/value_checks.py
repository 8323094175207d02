"""Checks of a call's values, which each call makes anew: two calls of one signature have others.

What shapes, strides and types decide is checked once a signature (:mod:`.argument_checks`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import is_fake

from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.foundation.scalars import as_int, as_number, number_key
from attndsl.ir import DType, Op, toposort
from attndsl.passes.int_ranges import POSITION_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attndsl.backends.base import Call, Part, Scalar
    from attndsl.ir import Program

_NARROW = (torch.int8, torch.uint8, torch.int16)
"""Ints that hold no position at the limit."""
_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1
"""Ints of 64 bits."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_level = torch._C._functorch.maybe_current_level
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_NUMBERS: dict[DType, type] = {DType.FLOAT: float, DType.INT: int, DType.BOOL: bool}
"""Types of a param's value that need no change."""


class ValueChecks(IntEnum):
    """Treatment that the values of one signature's calls need before a backend gets them."""

    SAME = 0
    """Nothing: they fit in every such call, with offsets of 0 where these are numbers."""
    DIFFER = 1
    """A check."""
    FOREIGN = 2
    """A check. Some are numbers of types that backends do not know, such as numpy's."""


_FOREIGN = ValueChecks.FOREIGN  # An attribute of the class takes longer to look up.


def params_of_dims(program: Program) -> tuple[str, ...]:
    """Names of the params that declared dims depend on."""
    dims = [dim for decl in program.tensors for dim in decl.dims]
    found = {str(item.value): None for item in toposort(*dims) if item.op is Op.PARAM}
    return tuple(found)


def dims_key(names: Iterable[str], captures: Mapping[str, object]) -> tuple[object, ...]:
    """The part of a key for the params ``names``, on whose values declared dims depend."""
    return tuple([number_key(captures.get(name)) for name in names])


def check_int(name: str, value: object) -> None:
    """Refuse an int param that 64 bits do not hold."""
    if isinstance(value, int) and not _LEAST <= value <= _GREATEST:
        raise ArgumentError(f"{name} does not fit 64 bits", hint="pass a smaller int")


def plain_number(dtype: DType, value: object) -> bool | int | float | None:
    """``value`` as a param of that type has it; None if it is no number, or one of another type.

    A whole float is as good as an int, and an int as the float next to it, if there is one. Bools
    are neither ints nor floats.
    """
    if dtype is DType.INT:
        return as_int(value)
    number = as_number(value)
    if number is None or isinstance(number, bool) is not (dtype is DType.BOOL):
        return None
    if dtype is not DType.FLOAT:
        return number
    try:
        return float(number)
    except OverflowError:
        return None


def no_value(name: str, dtype: DType, value: object) -> ArgumentError:
    """The error of a ``value`` that a param of that type cannot have."""
    hint = f"the program declares it as {dtype.value}"
    if isinstance(value, int) and value.bit_length() > 64:  # Its digits may be too many to show.
        return ArgumentError(
            f"{name} is an int of {value.bit_length()} bits", hint=f"{hint}: pass a smaller number"
        )
    return ArgumentError(f"{name} is {value!r}", hint=hint)


def needs_of_values(
    program: Program,
    call: Call,
    captures: Mapping[str, torch.Tensor | Scalar],
    numbers: tuple[object, ...],
) -> ValueChecks:
    """Find the treatment that the values of calls of this signature need.

    Args:
        program: The program of the call.
        call: Such a call, bound.
        captures: Its captures as they were given.
        numbers: Its offsets and its seed as they were given.
    """
    params = [(_NUMBERS[decl.dtype], captures.get(decl.name)) for decl in program.params]
    for kind, value in (*params, *((int, number) for number in numbers)):
        if not (value is None or type(value) is kind or isinstance(value, torch.Tensor)):
            return ValueChecks.FOREIGN
    return ValueChecks.DIFFER if _may_be_refused(program, call) else ValueChecks.SAME


def _with_plain_numbers(program: Program, call: Call) -> Call:
    params = {
        decl.name: _plain_number(decl.name, decl.dtype, call.params[decl.name])
        for decl in program.params
    }
    numbers = {
        name: _plain_number(name, DType.INT, getattr(call, name))
        for name in ("q_offset", "kv_offset", "seed")
    }
    return call._replace(params=params, **numbers)


def _plain_number(name: str, dtype: DType, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    number = plain_number(dtype, value)
    if number is None:  # A float that is whole in some calls of one signature only, or a long int.
        raise no_value(name, dtype, value)
    return number


def _may_be_refused(program: Program, call: Call) -> bool:
    if call.part is not None or any(decl.dtype is DType.INT for decl in program.params):
        return True
    positions = (call.q_offset, call.kv_offset, call.q_index, call.kv_index)
    return any(type(each) is not int and each is not None for each in positions)


def check_values(
    program: Program, call: Call, needs: ValueChecks = ValueChecks.DIFFER, marks: bool = False
) -> Call:
    """``call`` with values that backends know; refuses what a call of this signature may not have.

    Calls whose values need nothing need not come here where their offsets are 0.

    Args:
        program: Whose call it is.
        call: The call.
        needs: What the values of its signature need.
        marks: Whether the backend makes results of batch entries with wrong numbers NaN. It sees
            them in 32 bits.

    Raises:
        ArgumentError: An int that 64 bits do not hold; positions at the limit or beyond.
    """
    call = check_params(program, call, needs)
    # Most calls have no positions of their own, and a part of a microsecond counts.
    if (call.q_index is not None or type(call.q_offset) is not int or call.q_offset) and not (
        marks and call.q_index is None and is_of_entries(call.q_offset)
    ):
        _check_positions("q", call.q.shape[2], call.q_offset, call.q_index)
    if call.kv_index is not None or type(call.kv_offset) is not int or call.kv_offset:
        _check_positions("kv", call.k.shape[2], call.kv_offset, call.kv_index)
    if call.part is not None:
        _check_part(call, call.part, marks)
    return call


def is_of_entries(numbers: object) -> bool:
    """Return True if ``numbers`` is a tensor of one 32-bit int for each batch entry."""
    return isinstance(numbers, torch.Tensor) and numbers.dtype is torch.int32 and numbers.dim() == 1


def check_params(program: Program, call: Call, needs: ValueChecks) -> Call:
    """Check values as :func:`check_values` does, of calls whose positions cannot be wrong."""
    if needs is _FOREIGN:
        call = _with_plain_numbers(program, call)
    for decl in program.params:
        if decl.dtype is DType.INT:
            value = call.params[decl.name]
            if type(value) is not int or not _LEAST <= value <= _GREATEST:
                check_int(decl.name, value)
    return call


def _check_part(call: Call, part: Part, marks: bool) -> None:
    """Refuse rows that lie outside of the whole, and numbers of keys that k has no room for."""
    for name, rows in (("q", call.q.shape[2]), ("kv", call.k.shape[2])):
        if name not in part.counted:
            continue
        offset, index = getattr(call, f"{name}_offset"), getattr(call, f"{name}_index")
        whole = call.sizes[f"{name}_len"]
        if index is not None:
            check_range(f"{name}_index", index, 0, whole - 1, "{}_len is {}", name, whole)
        elif isinstance(offset, torch.Tensor):
            told = "{}_len is {}, and the call has {} rows of it"
            check_range(f"{name}_offset", offset, 0, whole - rows, told, name, whole, rows)
        elif isinstance(offset, int) and isinstance(whole, int) and isinstance(rows, int):
            check_rows_within(name, offset, rows, whole)
    if part.kv_lengths is not None and not (marks and is_of_entries(part.kv_lengths)):
        room = call.k.shape[2]
        check_range("kv_lengths", part.kv_lengths, 0, room, "k has room for {} keys", room)


def check_rows_within(name: str, offset: int, rows: int, whole: int) -> None:
    """Refuse rows of a part that lie outside of the whole.

    Args:
        name: ``q`` or ``kv``.
        offset: Where they start.
        rows: How many they are.
        whole: How many the whole has.

    Raises:
        ArgumentError: Some lie outside.
    """
    if offset < 0 or offset + rows > whole:
        what = "queries" if name == "q" else "keys"
        raise ArgumentError(
            f"{name}_len is {whole}, and the call has {rows} {what} from {name}_offset={offset} on",
            hint=f"{name}_len is the number of {what} in the whole call: {offset + rows} or more"
            if offset >= 0
            else f"where {name}_len is given, {name}_offset is 0 or more",
        )


def has_data(tensor: torch.Tensor) -> bool:
    """Tell whether ``tensor`` is more than a shape: neither of meta nor fake."""
    return not tensor.is_meta and (type(tensor) in _PLAIN or not is_fake(tensor))


def has_values(tensor: torch.Tensor) -> bool:
    """Tell whether the elements of ``tensor`` can be read, which transforms and make_fx refuse."""
    seen = _is_wrapped(tensor) or torch._C._get_dispatch_mode(_PROXY) is not None
    return has_data(tensor) and not seen


def refuse_wrapped(what: str, given: Iterable[object]) -> None:
    """Refuse ``what`` of tensors that a transform of ``torch.func``, such as ``vmap``, has wrapped.

    Raises:
        UnsupportedError: One of ``given`` is.
    """
    if _level() is None:
        return
    if any(isinstance(x, torch.Tensor) and _is_wrapped(x) for x in given):
        raise UnsupportedError(
            f"{what} reads and writes pages, which transforms of torch.func do not show",
            hint="call it outside of the transform, or call the program with keys and values that "
            "are no pages: attention(q, k, v, kv_lengths=...)",
        )


def check_range(
    name: str, values: torch.Tensor, low: int, high: int, told: str, *parts: object
) -> None:
    """Refuse elements outside of ``low ... high``; see :func:`_check_positions` for GPUs.

    Args:
        name: What the caller calls them.
        values: Ints.
        low: The least that may be.
        high: The greatest.
        told: Why that is the greatest, with ``{}`` for each of the ``parts``. Text of a size that
            a graph leaves open makes it a constant, so that none is made before a value is wrong.
        *parts: Of that text.

    Raises:
        ArgumentError: Some lie outside, and are not on a GPU.
    """
    if values.numel() == 0 or not has_values(values):
        return
    if values.device.type == "cuda":
        torch._assert_async(
            are_between(values, low, high), f"{name} lies outside of {low} ... {high}"
        )
        return
    least, greatest = (int(x) for x in torch.aminmax(values))
    if least < low or greatest > high:
        raise ArgumentError(
            f"{name} has values from {least} to {greatest}, and {told.format(*parts)}",
            hint=f"pass {name} from {low} to {high}",
        )


def are_within(values: torch.Tensor, most: int) -> torch.Tensor:
    """One number on the device of ``values``, 0 where one of these is larger than ``most`` in size.

    One launch for a 0-d tensor, two for others: a comparison with both ends would take one more.

    Args:
        values: Ints.
        most: From 0 to 2^52.
    """
    # A quotient in fp64 tells exactly; at 0 it is infinite, or no number where most is 0 too.
    limit = torch.scalar_tensor(most, dtype=torch.float64, device="cpu")
    quotients = torch.div(limit, values, rounding_mode="trunc")
    return quotients.all() if values.dim() else quotients


def are_between(values: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """One number on the device of ``values``, 0 where an element lies outside of ``low ... high``.

    One launch more than :func:`are_within`.

    Args:
        values: Ints.
        low: Its sum with ``high``, and their difference, are at most 2^52 in size.
        high: At least ``low``.
    """
    middle = torch.scalar_tensor(-(low + high), dtype=torch.float64, device="cpu")
    return are_within(torch.add(middle, values, alpha=2), high - low)


def check_offset(name: str, offset: int, length: int) -> None:
    """Refuse an offset from which ``length`` rows reach the limit of positions."""
    if offset == 0 and length >= POSITION_LIMIT:
        rows = "queries" if name == "q_offset" else "keys"
        raise ArgumentError(
            f"there are {length} {rows}",
            hint=f"pass fewer: positions are below {POSITION_LIMIT} in size",
        )
    if abs(offset) + length >= POSITION_LIMIT:
        raise ArgumentError(
            f"{name} is {offset}, and {length} rows from there reach position "
            f"{abs(offset) + length}; positions are below {POSITION_LIMIT} in size",
            hint=f"subtract one number from both offsets, or use a smaller {name}",
        )


def _check_positions(
    name: str, length: int, offset: int | torch.Tensor, index: torch.Tensor | None
) -> None:
    """Refuse positions of ``length`` rows that reach the limit.

    Values on a GPU are not waited for: an assertion there stops it, and torch reports that at the
    next synchronisation.

    Args:
        name: ``q`` or ``kv``.
        length: Number of rows.
        offset: As of a call, like ``index``.
        index: Replaces the offset.
    """
    if index is not None:
        _check_tensor(f"{name}_index", index, POSITION_LIMIT - 1)
    elif type(offset) is int:
        check_offset(f"{name}_offset", offset, length)
    elif isinstance(offset, torch.Tensor):
        check_offset(f"{name}_offset", 0, length)
        _check_tensor(f"{name}_offset", offset, POSITION_LIMIT - 1 - length)


def _check_tensor(name: str, values: torch.Tensor, most: int) -> None:
    # What a transform of torch.func wraps is computed with in 64 bits, without kernels.
    if values.dtype in _NARROW or values.numel() == 0 or not has_values(values):
        return
    if values.device.type == "cuda":
        message = f"{name} has positions of {POSITION_LIMIT} or more in size"
        torch._assert_async(are_within(values, most), message)
        return
    if values.dim() == 0:
        least = greatest = int(values)
    else:
        least, greatest = (int(x) for x in torch.aminmax(values))
    if least < -most or greatest > most:
        raise ArgumentError(
            f"{name} has values from {least} to {greatest}; positions are below "
            f"{POSITION_LIMIT} in size, and here values at most {most}",
            hint="subtract one number from the positions of queries and of keys",
        )
