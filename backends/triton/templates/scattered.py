"""Sums that any pairs may meet in, exact ones. Follows ``tile_gradients.py`` in one module."""
# ruff: noqa: F821

#: begin


@triton.jit
def scattered(
    Q, K, V, DOUT, LSE, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    #: given
):
    """One program: one query tile of one head.

    It either finds the greatest of its rows' sums of sizes (``scattered.py`` in the package of
    kernels says what for), or adds to integers. LSE (2, batch * heads, q_len) is a ``LogSum``, DELTA
    padded as ``statistics_rows`` says.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    origins = Origins(q_origin, kv_origin)
    given = Given(
        #: given
    )
    q_tiles = tl.cdiv(q_len, BLOCK_M)
    first = (tl.program_id(0) % q_tiles) * BLOCK_M
    head_of_batch = tl.program_id(0) // q_tiles
    head = head_of(head_of_batch, sizes)
    scope = Scope(head, sizes, given)
    operands = Operands(
        Tensor(Q, stride_qb, stride_qh, stride_qm), Tensor(K, stride_kb, stride_kh, stride_kn),
        Tensor(V, stride_vb, stride_vh, stride_vn), Tensor(DOUT, stride_gb, stride_gh, stride_gm),
        LSE, DELTA,
    )
    operands = with_statistics(operands_of(operands, head), head_of_batch, sizes)
    q = positions(first + tl.arange(0, BLOCK_M), q_len, q_origin, Q_KIND)[:, None]
    sums = no_sums()
    for tile in range(0, tl.cdiv(kv_len, BLOCK_N)):
        corner = Corner(first, tile * BLOCK_N)
        some, every = lives_of_tile(corner, origins, scope)
        if some:
            columns = corner.kv + tl.arange(0, BLOCK_N)
            kv = positions(columns, kv_len, kv_origin, KV_KIND)[None, :]
            sums = add_tile(sums, corner, q, kv, operands, scale, scope, True)
    store_sums(sums, given)
