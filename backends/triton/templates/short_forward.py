"""Forward where all keys of a head fit: a program loads them once for several query tiles.

These are of all query heads that share the keys, one head after the other.

The number of rows of a tile is a power of two, so keys are one to three pieces: 197 keys take
128 + 64 + 16.
Follows ``softmax.py`` in one module.
"""
# ruff: noqa: F821

#: begin


@triton.jit
def piece_of(keys, sizes, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Keys ``FIRST ... FIRST + COUNT`` of a head."""
    first = tl.full([], FIRST, tl.int32)
    k = load_tile(keys.k, first, sizes.kv_len, D, COUNT, BLOCK_D, True)
    v = load_tile(keys.v, first, sizes.kv_len, DV, COUNT, BLOCK_DV, True)
    return Piece(k, v, Columns(first, first + tl.arange(0, COUNT), keys.origin))


@triton.jit
def attend_piece(softmax, q_tile, first_row, q, piece, scale, factor, scope, NUMBER: tl.constexpr):
    """Take piece NUMBER of the keys into the running softmax of a query tile."""
    s = dot(q_tile, tl.trans(piece.k), PRECISION, UPCAST)
    PARTIAL: tl.constexpr = MASKED or NUMBER == PIECES - 1
    p, softmax = weigh(
        s, softmax, first_row, q, piece.columns, scale, factor, scope, PARTIAL, NUMBER == 0
    )
    acc = dot_add(p.to(piece.v.dtype), piece.v, softmax.acc, PRECISION, UPCAST)
    return Softmax(acc, softmax.row_sum, softmax.row_max)


@triton.jit
def attention_short_forward(
    Q, K, V, OUT, LSE,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_ob, stride_oh, stride_om,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, part_tiles,
    #: given
):
    """One program: ``part_tiles`` query tiles of the heads that share keys.

    LSE (2, batch, heads, q_len) is contiguous.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    given = Given(
        #: given
    )
    # Numbers by three dims spare short programs divisions.
    b = tl.program_id(0)
    hkv = tl.program_id(1)
    start = tl.program_id(2) * part_tiles
    group = heads // kv_heads
    tiles_of_head = tl.cdiv(q_len, BLOCK_M)
    keys = Keys(
        rows_of(Tensor(K, stride_kb, stride_kh, stride_kn), b, hkv),
        rows_of(Tensor(V, stride_vb, stride_vh, stride_vn), b, hkv),
        kv_origin,
    )
    piece = piece_of(keys, sizes, 0, KEYS_0)
    if PIECES > 1:
        second = piece_of(keys, sizes, KEYS_0, KEYS_1)
    if PIECES > 2:
        third = piece_of(keys, sizes, KEYS_0 + KEYS_1, KEYS_2)
    # The running maximum needs a positive factor, so a negative scale is applied to the scores.
    if SCALED_FIRST:
        factor = LOG2E
    else:
        factor = scale * LOG2E
    h = hkv * group + start // tiles_of_head
    first = start % tiles_of_head * BLOCK_M
    for _ in tl.range(0, tl.minimum(part_tiles, group * tiles_of_head - start)):
        scope = Scope(Head(b, h, hkv), sizes, given)
        q_rows = rows_of(Tensor(Q, stride_qb, stride_qh, stride_qm), b, h)
        out = rows_of(Tensor(OUT, stride_ob, stride_oh, stride_om), b, h)
        rows = first + tl.arange(0, BLOCK_M)
        q = positions(rows, q_len, q_origin, Q_KIND)[:, None]
        q_tile = load_tile(q_rows, first, q_len, D, BLOCK_M, BLOCK_D, True)
        softmax = Softmax(
            tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.full([BLOCK_M], float("-inf"), tl.float32),
        )
        softmax = attend_piece(softmax, q_tile, first, q, piece, scale, factor, scope, 0)
        if PIECES > 1:
            softmax = attend_piece(softmax, q_tile, first, q, second, scale, factor, scope, 1)
        if PIECES > 2:
            softmax = attend_piece(softmax, q_tile, first, q, third, scale, factor, scope, 2)
        out_tile, lse = results_of(softmax, scale, scope)
        store_tile(out, first, q_len, out_tile, DV, BLOCK_M, BLOCK_DV)
        line = (b * heads + h).to(tl.int64) * q_len + rows
        store_log_sum(LSE, line, lse, sizes, rows < q_len)
        first += BLOCK_M
        h = tl.where(first >= q_len, h + 1, h)
        first = tl.where(first >= q_len, 0, first)
