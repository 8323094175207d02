"""Tangents of a query tile's output and log-sum-exp. Follows ``weights.py`` in one module.

With P the weights and a dot for the derivative along the tangents: dot(lse) = sum P dot(S) over a
row's pairs and its sink, and dot(O) = sum (P dot(S) V + P dot(V)) - dot(lse) O, so that one pass over
the keys needs no row sum beforehand (``backends/dense/dense_jvp.py`` has the formulas in torch).
"""
# ruff: noqa: F821

#: begin


@triton.jit
def moved_score(tiles, keys_moved, first, weights, pairs, scale, scope, PARTIAL: tl.constexpr):
    """The final score's tangent; where the slope is infinite, one that does not move has none."""
    q_tile, q_moved, k_tile = tiles
    if HAS_TANGENT_Q:
        moved = dot(q_moved, tl.trans(k_tile), PRECISION, UPCAST)
    else:
        moved = tl.zeros(weights.raw.shape, tl.float32)
    if HAS_TANGENT_K:
        k_moved = load_tile(keys_moved.k, first, scope.sizes.kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
        moved = dot_add(q_tile, tl.trans(k_moved), moved, PRECISION, UPCAST)
    moved = moved * scale
    if MODIFIED:
        slope = derivative_of_pair(weights.raw, weights.live, pairs.q, pairs.kv, scope)
        moved = tl.where(moved == 0.0, 0.0, moved * slope)
    if HAS_TANGENT_SCORE:
        moved = moved + moved_score_of_pair(weights.raw, weights.live, pairs.q, pairs.kv, scope)
    return moved


@triton.jit
def moved_weights(tiles, keys_moved, first, weights, pairs, scale, scope, PARTIAL: tl.constexpr):
    """The tangents of a tile's weights, before dot(lse) is taken off."""
    moved = moved_score(tiles, keys_moved, first, weights, pairs, scale, scope, PARTIAL)
    if MODIFIED or OWN_WEIGHTS:
        # Whichever is 0 leaves nothing, be the other infinite.
        moved = tl.where(
            (weights.p_slope == 0.0) | (moved == 0.0), 0.0, weights.p_slope * moved
        )
    else:
        moved = weights.p_slope * moved
    if HAS_TANGENT_WEIGHT:
        moved = moved + moved_weight_of_pair(weights.final, weights.live, pairs.q, pairs.kv, scope)
    if PARTIAL:
        moved = tl.where(weights.live, moved, 0.0)
    return moved


@triton.jit
def dropped(moved, weights, pairs, corner, scope, ROWS: tl.constexpr):
    """Weights and their tangents where dropout kept the pairs."""
    drop = drop_probability(scope)
    stays = kept_of_tile(corner.q, corner.kv, drop, pairs.q, pairs.kv, scope, ROWS, BLOCK_N)
    keep = keep_factor(stays, drop)
    if HAS_TANGENT_WEIGHTS:
        moved = moved * keep
    if HAS_TANGENT_DROPOUT:
        # keep is 1 / (1 - p), whose derivative is its square; outside of [0, 1) it is constant.
        moved_p = moved_dropout_of_pair(weights.raw, weights.live, pairs.q, pairs.kv, scope)
        varies = (weights.p != 0.0) & (drop >= 0.0) & (drop < 1.0)
        moved += tl.where(varies, weights.p * moved_p * keep * keep, 0.0)
    return weights.p * keep, moved


@triton.jit
def add_key_tile(
    tangents, query, q_moved, kv_tile, keys, keys_moved, scale, scope, PARTIAL: tl.constexpr
):
    """Add one key-value tile's part to the tangents."""
    sizes = scope.sizes
    acc, dlse, rounded = tangents
    corner = Corner(query.first, kv_tile * BLOCK_N)
    columns = corner.kv + tl.arange(0, BLOCK_N)
    k_tile = load_tile(keys.k, corner.kv, sizes.kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
    kv = positions(columns, sizes.kv_len, keys.origin, KV_KIND)[None, :]
    s = dot(query.q, tl.trans(k_tile), PRECISION, UPCAST)
    pairs = Pairs(
        query.places, kv, query.exists[:, None], (columns < sizes.kv_len)[None, :]
    )
    lse = LogSum(query.lse.shift[:, None], query.lse.rest[:, None])
    weights = weights_of_tile(s, pairs, lse, scale, scope, PARTIAL)
    p = weights.p
    moved = 0.0
    if HAS_TANGENT_WEIGHTS:
        tiles = query.q, q_moved, k_tile
        moved = moved_weights(tiles, keys_moved, corner.kv, weights, pairs, scale, scope, PARTIAL)
        if not OWN_WEIGHTS:
            dlse += tl.sum(moved, 1)
    if HAS_DROPOUT:
        p, moved = dropped(moved, weights, pairs, corner, scope, query.q.shape[0])
    if HAS_TANGENT_WEIGHTS:
        v_tile = load_tile(keys.v, corner.kv, sizes.kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
        moved = moved.to(v_tile.dtype)
        if not OWN_WEIGHTS and not HAS_DROPOUT:
            rounded += tl.sum(moved.to(tl.float32), 1)
        acc = dot_add(moved, v_tile, acc, PRECISION, UPCAST)
    if HAS_TANGENT_V:
        v_moved = load_tile(keys_moved.v, corner.kv, sizes.kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
        acc = dot_add(p.to(v_moved.dtype), v_moved, acc, PRECISION, UPCAST)
    return acc, dlse, rounded


@triton.jit
def attention_tangent(
    Q, K, V, OUT, LSE, Q_MOVED, K_MOVED, V_MOVED, OUT_MOVED, LSE_MOVED,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_tqb, stride_tqh, stride_tqm, stride_tkb, stride_tkh, stride_tkn,
    stride_tvb, stride_tvh, stride_tvn,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    rows_ob, rows_oh, rows_om, together,
    #: given
):
    """One program: one query tile of one head.

    OUT and OUT_MOVED are (batch, heads, q_len, DV), their rows ``rows_ob``, ``rows_oh`` and
    ``rows_om`` apart. LSE (2, batch, heads, q_len), LSE_MOVED (batch, heads, q_len) contiguous. Of
    Q_MOVED, K_MOVED and V_MOVED those are read that move.
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
    q = positions(rows, q_len, q_origin, Q_KIND)[:, None]
    keys = Keys(
        rows_of(Tensor(K, stride_kb, stride_kh, stride_kn), head.b, head.hkv),
        rows_of(Tensor(V, stride_vb, stride_vh, stride_vn), head.b, head.hkv),
        kv_origin,
    )
    keys_moved = Keys(
        rows_of(Tensor(K_MOVED, stride_tkb, stride_tkh, stride_tkn), head.b, head.hkv),
        rows_of(Tensor(V_MOVED, stride_tvb, stride_tvh, stride_tvn), head.b, head.hkv),
        kv_origin,
    )
    q_rows = rows_of(Tensor(Q, stride_qb, stride_qh, stride_qm), head.b, head.h)
    q_tile = load_tile(q_rows, first, q_len, D, BLOCK_M, BLOCK_D, True)
    q_moved = q_tile
    if HAS_TANGENT_Q:
        q_moved_rows = rows_of(Tensor(Q_MOVED, stride_tqb, stride_tqh, stride_tqm), head.b, head.h)
        q_moved = load_tile(q_moved_rows, first, q_len, D, BLOCK_M, BLOCK_D, True)
    lse_head = LSE + head_of_batch.to(tl.int64) * q_len
    lse = load_log_sum(lse_head, rows, plane_of(sizes), rows < q_len)
    tangents = (
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    # dO and delta are a backward's.
    query = QueryTile(q_tile, 0.0, lse, 0.0, first, q, rows < q_len)
    visits = q_pass_visits(tile, shift, scope)
    for PARTIAL in tl.static_range(2):
        if (PARTIAL and Q_PASS_HAS_PARTIAL) or (not PARTIAL and Q_PASS_HAS_FULL):
            kv_tile = q_pass_tile(0, visits, tile, shift, scope, PARTIAL)
            for step in tl.range(0, visits.partial if PARTIAL else visits.full):
                tangents = add_key_tile(
                    tangents, query, q_moved, kv_tile, keys, keys_moved, scale, scope, PARTIAL
                )
                kv_tile = q_pass_tile(step + 1, visits, tile, shift, scope, PARTIAL)
    acc, dlse, rounded = tangents
    if HAS_TANGENT_SINK:
        sink = sink_of_head(scope)
        sink_moved = moved_sink_of_head(scope)
        sink_weight = tl.exp2((sink - lse.shift) * LOG2E - lse.rest)
        sink_part = tl.where(sink_weight == 0.0, 0.0, sink_weight * sink_moved)
        dlse += sink_part
        rounded += sink_part
    if not OWN_WEIGHTS:
        out_rows = rows_of_result(Tensor(OUT, rows_ob, rows_oh, rows_om), head.b, head.h, DV)
        out = load_tile(out_rows, first, q_len, DV, BLOCK_M, BLOCK_DV, True)
        # What the product's operand was rounded to cancels better; a dropped weight is not in it.
        common = dlse if HAS_DROPOUT else rounded
        acc -= common[:, None] * out.to(tl.float32)
    moved_rows = rows_of_result(Tensor(OUT_MOVED, rows_ob, rows_oh, rows_om), head.b, head.h, DV)
    store_tile(moved_rows, first, q_len, acc, DV, BLOCK_M, BLOCK_DV)
    tl.store(LSE_MOVED + head_of_batch.to(tl.int64) * q_len + rows, dlse, mask=rows < q_len)
