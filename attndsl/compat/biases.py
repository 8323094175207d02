"""The attention biases of xFormers, with its names and constructors.

They hold what their callers give; :mod:`.xformers` makes captures of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Self

import torch

from attndsl.errors import ArgumentError, ShapeError

from .option_checks import whole_of, wholes_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class AttentionBias:
    """Base class of all biases."""


@dataclass(frozen=True)
class LowerTriangularMask(AttentionBias):
    """Query i sees keys 0 to i."""

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        """The same mask with a tensor that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


@dataclass(frozen=True)
class LowerTriangularMaskWithTensorBias(AttentionBias):
    """Query i sees keys 0 to i, and ``bias`` (..., heads, queries, keys) is added to the scores."""

    bias: torch.Tensor


@dataclass(frozen=True)
class LowerTriangularFromBottomRightMask(AttentionBias):
    """The last query sees all keys, the one before all but one, and so on."""

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """The same mask, with at most ``window_size`` keys for each query."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass(frozen=True)
class LowerTriangularFromBottomRightLocalAttentionMask(AttentionBias):
    """Each query sees at most ``window_size`` keys: its own and those before."""

    window_size: int

    def __post_init__(self) -> None:
        _check_window(self.window_size)


@dataclass(frozen=True)
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Each query sees ``window_left`` keys before its own and ``window_right`` behind it."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        whole_of("window_left", self.window_left)
        whole_of("window_right", self.window_right)
        if self.window_left < 0 or self.window_right < 0:
            raise ArgumentError(
                f"the window reaches {self.window_left} keys back and {self.window_right} on",
                hint="pass numbers that are not negative",
            )


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    """Starts of sequences of these lengths, one behind the other, and the end of the last one."""
    found = [0]
    for length in lengths:
        if length < 0:
            raise ArgumentError(f"a sequence has {length} rows", hint="pass lengths from 0 on")
        found.append(found[-1] + length)
    return tuple(found)


@dataclass(frozen=True)
class BlockDiagonalMask(AttentionBias):
    """Sequences one behind the other, in tensors of batch 1. Each sees its own keys."""

    q_starts: tuple[int, ...]
    """The row at which each sequence begins, and the end."""
    k_starts: tuple[int, ...]
    """The key at which each begins, and the end."""
    k_lengths: tuple[int, ...]
    """Numbers of keys, which may have room behind them."""
    batches: tuple[int, ...] | None = None
    """Number of sequences in each tensor that :meth:`from_tensor_list` packed."""

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None) -> Self:
        """A mask for sequences of these lengths.

        Args:
            q_seqlen: Queries of each sequence.
            kv_seqlen: Keys of each; as many as queries by default.

        Raises:
            ShapeError: The numbers of sequences differ.
        """
        rows = wholes_of("q_seqlen", q_seqlen)
        lengths = rows if kv_seqlen is None else wholes_of("kv_seqlen", kv_seqlen)
        _check_count(rows, lengths)
        return cls(_starts(rows), _starts(lengths), lengths)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Self, torch.Tensor]:
        """A mask and the tensors (batch, length, ...) behind one another, as one of batch 1.

        Raises:
            ArgumentError: There are none, or they are no such tensors.
            ShapeError: They differ in more than batch and length.
        """
        _check_tensors(tensors)
        lengths = [x.shape[1] for x in tensors for _ in range(x.shape[0])]
        packed = torch.cat([x.flatten(0, 1)[None] for x in tensors], 1)
        made = cls.from_seqlens(lengths)
        return replace(made, batches=tuple(x.shape[0] for x in tensors)), packed

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The rows (1, total, ...) of queries as tensors (batch, length, ...).

        They are those of :meth:`from_tensor_list`, or one of batch 1 for each sequence.

        Raises:
            ArgumentError: It is no tensor.
            ShapeError: The tensor has other rows.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"tensor is a {type(tensor).__name__}", hint="pass what a call gave"
            )
        if tensor.shape[:2] != (1, self.q_starts[-1]):
            raise ShapeError(
                f"the tensor has shape {tuple(tensor.shape)}, for {self.q_starts[-1]} rows",
                hint=f"pass (1, {self.q_starts[-1]}, ...), as the call returns it",
            )
        count = len(self.q_starts) - 1
        batches = (1,) * count if self.batches is None else self.batches
        starts = tuple(self.q_starts[end] for end in accumulate(batches))
        parts = torch.tensor_split(tensor[0], starts[:-1])
        return [
            x.reshape(batch, x.shape[0] // max(batch, 1), *x.shape[1:])
            for x, batch in zip(parts, batches, strict=True)
        ]

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Query i of a sequence sees its keys 0 to i."""
        return BlockDiagonalCausalMask(self.q_starts, self.k_starts, self.k_lengths, self.batches)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """The last query of a sequence sees all its keys, the one before all but one, and so on."""
        return BlockDiagonalCausalFromBottomRightMask(
            self.q_starts, self.k_starts, self.k_lengths, self.batches
        )

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Causal, with at most ``window_size`` keys for each query."""
        return BlockDiagonalCausalLocalAttentionMask(
            self.q_starts, self.k_starts, self.k_lengths, self.batches, window_size
        )

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """The same, aligned to the last key of each sequence."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_starts, self.k_starts, self.k_lengths, self.batches, window_size
        )


@dataclass(frozen=True)
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Sequences one behind the other; query i of each sees its keys 0 to i."""


@dataclass(frozen=True)
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Sequences one behind the other; the last query of each sees all its keys, and so on."""


@dataclass(frozen=True)
class _Windowed(BlockDiagonalMask):
    window_size: int = 1

    def __post_init__(self) -> None:
        _check_window(self.window_size)


@dataclass(frozen=True)
class BlockDiagonalCausalLocalAttentionMask(_Windowed):
    """A :class:`BlockDiagonalCausalMask` with at most ``window_size`` keys for each query."""


@dataclass(frozen=True)
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(_Windowed):
    """A :class:`BlockDiagonalCausalFromBottomRightMask` with at most ``window_size`` keys."""


@dataclass(frozen=True)
class BlockDiagonalPaddedKeysMask(AttentionBias):
    """Packed queries, and keys with the same room for each sequence, as in a cache."""

    q_starts: tuple[int, ...]
    k_starts: tuple[int, ...]
    k_lengths: tuple[int, ...]

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int]
    ) -> Self:
        """A mask for sequences of these lengths.

        Args:
            q_seqlen: Queries of each sequence.
            kv_padding: Room for keys of each.
            kv_seqlen: Keys of each.

        Raises:
            ShapeError: The numbers of sequences differ.
            ArgumentError: A sequence has more keys than there is room for.
        """
        rows, lengths = wholes_of("q_seqlen", q_seqlen), wholes_of("kv_seqlen", kv_seqlen)
        room = whole_of("kv_padding", kv_padding)
        _check_count(rows, lengths)
        if any(not 0 <= length <= room for length in lengths):
            raise ArgumentError(
                f"kv_seqlen is {list(lengths)}, with room for {room} keys each",
                hint="pass lengths from 0 to kv_padding",
            )
        return cls(_starts(rows), _starts([room] * len(lengths)), lengths)


@dataclass(frozen=True)
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, where the last query of each sequence sees all its keys, and so on."""


def _check_count(rows: Sequence[int], lengths: Sequence[int]) -> None:
    if len(rows) != len(lengths):
        raise ShapeError(
            f"q_seqlen is of {len(rows)} sequences, and kv_seqlen of {len(lengths)}",
            hint="pass a length for each sequence",
        )


def _check_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse anything but a list of tensors (batch, length, ...) with equal other dims."""
    good = isinstance(tensors, list | tuple) and len(tensors) > 0
    if not good or not all(isinstance(x, torch.Tensor) and x.dim() > 1 for x in tensors):
        raise ArgumentError(
            "tensors is no list of tensors", hint="pass [tensor (batch, length, ...), ...]"
        )
    first = tensors[0]
    for x in tensors:
        if x.shape[2:] != first.shape[2:] or x.device != first.device:
            raise ShapeError(
                f"a tensor has shape {tuple(x.shape)} on {x.device}, and the first one "
                f"{tuple(first.shape)} on {first.device}",
                hint="pass tensors that differ in batch and length alone",
            )


def _check_window(window_size: int) -> None:
    whole_of("window_size", window_size)
    if window_size < 1:
        raise ArgumentError(f"window_size is {window_size}", hint="pass a number from 1 on")
