"""Arguments of Hopper kernels: their types for the compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.experimental.gluon.language import NVMMASharedLayout

from ..emit.facts import ADDRESS
from ..kernels.arguments import capture_types, template_argument
from ..kernels.compile import Argument
from ..kernels.kernel import Task
from .features import BUFFERS, FEATURES
from .features.bias import pair_block
from .tile_shapes import BYTES_OF_TYPES, COLUMN_BLOCK, Block, block_width, key_blocks

if TYPE_CHECKING:
    from ..emit.facts import KernelFacts, PairTile
    from ..kernels.config import Config

_ROWS = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
_STATISTICS = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def moved_argument(name: str) -> str:
    """The argument that describes the tangent of what ``name`` describes: ``q_moved_desc``."""
    return name.replace("_desc", "_moved_desc")


def blocks_of(task: Task, facts: KernelFacts, config: Config) -> dict[str, Block]:
    """Blocks of the descriptors that a kernel takes."""
    d, dv = block_width(facts.head_dim), block_width(facts.value_dim)
    if key_blocks(task, facts) > 1:
        d = COLUMN_BLOCK
    m, n = config.block_m, config.block_n

    def rows(number: int, width: int) -> Block:
        return Block((1, 1, number, width), facts.dtype, _ROWS)

    pairs = {
        f"pair{number}_desc": _pair_block(tile, pair_block(task, facts, config))
        for number, tile in enumerate(facts.pair_tiles)
    }
    if task is not Task.BACKWARD:
        m = m // config.consumers
        own = {
            "q_desc": rows(m, d),
            "k_desc": rows(n, d),
            "v_desc": rows(n, dv),
            "o_desc": rows(m, dv),
        }
        if task is Task.FORWARD_TANGENT:
            own |= {moved_argument(name): block for name, block in own.items()}
        return pairs | own
    statistics = Block((m,), "fp32", _STATISTICS)
    for feature in FEATURES:
        if feature.flag in facts.features:
            pairs |= {x.name: x.block(facts, config) for x in feature.stores if x.block}
    return pairs | {
        "q_desc": rows(m, d),
        "k_desc": rows(n, d),
        "v_desc": rows(n, dv),
        "do_desc": rows(m, dv),
        "lse_desc": statistics,
        "delta_desc": statistics,
    }


def _pair_block(tile: PairTile, shape: tuple[int, int, int]) -> Block:
    """One consumer's tile of what pairs look up."""
    _, queries, keys = shape
    size, rank = BYTES_OF_TYPES[tile.dtype], len(tile.leading) + 2
    layout = NVMMASharedLayout(
        swizzle_byte_width=min(128, keys * size), element_bitwidth=8 * size, rank=rank
    )
    return Block((*(1,) * len(tile.leading), queries, keys), tile.dtype, layout)


def arguments_of(task: Task, function: Any, facts: KernelFacts, config: Config) -> list[Argument]:
    """Types of all arguments of the kernel of a task, by their names."""
    blocks = blocks_of(task, facts, config)
    captures = capture_types(facts)
    found = []
    for name in function.arg_names:
        if name in blocks:
            found.append(Argument(name, blocks[name].type))
        elif name in BUFFERS:
            found.append(Argument(name, BUFFERS[name].type, divisor=ADDRESS))
        elif name == "COUNTER":
            found.append(Argument(name, "*i32", divisor=ADDRESS))
        else:
            found.append(captures.get(name) or template_argument(name, facts))
    return found
