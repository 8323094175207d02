"""Texts of the kernels for keys that fit: the portable templates, with pieces in place of loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..emit.device_functions import parameters, record_of_given
from ..emit.template import Flags, Products, fill_template
from ..kernels.kernel import Task
from .generate import constants, flags_of_program, functions_of_program, sink_of_program
from .short_tiles import pieces_of

if TYPE_CHECKING:
    from attndsl.passes.tiles.tile_plan import LoopPlan

    from ..kernels.config import Config
    from ..kernels.kernel import Job

_MOST_PIECES = 3


def short_text(job: Job, config: Config, loop: LoopPlan, products: Products) -> str:
    """The module of a kernel whose programs hold all keys of a head."""
    lowered, facts, kernel = job.lowered, job.facts, job.kernel
    program = lowered.program
    functions, helpers = functions_of_program(lowered, facts)
    if Task.FORWARD in kernel.tasks:
        text, used = sink_of_program(program, facts)
        functions.append(text)
        helpers |= used
    pieces = pieces_of(config.block_n)
    flags: Flags = {
        **flags_of_program(program, facts),
        **constants(facts, config, products),
        "PIECES": len(pieces),
        **{
            f"KEYS_{number}": pieces[number] if number < len(pieces) else 0
            for number in range(_MOST_PIECES)
        },
    }
    given = parameters(facts)
    texts = [record_of_given(given), *functions]
    return fill_template(
        __package__, kernel.templates, (kernel.entry,), texts, helpers, flags, given
    )
