"""Calls in graphs of ``torch.compile`` and ``torch.export``, and on tensors without data.

Apart from eager calls, since it needs parts of torch that take seconds to import.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental import symbolic_shapes

from attndsl.backends.base import Backward
from attndsl.errors import UnsupportedError

from .backward import Gradients, lse_or_zeros, with_out_of
from .distributed import refuse_context_parallel
from .higher import is_transformed
from .operator import operands, through_operator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attndsl.backends.base import Call, Wants

    from .backward import Results
    from .operator import Request


def attend_in_graph(
    request: Request, call: Call, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` through the operator.

    Args:
        request: The program.
        call: The checked call; its own scale is not used.
        scale: Factor of q . k, or None for the default.

    Raises:
        UnsupportedError: A transform of ``torch.func`` in a graph, or torch's ``context_parallel``.
    """
    refuse_context_parallel()
    if torch.compiler.is_dynamo_compiling() and _is_transformed_now():
        # The operator would drop tangents without a word.
        raise UnsupportedError(
            "graphs of torch.compile have no tangents and no torch.func transforms of a call",
            hint="take the transform outside of torch.compile",
        )
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.attndsl.forward(
        *operands(request, call, scale, _varying)
    )
    return found


def backward_in_graph(
    request: Request, call: Call, scale: float | None, given: Results, wants: Wants
) -> Gradients:
    """The gradients of checked results through an operator; not differentiable.

    Args:
        request: The program.
        call: The checked call; its own scale is not used.
        scale: Factor of q . k, or None for the default.
        given: The results.
        wants: Which gradients.
    """
    call = with_out_of(call, given.out)
    backward = Backward(given.out, lse_or_zeros(call, given), given.grad_out, given.grad_lse, wants)
    found = through_operator(operands(request, call, scale, _varying), call, backward)
    return Gradients(found.q, found.k, found.v, {**found.tensors, **found.params})


def maxima_in_graph(request: Request, call: Call, scale: float | None) -> torch.Tensor:
    """The largest score of each row through an operator; not differentiable.

    Args:
        request: The program.
        call: The checked call, of tensors that need no gradient; its own scale is not used.
        scale: Factor of q . k, or None for the default.

    Returns:
        (B, Hq, Lq), fp32 (fp64 for fp64).
    """
    given = operands(request, call, scale, _varying)
    found: torch.Tensor = torch.ops.attndsl.row_maxima(*given)
    return found


class Kept:
    """What is made while graphs are made, as attributes, so that graphs depend on each alone."""


KEPT = Kept()


def constant(value: Any) -> Any:
    """``value``; a number that varies from run to run is a constant of each graph then."""
    is_number = isinstance(value, int | float | torch.SymInt | torch.SymFloat)
    is_open = is_number and not isinstance(value, bool)
    return symbolic_shapes.guard_scalar(value) if is_open else value


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def keep(make: Callable[..., object], arguments: Mapping[str, object]) -> str:
    """Make an object of constants of a graph; the name under which :data:`KEPT` has it.

    This runs while a graph is made, and no graph holds it. Dynamo cannot follow the compiler, and
    need not: the object is the same in each run.

    Args:
        make: Takes ``arguments``.
        arguments: By name, all known when the graph is made.
    """
    key = repr((make.__qualname__, sorted(arguments.items(), key=lambda item: item[0])))
    name = f"of_{hashlib.sha256(key.encode()).hexdigest()}"
    if any(map(callable, arguments.values())):
        name += f"_{len(vars(KEPT))}"  # Another function may be what a name in its text means.
    if not hasattr(KEPT, name):
        setattr(KEPT, name, make(**arguments))
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_transformed_now() -> bool:
    """Dynamo enters transforms as it goes."""
    return is_transformed()


def _varying(numbers: Sequence[float]) -> torch.Tensor | None:
    """``numbers`` (n,) in fp64 on the CPU, or None where the graph has them all as constants.

    An operator's ``float`` is a constant of the graph, so that another number compiles another
    graph; what is made of tensors is not. Constants stay numbers: a tensor of the CPU keeps torch
    from using CUDA graphs.
    """
    if all(map(symbolic_shapes.has_static_value, numbers)):
        return None
    # torch.compile turns sums with open numbers into sums of tensors; not so torch.tensor.
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.stack([zero + number for number in numbers])
