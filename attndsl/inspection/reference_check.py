"""Calls held to the reference in fp64: their results and all their gradients.

The method is that of the tests (docs/dev/architecture.md, "Verification"): on average a result may
be a number of times as far from the reference in fp64 as the reference in the same dtype is, and no
element may be further off than rounding explains in its own row (:mod:`.tolerance`).
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.attention import Attention, on_reference
from attndsl.call.argument_checks import autocast, joined
from attndsl.call.attention_base import bound_call
from attndsl.call.backward_call import WantedGradients, wants_for
from attndsl.call.dropout_seed import draw_seed
from attndsl.call.optional_captures import sizes_of_operands
from attndsl.call.options import CALL_ARGUMENTS, LOCATION, options_in
from attndsl.errors import ArgumentError, ShapeError, UnsupportedError, visible
from attndsl.ir import DType, dependencies, toposort

from .tolerance import largest_allowed, spreads_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from attndsl.backends.base import Call, Scalar
    from attndsl.ir import Program

MAX_BYTES = 8 << 30
"""Limit of the reference's bytes, unless the caller allows more."""
FACTORS = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 10.0, torch.float64: 10.0}
"""Allowed error of the output as a multiple of the error of the reference in the same dtype."""
GRADIENT_FACTORS = {"out": 1.0, "lse": 1.0, "dq": 2.5, "dk": 4.0, "dv": 4.0}
ROWS = frozenset({"out", "dq", "dk", "dv"})
"""Results whose last dim is a row."""
_CAPTURE_FACTOR = 4.0
_HALVES = (torch.float16, torch.bfloat16)
_ROUNDINGS = 8
"""A result may have few elements, whose errors in the reference may be small by chance. So one
element may also be off by this many times the dtype's precision, n by n ** -0.5 of that."""
_FLOOR = 16 * torch.finfo(torch.float32).eps
"""Rounding of sums in fp32, exact in the reference by chance; of results of size 1."""
_FLOOR_64 = 1024 * torch.finfo(torch.float64).eps
"""The same in fp64, where the reference gives no error of its own."""
_HEADS = (
    "result", "shape", "max error", "of allowed", "relative", "reference", "mean error",
    "allowed mean",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """One result against the reference in fp64. Errors are those of elements that are finite."""

    name: str
    """``out``, ``lse``, or ``d`` and the name of what the gradient belongs to."""
    shape: tuple[int, ...]
    max_error: float
    of_allowed: float
    """The largest error of an element as a share of what that element may be off: at most 1."""
    relative_error: float
    """Error of the whole result: the norm of the error, divided by that of the reference."""
    mean_error: float
    reference_error: float
    """The mean error of the reference in the tested dtype."""
    allowed: float
    """Limit of ``mean_error``: a factor times ``reference_error``, and some roundings."""
    ok: bool
    note: str = ""
    """Complaints about single elements, in words."""


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Result of :func:`compare`; ``print`` shows a table."""

    rows: tuple[Check, ...]
    backend: str
    """Backend that ran the call."""
    device: str
    dtype: torch.dtype
    """dtype in which the call computed."""
    seed: int | torch.Tensor | None = field(default=None, compare=False)
    """Seed of dropout; None where the program has none."""
    dead_rows: int | None = 0
    """Rows of queries without a live pair, over batch entries and heads. Their output is 0. None
    where the program has weights of its own, which may give a score of -inf a weight."""

    @property
    def ok(self) -> bool:
        """True if all results are as near to exact as they may be."""
        return all(row.ok for row in self.rows)

    @property
    def title(self) -> str:
        """Backend, device, dtype and verdict of the comparison, in a line."""
        failed = [row.name for row in self.rows if not row.ok]
        verdict = f"FAILED: {', '.join(failed)}" if failed else "ok"
        return (
            f"{self.backend} on {self.device}, {_short(self.dtype)}, "
            f"beside the reference in float64: {verdict}"
        )

    @property
    def remark(self) -> str:
        """A line about rows without a live pair, or an empty text where there are none."""
        if not self.dead_rows:
            return ""
        (out,) = (row.shape for row in self.rows if row.name == "out")
        told = "has no live pair; its" if self.dead_rows == 1 else "have no live pair; their"
        return f"{self.dead_rows} of {math.prod(out[:3])} rows {told} output is 0"

    def __str__(self) -> str:
        return "\n".join([self.title, *table(self.rows), *filter(None, [self.remark])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = [[*_cells(row)[:-1], _verdict(row)] for row in self.rows]
        said = "; ".join(filter(None, [self.title, self.remark]))
        lines = [f"<table><caption>{html.escape(said)}</caption>", "<tr>"]
        lines += [f"<th>{head}</th>" for head in (*_HEADS, "verdict")]
        for row in cells:
            lines += ["</tr><tr>", *(f"<td>{html.escape(cell)}</td>" for cell in row)]
        return "".join([*lines, "</tr></table>"])


def table(rows: Sequence[Check]) -> list[str]:
    """Aligned lines of plain text: the head, a line for each row."""
    cells = [[*_HEADS, "verdict"], *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADS))]
    lines = []
    for row in cells:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:-1], widths[2:], strict=True)]
        lines.append("  ".join([*left, *right, row[-1]]))
    return lines


def _cells(row: Check) -> list[str]:
    numbers = (
        row.max_error, row.of_allowed, row.relative_error, row.reference_error, row.mean_error,
        row.allowed,
    )  # fmt: skip
    shape = "x".join(map(str, row.shape)) or "0-d"
    return [visible(row.name), shape, *(f"{number:.2e}" for number in numbers), _verdict(row)]


def _verdict(row: Check) -> str:
    return ("ok" if row.ok else "FAILED") + (f": {row.note}" if row.note else "")


@dataclass(frozen=True, slots=True)
class Case:
    """A call, and the gradients of its results."""

    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """q, k and v."""
    captures: Mapping[str, torch.Tensor | Scalar]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the call, without ``return_lse``."""
    learned: tuple[str, ...] = ()
    """Names of the captures whose gradients are compared."""
    lse: bool = False
    """True to compare the log-sum-exp."""
    grad_out: torch.Tensor | None = None
    """Gradient of the output; None where no gradients are compared."""
    grad_lse: torch.Tensor | None = None


Results = dict[str, torch.Tensor]


def compare(
    attn: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    grad_out: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
    wants_captures: Collection[str] | None = None,
    max_bytes: int = MAX_BYTES,
    progress: Callable[[str], None] | None = None,
    captures: Mapping[str, torch.Tensor | Scalar] | None = None,
    **arguments: Any,
) -> Comparison:
    """Hold a call and all its gradients to the reference in fp64, on the call's own tensors.

    The call runs as it is: on its backend and device, in its dtype. Nothing of yours is changed,
    and ``.grad`` stays as it is.

    Args:
        attn: The compiled program.
        q: (B, Hq, Lq, D), as of the call.
        k: (B, Hkv, Lk, D).
        v: (B, Hkv, Lk, Dv).
        grad_out: (B, Hq, Lq, Dv), the gradient of the output; normal numbers by default.
        grad_lse: (B, Hq, Lq), that of the log-sum-exp; zeros by default, and normal numbers with
            ``return_lse=True``.
        wants_captures: Names of the captures whose gradients are compared; by default all float
            tensors, and float params that are given as 0-d tensors.
        max_bytes: How much memory the reference may take, which is dense: 8 GiB by default.
        progress: Called with a line before each step.
        captures: The program's tensors and params.
        **arguments: The same, by keywords, and all other arguments of the call. Dropout draws a
            seed where none is given, and all calls use that one.

    Returns:
        A table, as text and as records: ``print(found)``, ``found.ok``, ``found.rows``. It also
        says how many rows of queries have no live pair (``found.dead_rows``; None where the program
        has weights of its own).

    Raises:
        ArgumentError: More than ``max_bytes``; what no call could take.
        AttnDSLError: The call is refused.

    Example:
        >>> import torch, attndsl
        >>> attn = attndsl.compile("tensor gain[heads]: float; score = gain[h] * score")
        >>> q = k = v = torch.randn(1, 2, 16, 8)
        >>> [row.name for row in attndsl.compare(attn, q, k, v, gain=torch.ones(2)).rows]
        ['out', 'lse', 'dq', 'dk', 'dv', 'dgain']
    """
    if not isinstance(attn, Attention):
        raise ArgumentError(
            f"attn is a {type(attn).__name__}", hint="pass what attndsl.compile(...) gives"
        )
    options = {name: arguments.pop(name) for name in CALL_ARGUMENTS & arguments.keys()}
    return_lse = options.pop("return_lse", False)
    given: dict[str, Any] = {x.name: x.default for x in attn.tensors if x.default is not None}
    given |= {x.name: x.default for x in attn.params if x.default is not None}
    given |= joined(captures, arguments)
    # In which nothing is optional, so that all that follows is of one program.
    location = options_in(options)[1]
    attn, present = attn.variant(given, sizes_of_operands(q, k), location)
    given = dict(present)
    program = attn.lowered.program
    checked = {name: x for name, x in options.items() if name != "tiles"}
    with torch.inference_mode(False), torch.enable_grad():
        call, backend = bound_call(attn, (q, k, v), {**checked, "captures": given})
        if (return_lse or grad_lse is not None) and program.weights is not None:
            raise UnsupportedError(
                "the log-sum-exp is that of a softmax, and the program has other weights",
                hint="drop return_lse and grad_lse",
            )
        _check_bytes(program, call, max_bytes)
        if program.dropout is not None and options.get("seed") is None:
            options["seed"] = int(draw_seed(torch.device("cpu")))
        case = Case(
            (q, k, v),
            given,
            options,
            _learned(program, call, wants_captures),
            program.weights is None,
            *_gradients(call, grad_out, grad_lse, return_lse),
        )
        step = progress or _no_progress
        step(f"the call, on {backend}")
        rows = held_to_reference(attn, case, results(attn, case), step)
        dead = _dead_rows(attn, case, max_bytes)
    seed = options.get("seed") if program.dropout is not None else None
    return Comparison(rows, backend, str(call.q.device), call.q.dtype, seed, dead)


def _dead_rows(attention: Attention, case: Case, max_bytes: int) -> int | None:
    """Count rows of queries without a live pair; :func:`_check_bytes` has allowed the array.

    None where the program has weights of its own: these may give a score of -inf a weight.
    """
    if attention.lowered.program.weights is not None:
        return None
    options = {n: x for n, x in case.options.items() if n == "scale" or n in LOCATION}
    q, k, _ = (x.detach() for x in case.operands)
    with torch.no_grad():
        scores = attention.scores(q, k, captures=case.captures, max_bytes=max_bytes, **options)
        return int((scores == -torch.inf).all(-1).sum())


def _no_progress(line: str) -> None:
    return


def _learned(program: Program, call: Call, asked: Collection[str] | None) -> tuple[str, ...]:
    """Names of the captures whose gradients are compared, in the order of their declarations."""
    names = [decl.name for decl in program.tensors if decl.dtype is DType.FLOAT]
    names += [
        decl.name
        for decl in program.params
        if decl.dtype is DType.FLOAT and isinstance(call.params[decl.name], torch.Tensor)
    ]
    if asked is None:
        return tuple(names)
    wants_for(call, WantedGradients(captures=asked))  # Refuses what has no gradient.
    return tuple(name for name in names if name in asked)


def _gradients(
    call: Call, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of ``out`` and ``lse``, those that are given or made up.

    Raises:
        ArgumentError, ShapeError: One that does not fit.
    """
    rows = tuple(call.q.shape[:3])
    shape = (*rows, call.v.shape[3])
    for name, value, wanted in (("grad_out", grad_out, shape), ("grad_lse", grad_lse, rows)):
        if value is not None and not isinstance(value, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(value).__name__}", hint="pass a tensor")
        if value is not None and tuple(value.shape) != wanted:
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)}", hint=f"pass one of shape {wanted}"
            )
    generator = torch.Generator().manual_seed(0)
    device, dtype = call.q.device, call.q.dtype
    if grad_out is None:
        kind = torch.float32 if call.wide else dtype
        grad_out = torch.randn(shape, generator=generator, device="cpu").to(device, kind)
    if grad_lse is None and return_lse:
        kind = torch.promote_types(dtype, torch.float32)
        grad_lse = torch.randn(rows, generator=generator, device="cpu").to(device, kind)
    return grad_out.to(device), None if grad_lse is None else grad_lse.to(device)


def _check_bytes(program: Program, call: Call, most: int) -> None:
    """Refuse calls whose dense reference would take more than about ``most`` bytes.

    Torch keeps a value of each pair for each operation that varies with pairs. The softmax, its
    gradient and the products around them take about as many as six operations.
    """
    if not isinstance(most, int) or isinstance(most, bool):
        raise ArgumentError(f"max_bytes is {most!r}", hint="pass a number of bytes")
    varies = dependencies(*program.roots())
    by_pair = [
        item for item in toposort(*program.roots())
        if "score" in varies[item] or {"q", "kv"} <= varies[item]
    ]  # fmt: skip
    pairs = call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.k.shape[2]
    needed = 8 * pairs * (len(by_pair) + 6)
    if needed > most:
        raise ArgumentError(
            f"the reference is dense and would take about {needed / 2**30:.1f} GiB, and max_bytes "
            f"allows {most / 2**30:.1f} GiB",
            hint="pass fewer heads or batch entries, or some rows of q with q_len= and q_offset=; "
            "or a larger max_bytes",
        )


def results(attention: Attention, case: Case) -> Results:
    """The results of a call, and with ``case.grad_out`` its gradients.

    ``out``, ``lse``, and gradients under ``d`` and the name of what they belong to.
    """
    return _run(attention, case, exact=False)[0]


def _run(
    attention: Attention, case: Case, exact: bool, rounded: torch.dtype | None = None
) -> tuple[Results, Results]:
    """Results of a call, in fp64 if ``exact``; and what rounding the output does to gradients.

    The latter are those of an output that the call rounds to the dtype ``rounded``, if it does.
    """

    def leaf(x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        return (x.double() if exact else x.clone() if x.is_inference() else x).requires_grad_()

    # Autocast rounds operands, which is no error of who gets them.
    given = map(autocast, case.operands) if exact else case.operands
    operands = dict(zip(("q", "k", "v"), map(leaf, given), strict=True))
    learned = {name: leaf(case.captures[name]) for name in case.learned}  # type: ignore[arg-type]
    options = dict(case.options)
    if exact:
        options.pop("out_dtype", None)
    with_lse = attention.lowered.program.weights is None
    with torch.set_grad_enabled(case.grad_out is not None):
        both = attention(
            *operands.values(), captures={**case.captures, **learned}, return_lse=with_lse,
            **options,
        )  # fmt: skip
    ends: list[torch.Tensor] = list(both) if isinstance(both, tuple) else [both]
    found = {"out": ends[0].detach()}
    if case.lse:
        found["lse"] = ends[1].detach()
    if case.grad_out is None:
        return found, {}
    grads = [case.grad_out.to(ends[0].dtype)]
    if case.grad_lse is not None:
        grads.append(case.grad_lse.to(ends[1].dtype))
    leaves = {f"d{name}": x for name, x in (operands | learned).items()}
    again = rounded is not None and with_lse
    found |= _pulled(leaves, ends[: len(grads)], grads, again)
    if rounded is None or not with_lse:
        return found, {}
    return found, _pulled(leaves, ends[1:], [_of_rounding(ends[0], grads[0], rounded)])


def _pulled(
    leaves: Mapping[str, torch.Tensor],
    ends: list[torch.Tensor],
    grads: list[torch.Tensor],
    again: bool = False,
) -> Results:
    parts = torch.autograd.grad(
        ends, list(leaves.values()), grads, retain_graph=again, allow_unused=True
    )
    return {
        name: torch.zeros_like(x) if part is None else part
        for (name, x), part in zip(leaves.items(), parts, strict=True)
    }


def _of_rounding(out: torch.Tensor, grad_out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Estimate what half a rounding of each element of ``out`` adds to a row's rowsum(dO * O).

    A backward takes that sum from the stored output (FlashAttention-2, arXiv 2307.08691, section
    3.1), and it is to gradients what a gradient of the log-sum-exp is. Where few keys share a row,
    nothing else may be left of the gradient. Signs are drawn, as those of roundings are by chance.
    """
    products = out.detach() * grad_out
    size = products.square().sum(-1).sqrt() * (torch.finfo(dtype).eps / 2)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, size.shape, generator=generator, device="cpu").to(size) * 2 - 1
    return size * signs


def held_to_reference(
    attention: Attention, case: Case, found: Results, progress: Callable[[str], None]
) -> tuple[Check, ...]:
    """A check of each of ``found``, which are the results of ``case``."""
    reference, dtype = on_reference(attention), autocast(case.operands[0]).dtype
    # A map of tiles is what the call is held to account for.
    case = replace(case, options={n: x for n, x in case.options.items() if n != "tiles"})
    progress("the reference in float64")
    own = found["out"].dtype
    golden, rounding = _run(reference, case, True, own if own in _HALVES else None)
    progress(f"the reference in {_short(dtype)}")
    learned: list[Any] = [case.captures[name] for name in case.learned]
    in_fp64 = dtype is torch.float64 and all(x.dtype is dtype for x in learned)
    usual = golden if in_fp64 else results(reference, case)
    progress("what rounding may do")
    spread = spreads_of(reference, case, dtype)
    sizes = _sizes(case)
    return tuple(
        _check(
            name,
            _Held(found[name], usual[name], exact, rounding.get(name), spread[name]),
            dtype,
            sizes.get(name, sizes["captures"]),
        )
        for name, exact in golden.items()
    )


def _sizes(case: Case) -> dict[str, float]:
    """Usual size of each result by the sizes of its factors, so that scaled data is as good.

    All are 1 for normal numbers. An output is as large as values, a gradient as its factors are.
    """
    q, k, v = (_root_mean_square(x) for x in case.operands)
    if case.grad_out is None:
        return {"out": v, "lse": 1.0, "captures": 1.0}
    grad = _root_mean_square(case.grad_out)
    score = grad * v + (0.0 if case.grad_lse is None else _root_mean_square(case.grad_lse))
    return {"out": v, "lse": 1.0, "dq": score * k, "dk": score * q, "dv": grad, "captures": score}


def _root_mean_square(x: torch.Tensor) -> float:
    found = float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0
    return found if math.isfinite(found) else 0.0


class _Held(NamedTuple):
    """A result, and what it is held to."""

    found: torch.Tensor
    usual: torch.Tensor
    """The result of the reference in the same dtype."""
    exact: torch.Tensor
    rounding: torch.Tensor | None
    """The effect of rounding the output."""
    spread: torch.Tensor


def _check(name: str, held: _Held, dtype: torch.dtype, size: float) -> Check:
    """One result."""
    found, usual, exact = (x.detach() for x in held[:3])
    note = _not_finite(name, found, usual, exact)
    there = found.isfinite() & exact.isfinite()
    error = torch.where(there, found.double() - exact, 0.0).abs()
    exact = torch.where(there, exact, 0.0)
    usual_error = torch.where(there & usual.isfinite(), usual.double() - exact, 0.0).abs()
    mean, mean_usual = _mean(error), _mean(usual_error)
    norm = float(exact.norm())
    own = norm * max(1, exact.numel()) ** -0.5
    floor = _FLOOR_64 if found.dtype is dtype is torch.float64 else _FLOOR
    factor = FACTORS[dtype] * GRADIENT_FACTORS.get(name, _CAPTURE_FACTOR)
    allowed = factor * mean_usual + floor * size
    if held.rounding is not None:
        rounding = held.rounding.detach()
        allowed += factor * _mean(torch.where(rounding.isfinite(), rounding, 0.0).abs())
    allowed += _ROUNDINGS * max(1, exact.numel()) ** -0.5 * torch.finfo(dtype).eps * own
    if dtype is torch.float64 or name not in GRADIENT_FACTORS:
        allowed += floor * own
    if name not in GRADIENT_FACTORS:
        # Of few sums, where the reference may be right by chance.
        usable = there & held.spread.isfinite()
        allowed = max(allowed, _mean(torch.where(usable, held.spread, 0.0)))
    rows = name in ROWS
    largest = largest_allowed(exact, usual_error, held.spread, found.dtype, rows) + floor * size
    share = error / largest
    of_allowed = float(share.max()) if share.numel() else 0.0
    note = note or _too_far(error, largest, share)
    return Check(
        name,
        tuple(found.shape),
        float(error.max()) if error.numel() else 0.0,
        of_allowed,
        float(error.norm()) / norm if norm else float(error.norm() > 0),
        mean,
        mean_usual,
        allowed,
        mean <= allowed and not note,
        note,
    )


def _too_far(error: torch.Tensor, largest: torch.Tensor, share: torch.Tensor) -> str:
    """The element that is furthest off for its row, if that is further than it may be."""
    number = int((share > 1).sum())
    if not number:
        return ""
    worst = int(share.argmax())
    place = [int(x) for x in torch.unravel_index(torch.tensor(worst), share.shape)]
    told = "1 element is" if number == 1 else f"{number} elements are"
    return (
        f"{told} too far off: {place} by {float(error.flatten()[worst]):.2e}, where rounding may "
        f"leave {float(largest.flatten()[worst]):.2e}"
    )


def _mean(x: torch.Tensor) -> float:
    return float(x.mean()) if x.numel() else 0.0


def _not_finite(name: str, found: torch.Tensor, usual: torch.Tensor, exact: torch.Tensor) -> str:
    """Describe wrong infinities and NaN; -inf is right for the lse of a row without keys."""
    right = (found == exact) & (exact == -torch.inf) if name == "lse" else None
    wrong = [~(x.isfinite() if right is None else x.isfinite() | right) for x in (found, exact)]
    mine, others = (int(x.sum()) for x in wrong)
    if others:
        where = "compile(text, checked=True) says where from"
        return f"{others} elements of the reference are not finite; {where}"
    if mine:
        too = int((~usual.isfinite() & wrong[0]).sum())
        same = f", {too} of them in the reference of this dtype too" if too else ""
        return f"{mine} elements are not finite{same}"
    return ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
