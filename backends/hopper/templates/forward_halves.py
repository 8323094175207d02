"""FULL tiles of the forward kernel for Hopper, half by half: while one half's scores become weights,
the other half's are computed.

For rows of few numbers, whose products take less time than their exponentials: a consumer that
waited for the scores of a whole tile would have no exponentials to compute meanwhile. Halves have no
more scores in registers than whole tiles have.

Algorithm: the pipelining within a warpgroup of J. Shah et al., FlashAttention-3 (arXiv 2407.08608),
section 3.2, a half of a tile at a time.
"""
# ruff: noqa: F821

#: begin
@gluon.jit
def weigh_half(score, row_sum, row_max, factors, q_len):
    """Packed weights of one half of a FULL tile; the sums with theirs. ``row_max`` is in base 2."""
    if SCALED_FIRST:
        score = score * factors.scale
    p = gl.exp2(score * factors.factor - row_max[:, None])
    own = gl.convert_layout(partial_row_sums(p), row_sum.type.layout, assert_trivial=True)
    row_sum = row_sum + own
    pin_before_wait(row_sum, q_len >> 31)
    return pack(p, HALF), row_sum


@gluon.jit
def attend_by_halves(first, end, softmax, q_tile, factors, memory, q_len):
    """Outputs and sums with tiles number ``first`` to ``end - 1``, of which there is one at least.

    ``softmax.p`` is that of the tile before; no weights are left that are yet to be multiplied.
    """
    k, v = memory.k, memory.v
    SIDE: gl.constexpr = BLOCK_N // 2
    HALF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    zeros = gl.zeros([ROWS, SIDE], gl.float32, layout=HALF_SCORES)
    acc, row_sum = softmax.acc, softmax.row_sum
    row_max = gl.convert_layout(
        peaks_of(softmax.row_max, factors.factor), gl.SliceLayout(1, HALF_SCORES),
        assert_trivial=True,
    )
    slot, before = slot_of(first, STAGES), slot_of(first - 1, STAGES)
    consumer_wait(k, slot)
    k_tile = k.data.index(slot.stage).reshape([BLOCK_N, D])
    scoring = multiply(q_tile, k_tile.slice(0, SIDE), zeros, HEAD_DIM)
    consumer_wait(v, before)
    v_tile = v.data.index(before.stage).reshape([BLOCK_N, DV])
    adding = warpgroup_mma(halves(softmax.p, HALF, WEIGHTS), v_tile, acc, is_async=True)
    score, acc = warpgroup_mma_wait(0, deps=[scoring, adding])
    consumer_release(v, before)
    for tile_index in range(first, end):
        slot = slot_of(tile_index, STAGES)
        k_tile = k.data.index(slot.stage).reshape([BLOCK_N, D])
        scoring = multiply(q_tile, k_tile.slice(SIDE, SIDE), zeros, HEAD_DIM)
        left, row_sum = weigh_half(score, row_sum, row_max, factors, q_len)
        consumer_wait(v, slot)
        v_tile = v.data.index(slot.stage).reshape([BLOCK_N, DV])
        operand = halves(left, HALF, WEIGHTS)
        adding = warpgroup_mma(operand, v_tile.slice(0, SIDE), acc, is_async=True)
        # Behind the last tile, once more its own scores, which nobody asks for.
        more = tile_index + 1 < end
        next_slot = slot_of(gl.where(more, tile_index + 1, tile_index), STAGES)
        consumer_wait(k, next_slot)
        k_tile = k.data.index(next_slot.stage).reshape([BLOCK_N, D])
        next_scoring = multiply(q_tile, k_tile.slice(0, SIDE), zeros, HEAD_DIM)
        score = warpgroup_mma_wait(2, deps=[scoring])
        consumer_release(k, slot, more)
        right, row_sum = weigh_half(score, row_sum, row_max, factors, q_len)
        operand = halves(right, HALF, WEIGHTS)
        adding = warpgroup_mma(operand, v_tile.slice(SIDE, SIDE), adding, is_async=True)
        score, acc = warpgroup_mma_wait(0, deps=[next_scoring, adding])
        consumer_release(v, slot)
    consumer_release(k, slot_of(end - 1, STAGES))
    return acc, row_sum


@gluon.jit
def add_last(last, acc, p, v, q_len):
    """Outputs with tile number ``last``, whose weights are those that are left."""
    slot = slot_of(last, STAGES)
    consumer_wait(v, slot)
    v_tile = v.data.index(slot.stage).reshape([BLOCK_N, DV])
    adding = warpgroup_mma(unpack(p, q_len >> 31, HALF, WEIGHTS), v_tile, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[adding])
    consumer_release(v, slot)
    return acc
