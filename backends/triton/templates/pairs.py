"""Sums over batch entries and heads, of every pair. Follows ``pair_sums.py`` in one module."""
# ruff: noqa: F821

import triton
import triton.language as tl

from attndsl.backends.triton.library import positions, statistics_rows

#: begin


@triton.jit
def add_member(
    #: sums
    member, first, kv_first, q, kv, own_b, own_h, Q, K, V, DOUT, LSE, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, rest_heads,
    #: parameters
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, PARTIAL: tl.constexpr,
):
    """The sums with what one batch entry and head adds."""
    b, h = place_of_member(member, own_b, own_h, rest_heads)
    hkv = h // (heads // kv_heads)
    return add_tile(
        #: sums
        first, kv_first, q, kv,
        Q + b * stride_qb + h * stride_qh,
        K + b * stride_kb + hkv * stride_kh,
        V + b * stride_vb + hkv * stride_vh,
        DOUT + b * stride_gb + h * stride_gh,
        LSE + (b * heads + h).to(tl.int64) * q_len,
        DELTA + statistics_rows(b * heads + h, q_len),
        stride_qm, stride_kn, stride_vn, stride_gm,
        scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, UPCAST, PARTIAL,
    )


@triton.jit
def pairs(
    Q, K, V, DOUT, LSE, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    rest_batches, rest_heads, parts,
    #: parameters
    #: outputs
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_KIND: tl.constexpr, KV_KIND: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """One program: one tile of what is told apart, over a part of what is not.

    Told apart are ``batch / rest_batches`` batch entries and ``heads / rest_heads`` heads; what is
    not told apart is gone through in order, a ``parts``-th of it here. LSE (batch * heads, q_len)
    is in base e, DELTA padded as ``statistics_rows`` says.
    """
    first, kv_first, own_b, own_h, part = place_of_program(
        batch // rest_batches, heads // rest_heads, q_len, kv_len, BLOCK_M, BLOCK_N
    )
    rest = rest_batches * rest_heads
    begin = rest * part // parts
    end = rest * (part + 1) // parts
    q = positions(first + tl.arange(0, BLOCK_M), q_len, q_origin, Q_KIND)[:, None]
    kv = positions(kv_first + tl.arange(0, BLOCK_N), kv_len, kv_origin, KV_KIND)[None, :]
    #: begin_sums
    if MASK_IS_SHARED:
        # Loops without branches, whose loads Triton can have run ahead; dead tiles have no turn.
        some, every = lives_of_tile(
            first, kv_first, own_b, own_h, own_h, batch, heads, kv_heads, q_len, kv_len,
            q_origin, kv_origin,
            #: arguments
            BLOCK_M, BLOCK_N, Q_KIND, KV_KIND,
        )
        end = tl.where(some, end, begin)
        middle = tl.where(every, end, begin)
        for member in tl.range(begin, middle):
            (
                #: sums
            ) = add_member(
                #: sums
                member, first, kv_first, q, kv, own_b, own_h, Q, K, V, DOUT, LSE, DELTA,
                stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
                stride_vn, stride_gb, stride_gh, stride_gm,
                scale, batch, heads, kv_heads, q_len, kv_len, rest_heads,
                #: arguments
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, UPCAST, False,
            )
        for member in tl.range(middle, end):
            (
                #: sums
            ) = add_member(
                #: sums
                member, first, kv_first, q, kv, own_b, own_h, Q, K, V, DOUT, LSE, DELTA,
                stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
                stride_vn, stride_gb, stride_gh, stride_gm,
                scale, batch, heads, kv_heads, q_len, kv_len, rest_heads,
                #: arguments
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, UPCAST, True,
            )
    else:
        for member in tl.range(begin, end):
            b, h = place_of_member(member, own_b, own_h, rest_heads)
            some, every = lives_of_tile(
                first, kv_first, b, h, h // (heads // kv_heads), batch, heads, kv_heads, q_len, kv_len,
                q_origin, kv_origin,
                #: arguments
                BLOCK_M, BLOCK_N, Q_KIND, KV_KIND,
            )
            if some:
                (
                    #: sums
                ) = add_member(
                    #: sums
                    member, first, kv_first, q, kv, own_b, own_h, Q, K, V, DOUT, LSE, DELTA,
                    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
                    stride_vn, stride_gb, stride_gh, stride_gm,
                    scale, batch, heads, kv_heads, q_len, kv_len, rest_heads,
                    #: arguments
                    D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, UPCAST, True,
                )
    inside = (first + BLOCK_M <= q_len) & (kv_first + BLOCK_N <= kv_len)
    #: end_sums
