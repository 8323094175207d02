"""What a user's function reaches: code, numbers and tensors in closures, defaults and globals.

The walk gives a *structure*, equal for two functions whose traces can differ by their tensors' and
numbers' values only, and the tensors and numbers in a fixed order. The same walk puts other values
in the numbers' places. What it cannot see through (objects with attributes, modules of the user's)
makes a function *opaque*: it is traced anew in each call, since a change there would go unseen.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attndsl.scalars import number_key

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST = 2000
_LIBRARIES = ("torch", "math", "operator", "functools", "builtins", "numpy", "typing")
"""Packages whose functions and modules do not change."""
_PLAIN = (bool, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, torch.Size)
_FIXED = (
    type, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
"""Of a library, these hold nothing of the user's."""


@dataclass(slots=True)
class Reach:
    """What a walk finds."""

    structure: list[object] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Each once."""
    numbers: list[int | float] = field(default_factory=list)
    """At each place once."""
    names: dict[int, str] = field(default_factory=dict)
    """What the user calls tensors, by id."""
    number_names: list[str] = field(default_factory=list)
    opaque: bool = False


def reach(value: object) -> Reach:
    """What ``value``, a function or anything that holds some, can reach."""
    walk = _Walk({})
    walk.visit(value, "")
    return walk.found


def replaced(value: Any, replacements: Mapping[int, object]) -> Any:
    """``value`` with others in the places of some numbers, by their order in :func:`reach`."""
    return _Walk(replacements).visit(value, "")


class _Walk:
    def __init__(self, replacements: Mapping[int, object]) -> None:
        self.found = Reach()
        self.replacements = replacements
        self.seen: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self.alive: list[object] = []

    def visit(self, value: Any, name: str) -> Any:
        """``value``, or a copy with other numbers in it."""
        found = self.found
        if isinstance(value, _PLAIN):
            found.structure.append(number_key(value))
            return value
        if isinstance(value, int | float):
            place = len(found.numbers)
            found.numbers.append(value)
            found.number_names.append(name)
            found.structure.append(type(value))
            return self.replacements.get(place, value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if id(value) in self.seen or len(self.seen) > _MOST:
            found.structure.append(("again", self.seen.get(id(value), -1)))
            found.opaque |= id(value) not in self.seen
            return value
        self.seen[id(value)] = len(self.seen)
        self.alive.append(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            return self._partial(value)
        if type(value) in (tuple, list):
            found.structure.append((type(value), len(value)))
            items = [self.visit(item, f"{name}{n}") for n, item in enumerate(value)]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same else type(value)(items)
        if type(value) is dict:
            found.structure.append((dict, tuple(map(repr, value))))
            changed = {key: self.visit(item, str(key)) for key, item in value.items()}
            return value if all(changed[k] is value[k] for k in value) else changed
        self._other(value)
        return value

    def _tensor(self, value: torch.Tensor, name: str) -> torch.Tensor:
        found = self.found
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
        found.structure.append((code, function.__name__))
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
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            return None
        values = function.__globals__
        changed = {}
        for name in _global_names(function.__code__):
            if name in values:
                new = self.visit(values[name], name)
                if new is not values[name]:
                    changed[name] = new
        return {**values, **changed} if changed else None

    def _partial(self, value: functools.partial[Any]) -> Any:
        self.found.structure.append((functools.partial, len(value.args), tuple(value.keywords)))
        function = self.visit(value.func, "")
        args = [self.visit(item, f"arg{n}") for n, item in enumerate(value.args)]
        keywords = {name: self.visit(item, name) for name, item in value.keywords.items()}
        same = function is value.func and all(a is b for a, b in zip(args, value.args, strict=True))
        if same and all(keywords[name] is item for name, item in value.keywords.items()):
            return value
        return functools.partial(function, *args, **keywords)

    def _other(self, value: Any) -> None:
        """Something that is not taken apart: stable by its identity, or opaque."""
        found = self.found
        home = ""
        if isinstance(value, types.ModuleType):
            home = value.__name__
        elif isinstance(value, _FIXED):
            home = getattr(value, "__module__", None) or "builtins"
        owner = getattr(value, "__self__", None)
        bound = owner is not None and not isinstance(owner, types.ModuleType | type)
        if home.partition(".")[0].lstrip("_") in _LIBRARIES and not bound:
            found.structure.append(("library", id(value)))
            return
        found.opaque = True
        for holder in (value, owner):
            attributes = dict(getattr(holder, "__dict__", {}))
            for more in ("_parameters", "_buffers"):
                attributes.update(attributes.get(more) or {})
            for name, item in attributes.items():
                if isinstance(item, torch.Tensor):
                    found.names.setdefault(id(item), name)


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that ``code``, and code within it, may look up among globals."""
    names = dict.fromkeys(code.co_names)
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            names.update(dict.fromkeys(_global_names(item)))
    return tuple(names)
