"""Gradients of biases from the scores' gradients, which the backward stores as it makes them.

What is added to the score of each pair as it is has the score's gradient, dS, for its own. A kernel
of its own (``triton.pairs``) would make that again, by three of the backward's five products.

Non-goals: tensors whose gradient is a multiple of dS, and those that many pairs share: these would
need far more memory than they take themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import const

from ..triton.pairs import by_pairs, rest_of
from ..triton.shares import share_out
from ..triton.terms import ONE, is_plain, terms_of
from .memory import block_width
from .pair_tiles import indices_of

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants
    from ..triton.shares import Shares
    from ..triton.specialise import Specialisation
    from ..triton.tiles import Config

_MOST = 2
"""Pairs that share an element, beyond which stored gradients take too much memory."""
_INDENT = "    "


def shares_of(lowered: Lowered, call: Call, wants: Wants) -> Shares:
    """As ``share_out``, where the backward makes more of the gradients than sums along lines."""
    found = share_out(lowered, call, wants)
    names = frozenset[str]().union(*(own.tensors for own in found.pairs))
    stored = among(lowered, call, names)
    if not stored:
        return found
    rest = [replace(own, tensors=own.tensors - stored) for own in found.pairs]
    return replace(
        found,
        lines=replace(found.lines, tensors=found.lines.tensors | stored),
        pairs=tuple(own for own in rest if own.tensors),
    )


def among(lowered: Lowered, call: Call, names: frozenset[str]) -> frozenset[str]:
    """Those of the tensors ``names`` whose gradients are sums of dS alone."""
    program = lowered.program
    if program.weights is not None or program.dropout is not None or not names:
        return frozenset()
    # A derivative would be multiplied in before there is dS.
    if lowered.placed.slope is not const(1.0):
        return frozenset()
    if call.q.dtype is not torch.bfloat16 or call.deterministic:
        return frozenset()
    if max(block_width(call.q.shape[3]), block_width(call.v.shape[3])) > 128:
        return frozenset()
    found, least = set(), _MOST + 1
    for name in names:
        terms = terms_of(lowered, {name})
        if len(terms) != 1 or dict(terms[0].factors) != {"score": ONE} or not is_plain(terms[0]):
            continue
        (term,) = terms
        if call.tensors[name].dtype is not call.q.dtype:
            continue
        if not by_pairs(lowered, call, {name}) or not _is_whole(indices_of(term.leaf), name, call):
            continue
        rest = rest_of(term, call)
        least = min(least, rest.batches * rest.heads)
        found.add(name)
    return frozenset(found) if least <= _MOST else frozenset()


def with_stored(special: Specialisation, lowered: Lowered, call: Call) -> Specialisation:
    """``special`` of a backward that stores dS for the gradients that come of it."""
    stored = among(lowered, call, frozenset(special.tensor_gradients))
    if not stored:
        return special
    learned = tuple(name for name in special.tensor_gradients if name not in stored)
    return replace(special, tensor_gradients=learned, stores_slopes=True)


def _is_whole(indices: tuple[str, ...], name: str, call: Call) -> bool:
    """Whether pairs look up all of the tensor."""
    batch, heads, q_len, _ = call.q.shape
    kv_heads, kv_len = call.k.shape[1:3]
    sizes = {"b": batch, "h": heads, "hkv": kv_heads, "q": q_len, "kv": kv_len}
    return tuple(sizes[index] for index in indices) == tuple(call.tensors[name].shape)


def slopes_shape(call: Call, config: Config) -> tuple[int, ...]:
    """Of dS: (batch, heads, keys, queries), both rounded up to whole tiles."""
    batch, heads, q_len, _ = call.q.shape
    keys = -(-call.k.shape[2] // config.block_n) * config.block_n
    return batch, heads, keys, -(-q_len // config.block_m) * config.block_m


def empty_slopes(lowered: Lowered, call: Call, config: Config) -> torch.Tensor:
    """Room for dS, see :func:`slopes_shape`: zeros where a mask leaves tiles out."""
    empty = call.q.new_empty(slopes_shape(call, config))
    return empty if lowered.program.mask is None else empty.zero_()


def gradients_from(
    slopes: torch.Tensor, lowered: Lowered, call: Call, names: frozenset[str]
) -> dict[str, torch.Tensor]:
    """Gradients of the tensors ``names``, from dS as :func:`empty_slopes`."""
    found = {}
    slopes = slopes[:, :, : call.k.shape[2], : call.q.shape[2]]
    for term in terms_of(lowered, names):
        indices = indices_of(term.leaf)
        total, dims = slopes, ["b", "h", "kv", "q"]
        if "hkv" in indices:
            batch, heads, *pairs = total.shape
            kv_heads = call.k.shape[1]
            total = total.reshape(batch, kv_heads, heads // kv_heads, *pairs)
            dims = ["b", "hkv", "member", "kv", "q"]
        gone = [place for place, dim in enumerate(dims) if dim not in indices]
        if gone:
            # In fp32, and in a fixed order, whatever the dtype.
            total = total.sum(gone)
        left = [dim for dim in dims if dim in indices]
        total = total.permute([left.index(index) for index in indices])
        found[term.name] = total.to(call.tensors[term.name].dtype)
    return found


def slope_hooks(special: Specialisation) -> dict[str, list[str]]:
    """Lines of the backward's templates by which dS goes from shared to global memory.

    One consumer stores the tile that both have written. Before both meet again, one tile later, it
    has been read; the tile after that takes its place.
    """
    stores = special.stores_slopes
    wait = ["if PART == 0:", f"{_INDENT}tma_wait(0)"]
    store = [
        "if PART == 0:",
        f"{_INDENT}keys_of_slopes = tl.cdiv(kv_len, BLOCK_N) * BLOCK_N",
        f"{_INDENT}tma_store(",
        f"{2 * _INDENT}slopes_desc, [(b * heads + h) * keys_of_slopes + own, first], shared",
        f"{_INDENT})",
    ]
    found = {
        "stored_desc": ["slopes_desc,"],
        "stored": ["slopes_desc, own,"],
        "stored_imports": ["from attndsl.backends.hopper.shim import tma_store, tma_wait"],
        "slopes_are_stored": wait,
        "store_slopes": store,
    }
    return {name: lines * stores for name, lines in found.items()}
