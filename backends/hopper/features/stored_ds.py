"""Gradients of biases from the scores' gradients, which the backward stores as it makes them.

What is added to the score of each pair as it is has the score's gradient, dS, for its own. A kernel
of its own would make that again, by three of the backward's five products; so dS of the tiles that
a mask leaves goes to memory in 16 bits, as it goes into the products of dQ and dK, and a kernel
adds it up (``triton/captures/pair_gradients.py``).

Non-goals: tensors whose gradient is a multiple of dS, and those that so many pairs share that dS
would take far more memory than their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from ...base import StoredDS
from ...gradients.gradient_terms import ONE, terms_of
from ...triton.captures.pair_gradients import BY_PAIRS, OF_STORED
from ..capture_sums import holds_score_gradient
from ..tile_shapes import Block
from .feature import Buffer, Feature, has_flag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.pipeline import Lowered

    from ...base import Call, CallGradients
    from ...emit.facts import KernelFacts
    from ...gradients.gradient_plan import GradientPlan
    from ...kernels.config import Config

_FLAG = "STORES_DS"
_MOST = 4
"""Bytes that stored dS may take for each byte of the gradients that are made of it."""
_SLOPES = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _takes(plan: GradientPlan, lowered: Lowered, call: Call) -> GradientPlan:
    """Take biases if that is worth the memory of dS.

    It takes 2 bytes a pair and has the bits of bf16, as what torch's own attention in bf16 gives a
    bias. All of them share it, so that it may take four times as much as they do together: with
    fp32 tensors, of eight pairs that share each element.
    """
    own = plan.of_kind(BY_PAIRS.name)
    if not own or not holds_score_gradient(lowered, call):
        return plan
    names, room = set(), 0.0
    for share in own:
        assert share.rest is not None
        for name in share.names:
            terms = terms_of(lowered, {name})
            if len(terms) == 1 and dict(terms[0].factors) == {"score": ONE}:
                names.add(name)
                room += call.tensors[name].element_size() / share.rest.members
    if not names or call.q.element_size() > _MOST * room:
        return plan
    return plan.with_feature(_FLAG, frozenset(names), OF_STORED.name)


def empty_ds(call: Call, config: Config) -> torch.Tensor:
    """Room for dS (batch, heads, keys, queries), both rounded up to whole tiles."""
    batch, heads, key_tiles, query_tiles = _tiles(call, config)
    lengths = key_tiles * config.block_n, query_tiles * config.block_m
    return call.q.new_empty((batch, heads, *lengths))


def no_tiles(call: Call, config: Config) -> torch.Tensor:
    """(batch, heads, tiles of keys, tiles of queries) int8, zeros: nothing is stored yet."""
    return call.q.new_zeros(_tiles(call, config), dtype=torch.int8)


def _tiles(call: Call, config: Config) -> tuple[int, int, int, int]:
    batch, heads, q_len, _ = call.q.shape
    return batch, heads, -(-call.k.shape[2] // config.block_n), -(-q_len // config.block_m)


def _block(facts: KernelFacts, config: Config) -> Block:
    return Block((config.block_n, config.block_m), facts.dtype, _SLOPES)


def _collect(
    lowered: Lowered, call: Call, names: frozenset[str], buffers: Mapping[str, torch.Tensor],
    found: CallGradients,
) -> CallGradients:  # fmt: skip
    return found._replace(stored_ds=StoredDS(buffers["slopes_desc"], buffers["STORED_TILES"]))


STORED_DS = Feature(
    _FLAG,
    has_flag(_FLAG),
    template="stored_ds",
    stores=(Buffer("slopes_desc", "", empty_ds, _block), Buffer("STORED_TILES", "*i8", no_tiles)),
    takes=_takes,
    collect=_collect,
)
