"""The portable kernels as texts of Python modules: templates with the program printed in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING

from attndsl.ir import (
    NO_ENTRIES,
    DType,
    Op,
    const,
    dependencies,
    load,
    node,
    reads_score,
    size,
    var,
)
from attndsl.passes.distance import meets_distances_alone
from attndsl.passes.int_ranges import POSITION_LIMIT

from ..emit.device_functions import param_values, parameters, program_function, record_of_given
from ..emit.dropout_offsets import kept_function
from ..emit.expression import print_expressions
from ..emit.facts import block_widths
from ..emit.loops import LIST_PARAMETERS, print_loop
from ..emit.template import Flags, Products, fill_template, pair_function
from ..gradients.gradient_terms import derivatives, terms_of
from ..kernels.kernel import REPAIRS, Job, Task
from .generate_gradients import NO_GRADIENTS, gradient_texts, stored_texts
from .generate_tangent import tangent_texts

if TYPE_CHECKING:
    from attndsl.ir import Node, Program
    from attndsl.passes.tiles.tile_plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts
    from ..kernels.config import Config
    from .generate_gradients import Sums

_RESULTS = frozenset({Task.FORWARD, Task.TANGENT, Task.REPAIR})
"""Tasks whose kernels know a row's denominator, with the sink in it."""

EXTRA = ("weights", "tile_gradients")
"""Templates that :func:`extra_text` needs first."""


def attention_text(
    sums: Sums | None, job: Job, config: Config, loop: LoopPlan, products: Products
) -> str:
    """The module of a kernel with a planned loop.

    The backward kernels add up ``sums`` for the gradients that the job's facts name; that of
    tangents has those of what they say moves.
    """
    lowered, facts, kernel = job.lowered, job.facts, job.kernel
    program, sparsity = lowered.program, lowered.sparsity
    functions, helpers = functions_of_program(lowered, facts)
    if Task.TANGENT in kernel.tasks:
        learned = tangent_texts(lowered, facts)
    else:
        learned = NO_GRADIENTS if sums is None else gradient_texts(lowered, facts, sums)
    functions += learned.functions
    helpers |= learned.helpers
    if kernel.tasks & _RESULTS:
        text, used = sink_of_program(program, facts)
        functions.append(text)
        helpers |= used
    if Task.REPAIR in kernel.tasks:
        text, used = wrong_entries(program, facts)
        functions.append(text)
        helpers |= used
    assert kernel.loop is not None
    name = kernel.loop_name
    values = param_values(facts, scalar=True)
    texts, used = print_loop(name, kernel.loop.along, loop, values, facts.names())
    listed = loop.listed is not None
    flags: Flags = {
        **flags_of_program(program, facts),
        **constants(facts, config, products),
        "RAGGED_FULL": sparsity.plain,
        f"{name.upper()}_HAS_FULL": listed or bool(loop.full),
        f"{name.upper()}_HAS_PARTIAL": listed or bool(loop.partial),
        f"{name.upper()}_DESCENDING": loop.descending,
        "REPAIRS": bool(kernel.tasks & REPAIRS),
        "MARKED": program.entries != NO_ENTRIES,
        **learned.flags,
    }
    given = [*parameters(facts), *(LIST_PARAMETERS if listed else ()), *learned.given]
    if kernel.tasks & REPAIRS:
        given.append("results_sum")
    texts = [record_of_given(given), *functions, *texts]
    entries = (kernel.entry,)
    return fill_template(
        __package__, kernel.templates, entries, texts, helpers | used, flags, given
    )


def stored_text(sums: Sums, job: Job, config: Config, loop: LoopPlan, products: Products) -> str:
    """The module of the kernel that adds up what attention kernels have stored."""
    flags: Flags = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "HEADS_APART": _tells_heads_apart(job.lowered, job.facts),
    }
    learned = stored_texts(job.lowered, job.facts, sums)
    texts = [record_of_given(learned.given), *learned.functions]
    templates, entries, given = job.kernel.templates, (job.kernel.entry,), list(learned.given)
    return fill_template(__package__, templates, entries, texts, set(), flags, given)


def _tells_heads_apart(lowered: Lowered, facts: KernelFacts) -> bool:
    """Return True if all tensors that get sums of pairs have elements of each query head."""
    return all(
        "h" in {index.value for index in term.leaf.args}
        for term in terms_of(lowered, facts.tensor_gradients)
    )


def extra_text(sums: Sums, job: Job, config: Config, loop: LoopPlan, products: Products) -> str:
    """The module of a kernel that makes gradients of captured tensors and params alone."""
    lowered, facts, kernel = job.lowered, job.facts, job.kernel
    functions, helpers = functions_of_program(lowered, facts)
    learned = gradient_texts(lowered, facts, sums)
    program = lowered.program
    mask = program.mask
    varies = frozenset[str]() if mask is None else dependencies(mask)[mask]
    roots = (mask, program.score, program.weights, program.dropout)
    flags: Flags = {
        **flags_of_program(program, facts),
        **constants(facts, config, products),
        **learned.flags,
        "HEADS_APART": _tells_heads_apart(lowered, facts),
        "MASK_READS_SCORE": reads_score(mask),
        "MASK_MEETS_DISTANCES": mask is None
        or ("score" not in varies and meets_distances_alone(mask)),
        "ALL_MEETS_DISTANCES": meets_distances_alone(*(root for root in roots if root)),
        "MASK_IS_SHARED": not varies & {"b", "h", "score"},
    }
    given = [*parameters(facts), *learned.given]
    texts = [record_of_given(given), *functions, *learned.functions]
    helpers |= learned.helpers
    entries = (kernel.entry,)
    return fill_template(__package__, kernel.templates, entries, texts, helpers, flags, given)


def flags_of_program(program: Program, facts: KernelFacts) -> Flags:
    """Flags that every program decides."""
    return {
        "MASKED": program.mask is not None,
        "MODIFIED": program.score.op is not Op.SCORE,
        "OWN_WEIGHTS": program.weights is not None,
        "HAS_DROPOUT": program.dropout is not None,
        "HAS_SINK": program.sink is not None,
        "SCALED_FIRST": program.score.op is not Op.SCORE
        or reads_score(program.mask)
        or program.weights is not None
        or facts.scale_first,
    }


def constants(facts: KernelFacts, config: Config, products: Products) -> Flags:
    """Constants that every call decides: sizes of tiles, dims, kinds of positions, precision."""
    block_d, block_dv = block_widths(facts)
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "D": facts.head_dim,
        "DV": facts.value_dim,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "Q_KIND": facts.q_kind,
        "KV_KIND": facts.kv_kind,
        "PRECISION": products.precision,
        "UPCAST": products.upcast,
        "REPAIRS": False,
    }


def functions_of_program(lowered: Lowered, facts: KernelFacts) -> tuple[list[str], set[str]]:
    """The program's own device functions, and the library functions that they use."""
    program, derivative = lowered.program, lowered.derivative
    found = derivatives(lowered)
    slope = found["weight"].score if "weight" in found else None
    helpers: set[str] = set()
    texts = []
    specs: tuple[tuple[str, Node | None, str], ...] = (
        ("mask_of_pair", program.mask, "Whether each pair takes part."),
        ("score_of_pair", program.score, "The program's score from scale * (q . k)."),
        (
            "derivative_of_pair",
            derivative.score,
            "Derivative of the program's score by scale * (q . k).",
        ),
        ("weight_of_pair", program.weights, "The weight that the program gives to its score."),
        ("slope_of_weight", slope, "The weight's derivative by the score."),
    )
    for name, root, doc in specs:
        text, used = pair_function(name, root, facts, doc)
        helpers |= used
        texts.append(text)
    doc = "With what probability each pair is dropped."
    text, used = _head_function("drop_probability", program.dropout, facts, doc, "{}")
    texts.append(text)
    helpers |= used
    if program.dropout is not None:
        texts.append(kept_function(facts.draws))
    return texts, helpers


def sink_of_program(program: Program, facts: KernelFacts) -> tuple[str, set[str]]:
    """The function that gives a head's sink, and the library functions that it uses."""
    doc = "The logit that is in the denominator of each row of a head."
    form = "tl.sum({}, 1)" if facts.packed_heads else "tl.sum({})"
    return _head_function("sink_of_head", program.sink, facts, doc, form)


def wrong_entries(program: Program, facts: KernelFacts) -> tuple[str, set[str]]:
    """The function that tells which entries are wrong, and the library functions that it uses."""
    doc = "Whether a batch entry has a number of keys or an offset that cannot be."
    ranges = [(program.entries.lengths, const(0), size("kv_len"))]
    most = node(Op.SUB, const(POSITION_LIMIT - 1), size("q_len"))
    ranges.append((program.entries.starts, node(Op.NEG, most), most))
    # What no expression reads is no argument, and decides nothing.
    read = {capture.name for capture in facts.captures}
    wrong = []
    for name, low, high in ranges:
        if name in read:
            number = load(name, DType.INT, var("b"))
            wrong.append(node(Op.OR, node(Op.LT, number, low), node(Op.LT, high, number)))
    if not wrong:
        return program_function("is_wrong", "", facts, doc, ["return False"], False), set()
    printed = print_expressions(
        (reduce(partial(node, Op.OR), wrong),), replace(facts.names(), scalar=True)
    )
    body = [*printed.lines, f"return {printed.results[0]}"]
    return program_function("is_wrong", "", facts, doc, body, False), set(printed.helpers)


def _head_function(
    name: str, root: Node | None, facts: KernelFacts, doc: str, form: str
) -> tuple[str, set[str]]:
    """``root`` of a head, from its tile (1, 1), and the library functions that it uses."""
    body, helpers = ["return 0.0"], set[str]()
    if root is not None:
        printed = print_expressions((root,), facts.names())
        # A tile of one element, or a number.
        result = form.format(f"{printed.terms[0]} + tl.zeros([1, 1], tl.float32)")
        body, helpers = [*printed.lines, f"return {result}"], set(printed.helpers)
    return program_function(name, "", facts, doc, body, root is not None), helpers
