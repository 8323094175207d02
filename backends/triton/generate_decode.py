"""Text of the kernels for few rows: the portable forward's functions, over parts of its loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attndsl.ir import NO_ENTRIES

from ..emit.device_functions import param_values, parameters, record_of_given
from ..emit.facts import FP8_TYPE, block_widths
from ..emit.leaf_names import made_field
from ..emit.loops import LIST_PARAMETERS, print_loop
from ..emit.module_lines import wrapped
from ..emit.template import Products, fill_template
from .decode_tiles import (
    MANY_TILES,
    MOST_PARTS,
    PARTS_OF_GROUP,
    REQUESTS_AT_ONCE,
    TOKENS_AT_ONCE,
    DecodeShape,
    folds_groups,
    is_looked_up,
    sharing_of,
)
from .generate import (
    constants,
    flags_of_program,
    functions_of_program,
    sink_of_program,
    wrong_entries,
)

if TYPE_CHECKING:
    from attndsl.passes.tiles.tile_plan import LoopPlan

    from ..kernels.config import Config
    from ..kernels.kernel import Job


def decode_text(
    shape: DecodeShape, job: Job, config: Config, loop: LoopPlan, products: Products
) -> str:
    """The module of a kernel whose programs share the keys of ``shape``'s rows."""
    lowered, facts, kernel = job.lowered, job.facts, job.kernel
    program = lowered.program
    functions, helpers = functions_of_program(lowered, facts)
    sink, used = sink_of_program(program, facts)
    wrong, more = wrong_entries(program, facts)
    assert kernel.loop is not None
    values = param_values(facts, scalar=True)
    loops, found = print_loop(kernel.loop_name, kernel.loop.along, loop, values, facts.names())
    listed = loop.listed is not None
    sharing = sharing_of(shape, program, facts)
    flags: dict[str, Any] = {
        **flags_of_program(program, facts),
        **constants(facts, config, products),
        "ROWS": shape.rows,
        "GROUP": shape.group,
        "LINES": shape.lines,
        "TILES_OF_PART": sharing.tiles,
        "MANY_TILES": MANY_TILES,
        "PROGRAMS": sharing.programs,
        "LEAST_PARTS": sharing.least,
        "MOST_PARTS": MOST_PARTS,
        "PARTS_AT_ONCE": sharing.least,
        "PARTS_OF_GROUP": PARTS_OF_GROUP,
        "EVEN_PARTS": sharing.even,
        "MOST_IN_ONE": sharing.most_in_one,
        "LINES_AT_ONCE": sharing.lines_at_once(shape, block_widths(facts)[1]),
        "MARKED": program.entries != NO_ENTRIES,
        "PEELED": is_looked_up(program.mask),
        "FOLDS": folds_groups(shape, block_widths(facts)[1], config.warps),
        "SEVERAL_PARTS": facts.joined_parts,
        "CHECKS": program.bounded and facts.pages is None,
        "FORWARD_HAS_FULL": listed or bool(loop.full),
        "FORWARD_HAS_PARTIAL": listed or bool(loop.partial),
    }
    pages = facts.pages
    if pages is not None:
        flags |= {"PAGE": pages.size, "SAME_STEPS": pages.same_steps}
        flags |= {"K_SCALES": pages.k_scales, "V_SCALES": pages.v_scales}
        in_fp16 = pages.dtype == FP8_TYPE and facts.dtype == "bf16"
        weighted = pages.v_scales == 4
        flags |= {
            "K_IN_FP16": in_fp16,
            "V_IN_FP16": in_fp16 and program.weights is None and not weighted,
            "PAGES_IN_FP8": pages.dtype == FP8_TYPE,
            "WIDENS_PAIRS": pages.widens_pairs,
        }
        flags |= {"TOKENS_AT_ONCE": TOKENS_AT_ONCE, "REQUESTS_AT_ONCE": REQUESTS_AT_ONCE}
    given = [*parameters(facts.without_made()), *(LIST_PARAMETERS if listed else ())]
    made = () if pages is None else pages.made
    fields = [*given, *(made_field(name) for name, _ in made)]
    values = [*given, *(what for _, what in made)]
    texts = [record_of_given(fields), *functions, sink, wrong, *loops]
    used |= helpers | found | more
    return fill_template(
        __package__, kernel.templates, (kernel.entry,), texts, used, flags, given,
        {"values": wrapped(values)},
    )  # fmt: skip
