"""Plan that the layers of one step of serving share: made once, looked up by each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attndsl.errors import ArgumentError, ShapeError

if TYPE_CHECKING:
    from .ragged_batch import Run, ServeStep

_HELD = ("table", "lengths", "starts", "q_index")
_HINT = "make one plan for each step: attn.plan(cache, starts, tokens)"


@dataclass(frozen=True, slots=True, eq=False)
class ServingPlan:
    """Plan that the layers of one step share: :meth:`attndsl.Attention.plan` makes it.

    A plan belongs to a program, and to the table, lengths and starts that it was made of. A call
    with others is refused. So is a call after one of these has changed in place, if the plan has
    looked at its values.
    """

    tokens: int
    """Rows of q."""
    most_queries: int | None
    """Capacities, as calls have them."""
    most_chunks: int | None
    program: str
    """Digest of the program."""
    held: tuple[torch.Tensor | None, ...]
    """Table, lengths, starts and ``q_index``."""
    pages: tuple[int, int]
    """Number of pages, which page numbers were held to, and the size of one."""
    runs: tuple[Run, ...] | None
    """Runs of calls of gathered keys, where the host has read the numbers of queries."""
    found: torch.Tensor | None
    """Requests with many queries; see :func:`.prefill.found_chunks`."""
    versions: tuple[int | None, ...] | None
    """Versions of the held tensors, where the plan depends on values."""
    in_graph: bool
    """True if a CUDA graph makes the plan again at each replay."""
    signature: tuple[object, ...] | None
    """The part of each layer's signature that the plan knows; see :mod:`.serve_cache`."""

    def check(self, digest: str, step: ServeStep) -> None:
        """Refuse a call that the plan was not made for.

        Args:
            digest: Of the program that is called.
            step: The inputs, whose capacities are the plan's unless the caller gave some.

        Raises:
            ArgumentError, ShapeError: Says what differs.
        """
        cache = step.cache
        if digest != self.program:
            raise ArgumentError(
                "the plan was made by another program",
                hint="layers of one program share a plan: make one with this attention's plan()",
            )
        for name, own, other in zip(_HELD, self.held, held_by(step), strict=True):
            if own is not other and not _is_same(own, other):
                raise ArgumentError(f"the plan was made for another {name}", hint=_HINT)
        (count, size), (own_count, own_size, *_) = self.pages, cache.k_pages.shape
        if own_size != size:
            raise ArgumentError(
                f"the plan was made for pages of {size}, and the cache has pages of {own_size}",
                hint="layers with pages of another size have a plan of their own",
            )
        if own_count < count:
            raise ArgumentError(
                f"the plan was made for a pool of {count} pages, and the cache has {own_count}",
                hint="make the plan of the cache with the fewest pages",
            )
        if step.q.dim() == 3 and step.q.shape[0] != self.tokens:
            raise ShapeError(
                f"q has {step.q.shape[0]} tokens, and the plan was made for {self.tokens}",
                hint=_HINT,
            )
        if (step.most_queries, step.most_chunks) != (self.most_queries, self.most_chunks):
            raise ArgumentError(
                f"most_queries and most_chunks are {step.most_queries} and {step.most_chunks}, "
                f"and the plan has {self.most_queries} and {self.most_chunks}",
                hint="give them to attn.plan alone",
            )
        if self.versions is not None and versions_of(self.held) != self.versions:
            raise ArgumentError(
                "table, lengths, starts or q_index have changed since the plan was made", hint=_HINT
            )
        if self.found is not None and self.in_graph != in_capture(self.found.device):
            where = (
                "within a CUDA graph, whose replays make it"
                if self.in_graph
                else "outside of the CUDA graph that is captured: replays would not make it again"
            )
            raise ArgumentError(
                f"the plan was made {where}", hint="call attn.plan where its layers are called"
            )


def versions_of(held: tuple[torch.Tensor | None, ...]) -> tuple[int | None, ...]:
    """Number of in-place changes of each tensor; None for those that torch does not count."""
    return tuple(None if x is None or x.is_inference() else x._version for x in held)


def in_capture(device: torch.device) -> bool:
    """Return True if a CUDA graph records what is launched."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_same(own: object, other: object) -> bool:
    """Return True if two tensors have the same memory, shape, strides and dtype."""
    if not isinstance(own, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return (
        own.data_ptr() == other.data_ptr() and own.shape == other.shape
        and own.stride() == other.stride() and own.dtype is other.dtype
        and own.device == other.device
    )  # fmt: skip


def held_by(step: ServeStep) -> tuple[torch.Tensor | None, ...]:
    """Tensors that a plan is made of, in the order of its checks."""
    return step.cache.table, step.cache.lengths, step.starts, step.q_index
