"""Gradients that ``torch.autograd`` batches by its own, older vmap, which kernels cannot see."""

from __future__ import annotations

from typing import NoReturn

import torch

from attndsl.errors import UnsupportedError

_is_vectorized = torch._C._functorch.is_legacy_batchedtensor


def refuse_vectorized(*given: torch.Tensor | None) -> None:
    """Refuse gradients and tangents of ``is_grads_batched=True`` and ``jacobian(vectorize=True)``.

    Raises:
        UnsupportedError: One of ``given`` is such.
    """
    if any(x is not None and _is_vectorized(x) for x in given):
        refuse()


def refuse(*_: object) -> NoReturn:
    """Refuse any operation on such gradients.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        "is_grads_batched=True and jacobian(vectorize=True) of torch.autograd batch gradients in a "
        "way that kernels cannot see",
        hint="use torch.func.jacrev, jacfwd or hessian, or leave the option out",
    )
