"""Backward, first pass: dK and dV of a key-value tile. Follows ``weights.py`` in one module."""
# ruff: noqa: F821

#: begin


@triton.jit
def add_query_tile(
    grads, key_tile, q_tile_index, q_origin, operands, scale, scope, PARTIAL: tl.constexpr
):
    """Add one query tile's part to dK (before the scale), to dV, and to columns' sums.

    Tiles are (keys, queries) here. ``operands`` has the ``LogSum`` of all heads.
    """
    head, sizes = scope.head, scope.sizes
    dk, dv, sums = grads
    k_tile, v_tile = key_tile.k, key_tile.v
    corner = Corner(q_tile_index * BLOCK_M, key_tile.first)
    rows = corner.q + tl.arange(0, BLOCK_M)
    checked: tl.constexpr = PARTIAL or RAGGED_FULL
    q_tile = load_tile(operands.q, corner.q, sizes.q_len, D, BLOCK_M, BLOCK_D, checked)
    of_head = statistics_rows(head.b * sizes.heads + head.h, sizes.q_len)
    if REPAIRS:
        own = (head.b * sizes.heads + head.h).to(tl.int64) * sizes.q_len
        # As forwards store it: the rests lie behind all shifts.
        lse = load_log_sum(operands.lse.shift, own + rows, plane_of(sizes), rows < sizes.q_len)
        shift, rest = lse.shift, lse.rest
    else:
        shift = tl.load(operands.lse.shift + of_head + rows)
        rest = tl.load(operands.lse.rest + of_head + rows)
    q = positions(rows, sizes.q_len, q_origin, Q_KIND)[None, :]
    s = dot(k_tile, tl.trans(q_tile), PRECISION, UPCAST)
    pairs = Pairs(q, key_tile.places, (rows < sizes.q_len)[None, :], key_tile.exists[:, None])
    lse = LogSum(shift[None, :], rest[None, :])
    weights = weights_of_tile(s, pairs, lse, scale, scope, PARTIAL)
    do_tile = load_tile(operands.do, corner.q, sizes.q_len, DV, BLOCK_M, BLOCK_DV, checked)
    dp = dot(v_tile, tl.trans(do_tile), PRECISION, UPCAST)
    delta = tl.load(operands.delta + of_head + rows)
    kept = weights.p
    exists = weights.live & (rows < sizes.q_len)[None, :] & key_tile.exists[:, None]
    if HAS_DROPOUT:
        drop = drop_probability(scope)
        stays = kept_of_tile(
            corner.q, corner.kv, drop, pairs.q, pairs.kv, scope, BLOCK_M, k_tile.shape[0]
        )
        keep = keep_factor(tl.trans(stays), drop)
        dp = dp * keep
        kept = weights.p * keep
    if GRAD_OF_WEIGHT:
        sums = add_weight_gradients(
            sums, tl.where(exists, dp, 0.0), weights.final, exists, pairs.q, pairs.kv, scope
        )
    if not OWN_WEIGHTS:
        dp = dp - delta[None, :]
    ds = weights.p_slope * dp
    if GRAD_OF_SCORE:
        sums = add_score_gradients(
            sums, tl.where(exists, ds, 0.0), weights.raw, exists, pairs.q, pairs.kv, scope
        )
    ds = through_score(ds, weights, pairs, scope, PARTIAL)
    if REPAIRS and PARTIAL:
        kept, do_tile = for_live_pairs(kept, exists, do_tile)
        ds, q_tile = for_live_pairs(ds, exists, q_tile)
    # dV comes after dS: its operand is ready, and issuing it earlier spills registers.
    dv = dot_add(kept.to(do_tile.dtype), do_tile, dv, PRECISION, UPCAST)
    dk = dot_add(ds.to(q_tile.dtype), q_tile, dk, PRECISION, UPCAST)
    return dk, dv, sums


@triton.jit
def attention_backward_kv(
    Q, K, V, DOUT, DK, DV_OUT, LSE_SHIFT, LSE_REST, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    rows_dkb, rows_dkh, rows_dkn, rows_dvb, rows_dvh, rows_dvn, together,
    #: given
):
    """One program: dK and dV of one key-value tile, summed over the head's group of query heads.

    DK is (batch, kv_heads, kv_len, D), its rows ``rows_dkb``, ``rows_dkh`` and ``rows_dkn`` apart.
    DV_OUT (batch, kv_heads, kv_len, DV) likewise. LINE_SUMS (sums, batch, heads, kv_len) is
    contiguous; the sums are each head's own columns'.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    origins = Origins(q_origin, kv_origin)
    given = Given(
        #: given
    )
    tile, head_of_batch = place_of_item(
        tl.program_id(0), tl.cdiv(kv_len, BLOCK_N), batch * kv_heads, together,
        MASKED, KV_PASS_DESCENDING,
    )
    b = head_of_batch // kv_heads
    hkv = head_of_batch % kv_heads
    group = heads // kv_heads
    shift = shift_of(origins, Q_KIND, KV_KIND)
    first = tile * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    if REPAIRS:
        if is_number(tl.load(given.results_sum)):
            return
        # Tiles that are finite stay as they are.
        own_dk = head_of_result(Tensor(DK, rows_dkb, rows_dkh, rows_dkn), b, hkv, D)
        own_dv = head_of_result(Tensor(DV_OUT, rows_dvb, rows_dvh, rows_dvn), b, hkv, DV)
        found_dk = load_tile(
            Rows(own_dk, rows_dkn * D), first, kv_len, D, BLOCK_N, BLOCK_D, True
        )
        found_dv = load_tile(
            Rows(own_dv, rows_dvn * DV), first, kv_len, DV, BLOCK_N, BLOCK_DV, True
        )
        if is_finite(found_dk) & is_finite(found_dv):
            return
    kv = positions(columns, kv_len, kv_origin, KV_KIND)[:, None]
    k = rows_of(Tensor(K, stride_kb, stride_kh, stride_kn), b, hkv)
    k_tile = load_tile(k, first, kv_len, D, BLOCK_N, BLOCK_D, True)
    v = rows_of(Tensor(V, stride_vb, stride_vh, stride_vn), b, hkv)
    v_tile = load_tile(v, first, kv_len, DV, BLOCK_N, BLOCK_DV, True)
    key_tile = KeyTile(k_tile, v_tile, first, kv, columns < kv_len)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in tl.range(0, group):
        h = hkv * group + member
        scope = Scope(Head(b, h, hkv), sizes, given)
        operands = Operands(
            rows_of(Tensor(Q, stride_qb, stride_qh, stride_qm), b, h), k, v,
            rows_of(Tensor(DOUT, stride_gb, stride_gh, stride_gm), b, h),
            LogSum(LSE_SHIFT, LSE_REST), DELTA,
        )
        # What is summed along columns is one head's.
        grads = dk, dv, no_sums()
        visits = kv_pass_visits(tile, shift, scope)
        for PARTIAL in tl.static_range(2):
            if (PARTIAL and KV_PASS_HAS_PARTIAL) or (not PARTIAL and KV_PASS_HAS_FULL):
                q_tile = kv_pass_tile(0, visits, tile, shift, scope, PARTIAL)
                for step in tl.range(0, visits.partial if PARTIAL else visits.full):
                    grads = add_query_tile(
                        grads, key_tile, q_tile, q_origin, operands, scale, scope, PARTIAL
                    )
                    q_tile = kv_pass_tile(step + 1, visits, tile, shift, scope, PARTIAL)
        dk, dv, sums = grads
        store_sums(sums, columns, scope)
    dk_head = head_of_result(Tensor(DK, rows_dkb, rows_dkh, rows_dkn), b, hkv, D)
    dv_head = head_of_result(Tensor(DV_OUT, rows_dvb, rows_dvh, rows_dvn), b, hkv, DV)
    store_tile(Rows(dk_head, rows_dkn * D), first, kv_len, dk * scale, D, BLOCK_N, BLOCK_D)
    store_tile(Rows(dv_head, rows_dvn * DV), first, kv_len, dv, DV, BLOCK_N, BLOCK_DV)
