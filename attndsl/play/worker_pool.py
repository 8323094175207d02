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

from .messages import MOST_ANSWER, Answer, TextProblem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .messages import PageRequest, RequestKind

COMMAND = (sys.executable, "-P", "-W", "ignore", "-m", "attndsl.play.worker")
PATIENT = "--patient"
"""Ends the command of a process that leaves the processors to others."""
START_SECONDS = 180.0
"""Seconds that a process may take to import everything, on a machine that is busy."""
GRACE = 0.5
"""Seconds that a request still runs once nobody waits for it."""
MOST_WAITING = 16
"""Requests that wait for one process."""
_MOST_LINE = 2 * MOST_ANSWER


@dataclass(slots=True)
class _Running:
    """One running process and its state."""

    process: asyncio.subprocess.Process
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Future[dict[str, Any] | None] | None = None
    pid: int = 0
    """The id of the process that answers, which is a child of ours or a child of that."""
    _number: int = 0
    _reader: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, command: Sequence[str]) -> _Running:
        """Start a process, which then imports what it needs."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=_MOST_LINE, env={**os.environ, "ATTNDSL_CACHE": "0"},
            start_new_session=True,  # An interrupt of the terminal is for the server alone.
        )  # fmt: skip
        found = cls(process)
        found._reader = asyncio.create_task(found._read())
        return found

    @property
    def ended(self) -> bool:
        """Tell whether the process has. A child that answers may go on without it."""
        return self.process.returncode is not None

    def ask(self, asked: PageRequest) -> asyncio.Future[dict[str, Any] | None]:
        """Send a request; None is the answer of a process that dies."""
        self._number += 1
        self.answer = asyncio.get_running_loop().create_future()
        line = json.dumps({"number": self._number, "asked": asked.as_json()})
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        return self.answer

    async def _read(self) -> None:
        """Take the lines of the process until it ends, and all that hold its pipe."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            try:
                said = json.loads(line)
            except ValueError:
                continue  # Half a line of a child that was killed.
            if "ready" in said:
                self._settle(None)  # The child before it has died.
                self.pid = said["ready"]
                self.ready.set()
            elif said["number"] == self._number:
                self._settle(said["answer"])
        await self.process.wait()
        self.pid = 0
        self._settle(None)
        self.ready.set()  # Nobody need wait for it.

    def _settle(self, found: dict[str, Any] | None) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(found)

    def kill(self) -> None:
        """Kill the process that answers; the next request waits for another one."""
        self.ready.clear()
        self._number += 1  # What it may have answered just now is for nobody.
        self._kill_child()

    async def end(self) -> None:
        """End the process, and a child that has outlived it."""
        reader, self._reader = self._reader, None
        # Somebody of the group holds the pipe, or else its number may be another's by now.
        if reader is not None and not reader.done():
            reader.cancel()
            self._kill_all()
        await self.process.wait()

    def _kill_all(self) -> None:
        if not hasattr(os, "killpg"):
            self._kill_child()
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            return
        # At once: a process whose child was killed first may have forked another by then, which
        # would hold the pipe open for ever.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _kill_child(self) -> None:
        if not self.pid:
            return  # 0 would be this process and all of its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, getattr(signal, "SIGKILL", signal.SIGTERM))


@dataclass(slots=True)
class Helper:
    """One process after another, which answers one request at a time."""

    seconds: float
    """Seconds that a request may take."""
    command: Sequence[str] = COMMAND
    _running: _Running | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: int = 0

    async def start(self) -> None:
        """Start the process, which then imports what it needs."""
        self._running = await _Running.begin(self.command)

    async def stop(self) -> None:
        """End the process."""
        running, self._running = self._running, None
        if running is not None:
            await running.end()

    async def ask(self, asked: PageRequest) -> dict[str, Any]:
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

    async def _ready(self) -> _Running | str:
        """The process, once it waits for a request; why there is none."""
        for _ in range(2):  # One that has ended meanwhile is followed by another.
            if self._running is None or self._running.ended:
                await self.stop()
                await self.start()
            running = self._running
            assert running is not None
            try:
                await asyncio.wait_for(running.ready.wait(), START_SECONDS)
            except TimeoutError:
                return "the compiler does not start"
            if not running.ended:
                return running
        return "the compiler has ended"

    async def _ask(self, asked: PageRequest) -> dict[str, Any]:
        running = await self._ready()
        if isinstance(running, str):
            await self.stop()
            return _refusal(running, "look at the terminal of 'attndsl play'")
        answer = running.ask(asked)
        try:
            found = await asyncio.wait_for(asyncio.shield(answer), self.seconds)
        except TimeoutError:
            running.kill()
            return _refusal(
                f"this takes longer than {self.seconds:g} seconds, and was stopped",
                "give shorter lengths, or run the command instead of the page",
            )
        except asyncio.CancelledError:
            done, _ = await asyncio.wait({answer}, timeout=GRACE)
            if not done:
                running.kill()
            raise
        finally:
            running.answer = None
        if found is None:
            return _refusal(
                "this takes more memory than the page may use, or ended the compiler",
                "give shorter lengths",
            )
        return found


@dataclass(frozen=True, slots=True)
class Helpers:
    """One process for quick answers while people type, and another for slow ones."""

    by_kind: Mapping[RequestKind, Helper]

    async def start(self) -> None:
        """Start all processes."""
        for helper in self._all():
            await helper.start()

    async def stop(self) -> None:
        """End them."""
        for helper in self._all():
            await helper.stop()

    async def ask(self, asked: PageRequest) -> dict[str, Any]:
        """See :meth:`Helper.ask`."""
        return await self.by_kind[asked.kind].ask(asked)

    def _all(self) -> list[Helper]:
        return list({id(helper): helper for helper in self.by_kind.values()}.values())


def _refusal(message: str, hint: str) -> dict[str, Any]:
    return Answer((TextProblem(message, hint),)).as_json()
