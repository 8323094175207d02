"""Text of Hopper kernels that load what pairs look up by tiles (:mod:`.pair_tiles`).

Each consumer has one tile of each tensor in shared memory. The producer loads the next as soon as
the consumer has read the one before, so it comes while the rest of the step is computed. Templates
name the places; where a program looks nothing up, nothing is there.

Where masks alone look something up, FULL tiles load nothing. Both sides pass their barriers still:
so phases follow the number of tiles, and neither side is ahead of the other by two of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import param, toposort

from .pair_tiles import indices_of, lookups_of_pairs

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts, PairTile

_INDENT = "    "
_HOOKS = (
    "pair_descs", "pair_memory", "pair_producer", "pair_consumer", "pair_load_parameters",
    "load_pairs", "load_partial_pairs", "load_full_pairs", "pair_reader_parameters", "pair_reader",
    "read_first_pairs", "read_pairs", "pair_parts", "leave_pairs", "leave_first_pairs",
)  # fmt: skip


def pair_params(lowered: Lowered, facts: KernelFacts) -> dict[Node, Node]:
    """The lookups that are read by tiles, and for each the param that is to stand for it."""
    places = {(tile.name, tile.indices): n for n, tile in enumerate(facts.pair_tiles)}
    found = {}
    for item in lookups_of_pairs(lowered):
        place = places.get((str(item.value), indices_of(item)))
        if place is not None:
            found[item] = param(f"$pair_part{place}", item.dtype)
    return found


def _in_masks_alone(lowered: Lowered, facts: KernelFacts) -> bool:
    roots = (lowered.placed.pair, lowered.program.weights)
    used = toposort(*(root for root in roots if root is not None))
    return set(used).isdisjoint(pair_params(lowered, facts))


def pair_hooks(
    lowered: Lowered, facts: KernelFacts, direction: str, wide: bool
) -> dict[str, list[str]]:
    """Lines of the templates' hooks.

    Args:
        lowered: The program.
        facts: What the call is like.
        direction: ``forward`` or ``backward_kv``.
        wide: Whether the backward is that of head dims above 128.
    """
    found: dict[str, list[str]] = {name: [] for name in _HOOKS}
    tiles = facts.pair_tiles
    if not tiles:
        return found
    forward = direction == "forward"
    masks = _in_masks_alone(lowered, facts)
    descs = ", ".join(f"pair{n}_desc" for n in range(len(tiles)))
    memory = ", ".join(f"pair{n}_s" for n in range(len(tiles)))
    reader = f"{memory}, pairs_full, pairs_empty,"
    producer = f"{descs}, {reader}"
    used = "PARTIAL" if masks else "True"
    read = f"pair_parts = read_pairs(PART, count, {used}, SCORES, {reader[:-1]})"
    leave = "mbarrier.arrive(pairs_empty.index(PART), count=1)"
    found |= {
        "pair_descs": [f"{descs},"],
        "pair_memory": _memory(tiles, forward, wide),
        "pair_producer": [producer],
        "pair_consumer": [reader],
        "pair_reader": [reader],
        "pair_reader_parameters": [reader],
        "pair_parts": ["pair_parts,"],
        "leave_pairs": [leave],
    }
    if not forward:
        wanted = "step < masked" if masks else "True"
        found["load_pairs"] = [
            "load_pairs(",
            f"{_INDENT}count, {wanted}, head, first + shift.q, tile * BLOCK_N + shift.kv,",
            f"{_INDENT}{producer}",
            ")",
        ]
        found["read_pairs"] = [read]
        return found
    place = "tile * BLOCK_M + shift.q, shift"
    return found | {
        "pair_load_parameters": ["wanted, first_query, shift,", producer],
        "load_pairs": [
            "load_pairs(",
            f"{_INDENT}count, wanted, head, first_query, kv_tile * BLOCK_N + shift.kv,",
            f"{_INDENT}{producer}",
            ")",
        ],
        "load_partial_pairs": [f"True, {place},", producer],
        # The first tile may take the mask's code though it is FULL.
        "load_full_pairs": [
            f"{'visits.partial + step == 0' if masks else 'True'}, {place},", producer,
        ],
        "pair_reader": [reader],
        "pair_reader_parameters": [reader],
        "read_first_pairs": [f"pair_parts = read_pairs(PART, done, True, SCORES, {reader[:-1]})"],
        "read_pairs": [read],
        "leave_first_pairs": [leave],
    }  # fmt: skip


def _memory(tiles: tuple[PairTile, ...], forward: bool, wide: bool) -> list[str]:
    parts, size = "1", "BLOCK_M, BLOCK_N"
    if forward:
        parts, size = "CONSUMERS", "ROWS, BLOCK_N"
    elif not wide:
        parts, size = "2", "BLOCK_M, BLOCK_N // 2"
    lines = []
    for number, tile in enumerate(tiles):
        shape = ", ".join([parts, *["1"] * len(tile.leading), size])
        desc = f"pair{number}_desc"
        lines += [
            f"pair{number}_s = gl.allocate_shared_memory(",
            f"{_INDENT}{desc}.dtype, [{shape}], {desc}.layout",
            ")",
        ]
    return [
        *lines,
        f"pairs_full = gl.allocate_shared_memory(gl.int64, [{parts}, 1], BARRIER)",
        f"pairs_empty = gl.allocate_shared_memory(gl.int64, [{parts}, 1], BARRIER)",
        f"for part in gl.static_range({parts}):",
        f"{_INDENT}mbarrier.init(pairs_full.index(part), count=1)",
        f"{_INDENT}mbarrier.init(pairs_empty.index(part), count=1)",
    ]


def print_pair_functions(lowered: Lowered, facts: KernelFacts, direction: str) -> list[str]:
    """Device functions that load tiles of what pairs look up, and that read them."""
    tiles = facts.pair_tiles
    if not tiles:
        return []
    descs = ", ".join(f"pair{n}_desc" for n in range(len(tiles)))
    memory = ", ".join(f"pair{n}_s" for n in range(len(tiles)))
    masks = _in_masks_alone(lowered, facts)
    along = 0 if direction == "forward" else 1
    return [
        _load_function(tiles, descs, memory, masks, along),
        _read_function(tiles, memory, masks, along),
    ]


def _load_function(
    tiles: tuple[PairTile, ...], descs: str, memory: str, masks: bool, along: int
) -> str:
    step = ["first_query", "first_key"]
    rank = len(tiles[0].leading) + 2
    step[along] += f" + part * pair0_s.shape[{rank - 1 + along}]"
    total = " + ".join(f"pair{n}_desc.block_type.nbytes" for n in range(len(tiles)))
    loads = [f"mbarrier.expect(ready, {total})"]
    for number, tile in enumerate(tiles):
        place = ", ".join([*(f"head.{name}" for name in tile.leading), "query", "key"])
        loads.append(f"tma_load(pair{number}_desc, [{place}], ready, pair{number}_s.index(part))")
    if masks:
        loads = ["if wanted:", *(_INDENT + line for line in loads)]
        loads += ["else:", f"{_INDENT}mbarrier.arrive(ready, count=1)"]
    body = [
        "mbarrier.wait(pairs_empty.index(part), (count & 1) ^ 1)",
        "ready = pairs_full.index(part)",
        f"query, key = {', '.join(step)}",
        *loads,
    ]
    return "\n".join([
        "@gluon.jit",
        "def load_pairs(",
        f"{_INDENT}count, wanted, head, first_query, first_key,",
        f"{_INDENT}{descs}, {memory}, pairs_full, pairs_empty,",
        "):",
        f'{_INDENT}"""Load what pairs look up for each consumer, when it has read what was there.',
        "",
        f"{_INDENT}Unless ``wanted``, nothing: consumers do not read it.",
        f'{_INDENT}"""',
        f"{_INDENT}PARTS: gl.constexpr = pair0_s.shape[0]",
        f"{_INDENT}for part in gl.static_range(PARTS):",
        *(2 * _INDENT + line for line in body),
    ])  # fmt: skip


def _read_function(tiles: tuple[PairTile, ...], memory: str, masks: bool, along: int) -> str:
    turned = ".permute((1, 0))" if along else ""
    lines = []
    for number, tile in enumerate(tiles):
        rank = len(tile.leading) + 2
        shape = f"[pair{number}_s.shape[{rank - 1}], pair{number}_s.shape[{rank}]]"
        lines.append(f"part{number} = pair{number}_s.index(PART).reshape({shape}){turned}")
    parts = " ".join(f"part{number}.load(LAYOUT)," for number in range(len(tiles)))
    lines.append(f"found = ({parts})")
    if masks:
        lines = ["found = (0,)", "if USED:", *(_INDENT + line for line in lines)]
    lines.insert(0, "mbarrier.wait(pairs_full.index(PART), count & 1)")
    return "\n".join([
        "@gluon.jit",
        "def read_pairs(",
        f"{_INDENT}PART: gl.constexpr, count, USED: gl.constexpr, LAYOUT: gl.constexpr,",
        f"{_INDENT}{memory}, pairs_full, pairs_empty,",
        "):",
        f'{_INDENT}"""What the pairs of a consumer\'s tile look up, where it is ``USED``."""',
        *(_INDENT + line for line in [*lines, "return found"]),
    ])  # fmt: skip
