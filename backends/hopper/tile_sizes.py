"""Tile sizes of Hopper kernels: candidates in order of preference.

Preferences are those of FlashAttention-3 (arXiv 2407.08608) where measurements do not say better.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..kernels.config import HOPPER_PROCESSORS, Config
from ..kernels.kernel import Task
from .tile_shapes import config_width, widest

if TYPE_CHECKING:
    from attndsl.ir import Program
    from attndsl.passes.tiles.sparsity import Sparsity

    from ..base import Call
    from ..emit.facts import KernelFacts

_FORWARD = {
    64: (Config(192, 128, 4, 2, 3, 160), Config(128, 128, 4, 2, 2, 240)),
    128: (
        Config(128, 128, 4, 2, 2, 240),
        Config(128, 128, 4, 2, 2, 240, early=True),
        Config(128, 64, 4, 3, 2, 240),
    ),
    192: (
        Config(128, 128, 4, 2, 2, 240),
        Config(128, 128, 4, 2, 2, 240, early=True),
        Config(128, 64, 4, 3, 2, 240),
    ),
    256: (Config(128, 64, 4, 2, 2, 240),),
}
_BACKWARD = {
    64: (
        Config(128, 128, 4, 2, 2, 240),
        Config(64, 128, 4, 2, 2, 240),
        Config(128, 128, 4, 2, 2, 240, peeled=False),
    ),
    128: (Config(64, 128, 4, 2, 2, 240), Config(64, 128, 4, 2, 2, 240, peeled=False)),
    256: (Config(64, 64, 4, 2, 2, 240), Config(64, 64, 4, 2, 2, 240, peeled=False)),
}
# Two sums of products need the registers of twice as many rows. Early configs add up tangents
# before their products: tangents of 128 keys, or beside a function of the score, need too many
# registers. Persistent programs gain at D64, and lose at D128: see M10 in docs/dev/measured.md.
_FORWARD_TANGENT: dict[int, tuple[Config, ...]] = {
    64: (
        Config(128, 128, 4, 2, 2, 240, early=True, persistent=True),
        Config(128, 64, 4, 3, 2, 240, persistent=True),
    ),
    128: (
        Config(128, 64, 4, 2, 2, 240),
        Config(128, 64, 4, 2, 2, 240, early=True),
        Config(128, 32, 4, 4, 2, 240),
    ),
}
_SHARED = 232
"""Registers of consumers that leave a producer 40 instead of 24."""
_DRAWING = {2: 216, 3: 152}
"""The same, of two or three consumers whose producer draws for all of them: it has 56 or more."""
CANDIDATES: dict[Task, dict[int, tuple[Config, ...]]] = {
    Task.FORWARD: _FORWARD, Task.FORWARD_TANGENT: _FORWARD_TANGENT, Task.BACKWARD: _BACKWARD
}  # fmt: skip
"""Configs worth compiling, by task and head dim, a power of two."""


_MIDDLE = 96
"""The most columns of rows whose forward has three consumers, with 64 keys a tile."""
_OF_MIDDLE = Config(192, 64, 4, 3, 3, 160, persistent=True)
_FEW_KEYS = Config(128, 64, 4, 4, 2, 240, persistent=True)
"""Config of forwards of more columns that have few keys, or whose rows begin between sectors."""
_SECTOR = 16
"""Elements of 16 bits: rows of other lengths take more sectors of memory than they fill."""
_ONE_TILE = 128
"""Calls of no more rows have one work tile a head, and calls of no more keys few tiles anyway."""
_LEFT_OVER, _LEFT_OVER_OF_MIDDLE = 1.04, 1.13
"""Ratio of rows rounded up to the larger work tiles of a forward, and to the smaller ones, above
which it has the smaller ones."""
_MOST_KEYS_OF_SMALL = {64: 3072, 128: 1024}
"""Keys up to which forwards have smaller tiles, by columns: of D64 with a mask, of D128."""
_MOST_KEYS_OF_SMALL_BACKWARD = 384
_MOST_ELEMENTS_APART = 1 << 26
"""Most gradients of keys, fp32, that heads have apart: 256 MB."""
_WAVES_OF_FEW = 4
"""Work tiles for each multiprocessor up to which a call of two tiles a row has few."""


_SMALL_CELLS = 64
_OF_ONE_CONSUMER = Config(64, 64, 4, 3, 1, 216, most_registers=128)
"""Config of forwards whose tiles are cells of 64 x 64 pairs, or that have so few rows a head. A
multiprocessor runs two programs at a time. See M71 in docs/dev/measured.md."""
_OF_THREE_PROGRAMS = Config(64, 64, 4, 3, 1, 120, most_registers=80)
"""Config of forwards of 64 columns with short loops or few rows a head. A multiprocessor runs three
programs at a time: others compute while one begins or ends. See M76 in docs/dev/measured.md."""


def looks_up_many_keys(facts: KernelFacts, sparsity: Sparsity) -> bool:
    """Return True if what a mask looks up suits forwards with tiles of 128 keys.

    These are maps of pairs that are read by tiles, and blocks of so many keys: see M75 in
    docs/dev/measured.md.
    """
    bounds = sparsity.by_cells
    if not _MIDDLE < max(facts.head_dim, facts.value_dim) <= 128 or bounds is None:
        return False
    cells = bounds.cells
    blocks = bool(cells) and all(cell.kv_size % (2 * _SMALL_CELLS) == 0 for cell in cells)
    # A bias that is read by tiles has none measured.
    maps = bool(facts.pair_tiles) and all(tile.dtype == "i8" for tile in facts.pair_tiles)
    return blocks or maps


def with_small_cells(
    task: Task, facts: KernelFacts, sparsity: Sparsity, configs: tuple[Config, ...]
) -> tuple[Config, ...]:
    """Configs, best first, before which there is that of cells of 64 x 64 if a mask has such.

    In a tile of 128 x 128 with a live cell most cells are dead, where rows of cells differ.
    """
    placed = facts.shifted or facts.indexed or bool(facts.pair_tiles) or facts.dropout
    bounds = sparsity.by_cells
    if task is not Task.FORWARD or placed or bounds is None or sparsity.not_affine is None:
        return configs
    small = any(
        cell.q_size % (2 * _SMALL_CELLS) == _SMALL_CELLS
        and (cell.kv_size % (2 * _SMALL_CELLS) == _SMALL_CELLS or _SMALL_CELLS % cell.kv_size == 0)
        for cell in bounds.cells
    )
    return (_OF_ONE_CONSUMER, *configs) if small and config_width(task, facts) <= 128 else configs


def with_short_loops(facts: KernelFacts, configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """Configs, best first, before which there is that of three programs a multiprocessor."""
    return (_OF_THREE_PROGRAMS, *configs) if _is_narrow(facts) else configs


def _is_narrow(facts: KernelFacts) -> bool:
    """Return True for rows of up to 64 columns that begin at sectors of memory."""
    cut = facts.head_dim % _SECTOR or facts.value_dim % _SECTOR
    return widest(facts) == 64 and not cut


def has_few_tiles(call: Call, sparsity: Sparsity) -> bool:
    """Return True if listing a call's live tiles would take longer than what it saves.

    Lists take three kernels of a few microseconds. Tiles that may be live are then PARTIAL.
    """
    (batch, heads, q_len), kv_len = call.q.shape[:3], call.k.shape[2]
    if sparsity.not_affine is None or max(q_len, kv_len) > 2 * _ONE_TILE:
        return False
    return batch * heads * -(-q_len // _ONE_TILE) <= _WAVES_OF_FEW * HOPPER_PROCESSORS


def has_few_rows(task: Task, facts: KernelFacts, call: Call) -> bool:
    """Return True if a forward's rows of a head fit one consumer's tile.

    Tiles of two would be half empty, and half of their products be of nothing. Calls with even
    fewer rows of all heads that share keys are the decode family's.
    """
    rows, group = call.q.shape[2], call.q.shape[1] // call.k.shape[1]
    return task is Task.FORWARD and rows <= _SMALL_CELLS < group * rows and widest(facts) <= 128


def with_few_rows(facts: KernelFacts, configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """Configs, best first, before which there is that of one consumer if a call has few rows."""
    if not facts.few_rows or facts.dropout:
        return configs
    return (_OF_THREE_PROGRAMS if _is_narrow(facts) else _OF_ONE_CONSUMER, *configs)


def has_small_tiles(task: Task, facts: KernelFacts, q_len: int, kv_len: int, masked: bool) -> bool:
    """Return True if lengths make smaller tiles faster: see M28 and M47 in docs/dev/measured.md.

    Short rows leave much of the last large tile empty, and programs of few tiles wait for the
    first and the last of them. Where keys alone decide, parts of a call's rows have the tiles of
    all. Forwards of up to 96 columns and backwards also depend on how many rows there are.
    """
    width, columns = widest(facts), max(facts.head_dim, facts.value_dim)
    if task is Task.BACKWARD:
        cut = q_len % _ONE_TILE or kv_len % _ONE_TILE
        short = _ONE_TILE < max(q_len, kv_len) <= _MOST_KEYS_OF_SMALL_BACKWARD
        return width == 64 and not masked and short and bool(cut)
    if task is not Task.FORWARD or width > 128:
        return False
    if columns > _MIDDLE:
        return _ONE_TILE < kv_len <= _MOST_KEYS_OF_SMALL[128]
    large, small = (-(-q_len // rows) * rows for rows in (192, 128))
    most = _LEFT_OVER if width == 64 else _LEFT_OVER_OF_MIDDLE
    few = width == 64 and masked and kv_len <= _MOST_KEYS_OF_SMALL[64]
    return q_len > _ONE_TILE and (few or large > most * small)


def has_heads_apart(call: Call, facts: KernelFacts, program: Program) -> bool:
    """Return True if a backward's work tiles are too few for a GPU, and heads share keys.

    A work tile then has one query head instead of all that share its keys, and another kernel adds
    gradients of keys up. Gradients in fp32 and in a fixed order have theirs summed already, and
    programs with bounds check them.
    """
    (batch, heads), (kv_heads, kv_len) = call.q.shape[:2], call.k.shape[1:3]
    if facts.wide_gradients or facts.wide_out or facts.takes_turns or program.bounded:
        return False
    tiles = -(-kv_len // _ONE_TILE) * batch * kv_heads
    elements = batch * heads * kv_len * (call.k.shape[3] + call.v.shape[3])
    few = 2 * tiles <= HOPPER_PROCESSORS and elements <= _MOST_ELEMENTS_APART
    return heads > kv_heads and few


def for_lengths(
    task: Task, facts: KernelFacts, configs: tuple[Config, ...], few: bool
) -> tuple[Config, ...]:
    """The :func:`candidates` in the order that suits the call's lengths.

    Args:
        task: ``FORWARD`` or ``BACKWARD``.
        facts: Those of the call.
        configs: All, best first for long sequences.
        few: Whether a forward's work tiles visit few tiles, however long sequences are.
    """
    width = widest(facts)
    if task is Task.BACKWARD:
        if facts.small_tiles:
            return tuple(sorted(configs, key=lambda config: config.block_m))
        return configs
    if facts.small_tiles or (few and width == 64):
        return tuple(config for config in configs if config.consumers < 3)
    return configs


def with_few_keys(facts: KernelFacts, configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """Forward configs, best first, before which there are those of fewer keys that are faster.

    Tiles of 128 columns hold rows of fewer columns as well: then the registers of three consumers
    suffice, and products take less time than exponentials. See M47 in docs/dev/measured.md.
    """
    columns = max(facts.head_dim, facts.value_dim)
    if widest(facts) != 128 or not configs[0].persistent:
        return configs
    found: tuple[Config, ...] = ()
    if columns <= _MIDDLE:
        cut = facts.head_dim % _SECTOR or facts.value_dim % _SECTOR
        found = (_OF_MIDDLE, _FEW_KEYS) if cut else (_OF_MIDDLE,)
    elif facts.small_tiles:
        found = (_FEW_KEYS,)
    return (*found, *configs)


def candidates(
    task: Task, width: int, plain: bool, work: str, column: bool, dropped: bool, own: bool
) -> tuple[Config, ...]:
    """Configs for a program, best first.

    Larger tiles pay, except where a mask leaves few tiles and many of these are PARTIAL (see M4 in
    docs/dev/measured.md). Backward, a program's own score leaves fewer registers for larger tiles
    (see M7). In both directions dropout leaves fewer registers, since its producer draws.

    Persistent programs hide how items begin and end. Forwards that add something to columns lose by
    it, and so do forwards of head dims above 192. See M5 in docs/dev/measured.md.

    Args:
        task: ``FORWARD`` or ``BACKWARD``.
        width: Columns of the wider tiles, see ``tile_shapes.config_width``.
        plain: Whether it has scores that are ``scale * (q . k)``, or no mask.
        work: What its loop is like, see ``Sparsity.work``.
        column: Whether its score has a part that varies with the key alone, and weights follow the
            maximum to the end, as in fp16.
        dropped: Whether it has dropout.
        own: Whether it says what weights are.
    """
    found = CANDIDATES[task][width]
    if own and not dropped:
        # Without a softmax their sums are no work for that time: see M6 in docs/dev/measured.md.
        found = tuple(sorted(found, key=lambda config: not config.early))
    crowded = dropped or not plain
    if dropped and task is Task.FORWARD:
        found = tuple(
            replace(config, registers=_DRAWING[config.consumers])
            for config in sorted(found, key=lambda config: config.consumers)
        )
    if (crowded and task is Task.BACKWARD) or work == "short partial":
        found = tuple(sorted(found, key=lambda config: (config.block_m, config.block_n)))
    if dropped and task is Task.BACKWARD and width <= 64:
        found = for_busy_producers(found)
    persistent = width <= 192 and not (task is Task.FORWARD and column)
    return tuple(replace(config, persistent=persistent) for config in found)


def for_busy_producers(configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """Configs for a backward whose producer adds up diagonals, or draws for tiles of D64.

    With 24 registers the diagonal producer does not compile: ptxas then drops all register hints.
    The drawing producer spills. Giving a producer 40 registers costs each consumer 8 and hardly any
    spills.
    """
    return tuple(replace(config, registers=_SHARED) for config in configs)
