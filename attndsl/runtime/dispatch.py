"""Choice of the backend that runs a call."""

from __future__ import annotations

import difflib
import logging
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import torch

from attndsl.backends.dense.reference import ReferenceBackend
from attndsl.backends.tiled.cpu import CPUBackend
from attndsl.backends.tiled.dots import WidenedBackend
from attndsl.errors import BackendError
from attndsl.foundation.caches import CACHES, Reason, memoised
from attndsl.logs import LOG, tell_once
from attndsl.settings import starts_quickly
from attndsl.uncollected import uncollected

from .programs import default_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.backends.base import Backend, Call
    from attndsl.backends.entries import Store
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

    ``auto`` means ``hopper`` on Hopper GPUs (``triton`` where this Triton cannot load Gluon), with
    the kernels of ``short`` where all keys of a head fit a program. It means ``triton`` on other
    GPUs, and ``cpu`` on CPUs. In fp64, which no kernel computes in, it means ``cpu`` everywhere. In
    checked mode it means ``reference`` in place of ``cpu``. A backend that fails is never replaced
    silently.

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
            "checked mode runs on the reference backend", hint="use backend='reference' with it"
        )
    backend = get_backend(name, checked)
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
    if device.type == "cuda" and _is_hopper(device.index):
        missing = why_no_hopper_kernels()
        if missing is not None:
            return "triton", f"the default where Hopper's own kernels cannot be loaded: {missing}"
        return _FASTEST, (
            "the default for Hopper GPUs: short kernels where all keys fit a program, "
            "triton kernels for what the hopper ones cannot run"
        )
    return "triton", f"the default for {device.type} tensors"


@lru_cache(maxsize=64)
def _is_hopper(index: int | None) -> bool:
    if torch.version.hip is not None or (index or 0) >= torch.cuda.device_count():
        return False
    return torch.cuda.get_device_capability(index) == (9, 0)


@lru_cache(maxsize=1)
def why_no_hopper_kernels() -> str | None:
    """Reason why this Triton lacks Gluon as the kernels know it, an experimental part; or None."""
    try:
        import_module("attndsl.backends.hopper.family")
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _reference(checked: bool) -> Backend:
    return ReferenceBackend(checked=checked)


def _cpu(checked: bool) -> Backend:
    return CPUBackend()


# Triton takes long to import, and CPU users never need it.


def _store() -> Store:
    """Store of kernels, with everything ready that loading them needs."""
    store = default_cache()
    store.prepare()
    return store


def _triton(checked: bool) -> Backend:
    from attndsl.backends.generated.for_any_gpu import triton_backend

    return triton_backend(_store())


def _hopper(checked: bool) -> Backend:
    from attndsl.backends.generated.for_hopper import hopper_backend

    return hopper_backend(_store())


def _short(checked: bool) -> Backend:
    from attndsl.backends.generated.for_short import short_backend

    return short_backend(_store())


def _decode(checked: bool) -> Backend:
    from attndsl.backends.generated.for_decode import decode_backend

    return decode_backend(_store())


def _fastest(checked: bool) -> Backend:
    from attndsl.backends.generated.for_hopper import fastest_backend

    return fastest_backend(_store(), _other_kernels if starts_quickly() else None)


def _other_kernels() -> None:
    CACHES.invalidate(Reason.KERNELS)


def _nothing_missing() -> str | None:
    return None


def _missing_for_hopper() -> str | None:
    return why_no_hopper_kernels()


class _Known(NamedTuple):
    """A backend of this version."""

    make: Callable[[bool], Backend]
    """In checked mode or not."""
    generated: bool = False
    """Whether its kernels are generated text."""
    missing: Callable[[], str | None] = _nothing_missing
    """Why this Triton cannot load its kernels, or None."""


_KNOWN = {
    "reference": _Known(_reference),
    "cpu": _Known(_cpu),
    "triton": _Known(_triton, generated=True),
    "hopper": _Known(_hopper, generated=True, missing=_missing_for_hopper),
    "short": _Known(_short, generated=True),
    "decode": _Known(_decode, generated=True),
}
_FASTEST = "auto"
"""What ``auto`` runs on Hopper GPUs has no other name."""
BACKENDS = tuple(_KNOWN)
"""Names of the backends of this version."""
GENERATED = tuple(name for name, known in _KNOWN.items() if known.generated)
"""Those whose kernels are generated text."""


def why_not_loaded(name: str) -> str | None:
    """Reason why this Triton cannot load the kernels of a backend, or None."""
    return _KNOWN[name].missing()


def get_backend(name: str, checked: bool = False) -> Backend:
    """The one object of a backend in this process; it holds the compiled kernels."""
    return _made(name, checked)


@memoised("backends", None, Reason.BACKENDS)
def _made(name: str, checked: bool) -> Backend:
    # ``cache`` takes ``f(x)`` and ``f(x, False)`` for two calls.
    try:
        with uncollected():
            return _fastest(checked) if name == _FASTEST else _KNOWN[name].make(checked)
    except ImportError as error:
        raise BackendError(
            f"Triton cannot be imported: {error}", hint="install triton, or use backend='reference'"
        ) from error
