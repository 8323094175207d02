"""Masks of transformers as texts and captures, in place of arrays of all pairs.

Where a mask is made outside of graphs, its function is traced at once. Within a graph of
``torch.compile`` the function is kept, and each attention follows it (:mod:`.mask_graph`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.utils.import_utils import is_tracing

from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.flex.trace_cache import default_traces
from attndsl.flex.tracing import trace_mods

from .model_programs import MASK_PREFIX, PREFIX, composed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.attention import Attention
    from attndsl.source import Span

    from .model_programs import Own

Offset = int | torch.Tensor
_HINT = (
    "use attn_implementation='sdpa' for this model, or 'eager' if transformers refuses 'sdpa'. "
    "A dict chooses for parts: {'text_config': 'attndsl', 'audio_config': 'eager'}"
)


class NotAnArrayError(UnsupportedError, AttributeError):
    """A model's code that treats a mask as an array of all pairs.

    An AttributeError too, so that libraries may ask by ``hasattr`` for what tensors have.
    """

    def __init__(self, message: str, span: Span | None = None, hint: str | None = _HINT) -> None:
        UnsupportedError.__init__(self, message, span, hint)


@dataclass(frozen=True, eq=False)
class Mask:
    """Mask that a model hands to its attentions."""

    shape: tuple[int, int, int, int]
    """(batch, 1, queries, keys); transformers looks at it."""
    attention: Attention | None
    """The composed program; None within graphs."""
    function: Callable[..., Any]
    """The mask at positions (b, h, q, kv)."""
    captures: Mapping[str, Any] = field(default_factory=dict)
    q_offset: Offset = 0
    kv_offset: Offset = 0
    lengths: tuple[int, int] | None = None
    """Numbers of rows and keys of the whole sequence, where the user's program reads them."""
    text: str | None = None
    """The traced function; None within graphs."""
    made_on: torch.device | None = None

    @property
    def ndim(self) -> int:
        """Number of dims, as of a mask of all pairs."""
        return len(self.shape)

    def __getitem__(self, index: tuple[slice | int, ...]) -> Mask | torch.Tensor:
        """The mask of some of the rows, ``mask[:, :, -1:, :]``, as Gemma 4 takes it.

        Or all pairs as an array, ``mask[:, 0, :, :]`` or ``mask[:, 0]``, for indexers that choose
        keys, as DeepSeek V3.2 has them: bool (batch, queries, keys), True for pairs that take part.

        Raises:
            UnsupportedError: Anything but rows that lie one behind the other; an array in a graph.
        """
        parts = index if isinstance(index, tuple) else ()
        whole = parts[:2] == (slice(None), 0) and all(x == slice(None) for x in parts[2:])
        if whole and len(parts) in (2, 4) and self.text is not None:
            return self._pairs(composed(None, self.text))
        plain = len(parts) == len(self.shape) and all(isinstance(x, slice) for x in parts)
        if not plain or any(x != slice(None) for x in (*parts[:2], parts[3])):
            raise NotAnArrayError(
                "the model takes a part of its mask, as if it were an array of all pairs"
            )
        batch, heads, count, keys = self.shape
        rows: Any = range(count)[parts[2]]
        if rows.step != 1 or not rows:
            raise NotAnArrayError(f"the model takes rows {parts[2]} of its mask")
        return Mask(
            (batch, heads, len(rows), keys), self.attention, self.function, self.captures,
            self.q_offset + rows.start, self.kv_offset, self.lengths, self.text, self.made_on,
        )  # fmt: skip

    def _pairs(self, program: Attention) -> torch.Tensor:
        batch, _, rows, keys = self.shape
        captures = dict(self.captures)
        if f"{PREFIX}pad" in captures and not _is_zero(self.kv_offset):
            captures[f"{PREFIX}k0"] = self.kv_offset
        how: dict[str, Any] = {"q_offset": self.q_offset, "kv_offset": self.kv_offset}
        how |= {"device": self.made_on, "max_bytes": sys.maxsize}
        found = program.mask(rows, keys, batch, 1, captures=captures, **how)
        return found[:, 0]

    def __getattr__(self, name: str) -> NoReturn:
        raise NotAnArrayError(
            f"the model reads '{name}' of its mask, as if it were an array of all pairs"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: object = (), kwargs: object = None
    ) -> NoReturn:
        name = getattr(func, "__name__", "a function of torch")
        raise NotAnArrayError(
            f"the model calls '{name}' with its mask, as if it were an array of all pairs"
        )

    def _compute(self, *others: object) -> NoReturn:
        raise NotAnArrayError(
            "the model computes with its mask, as if it were an array of all pairs"
        )

    __hash__ = object.__hash__
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compute
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _compute
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _compute
    __and__ = __or__ = __xor__ = __rand__ = __ror__ = __rxor__ = __invert__ = _compute
    __matmul__ = __rmatmul__ = __lshift__ = __rshift__ = __neg__ = __pos__ = __abs__ = _compute
    __len__ = __iter__ = __bool__ = __int__ = __float__ = __setitem__ = _compute


@dataclass(frozen=True)
class MaskArguments:
    """Arguments with which transformers asks for a mask, beside its function."""

    batch: int
    rows: int
    keys: int
    q_offset: Offset
    """Position of the first query: an int or a 0-d tensor, which the cache may change in place."""
    kv_offset: Offset
    padding: torch.Tensor | None
    """(batch, n) bool, whether each position has a token. If n is less than the number of keys,
    the other keys have none."""
    plain: bool
    """True if each query sees no key behind it, and nothing was added to the mask."""
    device: torch.device

    @property
    def steady(self) -> bool:
        """True if this may be a step of a compiled cache, outside of its graph.

        What differs between such steps has to be a tensor, or each step compiles a graph.
        """
        return self.rows == 1 and not self.plain and not torch.compiler.is_dynamo_compiling()


def make_mask(own: Own | None, asked: MaskArguments, function: Callable[..., Any]) -> Mask:
    """A mask.

    Args:
        own: The user's program, if there is one.
        asked: The call that it is for.
        function: Of (b, h, q, kv), at positions.

    Raises:
        ArgumentError: The padding has another shape.
        TraceError: The function cannot be traced.
        UnsupportedError: The user's program reads lengths that the host does not know.
    """
    offsets = (asked.q_offset, asked.kv_offset)
    lengths = _whole_lengths(asked) if own is not None and own.reads_lengths else None
    pad = None if asked.padding is None else _padding_of_keys(asked, asked.padding)
    captures: dict[str, Any] = {} if pad is None else {f"{PREFIX}pad": pad}
    q_offset = _kept_offset(asked.q_offset, asked)
    # Most caches begin with the first key. Lists of keys need that as a number.
    kv_offset = 0 if _is_zero(asked.kv_offset) else _kept_offset(asked.kv_offset, asked)
    shape = (asked.batch, 1, asked.rows, asked.keys)
    mask = Mask(shape, None, function, captures, q_offset, kv_offset, lengths)
    return _traced(own, mask, asked.device, (*offsets, pad))


def repeated(own: Own | None, mask: Mask, query: torch.Tensor) -> Mask:
    """The mask of one row for each row of the queries, as arrays broadcast."""
    function, row = mask.function, mask.q_offset

    def same(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return function(b, h, q * 0 + row, kv)

    batch, heads, _, keys = mask.shape
    captures = {name: x for name, x in mask.captures.items() if not name.startswith(MASK_PREFIX)}
    found = Mask(
        (batch, heads, query.shape[2], keys), None, same, captures, row, mask.kv_offset,
        mask.lengths,
    )  # fmt: skip
    return _traced(own, found, query.device, (row, mask.kv_offset, query))


def _traced(own: Own | None, mask: Mask, device: torch.device, given: tuple[object, ...]) -> Mask:
    """The mask with a program, or as it is within graphs."""
    if torch.compiler.is_dynamo_compiling():
        return mask
    if any(is_tracing(x) for x in given if isinstance(x, torch.Tensor)):
        # Tensors without data would stay in the cache.
        traced = trace_mods(None, mask.function, torch.float32, device, {}, (), None)
    else:
        traced = default_traces().trace(None, mask.function, torch.float32, device, {})
    named = {f"{MASK_PREFIX}{name}": value for name, value in traced.captures.items()}
    return Mask(
        mask.shape, composed(own, traced.text), mask.function, {**mask.captures, **named},
        mask.q_offset, mask.kv_offset, mask.lengths, traced.text, device,
    )  # fmt: skip


def _is_zero(offset: Offset) -> bool:
    return not isinstance(offset, torch.Tensor) and offset == 0


def _whole_lengths(asked: MaskArguments) -> tuple[int, int] | None:
    """Numbers of rows and keys up to the last ones here; None where these are all."""
    q_offset, kv_offset = asked.q_offset, asked.kv_offset
    if isinstance(q_offset, torch.Tensor) or isinstance(kv_offset, torch.Tensor):
        raise UnsupportedError(
            "the program reads q_len or kv_len, and a static cache knows no length on the host",
            hint="write the program in terms of q and kv, or use a dynamic cache",
        )
    if q_offset == 0 and kv_offset == 0:
        return None
    return q_offset + asked.rows, kv_offset + asked.keys


def _padding_of_keys(asked: MaskArguments, padding: torch.Tensor) -> torch.Tensor | None:
    """Keys of this call with a token, (batch, keys) bool; None where all that count have one."""
    if padding.dim() != 2:
        raise ArgumentError(
            f"attention_mask has {padding.dim()} dims",
            hint="pass (batch, length), or all pairs as (batch, heads or 1, queries, keys)",
        )
    start = asked.kv_offset
    if isinstance(start, torch.Tensor):
        raise UnsupportedError(
            "the cache gives the position of its first key as a tensor",
            hint="use another cache of transformers, such as a static or a dynamic one",
        )
    missing = start + asked.keys - padding.shape[1]
    looks = not asked.steady and not is_tracing(padding)
    # Keys without an entry lie behind the last query, which a plain mask keeps from seeing them.
    if looks and (missing <= 0 or asked.plain) and bool(padding.all()):
        return None
    if missing > 0:
        padding = torch.nn.functional.pad(padding, (0, missing))
    return padding[:, start : start + asked.keys].to(torch.bool)


def _kept_offset(offset: Offset, asked: MaskArguments) -> Offset:
    if isinstance(offset, torch.Tensor):
        return offset.clone()
    if asked.steady:
        return torch.tensor(offset, device=asked.device)
    return offset
