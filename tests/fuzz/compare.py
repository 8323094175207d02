"""Runs a case on a backend and holds what comes out to the oracle.

An element may differ from the oracle by a multiple of what random errors of the tested precision
change it by. Cases in which such errors change a decision, or most of a result, are *unfit*: they
say nothing about a backend.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

import attndsl
from attndsl.errors import AttnDSLError, LimitError, UnsupportedError

from .graphs import InGraph
from .inputs import arriving, python_call, value_of
from .oracle import PRECISIONS, Errors, Oracle, Result, Unfit
from .parts import InParts
from .serving import Served, served_rows
from .text import text

if TYPE_CHECKING:
    from .inputs import Call
    from .program import Case

_RUNS = 2
_SLACK = 12.0
_ILL = 0.05
"""How much of a result errors may change before it is called ill-conditioned."""
_DEVIATIONS = 7
"""Standard deviations by which the number of kept weights may differ from what is expected."""
_TELLING = 1e-3
"""Least weight that no dtype makes 0."""
_MOST = 300.0
"""Largest score of a case that says something: beyond, a softmax is an argmax."""


class Verdict(Enum):
    """What became of a case."""

    GOOD = "good"
    REFUSED = "refused"
    UNFIT = "unfit"
    WRONG = "wrong"
    CRASHED = "crashed"
    REJECTED = "rejected"
    """A valid program or call that was called invalid."""

    @property
    def failed(self) -> bool:
        return self in (Verdict.WRONG, Verdict.CRASHED, Verdict.REJECTED)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a case runs."""

    backend: str
    dtype: str = "float64"
    device: str = "cpu"
    parts: bool = False
    """Whether calls are cut into parts."""
    ragged: bool = False
    """Whether batch entries have keys of different lengths."""
    served: bool = False
    """Whether they are packed requests over pages."""
    graphs: bool = False
    """Whether each call is a graph of torch.compile."""
    sequences: bool = False
    """Whether a case is several calls of one compiled object."""
    wrappers: bool = False
    """Whether it is several calls of functions with other libraries' signatures."""
    nan: bool = False
    """Whether rows in no sequence of such a call are NaN."""

    @property
    def exact(self) -> bool:
        """Whether functions keep exact forms: tolerances know nothing of hardware's fast ones."""
        return self.device != "cpu" and self.dtype in ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict, and its reason."""

    verdict: Verdict
    reason: str = ""
    """Short, and the same for cases that fail for one reason."""
    details: str = ""
    seconds: float = 0.0
    """What the backend took."""
    traits: frozenset[str] = field(default=frozenset())


@dataclass(frozen=True, slots=True)
class Expected:
    """What a case must give at a precision, and by how much each element may differ."""

    result: Result
    allowed: dict[str, torch.Tensor]


_OF_MASKS = (
    "a line before has masked some of its pairs",
    "would make a number of this -inf",
    "a weight of -inf has no meaning",
)
"""Refusals of scores that would lose the mask in ``where(c, x, -inf)``."""


def expect(
    oracle: Oracle, dtype: str, runs: int = _RUNS, kept: torch.Tensor | None = None
) -> Expected:
    """What backends must give in ``dtype``.

    Raises:
        Unfit: The case says nothing about a backend.
    """
    result = oracle.run(None, kept)
    if result.score.numel() and float(result.score.abs().max()) > _MOST:
        raise Unfit("large scores")
    spread = {name: torch.zeros_like(value) for name, value in result.values.items()}
    for number in range(runs):
        errors = Errors(PRECISIONS[dtype], torch.Generator().manual_seed(number))
        other = oracle.run(errors, kept)
        if not _same(result.decisions, other.decisions) or not torch.equal(result.live, other.live):
            raise Unfit("a decision that rounding may change")
        for name, value in other.values.items():
            difference = torch.where(value == result.values[name], 0.0, value - result.values[name])
            if not bool(difference.isfinite().all()):
                raise Unfit("a result that is not finite")
            spread[name] = torch.maximum(spread[name], difference.abs())
    allowed = {name: _allowed(result.values[name], spread[name], dtype) for name in spread}
    return Expected(result, allowed)


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _allowed(value: torch.Tensor, spread: torch.Tensor, dtype: str) -> torch.Tensor:
    if not value.numel():
        return spread
    finite = torch.where(value.isfinite(), value, 0.0)
    if not bool(value[value != -torch.inf].isfinite().all()):
        raise Unfit("a result that is not finite")
    size, typical = finite.square().mean().sqrt(), spread.square().mean().sqrt()
    if float(typical) > _ILL * float(size) + 1e-4:
        raise Unfit("ill-conditioned")
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    # Where a kernel multiplies and adds in one step, equal terms leave a rounding of fp32.
    least = 1e-4 * epsilon if dtype in ("float64", "float32") else 1e-6
    return _SLACK * (spread + typical) + 4 * epsilon * (finite.abs() + size) + least


def judge(case: Case, place: Place, runs: int = _RUNS) -> Outcome:
    """Run ``case`` at ``place`` and compare."""
    try:
        oracle = Oracle(case, place.device)
        expected = expect(oracle, place.dtype, runs) if case.dropout is None else None
    except Unfit as reason:
        return Outcome(Verdict.UNFIT, str(reason))
    begin = time.perf_counter()
    try:
        if expected is None:
            kept = _kept(case, place)
            expected = expect(oracle, place.dtype, runs, kept)
            _check_own_zeros(kept, expected.result)
            share = _wrong_share(case, kept, expected.result)
            if share is not None:
                return Outcome(Verdict.WRONG, "the share of kept weights is wrong", share)
            # That was a call of its own, of other head dims.
            begin = time.perf_counter()
        found = run(case, place)
    except Unfit as reason:
        return Outcome(Verdict.UNFIT, str(reason))
    except AttnDSLError as error:
        return refused(error, time.perf_counter() - begin)
    except Exception as error:
        seconds = time.perf_counter() - begin
        return Outcome(Verdict.CRASHED, cause_of(error), traceback.format_exc(), seconds)
    seconds = time.perf_counter() - begin
    traits = traits_of(expected.result)
    for name, value in expected.result.values.items():
        if name == "lse" and not case.lse:
            continue
        allowed = expected.allowed[name]
        if case.positions.counts is not None and name in ("out", "lse") and found[name] is not None:
            rows = served_rows(case)
            rows = rows if name == "lse" else rows[..., None]
            value = torch.where(rows.to(value.device), value, 0.0)
        if place.parts and found[name] is not None and value.numel():
            # Gradients of parts are rounded before they are added up.
            allowed = allowed + 8 * torch.finfo(found[name].dtype).eps * value.abs().amax()
        wrong = compared(name, value, allowed, found[name])
        if wrong is not None:
            return Outcome(Verdict.WRONG, f"{name} is wrong", wrong, seconds, traits)
    return Outcome(Verdict.GOOD, "", "", seconds, traits)


def refused(error: AttnDSLError, seconds: float) -> Outcome:
    welcome = isinstance(error, UnsupportedError | LimitError)
    welcome |= any(words in error.message for words in _OF_MASKS)
    # A tensor of another size may happen to be as long as a part.
    welcome |= "which the program looks up by" in error.message
    verdict = Verdict.REFUSED if welcome else Verdict.REJECTED
    return Outcome(verdict, f"{type(error).__name__}: {error.message}"[:160], str(error), seconds)


def cause_of(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def compared(
    name: str, value: torch.Tensor, allowed: torch.Tensor, found: torch.Tensor | None
) -> str | None:
    """What is wrong with ``found``, if anything."""
    if found is None:
        found = torch.zeros_like(value)
    if found.shape != value.shape:
        return f"{name} has shape {tuple(found.shape)}, not {tuple(value.shape)}"
    if not value.numel():
        return None
    # Gradients come in the dtype of what they are of.
    epsilon = torch.finfo(found.dtype).eps
    wide = found.detach().to(value.device).double()
    error = torch.where(wide == value, 0.0, (wide - value).abs())
    # A gradient of a half-precision tensor may be too small for it.
    smallest = torch.finfo(found.dtype).tiny
    over = error / (allowed + smallest + epsilon * torch.where(value.isfinite(), value, 0.0).abs())
    over = torch.where(over.isnan() & (error == 0), 0.0, over)
    if bool((over <= 1).all()):
        return None
    worst = int(torch.where(over.isnan(), torch.inf, over).argmax())
    place = tuple(int(x) for x in torch.unravel_index(torch.tensor(worst), value.shape))
    return (
        f"{name}{list(place)} is {float(wide[place]):.9g}, and must be {float(value[place]):.9g} "
        f"(give or take {float(allowed[place]):.2g}); {int((~(over <= 1)).sum())} of "
        f"{over.numel()} elements are wrong"
    )


def run(case: Case, place: Place) -> dict[str, torch.Tensor | None]:
    """What the backend gives: ``out``, ``lse`` and gradients by name.

    Calls of graphs are bound to what runs them once they are known: from the third one on.
    """
    for _ in range(2 if place.graphs else 0):
        _run(case, place)
    return _run(case, place)


def _run(case: Case, place: Place) -> dict[str, torch.Tensor | None]:
    call = python_call(case, place.dtype, place.device)
    given = {**call.operands, **call.captures}
    values = {name: value_of(source) for name, source in given.items()}
    for name in call.learned:
        values[name] = values[name].detach().requires_grad_()
    attention = _attention(case, place)
    attend = InParts(attention, case.seed) if place.parts else attention
    attend = InGraph(attention) if place.graphs else attend
    if case.positions.counts is not None:
        most = _most_queries(case, place)
        attend = Served(attention, case.positions.counts, case.positions.page, most)
    returned = attend(**values, **_options(call))
    out, lse = returned if case.lse else (returned, None)
    found: dict[str, torch.Tensor | None] = {"out": out, "lse": lse}
    if not call.learned:
        return found
    if not out.requires_grad:
        return found | {f"d{name}": None for name in call.learned}
    outputs, seeds = [out], [arriving(case)[0].to(place.device, out.dtype)]
    if lse is not None:
        outputs.append(lse)
        back = arriving(case)[1].to(place.device, lse.dtype)
        seeds.append(torch.where(lse.detach().isfinite(), back, 0.0))
    leaves = [values[name] for name in call.learned]
    grads = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
    return found | {f"d{name}": grad for name, grad in zip(call.learned, grads, strict=True)}


def _most_queries(case: Case, place: Place) -> int | None:
    """What a served call says of that. Kernels that read pages want to know it."""
    tells = place.backend == "decode" or case.seed % 3 == 0
    return case.sizes.q_len if tells else None


def _attention(case: Case, place: Place) -> attndsl.Attention:
    call = python_call(case, place.dtype, place.device)
    bound = {name: value_of(source) for name, source in call.bound.items()}
    return attndsl.compile(text(case), backend=place.backend, exact=place.exact, **bound)


def _options(call: Call) -> dict[str, Any]:
    return {name: value_of(source) for name, source in call.options.items()}


def _kept(case: Case, place: Place) -> torch.Tensor:
    """Which weights dropout keeps: those that are not 0 in the output where V is the identity.

    Bool (batch, heads, q_len, kv_len). A weight that is 0 by itself counts as dropped, which
    changes nothing.
    """
    call, sizes = python_call(case, place.dtype, place.device), case.sizes
    given = {**call.operands, **call.captures}
    values = {name: value_of(source) for name, source in given.items()}
    identity = torch.eye(sizes.kv_len, dtype=values["q"].dtype, device=place.device)
    values["v"] = identity.expand(sizes.batch, sizes.kv_heads, -1, -1)
    found = _attention(case, place)(**values, **_options(call))
    weights = found[0] if case.lse else found
    return weights.detach() != 0


def _check_own_zeros(kept: torch.Tensor, result: Result) -> None:
    """Refuse cases whose own weights are 0 for some live pairs: dropout decides on their gradients.

    Raises:
        Unfit: Nobody sees whether these are kept.
    """
    if bool((result.live & (result.weights == 0) & ~kept).any()):
        raise Unfit("a weight of 0, which may be dropped or kept")


def _wrong_share(case: Case, kept: torch.Tensor, result: Result) -> str | None:
    """What is wrong with how many weights are kept, if anything."""
    assert case.dropout is not None
    some = result.weights.abs() > _TELLING
    count, stays = int(some.sum()), int((some & kept).sum())
    wanted = count * (1 - case.dropout)
    if abs(stays - wanted) <= _DEVIATIONS * (wanted * case.dropout) ** 0.5:
        return None
    return f"{stays} of {count} weights are kept, and {wanted:.0f} are expected"


def traits_of(result: Result) -> frozenset[str]:
    """What is worth counting of a case: whether its mask and its score do something."""
    found = set()
    share = float(result.live.float().mean()) if result.live.numel() else 1.0
    found.add("no pair" if share == 0 else "all pairs" if share == 1 else "some pairs")
    if result.score.numel() and float((result.score - result.raw).abs().max()) > 1e-3:
        found.add("own score")
    if result.score.numel() and found & {"own score", "some pairs"}:
        found.add("useful")
    return frozenset(found)


def reproduction(case: Case, place: Place, outcome: Outcome) -> str:
    """Python that shows the failure without the fuzzer."""
    call = python_call(case, place.dtype, place.device)
    interpreted = place.device == "cpu" and place.backend not in ("cpu", "reference")
    lines = ["import os; os.environ['TRITON_INTERPRET'] = '1'"] if interpreted else []
    lines += ["import torch, attndsl", "", f'text = """\n{text(case)}\n"""']
    there = f".to({place.device!r})" if place.device != "cpu" else ""
    for name, source in {**call.operands, **call.captures}.items():
        grad = ".detach().requires_grad_()" if name in call.learned else ""
        lines.append(f"{name}_ = {source}{grad}")
    given = {name: f"{name}_" for name in (*call.operands, *call.captures)} | call.options
    arguments = ", ".join(f"{name}={value}" for name, value in given.items())
    bound = "".join(f", {name}={value}" for name, value in call.bound.items())
    bound = ", exact=True" * place.exact + bound
    lines.append(f'attn = attndsl.compile(text, backend="{place.backend}"{bound})')
    if place.parts:  # Beside tests/.
        lines.append(f"from fuzz.parts import InParts; attn = InParts(attn, {case.seed})")
    if place.graphs:
        lines.append("from fuzz.graphs import InGraph; attn = InGraph(attn)")
    at = case.positions
    if at.counts is not None:
        most = _most_queries(case, place)
        lines.append("from fuzz.serving import Served")
        lines.append(f"attn = Served(attn, {at.counts}, {at.page}, {most})")
    lines.append(f"{'out, lse' if case.lse else 'out'} = attn({arguments})")
    lines += _gradient_lines(case, call.learned, there)
    lines.append(f"# {outcome.verdict.value}: {outcome.reason}")
    last = outcome.details.strip().splitlines()[-1:] if outcome.details else []
    return "\n".join([*lines, *(f"# {line}" for line in last)])


def _gradient_lines(case: Case, learned: tuple[str, ...], there: str) -> list[str]:
    if not learned:
        return ['print("out", out)']
    s = case.sizes
    shape = (s.batch, s.heads, s.q_len, s.value_dim)
    lines = [
        f"generator = torch.Generator().manual_seed({case.seed})",
        f"back = torch.randint(-32, 33, {shape}, generator=generator){there}.to(out.dtype) / 32",
    ]
    outputs, seeds = "[out]", "[back]"
    if case.lse:
        lines.append(f"down = torch.randint(-32, 33, {shape[:3]}, generator=generator){there} / 32")
        lines.append("down = torch.where(lse.isfinite(), down.to(lse.dtype), 0)")
        outputs, seeds = "[out, lse]", "[back, down]"
    leaves = ", ".join(f"{name}_" for name in learned)
    names = ", ".join(f"d{name}" for name in learned)
    lines.append(
        f"{names}, = torch.autograd.grad({outputs}, [{leaves}], {seeds}, allow_unused=True)"
    )
    lines.append(f'print("out", out); print(({", ".join(f"{n!r}, d{n}" for n in learned)}))')
    return lines
