"""Gradients of biases from the scores' gradients, which the backward stores as it makes them.

What is added to the score of each pair as it is has the score's gradient, dS, for its own. A kernel
of its own (``gradients.pairs``) would make that again, by three of the backward's five products; so
dS of the tiles that a mask leaves goes to memory in 16 bits, as it goes into the products of dQ and
dK, and a kernel adds it up (``triton/templates/stored.py``).

Non-goals: tensors whose gradient is a multiple of dS, and those that so many pairs share that dS
would take far more memory than their gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..base import StoredDS
from ..gradients.pairs import by_pairs, rest_of
from ..gradients.terms import ONE, is_plain, terms_of
from .capture_sums import holds_score_gradient

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants
    from ..gradients.plan import GradientPlan
    from ..kernels.config import Config

_MOST = 4
"""Bytes that stored dS may take for each byte of the gradients that are made of it."""


def with_stored(found: GradientPlan, lowered: Lowered, call: Call) -> GradientPlan:
    """``found``, where the backward stores dS if that is worth its memory."""
    names = frozenset[str]().union(*(own.tensors for own in found.pairs))
    stored = among(lowered, call, names)
    if not stored:
        return found

    def only(names: frozenset[str]) -> tuple[Wants, ...]:
        parts = (replace(own, tensors=own.tensors & names) for own in found.pairs)
        return tuple(own for own in parts if own.tensors)

    return replace(
        found,
        lines=replace(found.lines, stores_ds=True),
        pairs=only(names - stored),
        stored=only(stored),
    )


def among(lowered: Lowered, call: Call, names: frozenset[str]) -> frozenset[str]:
    """Those of the tensors ``names`` whose gradients are to be made of stored dS.

    It takes 2 bytes a pair and has the bits of bf16, as what torch's own attention in bf16 gives a
    bias. All of them share it, so that it may take four times as much as they do together: with
    fp32 tensors, of eight pairs that share each element.
    """
    if not names or not holds_score_gradient(lowered, call):
        return frozenset()
    found, room = set(), 0.0
    for name in names:
        terms = terms_of(lowered, {name})
        if len(terms) != 1 or dict(terms[0].factors) != {"score": ONE} or not is_plain(terms[0]):
            continue
        if by_pairs(lowered, call, {name}):
            rest = rest_of(terms[0], call)
            found.add(name)
            room += call.tensors[name].element_size() / (rest.batches * rest.heads)
    return frozenset(found) if call.q.element_size() <= _MOST * room else frozenset()


def empty_ds(call: Call, config: Config) -> StoredDS:
    """Room for dS, of which nothing is stored yet."""
    batch, heads, q_len, _ = call.q.shape
    counts = -(-call.k.shape[2] // config.block_n), -(-q_len // config.block_m)
    lengths = counts[0] * config.block_n, counts[1] * config.block_m
    stored = torch.zeros((batch, heads, *counts), dtype=torch.int8, device=call.q.device)
    return StoredDS(call.q.new_empty((batch, heads, *lengths)), stored)
