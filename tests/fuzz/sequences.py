"""Sequences of calls of one compiled object, of which each is held to the oracle.

Between calls tensors are written in place or replaced, and shapes, layouts, positions, params,
wanted gradients and the context of the call change or stay. A sequence is run as the program that
its reproduction prints.
"""

from __future__ import annotations

import itertools
import math
import random
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import AttnDSLError

from . import layouts
from .compare import Outcome, Place, Verdict, cause_of, compared, expect, refused, traits_of
from .expressions import KV, SCORE, Q, apply, as_float
from .generate import Scale, drawn, positions, ragged, trimmed, useful
from .inputs import literal, python_call, shapes
from .oracle import Oracle, Unfit
from .program import Given, Kind, Line, Literal, Name, Param, Positions, Target, Values
from .shrink import candidates
from .text import text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .layouts import Memory
    from .program import Case

SMALL = Scale((0, 1, 1, 2, 3, 5, 7, 8, 9, 12, 16, 19, 33), (1, 2, 4, 8), 700)
TALL = Scale((2, 9, 91, 130, 150), (2, 4), 24000)
"""Enough pairs of a head that the tiles of a call are planned, and the plan is kept."""
_CONTEXTS = ("", "", "", "", "no_grad", "inference_mode", "default dtype", "thread", "checkpoint",
             "save_on_cpu", "twice")  # fmt: skip
_WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
_FLOATS = (0.0, -0.0, 0.0, -0.0, 1.0, 0.5, -1.0, 2.0, float("nan"))
_INTS = (0, 1, 2, 3, 5, -1, -2, 2**31, 2**40, -(2**33))
_NUMBERS = itertools.count()
_MOST = 1 << 16
"""Elements of a tensor."""


@dataclass(frozen=True, slots=True)
class Step:
    """A call, and how its tensors come to be."""

    case: Case
    """The program, and sizes and values of this call."""
    memory: dict[str, Memory]
    """Of q, k, v, captured tensors, and the gradients ``back`` and ``down`` that arrive."""
    again: frozenset[str] = frozenset()
    """Names of what is written in place, if the call before has it in the same memory."""
    spelled: dict[str, int] = field(default_factory=dict)
    """Ways to write numbers, by the names of params."""
    context: str = ""


@dataclass(frozen=True, slots=True)
class Sequence:
    """Calls of one compiled object."""

    steps: tuple[Step, ...]


def draw(seed: int, place: Place) -> Sequence:
    """The sequence of a seed."""
    rng = random.Random(f"sequence {seed}")
    scale = TALL if rng.random() < 0.15 else SMALL
    common = rng.random() < 0.35
    while True:
        case = replace(drawn(rng, scale), dropout=None)
        if scale is TALL and case.sizes.q_len * case.sizes.kv_len < 8200:
            continue
        if common:
            case = _common(rng, case)
        if _fits(case) and (common or rng.random() < 0.2 or useful(case)):
            break
    if not common or scale is TALL or rng.random() < 0.3:
        case = _sensing(rng, case)
    steps = [_step(rng, case, None, place)]
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        steps.append(_step(rng, case, rng.choice(steps), place))
    return Sequence(tuple(steps))


def _fits(case: Case) -> bool:
    """Whether all tensors have a size, and a small one."""
    return all(
        min(shape, default=0) >= 0 and math.prod(shape) <= _MOST for shape in shapes(case).values()
    )


def _common(rng: random.Random, case: Case) -> Case:
    """A program such as most are, which backends know ways of their own for."""
    causal, near = apply(">=", Q, KV), apply("<", apply("-", Q, KV), Literal(rng.choice((3, 9))))
    masks = rng.choice(((), (causal,), (apply("<", KV, Literal(rng.choice((5, 20)))),),
                        (causal, near), (near,)))  # fmt: skip
    lines = [Line(Target.MASK, mask) for mask in masks]
    if not lines or rng.random() < 0.4:
        twice = apply("*", SCORE, Literal(2.0)) if rng.random() < 0.5 else SCORE
        lines.append(Line(Target.SCORE, twice))
    return trimmed(replace(case, lines=tuple(lines)))


def _sensing(rng: random.Random, case: Case) -> Case:
    """``case`` with lines that tell numbers apart which are equal, or large."""
    lines, params = list(case.lines), list(case.params)
    given = rng.choice((Given.NUMBER, Given.NUMBER, Given.NUMBER, Given.TENSOR, Given.BOUND))
    tall = case.sizes.q_len * case.sizes.kv_len > SMALL.most
    if rng.random() < (0.7 if tall else 0.35):
        zero = Name("nil", Kind.FLOAT)
        over = apply("/", Literal(1.0), zero)
        params.append(Param("nil", Kind.FLOAT, rng.choice((0.0, -0.0)), given))
        if rng.random() < (0.8 if tall else 0.3):
            seen = apply("<", as_float(apply("-", Q, KV)), over)
            lines.append(Line(Target.MASK, seen))
        else:
            chosen = apply("where", apply(">", over, Literal(0.0)), SCORE,
                           apply("*", SCORE, Literal(0.5)))  # fmt: skip
            lines.insert(0, Line(Target.SCORE, chosen))
    if rng.random() < 0.3:
        size = Name("far", Kind.INT)
        params.append(Param("far", Kind.INT, rng.choice(_INTS), given))
        seen = apply(rng.choice(("<", ">=")), apply("-", Q, KV), size)
        lines.append(Line(Target.MASK, seen))
    return trimmed(replace(case, lines=tuple(lines), params=tuple(params)))


def _step(rng: random.Random, case: Case, like: Step | None, place: Place) -> Step:
    """A call as ``like``, of which some things change; of ``case`` where there is none."""
    memory, context = {}, ""
    if like is not None:
        case, memory = _changed(rng, like.case), like.memory
        case = case if _fits(case) else like.case
    found = {}
    for name, shape in _shapes(case).items():
        old = memory.get(name)
        if old is not None and old.shape == shape and rng.random() < 0.75:
            found[name] = old
        else:
            found[name] = layouts.draw(rng, shape, name not in _kinds(case, Kind.BOOL, Kind.INT))
    if rng.random() < 0.5:
        context = rng.choice(_CONTEXTS)
    if place.graphs and context not in ("", "no_grad"):
        context = ""
    names = [*found, *(p.name for p in case.params),
             "q_offset", "kv_offset", "q_index", "kv_index", "kv_lengths"]  # fmt: skip
    again = frozenset(name for name in names if rng.random() < 0.8)
    # Dynamo makes tensors of numpy's numbers.
    ways = (0, 3) if place.graphs else (0, 0, 0, 1, 2, 3)
    spelled = {p.name: rng.choice(ways) for p in case.params}
    return Step(case, found, again, spelled, context)


def _kinds(case: Case, *kinds: Kind) -> set[str]:
    return {tensor.name for tensor in case.tensors if tensor.kind in kinds}


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    s = case.sizes
    back = {"back": (s.batch, s.heads, s.q_len, s.value_dim), "down": (s.batch, s.heads, s.q_len)}
    return shapes(case) | back


def _changed(rng: random.Random, case: Case) -> Case:
    """Another call of the same program."""
    if rng.random() < 0.35:
        case = _resized(rng, case)
    fixed = case.positions.q_index or case.positions.kv_index or case.positions.kv_lengths
    if fixed or rng.random() < 0.35:
        case = replace(case, positions=positions(rng, case.sizes))
        if rng.random() < 0.25:
            case = ragged(rng, case)
    if rng.random() < 0.2:
        case = replace(case, scale=rng.choice((None, 0.5, 1.0, 0.0, -0.0, -0.4)))
    if rng.random() < 0.3:
        case = replace(case, lse=not case.own_weights and not case.lse)
    dims = {x.name for t in case.tensors for d in t.dims for x in _names(d)}
    return replace(
        case,
        inputs=tuple(_redrawn(rng, values) for values in case.inputs),
        tensors=tuple(replace(t, values=_redrawn(rng, t.values)) for t in case.tensors),
        params=tuple(p if p.name in dims else _other(rng, p) for p in case.params),
        seed=rng.randrange(1 << 20) if rng.random() < 0.5 else case.seed,
    )


def _names(item: Any) -> list[Name]:
    return ([item] if isinstance(item, Name) else []) + [x for a in item.args for x in _names(a)]


def _resized(rng: random.Random, case: Case) -> Case:
    sizes = case.sizes
    scale = TALL if sizes.q_len * sizes.kv_len > SMALL.most else SMALL
    for name in ("batch", "q_len", "kv_len"):
        if rng.random() < 0.4:
            pool = (1, 1, 2, 3) if name == "batch" else scale.lengths[1:]
            sizes = replace(sizes, **{name: rng.choice(pool)})
    if rng.random() < 0.15:
        sizes = replace(sizes, heads=sizes.kv_heads * rng.choice((1, 2, 3)))
    if sizes.batch * sizes.heads * sizes.q_len * sizes.kv_len > scale.most:
        return case
    return replace(case, sizes=sizes, positions=Positions())


def _redrawn(rng: random.Random, values: Values) -> Values:
    if rng.random() < 0.5:
        values = replace(values, seed=rng.randrange(1 << 20))
    whole = values.dtype and not getattr(torch, values.dtype).is_floating_point
    if rng.random() < 0.2 and not whole:
        values = replace(values, learned=not values.learned)
    return values


def _other(rng: random.Random, param: Param) -> Param:
    if rng.random() < 0.5 or param.given is Given.DEFAULT:
        return param
    pool = {Kind.FLOAT: _FLOATS, Kind.INT: _INTS, Kind.BOOL: (True, False)}[param.kind]
    value = rng.choice(pool)
    if param.given is Given.BOUND and value != value:
        return param  # compile() refuses NaN.
    param = replace(param, value=value)
    if param.given is not Given.BOUND and rng.random() < 0.25:
        ways = [Given.NUMBER, Given.TENSOR] + [Given.LEARNED] * (param.kind is Kind.FLOAT)
        param = replace(param, given=rng.choice(ways))
    return param


# The program of a sequence.


def opening(sequence: Sequence, own: str = "") -> list[str]:
    """Lines before the first call."""
    return [
        "import numpy as np, torch, torch.utils.checkpoint, attndsl",
        f'text = """\n{own}{text(sequence.steps[0].case)}\n"""',
    ]


@dataclass(slots=True)
class Writer:
    """Writes the lines of one call after the other, and knows what those before have left."""

    place: Place
    drawn: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """How values of each name were made, their memory first."""
    learned: dict[str, bool] = field(default_factory=dict)
    bound: str | None = None

    def prepared(self, step: Step) -> tuple[list[str], dict[str, str]]:
        """Lines that make what a call is given, and its arguments."""
        case = step.case
        call = python_call(case, self.place.dtype)
        lines = self._compiled(call.bound)
        arguments = {}
        values = dict(zip("qkv", case.inputs, strict=True))
        values |= {tensor.name: tensor.values for tensor in case.tensors}
        for name, each in values.items():
            dtype = self.place.dtype if name in "qkv" else each.dtype
            lines += self._tensor(step, name, replace(each, dtype=dtype))
            lines += self._learning(name, name in call.learned)
            arguments[name] = f"{name}_"
        for param in case.params:
            if param.name not in call.captures:
                continue
            arguments[param.name] = f"{param.name}_"
            if param.given is Given.NUMBER:
                arguments[param.name] = spelling(param, step.spelled.get(param.name, 0))
                self.drawn.pop(param.name, None)
                continue
            lines += self._small(step, param.name, call.captures[param.name])
            lines += self._learning(param.name, param.given is Given.LEARNED)
        for name, source in call.options.items():
            arguments[name] = source
            if source.startswith("torch."):
                lines += self._small(step, name, source)
                arguments[name] = f"{name}_"
        wide = "float64" if self.place.dtype == "float64" else "float32"
        for at, (name, dtype) in enumerate((("back", self.place.dtype), ("down", wide))):
            if call.learned and (name == "back" or case.lse):
                lines += self._tensor(step, name, Values(dtype, -32, 32, 32, case.seed + at))
        return lines, arguments

    def called(self, step: Step, arguments: dict[str, str]) -> list[str]:
        """Lines of the call and of its gradients."""
        case, context = step.case, step.context
        learned = python_call(case, self.place.dtype).learned
        call = f"attn({', '.join(f'{name}={value}' for name, value in arguments.items())})"
        results = "out, lse" if case.lse else "out"
        lines = _in_context(f"{results} = {call}", call, results, context)
        if not learned or context in _WITHOUT_GRADIENTS:
            return lines
        outputs, backs = "[out]", "[back_]"
        if case.lse:
            outputs, backs = "[out, lse]", "[back_, down]"
            lines.append("down = down_ if bool(lse.isfinite().all()) else "
                         "torch.where(lse.detach().isfinite(), down_, 0)")  # fmt: skip
        leaves = ", ".join(f"{name}_" for name in learned)
        names = "".join(f"d{name}_, " for name in learned)
        keep = ", retain_graph=True" if context == "twice" else ""
        grad = f"torch.autograd.grad({outputs}, [{leaves}], {backs}, allow_unused=True{keep})"
        lines += [f"{names}= {grad} if out.requires_grad else [None] * {len(learned)}"] * (
            2 if keep else 1
        )
        return lines

    def _compiled(self, bound: dict[str, str]) -> list[str]:
        place = self.place
        given = "".join(f", {name}={value}" for name, value in bound.items())
        if given == self.bound:
            return []
        self.bound = given
        lines = [f'attn = attndsl.compile(text, backend="{place.backend}"{given})']
        if place.graphs:
            lines += ["eager = attn",
                      "attn = torch.compile(lambda **given: eager(**given), dynamic=True, "
                      'fullgraph=True, backend="aot_eager")']  # fmt: skip
        return lines

    def _tensor(self, step: Step, name: str, values: Values) -> list[str]:
        memory = step.memory[name]
        source = (
            f"torch.randint({values.low}, {values.high + 1}, ({memory.length},), "
            f"generator=torch.Generator().manual_seed({values.seed}))"
        )
        if values.step != 1:
            source = f"({source} / {values.step})"
        source += f".to(torch.{values.dtype})"
        before, now = self.drawn.get(name), (memory, values.dtype, source)
        if before is not None and before[:2] == now[:2] and name in step.again:
            self.drawn[name] = now
            return [] if before == now else [f"{name}_base.copy_({source})"]
        self.drawn[name] = now
        self.learned[name] = False
        return [f"{name}_base = {source}", f"{name}_ = {memory.view(f'{name}_base')}.detach()"]

    def _small(self, step: Step, name: str, source: str) -> list[str]:
        """Lines for a tensor of few numbers."""
        kind = (source.count(","), "[" in source, "[]" in source, source.split("dtype=")[1])
        before, now = self.drawn.get(name), (kind, source)
        self.drawn[name] = now
        if before is not None and before[0] == kind and name in step.again:
            return [] if before == now else [f"{name}_.detach().copy_({source})"]
        self.learned[name] = False
        return [f"{name}_ = {source}"]

    def _learning(self, name: str, wanted: bool) -> list[str]:
        if self.learned.get(name, False) == wanted:
            return []
        self.learned[name] = wanted
        return [f"{name}_.requires_grad_({wanted})"]


def spelling(param: Param, way: int) -> str:
    """A param's number as Python, or as another type that says the same."""
    value = param.value
    plain = literal(value)
    if param.kind is Kind.BOOL:
        return f"np.bool_({plain})" if way == 1 else plain
    if param.kind is Kind.INT:
        small = abs(value) < 2**31
        ways = (f"np.int64({plain})", f"np.int32({plain})" if small else plain,
                repr(float(value)) if abs(value) < 2**53 else plain)  # fmt: skip
        return plain if way == 0 else ways[way - 1]
    whole = math.isfinite(value) and value == int(value) and (value, math.copysign(1, value))
    exact = math.isnan(value) or float(torch.tensor(value, dtype=torch.float32)) == value
    ways = (
        f"np.float64({plain})", f"np.float32({plain})" if exact else plain,
        repr(int(value)) if whole and whole != (0.0, -1.0) else plain,
    )  # fmt: skip
    return plain if way == 0 else ways[way - 1]


def _in_context(line: str, call: str, results: str, context: str) -> list[str]:
    if context in _WITHOUT_GRADIENTS:
        return [f"with torch.{context}(): {line}"]
    if context == "save_on_cpu":
        return [f"with torch.autograd.graph.save_on_cpu(): {line}"]
    if context == "checkpoint":
        return [f"{results} = torch.utils.checkpoint.checkpoint(lambda: {call}, "
                "use_reentrant=False)"]  # fmt: skip
    if context == "default dtype":
        return ["torch.set_default_dtype(torch.float64)", line,
                "torch.set_default_dtype(torch.float32)"]  # fmt: skip
    if context == "thread":
        return ["from concurrent.futures import ThreadPoolExecutor",
                f"with ThreadPoolExecutor(1) as pool: {results} = pool.submit(lambda: {call})"
                ".result()"]  # fmt: skip
    return [line]


# Judging.


def judge(
    sequence: Sequence, place: Place, runs: int = 2, apart: bool = False
) -> tuple[Outcome, int]:
    """Run the calls until one fails: its outcome and number, or the outcome of all and their sum.

    A call that says nothing (:class:`Unfit`) is run all the same, for what it leaves behind. A
    sequence ``apart`` has a param of its own, so that it finds nothing that another one has left.
    """
    scope: dict[str, Any] = {}
    writer = Writer(place)
    if place.graphs:
        torch._dynamo.reset()
    own = f"param apart{next(_NUMBERS)}: int = 0\n" if apart else ""
    exec("\n".join(opening(sequence, own)), scope)
    outcomes: list[Outcome] = []
    for at, step in enumerate(sequence.steps):
        outcome = _judge_step(step, place, runs, writer, scope)
        if outcome.verdict.failed:
            return outcome, at
        outcomes.append(outcome)
    told = [each for each in outcomes if each.verdict is Verdict.GOOD] or outcomes
    seconds = max(each.seconds for each in outcomes)
    return replace(told[-1], seconds=seconds), len(outcomes)


def _judge_step(
    step: Step, place: Place, runs: int, writer: Writer, scope: dict[str, Any]
) -> Outcome:
    case = step.case
    reason = ""
    expected = None
    lines, arguments = writer.prepared(step)
    try:
        exec("\n".join(lines), scope)
    except AttnDSLError as error:  # Of compile().
        writer.drawn.clear()
        writer.bound = None
        return refused(error, 0.0)
    try:
        expected = expect(_oracle(step, scope), place.dtype, runs)
    except Unfit as error:
        reason = str(error)
    begin = time.perf_counter()
    before = _versions(step, scope)
    try:
        exec("\n".join(writer.called(step, arguments)), scope)
    except AttnDSLError as error:
        found = refused(error, time.perf_counter() - begin)
        return found if expected is not None else replace(found, verdict=Verdict.REFUSED)
    except Exception as error:
        return _crashed(error, scope, arguments, time.perf_counter() - begin)
    finally:
        torch.set_default_dtype(torch.float32)
    seconds = time.perf_counter() - begin
    if before != _versions(step, scope):
        return Outcome(Verdict.WRONG, "a call has written to its arguments", "", seconds)
    if expected is None:
        return Outcome(Verdict.UNFIT, reason, "", seconds)
    grads = step.context not in _WITHOUT_GRADIENTS
    for name, value in expected.result.values.items():
        if (name == "lse" and not case.lse) or (name not in ("out", "lse") and not grads):
            continue
        got = scope[name if name in ("out", "lse") else f"{name}_"]
        wrong = compared(name, value, expected.allowed[name], got)
        if wrong is not None:
            return Outcome(Verdict.WRONG, f"{name} is wrong", wrong, seconds)
    return Outcome(Verdict.GOOD, "", "", seconds, traits_of(expected.result))


def _versions(step: Step, scope: dict[str, Any]) -> list[int]:
    return [scope[f"{name}_"]._version for name in step.memory if f"{name}_" in scope]


def _crashed(
    error: Exception, scope: dict[str, Any], arguments: dict[str, str], seconds: float
) -> Outcome:
    """Dynamo says with an error of its own what a call is refused for."""
    details = traceback.format_exc()
    if "eager" in scope:
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        try:
            exec(f"eager({given})", scope)
        except AttnDSLError as refusal:
            return refused(refusal, seconds)
    return Outcome(Verdict.CRASHED, cause_of(error), details, seconds)


def _oracle(step: Step, scope: dict[str, Any]) -> Oracle:
    """The oracle of a call whose tensors are those in ``scope``."""
    case = step.case
    oracle = Oracle(case)
    for name, given in oracle.given.items():
        if isinstance(given, torch.Tensor):
            oracle.given[name] = _dense(scope[f"{name}_"])
    for at, name in enumerate(("back", "down")):
        if name in step.memory and f"{name}_" in scope and _has(case, name):
            oracle.arriving[at] = _dense(scope[f"{name}_"]).double()
    return oracle


def _has(case: Case, name: str) -> bool:
    """Whether a call has that gradient."""
    return bool(python_call(case, "float64").learned) and (name == "back" or case.lse)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own."""
    found = torch.empty(x.shape, dtype=x.dtype)
    found.copy_(x.detach())
    return found.double() if found.is_floating_point() else found


# Failures.


def shrink(
    sequence: Sequence, fails: Callable[[Sequence], bool], seconds: float = 60.0
) -> Sequence:
    """The shortest sequence found that fails as ``sequence`` does."""
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for candidate in _simpler(sequence):
            if time.monotonic() > end:
                return sequence
            if fails(candidate):
                sequence, progress = candidate, True
                break
    return sequence


def _simpler(sequence: Sequence) -> Iterator[Sequence]:
    steps = sequence.steps
    if len(steps) > 1:
        for at in range(len(steps)):
            yield Sequence((*steps[:at], *steps[at + 1 :]))
    for candidate in candidates(steps[-1].case):
        if candidate.lines != steps[-1].case.lines:
            changed = [_of_lines(step, candidate) for step in steps]
            yield Sequence(tuple(changed))
    for at, step in enumerate(steps):
        for simpler in _simpler_steps(step):
            yield Sequence((*steps[:at], simpler, *steps[at + 1 :]))


def _of_lines(step: Step, like: Case) -> Step:
    return replace(step, case=trimmed(replace(step.case, lines=like.lines)))


def _simpler_steps(step: Step) -> Iterator[Step]:
    if step.context:
        yield replace(step, context="")
    if any(step.spelled.values()):
        yield replace(step, spelled={})
    for name, memory in step.memory.items():
        if memory != (simple := layouts.plain(memory.shape)):
            yield replace(step, memory={**step.memory, name: simple})
    for candidate in candidates(step.case):
        if candidate.lines == step.case.lines and _fits(candidate):
            old, new = _shapes(step.case), _shapes(candidate)
            memory = {
                name: step.memory[name] if old.get(name) == shape else layouts.plain(shape)
                for name, shape in new.items()
            }
            yield replace(step, case=candidate, memory=memory)


def reproduction(sequence: Sequence, place: Place, outcome: Outcome) -> str:
    """Python that shows the failure without the fuzzer."""
    writer = Writer(place)
    lines = opening(sequence)
    for number, step in enumerate(sequence.steps, 1):
        prepared, arguments = writer.prepared(step)
        lines += [f"# Call {number}.", *prepared, *writer.called(step, arguments)]
    learned = python_call(sequence.steps[-1].case, place.dtype).learned
    if learned and sequence.steps[-1].context not in _WITHOUT_GRADIENTS:
        lines.append(f"print({', '.join(f'{name!r}, d{name}_' for name in learned)})")
    lines.append('print("out", out)')
    lines.append(f"# {outcome.verdict.value}: {outcome.reason}")
    last = outcome.details.strip().splitlines()[-1:] if outcome.details else []
    return "\n".join([*lines, *(f"# {line}" for line in last)])


def try_seed(
    seed: int, place: Place, shrinking: float, confirming: int
) -> tuple[Sequence, Outcome, str]:
    """The sequence of a seed, what became of it, and a failure's program."""
    sequence = draw(seed, place)
    outcome, at = judge(sequence, place)
    if outcome.verdict.failed:
        runs = confirming if outcome.verdict is Verdict.WRONG else 2
        sure, where = judge(sequence, place, runs, apart=True)
        if not sure.verdict.failed:
            sure, where = judge(sequence, place, runs)
        outcome, at = sure, where
    if not outcome.verdict.failed:
        return sequence, outcome, ""
    sequence = Sequence(sequence.steps[: at + 1])

    def fails(other: Sequence) -> bool:
        found, where = judge(other, place, 4, apart=True)
        same = found.verdict is outcome.verdict and where == len(other.steps) - 1
        return same and (
            found.verdict is Verdict.WRONG
            or found.reason.split(":")[0] == outcome.reason.split(":")[0]
        )

    small = shrink(sequence, fails, shrinking)
    last, _ = judge(small, place, confirming, apart=True)
    if not last.verdict.failed:
        small, last = sequence, outcome
    return sequence, replace(last, seconds=outcome.seconds), reproduction(small, place, last)
