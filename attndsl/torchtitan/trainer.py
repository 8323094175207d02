"""torchtitan's trainer, for models whose sequences several processes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan import trainer as titan
from torchtitan.components import validate
from torchtitan.distributed.spmd_types import annotate_input_spmd_types

from .shared_attention import Shared
from .shared_batches import SharedRows
from .sharing_config import layout_of, shape_of, shared

if TYPE_CHECKING:
    import torch


class Trainer(titan.Trainer):  # type: ignore[misc]
    """torchtitan's trainer, also with ``parallelism.context_parallel_degree`` above 1.

    Then all attention of the model is :class:`attndsl.torchtitan.Attention`. For each batch the
    processes that share its sequences decide who holds which rows, by the documents and by the
    programs of all layers. Without context parallelism this is torchtitan's trainer, for any model.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):  # type: ignore[misc]
        """torchtitan's.

        ``parallelism.context_parallel_load_balancer`` names the layout: ``"headtail"``, the
        default, gives each process a piece of both ends; None gives it one run of rows;
        ``"balanced"`` and ``"auto"`` follow the documents of each batch.
        """

    def __init__(self, config: Trainer.Config) -> None:
        """Build the model and all that trains it.

        Raises:
            ArgumentError: A layout that there is not, or a length that it does not divide.
            UnsupportedError: What cannot be done with shared sequences.
        """
        if config.parallelism.context_parallel_degree > 1:
            config = shared(config, Validator)
        super().__init__(config)
        self._rows: SharedRows | None = None
        if self.parallel_dims.cp_enabled:
            modules = _modules(self.model_parts[0])
            layout = layout_of(config.parallelism.context_parallel_load_balancer)
            mesh = self.parallel_dims.get_mesh("cp")
            self._rows = SharedRows(mesh, layout, modules, shape_of(config))

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """This process's part of a batch.

        Args:
            input_dict: ``input`` and ``positions`` of whole sequences, (batch, length).
            labels: (batch, length).

        Returns:
            Inputs, labels, and what else the model takes.

        Raises:
            AttnDSLError: As of :meth:`.shared_batches.SharedRows.share`.
        """
        if self._rows is None:
            found: tuple[Any, Any, dict[str, Any]]
            found = super().post_dataloading_process(input_dict, labels)
            return found
        inputs, labels, more = self._rows.share(input_dict, labels)
        self.ntokens_seen += labels.numel()
        if self.config.parallelism.spmd_backend == "spmd_types":
            annotate_input_spmd_types(self.parallel_dims, inputs, labels, more)
        return inputs, labels, more

    def explain(self) -> str:
        """Text on processes' rows and traffic for the latest batch; empty without sharing."""
        return "" if self._rows is None else self._rows.explain()


class Validator(validate.Validator):  # type: ignore[misc]
    """torchtitan's validator, with batches that are shared as those of the trainer are."""

    @dataclass(kw_only=True, slots=True)
    class Config(validate.Validator.Config):  # type: ignore[misc]
        """torchtitan's."""

    def post_dataloading_process(
        self,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        model_parts: list[torch.nn.Module],
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Process's part of a batch: see :meth:`Trainer.post_dataloading_process`."""
        rows = _modules(model_parts[0])[0].rows
        assert rows is not None
        return rows.share(input_dict, labels)


def _modules(model: torch.nn.Module) -> list[Shared]:
    """The attention of all layers, within wrappers of checkpoints and of FSDP."""
    return [x for x in model.modules() if isinstance(x, Shared)]
