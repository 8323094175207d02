"""A process that answers requests: a JSON line in on stdin, a JSON line out on stdout.

A text may be hostile, so the process that answers is one that may be killed at any time. Importing
torch takes seconds. So on Linux the process that has imported everything never answers: it forks a
child that does, and another as soon as that one is gone. Elsewhere, where forks are not safe with
the system's own libraries, the process answers itself, and is started anew when it has been killed.

A child begins with the line ``{"ready": PID}``. Whoever asks may kill that process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from typing import IO

import torch

from attndsl.play.answers import answer
from attndsl.play.messages import (
    MOST_ANSWER,
    Answer,
    PageRequest,
    PictureCall,
    RequestKind,
    TextProblem,
    read_asked,
)
from attndsl.play.worker_pool import PATIENT

FORKS = sys.platform == "linux"
MEMORY = 1 << 30
"""Bytes that a child may take beside what it begins with."""
MOST_SECONDS = 60
"""Seconds after which a child ends in any case: longer than any request may take. The server may
have gone without killing it."""


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until there are no more."""
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    for line in requests:
        if hasattr(signal, "alarm"):
            signal.alarm(MOST_SECONDS)
        given = json.loads(line)
        text = _as_line(given["number"], answer(read_asked(given["asked"])))
        if len(text) > MOST_ANSWER:
            long = TextProblem("this is too long to show", "run the command instead of the page")
            text = _as_line(given["number"], Answer((long,)))
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        print(text, file=answers, flush=True)


def _as_line(number: int, found: Answer) -> str:
    return json.dumps({"number": number, "answer": found.as_json()}, allow_nan=False)


def main() -> None:
    """Serve stdin, by a child where this process can fork."""
    # Whatever else prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    # Threads would not survive a fork, and several such processes share the machine.
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if PATIENT in sys.argv and hasattr(os, "nice"):
        os.nice(10)
    warm_up()
    if not FORKS:
        serve(sys.stdin, answers)
        return
    # Children would copy the pages of all objects that a collection looks at.
    gc.collect()
    gc.freeze()
    while True:
        child = os.fork()
        if child == 0:
            _limit_memory()
            # Of its own, since a child that was killed has read ahead.
            with os.fdopen(os.dup(0), encoding="utf-8") as requests:
                serve(requests, answers)
            answers.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:  # There are no more requests.
            # Not by the end of the interpreter, at which triton's library prints what it leaks.
            os._exit(0)
        # A child that was killed may have written half a line.
        print(file=answers, flush=True)


def warm_up() -> None:
    """Have everything imported and read that an answer needs: sympy alone takes a second."""
    text = "param w: int = 4\ntensor t[heads]: float\nscore = softcap(score, t[h])\n"
    text += "mask = causal() and q - kv < w + 1 + w + 1"  # A sum that sympy is imported for.
    for kind in RequestKind:
        answer(PageRequest(kind, text, view=PictureCall(q_len=8, kv_len=8, cost_len=64)))


def _limit_memory() -> None:
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
