"""Exact sums that any pairs may meet in: tables looked up by what the program computes.

Numbers are rounded to multiples of a power of two and added as integers, which gives the same sum
in any order; so GPUs may add with atomics and yet find the same bits each time (the idea of J.
Demmel and H. D. Nguyen, Fast reproducible floating-point summation, ARITH 2013: one unit in the
last place for all terms, chosen from a bound). The bound is R, of the sum of sizes of the terms of
a row (of one query of one head). Where a softmax makes the weights, and all else is at most so many
times the raw score, R comes from the operands. Otherwise two kernels make the terms: the first
finds the greatest such sum, added up in a fixed order; the second adds.

With N rows in the call, no element's sum exceeds N * R. The unit is the power of two that makes
this less than 2^62, with a factor of 2 for the rounding of R; each term errs by at most half of it,
less than N * R * 2^-60. At 2^20 rows that is 2^-40 R, and terms come as fp32 numbers. An R from
operands is some hundreds of times the greatest sum, for random ones of 128 columns 2^9 times: the
error is then 2^-31 of that sum at 2^20 rows, in a term that is mostly one of thousands. Random
scores are some 2^3 times smaller than the norms of their rows say. Infinities and NaN are not part
of the sums: what they are at each element is noted, in any order too.

Additions to memory are what takes the time (see M51 in docs/dev/measured.md). Where no index of any
lookup tells batch entries apart, or heads, pairs at the same positions meet in the same element. A
program then sums these up in fp32, in order, and adds each sum once. Such a sum has the error of an
fp32 sum of its terms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.ir import DType, Op, dependencies, toposort

from ...emit.device_functions import PAIR, program_function
from ...emit.expression import Printer, element_offset
from ...gradients.gradient_plan import Rest
from ...gradients.gradient_terms import terms_of
from ...kernels.config import Config
from ..generate import EXTRA
from ..generate_gradients import ROWS_OF_TILE, Sums, numbers_of
from ..tiles import Tiles
from . import pair_gradients
from .kind import OwnKernels, own_kernel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ...base import Call, CallGradients
    from ...emit.facts import KernelFacts
    from ...gradients.gradient_plan import GradientShare
    from ...gradients.gradient_terms import Term
    from ...kernels.kernel import Kernel
    from .kind import BackwardState

_ROOM = 61
_OVERFLOWN = 160
"""A row's sum of sizes is less than two to this power, whatever fp32 numbers they are."""
_COPIES = 64
_ELEMENTS = 1 << 18
"""Small tables are added up in copies, up to that many elements, lest all programs meet."""
_AT_MOST_ONE = frozenset({Op.TANH, Op.SIGMOID, Op.SIN, Op.COS, Op.SIGN})
_MOST_TOGETHER = 2
"""Lookups whose sums over batch entries and heads a program has room for."""
INF, MINUS_INF, NAN = 1, 2, 4
"""Flags that kernels note of an element (``library.note_infinities``)."""


@dataclass(frozen=True, slots=True)
class Exact:
    """Buffers of the second kernel for one tensor."""

    name: str
    sums: torch.Tensor
    """(copies, elements) int64."""
    notes: torch.Tensor
    """(elements,) int32."""
    steps: tuple[int, ...]
    """Strides of the tensor's dims in them."""

    def arguments(self) -> list[object]:
        """In the order of :func:`_exact_arguments`."""
        return [self.sums, self.notes, *self.sums.shape, *self.steps]


def buffers(names: Iterable[str], call: Call) -> list[Exact]:
    """Zeros for the tensors ``names``, in order."""
    found = []
    for name in sorted(names):
        shape = call.tensors[name].shape
        count = shape.numel()
        copies = max(1, min(_COPIES, _ELEMENTS // count))
        sums = torch.zeros((copies, count), dtype=torch.int64, device=call.q.device)
        notes = torch.zeros(count, dtype=torch.int32, device=call.q.device)
        found.append(Exact(name, sums, notes, notes.view(shape).stride()))
    return found


def by_any_pairs(
    lowered: Lowered, call: Call, names: Collection[str]
) -> list[tuple[frozenset[str], Rest | None]]:
    """The tensors of ``names`` that pairs look up, and what no index of their lookups tells apart.

    Pairs at the same positions then meet, and are summed up in order before that. None if that is
    one batch entry and one head, if there are too many lookups, or if an index varies with the
    score.
    """
    names = frozenset(term.name for term in terms_of(lowered, names) if term.along == "pair")
    terms = terms_of(lowered, names)
    found = [dependencies(index)[index] for term in terms for index in term.leaf.args]
    varies = frozenset[str]().union(*found)
    batch, heads = call.q.shape[:2]
    rest = Rest(1 if "b" in varies else batch, 1 if "h" in varies else heads)
    apart = len(terms) > _MOST_TOGETHER or "score" in varies or rest.members == 1
    return [(names, None if apart else rest)]


class Size(NamedTuple):
    """A float is at most ``constant + of_score * |raw score|`` in size."""

    constant: float
    of_score: float = 0.0

    def plus(self, other: Size) -> Size:
        """Size of a sum."""
        return Size(self.constant + other.constant, self.of_score + other.of_score)

    def times(self, factor: float) -> Size:
        """Size of a product with a constant of this size."""
        return Size(self.constant * factor, self.of_score * factor)


def size_of(root: Node) -> Size | None:
    """Upper bound of the size of ``root``; None where that is not known."""
    found: dict[Node, Size | None] = {}
    for item in toposort(root):
        if item.op is Op.CONST and item.dtype is DType.FLOAT:
            found[item] = Size(abs(float(item.value)))  # type: ignore[arg-type]
        elif item.op is Op.SCORE:
            found[item] = Size(0.0, 1.0)
        elif item.op in _AT_MOST_ONE:
            found[item] = Size(1.0)
        else:
            found[item] = _size_of_sum(item, [found[arg] for arg in item.args])
    return found[root]


def _size_of_sum(item: Node, args: list[Size | None]) -> Size | None:
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args):
        return None
    if item.op in (Op.NEG, Op.ABS):
        return known[0]
    if item.op in (Op.ADD, Op.SUB):
        return known[0].plus(known[1])
    constants = [i for i, arg in enumerate(known) if arg.of_score == 0.0]
    if item.op is Op.MUL and constants:
        (i, *_) = constants
        return known[1 - i].times(known[i].constant)
    return None


def known_factors(lowered: Lowered, names: Collection[str]) -> Mapping[str, Size] | None:
    """Sizes of the factors of the score's gradient, added up, for each of the tensors ``names``.

    None where that is not known, or where weights are not those of a softmax alone, which add up
    to 1.
    """
    program = lowered.program
    if program.weights is not None or program.dropout is not None:
        return None
    found = dict.fromkeys(sorted(names), Size(0.0))
    for term in terms_of(lowered, names):
        for factor in term.factors.values():
            size = size_of(factor)
            if size is None:
                return None
            found[term.name] = found[term.name].plus(size)
    return found


def bounds_from_operands(
    factors: Mapping[str, Size], call: Call, grad_out: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor:
    """R of each tensor of :func:`known_factors`, in that order; int32, the bits of fp32 numbers.

    With P the weights of a row, the sizes of dS = P * (dO V^T - delta) add up to no more than the
    greatest |dO V^T| and |delta|, and the former is at most the sum of sizes of the row of dO times
    the greatest size in V. A raw score is at most the product of the norms of its rows of Q and K,
    times the scale. Rows with an infinity or NaN make no finite terms, and do not count.

    Args:
        factors: Of the gradient of the score.
        call: As of the backward.
        grad_out: (batch, heads, q_len, value_dim).
        delta: fp32, any shape.
    """
    norm, fp32 = torch.linalg.vector_norm, torch.float32
    sizes = norm(grad_out, 1, dim=-1, dtype=fp32)
    # Finite numbers may add up to infinity, which is a bound of those.
    sizes = torch.where(norm(grad_out, torch.inf, dim=-1, dtype=fp32).isfinite(), sizes, 0.0)
    values = norm(call.v, torch.inf, dim=-1, dtype=fp32)
    row = sizes.amax() * torch.where(values.isfinite(), values, 0.0).amax()
    row = row + torch.where(delta.isfinite(), delta.abs(), 0.0).amax()
    score = abs(call.scale) * _longest(call.q) * _longest(call.k) if _reads_score(factors) else 0.0
    # Twice, since weights and products are rounded.
    bounds = [2.0 * (size.constant + size.of_score * score) * row for size in factors.values()]
    return torch.stack(bounds).view(torch.int32)


def _reads_score(factors: Mapping[str, Size]) -> bool:
    return any(size.of_score for size in factors.values())


def _longest(rows: torch.Tensor) -> torch.Tensor:
    """The greatest norm of a finite row of a tensor (batch, heads, length, dim); fp32."""
    norm, fp32 = torch.linalg.vector_norm, torch.float32
    lengths = norm(rows, dim=-1, dtype=fp32)
    finite = norm(rows, torch.inf, dim=-1, dtype=fp32).isfinite()
    return torch.where(finite, lengths, 0.0).amax()


def scales_of(bounds: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of the terms, and what undoes them: fp64 powers of two, on the device.

    Args:
        bounds: int32: the bits of R, an fp32 number, of each tensor.
        rows: The number of rows of all heads and batch entries.
    """
    exponent = (bounds >> 23).long()
    top = torch.where(exponent == 255, _OVERFLOWN, exponent - 126)
    shift = _ROOM - (rows - 1).bit_length() - top
    return _power(shift), _power(-shift)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Two to a power that normal fp64 numbers have."""
    return ((1023 + exponent) << 52).view(torch.float64)


def gradient_of(found: Exact, inverse: torch.Tensor, call: Call) -> torch.Tensor:
    """The gradient, once the second kernel has added to ``found``.

    Args:
        found: Its buffers.
        inverse: 0-d, of :func:`scales_of`.
        call: As of the backward.
    """
    like = call.tensors[found.name]
    total = found.sums.sum(0).double() * inverse
    notes = found.notes
    infinite = torch.where(notes == INF, torch.inf, -torch.inf)
    infinite = torch.where(notes > MINUS_INF, torch.nan, infinite)
    total = torch.where(notes == 0, total, infinite)
    return total.to(like.dtype).view(like.shape)


def _raise_bounds(count: int, facts: KernelFacts) -> list[str]:
    return [f"raise_bound(given.BOUNDS + {number}, sums[{number}])" for number in range(count)]


def _exact_arguments(count: int, facts: KernelFacts) -> list[str]:
    ranks = {capture.name: capture.rank for capture in facts.captures}
    names = ["SCALES"]
    for name in facts.tensor_gradients:
        names += [f"exact_{name}", f"notes_{name}", f"copies_{name}", f"step_{name}"]
        names += [f"gstride{dim}_{name}" for dim in range(ranks[name])]
    return names


def _scatter(
    term: Term, part: str, number: int, printer: Printer, facts: KernelFacts
) -> tuple[list[str], set[str]]:
    """Lines that add a term's parts, as integers, at the elements that it looks up."""
    name = term.name
    capture = next(capture for capture in facts.captures if capture.name == name)
    # Strides of the buffer are its own, so no dim of it counts as having stride 1.
    place = element_offset(printer.indices(term.leaf), "gstride", name, capture.wide, frozenset())
    lines = [f"part = {part}", f"exact = exact_parts(part, given.SCALES + {number})"]
    if term.along != "pair":
        # Integers are added up in any order: in the tile first, along what the index lacks.
        varies = frozenset[str]().union(*(printer.deps[index] for index in term.leaf.args))
        if "kv" not in varies:
            lines.append("exact = tl.sum(exact, 1, keep_dims=True)")
        if "q" not in varies:
            lines.append("exact = tl.sum(exact, 0, keep_dims=True)")
    lines += [
        f"place = {place}",
        f"number = (tl.program_id(0) % given.copies_{name}).to(tl.int64)",
        f"add_exactly(given.exact_{name} + number * given.step_{name}, place, exact)",
        f"note_infinities(given.notes_{name}, place, part)",
    ]
    return lines, {"exact_parts", "add_exactly", "note_infinities"}


def _meetings(terms: tuple[Term, ...], facts: KernelFacts) -> tuple[list[str], set[str]]:
    """The function that adds each term's sums at the elements that it looks up."""
    printer = Printer(tuple(index for term in terms for index in term.leaf.args), facts.names())
    lines: list[str] = []
    helpers: set[str] = set()
    numbers = numbers_of(terms, facts)
    for number, term in enumerate(terms):
        found, used = _scatter(term, f"sums[{number}]", numbers[term.leaf], printer, facts)
        lines += found
        helpers |= used
    doc = "Add the sums, as integers, at the elements that their pairs look up."
    body = [*printer.lines, *lines]
    function = program_function("scatter", f"sums, live, {PAIR}", facts, doc, body, True)
    return [function], set(printer.helpers) | helpers


def _store_meetings(count: int, facts: KernelFacts) -> list[str]:
    # Where heads are told apart each is its own; elsewhere nothing looks at them.
    return [
        "head = Head(share.b, share.h, share.h // (sizes.heads // sizes.kv_heads))",
        "rows = share.corner.q + tl.arange(0, BLOCK_M)",
        "columns = share.corner.kv + tl.arange(0, BLOCK_N)",
        "live = (rows < sizes.q_len)[:, None] & (columns < sizes.kv_len)[None, :]",
        "scatter(sums, live, q, kv, Scope(head, sizes, given))",
    ]


BOUNDS = Sums(
    shape=ROWS_OF_TILE,
    by_tensor=True,
    added="tl.sum(finite_size({}), 1)",
    helpers=frozenset({"finite_size", "raise_bound"}),
    given=lambda count, facts: ["BOUNDS"],
    stored_from="sums, given",
    store=_raise_bounds,
)
"""Sums of sizes, the greatest of which bounds the exact sums."""
EXACT = Sums(
    shape=ROWS_OF_TILE,
    by_tensor=True,
    scatter=_scatter,
    given=_exact_arguments,
    stored_from="sums, given",
)
"""Sums that any pairs may meet in."""
TOGETHER = Sums(
    functions=_meetings,
    given=_exact_arguments,
    stored_from=pair_gradients.SUMS.stored_from,
    store=_store_meetings,
)
"""Sums over batch entries and heads, of every pair, that any pairs may meet in."""
_TEMPLATES = (*EXTRA, "scattered")
# They hold no tile of sums. In one stage, since Triton 3.6 cannot pipeline products in a branch.
_FOR_BOUNDS = Tiles(
    dense={
        64: (Config(128, 64, 8, 1), Config(64, 64, 4, 1), Config(32, 32, 4, 1)),
        128: (Config(128, 64, 8, 1), Config(64, 64, 4, 1), Config(32, 32, 4, 1)),
        256: (Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
        512: (Config(32, 32, 4, 1),),
    }
)
# Integers of 64 bits take registers: more threads, or smaller tiles.
_FOR_EXACT = Tiles(
    dense={
        64: (Config(64, 64, 8, 1), Config(64, 32, 4, 1), Config(32, 32, 4, 1)),
        128: (Config(64, 32, 4, 1), Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
        256: (Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
        512: (Config(32, 32, 4, 1),),
    }
)
FIND_BOUNDS = replace(
    own_kernel("scatter_bounds", "scattered", BOUNDS, _FOR_BOUNDS, _TEMPLATES), derives=False
)
ADD_EACH = own_kernel("scatter_sums", "scattered", EXACT, _FOR_EXACT, _TEMPLATES)
ADD_TOGETHER = own_kernel(
    "scatter_together", "pairs", TOGETHER, pair_gradients.TILES, pair_gradients.TEMPLATES
)


def _needed(lowered: Lowered, share: GradientShare) -> tuple[Kernel, ...]:
    """First the kernel that finds the bound of the sums, where the operands do not give it."""
    add = ADD_EACH if share.rest is None else ADD_TOGETHER
    return (FIND_BOUNDS, add) if known_factors(lowered, share.names) is None else (add,)


def _make(state: BackwardState, share: GradientShare, found: CallGradients) -> CallGradients:
    call, rest = state.call, share.rest
    _, batch, heads, q_len = state.lse.shape
    factors = known_factors(state.lowered, share.names)
    exact = buffers(share.names, call)

    def run(own: Kernel, last: list[Any]) -> None:
        layout, kernel = state.kernel_of(own, share)
        programs, first = -(-q_len // kernel.config.block_m) * batch * heads, []
        if own is ADD_TOGETHER:
            assert rest is not None
            programs = pair_gradients.programs_of(state, kernel, rest)
            first = [rest.batches, rest.heads, pair_gradients.parts_of(rest, call)]
        state.launch(kernel, programs, layout, first, last)

    if factors is None:
        bounds = torch.zeros(len(exact), dtype=torch.int32, device=call.q.device)
        run(FIND_BOUNDS, [bounds])
    else:
        bounds = bounds_from_operands(factors, call, state.grad_out, state.delta)
    scales, inverses = scales_of(bounds, batch * heads * q_len)
    last = [scales, *(value for item in exact for value in item.arguments())]
    run(ADD_EACH if rest is None else ADD_TOGETHER, last)
    made = zip(exact, inverses, strict=True)
    return found.plus({item.name: gradient_of(item, x, call) for item, x in made})


BY_ANY_PAIRS = OwnKernels(
    name="scattered",
    takes=by_any_pairs,
    kernels=(FIND_BOUNDS, ADD_EACH, ADD_TOGETHER),
    needed=_needed,
    make=_make,
)
