"""A drop-in for ``torch.nn.attention.flex_attention``, traced into attndsl programs."""

from __future__ import annotations

from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks

from .block_mask import BlockMask, create_block_mask
from .flex_call import AuxOutput, AuxRequest, flex_attention
from .kernel_options import FlexKernelOptions
from .tracing import Trace, trace

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "Trace",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
    "trace",
]
