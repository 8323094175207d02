"""Batches of a trainer that several processes share, and the calls of their rows."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.parallel import ContextParallel, Shape

from .attention_module import DOCUMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from attndsl.attention import Attention as Program
    from attndsl.parallel import Sharded

    from .shared_attention import Shared

_NUMBERS = count()
_INPUT, _POSITIONS = "input", "positions"
_LABELS = "labels"


class SharedRows:
    """Rows of each batch that this process has.

    Args:
        mesh: The processes that share sequences.
        layout: As of :class:`attndsl.parallel.ContextParallel`.
        modules: The model's attention modules.
        shape: Sizes of their calls, but the batch.
    """

    def __init__(
        self, mesh: DeviceMesh, layout: str, modules: Sequence[Shared], shape: Shape
    ) -> None:
        self.home = next(_NUMBERS)
        """Number by which graphs find this object."""
        self._cp = ContextParallel(mesh, layout)
        self._shape = shape
        self._programs = [module.attention for module in modules]
        self._sharded: dict[Program, Sharded] = {}
        HOMES[self.home] = self
        for module in modules:
            module.over(self)

    def share(
        self, given: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """This process's rows of a batch, which is planned by its documents.

        Args:
            given: ``input`` and ``positions`` of whole sequences, (batch, length).
            labels: The same.

        Returns:
            The rows of inputs and labels, and what else the model takes: the rows of positions,
            and as ``attention_masks`` the document of each position of the whole sequences, (batch,
            length).

        Raises:
            ArgumentError: No positions; processes that do not have the same batch.
            UnsupportedError: Other inputs.
        """
        if others := sorted(set(given) - {_INPUT, _POSITIONS}):
            raise UnsupportedError(
                f"the data loader gives {', '.join(others)}, and which rows belong to which "
                "tokens is not known",
                hint="set context_parallel_degree to 1 for such a model",
            )
        positions = given.get(_POSITIONS)
        if positions is None:
            raise ArgumentError(
                "the data loader gives no positions, and these say where documents begin",
                hint='let it give {"input": tokens, "positions": positions}, both of them '
                "(batch, length)",
            )
        document = (positions == 0).cumsum(1)
        whole = {_INPUT: given[_INPUT], _POSITIONS: positions, _LABELS: labels}
        found = self._cp.shard(
            whole, dict.fromkeys(whole, 1), programs=self._programs,
            shape=self._shape._replace(batch=len(positions)), captures={DOCUMENT: document},
        )  # fmt: skip
        more = {_POSITIONS: found[_POSITIONS], "attention_masks": document}
        return found[_INPUT], found[_LABELS], more

    def attend(
        self,
        program: Program,
        operands: Sequence[torch.Tensor],
        document: torch.Tensor,
        scale: float | None,
        wants_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output (batch, rows, heads, dim), and the log-sum-exp (batch, heads, rows).

        Args:
            program: One of :func:`.attention_module.composed`.
            operands: q, k and v, (batch, rows, heads, dim).
            document: That of each position of the whole sequences, (batch, length).
            scale: Factor of q . k.
            wants_lse: Whether to give the log-sum-exp.
        """
        found = self._of(program)(
            *(x.transpose(1, 2) for x in operands), scale=scale, return_lse=wants_lse,
            captures={DOCUMENT: document},
        )  # fmt: skip
        out, lse = found if wants_lse else (found, None)
        return out.transpose(1, 2), lse

    def gradients(
        self,
        program: Program,
        operands: Sequence[torch.Tensor],
        results: tuple[torch.Tensor, torch.Tensor],
        grads: tuple[torch.Tensor, torch.Tensor | None],
        document: torch.Tensor,
        scale: float | None,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of ``operands``, from results of :meth:`attend` and the gradients of these."""
        has_lse = program.lowered.program.weights is None
        found = self._of(program).gradients(
            [x.transpose(1, 2) for x in operands],
            [results[0].transpose(1, 2), *results[1:][:has_lse]],
            [grads[0].transpose(1, 2), *grads[1:][:has_lse]], scale=scale,
            captures={DOCUMENT: document},
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in found)

    def explain(self) -> str:
        """Text on the rows, work and traffic of processes for the latest batch."""
        return self._cp.explain()

    def _of(self, program: Program) -> Sharded:
        if (found := self._sharded.get(program)) is None:
            found = self._sharded[program] = self._cp(program)
        return found


HOMES: WeakValueDictionary[int, SharedRows] = WeakValueDictionary()
"""Living batches by number: graphs hold no objects."""
