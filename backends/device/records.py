"""Records that device functions take in place of long lists of arguments.

They are NamedTuples: Triton's compiler, its interpreter and plain Python all read them, and the
compiler makes the same of them as of single arguments. A generated module adds one of its own,
``Given``: the program's captures, params, sizes, seed and lists of tiles, in the order in which the
kernel takes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """Sizes of a call's dims, int32."""

    batch: Any
    heads: Any
    kv_heads: Any
    q_len: Any
    kv_len: Any


class Head(NamedTuple):
    """A batch entry, a query head, and the head of keys that it shares."""

    b: Any
    h: Any
    hkv: Any


class Scope(NamedTuple):
    """The head, the sizes and the program's arguments, which all its functions may read.

    A kernel makes one as soon as it knows the head.
    """

    head: Head
    sizes: Sizes
    given: Any
    """The generated ``Given``."""


class Origins(NamedTuple):
    """Sources of logical positions of rows and of keys: an offset, or where one or a map lies."""

    q: Any
    kv: Any


class Shift(NamedTuple):
    """Logical positions of row 0 and of key 0; 0 where a map gives positions."""

    q: Any
    kv: Any


class Tensor(NamedTuple):
    """Pointer and strides of a tensor (batch, heads, rows, width); its last dim has stride 1."""

    base: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any


class KeyGradients(NamedTuple):
    """Pointers to dK and dV (batch, kv_heads, kv_len, width), and strides in rows."""

    dk: Any
    dv: Any
    dk_b: Any
    dk_h: Any
    dk_n: Any
    dv_b: Any
    dv_h: Any
    dv_n: Any


class Rows(NamedTuple):
    """A matrix (rows, width) of one head: where it lies, and the stride of its rows."""

    base: Any
    stride: Any


class Visits(NamedTuple):
    """Numbers of FULL and PARTIAL tiles that a program visits.

    The rest is of listed tiles: the first live tile (-1 where live tiles or FULL ones have gaps),
    and the first FULL one.
    """

    full: Any
    partial: Any
    first_live: Any
    first_full: Any


class Softmax(NamedTuple):
    """The running softmax of a query tile's rows."""

    acc: Any
    """Sums of weights times values (rows, width)."""
    row_sum: Any
    """Sums of weights (rows)."""
    row_max: Any
    """The greatest score so far (rows), yet to be scaled unless scores are SCALED_FIRST."""


class Keys(NamedTuple):
    """Rows of one head's k and v, and the origins of their positions."""

    k: Any
    v: Any
    origin: Any


class LogSum(NamedTuple):
    """Log-sum-exps of rows in two parts: weights are ``2 ** ((score - shift) * log2(e) - rest)``.

    One number of fp32 has too few digits for rows whose scores are all far from 0.
    """

    shift: Any
    rest: Any


class QueryTile(NamedTuple):
    """A query tile: q, dO, ``LogSum``, delta = rowsum(dO * O) - dlse; and which rows.

    ``first`` is its first row, ``places`` are logical positions, ``exists`` says which rows exist.
    """

    q: Any
    do: Any
    lse: Any
    delta: Any
    first: Any
    places: Any
    exists: Any


class KeyTile(NamedTuple):
    """A key-value tile: k, v, its first key, logical positions, and which keys exist."""

    k: Any
    v: Any
    first: Any
    places: Any
    exists: Any


class Columns(NamedTuple):
    """Keys of a tile: the first one, the numbers of all, and the origin of their positions."""

    first: Any
    numbers: Any
    origin: Any


class Piece(NamedTuple):
    """Some keys of a head with their values."""

    k: Any
    v: Any
    columns: Any


class PackedRows(NamedTuple):
    """Rows of a tile that are queries of several heads: query, head, and whether the row exists."""

    query: Any
    h: Any
    exists: Any


class Factors(NamedTuple):
    """Factors of a raw score, and of its exponential in base 2."""

    scale: Any
    of_scores: Any


class ShareLimits(NamedTuple):
    """Limits of how programs share a unit's live tiles: the most parts, a program's least tiles."""

    most_parts: Any
    least_tiles: Any


class ShareOfParts(NamedTuple):
    """A program's share of a unit's parts, of ``taken`` live tiles each.

    ``parts`` is the unit's number of them, ``each`` a program's. The program has those from
    ``first`` on, before ``last``, and their tiles end before number ``end``. ``alone`` tells if
    they are all of the unit's.
    """

    parts: Any
    taken: Any
    each: Any
    first: Any
    last: Any
    end: Any
    alone: Any


class RunningParts(NamedTuple):
    """The softmax of the part at hand, of the group's parts before, and of the groups before.

    ``part`` is the number of the part at hand, ``left`` how many of its tiles are left, ``lost``
    how many sums are not finite.
    """

    softmax: Any
    group: Any
    merged: Any
    part: Any
    left: Any
    lost: Any


class EveryPart(NamedTuple):
    """Parts of a unit's keys that are merged: the first, how many, and how many lie together.

    ``step`` is a power of two: 1, or where the first part of each group has the group's sums more.
    """

    first: Any
    count: Any
    step: Any


class UnitPlaces(NamedTuple):
    """Places of packed rows: their tile of queries, the scope of their first head, and of each row.

    The head of ``scope_of_rows`` has a column of numbers of query heads. ``factors`` are those of
    their scores. ``token`` is the first one of their request, 0 where rows are not packed by
    tokens. ``wrong`` tells whether their batch entry has a number of keys or an offset that cannot
    be.
    """

    tile: Any
    scope: Scope
    scope_of_rows: Scope
    factors: Any
    token: Any
    wrong: Any


class PageRows(NamedTuple):
    """Rows of a head in pages (pages, size, heads, width), and what they are multiplied by.

    ``scale`` is a number, or where one or all lie: a scale of the first page's first row.
    """

    base: Any
    stride_p: Any
    stride_n: Any
    scale: Any
    scale_p: Any
    scale_n: Any


class PagedKeys(NamedTuple):
    """Keys and values of a request's head, the request's row of the table, and how many there are.

    ``pages`` is the number of pages in the pool, ``length`` that of the request's keys.
    """

    k: Any
    v: Any
    table: Any
    stride_t: Any
    pages: Any
    length: Any


class RowFactors(NamedTuple):
    """``Factors``, and those of the products of each row of q."""

    scale: Any
    of_scores: Any
    of_rows: Any


class RequestTokens(NamedTuple):
    """Place of the first token of each request, and behind it that of the next.

    ``tokens`` is the number of all tokens, ``most`` that of a request's which are computed.
    """

    starts: Any
    stride: Any
    tokens: Any
    most: Any


class PageOfKeys(NamedTuple):
    """The page of each key of a tile, its row there, and whether the request has the key."""

    page: Any
    row: Any
    exists: Any


class PartsRoom(NamedTuple):
    """Room for sums (parts, rows, width), row sums and row maxima of parts of one tile's keys."""

    sums: Any
    row_sums: Any
    row_maxes: Any


class Pairs(NamedTuple):
    """Logical positions of a tile's queries and keys, and which of both exist; they broadcast."""

    q: Any
    kv: Any
    rows_ok: Any
    columns_ok: Any


class Weights(NamedTuple):
    """Values of a tile of pairs that kernels of gradients and of tangents compute again."""

    p: Any
    """The weights."""
    p_slope: Any
    """Their derivatives by the final score: of a softmax, once delta is taken off dP, p itself."""
    live: Any
    """Mask of the pairs that take part."""
    raw: Any
    """scale * (q . k)."""
    final: Any
    """The program's score."""


class Operands(NamedTuple):
    """Rows of one head's q, k, v and dO, and where its log-sum-exp and delta lie."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any


class Corner(NamedTuple):
    """A tile's first query and first key."""

    q: Any
    kv: Any


class Share(NamedTuple):
    """One program's share of a sum: a tile of one (batch entry, head) told apart, and its part."""

    corner: Corner
    b: Any
    h: Any
    part: Any


class Steps(NamedTuple):
    """Steps of a buffer between parts, batch entries, heads, queries and keys."""

    part: Any
    b: Any
    h: Any
    q: Any
    kv: Any


class Place(NamedTuple):
    """A tile of rows, or of columns, of one map: the map's number, the tile's, and how many."""

    number: Any
    tile: Any
    tiles: Any


class Extremes(NamedTuple):
    """Pointers to the least and greatest values of a mask's row and column expressions."""

    row_ints: Any
    row_floats: Any
    column_ints: Any
    column_floats: Any


class Stored(NamedTuple):
    """dS (batch, heads, keys, queries) as a backward stored it, and which of its tiles it did."""

    ds: Any
    tiles: Any
    keys: Any
    queries: Any
    key_tiles: Any
    query_tiles: Any
