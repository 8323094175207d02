"""The programs of Hugging Face's models: what a model asks for, its mask, and a user's own program.

What models ask for is one text with optional captures. A mask of transformers is another text,
traced from its function. Both are joined with the user's program, and each combination is
compiled once.
"""

from __future__ import annotations

from typing import NamedTuple

from attndsl.api import compile as compile_program
from attndsl.attention import Attention
from attndsl.foundation.caches import memoised
from attndsl.ir import Op, toposort
from attndsl.program_join import join

PREFIX = "hf_"
MASK_PREFIX = "hf_mask_"
"""Prefix of a traced mask's names in the joined program."""
NO_MASK = ""
CAUSAL = "mask = causal()"
_ASKED = """
param cap: float = none
param q0: int = none
param k0: int = none
tensor bias[batch, heads, bias_rows, bias_keys]: float = none
tensor pad[batch, pad_keys]: bool = none
tensor live[batch, heads, live_rows, live_keys]: bool = none
tensor added[batch, heads, added_rows, added_keys]: float = none
tensor chosen[batch, chosen_rows, most_keys]: int = none
tensor blocks[batch, kv_heads, block_rows, most_blocks]: int = none
param size: int = 64
row = q - q0 if given(q0) else q
column = kv - k0 if given(k0) else kv
mask = pad[b, column]
mask = live[b, h, row, column]
mask = column in chosen[b, row, :]
mask = column // size in blocks[b, hkv, row, :]
score = softcap(score, cap)
score = score + bias[b, h, row, column]
score = score + added[b, h, row, column]
"""
"""``q0`` and ``k0`` are the positions of the first row and key where tensors count from them.
``chosen`` and ``blocks`` are keys, and blocks of ``size`` keys, that a model's indexer chose."""
USUAL_BLOCKS = (16, 32, 64, 128, 256)
"""Sizes of blocks that have a line each: kernels find tiles of constant blocks a block at a
time (see M71 in docs/dev/measured.md)."""
_USUAL = "".join(
    f"tensor blocks{size}[batch, kv_heads, block_rows, most_blocks]: int = none\n"
    f"mask = column // {size} in blocks{size}[b, hkv, row, :]\n"
    for size in USUAL_BLOCKS
)
LISTS = ("chosen", "blocks", *(f"blocks{size}" for size in USUAL_BLOCKS))
"""Tensors of what an indexer chose."""
_SINK = "tensor logit[heads]: float = none\nsink = logit[h]\n"
_DROPOUT = "param p: float = none\nweights = dropout(softmax(score), p)\n"


class Own(NamedTuple):
    """A user's program."""

    program: Attention
    captures: tuple[tuple[str, bool], ...]
    """Names of its captures, each with whether a call has to have it."""
    reads_positions: bool
    reads_lengths: bool
    has_sink: bool
    has_weights: bool


def own_program(program: Attention) -> Own:
    """Collect the facts about a user's program that calls need."""
    found = program.lowered.program
    dims = [dim for tensor in found.tensors for dim in tensor.dims]
    nodes = toposort(*found.roots(), *dims)
    sizes = {str(item.value) for item in nodes if item.op is Op.SIZE}
    variables = {str(item.value) for item in nodes if item.op is Op.VAR}
    defaults = program.made_of.defaults
    without = {x.name for x in found.params if x.optional or x.default is not None}
    without |= {x.name for x in found.tensors if x.optional} | defaults.keys()
    captured = [*(x.name for x in found.params), *(x.name for x in found.tensors)]
    names = [(name, name not in without) for name in captured]
    return Own(
        program,
        tuple(names),
        not variables.isdisjoint({"q", "kv"}),
        not sizes.isdisjoint({"q_len", "kv_len"}),
        found.sink is not None,
        found.weights is not None or found.dropout is not None,
    )


@memoised("programs of transformers' layers", 512)
def composed(own: Own | None, mask: str) -> Attention:
    """The program of a call.

    Args:
        own: The user's program, if there is one.
        mask: The text of the model's mask, as :func:`attndsl.trace` gives it; may be empty.
    """
    text = _ASKED + _USUAL
    text += "" if own is not None and own.has_sink else _SINK
    text += "" if own is not None and own.has_weights else _DROPOUT
    parts: list[Attention | str] = [compile_program(text, name="<transformers>")]
    prefixes = [PREFIX]
    if mask:
        parts.append(mask)
        prefixes.append(MASK_PREFIX)
    if own is None:
        joined = join(*parts, prefixes=prefixes, backend="auto")
    else:
        made = own.program.made_of
        joined = join(
            *parts, own.program, prefixes=[*prefixes, ""], backend=made.backend,
            checked=made.checked, exact=own.program.lowered.program.exact,
        )  # fmt: skip
    # Models say where their rows lie. A prompt has fewer rows than a static cache has keys.
    return Attention(*joined.made_of._replace(warns=False))
