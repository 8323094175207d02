"""The table of the kernels for packed requests: an entry for each shape of a tile's rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attndsl.passes.tiles import tile_plan

from ..emit.facts import ADDRESS
from ..kernels.arguments import arguments_of
from ..kernels.compile import Argument
from ..kernels.kernel import Kernel, Task
from .decode_kernels import NAME
from .decode_tiles import SHAPES, DecodeShape, configs_of
from .generate_decode import decode_text

if TYPE_CHECKING:
    from ..emit.facts import KernelFacts
    from ..kernels.config import Config


def arguments(function: Any, facts: KernelFacts, config: Config) -> list[Argument]:
    """Types of all arguments: those that no other kernel has are said here."""
    pages = facts.pages
    assert pages is not None
    own = {
        "K_PAGES": f"*{pages.dtype}",
        "V_PAGES": f"*{pages.dtype}",
        "TABLE": f"*{pages.table}",
        "LENGTHS": f"*{pages.lengths}",
        "STARTS": f"*{pages.starts}",
        "K_SCALE": "*fp32",
        "V_SCALE": "*fp32",
        "k_factor": "fp32",
        "v_factor": "fp32",
    }
    found = []
    for argument in arguments_of(function, facts, {}):
        name = argument.name
        is_page = name in ("K_PAGES", "V_PAGES") or name[:6] in ("step_k", "step_v")
        divisor = ADDRESS if is_page and pages.aligned else 1
        if name in own:
            argument = Argument(name, own[name], divisor=divisor)
        elif name.startswith("step_"):
            kind = "i64" if pages.wide_steps else "i32"
            argument = Argument(name, kind, divisor=divisor)
        found.append(argument)
    return found


def _kernel(shape: DecodeShape) -> Kernel:
    return Kernel(
        name=f"serve_{shape}",
        family=NAME,
        tasks=frozenset({Task.FORWARD}),
        entry="attention_serve",
        text=partial(decode_text, shape),
        configs=partial(configs_of, shape),
        arguments=arguments,
        loop=tile_plan.FORWARD,
        loop_name="forward",
        templates=("softmax", "parts", "serve"),
        derives=False,
    )


SERVES = {shape: _kernel(shape) for shape in SHAPES}
KERNELS: tuple[Kernel, ...] = tuple(SERVES.values())
