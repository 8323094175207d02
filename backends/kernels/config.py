"""Tile sizes and launch options of a kernel, and how much shared memory GPUs have."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_MEMORY = {
    "cuda:80": 166912,
    "cuda:86": 101376,
    "cuda:87": 166912,
    "cuda:89": 101376,
    "cuda:90": 232448,
    "cuda:100": 232448,
    "cuda:103": 232448,
    "cuda:120": 101376,
    "hip:gfx942": 65536,
    "hip:gfx950": 163840,
}
"""Bytes of shared memory that one program may use, by target."""
_SMALLEST_SHARED = 65536
HOPPER_PROCESSORS = 132
"""Multiprocessors of an H100 and of an H200, which decide between kernels for them."""


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes and launch options of one kernel."""

    block_m: int
    """Query rows of a tile."""
    block_n: int
    """Key rows of a tile."""
    warps: int
    stages: int
    """Depth of the software pipeline."""
    consumers: int = 0
    """Warpgroups that compute, where others only load; 0 where all warps do the same."""
    registers: int = 0
    """Registers of each thread of such a warpgroup."""
    peeled: bool = True
    """True if FULL tiles have a loop of their own, without the mask's code: it may take registers
    that are worth more elsewhere."""
    early: bool = False
    """True if weights are rounded before the product of those before them has ended, or tangents
    are added up before theirs begins: this needs fewer registers, and more instructions or time."""
    persistent: bool = False
    """True if there are as many programs as run at a time, each with one tile after the other: the
    next one's loads run while one ends."""
    most_registers: int = 0
    """Registers that a thread may have, where more would leave room for fewer programs at a time;
    0 for as many as there are."""

    @property
    def elements(self) -> int:
        """Scores of a tile that a thread holds."""
        return self.block_m * self.block_n // (32 * self.warps * max(1, self.consumers))

    def __str__(self) -> str:
        """For people."""
        text = f"{self.block_m} x {self.block_n} tiles, {self.stages} stages, "
        if self.consumers:
            text += f"{self.consumers} warpgroups of {self.registers} registers"
        else:
            text += f"{self.warps} warps"
            text += f" of {self.most_registers} registers" * bool(self.most_registers)
        text += ", one loop" * (not self.peeled) + ", rounded early" * self.early
        return text + ", persistent" * self.persistent


MAX_SPILLS = 48
"""Spilled registers a thread from which the next candidate is tried."""
MAX_SPILLS_OF_HALF = 96
"""The same where a config says how many registers there are: what spills is mostly not in loops."""
INTERPRETED = (Config(32, 32, 4, 1),)


def is_hopeless(config: Config, spilled: Config) -> bool:
    """Return True if ``config`` would spill no fewer registers than ``spilled`` did.

    Its threads hold more, in no more registers, or it differs in what lies in shared memory alone.
    """
    holds_more = config.elements > spilled.elements and config.registers <= spilled.registers
    return holds_more or replace(config, stages=0) == replace(spilled, stages=0)


def shared_memory_of(target: str) -> int:
    """Bytes of shared memory of a target such as ``cuda:90``; a cautious figure if unknown."""
    return SHARED_MEMORY.get(target, _SMALLEST_SHARED)
