"""The facts that a compiled program gives without a call: its tiles, its stages, a picture."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import torch

from attndsl.compiled import Compiled
from attndsl.errors import ArgumentError, AttnDSLError
from attndsl.runtime.arguments import joined
from attndsl.runtime.location import WHOLE, Location, Sizes, sizes_of_whole
from attndsl.runtime.parts import localised
from attndsl.runtime.programs import pointing_into
from attndsl.runtime.sources import check_head_dims, device_of
from attndsl.runtime.tiles import call_of_lengths, find_tiles
from attndsl.runtime.to_flex import FLEX_OPTIONS, flex_functions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from attndsl.backends.base import Call, Scalar
    from attndsl.compiled import Captures
    from attndsl.tilemap import TileMap


class Analysis(Compiled):
    """The part of :class:`~attndsl.Attention` that needs no tensors to attend to."""

    __slots__ = ()

    def tiles(
        self,
        q_len: int,
        kv_len: int,
        block_m: int = 128,
        block_n: int = 128,
        batch: int = 1,
        heads: int = 1,
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
        """Which tiles of the score matrix are EMPTY, PARTIAL and FULL.

        Never makes a length x length array. Exact where the mask is quasi-affine or evaluated,
        sound otherwise: a live pair is never in an EMPTY tile, a dead one never in a FULL one.

        Args:
            q_len: Number of queries.
            kv_len: Number of keys.
            block_m: Query rows of a tile, 1 or more.
            block_n: Key rows of a tile.
            batch: Batch entries; the map has one only, where the mask does not depend on them.
            heads: Query heads, likewise.
            direction: The loop whose plan is used: ``forward``, ``backward_q`` (dQ) or
                ``backward_kv`` (dK and dV; also ``backward``).
            kv_heads: Key-value heads; ``heads`` by default.
            head_dim: For masks that mention it.
            device: Where to find them; that of the captured tensors, else the CPU.
            q_offset: As for a call, like the three that follow.
            kv_offset: Logical position of the first key.
            q_index: (q_len,) logical positions of the queries.
            kv_index: (kv_len,) logical positions of the keys.
            whole_sizes: Those of the whole call, by their names at a call (``q_len``, ``heads``
                ...), where these are the sizes of a part of it.
            h_offset: As for a call of a part, like the two that follow.
            b_offset: Number in the whole of the first batch entry.
            kv_lengths: (batch,) numbers of keys.
            captures: The program's tensors and run-time params.
            **named: The same, by keywords.

        Raises:
            ArgumentError: A size or a direction that cannot be; a missing capture.
        """
        location = Location(
            q_offset, kv_offset, q_index, kv_index, h_offset=h_offset, b_offset=b_offset,
            kv_lengths=kv_lengths, **sizes_of_whole(whole_sizes),
        )  # fmt: skip
        given = joined(captures, named)
        call = self.call_of_lengths(
            given, q_len, kv_len, batch, heads, kv_heads, head_dim, device, location
        )
        with pointing_into(self._source):
            return find_tiles(*localised(self._lowered, call), block_m, block_n, direction)

    def to_flex(
        self, q_len: int, kv_len: int, batch: int = 1, heads: int = 1, block_size: int = 128,
        *, captures: Captures | None = None, **arguments: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """``(score_mod, block_mask)`` for torch's ``flex_attention``; None for what is not there.

        ``block_size`` is that of the block mask; other arguments are those of :meth:`tiles`.

        Raises:
            UnsupportedError: The program has a sink, other weights or dropout.
        """
        sizes = (q_len, kv_len, batch, heads)
        options = {name: arguments.pop(name) for name in FLEX_OPTIONS if name in arguments}
        given = self._given(captures, arguments)
        with pointing_into(self._source):
            return flex_functions(self._lowered, sizes, block_size, options, given)

    def explain(
        self,
        device: str | torch.device = "cpu",
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
        batch: int = 1,
        heads: int = 1,
        head_dim: int = 64,
        block_m: int = 128,
        block_n: int = 64,
        kv_heads: int | None = None,
        q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0,
        whole_sizes: Mapping[str, int] | None = None,
        h_offset: int = 0,
        b_offset: int = 0,
        kv_lengths: torch.Tensor | None = None,
        captures: Captures | None = None,
        **named: torch.Tensor | Scalar,
    ) -> str:
        """What the program is to the compiler, as text to read.

        Its parts; which way each part of the mask takes to its tiles, and why; the loops as
        formulas of the tile's index; what would run it. With lengths also how many tiles are live,
        the work of these, and changes that would reduce it.

        Args:
            device: Where calls would run.
            q_len: Number of queries; given together with ``kv_len``.
            kv_len: Number of keys.
            batch: Batch entries.
            heads: Query heads.
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
            captures: The program's tensors and params, where lengths are given.
            **named: The same, by keywords.
        """
        from attndsl.explain import explain, explain_tiles

        check_head_dims(head_dim)
        location = Location(
            q_offset, kv_offset, h_offset=h_offset, b_offset=b_offset, kv_lengths=kv_lengths,
            **sizes_of_whole(whole_sizes),
        )  # fmt: skip
        lowered, call = self._lowered, None
        if q_len is not None and kv_len is not None:
            given = joined(captures, named)
            call = self.call_of_lengths(
                given, q_len, kv_len, batch, heads, kv_heads, head_dim, None, location
            )
            lowered, call = localised(lowered, call)
        elif q_len is not None or kv_len is not None or not location.plain:
            raise ArgumentError("a length is missing", hint="pass both q_len and kv_len")
        text = explain(
            lowered, self._backend, self._checked, device_of(device), block_m, block_n, head_dim
        )
        if call is None:
            return text
        return f"{text}\n{explain_tiles(lowered, call, block_m, block_n)}"

    def plot(
        self,
        path: str | PathLike[str] | None = None,
        *,
        q_len: int = 64,
        kv_len: int = 64,
        block_m: int = 16,
        block_n: int = 16,
        batch: int = 1,
        heads: int = 1,
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
    ) -> str:
        """A picture of the mask, its tiles and the score at a small length.

        Args:
            path: File to write, ``.svg``, ``.png``, ``.html`` or ``.txt``.
            q_len: Number of queries.
            kv_len: Number of keys.
            block_m: Query rows of a tile.
            block_n: Key rows of a tile.
            batch: Batch entries.
            heads: Query heads.
            b: The batch entry shown, of these.
            h: The head shown, of these.
            kv_heads: Key heads; ``heads`` by default.
            q_offset: As for :meth:`tiles`, like those that follow.
            kv_offset: Logical position of the first key.
            whole_sizes: Those of the whole call, where these are the sizes of a part of it.
            h_offset: Number in the whole of the first query head.
            b_offset: The same of the first batch entry.
            kv_lengths: (batch,) numbers of keys.
            captures: The program's tensors and run-time params.
            **named: The same, by keywords.

        Returns:
            The picture as SVG.
        """
        from attndsl import picture  # It takes long to import, and few draw.

        location = Location(
            q_offset, kv_offset, h_offset=h_offset, b_offset=b_offset, kv_lengths=kv_lengths,
            **sizes_of_whole(whole_sizes),
        )  # fmt: skip
        given = self._given(captures, named)
        params = {decl.name for decl in self._lowered.program.params}
        data = picture.picture_data(
            self._lowered, q_len=q_len, kv_len=kv_len, block_m=block_m, block_n=block_n,
            batch=batch, heads=heads, kv_heads=kv_heads, b=b, h=h, location=location,
            title=self.text,
            tensors={n: torch.as_tensor(x) for n, x in given.items() if n not in params},
            params={n: x for n, x in given.items() if n in params},
        )  # fmt: skip
        if path is not None:
            picture.write(data, path)
        return picture.svg(data)

    def _repr_html_(self) -> str:
        """The picture, where the program can be drawn without captures; else its text."""
        try:
            return self.plot()
        except AttnDSLError as refusal:
            return f"<pre>{html.escape(repr(self))}\n{html.escape(refusal.message)}</pre>"

    def call_of_lengths(
        self, captures: Mapping[str, torch.Tensor | Scalar], q_len: int, kv_len: int, batch: int,
        heads: int, kv_heads: int | None = None, head_dim: int = 64,
        device: str | torch.device | None = None, location: Location = WHOLE,
    ) -> Call:  # fmt: skip
        """The checked call of these sizes, whose q, k and v take no memory."""
        with pointing_into(self._source):
            sizes = Sizes(q_len, kv_len, batch, heads, kv_heads, head_dim)
            given = {**self._defaults, **captures}
            return call_of_lengths(self._lowered, sizes, given, location, device)
