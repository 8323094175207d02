"""Names that a caller declares in Python rather than in the program's text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attndsl.source import Span


GIVEN = "was given to compile()"
CALL_ARGUMENTS = frozenset(
    {
        "self", "q", "k", "v", "scale", "return_lse", "q_offset", "kv_offset", "q_index",
        "kv_index", "q_len", "kv_len", "heads", "kv_heads", "batch", "h_offset", "b_offset",
        "kv_lengths", "deterministic", "seed", "tiles", "out_dtype", "captures",
    }
)  # fmt: skip
"""Arguments of every call: captures of such names are given in ``captures``, not by keyword."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A param whose value is folded into the program."""

    value: bool | int | float
    origin: str = field(default=GIVEN, compare=False)
    """Who binds the name, for errors."""
    span: Span | None = field(default=None, compare=False)
    """Where a file says so."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A capture that the text declares with ``= none`` and that is not there."""

    origin: str = field(default=GIVEN, compare=False)
    """Who leaves it out, for errors."""
    span: Span | None = field(default=None, compare=False)
    """Where a file says so."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A run-time param; ``dtype`` is ``int``, ``float`` or ``bool``."""

    dtype: str = "float"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A captured tensor: dims are integers, sizes' names or expressions, as in ``tensor`` lines."""

    dims: tuple[str | int, ...]
    dtype: str = "float"


Declared = Bound | Absent | ParamSpec | TensorSpec


def tensor(*dims: str | int, dtype: str = "float") -> TensorSpec:
    """Declare a captured tensor in a call of ``compile()``: ``gain=attndsl.tensor("heads")``."""
    return TensorSpec(dims, dtype)
