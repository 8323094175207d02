"""Requests of the page and answers to it, as records. Never imports torch.

Requests come from a browser and may hold anything: :func:`read_asked` lets through what is within
the bounds that are stated here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from attndsl.errors import ArgumentError, LimitError
from attndsl.foundation.scalars import read_number
from attndsl.frontend.limits import MAX_SOURCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_LENGTH = 1024
"""Queries and keys of a picture, and rows of its tiles."""
MAX_PARAMS = 100
MOST_ANSWER = 1 << 23
"""Characters of an answer as JSON."""
_MAX_NAME = 200
ABSENT = "none"
"""The value of a param that is left out."""
_POSITION = 1 << 20

Number = bool | int | float


class RequestKind(StrEnum):
    """Kind of a request."""

    PICTURE = "picture"
    DETAILS = "details"
    KERNEL = "kernel"
    LAYOUT = "layout"


class Choice(StrEnum):
    """A setting with a few values."""

    @classmethod
    def read(cls, name: str, value: object) -> Choice:
        """The member that ``value`` names.

        Raises:
            ArgumentError: There is none.
        """
        names = [member.value for member in cls]
        if value not in names:
            raise ArgumentError(f"'{name}' is no choice", hint=f"use {', '.join(names)}")
        return cls(value)


class KernelDirection(Choice):
    """A kernel's direction."""

    FORWARD = "forward"
    BACKWARD = "backward"


class KernelFamily(Choice):
    """A backend whose kernels are generated."""

    TRITON = "triton"
    HOPPER = "hopper"


class HalfType(Choice):
    """The dtype of q, k and v that a kernel is shown for."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@dataclass(frozen=True, slots=True)
class PictureCall:
    """The call that pictures are of."""

    q_len: int = 64
    kv_len: int = 64
    block_m: int = 16
    """Queries of a tile."""
    block_n: int = 16
    """Keys of a tile."""
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    b: int = 0
    """The batch entry that is shown."""
    h: int = 0
    """The head that is shown."""
    q_offset: int = 0
    kv_offset: int = 0
    seed: int = 0
    """Seed of made-up tensors."""
    raw_score: float = 0.0
    """Value of ``scale * (q . k)``."""
    cost_len: int = 8192
    """Number of queries and keys in the costs."""


BOUNDS = {
    "q_len": (1, MAX_LENGTH),
    "kv_len": (1, MAX_LENGTH),
    "block_m": (1, MAX_LENGTH),
    "block_n": (1, MAX_LENGTH),
    "batch": (1, 16),
    "heads": (1, 64),
    "kv_heads": (1, 64),
    "b": (0, 15),
    "h": (0, 63),
    "q_offset": (-_POSITION, _POSITION),
    "kv_offset": (-_POSITION, _POSITION),
    "seed": (0, _POSITION),
    "cost_len": (1, 1 << 17),
}
"""Least and greatest value of each int of a :class:`PictureCall`."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Choice of the kernel whose text is shown."""

    direction: KernelDirection = KernelDirection.FORWARD
    family: KernelFamily = KernelFamily.TRITON
    dtype: HalfType = HalfType.BF16
    head_dim: int = 64


@dataclass(frozen=True, slots=True)
class PageRequest:
    """One request."""

    kind: RequestKind
    text: str
    params: Mapping[str, Number | None] = field(default_factory=dict)
    """Values of run-time params; others have their defaults, or are made up. None leaves out one
    that is declared with ``= none``."""
    view: PictureCall = PictureCall()
    kernel: KernelChoice = KernelChoice()

    def as_json(self) -> dict[str, Any]:
        """JSON values from which :func:`read_asked` makes an equal record."""
        params = {name: str(value).lower() for name, value in self.params.items()}  # None too.
        return {**asdict(self), "params": params}


@dataclass(frozen=True, slots=True)
class TextProblem:
    """An error, and the part of the text that it is about."""

    message: str
    hint: str | None = None
    start: int | None = None
    """First unit of UTF-16, as browsers count; None where the error is about no part of the text,
    as of a setting."""
    end: int | None = None
    """The unit after the last one."""
    where: str = ""
    """``line 3, column 5``, for people."""


@dataclass(frozen=True, slots=True)
class ParamField:
    """A run-time param, as the page asks for its value."""

    name: str
    dtype: str
    """``int``, ``float`` or ``bool``."""
    value: str
    """Value that the answer was computed with, as text, since JSON has no large ints and no
    infinity."""
    made_up: bool
    """True if neither the program nor the request gave the value."""
    optional: bool = False
    """True if the value may be ``none``."""


@dataclass(frozen=True, slots=True)
class PictureAnswer:
    """Picture of a program at the sizes of a :class:`PictureCall`, and texts about it."""

    svg: str
    summary: str
    """Counts of tiles and live pairs, for who does not see the picture."""
    curve: str
    """Some points of the score's curve over the raw score, which the picture has too; empty where
    that is a straight line."""
    made_up: str
    """Captures that neither the program nor the request gave, in words; empty where there are
    none."""
    params: tuple[ParamField, ...]
    derivative: str
    """Output of ``attndsl show --stage derivative``."""


@dataclass(frozen=True, slots=True)
class DetailsAnswer:
    """Details that may take seconds to find out: sets of tiles, and counts of these."""

    loops: str
    cost: str
    """The first sentence of ``explain``."""
    costs: str
    """Its lines about the lengths asked for."""
    explanation: str
    """All of it."""
    made_up: str
    cost_problem: TextProblem | None
    """Reason why the costs are not known at these lengths."""


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """A text, such as a kernel's or the program's in its canonical layout."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request, or all that is wrong with it."""

    problems: tuple[TextProblem, ...] = ()
    result: PictureAnswer | DetailsAnswer | TextAnswer | None = None

    def as_json(self) -> dict[str, Any]:
        """Values that ``json.dumps(..., allow_nan=False)`` takes."""
        return asdict(self)


def read_asked(values: object) -> PageRequest:
    """The request that JSON values are.

    Raises:
        LimitError: The text is too long.
        ArgumentError: They are no request, or a number is out of its bounds.
    """
    known = ("kind", "text", "params", "view", "kernel")
    given = _mapping("the request", values, known)
    try:
        kind = RequestKind(str(given.get("kind")))
    except ValueError:
        raise ArgumentError(f"'kind' is none of {', '.join(RequestKind)}") from None
    text = given.get("text")
    if not isinstance(text, str):
        raise ArgumentError("'text' is no text")
    if len(text) > MAX_SOURCE:
        raise LimitError(
            f"the program is longer than {MAX_SOURCE} characters",
            hint="shorten it, or move data to tensors",
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ArgumentError("the text holds half a character", hint="delete it and type it again")
    return PageRequest(
        kind,
        text,
        _params(given.get("params", {})),
        _view(given.get("view", {})),
        _kernel(given.get("kernel", {})),
    )


def _params(values: object) -> dict[str, Number | None]:
    if not isinstance(values, dict) or len(values) > MAX_PARAMS:
        raise ArgumentError(f"'params' is no mapping of at most {MAX_PARAMS} names")
    found: dict[str, Number | None] = {}
    for name, written in values.items():
        absent = written == ABSENT
        value = read_number(written) if isinstance(written, str) and not absent else None
        if len(name) > _MAX_NAME or (value is None and not absent):
            raise ArgumentError(
                f"the value of '{name[:_MAX_NAME]}' is no number",
                hint="write a number, such as 16 or 0.5",
            )
        found[name] = value
    return found


def _view(values: object) -> PictureCall:
    given = _mapping("'view'", values, (*BOUNDS, "raw_score"))
    for name, (low, high) in BOUNDS.items():
        _check_int(name, given.get(name, low), low, high)
    raw = given.get("raw_score", 0.0)
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not abs(raw) <= 1e30:
        raise ArgumentError("'raw_score' is no finite number", hint="give a number up to 1e30")
    return PictureCall(**{**given, "raw_score": float(raw)})


def _kernel(values: object) -> KernelChoice:
    given = _mapping("'kernel'", values, ("direction", "family", "dtype", "head_dim"))
    head_dim = given.get("head_dim", 64)
    _check_int("head_dim", head_dim, 1, 512)
    return KernelChoice(
        KernelDirection(KernelDirection.read("direction", given.get("direction", "forward"))),
        KernelFamily(KernelFamily.read("family", given.get("family", "triton"))),
        HalfType(HalfType.read("dtype", given.get("dtype", "bf16"))),
        head_dim,
    )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ArgumentError(f"'{name}' is out of bounds", hint=f"give {low} to {high}")


def _mapping(what: str, values: object, names: Iterable[str]) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ArgumentError(f"{what} is no mapping")
    unknown = values.keys() - set(names)
    if unknown:
        raise ArgumentError(f"{what} has unknown names", hint=f"its names are {', '.join(names)}")
    return values
