"""Parallel compilation of the kernels of several programs before their first calls.

Non-goals: kernels for a GPU that is not there; other lengths than those of the given call where
lengths choose the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.backends.kernels.compile_pool import processors
from attndsl.call.argument_checks import joined
from attndsl.errors import ArgumentError, AttnDSLError, ProgramErrors, raise_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attndsl.attention import Attention

_OPERANDS = ("q", "k", "v")


class Warmed(NamedTuple):
    """Outcome of warming up one program: its seconds, and its error if any."""

    name: str
    seconds: float
    """Seconds since it began. Programs share processors, so these do not add up."""
    error: AttnDSLError | None


def warm_up(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    done: Callable[[Warmed], None] | None = None,
) -> list[Warmed]:
    """Make all calls, each in a thread, so that what they compile is compiled side by side.

    Args:
        calls: By names of programs.
        device: Where they run.
        done: Is told of each call when it ends, in this thread.

    Returns:
        One for each call, in the order of ``calls``. Errors of the project are in it. Others are
        raised once all calls have ended.
    """
    grad = torch.is_grad_enabled()

    def timed(name: str) -> Warmed:
        # A new thread has torch's defaults.
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        begin = time.perf_counter()
        error = None
        with torch.set_grad_enabled(grad), current:
            try:
                calls[name]()
            except AttnDSLError as found:
                error = found
        return Warmed(name, time.perf_counter() - begin, error)

    pool = ThreadPoolExecutor(max(2, processors()), "attndsl warms up")
    try:
        futures = {pool.submit(timed, name): name for name in calls}
        found = {}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            if done is not None:
                done(found[futures[future]])
        return [found[name] for name in calls]
    finally:
        pool.shutdown(cancel_futures=True)


def warm_up_programs(programs: Mapping[str, Attention], arguments: Mapping[str, Any]) -> None:
    """Have the kernels of all programs for one call's ``arguments``; see :func:`attndsl.load`.

    Raises:
        ArgumentError: ``arguments`` are not those of a call, or hold a capture that no program has.
        AttnDSLError: What programs refuse, each under the program's name, after all have ended.
    """
    given = _checked(arguments)
    operands = [given.pop(name) for name in _OPERANDS]
    captures = joined(given.pop("captures", None), {})
    own = {name: _names(attention) for name, attention in programs.items()}
    foreign = [name for name in captures if not any(name in each for each in own.values())]
    if foreign:
        raise ArgumentError(
            f"warmup has the captures {', '.join(foreign)}, which no program of the file has",
            hint="drop them, or look for a misspelt name",
        )

    def call(name: str) -> Callable[[], object]:
        mine = {key: value for key, value in captures.items() if key in own[name]}
        return lambda: programs[name].warmup(*operands, captures=mine, **given)

    raise_all(errors_of(warm_up({name: call(name) for name in programs}, operands[0].device)))


def errors_of(found: Iterable[Warmed]) -> list[AttnDSLError]:
    """The errors, each with the name of its program."""
    errors = []
    for each in found:
        several = each.error.errors if isinstance(each.error, ProgramErrors) else (each.error,)
        for error in several:
            if error is not None:
                error.message = f"program '{each.name}': {error.message}"
                errors.append(error)
    return errors


def _checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a call's arguments; ArgumentError where they are none."""
    hint = 'write warmup={"q": q, "k": k, "v": v, "captures": {...}}'
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise ArgumentError(
            f"warmup is a {type(arguments).__name__} that is no mapping from names", hint=hint
        )
    for name in _OPERANDS:
        if not isinstance(arguments.get(name), torch.Tensor):
            raise ArgumentError(f"warmup has no tensor {name}", hint=hint)
    return dict(arguments)


def _names(attention: Attention) -> set[str]:
    """The captures that a call of a program may give."""
    program = attention.lowered.program
    return {decl.name for decl in program.tensors} | {decl.name for decl in program.params}
