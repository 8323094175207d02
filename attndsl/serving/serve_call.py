"""Calls of an engine: queries of several requests packed into one tensor, keys in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import ReadsPages, Signature
from attndsl.call.argument_checks import is_wide
from attndsl.call.attention_base import Compiled
from attndsl.call.autograd import attend
from attndsl.call.bind import bind
from attndsl.call.dispatch import choose_backend
from attndsl.call.optional_captures import dims_of_one
from attndsl.call.options import CallOptions, Location
from attndsl.call.prepared import check_has_lse
from attndsl.call.resolve import dispatched
from attndsl.call.value_checks import check_values, refuse_wrapped
from attndsl.errors import ArgumentError, AttnDSLError, UnsupportedError
from attndsl.foundation.logs import tell_once
from attndsl.runtime.program_store import point_into, pointing_into

from .kv_append import FP8
from .paged import PagedCache, gathered, is_at_hand, looks_at_values
from .prefill import MOST_FEW, capacity_of, found_chunks, prepared_chunks
from .ragged_batch import Run, ServeStep, location_of, rows_of, runs_by_values, runs_of, store
from .serve_cache import (
    PreparedStep,
    are_positions_right,
    pages_of,
    prepared_step,
    signature_of,
    signature_of_requests,
)
from .serve_checks import check_batch, check_queries, check_step_values
from .serving_plan import ServingPlan, held_by, in_capture, versions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.backends.base import Call, Scalar
    from attndsl.call.attention_base import Captures

READS_PAGES = "decode"
"""The backend whose kernels do. It has to be asked for: for trees of drafts and chunks of prompts
there is no measured time yet (``docs/serving.md``)."""


class Serving(Compiled):
    """The part of :class:`~attndsl.Attention` that engines call."""

    __slots__ = ()
    _dims: tuple[str, ...]
    """Params that declared dims depend on."""
    _by_token: bool
    """True if the program reads ``token`` or ``tokens``."""

    def serve(
        self,
        q: torch.Tensor,
        cache: PagedCache,
        starts: torch.Tensor,
        *,
        q_index: torch.Tensor | None = None,
        most_queries: int | None = None,
        most_chunks: int | None = None,
        plan: ServingPlan | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        out_dtype: torch.dtype | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        h_offset: int = 0,
        captures: Captures | None = None,
        **named: torch.Tensor | Scalar,
    ) -> Any:
        """Attention of packed queries over a paged cache: decoding, chunks of prompts, or both.

        Request ``b`` has tokens ``starts[b]`` to ``starts[b + 1] - 1``. They are its last
        positions, up to ``lengths[b] - 1``, and the cache has their keys already. In the program
        ``b`` is the request, ``q`` and ``kv`` are positions in it, ``q_len`` and ``kv_len`` are
        ``lengths[b]`` (in the dims of tensors the cache's room), and ``token`` is the row of ``q``
        here. Nothing is differentiable.

        Args:
            q: (tokens, Hq, D), of the pages' dtype; any float dtype for pages of fp8.
            cache: Keys and values.
            starts: (batch + 1,), int32 or int64, on the device of the cache.
            q_index: (tokens,) ints: the logical position of each query, where these are not the
                request's last ones, as in a tree of drafts.
            most_queries: The most tokens of a request: a capacity, so that lengths are not read on
                the host to make the call. On other devices than CPUs it is by default the number of
                all tokens.
            most_chunks: The most requests with more than 64 tokens, another capacity. Of these each
                has room for a copy of its keys, and kernels of its own that end at once where it is
                not there. By default it is as many as the tokens allow.
            plan: What :meth:`plan` made of this step. It brings both capacities.
            scale: Factor of ``q . k`` in the raw score; 1 / sqrt(D) by default.
            return_lse: Whether to return the log-sum-exp of each row too.
            out_dtype: dtype of the output: q's by default, or ``torch.float32``.
            heads: Number of query heads in the whole, where this call has some of them.
            kv_heads: The same of key heads.
            h_offset: Number in the whole of the first query head here.
            captures: The program's tensors, and its run-time params.
            **named: The same, by keywords; those called like an argument go into ``captures``.

        Returns:
            out (tokens, Hq, Dv); with ``return_lse`` also lse (tokens, Hq), natural logarithm, fp32
            (fp64 for fp64). Tokens of no request, and rows with no live pair, have out 0 and lse
            -inf.

        Raises:
            ShapeError, DTypeError, DeviceError: What does not go together.
            ArgumentError: Missing or unusable arguments. On CPUs, and with ``ATTNDSL_VERIFY=1``,
                also values that :meth:`attndsl.PagedCache.validate` refuses. Without a check a
                request with such values has a result of no meaning, and others have theirs.
            UnsupportedError: Gradients are asked for; the program drops weights; in a graph of
                ``torch.compile``; a tensor is within a transform of ``torch.func``.
        """
        _refuse_graphs()
        if plan is not None:
            if not isinstance(plan, ServingPlan):
                raise ArgumentError(
                    f"plan is a {type(plan).__name__}", hint="pass what attn.plan(...) returned"
                )
            most_queries = plan.most_queries if most_queries is None else most_queries
            most_chunks = plan.most_chunks if most_chunks is None else most_chunks
        step = ServeStep(
            q, cache, starts, q_index, most_queries, most_chunks, heads, kv_heads, h_offset, scale,
            out_dtype, bool(return_lse),
        )  # fmt: skip
        given = {**self._defaults, **named} if captures is None else self._given(captures, named)
        found = self._serve(step, given, plan)
        return found if return_lse else found[0]

    def plan(
        self,
        cache: PagedCache,
        starts: torch.Tensor,
        tokens: int,
        *,
        q_index: torch.Tensor | None = None,
        most_queries: int | None = None,
        most_chunks: int | None = None,
    ) -> ServingPlan:
        """Make, once, the plan that the layers of one step share: their calls get it as ``plan``.

        The layers run this program. Their caches have pages of one size, and one table and lengths.
        The numbers are those of :meth:`serve`. Values of the step are looked at here and not by
        each layer, where calls look at values. Requests with more than 64 queries are found here,
        by one kernel. A layer's call that looks like one before skips most checks.

        Args:
            cache: Of any layer.
            starts: (batch + 1,) ints, on the device of the cache.
            tokens: Rows of the packed queries.
            q_index: As of :meth:`serve`.
            most_queries: As of :meth:`serve`.
            most_chunks: As of :meth:`serve`.

        Raises:
            ShapeError, DTypeError, DeviceError, ArgumentError: As of :meth:`serve`.
            BackendError: The program's backend cannot run on the device.
        """
        _refuse_graphs()
        no_queries: Any = None
        step = ServeStep(no_queries, cache, starts, q_index, most_queries, most_chunks)
        check_batch(step, tokens)
        device, held, most = cache.table.device, held_by(step), most_queries
        is_looked_at = self._checked or looks_at_values(cache.table)
        if is_looked_at:
            check_step_values(step, tokens)
        if self._checked:
            most = None
        elif most is None and not is_at_hand(cache.table):
            most = tokens
        runs = found = None
        if self._backend == READS_PAGES and not self._checked:
            choose_backend(self._backend, device, False, cache.k_pages.dtype)
            capacity = capacity_of(tokens, cache.batch, most, most_chunks)
            if capacity and most and cache.room:
                sizes = tokens, cache.room, most
                found = found_chunks(starts, cache.lengths, capacity, *sizes)
        if most is None:
            runs = tuple(runs_by_values(starts, cache.lengths))
        depends = is_looked_at or runs is not None or found is not None
        return ServingPlan(
            tokens, most_queries, most_chunks, self._lowered.digest, held,
            (cache.k_pages.shape[0], cache.page_size), runs, found,
            versions_of(held) if depends else None, in_capture(device),
            signature_of_requests(step, tokens, self._by_token),
        )  # fmt: skip

    def _serve(
        self, step: ServeStep, given: Captures, plan: ServingPlan | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of a step whose signature may be known."""
        key = requests = found = None
        if plan is not None:
            if not isinstance(step.q, torch.Tensor) or not isinstance(step.cache, PagedCache):
                check_queries(step)
            plan.check(self._lowered.digest, step)
            requests, found = plan.signature, plan.found
        if self._backend == READS_PAGES and not self._checked:
            key = signature_of(step, given, self._dims, self._by_token, requests)
        prepared: PreparedStep | None = None if key is None else self._prepared.cache.get(key)
        if prepared is None:
            return self._serve_anew(step, given, key, plan)
        _refuse_gradients(step, given)
        if plan is None and looks_at_values(step.q):
            check_step_values(step, step.q.shape[0])
        try:
            return prepared.run(step, given, found)
        except AttnDSLError as error:  # A context manager would take a microsecond.
            point_into(error, self._source)
            raise

    def _serve_anew(
        self,
        step: ServeStep,
        given: Captures,
        key: tuple[object, ...] | None,
        plan: ServingPlan | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of a step that is checked in full; ``key`` is its signature."""
        check_queries(step)
        q, cache, tokens = step.q, step.cache, step.q.shape[0]
        floats = _refuse_gradients(step, given)
        refuse_wrapped("serve", (*floats, step.starts, step.q_index, cache.table, cache.lengths))
        is_wide("out_dtype", step.out_dtype, q.dtype)
        if plan is None and (self._checked or looks_at_values(q)):
            check_step_values(step, tokens)
        most = step.most_queries
        if self._checked:
            # Rows that stand for no query may look up what is not there.
            most = None
        elif most is None and not is_at_hand(q):
            most = tokens
        own, given = self._of_step(step, given)
        own._check_program(step.return_lse)
        # Kernels read what is stored.
        q = q.detach().resolve_neg()
        given = {n: x.resolve_neg() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        step = step._replace(q=q, most_queries=most, out_dtype=step.out_dtype or q.dtype)
        with torch.no_grad(), pointing_into(self._source):
            prepared = own._prepared_step(step, given)
            if prepared is None:
                return own._attend_step(step, given, None if plan is None else plan.runs)
            if key is not None and are_positions_right(step):
                self._prepared.cache.put(key, prepared)
            return prepared.run(step, given, None if plan is None else plan.found)

    def _check_program(self, return_lse: bool) -> None:
        """Refuse programs that draw numbers, or that have no log-sum-exp where it is requested.

        Raises:
            UnsupportedError: Says what to write instead.
        """
        program = self._lowered.program
        if program.dropout is not None:
            with pointing_into(self._source):
                raise UnsupportedError(
                    "serve does not apply dropout",
                    program.dropout.span,
                    "remove the dropout, as in a model's evaluation mode",
                )
        if return_lse:
            check_has_lse(program)

    def _of_step(self, step: ServeStep, given: Captures) -> tuple[Serving, Captures]:
        """The program of a step, and its captures; see :meth:`Compiled.variant`."""
        own, given = self.variant(given)
        q, cache = step.q, step.cache
        sizes: dict[str, int | None] = {
            "batch": cache.batch, "heads": q.shape[1], "kv_heads": cache.k_pages.shape[2],
            "q_len": cache.room, "kv_len": cache.room, "head_dim": q.shape[2],
        }  # fmt: skip
        heads = Location(heads=step.heads, kv_heads=step.kv_heads, h_offset=step.h_offset)
        ones = dims_of_one(own._lowered.written, given, sizes, heads)
        return (own._variant((), ones) if ones else own), given

    def _prepared_step(self, step: ServeStep, given: Captures) -> PreparedStep | None:
        """Prepare steps like this for kernels that read pages; None if keys are gathered."""
        cache, most = step.cache, step.most_queries
        # None of 0 queries, and capacities that are not known.
        if self._backend != READS_PAGES or not (most and step.q.shape[0] * cache.batch):
            return None
        if self._lowered.program.lists:
            return None
        chunked = prepared_chunks(self._lowered, self.name, step, given)
        if chunked is not None:
            most = MOST_FEW
        # Not fewer rows where there are fewer tokens: tiles, and so the bits, follow from them.
        run = Run(slice(0, cache.batch), most, cache.room, False)
        # Such a call tells sizes. What is read are the pages.
        operands = step.stand_ins(cache.batch, most)
        call = self._call_of_run(operands, step, run, given, step.wide)
        backend, lowered, own, terms, _ = dispatched(self, call)
        if not isinstance(backend, ReadsPages):
            return None
        reason = backend.why_not_pages(lowered, own, pages_of(step, ()))
        if reason is not None:
            tell_once(f"{self.name}: keys are gathered: {reason}")
            return None
        call = call._replace(signature=Signature(self.name))
        assert terms is not None
        return prepared_step(backend, self._lowered.written, call, given, chunked, terms)

    def _attend_step(
        self, step: ServeStep, given: Captures, runs: Sequence[Run] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of all tokens by calls of gathered keys."""
        q, cache = step.q, step.cache
        dtype = cache.k_pages.dtype
        if dtype is FP8:
            dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        exact = torch.float64 if dtype is torch.float64 else torch.float32
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        tokens, heads, _ = q.shape
        q = q.to(dtype)
        out = q.new_zeros((tokens, heads, cache.v_pages.shape[3]), dtype=exact)
        lse = q.new_full((tokens, heads), -torch.inf, dtype=exact)
        for run in runs_of(step, runs):
            queries = q[rows_of(step, run)].transpose(1, 2)
            operands = [queries, *gathered(cache, run.requests, run.length, dtype)]
            call = self._call_of_run(operands, step, run, given, wide)
            found: Any = attend(*dispatched(self, call)[:3], True)
            store(step, run, found[0], out)
            store(step, run, found[1], lse)
        return out.to(step.out_dtype), lse

    def _call_of_run(
        self, operands: Sequence[torch.Tensor], step: ServeStep, run: Run, given: Captures,
        wide: torch.dtype | None,
    ) -> Call:  # fmt: skip
        """The checked call of some requests."""
        program, (q, k, v) = self._lowered.written, operands
        location, options = location_of(step, run), CallOptions(step.scale, out_dtype=wide)
        return check_values(program, bind(program, (q, k, v), given, location, options))


def _refuse_graphs() -> None:
    if torch.compiler.is_dynamo_compiling():
        raise UnsupportedError(
            "serve cannot be in a graph of torch.compile",
            hint="call it outside of the graph: torch.compiler.disable",
        )


def _refuse_gradients(step: ServeStep, given: Captures) -> tuple[object, ...]:
    """Refuse steps that need more than a forward; return what could ask for that.

    Raises:
        UnsupportedError: Says what to write instead.
    """
    cache = step.cache
    floats = step.q, cache.k_pages, cache.v_pages, cache.k_scale, cache.v_scale, *given.values()
    if torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in floats
    ):
        raise UnsupportedError(
            "an input requires grad, and serve is forward only",
            hint="call it within torch.no_grad(), or train with a dense call",
        )
    return floats
