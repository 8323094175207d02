"""Warp-specialised kernels for what they can run, portable ones for all else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..base import Gradients
from ..triton.arguments import capture_arguments, origin
from ..triton.backend import PADDING, TritonBackend, lists_of, on_device, stream_of
from ..triton.kernels import STATISTICS_ROWS
from ..triton.specialise import strides
from .arguments import block_width, blocks_of, descriptor, descriptor_strides
from .kernels import HopperKernels
from .tiles import CANDIDATES

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Store, Wants

_DTYPES = (torch.float16, torch.bfloat16)
_TOGETHER_BYTES = 16 << 20
"""Keys and values of the heads that run side by side: a third of the L2 cache."""


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
        steps = all_strides(q, k, v)
        if steps is None or why_portable(call, "forward") is not None:
            return self._portable.forward(lowered, call)
        batch, heads, q_len, _ = q.shape
        out = q.new_empty((batch, heads, q_len, v.shape[-1]))
        out_steps = descriptor_strides(out)
        if out_steps is None:
            return self._portable.forward(lowered, call)
        lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
        layout = self._layout(lowered, call, "forward")
        kernel = layout.executables["forward"]
        blocks = blocks_of("forward", layout.special, kernel.config)
        stream = stream_of(q.device)
        with on_device(q.device):
            lists = lists_of(layout, lowered, call, "forward", stream)
            kernel.launch(
                -(-q_len // kernel.config.block_m) * batch * heads,
                stream,
                [
                    descriptor(q, steps[0], blocks["q_desc"]),
                    descriptor(k, steps[1], blocks["k_desc"]),
                    descriptor(v, steps[2], blocks["v_desc"]),
                    descriptor(out, out_steps, blocks["o_desc"]),
                    lse, call.scale, *layout.sizes, origin(call.q_offset, call.q_index),
                    origin(call.kv_offset, call.kv_index),
                    _together(call, lowered.program.mask is not None),
                    *capture_arguments(layout.special, call), *lists,
                ],
            )  # fmt: skip
        return out, lse

    def backward(
        self,
        lowered: Lowered,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        wants: Wants,
    ) -> Gradients:
        """See :class:`~attndsl.backends.base.Backend`."""
        q, k, v = call.q, call.k, call.v
        if grad_out.numel() and descriptor_strides(grad_out) is None:
            grad_out = grad_out.contiguous()
        steps = all_strides(q, k, v, grad_out)
        reason = why_portable(call, "backward_kv")
        if steps is None or reason is not None or wants.tensors or wants.params:
            return self._portable.backward(lowered, call, out, lse, grad_out, grad_lse, wants)
        batch, heads, q_len, head_dim = q.shape
        layout = self._layout(lowered, call, "backward", grad_out, wants, grad_lse is not None)
        padded = -(-q_len // PADDING) * PADDING
        lse2, delta = lse.new_empty((2, batch, heads, padded))
        sums = lse.new_empty((batch, heads, padded, block_width(head_dim)))
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        kernel = layout.executables["backward_kv"]
        blocks = blocks_of("backward_kv", layout.special, kernel.config)
        stream = stream_of(q.device)
        with on_device(q.device):
            layout.executables["prepare_backward"].launch(
                padded // STATISTICS_ROWS * batch * heads, stream,
                [out, grad_out, lse, lse if grad_lse is None else grad_lse.contiguous(),
                 lse2, delta, sums, *strides(out)[:3], *strides(grad_out)[:3], heads, q_len],
            )  # fmt: skip
            kernel.launch(
                -(-k.shape[2] // kernel.config.block_n) * batch * k.shape[1], stream,
                [
                    descriptor(q, steps[0], blocks["q_desc"]),
                    descriptor(k, steps[1], blocks["k_desc"]),
                    descriptor(v, steps[2], blocks["v_desc"]),
                    descriptor(grad_out, steps[3], blocks["do_desc"]),
                    descriptor(lse2.flatten(), (1,), blocks["lse_desc"]),
                    descriptor(delta.flatten(), (1,), blocks["delta_desc"]),
                    sums, dk, dv, call.scale, *layout.sizes, origin(call.q_offset, call.q_index),
                    origin(call.kv_offset, call.kv_index), padded,
                    *capture_arguments(layout.special, call),
                    *lists_of(layout, lowered, call, "backward_kv", stream),
                ],
            )  # fmt: skip
            dq = None
            if wants.q:
                dq = q.new_empty(q.shape)
                layout.executables["dq_from_sums"].launch(
                    padded // 32 * batch * heads, stream, [sums, dq, call.scale, q_len]
                )
        return Gradients(
            q=dq, k=dk if wants.k else None, v=dv if wants.v else None, tensors={}, params={}
        )


def why_portable(call: Call, direction: str) -> str | None:
    """Why the portable kernels run this part of a call, or None."""
    if call.q.dtype not in _DTYPES:
        return f"the Hopper kernels compute in fp16 and bf16, not {call.q.dtype}"
    width = max(block_width(call.q.shape[3]), block_width(call.v.shape[3]))
    if width not in CANDIDATES[direction]:
        most = max(CANDIDATES[direction])
        return f"the Hopper kernels of this direction take head dims up to {most}"
    if direction != "forward" and call.deterministic:
        return "the Hopper backward adds up dQ in no fixed order"
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        return "nothing is to be computed"
    return None


def all_strides(*tensors: torch.Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Descriptor strides of each; None if the hardware cannot read one of them."""
    found = tuple(map(descriptor_strides, tensors))
    return None if None in found else found  # type: ignore[return-value]


def _together(call: Call, masked: bool) -> int:
    """Query heads whose tiles run side by side.

    Programs that read the same keys at the same time read them once from the L2 cache, which limits
    the forward at head dim 128; so a group of heads that share keys, and no other, where programs
    take equally long. Where a mask makes them differ, the longest come first, among as many heads
    as fit the cache.
    """
    k, v = call.k, call.v
    group = call.q.shape[1] // k.shape[1]
    if not masked:
        return int(group)
    bytes_of_head = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    kv_heads = max(1, _TOGETHER_BYTES // bytes_of_head)
    return int(min(kv_heads * group, call.q.shape[0] * call.q.shape[1]))
