"""Scripts of a plan side by side on the GPUs that there are, each for a limited time.

A script writes into a folder of its own. What it has written goes into the result files every half
second, so that whatever ends a run, a script or the machine costs no row that was measured.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

import kept_rows
from kept_rows import Unreadable

import common

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rounds import Round

EVERY = 15.0
"""Seconds between two lines of progress."""
_POLL = 0.5
_PATIENCE = ((signal.SIGINT, 3.0), (signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0))
"""How a process is ended: many end what they have started when they are interrupted."""
_MOST_LOG, _KEPT_LOG = 8_000_000, 200_000
"""Bytes of a log, and what is left of one that has more."""
_SAID = 5
"""Last lines of a failure in the table."""


class Busy(Exception):
    """Another run writes into the folder."""


@dataclass(frozen=True)
class Job:
    """A round with the names that are missing, or why it is not run."""

    round: Round
    names: tuple[str, ...]
    why_not: str = ""


@dataclass
class Outcome:
    """How a job ended."""

    name: str
    state: str
    seconds: float = 0.0
    rows: int = 0
    said: list[str] = field(default_factory=list)
    """The last lines of a failure."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have a folder alone.

    Raises:
        Busy: Another run has it.
    """
    (folder / "work").mkdir(parents=True, exist_ok=True)
    with (folder / "work" / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Busy(f"another run writes into {folder}") from None
        yield


class Kept:
    """What one script has written, and the result file that takes it."""

    def __init__(self, own: Round, folders: Sequence[Path]) -> None:
        """``folders``: see :func:`kept_rows.place`."""
        self._round, self._folders = own, folders
        self.work = folders[0] / "work" / own.name
        self.path = self.work / "results.json"
        # What passed at one commit says nothing of another.
        at = (common.commit() or "")[:12].rstrip("+")
        self.record = folders[0] / ".".join(filter(None, (own.name, at, "jsonl")))
        """Of a script that has no result file."""
        self._lines = _lines(self.record)
        self._seen: tuple[int, int] | None = None
        self.rows = 0
        """New ones with a figure."""
        self.broken = ""
        """Why the last rows were not taken."""

    def take(self) -> None:
        """Put rows that are new into the result file. A file that cannot be read is left."""
        stem = self._round.file
        if stem is None:
            self.rows = _lines(self.record) - self._lines
            return
        with contextlib.suppress(FileNotFoundError):
            stat = self.path.stat()
            seen = stat.st_mtime_ns, stat.st_size
            if seen == self._seen:
                return
            self._seen = seen
            try:
                new = kept_rows.read(self.path)
                assert new is not None
                if new.get("benchmark") != stem:
                    raise Unreadable(f"{self.path} is of {new.get('benchmark')!r}, not of {stem!r}")
                target, old = kept_rows.place(stem, new, self._folders)
                common.put_results(target, kept_rows.merged(old, new, self._round.shape))
            except (Unreadable, OSError) as error:
                self.broken = str(error)
                return
            self.broken = ""
            measured = {self._round.shape.key(x) for x in new["rows"]
                        if self._round.shape.has_figure(x)}  # fmt: skip
            self.rows = len(measured)

    def recover(self) -> None:
        """Take what a run has left that was ended before it took everything; begin anew.

        A file that cannot be read is kept under another name.
        """
        self.take()
        if self.broken:
            target = self._folders[0] / "logs" / f"{self._round.name}.{time.time_ns()}.broken.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            self.path.replace(target)
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self._seen, self.rows, self.broken = None, 0, ""


class Running:
    """A job that has begun."""

    def __init__(self, job: Job, gpus: tuple[str, ...], seconds: float, kept: Kept) -> None:
        self.job, self.gpus, self.kept = job, gpus, kept
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        folder = kept.work.parents[1]
        given = {
            "seconds": str(max(1, int(seconds - 10))), "gpus": str(len(gpus)),
            "minutes": f"{max(5.0, seconds - 20) / 60:.2f}", "record": str(kept.record),
            "work": str(kept.work),
        }  # fmt: skip
        own = job.round
        last = [str(own.path), *own.choosing(job.names), *own.arguments]
        last += ["--output", str(kept.path)] if own.file is not None else []
        self._commands = [
            [sys.executable, *(word.format(**given) for word in words)]
            for words in (own.before, last) if words
        ]  # fmt: skip
        self.log = folder / "logs" / f"{own.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = self.log.open("ab")
        self._process = self._start()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.begin

    def _start(self) -> subprocess.Popen[bytes]:
        command = self._commands.pop(0)
        self._file.write(f"== {time.strftime('%F %T')} {' '.join(command[1:])}\n".encode())
        self._file.flush()
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        return subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=self._file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def state(self) -> str:
        """Empty while it runs; otherwise how it ended."""
        _shorten(self.log)
        code = self._process.poll()
        if code is None:
            return "cut" if time.monotonic() >= self.end else ""
        if code == 0 and self._commands:
            self._process = self._start()
            return ""
        return f"failed ({code})" if code else "done"

    def outcome(self, state: str) -> Outcome:
        """End what is left of it, and take its last rows."""
        _stop(self._process)
        self._file.close()
        self.kept.take()
        if self.kept.broken:
            state = "failed (results)"
        said = _tail(self.log, _SAID) if state.startswith("failed") else []
        said += [self.kept.broken] * bool(self.kept.broken)
        return Outcome(self.job.round.name, state, self.seconds, self.kept.rows, said)


class Lanes:
    """A run: jobs in order, one on each GPU, until all have ended or time is up."""

    def __init__(self, gpus: Sequence[str], seconds: float, folders: Sequence[Path]) -> None:
        """``gpus`` are called as CUDA_VISIBLE_DEVICES has them; ``folders`` as for Kept."""
        self._gpus, self._folders = tuple(gpus), folders
        self._begin = time.monotonic()
        # Some seconds are for ending what still runs.
        self._end = self._begin + seconds - min(10.0, 0.1 * seconds)
        self._waiting: list[Job] = []
        self._running: list[Running] = []
        self.outcomes: list[Outcome] = []
        self._said = self._begin

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run them. What an interruption ends is among the outcomes too."""
        for job in jobs:
            why = job.why_not
            if not why and job.round.gpus > len(self._gpus):
                why = f"needs {job.round.gpus} GPUs"
            if why:
                self._tell(Outcome(job.round.name, why))
            else:
                self._waiting.append(job)
        try:
            while self._waiting or self._running:
                self._collect()
                self._begin_next()
                self._progress()
                if self._running:
                    time.sleep(_POLL)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        finally:
            for one in self._running:
                self._tell(one.outcome("cut"))
            for job in self._waiting:
                self._tell(Outcome(job.round.name, "not begun"))
            self._running, self._waiting = [], []
        return self.outcomes

    def _collect(self) -> None:
        for one in tuple(self._running):
            one.kept.take()
            state = one.state()
            if state:
                self._running.remove(one)
                self._tell(one.outcome(state))

    def _begin_next(self) -> None:
        """Begin what comes next. What runs alone waits for all before it, and all wait for it."""
        while self._waiting:
            own = self._waiting[0].round
            left = self._end - time.monotonic()
            if left < own.least:
                self._tell(Outcome(self._waiting.pop(0).round.name, "not begun"))
                continue
            used = {gpu for one in self._running for gpu in one.gpus}
            free = [gpu for gpu in self._gpus if gpu not in used]
            wanted = len(self._gpus) if own.alone else own.gpus
            if len(free) < wanted:
                return
            job = self._waiting.pop(0)
            kept = Kept(own, self._folders)
            try:
                kept.recover()
                gpus = tuple(free[:wanted])
                self._running.append(Running(job, gpus, min(own.timeout, left), kept))
            except OSError as error:
                self._tell(Outcome(own.name, "failed (start)", said=[str(error)]))

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._said < EVERY:
            return
        self._said = now
        running = ", ".join(
            f"{one.job.round.name} {one.seconds:.0f} s {one.kept.rows} rows on {','.join(one.gpus)}"
            for one in self._running
        )
        print(f"{now - self._begin:5.0f} s: {running}; {len(self._waiting)} wait, "
              f"{max(0.0, self._end - now):.0f} s left", flush=True)  # fmt: skip

    def _tell(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(f"{time.monotonic() - self._begin:5.0f} s: {outcome.name} {outcome.state}, "
              f"{outcome.rows} rows", flush=True)  # fmt: skip


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _tail(path: Path, lines: int) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        text = file.read().decode("utf-8", "replace")
    return [line[:200] for line in text.splitlines() if line.strip()][-lines:]


def _shorten(path: Path) -> None:
    """Leave the end of a log that has grown large; whoever appends to it goes on."""
    if path.stat().st_size <= _MOST_LOG:
        return
    with path.open("r+b") as file:
        file.seek(-_KEPT_LOG, os.SEEK_END)
        end = file.read()
        file.seek(0)
        file.write(end)
        file.truncate()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, also in sessions of their own."""
    if process.poll() is None:
        family = _family(process.pid)
        for number, patience in _PATIENCE:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
                break
        for pid, begun in family.items():
            if _stat(pid)[1] == begun:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    # Whoever was left in its session, such as the children of a process that died.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _family(pid: int) -> dict[int, str]:
    """Descendants of a process, with the times at which they began; none where nobody tells."""
    parents: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdecimal():
                parents.setdefault(_stat(int(name))[0], []).append(int(name))
    found: dict[int, str] = {}
    left = [pid]
    while left:
        children = parents.get(left.pop(), [])
        found.update((child, _stat(child)[1]) for child in children)
        left += children
    return found


def _stat(pid: int) -> tuple[int, str]:
    """The parent of a process and when it began; 0 and nothing for none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[1]), fields[19].decode()
