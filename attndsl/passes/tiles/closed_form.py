"""Closed-form loops of a quasi-affine mask: segments of tiles, exact for every length.

With live = {[q, kv]} and dead its complement, both mapped to tiles, FULL = live tiles - dead tiles
and PARTIAL = live tiles & dead tiles. isl's code generator (S. Verdoolaege et al., Polyhedral AST
generation is more than scanning polyhedra, TOPLAS 2015) writes the loop over the tiles of one owner
tile; each loop or statement of that code is a segment, and what guards it is the segment's guard.
Where the code tests a tile inside a loop, each convex piece of the set is tried as one strided
range and the range is compared with the piece, so that no segment is more or less than its set.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attndsl.foundation.caches import memoised
from attndsl.ir import DType, Node, Op, const, node, toposort
from attndsl.passes.int_ranges import INT32, INT64, POSITION_LIMIT, exact_range, fits

from .affine import guard_of, symbols_of
from .isl_sets import SetBuilder, TooComplicated, divisions_of
from .isl_sets import bounded as bounded_pairs
from .tile_plan import TILE, TILES, WHOLE, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attndsl.passes.int_ranges import Range

    from .affine import Symbols

MAX_SEGMENTS = 12
"""Segments of one kind that a kernel still computes faster than it reads a list."""
MAX_PIECES = 12
"""Convex pieces that are tried as ranges."""
MAX_OPERATIONS = 200_000
"""isl's own count of operations on sets: see M23 in docs/dev/measured.md."""
MAX_DISJOINT, MAX_CONSTRAINTS = 24, 256
"""Disjoint pieces of a set that isl writes code for, and constraints of all of them. Both bound the
time of isl: see M23 in docs/dev/measured.md. A set of 12 segments seldom has more pieces."""
MAX_DIVISIONS, MAX_UNKNOWN = 24, 2
"""Rounded divisions of one convex piece of a set of tiles, and those of one before isl has found
out what they are of: see M23 in docs/dev/measured.md."""
MAX_ENDS, MAX_TRIES = 30_000, 48
"""Operations that the ends of one range may take, and pieces that are tried as ranges."""
MAX_PRODUCT = 128
"""Convex pieces of live pairs times those of dead pairs: beyond it their difference may take
minutes, which isl's count of operations does not show."""
_STRIDES = (2, 4, 8, 16, 32, 64)


class NoClosedForm(Exception):
    """A mask that has none, with the reason in words."""


@memoised("closed forms of masks", 1024)
def closed_segments(
    mask: Node,
    own: tuple[str, int],
    along: tuple[str, int],
    shifted: bool,
    ragged_full: bool,
    wide: frozenset[str] = frozenset(),
    sure: Node | None = None,
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The FULL and the PARTIAL segments of ``mask``.

    They hold where the guard of both masks does (see :func:`.affine.guard_of`).

    Args:
        mask: Quasi-affine.
        own: What the owning tile counts, ``q`` or ``kv``, and the size of its tiles.
        along: What the loop counts, and the size of its tiles.
        shifted: Whether logical positions are rows plus run-time offsets.
        ragged_full: Whether FULL may name the ragged last tile of the loop.
        wide: Names of the mask's int params and int tensors that may have more than 32 bits.
        sure: Quasi-affine, where ``mask`` says of pairs only that they may be live: it holds where
            they surely are, and FULL tiles have no others. None where ``mask`` is exact.

    Raises:
        NoClosedForm: There is none that is worth it.
    """
    both = mask if sure is None else node(Op.AND, mask, sure)
    with _derivation(both, shifted, wide) as derivation:
        found = derivation.segments((mask, sure), own, along, ragged_full)
    _check_widths([segment for kind in found for segment in kind], symbols_of(both))
    return found


@memoised("closed forms of live tiles", 1024)
def live_segments(
    mask: Node, own: tuple[str, int], along: tuple[str, int], shifted: bool,
    wide: frozenset[str] = frozenset(),
) -> tuple[Segment, ...]:  # fmt: skip
    """The segments of all tiles that have a live pair, in ascending order where isl writes loops.

    They are those of :func:`closed_segments` together: the set is the same, and lengths bound
    neither side of its tiles. So an owner visits a tile along the loop exactly if, with both sides
    exchanged, that tile visits the owner.

    Args:
        mask: Quasi-affine.
        own: As of :func:`closed_segments`, and so are all others.
        along: Likewise.
        shifted: Likewise.
        wide: Likewise.

    Raises:
        NoClosedForm: There is none that is worth it.
    """
    with _derivation(mask, shifted, wide) as derivation:
        found = derivation.live_segments(mask, own, along)
    _check_widths(list(found), symbols_of(mask))
    return found


@contextmanager
def _derivation(mask: Node, shifted: bool, wide: frozenset[str]) -> Iterator[_Derivation]:
    """Derive segments of ``mask``; sets too complicated for isl's limits have no closed form."""
    import islpy

    # A context of its own, since isl counts and limits operations by context.
    context = islpy.Context()
    context.set_max_operations(MAX_OPERATIONS)
    # With it isl writes (tile + n) mod 64 as tile % 64 where only tile is known not to be negative.
    context.set_ast_build_prefer_pdiv(0)
    try:
        yield _Derivation(SetBuilder(context, shifted, guard_of(mask, wide).cut))
    except (islpy.Error, TooComplicated) as error:
        raise NoClosedForm("the integer sets of its tiles are too complicated") from error


class _Derivation:
    def __init__(self, builder: SetBuilder) -> None:
        self.context = builder.context
        self.builder = builder
        self.slopes = [0]
        """Tiles along the loop that the diagonal moves for one owner tile, and none."""
        self.strides: tuple[int, ...] = _STRIDES
        self.tries = 0

    def segments(
        self, masks: tuple[Node, Node | None], owner: tuple[str, int], loop: tuple[str, int],
        ragged_full: bool,
    ) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:  # fmt: skip
        mask, sure = masks
        pairs, live, tiling = self._tiled(mask, owner, loop)
        dead = bounded_pairs(pairs.subtract(live if sure is None else self.builder.live(sure)))
        some = bounded(bounded(live.apply(tiling)).coalesce())
        spoiled = bounded(bounded(dead.apply(tiling)).coalesce())
        pieces = some.n_basic_set() * spoiled.n_basic_set()
        if pieces > MAX_PRODUCT:
            raise NoClosedForm("its tiles fall into too many pieces")
        if max(divisions_of(some), divisions_of(spoiled)) > MAX_UNKNOWN:
            raise TooComplicated
        full = bounded(bounded(some.subtract(spoiled)).coalesce())
        partial = bounded(some.intersect(spoiled))
        everywhere = self._set("[tiles] -> { [j] : 0 <= j < tiles }")
        if not ragged_full:
            whole = self._set("[whole] -> { [j] : 0 <= j < whole }")
            ragged = self._set("[whole, tiles] -> { [j] : whole <= j < tiles }")
            partial = partial.union(full.intersect(ragged))
            full = full.intersect(whole)
        return (
            self._segments(full.intersect(everywhere).coalesce()),
            self._segments(partial.intersect(everywhere).coalesce()),
        )

    def live_segments(
        self, mask: Node, owner: tuple[str, int], loop: tuple[str, int]
    ) -> tuple[Segment, ...]:
        _, live, tiling = self._tiled(mask, owner, loop)
        everywhere = self._set("[tiles] -> { [j] : 0 <= j < tiles }")
        found = bounded(bounded(live.apply(tiling)).intersect(everywhere))
        return self._segments(found.coalesce())

    def _tiled(
        self, mask: Node, owner: tuple[str, int], loop: tuple[str, int]
    ) -> tuple[Any, Any, Any]:
        """The sets of all and of live pairs, and the map from pairs to tiles along the loop."""
        pairs = self._set("{ [q, kv] : q >= 0 and kv >= 0 }")
        (owner_name, own), (loop_name, along) = owner, loop
        self.strides = (*_periods(mask, along), *_STRIDES)
        self.slopes = sorted({own // along, 0}, reverse=True)
        tiling = self._map(
            f"[tile] -> {{ [q, kv] -> [j] : {own} * tile <= {owner_name} < {own} * tile + {own}"
            f" and {along} * j <= {loop_name} < {along} * j + {along} }}"
        )
        return pairs, bounded_pairs(self.builder.live(mask).intersect(pairs)), tiling

    def _set(self, text: str) -> Any:
        import islpy

        return islpy.Set.read_from_str(self.context, text)

    def _map(self, text: str) -> Any:
        import islpy

        return islpy.Map.read_from_str(self.context, text)

    def _known(self) -> Any:
        """Constraints on the parameters that hold in every call."""
        facts = ["tile >= 0", "tiles >= 0", "0 <= whole <= tiles", "tiles <= whole + 1"]
        names = ["tile", "tiles", "whole"]
        for name, item in self.builder.parameters.items():
            if item.op is Op.SIZE or (item.op is Op.VAR and item.value in ("b", "h", "hkv")):
                names.append(name)
                facts.append(f"{name} >= 0")
        return self._set(f"[{', '.join(names)}] -> {{ : {' and '.join(facts)} }}")

    def _segments(self, found: Any) -> tuple[Segment, ...]:
        found = bounded(bounded(found).gist_params(self._known()))
        found = bounded(found.coalesce())
        if found.is_empty():
            return ()
        pieces = bounded(found.make_disjoint()).get_basic_sets()
        writer = _AstWriter(self.context, self._known(), self.builder.parameters)
        try:
            segments = writer.loops(found, pieces)
        except _NoRanges:
            segments = self._by_pieces(pieces, writer)
        if len(segments) > MAX_SEGMENTS:
            raise NoClosedForm(f"{len(segments)} segments of tiles for each tile are too many")
        return tuple(segments)

    def _by_pieces(self, pieces: list[Any], writer: _AstWriter) -> list[Segment]:
        """One strided range a piece, where each piece is one."""
        segments = []
        if len(pieces) > MAX_PIECES:
            raise NoClosedForm(f"its tiles fall into {len(pieces)} pieces")
        import islpy

        for piece in pieces:
            segments += self._as_ranges(islpy.Set.from_basic_set(piece), writer)
        return segments

    def _as_ranges(self, piece: Any, writer: _AstWriter) -> list[Segment]:
        segment = self._as_range(piece, writer, 1)
        if segment is not None:
            return [segment]
        # The same class of j relative to the owner's diagonal or to 0, for a power of two.
        for stride in self.strides:
            for slope in self.slopes:
                parts: list[Segment] = []
                for residue in range(stride):
                    kept = piece.intersect(
                        self._set(
                            f"[tile] -> {{ [j] : (j - {slope} * tile) mod {stride} = {residue} }}"
                        )
                    )
                    if kept.is_empty():
                        continue
                    segment = self._as_range(kept, writer, stride)
                    if segment is None or len(parts) == MAX_SEGMENTS:
                        break
                    parts.append(segment)
                else:
                    return parts
        raise NoClosedForm("its tiles lie in no pattern of strided ranges")

    def _end(self, find: Callable[[int], Any]) -> Any:
        """An end of a piece, which takes isl few operations or far too many."""
        self.context.reset_operations()
        self.context.set_max_operations(MAX_ENDS)
        try:
            return find(0)
        finally:
            self.context.set_max_operations(MAX_OPERATIONS)

    def _as_range(self, piece: Any, writer: _AstWriter, step: int) -> Segment | None:
        """``piece`` as ``range(first, last + 1, step)``, or None where it is another set."""
        import islpy

        self.tries += 1
        if self.tries > MAX_TRIES:
            raise TooComplicated
        first, last = (bounded(self._end(end)) for end in (piece.dim_min, piece.dim_max))
        j = islpy.PwAff.read_from_str(self.context, "{ [j] -> [(j)] }")
        low, high = (end.add_dims(islpy.dim_type.in_, 1) for end in (first, last))
        hull = j.ge_set(low).intersect(j.le_set(high))
        if step > 1:
            # Congruent to the first element: (j - first) mod step = 0.
            size = islpy.Val.int_from_si(self.context, step)
            hull = hull.intersect(j.sub(low).mod_val(size).zero_set())
        if not bounded(hull).is_equal(piece):
            return None
        return writer.range(first, last, step, piece.params().gist(self._known()))


def bounded(found: Any) -> Any:
    """``found``, a set of tiles or a function, as :func:`.isl_sets.bounded` has sets of pairs."""
    return bounded_pairs(found, MAX_DIVISIONS)


def _periods(mask: Node, along: int) -> list[int]:
    """Tiles after which a constant divisor of the mask repeats, where that is a few tiles."""
    found = {
        int(item.args[1].value or 0) // along
        for item in toposort(mask)
        if item.op in (Op.MOD, Op.FLOORDIV) and item.args[1].op is Op.CONST
    }
    return sorted(period for period in found if 1 < period <= _STRIDES[-1])


def _check_widths(segments: list[Segment], symbols: Symbols) -> None:
    """Refuse bounds whose arithmetic may wrap where the symbols fit 32 bits.

    Raises:
        NoClosedForm: There is such a bound.
    """
    values: dict[Node, Range] = {item: symbols.values.get(item, INT32) for item in symbols.named}
    values |= dict.fromkeys((TILE, TILES, WHOLE), (0, POSITION_LIMIT))
    bounds = [(s.start, s.stop, *(() if s.guard is None else (s.guard,))) for s in segments]
    for item in toposort(*(bound for group in bounds for bound in group)):
        if item.dtype is DType.INT and item not in values:
            values[item] = exact_range(item, values)
            if not fits(values[item], INT64):
                raise NoClosedForm("the bounds of its tiles may need more than 64 bits")


class _NoRanges(NoClosedForm):
    """isl's code for a set tests a tile inside a loop."""


class _AstWriter:
    """isl's code generator, which runs without the limit on operations.

    At that limit isl 0.27 frees expressions twice (``isl_ast_build_expr_from_basic_set``), and the
    process goes on with a broken heap. So the limit is lifted while isl writes code, and the size
    of what it writes code for bounds the work.

    Args:
        context: The isl context.
        known: What holds of the parameters, a parameter set.
        parameters: What each isl parameter stands for.
    """

    def __init__(self, context: Any, known: Any, parameters: dict[str, Node]) -> None:
        import islpy

        self.context = context
        self.reader = _AstReader(parameters)
        with self._unlimited():
            self.build = islpy.AstBuild.from_context(known)

    def loops(self, found: Any, pieces: list[Any]) -> list[Segment]:
        """The loops over the set ``found``, whose disjoint ``pieces`` say how complicated it is.

        Raises:
            _NoRanges: The loops are no segments.
            NoClosedForm: The set is too complicated.
        """
        import islpy

        _check_size(pieces)
        identity = islpy.Map.read_from_str(self.context, "{ [j] -> [j] }")
        schedule = islpy.UnionMap.from_map(identity.intersect_domain(found))
        with self._unlimited():
            return self.reader.read(self.build.node_from_schedule_map(schedule))

    def range(self, first: Any, last: Any, step: int, guard: Any) -> Segment:
        """Segment from ``first`` to ``last``, functions of the parameters, where ``guard`` holds.

        Raises:
            NoClosedForm: The functions or the guard are too complicated.
        """
        _check_size(_domains(first) + _domains(last))
        _check_size(guard.get_basic_sets())
        with self._unlimited():
            start, end = (
                self.reader.expression(self.build.expr_from_pw_aff(bound))
                for bound in (first, last)
            )
            condition = (
                None
                if guard.plain_is_universe()
                else self.reader.expression(self.build.expr_from_set(guard))
            )
        return Segment(start, node(Op.ADD, end, const(1)), step, condition)

    @contextmanager
    def _unlimited(self) -> Iterator[None]:
        self.context.set_max_operations(0)
        try:
            yield
        finally:
            self.context.set_max_operations(MAX_OPERATIONS)


def _domains(function: Any) -> list[Any]:
    """Basic sets that a piecewise function is defined on."""
    return [basic for domain, _ in function.get_pieces() for basic in domain.get_basic_sets()]


def _check_size(pieces: list[Any]) -> None:
    """Refuse sets that isl may take long to write code for."""
    constraints = sum(piece.n_constraint() for piece in pieces)
    if len(pieces) > MAX_DISJOINT or constraints > MAX_CONSTRAINTS:
        raise NoClosedForm(f"its tiles fall into {len(pieces)} pieces of {constraints} conditions")


class _AstReader:
    """isl's syntax tree as segments and IR."""

    def __init__(self, parameters: dict[str, Node]) -> None:
        self.names = {**parameters, "tile": TILE, "tiles": TILES, "whole": WHOLE}

    def read(self, code: Any) -> list[Segment]:
        segments: list[Segment] = []
        self._walk(code, None, segments)
        return segments

    def _walk(self, code: Any, guard: Node | None, segments: list[Segment]) -> None:
        import islpy

        kinds: Any = islpy.ast_node_type
        kind = code.get_type()
        if kind == kinds.block:
            children = code.block_get_children()
            for number in range(children.n_ast_node()):
                self._walk(children.get_at(number), guard, segments)
        elif kind == kinds.if_:
            condition = self.expression(code.if_get_cond())
            self._walk(code.if_get_then_node(), _both(guard, condition), segments)
            if code.if_has_else_node():
                other = _both(guard, node(Op.NOT, condition))
                self._walk(code.if_get_else_node(), other, segments)
        elif kind == kinds.user:
            only = self.expression(code.user_get_expr().get_op_arg(1))
            segments.append(Segment(only, node(Op.ADD, only, const(1)), 1, guard))
        elif kind == kinds.for_:
            segments.append(self._loop(code, guard))
        else:
            raise _NoRanges(f"isl wrote a node of kind {kind}")

    def _loop(self, code: Any, guard: Node | None) -> Segment:
        import islpy

        start = self.expression(code.for_get_init())
        if code.for_is_degenerate():
            stop, step = node(Op.ADD, start, const(1)), 1
        else:
            condition = code.for_get_cond()
            stop = self.expression(condition.get_op_arg(1))
            if condition.get_op_type() == islpy.ast_expr_op_type.le:
                stop = node(Op.ADD, stop, const(1))
            step = _integer(code.for_get_inc().get_val())
        body = code.for_get_body()
        iterator = code.for_get_iterator().get_id().get_name()
        if body.get_type() != islpy.ast_node_type.user:
            raise _NoRanges("its tiles are no ranges")
        argument = body.user_get_expr().get_op_arg(1)
        if argument.to_C_str() != iterator:
            raise _NoRanges("its tiles are no ranges")
        return Segment(start, stop, step, guard)

    def expression(self, item: Any) -> Node:
        """An isl expression as IR: INT, or BOOL for conditions."""
        import islpy

        kind = item.get_type()
        if kind == islpy.ast_expr_type.int:
            return const(_integer(item.get_val()))
        if kind == islpy.ast_expr_type.id:
            return self.names[item.get_id().get_name()]
        name = item.get_op_type().name
        args = [self.expression(item.get_op_arg(n)) for n in range(item.get_op_n_arg())]
        if name in _INFIX:
            result = args[0]
            for arg in args[1:]:
                result = node(_INFIX[name], result, arg)
            return result
        if name == "minus":
            return node(Op.NEG, args[0])
        if name in ("ge", "gt"):
            return node(Op.LE if name == "ge" else Op.LT, args[1], args[0])
        if name in ("cond", "select"):
            return node(Op.WHERE, *args)
        raise _NoRanges(f"isl wrote an operation {name}")


_INFIX = {
    "add": Op.ADD,
    "sub": Op.SUB,
    "mul": Op.MUL,
    "div": Op.FLOORDIV,
    "fdiv_q": Op.FLOORDIV,
    "pdiv_q": Op.FLOORDIV,
    "pdiv_r": Op.MOD,
    "zdiv_r": Op.MOD,
    "min": Op.MIN,
    "max": Op.MAX,
    "and_": Op.AND,
    "and_then": Op.AND,
    "or_": Op.OR,
    "or_else": Op.OR,
    "eq": Op.EQ,
    "le": Op.LE,
    "lt": Op.LT,
}


def _integer(value: Any) -> int:
    return int(value.to_str())


def _both(a: Node | None, b: Node) -> Node:
    return b if a is None else node(Op.AND, a, b)
