"""Text of the kernels for few rows: the portable forward's functions, over parts of its loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..emit.device_functions import param_values, parameters, record_of_given
from ..emit.loops import LIST_PARAMETERS, print_loop
from ..emit.template import Products, fill_template
from .decode_tiles import MOST_PARTS, Shape, tiles_of_part
from .generate import constants, flags_of_program, functions_of_program, sink_of_program

if TYPE_CHECKING:
    from attndsl.passes.tiles.plan import LoopPlan

    from ..kernels.config import Config
    from ..kernels.kernel import Job


def decode_text(shape: Shape, job: Job, config: Config, loop: LoopPlan, products: Products) -> str:
    """The module of a kernel whose programs share the keys of ``shape``'s rows."""
    lowered, facts, kernel = job.lowered, job.facts, job.kernel
    program = lowered.program
    functions, helpers = functions_of_program(lowered, facts)
    sink, used = sink_of_program(program, facts)
    assert kernel.loop is not None
    values = param_values(facts, scalar=True)
    loops, more = print_loop(kernel.loop_name, kernel.loop.along, loop, values, facts.names())
    listed = loop.listed is not None
    flags: dict[str, Any] = {
        **flags_of_program(program, facts),
        **constants(facts, config, products),
        "ROWS": shape.rows,
        "GROUP": shape.group,
        "TILES_OF_PART": tiles_of_part(config),
        "MOST_PARTS": MOST_PARTS,
        "FORWARD_HAS_FULL": listed or bool(loop.full),
        "FORWARD_HAS_PARTIAL": listed or bool(loop.partial),
    }
    pages = facts.pages
    if pages is not None:
        flags |= {"PAGE": pages.size, "K_SCALES": pages.k_scales, "V_SCALES": pages.v_scales}
    given = [*parameters(facts), *(LIST_PARAMETERS if listed else ())]
    texts = [record_of_given(given), *functions, sink, *loops]
    return fill_template(
        __package__, kernel.templates, (kernel.entry,), texts, helpers | used | more, flags, given
    )
