"""Attentions of transformers as calls of composed programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from attndsl.call.dropout_seed import draw_seed
from attndsl.errors import ArgumentError, UnsupportedError

from .mask_programs import repeated
from .model_programs import LISTS, PREFIX, USUAL_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.attention import Attention

    from .mask_programs import Mask
    from .model_programs import Own

_MISSING: Any = object()
_FLAT = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
"""Arguments in which callers of FlashAttention say where packed sequences begin."""


class ModelCall(NamedTuple):
    """Arguments of one call of a model's attention."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float | None
    captures: dict[str, Any]
    location: dict[str, Any]
    """``q_offset`` and the like, where they are not the defaults."""


def runs_eager_alone(module: torch.nn.Module) -> bool:
    """Tell whether transformers allows the model of an attention eager attention alone.

    Models say it on their classes, which stand in the file of their attentions.
    """
    for kind in type(module).__mro__:
        beside = (
            vars(sys.modules[kind.__module__]).values() if kind.__module__ in sys.modules else ()
        )
        models = [
            x
            for x in beside
            if isinstance(x, type)
            and issubclass(x, PreTrainedModel)
            and x.__module__ == kind.__module__
        ]
        config = type(getattr(module, "config", None))
        models = [x for x in models if x.config_class is config] or models
        if models:
            return not any(
                x._supports_sdpa or x._supports_flash_attn or x._supports_flex_attn for x in models
            )
    return False


def _instead(module: torch.nn.Module) -> str:
    name = "eager" if runs_eager_alone(module) else "sdpa"
    return f"use attn_implementation='{name}' for this model"


def captures_of(own: Own | None, module: torch.nn.Module, options: Mapping[str, Any]) -> Any:
    """Captures of the composed program, without those of the mask.

    Args:
        own: The user's program, if there is one.
        module: The model's attention.
        options: What the model passed beside the tensors.

    Raises:
        ArgumentError: A capture of the user's program is nowhere.
        UnsupportedError: The model asks for what the user's program says in another way.
    """
    sink = options.get("s_aux")
    sink = options.get("sinks") if sink is None else sink
    asked = {
        "cap": options.get("softcap"), "logit": sink, "bias": options.get("position_bias"),
        "p": options.get("dropout") or None,
    }  # fmt: skip
    asked |= _chosen_keys(module, options)
    given = {f"{PREFIX}{name}": value for name, value in asked.items() if value is not None}
    if sink is not None and sink.dim() != 1:
        raise UnsupportedError(
            f"the model's attention sinks have shape {tuple(sink.shape)}, and not (heads,)",
            hint=_instead(module),
        )
    if own is None:
        return given
    for said, name, what in (
        (own.has_sink, "logit", "attention sinks"),
        (own.has_weights, "p", "attention dropout"),
    ):
        if said and f"{PREFIX}{name}" in given:
            raise UnsupportedError(
                f"the model has {what}, and the program replaces them",
                hint="drop that line of the program"
                if name == "logit"
                else "set the model's attention dropout to 0, and write it in the program",
            )
    for name, required in own.captures:
        value = options.get(name, _MISSING)
        if value is _MISSING:
            value = own.program.made_of.defaults.get(name, _MISSING)
        if value is _MISSING and not has_default(own, name):
            value = getattr(module, name, _MISSING)
        if value is not _MISSING:
            given[name] = value
        elif required:
            raise ArgumentError(
                f"the program captures '{name}', and nothing gives it",
                hint=f"pass it to the model, model(..., {name}=...), set it on the attention "
                f"modules as attributes called {name}, or give it to attndsl.compile",
            )
    return given


def _chosen_keys(module: torch.nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that the model's indexer chose, which models tell all but transformers' attentions."""
    chosen, blocks = options.get("indices"), options.get("block_indices")
    if blocks is None:
        return {"chosen": chosen}
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise UnsupportedError(
            "the model's indexer chose blocks of keys, and says nowhere how many keys they have",
            hint=_instead(module),
        )
    if size in USUAL_BLOCKS:
        return {"chosen": chosen, f"blocks{size}": blocks}
    return {"chosen": chosen, "blocks": blocks, "size": size}


def has_default(own: Own, name: str) -> bool:
    """Return True if the program gives the param ``name`` a default number."""
    return any(x.name == name and x.default is not None for x in own.program.lowered.program.params)


def check_options(
    own: Own | None, module: torch.nn.Module, query: torch.Tensor, options: Mapping[str, Any]
) -> None:
    """Refuse what would be computed wrong.

    Raises:
        UnsupportedError: See above.
    """
    flat = next((name for name in _FLAT if options.get(name) is not None), None)
    if flat is not None:
        raise UnsupportedError(
            f"packed sequences are given by {flat}",
            hint="pass position_ids that begin at 0 in each sequence, and no attention_mask",
        )
    if query.dim() != 4:
        raise UnsupportedError(
            f"the model's queries have {query.dim()} dims", hint=_instead(module)
        )
    config = getattr(module, "config", None)
    if own is None or not (own.reads_positions or own.reads_lengths) or config is None:
        return
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        raise UnsupportedError(
            "the program compares positions or reads lengths, and the model has cross-attention, "
            "where queries and keys are positions of two sequences",
            hint='use attn_implementation="attndsl" for this model',
        )


def is_causal(
    own: Own | None,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    asked: bool | None,
) -> bool:
    """Return True if an attention for which the model made no mask is causal.

    A module or a call may say so, to sdpa and FlashAttention. Eager attention never listens.

    Raises:
        UnsupportedError: Queries and keys differ in number, so that their positions are unknown.
    """
    rows, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if asked is None else asked
    causal = bool(causal) and rows > 1 and not runs_eager_alone(module)
    reads = own is not None and (own.reads_positions or own.reads_lengths)
    if rows != keys and (causal or reads):
        raise UnsupportedError(
            f"the model gives {rows} queries, {keys} keys and no mask: their positions are unknown",
            hint="let the model make its mask: pass no attention_mask, or (batch, length)",
        )
    return causal


def captures_of_pairs(
    own: Own | None, mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> dict[str, Any]:
    """Captures of a program without a mask for a mask of all pairs.

    Args:
        own: The user's program, if there is one.
        mask: (batch or 1, heads or 1, queries or 1, keys), bool (true: the pair takes part), or
            float, which is added to the score.
        query: (batch, heads, queries, head dim).
        key: (batch, key heads, keys, head dim).

    Raises:
        ArgumentError: The mask has another shape.
        UnsupportedError: The user's program needs positions, which such a mask does not tell.
    """
    rows, keys = query.shape[2], key.shape[2]
    if mask.dim() != 4 or mask.shape[3] != keys or mask.shape[2] not in (1, rows):
        raise ArgumentError(
            f"attention_mask has shape {tuple(mask.shape)}, for {rows} queries and {keys} keys",
            hint="pass (batch, heads or 1, queries, keys), with all keys of the cache",
        )
    if own is not None and (own.reads_positions or own.reads_lengths) and rows != keys:
        raise UnsupportedError(
            f"attention_mask gives all pairs of {rows} queries and {keys} keys, and the program "
            "compares positions or reads lengths, which it does not tell",
            hint="pass an attention_mask of shape (batch, length)",
        )
    name = "live" if mask.dtype is torch.bool else "added"
    return {f"{PREFIX}{name}": mask.expand(-1, -1, rows, -1)}


def fitted(
    own: Own | None, mask: Mask, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor
) -> Mask:
    """The mask for the queries and keys of a call; a mask of one row is that of all rows.

    Raises:
        UnsupportedError: It was made for other numbers of them, as where a model adds keys.
    """
    batch, _, rows, keys = mask.shape
    if keys == key.shape[2] and batch in (1, query.shape[0]):
        if rows == query.shape[2]:
            return mask
        if rows == 1:
            return repeated(own, mask, query)
    raise UnsupportedError(
        f"the model made its mask for {rows} queries and {keys} keys of {batch} sequences, and "
        f"calls attention with {query.shape[2]} queries and {key.shape[2]} keys of "
        f"{query.shape[0]}",
        hint=_instead(module),
    )


def located(mask: Mask, captures: dict[str, Any]) -> dict[str, Any]:
    """Offsets and lengths of a call; ``captures`` gets the offsets that its tensors count from."""
    location: dict[str, Any] = {}
    for name, offset, captured, readers in (
        ("q_offset", mask.q_offset, "q0", ("bias", *LISTS)),
        ("kv_offset", mask.kv_offset, "k0", ("bias", "pad", *LISTS)),
    ):
        if isinstance(offset, torch.Tensor) or offset != 0:
            location[name] = offset
            if any(f"{PREFIX}{reader}" in captures for reader in readers):
                captures[f"{PREFIX}{captured}"] = offset
    if mask.lengths is not None:
        location["q_len"], location["kv_len"] = mask.lengths
    return location


def run(
    attention: Attention, call: ModelCall, weights_too: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output as transformers wants it, (batch, length, heads, dim), and maybe the weights.

    Raises:
        UnsupportedError: Weights are wanted in a graph of ``torch.compile``.
    """
    named = {"scale": call.scale, "captures": call.captures, **call.location}
    weights = None
    if weights_too:
        if f"{PREFIX}p" in call.captures:
            named["seed"] = draw_seed(call.query.device)
        weights = attention.weights(call.query, call.key, **named).to(call.query.dtype)
    out = attention(call.query, call.key, call.value, **named)
    return out.transpose(1, 2).contiguous(), weights
