"""Rows of a list marked in a map: a kernel whose text is the same for all programs."""

import triton
import triton.language as tl


@triton.jit
def attention_list_map(
    LISTED,
    MAP,
    stride_row,
    stride_element,
    rows,
    number,
    width,
    shift,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: the elements of ROWS rows.

    ``MAP`` is int8 (rows, width), zeros: element x of a row becomes 1 at x + ``shift`` if that is
    inside.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    for first in range(0, number, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        there = (row < rows) & (column < number)
        address = LISTED + row * stride_row + column.to(tl.int64) * stride_element
        place = tl.load(address, mask=there, other=-1).to(tl.int64) + shift
        there = there & (place >= 0) & (place < width)
        tl.store(MAP + row * width + place, tl.full(place.shape, 1, tl.int8), mask=there)
