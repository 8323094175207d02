"""Sums over a tile of pairs. Follows ``weights.py`` in one module, its kernel follows."""
# ruff: noqa: F821

#: begin


@triton.jit
def lives_of_tile(corner, origins, scope):
    """Tell if some, and if all pairs of a tile take part."""
    sizes = scope.sizes
    rows = corner.q + tl.arange(0, BLOCK_M)
    columns = corner.kv + tl.arange(0, BLOCK_N)
    live = (rows < sizes.q_len)[:, None] & (columns < sizes.kv_len)[None, :]
    if MASKED and not MASK_READS_SCORE:
        q = positions(rows, sizes.q_len, origins.q, Q_KIND)[:, None]
        kv = positions(columns, sizes.kv_len, origins.kv, KV_KIND)[None, :]
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        live = live & mask_of_pair(s, live, q, kv, scope)
    counted = tl.sum(tl.sum(live.to(tl.int32), 1), 0)
    every = counted == BLOCK_M * BLOCK_N
    if MASK_READS_SCORE:
        every = every & False
    return counted > 0, every


@triton.jit
def add_pairs(sums, query, keys, scale, scope, PARTIAL: tl.constexpr):
    """The sums after adding these pairs."""
    pairs = Pairs(query.places, keys.places, query.exists[:, None], keys.exists[None, :])
    # Both before what takes either, so that the second runs meanwhile.
    s = dot(query.q, tl.trans(keys.k), PRECISION, UPCAST)
    dp = dot(query.do, tl.trans(keys.v), PRECISION, UPCAST)
    lse = LogSum(query.lse.shift[:, None], query.lse.rest[:, None])
    weights = weights_of_tile(s, pairs, lse, scale, scope, PARTIAL)
    live = weights.live
    if HAS_DROPOUT:
        drop = drop_probability(scope)
        stays = kept_of_tile(
            query.first, keys.first, drop, pairs.q, pairs.kv, scope,
            query.q.shape[0], keys.k.shape[0],
        )
        dp = dp * keep_factor(stays, drop)
    if GRAD_OF_WEIGHT:
        sums = add_weight_gradients(
            sums, tl.where(live, dp, 0.0), weights.final, live, pairs.q, pairs.kv, scope
        )
    if not OWN_WEIGHTS:
        dp = dp - query.delta[:, None]
    if GRAD_OF_SCORE:
        ds = tl.where(live, weights.p_slope * dp, 0.0)
        sums = add_score_gradients(sums, ds, weights.raw, live, pairs.q, pairs.kv, scope)
    return sums


@triton.jit
def add_tile(sums, corner, q, kv, operands, scale, scope, PARTIAL: tl.constexpr):
    """The sums with what the tile from ``corner`` on adds.

    ``q`` and ``kv`` are logical positions. ``operands`` has the ``LogSum``. PARTIAL: the
    tile reaches beyond the lengths, or has dead pairs.
    """
    # Triton's interpreter counts loops in numbers of Python.
    sizes = scope.sizes
    first = corner.q + tl.full([], 0, tl.int32)
    kv_first = corner.kv + tl.full([], 0, tl.int32)
    rows = first + tl.arange(0, BLOCK_M)
    columns = kv_first + tl.arange(0, BLOCK_N)
    q_tile = load_tile(operands.q, first, sizes.q_len, D, BLOCK_M, BLOCK_D, PARTIAL)
    k_tile = load_tile(operands.k, kv_first, sizes.kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
    v_tile = load_tile(operands.v, kv_first, sizes.kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
    do_tile = load_tile(operands.do, first, sizes.q_len, DV, BLOCK_M, BLOCK_DV, PARTIAL)
    # A masked load with another value than zero cannot be asynchronous.
    lse = load_log_sum(operands.lse, rows, plane_of(sizes), rows < sizes.q_len)
    delta = tl.load(operands.delta + rows, mask=rows < sizes.q_len, other=0.0)
    query = QueryTile(q_tile, do_tile, lse, delta, first, q, rows < sizes.q_len)
    keys = KeyTile(k_tile, v_tile, kv_first, kv, columns < sizes.kv_len)
    return add_pairs(sums, query, keys, scale, scope, PARTIAL)
