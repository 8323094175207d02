"""Backward kernel for Hopper: dQ, dK and dV in one pass over key-value tiles.

A producer warpgroup loads; two consumer warpgroups own half of the keys each. They share dS through
shared memory, so that each of them makes half of dQ, which it adds to fp32 sums in global memory,
straight from registers (``library.add_to_sums``).

Algorithm: T. Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2; J. Shah et al., FlashAttention-3
(arXiv 2407.08608), section 3 for the roles of warps. With P the weights, dP = dO V^T and delta =
rowsum(dO * O) - dlse, the gradient of the final score is dS = P * (dP - delta).
"""
# ruff: noqa: F821

#: begin
"""Backward kernel: dQ, dK and dV by key-value tile, by a producer and two consumer warpgroups.

With P the weights, dP = dO V^T and delta = rowsum(dO * O) - dlse, the gradient of the final score
is dS = P * (dP - delta) (FlashAttention-2, arXiv 2307.08691, algorithm 2).
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait,
)

from attndsl.backends.hopper import dialect as tl
from attndsl.backends.hopper.library import add_to_sums, count_up, finish, meet, places_of
from attndsl.backends.hopper.shim import tma_load
from attndsl.backends.triton.library import positions, shift_of_positions
#: imports

#: flags
LOG2E = tl.constexpr(1.4426950408889634)


#: functions


@gluon.jit
def count_tiles(
    tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    #: parameters
    #: kv_pass_lists
):
    """As ``kv_pass_tiles``, and how many tiles need the mask's code: all, beside missing keys."""
    full_tiles, partial_tiles, first_live, first_full = kv_pass_tiles(
        tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
        BLOCK_M, BLOCK_N,
        #: arguments
        #: kv_pass_lists
    )
    # Missing keys are zeros, whose weights may be infinite: infinity times zero would spoil dQ.
    ragged = (tile + 1) * BLOCK_N > kv_len
    masked = partial_tiles + full_tiles
    if PEELED:
        masked = gl.where(ragged, masked, partial_tiles)
    return full_tiles, partial_tiles, first_live, first_full, masked


@gluon.jit
def q_tile_of(
    step, partial_tiles, full_tiles, first_live, first_full, tile,
    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PARTIAL: gl.constexpr,
    #: parameters
    #: kv_pass_lists
):
    """Index of query tile number ``step``: PARTIAL ones, then FULL ones."""
    found = 0
    if KV_PASS_HAS_FULL:
        found = kv_pass_full_tile(
            step - partial_tiles, full_tiles, first_live, first_full, tile,
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: kv_pass_lists
        )
    if PARTIAL and KV_PASS_HAS_PARTIAL:
        partial = kv_pass_partial_tile(
            step, full_tiles, first_live, first_full, tile,
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: kv_pass_lists
        )
        found = gl.where(step < partial_tiles, partial, found)
    return found


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc,
    q_s, k_s, v_s, do_s, lse_s, delta_s, k_full, v_full, q_full, do_full, q_empty, do_empty,
    tile, b, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, padded,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_KIND: gl.constexpr,
    KV_KIND: gl.constexpr,
    #: parameters
    #: kv_pass_lists
):
    """Load k and v once, then every query tile's q, dO and row statistics."""
    q_offset = shift_of_positions(q_origin, Q_KIND)
    kv_offset = shift_of_positions(kv_origin, KV_KIND)
    mbarrier.expect(k_full, k_desc.block_type.nbytes)
    tma_load(k_desc, [b, hkv, tile * BLOCK_N, 0], k_full, k_s.index(0))
    mbarrier.expect(v_full, v_desc.block_type.nbytes)
    tma_load(v_desc, [b, hkv, tile * BLOCK_N, 0], v_full, v_s.index(0))
    group = heads // kv_heads
    count = 0
    for member in range(0, group):
        h = hkv * group + member
        full_tiles, partial_tiles, first_live, first_full, masked = count_tiles(
            tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: kv_pass_lists
        )
        row = (b * heads + h) * padded
        for step in range(0, partial_tiles + full_tiles):
            first = BLOCK_M * q_tile_of(
                step, partial_tiles, full_tiles, first_live, first_full, tile,
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                BLOCK_M, BLOCK_N, True,
                #: arguments
                #: kv_pass_lists
            )
            stage = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(q_empty.index(stage), phase ^ 1)
            q_ready = q_full.index(stage)
            mbarrier.expect(q_ready, q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
            tma_load(lse_desc, [row + first], q_ready, lse_s.index(stage))
            tma_load(q_desc, [b, h, first, 0], q_ready, q_s.index(stage))
            mbarrier.wait(do_empty.index(stage), phase ^ 1)
            do_ready = do_full.index(stage)
            mbarrier.expect(do_ready, do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
            tma_load(delta_desc, [row + first], do_ready, delta_s.index(stage))
            tma_load(do_desc, [b, h, first, 0], do_ready, do_s.index(stage))
            count += 1


@gluon.jit
def parts_of_queries(
    first, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin,
    BLOCK_M: gl.constexpr, Q_KIND: gl.constexpr,
    #: parameters
):
    """What is looked up by the tile's queries: by neighbouring threads, once."""
    rows = first + gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return q_parts_of_pairs(
        b, h, hkv, positions(rows, q_len, q_origin, Q_KIND),
        batch, heads, kv_heads, q_len, kv_len,
        #: arguments
    )


@gluon.jit
def weights_of_tile(
    score, q_parts, kv_parts, lse2, columns, column2, first, kv, scale, origin, ragged,
    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin,
    BLOCK_M: gl.constexpr, Q_KIND: gl.constexpr, PARTIAL: gl.constexpr, SCORES: gl.constexpr,
    #: parameters
):
    """From the tile's k . q: the softmax weights, and the derivative of the score by its raw one.

    ``column2`` is what the score has of each key alone, in base 2.
    """
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    rows = count_up(first, BLOCK_M, QUERIES)
    places = places_of(first, q_len, q_origin, Q_KIND, BLOCK_M, QUERIES)
    derivative = 1.0
    if HAS_ROW:
        part = row_of_score(
            b, h, hkv, places, origin, q_parts,
            batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        lse2 = lse2 - part * LOG2E
    if PARTIAL or MODIFIED or HAS_DERIVATIVE:
        q = places[None, :]
        live = (rows < q_len)[None, :] & (columns < kv_len)[:, None]
        raw = score * scale
    if HAS_DERIVATIVE:
        derivative, _ = gl.broadcast(
            derivative_of_pair(
                raw, live, q_parts, kv_parts, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
                #: arguments
            ),
            score,
        )
    if MODIFIED:
        final, _ = gl.broadcast(
            score_of_pair(
                raw, live, q_parts, kv_parts, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
                #: arguments
            ),
            score,
        )
        exponent = final * (OUTER * LOG2E)
    else:
        exponent = score * (scale * (OUTER * LOG2E))
    if HAS_COLUMN:
        exponent = exponent + column2[:, None]
    exponent = exponent - lse2[None, :]
    if PARTIAL and MASKED:
        allowed = mask_of_pair(
            raw, live, q_parts, kv_parts, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        exponent = gl.where(allowed, exponent, float("-inf"))
    if PARTIAL:
        if ragged | (first + BLOCK_M > q_len):
            exponent = gl.where(live, exponent, float("-inf"))
    return gl.exp2(exponent), derivative


@gluon.jit
def add_query_tile(
    PART: gl.constexpr, count, q_tile_index, dk, dv, zeros, no_dq, kv_parts, columns, column2, kv, origin,
    ragged, SUMS, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, q_full, do_full, q_empty, do_empty,
    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, padded,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr, Q_KIND: gl.constexpr, PARTIAL: gl.constexpr, SCORES: gl.constexpr,
    WEIGHTS: gl.constexpr, SLOPES: gl.constexpr, HALF: gl.constexpr,
    #: parameters
):
    """Add one query tile's part to dK (before the scale), dV and dQ. Tiles are (keys, queries)."""
    KEYS: gl.constexpr = BLOCK_N // 2
    # Each warpgroup makes half of dQ: half of its columns, or of more than 64 rows half of these.
    WIDTH: gl.constexpr = D // 2
    stage = count % STAGES
    phase = (count // STAGES) & 1
    first = q_tile_index * BLOCK_M
    # An index that no compiler knows to be zero. It would compute the products' descriptors before the
    # loop, 64 bits for every 16 columns of k and of v, and spill them; then each step waits for
    # their reload behind the sums of dQ.
    only = count >> 31
    k_tile = k_s.index(only).reshape([BLOCK_N, D])
    q = q_s.index(stage).reshape([BLOCK_M, D])
    do = do_s.index(stage).reshape([BLOCK_M, DV])
    mbarrier.wait(q_full.index(stage), phase)
    scoring = warpgroup_mma(
        k_tile.slice(PART * KEYS, KEYS, dim=0), q.permute((1, 0)), zeros, use_acc=False,
        is_async=True,
    )
    mbarrier.wait(do_full.index(stage), phase)
    v_part = v_s.index(only).reshape([BLOCK_N, DV]).slice(PART * KEYS, KEYS, dim=0)
    weighing = warpgroup_mma(v_part, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    q_parts = parts_of_queries(
        first, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, BLOCK_M, Q_KIND,
        #: arguments
    )
    score = warpgroup_mma_wait(1, deps=[scoring])
    lse2 = lse_s.index(stage).load(gl.SliceLayout(0, SCORES))
    weight, derivative = weights_of_tile(
        score, q_parts, kv_parts, lse2, columns, column2, first, kv, scale, origin, ragged,
        b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin,
        BLOCK_M, Q_KIND, PARTIAL, SCORES,
        #: arguments
    )
    delta = delta_s.index(stage).load(gl.SliceLayout(0, SCORES))
    weight_half = gl.convert_layout(weight.to(HALF), WEIGHTS)
    steep = weight
    if HAS_DERIVATIVE:
        steep = weight * derivative
        if PARTIAL:
            # A dead pair's derivative may be infinite.
            steep = gl.where(weight == 0.0, 0.0, steep)
    if PAIRWISE_DERIVATIVE:
        # One value instead of two, while dP is computed.
        finish(steep, q_len >> 31)
    dweight = warpgroup_mma_wait(0, deps=[weighing])
    slope = steep * (dweight - delta[None, :])
    slope_half = slope.to(HALF)
    shared = ds_s.index(count % 2)
    shared.slice(PART * KEYS, KEYS, dim=0).store(slope_half)
    slope_operand = gl.convert_layout(slope_half, SLOPES)
    # dV comes after dS: issuing it earlier spills registers.
    adding_v = warpgroup_mma(weight_half, do, dv, is_async=True)
    fence_async_shared()
    meet()
    # dQ comes before dK, so that it is added up while dK is computed.
    if BLOCK_M == 64:
        slopes, keys = shared, k_tile.slice(PART * WIDTH, WIDTH, dim=1)
    else:
        slopes, keys = shared.slice(PART * 64, 64, dim=1), k_tile
    making_q = warpgroup_mma(slopes.permute((1, 0)), keys, no_dq, use_acc=False, is_async=True)
    dv = warpgroup_mma_wait(1, deps=[adding_v])
    mbarrier.arrive(do_empty.index(stage), count=1)
    adding_k = warpgroup_mma(slope_operand, q, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[making_q])
    row = (b * heads + h).to(gl.int64) * padded + first
    add_to_sums(SUMS + row * D + PART * (BLOCK_M * D // 2), dq)
    dk = warpgroup_mma_wait(0, deps=[adding_k])
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def consume(
    PART: gl.constexpr, SUMS, DK, DV_OUT,
    q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s,
    k_full, v_full, q_full, do_full, q_empty, do_empty,
    tile, b, hkv, scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, padded,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_KIND: gl.constexpr,
    KV_KIND: gl.constexpr, HALF: gl.constexpr,
    #: parameters
    #: kv_pass_lists
):
    """dK and dV of the tile's keys number ``PART``, and half the columns of dQ."""
    KEYS: gl.constexpr = BLOCK_N // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DK_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DV_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    DQ_WIDTH: gl.constexpr = D // 2 if BLOCK_M == 64 else D
    DQ_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_WIDTH, 16])
    SLOPES: gl.constexpr = gl.DotOperandLayout(0, DK_ROWS, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, DV_ROWS, 2)
    q_offset = shift_of_positions(q_origin, Q_KIND)
    kv_offset = shift_of_positions(kv_origin, KV_KIND)
    own = tile * BLOCK_N + PART * KEYS
    columns = own + gl.arange(0, KEYS, layout=gl.SliceLayout(1, SCORES))
    places = positions(columns, kv_len, kv_origin, KV_KIND)
    kv = places[:, None]
    origin = tile * BLOCK_N + kv_offset
    ragged = (tile + 1) * BLOCK_N > kv_len
    dk = gl.zeros([KEYS, D], gl.float32, layout=DK_ROWS)
    dv = gl.zeros([KEYS, DV], gl.float32, layout=DV_ROWS)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, layout=SCORES)
    no_dq = gl.zeros([64, DQ_WIDTH], gl.float32, layout=DQ_ROWS)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)
    group = heads // kv_heads
    count = 0
    for member in range(0, group):
        h = hkv * group + member
        full_tiles, partial_tiles, first_live, first_full, masked = count_tiles(
            tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: kv_pass_lists
        )
        kv_parts = kv_parts_of_pairs(
            b, h, hkv, places, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        column2 = LOG2E * column_of_score(
            b, h, hkv, places, (places - origin).to(gl.float32), kv_parts,
            batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        factored = scale
        if HAS_FACTOR:
            factored = scale * factor_of_score(
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
                #: arguments
            )
        for step in range(0, masked):
            q_tile_index = q_tile_of(
                step, partial_tiles, full_tiles, first_live, first_full, tile,
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                BLOCK_M, BLOCK_N, True,
                #: arguments
                #: kv_pass_lists
            )
            dk, dv = add_query_tile(
                PART, count, q_tile_index, dk, dv, zeros, no_dq, kv_parts, columns, column2, kv, origin,
                ragged, SUMS, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, q_full, do_full, q_empty, do_empty,
                factored, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, padded,
                BLOCK_M, BLOCK_N, D, DV, STAGES, Q_KIND, True, SCORES, WEIGHTS, SLOPES, HALF,
                #: arguments
            )
            count += 1
        if KV_PASS_HAS_FULL and PEELED:
            for step in range(masked, partial_tiles + full_tiles):
                q_tile_index = q_tile_of(
                    step, partial_tiles, full_tiles, first_live, first_full, tile,
                    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                    BLOCK_M, BLOCK_N, False,
                    #: arguments
                    #: kv_pass_lists
                )
                dk, dv = add_query_tile(
                    PART, count, q_tile_index, dk, dv, zeros, no_dq, kv_parts, columns, column2, kv, origin,
                    ragged, SUMS, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s,
                    q_full, do_full, q_empty, do_empty,
                    factored, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, padded,
                    BLOCK_M, BLOCK_N, D, DV, STAGES, Q_KIND, False, SCORES, WEIGHTS, SLOPES, HALF,
                    #: arguments
                )
                count += 1
    # Through shared memory, so that each thread stores 16 bytes.
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = own + gl.arange(0, KEYS, layout=gl.SliceLayout(1, STORED))
    fields = gl.arange(0, D, layout=gl.SliceLayout(0, STORED))
    dk_head = DK + (b * kv_heads + hkv).to(gl.int64) * kv_len * HEAD_DIM
    inside = (keys < kv_len)[:, None] & (fields < HEAD_DIM)[None, :]
    offsets = keys.to(gl.int64)[:, None] * HEAD_DIM + fields[None, :]
    gl.store(dk_head + offsets, gl.convert_layout((dk * scale).to(HALF), STORED), mask=inside)
    fields = gl.arange(0, DV, layout=gl.SliceLayout(0, STORED))
    dv_head = DV_OUT + (b * kv_heads + hkv).to(gl.int64) * kv_len * VALUE_DIM
    inside = (keys < kv_len)[:, None] & (fields < VALUE_DIM)[None, :]
    offsets = keys.to(gl.int64)[:, None] * VALUE_DIM + fields[None, :]
    gl.store(dv_head + offsets, gl.convert_layout(dv.to(HALF), STORED), mask=inside)


@gluon.jit
def attention_backward_kv(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, SUMS, DK, DV_OUT,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, padded,
    #: parameters
    #: kv_pass_lists
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    Q_KIND: gl.constexpr, KV_KIND: gl.constexpr,
):
    """One program: one key-value tile of one kv head, summed over its group of query heads.

    Descriptors are of (batch, heads, length, head dim), dQ in fp32 and before the scale; those of
    the row statistics are of (batch * heads * padded,), see ``statistics_rows``. DK (batch,
    kv_heads, kv_len, HEAD_DIM) and DV_OUT are contiguous.
    """
    HALF: gl.constexpr = q_desc.dtype
    kv_tiles = tl.cdiv(kv_len, BLOCK_N)
    tile = gl.program_id(0) % kv_tiles
    if KV_PASS_DESCENDING:
        tile = kv_tiles - 1 - tile
    head_of_batch = gl.program_id(0) // kv_tiles
    b = head_of_batch // kv_heads
    hkv = head_of_batch % kv_heads
    q_s = gl.allocate_shared_memory(HALF, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(HALF, [STAGES, 1, 1, BLOCK_M, DV], do_desc.layout)
    k_s = gl.allocate_shared_memory(HALF, [1, 1, 1, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(HALF, [1, 1, 1, BLOCK_N, DV], v_desc.layout)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_s = gl.allocate_shared_memory(HALF, [2, BLOCK_N, BLOCK_M], SHARED)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=2)
        mbarrier.init(do_empty.index(stage), count=2)
    #: partitions
