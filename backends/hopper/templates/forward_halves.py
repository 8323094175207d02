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
def weigh_half(score, sums, peak, factor, scale, q_len):
    """Packed weights of one half of a FULL tile, relative to ``peak``; the sums with theirs."""
    if SCALED_FIRST:
        score = score * scale
    weight = gl.exp2(score * factor - peak[:, None])
    own = gl.convert_layout(eighths_of_sums(weight), sums.type.layout, assert_trivial=True)
    sums = sums + own
    finish(sums, q_len >> 31)
    return pack(weight, HALF), sums


@gluon.jit
def attend_by_halves(
    first, end, acc, weight, sums, peak, q_part, k_s, v_s, k_full, k_empty, v_full, v_empty, factor,
    scale, q_len, ROWS: gl.constexpr, WEIGHTS: gl.constexpr,
):
    """Outputs and sums with tiles number ``first`` to ``end - 1``, of which there is one at least.

    ``weight`` is that of the tile before; no weights are left that are yet to be multiplied.
    """
    SIDE: gl.constexpr = BLOCK_N // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    zeros = gl.zeros([ROWS, SIDE], gl.float32, layout=SCORES)
    peak = gl.convert_layout(peak, gl.SliceLayout(1, SCORES), assert_trivial=True)
    stage, phase = slot_of(first, STAGES)
    before, phase_before = slot_of(first - 1, STAGES)
    mbarrier.wait(k_full.index(stage), phase)
    scoring = multiply(q_part, k_s.index(stage).reshape([BLOCK_N, D]).slice(0, SIDE), zeros, HEAD_DIM)
    mbarrier.wait(v_full.index(before), phase_before)
    v = v_s.index(before).reshape([BLOCK_N, DV])
    adding = warpgroup_mma(halves(weight, HALF, WEIGHTS), v, acc, is_async=True)
    score, acc = warpgroup_mma_wait(0, deps=[scoring, adding])
    mbarrier.arrive(v_empty.index(before), count=1)
    for count in range(first, end):
        stage, phase = slot_of(count, STAGES)
        k = k_s.index(stage).reshape([BLOCK_N, D])
        scoring = multiply(q_part, k.slice(SIDE, SIDE), zeros, HEAD_DIM)
        left, sums = weigh_half(score, sums, peak, factor, scale, q_len)
        mbarrier.wait(v_full.index(stage), phase)
        v = v_s.index(stage).reshape([BLOCK_N, DV])
        adding = warpgroup_mma(halves(left, HALF, WEIGHTS), v.slice(0, SIDE), acc, is_async=True)
        # Behind the last tile, once more its own scores, which nobody asks for.
        more = count + 1 < end
        then = gl.where(more, count + 1, count)
        next_stage, next_phase = slot_of(then, STAGES)
        mbarrier.wait(k_full.index(next_stage), next_phase)
        k = k_s.index(next_stage).reshape([BLOCK_N, D])
        next_scoring = multiply(q_part, k.slice(0, SIDE), zeros, HEAD_DIM)
        score = warpgroup_mma_wait(2, deps=[scoring])
        mbarrier.arrive(k_empty.index(stage), count=1, pred=more)
        right, sums = weigh_half(score, sums, peak, factor, scale, q_len)
        adding = warpgroup_mma(halves(right, HALF, WEIGHTS), v.slice(SIDE, SIDE), adding, is_async=True)
        score, acc = warpgroup_mma_wait(0, deps=[next_scoring, adding])
        mbarrier.arrive(v_empty.index(stage), count=1)
    stage, phase = slot_of(end - 1, STAGES)
    mbarrier.arrive(k_empty.index(stage), count=1)
    return acc, sums


@gluon.jit
def add_last(last, acc, weight, v_s, v_full, v_empty, q_len, WEIGHTS: gl.constexpr):
    """Outputs with tile number ``last``, whose weights are those that are left."""
    stage, phase = slot_of(last, STAGES)
    mbarrier.wait(v_full.index(stage), phase)
    v = v_s.index(stage).reshape([BLOCK_N, DV])
    adding = warpgroup_mma(unpack(weight, q_len >> 31, HALF, WEIGHTS), v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[adding])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc
