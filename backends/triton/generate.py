"""A program's kernels as the text of a Python module: templates with the program printed in.

Non-goals: compiling the text, and choosing tile sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op, dependencies, reads_score
from attndsl.passes.distance import meets_distances_alone

from ..emit.device_functions import (
    HEAD,
    param_values,
    parameters,
    program_function,
    record_of_given,
)
from ..emit.draws import kept_function
from ..emit.expression import print_expressions
from ..emit.facts import block_widths
from ..emit.loops import LIST_PARAMETERS, LOOPS, print_loop
from ..emit.template import IEEE, Flags, Products, fill_template, pair_function
from ..gradients.terms import derivatives, terms_of
from .generate_gradients import SCATTERED, gradient_texts, stored_texts
from .generate_tangent import tangent_texts

if TYPE_CHECKING:
    from attndsl.ir import Node, Program
    from attndsl.passes.tiles.plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts
    from ..kernels.config import Config

_PASSES = {
    "forward": "forward",
    "backward_kv": "kv_pass",
    "backward_q": "q_pass",
    "tangent": "q_pass",
}
"""What templates call the loop of each direction."""


def generate_attention(
    lowered: Lowered,
    facts: KernelFacts,
    direction: str,
    loop: LoopPlan,
    config: Config,
    products: Products = IEEE,
) -> str:
    """The module of one kernel, :func:`entry_of` ``direction``, with its loop's plan.

    The backward kernels add up the gradients that ``facts`` names; that of tangents has those of
    what ``facts`` says moves. ``config`` has the tile sizes.
    """
    if direction == "stored":
        return _generate_stored(lowered, facts, config)
    if direction not in LOOPS:
        return _generate_apart(lowered, facts, direction, config, products)
    program, sparsity = lowered.program, lowered.sparsity
    functions, helpers = _functions(lowered, facts)
    if direction == "tangent":
        learned = tangent_texts(lowered, facts)
    else:
        learned = gradient_texts(lowered, facts, direction)
    functions += learned.functions
    helpers |= learned.helpers
    if direction in ("forward", "tangent"):
        doc = "The logit that is in the denominator of each row of a head."
        text, used = _head_function("sink_of_head", program.sink, facts, doc, "tl.sum({})")
        functions.append(text)
        helpers |= used
    name = _PASSES[direction]
    texts, used = print_loop(
        name, LOOPS[direction].along, loop, param_values(facts, scalar=True), facts.names()
    )
    listed = loop.listed is not None
    flags: Flags = {
        **_flags(program),
        **_constants(facts, config, products),
        "SCALED_FIRST": program.score.op is not Op.SCORE
        or reads_score(program.mask)
        or program.weights is not None
        or facts.scale_first,
        "RAGGED_FULL": sparsity.plain,
        "HAS_SINK": program.sink is not None,
        f"{name.upper()}_HAS_FULL": listed or bool(loop.full),
        f"{name.upper()}_HAS_PARTIAL": listed or bool(loop.partial),
        f"{name.upper()}_DESCENDING": loop.descending,
        **learned.flags,
    }
    given = [*parameters(facts), *(LIST_PARAMETERS if listed else ()), *learned.given]
    templates = ("forward",) if direction == "forward" else ("weights", direction)
    texts = [record_of_given(given), *functions, *texts]
    entries = (entry_of(direction),)
    return fill_template(__package__, templates, entries, texts, helpers | used, flags, given)


def _generate_stored(lowered: Lowered, facts: KernelFacts, config: Config) -> str:
    """The module of the kernel that adds up what attention kernels have stored."""
    flags: Flags = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "HEADS_APART": _tells_heads_apart(lowered, facts),
    }
    learned = stored_texts(lowered, facts)
    texts = [record_of_given(learned.given), *learned.functions]
    templates = ("stored", "pair_sums")
    given = list(learned.given)
    return fill_template(__package__, templates, ("stored",), texts, set(), flags, given)


def _tells_heads_apart(lowered: Lowered, facts: KernelFacts) -> bool:
    """Whether all tensors that get sums of pairs have elements of each query head."""
    return all(
        "h" in {index.value for index in term.leaf.args}
        for term in terms_of(lowered, facts.tensor_gradients)
    )


def _generate_apart(
    lowered: Lowered, facts: KernelFacts, direction: str, config: Config, products: Products
) -> str:
    """The module of a kernel that makes gradients of captured tensors and params alone."""
    functions, helpers = _functions(lowered, facts)
    learned = gradient_texts(lowered, facts, direction)
    program = lowered.program
    mask = program.mask
    varies = frozenset[str]() if mask is None else dependencies(mask)[mask]
    roots = (mask, program.score, program.weights, program.dropout)
    flags: Flags = {
        **_flags(program),
        **_constants(facts, config, products),
        **learned.flags,
        "HEADS_APART": _tells_heads_apart(lowered, facts),
        "MASK_READS_SCORE": reads_score(mask),
        "MASK_MEETS_DISTANCES": mask is None
        or ("score" not in varies and meets_distances_alone(mask)),
        "ALL_MEETS_DISTANCES": meets_distances_alone(*(root for root in roots if root)),
        "MASK_IS_SHARED": not varies & {"b", "h", "score"},
    }
    given = [*parameters(facts), *learned.given]
    templates = (
        "weights", "tile_gradients", *["pair_sums"] * (direction == "pairs"), entry_of(direction)
    )  # fmt: skip
    texts = [record_of_given(given), *functions, *learned.functions]
    helpers |= learned.helpers
    entries = (entry_of(direction),)
    return fill_template(__package__, templates, entries, texts, helpers, flags, given)


def entry_of(direction: str) -> str:
    """The kernel's name in its module."""
    if direction in LOOPS:
        return f"attention_{direction}"
    return "scattered" if direction in SCATTERED else direction


def _flags(program: Program) -> Flags:
    """What every program decides."""
    return {
        "MASKED": program.mask is not None,
        "MODIFIED": program.score.op is not Op.SCORE,
        "OWN_WEIGHTS": program.weights is not None,
        "HAS_DROPOUT": program.dropout is not None,
    }


def _constants(facts: KernelFacts, config: Config, products: Products) -> Flags:
    """What every call decides: sizes of tiles, dims, how positions are given, precision."""
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
    }


def _functions(lowered: Lowered, facts: KernelFacts) -> tuple[list[str], set[str]]:
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
    return program_function(name, HEAD, facts, doc, body, root is not None), helpers
