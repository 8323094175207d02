"""Keys that later queries can still see, for managers of KV caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import ArgumentError
from attndsl.ir import Op, const, mentions, toposort
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.tiles.retained_keys import Projection, projection, runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attndsl.backends.base import Scalar
    from attndsl.ir import Program

_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Retained:
    """The keys that some later query may see; made by :meth:`attndsl.Attention.retained`."""

    ranges: tuple[range, ...]
    """These keys: disjoint, in the order of their first keys, some with a step."""
    kv_len: int
    """Number of keys that were asked about."""
    exact: bool
    """True if some later query sees each of these keys. Otherwise the mask has a condition that
    only the pair itself decides, and no query may need some of these keys."""

    def __len__(self) -> int:
        """Number of keys."""
        return sum(map(len, self.ranges))

    def __contains__(self, key: object) -> bool:
        """Return True if a key is one of these."""
        return any(key in each for each in self.ranges)

    def __iter__(self) -> Iterator[int]:
        """The keys in ascending order."""
        return iter(sorted(key for each in self.ranges for key in each))

    def mask(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """(kv_len,) bool: whether each key is one of these."""
        found = torch.zeros(self.kv_len, dtype=torch.bool, device=device)
        for each in self.ranges:
            found[each.start : each.stop : each.step] = True
        return found

    def dead_pages(self, size: int) -> tuple[int, ...]:
        """Numbers of the pages of ``size`` keys without any of these: a cache may free them.

        A last page that has room for more keys is not among them.

        Raises:
            ArgumentError: ``size`` is no whole number above 0.
        """
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ArgumentError(f"the page size is {size!r}", hint="pass a whole number, 1 or more")
        whole = self.kv_len // size
        pages = self.mask()[: whole * size].view(whole, size).any(1)
        return tuple((~pages).nonzero().flatten().tolist())

    def __str__(self) -> str:
        """Text for people, such as ``keys 0 to 3 and 976 to 999, 28 of 1000``."""
        told = [_told(each) for each in self.ranges[:_SHOWN]]
        if len(self.ranges) > _SHOWN:
            told.append(f"{len(self.ranges) - _SHOWN} more ranges")
        listed = f"keys {', '.join(told)}" if told else "no key"
        return f"{listed}; {len(self)} of {self.kv_len}" + ("" if self.exact else ", at most")


def _told(keys: range) -> str:
    if len(keys) == 1:
        return str(keys.start)
    step = f" in steps of {keys.step}" if keys.step > 1 else ""
    return f"{keys[0]} to {keys[-1]}{step}"


@dataclass(frozen=True, slots=True)
class RetentionQuery:
    """A question for the keys that later queries may see."""

    next_q: int
    """Logical position of the next query."""
    kv_len: int
    b: int
    heads: int
    kv_heads: int


def retained_keys(
    program: Program, request: RetentionQuery, captures: Mapping[str, torch.Tensor | Scalar]
) -> Retained:
    """The keys that queries from ``request.next_q`` on may see, by any head.

    Raises:
        ArgumentError: A number that cannot be, or a capture that the mask reads is missing.
    """
    _check(request)
    found = projection(const(True) if program.mask is None else program.mask)
    by_head = any(mentions(item, name=name) for item in found.symbols.values() for name in _HEADS)
    names = _names(program, request, captures)
    parts = [
        found.ranges(request.next_q, request.kv_len, _values(found, names, captures, request, h))
        for h in range(request.heads if by_head else 1)
    ]
    first = parts[0]
    if all(part == first for part in parts):
        return Retained(first, request.kv_len, found.exact)
    keys = sorted({key for part in parts for each in part for key in each})
    return Retained(runs(keys), request.kv_len, found.exact)


_HEADS = ("h", "hkv")


def _check(request: RetentionQuery) -> None:
    for name in ("next_q", "kv_len", "b", "heads", "kv_heads"):
        value = getattr(request, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 30:
            raise ArgumentError(f"{name} is {value!r}", hint="pass a whole number, 0 or more")
    if not request.kv_heads or request.heads % request.kv_heads:
        raise ArgumentError(
            f"heads is {request.heads} and kv_heads is {request.kv_heads}",
            hint="the number of query heads is a multiple of that of key heads",
        )


def _names(
    program: Program, request: RetentionQuery, captures: Mapping[str, torch.Tensor | Scalar]
) -> dict[str, Any]:
    """Values of params and sizes, as far as they are known."""
    known: dict[str, Any] = {"b": request.b, "heads": request.heads, "kv_heads": request.kv_heads}
    for decl in program.params:
        value = captures.get(decl.name, decl.default)
        if value is not None:
            known[decl.name] = value.item() if isinstance(value, torch.Tensor) else value
    for tensor in program.tensors:
        given = captures.get(tensor.name)
        if isinstance(given, torch.Tensor) and given.dim() == len(tensor.dims):
            for dim, size in zip(tensor.dims, given.shape, strict=True):
                if isinstance(dim.value, str):
                    known.setdefault(dim.value, size)
    return known


def _values(
    found: Projection, names: Mapping[str, Any], captures: Mapping[str, Any],
    request: RetentionQuery,
    h: int,
) -> dict[str, int]:  # fmt: skip
    """The symbols' values for one head."""
    group = request.heads // request.kv_heads

    def load(name: str, index: tuple[int, ...]) -> bool | int | float:
        tensor = captures.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise _missing(name)
        inside = tuple(min(max(i, 0), n - 1) for i, n in zip(index, tensor.shape, strict=True))
        value: bool | int | float = tensor[inside].item()
        return value

    known = Environment({**names, "h": h, "hkv": h // group}, load)
    values = {}
    for symbol, item in found.symbols.items():
        missing = [
            x.value for x in toposort(item)
            if x.op in (Op.PARAM, Op.SIZE) and x.value not in known.names
        ]  # fmt: skip
        if missing:
            raise _missing(str(missing[0]))
        values[symbol] = int(evaluate(item, known))
    return values


def _missing(name: str) -> ArgumentError:
    return ArgumentError(
        f"the mask reads {name}, and it is not given", hint=f"pass {name}=... as for a call"
    )
