"""The attention modules of shared sequences, which torchtitan's models build and parallelize.

torchtitan refuses context parallelism beside its ``VarlenAttention``. What else it asks of the
module depends on ``parallelism.spmd_backend``:

- ``spmd_types`` gathers keys by the module's sharding configuration, and refuses
  ``ScaledDotProductAttention``: :class:`Shared` has keys stay where they are.
- ``partial_dtensor`` wraps that class alone, and gives it DTensors: :class:`SharedDTensors`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig

from attndsl.call.argument_checks import autocast
from attndsl.errors import ArgumentError, UnsupportedError

from .attention_module import check_heads, program_of
from .graph_operator import attend_in_graph

if TYPE_CHECKING:
    from torchtitan.protocols.sharding import ShardingConfig

    from .attention_module import Epilogue
    from .shared_batches import SharedRows

_OPERANDS = ("q_BLNH", "k_BLNH", "v_BLNH")


def _rows_stay(config: ShardingConfig) -> Any:
    """``config`` without its all-gathers of keys and values: this package fetches what is seen."""
    own = {name: config.in_src_shardings[name] for name in _OPERANDS}
    return replace(
        config, in_dst_shardings=own,
        local_map=LocalMapConfig(in_grad_placements=tuple(own.values())),
    )  # fmt: skip


class Shared(Module):  # type: ignore[misc]
    """Counterpart of :class:`.attention_module.Attention` for this process's rows of sequences."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """Settings: see :class:`.attention_module.Attention`."""

        window_size: tuple[int, int] = (-1, 0)
        program: str = ""
        heads: int | None = None

        def build(self, **unused: Any) -> Any:
            """The module."""
            own: Any = self
            if own.sharding_config is not None:
                own = replace(own, sharding_config=_rows_stay(own.sharding_config))
            # A class with slots has no super() without arguments.
            return Module.Config.build(own)

    def __init__(self, config: Shared.Config) -> None:
        # ScaledDotProductAttention's own, of a derived class, would choose kernels of torch.
        Module.__init__(self)
        self.heads = config.heads
        self.attention = program_of(config)
        # A graph takes these for constants, which all layers with one program have.
        self.text, self.window_size = config.program, tuple(config.window_size)
        self.rows: SharedRows | None = None
        self.home = -1

    def over(self, rows: SharedRows) -> None:
        """Take rows by what ``rows`` decides for each batch."""
        self.rows, self.home = rows, rows.home

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        out_transform: Epilogue | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """The attention of one layer.

        Args:
            q_BLNH: (batch, rows of this process, heads, dim).
            k_BLNH: (batch, rows, key heads, dim).
            v_BLNH: (batch, rows, key heads, value dim).
            attention_masks: The document of each position of the whole sequences, (batch, length).
            scale: Factor of q . k; 1 / sqrt(dim) by default.
            out_transform: Given the output and the log-sum-exp (batch, rows, heads).
            **unused: ``enable_gqa``, which is always so.

        Returns:
            (batch, rows, heads, value dim).

        Raises:
            ArgumentError: Another kind of ``attention_masks``, as where no trainer of ours is.
            UnsupportedError: Some of the heads, for a program that reads heads; an epilogue beside
                a program with weights of its own.
        """
        check_heads(self.heads, q_BLNH)
        if self.rows is None or not isinstance(attention_masks, torch.Tensor):
            raise ArgumentError(
                f"attention_masks is a {type(attention_masks).__name__}, which says no documents "
                "of shared sequences",
                hint="train with attndsl.torchtitan.Trainer",
            )
        if out_transform is not None and self.attention.lowered.program.weights is not None:
            raise UnsupportedError(
                "the program has weights of its own, and the model's epilogue needs a log-sum-exp",
                hint="choose a program of softmax, or a model without sinks of its own",
            )
        # An operator in a graph may run where autocast is off by then.
        operands = autocast(q_BLNH), autocast(k_BLNH), autocast(v_BLNH)
        out: torch.Tensor
        lse: torch.Tensor | None
        if torch.compiler.is_compiling():
            out, lse = attend_in_graph(
                *operands, attention_masks, self.text, self.window_size, scale, self.home
            )
        else:
            wants_lse = out_transform is not None
            out, lse = self.rows.attend(self.attention, operands, attention_masks, scale, wants_lse)
        if out_transform is None or lse is None:
            return out
        return out_transform(out, lse.transpose(1, 2))


class SharedDTensors(Shared, ScaledDotProductAttention):  # type: ignore[misc]
    """Variant of :class:`Shared` for DTensors whose local parts are this process's rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Shared.Config):
        """Settings: see :class:`Shared`."""

    def forward(
        self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, attention_masks: Any, **options: Any
    ) -> torch.Tensor:
        """Attention of one layer: see :meth:`Shared.forward`.

        The shape that torchtitan's wrapper gives these DTensors is that of equal runs of rows, and
        their placements know of no layout but these. So nothing is asked of them.
        """
        own = (x.to_local() for x in (q_BLNH, k_BLNH, v_BLNH))
        return super().forward(*own, attention_masks=attention_masks, **options)
