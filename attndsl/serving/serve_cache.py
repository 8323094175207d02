"""Cache of prepared steps by signature, so that a repeated step is checked and bound once.

A signature has all that the outcome depends on beside values that kernels read: shapes, strides,
dtypes, kinds of captures and scales, capacities, and what numbers of the call stand for themselves.
It has two parts: that of the requests, which layers of a step share, and that of the layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.backends.base import NONE, Call, ReadsPages
from attndsl.backends.memory_order import rows_contiguous
from attndsl.backends.paged_requests import Pages
from attndsl.call.argument_checks import scale_of
from attndsl.call.chunked_autograd import is_transformed
from attndsl.call.sub_calls import made_captures, narrow, with_narrow_positions
from attndsl.call.value_checks import ValueChecks, check_params, dims_key, needs_of_values
from attndsl.ir import TOKENS, size, toposort
from attndsl.passes.int_ranges import POSITION_LIMIT
from attndsl.settings import asks_to_verify

from .paged import PagedCache
from .prefill import MOST_FEW, attend_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.backends.base import Scalar
    from attndsl.backends.paged_requests import ChunkResults
    from attndsl.call.sub_calls import Terms
    from attndsl.ir import Program

    from .prefill import Chunked
    from .ragged_batch import ServeStep

    Captures = Mapping[str, torch.Tensor | Scalar]
    Results = tuple[torch.Tensor, torch.Tensor]
    Launch = tuple[Call, Callable[[Call, Pages, ChunkResults | None], Results]]

_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose signatures are looked up."""
_NUMBERS = (int, type(None))
"""The same of numbers."""
_MANY_TOKENS = POSITION_LIMIT // 4
"""Numbers of tokens from which on positions of each step are looked at."""


class PreparedStep(NamedTuple):
    """Backend, terms, template call and launches that steps of one signature share."""

    backend: ReadsPages
    program: Program
    """Program whose captures a step has."""
    terms: Terms
    call: Call
    """Template of a call, checked, without its captures, so that no tensor is kept alive."""
    needs: ValueChecks
    made: tuple[tuple[str, str], ...]
    """Captures that follow from ``starts`` and ``lengths``; see ``made`` of
    :class:`~attndsl.backends.paged_requests.Pages`."""
    chunked: Chunked | None
    """Calls of the requests with many queries, if these are not run as all others."""
    positions: str | None
    """Name of the capture that ``q_index`` is."""
    launches: dict[tuple[bool, ...], Launch] | None
    """Launches by the alignment of the tensors and the sign of the scale. None where a launch
    depends on more than these and the signature: captures bring addresses of their own, and fp32 a
    setting of torch."""

    def run(self, step: ServeStep, captures: Captures, found: torch.Tensor | None) -> Results:
        """Output and log-sum-exp of a step of the signature.

        Args:
            step: Its inputs.
            captures: Its captures.
            found: Its requests with many queries, if a plan has found them.

        Raises:
            ArgumentError: A number among the captures that cannot be.
        """
        call: Any = None
        pages = pages_of(step, self.made)
        if self.launches is None or self.chunked is not None:
            call = self.call_of(step, captures)
        chunks = None if self.chunked is None else attend_chunks(self.chunked, call, pages, found)
        if self.launches is None:
            call = self.terms.applied(call)
            return self.backend.bound_serve(self.terms.lowered, call, pages)(call, pages, chunks)
        scale = None if step.scale is None else scale_of(step.scale)
        index: Any = None if self.positions is None else step.q_index
        if index is not None:
            index = narrow(index)
        key = (
            (pages.k.data_ptr() | pages.v.data_ptr()) % 16 == 0, pages.q.data_ptr() % 16 == 0,
            index is None or index.data_ptr() % 16 == 0, scale is not None and scale <= 0,
        )  # fmt: skip
        launch = self.launches.get(key)
        if launch is None:
            launch = self.launches[key] = self._launch_of(step, captures, pages)
        call, run = launch
        if scale is not None and scale is not call.scale:
            call = call._replace(scale=scale)
        if index is not None:
            call = call._replace(tensors={**call.tensors, self.positions: index})
        return run(call, pages, chunks)

    def _launch_of(self, step: ServeStep, captures: Captures, pages: Pages) -> Launch:
        call = self.terms.applied(self.call_of(step, captures))
        run = self.backend.bound_serve(self.terms.lowered, call, pages)
        if self.positions is not None:
            call = call._replace(tensors={**call.tensors, self.positions: call.q.new_empty(0)})
        return call, run

    def call_of(self, step: ServeStep, captures: Captures) -> Call:
        """The call of a step, before it is put into its terms.

        Raises:
            ArgumentError: A number among the captures that cannot be.
        """
        program, scale, part = self.program, step.scale, self.call.part
        if step.q_index is not None:
            assert part is not None
            assert part.packed is not None
            part = replace(part, packed=part.packed._replace(positions=step.q_index))
        call = self.call._replace(
            scale=step.q.shape[2] ** -0.5 if scale is None else scale_of(scale),
            tensors={d.name: captures[d.name] for d in program.tensors},  # type: ignore[misc]
            params={d.name: captures.get(d.name, d.default) for d in program.params},  # type: ignore[arg-type]
            part=part,
        )
        return check_params(program, call, self.needs) if program.params else call


def pages_of(step: ServeStep, made: tuple[tuple[str, str], ...]) -> Pages:
    """Tensors of a step that kernels read: q, starts, and the cache's pages, table and lengths."""
    q, cache = step.q, step.cache
    q = q.detach() if q.requires_grad else q
    return Pages(
        q if q.stride(2) == 1 else rows_contiguous(q), step.starts, cache.k_pages, cache.v_pages,
        cache.table, cache.lengths, cache.k_scale, cache.v_scale, made,
    )  # fmt: skip


def prepared_step(
    backend: ReadsPages, program: Program, call: Call, captures: Captures, chunked: Chunked | None,
    terms: Terms,
) -> PreparedStep:  # fmt: skip
    """Prepare steps like a checked ``call``, which has the ``captures`` as they were given.

    Args:
        backend: The backend that runs it.
        program: The program as it was written.
        call: The call.
        captures: Captures by name.
        chunked: Steps of prompts, where there may be some.
        terms: Rules that put the call into the backend's terms.
    """
    needs = needs_of_values(program, call, captures, ())
    positions = next((name for name, what in terms.captures if what == "token_positions"), None)
    is_bound = not (program.tensors or program.params or call.q.dtype is torch.float32)
    call = with_narrow_positions(call)._replace(tensors=NONE, params=NONE)
    return PreparedStep(
        backend, program, terms, call, needs, made_captures(terms), chunked, positions,
        {} if is_bound else None,
    )  # fmt: skip


def are_positions_right(step: ServeStep) -> bool:
    """Return True if no values of lengths and starts make positions that are too large."""
    return max(_MANY_TOKENS, step.cache.room) + (step.most_queries or 0) < POSITION_LIMIT


def speaks_of_tokens(program: Program) -> bool:
    """Return True if ``token`` or ``tokens`` stand in a program, or in a declared dim."""
    dims = [dim for decl in program.tensors for dim in decl.dims]
    return program.by_token or size(TOKENS) in toposort(*program.roots(), *dims)


def signature_of(
    step: ServeStep, captures: Captures, names: tuple[str, ...], by_token: bool,
    requests: tuple[object, ...] | None = None,
) -> tuple[object, ...] | None:  # fmt: skip
    """The signature of a step; None where it has to be looked at anew.

    Args:
        step: Its inputs, not checked.
        captures: Its captures.
        names: Those of params whose values declared dims depend on.
        by_token: As of :func:`signature_of_requests`.
        requests: What that gave for the step's plan.
    """
    q, cache = step.q, step.cache
    if type(q) not in _TENSORS or type(cache) is not PagedCache or q.dim() != 3:
        return None
    if requests is None:
        requests = signature_of_requests(step, q.shape[0], by_token)
    k, v, dtype = cache.k_pages, cache.v_pages, step.out_dtype
    if (
        requests is None or type(k) not in _TENSORS or type(v) not in _TENSORS
        or type(step.heads) not in _NUMBERS or type(step.kv_heads) not in _NUMBERS
        or type(step.h_offset) not in _NUMBERS
        or not (dtype is None or type(dtype) is torch.dtype)
    ):  # fmt: skip
        return None
    if torch._C._get_tracing_state() is not None or is_transformed():
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    kinds = []
    for name, value in captures.items():
        if isinstance(value, torch.Tensor) and value.is_neg():
            return None
        kinds.append((name, kind_of_capture(value)))
    if names and any(type(captures.get(name)) not in _NUMBERS for name in names):
        return None
    return (
        requests, q.shape[1:], q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype,
        k.device, v.shape, v.stride(), kind_of_capture(cache.k_scale),
        kind_of_capture(cache.v_scale), step.heads, step.kv_heads, step.h_offset,
        type(step.scale), dtype, step.return_lse, *kinds,
        *(dims_key(names, captures) if names else ()),
    )  # fmt: skip


def signature_of_requests(
    step: ServeStep, tokens: int, by_token: bool
) -> tuple[object, ...] | None:
    """The part of a step's signature that its layers share: table, lengths, starts and limits.

    Args:
        step: Its inputs; ``cache`` is a cache.
        tokens: Rows of q.
        by_token: Whether the program knows how many tokens there are. Steps of other programs have
            any number, if the most queries of a request are given, and few.
    """
    cache, starts, index = step.cache, step.starts, step.q_index
    table, lengths, most = cache.table, cache.lengths, step.most_queries
    if not (
        type(table) in _TENSORS and type(lengths) in _TENSORS and type(starts) in _TENSORS
        and (index is None or type(index) in _TENSORS) and type(most) in _NUMBERS
        and type(step.most_chunks) in _NUMBERS and 0 < tokens < _MANY_TOKENS
    ):  # fmt: skip
        return None
    is_open = most is not None and most <= MOST_FEW and not by_token and index is None
    return (
        None if is_open else tokens, table.shape, table.stride(), table.dtype, lengths.shape,
        lengths.stride(), lengths.dtype, starts.shape, starts.stride(), starts.dtype,
        starts.device, kind_of_capture(index), most, step.most_chunks, asks_to_verify(),
    )  # fmt: skip


def kind_of_capture(value: object) -> object:
    """Key of a capture or a scale in a signature: its type, and a tensor's layout and dtype."""
    if isinstance(value, torch.Tensor):
        return (type(value), value.shape, value.stride(), value.dtype, value.device, value.is_neg())
    return type(value)
