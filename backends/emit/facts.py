"""Facts of a call that a kernel's text and compiled form depend on: dtypes, head dims, kinds.

Lengths, strides and the values of run-time params are arguments and none of them, but for facts
that change the code: whether addresses are aligned, and whether offsets need 64 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import DType
from attndsl.passes.index_bounds import dim_of
from attndsl.passes.trig_ranges import useful_reach

from ..fast_math import EXACT, forms_for
from ..memory_order import result_orders, strides
from .dropout_offsets import kinds_of_draws
from .leaf_names import CaptureFacts, LeafNames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from triton.backends.compiler import GPUTarget

    from attndsl.ir import Node, ParamDecl, Program, TensorDecl

    from ..base import Call, Scalar, Wants
    from .dropout_offsets import Kinds

TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
FP8_TYPE = "fp8e4nv"
"""Triton's name of ``torch.float8_e4m3fn``."""


@dataclass(frozen=True, slots=True)
class ParamKind:
    """Run-time param of a kernel: its dtype, and the type of its argument."""

    name: str
    dtype: DType
    type: str
    """Triton's name of the argument type: a scalar's, or a pointer's (``*fp32``)."""
    is_position: bool = False
    """True if its value is below 2**30 in size."""

    @property
    def argument(self) -> str:
        """Name of the kernel argument."""
        if self.type.startswith("*"):
            return f"at_{self.name}"
        return f"flag_{self.name}" if self.dtype is DType.BOOL else f"p_{self.name}"


@dataclass(frozen=True, slots=True)
class PairTile:
    """A captured tensor that pairs look up an element each of, and that kernels read by tiles."""

    name: str
    indices: tuple[str, ...]
    """The variable of each dim; the last two are ``q`` and ``kv``."""
    leading: tuple[str, ...]
    """The variables of the other dims that the tensor varies along."""
    dtype: str
    """Triton's name of an element as it is loaded: a bool is an ``i8``."""


@dataclass(frozen=True, slots=True)
class PageFacts:
    """Further facts that a kernel that reads pages depends on."""

    size: int
    """Keys of a page."""
    dtype: str
    """Triton's name of the pages' dtype."""
    table: str
    """Triton's name of the dtype of page numbers; those of lengths and starts follow."""
    lengths: str
    starts: str
    k_scales: int
    """0 for none, 1 for a number, and one in memory for all (2), each head (3), each key (4)."""
    v_scales: int
    aligned: bool
    """True if addresses and strides of pages are multiples of 16."""
    q_aligned: bool
    """The same of q."""
    wide_rows: bool
    """True if offsets within one tile of rows of q need 64 bits."""
    wide_steps: bool
    """True if a step of pages, tables or scales, or a row's offset from its page, needs 64 bits: a
    product of 32-bit numbers is one instruction, and others are five."""
    same_steps: bool
    """True if keys and values have the same steps from page to page and from row to row."""
    widens_pairs: bool = False
    """True if the GPU has an instruction that makes fp16 of two 8-bit numbers."""
    made: tuple[tuple[str, str], ...] = ()
    """Captures that the kernel makes itself of starts and lengths, by name, and which value each
    of them is (:class:`attndsl.backends.paged_requests.Requests`)."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Everything that selects one generated module."""

    head_dim: int
    value_dim: int
    dtype: str
    """Triton's name of the dtype of q, k and v."""
    captures: tuple[CaptureFacts, ...]
    capture_types: tuple[str, ...]
    """Triton's name of each capture's element type."""
    capture_aligned: tuple[bool, ...]
    """True for each capture whose address and strides, but unit ones, are multiples of 16."""
    params: tuple[ParamKind, ...]
    dim_names: tuple[str, ...]
    q_kind: str
    """``offset``, ``tensor`` or ``index``: how logical query positions are given."""
    q_origin_type: str
    """Triton's name of the type of the argument that gives them."""
    kv_kind: str
    kv_origin_type: str
    divisor: int
    """See :func:`divisor_of`: of strides of q, k, v and dO; 1 if an address is no multiple of 16.

    Rows of 40 elements, 80 bytes, are read 16 bytes at a time as well as rows of 48.
    """
    wide_rows: bool
    """True if offsets within one tile of rows need 64 bits."""
    shifted: bool = False
    """True if the call gives offsets other than the number 0."""
    scale_first: bool = False
    """True if the scale is applied to scores before their maximum is taken: a factor that is not
    positive moves the maximum or, at 0, makes NaN of -inf."""
    tensor_gradients: tuple[str, ...] = ()
    param_gradients: tuple[str, ...] = ()
    pair_types: tuple[str, ...] = ()
    """Triton's names of the types of sums of pairs (``triton/captures/pair_gradients.py``), in the
    order of their terms."""
    pair_units: tuple[str, ...] = ()
    """``q`` or ``kv`` where neighbours along that lie side by side in them, else empty."""
    moving_operands: str = ""
    """Letters of those of ``q``, ``k`` and ``v`` that have a tangent."""
    moving_captures: tuple[str, ...] = ()
    """Tensors and params that have a tangent, itself one of ``captures``
    (``generate_tangent.py``)."""
    pair_aligned: tuple[bool, ...] = ()
    """True for each of these sums whose address and steps, but unit ones, are multiples of 16."""
    dropout: bool = False
    """True if kernels draw random numbers from a seed."""
    draws: Kinds | None = None
    """Kinds of numbering of pairs that are drawn as for a part of a whole
    (:mod:`.dropout_offsets`)."""
    seed_type: str = "i64"
    """Type of the seed: a number, or ``*i64`` where the kernel reads it."""
    forms: str = EXACT
    """Set of fast forms that the score and its derivatives may take (:mod:`..fast_math`)."""
    pair_tiles: tuple[PairTile, ...] = ()
    """Tensors that the kernel reads by tiles; empty in kernels that read none so."""
    features: tuple[str, ...] = ()
    """Flags of the features of a Hopper backward for gradients of captures (``Wants.features``)."""
    takes_turns: bool = False
    """True if a Hopper backward adds to dQ in a fixed order (``features/ordered_dq.py``)."""
    small_tiles: bool = False
    """True if smaller tiles of a Hopper kernel are faster for the call's lengths."""
    few_tiles: bool = False
    """True if a call has so few tiles that listing the live ones takes longer than it saves."""
    few_rows: bool = False
    """True if a forward's rows of a head fit one consumer's tile (``tile_sizes.has_few_rows``)."""
    heads_apart: bool = False
    """True if a work tile of a Hopper backward has one query head, and its gradients of keys are
    summed over heads later (``tile_sizes.has_heads_apart``)."""
    wide_out: bool = False
    """True if the output is in fp32 (``Call.wide``)."""
    wide_gradients: bool = False
    """True if the gradients of q, k and v are in fp32 (``Wants.wide``)."""
    reach: int | None = None
    """Number above all row numbers and sizes of the call, where it makes angles of the program
    small (:mod:`attndsl.passes.trig_ranges`)."""
    narrow_dq: bool = False
    """True if dQ is in q's dtype all the same, because the call has room for it in that dtype."""
    packed_heads: bool = False
    """True if the rows of a tile are those of several query heads, which share keys."""
    joined_parts: bool = False
    """True if a program may have several parts of the keys of such rows."""
    pages: PageFacts | None = None
    """Facts of the pages; None except in kernels of packed requests."""
    locals: Mapping[Node, str] = field(default_factory=dict, compare=False, repr=False)
    """Names of locals that hold some expressions, in texts for people (:mod:`.local_names`). They
    select no module."""

    @property
    def indexed(self) -> bool:
        """True if logical positions are looked up."""
        return "index" in (self.q_kind, self.kv_kind)

    @property
    def wide(self) -> frozenset[str]:
        """Names of the int params and int tensors that may have more than 32 bits."""
        params = {p.name for p in self.params if p.dtype is DType.INT and "64" in p.type}
        return frozenset(
            params | {c.name for c in self.captures if c.dtype is DType.INT and c.bits > 32}
        )

    def names(self) -> LeafNames:
        """Names of leaves and their facts, for the expression printer."""
        bits = {
            # Unsigned bytes are twice as large as signed ones.
            c.name: POSITION_BITS if c.is_position else c.bits + (kind == "u8")
            for c, kind in zip(self.captures, self.capture_types, strict=True)
            if c.dtype is DType.INT
        }
        bits |= {
            p.name: POSITION_BITS if p.is_position else 64 if "64" in p.type else 32
            for p in self.params
            if p.dtype is DType.INT
        }
        from_zero = not self.shifted and not self.indexed
        captures = {c.name: c for c in self.captures}
        return LeafNames(
            captures, bits, self.head_dim, from_zero, self.reach, forms=self.forms,
            packed_heads=self.packed_heads, locals=self.locals,
            made=frozenset() if self.pages is None else frozenset(dict(self.pages.made)),
        )  # fmt: skip

    def without_made(self) -> KernelFacts:
        """The facts without the captures that a kernel of pages makes itself."""
        if self.pages is None or not self.pages.made:
            return self
        made = dict(self.pages.made)
        kept = [number for number, x in enumerate(self.captures) if x.name not in made]
        return replace(
            self,
            captures=tuple(self.captures[number] for number in kept),
            capture_types=tuple(self.capture_types[number] for number in kept),
            capture_aligned=tuple(self.capture_aligned[number] for number in kept),
        )


POSITION_BITS = 31
"""Bits of a signed int that is a position."""
MAX_ROWS = 512
"""Rows of the largest tile; offsets within a tile are below this times the row stride."""


ADDRESS = 16
"""Bytes of the longest load of a thread: addresses that are no multiple of it are read in parts."""


def tile_width(head_dim: int) -> int:
    """Columns of a tile that holds rows of ``head_dim`` elements."""
    return max(16, 1 << (head_dim - 1).bit_length())


def block_widths(facts: KernelFacts) -> tuple[int, int]:
    """Columns of the tiles that hold rows of q and k, and of v."""
    d, dv = tile_width(facts.head_dim), tile_width(facts.value_dim)
    if facts.divisor == 1 or facts.value_dim % 2:
        # Triton 3.6 multiplies by wrong elements of v where its tile is narrower than k's and its
        # rows cannot be copied asynchronously, 4 bytes or more; tiles of one width are right.
        d = dv = max(d, dv)
    return d, dv


def facts_of(program: Program, call: Call, *grads: torch.Tensor) -> KernelFacts:
    """Facts that kernels of a forward depend on, or with ``grads`` (the output's) of a backward."""
    operands = (call.q, call.k, call.v, *grads)
    results = result_orders(call.q, call.k, call.v)
    captures = [_capture(decl, call.tensors[decl.name]) for decl in program.tensors]
    facts = KernelFacts(
        head_dim=call.q.shape[-1],
        value_dim=call.v.shape[-1],
        dtype=TRITON_TYPES[call.q.dtype],
        captures=tuple(captures),
        capture_types=tuple(TRITON_TYPES[call.tensors[d.name].dtype] for d in program.tensors),
        capture_aligned=tuple(
            _aligned(call.tensors[d.name], strides(call.tensors[d.name])) for d in program.tensors
        ),
        params=tuple(_param(decl, call.params[decl.name]) for decl in program.params),
        dim_names=program.dim_names(),
        q_kind=position_kind(call.q_offset, call.q_index),
        q_origin_type=_origin_type(call.q_offset, call.q_index),
        kv_kind=position_kind(call.kv_offset, call.kv_index),
        kv_origin_type=_origin_type(call.kv_offset, call.kv_index),
        divisor=min(map(_divisor, operands)),
        shifted=call.shifted,
        scale_first=call.scale <= 0,
        dropout=program.dropout is not None,
        draws=kinds_of_draws(call),
        seed_type="*i64" if isinstance(call.seed, torch.Tensor) else "i64",
        wide_out=call.wide,
        wide_rows=MAX_ROWS * max(results.longest_step, *(strides(t)[2] for t in operands))
        >= 1 << 31,
    )
    return replace(facts, reach=_reach(program, call, facts))


def _reach(program: Program, call: Call, facts: KernelFacts) -> int | None:
    """See :attr:`KernelFacts.reach`."""
    if facts.shifted or facts.indexed:
        return None
    parts = (program.mask, program.score, program.weights, program.dropout, program.sink)
    roots = tuple(part for part in parts if part is not None)
    longest = max(call.q.shape[2], call.k.shape[2], *call.sizes.values())
    return useful_reach(roots, facts.names().int_bits, longest + MAX_ROWS)


def with_gradients(facts: KernelFacts, wants: Wants) -> KernelFacts:
    """``facts`` for kernels that make the gradients in ``wants``."""
    return replace(
        facts,
        tensor_gradients=tuple(sorted(wants.tensors)),
        param_gradients=tuple(sorted(wants.params)),
        features=tuple(flag for flag, _ in wants.features),
        wide_gradients=wants.wide,
    )


def for_lists(facts: KernelFacts) -> KernelFacts:
    """``facts`` for kernels that find tiles, of which one module serves all kernels of a call."""
    return replace(
        facts, tensor_gradients=(), param_gradients=(), moving_operands="", moving_captures=(),
        pair_tiles=(), features=(), takes_turns=False, small_tiles=False, few_rows=False,
        heads_apart=False, wide_out=False,
        wide_gradients=False, narrow_dq=False, few_tiles=False, packed_heads=False,
        joined_parts=False, pages=None,
    )  # fmt: skip


_WIDENING_ARCH = 89


def with_forms(facts: KernelFacts, program: Program, target: GPUTarget | None) -> KernelFacts:
    """``facts`` for attention kernels on ``target``; None for the interpreter.

    Kernels that find tiles take no part: what they evaluate must be exactly the mask.
    """
    kind = None if target is None else target.backend
    pages = facts.pages
    if pages is not None and target is not None and kind == "cuda":
        # PTX ISA, cvt: .e4m3x2 from sm_89 on.
        pages = replace(pages, widens_pairs=int(target.arch) >= _WIDENING_ARCH)
    return replace(facts, forms=forms_for(facts.dtype, kind, program.exact), pages=pages)


def position_kind(offset: int | torch.Tensor, index: torch.Tensor | None) -> str:
    """Form of logical positions in the kernel: ``index``, ``offset`` or ``tensor``."""
    if index is not None:
        return "index"
    return "offset" if isinstance(offset, int) else "tensor"


def _origin_type(offset: int | torch.Tensor, index: torch.Tensor | None) -> str:
    found = offset if index is None else index
    return "i32" if isinstance(found, int) else "*" + TRITON_TYPES[found.dtype]


def divisor_of(steps: Iterable[int]) -> int:
    """The largest of 16, 8 and 1 that divides all ``steps``."""
    common = math.gcd(*steps)
    return next(number for number in (ADDRESS, 8, 1) if common % number == 0)


def _divisor(tensor: torch.Tensor) -> int:
    """The divisor of an operand's strides; its last one is 1, and kernels know it."""
    return divisor_of(strides(tensor)[:-1]) if tensor.data_ptr() % ADDRESS == 0 else 1


def _aligned(tensor: torch.Tensor, steps: tuple[int, ...]) -> bool:
    return tensor.data_ptr() % 16 == 0 and all(step % 16 == 0 or step == 1 for step in steps)


def _capture(decl: TensorDecl, tensor: torch.Tensor) -> CaptureFacts:
    # Kernels get one zero in place of a tensor without elements.
    steps = strides(tensor) if tensor.numel() else (0,) * tensor.dim()
    extent = sum(max(n - 1, 0) * s for n, s in zip(tensor.shape, steps, strict=True))
    return CaptureFacts(
        name=decl.name,
        dtype=decl.dtype,
        rank=len(decl.dims),
        bits=tensor.element_size() * 8,
        wide=extent >= 1 << 31,
        unit_dims=frozenset(d for d, s in enumerate(steps) if s == 1),
        dims=tuple(map(dim_of, decl.dims)),
        is_position=decl.is_position,
        is_padded=decl.is_padded,
    )


def _param(decl: ParamDecl, value: Scalar | torch.Tensor) -> ParamKind:
    if isinstance(value, torch.Tensor):
        kind = "*" + TRITON_TYPES[value.dtype]
        return ParamKind(decl.name, decl.dtype, kind, decl.is_position)
    if decl.dtype is DType.FLOAT:
        return ParamKind(decl.name, decl.dtype, "fp32")
    if decl.dtype is DType.BOOL:
        return ParamKind(decl.name, decl.dtype, "i32")
    narrow = -(1 << 31) <= int(value) < 1 << 31
    return ParamKind(decl.name, decl.dtype, "i32" if narrow else "i64", decl.is_position)
