"""Forward: softmax(S) @ V one key-value tile at a time. Follows ``softmax.py`` in one module."""
# ruff: noqa: F821

#: begin


@triton.jit
def attend(
    softmax, q_tile, first_row, q, kv_tile, keys, scale, factor, scope,
    PARTIAL: tl.constexpr, ISOLATES: tl.constexpr,
):
    """Take one key-value tile into the running softmax of a query tile.

    ISOLATES: values that are not finite go to live pairs alone.
    """
    sizes = scope.sizes
    first = kv_tile * BLOCK_N
    columns = Columns(first, first + tl.arange(0, BLOCK_N), keys.origin)
    k_tile = load_tile(keys.k, first, sizes.kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
    s = dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
    p, softmax = weigh(s, softmax, first_row, q, columns, scale, factor, scope, PARTIAL, False)
    v_tile = load_tile(keys.v, first, sizes.kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
    if ISOLATES and PARTIAL:
        p, v_tile = for_live_pairs(p, live_pairs(s, q, columns, scale, scope), v_tile)
    acc = dot_add(p.to(v_tile.dtype), v_tile, softmax.acc, PRECISION, UPCAST)
    return Softmax(acc, softmax.row_sum, softmax.row_max)


@triton.jit
def attention_forward(
    Q, K, V, OUT, LSE,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_ob, stride_oh, stride_om,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,
    #: given
):
    """One program: one query tile of one head. LSE (2, batch, heads, q_len) is contiguous fp32."""
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    origins = Origins(q_origin, kv_origin)
    given = Given(
        #: given
    )
    tile, head_of_batch = place_of_item(
        tl.program_id(0), tl.cdiv(q_len, BLOCK_M), batch * heads, together,
        MASKED, FORWARD_DESCENDING,
    )
    head = head_of(head_of_batch, sizes)
    scope = Scope(head, sizes, given)
    shift = shift_of(origins, Q_KIND, KV_KIND)
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    q = positions(rows, q_len, q_origin, Q_KIND)[:, None]
    q_rows = rows_of(Tensor(Q, stride_qb, stride_qh, stride_qm), head.b, head.h)
    keys = Keys(
        rows_of(Tensor(K, stride_kb, stride_kh, stride_kn), head.b, head.hkv),
        rows_of(Tensor(V, stride_vb, stride_vh, stride_vn), head.b, head.hkv),
        kv_origin,
    )
    if REPAIRS:
        if is_number(tl.load(given.results_sum)):
            return
        # A tile that is finite stays as it is, and so does one that is NaN to tell of a wrong entry.
        found = rows_of(Tensor(OUT, stride_ob, stride_oh, stride_om), head.b, head.h)
        if is_finite(load_tile(found, first, q_len, DV, BLOCK_M, BLOCK_DV, True)):
            return
        if MARKED:
            if is_wrong(scope):
                return
    q_tile = load_tile(q_rows, first, q_len, D, BLOCK_M, BLOCK_D, True)
    # The running maximum needs a positive factor, so a negative scale is applied to the scores.
    if SCALED_FIRST:
        factor = LOG2E
    else:
        factor = scale * LOG2E
    softmax = Softmax(
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
    )
    visits = forward_visits(tile, shift, scope)
    for PARTIAL in tl.static_range(2):
        if (PARTIAL and FORWARD_HAS_PARTIAL) or (not PARTIAL and FORWARD_HAS_FULL):
            kv_tile = forward_tile(0, visits, tile, shift, scope, PARTIAL)
            for step in tl.range(0, visits.partial if PARTIAL else visits.full):
                softmax = attend(
                    softmax, q_tile, first, q, kv_tile, keys, scale, factor, scope, PARTIAL,
                    REPAIRS,
                )
                kv_tile = forward_tile(step + 1, visits, tile, shift, scope, PARTIAL)

    out_tile, lse = results_of(softmax, scale, scope)
    out = rows_of(Tensor(OUT, stride_ob, stride_oh, stride_om), head.b, head.h)
    store_tile(out, first, q_len, out_tile, DV, BLOCK_M, BLOCK_DV)
    line = head_of_batch.to(tl.int64) * q_len + rows
    store_log_sum(LSE, line, lse, sizes, rows < q_len)
