"""Tile sizes of Hopper kernels: candidates in order of preference.

Preferences are those of FlashAttention-3 (arXiv 2407.08608) where measurements do not say better.
"""

from __future__ import annotations

from ..triton.tiles import Config

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
        Config(128, 128, 4, 2, 2, 240, peeled=False),
        Config(64, 128, 4, 2, 2, 240),
    ),
    128: (Config(64, 128, 4, 2, 2, 240), Config(64, 128, 4, 2, 2, 240, peeled=False)),
    256: (Config(64, 64, 4, 2, 2, 240), Config(64, 64, 4, 2, 2, 240, peeled=False)),
}
CANDIDATES = {"forward": _FORWARD, "backward_kv": _BACKWARD}
"""Configs worth compiling, by direction and head dim, a power of two."""


def candidates(direction: str, width: int, masked: bool, work: str) -> tuple[Config, ...]:
    """Configs for a program, best first.

    A mask's code leaves fewer registers for larger tiles backward; forward, larger ones pay but for
    masks that leave few tiles, of which many are PARTIAL (documents, D 64: 0.41 against 0.48 ms).

    Args:
        direction: ``forward`` or ``backward_kv``.
        width: Head dim, a power of two.
        masked: Whether the program has a mask.
        work: What its loop is like, see ``Sparsity.work``.
    """
    found = CANDIDATES[direction][width]
    if (masked and direction == "backward_kv") or work == "short partial":
        return tuple(sorted(found, key=lambda config: config.block_m))
    return found
