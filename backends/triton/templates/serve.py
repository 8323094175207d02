"""Forward of packed requests: keys in pages, rows of q of all requests in one tensor.

A program has one part of the live tiles of some rows of one request, as ``parts.py`` says. It looks
up the page of each key, and widens numbers of 8 bits in registers. What the program's text sees is
the score of scaled keys.
Follows ``softmax.py`` and ``parts.py`` in one module.
"""
# ruff: noqa: F821

#: begin


@triton.jit
def pages_of(first, keys):
    """Pages and rows of a tile's keys, from number ``first`` on, a multiple of BLOCK_N.

    A wrong page number is some page of the pool. What a number is within its page is the same for
    all tiles where pages are parts of tiles, and rests on one division where tiles are parts of
    pages. Each thread does this for many keys: see M48 in docs/dev/measured.md.
    """
    place = tl.arange(0, BLOCK_N)
    exists = first + place < keys.length
    if BLOCK_N % PAGE == 0:
        index, row = first // PAGE + place // PAGE, place % PAGE
    elif PAGE % BLOCK_N == 0:
        index, row = first // PAGE + place * 0, first % PAGE + place
    else:
        index, row = (first + place) // PAGE, (first + place) % PAGE
    page = tl.load(keys.table + index.to(tl.int64) * keys.stride_t, mask=exists, other=0)
    page = tl.minimum(tl.maximum(page, 0), keys.pages - 1).to(tl.int32)
    return PageOfKeys(page, row, exists)


@triton.jit
def lines_of(at, stride_p, stride_n):
    """Offsets of the keys of a tile from the first key of all pages.

    Steps say by their type whether a product of 32 bits holds what a row is from its page.
    """
    return at.page.to(tl.int64) * stride_p + at.row * stride_n


@triton.jit
def load_rows(base, lines, exists, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Rows of keys or values as they are stored; zeros where there are none."""
    columns = tl.arange(0, BLOCK_WIDTH)
    exist = exists[:, None] & (columns < WIDTH)[None, :]
    return tl.load(base + lines[:, None] + columns[None, :], mask=exist, other=0.0)


@triton.jit
def fp16_of_fp8(tile):
    """Rows of 8 bits as fp16, in the layout of their loads: 16 bytes of a thread lie together.

    Products with values want numbers of several keys together, which lie a row apart. Numbers of 16
    bits are transposed as they are read from shared memory, and those of 8 bits are read one by one.
    Triton would convert them there, behind that, and does not move what is not pure.
    """
    if WIDENS_PAIRS:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [tile], dtype=tl.float16, is_pure=False, pack=4,
        )
    return tile.to(tl.float16)


@triton.jit
def rows_in_fp16(q_tile):
    """Rows of bf16 as rows of fp16, and the powers of two that products of these lack.

    The largest element of a row becomes 2^14 to 2^15. Those down to 2^-28 of it are exact.
    """
    top = tl.max(tl.abs(q_tile.to(tl.float32)), 1)
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.maximum(exponent, 32)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (q_tile.to(tl.float32) * factor[:, None]).to(tl.float16), inverse


@triton.jit
def scales_of(rows, at):
    """Factor of each row, where each has a number of its own."""
    lines = lines_of(at, rows.scale_p, rows.scale_n)
    return tl.load(rows.scale + lines, mask=at.exists, other=0.0)


@triton.jit
def attend_keys(
    softmax, q_tile, q, kv_tile, keys, factors, scope, PARTIAL: tl.constexpr, ISOLATES: tl.constexpr
):
    """Take one tile of keys into the running softmax of packed rows.

    Rows of a request read no values of others, so nothing ISOLATES them.
    """
    tl.static_assert(not ISOLATES)
    first = kv_tile * BLOCK_N
    at = pages_of(first, keys)
    lines = lines_of(at, keys.k.stride_p, keys.k.stride_n)
    k_tile = load_rows(keys.k.base, lines, at.exists, D, BLOCK_D).to(q_tile.dtype)
    s = dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
    if K_IN_FP16:
        s = s * factors.of_rows[:, None]
    if K_SCALES == 4:
        s = s * scales_of(keys.k, at)[None, :]
    elif K_SCALES != 0:
        s = s * keys.k.scale
    columns = Columns(first, first + tl.arange(0, BLOCK_N), 0)
    p, softmax = weigh(
        s, softmax, 0, q, columns, factors.scale, factors.of_scores, scope, PARTIAL, False
    )
    if not SAME_STEPS:
        lines = lines_of(at, keys.v.stride_p, keys.v.stride_n)
    v_tile = load_rows(keys.v.base, lines, at.exists, DV, BLOCK_DV)
    if PAGES_IN_FP8:
        v_tile = fp16_of_fp8(v_tile)
    if V_SCALES == 4:
        v_tile = v_tile.to(tl.float32) * scales_of(keys.v, at)[:, None]
    if V_IN_FP16:
        # Weights are 1 or a little more at most. As they are, small ones would be nothing in fp16.
        p = tl.minimum(p * 16384.0, 65504.0)
        acc = dot(p.to(tl.float16), v_tile, PRECISION, UPCAST)
        acc = softmax.acc + acc * (1.0 / 16384.0)
    elif K_IN_FP16:
        # Hopper goes to bf16 fastest by way of fp32.
        v_tile = v_tile.to(tl.float32).to(tl.bfloat16)
        acc = dot_add(p.to(tl.bfloat16), v_tile, softmax.acc, PRECISION, UPCAST)
    else:
        v_tile = v_tile.to(q_tile.dtype)
        acc = dot_add(p.to(v_tile.dtype), v_tile, softmax.acc, PRECISION, UPCAST)
    return Softmax(acc, softmax.row_sum, softmax.row_max)


@triton.jit
def times_values_factor(softmax, keys):
    """Sums times the factor that all values have, if they have one."""
    if V_SCALES != 0 and V_SCALES != 4:
        return Softmax(softmax.acc * keys.v.scale, softmax.row_sum, softmax.row_max)
    return softmax


@triton.jit
def store_rows(softmax, out, lse, rows, places):
    """Write a tile's output and log-sum-exp, (tokens, heads)."""
    result, own_lse = results_of(softmax, places.factors.scale, places.scope_of_rows)
    at, exist = addresses_of(out, places.token, rows, DV, BLOCK_DV)
    tl.store(at, result.to(out.base.dtype.element_ty), mask=exist)
    line = (places.token + rows.query) * places.scope.sizes.heads + rows.h
    tl.store(lse + line, own_lse.shift + own_lse.rest, mask=rows.exists)


@triton.jit
def cut(number, most):
    """A number that nobody has looked at, from 0 to ``most`` in 64 bits."""
    return tl.minimum(tl.maximum(number.to(tl.int64), 0), most)


@triton.jit
def tokens_of(requests, b, exists):
    """The first tokens of some requests, and numbers behind the last tokens that are computed."""
    at = requests.starts + b.to(tl.int64) * requests.stride
    first = cut(tl.load(at, mask=exists, other=0), requests.tokens)
    end = cut(tl.load(at + requests.stride, mask=exists, other=0), requests.tokens)
    return first, tl.minimum(end, first + requests.most)


@triton.jit
def clear_tokens(requests, out, lse, number, programs, sizes):
    """Results of tokens that no request has: 0, and -inf. Nothing else is written.

    Each token asks all requests, so that no values of ``starts`` make two programs write one token.
    """
    for start in tl.range(number * TOKENS_AT_ONCE, requests.tokens, programs * TOKENS_AT_ONCE):
        tokens = start + tl.arange(0, TOKENS_AT_ONCE)
        served = tokens >= requests.tokens
        for request in tl.range(0, sizes.batch, REQUESTS_AT_ONCE):
            b = request + tl.arange(0, REQUESTS_AT_ONCE)
            first, end = tokens_of(requests, b, b < sizes.batch)
            own = (first[None, :] <= tokens[:, None]) & (tokens[:, None] < end[None, :])
            served = served | (tl.max(own.to(tl.int32), 1) != 0)
        if tl.min(served.to(tl.int32), 0) == 0:
            columns = tl.arange(0, BLOCK_DV)
            free = served == 0
            exist = free[:, None] & (columns < DV)[None, :]
            line = tokens.to(tl.int64)
            zeros = tl.zeros([TOKENS_AT_ONCE, BLOCK_DV], out.base.dtype.element_ty)
            nothing = tl.full([TOKENS_AT_ONCE], float("-inf"), tl.float32)
            for h in tl.range(0, sizes.heads):
                places = line[:, None] * out.stride_n + h * out.stride_h + columns[None, :]
                tl.store(out.base + places, zeros, mask=exist)
                tl.store(lse + line * sizes.heads + h, nothing, mask=free)


@triton.jit
def attention_serve(
    Q, K_PAGES, V_PAGES, OUT, LSE_OF_TOKENS, PARTS, COUNTS, TABLE, LENGTHS, STARTS, K_SCALE, V_SCALE,
    stride_qh, stride_qm, stride_oh, stride_om,
    step_kp, step_kn, step_kh, step_vp, step_vn, step_vh,
    step_ap, step_an, step_ah, step_bp, step_bn, step_bh, step_tb, step_tp, step_l, step_s,
    scale, k_factor, v_factor, batch, heads, kv_heads, q_len, kv_len, tokens, chunk_len, pages,
    members, most_parts, least_tiles,
    #: given
):
    """One program: some parts of the keys of ``members`` heads and BLOCK_M queries of a request.

    Programs are numbered by parts, by heads and queries, and by request. Those behind the last
    request clear tokens. ``q_len`` is the most queries of a request, ``kv_len`` the most keys. If
    ``chunk_len`` is more, results of requests with more than ``q_len`` queries, and up to so many,
    are there already. LSE_OF_TOKENS
    (tokens, heads) is contiguous fp32. PARTS and COUNTS are those of ``attention_decode``.
    """
    tiles_of_queries = tl.cdiv(q_len, BLOCK_M)
    b = tl.program_id(2)
    wide_b = b.to(tl.int64)
    tile = tl.program_id(1) % tiles_of_queries
    first_head = tl.program_id(1) // tiles_of_queries * members
    out = Tensor(OUT, stride_om, stride_oh, stride_om)
    requests = RequestTokens(STARTS, step_s, tokens, q_len)
    if b == batch:
        kept = RequestTokens(STARTS, step_s, tokens, tl.maximum(q_len, chunk_len))
        clear_tokens(
            kept, out, LSE_OF_TOKENS, tl.program_id(0) * tl.num_programs(1) + tl.program_id(1),
            tl.num_programs(0) * tl.num_programs(1), Sizes(batch, heads, kv_heads, q_len, kv_len),
        )
        return
    begin, behind = tokens_of(requests, b, b < batch)
    count = (behind - begin).to(tl.int32)
    if tile * BLOCK_M >= count:
        return
    length = cut(tl.load(LENGTHS + wide_b * step_l), kv_len).to(tl.int32)
    end = cut(tl.load(STARTS + (wide_b + 1) * step_s), tokens)
    if (chunk_len > q_len) & (end - begin > q_len):
        return
    first_query = (length - (end - begin)).to(tl.int32)
    first_token = begin.to(tl.int32)
    given = Given(
        #: values
    )
    sizes = Sizes(batch, heads, kv_heads, count, kv_len)
    shift = shift_of(Origins(0, 0), Q_KIND, KV_KIND)
    hkv = first_head // (heads // kv_heads)
    wide_hkv = hkv.to(tl.int64)
    # Tiles are those of all heads of the unit.
    scope = Scope(Head(b, first_head, hkv), sizes, given)
    visits = forward_visits(tile, shift, scope)
    live = visits.full + visits.partial
    limits = ShareLimits(most_parts, least_tiles)
    share = share_of_parts(live, most_parts_of(live, members, sizes), limits)
    if share.first >= share.parts:
        return
    rows = packed_rows(tl.arange(0, ROWS), tile * BLOCK_M, first_head, members, sizes)
    scope_of_rows = Scope(Head(b, rows.h[:, None], hkv), sizes, given)
    q = rows.query[:, None]
    at, exist = addresses_of(
        Tensor(Q, stride_qm, stride_qh, stride_qm), begin, rows, D, BLOCK_D
    )
    q_tile = tl.load(at, mask=exist, other=0.0)
    k_scale = k_factor
    if K_SCALES == 4:
        k_scale = K_SCALE + wide_hkv * step_ah
    elif K_SCALES > 1:
        k_scale = tl.load(K_SCALE + wide_hkv * step_ah)
    v_scale = v_factor
    if V_SCALES == 4:
        v_scale = V_SCALE + wide_hkv * step_bh
    elif V_SCALES > 1:
        v_scale = tl.load(V_SCALE + wide_hkv * step_bh)
    keys = PagedKeys(
        PageRows(K_PAGES + wide_hkv * step_kh, step_kp, step_kn, k_scale, step_ap, step_an),
        PageRows(V_PAGES + wide_hkv * step_vh, step_vp, step_vn, v_scale, step_bp, step_bn),
        # Where there are no pages, there are no keys.
        TABLE + wide_b * step_tb, step_tp, pages, length * tl.minimum(pages, 1),
    )
    # The running maximum needs a positive factor, so a negative scale is applied to the scores.
    if SCALED_FIRST:
        factor = LOG2E
    else:
        factor = scale * LOG2E
    of_rows = factor
    if K_IN_FP16:
        q_tile, of_rows = rows_in_fp16(q_tile)
    factors = RowFactors(scale, factor, of_rows)
    places = UnitPlaces(tile, scope, scope_of_rows, factors, begin, False)
    unit = b * tl.num_programs(1) + tl.program_id(1)
    room = room_of(PARTS, unit, batch * tl.num_programs(1), most_parts)
    softmax = attend_share((q_tile, q), keys, visits, share, rows, places, shift, room)
    if share.alone:
        store_rows(softmax, out, LSE_OF_TOKENS, rows, places)
        return
    counts = counts_of_unit(COUNTS, unit, most_parts)
    put_together(room, counts, share, out, LSE_OF_TOKENS, places, members)
