"""State that steps of one signature share, so that a repeated step is checked and bound once.

A signature has all that the outcome depends on beside values that kernels read: shapes, strides,
dtypes, kinds of captures and scales, capacities, and what numbers of the call stand for themselves.

Non-goals: what a step is (:mod:`.packed`), and values that are wrong (:mod:`.paged`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from attndsl.backends.base import NONE, Call, ReadsPages
from attndsl.backends.memory_order import rows_contiguous
from attndsl.backends.requests import ChunkResults, Pages
from attndsl.ir import TOKENS, size, toposort
from attndsl.passes.widths import POSITION_LIMIT
from attndsl.settings import asks_to_verify

from .arguments import scale_of
from .chunks import MOST_FEW, attend_chunks, found_chunks
from .higher import is_transformed
from .paged import PagedCache
from .parts import made_captures, terms_of, with_narrow_positions
from .values import Values, check_params, dims_key, needs_of_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Scalar
    from attndsl.ir import Program
    from attndsl.pipeline import Lowered

    from .chunks import Chunked
    from .parts import Terms

    Captures = Mapping[str, torch.Tensor | Scalar]

TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose signatures are looked up."""
NUMBERS = (int, type(None))
"""The same of numbers."""
_MANY_TOKENS = POSITION_LIMIT // 4
"""Numbers of tokens from which on positions of each step are looked at."""


class Request(NamedTuple):
    """The arguments of a step."""

    q: torch.Tensor
    cache: PagedCache
    starts: torch.Tensor
    q_index: torch.Tensor | None
    numbers: tuple[object, ...]
    """``most_queries``, ``most_chunks``, ``heads``, ``kv_heads`` and ``h_offset``."""
    scale: object
    kinds: tuple[object, ...]
    """``out_dtype``, and whether there is a log-sum-exp."""


class Prepared(NamedTuple):
    """Backend, terms and template call that steps of one signature share."""

    backend: ReadsPages
    program: Program
    """Whose captures a step has."""
    terms: Terms
    call: Call
    """One of them, checked, without its captures: nobody's tensors are kept alive."""
    needs: Values
    made: tuple[tuple[str, str], ...]
    """As of :class:`~attndsl.backends.requests.Pages`."""
    chunked: Chunked | None = None
    """What runs the requests with many queries, if these are not run as all others."""

    def run(
        self, request: Request, captures: Captures, found: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of a step of the signature.

        Args:
            request: The step.
            captures: Its captures.
            found: Its requests with many queries, if a plan has found them.

        Raises:
            ArgumentError: A number among the captures that cannot be.
        """
        call = self.call_of(request, captures)
        pages = pages_of(request, self.made)
        chunks = None if self.chunked is None else chunks_of(self.chunked, call, pages, found)
        return self.backend.serve(self.terms.lowered, self.terms.applied(call), pages, chunks)

    def call_of(self, request: Request, captures: Captures) -> Call:
        """The call of a step, before it is put into its terms.

        Raises:
            ArgumentError: A number among the captures that cannot be.
        """
        program, scale, call = self.program, request.scale, self.call
        part = call.part
        if request.q_index is not None:
            assert part is not None
            assert part.packed is not None
            part = replace(part, packed=part.packed._replace(positions=request.q_index))
        call = call._replace(
            scale=request.q.shape[2] ** -0.5 if scale is None else scale_of(scale),
            tensors={d.name: captures[d.name] for d in program.tensors},  # type: ignore[misc]
            params={d.name: captures.get(d.name, d.default) for d in program.params},  # type: ignore[arg-type]
            part=part,
        )  # fmt: skip
        return check_params(program, call, self.needs) if program.params else call


def chunks_of(
    chunked: Chunked, call: Call, pages: Pages, found: torch.Tensor | None
) -> ChunkResults | None:
    """Results of a step's requests with many queries; None where there is no room for one."""
    slots = chunked.slots
    if not slots.capacity:
        return None
    if found is None:
        room = pages.table.shape[1] * pages.k.shape[1]
        numbers = (pages.q.shape[0], room, slots.most)
        found = found_chunks(pages.starts, pages.lengths, slots.capacity, numbers)
    out, lse = attend_chunks(chunked, found, call, pages)
    return ChunkResults(out, lse, slots.most)


def pages_of(request: Request, made: tuple[tuple[str, str], ...]) -> Pages:
    """Tensors of a step that kernels read: q, starts, and the cache's pages, table and lengths."""
    q, cache = request.q, request.cache
    q = q.detach() if q.requires_grad else q
    return Pages(
        rows_contiguous(q), request.starts, cache.k_pages, cache.v_pages, cache.table,
        cache.lengths, cache.k_scale, cache.v_scale, made,
    )  # fmt: skip


def prepared_step(
    backend: ReadsPages, lowered: Lowered, call: Call, captures: Captures
) -> Prepared:
    """Prepare steps like a checked ``call``, which has the ``captures`` as they were given."""
    terms = terms_of(lowered, call)
    program = lowered.written
    needs = needs_of_values(program, call, captures, ())
    call = with_narrow_positions(call)._replace(tensors=NONE, params=NONE)
    return Prepared(backend, program, terms, call, needs, made_captures(terms))


def with_signs(captures: Captures) -> Captures:
    """``captures`` without tensors whose signs torch has yet to change."""
    if not any(isinstance(x, torch.Tensor) and x.is_neg() for x in captures.values()):
        return captures
    return {
        name: x.resolve_neg() if isinstance(x, torch.Tensor) else x for name, x in captures.items()
    }


def are_positions_right(request: Request, most: int) -> bool:
    """Return True if no values of lengths and starts make positions that are too large."""
    return max(_MANY_TOKENS, request.cache.room) + most < POSITION_LIMIT


def speaks_of_tokens(program: Program) -> bool:
    """Return True if ``token`` or ``tokens`` stand in a program, or in a declared dim."""
    dims = [dim for decl in program.tensors for dim in decl.dims]
    return program.by_token or size(TOKENS) in toposort(*program.roots(), *dims)


def key_of_step(
    request: Request, captures: Captures, names: tuple[str, ...], by_token: bool
) -> tuple[object, ...] | None:
    """The signature of a step; None where it has to be looked at anew.

    Args:
        request: Its arguments, not checked.
        captures: Its captures.
        names: Those of params whose values declared dims depend on.
        by_token: Whether the program knows how many tokens there are. Steps of other programs have
            any number, if the most queries of a request are given.
    """
    q, cache, starts = request.q, request.cache, request.starts
    if type(q) not in TENSORS or type(cache) is not PagedCache or type(starts) not in TENSORS:
        return None
    k, v, table, lengths = cache.k_pages, cache.v_pages, cache.table, cache.lengths
    index, kinds = request.q_index, request.kinds
    if not (
        type(k) in TENSORS and type(v) in TENSORS and type(table) in TENSORS
        and type(lengths) in TENSORS and (index is None or type(index) in TENSORS)
        and all(type(number) in NUMBERS for number in request.numbers)
        and (kinds[0] is None or type(kinds[0]) is torch.dtype)
    ):  # fmt: skip
        return None
    if not runs_as_ever(q, k, v) or with_signs(captures) is not captures:
        return None
    if q.dim() != 3 or not 0 < q.shape[0] < _MANY_TOKENS:
        return None
    if any(type(captures.get(name)) not in NUMBERS for name in names):
        return None
    return (
        q.shape[1:] if has_any_tokens(request) and not by_token and index is None else q.shape,
        q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape,
        v.stride(), table.shape, table.stride(), table.dtype, lengths.shape, lengths.stride(),
        lengths.dtype, starts.shape, starts.stride(), starts.dtype, starts.device,
        kind_of_capture(cache.k_scale), kind_of_capture(cache.v_scale), kind_of_capture(index),
        request.numbers, kinds, type(request.scale), asks_to_verify(),
        *[(name, kind_of_capture(value)) for name, value in captures.items()],
        *dims_key(names, captures),
    )  # fmt: skip


def runs_as_ever(*tensors: torch.Tensor) -> bool:
    """Return True if no step is traced or transformed, and no tensor has torch's negative bit."""
    if torch._C._get_tracing_state() is not None or is_transformed():
        return False
    return not any(x.is_neg() for x in tensors)


def has_any_tokens(request: Request) -> bool:
    """Return True if steps of a signature may have any number of tokens: no dim has it."""
    most = request.numbers[0]
    return isinstance(most, int) and most <= MOST_FEW


def kind_of_capture(value: object) -> object:
    """Key of a capture or a scale in a signature: its type, and a tensor's layout and dtype."""
    if isinstance(value, torch.Tensor):
        return (
            type(value), value.shape, value.stride(), value.dtype, value.device, value.is_neg()
        )  # fmt: skip
    return type(value)
