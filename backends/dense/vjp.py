"""Gradients of functions of torch operations, wherever they are asked for.

``torch.func.vjp`` refuses to run under hooks on saved tensors, as checkpointing and ``save_on_cpu``
install them. The tensors that it saves are gone when it returns: hooks would have nothing of them.
Where its results are differentiated again, torch saves past the hooks, which costs memory alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensors = tuple[torch.Tensor, ...]
_hooks = torch._C._autograd


def pulled(function: Callable[..., Tensors], inputs: Tensors, grads: Tensors) -> Tensors:
    """Gradients of ``inputs`` from those of ``function(*inputs)``."""
    with _without_hooks():
        pull: Callable[..., Tensors] = torch.func.vjp(function, *inputs)[1]
        return pull(grads)


@contextmanager
def _without_hooks() -> Iterator[None]:
    aside = []
    try:
        while (hooks := _hooks._top_saved_tensors_default_hooks(True)) is not None:
            _hooks._pop_saved_tensors_default_hooks()
            aside.append(hooks)
        yield
    finally:
        for pack, unpack in reversed(aside):
            _hooks._push_saved_tensors_default_hooks(pack, unpack)
