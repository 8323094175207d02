"""Gradients of functions of torch operations, wherever they are asked for.

``torch.func.vjp`` refuses to run under hooks on saved tensors, as checkpointing and ``save_on_cpu``
install them. The tensors that it saves are gone when it returns: hooks would have nothing of them.
Where its results are differentiated again, torch saves past the hooks, which costs memory alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from attndsl.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensors = tuple[torch.Tensor, ...]
_hooks = torch._C._autograd
_top = getattr(_hooks, "_top_saved_tensors_default_hooks", None)
"""The innermost hooks, or None; torch has it since 2.8."""


def pulled(function: Callable[..., Tensors], inputs: Tensors, grads: Tensors) -> Tensors:
    """Gradients of ``inputs`` from those of ``function(*inputs)``.

    Raises:
        UnsupportedError: Hooks on saved tensors are active, and this torch cannot set them aside.
    """
    with _without_hooks():
        pull: Callable[..., Tensors] = torch.func.vjp(function, *inputs)[1]
        return pull(grads)


@contextmanager
def _without_hooks() -> Iterator[None]:
    if _top is None:
        _refuse_hooks()
        yield
        return
    aside = []
    try:
        while (hooks := _top(True)) is not None:
            _hooks._pop_saved_tensors_default_hooks()
            aside.append(hooks)
        yield
    finally:
        for pack, unpack in reversed(aside):
            _hooks._push_saved_tensors_default_hooks(pack, unpack)


def _refuse_hooks() -> None:
    message = "this torch cannot set hooks on saved tensors aside, as derivatives here need"
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(message):
            pass
    except RuntimeError:
        raise UnsupportedError(
            message,
            hint="use torch 2.8 or later, or take tangents and second derivatives of attention "
            "outside of checkpoint, save_on_cpu and saved_tensors_hooks",
        ) from None
