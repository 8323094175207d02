"""The table of the kernels for keys that fit: an entry for each size of tiles.

How many keys a call has is no part of what a module depends on, so that each size is a kernel.
"""

from __future__ import annotations

from functools import partial

from ..kernels.arguments import plain_arguments
from ..kernels.kernel import Kernel, Task
from .generate_short import short_text
from .short_tiles import ShortShape, configs_of, shapes

NAME = "short"


def _kernel(task: Task, shape: ShortShape) -> Kernel:
    backward = task is Task.BACKWARD
    return Kernel(
        name=f"{task.name}_{shape}",
        family=NAME,
        tasks=frozenset({task}),
        entry=f"attention_short_{task.name}",
        text=short_text,
        configs=partial(configs_of, shape),
        arguments=plain_arguments,
        templates=("weights" if backward else "softmax", f"short_{task.name}"),
        derives=backward,
    )


FORWARDS = {shape: _kernel(Task.FORWARD, shape) for shape in shapes(backward=False)}
BACKWARDS = {shape: _kernel(Task.BACKWARD, shape) for shape in shapes(backward=True)}
KERNELS: tuple[Kernel, ...] = (*FORWARDS.values(), *BACKWARDS.values())
