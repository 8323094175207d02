"""Forward of few rows: programs share the keys of a head, as ``parts.py`` says.

Follows ``softmax.py``, ``forward.py`` and ``parts.py`` in one module.
"""
# ruff: noqa: F821

#: begin


@triton.jit
def attend_keys(
    softmax, q_tile, q, kv_tile, keys, factors, scope, PARTIAL: tl.constexpr, ISOLATES: tl.constexpr
):
    """Take one tile of keys into the running softmax of packed rows; see ``attend``."""
    return attend(
        softmax, q_tile, 0, q, kv_tile, keys, factors.scale, factors.of_scores, scope, PARTIAL,
        ISOLATES,
    )


@triton.jit
def times_values_factor(softmax, keys):
    """Sums as they are: values have no factor."""
    return softmax


@triton.jit
def store_rows(softmax, out, lse, rows, places):
    """Write a tile's output and log-sum-exp."""
    head, sizes = places.scope.head, places.scope.sizes
    result, own_lse = results_of(softmax, places.factors.scale, places.scope_of_rows)
    if MARKED:
        result = tl.where(places.wrong, float("nan"), result)
        own_lse = LogSum(tl.where(places.wrong, float("nan"), own_lse.shift), own_lse.rest)
    places, exist = addresses_of(out, head.b, rows, DV, BLOCK_DV)
    tl.store(places, result.to(out.base.dtype.element_ty), mask=exist)
    line = (head.b * sizes.heads + rows.h).to(tl.int64) * sizes.q_len + rows.query
    store_log_sum(lse, line, own_lse, sizes, rows.exists)


@triton.jit
def attention_decode(
    Q, K, V, OUT, LSE, PARTS, COUNTS,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_ob, stride_oh, stride_om,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, members, most_parts,
    least_tiles,
    #: given
):
    """One program: some parts of the keys of ``members`` heads and BLOCK_M queries.

    Programs are numbered by parts, by heads and queries, and by batch entry. LSE (2, batch, heads,
    q_len) is contiguous fp32. A unit is the rows of one tile. PARTS has (units, most_parts, LINES,
    BLOCK_DV), then twice (units, most_parts, LINES), all fp32. COUNTS int32 is 0 before and
    after: as many for each unit as ``counts_of_unit`` says. A program takes ``least_tiles`` at
    least, if its unit has as many.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    origins = Origins(q_origin, kv_origin)
    given = Given(
        #: given
    )
    tiles_of_queries = tl.cdiv(q_len, BLOCK_M)
    b = tl.program_id(2)
    tile = tl.program_id(1) % tiles_of_queries
    first_head = tl.program_id(1) // tiles_of_queries * members
    shift = shift_of(origins, Q_KIND, KV_KIND)
    hkv = first_head // (heads // kv_heads)
    # Tiles are those of all heads of the unit.
    scope = Scope(Head(b, first_head, hkv), sizes, given)
    visits = forward_visits(tile, shift, scope)
    live = visits.full + visits.partial
    wrong = is_wrong(scope)
    if MARKED:
        # Formulas of tiles say anything where a position is beyond all limits.
        live = tl.where(wrong, 0, live)
    limits = ShareLimits(most_parts, least_tiles)
    share = share_of_parts(live, most_parts_of(live, members, sizes), limits)
    if share.first >= share.parts:
        return
    rows = packed_rows(tl.arange(0, ROWS), tile * BLOCK_M, first_head, members, sizes)
    scope_of_rows = Scope(Head(b, rows.h[:, None], hkv), sizes, given)
    q = positions(rows.query, q_len, q_origin, Q_KIND)[:, None]
    at, exist = addresses_of(
        Tensor(Q, stride_qb, stride_qh, stride_qm), b, rows, D, BLOCK_D
    )
    q_tile = tl.load(at, mask=exist, other=0.0)
    keys = Keys(
        rows_of(Tensor(K, stride_kb, stride_kh, stride_kn), b, hkv),
        rows_of(Tensor(V, stride_vb, stride_vh, stride_vn), b, hkv),
        kv_origin,
    )
    # The running maximum needs a positive factor, so a negative scale is applied to the scores.
    if SCALED_FIRST:
        factor = LOG2E
    else:
        factor = scale * LOG2E
    places = UnitPlaces(tile, scope, scope_of_rows, Factors(scale, factor), 0, wrong)
    out = Tensor(OUT, stride_ob, stride_oh, stride_om)
    unit = b * tl.num_programs(1) + tl.program_id(1)
    room = room_of(PARTS, unit, batch * tl.num_programs(1), most_parts)
    softmax = attend_share((q_tile, q), keys, visits, share, rows, places, shift, room)
    if share.alone:
        store_rows(softmax, out, LSE, rows, places)
        return
    counts = counts_of_unit(COUNTS, unit, most_parts)
    put_together(room, counts, share, out, LSE, places, members)
