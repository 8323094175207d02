"""Resolution of a call: the variant of its program, its bound arguments, and its backend."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.backends.dense.reference import ReferenceBackend
from attndsl.errors import UnsupportedError
from attndsl.inspection.tile_search import verify_if_asked
from attndsl.runtime.program_store import pointing_into

from .bind import bind
from .dispatch import backend_of, get_backend, tell_choice
from .dispatch_modes import ThroughOperators
from .list_maps import maps_of
from .optional_captures import sizes_of_operands
from .options import NAMES, options_in
from .sub_calls import terms_of
from .value_checks import has_data

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Backend, Call
    from attndsl.pipeline import Lowered

    from .attention_base import Compiled
    from .list_maps import ListMaps
    from .sub_calls import Terms


EXPORT = "use torch.export, whose programs serve all lengths: see docs/deployment.md"


def bound(
    asked: Compiled, operands: tuple[Any, Any, Any], options: Mapping[str, Any],
    captures: Mapping[str, Any],
) -> tuple[Compiled, Mapping[str, Any], Call]:  # fmt: skip
    """The program of a call, its captures, and the bound call.

    Args:
        asked: The program, whose captures may be optional.
        operands: q, k and v.
        options: Options by name.
        captures: Captures by name; the same mapping where ``options`` holds these too.

    Raises:
        AttnDSLError: As of :meth:`attndsl.Attention.__call__`.
    """
    if captures is options:
        captures = {name: x for name, x in options.items() if name not in NAMES}
    how, location = options_in(options)
    program, captures = asked.variant(captures, sizes_of_operands(*operands[:2]), location)
    # Graphs cannot follow it, and calls in them do without too.
    with nullcontext() if torch.compiler.is_compiling() else pointing_into(asked._source):
        return program, captures, bind(program.lowered.program, operands, captures, location, how)


class Dispatched(NamedTuple):
    """The backend of a bound call, with the program and the call that it gets."""

    backend: Backend
    lowered: Lowered
    call: Call
    terms: Terms | None
    """Rules that put the call into these terms; None for a call that is no part."""
    maps: ListMaps | None
    """Maps in place of the call's lists, which come first; None if it has none."""


def dispatched(program: Compiled, call: Call) -> Dispatched:
    """Choose the backend of a bound call.

    Raises:
        AttnDSLError: It cannot run; tiles are wrong, where these are to be checked.
    """
    given = call
    lowered, terms = program.lowered, None
    maps = maps_of(lowered, call)
    if maps is not None:
        lowered, call = maps.lowered, maps.applied(call)
    if call.part is not None:
        terms = terms_of(lowered, call)
        lowered, call = terms.lowered, terms.applied(call)
    if not has_data(call.q):  # Operators know shapes, and backends values.
        operators = ThroughOperators(get_backend("reference"), program._request, given)
        return Dispatched(operators, lowered, call, terms, maps)
    backend, reason = backend_of(
        lowered, program.backend, call.q.device, program._checked, call.q.dtype
    )
    if program._checked:  # Errors of its backward have to know where the program was written.
        backend = ReferenceBackend(checked=True, source=program._source)
    backend.check(lowered, call)
    tell_choice(program.name, call, backend, reason)
    verify_if_asked(lowered, call)
    if torch._C._get_tracing_state() is not None:
        raise UnsupportedError(
            "torch.jit.trace would record the operations of these lengths, and be wrong at others",
            hint=EXPORT,
        )
    return Dispatched(backend, lowered, call, terms, maps)
