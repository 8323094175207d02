"""The portable Triton backend: every GPU that Triton has, and its interpreter on CPU tensors."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton

from attndsl.errors import UnsupportedError
from attndsl.passes.widths import POSITION_LIMIT

from ..base import Gradients
from .arguments import Layout, capture_arguments, origin
from .distances import add_distance_gradients, share_out, wants_of_kernels
from .kernels import STATISTICS_ROWS, Kernels
from .library import STATISTICS_PADDING
from .order import of_pairs
from .sinks import add_sink_gradients
from .specialise import LARGE_GRADIENT, Specialisation, specialise, strides, with_gradients
from .tile_lists import list_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.pipeline import Lowered

    from ..base import Call, Scalar, Store, Wants
    from .compile import Executable
    from .kernels import Prepared
    from .tiles import Config

MAX_HEAD_DIM = 512
_MAX_LAYOUTS = 4096
PADDING = STATISTICS_PADDING.value
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonBackend:
    """Generates, compiles and launches kernels; keeps them in memory and in ``store``."""

    name = "triton"
    differentiable = False

    def __init__(self, store: Store) -> None:
        self._kernels = Kernels(store)
        self._shares: dict[tuple[object, ...], tuple[Wants, Wants]] = {}
        self._layouts: dict[tuple[object, ...], Layout] = {}

    @property
    def kernels_built(self) -> int:
        """Kernels compiled (or taken into the interpreter) by this object so far."""
        return self._kernels.built

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device``, or None."""
        if device.type == "cpu":
            if triton.knobs.runtime.interpret:
                return None
            return (
                "Triton compiles for GPUs only "
                "(on CPU tensors, set TRITON_INTERPRET=1 before importing attndsl)"
            )
        if device.type != "cuda":
            return f"Triton has no target for device type {device.type!r}"
        if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < 8:
            return "the kernels need compute capability 8.0 or higher"
        return None

    def check(self, lowered: Lowered, call: Call) -> None:
        """Refuse by name what these kernels cannot do."""
        if call.q.dtype not in _DTYPES:
            raise UnsupportedError(
                f"the triton backend computes in fp16, bf16 and fp32, not {call.q.dtype}",
                hint="convert q, k and v, or use backend='reference'",
            )
        for name, width in (("q", call.q.shape[-1]), ("v", call.v.shape[-1])):
            if not 1 <= width <= MAX_HEAD_DIM:
                raise UnsupportedError(
                    f"the triton backend takes head dims from 1 to {MAX_HEAD_DIM}, "
                    f"and {name} has {width}",
                    hint="use backend='reference'",
                )
        for name, offset, length in (
            ("q_offset", call.q_offset, call.q.shape[2]),
            ("kv_offset", call.kv_offset, call.k.shape[2]),
        ):
            reach = length + (abs(offset) if isinstance(offset, int) else 0)
            if reach >= POSITION_LIMIT:
                raise UnsupportedError(
                    f"positions reach {reach}; the kernels count below {POSITION_LIMIT}",
                    hint=f"use a smaller {name}",
                )

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        q, v = call.q, call.v
        batch, heads, q_len, _ = q.shape
        out = q.new_empty((batch, heads, q_len, v.shape[-1]))
        lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
        if lse.numel() == 0:
            return out, lse
        layout = self._layout(lowered, call, "forward")
        kernel = layout.executables["forward"]
        tiles = -(-q_len // kernel.config.block_m)
        stream = stream_of(q.device)
        with on_device(q.device):
            lists = lists_of(layout, lowered, call, "forward", stream)
            kernel.launch(
                tiles * batch * heads,
                stream,
                [
                    q, call.k, call.v, out, lse, *layout.strides, *layout.out_strides, call.scale,
                    *layout.sizes, origin(call.q_offset, call.q_index),
                    origin(call.kv_offset, call.kv_index), *capture_arguments(layout.special, call),
                    *lists,
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
        if not wants.tensors and not wants.params:
            return self._gradients(lowered, call, out, lse, grad_out, grad_lse, wants)[0]
        apart, scored = self._shared_out(lowered, call, wants)
        found, delta = self._gradients(lowered, call, out, lse, grad_out, grad_lse, scored)
        if apart.tensors or apart.params:
            sums = self._distance_sums(lowered, call, lse, delta, grad_out)
            found = add_distance_gradients(lowered, call, sums, apart, found)
        if lowered.program.sink is None:
            return found
        return add_sink_gradients(lowered, call, lse, delta, wants, found)

    def _shared_out(self, lowered: Lowered, call: Call, wants: Wants) -> tuple[Wants, Wants]:
        """As :func:`.distances.share_out`, kept."""
        key = lowered.digest, call.indexed, wants
        found = self._shares.get(key)
        if found is None:
            found = share_out(lowered, call, wants)
            if len(self._shares) >= _MAX_LAYOUTS:
                self._shares.clear()
            self._shares[key] = found
        return found

    def _distance_sums(
        self,
        lowered: Lowered,
        call: Call,
        lse: torch.Tensor,
        delta: torch.Tensor,
        grad_out: torch.Tensor,
    ) -> torch.Tensor:
        """Sums of dS, see :func:`.distances.add_distance_gradients`."""
        batch, heads, q_len = lse.shape
        kv_len = call.k.shape[2]
        if not lse.numel() or not kv_len:
            return lse.new_zeros((batch, heads, 1, 2, 1))
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        layout = self._layout(lowered, call, "distances", grad_out)
        kernel = layout.executables["distances"]
        block = kernel.config.block_m
        diagonals = -(-q_len // block) + -(-kv_len // block) - 1
        sums = lse.new_empty((batch, heads, diagonals, 2, block))
        with on_device(lse.device):
            kernel.launch(
                batch * heads * diagonals, stream_of(lse.device),
                [
                    call.q, call.k, call.v, grad_out, lse, delta, sums, *layout.strides,
                    *strides(grad_out)[:3], call.scale, *layout.sizes,
                    origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
                    *capture_arguments(layout.special, call),
                ],
            )  # fmt: skip
        return sums

    def _gradients(
        self,
        lowered: Lowered,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        wants: Wants,
    ) -> tuple[Gradients, torch.Tensor]:
        """What kernels make of the gradients, and delta (batch, heads, padded rows)."""
        captures = wants.tensors or wants.params
        if call.deterministic and (wants.params or wants.tensors - of_pairs(lowered.program, call)):
            raise UnsupportedError(
                "the triton backend adds up gradients of captured tensors and params with atomics, "
                "whose order varies from run to run",
                hint="drop deterministic=True, use backend='reference', or look up a tensor of "
                "[batch, heads, q_len, kv_len] by [b, h, q, kv]",
            )
        q, k, v = call.q, call.k, call.v
        batch, heads, q_len, _ = q.shape
        if grad_out.numel() and grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        large = {name for name in wants.tensors if call.tensors[name].numel() >= LARGE_GRADIENT}
        buffers = {
            name: torch.zeros(
                call.tensors[name].shape,
                dtype=torch.float32 if name in large else torch.float64,
                device=q.device,
            )
            for name in sorted(wants.tensors)
        } | {
            name: torch.zeros((), dtype=torch.float64, device=q.device)
            for name in sorted(wants.params)
        }
        dq = (
            torch.zeros_like(q, memory_format=torch.contiguous_format)
            if lse.numel() == 0
            else q.new_empty(q.shape)
        )
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        if lse.numel() == 0:
            dk.zero_(), dv.zero_()
            delta = lse
        else:
            layout = self._layout(lowered, call, "backward", grad_out, wants, grad_lse is not None)
            padded = -(-q_len // PADDING) * PADDING
            lse2 = lse.new_empty((batch, heads, padded))
            delta = torch.empty_like(lse2)
            stream = stream_of(q.device)
            grad_strides = strides(grad_out)[:3]
            rows = layout.executables["row_statistics"]
            shared = [*layout.strides, *grad_strides, call.scale, *layout.sizes,
                      origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
                      *capture_arguments(layout.special, call)]  # fmt: skip
            with on_device(q.device):
                rows.launch(
                    padded // STATISTICS_ROWS * batch * heads, stream,
                    [out, grad_out, lse, lse if grad_lse is None else grad_lse.contiguous(),
                     lse2, delta,
                     *strides(out)[:3], *grad_strides, heads, q_len],
                )  # fmt: skip
                if (wants.k or wants.v) and k.shape[2]:
                    kernel = layout.executables["backward_kv"]
                    tiles = -(-k.shape[2] // kernel.config.block_n)
                    kernel.launch(
                        tiles * batch * k.shape[1], stream,
                        [q, k, v, grad_out, dk, dv, lse2, delta, *shared,
                         *lists_of(layout, lowered, call, "backward_kv", stream)],
                    )  # fmt: skip
                if wants.q or captures:
                    kernel = layout.executables["backward_q"]
                    tiles = -(-q_len // kernel.config.block_m)
                    kernel.launch(
                        tiles * batch * heads, stream,
                        [q, k, v, grad_out, dq, lse2, delta, *shared,
                         *lists_of(layout, lowered, call, "backward_q", stream),
                         *_gradient_arguments(buffers)],
                    )  # fmt: skip
        gradients = Gradients(
            q=dq if wants.q else None,
            k=dk if wants.k else None,
            v=dv if wants.v else None,
            tensors={name: buffers[name].to(call.tensors[name].dtype) for name in wants.tensors},
            params={name: buffers[name].to(_dtype(call.params[name])) for name in wants.params},
        )
        return gradients, delta

    def choices(
        self, lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None,
        wants: Wants | None,
    ) -> Mapping[str, tuple[Config, ...]]:  # fmt: skip
        """See :class:`~attndsl.runtime.tuning.Tunable`."""
        wants = wants and wants_of_kernels(lowered, call, wants)
        special = _special(lowered, call, () if grad_out is None else (grad_out,), wants)
        return {
            direction: self._kernels.configs(lowered, direction, special, call.q.device)
            for direction in self._kernels.directions[kind]
        }

    def choose(
        self, lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None,
        wants: Wants | None, kernel: str, config: Config,
    ) -> None:  # fmt: skip
        """See :class:`~attndsl.runtime.tuning.Tunable`."""
        wants = wants and wants_of_kernels(lowered, call, wants)
        special = _special(lowered, call, () if grad_out is None else (grad_out,), wants)
        self._kernels.choose(lowered, kernel, special, call.q.device, config)
        self._layouts.clear()

    def _layout(
        self,
        lowered: Lowered,
        call: Call,
        kind: str,
        grad_out: torch.Tensor | None = None,
        wants: Wants | None = None,
        has_dlse: bool = False,
    ) -> Layout:
        """What calls of this signature share: kernels, strides and sizes."""
        key = (*_signature(lowered, call, kind, grad_out), wants, has_dlse)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._make_layout(lowered, call, kind, grad_out, wants, has_dlse)
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout

    def _make_layout(
        self,
        lowered: Lowered,
        call: Call,
        kind: str,
        grad_out: torch.Tensor | None,
        wants: Wants | None,
        has_dlse: bool,
    ) -> Layout:
        grads = () if grad_out is None else (grad_out,)
        special = _special(lowered, call, grads, wants)
        device = call.q.device
        prepared = self._kernels.attention(lowered, kind, special, device, has_dlse)
        steps = tuple(s for t in (call.q, call.k, call.v) for s in strides(t)[:3])
        batch, heads, q_len, _ = call.q.shape
        sizes = (batch, heads, call.k.shape[1], q_len, call.k.shape[2])
        out = torch.empty((batch, heads, q_len, call.v.shape[-1]), device="meta")
        lists = {
            direction: self._list_kernels(lowered, special, prepared, direction, device)
            for direction in prepared.listed
        }
        return Layout(special, prepared.executables, steps, strides(out)[:3], sizes, lists)

    def _list_kernels(
        self,
        lowered: Lowered,
        special: Specialisation,
        prepared: Prepared,
        direction: str,
        device: torch.device,
    ) -> Mapping[str, Executable]:
        config = prepared.executables[direction].config
        # They add up no gradients, so that one module serves all directions.
        special = replace(special, tensor_gradients=(), param_gradients=(), large_gradients=())
        return self._kernels.tile_lists(lowered, special, device, config.block_m, config.block_n)


def lists_of(
    layout: Layout, lowered: Lowered, call: Call, direction: str, stream: int
) -> list[Any]:
    """The arguments that a kernel gets whose tiles are listed."""
    kernels = layout.lists.get(direction)
    if kernels is None:
        return []
    return list_arguments(kernels, lowered.sparsity, layout.special, call, direction, stream)


def _special(
    lowered: Lowered, call: Call, grads: tuple[torch.Tensor, ...], wants: Wants | None
) -> Specialisation:
    special = specialise(lowered.program, call, *grads)
    return special if wants is None else with_gradients(special, call, wants.tensors, wants.params)


def _signature(
    lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None
) -> tuple[object, ...]:
    """What a :class:`Layout` depends on; cheap, since every call makes one."""
    q, k, v = call.q, call.k, call.v
    bits = q.data_ptr() | k.data_ptr() | v.data_ptr()
    if grad_out is not None:
        bits |= grad_out.data_ptr()
    found: tuple[object, ...] = (
        kind,
        call.scale < 0,
        call.deterministic,
        torch.get_float32_matmul_precision() if q.dtype is torch.float32 else None,
        isinstance(call.seed, torch.Tensor),
        bits % 16 == 0,
        None if grad_out is None else grad_out.stride(),
        call.q_offset != 0 if isinstance(call.q_offset, int) else call.q_offset.dtype,
        call.kv_offset != 0 if isinstance(call.kv_offset, int) else call.kv_offset.dtype,
    )
    if call.tensors or call.params:
        aligned = tuple(t.data_ptr() % 16 == 0 for t in call.tensors.values())
        found = (*found, aligned, *map(_param_class, call.params.values()))
    if call.signature is not None:
        return (call.signature, *found)
    return (
        lowered.digest,
        *found,
        q.dtype,
        q.device,
        tuple((t.shape, t.stride()) for t in (q, k, v)),
        tuple((t.dtype, t.shape, t.stride()) for t in call.tensors.values()),
        None if call.q_index is None else call.q_index.dtype,
        None if call.kv_index is None else call.kv_index.dtype,
    )


def _param_class(value: Scalar | torch.Tensor) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype
    return isinstance(value, int) and value.bit_length() > 31


def _gradient_arguments(buffers: Mapping[str, torch.Tensor]) -> list[Any]:
    arguments: list[Any] = []
    for buffer in buffers.values():
        arguments.append(buffer)
        arguments += buffer.stride()
    return arguments


def _dtype(value: object) -> torch.dtype:
    assert isinstance(value, torch.Tensor)
    return value.dtype


_UNCHANGED = contextlib.nullcontext()


def stream_of(device: torch.device) -> int:
    """Handle of the current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes ``device`` the current one meanwhile, where it is not."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        return torch.cuda.device(device)
    return _UNCHANGED
