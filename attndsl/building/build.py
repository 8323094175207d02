"""Parallel compilation of kernels for a GPU that this machine does not have.

Calls run up to their launches, which do nothing: so they find their kernels in the way in which
they find them on the GPU. What they compute means nothing.

Non-goals: tuned tile sizes, which only a GPU can measure.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.engine.families import GENERATED, HOPPER, families_of, why_not_loaded
from attndsl.backends.kernels.offline_gpu import AbsentGPU
from attndsl.backends.tiled.contractions import WidenedBackend, why_tiles
from attndsl.call.attention_base import located_call
from attndsl.call.autograd import attend
from attndsl.call.dispatch import get_backend
from attndsl.errors import AttnDSLError, BackendError, LaunchWarning
from attndsl.runtime.disk_cache import MemoryStore
from attndsl.runtime.program_store import program_entry

from .bundle_calls import examples
from .warmup import warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.attention import Attention
    from attndsl.backends.engine.backend import GeneratedBackend

    from .bundle_calls import CallGrid, ExampleCall
    from .warmup import Warmed


class CompiledKernel(NamedTuple):
    """One kernel that Triton has compiled, or found in its own cache."""

    name: str
    seconds: float
    cached: bool
    """True if it was in Triton's cache."""


class Progress(NamedTuple):
    """Callbacks of a build, each called in whichever thread does the work."""

    compiled: Callable[[CompiledKernel], None]
    done: Callable[[Warmed], None]


class Without(NamedTuple):
    """Calls that have no kernels: torch operations run them."""

    program: str
    why: str


@dataclass(slots=True)
class Built:
    """Results of a build."""

    store: MemoryStore
    """Entries of kernels and programs."""
    gpu: AbsentGPU
    warmed: list[Warmed]
    """One for each program."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of compilation by hash of a kernel."""
    calls: int = 0
    without: Counter[Without] = field(default_factory=Counter)
    """Number of calls without kernels, by program and reason."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards the fields above: a thread for each program writes them."""


def build(
    programs: Mapping[str, Attention], asked: CallGrid, target: str, progress: Progress
) -> Built:
    """Compile the kernels of all programs for all calls that ``asked`` means.

    The process compiles for ``target`` alone from then on, and launches nothing.

    Args:
        programs: By names.
        asked: Which calls.
        target: ``cuda:90`` and the like.
        progress: Who is told.

    Returns:
        What was made. Errors of programs are in it.

    Raises:
        BackendError: There is no such target.
    """
    import triton

    gpu = AbsentGPU(target)
    gpu.activate()
    built = Built(MemoryStore(), gpu, [])

    def heard(**what: Any) -> None:
        hit = bool(what["cache_hit"])
        seconds = 0.0 if hit else what["times"].total / 1e6
        with built.lock:
            built.seconds.setdefault(str(what["metadata"]["hash"]), seconds)
        progress.compiled(CompiledKernel(what["metadata"]["name"], seconds, hit))

    triton.knobs.compilation.listener = heard
    backends = {x.made_of.backend: None for x in programs.values()}
    known = {name: _backend(name, target, built.store) for name in backends}

    calls = {
        name: partial(_compile_all, built, name, x, asked, known[x.made_of.backend])
        for name, x in programs.items()
    }
    # Nothing is launched, by whatever launcher.
    warnings.filterwarnings("ignore", category=LaunchWarning)
    try:
        built.warmed = warm_up(calls, torch.device("cpu"), progress.done)
    finally:
        triton.knobs.compilation.listener = None
    return built


def _compile_all(
    built: Built, name: str, attention: Attention, asked: CallGrid, backend: GeneratedBackend
) -> None:
    """Have the kernels of all calls of one program.

    Raises:
        AttnDSLError: Of a call, which the message names.
    """
    for example in examples(attention, asked):
        with built.lock:
            built.calls += 1
        key, meta = program_entry(example.attention.made_of.spec)
        built.store.save(key, "", meta)
        try:
            why = run_example(example, backend)
        except AttnDSLError as error:
            error.message = f"{error.message} (in the call with {example})"
            raise
        if why is not None:
            with built.lock:
                built.without[Without(name, why)] += 1


def run_example(example: ExampleCall, backend: GeneratedBackend) -> str | None:
    """Have the kernels of one call, and of its backward if it has gradients.

    Returns:
        Why there are none, of a call that torch operations run.
    """
    lowered, call = located_call(example.attention, example.operands, example.arguments)
    whole = backend
    if lowered.contractions is not None:
        if (why := why_tiles(lowered, call)) is not None:
            return why
        whole = WidenedBackend(backend, get_backend("cpu"))  # type: ignore[assignment]
    whole.check(lowered, call)
    with torch.set_grad_enabled(bool(example.learned)):
        found = attend(whole, lowered, call, example.return_lse, first=True)
        outputs = found if isinstance(found, tuple) else (found,)
        if example.learned:
            grads = [torch.zeros_like(x) for x in outputs]
            torch.autograd.grad(outputs, example.learned, grads, allow_unused=True)
    return None


def check_backend(name: str, target: str) -> None:
    """Refuse a backend that compiles nothing for ``target``.

    Raises:
        BackendError: Says which do.
    """
    if name != "auto" and name not in GENERATED:
        raise BackendError(
            f"the {name} backend compiles no kernels", hint=f"use auto, {', '.join(GENERATED)}"
        )
    if name == "hopper" and target != HOPPER:
        raise BackendError(
            f"the hopper backend compiles for {HOPPER}, not for {target}", hint="use auto"
        )
    missing = None if name == "auto" else why_not_loaded(name)
    if missing is not None:
        raise BackendError(f"Hopper's kernels cannot be loaded here: {missing}")


def _backend(name: str, target: str, store: MemoryStore) -> GeneratedBackend:
    """Backend of calls that ask for ``name`` on ``target``, as ``runtime.dispatch`` chooses."""
    check_backend(name, target)
    return generated_backend(families_of(name, target), store)
