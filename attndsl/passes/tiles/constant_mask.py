"""Masks that are the same for all pairs, whatever the lengths and the captures are.

Non-goals: masks that are the same for all pairs of some lengths only; masks of many operations,
which nobody wrote by hand and which would take longer to decide than to compile.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from attndsl.ir import SIZES, Op, const, leaf_names, toposort
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.simplify import simplify_node

from .affine import guard_of
from .isl_sets import SetBuilder, TooComplicated, bounded
from .mask_bounds import lower, upper

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from attndsl.ir import Node

_TRUE, _FALSE = const(True), const(False)
_MOST_NODES = 128
"""Nodes of a mask that is looked at. Time grows with their square."""
_MAX_OPERATIONS = 20_000
"""isl's own count of operations on sets, a tenth of what finding tiles may take."""
_SAMPLES = (0, 1, 7, 30, 1000)
"""Positions of pairs that are looked at first."""
_SIZE_OF = {"b": "batch", "h": "heads", "hkv": "kv_heads"}
_GUESSES = (8, 512)
"""Values of all that a mask reads, for these."""


def verdict(mask: Node) -> bool | None:
    """False where no pair can be live, True where every pair is, None where neither is known.

    Positions are 0 or more and have no upper bound, since a call may begin anywhere. A condition
    that integer sets cannot decide may hold or not, and masks of many operations are not known.
    """
    if len(toposort(mask)) > _MOST_NODES:
        return None
    most, least = simplify_node(upper(mask)), simplify_node(lower(mask))
    if most is _FALSE or least is _TRUE:
        return least is _TRUE
    if most is not _TRUE and _all_or_none(most, wanted=False):
        return False
    if least is not _FALSE and _all_or_none(least, wanted=True):
        return True
    return None


def _all_or_none(mask: Node, wanted: bool) -> bool:
    """Return True if a quasi-affine mask is known to be ``wanted`` for all pairs."""
    # Most masks show at once that they are not, and isl takes long to import.
    if _has_sample(mask, not wanted):
        return False
    import islpy

    context = islpy.Context()
    context.set_max_operations(_MAX_OPERATIONS)
    try:
        builder = SetBuilder(context, False, guard_of(mask, leaf_names(mask)).cut)
        live = builder.live(mask)
        pairs = islpy.Set.read_from_str(context, _pairs(builder.parameters))
        if wanted:
            return bool(pairs.is_subset(live))
        return bool(bounded(live.intersect(pairs)).is_empty())
    except (islpy.Error, TooComplicated):
        return False


def _has_sample(mask: Node, wanted: bool) -> bool:
    """Return True if the mask is ``wanted`` for a sampled pair and guessed sizes and params."""
    leaves = [x for x in toposort(mask) if x.op in (Op.SIZE, Op.PARAM, Op.VAR)]
    for guess in _GUESSES:
        # Heads and batch entries are 0.
        names = {str(x.value): 0 if x.op is Op.VAR else guess for x in leaves}
        for q, kv in product(_SAMPLES, _SAMPLES):
            if bool(evaluate(mask, _known({**names, "q": q, "kv": kv}, guess))) is wanted:
                return True
    return False


def _known(names: Mapping[str, int], guess: int) -> Environment:
    """Values of leaves: those of ``names``, and ``guess`` for all elements of tensors."""
    return Environment(names, lambda _name, _at: guess, lambda _name, _at: (float(guess),))


def _pairs(symbols: dict[str, Node] | Any) -> str:
    """All pairs, with what is known of the symbols of a set."""
    bounds = ["0 <= q", "0 <= kv"]
    names = {item.value: name for name, item in symbols.items() if not item.args}
    for name, item in symbols.items():
        if item.op is Op.SIZE and item.value in SIZES:
            bounds.append(f"{name} >= 1")
        elif item.op is Op.VAR:
            size = names.get(_SIZE_OF.get(str(item.value), ""))
            bounds.append(f"0 <= {name}" + (f" < {size}" if size else ""))
    return f"[{', '.join(symbols)}] -> {{ [q, kv] : {' and '.join(bounds)} }}"
