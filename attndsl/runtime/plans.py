"""Plan that the layers of one step of serving share: made once, looked up by each of them.

Non-goals: what a step is (:mod:`.packed`), and what steps of one signature share (:mod:`.steps`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.errors import ArgumentError, ShapeError
from attndsl.scalars import number_key

from .steps import (
    NUMBERS,
    TENSORS,
    Prepared,
    chunks_of,
    kind_of_capture,
    pages_of,
    runs_as_ever,
)
from .values import dims_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Call, Scalar
    from attndsl.pipeline import Lowered

    from .packed import Run
    from .paged import PagedCache
    from .steps import Request

    Captures = Mapping[str, torch.Tensor | Scalar]

_HINT = "make one plan for each step: attn.plan(cache, starts, tokens)"


class Layer(NamedTuple):
    """Prepared step and launch that layers of one plan share whose tensors look alike."""

    prepared: Prepared
    launch: tuple[Lowered, Call, Any] | None
    """The program, the call and the backend's own part, where no capture changes them."""

    def run(
        self, request: Request, captures: Captures, found: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp; see :meth:`.steps.Prepared.run`."""
        prepared = self.prepared
        if self.launch is None:
            return prepared.run(request, captures, found)
        lowered, call, launch = self.launch
        pages = pages_of(request, prepared.made)
        chunks = None
        if prepared.chunked is not None:
            chunks = chunks_of(prepared.chunked, prepared.call_of(request, captures), pages, found)
        return prepared.backend.launched(launch, lowered, call, pages, chunks)


def layer_of(prepared: Prepared, request: Request, captures: Captures) -> Layer:
    """Make the :class:`Layer` of requests that look like one that ``prepared`` has run."""
    program, index = prepared.program, request.q_index
    launch = None
    # Captures bring addresses of their own, and fp32 a setting of torch. Kernels read positions of
    # 64 bits from a copy, which has the values of one step.
    if (
        not program.tensors and not program.params and request.q.dtype is not torch.float32
        and (index is None or index.dtype is torch.int32)
    ):  # fmt: skip
        call = prepared.terms.applied(prepared.call_of(request, captures))
        lowered = prepared.terms.lowered
        backend = prepared.backend
        launch = (lowered, call, backend.launch_of(lowered, call, pages_of(request, prepared.made)))
    return Layer(prepared, launch)


def key_of_layer(
    request: Request, captures: Captures, names: tuple[str, ...]
) -> tuple[object, ...] | None:
    """Key of a layer, of all that may differ within its plan; None where it is looked at anew.

    Args:
        request: Its arguments, not checked.
        captures: Its captures.
        names: Those of params whose values declared dims depend on.
    """
    q, cache = request.q, request.cache
    k, v = cache.k_pages, cache.v_pages
    if type(q) not in TENSORS or not runs_as_ever(q, k, v):
        return None
    if any(type(captures.get(name)) not in NUMBERS for name in names):
        return None
    return (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, v.shape, v.stride(),
        (k.data_ptr() | v.data_ptr()) % 16 == 0, q.data_ptr() % 16 == 0,
        kind_of_capture(cache.k_scale), kind_of_capture(cache.v_scale), request.numbers,
        request.kinds, number_key(request.scale),
        *[(name, kind_of_capture(value)) for name, value in captures.items()],
        *dims_key(names, captures),
    )  # fmt: skip


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
    """Their number, which page numbers were held to, and the size of one."""
    runs: tuple[Run, ...] | None
    """Of calls of gathered keys, where the host has read the numbers of queries."""
    found: torch.Tensor | None
    """Requests with many queries; see :func:`.chunks.found_chunks`."""
    versions: tuple[int | None, ...] | None
    """Of what is held, where the plan depends on values."""
    in_graph: bool
    """Whether a CUDA graph makes the plan again at each replay."""
    layers: dict[tuple[object, ...], Layer] = field(default_factory=dict)

    def check(self, digest: str, request: Request) -> None:
        """Refuse a call that the plan was not made for.

        Args:
            digest: Of the program that is called.
            request: The arguments, whose capacities are the plan's unless the caller gave some.

        Raises:
            ArgumentError, ShapeError: Says what differs.
        """
        cache = request.cache
        if digest != self.program:
            raise ArgumentError(
                "the plan was made by another program",
                hint="layers of one program share a plan: make one with this attention's plan()",
            )
        given = (cache.table, cache.lengths, request.starts, request.q_index)
        for name, own, other in zip(HELD, self.held, given, strict=True):
            if own is not other and not _is_same(own, other):
                raise ArgumentError(f"the plan was made for another {name}", hint=_HINT)
        count, size = self.pages
        if cache.page_size != size:
            raise ArgumentError(
                f"the plan was made for pages of {size}, and the cache has pages of "
                f"{cache.page_size}",
                hint="layers with pages of another size have a plan of their own",
            )
        if cache.k_pages.shape[0] < count:
            raise ArgumentError(
                f"the plan was made for a pool of {count} pages, and the cache has "
                f"{cache.k_pages.shape[0]}",
                hint="make the plan of the cache with the fewest pages",
            )
        if request.q.dim() == 3 and request.q.shape[0] != self.tokens:
            raise ShapeError(
                f"q has {request.q.shape[0]} tokens, and the plan was made for {self.tokens}",
                hint=_HINT,
            )
        capacities = (self.most_queries, self.most_chunks)
        if request.numbers[:2] != capacities:
            raise ArgumentError(
                f"most_queries and most_chunks are {request.numbers[0]} and {request.numbers[1]}, "
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


HELD = ("table", "lengths", "starts", "q_index")


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


def held_by(cache: PagedCache, starts: torch.Tensor, index: torch.Tensor | None) -> tuple[Any, ...]:
    """Tensors that a plan is made of, in the order of its checks."""
    return cache.table, cache.lengths, starts, index
