"""Estimate of the work that a kernel does for a pair of positions besides its products.

A kernel's text is repeated for each element that a thread holds, and for each loop. Compilation
takes time by the length of that, so that programs with much work a pair want few elements a thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, dependencies, toposort
from attndsl.passes.int_ranges import fits, ranges
from attndsl.passes.trig_ranges import small_angles

from ..emit.operand_kinds import is_small_power
from ..fast_math import FORMS, fast_nodes
from ..gradients.gradient_terms import terms_of

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts
    from ..emit.leaf_names import LeafNames

_INSTRUCTIONS = {
    Op.MIN: 3, Op.MAX: 3, Op.ABS: 3, Op.SIGN: 7, Op.SHL: 5, Op.SHR: 5, Op.SQRT: 3, Op.RSQRT: 3,
    Op.EXP2: 3, Op.RELU: 4, Op.ROUND: 8, Op.FLOORDIV: 14, Op.MOD: 14, Op.LOAD: 15, Op.EXP: 16,
    Op.EXPM1: 16, Op.FLOOR: 18, Op.CEIL: 18, Op.DIV: 18, Op.SIGMOID: 18, Op.SILU: 19, Op.TANH: 20,
    Op.LOG: 34, Op.ERF: 35, Op.LOG2: 36, Op.GELU: 40, Op.LOG1P: 44, Op.POW: 45, Op.SOFTPLUS: 50,
    Op.SIN: 61, Op.COS: 61, Op.TAN: 61,
}  # fmt: skip
"""PTX instructions an element, counted in kernels for sm_90 (Triton 3.9) beside the same without.
Lookups have three times as many, of which most compute an address and compile fast."""
_USUAL = 2
"""Instructions of each other operation that does something: those of an addition."""
_FAST = 5
"""Instructions of a fast form, and of a quotient by a value that is the same for all pairs."""
_OF_SMALL_ANGLE = 35
"""Instructions of a sine, cosine or tangent of a small angle
(:mod:`attndsl.passes.trig_ranges`)."""
_OF_SMALL_POWER = 6
"""Instructions of a power that is made of products."""
_WIDE = 100
"""Instructions of a 64-bit division, which is a function of its own."""
_FREE = frozenset({Op.CONST, Op.VAR, Op.SIZE, Op.PARAM, Op.SCORE, Op.DOT})
_AHEAD = 0.5
"""Share that counts of an instruction that does not read the score: it runs beside products."""
_ALONG = 0.25
"""Share that counts where values vary with the row or the column alone: fewer elements are made."""


def work_of_pair(
    lowered: Lowered, facts: KernelFacts, backward: bool, with_mask: bool = True
) -> int:
    """Instructions a pair that the program adds to a forward or backward kernel."""
    program = lowered.program
    mask = program.mask if with_mask else None
    roots = [mask, lowered.placed.pair, program.weights, program.dropout]
    if backward:
        names = {*facts.tensor_gradients, *facts.param_gradients}
        roots.append(lowered.derivative.score)
        roots += [root for term in terms_of(lowered, names) for root in term.factors.values()]
    return instructions(tuple(root for root in roots if root is not None), facts.names())


def work_of_mask(lowered: Lowered, facts: KernelFacts) -> int:
    """The share of a mask that FULL tiles do not do; 0 where it reads the score.

    Such a mask leaves no tile FULL, and its work waits for the product as a score's does.
    """
    mask = lowered.program.mask
    if mask is None or "score" in dependencies(mask)[mask]:
        return 0
    return instructions((mask,), facts.names())


def work_of_score(lowered: Lowered, facts: KernelFacts) -> int:
    """The share of a forward's :func:`work_of_pair` that waits for the product of scores.

    Small powers count as products here. The limits of the whole work were measured without that.
    """
    roots = (lowered.placed.pair, lowered.program.weights)
    present = tuple(root for root in roots if root is not None)
    varies = dependencies(*present)
    products = sum(
        _INSTRUCTIONS[Op.POW] - _OF_SMALL_POWER
        for item in toposort(*present)
        if item.op is Op.POW and "score" in varies[item] and _is_small(item.args[1])
    )
    return instructions(present, facts.names(), frozenset({"score"})) - products


def _is_small(exponent: Node) -> bool:
    known = exponent.value
    return exponent.op is Op.CONST and isinstance(known, float) and is_small_power(known)


def instructions(
    roots: tuple[Node, ...], names: LeafNames, along: frozenset[str] = frozenset()
) -> int:
    """Instructions of ``roots`` for each pair: what varies along all of ``along``, or at all."""
    varies, limits = dependencies(*roots), ranges(roots, names.int_bits, names.from_zero)
    small = small_angles(roots, names.int_bits, names.from_zero, names.reach)
    forms = FORMS[names.forms]
    # Each part of a kernel has a text of its own.
    fast = {item for root in roots for item in fast_nodes((root,)) if item.op in forms}
    total = 0.0
    for item in toposort(*roots):
        found = varies[item] & {"q", "kv", "score"}
        if not found or not along <= found or item.op in _FREE:
            continue
        taken: float = _INSTRUCTIONS.get(item.op, _USUAL)
        if item in fast or (item.op is Op.DIV and not varies[item.args[1]]):
            taken = _FAST
        elif item in small:
            taken = _OF_SMALL_ANGLE
        elif item.op in (Op.FLOORDIV, Op.MOD) and item.dtype is DType.INT:
            taken = taken if all(fits(limits[arg]) for arg in item.args) else _WIDE
        if "score" not in found:
            taken *= _AHEAD if len(found) > 1 else _ALONG
        total += taken
    return round(total)
