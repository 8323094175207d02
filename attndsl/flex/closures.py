"""Reach of a user's function: code, numbers and tensors in closures, defaults and globals.

The walk gives a *structure*, equal for two functions whose traces can differ by their tensors' and
numbers' values only, and the tensors and numbers in a fixed order. The same walk puts other values
in the numbers' places. All that is not known to be compared so makes a function *opaque*: objects,
subclasses, modules of the user's, code that reads attributes or state beyond
:mod:`.cacheable_names`. It is traced anew in each call, since a change there would go unseen.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .cacheable_names import (
    ATTRIBUTES,
    BUILTINS,
    NUMBERS,
    PLAIN,
    TENSORS,
    is_of_library,
    is_unchanging,
    read_by,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST = 2000
_KEYS = PLAIN | {int}
"""Types of keys of dicts."""


@dataclass(slots=True)
class ClosureReach:
    """Structure, tensors and numbers that a walk finds."""

    structure: list[object] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Each once."""
    numbers: list[int | float] = field(default_factory=list)
    """Numbers, one for each place."""
    names: dict[int, str] = field(default_factory=dict)
    """The user's names of tensors, by id."""
    number_names: list[str] = field(default_factory=list)
    opaque: bool = False


def reach(value: object) -> ClosureReach:
    """Walk over all that ``value``, a function or anything that holds some, can reach."""
    walk = _Walk({})
    walk.visit(value, "")
    return walk.found


def replaced(value: Any, replacements: Mapping[int, object]) -> Any:
    """``value`` with others in the places of some numbers, by their order in :func:`reach`."""
    return _Walk(replacements).visit(value, "")


class _Walk:
    def __init__(self, replacements: Mapping[int, object]) -> None:
        self.found = ClosureReach()
        self.replacements = replacements
        self.seen: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self.alive: list[object] = []

    def visit(self, value: Any, name: str) -> Any:
        """``value``, or a copy with other numbers in it."""
        found, kind = self.found, type(value)
        if kind in PLAIN:
            found.structure.append((kind, value))
            return value
        if kind in NUMBERS:
            place = len(found.numbers)
            found.numbers.append(value)
            found.number_names.append(name)
            found.structure.append(kind)
            return self.replacements.get(place, value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if id(value) in self.seen or len(self.seen) > _MOST:
            found.structure.append(("again", self.seen.get(id(value), -1)))
            found.opaque |= id(value) not in self.seen
            return value
        self.seen[id(value)] = len(self.seen)
        self.alive.append(value)
        if is_unchanging(value):
            found.structure.append(("library", id(value)))
            return value
        if kind is types.FunctionType:
            return self._function(value)
        if kind is functools.partial:
            return self._partial(value)
        if kind is tuple or kind is list:
            found.structure.append((kind, len(value)))
            items = [self.visit(item, f"{name}{n}") for n, item in enumerate(value)]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same else kind(items)
        if kind is dict:
            found.structure.append((dict, *((type(key), key) for key in value)))
            found.opaque |= not all(type(key) in _KEYS for key in value)
            changed = {key: self.visit(item, str(key)) for key, item in value.items()}
            return value if all(changed[k] is value[k] for k in value) else changed
        self._other(value)
        return value

    def _tensor(self, value: torch.Tensor, name: str) -> torch.Tensor:
        found = self.found
        self._own_attributes(value, type(value) in TENSORS)
        if id(value) not in self.places:
            self.places[id(value)] = len(found.tensors)
            found.tensors.append(value)
            if name:
                found.names[id(value)] = name
        # Two names of one tensor are one capture, and may be two in the next call.
        place = self.places[id(value)]
        found.structure.append((torch.Tensor, place, value.shape, value.dtype, value.device))
        return value

    def _function(self, function: types.FunctionType) -> Any:
        found, code = self.found, function.__code__
        found.structure.append(code)
        self._own_attributes(function, True)
        cells, changed = [], False
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                found.structure.append("empty")
                cells.append(cell)
                continue
            new = self.visit(content, name)
            cells.append(cell if new is content else types.CellType(new))
            changed |= new is not content
        defaults = function.__defaults__
        kwdefaults = function.__kwdefaults__
        names = code.co_varnames[: code.co_argcount][-len(defaults or ()) :] if defaults else ()
        new_defaults = defaults and tuple(
            self.visit(item, name) for name, item in zip(names, defaults, strict=True)
        )
        new_kwdefaults = kwdefaults and {n: self.visit(x, n) for n, x in kwdefaults.items()}
        new_globals = self._globals(function)
        changed |= bool(defaults) and any(
            a is not b for a, b in zip(defaults or (), new_defaults or (), strict=True)
        )
        changed |= bool(kwdefaults) and any(
            (new_kwdefaults or {})[n] is not x for n, x in (kwdefaults or {}).items()
        )
        if not changed and new_globals is None:
            return function
        made = types.FunctionType(
            code,
            function.__globals__ if new_globals is None else new_globals,
            function.__name__,
            new_defaults,
            tuple(cells) or None,
        )
        made.__kwdefaults__ = new_kwdefaults
        return made

    def _globals(self, function: types.FunctionType) -> dict[str, Any] | None:
        """The function's globals with other numbers, or None where nothing changes."""
        names, known = read_by(function.__code__)
        found, values = self.found, function.__globals__
        found.opaque |= not known
        if not known and is_of_library(function):
            return None
        changed = {}
        for name in names:
            if name in values:
                new = self.visit(values[name], name)
                if new is not values[name]:
                    changed[name] = new
                continue
            own = BUILTINS.get(name)
            found.structure.append(name)
            its = function.__builtins__  # type: ignore[attr-defined]
            found.opaque |= own is None or its.get(name) is not own
        return {**values, **changed} if changed else None

    def _partial(self, value: functools.partial[Any]) -> Any:
        self.found.structure.append((functools.partial, len(value.args), tuple(value.keywords)))
        self._own_attributes(value, True)
        function = self.visit(value.func, "")
        args = [self.visit(item, f"arg{n}") for n, item in enumerate(value.args)]
        keywords = {name: self.visit(item, name) for name, item in value.keywords.items()}
        same = function is value.func and all(a is b for a, b in zip(args, value.args, strict=True))
        if same and all(keywords[name] is item for name, item in value.keywords.items()):
            return value
        return functools.partial(function, *args, **keywords)

    def _own_attributes(self, value: Any, known: bool) -> None:
        """Functions and tensors may have attributes, if none stands for one that code may read."""
        own = value.__dict__
        self.found.opaque |= not known or bool(own and not ATTRIBUTES.isdisjoint(own))

    def _other(self, value: Any) -> None:
        """Something that is not taken apart."""
        found = self.found
        found.opaque = True
        for holder in (value, getattr(value, "__self__", None)):
            attributes = dict(getattr(holder, "__dict__", {}))
            for more in ("_parameters", "_buffers"):
                attributes.update(attributes.get(more) or {})
            for name, item in attributes.items():
                if isinstance(item, torch.Tensor):
                    found.names.setdefault(id(item), name)
