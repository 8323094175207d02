"""``scaling.py --run``: processes that measure part by part, ended where a part takes too long.

A part is a program, a GPU's tokens and a system. Each has a time limit of its own, and its figures
are in the result file as soon as it ends: torch's context parallelism costs no figure of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from scaling_programs import TEXTS
from scaling_told import PEERS, prediction, short_table

from common import put_results

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SCRIPT = Path(__file__).with_name("scaling.py")
SYSTEMS = ("attndsl", *PEERS)
FIRST = tuple(
    (name, tokens) for tokens in (8192, 32768) for name in ("window1024", "causal", "documents2000")
)
"""What is measured before all else."""
GRACE = 40.0
"""Seconds that torchrun has to end its processes, which are of sessions of their own."""
TELLING = 30.0
"""Seconds before the end of a part's time at which rank 0 prints where it is: more than it takes to
start."""
CALL = re.compile(r'File "([^"]+)", line (\d+),? in (.+)')
"""A call in a stack, as ``faulthandler`` prints it."""
FRAMES = 3
"""Of these, how many a row names."""
SDPA = "torch's ring of SDPA has no mask but a causal one, and no scores"
POSITIONS = (
    "torch's context parallelism rewrites the positions of mask_mod, and leaves score_mod alone: "
    "this score would be that of positions within a shard"
)
REFUSED = {("torch_flex", "alibi"): POSITIONS} | {
    ("torch_sdpa", name): SDPA for name in TEXTS if name != "causal"
}
"""What torch cannot do, by system and program, and why."""

Part = tuple[str, int, str]
"""A program, a GPU's tokens, and a system."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure, and how long it may take."""

    programs: tuple[str, ...]
    tokens: tuple[int, ...]
    heads: str
    """Of queries and of keys, such as 64,8."""
    systems: tuple[str, ...] = SYSTEMS
    profile: bool = False
    limit: float = 3600.0
    """Seconds in all."""
    part_limit: float = 300.0
    done: frozenset[tuple[int, str, int, str]] = frozenset()
    """What is left out: numbers of GPUs, and a part of each."""

    def parts(self) -> list[Part]:
        """The most important ones first: one system after the other, since some peers take long."""
        for what, given, known in (
            ("program", self.programs, TEXTS), ("system", self.systems, SYSTEMS)
        ):  # fmt: skip
            unknown = {*given} - {*known}
            if unknown:
                raise SystemExit(f"there is no {what} {', '.join(sorted(unknown))} to measure")
        every = [(name, number) for number in self.tokens for name in self.programs]
        ordered = [x for x in FIRST if x in every] + [x for x in every if x not in FIRST]
        return [(name, tokens, system) for system in self.systems for name, tokens in ordered]


def done_in(rows: Iterable[Mapping[str, Any]], heads: str) -> frozenset[tuple[int, str, int, str]]:
    """Parts of which ``rows`` have figures, with so many heads; as :attr:`Asked.done`."""
    return frozenset(
        (row["ranks"], row["program"], row["tokens"], system)
        for row in rows for system in SYSTEMS
        if row["heads"] == heads and f"{system}_step_ms" in row
    )  # fmt: skip


def run(asked: Asked, numbers: Sequence[int], head: dict[str, Any], output: Path) -> None:
    """Measure part by part; what takes too long, or fails, is told in its row."""
    started = time.monotonic()
    ended = started + asked.limit
    rows: dict[tuple[int, str, int], dict[str, Any]] = {}
    left: list[str] = []
    for ranks in numbers:
        for part, found in _all_of(ranks, asked, ended):
            name, tokens, system = part
            if not found:
                left.append(f"{ranks} x {tokens} {name} {system}")
                continue
            row = rows.setdefault((ranks, name, tokens), {
                "program": name, "ranks": ranks, "tokens": tokens, "heads": asked.heads,
                "machine": head["machine"], "commit": head["versions"]["commit"],
            })  # fmt: skip
            row |= found
            if system == "attndsl" and "attndsl_step_ms" in row:
                row |= prediction(row)
            put_results(output, {**head, "rows": [*rows.values()]})
            print(f"[{time.monotonic() - started:6.0f} s] {_line(ranks, part, found)}", flush=True)
    print(short_table([*rows.values()]))
    if left:
        print(f"not measured in {asked.limit:g} s: {'; '.join(left)}"[:2000])


def _line(ranks: int, part: Part, found: dict[str, Any]) -> str:
    """A part and what became of it."""
    name, tokens, system = part
    why = found.get("why" if system == "attndsl" else f"{system}_why")
    times = [f"{x} {found[f'{system}_{x}_ms']:.2f} ms" for x in ("forward", "step")
             if f"{system}_{x}_ms" in found]  # fmt: skip
    return f"{ranks} x {tokens} {name} {system}: {why or ', '.join(times)}"[:300]


def _all_of(ranks: int, asked: Asked, ended: float) -> Iterator[tuple[Part, dict[str, Any]]]:
    """Each part and what was found of it; nothing where no time was left."""
    every = asked.parts()
    parts = [
        part for part in every
        if (part[2], part[0]) not in REFUSED and (ranks, *part) not in asked.done
    ]  # fmt: skip
    while parts and time.monotonic() < ended:
        for part, found in measured(ranks, parts, asked, ended):
            parts = parts[1:]
            yield part, found
    yield from ((part, {}) for part in parts)
    for name, tokens, system in every:
        if (system, name) in REFUSED:
            yield (name, tokens, system), {f"{system}_why": REFUSED[system, name]}


def measured(
    ranks: int, parts: list[Part], asked: Asked, ended: float
) -> Iterator[tuple[Part, dict[str, Any]]]:
    """The figures of parts, by processes of their own; or why there are none.

    One part that takes too long, or fails, ends the processes, and is the last one here.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), str(SCRIPT), "--parts", json.dumps(parts), "--heads", asked.heads,
        "--patience", str(max(0.1, asked.part_limit - TELLING)),
        *(["--profile"] if asked.profile else []),
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=err, text=True, start_new_session=True
        )
        try:
            yield from _told(process, parts, asked.part_limit, ended, err)
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its processes: a signal that it cannot handle would leave these."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=GRACE)


def _told(
    process: subprocess.Popen[str], parts: list[Part], limit: float, ended: float, err: IO[str]
) -> Iterator[tuple[Part, dict[str, Any]]]:
    """What the processes print of each part, and why the first one without a figure has none."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    for part in parts:
        begin = os.fstat(err.fileno()).st_size
        seconds = max(0.1, min(limit, round(ended - time.monotonic(), 1)))
        found = _next(lines, part, time.monotonic() + seconds, err)
        if found is None and seconds < limit:
            # The whole run has ended, which says nothing about the part.
            yield part, {}
            return
        if found is None:
            found = {"why": f"took more than {seconds:g} s{_where(err, begin)}", "over": True}
        over = found.pop("over", False)
        yield part, _named(part[2], found)
        if over:
            return


def _next(
    lines: queue.SimpleQueue[str], part: Part, until: float, err: IO[str]
) -> dict[str, Any] | None:
    """What is said of ``part``; ``over`` where no more is said, and None where nothing is."""
    while True:
        try:
            line = lines.get(timeout=max(0.01, until - time.monotonic()))
        except queue.Empty:
            return None
        if not line:
            err.seek(0)
            reasons = [x for x in err if "Error" in x or "there is no" in x]
            why = (reasons or ["nothing was printed"])[0].strip()[:300]
            return {"why": why, "over": True}
        told: dict[str, Any] = json.loads(line)
        # Several ranks may say that one part has failed.
        if tuple(told.pop("part")) == part:
            return told


def _where(err: IO[str], begin: int) -> str:
    """Where rank 0 was when it printed its stacks: the innermost calls of its main thread.

    Args:
        err: What the processes have printed.
        begin: From where on that is of the present part.
    """
    err.seek(begin)
    lines = [line.strip() for line in err]
    # The main thread comes last. Its innermost call is first.
    heads = [i for i, line in enumerate(lines) if line.startswith(("Thread 0x", "Current thread"))]
    calls = [CALL.fullmatch(line) for line in lines[heads[-1] + 1 :]] if heads else []
    frames = [f"{Path(x[1]).name}:{x[2]} {x[3]}" for x in calls[:FRAMES] if x is not None]
    return f", in {' < '.join(frames)}" if frames else ""


def _named(system: str, found: dict[str, Any]) -> dict[str, Any]:
    """``why`` of a peer is its own: the row is also that of others."""
    if system == "attndsl":
        return found
    return {f"{system}_{key}" if key == "why" else key: x for key, x in found.items()}


def _read(source: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Hand on what is JSON, and an empty line at the end."""
    for line in source:
        if line.startswith('{"part"'):
            lines.put(line)
    lines.put("")
