"""The probability of dropout, checked at every call where it is a number that the host knows.

Non-goals: probabilities of tensors, which are read on the device. They are clamped to 0 ... 1
there, and NaN counts as 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import ArgumentError
from attndsl.foundation.caches import memoised
from attndsl.foundation.scalars import number_key
from attndsl.ir import Op, toposort
from attndsl.passes.evaluate import Environment, evaluate

if TYPE_CHECKING:
    from attndsl.backends.base import Call
    from attndsl.ir import Node

_NUMBERS = frozenset({bool, int, float})


def check_probability(root: Node, call: Call) -> None:
    """Refuse a call whose weights would be dropped with a probability that is none.

    Args:
        root: ``dropout`` of the program.
        call: Its arguments.

    Raises:
        ArgumentError: The probability is not from 0 to 1.
    """
    if root.op is Op.PARAM:  # Most have one param that says it.
        value = call.params[root.value]  # type: ignore[index]
        if type(value) is float and 0.0 <= value <= 1.0:
            return
    _reader(root).check(call)


@memoised("readers of dropout probabilities", 256)
def _reader(root: Node) -> _ProbabilityReader:
    return _ProbabilityReader(root)


class _ProbabilityReader:
    """Params and sizes that a probability depends on, with their values of the last good one."""

    def __init__(self, root: Node) -> None:
        items = toposort(root)
        self.root = root
        self.params = tuple(str(item.value) for item in items if item.op is Op.PARAM)
        self.sizes = tuple(str(item.value) for item in items if item.op is Op.SIZE)
        # A constant is checked when the program is compiled; elements of tensors nowhere.
        self.known = bool(self.params or self.sizes) and all(
            item.op is not Op.LOAD for item in items
        )
        self.good: list[tuple[type, object]] | None = None

    def check(self, call: Call) -> None:
        """Refuse a call whose probability is outside of 0 to 1; see :func:`check_probability`."""
        if not self.known:
            return
        values: list[object] = [call.params[name] for name in self.params]
        for value in values:
            if type(value) not in _NUMBERS:  # A tensor, or what a graph finds when it runs.
                return
        values += [call.sizes[name] for name in self.sizes]
        key = list(map(number_key, values))
        if key == self.good:
            return
        names = dict(zip((*self.params, *self.sizes), values, strict=True))
        found = evaluate(self.root, Environment(names))  # type: ignore[arg-type]
        if not 0.0 <= found <= 1.0:
            given = ", ".join(f"{name} = {value}" for name, value in names.items())
            raise ArgumentError(
                f"the dropout probability is {found}" + (f" ({given})" if self.root.args else ""),
                self.root.span,
                "pass a number from 0 to 1, such as 0.1 to drop one weight in ten",
            )
        self.good = key
