"""A trainer's configuration for sequences that several processes share, or why there is none."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from torchtitan.components import validate
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.common.decoder import Decoder

from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.parallel import Shape
from attndsl.parallel.row_layouts import LAYOUTS, chunk_size

from .attention_module import Attention, program_of
from .shared_attention import Shared, SharedDTensors

if TYPE_CHECKING:
    from collections.abc import Iterator

_OTHERS = (FlexAttention.Config, ScaledDotProductAttention.Config, VarlenAttention.Config)
_NAMES = {"headtail": "head_tail", None: "contiguous"}
"""Layouts by torchtitan's names."""
_MODULES = {"spmd_types": Shared, "partial_dtensor": SharedDTensors}
"""Classes of attention by ``parallelism.spmd_backend``."""
_ALONE = "or set context_parallel_degree to 1"


def shared(config: Any, validator: Any) -> Any:
    """``config`` with attention, and a validator, of shared sequences; itself it stays as it is.

    Args:
        config: A trainer's.
        validator: The class that stands in for torchtitan's validator.

    Raises:
        ArgumentError: A layout that there is not, or a length that it does not divide.
        UnsupportedError: What cannot be done with shared sequences.
    """
    layout_of(config.parallelism.context_parallel_load_balancer)
    _check_length(config.training.seq_len, config.parallelism.context_parallel_degree)
    for problem, hint in _problems(config):
        raise UnsupportedError(problem, hint=f"{hint}, {_ALONE}")
    spec = replace(config.model_spec, model=deepcopy(config.model_spec.model))
    _replace_attention(spec.model, _MODULES[config.parallelism.spmd_backend])
    checks = config.validator
    if type(checks) is validate.Validator.Config:
        checks = validator.Config(**{x.name: getattr(checks, x.name) for x in fields(checks)})
    return replace(config, model_spec=spec, validator=checks)


def layout_of(balancer: str | None) -> str:
    """The layout that ``parallelism.context_parallel_load_balancer`` names.

    Raises:
        ArgumentError: It names none.
    """
    found = _NAMES.get(balancer, balancer)
    if found not in LAYOUTS:
        raise ArgumentError(
            f"context_parallel_load_balancer is {balancer!r}, and there is no such layout for "
            "attndsl's attention",
            hint="'auto' and 'balanced' weigh the rows of each batch by its documents, as 'ptrr' "
            "weighs those of a BlockMask; others are 'headtail' and None",
        )
    return found


def _check_length(length: int, ranks: int) -> None:
    """Raise if layouts do not give all processes as many rows.

    Losses in chunks and sequence parallelism have each process do as much as the others.

    Raises:
        ArgumentError: They do not.
    """
    if length % (2 * ranks * chunk_size(length, ranks)):
        raise ArgumentError(
            f"sequences of {length} rows have no layout that gives {ranks} processes as many",
            hint=f"choose a multiple of {256 * ranks} for training.seq_len",
        )


def _problems(config: Any) -> Iterator[tuple[str, str]]:
    """Settings that do not work with shared sequences, and what to set instead."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree > 1:
        yield (
            "a pipeline has several batches at once, and layouts follow the latest one",
            "set pipeline_parallel_degree to 1",
        )
    if parallelism.spmd_backend not in _MODULES:
        yield (
            f"spmd_backend is {parallelism.spmd_backend!r}, which gathers all keys",
            f"choose one of {', '.join(_MODULES)}",
        )
    if config.debug.spmd_typechecking:
        yield (
            "the checker of SPMD types does not know attndsl's exchange of keys",
            "set debug.spmd_typechecking to False",
        )
    if not config.training.disable_cuda_graphs:
        yield (
            "a CUDA graph would replay the plan of one batch's documents",
            "set training.disable_cuda_graphs to True",
        )
    if type(config.validator) is not validate.Validator.Config and config.validator.enable:
        yield (
            f"the validator is a {type(config.validator).__qualname__}, which shards batches by "
            "itself",
            "use torchtitan's Validator.Config",
        )
    yield from _problems_of_model(config.model_spec.model)


def _problems_of_model(model: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(model, Decoder.Config):
        yield (
            f"the model is a {type(model).__qualname__}, which is none of torchtitan's decoders",
            "train it in a loop of your own, with attndsl.parallel.ContextParallel",
        )
    for name, config, *_ in model.traverse(_OTHERS):
        if not isinstance(config, Attention.Config):
            yield (
                f"{name} is a {type(config).__qualname__}, and all layers share their sequences",
                "put attndsl.torchtitan.Attention.Config there",
            )
        elif program_of(config).lowered.program.dropout is not None:
            yield (f"the program of {name} has dropout, for which this trainer has no seeds",
                   "leave dropout out of the program")  # fmt: skip
    if not any(model.traverse(Attention.Config)):
        yield (
            "the model has no attention of attndsl",
            "put attndsl.torchtitan.Attention.Config in its layers as inner_attention",
        )


def _replace_attention(model: Any, module: Any) -> None:
    """Put the configuration of shared sequences in place of that of whole ones."""
    for _, config, parent, place in list(model.traverse(Attention.Config)):
        own = module.Config(
            window_size=config.window_size, program=config.program, heads=config.heads,
            param_init=config.param_init, sharding_config=config.sharding_config,
        )  # fmt: skip
        setattr(parent, place, own)


def shape_of(config: Any) -> Shape:
    """Sizes of the model's calls, for plans.

    Args:
        config: Of :func:`shared`.
    """
    attention = config.model_spec.model.first_attention
    shares = config.parallelism.tensor_parallel_degree
    heads = attention.n_heads
    dim = getattr(attention, "head_dim", None)
    if dim is None:
        dim = config.model_spec.model.dim // heads
    return Shape(
        heads=heads // shares,
        kv_heads=(getattr(attention, "n_kv_heads", None) or heads) // shares,
        head_dim=dim,
        value_dim=getattr(attention, "v_head_dim", None) or dim,
        itemsize=TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize,
    )
