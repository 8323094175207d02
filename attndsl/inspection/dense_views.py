"""Masks, scores and weights of a compiled program as dense arrays, to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.dense.reference import check_meaning
from attndsl.call.argument_checks import autocast, check_operands
from attndsl.call.attention_base import Compiled
from attndsl.call.bind import bind
from attndsl.call.call_slice import CallSizes, sizes_of_whole
from attndsl.call.dropout_checks import check_probability
from attndsl.call.meta_call import AskedSizes, call_of_lengths, completed, filled
from attndsl.call.optional_captures import sizes_of_operands
from attndsl.call.options import LOCATION, CallOptions, Location, taken
from attndsl.call.sub_calls import localised
from attndsl.call.value_checks import check_values
from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.ir import reads_score
from attndsl.runtime.program_store import pointing_into

from .dense_evaluation import (
    MAX_BYTES,
    check_bytes,
    choose,
    dense_mask,
    dense_scores,
    dense_weights,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Call, Scalar
    from attndsl.call.attention_base import Captures
    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from .dense_evaluation import Choice, Chosen


class DenseViews(Compiled):
    """The part of :class:`~attndsl.Attention` that shows what a call computes, pair by pair."""

    __slots__ = ()

    def mask(
        self,
        q_len: int,
        kv_len: int,
        batch: int | None = None,
        heads: int | None = None,
        *,
        b: Choice = None,
        h: Choice = None,
        rows: Choice = None,
        max_bytes: int = MAX_BYTES,
        kv_heads: int | None = None,
        head_dim: int = 64,
        device: str | torch.device | None = None,
        q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0,
        q_index: torch.Tensor | None = None,
        kv_index: torch.Tensor | None = None,
        whole_sizes: Mapping[str, int] | None = None,
        h_offset: int = 0,
        b_offset: int = 0,
        kv_lengths: torch.Tensor | None = None,
        captures: Captures | None = None,
        **named: torch.Tensor | Scalar,
    ) -> torch.Tensor:
        """Array of the query-key pairs that take part.

        Args:
            q_len: Number of queries.
            kv_len: Number of keys.
            batch: Batch entries; those of the captures by default, or 1.
            heads: Query heads, likewise.
            b: Which batch entries to show: a number or a slice without steps; all by default.
            h: Which query heads, likewise.
            rows: Which rows of queries, likewise: ``rows=slice(0, 64)`` of a long call.
            max_bytes: How large the array may be; 1 GiB by default.
            kv_heads: Key-value heads; ``heads`` by default.
            head_dim: For masks that mention it.
            device: Device to compute on; by default that of the captured tensors, or the CPU.
            q_offset: As for a call, like the three that follow.
            kv_offset: Logical position of the first key.
            q_index: (q_len,) logical positions of the queries.
            kv_index: (kv_len,) logical positions of the keys.
            whole_sizes: As for :meth:`attndsl.Attention.tiles`, like the three that follow.
            h_offset: Number in the whole of the first query head.
            b_offset: Number in the whole of the first batch entry.
            kv_lengths: (batch,) numbers of keys.
            captures: The program's tensors and params; those that the mask does not mention may be
                left out.
            **named: The same, by keywords.

        Returns:
            bool (entries, heads, rows, kv_len), True where the pair takes part. Entries and heads
            with the same mask share its memory: ``clone()`` it before you write to it.

        Raises:
            ArgumentError: A size that cannot be; a missing capture; more than ``max_bytes``.
            UnsupportedError: The mask depends on the score: :meth:`scores` shows it.
        """
        if isinstance(q_len, torch.Tensor) or isinstance(kv_len, torch.Tensor):
            raise ArgumentError(
                "mask() takes lengths, and a tensor is given",
                hint="pass mask(q.shape[2], k.shape[2], ...); scores(q, k, ...) takes tensors",
            )
        location = Location(
            q_offset, kv_offset, q_index, kv_index, h_offset=h_offset, b_offset=b_offset,
            kv_lengths=kv_lengths, **sizes_of_whole(whole_sizes),
        )  # fmt: skip
        asked = AskedSizes(q_len, kv_len, batch, heads, kv_heads, head_dim)
        own, given = self.variant(self._given(captures, named), asked.known(), location)
        program = own.lowered.program
        with pointing_into(self._source):
            _check_mask(program.mask)
            given, sizes = completed(program, (program.mask,), given, asked, location, device)
            call = call_of_lengths(own.lowered, sizes, given, location, device)
            lowered, call = localised(own.lowered, call)
        chosen = choose(call, b, h, rows)
        entries, shown_heads, count = chosen.shape
        maps = lowered.sparsity.maps(entries, shown_heads)
        check_bytes("mask", (*maps, count, kv_len), 1, max_bytes)
        return dense_mask(lowered, call, chosen)

    def scores(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        raw: bool = False,
        b: Choice = None,
        h: Choice = None,
        rows: Choice = None,
        max_bytes: int = MAX_BYTES,
        captures: Captures | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """The scores that a call's weights are made of, as an array.

        Args:
            q: (B, Hq, Lq, D), as of a call.
            k: (B, Hkv, Lk, D).
            raw: Whether to show ``scale * (q . k)`` of all pairs, without the program.
            b: Which batch entries to show: a number or a slice without steps; all by default.
            h: Which query heads, likewise.
            rows: Which rows of q, likewise: ``rows=slice(0, 64)`` of a long call.
            max_bytes: How large the array may be; 1 GiB by default.
            captures: The program's tensors and params; those that neither mask nor score mention
                may be left out.
            **arguments: The same, by keywords, and ``scale`` and all that says where the call lies
                in a larger one (``q_offset``, ``kv_lengths``, ``heads`` ...), as of a call.

        Returns:
            (entries, heads, rows, Lk), fp32 (fp64 for fp64): the program's last score, -inf where
            the pair is masked out. Operands of a half type are multiplied in fp32. Differentiable.

        Raises:
            ArgumentError, ShapeError, DTypeError, DeviceError: As a call; more than ``max_bytes``.
            UnsupportedError: In a graph of ``torch.compile``.
        """
        parts = () if raw else ("mask", "score")
        lowered, call = self._call_of(q, k, captures, arguments, parts)
        chosen = _chosen("scores", call, (b, h, rows), max_bytes)
        return dense_scores(lowered, call, chosen, raw)

    def weights(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        seed: int | torch.Tensor | None = None,
        b: Choice = None,
        h: Choice = None,
        rows: Choice = None,
        max_bytes: int = MAX_BYTES,
        captures: Captures | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """The weights that a call gives its values, as an array: ``weights(q, k) @ v`` is its out.

        Args:
            q: (B, Hq, Lq, D), as of a call.
            k: (B, Hkv, Lk, D).
            seed: That of a call, whose dropped weights are 0 and whose others are divided by
                ``1 - p``. Without a seed nothing is dropped.
            b: As for :meth:`scores`, like the four that follow.
            h: Which query heads.
            rows: Which rows of q.
            max_bytes: How large the array may be.
            captures: The program's tensors and params.
            **arguments: The same, by keywords, and what else says where the call lies.

        Returns:
            (entries, heads, rows, Lk), fp32 (fp64 for fp64): the softmax of the scores, with the
            program's sink if it has one, or the program's own ``weights``. 0 where the pair is
            masked out, and in rows that see no key. Differentiable.

        Raises:
            ArgumentError, ShapeError, DTypeError, DeviceError: As a call; more than ``max_bytes``.
            UnsupportedError: In a graph of ``torch.compile``; a program without a meaning.
        """
        dropped = seed is not None
        arguments["seed"] = seed
        parts = ("mask", "score", "sink", "weights", *(("dropout",) if dropped else ()))
        lowered, call = self._call_of(q, k, captures, arguments, parts)
        with pointing_into(self._source):
            check_meaning(lowered.program)
            if dropped and lowered.program.dropout is not None:
                check_probability(lowered.program.dropout, call)
        chosen = _chosen("weights", call, (b, h, rows), max_bytes)
        return dense_weights(lowered, call, chosen, dropped)

    def _call_of(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        captures: Captures | None,
        arguments: dict[str, Any],
        parts: tuple[str, ...],
    ) -> tuple[Lowered, Call]:
        """The checked call of q and k, for who looks at ``parts``, as backends get it."""
        if torch.compiler.is_dynamo_compiling():
            raise UnsupportedError(
                "graphs of torch.compile have no dense views",
                hint="call scores() and weights() outside of the graph",
            )
        options = CallOptions(**taken(arguments, ("scale", "seed")))
        location = Location(**taken(arguments, LOCATION))
        q, k = autocast(q), autocast(k)
        check_operands(q, k, k)
        own, given = self.variant(
            self._given(captures, arguments), sizes_of_operands(q, k), location
        )
        program, (batch, heads, q_len, head_dim) = own.lowered.program, q.shape
        roots = tuple(getattr(program, part) for part in parts)
        sizes = CallSizes(q_len, k.shape[2], batch, heads, k.shape[1], head_dim)
        with pointing_into(self._source):
            given = filled(program, roots, given, sizes, location, q.device)
            call = bind(program, (q, k, k), given, location, options)
            check_values(program, call)
            return localised(own.lowered, call)


def _check_mask(mask: Node | None) -> None:
    """Refuse a mask that lengths do not tell."""
    if mask is not None and reads_score(mask):
        raise UnsupportedError(
            "the mask depends on the score, which lengths do not tell",
            mask.span,
            "look at scores(q, k, ...), which are -inf where a pair is masked out",
        )


def _chosen(what: str, call: Call, asked: tuple[Choice, Choice, Choice], max_bytes: int) -> Chosen:
    chosen = choose(call, *asked)
    size = 8 if call.q.dtype is torch.float64 else 4
    check_bytes(what, (*chosen.shape, call.k.shape[2]), size, max_bytes)
    return chosen
