"""Tensors that pairs look up, read by tiles: ``bias[h, q, kv]``, masks ``allowed[q, kv]``.

Each consumer has one tile of each tensor in shared memory. Which tensors they are says
:mod:`..tma_bias`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op, param, toposort

from ...emit.module_lines import device_function
from ...kernels.kernel import Task
from ..tile_shapes import BYTES_OF_TYPES, widest
from .feature import Feature, Texts

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ...emit.facts import KernelFacts
    from ...emit.template import Flags
    from ...kernels.config import Config
    from .feature import ModuleSpec


def lookups_of_pairs(lowered: Lowered) -> list[Node]:
    """LOADs by at most each of ``b``, ``h`` and ``hkv``, then by ``q``, then by ``kv``."""
    program = lowered.program
    roots = (program.mask, lowered.placed.pair, program.weights)
    found = []
    for item in toposort(*(root for root in roots if root is not None)):
        if item.op is Op.LOAD and all(index.op is Op.VAR for index in item.args):
            indices = indices_of(item)
            others = indices[:-2]
            if indices[-2:] == ("q", "kv") and len({*others} - {"q", "kv"}) == len(others):
                found.append(item)
    return found


def indices_of(item: Node) -> tuple[str, ...]:
    """The variables by which a LOAD looks up."""
    return tuple(str(index.value) for index in item.args)


def pair_params(lowered: Lowered, facts: KernelFacts) -> dict[Node, Node]:
    """The lookups that are read by tiles, and for each the param that is to stand for it."""
    places = {(tile.name, tile.indices): n for n, tile in enumerate(facts.pair_tiles)}
    found = {}
    for item in lookups_of_pairs(lowered):
        place = places.get((str(item.value), indices_of(item)))
        if place is not None:
            found[item] = param(f"$pair_part{place}", item.dtype)
    return found


def pair_block(task: Task, facts: KernelFacts, config: Config) -> tuple[int, int, int]:
    """Tiles of what pairs look up: how many consumers have one, its queries, its keys."""
    m, n = config.block_m, config.block_n
    if task is Task.FORWARD:
        return config.consumers, m // config.consumers, n
    # Above head dim 128 one consumer alone computes weights.
    return (1, m, n) if widest(facts) > 128 else (2, m, n // 2)


def _shared_bytes(task: Task, facts: KernelFacts, config: Config) -> int:
    """Shared memory of the tiles."""
    parts, queries, keys = pair_block(task, facts, config)
    return parts * queries * keys * _element_bytes(facts)


def _element_bytes(facts: KernelFacts) -> int:
    return sum(BYTES_OF_TYPES[tile.dtype] for tile in facts.pair_tiles)


def _has_tiles(spec: ModuleSpec) -> bool:
    return bool(spec.facts.pair_tiles)


def _flags(spec: ModuleSpec) -> Flags:
    placed, weights = spec.lowered.placed, spec.lowered.program.weights
    used = toposort(*(root for root in (placed.pair, weights) if root is not None))
    return {
        "BIAS_TILES": len(spec.facts.pair_tiles),
        # Of one pair, of all tensors together.
        "BIAS_BYTES": _element_bytes(spec.facts),
        "BIAS_IN_MASK": set(used).isdisjoint(pair_params(spec.lowered, spec.facts)),
        # Rows of a backward's products are keys.
        "BIAS_TURNED": not spec.is_forward,
    }


def _functions(spec: ModuleSpec) -> Texts:
    places = []
    for tile in spec.facts.pair_tiles:
        leading = "".join(f"head.{name}, " for name in tile.leading)
        places.append(f"({leading}query, key)")
    doc = "Where the tiles of each tensor begin."
    body = [f"return ({', '.join(places)},)"]
    return Texts([device_function("places_of_bias", "head, query, key", doc, body)])


def _arguments(spec: ModuleSpec) -> list[str]:
    return [f"pair{number}_desc" for number in range(len(spec.facts.pair_tiles))]


BIAS = Feature(
    "HAS_BIAS", _has_tiles, _flags, "bias", functions=_functions, arguments=_arguments,
    shared_bytes=_shared_bytes,
)  # fmt: skip
