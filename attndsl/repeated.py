"""Calls that are made again and again, and differ in what their tensors hold alone.

The first two are ordinary calls, checked in all their parts: most are made once. Another one whose
tensors have the same shapes and strides is not bound again, which takes more of the host's time
than a kernel's launch.

Non-goals: gradients by autograd, which callers make themselves; graphs of torch.compile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.runtime.arguments import is_deterministic
from attndsl.runtime.programs import pointing_into
from attndsl.scalars import number_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.compiled import CheckedCall, Compiled, Ready
    from attndsl.runtime.backward import Asked, Gradients, Results

    Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


_LEARNS = 2
"""Which ordinary call is remembered."""


class _Known(NamedTuple):
    """Program, prepared call and signature that calls like one before share."""

    own: Compiled
    """The program of the call, whose captures may be others than those of the program asked."""
    ready: Ready
    signature: tuple[object, ...]
    """Of the operands and captures."""


class Repeated:
    """A call of one program with the same options each time. Operands are plain tensors."""

    def __init__(self, attention: Any, options: Mapping[str, Any]) -> None:
        """Remember what is called.

        Args:
            attention: A compiled program.
            options: Of the call, without captures. None stands for the default.
        """
        self._attention, self._options = attention, dict(options)
        self._known: _Known | None = None
        self._made = 0
        """How many calls were ordinary ones."""

    def put(
        self, operands: Operands, room: torch.Tensor, captures: Mapping[str, Any]
    ) -> torch.Tensor:
        """Run :meth:`attndsl.Attention.put` of these operands."""
        known = self._known
        if known is None or not _fits(known, operands, captures):
            found: torch.Tensor = self._attention.put(
                *operands, room, captures=captures, **self._options
            )
            self._learn(operands, captures)
            return found
        with pointing_into(known.own._source), torch.no_grad():
            return known.own._into(self._call(known, operands, captures), room)

    def backward(
        self,
        operands: Operands,
        given: Results,
        room: torch.Tensor | None,
        how: Asked,
        captures: Mapping[str, Any],
    ) -> Gradients:
        """Run :meth:`attndsl.Attention.backward` of these operands.

        Args:
            operands: q, k and v.
            given: As this program's forward and autograd give them: they are not checked.
            room: Of the gradient of q.
            how: Which gradients, and in which dtype.
            captures: Of the call.
        """
        known = self._known
        if known is None or not _fits(known, operands, captures):
            found: Gradients = self._attention.backward(
                *operands, given.out, given.lse, given.grad_out, given.grad_lse, room=room,
                wants=how.operands, wants_captures=how.captures, grad_dtype=how.dtype,
                captures=captures, **self._options,
            )  # fmt: skip
            self._learn(operands, captures)
            return found
        with pointing_into(known.own._source):
            return known.own._gradients(self._call(known, operands, captures), given, how, room)

    def _call(self, known: _Known, operands: Operands, captures: Mapping[str, Any]) -> CheckedCall:
        """The call, like the one that is remembered."""
        given = {**known.own._defaults, **captures}
        arguments = {**self._options, "captures": given}
        return known.ready.made(known.own.lowered, operands, arguments)

    def _learn(self, operands: Operands, captures: Mapping[str, Any]) -> None:
        """Remember a call that has been made, if calls of its signature share anything."""
        self._made += 1
        if self._made != _LEARNS and self._known is None:
            return
        q, k, v = operands
        own, arguments = self._attention._of_call(q, k, {**self._options, "captures": captures})
        arguments["deterministic"] = is_deterministic(arguments.get("deterministic"))
        key = own._key_of(q, k, v, arguments)
        ready = None if key is None else own._readied.get(key)
        self._known = None if ready is None else _Known(
            own, ready, _signature(operands, captures)
        )  # fmt: skip


def _signature(operands: Operands, captures: Mapping[str, Any]) -> tuple[object, ...]:
    """Key that repeated calls share. Dims may depend on params, whose values are few."""
    found: list[object] = [torch.are_deterministic_algorithms_enabled()]
    for x in (*operands, *captures.values()):
        if isinstance(x, torch.Tensor):
            found += (type(x), x.shape, x.stride(), x.dtype, x.device)
        else:
            found.append(number_key(x))
    return (*captures, *found)


def _fits(known: _Known, operands: Operands, captures: Mapping[str, Any]) -> bool:
    if torch._C._is_any_autocast_enabled():
        return False
    return _signature(operands, captures) == known.signature
