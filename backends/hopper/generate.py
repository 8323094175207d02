"""A program's Hopper kernels as the text of a Python module.

Functions of pairs and of loops are those of the portable kernels, letter by letter; the name ``tl``
in the module is :mod:`.dialect`.

Non-goals: compiling the text, and choosing tile sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op, dependencies
from attndsl.passes.tiles.plan import DIRECTIONS

from ..triton.device_functions import param_values, parameters, wrapped
from ..triton.generate import fill_template, pair_function
from ..triton.loops import LIST_PARAMETERS, print_loop

if TYPE_CHECKING:
    from attndsl.passes.tiles.plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ..triton.specialise import Specialisation

_SHARED = (
    "q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,",
    "batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,",
    "BLOCK_M, BLOCK_N, STAGES, CONSUMERS, Q_KIND, KV_KIND,",
)
_CONSUMER = (
    "o_desc, LSE, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,",
    "scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,",
    "D, DV, BLOCK_M, BLOCK_N, STAGES, CONSUMERS, Q_KIND, KV_KIND,",
)
_INDENT = "    "


def generate_forward(
    lowered: Lowered, special: Specialisation, loop: LoopPlan, consumers: int
) -> str:
    """The module of ``attention_forward``.

    Args:
        lowered: The program.
        special: What the call is like.
        loop: The plan of the loop over key-value tiles.
        consumers: Warpgroups that share a query tile.
    """
    program = lowered.program
    names = parameters(special)
    functions, helpers = [], set[str]()
    for name, root, doc in (
        ("mask_of_pair", program.mask, "Whether each pair takes part."),
        ("score_of_pair", program.score, "The program's score from scale * (q . k)."),
    ):
        text, used = pair_function(name, root, special, doc)
        functions.append(text)
        helpers |= used
    texts, used = print_loop(
        "forward",
        DIRECTIONS["forward"].along,
        loop,
        names,
        param_values(special, scalar=True),
        special.names(),
    )
    modified = program.score.op is not Op.SCORE
    listed = loop.listed is not None
    flags = {
        "MASKED": program.mask is not None,
        "MODIFIED": modified,
        "SCALED_FIRST": modified
        or (program.mask is not None and "score" in dependencies(program.mask)[program.mask])
        or special.negative_scale,
        "FORWARD_HAS_FULL": listed or bool(loop.full),
        "FORWARD_HAS_PARTIAL": listed or bool(loop.partial),
        "FORWARD_DESCENDING": loop.descending,
    }
    lists = wrapped(LIST_PARAMETERS) if listed else []
    more = {
        "forward_lists": lists,
        "partitions": _partitions(consumers, [*wrapped(names), *lists]),
    }
    return fill_template(
        __package__, ("forward",), [*functions, *texts], helpers | used, flags, names, more
    )


def _partitions(consumers: int, arguments: list[str]) -> list[str]:
    """The statement that sets the warpgroups to work."""
    lines = ["gl.warp_specialize(", _INDENT + "[", *_call("produce", _SHARED, arguments)]
    for part in range(consumers):
        lines += _call("consume", (f"{part},", *_CONSUMER), arguments)
    warps = ", ".join(["4"] * consumers)
    registers = ", ".join(["REGISTERS"] * consumers)
    return [*lines, _INDENT + "],", f"{_INDENT}[{warps}],", f"{_INDENT}[{registers}],", ")"]


def _call(function: str, own: tuple[str, ...], arguments: list[str]) -> list[str]:
    inner = [3 * _INDENT + line for line in (*own, *arguments)]
    return [2 * _INDENT + f"({function}, (", *inner, 2 * _INDENT + ")),"]
