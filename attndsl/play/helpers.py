"""Processes that answer the page's requests, and are killed where they take too long.

Never imports torch: the page is there before the compiler is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .records import MOST_ANSWER, Answer, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .records import Asked, Kind

COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "attndsl.play.worker")
PATIENT = "--patient"
"""Ends the command of a process that leaves the processors to others."""
START_SECONDS = 180.0
"""That a process may take to import everything, on a machine that is busy."""
GRACE = 0.5
"""Seconds that a request goes on which nobody waits for any more."""
MOST_WAITING = 16
"""Requests that wait for one process."""
_MOST_LINE = 2 * MOST_ANSWER


@dataclass(slots=True)
class Helper:
    """One process, which answers one request at a time."""

    seconds: float
    """That a request may take."""
    command: Sequence[str] = COMMAND
    _process: asyncio.subprocess.Process | None = None
    _reader: asyncio.Task[None] | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _pid: int = 0
    """Of the process that answers, which is a child of ours or a child of that."""
    _number: int = 0
    _answer: asyncio.Future[dict[str, Any] | None] | None = None
    _waiting: int = 0

    async def start(self) -> None:
        """Start the process, which then imports what it needs."""
        self._ready.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self.command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=_MOST_LINE, env={**os.environ, "ATTNDSL_CACHE": "0"},
            start_new_session=True,  # An interrupt of the terminal is for the server alone.
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read(self._process))

    async def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if self._reader is not None:
            self._reader.cancel()
        if process is not None:
            self._kill_all(process)
            await process.wait()

    async def ask(self, asked: Asked) -> dict[str, Any]:
        """The answer to ``asked``, as JSON values; one that says so where there is none in time.

        Where the task is cancelled, since nobody waits for the answer any more, the process that
        works on it is killed if it goes on.
        """
        if self._waiting >= MOST_WAITING:
            return _refusal("the page has too many requests waiting", "close other tabs of it")
        self._waiting += 1
        try:
            async with self._turn:
                return await self._ask(asked)
        finally:
            self._waiting -= 1

    async def _ask(self, asked: Asked) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            await self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            await asyncio.wait_for(self._ready.wait(), START_SECONDS)
        except TimeoutError:
            await self.stop()
            return _refusal("the compiler does not start", "look at the terminal of 'attndsl play'")
        if self._process.returncode is not None:
            return _refusal("the compiler has ended", "look at the terminal of 'attndsl play'")
        self._number += 1
        self._answer = asyncio.get_running_loop().create_future()
        line = json.dumps({"number": self._number, "asked": asked.as_json()})
        self._process.stdin.write(line.encode() + b"\n")
        try:
            found = await asyncio.wait_for(asyncio.shield(self._answer), self.seconds)
        except TimeoutError:
            self._kill()
            return _refusal(
                f"this takes longer than {self.seconds:g} seconds, and was stopped",
                "give shorter lengths, or run the command instead of the page",
            )
        except asyncio.CancelledError:
            done, _ = await asyncio.wait({self._answer}, timeout=GRACE)
            if not done:
                self._kill()
            raise
        finally:
            self._answer = None
        if found is None:
            return _refusal(
                "this takes more memory than the page may use, or ended the compiler",
                "give shorter lengths",
            )
        return found

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Take the lines of ``process`` until it ends."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            try:
                said = json.loads(line)
            except ValueError:
                continue  # Half a line of a child that was killed.
            if "ready" in said:
                self._settle(None)  # The child before it has died.
                self._pid = said["ready"]
                self._ready.set()
            elif said["number"] == self._number:
                self._settle(said["answer"])
        await process.wait()
        self._pid = 0
        self._settle(None)
        self._ready.set()  # Nobody need wait for it.

    def _settle(self, found: dict[str, Any] | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(found)

    def _kill(self) -> None:
        """Kill the process that answers; the next request waits for another one."""
        self._ready.clear()
        self._number += 1  # What it may have answered just now is for nobody.
        self._kill_child()

    def _kill_all(self, process: asyncio.subprocess.Process) -> None:
        if not hasattr(os, "killpg"):
            self._kill_child()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            return
        # At once: a process whose child was killed first may have forked another by then, which
        # would hold the pipe open for ever.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def _kill_child(self) -> None:
        if not self._pid:
            return  # 0 would be this process and all of its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, getattr(signal, "SIGKILL", signal.SIGTERM))


@dataclass(frozen=True, slots=True)
class Helpers:
    """A process for what is shown while people type, and another for what may take longer."""

    by_kind: Mapping[Kind, Helper]

    async def start(self) -> None:
        """Start all processes."""
        for helper in self._all():
            await helper.start()

    async def stop(self) -> None:
        """End them."""
        for helper in self._all():
            await helper.stop()

    async def ask(self, asked: Asked) -> dict[str, Any]:
        """See :meth:`Helper.ask`."""
        return await self.by_kind[asked.kind].ask(asked)

    def _all(self) -> list[Helper]:
        return list({id(helper): helper for helper in self.by_kind.values()}.values())


def _refusal(message: str, hint: str) -> dict[str, Any]:
    return Answer((Problem(message, hint),)).as_json()
