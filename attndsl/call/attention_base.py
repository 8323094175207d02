"""The parts of a compiled program beside its calls: comparison, pickling, backward, sink."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from attndsl.backends.dense.interpret import evaluate, scope_of
from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.runtime.program_store import bound_numbers, pointing_into, spec_of_variant
from attndsl.source import NAME_LENGTH, shorten

from .argument_checks import autocast, check_known, joined
from .argument_type_errors import refuse_call
from .backward_call import (
    OPERANDS,
    Gradients,
    Results,
    WantedGradients,
    check_has_seed,
    check_results,
    check_room,
    in_room,
    wants_for,
)
from .optional_captures import absent_names, dims_of_one
from .options import NAMES, WHOLE, Location
from .resolve import EXPORT, bound, dispatched
from .signature import PLAIN_TENSORS
from .sub_calls import gradients_of_wholes, localised
from .torch_ops_impl import OperatorCall
from .value_checks import check_values

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from attndsl.backends.base import Call, Scalar
    from attndsl.foundation.caches import BoundedCache
    from attndsl.inspection.tilemap import TileMap
    from attndsl.passes.broadcast import Dims
    from attndsl.pipeline import Lowered
    from attndsl.source import Source

    from .prepared import PreparedCalls

    Captures = Mapping[str, torch.Tensor | Scalar]


class TracedPrograms:
    """Programs that graphs of torch.compile call, as attributes.

    A graph depends on the attributes that it uses, and on all of a dict.
    """


class Made(NamedTuple):
    """Complete state of a compiled program: it is made of these fields alone."""

    spec: str
    source: Source
    """The text, where errors point."""
    backend: str
    """The backend asked for."""
    checked: bool
    defaults: dict[str, Any]
    """Tensors that captures have unless a call gives others."""
    warns: bool = False
    """True to warn about probably unintended calls: a person wrote the program."""


MAX_VARIANTS = 1024
"""The most programs of one text, by the captures that calls leave out or give with size 1."""


class Compiled:
    """Base class of :class:`attndsl.Attention`: a compiled program without its calls."""

    __slots__ = ()
    _spec: str
    _source: Source
    _backend: str
    _checked: bool
    _defaults: dict[str, Any]
    _warns: bool
    """These six are the fields of :class:`Made`."""
    _in_graphs: str
    """All of these that graphs depend on; empty where calls have tensors by default."""
    _lowered: Lowered
    _optional: tuple[str, ...]
    """Captures that calls may leave out."""
    _variants: BoundedCache[Any]
    """Programs of calls that leave some out, or whose tensors have size 1 in place of another."""
    _names: frozenset[str]
    """Names of all captures."""
    _prepared: PreparedCalls
    """Prepared calls by signature."""
    _traced: TracedPrograms

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
            "torch.jit.script compiles Python's text, and a program is none", hint=EXPORT
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
        for name in ("return_lse", "out"):
            if name in arguments:
                raise ArgumentError(
                    f"the program has no tensor or run-time param '{name}'",
                    hint=f"backward takes no {name}",
                )
        results = Results(out, lse, grad_out, grad_lse)
        asked = WantedGradients(wants, wants_captures, grad_dtype)
        if torch.compiler.is_compiling() or type(q) not in PLAIN_TENSORS:
            return self._backward_in_graph((q, k, v), arguments, results, asked, room)
        try:
            prepared, given, _ = self._prepared.of(self, q, k, v, arguments)
            return prepared.gradients(given, results, asked, room, tiles)
        except (AttributeError, TypeError):
            refuse_call(self, (q, k, v), arguments)
            raise

    def _backward_in_graph(
        self, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        arguments: dict[str, Any], results: Results, asked: WantedGradients,
        room: torch.Tensor | None,
    ) -> Gradients:  # fmt: skip
        """The gradients of a call by operations that a graph, or a tracer, may follow."""
        from .compile_graphs import backward_in_graph  # Imports torch.compile.

        q, k, v = operands
        operands = autocast(q), autocast(k), autocast(v)
        own, _, call = bound(self, operands, arguments, self._captures_of(arguments))
        program = own._lowered.program
        check_has_seed(program, arguments.get("seed"))
        check_results(program, call, results)
        check_room("room", room, call.q.shape, call.q.dtype, call.q.device)
        wants = wants_for(call, asked)
        found = backward_in_graph(own._request, call, arguments.get("scale"), results, wants)
        captures = gradients_of_wholes(program, call, found.captures)
        # With torch 2.11 no graph can return what _replace makes.
        return Gradients(in_room(room, found.q), found.k, found.v, captures)

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
        captures = self._captures_of(arguments)
        own, _, call = bound(self, (q, k, k), arguments, captures)
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

    def _captures_of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The captures of a call whose keywords are ``given``."""
        named = {n: x for n, x in given.items() if n != "captures" and n not in NAMES}
        return self._given(given.get("captures"), named)

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

        def make() -> Any:
            with pointing_into(self._source):
                left = {n: x for n, x in self._defaults.items() if n not in absent}
                return self._like(spec_of_variant(self._spec, absent, ones), left)

        chosen: Self = self._variants.get_or_make((absent, ones), make)
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

    @property
    def _request(self) -> OperatorCall:
        return OperatorCall(self._spec, self._backend, self._checked)

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
    own, _, call = bound(attention, (q, k, v), arguments, attention._captures_of(arguments))
    with pointing_into(own._source):
        check_values(own.lowered.program, call)
        return call, dispatched(own, call).backend.name


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
    own, _, call = bound(attention, (q, k, v), arguments, attention._captures_of(arguments))
    return localised(own.lowered, call)
