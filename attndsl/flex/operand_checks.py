"""Checks of the arguments of ``flex_attention``, beyond those of every call of a program."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from attndsl.call.argument_checks import FLOATS
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError, counted

_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")
"""Values of torch's own option ``BACKEND``."""
_TORCH_OPTIONS = frozenset(
    {
        "num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2",
        "BLOCK_N2", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ",
        "FORCE_USE_FLEX_ATTENTION", "USE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu",
        "BACKEND",
    }
)  # fmt: skip


def same_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: TorchBlockMask | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value of one batch entry for a batch of queries, as torch has it."""
    tensors = (query, key, value)
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in tensors):
        return key, value
    batch = query.shape[0]
    if block_mask is None or batch == 1 or key.shape[0] != 1 or value.shape[0] != 1:
        return key, value
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def same_dtype(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value in the dtype of query, which torch's kernels multiply them in.

    They may be of another floating dtype, fp8 too, as those of a cache: forward only, as in torch.

    Raises:
        DTypeError: Gradients are asked for.
    """
    tensors = (query, key, value)
    if not all(isinstance(x, torch.Tensor) and x.dtype.is_floating_point for x in tensors):
        return key, value
    if key.dtype == query.dtype and value.dtype == query.dtype:
        return key, value
    if query.dtype not in FLOATS:
        return key, value
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise DTypeError(
            f"query is {query.dtype}, key is {key.dtype} and value is {value.dtype}: calls of "
            "mixed dtypes have no gradients",
            hint="convert key and value before the call, or call it within torch.no_grad()",
        )
    return key.to(query.dtype), value.to(query.dtype)


def number_of(value: Any) -> Any:
    """``value``, a number of numpy's or a 0-d tensor, as a number of Python's; others as they are.

    A tensor on a GPU is waited for.
    """
    scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if scalar else value


def check_heads(query: torch.Tensor, key: torch.Tensor, enable_gqa: bool) -> None:
    """Refuse grouped heads that are not asked for."""
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ShapeError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}",
            hint="pass enable_gqa=True for grouped heads",
        )


def check_block_mask(query: torch.Tensor, key: torch.Tensor, block_mask: TorchBlockMask) -> None:
    """Refuse a block mask of other lengths, sizes or devices than those of the call."""
    if not isinstance(block_mask, TorchBlockMask):
        raise ArgumentError(
            f"block_mask is a {type(block_mask).__name__}",
            hint="make it with attndsl.flex.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)",
        )
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ArgumentError(
            "the block_mask was sliced, and has no mask_mod since",
            hint="set its mask_mod, from that of the whole mask",
        )
    if block_mask.kv_num_blocks.device != query.device:
        raise DeviceError(
            f"block_mask is on {block_mask.kv_num_blocks.device} and query is on {query.device}",
            hint="block_mask.to(query.device)",
        )
    if min(block_mask.BLOCK_SIZE) >= 1 << 30:
        return
    lengths = tuple(block_mask.shape[-2:])
    if lengths != (query.shape[2], key.shape[2]):
        raise ShapeError(
            f"block_mask is of {lengths[0]} queries x {lengths[1]} keys, and the call has "
            f"{query.shape[2]} x {key.shape[2]}",
            hint="make a block mask of the call's lengths",
        )
    needed, listed = -(-query.shape[2] // block_mask.BLOCK_SIZE[0]), block_mask.kv_num_blocks
    if listed.shape[-1] < needed:
        raise ShapeError(
            f"block_mask lists {counted(listed.shape[-1], 'row')} of blocks, and "
            f"{query.shape[2]} queries have {needed}",
            hint="where its rows were sliced, set seq_lengths to the lengths of what is left",
        )
    sizes = block_mask.kv_num_blocks.shape[:-1]
    for name, size, wanted in zip(
        ("heads", "batch entries"), reversed(sizes), (query.shape[1], query.shape[0]), strict=False
    ):
        # In graphs sizes may be symbols, which Dynamo does not look for in tuples.
        if size != 1 and size != wanted:
            raise ShapeError(
                f"block_mask is of {size} {name}, and query has {wanted}",
                hint="make it with the call's own sizes, or with None for all alike",
            )


def backend_of(options: Mapping[str, Any] | None) -> str:
    """The backend that ``kernel_options`` asks for.

    Raises:
        ArgumentError: An option that neither torch nor attndsl has, or a value that it cannot have.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(
            f"kernel_options is a {type(options).__name__}",
            hint="pass a dict, such as {'backend': 'triton'}",
        )
    for name in map(str, options or {}):
        if name != "backend" and name.removeprefix("fwd_").removeprefix("bwd_") not in (
            _TORCH_OPTIONS
        ):
            close = difflib.get_close_matches(name, ["backend", *_TORCH_OPTIONS], n=1)
            raise ArgumentError(
                f"there is no kernel option {name!r}",
                hint=f"did you mean '{close[0]}'?" if close else "attndsl's own is 'backend'",
            )
    for name, value in (options or {}).items():
        bare = str(name).removeprefix("fwd_").removeprefix("bwd_")
        if bare == "BACKEND" and value not in _BACKENDS:
            raise ArgumentError(
                f"kernel option {name!r} is {value!r}",
                hint=f"torch has {', '.join(_BACKENDS)}; attndsl's own option is 'backend'",
            )
        if bare not in ("BACKEND", "backend") and not isinstance(value, int | torch.SymInt):
            raise ArgumentError(
                f"kernel option {name!r} is {value!r}", hint="pass a whole number, or a bool"
            )
    return str((options or {}).get("backend", "auto"))
