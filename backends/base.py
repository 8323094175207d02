"""Backend interface: a checked call in, tensors out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from attndsl.errors import UnsupportedError
from attndsl.passes.print_ir import short_form

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from .paged_requests import ChunkResults, Packed, Pages

Scalar = bool | int | float


@dataclass(frozen=True, slots=True)
class TileKinds:
    """Kinds of tiles that the caller has found before."""

    kinds: torch.Tensor
    """int8 (batch or 1, heads or 1, q tiles, kv tiles): 0 EMPTY, 1 PARTIAL, 2 FULL."""
    block_m: int
    block_n: int


@dataclass(frozen=True, slots=True)
class Part:
    """Place of a call within the larger call that it is a part of.

    No backend gets one: :func:`attndsl.call.sub_calls.localised` says it in the program's terms.
    """

    b_offset: int = 0
    """Logical number of the first batch entry."""
    h_offset: int = 0
    """Logical number of the first query head."""
    counted: frozenset[str] = frozenset()
    """The subset of ``q`` and ``kv`` whose logical positions are row numbers of the whole: dropout
    counts by these. Rows of the others count from 0."""
    shares: frozenset[tuple[str, int]] = frozenset()
    """Tensors' names and dims that have the part's own rows only."""
    narrowed: frozenset[tuple[str, int]] = frozenset()
    """The shares that were narrowed out of whole tensors."""
    kv_lengths: torch.Tensor | None = None
    """(B,) int: number of keys of each batch entry; ``kv_len`` is the number of rows of k."""
    packed: Packed | None = None
    """Layout of requests that are served together; see :mod:`attndsl.serving.ragged_batch`."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Numbers that a part's pairs have in the whole call, by which its dropout counts.

    See :mod:`.dense.philox`: the pair of row ``i``, key ``j``, batch entry ``b`` and head ``h`` of
    the call's tensors is drawn as that of ``q_start + i``, ``kv_start + j``, ``b_offset + b`` and
    ``h_offset + h`` of a call with ``heads`` query heads.
    """

    heads: int
    b_offset: int = 0
    h_offset: int = 0
    q_start: int | None = 0
    """None where ``q_index`` or a tensor ``q_offset`` of the call says which row each is. Calls of
    one signature may have other starts, but are None together."""
    kv_start: int | None = 0


class Signature:
    """Identity of a signature that calls share, with the program's name for profiles."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        """Equal to itself alone."""
        self.name = name


NONE: Mapping[str, Any] = MappingProxyType({})
"""Captures, or their gradients, of a call that has none."""


class Call(NamedTuple):
    """One call's arguments, checked and complete.

    A tuple, since each call makes one, and a frozen dataclass takes a microsecond more: see M26 in
    docs/dev/measured.md.

    ``q`` (B, Hq, Lq, D), ``k`` (B, Hkv, Lk, D), ``v`` (B, Hkv, Lk, Dv): one floating dtype, one
    device, last stride 1, Hq a multiple of Hkv; any other strides, any size 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    """Factor of q . k, natural units."""
    sizes: Mapping[str, int]
    """Every name of ``ir.SIZES`` and ``Program.dim_names()``. Backends find the sizes of q and k
    under the former; where these are a part of a larger call, its sizes have names of the latter
    kind (:mod:`attndsl.passes.sub_program`)."""
    tensors: Mapping[str, torch.Tensor] = NONE
    """One per ``Program.tensors``, in that order; shape checked, any strides."""
    params: Mapping[str, Scalar | torch.Tensor] = NONE
    """One per ``Program.params``, in that order; a tensor is 0-d and on ``q``'s device."""
    q_offset: int | torch.Tensor = 0
    """Logical position of query row 0; int or 0-d int tensor on ``q``'s device."""
    kv_offset: int | torch.Tensor = 0
    q_index: torch.Tensor | None = None
    """(Lq,) int: logical position of each query row; replaces the offset."""
    kv_index: torch.Tensor | None = None
    seed: int | torch.Tensor = 0
    """Seed of dropout; a tensor is 0-d, int64 and on ``q``'s device, and read by the kernels."""
    deterministic: bool = False
    tiles: TileKinds | None = None
    """Used in place of finding the tiles of this call anew, where they have no closed form."""
    signature: Signature | None = None
    """One for all calls of one program whose tensors agree in shape, strides, dtype and
    device, whose sizes agree, whose other arguments agree in type, and whose outputs agree in
    dtype; None where nobody compared them."""
    wide: bool = False
    """True if ``out`` is in fp32 while q, k and v are of a half type."""
    draws: Draws | None = None
    """Pair numbers by which dropout counts in a part of a larger call; None where pairs count by
    their rows, or the program has no dropout."""
    part: Part | None = None
    """None in calls that backends get. Elsewhere ``sizes`` are those of the whole, and offsets may
    be (B,) ints, one for each batch entry."""
    within_graph: bool = False
    """True if a graph of torch makes the call. Its memory holds one tensor after the other, and no
    version of a tensor tells them apart."""
    room: torch.Tensor | None = None
    """Memory where the output, or a backward's dQ, may be written; a result that was written
    elsewhere is copied into it."""

    @property
    def shifted(self) -> bool:
        """True if rows and logical positions may differ by an offset."""
        return any(
            not isinstance(offset, int) or offset != 0 for offset in (self.q_offset, self.kv_offset)
        )

    @property
    def indexed(self) -> bool:
        """True if logical positions are looked up."""
        return self.q_index is not None or self.kv_index is not None

    @property
    def has_plain_positions(self) -> bool:
        """True if no tensor or part says where rows are, or by which numbers dropout draws."""
        return (
            self.q_index is None and self.kv_index is None and self.part is None
            and type(self.q_offset) is int and type(self.kv_offset) is int
            and type(self.seed) is int
        )  # fmt: skip

    def of(self, operands: Sequence[torch.Tensor]) -> Call:
        """The same call of other tensors: q, k, v, and captures in their order."""
        q, k, v, *captures = operands
        _, _, _, scale, sizes, named, *rest = self
        if captures:
            named = dict(zip(named, captures, strict=True))
        # To name the fields that stay takes two microseconds less than _replace.
        return Call._make((q, k, v, scale, sizes, named, *rest))

    def emptied(self) -> Call:
        """The call as a template for :meth:`of`, which keeps no tensor's memory."""
        empty = torch.empty(0, dtype=self.q.dtype, device=self.q.device)
        return self.of([empty] * (3 + len(self.tensors)))

    def flatten(self) -> tuple[Form, tuple[torch.Tensor, ...]]:
        """The call in two parts: what is no tensor, and its tensors in the order of :class:`Form`.

        A map of tiles stays with the former: nothing is computed from its elements but which tiles
        are left out.
        """
        params, moved = self.params, not self.has_plain_positions
        if not (self.tensors or params or moved):  # Most calls, where parts of microseconds count.
            return Form(self.scale, self.sizes, (), (), params, (), (), self[3:]), self[:3]
        given: tuple[str, ...] = ()
        places: tuple[str, ...] = ()
        others: tuple[torch.Tensor, ...] = ()
        plain: tuple[Any, ...] = self[_FIRST_PLAIN:]
        if params and (found := _tensors_among(params)):
            given, others, params = tuple(found), tuple(found.values()), _without(found, params)
        if moved:
            found, plain = _positions_apart(dict(zip(_PLAIN, plain, strict=True)))
            places, others = tuple(found), (*others, *found.values())
        form = Form(self.scale, self.sizes, tuple(self.tensors), given, params, places, plain)
        return form, (self.q, self.k, self.v, *self.tensors.values(), *others)


def _tensors_among(values: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    return {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}


def _without(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, None in place of those that are among ``tensors``."""
    return {name: None if name in tensors else x for name, x in values.items()}


def _positions_apart(plain: dict[str, Any]) -> tuple[Mapping[str, torch.Tensor], tuple[Any, ...]]:
    """Fields behind a call's params that are tensors, and all fields without these."""
    positions = {**_tensors_among(plain)}
    part = plain["part"]
    if part is not None and part.kv_lengths is not None:
        positions[_LENGTHS] = part.kv_lengths
        plain["part"] = replace(part, kv_lengths=None)
    return positions, tuple(_without(positions, plain).values())


_LENGTHS = "kv_lengths"
"""A tensor of the call's part."""
_FIRST_PLAIN = Call._fields.index("params") + 1
_PLAIN = Call._fields[_FIRST_PLAIN:]
"""The fields of a call behind its params."""


class Form(NamedTuple):
    """A call without its tensors, and where they go: q, k, v, captures, params, positions."""

    scale: float
    sizes: Mapping[str, int]
    tensors: tuple[str, ...]
    """Names of the captured tensors."""
    given: tuple[str, ...]
    """Names of the params that are tensors."""
    params: Mapping[str, Any]
    """All params; None for those that are tensors."""
    positions: tuple[str, ...]
    """Fields that are tensors, among offsets, indices, the seed and ``kv_lengths``."""
    plain: tuple[Any, ...]
    """The call's fields behind ``params``; None for those that are tensors."""
    rest: tuple[Any, ...] | None = None
    """The call's fields behind v, where none of them has tensors; ``plain`` is empty then."""

    @property
    def captures(self) -> tuple[str, ...]:
        """Names of the tensors and of the params that are tensors, as they stand behind v."""
        return (*self.tensors, *self.given)

    def call(self, tensors: Sequence[torch.Tensor]) -> Call:
        """The call of ``tensors``, which are in the order that :meth:`Call.flatten` gives."""
        if self.rest is not None:
            return Call._make((*tensors, *self.rest))
        q, k, v, *rest = tensors
        plain, params, count = self.plain, self.params, len(self.tensors)
        if self.given:
            params = {**params, **dict(zip(self.given, rest[count:], strict=False))}
        if self.positions:
            named = dict(zip(_PLAIN, plain, strict=True))
            positions = rest[count + len(self.given) :]
            named |= zip(self.positions, positions, strict=True)
            lengths = named.pop(_LENGTHS, None)
            if lengths is not None:
                named["part"] = replace(named["part"], kv_lengths=lengths)
            plain = tuple(named.values())
        captured = dict(zip(self.tensors, rest, strict=False))
        return Call(q, k, v, self.scale, self.sizes, captured, params, *plain)


def name_of_call(lowered: Lowered, call: Call) -> str:
    """Name of the program of ``call`` in profiles and logs."""
    return short_form(lowered) if call.signature is None else call.signature.name


@dataclass(frozen=True, slots=True)
class Wants:
    """Gradients that a backward call must compute."""

    q: bool = True
    k: bool = True
    v: bool = True
    tensors: frozenset[str] = frozenset()
    params: frozenset[str] = frozenset()
    features: tuple[tuple[str, frozenset[str]], ...] = ()
    """Flags of features that attention kernels have for gradients of captures, each with the
    tensors and params whose gradients come of it (``hopper/features``)."""
    wide: bool = False
    """True if the gradients of q, k and v are in fp32 while q, k and v are of a half type."""
    partial: bool = False
    """True if ``out`` and ``lse`` may cover more keys than the call has. The gradients of a row's
    scores then do not sum to the value that the call's own results imply."""


class Backward(NamedTuple):
    """A forward's results, their gradients, and which gradients are wanted of them."""

    out: torch.Tensor
    """(B, Hq, Lq, Dv), of the dtype and memory order that ``forward`` gives."""
    lse: torch.Tensor
    """(B, Hq, Lq), as ``forward`` gives it."""
    grad_out: torch.Tensor
    """Gradient of ``out``, in its dtype or in that of q."""
    grad_lse: torch.Tensor | None
    """In fp32 (fp64 for fp64); None for zeros."""
    wanted: Wants


@dataclass(frozen=True, slots=True)
class StoredDS:
    """The gradient of each score, by tiles, as attention kernels store it."""

    values: torch.Tensor
    """(batch, heads, keys, queries), both rounded up to whole tiles."""
    stored: torch.Tensor
    """(batch, heads, tiles of keys, tiles of queries) int8: 1 where the tile's dS was stored; the
    rest of ``values`` is uninitialised and counts as zero."""


class CallGradients(NamedTuple):
    """Gradients, of the shape and dtype of what they are gradients of; None where not wanted.

    Those of q, k and v have their memory order too (see :mod:`.memory_order`), and are in fp32
    where ``Wants.wide`` says so.
    """

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    tensors: Mapping[str, torch.Tensor] = NONE
    params: Mapping[str, torch.Tensor] = NONE
    stored_ds: StoredDS | None = None
    checks: tuple[torch.Tensor, torch.Tensor] | None = None
    """Numbers that are finite only if the gradient of q is, and if those of k and v are."""

    def plus(
        self, tensors: Mapping[str, torch.Tensor], params: Mapping[str, torch.Tensor] = NONE
    ) -> CallGradients:
        """These gradients and further ones, added where both are of the same capture."""
        whole = [dict(self.tensors), dict(self.params)]
        for found, more in zip(whole, (tensors, params), strict=True):
            found.update({n: found[n] + x if n in found else x for n, x in more.items()})
        return self._replace(tensors=whole[0], params=whole[1])


@dataclass(frozen=True, slots=True)
class Tangents:
    """Directions, each of the shape and dtype of its tensor; None, or no entry, for constants."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    captures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tangents of tensors and params, by name."""


@dataclass(frozen=True, slots=True)
class Written:
    """A program as a person wrote it, for texts of kernels that people read."""

    text: str = ""
    bound: Mapping[str, bool | int | float] = field(default_factory=dict)
    """Params that are folded into the program."""
    names: Mapping[Node, str] = field(default_factory=dict)
    """Expressions that the text gives a name, before and after simplification."""


UNWRITTEN = Written()
"""The empty form, for compiled texts: programs that mean the same then have the same text."""


BoundForward = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
"""Function of q, k, v and captures that returns the output and the log-sum-exp."""
BoundBackward = Callable[[Sequence[torch.Tensor], Backward], CallGradients]


class Backend(Protocol):
    """Runner of lowered programs. Stateless but for caches."""

    name: str
    differentiable: bool
    """True: ``forward`` is made of torch operations, and torch differentiates it."""
    checked: bool = False
    """True if it reads the values of lookups, which forward mode and ``torch.func`` do not show."""
    reads_windows: bool = False
    """True if its backward reads an output whose heads and batch entries lie further apart than in
    a contiguous one."""
    has_events: bool = False
    """True if profiles show its forwards and backwards as events with the program's name."""
    any_length: bool = False
    """True if it runs a call with any number of keys where it runs one, and keeps nothing."""
    binds: bool = False
    """True if a bound call takes less of the host's time than an unbound one."""
    contracts: bool = True
    """True if it runs programs with contractions; other backends leave them to
    :mod:`.tiled.contractions`."""

    def why_not(self, device: torch.device) -> str | None:
        """Reason why this backend cannot run on ``device`` here, or None where it can."""

    def check(self, lowered: Lowered, call: Call) -> None:
        """Raise :class:`~attndsl.errors.UnsupportedError` naming what this backend cannot do."""

    def start(self, lowered: Lowered, call: Call, wanted: Wants) -> None:
        """Begin with what takes long of a forward and of the backward that may follow.

        Both do without it. ``wanted`` is what the backward will be asked for.
        """
        return

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp.

        Returns:
            ``out`` (B, Hq, Lq, Dv) in q's dtype (fp32 where ``call.wide``) and memory order (see
            :mod:`.memory_order`), and ``lse`` (B, Hq, Lq), contiguous, natural log, in fp64 (see
            :mod:`.log_sum`), -inf for rows with no live pair. Neither is a view.
        """

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients:
        """Gradients of ``(out * grad_out).sum() + (lse * grad_lse).sum()``."""

    def bound_forward(self, lowered: Lowered, call: Call) -> BoundForward:
        """:meth:`forward` for calls that differ from ``call`` in elements and addresses alone.

        It takes q, k, v and captures. Their shapes, strides and dtypes are those of ``call``, whose
        params are numbers, and all addresses are multiples of 16. Nothing of it is differentiated.
        """
        return bound_call(self.forward, lowered, call)

    def bound_backward(self, lowered: Lowered, call: Call, backward: Backward) -> BoundBackward:
        """:meth:`backward` for calls and results as of :meth:`bound_forward`."""
        return bound_call(self.backward, lowered, call)

    def marks_entries(self, lowered: Lowered, call: Call) -> bool:
        """Return True if batch entries with wrong ``kv_lengths`` or offsets have results of NaN.

        Otherwise callers look at the values before.
        """
        return False

    def runner(self, lowered: Lowered, call: Call, direction: str) -> tuple[Backend, Lowered, Call]:
        """Backend that runs ``call`` in the end, and the program and call that it gets.

        ``direction`` is ``forward`` or ``backward``, which may have different ones.
        """
        return self, lowered, call

    def describe(self, lowered: Lowered, head_dim: int) -> list[str]:
        """Lines of plain text: which kernels run each direction, where there are several families.

        Args:
            lowered: The program.
            head_dim: Head dim of q, k and v.
        """
        return []

    def source(
        self, lowered: Lowered, call: Call, direction: str, wants: Wants,
        written: Written = UNWRITTEN,
    ) -> str:  # fmt: skip
        """Text of the modules that ``call`` would use, ``forward``, ``backward`` or ``tangent``.

        ``written`` is the program as the text shows it.

        Raises:
            UnsupportedError: No kernels are generated for it; says why.
        """
        raise UnsupportedError(
            f"the {self.name} backend generates no kernels", hint="use backend='triton'"
        )


def matmul_precision() -> str:
    """Precision of torch's products of fp32 matrices: ``highest``, ``high`` or ``medium``.

    Torch has two settings of it since 2.9, and refuses to say the older one once the other is set.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        places = torch.backends.cuda.matmul, torch.backends
        own, of_all = (getattr(x, "fp32_precision", "none") for x in places)
        return "high" if (of_all if own == "none" else own) == "tf32" else "highest"


def bound_call(run: Callable[..., Any], lowered: Lowered, call: Call) -> Callable[..., Any]:
    """``run`` for calls like ``call``: of their tensors, and of results where it takes these."""
    template = call.emptied()
    return lambda operands, *results: run(lowered, template.of(operands), *results)


@runtime_checkable
class ReadsPages(Protocol):
    """A backend that may have kernels for packed requests; others get keys that are gathered."""

    def why_not_pages(self, lowered: Lowered, call: Call, pages: Pages) -> str | None:
        """Reason why keys of ``pages`` have to be gathered for ``call``, or None."""

    def bound_serve(
        self, lowered: Lowered, call: Call, pages: Pages
    ) -> Callable[[Call, Pages, ChunkResults | None], tuple[torch.Tensor, torch.Tensor]]:
        """Function that launches calls like this one; it holds none of their tensors.

        Its results are the output (tokens, Hq, Dv) and log-sum-exp (tokens, Hq), 0 and -inf for
        other tokens. Where it gets results of the requests with more queries than the call has
        rows, those of all others are written into their tensors.

        Args:
            lowered: The program.
            call: Sizes, captures and the scale: its q has room for the most queries of a request,
                and its k and v have no elements of their own. In calls of one signature the tensors
                of ``pages`` agree in shape, strides and dtype too, but not in how many tokens
                there are. Calls are alike whose tensors are also aligned alike, and whose scales
                have one sign.
            pages: What is read.
        """


@runtime_checkable
class ForwardMode(Protocol):
    """A backend that has a kernel for tangents; others leave them to torch operations."""

    def tangent(
        self, lowered: Lowered, call: Call, moved: Tangents, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Derivatives of ``out`` and ``lse`` along ``moved``, which may have any strides.

        Args:
            lowered: The program.
            call: Its arguments.
            moved: The direction.
            out: What ``forward`` returns for the call.
            lse: The same.
        """


@runtime_checkable
class FusedForwardMode(ForwardMode, Protocol):
    """A backend that may have a kernel for results and tangents together."""

    fused: bool
    """True if it has one."""

    def forward_with_tangents(
        self, lowered: Lowered, call: Call, moved: Tangents
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Results of ``forward`` and then ``tangent``; None for calls that have no such kernel.

        Args:
            lowered: The program.
            call: Its arguments.
            moved: The direction.
        """


def as_fused(backend: Backend) -> FusedForwardMode | None:
    """``backend`` if it has a kernel for results and tangents together, or None."""
    return backend if isinstance(backend, FusedForwardMode) and backend.fused else None


SHORT_FORM = 100
"""Characters of a program's text that an entry holds."""
