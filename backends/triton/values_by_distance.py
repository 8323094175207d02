"""The kernel that evaluates a part of the score for each distance, and what a lookup saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.passes.look_up_distance import MARGIN

from ..emit.device_functions import parameters, record_of_given
from ..emit.leaf_names import LeafNames
from ..emit.template import fill_template
from ..fast_math import forms_for
from ..kernels.arguments import capture_arguments, origin, plain_arguments
from ..kernels.config import INTERPRETED, Config
from ..kernels.cost_model import instructions
from ..kernels.device import on_device, stream_of
from ..kernels.kernel import Kernel, Task
from ..tiled.distance_lookups import box_of, empty_values
from .generate import constants, functions_of_program

if TYPE_CHECKING:
    import torch

    from attndsl.ir import Node
    from attndsl.passes.look_up_distance import DistanceLookup
    from attndsl.passes.tiles.tile_plan import LoopPlan

    from ..base import Call
    from ..emit.template import Products
    from ..kernels.kernel import Job
    from ..kernels.launch_spec import LaunchSpec
    from ..kernels.target import Target

VALUES = Task("values by distance")


def work_by_distance(part: Node, exact: bool) -> int:
    """Instructions of an expression for a pair, on GPUs and in half precision."""
    forms = forms_for("bf16", "cuda", exact)
    return instructions((part,), LeafNames({}, {}, 128, forms=forms))


def _text(job: Job, config: Config, loop: LoopPlan, products: Products) -> str:
    functions, helpers = functions_of_program(job.lowered, job.facts)
    given, own = parameters(job.facts), job.kernel
    flags = {**constants(job.facts, config, products), "MARGIN": MARGIN}
    parts = [record_of_given(given), *functions]
    return fill_template(__package__, own.templates, (own.entry,), parts, helpers, flags, given)


def _configs(job: Job, machine: Target) -> tuple[Config, ...]:
    return INTERPRETED if machine.target is None else (Config(128, 16, 4, 1),)


KERNEL = Kernel(
    name="distance_values",
    family="triton",
    tasks=frozenset({VALUES}),
    entry="distance_values",
    text=_text,
    configs=_configs,
    arguments=plain_arguments,
    templates=("distance_values",),
    derives=False,
)


def launch_values(layout: LaunchSpec, found: DistanceLookup, call: Call) -> torch.Tensor:
    """The values by distance of ``call``, whose layout is that of :data:`VALUES`."""
    values, kernel = empty_values(found, call), layout.executables[KERNEL.name]
    (entries, heads), number = box_of(found, call), values.shape[-1]
    places = origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index)
    rest = capture_arguments(layout.facts, call)
    with on_device(values.device):
        kernel.launch(
            entries * heads * -(-number // kernel.config.block_m),
            stream_of(values.device),
            [values, *layout.sizes, *places, number, heads, *rest],
        )
    return values
