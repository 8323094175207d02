"""Programs as functions for torch's own ``flex_attention``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.call.call_slice import CallSizes, sizes_of_whole
from attndsl.call.meta_call import call_of_lengths
from attndsl.call.options import Location
from attndsl.call.sub_calls import localised
from attndsl.errors import UnsupportedError
from attndsl.inspection.tile_search import find_tiles, needs_score
from attndsl.ir import Op, const, dependencies, node, toposort

from .torch_source import torch_function

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Call, Scalar
    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

_PLACES = ("q_offset", "kv_offset", "q_index", "kv_index", "h_offset", "b_offset", "kv_lengths")
FLEX_OPTIONS = (*_PLACES, "whole_sizes", "device", "kv_heads", "head_dim")
"""Options of a call beside its sizes and captures."""
_PAIR = ("b", "h", "q_idx", "kv_idx")


def flex_functions(
    lowered: Lowered,
    sizes: tuple[int, int, int, int],
    block_size: int,
    options: Mapping[str, Any],
    captures: Mapping[str, torch.Tensor | Scalar],
) -> tuple[Any, Any]:
    """``(score_mod, block_mask)`` of a call; either is None where it has nothing to say.

    Args:
        lowered: The program.
        sizes: Numbers of queries, keys, batch entries and heads.
        block_size: Rows and columns of the block mask's blocks.
        options: Those of :data:`FLEX_OPTIONS` that are given.
        captures: The program's tensors and params.

    Raises:
        UnsupportedError: The program has parts that FlexAttention has not.
    """
    location = Location(
        **{name: options[name] for name in _PLACES if name in options},
        **sizes_of_whole(options.get("whole_sizes")),
    )
    given = CallSizes(*sizes, options.get("kv_heads"), options.get("head_dim", 64))
    call = call_of_lengths(lowered, given, captures, location, options.get("device"))
    lowered, call = localised(lowered, call)
    program = lowered.program
    for what, part in (("sink", program.sink), ("weights", program.weights),
                       ("dropout", program.dropout)):  # fmt: skip
        if part is not None:
            raise UnsupportedError(
                f"FlexAttention has no {what}", part.span, "run the program with attndsl"
            )
    if program.products:
        raise UnsupportedError(
            "FlexAttention has no products of rows", program.products[0].span,
            "run the program with attndsl",
        )  # fmt: skip
    score, mask = program.score, program.mask
    if mask is not None and needs_score(lowered):
        # A mask_mod does not get the score.
        score, mask = node(Op.WHERE, mask, score, const(float("-inf"))), None
    score_mod = None
    if score.op is not Op.SCORE:
        score_mod = _function("score_mod", ("score", *_PAIR), score, call)
    if mask is None:
        return score_mod, None
    tiles = find_tiles(lowered, call, block_size, block_size, "forward")
    whole = tiles.kinds.expand(*sizes[2:], -1, -1).contiguous()
    mask_mod = _function("mask_mod", _PAIR, mask, call)
    return score_mod, replace(tiles, kinds=whole).to_flex(mask_mod)


def _function(name: str, arguments: tuple[str, ...], root: Node, call: Call) -> Any:
    tensors = {k: x for k, x in call.tensors.items() if _mentions(root, k)}
    numbers: dict[str, Scalar] = dict(call.sizes)
    for key, value in call.params.items():
        if isinstance(value, torch.Tensor):
            tensors |= {key: value} if _mentions(root, key) else {}
        else:
            numbers[key] = value
    group = max(1, call.sizes["heads"] // max(1, call.sizes["kv_heads"]))
    leaves = {"b": "b", "h": "h", "hkv": f"(h // {group})"}
    needed = dependencies(root)[root]
    origins = (("q", call.q_offset, call.q_index), ("kv", call.kv_offset, call.kv_index))
    for position, offset, index in origins:
        own = f"{position}_idx"
        leaves[position] = own
        if position not in needed:
            continue
        origin = f"{position}_offset" if index is None else f"{position}_index"
        while origin in call.tensors or origin in call.params:  # A capture may have any name.
            origin += "_"
        if index is not None:
            tensors[origin] = index
            leaves[position] = f"{origin}[{own}]"
        elif isinstance(offset, torch.Tensor):
            tensors[origin] = offset
            leaves[position] = f"({own} + {origin})"
        elif offset:
            leaves[position] = f"({own} + {offset})"
    return torch_function(name, arguments, root, leaves, numbers, tensors)


def _mentions(root: Node, name: str) -> bool:
    return any(x.op in (Op.LOAD, Op.PARAM) and x.value == name for x in toposort(root))
