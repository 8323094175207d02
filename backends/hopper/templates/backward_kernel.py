"""A backward kernel itself: which tile a program has, and what its warpgroups share.

Follows ``backward_shared``, then ``backward`` or ``backward_wide``, in one module.
"""
# ruff: noqa: F821

#: begin


@gluon.jit
def attention_backward_kv(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, SUMS, DK, DV_OUT,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, padded,
    #: learned
    #: parameters
    #: kv_pass_lists
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    Q_KIND: gl.constexpr, KV_KIND: gl.constexpr,
):
    """One program: one key-value tile of one kv head, summed over its group of query heads.

    Descriptors are of (batch, heads, length, head dim), dQ in fp32 and before the scale; those of
    the row statistics are of (batch * heads * padded,), see ``statistics_rows``. DK (batch,
    kv_heads, kv_len, HEAD_DIM) and DV_OUT are contiguous. Where a factor or columns of the score
    learn: FACTOR_SUMS (batch, heads, tiles, 2) and COLUMN_SUMS (batch, heads, kv_len), fp32.
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
    ds_s = gl.allocate_shared_memory(HALF, [1 if WIDE else 2, BLOCK_N, BLOCK_M], SHARED)
    if WIDE:
        # Rows of eight lie in as many banks.
        ROTATED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        steep_s = gl.allocate_shared_memory(gl.float32, [BLOCK_N, BLOCK_M], ROTATED)
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
