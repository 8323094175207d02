"""Backward, second pass: dQ of a query tile. Follows ``weights.py`` in one module."""
# ruff: noqa: F821

#: begin


@triton.jit
def with_dropout(dp, sums, weights, exists, pairs, corner, scope, ROWS: tl.constexpr):
    """dP where dropout kept the pairs, and the sums with what the chance to be dropped adds."""
    drop = drop_probability(scope)
    stays = kept_of_tile(corner.q, corner.kv, drop, pairs.q, pairs.kv, scope, ROWS, BLOCK_N)
    keep = keep_factor(stays, drop)
    dp = dp * keep
    if GRAD_OF_DROPOUT:
        # keep is 1 / (1 - p), whose derivative is its square; outside of [0, 1) it is constant.
        varies = exists & (drop >= 0.0) & (drop < 1.0)
        sums = add_dropout_gradients(
            sums, tl.where(varies, dp * weights.p * keep, 0.0), weights.raw, exists,
            pairs.q, pairs.kv, scope,
        )
    return dp, sums


@triton.jit
def add_key_tile(grads, query, kv_tile, keys, scale, scope, PARTIAL: tl.constexpr):
    """Add one key-value tile's part to dQ (before the scale), and to rows' sums."""
    sizes = scope.sizes
    dq, sums = grads
    corner = Corner(query.first, kv_tile * BLOCK_N)
    columns = corner.kv + tl.arange(0, BLOCK_N)
    k_tile = load_tile(keys.k, corner.kv, sizes.kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
    v_tile = load_tile(keys.v, corner.kv, sizes.kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
    kv = positions(columns, sizes.kv_len, keys.origin, KV_KIND)[None, :]
    s = dot(query.q, tl.trans(k_tile), PRECISION, UPCAST)
    pairs = Pairs(
        query.places, kv, query.exists[:, None], (columns < sizes.kv_len)[None, :]
    )
    lse = LogSum(query.lse.shift[:, None], query.lse.rest[:, None])
    weights = weights_of_tile(s, pairs, lse, scale, scope, PARTIAL)
    dp = dot(query.do, tl.trans(v_tile), PRECISION, UPCAST)
    exists = weights.live & query.exists[:, None] & (columns < sizes.kv_len)[None, :]
    if HAS_DROPOUT:
        dp, sums = with_dropout(dp, sums, weights, exists, pairs, corner, scope, query.q.shape[0])
    if GRAD_OF_WEIGHT:
        sums = add_weight_gradients(
            sums, tl.where(exists, dp, 0.0), weights.final, exists, pairs.q, pairs.kv, scope
        )
    if not OWN_WEIGHTS:
        dp = dp - query.delta[:, None]
    ds = weights.p_slope * dp
    if GRAD_OF_SCORE:
        sums = add_score_gradients(
            sums, tl.where(exists, ds, 0.0), weights.raw, exists, pairs.q, pairs.kv, scope
        )
    ds = through_score(ds, weights, pairs, scope, PARTIAL)
    if REPAIRS and PARTIAL:
        ds, k_tile = for_live_pairs(ds, exists, k_tile)
    dq = dot_add(ds.to(k_tile.dtype), k_tile, dq, PRECISION, UPCAST)
    return dq, sums


@triton.jit
def attention_backward_q(
    Q, K, V, DOUT, DQ, LSE_SHIFT, LSE_REST, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    rows_dqb, rows_dqh, rows_dqm, together,
    #: given
):
    """One program: dQ of one query tile of one head, and its rows' sums for other gradients.

    DQ is (batch, heads, q_len, D), its rows ``rows_dqb``, ``rows_dqh`` and ``rows_dqm`` apart.
    LINE_SUMS (sums, batch, heads, q_len) is contiguous.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    origins = Origins(q_origin, kv_origin)
    given = Given(
        #: given
    )
    tile, head_of_batch = place_of_item(
        tl.program_id(0), tl.cdiv(q_len, BLOCK_M), batch * heads, together,
        MASKED, Q_PASS_DESCENDING,
    )
    head = head_of(head_of_batch, sizes)
    scope = Scope(head, sizes, given)
    shift = shift_of(origins, Q_KIND, KV_KIND)
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    if REPAIRS:
        if is_number(tl.load(given.results_sum)):
            return
        # A tile that is finite stays as it is.
        found = rows_of_result(Tensor(DQ, rows_dqb, rows_dqh, rows_dqm), head.b, head.h, D)
        if is_finite(load_tile(found, first, q_len, D, BLOCK_M, BLOCK_D, True)):
            return
    q = positions(rows, q_len, q_origin, Q_KIND)[:, None]
    keys = Keys(
        rows_of(Tensor(K, stride_kb, stride_kh, stride_kn), head.b, head.hkv),
        rows_of(Tensor(V, stride_vb, stride_vh, stride_vn), head.b, head.hkv),
        kv_origin,
    )
    q_rows = rows_of(Tensor(Q, stride_qb, stride_qh, stride_qm), head.b, head.h)
    q_tile = load_tile(q_rows, first, q_len, D, BLOCK_M, BLOCK_D, True)
    do = rows_of(Tensor(DOUT, stride_gb, stride_gh, stride_gm), head.b, head.h)
    do_tile = load_tile(do, first, q_len, DV, BLOCK_M, BLOCK_DV, True)
    of_head = statistics_rows(head_of_batch, q_len)
    if REPAIRS:
        own = head_of_batch.to(tl.int64) * q_len
        # As forwards store it: the rests lie behind all shifts.
        lse = load_log_sum(LSE_SHIFT, own + rows, plane_of(sizes), rows < q_len)
    else:
        lse_shift = tl.load(LSE_SHIFT + of_head + rows, mask=rows < q_len, other=float("inf"))
        lse_rest = tl.load(LSE_REST + of_head + rows, mask=rows < q_len, other=0.0)
        lse = LogSum(lse_shift, lse_rest)
    delta = tl.load(DELTA + of_head + rows, mask=rows < q_len, other=0.0)
    query = QueryTile(q_tile, do_tile, lse, delta, first, q, rows < q_len)
    grads = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), no_sums()
    visits = q_pass_visits(tile, shift, scope)
    for PARTIAL in tl.static_range(2):
        if (PARTIAL and Q_PASS_HAS_PARTIAL) or (not PARTIAL and Q_PASS_HAS_FULL):
            kv_tile = q_pass_tile(0, visits, tile, shift, scope, PARTIAL)
            for step in tl.range(0, visits.partial if PARTIAL else visits.full):
                grads = add_key_tile(grads, query, kv_tile, keys, scale, scope, PARTIAL)
                kv_tile = q_pass_tile(step + 1, visits, tile, shift, scope, PARTIAL)
    dq, sums = grads
    dq_rows = rows_of_result(Tensor(DQ, rows_dqb, rows_dqh, rows_dqm), head.b, head.h, D)
    store_tile(dq_rows, first, q_len, dq * scale, D, BLOCK_M, BLOCK_D)
    store_sums(sums, rows, scope)
