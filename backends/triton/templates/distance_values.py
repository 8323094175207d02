"""Values of a part of the score by distance, one for each that a call's pairs may have."""
# ruff: noqa: F821

from typing import NamedTuple

import triton
import triton.language as tl

from attndsl.backends.device.library import shift_of
from attndsl.backends.device.records import Head, Origins, Scope, Sizes

#: imports

#: flags

#: functions


@triton.jit
def distance_values(
    DISTANCE_VALUES, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, number, told_heads,
    #: given
):
    """One program: BLOCK_M distances of a batch entry and head that values vary with.

    DISTANCE_VALUES (entries, told_heads, number) are of q - kv, from that of row 0 to the key which
    is MARGIN behind the last. A distance is like a query at that position, whose key is at 0.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    given = Given(
        #: given
    )
    tiles = tl.cdiv(number, BLOCK_M)
    line = tl.program_id(0) // tiles
    h = line % told_heads
    scope = Scope(Head(line // told_heads, h, h // (heads // kv_heads)), sizes, given)
    shift = shift_of(Origins(q_origin, kv_origin), Q_KIND, KV_KIND)
    places = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (places < number)[:, None]
    # Lookups of values by distance, which are not masked, stay inside theirs.
    distances = tl.minimum(places, number - 1) - kv_len - MARGIN
    q = (distances + (shift.q - shift.kv))[:, None]
    kv = tl.zeros([1, 1], tl.int32)
    values = score_of_pair(tl.zeros([BLOCK_M, 1], tl.float32), live, q, kv, scope)
    whole = line.to(tl.int64) * number + places
    tl.store(DISTANCE_VALUES + whole[:, None], values, mask=live)
