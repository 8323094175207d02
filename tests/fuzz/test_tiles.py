"""Random masks: tile maps and loops against every pair, by an oracle in numpy.

``PYTHONPATH=tests python -m fuzz.test_tiles COUNT [SEED]`` runs more of them, and prints a small
program and a call for each that goes wrong.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fuzz.masks import DIMS, EXTREMES, NUMBERS, Masks, smaller, text_of, value_of

from attndsl.backends.tiled.tile_kinds import grid_of, kinds_by_bounds, segment_kinds
from attndsl.call.call_slice import CallSizes
from attndsl.call.meta_call import call_of_lengths
from attndsl.call.options import Location
from attndsl.errors import AttnDSLError
from attndsl.inspection.tile_search import find_tiles, verify_call
from attndsl.passes.tiles.tile_plan import DIRECTIONS, EMPTY, FULL
from attndsl.pipeline import lower
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fuzz.masks import Tree

    from attndsl.backends.base import Call
    from attndsl.passes.lowered import Lowered

COUNT = int(os.environ.get("ATTNDSL_FUZZ_TILES", "60"))
SEED = int(os.environ.get("ATTNDSL_FUZZ_SEED", "1"))
_LENGTHS = (0, 1, 2, 17, 30, 64, 100, 128, 150, 190, 257, 300)
_BLOCKS = (1, 3, 5, 7, 13, 16, 31, 32, 48, 64, 100, 128, 200)
_OFFSETS = (0, 0, 0, 0, 5, 37, -20, 300, (1 << 30) - 400)


@dataclass(frozen=True)
class Case:
    """A mask and a call; captures follow from ``seed``."""

    mask: Tree
    seed: int
    batch: int = 1
    heads: int = 1
    lengths: tuple[int, int] = (30, 30)
    tiles: tuple[int, int] = (16, 16)
    direction: str = "forward"
    offsets: tuple[int, int] = (0, 0)
    indexed: bool = False

    def less(self) -> Iterator[Case]:
        """Cases with one thing simpler."""
        if self.indexed:
            yield replace(self, indexed=False)
        if self.offsets != (0, 0):
            yield replace(self, offsets=(0, 0))
        for name in ("batch", "heads"):
            if getattr(self, name) > 1:
                yield replace(self, **{name: 1})
        for name in ("lengths", "tiles"):
            for place, size in enumerate(getattr(self, name)):
                for part in sorted({1, size // 2, size - 1} - {size}):
                    sizes = list(getattr(self, name))
                    sizes[place] = part
                    if part > 0:
                        yield replace(self, **{name: tuple(sizes)})
        for mask in smaller(self.mask):
            yield replace(self, mask=mask)


@dataclass
class Report:
    """What a run found."""

    cases: int = 0
    closed: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


def case_of(seed: int) -> Case:
    """The case of a seed."""
    dice = random.Random(seed)
    many = dice.random() < 0.3
    return Case(
        Masks(dice).condition(dice.choice((1, 2, 2, 3))),
        seed,
        batch=dice.choice((1, 2)) if many else 1,
        heads=dice.choice((1, 2, 3)) if many else 1,
        lengths=(dice.choice(_LENGTHS), dice.choice(_LENGTHS)),
        tiles=(dice.choice(_BLOCKS), dice.choice(_BLOCKS)),
        direction=dice.choice(list(DIRECTIONS)),
        offsets=(dice.choice(_OFFSETS), dice.choice(_OFFSETS)),
        indexed=dice.random() < 0.1,
    )


def captures_of(case: Case) -> dict[str, Any]:
    """Values of all the tensors and params that masks may name."""
    chance = np.random.default_rng(case.seed)
    dice = random.Random(case.seed + 1)

    def ints(*shape: int, most: int = 9, extreme: float = 0.0) -> torch.Tensor:
        values = chance.integers(-1 if dice.random() < 0.2 else 0, most, shape)
        if dice.random() < 0.6:
            values = np.sort(values, axis=-1)
        far = chance.random(shape) < (extreme if dice.random() < 0.3 else 0.0)
        values = np.where(far, chance.choice(EXTREMES, shape), values)
        small = values.min() >= -128 and values.max() < 128
        fits = values.min() >= -(2**31) and values.max() < 2**31
        dtypes = [torch.int64] + [torch.int32] * bool(fits) + [torch.int8] * bool(small)
        made = torch.from_numpy(values).to(dice.choice(dtypes))
        return _restrided(made, dice)

    size = max(1, max(case.lengths) + dice.choice((0, 0, 3, -20)))
    return {
        "n": dice.choice(EXTREMES) if dice.random() < 0.25 else dice.choice(NUMBERS),
        "p": dice.choice((0.0, 0.5, -1.25, 3.0)),
        "ids": ints(size, extreme=0.02),
        "rows": ints(case.batch, size, extreme=0.02),
        "ends": ints(case.batch, most=200, extreme=0.5),
        "widths": ints(case.heads, most=100, extreme=0.5),
        "starts": ints(9, most=200),
        "flags": _restrided(torch.from_numpy(chance.random(size) < 0.1), dice),
        "on": torch.from_numpy(chance.random(case.heads) < 0.5),
        "values": torch.from_numpy(chance.standard_normal(size).astype(np.float32)),
        "blocks": _restrided(torch.from_numpy(chance.random((12, 9)) < 0.3), dice),
    }


def _restrided(tensor: torch.Tensor, dice: random.Random) -> torch.Tensor:
    """The same values with other strides, or the first of them along the last dim."""
    kind = dice.randrange(6)
    if kind == 0:
        return torch.stack([tensor, tensor], -1)[..., 0]
    if kind == 1:
        return tensor[..., :1].expand(tensor.shape)
    if kind == 2:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor


def positions_of(case: Case) -> dict[str, Any]:
    """Offsets or indices, as calls take them."""
    if not case.indexed:
        return dict(zip(("q_offset", "kv_offset"), case.offsets, strict=True))
    chance = np.random.default_rng(case.seed + 2)
    return {
        f"{name}_index": torch.from_numpy(chance.integers(0, 2 * length + 1, length))
        for name, length in zip(("q", "kv"), case.lengths, strict=True)
    }


def true_kinds(case: Case) -> np.ndarray[Any, Any]:
    """Kinds of all tiles by looking at every pair, (batch, heads, q tiles, kv tiles)."""
    shape = (case.batch, case.heads, *case.lengths)
    leaves: dict[str, Any] = {
        "b": np.arange(case.batch).reshape(-1, 1, 1, 1),
        "h": np.arange(case.heads).reshape(1, -1, 1, 1),
    }
    positions = positions_of(case)
    for place, (name, length) in enumerate(zip(("q", "kv"), case.lengths, strict=True)):
        if case.indexed:
            rows = positions[f"{name}_index"].numpy()
        else:
            rows = np.arange(length) + case.offsets[place]
        leaves[name] = rows.reshape((1, 1, -1, 1) if name == "q" else (1, 1, 1, -1))
        leaves[f"{name}_len"] = np.full((1, 1, 1, 1), length)
    for name, value in captures_of(case).items():
        if isinstance(value, torch.Tensor):
            array = value.numpy()
            leaves[name] = array.astype(np.int64) if array.dtype.kind == "i" else array
        else:
            kind = np.float32 if isinstance(value, float) else np.int64
            leaves[name] = np.full((1, 1, 1, 1), value, kind)
    live = np.broadcast_to(value_of(case.mask, leaves), shape)
    some = every = live
    for dim, (length, block) in enumerate(zip(case.lengths, case.tiles, strict=True), 2):
        if length:
            firsts = range(0, length, block)
            some = np.logical_or.reduceat(some, firsts, dim)
            every = np.logical_and.reduceat(every, firsts, dim)
    return some.astype(np.int8) + every


def what_is_wrong(case: Case, report: Report | None = None) -> str | None:
    """How maps or loops differ from the mask, or None.

    Raises:
        AttnDSLError: The program or the call is refused.
    """
    lowered = lower(Source(text_of(case.mask)), {})
    program = lowered.program
    names = {decl.name for decl in (*program.tensors, *program.params)}
    captures = {name: value for name, value in captures_of(case).items() if name in names}
    call = call_of_lengths(
        lowered,
        CallSizes(*case.lengths, case.batch, case.heads, head_dim=4),
        captures,
        Location(**positions_of(case)),
        None,
    )
    wanted = torch.from_numpy(true_kinds(case))
    for what, found, exact in _maps(case, lowered, call, report):
        got = found.expand(wanted.shape)
        if ((got == EMPTY) & (wanted != EMPTY)).any():
            return f"{what}: a live pair in an EMPTY tile"
        if ((got == FULL) & (wanted != FULL)).any():
            return f"{what}: a dead pair in a FULL tile"
        if exact and not torch.equal(got, wanted):
            return f"{what}: a tile is PARTIAL that need not be"
    try:
        verify_call(lowered, call, *case.tiles, case.direction)
    except AttnDSLError as error:
        return f"verify: {error}"
    return None


def _maps(
    case: Case, lowered: Lowered, call: Call, report: Report | None
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Each way to find the tiles: its name, its kinds, and whether they are to be exact."""
    from attndsl.backends.tiled import tile_kinds

    sparsity, direction = lowered.sparsity, DIRECTIONS[case.direction]
    wide = getattr(tile_kinds, "wide_ints", None)
    how = (call.shifted, call.indexed) if wide is None else (call.shifted, call.indexed, wide(call))
    loop = sparsity.loop(direction, *case.tiles, *how)
    if report is not None:
        report.closed += loop.listed is None
    exact = loop.listed is None or sparsity.evaluate
    yield "tile map", find_tiles(lowered, call, *case.tiles, case.direction).kinds, exact
    grid = grid_of(call, *case.tiles)
    with torch.no_grad():
        bounds = kinds_by_bounds(sparsity, grid)
        yield "bounds", bounds, sparsity.evaluate
        if loop.listed is None and bounds.numel():
            used = segment_kinds(loop, direction, grid, (bounds.shape[0], bounds.shape[1]))
            yield "loops", used if direction.along == "kv" else used.transpose(2, 3), False


def _outcome(case: Case, report: Report) -> str | None:
    """What is wrong with a case, an unexpected error included; refusals are counted."""
    try:
        return what_is_wrong(case, report)
    except AttnDSLError:
        report.refused += 1
        return None
    except (RuntimeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def shrunk(case: Case, most: int = 400) -> Case:
    """A smaller case that is wrong too."""
    tries = 0
    found = True
    while found:
        found = False
        for less in case.less():
            tries += 1
            if tries > most:
                return case
            found = _outcome(less, Report()) is not None
            if found:
                case = less
                break
    return case


def run(count: int, seed: int, progress: Callable[[str], None] = print) -> Report:
    """``count`` cases from ``seed`` on; what is wrong is reported as it is found."""
    report = Report()
    for number in range(seed, seed + count):
        case = case_of(number)
        report.cases += 1
        wrong = _outcome(case, report)
        if wrong is not None:
            small = shrunk(case)
            names = {name for name in DIMS if name in text_of(small.mask)} | {"n", "p"}
            captures = {k: v for k, v in captures_of(small).items() if k in names}
            report.wrong.append(
                f"seed {number}: {wrong}\n{text_of(small.mask)}\n{small}\n{captures}"
            )
            progress(report.wrong[-1])
        if report.cases % 500 == 0:
            progress(f"{report.cases} masks, {len(report.wrong)} wrong")
    return report


def test_random_masks() -> None:
    report = run(COUNT, SEED)
    assert not report.wrong, report.wrong[0]
    assert report.closed > COUNT // 5
    assert report.refused == 0


if __name__ == "__main__":
    done = run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.getrandbits(40))
    print(f"{done.cases} masks, {done.closed} in closed form, {done.refused} refused, "
          f"{len(done.wrong)} wrong")  # fmt: skip
    sys.exit(bool(done.wrong))
