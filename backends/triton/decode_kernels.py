"""The table of the kernels for few rows: an entry for each shape of a tile's rows."""

from __future__ import annotations

from functools import partial

from attndsl.passes.tiles import tile_plan

from ..kernels.arguments import plain_arguments
from ..kernels.kernel import Kernel, Task
from .decode_tiles import SHAPES, DecodeShape, configs_of
from .generate_decode import decode_text

NAME = "decode"


def _kernel(shape: DecodeShape) -> Kernel:
    return Kernel(
        name=f"forward_{shape}",
        family=NAME,
        tasks=frozenset({Task.FORWARD}),
        entry="attention_decode",
        text=partial(decode_text, shape),
        configs=partial(configs_of, shape),
        arguments=plain_arguments,
        loop=tile_plan.FORWARD,
        loop_name="forward",
        templates=("softmax", "forward", "parts", "decode"),
        derives=False,
    )


FORWARDS = {shape: _kernel(shape) for shape in SHAPES}
KERNELS: tuple[Kernel, ...] = tuple(FORWARDS.values())
