"""The Hopper backend: warp-specialised kernels where they can run a call, portable ones elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..triton.arguments import capture_arguments, origin
from ..triton.backend import TritonBackend, on_device, stream_of
from .arguments import descriptor, descriptor_strides, forward_blocks
from .kernels import HopperKernels

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Store

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_TOGETHER_BYTES = 24 << 20
"""Keys and values of the heads that run side by side: about half of the L2 cache."""


class HopperBackend(TritonBackend):
    """Runs on GPUs of compute capability 9.0."""

    name = "hopper"

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._portable = TritonBackend(store)
        self._kernels = HopperKernels(store)

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device``, or None."""
        if device.type != "cuda" or torch.version.hip is not None:
            return "its kernels are for NVIDIA's Hopper GPUs"
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"its kernels need compute capability 9.0, and this is {capability}"
        return super().why_not(device)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        q, k, v = call.q, call.k, call.v
        steps = tuple(map(descriptor_strides, (q, k, v)))
        if None in steps or why_portable(call) is not None:
            return self._portable.forward(lowered, call)
        batch, heads, q_len, _ = q.shape
        out = q.new_empty((batch, heads, q_len, v.shape[-1]))
        out_steps = descriptor_strides(out)
        if out_steps is None:
            return self._portable.forward(lowered, call)
        lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
        layout = self._layout(lowered, call, "forward")
        kernel = layout.executables["forward"]
        blocks = forward_blocks(layout.special, kernel.config)
        stream = stream_of(q.device)
        with on_device(q.device):
            lists = self._lists(layout, lowered, call, "forward", stream) if layout.listed else []
            kernel.launch(
                -(-q_len // kernel.config.block_m) * batch * heads,
                stream,
                [
                    descriptor(q, steps[0], blocks["q_desc"]),
                    descriptor(k, steps[1], blocks["k_desc"]),
                    descriptor(v, steps[2], blocks["v_desc"]),
                    descriptor(out, out_steps, blocks["o_desc"]),
                    lse, call.scale, *layout.sizes, origin(call.q_offset, call.q_index),
                    origin(call.kv_offset, call.kv_index), _together(call),
                    *capture_arguments(layout.special, call), *lists,
                ],
            )  # fmt: skip
        return out, lse


def why_portable(call: Call) -> str | None:
    """Why the portable kernels run a call, or None."""
    if call.q.dtype not in _DTYPES:
        return f"the Hopper kernels compute in fp16 and bf16, not {call.q.dtype}"
    if max(call.q.shape[3], call.v.shape[3]) > _MAX_HEAD_DIM:
        return f"the Hopper kernels take head dims up to {_MAX_HEAD_DIM}"
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        return "nothing is to be computed"
    return None


def _together(call: Call) -> int:
    """Query heads whose tiles run side by side: as many as share the L2 cache."""
    k, v = call.k, call.v
    bytes_of_head = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    group = call.q.shape[1] // k.shape[1]
    kv_heads = max(1, _TOGETHER_BYTES // bytes_of_head)
    return int(min(kv_heads * group, call.q.shape[0] * call.q.shape[1]))
