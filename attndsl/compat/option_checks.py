"""Arguments of these functions that are no operands, in the names of their callers.

None is the default wherever the other library has one.
"""

from __future__ import annotations

from typing import Any

import torch

from attndsl.call.call_slice import INTS, plain_int
from attndsl.call.value_checks import check_int
from attndsl.errors import ArgumentError, DeviceError
from attndsl.foundation.scalars import as_number


def number_of(name: str, given: Any) -> Any:
    """``given`` as a number; 0.0 where it is None. Tensors of no dims stay what they are.

    Raises:
        ArgumentError: It is none.
    """
    if given is None:
        return 0.0
    if isinstance(given, float | int | torch.SymFloat | torch.SymInt):
        return given
    if isinstance(given, torch.Tensor) and given.dim() == 0 and not given.is_complex():
        return given
    number = as_number(given)
    if number is None:
        raise ArgumentError(f"{name} is a {type(given).__name__}", hint="pass a number")
    return number


def whole_of(name: str, given: Any) -> Any:
    """``given`` as an int; tensors of no dims stay what they are.

    Raises:
        ArgumentError: It is no whole number.
    """
    if isinstance(given, torch.Tensor) and given.dim() == 0 and given.dtype in INTS:
        return given
    number = given if type(given) is int else plain_int(given)
    if type(number) not in (int, torch.SymInt):
        raise ArgumentError(f"{name} has {given!r}", hint=f"pass {name} as whole numbers")
    check_int(name, number)
    return number


def wholes_of(name: str, given: Any) -> tuple[Any, ...]:
    """The whole numbers of a sequence, or of a tensor of one dim.

    Raises:
        ArgumentError: It is no such sequence.
    """
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    try:
        found = tuple(given)
    except TypeError:
        raise ArgumentError(
            f"{name} is a {type(given).__name__}", hint=f"pass {name} as a list of whole numbers"
        ) from None
    return tuple([whole_of(name, x) for x in found])


def window_of(given: Any) -> tuple[Any, Any]:
    """Reach to the left and to the right, -1 where there is no limit.

    Raises:
        ArgumentError: It is no pair of whole numbers or None.
    """
    if given is None:
        return -1, -1
    if not hasattr(given, "__len__") or getattr(given, "shape", None) == () or len(given) != 2:
        shown = tuple(given) if isinstance(given, tuple | list) else f"a {type(given).__name__}"
        raise ArgumentError(f"window_size is {shown}", hint="pass (left, right), -1 for no limit")
    left, right = given
    return (
        -1 if left is None else whole_of("window_size", left),
        -1 if right is None else whole_of("window_size", right),
    )


def ints_of(name: str, given: Any, q: torch.Tensor, *shapes: tuple[int, ...]) -> torch.Tensor:
    """Ints of one of these shapes, on the device of ``q``.

    Raises:
        ArgumentError: They are no such ints.
        DeviceError: They have no elements, and ``q`` has.
    """
    number = plain_int(given)
    if type(number) in (int, torch.SymInt):
        check_int(name, number)
        found = torch.full((), number, dtype=torch.int64, device=q.device)
    elif isinstance(given, torch.Tensor):
        if given.is_meta and not q.is_meta:
            raise DeviceError(f"{name} is on {given.device}", hint=f"{name}.to(q.device)")
        found = given if given.device == q.device else given.to(q.device)
    else:
        try:
            found = torch.as_tensor(given, device=q.device)
        except (TypeError, ValueError, RuntimeError):
            raise ArgumentError(
                f"{name} is a {type(given).__name__}", hint=f"pass ({q.shape[0]},) ints"
            ) from None
    if found.dtype not in INTS or found.shape not in shapes:
        raise ArgumentError(
            f"{name} has shape {tuple(found.shape)} and dtype {found.dtype}",
            hint=f"pass ({q.shape[0]},) ints",
        )
    return found
