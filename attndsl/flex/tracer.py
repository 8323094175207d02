"""Runs a user's function on traced values, and takes in what it captures.

While it runs, a ``TorchFunctionMode`` sees every torch function, so that ``table[h]`` of a real
tensor and a traced index comes here too. What has no traced operand is computed as it stands: a
constant where no captured tensor comes in, else a tensor that each call has to compute anew.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from attndsl.ir import DType, Node, Op, const, param, size
from attndsl.passes.widths import ranges

from . import arithmetic as ar
from . import casting, functions, lookups, rows
from .casting import dtype_of
from .places import refusal
from .symbols import Symbol, Traced, View, flat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attndsl.passes.widths import Range


_SHORTEST = dict.fromkeys(("b", "h", "hkv", "q", "kv"), (0, 0))
"""Ranges of positions at length 1."""
_OPERANDS = ("condition", "input", "self", "other", "exponent")
"""Keywords of torch's for operands, in their order."""


@dataclass(frozen=True, slots=True)
class Capture:
    """A tensor that a trace mentions."""

    name: str
    tensor: torch.Tensor
    made: bool
    """Whether the function made it itself, of nothing but numbers."""


@dataclass(slots=True)
class Tracer:
    """One trace: what has been captured, and under which names."""

    dtype: torch.dtype
    device: torch.device
    lengths: Mapping[str, Range]
    """Ranges of ``b``, ``h``, ``q`` and ``kv``, as far as they are known."""
    names: Callable[[torch.Tensor], str]
    """A free name for a captured tensor."""
    captures: dict[int, Capture] = field(default_factory=dict)
    lengths_used: bool = False
    """Whether the program would be another one at other lengths."""
    in_graph: bool = False
    """Whether the function is a graph of Dynamo's, in which a number may be a tensor's ``item``."""
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors that the function made of numbers, by id; kept, so that ids stay theirs."""
    derived: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors that it computed of captured ones."""

    def run(self, function: Callable[..., Any], arguments: Sequence[Node]) -> Any:
        """What ``function`` gives for traced values of ``arguments``."""
        with _Mode(self):
            return function(*(Symbol(self, item) for item in arguments))

    def apply(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool = False
    ) -> Any:
        """The result of torch's function ``name`` for operands of which some are traced."""
        if name.startswith("__") and name.endswith("__"):
            return self.operator(name[2:-2], args)
        # torch.special.expit is special_expit, torch.nn.functional.threshold is _threshold.
        name = name.removeprefix("special_").removeprefix("_")
        if kwargs.get("out") is not None:
            raise refusal(f"out= of {name} writes to a tensor", "use the function's result")
        kwargs = {k: v for k, v in kwargs.items() if k not in ("out", "inplace") or v is True}
        in_place = in_place or bool(kwargs.pop("inplace", False))
        args = (*args, *(kwargs.pop(key) for key in _OPERANDS if key in kwargs))
        if name.endswith("_") and not name.endswith("__"):
            name, in_place = name[:-1], True
        name = functions.ALIASES.get(name, name)
        found = casting.convert(self, name, args, kwargs)
        if found is None:
            found = rows.over_row(self, name, args, kwargs)
        if found is None:
            found = self._call(name, args, kwargs)
        return self._assign(args[0], found, name) if in_place else found

    def operator(self, name: str, args: tuple[Any, ...]) -> Any:
        """The result of Python's operator ``__name__``."""
        if name in functions.IN_PLACE:
            return self.apply(functions.IN_PLACE[name], args, {}, in_place=True)
        if name in functions.TURNED_ROUND:
            return self.apply(functions.TURNED_ROUND[name], args[::-1], {})
        if name == "getitem":
            return lookups.index(self, args[0], args[1])
        return self.apply(name, args, {})

    def index(self, view: View, indices: Any) -> Any:
        """``view[indices]``."""
        return lookups.index(self, view, indices)

    def node(self, value: Any) -> Node:
        """An operand as a node; 0-d tensors become params."""
        if isinstance(value, Symbol):
            return value.node
        if isinstance(value, bool | int | float):
            return self._number(value)
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                return self.scalar(value)
            if self.in_graph and value.shape == (1,) and id(value) in self.made:
                # Positions have this shape in graphs, and so has what is made of their shape.
                return self.scalar(value.reshape(()))
            raise refusal(
                f"a tensor of shape {tuple(value.shape)} joins a value of one pair",
                "index it by what it belongs to, such as table[h] or bias[b, h, q_idx, kv_idx]",
            )
        if isinstance(value, View):
            raise refusal(
                f"a tensor with {value.ndim} dim(s) left joins a value of one pair",
                f"index it fully: it has {value.tensor.dim()} dims",
            )
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            return self.node(value.item())
        raise refusal(
            f"a {type(value).__name__} joins a traced value", "use a number or a tensor here"
        )

    def _number(self, value: bool | int | float) -> Node:
        if value != value:
            raise refusal("NaN has no literal in the language", "use -float('inf') for a mask")
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise refusal(f"{value} does not fit 64 bits", "write a float, such as 1e30")
        return ar.lift(value)

    def scalar(self, tensor: torch.Tensor) -> Node:
        """A 0-d tensor: a constant where the function made it, else a param."""
        # Within a graph it may have no value yet.
        if id(tensor) in self.made and not self.in_graph:
            with torch._C.DisableTorchFunction():
                return self._number(tensor.item())
        return param(self.capture(tensor).name, dtype_of(tensor.dtype))

    def capture(self, tensor: torch.Tensor) -> Capture:
        """``tensor`` under its name."""
        found = self.captures.get(id(tensor))
        if found is None:
            dtype_of(tensor.dtype)
            made = id(tensor) in self.made
            found = Capture(self.names(tensor), tensor, made)
            self.captures[id(tensor)] = found
        return found

    def from_end(self, index: Node, tensor: torch.Tensor, dim: int) -> Node:
        """``index`` as torch reads it: a negative one counts from the end."""
        length = tensor.shape[dim]
        if index.op is Op.CONST:
            place = int(index.value or 0)
            if not -length <= place < length:
                raise refusal(f"index {place} of a dim of size {length}", "use one within it")
            return const(place % length)
        if ranges((index,), {}, from_zero=True)[index][0] >= 0:
            return index
        # Where it may be negative at length 1, it may be so at every length.
        if ranges((index,), {}, known=_SHORTEST)[index][0] >= 0:
            self.lengths_used = True
            if ranges((index,), {}, known=self.lengths)[index][0] >= 0:
                return index
        end = size(dim_name(self.capture(tensor).name, dim))
        return ar.where(ar.compare("<", index, 0), ar.add(index, end), index)

    def plain(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a torch function of which no operand is traced."""
        name = getattr(func, "__name__", "")
        tensors = [x for x in flat((*args, *kwargs.values())) if isinstance(x, torch.Tensor)]
        captured = [x for x in tensors if id(x) not in self.made]
        bare = name.strip("_")
        if bare in functions.RANDOM and not name.startswith("__"):
            raise _random(bare)
        if self.in_graph and name == "item" and args[0].dim() == 0:
            return Symbol(self, self.scalar(args[0]))
        if captured and name in functions.VALUES:
            raise refusal(
                f"'{bare}' of a captured tensor: its value now would be that of all calls",
                "use the 0-d tensor itself in the expression, or pass a Python number",
            )
        if captured and bare in functions.REDUCTIONS:
            raise _reduction(bare)
        if captured and ((name.endswith("_") and not name.endswith("__")) or name == "__setitem__"):
            raise refusal(f"'{name}' changes a captured tensor", "change it before the call")
        result = func(*args, **kwargs)
        for found in flat([result]):
            if isinstance(found, torch.Tensor) and not any(found is x for x in tensors):
                (self.derived if captured else self.made)[id(found)] = found
        return result

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
        function = functions.FUNCTIONS.get(name)
        if function is None:
            raise _unknown(name)
        given = [self._operand(x) for x in args]
        named = {key: self._operand(x) for key, x in kwargs.items()}
        try:
            return Symbol(self, function(*given, **named))
        except TypeError as error:
            text = str(error).partition("()")[2].strip() or str(error)
            raise refusal(f"{name} {text}", "use it on values of one pair only") from None
        except ValueError as error:
            raise refusal(
                f"the language has no {error}", "convert an operand first, such as x.float()"
            ) from None

    def _operand(self, value: Any) -> Any:
        if isinstance(value, bool | int | float):
            self._number(value)
            return value
        return value if value is None or isinstance(value, str) else self.node(value)

    def _assign(self, target: Any, found: Symbol | View, name: str) -> Symbol:
        if not isinstance(target, Symbol) or not isinstance(found, Symbol):
            raise refusal(f"'{name}' in place changes a captured tensor", "use its result")
        before, after = target.node.dtype, found.node.dtype
        if after is not before and (before is DType.BOOL or after is DType.FLOAT):
            raise refusal(
                f"'{name}' in place makes a {after.value} of a {before.value}",
                "write x = x + y, which makes a new value",
            )
        target.node = ar.to(found.node, before)
        return target


def dim_name(name: str, dim: int) -> str:
    """The name of a captured tensor's size."""
    return f"{name}_{dim}"


class _Mode(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, Traced) for x in flat((*args, *kwargs.values()))):
            if func is torch.Tensor.where:
                args = (args[1], args[0], *args[2:])
            return self.tracer.apply(func.__name__, args, kwargs)
        return self.tracer.plain(func, args, kwargs)


def _reduction(name: str) -> Exception:
    return refusal(
        f"'{name}' would reduce over a tensor, but the function speaks of one pair",
        "compute it before the call and capture the result",
    )


def _random(name: str) -> Exception:
    return refusal(
        f"'{name}' draws numbers, and the function runs once, not once a pair",
        "draw a tensor before the call, or use an attndsl program with dropout",
    )


def _unknown(name: str) -> Exception:
    if name in functions.REDUCTIONS:
        return _reduction(name)
    if name in functions.RANDOM:
        return _random(name)
    if name in functions.VALUES:
        return refusal(
            f"'{name}' asks for a number, and this value differs from pair to pair",
            "write torch.where(condition, a, b) where Python would decide on it",
        )
    if name in functions.INSTEAD:
        return refusal(f"the language has no counterpart of '{name}'", functions.INSTEAD[name])
    close = difflib.get_close_matches(name, functions.FUNCTIONS, n=1)
    return refusal(
        f"the language has no counterpart of '{name}'",
        f"is '{close[0]}' what is meant?" if close else "write it out by functions that it has",
    )
