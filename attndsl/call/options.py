"""The table of a call's options: the one place where an option is declared.

Each option is a field of :class:`CallOptions` or :class:`Location`, with its type, its default, the
part that it has in a call's signature, and its description. The signature, the overloads and the
docstring of :meth:`attndsl.Attention.__call__` are made from these fields
(``python tools/call_options.py --write``).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from attndsl.backends.paged_requests import Packed
    from attndsl.inspection.tilemap import TileMap


class InKey(Enum):
    """Parts that options have in the signature by which prepared calls are found."""

    NOTHING = "nothing: calls that differ by it alone share what is prepared"
    KIND = "the type of a number; shape, strides, dtype and device of a tensor"
    VALUE = "its value"


_IN_KEY = "in_key"
_NOTHING, _KIND, _VALUE = ({_IN_KEY: x} for x in InKey)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of a call beside its place in a larger one."""

    scale: float | None = field(default=None, metadata=_KIND)
    """Factor of ``q . k`` in the raw score; 1 / sqrt(D) by default."""
    seed: int | torch.Tensor | None = field(default=None, metadata=_KIND)
    """Seed of dropout, an int or a 0-d int64 tensor on q's device; drawn from torch's generator
    where the program has dropout and none is given."""
    deterministic: bool | None = field(default=None, metadata=_VALUE)
    """True for gradients that are equal bit for bit from run to run; by default what
    ``torch.use_deterministic_algorithms`` says."""
    out_dtype: torch.dtype | None = field(default=None, metadata=_VALUE)
    """dtype of the output: ``torch.float32`` for q, k and v of a half type, so that nothing is lost
    where parts are put together; by default that of q."""
    return_lse: bool = field(default=False, metadata=_NOTHING)
    """True to return the log-sum-exp of each row too."""
    tiles: TileMap | None = field(default=None, metadata=_KIND)
    """Tiles that :meth:`tiles` found for this program and these captures: where the tiles have no
    closed form, they are not looked for again. A map of another mask would leave out live pairs. In
    graphs of ``torch.compile`` it is not used."""
    out: torch.Tensor | None = field(default=None, metadata=_NOTHING)
    """(B, Hq, Lq, Dv), any strides, of the output's dtype: the tensor that the output is written
    to and that is returned, such as the rows of a part in those of the whole. Its memory is that of
    no other argument, and nothing is differentiable."""


@dataclass(frozen=True, slots=True)
class Location:
    """Options that say where a call's rows, keys, heads and batch entries lie in a larger call."""

    q_offset: int | torch.Tensor = field(default=0, metadata=_KIND)
    """Logical position of the first query: an int, a 0-d int tensor, or (B,) ints, one for each
    batch entry."""
    kv_offset: int | torch.Tensor = field(default=0, metadata=_KIND)
    """Logical position of the first key, likewise."""
    q_index: torch.Tensor | None = field(default=None, metadata=_KIND)
    """(Lq,) ints, the logical position of each query; replaces the offset."""
    kv_index: torch.Tensor | None = field(default=None, metadata=_KIND)
    """(Lk,) ints, the logical position of each key, likewise."""
    q_len: int | None = field(default=None, metadata=_VALUE)
    """Number of queries in the whole call, where this call has a part of them. So are all sizes
    that follow: a program means in a part what it means in the whole."""
    kv_len: int | None = field(default=None, metadata=_VALUE)
    """Number of keys in the whole call."""
    heads: int | None = field(default=None, metadata=_VALUE)
    """Number of query heads in the whole call."""
    kv_heads: int | None = field(default=None, metadata=_VALUE)
    """Number of key heads in the whole call."""
    batch: int | None = field(default=None, metadata=_VALUE)
    """Number of batch entries in the whole call."""
    h_offset: int = field(default=0, metadata=_VALUE)
    """Number in the whole call of the first query head here."""
    b_offset: int = field(default=0, metadata=_VALUE)
    """Number in the whole call of the first batch entry here."""
    kv_lengths: torch.Tensor | None = field(default=None, metadata=_KIND)
    """(B,) ints, the number of keys of each batch entry, which is ``kv_len`` in the program; k and
    v have room for more."""
    packed: Packed | None = None
    """Requests of :meth:`attndsl.Attention.serve`; no option of a call."""


WHOLE = Location()
"""The place of a call that is no part."""


def _table(record: type) -> dict[str, Any]:
    return {x.name: x for x in fields(record) if _IN_KEY in x.metadata}


LOCATION = tuple(_table(Location))
"""Names of the options that say where a call lies in a larger one."""
OPTIONS: Mapping[str, Any] = {**_table(CallOptions), **_table(Location)}
"""Each option of a call by its name: the dataclass field that declares it."""
IN_KEY: Mapping[str, InKey] = {name: x.metadata[_IN_KEY] for name, x in OPTIONS.items()}
"""The part of each option in a call's signature."""
NAMES = frozenset(OPTIONS)
"""Names of all options."""
CALL_ARGUMENTS = frozenset({"self", "q", "k", "v", "captures", *OPTIONS})
"""Arguments of every call: captures of such names are given in ``captures``, not by keyword."""


def options_in(given: Mapping[str, Any]) -> tuple[CallOptions, Location]:
    """The options among the keywords ``given``."""
    found = {name: x for name, x in given.items() if name in NAMES}
    place = {name: found.pop(name) for name in LOCATION if name in found}
    return CallOptions(**found), Location(**place)


def taken(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Take the options ``names`` out of ``arguments``; None stands for the default."""
    found = {name: arguments.pop(name) for name in names if name in arguments}
    return {name: x for name, x in found.items() if x is not None}


def call_signature() -> inspect.Signature:
    """The signature of a call with its options by name, as users read it."""
    place, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    rows = [inspect.Parameter(name, place, annotation="torch.Tensor") for name in "qkv"]
    options = [
        inspect.Parameter(name, keyword, default=x.default, annotation=x.type)
        for name, x in OPTIONS.items()
    ]
    captures = inspect.Parameter("captures", keyword, default=None, annotation="Captures | None")
    named = inspect.Parameter(
        "named", inspect.Parameter.VAR_KEYWORD, annotation="torch.Tensor | Scalar"
    )
    return inspect.Signature(
        [inspect.Parameter("self", place), *rows, *options, captures, named], return_annotation=Any
    )
