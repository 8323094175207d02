"""Keys and values in pages: what a cache is, what may be wrong with it, and its keys as tensors.

A page holds the keys of some consecutive positions of one request. ``table`` says which page has
which positions. A cache owns nothing: it is the engine's tensors under one name.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from attndsl.call.argument_checks import FLOATS, check_is_writable
from attndsl.call.value_checks import has_values, refuse_wrapped
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from attndsl.passes.int_ranges import POSITION_LIMIT
from attndsl.settings import asks_to_verify

from .kv_append import AUTO, BY_KERNEL, FP8, Scale, append

if TYPE_CHECKING:
    from collections.abc import Sequence

INTS = (torch.int32, torch.int64)
_DIMS = 4
_LAYOUT = (
    "(pages, page size, key heads, dim); transpose(1, 2) makes it of (pages, heads, size, dim)"
)


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """Keys and values of several requests, in pages. All tensors are views of the engine's.

    Position ``p`` of request ``b`` lies in page ``table[b, p // size]``, row ``p % size``.

    Args:
        k_pages: (pages, size, Hkv, D), of q's dtype, or ``torch.float8_e4m3fn``. Any strides whose
            last one is 1.
        v_pages: (pages, size, Hkv, Dv), of the same dtype.
        table: (batch, pages of a request), int32 or int64. Elements beyond a request's length are
            not read.
        lengths: (batch,), int32 or int64: keys of each request, those of this step included.
        k_scale: Of fp8 pages: what each stored key is multiplied by. A number or 0-d tensor for
            all, (Hkv,) for each head, or (pages, size, Hkv) for each position and head; fp32. None
            stands for 1.
        v_scale: The same of values.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: Says which, and what to pass.
    """

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    k_scale: Scale = None
    v_scale: Scale = None

    def __post_init__(self) -> None:
        """Refuse tensors that do not go together."""
        _check_pages(self.k_pages, self.v_pages)
        _check_table(self)
        for name in ("k_scale", "v_scale"):
            _check_scale(self, name, getattr(self, name))

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.k_pages.shape[1]

    @property
    def room(self) -> int:
        """The most keys of a request, by the shapes of the table and of pages."""
        return self.table.shape[1] * self.page_size

    @property
    def batch(self) -> int:
        """Requests."""
        return self.table.shape[0]

    @property
    def is_fp8(self) -> bool:
        """True if pages hold fp8 numbers, of 8 bits."""
        return self.k_pages.dtype is FP8

    def append(
        self, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, *, backend: str = AUTO
    ) -> None:
        """Write the keys and values of this step into the pages.

        ``lengths`` include them already: the keys of request ``b`` become its positions from
        ``lengths[b] - n_b`` on. Numbers beyond the range of fp8 become its largest one. Where
        scales are by position and head, those of the new keys are made and written too, so that the
        largest element becomes the largest number of fp8. All other scales are given.

        Args:
            k: (tokens, Hkv, D), in any float dtype. Rows of no request are not written.
            v: (tokens, Hkv, Dv).
            starts: (batch + 1,) ints: request ``b`` has tokens ``starts[b]`` to
                ``starts[b + 1] - 1``.
            backend: ``auto`` writes by torch operations, ``decode`` by a kernel. Neither reads a
                value on the host.

        Raises:
            ShapeError, DTypeError, DeviceError: Tensors do not go together.
            BackendError: The kernel does not run on this device.
            UnsupportedError: A tensor is within a transform of ``torch.func``.
            ArgumentError: Another backend. On CPUs, or with ``ATTNDSL_VERIFY=1``, but not in graphs
                of ``torch.compile``: as :meth:`validate`.
        """
        check_starts(self, starts)
        _check_rows(self, k, v)
        held = self.k_pages, self.v_pages, self.table, self.lengths
        refuse_wrapped("append", (k, v, starts, *held, self.k_scale, self.v_scale))
        if not isinstance(backend, str) or backend not in (AUTO, BY_KERNEL):
            raise ArgumentError(
                f"append has no backend {backend!r}", hint=f"use {AUTO!r} or {BY_KERNEL!r}"
            )
        if not torch.compiler.is_compiling() and looks_at_values(self.table):
            self.validate(starts, k.shape[0])
        append(self, k, v, starts, backend)

    def validate(self, starts: torch.Tensor | None = None, tokens: int | None = None) -> None:
        """Look at all values, which takes a synchronisation on a GPU.

        Args:
            starts: As of a call, if there is one.
            tokens: Number of its tokens; by default the last start.

        Raises:
            ArgumentError: The first request that has a page number out of range, a length that is
                negative or beyond its table, starts that fall, or more queries than keys.
        """
        if not (tokens is None or isinstance(tokens, int)):
            raise ArgumentError(f"tokens is a {type(tokens).__name__}", hint="pass an int")
        if starts is not None and _is_right(self, starts, tokens):
            return
        _check_lengths(self)
        _check_numbers(self)
        if starts is not None:
            check_starts(self, starts)
            _check_start_values(self, starts, tokens)


def is_at_hand(tensor: torch.Tensor) -> bool:
    """Tell whether the elements can be looked at without waiting for a device."""
    return tensor.device.type == "cpu" and has_values(tensor)


def looks_at_values(tensor: torch.Tensor) -> bool:
    """Tell whether calls with ``tensor`` validate: where nothing waits, or settings ask for it."""
    return is_at_hand(tensor) or (asks_to_verify() and has_values(tensor))


def gathered(
    cache: PagedCache, requests: slice, length: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The first ``length`` keys and values of ``requests``, scaled, in ``dtype``.

    They are (requests, Hkv, length, D), with zeros beyond each request's length. Reads nothing
    outside of the pool, whatever the table holds.
    """
    table, size = cache.table[requests], cache.page_size
    positions = torch.arange(length, device=table.device)
    exist = positions < cache.lengths[requests, None]
    if cache.k_pages.shape[0] == 0 or not length:
        shape = table.shape[0], cache.k_pages.shape[2], length
        both = (cache.k_pages, cache.v_pages)
        return [x.new_zeros((*shape, x.shape[3]), dtype=dtype) for x in both]
    pages = table[:, : -(-length // size)].long().repeat_interleave(size, 1)[:, :length]
    pages = torch.where(exist, pages, 0).clamp(0, cache.k_pages.shape[0] - 1)
    rows = positions % size
    found = []
    for stored, scale in ((cache.k_pages, cache.k_scale), (cache.v_pages, cache.v_scale)):
        values = stored[pages, rows].to(dtype)
        if isinstance(scale, torch.Tensor) and scale.dim() == 3:
            values = values * scale[pages, rows].to(dtype).unsqueeze(-1)
        elif isinstance(scale, torch.Tensor) and scale.dim() == 1:
            values = values * scale.to(dtype).unsqueeze(-1)
        elif scale is not None:
            values = values * scale
        # What lies there may be no number.
        values = torch.where(exist[..., None, None], values, 0.0)
        found.append(values.transpose(1, 2))
    return found


def _check_pages(k: object, v: object) -> None:
    for name, pages in (("k_pages", k), ("v_pages", v)):
        if not isinstance(pages, torch.Tensor) or pages.dim() != _DIMS:
            what = (
                f"has shape {tuple(pages.shape)}"
                if isinstance(pages, torch.Tensor)
                else f"is a {type(pages).__name__}"
            )
            raise ShapeError(f"{name} {what}", hint=f"pass {_LAYOUT}")
        if pages.dtype not in FLOATS and pages.dtype is not FP8:
            raise DTypeError(
                f"{name} is of dtype {pages.dtype}",
                hint="use q's dtype, or torch.float8_e4m3fn with scales",
            )
        if pages.stride(3) != 1 and pages.shape[3] > 1:
            raise ShapeError(
                f"{name} has stride {pages.stride(3)} along its last dim",
                hint=f"a cache is no copy: pass {_LAYOUT}, whose rows lie together",
            )
    assert isinstance(k, torch.Tensor)
    assert isinstance(v, torch.Tensor)
    if k.shape[:3] != v.shape[:3]:
        raise ShapeError(
            f"k_pages is {tuple(k.shape)} and v_pages is {tuple(v.shape)}",
            hint="both have the same pages, page size and key heads",
        )
    if k.shape[1] == 0 or k.shape[2] == 0 or k.shape[3] == 0:
        raise ShapeError(f"k_pages is {tuple(k.shape)}", hint=f"pass {_LAYOUT}, none but pages 0")
    if v.dtype is not k.dtype or v.device != k.device:
        raise DTypeError(
            f"k_pages is {k.dtype} on {k.device}, and v_pages {v.dtype} on {v.device}",
            hint="both have one dtype and one device",
        )


def _check_table(cache: PagedCache) -> None:
    device = cache.k_pages.device
    for name, dims in (("table", 2), ("lengths", 1)):
        value = getattr(cache, name)
        hint = (
            f"pass (batch, pages of a request) ints on {device}"
            if name == "table"
            else f"pass (batch,) ints on {device}, the number of keys of each request"
        )
        if not isinstance(value, torch.Tensor) or value.dtype not in INTS:
            raise DTypeError(f"{name} is no int32 or int64 tensor", hint=hint)
        if value.dim() != dims:
            raise ShapeError(f"{name} has shape {tuple(value.shape)}", hint=hint)
        if value.device != device:
            raise DeviceError(f"{name} is on {value.device}", hint=hint)
    if cache.table.shape[0] != cache.lengths.shape[0]:
        raise ShapeError(
            f"table has {cache.table.shape[0]} requests and lengths {cache.lengths.shape[0]}",
            hint="both have a row for each request",
        )
    if cache.room >= POSITION_LIMIT:
        raise ShapeError(
            f"the table has room for {cache.room} keys a request",
            hint=f"positions are below {POSITION_LIMIT}: pass a narrower table",
        )


def _check_scale(cache: PagedCache, name: str, scale: object) -> None:
    if scale is None:
        return
    if not cache.is_fp8:
        raise ArgumentError(
            f"{name} is given, and the pages are {cache.k_pages.dtype}",
            hint="scales belong to pages of torch.float8_e4m3fn: drop it",
        )
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        return
    shape = cache.k_pages.shape[:3]
    if not isinstance(scale, torch.Tensor) or scale.dtype is not torch.float32:
        raise DTypeError(f"{name} is no fp32 tensor and no number", hint=_scale_hint(shape))
    if tuple(scale.shape) not in ((), (shape[2],), tuple(shape)):
        raise ShapeError(f"{name} has shape {tuple(scale.shape)}", hint=_scale_hint(shape))
    if scale.device != cache.k_pages.device:
        raise DeviceError(f"{name} is on {scale.device}", hint=f"{name}.to(k_pages.device)")


def _scale_hint(shape: Sequence[int]) -> str:
    return f"pass a number, or an fp32 tensor of shape (), ({shape[2]},) or {tuple(shape)}"


def _check_rows(cache: PagedCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse keys and values of a step that do not fit the pages."""
    for name, rows, pages in (("k", k, cache.k_pages), ("v", v, cache.v_pages)):
        if not isinstance(rows, torch.Tensor) or rows.dtype not in FLOATS:
            raise DTypeError(f"{name} is no float tensor", hint=_rows_hint(pages))
        if rows.dim() != 3 or tuple(rows.shape[1:]) != tuple(pages.shape[2:]):
            raise ShapeError(f"{name} has shape {tuple(rows.shape)}", hint=_rows_hint(pages))
        if rows.device != pages.device:
            raise DeviceError(f"{name} is on {rows.device}", hint=_rows_hint(pages))
        check_is_writable(f"{name}_pages", pages)
    if k.shape[0] != v.shape[0]:
        raise ShapeError(
            f"k has {k.shape[0]} tokens and v has {v.shape[0]}", hint="both have one row a token"
        )


def _rows_hint(pages: torch.Tensor) -> str:
    return f"pass (tokens, {pages.shape[2]}, {pages.shape[3]}) floats on {pages.device}"


def check_starts(cache: PagedCache, starts: object) -> None:
    """Refuse what are no starts of the cache's requests, by shape, dtype and device.

    Raises:
        ShapeError, DTypeError, DeviceError: Says which, and what to pass.
    """
    if not isinstance(starts, torch.Tensor) or starts.dtype not in INTS:
        raise DTypeError("starts is no int32 or int64 tensor", hint=_starts_hint(cache))
    if tuple(starts.shape) != (cache.batch + 1,):
        raise ShapeError(f"starts has shape {tuple(starts.shape)}", hint=_starts_hint(cache))
    if starts.device != cache.table.device:
        raise DeviceError(f"starts is on {starts.device}", hint="starts.to(table.device)")


def _starts_hint(cache: PagedCache) -> str:
    return f"pass ({cache.batch + 1},) ints: request b has tokens starts[b] to starts[b + 1] - 1"


def _is_right(cache: PagedCache, starts: torch.Tensor, tokens: int | None) -> bool:
    """Return True if all values are right, even page numbers beyond lengths, as in most steps."""
    check_starts(cache, starts)
    lengths, begins = cache.lengths.tolist(), starts.tolist()
    room = cache.room
    if begins[0] < 0 or (tokens is not None and begins[-1] > tokens):
        return False
    counts = [end - begin for begin, end in pairwise(begins)]
    if not all(0 <= n <= length <= room for n, length in zip(counts, lengths, strict=True)):
        return False
    if not cache.table.numel():
        return True
    least, greatest = torch.aminmax(cache.table)
    return int(least) >= 0 and int(greatest) < cache.k_pages.shape[0]


def _first(bad: torch.Tensor) -> int | None:
    """The first place where ``bad`` holds."""
    found = bad.nonzero()
    return int(found[0, 0]) if found.numel() else None


def _check_lengths(cache: PagedCache) -> None:
    b = _first((cache.lengths < 0) | (cache.lengths > cache.room))
    if b is not None:
        raise ArgumentError(
            f"request {b} has length {int(cache.lengths[b])}, and its row of the table has room "
            f"for {cache.room} keys ({cache.table.shape[1]} pages of {cache.page_size})",
            hint="lengths are from 0 to that room; pass a wider table",
        )


def _check_numbers(cache: PagedCache) -> None:
    pages, size = cache.k_pages.shape[0], cache.page_size
    columns = torch.arange(cache.table.shape[1], device=cache.table.device)
    used = columns * size < cache.lengths[:, None]
    bad = used & ((cache.table < 0) | (cache.table >= pages))
    b = _first(bad.any(1))
    if b is not None:
        column = int(bad[b].nonzero()[0, 0])
        raise ArgumentError(
            f"request {b} has page {int(cache.table[b, column])} for its keys from "
            f"{column * size} on, and there are {pages} pages",
            hint="page numbers are from 0 to the number of pages less 1",
        )


def _check_start_values(cache: PagedCache, starts: torch.Tensor, tokens: int | None) -> None:
    counts = starts.diff()
    b = _first(counts < 0)
    if b is not None:
        raise ArgumentError(
            f"starts falls at request {b}: from {int(starts[b])} to {int(starts[b + 1])}",
            hint="starts are sums of the requests' numbers of queries, from 0 on",
        )
    last = int(starts[-1])
    if int(starts[0]) < 0 or (tokens is not None and last > tokens):
        raise ArgumentError(
            f"starts goes from {int(starts[0])} to {last}, and there are {tokens} tokens",
            hint="starts are from 0 to the number of tokens",
        )
    b = _first(counts > cache.lengths)
    if b is not None:
        raise ArgumentError(
            f"request {b} has {int(counts[b])} queries, and its length is {int(cache.lengths[b])}",
            hint="lengths include the keys of this step: add its queries to them before the call",
        )
