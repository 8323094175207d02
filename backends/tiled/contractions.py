"""Calls of programs with contractions, made of calls of kernels that know of none.

Where contractions only add to the raw score, the kernels get longer rows of queries and keys (see
:mod:`attndsl.passes.fold_dots`); else the call is made of torch operations tile by tile.

Rows of captured tensors are taken in the dtype of q, like those of k. Where that would round them,
the call is made tile by tile too.

Contractions that are added to a whole row are computed once a row, for the log-sum-exp alone.

Non-goals: contractions within kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import Op, dependencies, leaf_names, sides, toposort, var
from attndsl.passes.fold_dots import with_heads_apart
from attndsl.pipeline import MADE, lower_program

from ..base import Backend, CallGradients
from ..dense.row_lookups import rows_at
from ..log_sum import LogSumParts
from ..memory_order import arranged_like, empty_like, wide_dtype
from .capture_gradients import CaptureSums
from .step_plan import QueryStep
from .tile_expressions import Expressions, work_dtype

if TYPE_CHECKING:
    from attndsl.ir import Node, Program, Side
    from attndsl.passes.fold_dots import DotTerm
    from attndsl.pipeline import Lowered

    from ..base import Backward, Call, Wants
    from .tile_expressions import Tile

MAX_WIDTH = 256
"""Head dim that kernels take at most."""
_STEP = 8
"""Rows are padded to multiples of as many elements: 16 bytes of half types."""


class WidenedBackend(Backend):
    """Runs programs with contractions by kernels of another backend.

    Args:
        kernels: Runs what it can be widened to.
        tiles: Runs the rest, on any device.
    """

    differentiable = False

    def __init__(self, kernels: Backend, tiles: Backend) -> None:
        self.kernels = kernels
        self.name = kernels.name
        self._tiles = tiles

    def why_not(self, device: torch.device) -> str | None:
        """Reason why the kernels' backend cannot run on ``device``, or None where it can."""
        return self.kernels.why_not(device)

    def check(self, lowered: Lowered, call: Call) -> None:
        """Refuse what neither the kernels nor torch operations do."""
        if why_tiles(lowered, call) is not None:
            self._tiles.check(lowered, call)
            return
        assert lowered.contractions is not None
        assert lowered.contractions.wide is not None
        if lowered.contractions.terms:
            width = _width_of(lowered, call)
            # Shapes say all; rows are put together when the call is made.
            q, k = (
                x.new_empty((1, 1, 1, 1)).expand(*x.shape[:3], -(-width // _STEP) * _STEP)
                for x in (call.q, call.k)
            )
            call = call._replace(q=q, k=k)
        self.kernels.check(lowered.contractions.wide, call)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        if why_tiles(lowered, call) is not None:
            return self._tiles.forward(lowered, call)
        with torch.no_grad():
            wide = Wide(lowered, call)
            out, lse = self.kernels.forward(wide.lowered, wide.call)
            return out, wide.with_row(lse, 1.0)

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients:
        """See :class:`~attndsl.backends.base.Backend`."""
        if why_tiles(lowered, call) is not None:
            return self._tiles.backward(lowered, call, backward)
        with torch.no_grad():
            wide = Wide(lowered, call)
            if backward.wanted.partial and wide.learns_row(backward.wanted):
                # Here a row's scores add up to the gradient of no log-sum-exp.
                return self._tiles.backward(lowered, call, backward)
            wanted = wide.wants(backward.wanted)
            lse = wide.with_row(backward.lse, -1.0)
            of_wide = backward._replace(wanted=wanted, lse=lse)
            found = self.kernels.backward(wide.lowered, wide.call, of_wide)
            return wide.gradients(found, backward)

    def runner(self, lowered: Lowered, call: Call, direction: str) -> tuple[Backend, Lowered, Call]:
        """See :class:`~attndsl.backends.base.Backend`."""
        if why_tiles(lowered, call) is not None:
            return self, lowered, call
        wide = Wide(lowered, call)
        return self.kernels.runner(wide.lowered, wide.call, direction)

    def describe(self, lowered: Lowered, head_dim: int) -> list[str]:
        """Lines on the operations that run the contractions, and the kernels' own lines."""
        assert lowered.contractions is not None
        if lowered.contractions.wide is None:
            return [f"  dot        torch operations, tile by tile: {lowered.contractions.why_not}"]
        lines = []
        if lowered.contractions.terms:
            lines = [
                "  dot        in one product with q and k, whose rows the others stand behind,",
                f"             up to {MAX_WIDTH} elements; torch operations, tile by tile, beyond",
                "             and for rows that the dtype of q would round",
            ]
        if lowered.contractions.row is not None:
            lines += ["  row        dot without keys: torch operations, once a row, for lse alone"]
        return [*lines, *self.kernels.describe(lowered.contractions.wide, head_dim)]


def why_tiles(lowered: Lowered, call: Call) -> str | None:
    """Reason why torch operations run the call, or None where kernels do."""
    contractions = lowered.contractions
    assert contractions is not None, "other programs have backends of their own"
    if contractions.wide is None:
        return contractions.why_not
    if not contractions.terms:
        return None
    own = call.q.dtype
    for name in (side.name for term in contractions.terms for side in sides(term.product)):
        given = call.tensors[name].dtype
        if torch.promote_types(given, own) is not own:
            return f"the dtype of q, {_short(own)}, would round rows of '{name}', {_short(given)}"
    width = _width_of(lowered, call)
    if width > MAX_WIDTH:
        return f"a row of q with its contractions has {width} elements (limit: {MAX_WIDTH})"
    if call.scale == 0.0:
        return "with scale=0, the raw score has no room for contractions"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _width_of(lowered: Lowered, call: Call) -> int:
    """Elements of a row of q and of all contractions."""
    assert lowered.contractions is not None
    left = (sides(term.product)[0] for term in lowered.contractions.terms)
    return int(call.q.shape[3]) + sum(call.tensors[side.name].shape[-1] for side in left)


@dataclass(frozen=True, slots=True)
class _TermRows:
    """One side of a term, for all its rows."""

    side: Side
    factor: Node | None
    """FLOAT; None for 1."""
    call: Call
    """Call whose heads are those of the rows."""
    tile: Tile
    """All rows of the side, and one of the other."""

    def plain(self) -> torch.Tensor:
        """(batch or 1, heads or 1, length or 1, width); a view where indices count rows up."""
        tensor, indices = self.call.tensors[self.side.name], self.side.indices
        found = self.tile.view(indices, tensor)
        if found is None:
            found = rows_at(tensor, self.tile.evaluate(*indices))
        # One of the dims of queries and keys is 1.
        return found.flatten(2, 3)

    def scaled(self, factor: float) -> torch.Tensor:
        """Rows of :meth:`plain`, times the side's factor and another one, in the dtype of q."""
        rows, dtype = self.plain(), self.call.q.dtype
        if self.factor is None and factor == 1.0:
            return rows.to(dtype)
        return (rows.to(self._work()) * self._factors(factor)).to(dtype)

    def add_gradient(self, sums: CaptureSums, grad: torch.Tensor, factor: float) -> None:
        """Add what ``grad``, of :meth:`scaled`, means for the tensor and the factor's leaves.

        Args:
            sums: Takes it.
            grad: (batch, heads, length, width).
            factor: As it was given to :meth:`scaled`.
        """
        grad = grad.to(self._work())
        rows = self.plain()
        part = (grad * self._factors(factor)).sum_to_size(rows.shape)
        indices = self.tile.evaluate(*self.side.indices) if self.side.indices else ()
        sums.add_rows(self.side.name, indices, part)
        if self.factor is not None and (terms := sums.of(self.factor)):
            seed = (grad * rows.to(grad.dtype)).sum(-1, keepdim=True) * factor
            columns = self.tile.scope.variables["kv"].shape[3]
            sums.add(terms, seed.mT if columns > 1 else seed, self.tile)

    def _work(self) -> torch.dtype:
        return self.tile.scope.dtype

    def _factors(self, factor: float) -> torch.Tensor:
        """Factors of the rows: (batch or 1, heads or 1, length or 1, 1), or a 0-d tensor."""
        if self.factor is None:
            return torch.full((), factor, dtype=self._work(), device=self.call.q.device)
        (found,) = self.tile.evaluate(self.factor)
        return found.flatten(2, 3).unsqueeze(-1) * factor


class Wide:
    """A call without contractions that stands for one with them.

    Args:
        lowered: The program, whose contractions only add to the raw score.
        call: The call.

    Attributes:
        lowered: The program without them.
        call: The call of it. q and k have what the contractions multiply behind their own rows.
    """

    def __init__(self, lowered: Lowered, call: Call) -> None:
        contractions = lowered.contractions
        assert contractions is not None
        assert contractions.wide is not None
        self._given = call
        self._row = contractions.row
        self._factor = 1.0 / call.scale if contractions.terms else 1.0
        terms = contractions.terms
        # Keys that differ between the query heads of a group need heads of their own.
        self._apart = call.q.shape[1] != call.k.shape[1] and any(map(_is_by_head, terms))
        keys = call if self._apart else _with_heads_of_keys(call)
        self._of_queries, of_keys = _tile(call, "q"), _tile(keys, "kv")
        self._queries = [_queries(term, call, self._of_queries) for term in terms]
        self._keys = [_keys(term, keys, of_keys) for term in terms]
        self.lowered, sizes, k, v = contractions.wide, call.sizes, call.k, call.v
        if self._apart:
            self.lowered, name = _with_heads_apart(contractions.wide.program)
            sizes = {**sizes, name: sizes["kv_heads"], "kv_heads": sizes["heads"]}
            group = call.q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        q = call.q
        if terms:
            q = _joined(q, [rows.scaled(self._factor) for rows in self._queries])
            k = _joined(k, [rows.scaled(1.0) for rows in self._keys])
        program = self.lowered.program
        self.call = call._replace(
            q=q, k=k, v=v,
            sizes=sizes,
            tensors={decl.name: call.tensors[decl.name] for decl in program.tensors},
            params={decl.name: call.params[decl.name] for decl in program.params},
        )  # fmt: skip

    def with_row(self, lse: torch.Tensor, sign: float) -> torch.Tensor:
        """``lse`` and what is added to each row; rows without pairs stay.

        Args:
            lse: See :mod:`..log_sum`.
            sign: -1 to take it away again.
        """
        if self._row is None:
            return lse
        (row,) = self._of_queries.evaluate(self._row)
        return LogSumParts(*lse).plus(sign * row.squeeze(3))

    def learns_row(self, wants: Wants) -> bool:
        """Tell whether gradients are wanted of what is added to whole rows."""
        return not (wants.tensors | wants.params).isdisjoint(leaf_names(self._row))

    def wants(self, wants: Wants) -> Wants:
        """Gradients to ask the kernels for."""
        rows = [*self._queries, *self._keys]
        names = wants.tensors | wants.params
        learned = any(rows.side.name in names or names & leaf_names(rows.factor) for rows in rows)
        return replace(
            wants,
            q=wants.q or learned,
            k=wants.k or learned,
            tensors=wants.tensors.intersection(self.call.tensors),
            params=wants.params.intersection(self.call.params),
        )

    def gradients(self, found: CallGradients, backward: Backward) -> CallGradients:
        """The gradients of the call that was given, from those of :attr:`call`.

        Args:
            found: Those of :attr:`call`.
            backward: What was asked for of the call that was given.
        """
        given, wants = self._given, backward.wanted
        sums = CaptureSums(given, wants)
        q, k, v = found.q, found.k, found.v
        if q is not None and k is not None:
            for rows, part in zip(self._queries, _parts(q, given, self._queries), strict=True):
                rows.add_gradient(sums, part, self._factor)
            for rows, part in zip(self._keys, _parts(k, given, self._keys), strict=True):
                rows.add_gradient(sums, part, 1.0)
        if backward.grad_lse is not None and (of_row := sums.of(self._row)):
            dead = backward.lse[0] == -torch.inf
            seed = backward.grad_lse.to(work_dtype(given)).masked_fill(dead, 0.0)
            sums.add(of_row, seed.unsqueeze(3), self._of_queries)
        tensors, params = sums.tensors(), sums.params()
        for name, more in found.tensors.items():
            tensors[name] = tensors[name] + more
        for name, more in found.params.items():
            params[name] = params[name] + more
        width, dtype = given.q.shape[3], wide_dtype(wants.wide)
        own, keys = (None if x is None else x[..., :width] for x in (q, k))
        return CallGradients(
            q=arranged_like(own, given.q, dtype) if wants.q and own is not None else None,
            k=self._of_group(keys, given.k, dtype) if wants.k and keys is not None else None,
            v=self._of_group(v, given.v, dtype) if v is not None else None,
            tensors=tensors,
            params=params,
        )

    def _of_group(
        self, grad: torch.Tensor, like: torch.Tensor, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """Sums over the query heads that share a key head, where each has had its own copy."""
        if not self._apart:
            return arranged_like(grad, like, dtype)
        batch, heads, length, width = grad.shape
        kv_heads = self._given.k.shape[1]
        parts = grad.reshape(batch, kv_heads, heads // kv_heads, length, width)
        return arranged_like(parts.sum(2, dtype=work_dtype(self._given)), like, dtype)


def _with_heads_apart(program: Program) -> tuple[Lowered, str]:
    """Lowered program, and name, that :func:`~attndsl.passes.fold_dots.with_heads_apart` gives."""

    def make() -> tuple[Lowered, str]:
        found, name = with_heads_apart(program)
        return lower_program(found), name

    made: tuple[Lowered, str] = MADE.get_or_make((with_heads_apart, program), make)
    return made


def _tile(call: Call, along: str) -> Tile:
    """All rows of queries (``q``) or of keys (``kv``), and one of the others, if there is one."""
    rows, columns = (0, call.q.shape[2]), (0, call.k.shape[2])
    if along == "q":
        columns = (0, min(1, columns[1]))
    else:
        rows = (0, min(1, rows[1]))
    step = QueryStep((0, call.q.shape[0]), (0, call.q.shape[1]), rows, ())
    # Nothing reads the score.
    score = torch.empty((1, 1, 1, 1), dtype=work_dtype(call), device=call.q.device)
    return Expressions(call).tile(step, columns, score)


def _queries(term: DotTerm, call: Call, tile: Tile) -> _TermRows:
    left, _ = sides(term.product)
    return _TermRows(left, None if _is_of_keys(term) else _or_none(term.factor), call, tile)


def _keys(term: DotTerm, call: Call, tile: Tile) -> _TermRows:
    _, right = sides(term.product)
    return _TermRows(right, term.factor if _is_of_keys(term) else None, call, tile)


def _or_none(factor: Node) -> Node | None:
    return None if factor.op is Op.CONST and factor.value == 1.0 else factor


def _is_of_keys(term: DotTerm) -> bool:
    return "kv" in dependencies(term.factor)[term.factor]


def _is_by_head(term: DotTerm) -> bool:
    """Return True if a term's keys differ between the query heads of a group."""
    _, right = sides(term.product)
    roots = [*right.indices, *([term.factor] if _is_of_keys(term) else [])]
    return var("h") in toposort(*roots)


def _with_heads_of_keys(call: Call) -> Call:
    """``call`` as if each key head had one query head."""
    batch, _, q_len, width = call.q.shape
    return call._replace(
        q=call.q.new_empty((1, 1, 1, width)).expand(batch, call.k.shape[1], q_len, width)
    )


def _joined(own: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """Rows behind one another, and zeros behind them up to a multiple of ``_STEP``.

    They lie in memory as ``own``, since the output and gradients will lie as they do.
    """
    width = sum(rows.shape[-1] for rows in (own, *others))
    found = empty_like(own, width + -width % _STEP)
    begin = 0
    for rows in (own, *others):
        found.narrow(-1, begin, rows.shape[-1]).copy_(rows)
        begin += rows.shape[-1]
    found[..., begin:].zero_()
    return found


def _parts(grad: torch.Tensor, call: Call, sides_of_terms: list[_TermRows]) -> list[torch.Tensor]:
    """The parts of a gradient that belong to each of the contractions' rows."""
    widths = [rows.call.tensors[rows.side.name].shape[-1] for rows in sides_of_terms]
    begin = call.q.shape[3]
    found = []
    for width in widths:
        found.append(grad[..., begin : begin + width])
        begin += width
    return found
