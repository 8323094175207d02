"""The tiles of one program at given lengths, as an array: to look at, keep, and use again."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.passes.tiles.tile_plan import EMPTY, FULL, PARTIAL

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from numpy.typing import NDArray

_FORMAT = 1
_SHOWN = 64
"""Tiles along a side of the largest picture in ``str``."""
_MARKS = {EMPTY: ".", PARTIAL: "+", FULL: "#"}
_COLOURS = {".": "#8c959f", "+": "#e69f00", "#": "#0072b2"}
"""Colours of marks in notebooks."""


@dataclass(frozen=True, slots=True, eq=False)
class TileMap:
    """Kinds of tiles; made by :meth:`attndsl.Attention.tiles`."""

    kinds: torch.Tensor
    """int8 (batch or 1, heads or 1, q tiles, kv tiles), on the device that they were found on:
    0 EMPTY (no live pair), 1 PARTIAL, 2 FULL (all pairs within the lengths live)."""
    q_len: int
    kv_len: int
    block_m: int
    """Query rows of a tile."""
    block_n: int
    """Key rows of a tile."""
    reason: str = ""
    """The method that found the kinds."""
    mask_mod: Callable[..., torch.Tensor] | None = field(default=None, repr=False)
    """The mask as FlexAttention takes it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies, like files, are without :attr:`mask_mod`, which holds a call."""
        sizes = self.q_len, self.kv_len, self.block_m, self.block_n
        return TileMap, (self.kinds, *sizes, self.reason)

    @property
    def kind(self) -> NDArray[np.int8]:
        """:attr:`kinds` as a numpy array."""
        found: NDArray[np.int8] = self.kinds.cpu().numpy()
        return found

    @property
    def sparsity(self) -> float:
        """Fraction of the tiles that are EMPTY, 0 to 1 (1 where there are no tiles)."""
        total = self.kinds.numel()
        return 1.0 - float((self.kinds != EMPTY).sum()) / total if total else 1.0

    def to(self, device: str | torch.device) -> TileMap:
        """The same on ``device``."""
        return TileMap(
            self.kinds.to(device), self.q_len, self.kv_len, self.block_m, self.block_n,
            self.reason, self.mask_mod,
        )  # fmt: skip

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as ``.npz``."""
        sizes = np.array([_FORMAT, self.q_len, self.kv_len, self.block_m, self.block_n])
        with open(path, "wb") as file:
            np.savez_compressed(
                file, kind=self.kind, sizes=sizes, reason=np.array(self.reason, dtype=np.str_)
            )

    @classmethod
    def load(cls, path: str | PathLike[str], device: str | torch.device = "cpu") -> TileMap:
        """A map that :meth:`save` wrote. It has no mask of its own, so :meth:`to_flex` needs one.

        Raises:
            ArgumentError: The file is none of these.
        """
        try:
            # Opened here, since numpy leaves files open that are no archives.
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:
                form, q_len, kv_len, block_m, block_n = (int(n) for n in data["sizes"])
                kinds, reason = data["kind"], str(data["reason"])
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ArgumentError(
                f"{path} holds no tile map: {error}", hint="write it with TileMap.save"
            ) from error
        shape = -(-q_len // max(1, block_m)), -(-kv_len // max(1, block_n))
        if form != _FORMAT or kinds.dtype != np.int8 or kinds.shape[2:] != shape:
            raise ArgumentError(f"{path} holds a tile map of another format", hint="write it again")
        return cls(
            torch.from_numpy(kinds.copy()).to(device), q_len, kv_len, block_m, block_n, reason
        )

    def to_flex(self, mask_mod: Callable[..., torch.Tensor] | None = None) -> Any:
        """A ``BlockMask`` for ``torch.nn.attention.flex_attention``.

        Args:
            mask_mod: The mask that PARTIAL tiles evaluate; by default the program's own.

        Raises:
            UnsupportedError: The map was loaded from a file or copied, or the mask depends on the
                score.
        """
        from torch.nn.attention.flex_attention import BlockMask

        mask_mod = mask_mod or self.mask_mod
        if mask_mod is None:
            raise UnsupportedError(
                "this tile map has no mask function",
                hint="pass mask_mod, or make the map by Attention.tiles from a mask without score",
            )
        numbers, indices = zip(
            *(_as_list(self.kinds == kind) for kind in (PARTIAL, FULL)), strict=True
        )
        return BlockMask.from_kv_blocks(
            numbers[0],
            indices[0],
            numbers[1],
            indices[1],
            BLOCK_SIZE=(self.block_m, self.block_n),
            mask_mod=mask_mod,
            seq_lengths=(self.q_len, self.kv_len),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TileMap):
            return NotImplemented
        mine = (self.q_len, self.kv_len, self.block_m, self.block_n)
        same = mine == (other.q_len, other.kv_len, other.block_m, other.block_n)
        return same and np.array_equal(self.kind, other.kind)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "\n".join([*self._head(), *self._rows()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = (
            re.sub(
                r"#+|\++|\.+",
                lambda run: f'<span style="color:{_COLOURS[run[0][0]]}">{run[0]}</span>',
                row,
            )
            for row in self._rows()
        )
        head = escape("\n".join(self._head()))
        return f'<pre style="line-height:1">{head}\n\n{chr(10).join(rows)}</pre>'

    def _head(self) -> list[str]:
        """Sizes, counts, and how the kinds were found."""
        counts = {kind: int((self.kinds == kind).sum()) for kind in _MARKS}
        batch, heads, rows, columns = self.kinds.shape
        lines = [
            f"{rows} x {columns} tiles of {self.block_m} queries x {self.block_n} keys"
            + (f", for batch size {batch} and {heads} heads" if batch * heads > 1 else ""),
            f"{counts[FULL]} FULL (#), {counts[PARTIAL]} PARTIAL (+), {counts[EMPTY]} EMPTY (.); "
            f"sparsity {self.sparsity:.1%}",
        ]
        if self.reason:
            lines.append(self.reason)
        if batch and heads and (steps := self._steps()) != (1, 1):
            lines.append(f"one character for {steps[0]} x {steps[1]} tiles")
        return lines

    def _steps(self) -> tuple[int, int]:
        """Tiles down and across that a character stands for."""
        rows, columns = (max(1, -(-n // _SHOWN)) for n in self.kinds.shape[2:])
        return rows, columns

    def _rows(self) -> list[str]:
        """The first head's tiles, a character for one or more."""
        batch, heads, rows, columns = self.kinds.shape
        if not (batch and heads):
            return []
        row_step, column_step = self._steps()
        kinds = self.kinds[0, 0].cpu().numpy()  # At once: a GPU is waited for each time.
        lines = []
        # The greatest kind of a group would hide that some of it is EMPTY.
        for first in range(0, rows, row_step):
            marks = []
            for start in range(0, columns, column_step):
                part = kinds[first : first + row_step, start : start + column_step]
                low, high = int(part.min()), int(part.max())
                marks.append(_MARKS[low if low == high else PARTIAL])
            lines.append("".join(marks))
        return lines


def _as_list(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and indices of the chosen tiles of each row, the chosen ones first."""
    indices = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1).to(torch.int32), indices.to(torch.int32)
