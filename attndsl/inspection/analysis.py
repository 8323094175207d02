"""The facts that a compiled program gives without a call: its tiles, its stages, a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.call.argument_checks import joined
from attndsl.call.attention_base import Compiled
from attndsl.call.call_slice import CallSizes, is_plain, plain_int, sizes_of_whole
from attndsl.call.call_warnings import doubts_of_call
from attndsl.call.meta_call import AskedSizes, call_of_lengths, completed
from attndsl.call.optional_captures import absent_names
from attndsl.call.options import LOCATION, WHOLE, Location, taken
from attndsl.call.sub_calls import localised
from attndsl.errors import ArgumentError
from attndsl.runtime.kernel_source import check_head_dims, device_of
from attndsl.runtime.program_store import pointing_into
from attndsl.runtime.to_flex import FLEX_OPTIONS, flex_functions

from .key_ranges import find_reach
from .kv_retention import RetentionQuery, retained_keys
from .tile_search import find_tiles

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from attndsl.backends.base import Call, Scalar
    from attndsl.call.attention_base import Captures
    from attndsl.picture import Picture
    from attndsl.pipeline import Lowered

    from .key_ranges import Reach
    from .kv_retention import Retained
    from .tilemap import TileMap


class Analysis(Compiled):
    """The part of :class:`~attndsl.Attention` that needs no tensors to attend to."""

    __slots__ = ()

    def tiles(
        self,
        q_len: int,
        kv_len: int,
        block_m: int = 128,
        block_n: int = 128,
        batch: int | None = None,
        heads: int | None = None,
        direction: str = "forward",
        *,
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
    ) -> TileMap:
        """Classify the tiles of the score matrix as EMPTY, PARTIAL or FULL.

        Never makes a length x length array. Exact where the mask is quasi-affine or evaluated,
        sound otherwise: a live pair is never in an EMPTY tile, a dead one never in a FULL one.

        Args:
            q_len: Number of queries.
            kv_len: Number of keys.
            block_m: Query rows of a tile, 1 or more.
            block_n: Key rows of a tile.
            batch: Batch entries; those of the captures by default, or 1. The map has one only,
                where the mask does not depend on them.
            heads: Query heads, likewise.
            direction: The loop whose plan is used: ``forward``, ``backward_q`` (dQ) or
                ``backward_kv`` (dK and dV; also ``backward``).
            kv_heads: Key-value heads; ``heads`` by default.
            head_dim: For masks that mention it.
            device: Device to compute on; by default that of the captured tensors, or the CPU.
            q_offset: As for a call, like the three that follow.
            kv_offset: Logical position of the first key.
            q_index: (q_len,) logical positions of the queries.
            kv_index: (kv_len,) logical positions of the keys.
            whole_sizes: Those of the whole call, by their names at a call (``q_len``, ``heads``
                ...), where these are the sizes of a part of it.
            h_offset: As for a call of a part, like the two that follow.
            b_offset: Number in the whole of the first batch entry.
            kv_lengths: (batch,) numbers of keys.
            captures: The program's tensors and run-time params; those that the mask does not
                mention may be left out.
            **named: The same, by keywords.

        Raises:
            ArgumentError: A size or a direction that cannot be; a missing capture.
            ShapeError: A capture that contradicts a size.
        """
        location = Location(
            q_offset, kv_offset, q_index, kv_index, h_offset=h_offset, b_offset=b_offset,
            kv_lengths=kv_lengths, **sizes_of_whole(whole_sizes),
        )  # fmt: skip
        sizes = AskedSizes(q_len, kv_len, batch, heads, kv_heads, head_dim)
        lowered, call = self.call_of_mask(joined(captures, named), sizes, location, device)
        with pointing_into(self._source):
            return find_tiles(*localised(lowered, call), block_m, block_n, direction)

    def reach(
        self, q_len: int, kv_len: int, block_m: int = 128, block_n: int = 128,
        batch: int | None = None, heads: int | None = None, *, kv_heads: int | None = None,
        head_dim: int = 64, captures: Captures | None = None, **named: torch.Tensor | Scalar,
    ) -> Reach:  # fmt: skip
        """Keys that the rows of each tile of queries can see, and the number of live tiles.

        Found without a map of the tiles: masks with a closed form take milliseconds at a million
        keys. Never leaves out a key that a row sees. Where tiles are looked at one by one and there
        are too many pairs to evaluate, a tile that bounds do not decide counts as live.

        Args:
            q_len: Number of queries.
            kv_len: Number of keys.
            block_m: Query rows of a tile, 1 or more.
            block_n: Key rows of a tile.
            batch: Batch entries; those of the captures by default, or 1.
            heads: Query heads, likewise.
            kv_heads: Key heads; ``heads`` by default.
            head_dim: For masks that mention it.
            captures: The tensors and params that the mask reads; others may be left out.
            **named: The same, by keywords.

        Raises:
            ArgumentError: A size that cannot be, a missing capture, or too many tiles.
            ShapeError: A capture that contradicts a size.

        Example:
            >>> attn = attndsl.compile("causal() and q - kv < 1024")
            >>> attn.reach(1 << 20, 1 << 20).ranges(100)
            ((11776, 12928),)
        """
        block_m, block_n = plain_int(block_m), plain_int(block_n)
        sizes = AskedSizes(q_len, kv_len, batch, heads, kv_heads, head_dim)
        lowered, call = self.call_of_mask(joined(captures, named), sizes)
        with pointing_into(self._source):
            return find_reach(lowered, call, block_m, block_n)

    def retained(
        self,
        next_q: int,
        kv_len: int,
        *,
        heads: int = 1,
        kv_heads: int | None = None,
        b: int = 0,
        captures: Captures | None = None,
        **named: torch.Tensor | Scalar,
    ) -> Retained:
        """Keys among the first ``kv_len`` that queries from ``next_q`` on can still see.

        For caches: a key that no later query sees need not be kept. One projection of the mask's
        integer set answers for all positions (:mod:`attndsl.passes.tiles.retained_keys`). A
        condition that sets cannot decide, such as a lookup by position, counts as one that may
        hold.

        Args:
            next_q: Logical position of the next query. Any number of queries may follow it.
            kv_len: Number of keys that there are now. There may be more later.
            heads: Query heads. A key is kept if one of them may see it.
            kv_heads: Key heads; ``heads`` by default.
            b: The batch entry, for masks that mention it.
            captures: The tensors and params that the mask reads; others may be left out.
            **named: The same, by keywords.

        Raises:
            ArgumentError: A number that cannot be, or what the mask reads is missing.

        Example:
            >>> attn = attndsl.compile("causal() and (q - kv < 64 or kv < 4)")
            >>> print(attn.retained(next_q=1000, kv_len=1000))
            keys 0 to 3, 937 to 999; 67 of 1000
        """
        own, given = self.variant(self._given(captures, named))
        of_keys = heads if kv_heads is None else kv_heads
        asked = RetentionQuery(next_q, kv_len, b, heads, of_keys)
        return retained_keys(own.lowered.program, asked, given)

    def to_flex(
        self, q_len: int, kv_len: int, batch: int = 1, heads: int = 1, block_size: int = 128,
        *, captures: Captures | None = None, **arguments: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """``(score_mod, block_mask)`` for torch's ``flex_attention``; None for a missing part.

        ``block_size`` is that of the block mask; other arguments are those of :meth:`tiles`.

        Raises:
            UnsupportedError: The program has a sink, other weights or dropout.
        """
        sizes = (q_len, kv_len, batch, heads)
        options = {name: arguments.pop(name) for name in FLEX_OPTIONS if name in arguments}
        known = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads}
        own, given = self.variant(self._given(captures, arguments), known)
        with pointing_into(self._source):
            return flex_functions(own.lowered, sizes, block_size, options, given)

    def explain(
        self,
        device: str | torch.device = "cpu",
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
        batch: int | None = None,
        heads: int | None = None,
        head_dim: int = 64,
        block_m: int = 128,
        block_n: int = 64,
        kv_heads: int | None = None,
        q_offset: int | torch.Tensor | None = None,
        kv_offset: int | torch.Tensor | None = None,
        whole_sizes: Mapping[str, int] | None = None,
        h_offset: int | None = None,
        b_offset: int | None = None,
        kv_lengths: torch.Tensor | None = None,
        verbose: bool = True,
        captures: Captures | None = None,
        **named: torch.Tensor | Scalar,
    ) -> str:
        """A sentence about what the program saves, and then its decisions, as text to read.

        Its parts; which way each part of the mask takes to its tiles, and why; the loops as
        formulas of the tile's index; what would run it. With lengths also how many tiles are live,
        the work of these, and changes that would reduce it.

        Args:
            device: Where calls would run.
            q_len: Number of queries; given together with ``kv_len``.
            kv_len: Number of keys.
            batch: Batch entries; those of the captures by default, or 1.
            heads: Query heads, likewise.
            head_dim: Head dim of q, k and v.
            block_m: Query rows of a tile.
            block_n: Key rows of a tile.
            kv_heads: Key heads; ``heads`` by default.
            q_offset: As for :meth:`tiles`, like those that follow; given together with lengths. The
                program is shown as a part of a call has it.
            kv_offset: Logical position of the first key.
            whole_sizes: Those of the whole call, where these are the sizes of a part of it.
            h_offset: Number in the whole of the first query head.
            b_offset: The same of the first batch entry.
            kv_lengths: (batch,) numbers of keys.
            verbose: Whether to say how functions are computed, which tiles loops visit, and what
                runs higher derivatives.
            captures: The program's tensors and params, where lengths are given; those that the
                mask does not mention may be left out. Those declared with ``= none`` are absent
                unless they are given.
            **named: The same, by keywords.
        """
        from .explain import Question, explain

        block_m, block_n, head_dim = map(plain_int, (block_m, block_n, head_dim))
        check_head_dims(head_dim)
        said = {
            "q_offset": q_offset, "kv_offset": kv_offset, "h_offset": h_offset,
            "b_offset": b_offset, "kv_lengths": kv_lengths, **sizes_of_whole(whole_sizes),
        }  # fmt: skip
        location = Location(**taken(dict(said), LOCATION))
        given, call = joined(captures, named), None
        doubts: tuple[str, ...] = ()
        lowered = self.variant({**self._defaults, **given})[0].lowered
        lists = lowered.written.lists
        if q_len is not None and kv_len is not None:
            sizes = AskedSizes(q_len, kv_len, batch, heads, kv_heads, head_dim)
            lowered, call = self.call_of_mask(given, sizes, location)
            found = doubts_of_call(lowered.program, call, said)
            doubts = tuple(f"{each.message}; {each.hint}" for each in found)
            lowered, call = localised(lowered, call)
        elif q_len is not None or kv_len is not None or not is_plain(location):
            raise ArgumentError("a length is missing", hint="pass both q_len and kv_len")
        asked = Question(
            self._backend, self._checked, device_of(device), (block_m, block_n), head_dim,
            absent_names(self._optional, {**self._defaults, **given}), doubts, lists, verbose,
        )  # fmt: skip
        return explain(lowered, asked, call)

    def plot(
        self,
        path: str | PathLike[str] | None = None,
        *,
        q_len: int = 64,
        kv_len: int = 64,
        block_m: int = 16,
        block_n: int = 16,
        batch: int | None = None,
        heads: int | None = None,
        b: int = 0,
        h: int = 0,
        kv_heads: int | None = None,
        q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0,
        whole_sizes: Mapping[str, int] | None = None,
        h_offset: int = 0,
        b_offset: int = 0,
        kv_lengths: torch.Tensor | None = None,
        captures: Captures | None = None,
        **named: torch.Tensor | Scalar,
    ) -> Picture:
        """A picture of the mask, its tiles and the score at a small length.

        Args:
            path: File to write, ``.svg``, ``.png``, ``.pdf``, ``.html`` or ``.txt``.
            q_len: Number of queries.
            kv_len: Number of keys.
            block_m: Query rows of a tile.
            block_n: Key rows of a tile.
            batch: Batch entries; those of the captures by default, or 1.
            heads: Query heads, likewise.
            b: The batch entry shown, of these.
            h: The head shown, of these.
            kv_heads: Key heads; ``heads`` by default.
            q_offset: As for :meth:`tiles`, like those that follow.
            kv_offset: Logical position of the first key.
            whole_sizes: Those of the whole call, where these are the sizes of a part of it.
            h_offset: Number in the whole of the first query head.
            b_offset: The same of the first batch entry.
            kv_lengths: (batch,) numbers of keys.
            captures: The program's tensors and run-time params; those that neither mask nor score
                mention may be left out.
            **named: The same, by keywords.

        Returns:
            The picture as SVG, a ``str`` that notebooks draw.
        """
        from attndsl import picture  # It takes long to import, and few draw.

        location = Location(
            q_offset, kv_offset, h_offset=h_offset, b_offset=b_offset, kv_lengths=kv_lengths,
            **sizes_of_whole(whole_sizes),
        )  # fmt: skip
        asked = AskedSizes(q_len, kv_len, batch, heads, kv_heads)
        own, given = self.variant(self._given(captures, named), asked.known(), location)
        program = own.lowered.program
        roots = program.mask, program.score
        given, sizes = completed(program, roots, given, asked, location)
        params = {decl.name for decl in program.params}
        counts = sizes.batch, sizes.heads, sizes.kv_heads
        frame = picture.Frame(q_len, kv_len, block_m, block_n, *counts, b=b, h=h, location=location)
        data = picture.picture_data(
            own.lowered, frame, title=self.text,
            tensors={
                n: torch.as_tensor(x, device="cpu") for n, x in given.items() if n not in params
            },
            params={n: x for n, x in given.items() if n in params},
        )  # fmt: skip
        if path is not None:
            picture.write(data, path)
        return picture.Picture.of(data)

    def _repr_html_(self) -> str:
        """The picture, with made-up captures where there are none, and the text."""
        from attndsl import picture

        own, given = self.variant(self._defaults)
        return picture.program_html(own.lowered, self._described, given)

    def call_of_lengths(
        self, captures: Mapping[str, torch.Tensor | Scalar], q_len: int, kv_len: int, batch: int,
        heads: int, kv_heads: int | None = None, head_dim: int = 64,
        device: str | torch.device | None = None, location: Location = WHOLE,
    ) -> Call:  # fmt: skip
        """The checked call of these sizes, whose q, k and v take no memory, of all captures."""
        with pointing_into(self._source):
            sizes = CallSizes(q_len, kv_len, batch, heads, kv_heads, head_dim)
            given = {**self._defaults, **captures}
            return call_of_lengths(self._lowered, sizes, given, location, device)

    def call_of_mask(
        self, captures: Captures, asked: AskedSizes, location: Location = WHOLE,
        device: str | torch.device | None = None,
    ) -> tuple[Lowered, Call]:  # fmt: skip
        """The call for who looks at the mask, and its program.

        Captures that the mask does not need may be missing.
        """
        own, given = self.variant({**self._defaults, **captures}, asked.known(), location)
        program = own.lowered.program
        with pointing_into(self._source):
            given, sizes = completed(program, (program.mask,), given, asked, location, device)
            return own.lowered, call_of_lengths(own.lowered, sizes, given, location, device)
