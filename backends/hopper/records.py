"""Records that Hopper's device functions take: channels in shared memory, work tiles of a program.

They are NamedTuples, as those that both families of kernels have (:mod:`..device.records`). A field
that a kernel has no use for is None; a flag of the generated module says so, and nobody reads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Slot(NamedTuple):
    """A stage of a channel, and the phase of its barriers."""

    stage: Any
    phase: Any


class Channel(NamedTuple):
    """Stages of shared memory that tiles go through in turn, from the producer to the consumers."""

    desc: Any
    """Describes where tiles come from: a tuple where several tensors have one each."""
    data: Any
    """The stages; of several tensors a tuple."""
    full: Any
    """Barriers: the tile has come."""
    empty: Any
    """Barriers: all consumers have read the tile; None where nothing takes its place."""
    tangent: Any
    """:class:`Tiles` of the operand's tangent."""


class Tiles(NamedTuple):
    """Tiles that come with those of a channel: where they come from, and their stages."""

    desc: Any
    data: Any


class ForwardMemory(NamedTuple):
    """Shared memory of a forward."""

    q: Channel
    k: Channel
    v: Channel
    out: Any
    """Place of the output; None where it takes that of q."""
    items: Channel
    """One stage, in which the producer describes a work tile: a ``QueryItem``."""
    kept: Any
    """Channel of which pairs dropout keeps."""
    bias: Any
    """Channel of the values that pairs look up: one stage a consumer."""
    overflowed: Any
    """Flags of weights that were too large or too small: of two work tiles, for each consumer."""


class BackwardMemory(NamedTuple):
    """Shared memory of a backward."""

    q: Channel
    k: Channel
    v: Channel
    do: Channel
    lse: Tiles
    """The rests of a ``LogSum``; comes with q."""
    delta: Tiles
    """rowsum(dO * O) - dlse; comes with dO."""
    ds: Channel
    """dS (keys, queries), which both consumers read; ``desc`` says where it is stored."""
    shifts: Any
    """Pointer to the shifts of a ``LogSum``; see ``row_statistics``."""
    p_slope: Any
    """Above head dim 128: weights' derivatives by the score (keys, queries)."""
    items: Channel
    """One stage, in which the producer describes a work tile: a ``KeyItem``."""
    kept: Any
    """Channel of which pairs dropout keeps."""
    bias: Any
    """Channel of the values that pairs look up."""
    lines: Any
    """Sums of dS along diagonals, which the producer adds up."""
    turns: Channel
    """The last two query tiles, each a ``Turn``. A stage is full when the consumers may add to the
    tile's sums of dQ."""


class Call(NamedTuple):
    """Arguments that all work tiles of a launch share."""

    scale: Any
    sizes: Any
    origins: Any
    padded: Any
    """Rows of a head that statistics and sums of dQ have; None in forwards."""
    together: Any
    """Number of heads whose work tiles are side by side in the order of work tiles."""
    counter: Any
    """Count of the work tiles that were drawn; None where programs take them in turn."""
    given: Any


class ForwardResults(NamedTuple):
    """Descriptors of tiles of results, pointers to numbers of each row."""

    out: Any
    lse: Any
    out_tangent: Any
    lse_tangent: Any


class BackwardResults(NamedTuple):
    """Pointers to gradients."""

    dq_sums: Any
    keys: Any
    """A ``KeyGradients``."""
    ds: Any
    """Describes where dS is stored; None where it is not."""
    stored_tiles: Any
    """Flags of the tiles of dS that have been stored."""


class QueryItem(NamedTuple):
    """A work tile of a forward, in integers; its fields are those of ``Work``."""

    work_tile: Any
    """Its number; below 0, or beyond the last, where there is none."""
    tile: Any
    b: Any
    h: Any
    hkv: Any
    full: Any
    partial: Any
    first_live: Any
    first_full: Any
    nothing: Any
    uses_fixed_max: Any


class KeyItem(NamedTuple):
    """A work tile of a backward, in integers."""

    work_tile: Any
    """Its number; beyond the last where there is none."""
    tile: Any
    b: Any
    hkv: Any


class Turn(NamedTuple):
    """A query tile that waits for its turn: where its count lies, -1 for none, and the turn."""

    place: Any
    turn: Any


class Work(NamedTuple):
    """A work tile of one head, and the values that its functions read."""

    tile: Any
    """Its index: of queries in a forward, of keys in a backward."""
    scope: Any
    """The head, the call's sizes, and the program's own arguments."""
    visits: Any
    nothing: Any
    """True if it has no tile, so that one beyond all keys stands for it."""
    uses_fixed_max: Any
    """True if FULL tiles may keep the maximum that they find."""
    origins: Any
    shift: Any


class Rows(NamedTuple):
    """A consumer's rows of a query tile."""

    numbers: Any
    places: Any
    """Logical positions."""
    q: Any
    """The same as a column."""
    parts: Any
    """Values that are looked up by the rows."""
    origin: Any
    """Logical position of the query tile's first row."""
    tile: Any
    """Their q in shared memory."""


class Columns(NamedTuple):
    """A tile of keys, as its pairs with a consumer's rows see it."""

    tile: Any
    parts: Any
    """Values that are looked up by the keys."""
    pairs: Any
    """Values that are looked up by the pairs, if these come by tiles."""


class KeyRows(NamedTuple):
    """A consumer's keys of a tile, the rows of a backward's products, for one query head."""

    first: Any
    numbers: Any
    kv: Any
    """Logical positions as a column."""
    parts: Any
    """Values that are looked up by the keys."""
    column: Any
    """The part of the score that depends on the key alone."""
    origin: Any
    """Logical position of the tile's first key."""
    ragged: Any
    """True if the tile reaches beyond the last key."""
    scale: Any
    """Factor of ``q . k``."""


class KeySums(NamedTuple):
    """Sums of a backward over query tiles."""

    dk: Any
    """Before the scale."""
    dv: Any
    column: Any
    """Sums of dS of each key, eight a row."""


class Kept(NamedTuple):
    """The factor of weights that dropout keeps."""

    factor: Any
    log2: Any
    inverse: Any


class Parts(NamedTuple):
    """Values looked up for a tile of pairs: by queries, by keys, by pairs."""

    q: Any
    kv: Any
    pairs: Any
    first_key: Any
    """Number of the tile's first key."""


class Factors(NamedTuple):
    """Factors of scores, see ``factors_of_scores``."""

    scale: Any
    """Factor of ``q . k``."""
    natural: Any
    """Factor of the program's score, which is then the final one but for the column's part."""
    factor: Any
    """Factor of the program's score, which is then in base 2."""
    steepness: Any
    """Change of a column's part from one key to the next."""


class MaxRule(NamedTuple):
    """The way in which a row's maximum is followed."""

    least_max: Any
    uses_fixed_max: Any
    """True if FULL tiles after the first will keep the maximum."""


class RunningSoftmax(NamedTuple):
    """The running softmax of a consumer's rows."""

    acc: Any
    """Sums of weights times values, without those of the last tile."""
    row_max: Any
    """The greatest score so far: in base 2, or if it is WIDE yet to be taken there by a factor."""
    row_sum: Any
    """Eight sums of weights a row."""
    p: Any
    """Weights of the last tile, packed."""


class RunningTangent(NamedTuple):
    """The running softmax of a consumer's rows, with tangents; sums are four a row."""

    acc: Any
    acc_tangent: Any
    row_max: Any
    row_sum: Any
    row_sum_tangent: Any
    rounded: Any
    """Sums of weights' tangents as they were rounded."""


class Draw(NamedTuple):
    """The draw for the tile before the one that a producer loads."""

    drop: Any
    first_row: Any
    tile_before: Any
    tiles_before: Any
