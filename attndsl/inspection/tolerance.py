"""Largest allowed error of each element of a result: a bound of its own for every row.

:mod:`attndsl.backends.dense.error_spreads` derives what rounding may do to an element. A result may
be ``SPREADS`` times as far off, and by the rounding of the result itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.attention import on_reference
from attndsl.backends.base import Backward, Wants
from attndsl.backends.dense.error_spreads import spreads
from attndsl.call.argument_checks import autocast
from attndsl.call.attention_base import bound_call
from attndsl.call.optional_captures import sizes_of_operands
from attndsl.call.options import options_in
from attndsl.call.sub_calls import gradients_of_wholes, localised

if TYPE_CHECKING:
    from attndsl.attention import Attention

    from .reference_check import Case

SPREADS = 6.0
"""Allowed error of an element, in spreads.

Spreads count the largest error of each rounding, and the standard deviation of a uniform error is
3 ** -0.5 of that: these are 10 standard deviations. For the largest errors that right results had,
see M62 in docs/dev/measured.md.
"""
USUAL = 4.0
"""Allowed error of an element as a multiple of the largest error of the reference in its row. This
bound is above that of spreads only where a program amplifies errors in a way that spreads do not
see."""


def spreads_of(attention: Attention, case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The spread of each element of the results of ``case``.

    Args:
        attention: The program.
        case: The call, and the gradients of its results.
        dtype: In which it is to run.

    Returns:
        fp64, by names as of :func:`.reference_check.results`; ``lse`` always.

    Raises:
        AttnDSLError: The call would be refused.
    """
    q, k, v = (autocast(x.detach()).double() for x in case.operands)
    learned: dict[str, Any] = {name: case.captures[name] for name in case.learned}
    wide = {name: x.detach().double() for name, x in learned.items()}
    left_out = ("tiles", "out_dtype")
    options = {name: x for name, x in case.options.items() if name not in left_out}
    location = options_in(options)[1]
    given: dict[str, Any] = {x.name: x.default for x in attention.tensors if x.default is not None}
    given |= {x.name: x.default for x in attention.params if x.default is not None}
    given |= {**case.captures, **wide}
    own, present = on_reference(attention).variant(given, sizes_of_operands(q, k), location)
    call, _ = bound_call(own, (q, k, v), {**options, "captures": present})
    lowered, part = localised(own.lowered, call)
    if case.grad_out is None:
        return spreads(lowered, part, dtype)
    names = frozenset(case.learned)
    wanted = Wants(tensors=names.intersection(part.tensors), params=names.intersection(part.params))
    grad_lse = None if case.grad_lse is None else case.grad_lse.detach().double()
    results = Backward(q, q, case.grad_out.detach().double(), grad_lse, wanted)
    found = spreads(lowered, part, dtype, results)
    parts = {name: found[f"d{name}"] for name in (*wanted.tensors, *wanted.params)}
    wholes = gradients_of_wholes(own.lowered.program, call, parts)
    return found | {f"d{name}": x for name, x in wholes.items()}


def largest_allowed(
    exact: torch.Tensor, usual: torch.Tensor, spread: torch.Tensor, dtype: torch.dtype, rows: bool
) -> torch.Tensor:
    """Largest allowed error of each element of a result.

    Args:
        exact: The result of the reference in fp64; finite.
        usual: Sizes of the errors of the reference in the tested dtype.
        spread: See :func:`spreads_of`.
        dtype: That of the result.
        rows: Whether the last dim is a row, of an output or a gradient of q, k or v.

    Returns:
        fp64, of the result's shape; infinite where ``spread`` is.
    """
    if rows and usual.numel():
        usual = usual.amax(-1, keepdim=True)
    kind = torch.finfo(dtype)
    # Truncation, as of Triton's interpreter, is off by up to twice as much as rounding.
    rounding = kind.eps * exact.abs() + kind.smallest_normal * kind.eps
    return torch.maximum(SPREADS * spread, USUAL * usual) + rounding
