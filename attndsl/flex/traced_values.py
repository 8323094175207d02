"""Traced values: what a user's function gets in place of 0-d tensors.

A :class:`Symbol` is a value of one pair; a :class:`CaptureView` is a captured tensor of which some
dims have been indexed by such values. All that is done to them goes to the tracer that made them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from attndsl.ir import DType

from .python_spans import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attndsl.ir import Node

_DECIDE = (
    "write torch.where(condition, a, b) in place of if; join conditions with & | ~ and not with "
    "and, or, not; write (a <= b) & (b < c) for a <= b < c"
)
_CONVERT = (
    "use torch's functions (torch.exp, torch.maximum, ...) in place of math's and Python's own, "
    "and index tensors, not lists"
)


class Recorder(Protocol):
    """Interface of the tracer that symbols use."""

    dtype: torch.dtype
    device: torch.device

    def apply(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool = False
    ) -> Any:
        """The result of torch's function ``name``."""

    def operator(self, name: str, args: tuple[Any, ...]) -> Any:
        """The result of Python's operator ``__name__``."""

    def index(self, target: Any, indices: Any) -> Any:
        """``target[indices]``."""


class Traced:
    """Base class of symbols and views: torch's attributes, and refusals of untraceable uses."""

    __slots__ = ("recorder",)
    __array_ufunc__ = None  # numpy's numbers leave operators to this class.

    recorder: Recorder

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operands = flat((*args, *(kwargs or {}).values()))
        traced = next(x for x in operands if isinstance(x, Traced))
        return traced.recorder.apply(func.__name__, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        """The device of the call."""
        return self.recorder.device

    @property
    def is_cuda(self) -> bool:
        """True if the call is on a GPU."""
        return self.recorder.device.type == "cuda"

    @property
    def ndim(self) -> int:
        """Number of dims that are left."""
        return len(self.shape)

    @property
    def shape(self) -> torch.Size:
        """Sizes of the dims that are left."""
        raise NotImplementedError

    def dim(self) -> int:
        """Number of dims that are left."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Sizes of the dims that are left."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def __bool__(self) -> NoReturn:
        raise refusal("Python cannot decide on a value that differs from pair to pair", _DECIDE)

    def __hash__(self) -> NoReturn:
        raise refusal("a value that differs from pair to pair is no key", _CONVERT)

    def __int__(self) -> NoReturn:
        raise refusal("Python asks for the number that this is, and it differs by pair", _CONVERT)

    __index__ = __float__ = __complex__ = __int__

    def __len__(self) -> int:
        if not self.shape:
            raise refusal("a value of one pair has no length", _CONVERT)
        return self.shape[0]

    def __iter__(self) -> NoReturn:
        raise refusal("a value of one pair cannot be iterated over", _CONVERT)

    def __contains__(self, value: object) -> NoReturn:
        raise refusal("'in' would search through a tensor", _DECIDE)

    def __str__(self) -> NoReturn:
        raise refusal(
            "a traced value has nothing to show: the function runs once, for all pairs",
            "remove the print; print(attndsl.trace(function)) shows the program that it makes",
        )

    def __format__(self, spec: str) -> NoReturn:
        str(self)
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Method(self, name)

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise refusal(
            "an element is assigned to", "write torch.where(condition, new, old) for the new value"
        )


class Symbol(Traced):
    """A value of one pair; in-place operations replace its node."""

    __slots__ = ("integer", "node")

    def __init__(
        self, recorder: Recorder, node: Node, integer: torch.dtype | None = torch.int64
    ) -> None:
        self.recorder = recorder
        self.node = node
        self.integer = integer
        """Its dtype where it is an int; None for a number of Python's, which takes others'."""

    @property
    def shape(self) -> torch.Size:
        """``()``."""
        return torch.Size(())

    @property
    def dtype(self) -> torch.dtype:
        """``bool``, that of an int, or the dtype that scores are computed in."""
        if self.node.dtype is DType.INT:
            return self.integer or torch.int64
        return torch.bool if self.node.dtype is DType.BOOL else self.recorder.dtype

    def is_floating_point(self) -> bool:
        """Return True if the value is a float."""
        return self.node.dtype is DType.FLOAT

    def __getitem__(self, index: object) -> Symbol:
        # Not by ==, which traces where the index is a symbol.
        if index is ... or (isinstance(index, tuple) and not index):
            return self
        raise refusal("a value of one pair has no elements", "index a captured tensor instead")

    def __repr__(self) -> str:
        return f"Symbol({self.node.op.name}, {self.node.dtype.value})"


class CaptureView(Traced):
    """A captured tensor, partly indexed."""

    __slots__ = ("casts", "indices", "tensor")

    def __init__(
        self,
        recorder: Recorder,
        tensor: torch.Tensor,
        indices: tuple[Node | None, ...],
        casts: tuple[torch.dtype, ...] = (),
    ) -> None:
        self.recorder = recorder
        self.tensor = tensor
        self.indices = indices
        """One a dim of the tensor; None where it is not indexed yet."""
        self.casts = casts
        """Casts of the element, applied in turn."""

    @property
    def shape(self) -> torch.Size:
        """Sizes of the dims that are left."""
        pairs = zip(self.tensor.shape, self.indices, strict=True)
        return torch.Size(size for size, index in pairs if index is None)

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's, or that of the last cast."""
        last = self.casts[-1] if self.casts else self.tensor.dtype
        return self.recorder.dtype if self.casts and last.is_floating_point else last

    def __getitem__(self, indices: object) -> Any:
        return self.recorder.index(self, indices)

    def __repr__(self) -> str:
        return f"View(shape={tuple(self.shape)})"


class _Method:
    """``symbol.name``, to be called."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Traced, name: str) -> None:
        self._owner = owner
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name == "where" and args:
            # As a method it takes the condition second.
            return self._owner.recorder.apply("where", (args[0], self._owner, *args[1:]), kwargs)
        return self._owner.recorder.apply(self._name, (self._owner, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Traced, *args: Any) -> Any:
        return self.recorder.operator(name, (self, *args))

    method.__name__ = f"__{name}__"
    return method


_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
        "rshift")  # fmt: skip
_NAMES = ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "round", "invert", "matmul",
          "rmatmul", *(f"{side}{name}" for name in _TWO for side in ("", "r", "i")))  # fmt: skip
for _name in _NAMES:
    setattr(Traced, f"__{_name}__", _operator(_name))


def flat(values: Any) -> Iterator[Any]:
    """``values``, and what lists and tuples among them hold."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value
