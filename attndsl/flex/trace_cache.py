"""Cache of traces, keyed by the closure of a function but for the values of its tensors.

A number in a closure is a constant of the program at first, which is what masks are analysed best
with. Once it has had more than a few values it becomes a run-time param, if the function can be
traced that way: a function that counts a loop by it, or decides on it, keeps it as a constant, and
makes one program a value.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from attndsl.errors import TraceError
from attndsl.foundation.caches import CACHES, BoundedCache, memoised
from attndsl.foundation.scalars import number_key

from .closures import ClosureReach, reach
from .tracing import Trace, trace_mods

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.passes.int_ranges import Range

    from .tracing import Mod

_FAMILIES = 512
_TRACES = 4096
_CONSTANTS = 4
"""Values of a number that are worth a program each: layers of two or three kinds, say."""
Source = tuple[str, str, object]
"""Name of a capture; ``tensor`` or ``number`` with its place in the reach, or ``made`` itself."""


@dataclass(frozen=True, slots=True)
class _Stored:
    trace: Trace
    """The trace without captures."""
    sources: tuple[Source, ...]

    def bound(self, found: ClosureReach) -> Trace:
        """The trace with the tensors and numbers of another closure."""
        captures: dict[str, torch.Tensor | int | float] = {}
        for name, kind, place in self.sources:
            if kind == "made":
                assert isinstance(place, torch.Tensor)
                captures[name] = place
            else:
                assert isinstance(place, int)
                values = found.tensors if kind == "tensor" else found.numbers
                captures[name] = values[place]
        return replace(self.trace, captures=captures)


@dataclass(slots=True)
class _Family:
    """Closures that differ by their numbers and tensors only."""

    values: tuple[set[object], ...]
    """Values that each number has had, up to one more than ``_CONSTANTS``."""
    varying: set[int] = field(default_factory=set)
    """Places of numbers that are params."""
    fixed: set[int] = field(default_factory=set)
    """Places of numbers that change, and cannot be params."""


class TraceCache:
    """Traces of a process, those not used for the longest time dropped."""

    def __init__(self) -> None:
        self._families: BoundedCache[_Family] = BoundedCache(
            "values of numbers by functions, dtype, device", _FAMILIES
        )
        self._traces: BoundedCache[_Stored] = BoundedCache(
            "traces by functions, dtype, device, constants, lengths", _TRACES
        )
        self._lock = threading.RLock()
        CACHES.at_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew in a forked process: another thread may have held it."""
        self._lock = threading.RLock()

    def trace(
        self,
        score_mod: Mod | None,
        mask_mod: Mod | None,
        dtype: torch.dtype,
        device: torch.device,
        lengths: Mapping[str, Range],
    ) -> Trace:
        """Like :func:`~attndsl.flex.tracing.trace_mods`, without tracing where it can.

        Raises:
            TraceError: A function cannot be traced.
        """
        found = reach((score_mod, mask_mod))
        if found.opaque:
            return trace_mods(score_mod, mask_mod, dtype, device, lengths, (), found)

        def fresh(varying: set[int]) -> Trace:
            places = tuple(sorted(varying))
            return trace_mods(score_mod, mask_mod, dtype, device, lengths, places, found)

        key = (tuple(found.structure), dtype, device)
        numbers = tuple(map(number_key, found.numbers))
        with self._lock:
            family = self._families.get_or_make(key, lambda: _Family(tuple(set() for _ in numbers)))
            for place, (now, values) in enumerate(zip(numbers, family.values, strict=True)):
                if len(values) <= _CONSTANTS:
                    values.add(now)
                if len(values) > _CONSTANTS and place not in family.varying | family.fixed:
                    try:
                        fresh({*family.varying, place})
                        family.varying.add(place)
                    except TraceError:
                        family.fixed.add(place)
            constants = tuple(n for place, n in enumerate(numbers) if place not in family.varying)
            base = (key, frozenset(family.varying), constants)
            at = tuple(sorted(lengths.items()))
            for kept in ((base, None), (base, at)):
                stored = self._traces.get(kept)
                if stored is not None and not (stored.trace.makes and _makes_otherwise()):
                    return stored.bound(found)
            try:
                made = fresh(family.varying)
            except TraceError:
                if not family.varying:
                    raise
                # With these constants the function decides on a number that is a param elsewhere.
                return fresh(set())
            if made.stable and not (made.makes and _makes_otherwise()):
                self._traces.put((base, at if made.lengths_used else None), _store(made, found))
            return made


@memoised("owners of traces", None)
def default_traces() -> TraceCache:
    """The one of this process."""
    return TraceCache()


def _makes_otherwise() -> bool:
    """Tell whether tensors that a function makes, as ``torch.tensor(0.1)``, may serve only now.

    Modes and settings choose their dtype and device, and wrap them in what is over with the mode.
    """
    return (
        torch.get_default_dtype() is not torch.float32
        or torch.is_inference_mode_enabled()
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
    )


def _store(made: Trace, found: ClosureReach) -> _Stored:
    places = {id(tensor): place for place, tensor in enumerate(found.tensors)}
    sources: list[Source] = []
    for name, value in made.captures.items():
        if name in made.numbers:
            sources.append((name, "number", made.numbers[name]))
        elif id(value) in places:
            sources.append((name, "tensor", places[id(value)]))
        else:
            sources.append((name, "made", value))
    return _Stored(replace(made, captures={}), tuple(sources))
