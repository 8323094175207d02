"""``Attention``: a compiled program with its calls, inspections and pickling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from attndsl.backends.engine.families import GENERATED
from attndsl.call.argument_checks import is_deterministic
from attndsl.call.argument_type_errors import refuse_call
from attndsl.call.attention_base import MAX_VARIANTS, TracedPrograms
from attndsl.call.call_slice import plain_int
from attndsl.call.distributed_checks import is_dtensor
from attndsl.call.dynamo_call import InGraphs
from attndsl.call.optional_captures import optional_names, sizes_of_operands
from attndsl.call.options import call_signature, options_in
from attndsl.call.prepared import PreparedCalls, check_has_lse
from attndsl.call.profiling import tell_name
from attndsl.call.resolve import bound, dispatched
from attndsl.call.signature import PLAIN_TENSORS, facts_of
from attndsl.call.value_checks import params_of_dims
from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.foundation.caches import BoundedCache
from attndsl.inspection.analysis import Analysis
from attndsl.inspection.call_inputs import Introspection
from attndsl.inspection.dense_views import DenseViews
from attndsl.runtime.kernel_source import source_of
from attndsl.runtime.program_store import (
    lowered_program,
    pointing_into,
    spec_without_sink,
    written_as,
)
from attndsl.runtime.tuning import Tuning, tune
from attndsl.serving.serve_cache import speaks_of_tokens
from attndsl.serving.serve_call import Serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.backends.base import Scalar
    from attndsl.call.attention_base import Captures
    from attndsl.inspection.tilemap import TileMap
    from attndsl.source import Source


class Attention(InGraphs, Analysis, DenseViews, Introspection, Serving):
    """A compiled program: call it with q, k and v. Immutable; made by :func:`compile`."""

    __slots__ = (
        "__weakref__", "_backend", "_by_token", "_checked", "_defaults", "_dims",
        "_in_graphs", "_lowered", "_names", "_optional", "_prepared", "_source", "_spec",
        "_traced", "_variants", "_warns",
    )  # fmt: skip

    def __init__(
        self, spec: str, source: Source, backend: str, checked: bool, defaults: dict[str, Any],
        warns: bool = False,
    ) -> None:  # fmt: skip
        self._spec = spec
        self._source = source
        self._backend = backend
        self._checked = checked
        self._defaults = defaults
        self._warns = warns
        self._in_graphs = "" if defaults else f"{spec} {backend} {checked}"
        self._lowered = lowered_program(spec)
        if source.label:
            tell_name(spec, source.label)
        self._dims = params_of_dims(self._lowered.program)
        program = self._lowered.program
        self._optional = optional_names(program)
        self._names = frozenset(x.name for x in program.captures())
        self._variants = BoundedCache("programs of calls by absent captures", MAX_VARIANTS)
        self._traced = TracedPrograms()
        self._by_token = speaks_of_tokens(program)
        self._prepared = PreparedCalls(facts_of(program, backend, checked, warns))

    def _like(self, spec: str, defaults: dict[str, Any]) -> Attention:
        made = self.made_of._replace(spec=spec, defaults=defaults)
        variant = Attention(*made)
        variant._optional = ()
        return variant

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        seed: int | torch.Tensor | None = None, deterministic: bool | None = None,
        out_dtype: torch.dtype | None = None, return_lse: Literal[False] = False,
        tiles: TileMap | None = None, out: torch.Tensor | None = None,
        q_offset: int | torch.Tensor = 0, kv_offset: int | torch.Tensor = 0,
        q_index: torch.Tensor | None = None, kv_index: torch.Tensor | None = None,
        q_len: int | None = None, kv_len: int | None = None, heads: int | None = None,
        kv_heads: int | None = None, batch: int | None = None, h_offset: int = 0, b_offset: int = 0,
        kv_lengths: torch.Tensor | None = None, captures: Captures | None = None,
        **named: torch.Tensor | Scalar,
    ) -> torch.Tensor: ...  # fmt: skip

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        seed: int | torch.Tensor | None = None, deterministic: bool | None = None,
        out_dtype: torch.dtype | None = None, return_lse: Literal[True],
        tiles: TileMap | None = None, out: torch.Tensor | None = None,
        q_offset: int | torch.Tensor = 0, kv_offset: int | torch.Tensor = 0,
        q_index: torch.Tensor | None = None, kv_index: torch.Tensor | None = None,
        q_len: int | None = None, kv_len: int | None = None, heads: int | None = None,
        kv_heads: int | None = None, batch: int | None = None, h_offset: int = 0, b_offset: int = 0,
        kv_lengths: torch.Tensor | None = None, captures: Captures | None = None,
        **named: torch.Tensor | Scalar,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        seed: int | torch.Tensor | None = None, deterministic: bool | None = None,
        out_dtype: torch.dtype | None = None, return_lse: bool, tiles: TileMap | None = None,
        out: torch.Tensor | None = None, q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0, q_index: torch.Tensor | None = None,
        kv_index: torch.Tensor | None = None, q_len: int | None = None, kv_len: int | None = None,
        heads: int | None = None, kv_heads: int | None = None, batch: int | None = None,
        h_offset: int = 0, b_offset: int = 0, kv_lengths: torch.Tensor | None = None,
        captures: Captures | None = None, **named: torch.Tensor | Scalar,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        """Attention of ``q`` over ``k`` and ``v``.

        Args:
            q: (B, Hq, Lq, D), fp16, bf16, fp32, or fp64 where the backend has it.
            k: (B, Hkv, Lk, D); Hq is a multiple of Hkv. A last stride other than 1 is copied.
            v: (B, Hkv, Lk, Dv).
            scale: Factor of ``q . k`` in the raw score; 1 / sqrt(D) by default.
            seed: Seed of dropout, an int or a 0-d int64 tensor on q's device; drawn from torch's
                generator where the program has dropout and none is given.
            deterministic: True for gradients that are equal bit for bit from run to run; by default
                what ``torch.use_deterministic_algorithms`` says.
            out_dtype: dtype of the output: ``torch.float32`` for q, k and v of a half type, so that
                nothing is lost where parts are put together; by default that of q.
            return_lse: True to return the log-sum-exp of each row too.
            tiles: Tiles that :meth:`tiles` found for this program and these captures: where the
                tiles have no closed form, they are not looked for again. A map of another mask
                would leave out live pairs. In graphs of ``torch.compile`` it is not used.
            out: (B, Hq, Lq, Dv), any strides, of the output's dtype: the tensor that the output is
                written to and that is returned, such as the rows of a part in those of the whole.
                Its memory is that of no other argument, and nothing is differentiable.
            q_offset: Logical position of the first query: an int, a 0-d int tensor, or (B,) ints,
                one for each batch entry.
            kv_offset: Logical position of the first key, likewise.
            q_index: (Lq,) ints, the logical position of each query; replaces the offset.
            kv_index: (Lk,) ints, the logical position of each key, likewise.
            q_len: Number of queries in the whole call, where this call has a part of them. So are
                all sizes that follow: a program means in a part what it means in the whole.
            kv_len: Number of keys in the whole call.
            heads: Number of query heads in the whole call.
            kv_heads: Number of key heads in the whole call.
            batch: Number of batch entries in the whole call.
            h_offset: Number in the whole call of the first query head here.
            b_offset: Number in the whole call of the first batch entry here.
            kv_lengths: (B,) ints, the number of keys of each batch entry, which is ``kv_len`` in
                the program; k and v have room for more.
            captures: The program's tensors, and its run-time params as numbers or 0-d tensors.
            **given: The options above, and captures by keywords; those called like an option go
                into ``captures``.

        Returns:
            out (B, Hq, Lq, Dv) in q's dtype, or in autocast's, which q, k and v take, if there is
            no ``out_dtype``; with ``return_lse`` also lse (B, Hq, Lq), natural logarithm, fp32
            (fp64 for fp64), differentiable. A row with no live pair has out 0 and lse -inf.

        Raises:
            ShapeError: Sizes that do not go together.
            DTypeError: dtypes that do not, or that cannot be used.
            DeviceError: Tensors on several devices.
            ArgumentError: Missing, unknown or unusable arguments.
            UnsupportedError: The backend cannot run the program.
            BackendError: The backend does not work here.
        """
        # Dynamo guards each default of a function that it follows, so that this one has none.
        if is_dynamo_compiling():
            found = self._at_once((q, k, v), given) if self._in_graphs else None
            return self._not_prepared((q, k, v), given) if found is None else found
        try:
            for launch in self._prepared.recent_launches.each:
                found = launch((q, k, v), given, given)
                if found is not None:
                    return found
            if torch.compiler.is_compiling() or type(q) not in PLAIN_TENSORS:
                return self._not_prepared((q, k, v), given)
            prepared, arguments, first = self._prepared.of(self, q, k, v, given)
            return prepared.run(arguments, first, self._prepared.recent_launches)
        except (AttributeError, TypeError):
            refuse_call(self, (q, k, v), given)
            raise

    # The options by name, for :func:`inspect.signature`, ``help`` and captures' names.
    __call__.__signature__ = call_signature()  # type: ignore[attr-defined]

    def _not_prepared(
        self, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], given: dict[str, Any]
    ) -> Any:
        """A call of DTensors, or of tensors that a tracer follows.

        Raises:
            ArgumentError: DTensors with ``tiles``, which are those of another call than that of a
                process, or with ``out``.
        """
        if not is_dtensor(operands[0]):
            return self._followed(operands, given)
        how, location = options_in(given)
        if how.tiles is not None:
            raise ArgumentError(
                "tiles is given, and q is a DTensor",
                hint="drop tiles: each process finds those of its own part",
            )
        if how.out is not None:
            raise ArgumentError(
                "out is given, and q is a DTensor", hint="drop out: copy the result there"
            )
        from attndsl.parallel.dtensor import attend_shards  # Imports torch.distributed.

        if how.return_lse:
            check_has_lse(self._lowered.program)
        own, captures = self.variant(
            self._captures_of(given), sizes_of_operands(*operands[:2]), location
        )
        options = {
            "scale": how.scale, "return_lse": how.return_lse, "seed": how.seed,
            "deterministic": is_deterministic(how.deterministic), "out_dtype": how.out_dtype,
        }  # fmt: skip
        return attend_shards(own, own._lowered.program, operands, captures, location, options)

    def source(
        self,
        direction: str = "forward",
        *,
        head_dim: int = 64,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        backend: str | None = None,
        captures: Captures | None = None,
        **named: torch.Tensor | Scalar,
    ) -> str:
        """Text of the generated kernels for calls of this kind; needs no GPU.

        Args:
            direction: ``forward``, ``backward`` or ``tangent``: along q, k, v and, in portable
                kernels, captures that require gradients; Hopper's makes the results too.
            head_dim: Head dim of q and k.
            value_dim: Head dim of v; ``head_dim`` by default.
            dtype: dtype of q, k and v.
            backend: ``triton``, ``hopper``, ``short`` or ``decode``; by default the one of these
                that the program was compiled for by name, or ``triton``.
            captures: Values of the program's tensors and params, where the defaults (fp32, int32
                and bool tensors, rows of ``dot`` in ``dtype``; numbers) differ from the values that
                calls will pass.
            **named: The same, by keywords.

        Raises:
            ArgumentError, ShapeError, DTypeError: No such direction or kernels; unfit captures.
            UnsupportedError: The Hopper kernels do not run such calls.
            BackendError: This Triton cannot load them.
        """
        if backend is None:
            backend = self._backend if self._backend in GENERATED else "triton"
        own, given = self.variant(self._given(captures, named))
        return source_of(
            own.lowered, backend, direction, plain_int(head_dim), plain_int(value_dim), dtype,
            given, written_as(self._spec),
        )  # fmt: skip

    def warmup(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> None:
        """Generate and compile the kernels that a call with these arguments needs, by making it.

        With an input that requires grad, the backward's kernels too. Arguments are those of a call.
        """
        out = self(q, k, v, **arguments)
        out = out[0] if isinstance(out, tuple) else out
        if out.requires_grad:
            more = arguments.pop("captures", None) or {}
            given = (q, k, v, *self._defaults.values(), *arguments.values(), *more.values())
            inputs = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
            torch.autograd.grad(out, inputs, torch.zeros_like(out), allow_unused=True)

    def tune(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        progress: Callable[[str], None] | None = None,
        **arguments: Any,
    ) -> Tuning:
        """Measure the tile sizes that this call's kernels may have, and keep the fastest.

        Takes seconds to minutes, since each has to be compiled. What is found serves all calls of
        the program with these dtypes and head dims, in other processes too (it is in the cache).

        Args:
            q: As of a call. The backward is tuned too if an input requires grad.
            k: The same.
            v: The same.
            progress: Called with a line for each measurement, as soon as there is one.
            **arguments: The same, except ``return_lse`` and ``tiles``.

        Raises:
            UnsupportedError: The backend has one way to run the call.
        """
        with pointing_into(self._source):
            program, _, call = bound(self, (q, k, v), arguments, self._captures_of(arguments))
            backend, lowered, call, *_ = dispatched(program, call)
        return tune(backend, lowered, call, progress)

    def without_sink(self) -> Attention:
        """The program without its sink, itself where it has none; it accepts the same captures.

        Where keys are split, each part would count the sink. Parts come from this program then, and
        :func:`attndsl.merge` counts the sink once.

        Raises:
            UnsupportedError: In a graph of ``torch.compile``.
        """
        if torch.compiler.is_dynamo_compiling():
            raise UnsupportedError(
                "graphs of torch.compile compile no programs",
                hint="call without_sink() outside of the graph, once",
            )
        if self._lowered.program.sink is None:
            return self
        spec = spec_without_sink(self._spec)
        return Attention(*self.made_of._replace(spec=spec))


def on_reference(attention: Attention) -> Attention:
    """The same program on the reference backend, to which others are held."""
    kept = attention.made_of._replace(backend="reference", checked=False, warns=False)
    return Attention(*kept)
