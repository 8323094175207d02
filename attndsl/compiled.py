"""The parts of a compiled program beside its calls: comparison, pickling, backward, sink."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch.autograd import profiler

from attndsl.backends.base import Signature
from attndsl.backends.dense.interpret import evaluate, scope_of
from attndsl.backends.dense.reference import ReferenceBackend
from attndsl.errors import UnsupportedError
from attndsl.runtime.arguments import (
    autocast,
    check_known,
    is_deterministic,
    joined,
    kinds_of,
    scale_of,
)
from attndsl.runtime.autograd import attend
from attndsl.runtime.backward import (
    OPERANDS,
    Asked,
    Gradients,
    Results,
    check_has_seed,
    check_results,
    check_room,
    gradients_of_results,
    in_room,
    wants_for,
)
from attndsl.runtime.bind import CallOptions, bind
from attndsl.runtime.dispatch import backend_of, get_backend, tell_choice
from attndsl.runtime.location import LOCATION, WHOLE, Location
from attndsl.runtime.modes import ThroughOperators, seen_by_modes
from attndsl.runtime.operator import Request
from attndsl.runtime.parts import gradients_of_wholes, localised, terms_of
from attndsl.runtime.probability import check_probability
from attndsl.runtime.profiling import BACKWARD, event_named
from attndsl.runtime.programs import bound_numbers, pointing_into, spec_of_variant
from attndsl.runtime.tiles import given_tiles, verify_if_asked
from attndsl.runtime.values import Values, check_values, dims_key, has_data, params_of_dims
from attndsl.runtime.variants import absent_names, dims_of_one, sizes_of_operands
from attndsl.source import NAME_LENGTH, shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from attndsl.backends.base import Backend, Call, Scalar
    from attndsl.ir import Program
    from attndsl.passes.broadcast import Dims
    from attndsl.pipeline import Lowered
    from attndsl.runtime.parts import Terms
    from attndsl.source import Source
    from attndsl.tilemap import TileMap

    Captures = Mapping[str, torch.Tensor | Scalar]


class Traced:
    """Programs that graphs of torch.compile call, as attributes.

    A graph depends on the attributes that it uses, and on all of a dict.
    """


class Made(NamedTuple):
    """Complete state of a compiled program: it is made of these fields alone."""

    spec: str
    source: Source
    """The text, where errors point."""
    backend: str
    """As asked for."""
    checked: bool
    defaults: dict[str, Any]
    """Tensors that captures have unless a call gives others."""
    warns: bool = False
    """Whether calls that are hardly meant so are told: somebody wrote the program."""


_OPTIONS = tuple(each.name for each in fields(CallOptions))
_MAX_VARIANTS = 1024
_PLAIN = (torch.Tensor, torch.nn.Parameter, bool, int, float, torch.dtype, type(None))
"""Types of operands, captures and dtypes that need no change."""
_EXPORT = "use torch.export, whose programs serve all lengths: see docs/deployment.md"


class CheckedCall(NamedTuple):
    """A checked call, and what runs it."""

    call: Call
    backend: Backend
    lowered: Lowered
    """The program that the backend gets."""
    part: Call
    """The call that it gets."""


class Ready(NamedTuple):
    """Backend, template call and terms that calls of one signature share."""

    backend: Backend
    template: Call
    """Without tensors."""
    terms: Terms | None
    """How a part is put into its program's terms."""

    def call(
        self, program: Program, operands: Sequence[torch.Tensor], arguments: Mapping[str, Any]
    ) -> Call:
        """The call of this signature with these operands and arguments."""
        q, k, v = operands
        captures, scale = arguments["captures"], arguments.get("scale")
        seed = arguments.get("seed")
        return self.template._replace(
            q=q, k=k, v=v,
            scale=self.template.scale if scale is None else scale_of(scale),
            seed=self.template.seed if seed is None else seed,
            tensors={d.name: captures[d.name] for d in program.tensors},
            params={d.name: captures.get(d.name, d.default) for d in program.params},
            q_offset=arguments.get("q_offset", 0), kv_offset=arguments.get("kv_offset", 0),
        )  # fmt: skip

    def made(
        self, lowered: Lowered, operands: Sequence[torch.Tensor], arguments: Mapping[str, Any]
    ) -> CheckedCall:
        """The call of this signature with these operands and arguments, and what runs it."""
        call = self.call(lowered.program, operands, arguments)
        call = check_values(lowered.program, call, Values.FOREIGN)
        if self.terms is None:
            return CheckedCall(call, self.backend, lowered, call)
        return CheckedCall(call, self.backend, self.terms.lowered, self.terms.applied(call))


def without_tensors(call: Call) -> Call:
    """Copy ``call`` without its tensors, for calls of its signature to share."""
    # ``q.new_empty`` would be of a transform of torch.func.
    empty = torch.empty(0, dtype=call.q.dtype, device=call.q.device)
    return call._replace(q=empty, k=empty, v=empty, tensors={}, params={})


class Compiled:
    """Base class of :class:`attndsl.Attention`: a compiled program without its calls."""

    __slots__ = ()
    _spec: str
    _source: Source
    _backend: str
    _checked: bool
    _defaults: dict[str, Any]
    _warns: bool
    """As of :class:`Made`."""
    _in_graphs: str
    """All of these that graphs depend on; empty where calls have tensors by default."""
    _lowered: Lowered
    _optional: tuple[str, ...]
    """Captures that calls may leave out."""
    _variants: dict[tuple[tuple[str, ...], Dims], Any]
    """The programs of calls that do so, or whose tensors have size 1 in place of another."""
    _names: frozenset[str]
    """Of all captures."""
    _readied: dict[Any, Ready]
    """By signature."""
    _traced: Traced

    @abstractmethod
    def _like(self, spec: str, defaults: dict[str, Any]) -> Self:
        """This program with another spec and other captures, in which nothing is optional."""

    @property
    def text(self) -> str:
        """The program's text, with that of its imports."""
        return self._source.text

    @property
    def name(self) -> str:
        """The name that profiles and logs show.

        That given to ``compile``, if it is not that of a file, or the key in a configuration;
        otherwise the beginning of the text.
        """
        return self._source.label or shorten(self.text, NAME_LENGTH)

    @property
    def backend(self) -> str:
        """The backend asked for."""
        return self._backend

    @property
    def lowered(self) -> Lowered:
        """The program as backends get it, with all its captures."""
        return self._lowered

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script``, which calls this method of an object that it is given.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "torch.jit.script compiles Python's text, and a program is none", hint=_EXPORT
        )

    @property
    def made_of(self) -> Made:
        """The parts that pickles and :func:`attndsl.join` take."""
        return Made(
            self._spec, self._source, self._backend, self._checked, self._defaults, self._warns
        )

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None = None,
        *,
        wants: Collection[str] = OPERANDS,
        wants_captures: Collection[str] | None = None,
        grad_dtype: torch.dtype | None = None,
        tiles: TileMap | None = None,
        room: torch.Tensor | None = None,
        **arguments: Any,
    ) -> Gradients:
        """The gradients of a call from given results, without its forward.

        Where k and v are some of the keys, and ``out``, ``lse`` and their gradients are those of
        all keys (see :func:`attndsl.merge`), these are what the given keys contribute to the
        gradients of all: summed over parts of the keys, they are the whole's. What a sink mentions
        has the whole gradient in each part: take one part from this program, and the others from
        :meth:`attndsl.Attention.without_sink`. The results are not differentiable.

        A part by rows, heads or batch entries takes the arguments that say so at a call. Where it
        is given a whole tensor, that tensor's gradient is whole too, with zeros where others have
        theirs.

        Args:
            q: As of the call, like k and v.
            k: (B, Hkv, Lk, D).
            v: (B, Hkv, Lk, Dv).
            out: (B, Hq, Lq, Dv), in q's dtype or fp32.
            lse: (B, Hq, Lq), fp32 (fp64 for fp64), natural logarithm, a sink included; None where
                the program has weights of its own, and their ``out`` is not read.
            grad_out: The gradient of ``out``, in q's dtype or fp32. Kernels round it to q's.
            grad_lse: That of ``lse``; None for zeros.
            wants: Which of ``q``, ``k`` and ``v`` get gradients.
            wants_captures: Names of float captures that do; by default those that require one.
            grad_dtype: dtype of the gradients of q, k and v: ``torch.float32`` where they are of a
                half type, so that nothing is lost where parts are added up; by default theirs.
            tiles: As of the call.
            room: (B, Hq, Lq, D), any strides, q's dtype whatever ``grad_dtype`` is: where the
                gradient of q is put, such as the rows of a part in that of the whole. Its memory is
                that of no other argument.
            **arguments: Captures and options of the call. Dropout wants the ``seed`` of it.

        Raises:
            ArgumentError, ShapeError, DTypeError, DeviceError: As a call, also for the results.
            UnsupportedError: The backend cannot do what the program says; ``torch.func``.
            BackendError: The backend does not work here.
        """
        own, arguments = self._of_call(q, k, arguments)
        if own is not self:
            return own.backward(
                q, k, v, out, lse, grad_out, grad_lse, wants=wants, wants_captures=wants_captures,
                grad_dtype=grad_dtype, tiles=tiles, room=room, **arguments,
            )  # fmt: skip
        program = self._lowered.program
        plain = type(q) is torch.Tensor or type(q) is torch.nn.Parameter
        in_graph = torch.compiler.is_compiling() or not plain
        if in_graph or torch._C._is_any_autocast_enabled():
            q, k, v = autocast(q), autocast(k), autocast(v)
        check_has_seed(program, arguments.get("seed"))
        arguments["deterministic"] = is_deterministic(arguments.get("deterministic"))
        given = Results(out, lse, grad_out, grad_lse)
        how = Asked(wants, wants_captures, grad_dtype)
        if in_graph:
            scale = arguments.get("scale")
            call = self._bound(q, k, v, arguments)
            check_results(program, call, given)
            check_room(room, q.shape, q.dtype, q.device)
            asked = wants_for(call, how)
            from attndsl.runtime.graph import backward_in_graph  # Imports torch.compile.

            found = backward_in_graph(self._request, call, scale, given, asked)
            captures = gradients_of_wholes(program, call, found.captures)
            # With torch 2.11 no graph can return what _replace makes.
            return Gradients(in_room(room, found.q), found.k, found.v, captures)
        with pointing_into(self._source):
            made = self._ready(q, k, v, arguments)
            check_results(program, made.call, given)
            check_room(room, q.shape, q.dtype, q.device)
            return self._gradients(made, given, how, room, tiles)

    def sink_logits(
        self, q: torch.Tensor, k: torch.Tensor, **arguments: Any
    ) -> torch.Tensor | None:
        """The sink's logits as :func:`attndsl.merge` takes them; None where there is no sink.

        Args:
            q: As of a call: heads, batch entries, dtype and device are those of the logits.
            k: The same. A sink that mentions ``kv_len`` reads that of this call.
            **arguments: Captures and options of a call.

        Returns:
            (B or 1, Hq), fp32 (fp64 for fp64), differentiable in the captures.

        Raises:
            ArgumentError, ShapeError, DTypeError, DeviceError: As a call.
            UnsupportedError: In a graph of ``torch.compile``.
        """
        if torch.compiler.is_dynamo_compiling():
            raise UnsupportedError(
                "graphs of torch.compile have no sink_logits",
                hint="give the graph the logits: for sink = s[h], merge(parts, sink=s)",
            )
        own, arguments = self._of_call(q, k, arguments)
        call = own._bound(q, k, k, arguments)
        with pointing_into(self._source):
            check_values(own.lowered.program, call)
            lowered, call = localised(own.lowered, call)
        sink = lowered.program.sink
        if sink is None:
            return None
        call = call._replace(q=q[:, :, :1], k=k[:, :, :1], q_index=None, kv_index=None)
        work = torch.float64 if q.dtype is torch.float64 else torch.float32
        (found,) = evaluate((sink,), scope_of(call, q.new_zeros((1,) * 4, dtype=work)))
        return found.expand(found.shape[0], q.shape[1], 1, 1)[..., 0, 0]

    def _bound(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]
    ) -> Call:
        """The checked call; takes the options out of ``arguments``, whose rest are captures."""
        options = CallOptions(**taken(arguments, _OPTIONS))
        location = Location(**taken(arguments, LOCATION))
        captures = self._given(arguments.pop("captures", None), arguments)
        # Graphs cannot follow it, and calls in them do without too.
        with nullcontext() if torch.compiler.is_compiling() else pointing_into(self._source):
            return bind(self._lowered.program, (q, k, v), captures, location, options)

    def _ready(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]
    ) -> CheckedCall:
        """The checked call, what runs it, and the program and the call that this gets.

        What calls of one signature share is kept, as that of calls is.

        Args:
            q: As of a call, like k and v.
            k: The same.
            v: The same.
            arguments: Options and ``captures`` of a call of this very program.
        """
        program = self._lowered.program
        key = self._key_of(q, k, v, arguments)
        kept = None if key is None else self._readied.get(key)
        if kept is not None:
            return kept.made(self._lowered, (q, k, v), arguments)
        call = check_values(program, self._bound(q, k, v, arguments))
        backend, lowered, part = self._dispatched(call)
        if key is not None and call.q is q and call.k is k and call.v is v:
            if len(self._readied) >= _MAX_VARIANTS:
                self._readied.clear()
            call = call._replace(signature=Signature(self.name))
            terms = None if call.part is None else terms_of(self._lowered, call)
            self._readied[key] = Ready(backend, without_tensors(call), terms)
            part = part._replace(signature=call.signature)
        return CheckedCall(call, backend, lowered, part)

    def _into(self, made: CheckedCall, room: torch.Tensor) -> torch.Tensor:
        """The log-sum-exp of a call whose output is put into ``room``."""
        backend = seen_by_modes(made.backend, self._request, made.call)
        out, lse = attend(backend, made.lowered, made.part._replace(room=room), True)
        in_room(room, out)
        return lse

    def _gradients(
        self, made: CheckedCall, given: Results, how: Asked, room: torch.Tensor | None,
        tiles: TileMap | None = None,
    ) -> Gradients:  # fmt: skip
        """The gradients of a call from checked results."""
        call, backend, lowered, part = made
        asked = wants_for(call, how)
        part = part._replace(tiles=given_tiles(lowered, part, tiles), room=room)
        if lowered.program.dropout is not None:
            check_probability(lowered.program.dropout, part)
        backend = seen_by_modes(backend, self._request, call)
        shown = profiler._is_profiler_enabled and not backend.has_events
        with event_named(self.name, BACKWARD) if shown else nullcontext():
            found = gradients_of_results(backend, lowered, part, given, asked)
        captures = gradients_of_wholes(self._lowered.program, call, found.captures)
        return found._replace(q=in_room(room, found.q), captures=captures)

    def _key_of(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Mapping[str, Any]
    ) -> tuple[object, ...] | None:
        """The signature of a call; None of one that is looked at each time."""
        location = Location(**{name: arguments[name] for name in LOCATION if name in arguments})
        seed, captures = arguments.get("seed"), arguments["captures"]
        positions = location.q_index, location.kv_index, location.kv_lengths
        numbers = location.q_offset, location.kv_offset, 0 if seed is None else seed
        plain = all(type(x) is int for x in numbers) and all(x is None for x in positions)
        tensors = all(isinstance(x, torch.Tensor) and not x.is_meta for x in (q, k, v))
        given = (q, k, v, arguments.get("out_dtype"), *captures.values())
        if not plain or not tensors or any(type(x) not in _PLAIN for x in given):
            return None
        program = self._lowered.program
        kinds = kinds_of(numbers, None, captures, location.numbers(program))
        operands = [y for x in (q, k, v) for y in (x.shape, x.stride(), x.dtype, x.device)]
        options = arguments.get("deterministic"), arguments.get("out_dtype")
        dims = dims_key(params_of_dims(program), captures)
        return *operands, type(arguments.get("scale")), *options, kinds, dims

    def _dispatched(self, call: Call) -> tuple[Backend, Lowered, Call]:
        """Choose the backend of ``call``; return it with the program and the call that it gets.

        Raises:
            AttnDSLError: It cannot run; tiles are wrong, where these are to be checked.
        """
        given = call
        lowered, call = localised(self._lowered, call)
        if not has_data(call.q):  # Operators know shapes, and backends values.
            shapes = ThroughOperators(get_backend("reference"), self._request, given)
            return shapes, lowered, call
        backend, reason = backend_of(
            lowered, self._backend, call.q.device, self._checked, call.q.dtype
        )
        if self._checked:  # Errors of its backward have to know where the program was written.
            backend = ReferenceBackend(checked=True, source=self._source)
        backend.check(lowered, call)
        tell_choice(self.name, call, backend, reason)
        verify_if_asked(lowered, call)
        if torch._C._get_tracing_state() is not None:
            raise UnsupportedError(
                "torch.jit.trace would record the operations of these lengths, and be wrong at "
                "others",
                hint=_EXPORT,
            )
        return backend, lowered, call

    def _given(self, captures: Captures | None, named: Captures) -> dict[str, Any]:
        """The captures of a call: given at once, by keywords, or to ``compile``."""
        return {**self._defaults, **joined(captures, named)}

    def variant(
        self,
        captures: Captures,
        sizes: Mapping[str, int | None] | None = None,
        location: Location = WHOLE,
    ) -> tuple[Self, Captures]:
        """The program that a call is of, in which nothing is optional, and the call's captures.

        Args:
            captures: All that the call has, given to ``compile`` or by itself.
            sizes: Those of the call that are known, by name. Where there are none, each tensor has
                its declared dims.
            location: Where the call lies in a larger one.

        Raises:
            AttnDSLError: The program has no meaning without these captures.
        """
        own = self
        if self._optional:
            own, captures = self._present(captures)
        if sizes is not None:
            ones = dims_of_one(own._lowered.program, captures, sizes, location)
            own = own._variant((), ones) if ones else own
        return own, captures

    def _present(self, captures: Captures) -> tuple[Self, Captures]:
        """The program without the captures that a call leaves out."""
        absent = absent_names(self._optional, captures)
        left = {name: x for name, x in captures.items() if name not in absent}
        if not self._names.issuperset(left):
            check_known(self._lowered.program, left)  # Among all names there are, to tell the near.
        return self._variant(absent, ()), left

    def _variant(self, absent: tuple[str, ...], ones: Dims) -> Self:
        """The program without some captures, and with size 1 along dims of others."""
        if torch.compiler.is_dynamo_compiling():
            found: Self = getattr(self._traced, self._keep_variant(absent, ones))
            return found
        kept = self._variants.get((absent, ones))
        if kept is None:
            with pointing_into(self._source):
                spec = spec_of_variant(self._spec, absent, ones)
                defaults = {n: x for n, x in self._defaults.items() if n not in absent}
                kept = self._like(spec, defaults)
            if len(self._variants) >= _MAX_VARIANTS:
                self._variants.clear()
            self._variants[absent, ones] = kept
        chosen: Self = kept
        return chosen

    def _keep_variant(self, absent: tuple[str, ...], ones: Dims) -> str:
        """Keep the program that a graph is to call; the name under which it is kept.

        This runs while a graph is made, and no graph holds it. It is a method, since arguments of
        such functions have to be constants, and Dynamo of torch 2.11 takes no program for one.
        """
        key = f"{absent} {ones}".encode().hex()
        name = f"of_{key}"
        setattr(self._traced, name, self._variant(absent, ones))
        return name

    # torch.compiler.assume_constant_result does the same, and takes seconds to import.
    _keep_variant._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _of_call(
        self, q: torch.Tensor, k: torch.Tensor, arguments: dict[str, Any]
    ) -> tuple[Self, dict[str, Any]]:
        """The program of a call, and its arguments: all captures stand in ``captures``."""
        rest = dict(arguments)
        options = {name: rest.pop(name) for name in (*_OPTIONS, *LOCATION) if name in rest}
        captures = self._given(rest.pop("captures", None), rest)
        location = Location(**taken(dict(options), LOCATION))
        own, given = self.variant(captures, sizes_of_operands(q, k), location)
        return own, {**options, "captures": given}

    @property
    def _request(self) -> Request:
        return Request(self._spec, self._backend, self._checked)

    @property
    def _described(self) -> str:
        """The text, and as a comment the numbers that its names are bound to."""
        bound = (f"{name} = {value!r}" for name, value in bound_numbers(self._spec).items())
        comment = ", ".join(bound)
        return f"{self.text.rstrip()}\n# {comment}" if comment else self.text

    def __repr__(self) -> str:
        return f"Attention({shorten(self.text, NAME_LENGTH)!r}, backend={self._backend!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Compiled):
            return NotImplemented
        return self._request == other._request and (
            self._defaults.keys() == other._defaults.keys()
            and all(t is other._defaults[n] for n, t in self._defaults.items())
        )

    def __hash__(self) -> int:
        return hash(self._request)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self.made_of)


def bound_call(
    attention: Compiled, operands: tuple[torch.Tensor, ...], arguments: Mapping[str, Any]
) -> tuple[Call, str]:
    """The checked call that is not made, and the name of the backend that would run it.

    Args:
        attention: What would be called.
        operands: q, k and v.
        arguments: Captures and options of the call.

    Raises:
        AttnDSLError: The call would be refused.
    """
    q, k, v = map(autocast, operands)
    own, arguments = attention._of_call(q, k, dict(arguments))
    call = own._bound(q, k, v, arguments)
    with pointing_into(own._source):
        check_values(own.lowered.program, call)
        return call, own._dispatched(call)[0].name


def located_call(
    attention: Compiled, operands: tuple[torch.Tensor, ...], arguments: Mapping[str, Any]
) -> tuple[Lowered, Call]:
    """Program and call that a backend would get of a call that is not made.

    Args:
        attention: What would be called.
        operands: q, k and v.
        arguments: Captures and options of the call.

    Raises:
        AttnDSLError: The call would be refused.
    """
    q, k, v = operands
    own, arguments = attention._of_call(q, k, dict(arguments))
    return localised(own.lowered, own._bound(q, k, v, arguments))


def taken(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Takes those of ``names`` out of ``arguments``; None stands for the default."""
    found = {name: arguments.pop(name) for name in names if name in arguments}
    return {name: x for name, x in found.items() if x is not None}
