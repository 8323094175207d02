"""Layout that all calls of one signature share: launches, and views of the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch

from attndsl.passes.tiles.tile_plan import LoopPlan

from ..kernels.call_signature import PADDING
from ..kernels.kernel import Task
from ..kernels.launch_spec import LaunchSpec
from ..kernels.tile_order import processors_of
from ..memory_order import MemoryOrder, given_room
from .around_backward import SUM_BLOCK
from .capture_sums import Learned, learned_in_kernel
from .descriptor_types import blocks_of, moved_argument
from .features import FEATURES
from .features.feature import ModuleSpec, OwnTiles
from .features.persistence import is_drawn
from .launch import RowStatistics, Views, descriptor_strides, launch_of, view
from .tile_shapes import block_width
from .tma_bias import is_readable, window
from .tma_copies import room_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..base import Call
    from ..kernels.config import Config
    from ..kernels.kernel import Job
    from .features.feature import Buffer, Feature
    from .launch import Launch, View


@dataclass(frozen=True, slots=True)
class HopperLayout(LaunchSpec):
    """Layout that all calls of one signature share, with launches and views of Hopper kernels."""

    launches: Mapping[str, Launch] = field(default_factory=dict)
    """By name of the executable."""
    views: Mapping[str, View] = field(default_factory=dict)
    """By kernel argument."""
    operands: Views = field(default_factory=Views)
    """Views of the operands, of the output or its gradient, and of a backward's statistics."""
    columns: int = 0
    """Columns of a backward's sums of dQ."""
    statistics: RowStatistics = field(default_factory=RowStatistics)
    """Row statistics of a backward."""
    learned: Learned = field(default_factory=Learned)
    """Parts of the score of which gradients are wanted."""
    programs: int = 0
    """Number of programs of the attention kernel."""
    drawn: bool = False
    """True if these programs draw their tiles by a counter."""
    copied: tuple[int, ...] = ()
    """Numbers of those of the ``pair_tiles`` that are copied first."""
    stores: tuple[Buffer, ...] = ()
    """Buffers that a backward's features store to; they add to those in ``sums``."""
    sums: tuple[Buffer, ...] = ()


def statistics_of(call: Call) -> RowStatistics:
    """The rows of a backward of ``call``."""
    batch, heads, q_len, _ = call.q.shape
    return RowStatistics(batch, heads, -(-q_len // PADDING) * PADDING)


def stored_orders(layout: HopperLayout) -> tuple[MemoryOrder, MemoryOrder]:
    """Memory orders of dK and dV as a backward stores them: of query heads if these are apart."""
    k, v = layout.orders.k, layout.orders.v
    return (_of_heads(layout, k), _of_heads(layout, v)) if layout.facts.heads_apart else (k, v)


def _of_heads(layout: HopperLayout, order: MemoryOrder) -> MemoryOrder:
    (batch, heads, _, _, keys), width = layout.sizes, order.shape[3]
    steps = (heads * keys * width, keys * width, width, 1)
    return MemoryOrder((batch, heads, keys, width), (heads * keys, keys, 1), steps)


def sum_arguments(layout: HopperLayout) -> tuple[int, tuple[int, ...]]:
    """Number of programs of ``sum_of_heads``, and its arguments but for addresses."""
    batch, heads, kv_heads, _, kv_len = layout.sizes
    keys = (layout.orders.k, layout.orders.v)
    blocks = sum(-(-kv_len * order.shape[3] // SUM_BLOCK) for order in keys)
    rows = (step for order in keys for step in order.rows)
    return blocks * batch * kv_heads, (*rows, kv_heads, kv_len, heads // kv_heads)


def layout_of(
    layout: LaunchSpec, job: Job, call: Call, more: Mapping[str, torch.Tensor]
) -> HopperLayout:
    """``layout`` with what Hopper's launches need; see :class:`~..kernels.kernel.Family`."""
    kernel, facts = job.kernel, layout.facts
    config = layout.executables[kernel.name].config
    launches = {name: launch_of(executable) for name, executable in layout.executables.items()}
    blocks = blocks_of(kernel.task, facts, config)
    encoders = launches[kernel.name].encoders
    views, copied = {}, []
    for number, tile in enumerate(facts.pair_tiles):
        name, own = f"pair{number}_desc", window(tile, call)
        if not is_readable(own):
            own = room_for(own)
            copied.append(number)
        views[name] = view(own, own.stride(), blocks[name], encoders.get(name))
    features = _with_buffers(job, config)
    rows = _rows(job, layout, call, more)
    for name, tensor in rows.items():
        steps = descriptor_strides(tensor)
        assert steps is not None
        views[name] = view(tensor, steps, blocks[name], encoders.get(name))
    for name, tensor in _of_backward(job, call, config, features).items():
        views[name] = view(tensor, tensor.stride(), blocks[name], encoders.get(name))
    operands = Views(tuple(views[name] for name in rows))
    if Task.BACKWARD in kernel.tasks:
        seen = (*operands.each, views["lse_desc"], views["delta_desc"])
        operands = Views(seen, statistics_of(call).seen)
    found = HopperLayout(
        **{each.name: getattr(layout, each.name) for each in fields(layout)},
        launches=launches,
        views=views,
        operands=operands,
        programs=_programs(job, layout, call, config),
        drawn=is_drawn(job.lowered, layout.facts, config),
        copied=tuple(copied),
    )
    if Task.BACKWARD not in kernel.tasks:
        return found
    return replace(
        found,
        columns=block_width(call.q.shape[3]),
        statistics=statistics_of(call),
        learned=learned_in_kernel(job.lowered, facts),
        stores=tuple(buffer for feature in features for buffer in feature.stores),
        sums=tuple(buffer for feature in features for buffer in feature.sums),
    )


def described(
    call: Call, out: torch.Tensor, operands: Mapping[str, torch.Tensor], out_moved: torch.Tensor
) -> dict[str, torch.Tensor]:
    """By argument of the kernel of results and tangents, in order.

    First q, k, v and ``out``, then their tangents; in place of one that does not move, itself.
    """
    own = {"q_desc": call.q, "k_desc": call.k, "v_desc": call.v, "o_desc": out}
    found = {**operands, "o": out_moved}
    return own | {moved_argument(name): found.get(name[0], x) for name, x in own.items()}


def _rows(
    job: Job, layout: LaunchSpec, call: Call, more: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors of rows of a head dim that the kernel sees by blocks, by argument."""
    operands = {"q_desc": call.q, "k_desc": call.k, "v_desc": call.v}
    if Task.BACKWARD in job.kernel.tasks:
        return operands | {"do_desc": more["do"]}
    order = layout.orders.out
    if Task.FORWARD_TANGENT in job.kernel.tasks:
        out = order.empty(call.q)  # Those of a launch are new: they have no room.
        return described(call, out, more, out)
    room = given_room(call, order, call.q.dtype)
    return operands | {"o_desc": order.empty(call.q) if room is None else room}


def _with_buffers(job: Job, config: Config) -> tuple[Feature, ...]:
    """Features of a backward that have buffers; they depend on no loop."""
    if Task.BACKWARD not in job.kernel.tasks:
        return ()
    spec = ModuleSpec(job.lowered, job.facts, Task.BACKWARD, LoopPlan(), config, OwnTiles())
    return tuple(x for x in FEATURES if (x.stores or x.sums) and x.applies(spec))


def _of_backward(
    job: Job, call: Call, config: Config, features: tuple[Feature, ...]
) -> dict[str, torch.Tensor]:
    """Tensors that a backward alone sees by blocks; shapes and strides count, not values."""
    if Task.BACKWARD not in job.kernel.tasks:
        return {}
    rows = torch.empty(statistics_of(call).number, device=call.q.device)
    found = {"lse_desc": rows, "delta_desc": rows}
    alike = call._replace(q=call.q.to("meta"))
    for buffer in (x for feature in features for x in feature.stores if x.block is not None):
        found[buffer.name] = buffer.empty(alike, config).flatten(0, -2)
    return found


def _programs(job: Job, layout: LaunchSpec, call: Call, config: Config) -> int:
    """Programs of a kernel: one for each work tile, or as many as run at a time.

    The registers of one program are all that a processor has.
    """
    work_tiles = layout.work_tiles[job.kernel.name]
    if not config.persistent:
        return work_tiles
    return min(work_tiles, processors_of(call.q.device))
