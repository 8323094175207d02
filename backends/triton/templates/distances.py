"""Sums of dS along diagonals. Follows ``tile_gradients.py`` in one module."""
# ruff: noqa: F821

#: begin


@triton.jit
def diagonal_lives(q, kv, scope):
    """Tell if some, and if all pairs take part that have the distances of a tile."""
    live = tl.full([BLOCK_M, BLOCK_N], 1, tl.int1)
    if MASKED:
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        live = live & mask_of_pair(s, live, q, kv, scope)
    counted = tl.sum(tl.sum(live.to(tl.int32), 1), 0)
    return counted > 0, counted == BLOCK_M * BLOCK_N


@triton.jit
def add_at(sums, corner, q, kv, origins, operands, scale, scope, PARTIAL: tl.constexpr):
    """The sums after adding a tile of the diagonal; ``q`` and ``kv`` are of its first tile."""
    sizes = scope.sizes
    if not ALL_MEETS_DISTANCES:
        rows = corner.q + tl.arange(0, BLOCK_M)
        columns = corner.kv + tl.arange(0, BLOCK_N)
        q = positions(rows, sizes.q_len, origins.q, Q_KIND)[:, None]
        kv = positions(columns, sizes.kv_len, origins.kv, KV_KIND)[None, :]
    return add_tile(sums, corner, q, kv, operands, scale, scope, PARTIAL)


@triton.jit
def store_diagonals(total, DISTANCE_SUMS):
    """Store the sums of a tile along its own diagonals."""
    row = tl.arange(0, BLOCK_M)[:, None]
    place = tl.arange(0, 2 * BLOCK_M)
    column = row - place[None, :] + (BLOCK_N - 1)
    inside = (column >= 0) & (column < BLOCK_N)
    skewed = tl.gather(total, tl.where(inside, column, 0), 1)
    sums = tl.sum(tl.where(inside, skewed, 0.0), 0)
    places = tl.program_id(0).to(tl.int64) * (BLOCK_M + BLOCK_N) + place
    tl.store(DISTANCE_SUMS + places, sums, mask=place < BLOCK_M + BLOCK_N)


@triton.jit
def distances(
    Q, K, V, DOUT, LSE, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    #: given
):
    """One program: the tiles of one head along one diagonal, whose pairs lie alike in all of them.

    So they can be added up as they are; only their sum is summed along its own diagonals. BLOCK_M
    is a multiple of BLOCK_N, and a step along the diagonal is BLOCK_M queries and keys.
    DISTANCE_SUMS (batch * heads, diagonals of tiles, BLOCK_M + BLOCK_N) are of q - kv from
    1 - BLOCK_N on, relative to the diagonal's first pair; the last is not used. LSE (2, batch * heads,
    q_len) is a ``LogSum``, DELTA padded as ``statistics_rows`` says.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    origins = Origins(q_origin, kv_origin)
    given = Given(
        #: given
    )
    RATIO: tl.constexpr = BLOCK_M // BLOCK_N
    q_tiles = tl.cdiv(q_len, BLOCK_M)
    kv_tiles = tl.cdiv(kv_len, BLOCK_N)
    diagonals = RATIO * (q_tiles - 1) + kv_tiles
    ahead = tl.program_id(0) % diagonals - (kv_tiles - 1)
    head_of_batch = tl.program_id(0) // diagonals
    head = head_of(head_of_batch, sizes)
    scope = Scope(head, sizes, given)
    operands = Operands(
        Tensor(Q, stride_qb, stride_qh, stride_qm), Tensor(K, stride_kb, stride_kh, stride_kn),
        Tensor(V, stride_vb, stride_vh, stride_vn), Tensor(DOUT, stride_gb, stride_gh, stride_gm),
        LSE, DELTA,
    )
    operands = with_statistics(operands_of(operands, head), head_of_batch, sizes)
    begin = tl.cdiv(tl.maximum(ahead, 0), RATIO)
    end = tl.minimum(q_tiles, tl.cdiv(kv_tiles + ahead, RATIO))
    # Of the first tile: where positions matter by their distance alone, of all tiles.
    q = positions(begin * BLOCK_M + tl.arange(0, BLOCK_M), q_len, q_origin, Q_KIND)[:, None]
    kv_first = begin * BLOCK_M - ahead * BLOCK_N
    kv = positions(kv_first + tl.arange(0, BLOCK_N), kv_len, kv_origin, KV_KIND)[None, :]
    sums = no_sums()
    if MASK_MEETS_DISTANCES:
        # Loops without branches, whose loads Triton can have run ahead.
        some, every = diagonal_lives(q, kv, scope)
        last = (end - 1) * BLOCK_M
        inside = (last + BLOCK_M <= q_len) & (last - (ahead - 1) * BLOCK_N <= kv_len)
        end = tl.where(some, end, begin)
        # Where tiles are oblong some diagonals have none; the one before begins before all keys, and
        # so counts as inside.
        middle = tl.where(every, tl.where(inside, end, end - 1), begin)
        for PARTIAL in tl.static_range(2):
            for tile in tl.range(middle if PARTIAL else begin, end if PARTIAL else middle):
                corner = Corner(tile * BLOCK_M, tile * BLOCK_M - ahead * BLOCK_N)
                sums = add_at(sums, corner, q, kv, origins, operands, scale, scope, PARTIAL)
    else:
        for tile in tl.range(begin, end):
            corner = Corner(tile * BLOCK_M, tile * BLOCK_M - ahead * BLOCK_N)
            some, every = lives_of_tile(corner, origins, scope)
            if some:
                sums = add_at(sums, corner, q, kv, origins, operands, scale, scope, True)
    store_diagonals(sums[0], given.DISTANCE_SUMS)
