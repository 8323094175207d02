"""Signatures of calls: the keys by which prepared calls are found.

Calls of one signature share what is prepared (:mod:`.prepared`). A signature has the shape,
strides, dtype and device of each tensor, and of each option the part that the table of options
names (:class:`.options.InKey`). Numbers that decide about shapes stand in it by their bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.foundation.scalars import number_key
from attndsl.inspection.tile_search import tiles_key
from attndsl.passes.int_ranges import POSITION_LIMIT
from attndsl.settings import asks_to_verify

from .argument_checks import is_deterministic
from .call_slice import has_rows, plain_int
from .list_maps import names_in_lists
from .options import IN_KEY, InKey
from .value_checks import dims_key, params_of_dims

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Program

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors whose calls are prepared once."""
ANY_LENGTH = "any number of keys"
"""First part of the signature of calls that share it whatever their number of keys is."""
_PARTS = frozenset(
    ("q_len", "kv_len", "heads", "kv_heads", "batch", "h_offset", "b_offset", "kv_lengths")
)
"""Options of calls that are parts of larger ones."""
_KIND, _VALUE = InKey.KIND, InKey.VALUE
_NUMBERS = frozenset((int, float))
_PLAIN_VALUES = frozenset((int, bool, torch.dtype, type(None)))
_is_deterministic = torch._C._get_deterministic_algorithms


class Facts(NamedTuple):
    """Facts about a program that say what the signatures of its calls have to hold."""

    dims: tuple[str, ...]
    """Params on whose values declared dims depend, or which lists of keys are looked through for.
    """
    placed: tuple[str, ...]
    """Offsets on whose values those lists depend."""
    by_token: bool
    """True if the program reads ``token`` or ``tokens``, which positions tell apart."""
    by_row: bool
    """True if a tensor is declared along queries or keys: a part may bring its own rows."""
    any_length: bool
    """True if calls on CPUs share a signature when they differ in their number of keys alone. A
    cache of keys grows from step to step, and to bind a call takes longer than its attention on a
    CPU: see M57 in docs/dev/measured.md."""
    draws: bool
    """True if calls without a seed draw one."""
    warns: bool
    """True to warn about lengths that do not fit the mask."""


def facts_of(program: Program, backend: str, checked: bool, warns: bool) -> Facts:
    """The facts about a program that runs on ``backend``, as it was asked for."""
    params, placed = names_in_lists(program)
    return Facts(
        (*params_of_dims(program), *params), placed, program.by_token,
        program.by_token or has_rows(program),
        backend in ("auto", "cpu") and not checked
        and not (program.tensors or program.params or program.by_token),
        program.dropout is not None, warns,
    )  # fmt: skip


def signature_of_call(
    facts: Facts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    options: Mapping[str, Any], captures: Mapping[str, Any],
) -> tuple[object, ...]:  # fmt: skip
    """Key of a call, whose arguments are not checked yet.

    Args:
        facts: Facts about the program.
        q: Queries; plain tensors, like k and v.
        k: Keys.
        v: Values.
        options: Keywords of the call, with its captures among them if ``captures`` is the same.
        captures: The captures by name; names of options are none of them.
    """
    together = captures is options
    parts, deterministic, plain, by_value = _of_options(facts, options, together)
    if not together:
        for name, x in captures.items():
            parts += (name, kind_of(x))
    if facts.dims:
        parts.append(dims_key(facts.dims, captures))
    if facts.draws and options.get("seed") is None:
        # A seed that a CUDA graph draws is a tensor.
        parts.append(q.is_cuda and torch.cuda.is_current_stream_capturing())
    placed = ("q_offset", "kv_offset") if by_value else facts.placed
    if placed:
        parts += [_value_of(options.get(name)) for name in placed]
    if facts.any_length and plain and q.is_cpu and not _needs_each_length(facts, k, v, options):
        return (
            ANY_LENGTH, q.shape, q.stride(), q.dtype, q.device, deterministic, k.shape[:2],
            k.shape[3], k.stride()[3], k.dtype, k.device, v.shape[:2], v.shape[3], v.stride()[3],
            v.dtype, v.device, *parts,
        )  # fmt: skip
    return (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape,
        v.stride(), v.dtype, v.device, deterministic, *parts,
    )  # fmt: skip


def _of_options(
    facts: Facts, options: Mapping[str, Any], together: bool
) -> tuple[list[object], bool, bool, bool]:
    """The parts of options, and of captures where these are ``together`` with them.

    Also returned: whether the call is deterministic, whether its options are numbers that hold for
    any number of keys, and whether offsets stand in the signature by their values.
    """
    parts: list[object] = []
    deterministic: Any = None
    plain, by_value = True, facts.by_token
    for name, x in options.items():
        in_key = IN_KEY.get(name)
        if in_key is _KIND:
            if x is None:
                continue
            plain = plain and type(x) in _NUMBERS
            parts += (name, tiles_key(x) if name == "tiles" else kind_of(x))
        elif in_key is _VALUE:
            if name == "deterministic":
                deterministic = x
            else:
                parts += (name, type(x), x if type(x) in _PLAIN_VALUES else number_key(x))
        elif in_key is None and together:
            parts += (name, kind_of(x))
        if name in _PARTS:
            plain, by_value = False, by_value or facts.by_row or name == "kv_lengths"
    if deterministic is not True and deterministic is not False:
        deterministic = (
            _is_deterministic() if deterministic is None else is_deterministic(deterministic)
        )
    return parts, deterministic, plain, by_value


def _needs_each_length(
    facts: Facts, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any]
) -> bool:
    """Return True if something has to be looked at for each number of keys."""
    if k.dim() != 4 or v.dim() != 4 or k.shape[2] != v.shape[2] or k.shape[2] >= POSITION_LIMIT:
        return True
    return (facts.warns and not options.get("q_offset")) or asks_to_verify()


def kind_of(x: object) -> object:
    """Type of a number; shape, strides, dtype and device of a tensor."""
    # The type of a number is faster to look at: see M19 in docs/dev/measured.md.
    kind = type(x)
    if kind in PLAIN_TENSORS:
        return x.shape, x.stride(), x.dtype, x.device  # type: ignore[attr-defined]
    if isinstance(x, torch.Tensor):
        return kind, x.shape, x.stride(), x.dtype, x.device
    return kind


def _value_of(offset: Any) -> object:
    """An offset by its value; a tensor has none that the host knows."""
    return None if isinstance(offset, torch.Tensor) else plain_int(0 if offset is None else offset)
