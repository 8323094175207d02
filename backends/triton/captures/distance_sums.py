"""Gradients of what varies with the distance between query and key: tables, buckets, slopes.

With dS the gradient of the final score and f(q - kv) a term of it, the gradient of f at a distance
is the sum of dS along a diagonal. A kernel makes dS again and adds up whole tiles along the
diagonals of tiles, in a fixed order; torch does the rest on one value a distance (batch, heads,
distances).

Non-goals: calls whose positions are looked up, what the program's weights or dropout mention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.passes.look_up_distance import MARGIN

from ...gradients.gradient_plan import captures_of
from ...gradients.gradient_terms import names_by_distance
from ...kernels.config import Config
from ...tiled.capture_gradients import CaptureSums
from ...tiled.distance_lookups import tile_of_distances
from ..generate import EXTRA
from ..generate_gradients import Sums
from ..tiles import Tiles, pair_bytes
from .kind import OwnKernels, own_kernel

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from attndsl.pipeline import Lowered

    from ...base import Call, CallGradients
    from ...gradients.gradient_plan import GradientShare
    from .kind import BackwardState

# Of two stages the second would be loaded after all of the first has been computed with; a mask
# that looks things up leaves one, since Triton 3.6 cannot pipeline products in a branch.
TILES = Tiles(
    dense={
        64: (
            Config(128, 64, 8, 3),
            Config(64, 64, 8, 3),
            Config(64, 64, 4, 1),
            Config(32, 32, 4, 1),
        ),
        128: (
            Config(64, 64, 8, 3),
            Config(128, 64, 8, 2),
            Config(64, 64, 8, 2),
            Config(32, 32, 4, 1),
        ),
        256: (Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
        512: (Config(32, 32, 4, 1),),
    },
    shared_bytes=pair_bytes,
    whole_diagonals=True,
)
SUMS = Sums(of_ds=True, given=lambda count, facts: ["DISTANCE_SUMS"])
KERNEL = own_kernel("distances", "distances", SUMS, TILES, (*EXTRA, "distances"))


def by_distance(lowered: Lowered, call: Call, names: Collection[str]) -> frozenset[str]:
    """The tensors and params of ``names`` whose gradients are sums along diagonals."""
    if not names or call.indexed:
        return frozenset()
    return names_by_distance(lowered, names)


def sums_of_distances(sums: torch.Tensor) -> torch.Tensor:
    """(batch, heads, distances), from 1 less the keys of all tiles on.

    Args:
        sums: (batch, heads, diagonals of tiles, parts, keys of a tile) fp32, see ``distances``.
    """
    batch, heads, diagonals, parts, block = sums.shape
    whole = sums.new_zeros((batch, heads, diagonals + parts - 1, block))
    # Neighbouring diagonals of tiles share distances.
    for part in range(parts):
        whole[:, :, part : part + diagonals] += sums[..., part, :]
    return whole.flatten(2)


def add_distance_gradients(
    lowered: Lowered,
    call: Call,
    sums: torch.Tensor,
    first: int,
    names: frozenset[str],
    found: CallGradients,
) -> CallGradients:
    """``found`` with the gradients of ``names``, which are of :func:`by_distance`.

    ``sums`` (batch, heads, distances) fp32 are those of dS along diagonals, from that of ``first``
    on: row of the query less row of the key.
    """
    totals = CaptureSums(call, captures_of(call, names))
    terms, start = totals.of_score(lowered.derivative), first + call.k.shape[2] + MARGIN
    padded = {decl.name for decl in lowered.program.tensors if decl.is_padded}
    terms = tuple(term for term in terms if not totals.add_line(term, padded, sums, start))
    if terms:
        batch, heads, number = sums.shape
        totals.add(terms, sums[..., None], tile_of_distances(call, (batch, heads), first, number))
    return found.plus(totals.tensors(), totals.params())


def _make(state: BackwardState, share: GradientShare, found: CallGradients) -> CallGradients:
    call = state.call
    _, batch, heads, q_len = state.lse.shape
    layout, kernel = state.kernel_of(KERNEL)
    block_m, block_n = kernel.config.block_m, kernel.config.block_n
    ratio, kv_tiles = block_m // block_n, -(-call.k.shape[2] // block_n)
    diagonals = ratio * (-(-q_len // block_m) - 1) + kv_tiles
    sums = state.lse.new_empty((batch, heads, diagonals, ratio + 1, block_n))
    state.launch(kernel, batch * heads * diagonals, layout, [], [sums])
    sums, first = sums_of_distances(sums), 1 - block_n * kv_tiles
    return add_distance_gradients(state.lowered, call, sums, first, share.names, found)


BY_DISTANCE = OwnKernels(
    name=KERNEL.name,
    takes=lambda lowered, call, names: [(by_distance(lowered, call, names), None)],
    kernels=(KERNEL,),
    make=_make,
    names_captures=False,
)
