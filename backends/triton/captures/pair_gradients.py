"""Gradients of tensors that pairs look up an element each of: biases, and what they broadcast over.

A program of the kernel owns a tile of query and key positions, goes through the batch entries and
heads that the tensor does not tell apart, in order, and stores each element once. One kernel makes
dS again; another reads dS that attention kernels have stored.

Non-goals: positions that are looked up or shifted by what only the device knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from attndsl.passes.index_bounds import reads_inside

from ...emit.facts import TRITON_TYPES
from ...gradients.gradient_plan import Rest
from ...gradients.gradient_terms import is_plain, terms_of
from ...kernels.config import Config
from ...kernels.device import on_device, stream_of
from ..generate import EXTRA, stored_text
from ..generate_gradients import Sums
from ..tiles import Tiles, Widths, pair_bytes
from .kind import OwnKernels, own_kernel

if TYPE_CHECKING:
    from collections.abc import Collection

    from attndsl.pipeline import Lowered

    from ...base import Call, CallGradients
    from ...emit.facts import KernelFacts
    from ...emit.leaf_names import CaptureFacts
    from ...gradients.gradient_plan import GradientShare
    from ...gradients.gradient_terms import Term
    from ...kernels.compile import Executable
    from .kind import BackwardState

PROGRAMS = 512
"""Programs from which a GPU is busy. Fewer elements than that many tiles are added up in parts."""
_TILE = 64
"""Rows and columns of the tiles that are counted; those of a kernel may be others."""
TEMPLATES = (*EXTRA, "pair_sums", "pairs")
# Loops are short: what hides loads is a second program, for which half of the registers are left,
# or loading all ahead.
TILES = Tiles(
    dense={
        64: (
            Config(64, 64, 8, 1, most_registers=128),
            Config(64, 64, 8, 2),
            Config(128, 64, 8, 2),
            Config(32, 32, 4, 1),
        ),
        128: (
            Config(64, 64, 8, 1, most_registers=128),
            Config(64, 64, 8, 3),
            Config(64, 64, 8, 2),
            Config(64, 64, 8, 1),
            Config(128, 64, 8, 1),
            Config(32, 32, 4, 1),
        ),
        256: (Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
        512: (Config(32, 32, 4, 1),),
    },
    shared_bytes=pair_bytes,
)


def _stored_bytes(config: Config, widths: Widths) -> int:
    """The sums, while they are turned."""
    return 4 * config.block_m * config.block_n


# Whole tiles of these make a backward's. Little else is done than to load and to store, of which
# much is to be on its way: five programs of a processor, whose threads have 96 registers.
STORED_TILES = Tiles(
    dense=dict.fromkeys((64, 128, 256, 512), (Config(64, 64, 4, 1), Config(32, 32, 4, 1))),
    shared_bytes=_stored_bytes,
)


def _arguments(count: int, facts: KernelFacts) -> list[str]:
    """Kernel arguments of so many sums: where each begins, and the steps that are not known."""
    found = []
    for number in range(count):
        found.append(f"PAIR_SUMS{number}")
        found += [step for step in _steps(number, facts) if step != "1"]
    return found


def _store(total: str, count: int, facts: KernelFacts) -> list[str]:
    """Lines that store each sum, of which ``total`` says what it is called."""
    body = []
    for number in range(count):
        steps = (step if step == "1" else f"given.{step}" for step in _steps(number, facts))
        own = total.format(number)
        body += [
            f"steps = Steps({', '.join(steps)})",
            f"store_pairs(given.PAIR_SUMS{number}, steps, {own}, share, inside, sizes)",
        ]
    return body


def _steps(number: int, facts: KernelFacts) -> list[str]:
    """Steps between parts, batch entries, heads, queries and keys; one that is known is a 1."""
    unit = facts.pair_units[number]
    return [
        "1" if name == unit else f"pair_step{number}_{name}"
        for name in ("part", "b", "h", "q", "kv")
    ]


SUMS = Sums(
    given=_arguments,
    stored_from="sums, share, q, kv, inside, sizes, given",
    store=partial(_store, "sums[{}]"),
)
KERNEL = own_kernel("pairs", "pairs", SUMS, TILES, TEMPLATES)
_OF_STORED = Sums(
    given=_arguments,
    stored_from="total, share, inside, sizes, given",
    store=partial(_store, "total"),
)
STORED_KERNEL = replace(
    own_kernel("stored", "stored", _OF_STORED, STORED_TILES, ("stored", "pair_sums")),
    text=partial(stored_text, _OF_STORED),
)


def by_pairs(
    lowered: Lowered, call: Call, names: Collection[str]
) -> list[tuple[frozenset[str], Rest]]:
    """The tensors of ``names`` that no two pairs of one batch entry and head meet in.

    Together where they do not tell the same apart.
    """
    found: dict[Rest, set[str]] = {}
    terms: dict[str, list[Term]] = {}
    for term in terms_of(lowered, names):
        terms.setdefault(term.name, []).append(term)
    for name, own in terms.items():
        if all(_is_exact(term, call) for term in own):
            rests = {rest_of(term, call) for term in own}
            if len(rests) == 1:
                found.setdefault(rests.pop(), set()).add(name)
    return [(frozenset(group), rest) for rest, group in found.items()]


def _is_exact(term: Term, call: Call) -> bool:
    if call.indexed or not is_plain(term):
        return False
    places = _places(term, call)
    if places is None or not {"q", "kv"} <= {str(index.value) for index in term.leaf.args}:
        return False
    return reads_inside(places, call.tensors[term.name].shape)


def _places(term: Term, call: Call) -> list[tuple[int, int]] | None:
    """The span of indices that pairs look up along each dim; None if only a GPU knows."""
    if isinstance(call.q_offset, torch.Tensor) or isinstance(call.kv_offset, torch.Tensor):
        return None
    batch, heads, q_len, _ = call.q.shape
    found = {
        "b": (0, batch),
        "h": (0, heads),
        "hkv": (0, call.k.shape[1]),
        "q": (call.q_offset, call.q_offset + q_len),
        "kv": (call.kv_offset, call.kv_offset + call.k.shape[2]),
    }
    return [found[str(index.value)] for index in term.leaf.args]


def rest_of(term: Term, call: Call) -> Rest:
    """Numbers of batch entries and heads that ``term``'s tensor does not tell apart."""
    batch, heads = call.q.shape[:2]
    names = {index.value for index in term.leaf.args}
    group = 1 if "h" in names else heads // call.k.shape[1] if "hkv" in names else heads
    return Rest(1 if "b" in names else batch, group)


@dataclass(frozen=True, slots=True)
class SumBuffer:
    """Memory in which the kernel stores the sums of one term."""

    term: Term
    total: torch.Tensor
    """(parts, *shape of the tensor) fp32, or where a part is all, in the tensor's dtype."""
    own: torch.Tensor
    """The part of ``total`` that pairs of the call look up."""
    unit: str
    """``q`` or ``kv`` where neighbours along that lie side by side, else empty."""
    aligned: bool
    """True if its address and steps but for those of 1 are multiples of 16."""

    def arguments(self) -> list[object]:
        """The buffer, and its steps by part, batch entry, head, query and key, but for ``unit``."""
        steps = dict(
            zip((i.value for i in self.term.leaf.args), self.own.stride()[1:], strict=True)
        )
        head = steps.get("h", steps.get("hkv", 0))
        pair = [steps[name] for name in ("q", "kv") if name != self.unit]
        return [self.own, self.own.stride(0), steps.get("b", 0), head, *pair]


def parts_of(rest: Rest, call: Call) -> int:
    """In how many parts the sums are made."""
    batch, heads, q_len, _ = call.q.shape
    tiles = -(-q_len // _TILE) * -(-call.k.shape[2] // _TILE)
    programs = tiles * (batch * heads // rest.members)
    return max(1, min(rest.members, -(-PROGRAMS // max(1, programs))))


def buffers_of(
    terms: tuple[Term, ...], call: Call, device: torch.device | None = None
) -> list[SumBuffer]:
    """A buffer for each term, with zeros where the kernel stores nothing."""
    parts = parts_of(rest_of(terms[0], call), call)
    names = [term.name for term in terms]
    found = []
    for term in terms:
        like, places = call.tensors[term.name], _places(term, call)
        assert places is not None
        # Where nothing is left to be added, the kernel rounds.
        last = parts == 1 and names.count(term.name) == 1
        kind, place = like.dtype if last else torch.float32, device or call.q.device
        if parts == 1:
            # Elements lie as in the tensor, by whose strides the kernel reads tiles too.
            total = torch.empty_like(like, dtype=kind, device=place)[None]
        else:
            total = torch.empty((parts, *like.shape), dtype=kind, device=place)
        if any(span != (0, n) for span, n in zip(places, total.shape[1:], strict=True)):
            total.zero_()
        own = total
        for dim, (first, stop) in enumerate(places):
            own = own.narrow(dim + 1, first, stop - first)
        steps = zip(term.leaf.args, total.stride()[1:], strict=True)
        units = {str(index.value) for index, step in steps if step == 1} & {"q", "kv"}
        aligned = all(step % 16 == 0 or step == 1 for step in total.stride())
        aligned = aligned and not any(first for first, _ in places)
        found.append(SumBuffer(term, total, own, max(units, default="", key=len), aligned))
    return found


def gradients_of(buffers: list[SumBuffer], call: Call) -> dict[str, torch.Tensor]:
    """Gradients by name, once the kernel has stored its sums."""
    found: dict[str, torch.Tensor] = {}
    for item in buffers:
        name = item.term.name
        total = item.total[0] if item.total.shape[0] == 1 else item.total.sum(0)
        found[name] = found[name] + total if name in found else total
    return {name: total.to(call.tensors[name].dtype) for name, total in found.items()}


def with_pair_sums(facts: KernelFacts, lowered: Lowered, call: Call) -> KernelFacts:
    """``facts`` for the kernel that adds up pairs of its tensors' gradients."""
    terms = terms_of(lowered, facts.tensor_gradients)
    buffers = buffers_of(terms, call, torch.device("meta"))
    return replace(
        facts,
        captures=exact_captures(facts, terms),
        pair_types=tuple(TRITON_TYPES[buffer.total.dtype] for buffer in buffers),
        pair_units=tuple(buffer.unit for buffer in buffers),
        pair_aligned=tuple(buffer.aligned for buffer in buffers),
    )


def exact_captures(facts: KernelFacts, terms: tuple[Term, ...]) -> tuple[CaptureFacts, ...]:
    """The captures, told which lookups of those in ``terms`` (of ``pairs.by_pairs``) are in range.

    Where two terms look one tensor up otherwise, the last's say.
    """
    found = {term.name: tuple(str(index.value) for index in term.leaf.args) for term in terms}
    return tuple(replace(c, exact=found.get(c.name, ())) for c in facts.captures)


def programs_of(state: BackwardState, kernel: Executable, rest: Rest) -> int:
    """Tiles of what is told apart, of each part of what is not."""
    _, batch, heads, q_len = state.lse.shape
    kv_len, config = state.call.k.shape[2], kernel.config
    tiles = -(-q_len // config.block_m) * -(-kv_len // config.block_n)
    return parts_of(rest, state.call) * tiles * (batch * heads // rest.members)


def _make(state: BackwardState, share: GradientShare, found: CallGradients) -> CallGradients:
    call, rest = state.call, share.rest
    assert rest is not None
    layout, kernel = state.kernel_of(KERNEL, share)
    buffers = buffers_of(terms_of(state.lowered, share.names), call)
    first = [rest.batches, rest.heads, parts_of(rest, call)]
    last = [argument for buffer in buffers for argument in buffer.arguments()]
    state.launch(kernel, programs_of(state, kernel, rest), layout, first, last)
    return found.plus(gradients_of(buffers, call))


def _make_of_stored(
    state: BackwardState, share: GradientShare, found: CallGradients
) -> CallGradients:
    call, rest, stored_ds = state.call, share.rest, found.stored_ds
    assert rest is not None
    assert stored_ds is not None
    _, kernel = state.kernel_of(STORED_KERNEL, share)
    buffers = buffers_of(terms_of(state.lowered, share.names), call)
    values, stored = stored_ds.values, stored_ds.stored
    batch, heads, q_len, _ = call.q.shape
    with on_device(values.device):
        kernel.launch(
            programs_of(state, kernel, rest), stream_of(values.device),
            [
                values, stored, *values.shape[2:], *stored.shape[2:],
                heads, heads // rest.heads, batch // rest.batches, rest.heads, rest.members,
                -(-rest.members // parts_of(rest, call)), q_len, call.k.shape[2],
                *(argument for buffer in buffers for argument in buffer.arguments()),
            ],
        )  # fmt: skip
    return found.plus(gradients_of(buffers, call))


BY_PAIRS = OwnKernels(
    name=KERNEL.name, takes=by_pairs, kernels=(KERNEL,), make=_make, facts=with_pair_sums
)
OF_STORED = OwnKernels(
    name=STORED_KERNEL.name, takes=lambda lowered, call, names: (), kernels=(STORED_KERNEL,),
    make=_make_of_stored, facts=with_pair_sums,
)  # fmt: skip
"""Takes nothing by itself: features of attention kernels leave it what they store dS for."""
