"""Texts of what moves scores, weights, dropout and sinks where captured tensors and params move.

A tangent of a captured tensor is a captured tensor too: the kernel's program has one more for each
that moves, and looks both up at the same places.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from attndsl.ir import DType, Node, Op, Program, const, load, node, param, reads_score
from attndsl.passes.differentiate import differentiate

from ..emit.device_functions import PAIR, program_function
from ..emit.expression import print_expressions
from ..emit.tangent_programs import moved_name
from ..gradients.gradient_terms import ONE, derivatives
from .generate_gradients import GradientTexts

if TYPE_CHECKING:
    from collections.abc import Collection

    from attndsl.passes.differentiate import Derivative
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts

_ZERO = const(0.0)


def tangent_texts(lowered: Lowered, facts: KernelFacts) -> GradientTexts:
    """Texts of the kernel of tangents, for the tensors that ``facts`` says move."""
    program = lowered.program
    sources = derivatives(lowered)
    if program.sink is not None:
        sources["sink"] = differentiate(Program(score=program.sink))
    functions: list[str] = []
    helpers: set[str] = set()
    flags: dict[str, bool | float] = {
        f"HAS_TANGENT_{name.upper()}": name in facts.moving_operands for name in ("q", "k", "v")
    }
    moves = {}
    for source in ("score", "weight", "dropout", "sink"):
        root = None
        if source in sources:
            root = _moved(program, sources[source], facts.moving_captures)
        moves[source] = root is not None
        flags[f"HAS_TANGENT_{source.upper()}"] = root is not None
        if root is not None:
            text, used = _function(source, root, facts)
            functions.append(text)
            helpers |= used
    pairs = moves["score"] or moves["weight"] or moves["dropout"]
    flags["HAS_TANGENT_WEIGHTS"] = pairs or bool(flags["HAS_TANGENT_Q"] or flags["HAS_TANGENT_K"])
    return GradientTexts(tuple(functions), frozenset(helpers), flags)


def _moved(program: Program, derivative: Derivative, names: Collection[str]) -> Node | None:
    """The sum of each lookup's tangent times its factor, of what is in ``names``; None for none."""
    leaves = [(item.load, item.factor) for item in derivative.tensors]
    leaves += [(param(item.name, DType.FLOAT), item.factor) for item in derivative.params]
    parts = []
    for leaf, factor in leaves:
        if leaf.value not in names:
            continue
        moved = load(moved_name(program, str(leaf.value)), DType.FLOAT, *leaf.args)
        if factor is not ONE:
            # What does not move adds nothing, be its derivative infinite.
            still = node(Op.EQ, moved, _ZERO)
            moved = node(Op.WHERE, still, _ZERO, node(Op.MUL, moved, factor))
        parts.append(moved)
    return reduce(lambda a, b: node(Op.ADD, a, b), parts) if parts else None


def _function(source: str, root: Node, facts: KernelFacts) -> tuple[str, set[str]]:
    """``root`` as a device function, and the library functions that it uses."""
    printed = print_expressions((root,), facts.names())
    doc = f"How what the {source} looks up moves it."
    if source == "sink":
        # A tile of one element, or a number.
        result = f"return tl.sum({printed.terms[0]} + tl.zeros([1, 1], tl.float32))"
        name, first = "moved_sink_of_head", ""
    else:
        spread = "" if reads_score(root) else " + tl.zeros(score.shape, tl.float32)"
        result = f"return {printed.terms[0]}{spread}"
        name, first = f"moved_{source}_of_pair", f"score, live, {PAIR}"
    body = [*printed.lines, result]
    return program_function(name, first, facts, doc, body, True), set(printed.helpers)
