"""Arguments of a program's calls, for frameworks that pass and for editors that complete them."""

from __future__ import annotations

import inspect
import keyword
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attndsl.call.attention_base import Compiled
from attndsl.call.options import CALL_ARGUMENTS
from attndsl.passes.print_ir import print_expression

if TYPE_CHECKING:
    from attndsl.backends.base import Scalar

_TYPES = {"float": "float | torch.Tensor", "int": "int | torch.Tensor",
          "bool": "bool | torch.Tensor"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Param:
    """A number that each call may choose. Numbers given to ``compile`` are part of the program."""

    name: str
    dtype: str
    """``int``, ``float`` or ``bool``."""
    default: Scalar | torch.Tensor | None
    """Value for calls that give none: a number of the text, or the 0-d tensor that ``compile`` got.
    None where each call must give a value."""

    optional: bool = field(default=False, repr=False)
    """True if calls may leave it out without a default, as ``= none`` declares."""

    @property
    def required(self) -> bool:
        """True if each call must give the param."""
        return self.default is None and not self.optional


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that the program reads."""

    name: str
    dtype: str
    """``int``, ``float`` or ``bool``: any torch dtype of that kind is taken."""
    dims: tuple[str, ...]
    """Each dim as the program declares it: ``heads``, ``2 * kv_len``, ``16``, ``n``."""
    default: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """The tensor that ``compile`` got, which calls use by default; None where each call must give
    one."""

    optional: bool = field(default=False, repr=False)
    """True if calls may leave it out, as ``= none`` declares."""

    @property
    def required(self) -> bool:
        """True if each call must give the tensor."""
        return self.default is None and not self.optional


class _OfInstance:
    """``__signature__``, which ``inspect.signature`` reads of an instance; its class has none."""

    def __get__(self, instance: Introspection | None, owner: type) -> inspect.Signature:
        if instance is None:
            raise AttributeError("the class has the signature of its __init__")
        return _signature(instance)


class Introspection(Compiled):
    """The part of :class:`~attndsl.Attention` that tells what its calls take."""

    __slots__ = ()

    __signature__ = _OfInstance()

    @property
    def params(self) -> tuple[Param, ...]:
        """The run-time params, in the order of their declarations."""
        return tuple(
            Param(
                decl.name,
                decl.dtype.value,
                self._defaults.get(decl.name, decl.default),
                decl.optional,
            )
            for decl in self._lowered.program.params
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The captured tensors, in the order of their declarations."""
        return tuple(
            Tensor(
                decl.name,
                decl.dtype.value,
                tuple(print_expression(dim) for dim in decl.dims),
                self._defaults.get(decl.name),
                decl.optional,
            )
            for decl in self._lowered.program.tensors
        )


def _signature(attention: Introspection) -> inspect.Signature:
    """Signature of a call: q, k, v, the program's own captures, and the options of every call.

    A capture whose name no keyword can be is left out; it goes into ``captures``.
    """
    whole = inspect.signature(type(attention).__call__)
    _, *arguments = whole.parameters.values()  # Without self.
    own = [_parameter(x, "torch.Tensor") for x in attention.tensors]
    own += [_parameter(x, _TYPES[x.dtype]) for x in attention.params]
    rows = [x for x in arguments if x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    options = [x for x in arguments if x.kind is inspect.Parameter.KEYWORD_ONLY]
    return whole.replace(parameters=[*rows, *(x for x in own if x is not None), *options])


def _parameter(capture: Param | Tensor, annotation: str) -> inspect.Parameter | None:
    name, default = capture.name, capture.default
    if name in CALL_ARGUMENTS or keyword.iskeyword(name) or not name.isidentifier():
        return None
    shown: object = inspect.Parameter.empty if capture.required else default
    annotation += " | None" if capture.optional else ""
    if isinstance(default, torch.Tensor):
        shown = ...  # As stubs say it: there is one, too long to show.
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=annotation
    )
