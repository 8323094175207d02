"""A compiled program, which users call, look at and keep."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from attndsl.analysis import Analysis
from attndsl.backends.base import NONE, Call, Signature
from attndsl.backends.memory_order import rows_contiguous
from attndsl.compiled import Traced, without_tensors
from attndsl.errors import ArgumentError, AttnDSLError, UnsupportedError
from attndsl.foundation.caches import BoundedCache, Reason
from attndsl.in_graphs import InGraphs
from attndsl.introspection import Introspection
from attndsl.other_lengths import OtherLengths, Prepared
from attndsl.refusals import refuse_call
from attndsl.repeated import Repeated
from attndsl.runtime.arguments import autocast, is_deterministic, joined, kinds_of, scale_of
from attndsl.runtime.autograd import attend
from attndsl.runtime.backward import check_has_seed, check_room
from attndsl.runtime.bind import CallOptions, bind
from attndsl.runtime.dispatch import GENERATED
from attndsl.runtime.distributed import is_dtensor
from attndsl.runtime.doubts import doubts_of_call, tell
from attndsl.runtime.higher import is_transformed
from attndsl.runtime.location import WHOLE, Location, plain_int
from attndsl.runtime.modes import modes_on, seen_by_modes
from attndsl.runtime.parts import terms_of
from attndsl.runtime.profiling import tell_name
from attndsl.runtime.programs import (
    lowered_program,
    point_into,
    pointing_into,
    spec_without_sink,
    written_as,
)
from attndsl.runtime.seed import draw_seed, seed_argument
from attndsl.runtime.sources import source_of
from attndsl.runtime.steps import speaks_of_tokens
from attndsl.runtime.tiles import given_tiles, tiles_key
from attndsl.runtime.tuning import Tuning, tune
from attndsl.runtime.values import check_values, dims_key, needs_of_values, params_of_dims
from attndsl.runtime.variants import dims_of_one, optional_names, sizes_of_operands
from attndsl.serving import Serving
from attndsl.views import Views

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.backends.base import Backend, Scalar
    from attndsl.compiled import Captures, Ready
    from attndsl.runtime.parts import Terms
    from attndsl.source import Source
    from attndsl.tilemap import TileMap

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAX_SIGNATURES = 4096


class Attention(InGraphs, Analysis, Views, Introspection, Serving):
    """A compiled program: call it with q, k and v. Immutable; made by :func:`compile`."""

    __slots__ = (
        "__weakref__", "_backend", "_by_token", "_checked", "_defaults", "_dims", "_in_graphs",
        "_lengths", "_lowered", "_names", "_of_ones", "_optional", "_prepared", "_readied",
        "_source", "_spec", "_steps", "_traced", "_variants", "_warns",
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
        self._variants: dict[Any, Attention] = {}
        self._traced = Traced()
        self._by_token = speaks_of_tokens(program)
        self._steps = BoundedCache("prepared steps", 4096, Reason.BACKENDS, Reason.KERNELS)
        self._of_ones: dict[Any, Attention] = {}  # By a call's signature, as `_prepared`.
        self._prepared: dict[Any, Prepared] = {}  # By a call's signature.
        self._lengths = OtherLengths()

        # The same of calls whose results have room, and of backwards.
        self._readied: dict[Any, Ready] = {}

    def _like(self, spec: str, defaults: dict[str, Any]) -> Attention:
        made = self.made_of._replace(spec=spec, defaults=defaults)
        variant = Attention(*made)
        variant._optional = ()
        return variant

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        return_lse: Literal[False] = False, q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0, q_index: torch.Tensor | None = None,
        kv_index: torch.Tensor | None = None, q_len: int | None = None, kv_len: int | None = None,
        heads: int | None = None, kv_heads: int | None = None, batch: int | None = None,
        h_offset: int = 0, b_offset: int = 0, kv_lengths: torch.Tensor | None = None,
        deterministic: bool | None = None, seed: int | torch.Tensor | None = None,
        tiles: TileMap | None = None, out_dtype: torch.dtype | None = None,
        captures: Captures | None = None, **named: torch.Tensor | Scalar,
    ) -> torch.Tensor: ...  # fmt: skip

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        return_lse: Literal[True], q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0, q_index: torch.Tensor | None = None,
        kv_index: torch.Tensor | None = None, q_len: int | None = None, kv_len: int | None = None,
        heads: int | None = None, kv_heads: int | None = None, batch: int | None = None,
        h_offset: int = 0, b_offset: int = 0, kv_lengths: torch.Tensor | None = None,
        deterministic: bool | None = None, seed: int | torch.Tensor | None = None,
        tiles: TileMap | None = None, out_dtype: torch.dtype | None = None,
        captures: Captures | None = None, **named: torch.Tensor | Scalar,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    @overload
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        return_lse: bool, q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0, q_index: torch.Tensor | None = None,
        kv_index: torch.Tensor | None = None, q_len: int | None = None, kv_len: int | None = None,
        heads: int | None = None, kv_heads: int | None = None, batch: int | None = None,
        h_offset: int = 0, b_offset: int = 0, kv_lengths: torch.Tensor | None = None,
        deterministic: bool | None = None, seed: int | torch.Tensor | None = None,
        tiles: TileMap | None = None, out_dtype: torch.dtype | None = None,
        captures: Captures | None = None, **named: torch.Tensor | Scalar,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
    ) -> Any:  # fmt: skip
        """Attention of ``q`` over ``k`` and ``v``.

        Args:
            q: (B, Hq, Lq, D), fp16, bf16, fp32, or fp64 where the backend has it.
            k: (B, Hkv, Lk, D); Hq is a multiple of Hkv. A last stride other than 1 is copied.
            v: (B, Hkv, Lk, Dv).
            scale: Factor of ``q . k`` in the raw score; 1 / sqrt(D) by default.
            return_lse: Whether to return the log-sum-exp of each row too.
            q_offset: Logical position of the first query: an int, a 0-d int tensor, or (B,) ints,
                one for each batch entry.
            kv_offset: The same of the first key.
            q_index: (Lq,) ints, the logical position of each query; replaces the offset.
            kv_index: (Lk,) ints, the same of each key.
            q_len: Number of queries in the whole call, where this call has a part of them. So are
                all sizes that follow: a program means in a part what it means in the whole.
            kv_len: The same of keys.
            heads: The same of query heads.
            kv_heads: The same of key heads.
            batch: The same of batch entries.
            h_offset: Number in the whole call of the first query head here.
            b_offset: The same of the first batch entry.
            kv_lengths: (B,) ints, the number of keys of each batch entry, which is ``kv_len`` in
                the program; k and v have room for more.
            deterministic: Whether gradients must be equal bit for bit from run to run; by default
                what ``torch.use_deterministic_algorithms`` says.
            seed: Seed of dropout, an int or a 0-d int64 tensor on q's device; drawn from torch's
                generator where the program has dropout and none is given.
            tiles: What :meth:`tiles` found for this program and these captures: where the tiles
                have no closed form, they are not looked for again. A map of another mask would
                leave out live pairs. In graphs of ``torch.compile`` it is not used.
            out_dtype: dtype of the output: ``torch.float32`` for q, k and v of a half type, so that
                nothing is lost where parts are put together; by default that of q.
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
            return self._called(given, q, k, v, **given) if found is None else found
        try:
            return self._called(given, q, k, v, **given)
        except (AttributeError, TypeError):
            refuse_call(self, (q, k, v), given)
            raise

    def _called(
        self,
        said: Mapping[str, object],
        /,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0,
        q_index: torch.Tensor | None = None,
        kv_index: torch.Tensor | None = None,
        q_len: int | None = None,
        kv_len: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        batch: int | None = None,
        h_offset: int = 0,
        b_offset: int = 0,
        kv_lengths: torch.Tensor | None = None,
        deterministic: bool | None = None,
        seed: int | torch.Tensor | None = None,
        tiles: TileMap | None = None,
        out_dtype: torch.dtype | None = None,
        captures: Captures | None = None,
        **named: torch.Tensor | Scalar,
    ) -> Any:
        """The call, with its options by name; ``said`` are those that somebody has written."""
        captures = named if captures is None else joined(captures, named)
        if self._defaults:
            captures = {**self._defaults, **captures}
        if self._optional:
            self, captures = self._present(captures)
        if deterministic is not True and deterministic is not False:
            deterministic = is_deterministic(deterministic)
        in_graph = torch.compiler.is_compiling() or type(q) not in _PLAIN
        location = (
            None
            if q_len is kv_len is heads is kv_heads is batch is None and kv_lengths is None
            and not h_offset and not b_offset and not self._lowered.program.by_token
            else Location(
                q_offset, kv_offset, q_index, kv_index, q_len, kv_len, heads, kv_heads, batch,
                h_offset, b_offset, kv_lengths,
            )
        )  # fmt: skip
        if in_graph and is_dtensor(q):
            return self._call_of_shards(
                (q, k, v), captures, tiles,
                location or Location(q_offset, kv_offset, q_index, kv_index),
                {"scale": scale, "return_lse": return_lse, "deterministic": deterministic,
                 "seed": seed, "out_dtype": out_dtype},
            )  # fmt: skip
        if in_graph or torch._C._is_any_autocast_enabled():
            q, k, v = autocast(q), autocast(k), autocast(v)
        drawn = None
        if seed is None:
            drawn = None if self._lowered.program.dropout is None else draw_seed(q.device)
            seed = 0 if drawn is None or in_graph else seed_argument(drawn)
        elif isinstance(seed, torch.Tensor):
            seed = drawn = seed.clone()  # The backward reads it again.
        if return_lse:
            self._check_has_lse()
        if in_graph:
            return self._followed(
                (q, k, v), captures, location or Location(q_offset, kv_offset, q_index, kv_index),
                CallOptions(scale, seed if drawn is None else drawn, deterministic, out_dtype),
                return_lse,
            )  # fmt: skip
        # Most calls have none of these, and each takes a part of a microsecond.
        kinds = (
            None
            if not captures and q_index is None and kv_index is None and tiles is None
            and type(q_offset) is int and type(kv_offset) is int and type(seed) is int
            and location is None
            else kinds_of(
                (q_offset, kv_offset, q_index, kv_index, seed), tiles_key(tiles),
                captures, None if location is None else location.numbers(self._lowered.program),
            )
        )  # fmt: skip
        key = (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device, deterministic, type(scale),
            kinds, dims_key(self._dims, captures) if self._dims else None, out_dtype,
        )  # fmt: skip
        if (prepared := self._prepared.get(key)) is None:
            if captures:
                self = self._for_ones(q, k, captures, location or WHOLE, key)
                prepared = self._prepared.get(key)
            elif kinds is None and (q_offset or not self._warns):
                prepared = self._lengths.of(key)
        lowered = self._lowered
        if prepared is None:
            location = location or Location(q_offset, kv_offset, q_index, kv_index)
            options = CallOptions(scale, seed, deterministic, out_dtype)
            made, call = self._prepare((q, k, v), captures, location, options, key, said)
            backend, template, as_given, needs, terms, marks = made
        else:
            backend, template, as_given, needs, terms, marks = prepared
            program, part = lowered.program, template.part
            call = Call(
                q if as_given else rows_contiguous(q),
                k if as_given else rows_contiguous(k),
                v if as_given else rows_contiguous(v),
                q.shape[3] ** -0.5 if scale is None else scale_of(scale),
                template.sizes,
                {d.name: captures[d.name] for d in program.tensors} if program.tensors else NONE,  # type: ignore[misc]
                {d.name: captures.get(d.name, d.default) for d in program.params}  # type: ignore[arg-type]
                if program.params else NONE,
                q_offset, kv_offset, q_index, kv_index, seed, deterministic, None,
                template.signature, template.wide, None,
                None if part is None else replace(part, kv_lengths=kv_lengths),
            )  # fmt: skip
        if needs or q_offset or kv_offset:
            call = check_values(lowered.program, call, needs, marks and _is_plain())
        if modes_on():
            backend = seen_by_modes(backend, self._request, call)
        if terms is not None:
            lowered, call = terms.lowered, terms.applied(call)
        if tiles is not None:
            call = call._replace(tiles=given_tiles(lowered, call, tiles))
        try:
            return attend(backend, lowered, call, return_lse, prepared is None)
        except AttnDSLError as error:  # A context manager would take a microsecond.
            point_into(error, self._source)
            raise

    def _prepare(
        self, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], captures: Captures,
        location: Location, options: CallOptions, key: tuple[Any, ...], said: Mapping[str, object],
    ) -> tuple[Prepared, Call]:  # fmt: skip
        """Prepare a signature's first call; return what later calls share, and the call."""
        lowered = self._lowered
        with pointing_into(self._source):
            call = bind(lowered.program, operands, captures, location, options)
            terms = None if call.part is None else terms_of(lowered, call)
            backend, *_ = self._dispatched(call)
        marks = _marks_entries(backend, terms, call)
        is_doubted = self._questioned(call, said)
        call = call._replace(signature=Signature(self.name))
        as_given = all(x is y for x, y in zip((call.q, call.k, call.v), operands, strict=True))
        numbers = location.q_offset, location.kv_offset, options.seed
        needs = needs_of_values(lowered.program, call, captures, numbers)
        found = Prepared(backend, without_tensors(call), as_given, needs, terms, marks)
        if len(self._prepared) >= _MAX_SIGNATURES:
            self._prepared.clear()
        self._prepared[key] = found
        if not is_doubted:  # Others are told of as well.
            self._lengths.keep(key, found)
        return found, call

    # What it takes, for whoever asks: :func:`inspect.signature`, ``help`` and captures' names.
    __call__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [x for name, x in inspect.signature(_called).parameters.items() if name != "said"],
        return_annotation=Any,
    )

    def _repeated(self, options: Mapping[str, Any]) -> Repeated:
        """Calls with these options, which are those of :meth:`put` and :meth:`backward`."""
        return Repeated(self, options)

    def put(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, room: torch.Tensor,
        **arguments: Any,
    ) -> torch.Tensor:  # fmt: skip
        """A call whose output is put into ``room``; nothing of it is differentiable.

        Args:
            q: As of the call, like k and v.
            k: (B, Hkv, Lk, D).
            v: (B, Hkv, Lk, Dv).
            room: (B, Hq, Lq, Dv), any strides, of the output's dtype: where the output is put, such
                as the rows of a part in that of the whole. Its memory is that of no other argument.
            **arguments: Captures and options of the call; not ``return_lse``, ``tiles``. Dropout
                wants a ``seed``.

        Returns:
            lse (B, Hq, Lq), of programs with weights of their own as backends leave it.

        Raises:
            AttnDSLError: As of the call.
        """
        own, arguments = self._of_call(q, k, arguments)
        if torch._C._is_any_autocast_enabled():
            q, k, v = autocast(q), autocast(k), autocast(v)
        check_has_seed(own._lowered.program, arguments.get("seed"))
        arguments["deterministic"] = is_deterministic(arguments.get("deterministic"))
        with pointing_into(self._source), torch.no_grad():
            made = own._ready(q, k, v, arguments)
            call = made.call
            kind = torch.float32 if call.wide else call.q.dtype
            check_room(room, (*call.q.shape[:3], call.v.shape[3]), kind, call.q.device)
            return own._into(made, room)

    def _questioned(self, call: Call, said: Mapping[str, object]) -> bool:
        """Warn of what a call hardly can mean; return True if there is any such doubt."""
        if not self._warns:
            return False
        doubts = list(doubts_of_call(self._lowered.program, call, said))
        tell(doubts)
        return bool(doubts)

    def _check_has_lse(self) -> None:
        if self._lowered.program.weights is not None:
            raise UnsupportedError(
                "return_lse asks for a softmax's log-sum-exp, and the program has other weights",
                hint="drop return_lse; the outputs of parts of the keys are added up",
            )

    def _for_ones(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        captures: Captures,
        location: Location,
        key: object,
    ) -> Attention:
        """The program of a call whose captures may have size 1 in place of a declared size.

        Args:
            q: As of the call.
            k: The same.
            captures: The same.
            location: Where the call lies in a larger one.
            key: The call's signature.
        """
        kept = self._of_ones.get(key)
        if kept is not None:
            return kept
        ones = dims_of_one(self._lowered.program, captures, sizes_of_operands(q, k), location)
        if not ones:
            return self
        found = self._variant((), ones)
        if len(self._of_ones) >= _MAX_SIGNATURES:
            self._of_ones.clear()
        self._of_ones[key] = found
        return found

    def _call_of_shards(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        captures: Captures,
        tiles: TileMap | None,
        location: Location,
        options: dict[str, Any],
    ) -> Any:
        """A call of DTensors.

        Raises:
            ArgumentError: It has ``tiles``. These are tiles of another call than that of a process.
        """
        if tiles is not None:
            raise ArgumentError(
                "tiles is given, and q is a DTensor",
                hint="drop tiles: each process finds those of its own part",
            )
        from attndsl.parallel.dtensor import attend_shards  # Imports torch.distributed.

        own, captures = self.variant(captures, sizes_of_operands(*operands[:2]), location)
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
        own, arguments = self._of_call(q, k, arguments)
        call = own._bound(q, k, v, arguments)
        with pointing_into(self._source):
            backend, lowered, call = own._dispatched(call)
        return tune(*backend.runner(lowered, call), progress)

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


def _marks_entries(backend: Backend, terms: Terms | None, call: Call) -> bool:
    """Return True if results tell of wrong numbers; False on CPUs, where checks need no wait."""
    if terms is None or not call.q.is_cuda:
        return False
    return backend.marks_entries(terms.lowered, terms.applied(call))


def _is_plain() -> bool:
    """Return True if a forward is all there will be: gradients and transforms mark no entries."""
    return not torch.is_grad_enabled() and not is_transformed()
