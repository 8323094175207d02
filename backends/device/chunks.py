"""Requests with many queries as dense calls: kernels that find them, and copy their rows.

They depend on no program, so that their text is the same for all and lies here.
"""

import triton
import triton.language as tl


@triton.jit
def cut(number, most):
    """A number that nobody has looked at, from 0 to ``most`` in 64 bits."""
    return tl.minimum(tl.maximum(number.to(tl.int64), 0), most)


@triton.jit
def find_chunks(
    STARTS, LENGTHS, FOUND, stride_s, stride_l, batch, tokens, room, least, most, slots,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: requests with ``least`` to ``most`` queries, in their order.

    FOUND (5, slots) int32 has for each of them: its number, the token of row 0, the position of row
    0, its number of keys and its number of queries. Slots that no request takes have zeros. With
    WHOLE, rows are tokens; otherwise row 0 is the request's first token.
    """
    taken = 0
    for first in range(0, batch, BLOCK):
        b = first + tl.arange(0, BLOCK)
        exists = b < batch
        begin = cut(tl.load(STARTS + b * stride_s, mask=exists, other=0), tokens)
        end = cut(tl.load(STARTS + (b + 1) * stride_s, mask=exists, other=0), tokens)
        length = cut(tl.load(LENGTHS + b * stride_l, mask=exists, other=0), room)
        count = end - begin
        chosen = exists & (count >= least) & (count <= most)
        slot = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        chosen = chosen & (slot < slots)
        position, token = length - count, begin
        if WHOLE:
            position, token = position - begin, begin * 0
        at = FOUND + slot
        tl.store(at, b, mask=chosen)
        tl.store(at + slots, token.to(tl.int32), mask=chosen)
        tl.store(at + 2 * slots, position.to(tl.int32), mask=chosen)
        tl.store(at + 3 * slots, length.to(tl.int32), mask=chosen)
        tl.store(at + 4 * slots, count.to(tl.int32), mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), 0)
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        free = (slot >= taken) & (slot < slots)
        for field in tl.static_range(5):
            tl.store(FOUND + field * slots + slot, 0, mask=free)


@triton.jit
def gather_chunk_keys(
    K_PAGES, V_PAGES, K, V, TABLE, FOUND,
    step_kp, step_kn, step_kh, step_vp, step_vn, step_vh, step_tb, step_tp,
    first_slot, slots, pages, room, kv_heads,
    PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK keys and values of one head of one slot's request.

    K and V (slots of the call, key heads, room, dim) are contiguous. Rows behind a request's keys
    are zeros up to the next multiple of PADDING. What lies behind these is not written.
    """
    h, slot = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first = tl.program_id(0) * BLOCK
    own = FOUND + first_slot + slot
    b, length = tl.load(own), tl.load(own + 3 * slots)
    if first < tl.cdiv(length, PADDING) * PADDING:
        numbers = first + tl.arange(0, BLOCK)
        # Where there are no pages, there are no keys.
        exists = numbers < length * tl.minimum(pages, 1)
        at = TABLE + b.to(tl.int64) * step_tb + (numbers // PAGE).to(tl.int64) * step_tp
        page = tl.load(at, mask=exists, other=0).to(tl.int64)
        page = tl.minimum(tl.maximum(page, 0), pages - 1)
        row = (numbers % PAGE).to(tl.int64)
        line = (slot.to(tl.int64) * kv_heads + h) * room + numbers
        stored = (numbers < room)[:, None]
        columns = tl.arange(0, BLOCK_D)
        at = K_PAGES + h * step_kh + (page * step_kp + row * step_kn)[:, None] + columns[None, :]
        rows = tl.load(at, mask=exists[:, None] & (columns < D)[None, :], other=0.0)
        wide = tl.arange(0, BLOCK_DV)
        at = V_PAGES + h * step_vh + (page * step_vp + row * step_vn)[:, None] + wide[None, :]
        values = tl.load(at, mask=exists[:, None] & (wide < DV)[None, :], other=0.0)
        at = K + line[:, None] * D + columns[None, :]
        tl.store(at, rows, mask=stored & (columns < D)[None, :])
        at = V + line[:, None] * DV + wide[None, :]
        tl.store(at, values, mask=stored & (wide < DV)[None, :])


@triton.jit
def move_chunk_rows(
    PACKED, PADDED, PACKED_LSE, PADDED_LSE, FOUND, stride_t, stride_h, heads, rows, tokens,
    first_slot, slots,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, TO_PACKED: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK rows of one head, between packed rows and those of one slot.

    PADDED is (slots of the call, rows, heads, dim), and PADDED_LSE (slots, heads, rows), both
    contiguous. PACKED_LSE (tokens, heads) is written with PACKED alone.
    """
    h, slot = tl.program_id(1), tl.program_id(2).to(tl.int64)
    own = FOUND + first_slot + slot
    token, count = tl.load(own + slots), tl.load(own + 4 * slots)
    numbers = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = (numbers < count) & (numbers < rows) & (token + numbers < tokens)
    columns = tl.arange(0, BLOCK_D)
    exist = exists[:, None] & (columns < D)[None, :]
    line = (token + numbers).to(tl.int64) * stride_t + h.to(tl.int64) * stride_h
    packed = PACKED + line[:, None] + columns[None, :]
    line = (slot * rows + numbers) * heads + h
    padded = PADDED + line[:, None] * D + columns[None, :]
    if TO_PACKED:
        tl.store(packed, tl.load(padded, mask=exist, other=0.0), mask=exist)
        at = PADDED_LSE + (slot * heads + h) * rows + numbers
        found = tl.load(at, mask=exists, other=0.0)
        tl.store(PACKED_LSE + (token + numbers).to(tl.int64) * heads + h, found, mask=exists)
    else:
        # Rows of nobody become zeros: what lies there may be no number.
        there = (numbers < rows)[:, None] & (columns < D)[None, :]
        tl.store(padded, tl.load(packed, mask=exist, other=0.0), mask=there)
