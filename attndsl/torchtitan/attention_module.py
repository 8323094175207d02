"""The attention module, and what it shares with :mod:`.shared_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

from attndsl.api import compile as compile_program
from attndsl.backends.kernels.device import stream_of
from attndsl.backends.kernels.tile_list_cache import KeptLists
from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.foundation.caches import memoised
from attndsl.ir import Op, toposort
from attndsl.program_join import join

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.attention import Attention as Program
    from attndsl.parallel import ContextParallel

    Epilogue = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_PREFIX = "titan_"
DOCUMENT = f"{_PREFIX}document"
"""Capture of composed programs: the document of each position of whole sequences."""
_DOCUMENTS = """
tensor document[batch, q_len]: int
mask = document[b, q] == document[b, kv]
"""
_KEPT = KeptLists("documents by sizes, starts and their versions")
"""Documents of the batches that are alive."""


@memoised("programs of torchtitan's layers", 64)
def composed(text: str, window: tuple[int, int]) -> Program:
    """Torchtitan's mask and a user's program: one for all layers that have both alike.

    Args:
        text: The user's program.
        window: How many keys before a row and behind it take part; -1 for all.

    Raises:
        AttnDSLError: The program has errors.
        ArgumentError: It captures something, which no configuration of torchtitan gives.
    """
    left, right = window
    own = _DOCUMENTS
    # Numbers of the text, since layers of one model may have several windows, and share captures.
    own += f"mask = q - kv <= {left}\n" if left >= 0 else ""
    own += f"mask = kv - q <= {right}\n" if right >= 0 else ""
    if not text.strip():
        return join(own, prefixes=[_PREFIX])
    given = compile_program(text, name="<torchtitan>")
    found = given.lowered.program
    names = [*(x.name for x in found.params), *(x.name for x in found.tensors)]
    if names:
        raise ArgumentError(
            f"the program captures {', '.join(names)}", hint="write its numbers in the text"
        )
    return join(own, given, prefixes=[_PREFIX, ""])


def _reads_heads(program: Program) -> bool:
    nodes = toposort(*program.lowered.program.roots())
    words = {str(item.value) for item in nodes if item.op in (Op.VAR, Op.SIZE)}
    return not words.isdisjoint({"h", "hkv", "heads", "kv_heads"})


def program_of(config: Any) -> Program:
    """The program of a configuration that has ``program``, ``window_size`` and ``heads``.

    Raises:
        AttnDSLError: As of :func:`composed`.
        ArgumentError: It reads heads, and there is no number of heads.
    """
    found = composed(config.program, tuple(config.window_size))
    if config.heads is None and _reads_heads(found):
        raise ArgumentError(
            "the program reads heads, and the configuration has no number of heads",
            hint="write Attention.Config(program=..., heads=16)",
        )
    return found


def check_heads(heads: int | None, q_BLNH: torch.Tensor) -> None:
    """Raise if this process has some of ``heads``, those that the program reads.

    Raises:
        UnsupportedError: It has.
    """
    if heads is not None and q_BLNH.shape[2] != heads:
        raise UnsupportedError(
            f"the program reads heads, and this process has {q_BLNH.shape[2]} of {heads}",
            hint="set tensor_parallel_degree to 1, or leave heads out of the program",
        )


def _make_documents(starts: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Number of the document that each position is in, (batch, length).

    ``starts`` has each document's first position in the rows of the batch, one behind the other,
    and the number of all positions.
    """
    rows = torch.arange(batch * length, device=starts.device)
    # Those before the first document and those behind the last are documents of their own.
    found = torch.searchsorted(starts, rows, right=True)
    return found.view(batch, length)


def _documents(starts: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Result of :func:`_make_documents`; all layers get one tensor until ``starts`` changes.

    So the layers of an eager step make their lists of tiles once. A graph makes its own documents,
    and what looks at operations does not find them missing.
    """
    if (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        or _get_current_dispatch_mode_stack() or type(starts) is not torch.Tensor
        or starts.device.type not in ("cpu", "cuda")
    ):  # fmt: skip
        return _make_documents(starts, batch, length)
    (found,) = _KEPT.of(
        (stream_of(starts.device), batch, length), [starts], starts.device,
        lambda: [_make_documents(starts, batch, length)],
    )  # fmt: skip
    return cast("torch.Tensor", found)


class Attention(VarlenAttention):  # type: ignore[misc]
    """Attention of packed documents by a program of attndsl; eager, compiled, on CPUs too.

    torchtitan gives it what it gives ``VarlenAttention``. A pair takes part if it lies in one
    document and in the window, and the program's mask keeps it. ``q`` and ``kv`` are positions in
    the row of the batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        """Settings of ``inner_attention`` in a model's configuration."""

        program: str = ""
        """Added to the mask of documents and of ``window_size``. It captures nothing."""
        heads: int | None = None
        """Number of query heads of the model. Programs that read heads need it: under tensor
        parallelism a process has some of them, and cannot tell which."""

    def __init__(self, config: Attention.Config) -> None:
        # VarlenAttention's own would choose kernels of FlashAttention.
        super(VarlenAttention, self).__init__()
        self.window_size = config.window_size
        self.heads = config.heads
        self.attention = program_of(config)
        self._attend: Callable[..., Any] = self.attention
        self._cp: ContextParallel | None = None

    def over(self, cp: ContextParallel) -> None:
        """Take this process's rows of sequences that the ranks of ``cp`` share.

        For a training loop of one's own: :class:`attndsl.torchtitan.Trainer` does it by itself.
        ``attention_masks`` stay those of the whole sequences. ``cp.shard`` or ``cp.plan`` comes
        before the call, with ``attention`` and :meth:`captures`.
        """
        self._attend, self._cp = cp(self.attention), cp

    def captures(self, attention_masks: Any, batch: int, length: int) -> dict[str, Any]:
        """Captures of ``attention`` for whole sequences (batch, length).

        Raises:
            ArgumentError: Another kind of ``attention_masks``.
        """
        if not isinstance(attention_masks, VarlenMetadata):
            raise ArgumentError(
                f"attention_masks is a {type(attention_masks).__name__}",
                hint="pass what the model's get_attention_masks(positions) gives",
            )
        return {DOCUMENT: _documents(attention_masks.cu_seq_q, batch, length)}

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
            q_BLNH: (batch, rows, heads, dim): whole sequences, or after :meth:`over` this rank's
                rows of them.
            k_BLNH: (batch, rows, key heads, dim).
            v_BLNH: (batch, rows, key heads, value dim).
            attention_masks: A ``VarlenMetadata``: where documents begin in the rows of the batch,
                one behind the other.
            scale: Factor of q . k; 1 / sqrt(dim) by default.
            out_transform: Given the output and the log-sum-exp (batch, rows, heads).
            **unused: ``enable_gqa``, which is always so.

        Returns:
            (batch, rows, heads, value dim).

        Raises:
            ArgumentError: Another kind of ``attention_masks``.
            UnsupportedError: Some of the heads, for a program that reads heads.
        """
        check_heads(self.heads, q_BLNH)
        batch, rows = q_BLNH.shape[:2]
        length = rows if self._cp is None else self._cp.now().length
        captures = self.captures(attention_masks, batch, length)
        found = self._attend(
            q_BLNH.transpose(1, 2), k_BLNH.transpose(1, 2), v_BLNH.transpose(1, 2), scale=scale,
            return_lse=out_transform is not None, captures=captures,
        )  # fmt: skip
        out: torch.Tensor
        out, lse = found if isinstance(found, tuple) else (found, None)
        if out_transform is None or lse is None:
            return out.transpose(1, 2)
        return out_transform(out.transpose(1, 2), lse.transpose(1, 2))
