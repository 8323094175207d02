"""Compilations side by side, with each other and with what their caller does meanwhile.

Threads are enough. Triton gives up Python's lock while it lowers a kernel, and ptxas is a process
of its own: a kernel holds the lock for a twentieth of its compilation. Hopper's kernels take longer
than the portable ones. See M30, and see M60, in docs/dev/measured.md.

Non-goals: a limit of time; kernels of a process that ends before they are compiled.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from attndsl.foundation.logs import LOG

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

_QUIET = 1.0
"""Seconds before a terminal hears of a compilation."""
_TICK = 0.5
"""Seconds between two lines on it, each in the place of the one before."""
_CLEAR = "\r\033[K"


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Turn:
    """The only thread that writes or reads a kernel's text, which holds Python's lock.

    Threads that share the lock would all be through late. In turns, what was begun first, and is
    waited for first, is lowered while the next text is read. See M55 in docs/dev/measured.md.
    """

    _only = threading.Lock()

    def __init__(self) -> None:
        """It begins with the ``with`` statement."""
        self._held: threading.Lock | None = None

    def __enter__(self) -> Turn:
        only = self._only
        only.acquire()
        self._held = only
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let the next one begin, before the ``with`` statement ends."""
        held, self._held = self._held, None
        if held is not None:
            held.release()


def _begin_anew() -> None:
    """In a forked process, which lacks the thread whose turn it was."""
    Turn._only = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


class Compilations:
    """Compilations in threads, by places that name them; each result is taken once."""

    def __init__(self) -> None:
        """Nothing runs before the first :meth:`begin`."""
        self._begun: dict[Hashable, Future[Any]] = {}
        self._free = threading.Semaphore(processors())

    def begin(self, place: Hashable, name: str, compiled: Callable[[], Any]) -> None:
        """Have a thread call ``compiled``, unless one does for this place, or none can be had.

        Args:
            place: What :meth:`take` will ask for.
            name: As the log calls it.
            compiled: Gives the result. What it raises, :meth:`take` raises.
        """
        if place not in self._begun:
            future = self._begun[place] = Future[Any]()
            thread = threading.Thread(target=self._run, args=(future, name, compiled))
            thread.name = f"attndsl compiles {name}"
            try:
                thread.start()
            except RuntimeError:  # Python ends, or the system has no more threads.
                del self._begun[place]

    def has(self, place: Hashable) -> bool:
        """Return True if a compilation for this place was begun and not taken."""
        return place in self._begun

    def wait(self, places: Iterable[Hashable]) -> None:
        """Wait for the results of these places, as far as somebody has begun them.

        A terminal is told how long that takes.
        """
        waiting = [future for place in places if (future := self._begun.get(place)) is not None]
        begin = time.perf_counter()
        told = False
        try:
            while wait(waiting, _TICK).not_done:
                seconds = time.perf_counter() - begin
                if seconds >= _QUIET and sys.stderr is not None and sys.stderr.isatty():
                    told = True
                    left = sum(not future.done() for future in list(self._begun.values()))
                    what = f"{left} kernel{'s' * (left != 1)}"
                    print(f"{_CLEAR}attndsl: compiling {what}, {seconds:.0f} s", end="",
                          file=sys.stderr, flush=True)  # fmt: skip
        finally:
            if told:
                print(_CLEAR, end="", file=sys.stderr, flush=True)

    def take(self, place: Hashable) -> Any:
        """The result for a place that :meth:`has` one, as soon as it is there."""
        self.wait([place])
        return self._begun.pop(place).result()

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Forget the places that are ``unwanted``. What runs by now runs on, for nobody."""
        for place in [place for place in self._begun if unwanted(place)]:
            self._begun.pop(place).cancel()

    def _run(self, future: Future[Any], name: str, compiled: Callable[[], Any]) -> None:
        with self._free:
            if not future.set_running_or_notify_cancel():
                return
            begin = time.perf_counter()
            LOG.info("compiling %s", name)
            try:
                found = compiled()
            except BaseException as error:  # Of whoever takes it.
                future.set_exception(error)
                return
            LOG.info("compiled %s in %.1f s", name, time.perf_counter() - begin)
            future.set_result(found)
