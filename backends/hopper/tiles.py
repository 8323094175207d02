"""Tile sizes of Hopper kernels: candidates in order of preference.

Preferences are those of FlashAttention-3 (arXiv 2407.08608) where measurements do not say better.
"""

from __future__ import annotations

from dataclasses import replace

from ..kernels.config import Config
from ..kernels.kernel import Task

_FORWARD = {
    64: (Config(192, 128, 4, 2, 3, 160), Config(128, 128, 4, 2, 2, 240)),
    128: (
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
# registers. Persistent programs gain at D64, and lose at D128: see M10 in docs/measured.md.
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


_FEWEST_ROWS = 128
"""Calls of no more rows have one work tile a head, of whatever size."""
_LEFT_OVER = 1.04
"""How many times as many rows the larger work tiles of a forward may have as the smaller ones."""


def has_narrow_rows(q_len: int) -> bool:
    """Whether work tiles of 128 rows make a forward of D64 faster than those of 192 do.

    Short rows leave much of the last large tile empty: see M28 in docs/measured.md.
    """
    large, small = (-(-q_len // rows) * rows for rows in (192, 128))
    return q_len > _FEWEST_ROWS and large > _LEFT_OVER * small


def candidates(
    task: Task, width: int, plain: bool, work: str, column: bool, dropped: bool, own: bool
) -> tuple[Config, ...]:
    """Configs for a program, best first.

    Larger tiles pay, except where a mask leaves few tiles and many of these are PARTIAL (see M4 in
    docs/measured.md). Backward, a program's own score leaves fewer registers for larger tiles
    (see M7). In both directions dropout leaves fewer registers, since its producer draws.

    Persistent programs hide how items begin and end. Forwards that add something to columns lose by
    it, and so do forwards of head dim 256. See M5 in docs/measured.md.

    Args:
        task: ``FORWARD`` or ``BACKWARD``.
        width: Head dim, a power of two.
        plain: Whether it has scores that are ``scale * (q . k)``, or no mask.
        work: What its loop is like, see ``Sparsity.work``.
        column: Whether its score has a part that varies with the key alone, and weights follow the
            maximum to the end, as in fp16.
        dropped: Whether it has dropout.
        own: Whether it says what weights are.
    """
    found = CANDIDATES[task][width]
    if own and not dropped:
        # Without a softmax their sums are no work for that time: see M6 in docs/measured.md.
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
    persistent = width <= 128 and not (task is Task.FORWARD and column)
    return tuple(replace(config, persistent=persistent) for config in found)


def for_busy_producers(configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """Configs for a backward whose producer adds up diagonals, or draws for tiles of D64.

    With 24 registers the diagonal producer does not compile: ptxas then drops all register hints.
    The drawing producer spills. Giving a producer 40 registers costs each consumer 8 and hardly any
    spills.
    """
    return tuple(replace(config, registers=_SHARED) for config in configs)
