"""Warp-specialised kernels for what they can run, portable ones for all else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..base import Gradients, Wants
from ..emit.facts import facts_of, strides
from ..kernels.arguments import capture_arguments, origin
from ..kernels.moving import moving_of
from ..kernels.order import processors_of
from ..kernels.signature import PADDING, signature_of
from ..kernels.streams import on_device, stream_of
from ..kernels.tile_lists import STATISTICS_ROWS, lists_of
from ..memory_order import empty_rows, result_orders, wide_dtype
from ..triton.backend import TritonBackend
from .arguments import (
    HopperLayout,
    addresses,
    blocks_of,
    descriptor_strides,
    is_drawn,
)
from .blocks import block_width
from .copies import room_for
from .counters import Counters
from .describe import describe_kernels
from .distances import empty_sums, split, with_diagonals, with_distances
from .features.skips import parts_of_lists
from .kernels import HopperKernels
from .launch import TensorMaps, launch_of, view
from .learned import gradients_of_parts, learned_in_kernel
from .pair_tiles import is_readable, window, with_pair_tiles
from .portable import why_portable
from .shares import shares_of
from .source import hopper_source
from .stored import empty_slopes
from .tangents import launch_with_tangents, layout_of, readable

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from attndsl.pipeline import Lowered

    from ..base import Backward, Call, Store, Tangents
    from ..emit.facts import KernelFacts
    from ..gradients.shares import Shares
    from ..kernels.config import Config


class HopperBackend(TritonBackend):
    """Runs on GPUs of compute capability 9.0."""

    name = "hopper"

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._portable = TritonBackend(store)
        self._kernels = HopperKernels(store)
        self._maps = TensorMaps()
        self._counters = Counters()

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device``, or None."""
        if device.type != "cuda" or torch.version.hip is not None:
            return "its kernels are for NVIDIA's Hopper GPUs"
        refusal = super().why_not(device)
        if refusal is not None:
            return refusal
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"its kernels need compute capability 9.0, and this is {capability}"
        return None

    def _parts_of_lists(
        self, lowered: Lowered, facts: KernelFacts, direction: str, config: Config
    ) -> int:
        return parts_of_lists(lowered, facts, direction, config)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        layout = self._hopper_layout(lowered, call, "forward")
        if layout.why_portable is not None:
            return self._portable.forward(lowered, call)
        q, views, of = call.q, layout.views, self._maps.of
        out = layout.orders.out.empty(q)
        batch, heads, q_len, _ = q.shape
        lse = empty_rows(q, batch, heads, q_len)
        launch = layout.launches["forward"]
        stream = stream_of(q.device)
        with on_device(q.device):
            of_pairs = _read_by_tiles(layout, call)
            lists = lists_of(layout, lowered, call, "forward", stream)
            launch.run(
                layout.programs,
                stream,
                [
                    *of(views["q_desc"], q), *of(views["k_desc"], call.k),
                    *of(views["v_desc"], call.v), *of(views["o_desc"], out), lse.data_ptr(),
                    *self._pair_maps(layout, of_pairs),
                    *self._counter(layout, q.device, stream), call.scale, *layout.sizes,
                    origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
                    layout.together["forward"],
                    *capture_arguments(layout.facts, call), *lists,
                ],
            )  # fmt: skip
        return out, lse

    def _gradients(
        self, lowered: Lowered, call: Call, backward: Backward
    ) -> tuple[Gradients, torch.Tensor]:
        out, lse, grad_out, grad_lse, wants = backward
        if descriptor_strides(grad_out) is None and (
            wants.tensors or wants.params or wants.slopes or not grad_out.is_contiguous()
        ):
            # A copy, at an address that suits: portable kernels have other shares of the gradients.
            grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        has_dlse = grad_lse is not None
        layout = self._hopper_layout(lowered, call, "backward", grad_out, wants, has_dlse)
        if layout.why_portable is not None:
            return self._portable._gradients(lowered, call, backward)
        q, k, v, views, of = call.q, call.k, call.v, layout.views, self._maps.of
        batch, heads, q_len, head_dim = q.shape
        padded = -(-q_len // PADDING) * PADDING
        rows = (batch, heads, padded)
        lse2 = lse.new_empty(rows)
        delta = torch.empty_like(lse2)
        sums = lse.new_empty((*rows, block_width(head_dim)))
        orders, kind = layout.orders, wide_dtype(wants.wide)
        dk, dv = orders.k.empty(k, kind), orders.v.empty(v, kind)
        dlse = lse if grad_lse is None else grad_lse.contiguous()
        launches, learned = layout.launches, layout.learned
        launch = launches["backward_kv"]
        config = launch.executable.config
        kv_tiles = -(-k.shape[2] // config.block_n)
        columns = lse.new_empty((batch, heads, k.shape[2])) if learned.column else None
        factors = lse.new_empty((batch, heads, 2 * kv_tiles)) if learned.factor else None
        slopes = empty_slopes(call, config) if wants.slopes else None
        distances = empty_sums(call, config) if layout.facts.adds_diagonals else None
        stream = stream_of(q.device)
        with on_device(q.device):
            of_pairs = _read_by_tiles(layout, call)
            launches["prepare_backward"].run(
                padded // STATISTICS_ROWS * batch * heads, stream,
                [*addresses(out, grad_out, lse, dlse, lse2, delta, sums), *strides(out)[:3],
                 *layout.grad_strides, heads, q_len],
            )  # fmt: skip
            launch.run(
                layout.programs, stream,
                [
                    *of(views["q_desc"], q), *of(views["k_desc"], k), *of(views["v_desc"], v),
                    *of(views["do_desc"], grad_out), *of(views["lse_desc"], lse2),
                    *of(views["delta_desc"], delta), *addresses(sums, dk, dv),
                    *self._pair_maps(layout, of_pairs),
                    *(() if slopes is None else of(views["slopes_desc"], slopes.values)),
                    *(() if slopes is None else addresses(slopes.stored)),
                    *self._counter(layout, q.device, stream), call.scale,
                    *layout.sizes, origin(call.q_offset, call.q_index),
                    origin(call.kv_offset, call.kv_index), padded,
                    *orders.k.rows, *orders.v.rows, layout.together["backward_kv"],
                    *(part for part in (columns, factors, distances) if part is not None),
                    *capture_arguments(layout.facts, call),
                    *lists_of(layout, lowered, call, "backward_kv", stream),
                ],
            )  # fmt: skip
            dq = None
            if wants.q:
                dq = orders.q.empty(q, kind)
                launches["dq_from_sums"].run(
                    padded // 32 * batch * heads, stream,
                    [*addresses(sums, dq), call.scale, *orders.q.rows, heads, q_len],
                )  # fmt: skip
        tensors: dict[str, torch.Tensor] = {}
        params: dict[str, torch.Tensor] = {}
        if layout.others.tensors or layout.others.params:
            tensors, params = gradients_of_parts(
                lowered, call, learned, layout.others, lse, delta, grad_lse, factors, columns
            )
        gradients = Gradients(
            q=dq, k=dk if wants.k else None, v=dv if wants.v else None,
            tensors=tensors, params=params, slopes=slopes,
        )  # fmt: skip
        if distances is not None:
            own = layout.distances
            gradients = with_distances(lowered, call, distances, config, own, gradients)
        return gradients, delta

    def _share_out(self, lowered: Lowered, call: Call, wants: Wants) -> Shares:
        found = shares_of(lowered, call, wants)
        if why_portable(lowered, call, "backward", None, found.lines) is None:
            return found
        return super()._share_out(lowered, call, wants)

    def _key_of_shares(self, lowered: Lowered, call: Call, wants: Wants) -> Hashable:
        readable = tuple(descriptor_strides(x) is not None for x in (call.q, call.k, call.v))
        dtypes = (call.q.dtype, *(tensor.dtype for tensor in call.tensors.values()))
        usual = super()._key_of_shares(lowered, call, wants)
        return usual, call.deterministic, dtypes, call.v.shape, readable

    def _pair_maps(self, layout: HopperLayout, tensors: list[torch.Tensor]) -> list[object]:
        found: list[object] = []
        for number, tensor in enumerate(tensors):
            found += self._maps.of(layout.views[f"pair{number}_desc"], tensor)
        return found

    def _counter(self, layout: HopperLayout, device: torch.device, stream: int) -> list[int]:
        return [self._counters.of(device, stream).data_ptr()] if layout.drawn else []

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
        return self._portable._add_apart(lowered, call, lse, delta, grad_out, shares, found)

    def tangent(
        self, lowered: Lowered, call: Call, moved: Tangents, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.ForwardMode`.

        There is no kernel for Hopper alone that makes tangents where the results are there already.
        """
        return self._portable.tangent(lowered, call, moved, out, lse)

    def forward_with_tangents(
        self, lowered: Lowered, call: Call, moved: Tangents
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """See :class:`~attndsl.backends.base.FusedForwardMode`."""
        wants = Wants(tensors=frozenset(moved.captures))
        if why_portable(lowered, call, "tangent", wants=wants) is not None:
            return None
        moving = readable(moving_of(lowered, call, moved))
        key = (*signature_of(lowered, call, "tangent", None), *moving.signature())
        layout = self._layouts.get(key)
        if layout is None:
            found = self._layout_for(lowered, call, "tangent", moving.facts(), False)
            config = found.executables["forward_tangent"].config
            layout = layout_of(found, moving, _programs(call, "tangent", config))
            self._keep(key, layout)
        assert isinstance(layout, HopperLayout)
        return launch_with_tangents(moving, layout, self._maps, self._counters)

    def choices(
        self, lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None,
        wants: Wants | None,
    ) -> Mapping[str, tuple[Config, ...]]:  # fmt: skip
        """See :class:`~attndsl.runtime.tuning.Tunable`."""
        wants = wants and self._shared_out(lowered, call, wants).lines
        if why_portable(lowered, call, kind, grad_out, wants) is not None:
            return self._portable.choices(lowered, call, kind, grad_out, wants)
        return super().choices(lowered, call, kind, grad_out, wants)

    def choose(
        self, lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None,
        wants: Wants | None, kernel: str, config: Config,
    ) -> None:  # fmt: skip
        """See :class:`~attndsl.runtime.tuning.Tunable`."""
        wants = wants and self._shared_out(lowered, call, wants).lines
        if why_portable(lowered, call, kind, grad_out, wants) is not None:
            self._portable.choose(lowered, call, kind, grad_out, wants, kernel, config)
        else:
            super().choose(lowered, call, kind, grad_out, wants, kernel, config)

    def describe(self, lowered: Lowered, head_dim: int) -> list[str]:
        """See :class:`~attndsl.backends.base.Backend`."""
        return describe_kernels(self, lowered, head_dim)

    def source(self, lowered: Lowered, call: Call, direction: str, wants: Wants) -> str:
        """See :class:`~attndsl.backends.base.Backend`."""
        return hopper_source(lowered, call, direction, wants)

    def _facts(
        self, lowered: Lowered, call: Call, grads: tuple[torch.Tensor, ...], wants: Wants | None
    ) -> KernelFacts:
        facts = with_diagonals(super()._facts(lowered, call, grads, wants), lowered, call)
        direction = "backward_kv" if grads else "forward"
        return with_pair_tiles(facts, lowered, call, direction)

    def _places(self, call: Call) -> tuple[object, ...]:
        # Where views of what pairs look up end; a number on the device is none.
        if not call.tensors or not call.shifted:
            return ()
        return tuple(x for x in (call.q_offset, call.kv_offset) if isinstance(x, int))

    def _hopper_layout(
        self,
        lowered: Lowered,
        call: Call,
        kind: str,
        grad_out: torch.Tensor | None = None,
        wants: Wants | None = None,
        has_dlse: bool = False,
    ) -> HopperLayout:
        layout = self._layout(lowered, call, kind, grad_out, wants, has_dlse)
        assert isinstance(layout, HopperLayout)
        return layout

    def _make_layout(
        self,
        lowered: Lowered,
        call: Call,
        kind: str,
        grad_out: torch.Tensor | None,
        wants: Wants | None,
        has_dlse: bool,
    ) -> HopperLayout:
        refused = why_portable(lowered, call, kind, grad_out, wants)
        if refused is not None:
            facts = facts_of(lowered.program, call)
            orders = result_orders(call.q, call.k, call.v)
            return HopperLayout(facts, {}, (), orders, (), {}, {}, why_portable=refused)
        layout = super()._make_layout(lowered, call, kind, grad_out, wants, has_dlse)
        direction = self._kernels.directions[kind][0]
        config = layout.executables[direction].config
        blocks = blocks_of(direction, layout.facts, config)
        launches = {name: launch_of(kernel) for name, kernel in layout.executables.items()}
        encoders = launches[direction].encoders
        batch, heads, q_len, _ = call.q.shape
        tensors = {"q_desc": call.q, "k_desc": call.k, "v_desc": call.v}
        if grad_out is None:
            tensors["o_desc"] = layout.orders.out.empty(call.q)
        else:
            tensors["do_desc"] = grad_out
        views = {}
        copied = []
        for number, tile in enumerate(layout.facts.pair_tiles):
            name, own = f"pair{number}_desc", window(tile, call)
            if not is_readable(own):
                own = room_for(own)
                copied.append(number)
            views[name] = view(own, own.stride(), blocks[name], encoders.get(name))
        for name, tensor in tensors.items():
            steps = descriptor_strides(tensor)
            assert steps is not None
            views[name] = view(tensor, steps, blocks[name], encoders.get(name))
        if layout.facts.stores_slopes:
            slopes = empty_slopes(replace(call, q=call.q.to("meta")), config).values.flatten(0, 2)
            name, steps = "slopes_desc", slopes.stride()
            views[name] = view(slopes, steps, blocks[name], encoders.get(name))
        if grad_out is not None:
            padded = -(-q_len // PADDING) * PADDING
            rows = torch.empty(batch * heads * padded, device=call.q.device)
            for name in ("lse_desc", "delta_desc"):
                views[name] = view(rows, (1,), blocks[name], encoders.get(name))
        return HopperLayout(
            layout.facts, layout.executables, layout.strides, layout.orders, layout.sizes,
            layout.lists, layout.together, layout.lines, launches, views,
            () if grad_out is None else strides(grad_out)[:3],
            learned_in_kernel(lowered, layout.facts),
            _programs(call, kind, config), is_drawn(lowered, config), tuple(copied),
            *split(lowered, call, wants or Wants()),
        )  # fmt: skip


def _read_by_tiles(layout: HopperLayout, call: Call) -> list[torch.Tensor]:
    """The tensors of ``KernelFacts.pair_tiles``, or copies; kept until kernels are launched."""
    found = []
    for number, tile in enumerate(layout.facts.pair_tiles):
        if number in layout.copied:
            own = window(tile, call)
            found.append(room_for(own).copy_(own))
        else:
            found.append(call.tensors[tile.name])
    return found


def _programs(call: Call, kind: str, config: Config) -> int:
    """Programs of a kernel: one for each of its items, or as many as run at a time.

    The registers of one program are all that a processor has.
    """
    if kind == "backward":
        batch, heads, length, _ = call.k.shape
        block = config.block_n
    else:
        batch, heads, length, _ = call.q.shape
        block = config.block_m
    items = -(-length // block) * batch * heads
    return min(items, processors_of(call.q.device)) if config.persistent else items
