"""Backward where all keys of a head fit: one kernel makes dQ, dK and dV, in a fixed order.

A program owns the keys of a head, and goes along the rows of the query heads that share it. dK and
dV stay in registers, dQ of a query tile is complete once all keys have been added, and delta is
made where it is used, so that no kernel runs before or after. Follows ``weights.py`` in one module.
"""
# ruff: noqa: F821

#: begin


@triton.jit
def piece_of(keys, sizes, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Keys ``FIRST ... FIRST + COUNT`` of a head."""
    first = tl.full([], FIRST, tl.int32)
    columns = first + tl.arange(0, COUNT)
    k = load_tile(keys.k, first, sizes.kv_len, D, COUNT, BLOCK_D, True)
    v = load_tile(keys.v, first, sizes.kv_len, DV, COUNT, BLOCK_DV, True)
    places = positions(columns, sizes.kv_len, keys.origin, KV_KIND)
    return KeyTile(k, v, first, places, columns < sizes.kv_len)


@triton.jit
def query_tile(operands, out, dlse, first, head_of_batch, q_origin, sizes):
    """Rows from ``first`` on: q, dO, log-sum-exp, and delta, which is stored too.

    ``dlse`` has a stride of 0 where there is no gradient of the log-sum-exp.
    """
    rows = first + tl.arange(0, BLOCK_M)
    exists = rows < sizes.q_len
    q = load_tile(operands.q, first, sizes.q_len, D, BLOCK_M, BLOCK_D, True)
    do = load_tile(operands.do, first, sizes.q_len, DV, BLOCK_M, BLOCK_DV, True)
    out_tile = load_tile(out, first, sizes.q_len, DV, BLOCK_M, BLOCK_DV, True)
    row = head_of_batch.to(tl.int64) * sizes.q_len + rows
    lse = load_log_sum(operands.lse, row, plane_of(sizes), exists)
    delta = tl.sum(out_tile.to(tl.float32) * do.to(tl.float32), 1)
    delta -= tl.load(dlse.base + row, mask=rows < sizes.q_len * dlse.stride, other=0.0)
    delta = tl.where(lse.shift == float("inf"), 0.0, delta)
    tl.store(operands.delta + statistics_rows(head_of_batch, sizes.q_len) + rows, delta)
    places = positions(rows, sizes.q_len, q_origin, Q_KIND)
    return QueryTile(q, do, lse, delta, first, places, exists)


@triton.jit
def add_piece(grads, query, piece, scale, scope, NUMBER: tl.constexpr):
    """Add what piece NUMBER of the keys gives to dQ and dK (before the scale), and to dV."""
    dq, dk, dv = grads
    # A score of its own may make NaN of the zeros that rows beyond q_len have.
    PARTIAL: tl.constexpr = MASKED or MODIFIED or OWN_WEIGHTS or NUMBER == PIECES - 1
    s = dot(query.q, tl.trans(piece.k), PRECISION, UPCAST)
    pairs = Pairs(
        query.places[:, None], piece.places[None, :], query.exists[:, None], piece.exists[None, :]
    )
    lse = LogSum(query.lse.shift[:, None], query.lse.rest[:, None])
    weights = weights_of_tile(s, pairs, lse, scale, scope, PARTIAL)
    dp = dot(query.do, tl.trans(piece.v), PRECISION, UPCAST)
    kept = weights.p
    if HAS_DROPOUT:
        drop = drop_probability(scope)
        stays = kept_of_tile(
            query.first, piece.first, drop, pairs.q, pairs.kv, scope, BLOCK_M, piece.k.shape[0]
        )
        keep = keep_factor(stays, drop)
        dp = dp * keep
        kept = weights.p * keep
    if not OWN_WEIGHTS:
        dp = dp - query.delta[:, None]
    ds = through_score(weights.p_slope * dp, weights, pairs, scope, PARTIAL)
    ds = ds.to(query.q.dtype)
    dv = dot_add(tl.trans(kept.to(query.do.dtype)), query.do, dv, PRECISION, UPCAST)
    dk = dot_add(tl.trans(ds), query.q, dk, PRECISION, UPCAST)
    dq = dot_add(ds, piece.k, dq, PRECISION, UPCAST)
    return dq, dk, dv


@triton.jit
def store_piece(dk, dv, results, head, scale, sizes, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Store dK and dV of keys ``FIRST ... FIRST + COUNT``."""
    first = tl.full([], FIRST, tl.int32)
    dk_rows = rows_of_result(results[0], head.b, head.hkv, D)
    dv_rows = rows_of_result(results[1], head.b, head.hkv, DV)
    store_tile(dk_rows, first, sizes.kv_len, dk * scale, D, COUNT, BLOCK_D)
    store_tile(dv_rows, first, sizes.kv_len, dv, DV, COUNT, BLOCK_DV)


@triton.jit
def attention_short_backward(
    Q, K, V, OUT, DOUT, DQ, DK, DV_OUT, LSE, DLSE, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    rows_dqb, rows_dqh, rows_dqm, rows_dkb, rows_dkh, rows_dkn, rows_dvb, rows_dvh, rows_dvn,
    has_dlse,
    #: given
):
    """One program: dK and dV of one head of keys, and dQ of the query heads that share it.

    Rows of gradients are ``rows_...`` apart. LSE is (2, batch, heads, q_len), DLSE (batch, heads, q_len), both contiguous, and
    DLSE is read if ``has_dlse`` is 1. DELTA is padded (``statistics_rows``).
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    given = Given(
        #: given
    )
    b = tl.program_id(0)
    hkv = tl.program_id(1)
    group = heads // kv_heads
    keys = Keys(
        rows_of(Tensor(K, stride_kb, stride_kh, stride_kn), b, hkv),
        rows_of(Tensor(V, stride_vb, stride_vh, stride_vn), b, hkv),
        kv_origin,
    )
    piece = piece_of(keys, sizes, 0, KEYS_0)
    dk = tl.zeros([KEYS_0, BLOCK_D], tl.float32)
    dv = tl.zeros([KEYS_0, BLOCK_DV], tl.float32)
    if PIECES > 1:
        second = piece_of(keys, sizes, KEYS_0, KEYS_1)
        second_dk = tl.zeros([KEYS_1, BLOCK_D], tl.float32)
        second_dv = tl.zeros([KEYS_1, BLOCK_DV], tl.float32)
    # One loop for all rows of all heads: two would keep addresses of both in registers.
    h = hkv * group
    first = tl.full([], 0, tl.int32)
    tiles = tl.cdiv(q_len, BLOCK_M)
    for item in tl.range(0, group * tiles):
        scope = Scope(Head(b, h, hkv), sizes, given)
        operands = Operands(
            rows_of(Tensor(Q, stride_qb, stride_qh, stride_qm), b, h), keys.k, keys.v,
            rows_of(Tensor(DOUT, stride_gb, stride_gh, stride_gm), b, h),
            LSE, DELTA,
        )
        out = rows_of(Tensor(OUT, stride_ob, stride_oh, stride_om), b, h)
        query = query_tile(
            operands, out, Rows(DLSE, has_dlse), first, b * heads + h, q_origin, sizes
        )
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        dq, dk, dv = add_piece((dq, dk, dv), query, piece, scale, scope, 0)
        if PIECES > 1:
            dq, second_dk, second_dv = add_piece(
                (dq, second_dk, second_dv), query, second, scale, scope, 1
            )
        dq_rows = rows_of_result(Tensor(DQ, rows_dqb, rows_dqh, rows_dqm), b, h, D)
        store_tile(dq_rows, first, q_len, dq * scale, D, BLOCK_M, BLOCK_D)
        first += BLOCK_M
        h = tl.where(first >= q_len, h + 1, h)
        first = tl.where(first >= q_len, 0, first)
    # Rows of padding have no gradient.
    padded = tl.cdiv(q_len, STATISTICS_PADDING) * (STATISTICS_PADDING // BLOCK_M)
    for member in tl.range(0, group):
        number = b * heads + hkv * group + member
        delta_rows = DELTA + statistics_rows(number, q_len) + tl.arange(0, BLOCK_M)
        for tile in tl.range(tiles, padded):
            tl.store(delta_rows + tile * BLOCK_M, tl.zeros([BLOCK_M], tl.float32))
    results = Tensor(DK, rows_dkb, rows_dkh, rows_dkn), Tensor(DV_OUT, rows_dvb, rows_dvh, rows_dvn)
    head = Head(b, hkv * group, hkv)
    store_piece(dk, dv, results, head, scale, sizes, 0, KEYS_0)
    if PIECES > 1:
        store_piece(second_dk, second_dv, results, head, scale, sizes, KEYS_0, KEYS_1)
