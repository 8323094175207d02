"""``register``: programs as attention implementations of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attndsl.api import compile as compile_program
from attndsl.api import load
from attndsl.attention import Attention
from attndsl.errors import ArgumentError, UnsupportedError

from .attention_calls import (
    ModelCall,
    captures_of,
    captures_of_pairs,
    check_options,
    fitted,
    is_causal,
    located,
    run,
)
from .mask_graph import attend_in_graph
from .mask_programs import Mask, MaskArguments, make_mask
from .model_programs import CAUSAL, NO_MASK, Own, composed, own_program

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "attndsl"
_BEFORE_TEXT = f"{NAME}:"
_MARK = "_attndsl"


@dataclass(frozen=True)
class Adapter:
    """The functions that transformers calls for one implementation."""

    name: str
    own: Own | None
    unmasked: Attention
    """The program of attentions without a mask. Graphs compile no programs, so that it is here."""
    causal: Attention
    meaning: str
    """Tells programs apart that had the same name, one after the other. Graphs depend on it."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Mask | torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """An attention of a model.

        Args:
            module: The model's attention.
            query: (batch, heads, length, head dim).
            key: (batch, key heads, keys, head dim).
            value: (batch, key heads, keys, value dim).
            attention_mask: Of :meth:`mask`, of all pairs, or none.
            **options: ``scaling``, ``dropout``, ``softcap``, ``s_aux``, ``position_bias``,
                ``is_causal``, ``output_attentions``, and what the model's caller passed.

        Returns:
            (batch, length, heads, value dim), and the weights (batch, heads, length, keys) if they
            are asked for.

        Raises:
            AttnDSLError: The call cannot be computed as asked.
        """
        check_options(self.own, module, query, options)
        captures = captures_of(self.own, module, options)
        location: dict[str, Any] = {}
        scale, weights_too = options.get("scaling"), bool(options.get("output_attentions"))
        attention: Attention | None
        if isinstance(attention_mask, Mask):
            mask = fitted(self.own, attention_mask, module, query, key)
            attention = mask.attention
            captures |= mask.captures
            location = located(mask, captures)
            if attention is None:
                call = ModelCall(query, key, value, scale, captures, location)
                return self._within_graph(mask, call, weights_too)
        elif attention_mask is None:
            causal = is_causal(self.own, module, query, key, options.get("is_causal"))
            attention = self.causal if causal else self.unmasked
        else:
            attention = self.unmasked
            captures |= captures_of_pairs(self.own, attention_mask, query, key)
        return run(attention, ModelCall(query, key, value, scale, captures, location), weights_too)

    def _within_graph(
        self, mask: Mask, call: ModelCall, weights_too: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if weights_too:
            raise UnsupportedError(
                "graphs of torch.compile have no weights of attention",
                hint="call the model with output_attentions=True outside of torch.compile",
            )
        if not torch.compiler.is_dynamo_compiling():
            raise UnsupportedError(
                "the mask was made in a graph of torch.compile, and the attention is outside of it",
                hint="compile the whole model, or each of its layers",
            )
        out = attend_in_graph((self.name, self.meaning), mask, call)
        return out.transpose(1, 2).contiguous(), None

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Mask | torch.Tensor | None = None,
        **options: Any,
    ) -> Mask:
        """A mask of a model, of which its attentions get the result.

        Args:
            batch_size: Batch entries.
            q_length: Queries.
            kv_length: Keys.
            q_offset: Position of the first query.
            kv_offset: Position of the first key.
            mask_function: Of (b, h, q, kv), at positions.
            attention_mask: (batch, positions) bool, or what this made before.
            **options: ``allow_is_causal_skip``, ``device``, and more.

        Raises:
            AttnDSLError: The mask cannot be made.
        """
        if isinstance(attention_mask, Mask):
            return attention_mask
        assert mask_function is not None
        asked = MaskArguments(
            batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask,
            # Masks that see both sides say False.
            bool(options.get("allow_is_causal_skip", False)),
            torch.device(options.get("device", "cpu")),
        )  # fmt: skip
        return make_mask(self.own, asked, mask_function)


def register(
    programs: Mapping[str, Attention | str] | str | PathLike[str] | None = None,
    *,
    key: str | None = None,
) -> tuple[str, ...]:
    """Make attndsl known to transformers as attention implementations.

    ``"attndsl"`` runs each model's own attention: its masks, soft caps, sinks, biases and dropout.
    ``"attndsl:TEXT"`` adds a program to that: ``"attndsl:q - kv < 1024"``. A pair takes part if
    both masks keep it, and the program's score lines read the model's final score.

    Args:
        programs: Programs by name, for use as ``"attndsl:NAME"``: texts, compiled programs, or the
            path of a configuration file or program file, as for :func:`attndsl.load`.
        key: Place of the programs in the file, as for :func:`attndsl.load`.

    Returns:
        The names for ``attn_implementation``.

    Raises:
        ArgumentError: ``programs`` is no such thing; a name is no name.
        AttnDSLError: A program has errors.

    Example:
        >>> import attndsl
        >>> attndsl.hf.register({"near": "q - kv < 1024"})
        ('attndsl', 'attndsl:near')
    """
    found: dict[str, Own | None] = {NAME: None}
    for name, program in _given_programs(programs, key).items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"{name!r} is no name of a program", hint="use letters and '_'")
        if isinstance(program, str):
            program = compile_program(program, name=name)
        if not isinstance(program, Attention):
            raise ArgumentError(
                f"the program '{name}' is a {type(program).__name__}",
                hint="pass a text or a compiled program",
            )
        found[f"{_BEFORE_TEXT}{name}"] = own_program(program)
    for name, own in found.items():
        _tell(name, own)
    _know_texts()
    return tuple(found)


def _given_programs(programs: object, key: str | None) -> Mapping[str, Any]:
    if programs is None:
        return {}
    # Values of other kinds are those of a configuration.
    if (
        isinstance(programs, Mapping)
        and key is None
        and all(isinstance(program, str | Attention) for program in programs.values())
    ):
        return programs
    if isinstance(programs, str | PathLike | Mapping):
        return load(programs, key=key)
    raise ArgumentError(
        f"programs is a {type(programs).__name__}",
        hint="pass {'near': 'q - kv < 1024'} or the path of a configuration file",
    )


def _tell(name: str, own: Own | None) -> None:
    """Add an implementation to those of transformers."""
    meaning = "" if own is None else repr(own.program.made_of[:4])
    adapter = Adapter(name, own, composed(own, NO_MASK), composed(own, CAUSAL), meaning)
    AttentionInterface.register(adapter.name, adapter.attend)
    AttentionMaskInterface.register(adapter.name, adapter.mask)


def _know_texts() -> None:
    """Have models add ``"attndsl:TEXT"`` to the implementations when they are first asked for it.

    transformers looks names up in a list, and has no other place for a family of names.
    """
    before = PreTrainedModel.get_correct_attn_implementation
    if hasattr(before, _MARK):
        return

    @wraps(before)
    def known(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention is not None:
            _tell_text(requested_attention)
        return before(self, requested_attention, is_init_check)

    setattr(known, _MARK, True)
    PreTrainedModel.get_correct_attn_implementation = known  # type: ignore[method-assign]


def _tell_text(name: str) -> None:
    if not name.startswith(_BEFORE_TEXT) or name in AttentionInterface():  # type: ignore[no-untyped-call]
        return
    text = name.removeprefix(_BEFORE_TEXT).strip()
    if not text:
        raise ArgumentError(
            f"{name!r} has no program", hint=f'write "{NAME}", or a program behind the colon'
        )
    if text.isidentifier():
        raise ArgumentError(
            f"there is no program '{text}'",
            hint=f"register it first: attndsl.hf.register({{'{text}': ...}}) or the path of a "
            "configuration file",
        )
    _tell(name, own_program(compile_program(text)))
