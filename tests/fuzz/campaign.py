"""Many cases at one or several places, by several processes, with statistics and reproductions."""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from support.interpreter import hasten

from . import sequences, wrappers
from .compare import Outcome, Place, Verdict, judge, reproduction
from .edges import edged
from .generate import DEVICE, PIECES, SHARED_KEYS, SMALL, TILED, Scale, generate, ragged
from .program import Apply, Dot, Invoke, Load, Masked, Member, everything
from .serving import served
from .shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .program import Case

_SLOW = 40.0
"""Seconds of a call, compilation included, that are worth reporting."""
_CONFIRMING = 12
"""Runs with random errors before a result is called wrong."""
_IDLE = 0.2
_GRACE = 45.0
"""Seconds for a case that runs when time is up, beside those to shrink it."""
_POISON = ("CUDA error", "device-side assert", "illegal memory access")
"""Errors after which a process cannot use its GPU."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    places: tuple[Place, ...]
    count: int
    """Cases at each place."""
    seed: int
    processes: int = 1
    minutes: float = float("inf")
    shrinking: float = 60.0
    """Seconds to shrink a failure."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that failed."""

    seed: int
    place: Place
    outcome: Outcome
    reproduction: str


@dataclass(slots=True)
class Report:
    """What a run found."""

    verdicts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By backend, dtype and verdict."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Of what was refused or unfit."""
    traits: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    """In how many programs each stands."""
    failures: list[Failure] = field(default_factory=list)
    slow: list[tuple[int, Place, float]] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def cases(self) -> int:
        """How many were run."""
        return sum(self.verdicts.values())

    def add(self, found: Found) -> None:
        """Count one case."""
        place, outcome = found.place, found.outcome
        self.verdicts[place.backend, place.dtype, outcome.verdict.value] += 1
        if outcome.verdict in (Verdict.REFUSED, Verdict.UNFIT):
            self.reasons[f"{outcome.verdict.value}: {outcome.reason}"] += 1
        self.traits.update(outcome.traits)
        self.operators.update(found.operators)
        if outcome.verdict.failed:
            self.failures.append(Failure(found.seed, place, outcome, found.reproduction))
        if outcome.seconds > _SLOW:
            self.slow.append((found.seed, place, outcome.seconds))


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one case, in a form that goes from process to process."""

    seed: int
    place: Place
    outcome: Outcome
    operators: frozenset[str]
    reproduction: str = ""


def scale_of(place: Place) -> Scale:
    """How large the calls are that a place can afford."""
    if place.device != "cpu":
        return DEVICE
    if place.backend == "decode":
        return SHARED_KEYS
    if place.backend == "short":
        return PIECES
    return TILED if place.backend in ("triton", "hopper") else SMALL


def case_of(seed: int, place: Place) -> Case:
    """The case of a seed at a place."""
    rng = random.Random(seed)
    case = generate(rng, scale_of(place))
    if place.served:
        return served(rng, case)
    if place.ragged:
        return ragged(rng, case)
    return edged(random.Random(f"edge {seed}"), case)


def try_seed(seed: int, place: Place, shrinking: float = 60.0) -> Found:
    """Run the case of a seed; a failure is made sure of, and shrunk."""
    if place.wrappers:
        outcome, told = wrappers.try_seed(seed, place)
        return Found(seed, place, outcome, frozenset(), told)
    if place.sequences:
        drawn, outcome, told = sequences.try_seed(seed, place, shrinking, _CONFIRMING)
        return Found(seed, place, outcome, operators_of(drawn.steps[0].case), told)
    case = case_of(seed, place)
    outcome = judge(case, place)
    if outcome.verdict is Verdict.WRONG:
        outcome = replace(judge(case, place, _CONFIRMING), seconds=outcome.seconds)
    if not outcome.verdict.failed:
        return Found(seed, place, outcome, operators_of(case))
    if _poisoned(outcome):
        return Found(seed, place, outcome, operators_of(case), reproduction(case, place, outcome))

    def fails(other: Case) -> bool:
        runs = 2 if outcome.verdict is not Verdict.WRONG else 4
        return _kind(judge(other, place, runs)) == _kind(outcome)

    small = shrink(case, fails, shrinking)
    last = judge(small, place, _CONFIRMING)
    if not last.verdict.failed:
        small, last = case, outcome
    told = reproduction(small, place, last)
    found = replace(last, seconds=outcome.seconds)
    return Found(seed, place, found, operators_of(case), told)


def _told(seed: int, place: Place, outcome: Outcome) -> str:
    """The program of what a seed is, as it was drawn."""
    if place.wrappers:
        return wrappers.reproduction(wrappers.draw(seed), place, outcome)
    if place.sequences:
        return sequences.reproduction(sequences.draw(seed, place), place, outcome)
    return reproduction(case_of(seed, place), place, outcome)


def _poisoned(outcome: Outcome) -> bool:
    return any(part in outcome.reason for part in _POISON)


def _kind(outcome: Outcome) -> tuple[Verdict, str]:
    """What a smaller case must share: the verdict, and the kind of error."""
    if outcome.verdict is Verdict.WRONG:
        return outcome.verdict, ""
    if outcome.verdict is Verdict.CRASHED:
        return outcome.verdict, outcome.reason.split(":")[0]
    return outcome.verdict, outcome.reason


def operators_of(case: Case) -> frozenset[str]:
    """Words of all that a program consists of."""
    found = {line.target.value for line in case.lines}
    names = {Load: "lookup", Dot: "dot", Member: "in", Masked: "where -inf"}
    for item in everything(case):
        if isinstance(item, Apply):
            kinds = item.operation.takes[-1:]
            found.add(f"{item.operation.word or 'promotion'} {kinds[0].value}")
        elif isinstance(item, Invoke):
            found.add("prelude" if item.function.prelude else "def")
        elif type(item) in names:
            found.add(names[type(item)])
    return frozenset(found)


def run(
    plan: Plan,
    progress: Callable[[str], None] | None = None,
    every: float = 10.0,
    stopped: Callable[[], bool] = lambda: False,
) -> Report:
    """Run a plan.

    Args:
        plan: What to run.
        progress: Called with a line now and then, and with each failure's reproduction.
        every: Seconds between such lines.
        stopped: Whether to end early. The report then says so, and has all cases until then.
    """
    report, say = Report(), progress or (lambda line: None)
    begin = time.monotonic()
    jobs = [(seed, place) for seed in range(plan.seed, plan.seed + plan.count)
            for place in plan.places]  # fmt: skip
    runner = _alone if plan.processes <= 1 else _together
    found = runner(jobs, plan, begin, stopped)
    last = begin
    for item in found:
        report.add(item)
        if item.outcome.verdict.failed:
            say(f"--- seed {item.seed}\n{item.reproduction}\n")
        if time.monotonic() - last > every:
            last = time.monotonic()
            say(f"{report.cases} cases, {len(report.failures)} failures, {last - begin:.0f} s")
    report.interrupted = stopped()
    report.seconds = time.monotonic() - begin
    return report


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch with a single thread, as many processes run beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _alone(
    jobs: Sequence[tuple[int, Place]], plan: Plan, begin: float, stopped: Callable[[], bool]
) -> Iterator[Found]:
    hasten()
    with _one_thread():
        for seed, place in jobs:
            if stopped() or time.monotonic() - begin > 60 * plan.minutes:
                return
            yield try_seed(seed, place, plan.shrinking)


class _Worker:
    """A process that runs cases; a case that kills it is a failure."""

    def __init__(self, context: multiprocessing.context.SpawnContext, plan: Plan) -> None:
        self.jobs = context.Queue()
        self.found = context.Queue()
        self.process = context.Process(
            target=_serve, args=(self.jobs, self.found, plan.shrinking), daemon=True
        )
        self.process.start()
        self.job: tuple[int, Place] | None = None
        self.begin = 0.0

    def give(self, job: tuple[int, Place]) -> None:
        self.job, self.begin = job, time.monotonic()
        self.jobs.put(job)

    def take(self) -> Found | None:
        """What became of the job, once that is known."""
        assert self.job is not None
        try:
            found = self.found.get_nowait()
        except queue.Empty:
            if self.process.is_alive():
                return None
            seed, place = self.job
            reason = f"the process ended with {self.process.exitcode}"
            outcome = Outcome(Verdict.CRASHED, reason)
            found = Found(seed, place, outcome, frozenset(), _told(seed, place, outcome))
        self.job = None
        return found


def _serve(jobs: multiprocessing.Queue, found: multiprocessing.Queue, shrinking: float) -> None:
    hasten()
    with _one_thread():
        while (job := jobs.get()) is not None:
            found.put(try_seed(*job, shrinking))


def _together(
    jobs: Sequence[tuple[int, Place]], plan: Plan, begin: float, stopped: Callable[[], bool]
) -> Iterator[Found]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    left = iter(jobs)
    end = begin + 60 * plan.minutes
    workers = [_Worker(context, plan) for _ in range(plan.processes)]
    try:
        while not stopped():
            now, idle = time.monotonic(), True
            for at, worker in enumerate(workers):
                if worker.job is not None:
                    found = worker.take()
                    if found is None:
                        continue
                    idle = False
                    yield found
                    if _poisoned(found.outcome) or not worker.process.is_alive():
                        worker.process.terminate()
                        workers[at] = worker = _Worker(context, plan)
                job = next(left, None) if now < end else None
                if job is not None:
                    worker.give(job)
            busy = [worker for worker in workers if worker.job is not None]
            if not busy or now > end + plan.shrinking + _GRACE:
                break
            if idle:
                time.sleep(_IDLE)
        now = time.monotonic()
        for worker in workers:
            if worker.job is None:
                continue
            outcome = Outcome(Verdict.UNFIT, "unfinished", seconds=now - worker.begin)
            yield Found(*worker.job, outcome, frozenset())
    finally:
        for worker in workers:
            worker.process.terminate()


def table(report: Report) -> str:
    """A short account of a run."""
    how = ", interrupted" if report.interrupted else ""
    lines = [f"{report.cases} cases in {report.seconds:.0f} s{how}"]
    places = sorted({key[:2] for key in report.verdicts})
    lines.append(f"{'backend':12}{'dtype':10}" + "".join(f"{v.value:>10}" for v in Verdict))
    for place in places:
        counts = [report.verdicts[(*place, verdict.value)] for verdict in Verdict]
        lines.append(f"{place[0]:12}{place[1]:10}" + "".join(f"{count:>10}" for count in counts))
    judged = max(1, sum(report.traits[name] for name in ("no pair", "some pairs", "all pairs")))
    lines.append(
        "programs judged: "
        + ", ".join(f"{name} {count / judged:.0%}" for name, count in report.traits.most_common())
    )
    lines += [f"{count:6} {reason}" for reason, count in report.reasons.most_common(12)]
    for seed, place, seconds in report.slow:
        lines.append(f"slow: seed {seed} {place.backend} {place.dtype}: {seconds:.0f} s")
    kinds = Counter((f.place.backend, f.outcome.verdict.value, f.outcome.reason[:90])
                    for f in report.failures)  # fmt: skip
    lines += [f"{count:6} {' '.join(kind)}" for kind, count in kinds.most_common()]
    return "\n".join(lines)
