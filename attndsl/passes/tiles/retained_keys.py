"""The keys that later queries can still see: one projection of a mask's integer set.

With live = {[q, kv]}, these are the kv of pairs whose q is ``next_q`` or more. A condition that
sets cannot decide counts as one that may hold (:func:`.mask_bounds.upper`), so that no key is left
out that a query may see. The projection is made once for all positions; a cache manager fixes
``next_q`` and the number of keys.

Non-goals: which keys the next query alone sees.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attndsl.foundation.caches import CACHES, memoised
from attndsl.ir import Op, const, leaf_names, toposort
from attndsl.passes.simplify import simplify_node

from .affine import guard_of
from .closed_form import MAX_OPERATIONS
from .isl_sets import SetBuilder, TooComplicated, bounded
from .mask_bounds import upper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node

_GROWING = frozenset({"q_len", "kv_len"})
"""Sizes that later calls have other values of."""
_NEXT, _KEYS = "next_q", "keys"
_MAX_PIECES = 64
"""Pieces of a set that are tried as ranges."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Projection:
    """Keys that queries from some position on may see, for all positions and numbers of keys."""

    keys: Any
    """An isl set ``[next_q, keys, symbols] -> { [kv] }``; None where it is too complicated."""
    symbols: Mapping[str, Node]
    """The expression of each symbol. None varies with ``q`` or ``kv``."""
    exact: bool
    """True if some query sees each of these keys, False if a query only may see it."""
    # isl's objects are not for several threads at a time.
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        CACHES.at_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew in a forked process: another thread may have held it."""
        self.lock = threading.Lock()

    def ranges(self, next_q: int, keys: int, values: Mapping[str, int]) -> tuple[range, ...]:
        """The keys below ``keys`` that queries from ``next_q`` on may see.

        Args:
            next_q: Logical position of the next query.
            keys: How many keys there are.
            values: Of the symbols.
        """
        if self.keys is None:
            return (range(keys),) if keys else ()
        with self.lock:
            return _ranges(_fixed(self.keys, {_NEXT: next_q, _KEYS: keys, **values}))


@memoised("projections of masks", 256)
def projection(mask: Node) -> Projection:
    """The projection of ``mask``."""
    import islpy

    bound = simplify_node(upper(mask))
    exact = bound is mask
    if bound is const(True):
        return Projection(None, {}, exact)
    context = islpy.Context()
    context.set_max_operations(MAX_OPERATIONS)
    try:
        builder = SetBuilder(context, False, guard_of(bound, leaf_names(bound)).cut)
        live = builder.live(bound)
        names = builder.parameters
        later = islpy.Set.read_from_str(
            context, f"[{_NEXT}, {_KEYS}] -> {{ [q, kv] : q >= {_NEXT} and 0 <= kv < {_KEYS} }}"
        )
        live = bounded(live.intersect(later))
        symbols = {}
        for name, item in names.items():
            if not any(x.op is Op.SIZE and x.value in _GROWING for x in toposort(item)):
                symbols[name] = item
                continue
            if item.op is Op.SIZE:
                least = _KEYS if item.value == "kv_len" else 1
                bounds = f"[{name}, {_KEYS}] -> {{ [q, kv] : {name} >= {least} }}"
                live = bounded(live.intersect(islpy.Set.read_from_str(context, bounds)))
            else:
                exact = False
            live = _without(live, islpy.dim_type.param, name)
        found = bounded(bounded(live.project_out(islpy.dim_type.set, 0, 1)).coalesce())
        # Questions are small, and isl counts the operations of all of them together.
        context.set_max_operations(0)
    except (islpy.Error, TooComplicated):
        return Projection(None, {}, False)
    return Projection(found, symbols, exact)


def _without(found: Any, kind: Any, name: str) -> Any:
    place = found.find_dim_by_name(kind, name)
    return found if place < 0 else bounded(found.project_out(kind, place, 1))


def _fixed(found: Any, values: Mapping[str, int]) -> Any:
    """``found`` with values in place of its parameters."""
    import islpy

    kind = islpy.dim_type.param
    for name, value in values.items():
        place = found.find_dim_by_name(kind, name)
        if place >= 0:
            number = islpy.Val.int_from_si(found.get_ctx(), value)
            found = found.fix_val(kind, place, number).project_out(kind, place, 1)
    return found.coalesce()


def _ranges(found: Any) -> tuple[range, ...]:
    """A set of keys as disjoint ranges in the order of their first keys."""
    if found.is_empty():
        return ()
    import islpy

    pieces = [islpy.Set(piece) for piece in found.make_disjoint().get_basic_sets()]
    tried = [_as_range(piece) for piece in pieces] if len(pieces) <= _MAX_PIECES else [None]
    if None not in tried:
        return tuple(sorted((each for each in tried if each), key=lambda each: each.start))
    points: list[int] = []
    found.foreach_point(lambda point: points.append(_first(point)))
    return runs(sorted(points))


def _as_range(piece: Any) -> range | None:
    """A piece as one range, or None where it is none."""
    import islpy

    low, high, step = (
        value.to_python()
        for value in (piece.dim_min_val(0), piece.dim_max_val(0), piece.get_stride(0))
    )
    found = range(low, high + 1, max(1, step))
    text = f"{{ [kv] : {low} <= kv <= {high} and (kv - {low}) mod {found.step} = 0 }}"
    same = islpy.Set.read_from_str(piece.get_ctx(), text).is_equal(piece)
    return found if same else None


def _first(point: Any) -> int:
    import islpy

    return int(point.get_coordinate_val(islpy.dim_type.set, 0).to_python())


def runs(points: list[int]) -> tuple[range, ...]:
    """Sorted numbers as ranges of neighbours."""
    found: list[range] = []
    for point in points:
        if found and found[-1].stop == point:
            found[-1] = range(found[-1].start, point + 1)
        else:
            found.append(range(point, point + 1))
    return tuple(found)
