"""Calls in graphs of ``torch.compile`` and ``torch.export``, and on tensors without data.

Apart from eager calls, since it needs parts of torch that take seconds to import.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import strided
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import has_static_value

from attndsl.backends.base import Backward
from attndsl.backends.log_sum import public_lse
from attndsl.errors import UnsupportedError

from .argument_checks import autocast_dtype
from .backward_call import Gradients, lse_or_zeros, with_out_of
from .bind import bind
from .chunked_autograd import is_transformed
from .distributed_checks import is_within_context_parallel, refuse_context_parallel
from .op_encoding import packed
from .torch_ops_impl import operands, through_operator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from attndsl.backends.base import Call, Wants
    from attndsl.ir import Program

    from .backward_call import Results
    from .options import CallOptions, Location
    from .torch_ops_impl import OperatorCall

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OPERANDS = 3
FORWARD = torch.ops.attndsl.forward
"""The operator of calls."""


def attend_in_graph(
    request: OperatorCall, call: Call, scale: float | None
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
    found: tuple[torch.Tensor, torch.Tensor] = FORWARD(
        *packed(operands(request, call, scale, _varying))
    )
    out, lse = found
    return out, public_lse(lse)


def backward_in_graph(
    request: OperatorCall, call: Call, scale: float | None, given: Results, wants: Wants
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


def maxima_in_graph(request: OperatorCall, call: Call, scale: float | None) -> torch.Tensor:
    """The largest score of each row through an operator; not differentiable.

    Args:
        request: The program.
        call: The checked call, of tensors that need no gradient; its own scale is not used.
        scale: Factor of q . k, or None for the default.

    Returns:
        (B, Hq, Lq), fp32 (fp64 for fp64).
    """
    given = operands(request, call, scale, _varying)
    found: torch.Tensor = torch.ops.attndsl.row_maxima(*packed(given))
    return found


def constant_kinds(tensors: Sequence[Any], numbers: Iterable[Any]) -> list[tuple[Any, ...]] | None:
    """Class, shape, strides, dtype and device of each tensor, if that and all numbers are known.

    Sizes and numbers may be left open where a graph is made.

    Args:
        tensors: q, k, v and the captures.
        numbers: Other arguments: a number, a dtype or None each.

    Returns:
        None if something else than tensors is among ``tensors``, or if a size or number is open.
    """
    # Dynamo follows this, and guards each name of Python's that it meets.
    kinds, sizes = [], []
    for x in numbers:
        if x is not None and not isinstance(x, torch.dtype):
            sizes.append(x)
    try:
        for x in tensors:
            if x.layout is not strided:
                return None
            sizes += [*x.shape, *x.stride()]
            kinds.append((type(x), x.shape, x.stride(), x.dtype, x.device))
    except AttributeError:  # It is refused where the call is followed.
        return None
    for x in sizes:
        if not has_static_value(x):
            return None
    return kinds


class Constants(NamedTuple):
    """Constants of a call while a graph is made: kinds of tensors, location and options."""

    kinds: Sequence[tuple[Any, ...]]
    """Class, shape, strides, dtype and device of q, k, v and each captured tensor."""
    names: Sequence[str]
    """Names of the captured tensors."""
    location: Location
    options: CallOptions
    has_lse: bool
    """True if the call returns lse."""


def stand_ins(known: Constants) -> list[torch.Tensor] | None:
    """Tensors of these kinds without elements, as autocast has them; None if one is special."""
    made = []
    for place, (own, shape, stride, dtype, device) in enumerate(known.kinds):
        if own not in _PLAIN or device != known.kinds[0][4]:
            return None
        taken = autocast_dtype(dtype, device.type) if place < _OPERANDS else dtype
        # What is converted may have other strides.
        made.append(torch.empty_strided(shape, stride, dtype=dtype, device="meta").to(taken))
    return made


def arguments_of(
    request: OperatorCall, program: Program, tensors: Sequence[torch.Tensor], known: Constants
) -> tuple[object, ...] | None:
    """The operator's arguments for a call, as constants of its graph.

    Dynamo follows the checks of a call otherwise, and leaves a guard for each name and function
    that it meets: 203, which each call of the graph looks at. See M53 in docs/dev/measured.md.

    Args:
        request: The program.
        program: The same.
        tensors: What :func:`stand_ins` made.
        known: The call.

    Returns:
        dtypes of q, k and v, names of the captures in the operator's order, ``what``, ints and
        floats; None for a call of which more is to be done, which is followed then.

    Raises:
        AttnDSLError: As of the call.
    """
    if program.dropout is not None or (known.has_lse and program.weights is not None):
        return None
    if _is_transformed_now() or is_within_context_parallel():
        return None
    q, k, v, *rest = tensors
    captures = dict(zip(known.names, rest, strict=True))
    call = bind(program, (q, k, v), captures, known.location, known.options)
    made = packed(operands(request, call, known.options.scale))
    names = tuple([decl.name for decl in program.tensors])
    as_given = [q, k, v, *[captures[name] for name in names]]
    if [id(x) for x in made.tensors] != [id(x) for x in as_given]:
        return None  # Something is copied, narrowed or left out.
    return (q.dtype, k.dtype, v.dtype), names, made.what, tuple(made.ints), tuple(made.floats)


class GraphObjects:
    """Objects made while graphs are made, as attributes, so that graphs depend on each alone."""


KEPT = GraphObjects()


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
    if all(map(has_static_value, numbers)):
        return None
    # torch.compile turns sums with open numbers into sums of tensors; not so torch.tensor.
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.stack([zero + number for number in numbers])
