"""Tile sizes of Hopper kernels: candidates in order of preference.

Preferences are those of FlashAttention-3 (arXiv 2407.08608) where measurements do not say better.
"""

from __future__ import annotations

from ..triton.tiles import Config

_FORWARD = {
    64: (Config(192, 128, 4, 2, 3, 160), Config(128, 128, 4, 2, 2, 240)),
    128: (Config(128, 128, 4, 2, 2, 240), Config(128, 64, 4, 3, 2, 240)),
    256: (Config(128, 64, 4, 2, 2, 240),),
}


def forward_candidates(block_d: int) -> tuple[Config, ...]:
    """Configs worth compiling for a head dim that is a power of two from 64 to 256."""
    return _FORWARD[block_d]
