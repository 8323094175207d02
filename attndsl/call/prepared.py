"""The one prepared call: what calls of one signature share, and how one of them runs.

Every way to call a program (``__call__``, ``out=``, :meth:`attndsl.Attention.backward`, context
parallelism) is two lines: :meth:`PreparedCalls.of` finds or makes what is prepared, and
:meth:`PreparedCall.run` or :meth:`PreparedCall.gradients` runs it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import profiler

from attndsl.backends.base import NONE, Call, Signature
from attndsl.backends.memory_order import rows_contiguous
from attndsl.errors import AttnDSLError, UnsupportedError
from attndsl.foundation.caches import BoundedCache, Reason, RecentEntries
from attndsl.inspection.tile_search import given_tiles
from attndsl.runtime.program_store import point_into, pointing_into

from .argument_checks import autocast, scale_of
from .autograd import attend, is_recorded, modes_on, needs_grad
from .backward_call import (
    check_has_seed,
    check_results,
    check_room,
    gradients_of_results,
    in_room,
    wants_for,
)
from .call_warnings import doubts_of_call, tell
from .chunked_autograd import is_transformed
from .dispatch_modes import seen_by_modes
from .dropout_checks import check_probability
from .dropout_seed import seed_of_call
from .guarded_launch import differences_of, guarded_launch, is_bindable
from .profiling import BACKWARD, event_named
from .resolve import bound, dispatched
from .signature import ANY_LENGTH, PLAIN_TENSORS, signature_of_call
from .sub_calls import gradients_of_wholes
from .value_checks import check_values, needs_of_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Backend
    from attndsl.inspection.tilemap import TileMap

    from .attention_base import Compiled
    from .backward_call import Gradients, Results, WantedGradients
    from .guarded_launch import GuardedLaunch
    from .resolve import Dispatched
    from .signature import Facts
    from .value_checks import ValueChecks


_MOST_SIGNATURES = 4096
_MOST_LAUNCHES = 8
"""Bound launches of one prepared call, such as with and without gradients, or for several values
of a param; others find out about each call anew."""
_MOST_RECENT = 4
"""Launches that calls of a program try before they look up their signature. Each that does not fit
takes 0.2 us."""


class Arguments(NamedTuple):
    """Arguments of one call, as they were given."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: Mapping[str, Any]
    """Options by name; with the captures among them, if ``captures`` is the same mapping."""
    captures: Mapping[str, Any]
    """Captures by name."""


class PreparedCall:
    """Program, backend and checks that calls of one signature share. It holds no tensors."""

    __slots__ = (
        "as_given",
        "backend",
        "bare",
        "binds",
        "declared",
        "how",
        "kv_len",
        "launches",
        "lowered",
        "maps",
        "marks",
        "name",
        "needs",
        "params",
        "request",
        "scale",
        "source",
        "template",
        "tensors",
        "terms",
    )

    def __init__(
        self, program: Compiled, found: Dispatched, call: Call, as_given: bool, needs: ValueChecks,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Prepare calls like one that was bound.

        Args:
            program: The program of the call, in which nothing is optional.
            found: The backend that runs it, and what it gets.
            call: The bound call.
            as_given: Whether q, k and v go to the backend as they are.
            needs: Treatment that values of each call need.
            options: The options of such a call.
        """
        # Not the program itself: it keeps prepared calls, and would be part of a cycle.
        self.declared = declared = program.lowered.program
        self.name, self.request, self.source = program.name, program._request, program._source
        self.as_given, self.needs = as_given, needs
        self.backend, self.lowered, _, self.terms, self.maps = found
        self.marks = _marks_entries(found)
        self.tensors = tuple(d.name for d in declared.tensors)
        self.params = tuple((d.name, d.default) for d in declared.params)
        self.scale = call.q.shape[3] ** -0.5
        self.kv_len = call.sizes["kv_len"]
        # ``q.new_empty`` would be of a transform of torch.func.
        empty = torch.empty(0, dtype=call.q.dtype, device=call.q.device)
        self.template = call._replace(
            q=empty,
            k=empty,
            v=empty,
            tensors=NONE,
            params=NONE,
            scale=self.scale,
            q_offset=0,
            kv_offset=0,
            q_index=None,
            kv_index=None,
            seed=0,
            signature=Signature(program.name),
        )
        self.bare = None
        if not (self.tensors or self.params or declared.dropout) and self.terms is None:
            self.bare = tuple(self.template[3:])
        self.how = differences_of(declared, self.terms, options, program._warns)
        self.binds = (
            self.backend.binds
            and as_given
            and declared.dropout is None
            and self.maps is None
            and not (call.part is not None and call.part.counted)
            and is_bindable(options, self.terms, self.marks)
        )
        self.launches: tuple[GuardedLaunch, ...] = ()
        """Launches of calls that differ in elements and addresses alone; none before the second
        call."""

    def call(self, given: Arguments, is_forward: bool = True) -> Call:
        """The checked call of these arguments, before a part is put into its program's terms.

        Args:
            given: The arguments.
            is_forward: True if the call's forward runs, False for its backward.

        Raises:
            ArgumentError: A value that cannot be.
        """
        q, k, v, options, captures = given
        if not self.as_given:
            q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        if self.bare is not None and not options:
            call = Call._make((q, k, v, *self.bare))
        else:
            call = self._with_options(q, k, v, options, captures)
        if self.terms is None and self.kv_len != k.shape[2]:
            sizes = {**call.sizes, "kv_len": k.shape[2]}
            call = call._replace(sizes=sizes, signature=Signature(self.name))
        if self.needs or call.q_offset or call.kv_offset:
            marks = is_forward and self._marks_now(call)
            call = check_values(self.declared, call, self.needs, marks)
        return call

    def _for_backend(self, call: Call) -> Call:
        if self.maps is not None:
            call = self.maps.applied(call)
        return call if self.terms is None else self.terms.applied(call)

    def _marks_now(self, call: Call) -> bool:
        """Return True if results of ``call`` tell of wrong numbers, as only a forward's do."""
        return self.marks and not (
            is_transformed() or is_recorded(self.backend, self.lowered, call)
        )

    def _with_options(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Mapping[str, Any],
        captures: Mapping[str, Any],
    ) -> Call:
        get, own, part = options.get, self.template, self.template.part
        scale, seed = get("scale"), get("seed")
        if self.declared.dropout is not None:
            seed = seed_of_call(seed, q.device)
        if part is not None:
            part = replace(part, kv_lengths=get("kv_lengths"))
        return Call(
            q, k, v, self.scale if scale is None else scale_of(scale), own.sizes,
            {name: captures[name] for name in self.tensors} if self.tensors else NONE,
            {name: captures.get(name, default) for name, default in self.params}
            if self.params else NONE,
            get("q_offset", 0), get("kv_offset", 0), get("q_index"), get("kv_index"),
            0 if seed is None else seed, own.deterministic, None, own.signature, own.wide, None,
            part,
        )  # fmt: skip

    def run(self, given: Arguments, first: bool, recent: RecentEntries[GuardedLaunch]) -> Any:
        """Output, and log-sum-exp if requested.

        Args:
            given: The call's arguments.
            first: Whether it is the first of its signature: the backward is prepared too.
            recent: Launches that the program's calls try first; that of this call is put there.

        Raises:
            AttnDSLError: As of :meth:`attndsl.Attention.__call__`.
        """
        options = given.options
        try:
            for launch in self.launches:
                found = launch((given.q, given.k, given.v), options, given.captures)
                if found is not None:
                    if options is given.captures and not torch._C._is_any_autocast_enabled():
                        recent.use(launch)
                    return found
            whole = self.call(given)
            backend, call = self.backend, whole
            if modes_on():
                backend = seen_by_modes(backend, self.request, whole)
            call = self._for_backend(whole)
            has_lse = bool(options.get("return_lse"))
            if has_lse:
                check_has_lse(self.declared)
            if self.binds and not first and (self.terms is None or self._marks_now(whole)):
                self._bind(call, given)
            if (tiles := options.get("tiles")) is not None:
                call = call._replace(tiles=given_tiles(self.lowered, call, tiles))
            if (out := options.get("out")) is not None:
                return self._into(backend, whole, call, out, has_lse)
            return attend(backend, self.lowered, call, has_lse, first)
        except AttnDSLError as error:  # A context manager would take a microsecond.
            point_into(error, self.source)
            raise

    def _bind(self, call: Call, given: Arguments) -> None:
        """Bind calls like this one, if nothing else is to be done for them."""
        if len(self.launches) >= _MOST_LAUNCHES:
            return
        launch = guarded_launch(
            self.backend, self.lowered, call, given.options, given.captures, self.how
        )
        if launch is not None:
            self.launches = *self.launches, launch

    def _into(
        self, backend: Backend, whole: Call, call: Call, out: torch.Tensor, has_lse: bool
    ) -> Any:
        """Run a call whose output is written to ``out``."""
        if torch.is_grad_enabled() and needs_grad(whole):
            raise UnsupportedError(
                "out is given, and an input requires grad: what is written there has no gradient",
                hint="call within torch.no_grad(), or drop out",
            )
        kind = torch.float32 if call.wide else call.q.dtype
        check_room("out", out, (*call.q.shape[:3], call.v.shape[3]), kind, call.q.device)
        with torch.no_grad():
            found, lse = attend(backend, self.lowered, call._replace(room=out), True)
            in_room(out, found)
        return (out, lse) if has_lse else out

    def gradients(
        self, given: Arguments, results: Results, asked: WantedGradients, room: torch.Tensor | None,
        tiles: TileMap | None = None,
    ) -> Gradients:  # fmt: skip
        """Gradients of a call from results; see :meth:`attndsl.Attention.backward`."""
        check_has_seed(self.declared, given.options.get("seed"))
        with pointing_into(self.source):
            whole = self.call(given, is_forward=False)
            check_results(self.declared, whole, results)
            check_room("room", room, whole.q.shape, whole.q.dtype, whole.q.device)
            wants = wants_for(whole, asked)
            call = self._for_backend(whole)
            call = call._replace(tiles=given_tiles(self.lowered, call, tiles), room=room)
            if self.lowered.program.dropout is not None:
                check_probability(self.lowered.program.dropout, call)
            backend = seen_by_modes(self.backend, self.request, whole)
            shown = profiler._is_profiler_enabled and not backend.has_events
            with event_named(self.name, BACKWARD) if shown else nullcontext():
                found = gradients_of_results(backend, self.lowered, call, results, wants)
            captures = gradients_of_wholes(self.declared, whole, found.captures)
            return found._replace(q=in_room(room, found.q), captures=captures)


class PreparedCalls:
    """The prepared calls of a program, by signature."""

    __slots__ = ("_facts", "cache", "recent_launches")

    def __init__(self, facts: Facts) -> None:
        """Make room for calls of a program with these ``facts``."""
        self._facts = facts
        self.cache: BoundedCache[Any] = BoundedCache(
            "prepared calls, steps by signature", _MOST_SIGNATURES, Reason.BACKENDS, Reason.KERNELS
        )
        """Prepared calls; and the steps of :meth:`attndsl.Attention.serve`, by signatures of
        their own."""
        self.recent_launches: RecentEntries[GuardedLaunch] = RecentEntries(
            "launches that calls try first by guards", _MOST_RECENT, Reason.BACKENDS, Reason.KERNELS
        )

    def of(
        self, program: Compiled, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        given: dict[str, Any],
    ) -> tuple[PreparedCall, Arguments, bool]:  # fmt: skip
        """The prepared call, its arguments, and whether it is the first of its signature.

        Args:
            program: The program that is called.
            q: Queries; autocast converts them, like keys and values.
            k: Keys.
            v: Values.
            given: All keywords of the call.

        Raises:
            AttnDSLError: As of :meth:`attndsl.Attention.__call__`.
        """
        if torch._C._is_any_autocast_enabled():
            q, k, v = autocast(q), autocast(k), autocast(v)
        captures = given
        if program._defaults or "captures" in given:
            captures = program._captures_of(given)
        arguments, key = Arguments(q, k, v, given, captures), None
        if type(k) in PLAIN_TENSORS and type(v) in PLAIN_TENSORS:
            key = signature_of_call(self._facts, q, k, v, given, captures)
            found = self.cache.recent.get(key) or self.cache.get(key)
            if found is not None:
                return found, arguments, False
        found, warned = prepare(program, arguments)
        if key is not None and not (warned and key[0] == ANY_LENGTH):  # Other lengths warn too.
            self.cache.put(key, found)
        return found, arguments, True

    def __len__(self) -> int:
        return len(self.cache)


def prepare(asked: Compiled, given: Arguments) -> tuple[PreparedCall, bool]:
    """Prepare calls like this one; say whether there was something to warn of.

    Args:
        asked: The program, whose captures may be optional.
        given: The call.

    Raises:
        AttnDSLError: As of :meth:`attndsl.Attention.__call__`.
    """
    operands = given.q, given.k, given.v
    with pointing_into(asked._source):
        program, captures, call = bound(asked, operands, given.options, given.captures)
        found = dispatched(program, call)
    doubts = []
    if program._warns:
        doubts = list(doubts_of_call(program.lowered.program, call, given.options))
        tell(doubts)
    as_given = all(x is y for x, y in zip((call.q, call.k, call.v), operands, strict=True))
    numbers = (given.options.get(name) for name in ("q_offset", "kv_offset", "seed"))
    needs = needs_of_values(program.lowered.program, call, captures, tuple(numbers))
    return PreparedCall(program, found, call, as_given, needs, given.options), bool(doubts)


def check_has_lse(program: Any) -> None:
    """Refuse to return the log-sum-exp of a program that has no softmax.

    Raises:
        UnsupportedError: It has weights of its own.
    """
    if program.weights is not None:
        raise UnsupportedError(
            "return_lse asks for a softmax's log-sum-exp, and the program has other weights",
            hint="drop return_lse; the outputs of parts of the keys are added up",
        )


def _marks_entries(found: Dispatched) -> bool:
    """Return True if results tell of wrong numbers; False on CPUs, where checks need no wait."""
    backend, lowered, call, terms, _ = found
    return terms is not None and call.q.is_cuda and backend.marks_entries(lowered, call)
