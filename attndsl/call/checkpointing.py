"""Gradient checkpointing: functions that save their arguments alone and recompute the rest.

A derivative of such a function is one again, so that a sum over many of them, one after the other,
takes the memory of one for derivatives of any order and mode, and under ``torch.func`` transforms.
(Recomputation: T. Chen et al., arXiv 1604.06174.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch.autograd import forward_ad

from attndsl.backends.dense.vjp import pulled

from .argument_checks import without_autocast
from .batched_gradients import refuse_vectorized

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.backends.dense.vjp import Tensors

_is_batched = torch._C._functorch.is_batchedtensor


class Function(Protocol):
    """Differentiable torch operations on its arguments; it holds no tensors of its own."""

    pushes_results: ClassVar[bool]
    """True if ``pushed`` takes the results too, behind the inputs."""

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """One tensor or more; ``inputs`` that are not floats are constants."""

    def pushed(self, moved: tuple[int, ...]) -> Function:
        """The derivative of the results along tangents.

        Args:
            moved: Which inputs have one. The function takes all inputs, the results where
                ``pushes_results``, then these tangents.
        """


def recomputed(function: Function, *inputs: torch.Tensor) -> Tensors:
    """``function(*inputs)``."""
    refuse_vectorized(*inputs)
    found: Tensors = _Recomputed.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return found


class _Recomputed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(function: Function, *inputs: torch.Tensor) -> Tensors:
        if forward_ad._current_level >= 0 and not torch._C._are_functorch_transforms_active():
            # What is inside would carry tangents along, for nothing: they are those of jvp.
            inputs = tuple(
                forward_ad.unpack_dual(x).primal if x.is_floating_point() else x  # type: ignore[no-untyped-call]
                for x in inputs
            )
        # Autocast would round operands, which are of the dtype to compute in.
        with without_autocast(inputs[0].device):
            return function(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors, *(output if ctx.function.pushes_results else ()))
        # What does not move, or has no gradient, makes no work; vmap's rule takes no None.
        ctx.set_materialize_grads(any(map(_is_batched, tensors)))
        ctx.like = tuple((x.shape, x.dtype, x.device) for x in output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        given = tuple(
            torch.zeros(shape, dtype=dtype, device=device) if each is None else each
            for each, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
        )
        needs = ctx.needs_input_grad[1:]
        wanted = tuple(place for place, need in enumerate(needs) if need)
        parts = recomputed(Pulled(ctx.function, wanted, len(inputs)), *inputs, *given)
        found: list[torch.Tensor | None] = [None] * len(inputs)
        for place, part in zip(wanted, parts, strict=True):
            found[place] = part
        return (None, *found)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Tensors:
        saved = ctx.saved_tensors
        given = {
            place: each
            for place, (each, like) in enumerate(zip(tangents, saved, strict=False))
            if each is not None and like.is_floating_point()
        }
        return recomputed(ctx.function.pushed(tuple(given)), *saved, *given.values())


@dataclass(frozen=True, slots=True)
class Pulled:
    """Gradients of some inputs of ``function``, from all inputs and the gradients of results."""

    pushes_results: ClassVar[bool] = False
    function: Function
    wanted: tuple[int, ...]
    """Places of those inputs."""
    count: int
    """Number of inputs."""

    def __call__(self, *args: torch.Tensor) -> Tensors:
        """One gradient for each input that is wanted."""
        inputs, grads = args[: self.count], args[self.count :]
        function = _of(self.function, self.wanted, inputs)
        return pulled(function, tuple(inputs[place] for place in self.wanted), grads)

    def pushed(self, moved: tuple[int, ...]) -> Function:
        """See :class:`Function`."""
        return Pushed(self, moved)


@dataclass(frozen=True, slots=True)
class Pushed:
    """Tangents of the results of ``function``, by transposing its reverse-mode derivative.

    (J. Townsend, A new trick for calculating Jacobian vector products, 2017.)
    """

    pushes_results: ClassVar[bool] = False
    function: Function
    moved: tuple[int, ...]

    def __call__(self, *args: torch.Tensor) -> Tensors:
        """One tangent for each result."""
        count = len(args) - len(self.moved)
        inputs, tangents = args[:count], args[count:]
        function = _of(self.function, self.moved, inputs)

        def pull(*grads: torch.Tensor) -> Tensors:
            return pulled(function, tuple(inputs[place] for place in self.moved), grads)

        zeros = tuple(torch.zeros_like(each) for each in self.function(*inputs))
        return pulled(pull, zeros, tangents)

    def pushed(self, moved: tuple[int, ...]) -> Function:
        """See :class:`Function`."""
        return Pushed(self, moved)


def _of(function: Function, places: tuple[int, ...], inputs: Tensors) -> Callable[..., Tensors]:
    """``function`` of the inputs at ``places`` alone."""

    def of_some(*some: torch.Tensor) -> Tensors:
        given = list(inputs)
        for place, each in zip(places, some, strict=True):
            given[place] = each
        return function(*given)

    return of_some
