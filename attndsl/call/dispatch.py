"""Choice of the backend that runs a call."""

from __future__ import annotations

import difflib
import logging
from typing import TYPE_CHECKING

import torch

from attndsl.backends.dense.reference import ReferenceBackend
from attndsl.backends.engine.families import GENERATED, HOPPER, families_of, why_not_loaded
from attndsl.backends.tiled.contractions import WidenedBackend
from attndsl.backends.tiled.cpu import CPUBackend
from attndsl.errors import BackendError
from attndsl.foundation.caches import Reason, memoised
from attndsl.foundation.gc_pause import gc_paused
from attndsl.foundation.logs import LOG, tell_once
from attndsl.runtime.program_store import default_cache

if TYPE_CHECKING:
    from attndsl.backends.base import Backend, Call
    from attndsl.pipeline import Lowered


def check_backend_name(name: str) -> None:
    """Refuse a name that is no backend.

    Raises:
        BackendError: ``name`` is unknown.
    """
    if name == "auto" or name in BACKENDS:
        return
    close = difflib.get_close_matches(str(name), ["auto", *BACKENDS], n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"use auto, {', '.join(BACKENDS)}"
    raise BackendError(f"there is no backend {name!r}", hint=hint)


def choose_backend(
    name: str, device: torch.device, checked: bool, dtype: torch.dtype
) -> tuple[Backend, str]:
    """The backend for tensors of ``dtype`` on ``device``, and the reason in words.

    ``auto`` means ``cpu`` on CPUs, and on GPUs the families of kernels that are best there
    (:mod:`attndsl.backends.engine.families`). On GPUs other than Hopper's, and where this Triton
    cannot load Gluon, these are those of ``triton``. In fp64, which no kernel computes in, it means
    ``cpu`` everywhere. In checked mode it means ``reference`` in place of ``cpu``. A backend that
    fails is never replaced silently.

    Raises:
        BackendError: The backend does not work here; says why.
    """
    reason = "asked for by name"
    if name == "auto":
        name, reason = _default(device, dtype)
        if checked and name == "cpu":
            name, reason = "reference", "checked mode runs there"
    if checked and name != "reference":
        raise BackendError(
            "checked mode runs only on the reference backend",
            hint="use backend='reference' with it",
        )
    backend = get_backend(name, checked, _target_of(device))
    refusal = backend.why_not(device)
    if refusal is not None:
        raise BackendError(
            f"the {backend.name} backend cannot run on {device}: {refusal}",
            hint="backend='reference' runs everywhere",
        )
    return backend, reason


def backend_of(
    lowered: Lowered, name: str, device: torch.device, checked: bool, dtype: torch.dtype
) -> tuple[Backend, str]:
    """Run :func:`choose_backend` for one program; kernels get a helper for dots they do not have.

    Raises:
        BackendError: The backend does not work here; says why.
    """
    chosen, reason = choose_backend(name, device, checked, dtype)
    if lowered.contractions is not None and not chosen.contracts:
        return WidenedBackend(chosen, get_backend("cpu")), reason
    return chosen, reason


def tell_choice(name: str, call: Call, backend: Backend, reason: str) -> None:
    """Log what runs calls of the program ``name`` like ``call``, once for all of one kind."""
    if LOG.isEnabledFor(logging.INFO):
        q, kv_len = call.q, call.k.shape[2]
        kind = f"{str(q.dtype).removeprefix('torch.')} on {q.device}"
        what = f"q {tuple(q.shape)}, {kv_len} keys, {kind}"
        tell_once(f"{name}: {what}: backend {backend.name}, {reason}")


def _default(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The backend for tensors of ``dtype`` on ``device``, and the reason."""
    if device.type == "cpu":
        return "cpu", "the default for cpu tensors"
    if dtype is torch.float64:
        return "cpu", "the default for fp64 on all devices, since no kernel computes in fp64"
    target = _target_of(device)
    if target == HOPPER:
        missing = why_not_loaded("hopper")
        if missing is not None:
            return "auto", f"the default where Hopper's own kernels cannot be loaded: {missing}"
        return "auto", (
            "the default for Hopper GPUs: short kernels where all keys fit a program, "
            "triton kernels for what the hopper ones cannot run"
        )
    return "auto", f"the default for {device.type} tensors"


@memoised("architectures of GPUs", 64)
def _target_of(device: torch.device) -> str | None:
    """Architecture of an NVIDIA GPU that is there, such as ``cuda:90``; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    if (device.index or 0) >= torch.cuda.device_count():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda:{major}{minor}"


BACKENDS = ("reference", "cpu", *GENERATED)
"""Names of the backends of this version."""


def get_backend(name: str, checked: bool = False, target: str | None = None) -> Backend:
    """The one object of a backend in this process; it holds the compiled kernels.

    Args:
        name: Of :data:`BACKENDS`, or ``auto`` for the kernels that are best on a GPU.
        checked: Whether the reference backend checks lookups.
        target: The GPU's architecture, of which ``auto`` depends.
    """
    if name == "auto" or name in GENERATED:
        return _generated(families_of(name, target))
    return _of_torch(name, checked)


@memoised("backends of torch operations", None, Reason.BACKENDS)
def _of_torch(name: str, checked: bool) -> Backend:
    return ReferenceBackend(checked=checked) if name == "reference" else CPUBackend()


@memoised("backends of generated kernels", None, Reason.BACKENDS)
def _generated(families: tuple[str, ...]) -> Backend:
    try:
        with gc_paused():
            # Triton takes long to import, and CPU users never need it.
            from attndsl.backends.engine.backend import generated_backend

            store = default_cache()
            store.prepare()
            return generated_backend(families, store)
    except ImportError as error:
        raise BackendError(
            f"Triton cannot be imported: {error}", hint="install triton, or use backend='reference'"
        ) from error
