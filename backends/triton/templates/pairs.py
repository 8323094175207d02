"""Sums over batch entries and heads, of every pair. Follows ``pair_sums.py`` in one module."""
# ruff: noqa: F821

#: begin


@triton.jit
def add_member(sums, share, q, kv, operands, scale, scope, PARTIAL: tl.constexpr):
    """The sums with what one batch entry and head adds; ``operands`` are tensors, not rows."""
    head, sizes = scope.head, scope.sizes
    rows = operands_of(operands, head)
    own = with_statistics(rows, head.b * sizes.heads + head.h, sizes)
    return add_tile(sums, share.corner, q, kv, own, scale, scope, PARTIAL)


@triton.jit
def member_of(member, share, rest_heads, sizes):
    """The head that is number ``member`` of those that are not told apart."""
    b, h = place_of_member(member, share, rest_heads)
    return Head(b, h, h // (sizes.heads // sizes.kv_heads))


@triton.jit
def pairs(
    Q, K, V, DOUT, LSE, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    rest_batches, rest_heads, parts,
    #: given
):
    """One program: one tile of what is told apart, over a part of what is not.

    Told apart are ``batch / rest_batches`` batch entries and ``heads / rest_heads`` heads; what is
    not told apart is gone through in order, a ``parts``-th of it here. LSE (2, batch * heads, q_len)
    is a ``LogSum``, DELTA padded as ``statistics_rows`` says.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    origins = Origins(q_origin, kv_origin)
    given = Given(
        #: given
    )
    share = share_of_program(batch // rest_batches, heads // rest_heads, sizes)
    rest = rest_batches * rest_heads
    begin = rest * share.part // parts
    end = rest * (share.part + 1) // parts
    operands = Operands(
        Tensor(Q, stride_qb, stride_qh, stride_qm), Tensor(K, stride_kb, stride_kh, stride_kn),
        Tensor(V, stride_vb, stride_vh, stride_vn), Tensor(DOUT, stride_gb, stride_gh, stride_gm),
        LSE, DELTA,
    )
    rows = share.corner.q + tl.arange(0, BLOCK_M)
    q = positions(rows, q_len, q_origin, Q_KIND)[:, None]
    columns = share.corner.kv + tl.arange(0, BLOCK_N)
    kv = positions(columns, kv_len, kv_origin, KV_KIND)[None, :]
    sums = no_sums()
    if MASK_IS_SHARED:
        # Loops without branches, whose loads Triton can have run ahead; dead tiles have no turn.
        own = Scope(Head(share.b, share.h, share.h), sizes, given)
        some, every = lives_of_tile(share.corner, origins, own)
        end = tl.where(some, end, begin)
        middle = tl.where(every, end, begin)
        for PARTIAL in tl.static_range(2):
            for member in tl.range(middle if PARTIAL else begin, end if PARTIAL else middle):
                scope = Scope(member_of(member, share, rest_heads, sizes), sizes, given)
                sums = add_member(sums, share, q, kv, operands, scale, scope, PARTIAL)
    else:
        for member in tl.range(begin, end):
            scope = Scope(member_of(member, share, rest_heads, sizes), sizes, given)
            some, every = lives_of_tile(share.corner, origins, scope)
            if some:
                sums = add_member(sums, share, q, kv, operands, scale, scope, True)
    inside = (share.corner.q + BLOCK_M <= q_len) & (share.corner.kv + BLOCK_N <= kv_len)
    store_sums(sums, share, q, kv, inside, sizes, given)
