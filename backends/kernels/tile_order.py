"""In which order the programs of an attention kernel take its tiles (``library.place_of_item``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..base import Call
    from .config import Config
    from .kernel import Kernel


_WAITING = 8
"""Work tiles of one head that begin together, about, where they would end together too."""


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def heads_per_wave(
    call: Call, kernel: Kernel, config: Config, masked: bool, in_turn: bool = False
) -> int:
    """Heads whose tiles run side by side: query heads, or those of keys where keys own tiles.

    Programs that read the same tiles at the same time read them once from the L2 cache, so that
    heads follow one another; but query heads that share keys come together.

    Groups of heads are for two cases. Where a mask makes items differ (``masked``), the longest
    come first among the heads of a group. Where items take turns (``in_turn``), those of one head
    wait for each other, and of a group's fewer begin at once. The longest item of the last group
    takes twice the average time, and has to begin as long before the end. So groups have two or
    four items for each that runs at a time, which leaves all programs a long one and a short one. A
    group has one if more of them would read more than fits the cache: see M13 in
    docs/dev/measured.md.

    Items that take turns may be as many tiles shorter than the ones before as they begin later, if
    their own tiles are no longer than those along the loop. Then all end together, and the next
    ones wait again. Groups as large as the cache take less time in that case, and so do larger ones
    whose items wait for few others, although they read more: see M43 in docs/dev/measured.md.
    """
    batch, heads, q_len, head_dim = call.q.shape
    kv_heads, kv_len, value_dim = call.k.shape[1], call.k.shape[2], call.v.shape[3]
    group, row = heads // kv_heads, (head_dim + value_dim) * call.q.element_size()
    assert kernel.loop is not None
    if kernel.loop.own == "kv":
        # Of query heads that share keys, items are at the same one. dQ is added up in fp32.
        unit, read = 1, q_len * (row + 4 * head_dim)
        # Calls without keys have none.
        items = max(1, -(-kv_len // config.block_n))
    else:
        unit, read = group, kv_len * row
        items = -(-q_len // config.block_m) * group
    if not (masked or in_turn):
        return unit
    processors, cache = processors_of(call.q.device), _cache(call.q.device)
    units = 1
    for waves in kernel.waves:
        units = max(1, waves * processors // items)
        if units * read <= cache:
            break
    if masked and in_turn and config.block_n <= config.block_m:
        units = max(units, processors // _WAITING, cache // max(1, read))
    return min(units, batch * kv_heads) * unit


def _cache(device: torch.device) -> int:
    """Bytes of the L2 cache that heads may take: two thirds."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size) * 2 // 3
