"""The data of pictures: pairs, tiles and scores of one head, computed on the CPU.

What is shown is what kernels go by: kinds of tiles are those that the compiler finds, which are
sound but, for masks that are decided by least and greatest values, not always the best ones. How
many PARTIAL tiles could have been something else is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Part
from attndsl.backends.dense.interpret import LeafValues, evaluate
from attndsl.backends.tiled.tile_kinds import Grid, grid_of, kinds_by_bounds
from attndsl.call.bind import bind
from attndsl.call.call_slice import plain_int
from attndsl.call.options import LOCATION, WHOLE, Location
from attndsl.call.sub_calls import localised
from attndsl.call.value_checks import check_values
from attndsl.errors import ArgumentError
from attndsl.ir import SIZES, reads_score
from attndsl.passes.print_ir import print_program
from attndsl.passes.tiles.tile_plan import EMPTY, FULL, PARTIAL

from .curve import curve_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Call, Scalar
    from attndsl.pipeline import Lowered

    from .curve import Curve

MAX_LENGTH = 4096
MAX_COUNT = 1 << 16
"""The most batch entries, heads and head dims."""
MAX_TILES = 256
"""The most tiles along either side: more are too small to see, in pixels as well as in
characters."""
_MOST = {
    **dict.fromkeys(("q_len", "kv_len", "block_m", "block_n"), MAX_LENGTH),
    **dict.fromkeys(("batch", "heads", "kv_heads", "head_dim"), MAX_COUNT),
}
_CHUNK = 1 << 20
"""Pairs that are evaluated at a time; programs have tens of values for each."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Sizes and tiles of what a picture shows, and the head that it shows."""

    q_len: int
    """Queries, at most 4096."""
    kv_len: int
    """Keys, at most 4096."""
    block_m: int
    """Queries of a tile; at most 256 tiles along either side."""
    block_n: int
    """Keys of a tile."""
    batch: int = 1
    """Batch size, which programs may depend on."""
    heads: int = 1
    """Query heads."""
    kv_heads: int | None = None
    """Key heads; None for as many as query heads."""
    head_dim: int = 64
    """Head dim of q and k."""
    b: int = 0
    """The batch entry that is shown, of these."""
    h: int = 0
    """The query head that is shown."""
    location: Location = WHOLE
    """The place of these sizes in a larger call. Without indices: axes count from offsets."""

    def sizes(self) -> dict[str, int]:
        """The sizes that programs know."""
        own = {name: getattr(self, name) for name in SIZES}
        return own if self.kv_heads is not None else {**own, "kv_heads": self.heads}

    def checked(self) -> Frame:
        """The same, whose whole numbers of other types are ints.

        Raises:
            ArgumentError: A size or index out of range.
        """
        frame = Frame(*(plain_int(getattr(self, field.name)) for field in fields(self)))
        frame = replace(frame, kv_heads=frame.sizes()["kv_heads"])
        for name, most in _MOST.items():
            value = getattr(frame, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ArgumentError(f"{name} is {value!r}", hint=f"give an int from 1 to {most}")
        for name, length in (("block_m", frame.q_len), ("block_n", frame.kv_len)):
            block = getattr(frame, name)
            tiles = -(-length // block)
            if tiles > MAX_TILES:
                raise ArgumentError(
                    f"{name} is {block}, which makes {tiles} tiles of {length} positions",
                    hint=f"give at least {-(-length // MAX_TILES)}: "
                    f"a picture has at most {MAX_TILES} tiles a side",
                )
        for name, index, what in (("b", frame.b, "batch"), ("h", frame.h, "heads")):
            size = getattr(frame, what)
            if type(index) is not int or not 0 <= index < size:
                raise ArgumentError(
                    f"{name} is {index!r}, and {what} is {size}",
                    hint=f"give 0 to {size - 1}, or a larger {what}",
                )
        return frame


@dataclass(frozen=True, slots=True, eq=False)
class PictureData:
    """One head of one batch entry, by their numbers in the whole call. Tensors are on the CPU."""

    title: str
    """The program's text."""
    mask: torch.Tensor
    """Bool (q_len, kv_len): True for live pairs."""
    kinds: torch.Tensor
    """int8 (q tiles, kv tiles): 0 EMPTY, 1 PARTIAL, 2 FULL, as the compiler finds them."""
    score: torch.Tensor
    """float64 (q_len, kv_len): the score that ``raw_score`` becomes; NaN where the pair is dead."""
    raw_score: float
    changes_score: bool
    """True if the score is anything but the raw one."""
    mask_reads_score: bool
    """True if ``mask`` is that of ``raw_score`` only; tiles are those of all scores."""
    block_m: int
    block_n: int
    batch: int
    b: int
    heads: int
    h: int
    q_offset: int
    """Logical position of the first row."""
    kv_offset: int
    could_be_empty: int = 0
    """PARTIAL tiles without a live pair."""
    could_be_full: int = 0
    """PARTIAL tiles with live pairs only."""
    curve: Curve | None = None
    """The program's scores of other raw scores; None where it adds to them, if anything."""
    made_up: str = ""
    """Captures that were made up, in words."""

    @property
    def q_len(self) -> int:
        """Rows."""
        return self.mask.shape[0]

    @property
    def kv_len(self) -> int:
        """Columns."""
        return self.mask.shape[1]

    @property
    def counts(self) -> dict[str, int]:
        """Tiles by kind: ``FULL``, ``PARTIAL`` and ``EMPTY``."""
        kinds = (("FULL", FULL), ("PARTIAL", PARTIAL), ("EMPTY", EMPTY))
        return {name: int((self.kinds == kind).sum()) for name, kind in kinds}

    @property
    def live(self) -> str:
        """Percentage and number of live pairs, in words."""
        live, pairs = int(self.mask.sum()), self.mask.numel()
        percent = 100 * live / pairs
        # A mask of a few pairs is not one of none.
        shown = f"{percent:.2g}" if 0 < percent < 1 else f"{percent:.0f}"
        return f"live pairs {shown} % ({live} of {pairs})"

    @property
    def summary(self) -> str:
        """Counts of tiles and of live pairs, in one line."""
        tiles = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{tiles}; {self.live}"

    @property
    def place(self) -> str:
        """Batch entry, head and tile size of the picture, in words."""
        return (
            f"batch entry {self.b} of {self.batch}, head {self.h} of {self.heads}, "
            f"tiles of {self.block_m} x {self.block_n} (queries x keys)"
        )

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Least and greatest finite score of the live pairs; None where there is none."""
        finite = self.score[self.score.isfinite()]
        return (float(finite.min()), float(finite.max())) if finite.numel() else None

    @property
    def shows_scores(self) -> bool:
        """True if the scores of pairs say anything that the curve does not."""
        if not self.changes_score or self.curve is None:
            return self.changes_score
        live = self.score[self.mask]
        ends = self.score_range
        return not bool(live.isfinite().all()) or (ends is not None and ends[0] < ends[1])

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes for the reader of a picture."""
        found = []
        if self.could_be_empty:
            found.append(f"{self.could_be_empty} of the PARTIAL tiles have no live pair")
        if self.could_be_full:
            found.append(f"{self.could_be_full} of the PARTIAL tiles have live pairs only")
        if self.mask_reads_score:
            found.append(f"the mask depends on the score: pairs are those of {self.raw_score:g}")
        if self.made_up:
            found.append(f"made up: {self.made_up}")
        return tuple(found)


def picture_data(
    lowered: Lowered,
    frame: Frame,
    *,
    tensors: Mapping[str, torch.Tensor] = {},
    params: Mapping[str, Scalar | torch.Tensor] = {},
    raw_score: float = 0.0,
    title: str | None = None,
) -> PictureData:
    """The data of a picture of ``lowered``. Works on the CPU, in fp64.

    Args:
        lowered: The program.
        frame: Sizes, tiles, batch entry and head.
        tensors: The program's tensors by name, of shapes that fit these sizes, on any device.
        params: Its run-time params by name; those left out have their defaults.
        raw_score: The value of ``scale * (q . k)`` for all pairs.
        title: Heading, such as the program's text; the lowered program as text by default.

    Raises:
        ArgumentError: A size or index out of range, or a capture that is missing or unknown.
        ShapeError: A tensor that does not fit the sizes.
        DTypeError: A tensor that does not have the type that the program declares.
    """
    frame = frame.checked()
    if not math.isfinite(raw_score):
        raise ArgumentError(f"raw_score is {raw_score}", hint="give a finite number")
    # Operands have their shapes, which are checked, and no values, which are not looked at.
    element = torch.zeros(frame.head_dim, dtype=torch.float64, device="cpu")
    sizes = frame.sizes()
    q = element.expand(sizes["batch"], sizes["heads"], sizes["q_len"], -1)
    k = element.expand(sizes["batch"], sizes["kv_heads"], sizes["kv_len"], -1)
    captures = {name: _on_cpu(value) for name, value in {**tensors, **params}.items()}
    location = frame.location
    here = replace(location, **{name: _on_cpu(getattr(location, name)) for name in LOCATION})
    call = bind(lowered.program, (q, k, k), captures, here)
    check_values(lowered.program, call)
    shown = print_program(lowered.program) if title is None else title
    with torch.no_grad():
        return _look(lowered, call, frame, float(raw_score), shown)


def _first(offset: int | torch.Tensor, b: int) -> int:
    """The logical position of the first row of a batch entry."""
    return int(offset[b] if isinstance(offset, torch.Tensor) and offset.dim() else offset)


def _look(lowered: Lowered, whole: Call, frame: Frame, raw_score: float, title: str) -> PictureData:
    blocks = frame.block_m, frame.block_n
    part = Part() if whole.part is None else whole.part
    lowered, call = localised(lowered, whole)
    sparsity, program = lowered.sparsity, lowered.program
    grid = grid_of(call, *blocks)
    scope = _only(grid.scope, frame.b, frame.h)
    mask, score = _pairs(lowered, scope, raw_score)
    # One head of one batch entry: what others have is neither found nor kept.
    alone = replace(sparsity, by_batch=False, by_head=False, evaluate=False)
    kinds = kinds_by_bounds(alone, Grid(scope, *blocks))[0, 0]
    exact = _exact_kinds(mask, *blocks)
    mask_reads_score = reads_score(program.mask)
    loose = kinds == PARTIAL
    if sparsity.evaluate:
        # The compiler evaluates the tiles that bounds leave open; here that has been done already.
        kinds = torch.where(loose, exact, kinds)
        loose = torch.zeros_like(loose)
    if mask_reads_score:
        # Another score may well fill a tile that this one leaves empty.
        loose = torch.zeros_like(loose)
    return PictureData(
        title=title,
        mask=mask,
        kinds=kinds,
        score=score,
        raw_score=raw_score,
        changes_score=not sparsity.plain,
        mask_reads_score=mask_reads_score,
        block_m=frame.block_m,
        block_n=frame.block_n,
        batch=whole.sizes["batch"],
        b=frame.b + part.b_offset,
        heads=whole.sizes["heads"],
        h=frame.h + part.h_offset,
        q_offset=_first(whole.q_offset, frame.b),
        kv_offset=_first(whole.kv_offset, frame.b),
        could_be_empty=int((loose & (exact == EMPTY)).sum()),
        could_be_full=int((loose & (exact == FULL)).sum()),
        curve=curve_of(lowered, scope, mask),
    )


def _only(scope: LeafValues, b: int, h: int) -> LeafValues:
    """``scope`` for one head of one batch entry."""
    found = dict(scope.variables)
    for name, dim, index in (("b", 0, b), ("h", 1, h), ("hkv", 1, h)):
        found[name] = found[name].narrow(dim, index, 1)
    return replace(scope, variables=found)


def _pairs(
    lowered: Lowered, scope: LeafValues, raw_score: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask of live pairs, and their scores, NaN elsewhere: (q_len, kv_len) each."""
    program = lowered.program
    q, kv = scope.variables["q"], scope.variables["kv"]
    shape = (q.shape[2], kv.shape[3])
    mask = torch.ones(shape, dtype=torch.bool, device="cpu")
    score = torch.empty(shape, dtype=torch.float64, device="cpu")
    raw = torch.full((1, 1, 1, 1), raw_score, dtype=torch.float64, device="cpu")
    roots = (program.score,) if program.mask is None else (program.score, program.mask)
    rows = max(1, _CHUNK // shape[1])
    for first in range(0, shape[0], rows):
        part = slice(first, first + rows)
        variables = {**scope.variables, "q": q[:, :, part]}
        found, *live = evaluate(roots, replace(scope, variables=variables, score=raw))
        score[part] = found[0, 0]
        if live:
            mask[part] = live[0][0, 0]
    return mask, torch.where(mask, score, torch.nan)


def _exact_kinds(mask: torch.Tensor, block_m: int, block_n: int) -> torch.Tensor:
    """int8 (q tiles, kv tiles): the kinds of the tiles of ``mask``."""

    def totals(pairs: torch.Tensor) -> torch.Tensor:
        for dim, block in ((0, block_m), (1, block_n)):
            tiles = torch.arange(pairs.shape[dim], device="cpu") // block
            shape = list(pairs.shape)
            shape[dim] = int(tiles[-1]) + 1
            pairs = torch.zeros(shape, dtype=torch.int64, device="cpu").index_add_(
                dim, tiles, pairs
            )
        return pairs

    live, there = (
        totals(mask.to(torch.int64)),
        totals(torch.ones(mask.shape, dtype=torch.int64, device="cpu")),
    )
    return (live > 0).to(torch.int8) * PARTIAL + (live == there).to(torch.int8) * (FULL - PARTIAL)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
