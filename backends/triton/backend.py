"""The portable Triton backend: every GPU that Triton has, and its interpreter on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton

from attndsl.errors import UnsupportedError

from ..base import Backend, Gradients
from ..emit.facts import KernelFacts, facts_of, strides, with_gradients
from ..gradients.lines import line_gradients, lines_among
from ..gradients.pairs import with_pair_sums
from ..gradients.shares import key_of, share_out, wants_of_kernels
from ..gradients.sinks import add_sink_gradients
from ..kernels.arguments import NO_LINES, Layout, capture_arguments, origin
from ..kernels.moving import moving_of
from ..kernels.order import ORDERED, together_of
from ..kernels.signature import PADDING, signature_of
from ..kernels.streams import on_device, stream_of
from ..kernels.tile_lists import STATISTICS_ROWS, lists_of
from ..memory_order import empty_like, empty_rows, result_orders, wide_dtype
from .apart import Again, add_apart
from .cross import kernel_source
from .kernels import Kernels
from .tangents import launch_tangent

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from attndsl.pipeline import Lowered

    from ..base import Backward, Call, Store, Tangents, Wants
    from ..gradients.shares import Shares
    from ..kernels.config import Config
    from ..kernels.moving import Moving
    from ..kernels.tile_lists import ListKernels
    from .kernels import Prepared

MAX_HEAD_DIM = 512
_MAX_LAYOUTS = 4096
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonBackend(Backend):
    """Generates, compiles and launches kernels; keeps them in memory and in ``store``."""

    name = "triton"
    differentiable = False
    contracts = False

    def __init__(self, store: Store) -> None:
        self._kernels = Kernels(store)
        self._shares: dict[Hashable, Shares] = {}
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
        if (device.index or 0) >= (found := torch.cuda.device_count()):
            return f"torch sees {found} GPU(s) here"
        if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < 8:
            return "the kernels need compute capability 8.0 or higher"
        return None

    def check(self, lowered: Lowered, call: Call) -> None:
        """Refuse by name what these kernels cannot do."""
        if call.q.dtype not in _DTYPES:
            raise UnsupportedError(
                f"the triton backend computes in fp16, bf16 and fp32, not {call.q.dtype}",
                hint="convert q, k and v, or use backend='auto': it runs fp64 by torch operations",
            )
        for name, width in (("q", call.q.shape[-1]), ("v", call.v.shape[-1])):
            if not 1 <= width <= MAX_HEAD_DIM:
                raise UnsupportedError(
                    f"the triton backend takes head dims from 1 to {MAX_HEAD_DIM}, "
                    f"and {name} has {width}",
                    hint="use backend='reference'",
                )

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        q, v = call.q, call.v
        batch, heads, q_len, _ = q.shape
        if q.numel() == 0:
            lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
            return empty_like(q, v.shape[-1], wide_dtype(call.wide)), lse
        layout = self._layout(lowered, call, "forward")
        order = layout.orders.out
        out = order.empty(q, torch.float32) if call.wide else order.empty(q)
        lse = empty_rows(q, batch, heads, q_len)
        kernel = layout.executables["forward"]
        tiles = -(-q_len // kernel.config.block_m)
        stream = stream_of(q.device)
        with on_device(q.device):
            lists = lists_of(layout, lowered, call, "forward", stream)
            kernel.launch(
                tiles * batch * heads,
                stream,
                [
                    q, call.k, call.v, out, lse, *layout.strides, *layout.orders.out.strides[:3],
                    call.scale, *layout.sizes, origin(call.q_offset, call.q_index),
                    origin(call.kv_offset, call.kv_index), layout.together["forward"],
                    *capture_arguments(layout.facts, call), *lists,
                ],
            )  # fmt: skip
        return out, lse

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> Gradients:
        """See :class:`~attndsl.backends.base.Backend`."""
        _, lse, grad_out, _, wants = backward
        if grad_out.dtype is not call.q.dtype:  # An operand of products, as they take it.
            grad_out = grad_out.to(call.q.dtype)
            backward = backward._replace(grad_out=grad_out)
        if not wants.tensors and not wants.params:
            return self._gradients(lowered, call, backward)[0]
        shares = self._shared_out(lowered, call, wants)
        found, delta = self._gradients(lowered, call, backward._replace(wanted=shares.lines))
        found = self._add_apart(lowered, call, lse, delta, grad_out, shares, found)
        if lowered.program.sink is None:
            return found
        return add_sink_gradients(lowered, call, lse, delta, wants, found)

    def _shared_out(self, lowered: Lowered, call: Call, wants: Wants) -> Shares:
        """As :meth:`_share_out`, kept."""
        key = self._key_of_shares(lowered, call, wants)
        found = self._shares.get(key)
        if found is None:
            found = self._share_out(lowered, call, wants)
            if len(self._shares) >= _MAX_LAYOUTS:
                self._shares.clear()
            self._shares[key] = found
        return found

    def _share_out(self, lowered: Lowered, call: Call, wants: Wants) -> Shares:
        """Which kernels make which gradients."""
        return share_out(lowered, call, wants)

    def _key_of_shares(self, lowered: Lowered, call: Call, wants: Wants) -> Hashable:
        """What that depends on."""
        return key_of(lowered, call, wants)

    def _add_apart(
        self,
        lowered: Lowered,
        call: Call,
        lse: torch.Tensor,
        delta: torch.Tensor,
        grad_out: torch.Tensor,
        shares: Shares,
        found: Gradients,
    ) -> Gradients:
        """``found`` with the gradients that have kernels of their own."""
        if grad_out.numel() and grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        again = Again(lowered, call, lse, delta, grad_out, self._layout)
        return add_apart(again, shares, found)

    def _gradients(
        self, lowered: Lowered, call: Call, backward: Backward
    ) -> tuple[Gradients, torch.Tensor]:
        """What kernels make of the gradients, and delta (batch, heads, padded rows)."""
        out, lse, grad_out, grad_lse, wants = backward
        q, k, v = call.q, call.k, call.v
        batch, heads, q_len, _ = q.shape
        if grad_out.numel() and grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        lines, row_sums, column_sums = NO_LINES, None, None
        if lse.numel() == 0:
            kind = wide_dtype(wants.wide)
            dq, dk, dv = (empty_like(x, dtype=kind).zero_() for x in (q, k, v))
            delta = lse
        else:
            layout = self._layout(lowered, call, "backward", grad_out, wants, grad_lse is not None)
            orders = layout.orders
            kind = torch.float32 if wants.wide else None
            dq, dk, dv = orders.q.empty(q, kind), orders.k.empty(k, kind), orders.v.empty(v, kind)
            padded = -(-q_len // PADDING) * PADDING
            lse2 = lse.new_empty((batch, heads, padded))
            delta = torch.empty_like(lse2)
            lines = layout.lines
            if lines.rows:
                row_sums = lse.new_empty((len(lines.rows), batch, heads, q_len))
            if lines.columns:
                column_sums = lse.new_empty((len(lines.columns), batch, heads, k.shape[2]))
            stream = stream_of(q.device)
            grad_strides = strides(grad_out)[:3]
            rows = layout.executables["row_statistics"]
            origins = origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index)
            shared = [*layout.strides, *grad_strides, call.scale, *layout.sizes, *origins]
            captures = capture_arguments(layout.facts, call)
            with on_device(q.device):
                rows.launch(
                    padded // STATISTICS_ROWS * batch * heads, stream,
                    [out, grad_out, lse, lse if grad_lse is None else grad_lse.contiguous(),
                     lse2, delta,
                     *strides(out)[:3], *grad_strides, heads, q_len],
                )  # fmt: skip
                if (wants.k or wants.v or column_sums is not None) and k.shape[2]:
                    kernel = layout.executables["backward_kv"]
                    tiles = -(-k.shape[2] // kernel.config.block_n)
                    kernel.launch(
                        tiles * batch * k.shape[1], stream,
                        [q, k, v, grad_out, dk, dv, lse2, delta, *shared,
                         *orders.k.rows, *orders.v.rows,
                         layout.together["backward_kv"], *captures,
                         *lists_of(layout, lowered, call, "backward_kv", stream),
                         *([] if column_sums is None else [column_sums])],
                    )  # fmt: skip
                if wants.q or (row_sums is not None and k.shape[2]):
                    kernel = layout.executables["backward_q"]
                    tiles = -(-q_len // kernel.config.block_m)
                    kernel.launch(
                        tiles * batch * heads, stream,
                        [q, k, v, grad_out, dq, lse2, delta, *shared, *orders.q.rows,
                         layout.together["backward_q"], *captures,
                         *lists_of(layout, lowered, call, "backward_q", stream),
                         *([] if row_sums is None else [row_sums])],
                    )  # fmt: skip
        tensors: dict[str, torch.Tensor] = {}
        params: dict[str, torch.Tensor] = {}
        if wants.tensors or wants.params:
            some = (row_sums, column_sums) if k.shape[2] else (None, None)
            tensors, params = line_gradients(call, wants, lines, *some)
        gradients = Gradients(
            q=dq if wants.q else None,
            k=dk if wants.k else None,
            v=dv if wants.v else None,
            tensors=tensors,
            params=params,
        )
        return gradients, delta

    def tangent(
        self, lowered: Lowered, call: Call, moved: Tangents, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.ForwardMode`."""
        if lse.numel() == 0:
            return torch.zeros_like(out), torch.zeros_like(lse)
        moving = moving_of(lowered, call, moved)
        return launch_tangent(moving, self._tangent_layout(moving), out, lse)

    def _tangent_layout(self, moving: Moving) -> Layout:
        """As :meth:`_layout`, for the kernel of tangents."""
        lowered, call = moving.lowered, moving.call
        key = (*signature_of(lowered, call, "tangent", None), *moving.signature())
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layout_for(lowered, call, "tangent", moving.facts(), False)
            self._keep(key, layout)
        return layout

    def choices(
        self, lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None,
        wants: Wants | None,
    ) -> Mapping[str, tuple[Config, ...]]:  # fmt: skip
        """See :class:`~attndsl.runtime.tuning.Tunable`."""
        wants = wants and wants_of_kernels(lowered, call, wants)
        facts = self._facts(lowered, call, () if grad_out is None else (grad_out,), wants)
        return {
            direction: self._kernels.configs(lowered, direction, facts, call.q.device)
            for direction in self._kernels.directions[kind]
        }

    def choose(
        self, lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None,
        wants: Wants | None, kernel: str, config: Config,
    ) -> None:  # fmt: skip
        """See :class:`~attndsl.runtime.tuning.Tunable`."""
        wants = wants and wants_of_kernels(lowered, call, wants)
        facts = self._facts(lowered, call, () if grad_out is None else (grad_out,), wants)
        self._kernels.choose(lowered, kernel, facts, call.q.device, config)
        self._layouts.clear()

    def source(self, lowered: Lowered, call: Call, direction: str, wants: Wants) -> str:
        """See :class:`~attndsl.backends.base.Backend`."""
        return kernel_source(lowered, call, direction, wants)

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
        key = (*signature_of(lowered, call, kind, grad_out), *self._places(call), wants, has_dlse)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._make_layout(lowered, call, kind, grad_out, wants, has_dlse)
            self._keep(key, layout)
        return layout

    def _keep(self, key: tuple[object, ...], layout: Layout) -> None:
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        self._layouts[key] = layout

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
        facts = self._facts(lowered, call, grads, wants)
        if kind in ("pairs", "stored"):
            facts = with_pair_sums(facts, lowered, call)
        if kind not in ("forward", "backward"):  # They have no such arguments.
            facts = replace(facts, wide_out=False, wide_gradients=False)
        return self._layout_for(lowered, call, kind, facts, has_dlse)

    def _layout_for(
        self, lowered: Lowered, call: Call, kind: str, facts: KernelFacts, has_dlse: bool
    ) -> Layout:
        device = call.q.device
        prepared = self._kernels.attention(lowered, kind, facts, device, has_dlse)
        steps = tuple(s for t in (call.q, call.k, call.v) for s in strides(t)[:3])
        batch, heads, q_len, _ = call.q.shape
        sizes = (batch, heads, call.k.shape[1], q_len, call.k.shape[2])
        orders = result_orders(call.q, call.k, call.v)
        lists = {
            direction: self._list_kernels(lowered, facts, prepared, direction, device)
            for direction in prepared.listed
        }
        names = {*facts.tensor_gradients, *facts.param_gradients}
        learned = lines_among(lowered, names) if kind == "backward" else NO_LINES
        masked = lowered.program.mask is not None
        together = {
            name: together_of(call, name, kernel.config, masked)
            for name, kernel in prepared.executables.items()
            if name in ORDERED
        }
        return Layout(facts, prepared.executables, steps, orders, sizes, lists, together, learned)

    def _list_kernels(
        self,
        lowered: Lowered,
        facts: KernelFacts,
        prepared: Prepared,
        direction: str,
        device: torch.device,
    ) -> ListKernels:
        config = prepared.executables[direction].config
        parts = self._parts_of_lists(lowered, facts, direction, config)
        # They add up no gradients, so that one module serves all directions.
        facts = replace(
            facts, tensor_gradients=(), param_gradients=(), moving_operands="",
            moving_captures=(), pair_tiles=(), stores_slopes=False, adds_diagonals=False,
            wide_out=False, wide_gradients=False,
        )  # fmt: skip
        return self._kernels.tile_lists(
            lowered, facts, device, config.block_m, config.block_n, parts
        )

    def _parts_of_lists(
        self, lowered: Lowered, facts: KernelFacts, direction: str, config: Config
    ) -> int:
        """Of how many parts of an owning tile's rows lists tell which tiles they have."""
        return 1

    def _facts(
        self, lowered: Lowered, call: Call, grads: tuple[torch.Tensor, ...], wants: Wants | None
    ) -> KernelFacts:
        facts = facts_of(lowered.program, call, *grads)
        return facts if wants is None else with_gradients(facts, wants)

    def _places(self, call: Call) -> tuple[object, ...]:
        """What a :class:`Layout` depends on of the positions' values."""
        return ()
