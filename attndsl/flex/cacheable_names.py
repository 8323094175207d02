"""Names that a traced function may use, if its trace is to serve later calls too.

Such a trace is right as long as all that the function reads is compared (:mod:`.closures`). These
are lists of names, objects and types of which that is so: what they give depends on their operands
alone. Code that uses anything else (``mod.window``, ``torch.is_grad_enabled()``, ``x.stride()``,
``globals()``) may read what nobody compares.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
import types

import numpy
import torch

from attndsl.foundation.caches import memoised

from . import torch_functions
from .tracer import FILLS, METHODS

PLAIN = frozenset(
    {bool, str, bytes, types.NoneType, types.EllipsisType, torch.dtype, torch.device, torch.Size}
)
"""Types of values that are equal only where they mean the same. Subclasses may mean anything."""
NUMBERS = frozenset({int, float, numpy.float64})
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})

_MODULES = (torch, torch.nn, torch.nn.functional, torch.special, math, operator, functools, numpy)
_ROOTS = frozenset(module.__name__.partition(".")[0] for module in _MODULES)
_MADE = (
    "arange", "as_tensor", "eye", "full", "linspace", "logspace", "ones", "scalar_tensor", "tensor",
    "zeros",
)  # fmt: skip
_OF_TENSORS = (
    "broadcast_to", "chunk", "cpu", "cuda", "detach", "device", "dim", "dtype", "expand",
    "expand_as", "flatten", "flip", "gather", "index_select", "is_cuda", "is_floating_point",
    "item", "ndim", "numel", "permute", "repeat", "reshape", "roll", "select", "shape", "size",
    "split", "squeeze", "take", "tile", "to", "tolist", "transpose", "tril", "triu", "type",
    "type_as", "unbind", "unflatten", "unsqueeze", "view", "view_as",
)  # fmt: skip
"""They give a tensor or what structures compare: shapes, dtypes, devices."""
_WAYS = ("Tensor", "functional", "nn", "partial", "reduce", "special")
_NUMBERS = ("eps", "finfo", "iinfo", "inf", "nan", "pi", "smallest_normal", "tiny")
_OF_CONTAINERS = ("count", "get", "index", "items", "keys", "values")
_OPERATORS = (
    "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "inv", "invert", "is_", "is_not",
    "le", "lshift", "lt", "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub",
    "truediv", "truth", "xor",
)  # fmt: skip
_DTYPES = tuple(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
ATTRIBUTES = frozenset(
    {
        *torch_functions.FUNCTIONS, *(f"{name}_" for name in torch_functions.FUNCTIONS),
        *torch_functions.ALIASES,
        *torch_functions.REDUCTIONS, *torch_functions.INSTEAD, *torch_functions.RANDOM, *FILLS,
        *METHODS, *_MADE,
        *_OF_TENSORS, *_WAYS, *_NUMBERS, *_OF_CONTAINERS, *_OPERATORS, *_DTYPES,
        *(name for name in vars(math) if not name.startswith("_")),
    }
)  # fmt: skip
"""Names after a dot."""
BUILTINS = {
    name: getattr(builtins, name)
    for name in (
        "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "filter", "float", "int",
        "isinstance", "len", "list", "map", "max", "min", "pow", "range", "reversed", "round",
        "slice", "sorted", "sum", "tuple", "zip",
    )
}  # fmt: skip
"""Builtins by their names, as long as the names mean them."""
_UNCHANGING = {
    id(value): value
    for owner in (*_MODULES, torch.Tensor)
    for value in (getattr(owner, name, None) for name in ATTRIBUTES)
    if callable(value)
} | {id(value): value for value in (*_MODULES, *BUILTINS.values())}
"""Functions, types and modules by id; held, so that no other object gets the id."""
_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"})
_UNSEEN = frozenset(
    {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "LOAD_BUILD_CLASS", "MATCH_CLASS"}
)
"""Operations that change what they do not own, or read attributes without naming them."""


def is_unchanging(value: object) -> bool:
    """Return True if ``value`` is a known library's function, type or module."""
    return id(value) in _UNCHANGING


def is_of_library(function: types.FunctionType) -> bool:
    """Tell whether ``function`` says that it is of a library, whose globals are not the user's."""
    return (function.__module__ or "").partition(".")[0] in _ROOTS


@memoised("names that functions read", 1024)
def read_by(code: types.CodeType) -> tuple[tuple[str, ...], bool]:
    """Names that ``code``, and code within it, looks up among globals; whether it is all known.

    It is, if it reads no attribute but :data:`ATTRIBUTES`, and changes nothing that is not its own.
    """
    names: dict[str, None] = {}
    known = True
    for step in dis.get_instructions(code):
        name = step.opname
        if name == "LOAD_GLOBAL":
            names[step.argval] = None
        elif name in _READS:
            known &= step.argval in ATTRIBUTES
        elif name == "IMPORT_NAME":
            known &= step.argval.partition(".")[0] in _ROOTS
        elif name in ("STORE_DEREF", "DELETE_DEREF"):
            known &= step.argval not in code.co_freevars
        elif step.opcode in dis.hasname or name in _UNSEEN:
            known = False
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            more, also = read_by(item)
            names.update(dict.fromkeys(more))
            known &= also
    return tuple(names), known
