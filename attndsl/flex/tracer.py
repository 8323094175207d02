"""Tracer: runs a user's function on traced values, and collects its captured tensors.

While it runs, a ``TorchFunctionMode`` sees every torch function, so that ``table[h]`` of a real
tensor and a traced index comes here too. What has no traced operand is computed as it stands: a
constant where no captured tensor comes in, else a tensor that each call has to compute anew.

The language has no loop over a row's elements. A reduction over a short captured row, such as
``table[b].sum(-1)`` or ``torch.isin(kv_idx, listed)``, is written out, element by element.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

from attndsl.errors import counted
from attndsl.ir import DType, Node, Op, const, load, member, param, size
from attndsl.passes.int_ranges import ranges

from . import arithmetic as ar
from . import torch_functions
from .int_dtypes import RANGES, joined, literal, wrapped
from .python_spans import refusal
from .traced_values import CaptureView, Symbol, Traced, flat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attndsl.passes.int_ranges import Range


METHODS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16,
    "bfloat16": torch.bfloat16, "int": torch.int32, "long": torch.int64, "bool": torch.bool,
    "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
}  # fmt: skip
"""Methods that convert."""
_INTS = (*RANGES, torch.int64)
FILLS = {
    "new_zeros": 0, "new_ones": 1, "zeros_like": 0, "ones_like": 1, "new_full": None,
    "full_like": None, "new_tensor": None, "new_empty": 0, "empty_like": 0,
}  # fmt: skip
"""Functions that fill in the likeness of a value, and with what; None where they are told."""
_UNCHANGED = frozenset({"detach", "cpu", "cuda", "requires_grad_"})
_NO_SIZES: tuple[object, ...] = ((), [], torch.Size(()))
_ONE_SIZES: tuple[object, ...] = ((1,), [1], torch.Size((1,)))
_WHOLE = slice(None)
_LONGEST = 32
"""Elements of a row that are written out; programs of more would compile slowly."""
_SHORTEST = dict.fromkeys(("b", "h", "hkv", "q", "kv"), (0, 0))
"""Ranges of positions at length 1."""
_OPERANDS = ("condition", "input", "self", "other", "exponent")
"""Keywords of torch's for operands, in their order."""


@dataclass(frozen=True, slots=True)
class TracedCapture:
    """A tensor that a trace mentions."""

    name: str
    tensor: torch.Tensor
    made: bool
    """True if the function made it itself, of nothing but numbers."""


@dataclass(slots=True)
class Tracer:
    """One trace: what has been captured, and under which names."""

    dtype: torch.dtype
    device: torch.device
    lengths: Mapping[str, Range]
    """Ranges of ``b``, ``h``, ``q`` and ``kv``, as far as they are known."""
    names: Callable[[torch.Tensor], str]
    """A free name for a captured tensor."""
    captures: dict[int, TracedCapture] = field(default_factory=dict)
    lengths_used: bool = False
    """True if other lengths would give another program."""
    in_graph: bool = False
    """True if the function is a graph of Dynamo's, in which a number may be a tensor's ``item``."""
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors that the function made of numbers, by id; kept, so that ids stay theirs."""
    derived: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors that it computed of captured ones."""

    def run(self, function: Callable[..., Any], arguments: Sequence[Node]) -> Any:
        """Call ``function`` with traced values of ``arguments``, and return its result."""
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
        name = torch_functions.ALIASES.get(name, name)
        found = self._convert(name, args, kwargs)
        if found is None:
            found = self._over_row(name, args, kwargs)
        if found is None:
            found = self._call(name, args, kwargs)
        return self._assign(args[0], found, name) if in_place else found

    def operator(self, name: str, args: tuple[Any, ...]) -> Any:
        """The result of Python's operator ``__name__``."""
        if name in torch_functions.IN_PLACE:
            return self.apply(torch_functions.IN_PLACE[name], args, {}, in_place=True)
        if name in torch_functions.TURNED_ROUND:
            return self.apply(torch_functions.TURNED_ROUND[name], args[::-1], {})
        if name == "getitem":
            return self.index(args[0], args[1])
        return self.apply(name, args, {})

    def index(self, target: Any, indices: Any) -> Symbol | CaptureView:
        """``target[indices]``, a value of one pair once all dims are indexed."""
        if isinstance(target, torch.Tensor):
            target = CaptureView(self, target, (None,) * target.dim())
        if not isinstance(target, CaptureView):
            raise refusal(
                f"a {type(target).__name__} is indexed by a value that differs from pair to pair",
                "make it a tensor: torch.tensor(values)[index]",
            )
        given = list(indices) if isinstance(indices, tuple) else [indices]
        free = [dim for dim, found in enumerate(target.indices) if found is None]
        places = [n for n, item in enumerate(given) if item is Ellipsis]
        if places:
            given[places[0] : places[0] + 1] = [_WHOLE] * (len(free) - len(given) + 1)
        if len(given) > len(free):
            raise refusal(
                f"{len(given)} indices of a tensor with {counted(len(free), 'dim')} left",
                "drop some of them",
            )
        found = list(target.indices)
        for dim, item in zip(free, given, strict=False):
            if isinstance(item, slice):
                if (item.start, item.stop, item.step) != (None, None, None):
                    raise refusal(
                        "a slice beside a traced index", "slice the tensor before the call"
                    )
                continue
            found[dim] = self._index_node(item, target.tensor, dim)
        view = CaptureView(self, target.tensor, tuple(found), target.casts)
        return view if view.ndim else self._element(view)

    def _index_node(self, item: Any, tensor: torch.Tensor, dim: int) -> Node:
        if item is None:
            raise refusal("None adds a dim, and a value of one pair has none", "drop it")
        node = self.node(item)
        if node.dtype is not DType.INT or _own(item) is torch.uint8:
            kind = "uint8, which torch takes for a mask" if node.dtype is DType.INT else node.dtype
            raise refusal(
                f"an index is an int, and this is a {getattr(kind, 'value', kind)}",
                "write .to(torch.int64), or torch.where for a condition",
            )
        return self.from_end(node, tensor, dim)

    def _element(self, view: CaptureView) -> Symbol:
        name, dtype = self.capture(view.tensor).name, view.tensor.dtype
        loaded = load(name, dtype_of(dtype), *(i for i in view.indices if i is not None))
        found = Symbol(self, loaded, dtype)
        for dtype in view.casts:
            found = self._converted(found, dtype)
        return found

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
        if isinstance(value, CaptureView):
            raise refusal(
                f"a tensor with {counted(value.ndim, 'dim')} left joins a value of one pair",
                f"index it fully: it has {value.tensor.dim()} dims; for (row == x).any() write "
                "torch.isin(x, row)",
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

    def symbol(self, value: Any) -> Symbol:
        """An operand as a traced value."""
        return value if isinstance(value, Symbol) else Symbol(self, self.node(value), _own(value))

    def _wrapped(self, node: Node, integer: torch.dtype | None) -> Symbol:
        """``node``, in the range of the dtype ``integer`` where it is an int."""
        if node.dtype is not DType.INT:
            return Symbol(self, node)
        known = {
            capture.name: RANGES[capture.tensor.dtype]
            for capture in self.captures.values()
            if capture.tensor.dtype in RANGES
        }
        return Symbol(self, wrapped(node, integer, known), integer)

    def _converted(self, value: Symbol, dtype: torch.dtype) -> Symbol:
        """``value`` as ``dtype``."""
        node, wanted = value.node, dtype_of(dtype)
        if node.dtype is not DType.FLOAT:
            return self._wrapped(ar.to(node, wanted), dtype)
        if dtype in RANGES and dtype is not torch.int32:
            raise refusal(
                f"a conversion of a float to {dtype} has no result where it does not fit",
                "convert it to torch.int64 first",
            )
        return Symbol(self, ar.to(node, wanted), dtype)

    def scalar(self, tensor: torch.Tensor) -> Node:
        """A 0-d tensor: a constant where the function made it, else a param."""
        # Within a graph it may have no value yet.
        if id(tensor) in self.made and not self.in_graph:
            if tensor.is_meta:
                raise refusal("a number as a tensor of meta has no value", "write the number alone")
            with torch._C.DisableTorchFunction():
                return self._number(tensor.item())
        return param(self.capture(tensor).name, dtype_of(tensor.dtype))

    def capture(self, tensor: torch.Tensor) -> TracedCapture:
        """``tensor`` under its name."""
        found = self.captures.get(id(tensor))
        if found is None:
            dtype_of(tensor.dtype)
            made = id(tensor) in self.made
            found = TracedCapture(self.names(tensor), tensor, made)
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
        if bare in torch_functions.RANDOM and not name.startswith("__"):
            raise _random(bare)
        if self.in_graph and name == "item" and args[0].dim() == 0:
            return Symbol(self, self.scalar(args[0]), None)
        if captured and name in torch_functions.VALUES:
            raise refusal(
                f"'{bare}' of a captured tensor: its value now would be that of all calls",
                "use the 0-d tensor itself in the expression, or pass a Python number",
            )
        if captured and bare in torch_functions.REDUCTIONS:
            raise _reduction(bare)
        if captured and ((name.endswith("_") and not name.endswith("__")) or name == "__setitem__"):
            raise refusal(f"'{name}' changes a captured tensor", "change it before the call")
        result = func(*args, **kwargs)
        for found in flat([result]):
            if isinstance(found, torch.Tensor) and not any(found is x for x in tensors):
                (self.derived if captured else self.made)[id(found)] = found
        return result

    def _convert(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Symbol | CaptureView | None:
        """``args[0]`` in another type, or a constant of its kind; None where that is not asked."""
        value = args[0] if args else None
        if name in METHODS:
            return self._cast(value, METHODS[name])
        if name in ("to", "type", "type_as"):
            wanted = kwargs.get("dtype") or next((d for d in map(_dtype, args[1:]) if d), None)
            return self._cast(value, wanted)
        if name in FILLS:
            return self._filled(name, args, kwargs)
        if name == "scalar_tensor" or (name == "tensor" and isinstance(value, Symbol)):
            found = self.symbol(value)
            return self._converted(found, kwargs.get("dtype") or found.dtype)
        if name in _UNCHANGED and isinstance(value, Symbol | CaptureView):
            if name == "detach":
                raise refusal(
                    "detach would hide a gradient", "detach captured tensors before the call"
                )
            return value
        return None

    def _cast(self, value: Any, wanted: torch.dtype | None) -> Symbol | CaptureView:
        if isinstance(value, CaptureView):
            extra = () if wanted is None else (wanted,)
            return CaptureView(self, value.tensor, value.indices, (*value.casts, *extra))
        found = self.symbol(value)
        return found if wanted is None else self._converted(found, wanted)

    def _filled(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
        """A constant in the likeness of ``args[0]``."""
        dtype = kwargs.get("dtype") or self.symbol(args[0]).dtype
        fill: Any = FILLS[name]
        rest = list(args[1:])
        if name in ("new_zeros", "new_ones", "new_full", "new_empty"):
            sizes = kwargs["size"] if "size" in kwargs else rest.pop(0) if rest else ()
            # Positions have shape (1,) in graphs.
            if sizes not in (_NO_SIZES + _ONE_SIZES if self.in_graph else _NO_SIZES):
                raise refusal(f"'{name}' makes a tensor of size {sizes}", "write () for the size")
        if fill is None:
            given = kwargs.get("fill_value", kwargs.get("data"))
            fill = rest[0] if given is None else given
        return self._converted(self.symbol(self._operand(fill, dtype)), dtype)

    def _over_row(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol | None:
        """The result of a reduction of a captured row, or None where ``name`` is none of one.

        Raises:
            TraceError: The row is too long, or has no fixed length.
        """
        if name in torch_functions.FOLDS and isinstance(args[0], CaptureView) and args[0].ndim == 1:
            dims = (*args[1:], kwargs.get("dim", -1))[:1]
            if set(kwargs) <= {"dim"} and dims[0] in (-1, 0, None, (-1,), (0,), [-1], [0]):
                return self._folded(name, args[0])
        if name in ("dot", "inner") and len(args) == 2 and all(_is_row(x) for x in args):
            left, right = (self._elements(x) for x in args)
            if len(left) == len(right):
                products = [ar.mul(a, b) for a, b in zip(left, right, strict=True)]
                found = torch_functions.FOLDS["sum"](products)
                return self._wrapped(
                    found, joined(x.dtype for x in args if found.dtype is DType.INT)
                )
        if name == "isin" and len(args) == 2 and not kwargs and _is_row(args[1]):
            # A row's dtype counts, and a value's of no dims does not.
            value = self._wrapped(self.node(args[0]), args[1].dtype).node
            listed = self._listed(value, args[1])
            if listed is not None:
                return listed
            each = [ar.compare("==", value, x) for x in self._elements(args[1])]
            return Symbol(self, torch_functions.FOLDS["any"](each))
        return None

    def _listed(self, value: Node, row: CaptureView | torch.Tensor) -> Symbol | None:
        """``value in row``; None for rows that are short, of no ints, or not along the last dim."""
        count = row.shape[0]
        if value.dtype is not DType.INT or (isinstance(count, int) and count <= _LONGEST):
            return None
        first = self.node(self.index(row, 0))
        if first.op is not Op.LOAD or first.dtype is not DType.INT or first.args[-1] != const(0):
            return None
        return Symbol(self, member(value, str(first.value), *first.args[:-1]))

    def _folded(self, name: str, row: CaptureView) -> Symbol:
        found = torch_functions.FOLDS[name](self._elements(row))
        if name in ("any", "all"):  # torch gives a uint8 for one.
            return self._converted(
                Symbol(self, found), torch.uint8 if row.dtype is torch.uint8 else torch.bool
            )
        return self._wrapped(found, row.dtype if name in ("amax", "amin") else torch.int64)

    def _elements(self, row: CaptureView | torch.Tensor) -> list[Node]:
        """The elements of a row, each as a lookup."""
        count = row.shape[0]
        if not isinstance(count, int) or not 0 < count <= _LONGEST:
            raise refusal(
                f"a row of {count} elements is reduced, "
                f"and rows of 1 to {_LONGEST} are written out",
                "compute the reduction for all rows before the call and capture its result",
            )
        return [self.node(self.index(row, place)) for place in range(count)]

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
        function = torch_functions.FUNCTIONS.get(name)
        if function is None:
            raise _unknown(name)
        integer = self._integer(name, args, kwargs)
        given = [self._operand(x, integer) for x in args]
        named = {key: self._operand(x, integer) for key, x in kwargs.items()}
        try:
            return self._wrapped(function(*given, **named), integer)
        except TypeError as error:
            text = str(error).partition("()")[2].strip() or str(error)
            raise refusal(f"{name} {text}", "use it on values of one pair only") from None
        except ValueError as error:
            raise refusal(
                f"the language has no {error}", "convert an operand first, such as x.float()"
            ) from None

    def _integer(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.dtype | None:
        """The dtype in which ``name`` computes with ints; None where all are Python's numbers."""
        operands = [*args, *kwargs.values()]
        if name == "where":
            operands = operands[1:]
        elif name == "masked_fill":
            operands = operands[:1]
        if any(isinstance(x, float) for x in operands):
            return torch.int64
        own = [_own(x) for x in operands if isinstance(x, Symbol | CaptureView | torch.Tensor)]
        floats = any(dtype is not None and dtype.is_floating_point for dtype in own)
        return torch.int64 if floats else joined(own)

    def _operand(self, value: Any, integer: torch.dtype | None) -> Any:
        """An argument of a function that computes with ints in the dtype ``integer``."""
        if isinstance(value, numpy.generic):
            value = value.item()
        if isinstance(value, bool | int | float):
            self._number(value)
            if isinstance(value, bool | float):
                return value
            try:
                return literal(int(value), integer)
            except OverflowError:
                raise refusal(
                    f"{value} joins a value of {integer}, which does not hold it",
                    "convert the value first: x.to(torch.int64)",
                ) from None
        if value is None or isinstance(value, str):
            return value
        found = self.symbol(value)
        varies = found.node.dtype is DType.INT and found.integer is None
        if varies and integer in RANGES and integer is not torch.int32:
            raise refusal(
                f"a number that varies joins a value of {integer}, which may not hold it",
                "convert the value first: x.to(torch.int64)",
            )
        return self._wrapped(found.node, integer).node

    def _assign(self, target: Any, found: Symbol | CaptureView, name: str) -> Symbol:
        if not isinstance(target, Symbol) or not isinstance(found, Symbol):
            raise refusal(f"'{name}' in place changes a captured tensor", "use its result")
        before, after = target.node.dtype, found.node.dtype
        if after is not before and (before is DType.BOOL or after is DType.FLOAT):
            raise refusal(
                f"'{name}' in place makes a {after.value} of a {before.value}",
                "write x = x + y, which makes a new value",
            )
        target.node = self._wrapped(ar.to(found.node, before), target.integer).node
        return target


def dtype_of(dtype: torch.dtype) -> DType:
    """The language's type of ``dtype``."""
    if dtype is torch.bool:
        return DType.BOOL
    if dtype.is_floating_point:
        return DType.FLOAT
    if dtype.is_complex:
        raise refusal("a complex tensor", "the language has bools, ints and floats")
    if dtype not in _INTS:
        raise refusal(f"an int of {dtype}", "convert it before the call: x.to(torch.int64)")
    return DType.INT


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, Symbol | CaptureView | torch.Tensor):
        return value.dtype
    return None


def _own(value: Any) -> torch.dtype | None:
    """The dtype of an operand; None of a number of Python's."""
    if isinstance(value, Symbol) and value.node.dtype is DType.INT:
        return value.integer
    return value.dtype if isinstance(value, Symbol | CaptureView | torch.Tensor) else None


def _is_row(value: Any) -> bool:
    return isinstance(value, CaptureView | torch.Tensor) and value.ndim == 1


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
    if name in torch_functions.REDUCTIONS:
        return _reduction(name)
    if name in torch_functions.RANDOM:
        return _random(name)
    if name in torch_functions.VALUES:
        return refusal(
            f"'{name}' asks for a number, and this value differs from pair to pair",
            "write torch.where(condition, a, b) where Python would decide on it",
        )
    if name in torch_functions.INSTEAD:
        return refusal(
            f"the language has no counterpart of '{name}'", torch_functions.INSTEAD[name]
        )
    close = difflib.get_close_matches(name, torch_functions.FUNCTIONS, n=1)
    return refusal(
        f"the language has no counterpart of '{name}'",
        f"is '{close[0]}' what is meant?" if close else "write it out by functions that it has",
    )
