"""Tile sizes measured on a call's own tensors.

The choice is kept beside the kernels, in memory and on disk: by program, dtypes and head dims.
Lengths count only where they choose the kernel, so tune on the call that matters most.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from attndsl.backends.base import Backward, Wants
from attndsl.call.argument_checks import learned
from attndsl.errors import BackendError, UnsupportedError
from attndsl.foundation.caches import CACHES, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.backends.base import Backend, Call
    from attndsl.pipeline import Lowered

_WARM_UP, _MEASURED = 3, 0.1
"""Runs before the measurement, and the seconds that it takes."""
_AHEAD = 2_000_000
"""Cycles that a GPU waits, a millisecond or so: longer than the host needs for a call."""


@runtime_checkable
class Tunable(Protocol):
    """A backend with several kernels for one call; ``kind`` is ``forward`` or ``backward``."""

    def choices(
        self, lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None,
        wants: Wants | None,
    ) -> Mapping[str, tuple[object, ...]]:  # fmt: skip
        """Configs by kernel, each printable."""

    def choose(
        self, lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None,
        wants: Wants | None, kernel: str, config: object,
    ) -> None:  # fmt: skip
        """Use ``config`` for calls like this one from now on; BackendError if it does not fit."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One config of one kernel."""

    kernel: str
    config: str
    milliseconds: float | None
    """Time of the whole forward or backward call; None where the config does not fit the device."""
    why: str = ""
    """Reason why there is no time."""
    chosen: bool = False

    def __str__(self) -> str:
        """One line of the table."""
        time = "-" if self.milliseconds is None else f"{self.milliseconds:.4f} ms"
        note = " <- chosen" if self.chosen else f" ({self.why})" if self.why else ""
        return f"{self.kernel:<20} {time:>14}  {self.config}{note}"


@dataclass(frozen=True, slots=True)
class Tuning:
    """All measurements of :meth:`attndsl.Attention.tune`; printed, a table."""

    measurements: tuple[Measurement, ...]

    def __str__(self) -> str:
        """A line a measurement."""
        return "\n".join(map(str, self.measurements))


def tune(
    backend: Backend, lowered: Lowered, call: Call, progress: Callable[[str], None] | None = None
) -> Tuning:
    """Measure every config of every kernel that ``call`` needs, and choose the fastest.

    Kernels are tuned one after the other, the earlier ones as chosen.

    Args:
        backend: What runs the call.
        lowered: The program.
        call: With gradients of what requires grad.
        progress: Gets a line as soon as it is known.

    Raises:
        UnsupportedError: ``backend`` has nothing to choose from.
        BackendError: No config of a kernel fits.
    """
    found = _tune_direction("forward", *backend.runner(lowered, call, "forward"), progress)
    if _wants(call) is not None:
        runner = backend.runner(lowered, call, "backward")
        found += _tune_direction("backward", *runner, progress)
    return Tuning(tuple(found))


def _tune_direction(
    kind: str, backend: Backend, lowered: Lowered, call: Call,
    progress: Callable[[str], None] | None,
) -> list[Measurement]:  # fmt: skip
    """Measure the configs of the kernels of one direction."""
    if not isinstance(backend, Tunable):
        raise UnsupportedError(
            f"the {backend.name} backend has one way to run a call, and nothing to tune",
            hint="tune on a GPU in fp16, bf16 or fp32, where auto takes generated kernels",
        )
    out, lse = backend.forward(lowered, call)
    wanted = _wants(call) if kind == "backward" else None
    grad = None if wanted is None else torch.randn_like(out, dtype=call.q.dtype)
    run: Callable[[], object] = partial(backend.forward, lowered, call)
    if wanted is not None and grad is not None:
        run = partial(backend.backward, lowered, call, Backward(out, lse, grad, None, wanted))
    found: list[Measurement] = []
    for kernel, configs in backend.choices(lowered, call, kind, grad, wanted).items():
        choose = partial(backend.choose, lowered, call, kind, grad, wanted, kernel)
        timed = partial(milliseconds, run, call.q.device)
        found += _tune_kernel(kernel, configs, choose, timed, progress)
    return found


def _tune_kernel(
    kernel: str,
    configs: tuple[object, ...],
    choose: Callable[[object], None],
    timed: Callable[[], float],
    progress: Callable[[str], None] | None,
) -> list[Measurement]:
    """Measure each of ``configs``, and choose the fastest; BackendError where none fits."""
    times: dict[int, float] = {}
    found = []
    try:
        for number, config in enumerate(configs):
            try:
                choose(config)
                times[number] = timed()
                found.append(Measurement(kernel, str(config), times[number]))
            except BackendError as refusal:
                found.append(Measurement(kernel, str(config), None, refusal.message))
            if progress is not None:
                progress(str(found[-1]))
    finally:
        # An interrupted run keeps the best so far, not what it was at.
        best = min(times, key=times.__getitem__, default=None)
        if best is not None:
            choose(configs[best])
        CACHES.invalidate(Reason.KERNELS)
    if best is None:
        raise BackendError(f"no config of {kernel} fits: {found[-1].why}")
    found[best] = replace(found[best], chosen=True)
    return found


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time of ``run``; on a GPU that of its kernels, by CUDA events."""
    timed = _gpu_time if device.type == "cuda" else _cpu_time
    for _ in range(_WARM_UP):
        timed(run)
    begin = time.perf_counter()
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() - begin < _MEASURED:
        times.append(timed(run))
    return statistics.median(times)


def _gpu_time(run: Callable[[], object]) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    # Kernels of a few microseconds would otherwise wait for the host, which takes longer to launch
    # them and is the same for all tile sizes.
    torch.cuda._sleep(_AHEAD)  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _cpu_time(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def _wants(call: Call) -> Wants | None:
    """The gradients that a backward of ``call`` would make; None for none."""
    wants = Wants(
        call.q.requires_grad, call.k.requires_grad, call.v.requires_grad,
        learned(call.tensors), learned(call.params),
    )  # fmt: skip
    some = wants.q or wants.k or wants.v or wants.tensors or wants.params
    return wants if some else None
