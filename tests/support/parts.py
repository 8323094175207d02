"""Calls cut into parts and put together again, for any backend: parts mean what the whole means.

Sixty programs of the whole language; cuts by rows, keys, heads and batch entries; captured tensors
given whole or by shares. Parts are slices of the whole's own leaves, so that torch adds up their
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

import attndsl
from attndsl.ir import DType, Op
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.sub_program import VARIABLE_OF, other_lookup

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attndsl.pipeline import Lowered

PROGRAMS = {
    # Masks.
    "all": "score",
    "causal": "causal()",
    "lower right": "causal_lower_right()",
    "window": "sliding_window(7)",
    "local": "local_window(5)",
    "prefix": "prefix_lm(6)",
    "dilated": "dilated(12, 3)",
    "strided": "strided(5, 7)",
    "block diagonal": "block_diagonal(9)",
    "block causal": "block_causal(8)",
    "global": "sliding_window(6) or global_tokens(2)",
    "diffusion": "block_diffusion(12, 4)",
    "natten": "natten2d(6, 4, 3, 3)",
    "tiles": "sta2d(2, 6, 2, 1)",
    "bits": "((q ^ kv) & 5) == 0 or kv == 0",
    "ends": "kv < 2 or kv >= kv_len - 3 or q == q_len - 1",
    "halves": "(q < q_len // 2) == (kv < kv_len // 2)",
    "by head": "q - kv < 4 * (h + 1) and q >= kv",
    "by key head": "abs(q - kv) < 3 + 5 * hkv",
    "by entry": "q >= kv + b * 3",
    "last head": "q >= kv or h == heads - 1",
    "last entry": "q >= kv or b == batch - 1",
    "nothing for some": "kv < q - 4",
    # Scores.
    "alibi": "mask = causal(); score = score + alibi()",
    "alibi of all": "score + alibi()",
    "softcap": "mask = causal(); score = softcap(score, 3.0)",
    "key heads": "score = score * (1.0 + hkv / kv_heads)",
    "positions": "score = score + sin(0.3 * q) * cos(0.1 * kv)",
    "lengths": "score = score * (q + 1) / q_len - kv / kv_len",
    "entries": "score = score + 0.5 * b / batch",
    "groups": "score = score * (heads // kv_heads) + h % 2",
    "masked score": "score = where(q >= kv, score, -inf); score = softcap(score, 4.0)",
    "by score": "mask = score > -0.5 and q >= kv; score = 2 * score",
    # Captures.
    "slopes": "tensor slope[heads]: float\nmask = causal(); score = score - slope[h] * (q - kv)",
    "key slopes": "tensor slope[kv_heads]: float\nscore = score * slope[hkv]",
    "gains": "tensor gain[batch, heads]: float\nscore = score * gain[b, h]",
    "rows": "tensor t[q_len]: float\nscore = score + t[q]",
    "keys": "tensor t[batch, kv_len]: float\nmask = q >= kv; score = score + t[b, kv]",
    "bias": "tensor bias[heads, q_len, kv_len]: float\nscore = score + bias[h, q, kv]",
    "bias of entries": "tensor bias[batch, heads, q_len, kv_len]: float\n"
    "mask = q >= kv; score = score + bias[b, h, q, kv]",
    "gate": "tensor gate[heads, q_len]: float\nscore = score * sigmoid(gate[h, q])",
    "padding": "tensor valid[batch, kv_len]: bool\nmask = valid[b, kv] and q >= kv",
    "documents": "tensor doc[batch, kv_len]: int\nmask = document_causal(doc)",
    "documents of rows": "tensor a[batch, q_len]: int\ntensor c[batch, kv_len]: int\n"
    "mask = a[b, q] % 3 == c[b, kv] % 3 or kv == 0",
    "flags": "tensor wide[heads]: bool\nmask = q >= kv or wide[h]",
    "valid keys": "tensor n[batch]: int\nmask = valid_keys(n)",
    "relative": "tensor t[heads, 2 * kv_len]: float\nmask = causal(); score = score + rel_bias(t)",
    "buckets": "tensor near[heads, 8]: float\n"
    "mask = causal(); score = score + near[h, t5_bucket_causal(q - kv, 8, 20)]",
    "neighbours": "tensor t[heads]: float\n"
    "score = score + t[h] + t[min(h + 1, heads - 1)] * t[heads - 1 - h]",
    "scattered": "tensor t[n]: float\nscore = score + t[(q * 3 + kv + h) % n]",
    "cells": "tensor map[batch, (q_len + 7) // 8, (kv_len + 7) // 8]: bool\n"
    "mask = map[b, q // 8, kv // 8] or kv == 0",
    "rotary": "tensor u[batch, heads, q_len, 4]: float\ntensor w[batch, kv_len, 4]: float\n"
    "mask = causal(); score = score + dot(u[b, h, q, :], w[b, kv, :])",
    "low rank": "tensor u[heads, q_len, 3]: float\ntensor w[heads, kv_len, 3]: float\n"
    "score = score + tanh(dot(u[h, q, :], w[h, kv, :]))",
    "param": "param p: float = 0.5\nparam w: int = 9\nmask = q - kv < w; score = score + p * h",
    # Sinks, weights, dropout.
    "sink": "tensor logit[heads]: float\nmask = sliding_window(5); sink = logit[h]",
    "sink of entries": "mask = kv < q - 3; sink = 0.3 * h + b - 0.1 * kv_len",
    "sigmoid": "mask = causal(); weights = sigmoid(score - log(float(kv_len)))",
    "relu": "tensor t[heads]: float\nweights = relu(score + t[h]) / q_len",
    "dropout": "mask = causal(); weights = dropout(softmax(score), 0.3)",
    "dropout by sizes": "score = score + alibi()\n"
    "weights = dropout(softmax(score), 0.1 + 0.5 / q_len)",
    "dropped sigmoid": "weights = dropout(sigmoid(score), 0.25)",
}
RAGGED = {
    "window": "sliding_window(9)",
    "alibi": "mask = causal(); score = score + alibi()",
    "soft cap": "mask = causal(); score = softcap(score, 3.0) * (1 + q / kv_len)",
    "documents": "tensor doc[batch, kv_len]: int\nmask = document_causal(doc)",
    "sinks": "tensor logit[heads]: float\nmask = kv < q - 2; sink = logit[h]",
    "buckets": "tensor near[heads, 8]: float\n"
    "mask = causal(); score = score + near[h, t5_bucket_causal(q - kv, 8, 20)]",
    "prefix": "tensor prompt[batch]: int\nmask = causal() or kv < prompt[b]",
    "lengths": "tensor bias[batch, kv_len]: float\n"
    "mask = q + kv_len - q_len >= kv and kv >= kv_len // 3; score = score * kv_len + bias[b, kv]",
    "weights": "mask = kv < kv_len - 1; weights = sigmoid(score) / kv_len",
    "rotary": "tensor u[batch, heads, 4]: float\ntensor w[batch, kv_len, 4]: float\n"
    "mask = causal(); score = score + dot(u[b, h, :], w[b, kv, :])",
}
"""Programs for batch entries that have their own numbers of keys and first positions."""
SPLITS = ("rows", "odd rows", "keys", "heads", "groups", "batch", "all")
SEED = 7


@dataclass(frozen=True)
class Sizes:
    """A whole call's."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 24
    kv_len: int = 40
    head_dim: int = 8


@dataclass
class Case:
    """A call: leaves that require grad, and what else it takes."""

    lowered: Lowered
    attention: attndsl.Attention
    sizes: Sizes
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    captures: dict[str, Any]
    """Tensors, and params in the fuzzer's cases."""
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> dict[str, torch.Tensor]:
        """What gradients are taken of."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        return found | {n: x for n, x in self.captures.items() if x.is_floating_point()}


@dataclass(frozen=True)
class Cut:
    """A part: ranges of batch entries, query heads, key heads, rows and keys."""

    b: slice
    h: slice
    hkv: slice
    q: slice | torch.Tensor
    kv: slice


def make_case(
    name: str, backend: str, dtype: torch.dtype = torch.float64, sizes: Sizes = Sizes(),
    device: str = "cpu", programs: Mapping[str, str] = PROGRAMS,
) -> Case:  # fmt: skip
    """The call of a program with random leaves; draws from torch's generator."""
    attention = attndsl.compile(programs[name], backend=backend)
    wide = torch.float64 if dtype is torch.float64 else torch.float32

    def draw(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).to(kind).requires_grad_()

    keys = (sizes.batch, sizes.kv_heads, sizes.kv_len, sizes.head_dim)
    program = attention.lowered.program
    known = Environment(vars(sizes) | dict.fromkeys(program.dim_names(), 11))
    captures = {}
    for decl in program.tensors:
        shape = [int(evaluate(dim, known)) for dim in decl.dims]
        if decl.dtype is DType.FLOAT:
            captures[decl.name] = draw(*shape, kind=wide)
        elif decl.dtype is DType.BOOL:
            captures[decl.name] = torch.rand(shape, device=device) < 0.6
        else:
            made = torch.randint(0, sizes.kv_len, shape, device=device, dtype=torch.int32)
            captures[decl.name] = made.sort(-1).values // 9 if name == "documents" else made
    options = {"seed": SEED} if program.dropout is not None else {}
    q = draw(sizes.batch, sizes.heads, sizes.q_len, sizes.head_dim)
    return Case(attention.lowered, attention, sizes, q, draw(*keys), draw(*keys), captures, options)


def widened(case: Case) -> Case:
    """The same call in fp64, with leaves of its own."""

    def wide(value: torch.Tensor) -> torch.Tensor:
        return value.detach().double().requires_grad_() if value.is_floating_point() else value

    captures = {name: wide(value) for name, value in case.captures.items()}
    return replace(case, q=wide(case.q), k=wide(case.k), v=wide(case.v), captures=captures)


def cuts(split: str, sizes: Sizes, block: int = 16) -> Iterator[Cut]:
    """The parts of a call, in their order; ``rows`` start at multiples of ``block``."""
    group = sizes.heads // sizes.kv_heads
    ends = {
        "rows": ("q", [block, sizes.q_len]),
        "odd rows": ("q", [5, 6, sizes.q_len]),
        "keys": ("kv", [sizes.kv_len // 3, sizes.kv_len]),
        "heads": ("hkv", list(range(1, sizes.kv_heads + 1))),
        "groups": ("h", list(range(1, sizes.heads + 1))),
        "batch": ("b", list(range(1, sizes.batch + 1))),
    }
    whole = {
        "b": slice(0, sizes.batch), "h": slice(0, sizes.heads), "hkv": slice(0, sizes.kv_heads),
        "q": slice(0, sizes.q_len), "kv": slice(0, sizes.kv_len),
    }  # fmt: skip
    if split == "all":
        last = {
            "b": slice(sizes.batch - 1, sizes.batch),
            "hkv": slice(sizes.kv_heads - 1, sizes.kv_heads),
            "h": slice(sizes.heads - group, sizes.heads),
            "q": slice(sizes.q_len // 2, sizes.q_len),
        }  # fmt: skip
        yield Cut(**(whole | last))
        return
    axis, stops = ends[split]
    for start, stop in zip([0, *stops], stops, strict=False):
        part = {axis: slice(start, stop)}
        if axis == "hkv":
            part["h"] = slice(start * group, stop * group)
        elif axis == "h":
            part["hkv"] = slice(start // group, (stop - 1) // group + 1)
        yield Cut(**(whole | part))


def call_part(
    case: Case, cut: Cut, shares: bool, return_lse: bool = True, named: bool = True
) -> Any:
    """The call of a part of ``case``.

    Args:
        case: The whole.
        cut: Which part.
        shares: Whether tensors are given by the part's own rows, where that may be.
        return_lse: As of a call.
        named: Whether all sizes are said, or those alone that differ.
    """
    sizes = case.sizes
    options: dict[str, Any] = dict(case.options)
    for size, offset, part, whole in (
        ("batch", "b_offset", cut.b, sizes.batch), ("heads", "h_offset", cut.h, sizes.heads),
        ("kv_heads", None, cut.hkv, sizes.kv_heads), ("q_len", "q_offset", cut.q, sizes.q_len),
        ("kv_len", "kv_offset", cut.kv, sizes.kv_len),
    ):  # fmt: skip
        heads = size == "kv_heads" and cut.h != slice(0, sizes.heads)
        if named or heads or part != slice(0, whole):
            options[size] = whole
            if offset is not None:
                options[offset] = part.start
    captures = {n: share_of(case, n, cut) if shares else x for n, x in case.captures.items()}
    return case.attention(
        case.q[cut.b, cut.h, cut.q], case.k[cut.b, cut.hkv, cut.kv],
        case.v[cut.b, cut.hkv, cut.kv], return_lse=return_lse, **captures, **options,
    )  # fmt: skip


def share_of(case: Case, name: str, cut: Cut) -> torch.Tensor:
    """The part's own rows of a captured tensor, along the dims that it may have them of."""
    program, tensor = case.lowered.program, case.captures[name]
    decl = next((decl for decl in program.tensors if decl.name == name), None)
    if decl is None:  # A param.
        return tensor
    for number, dim in enumerate(decl.dims):
        if dim.op is Op.SIZE and dim.value in VARIABLE_OF:
            variable = VARIABLE_OF[str(dim.value)]
            if other_lookup(program, name, number, variable) is None:
                tensor = tensor[(*[slice(None)] * number, getattr(cut, variable))]
    return tensor


def whole_of(case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(out, lse)`` of the call in one piece; no lse where weights are the program's own."""
    softmax = case.lowered.program.weights is None
    found = case.attention(
        case.q, case.k, case.v, return_lse=softmax, **case.captures, **case.options
    )
    return found if softmax else (found, None)


def parts_of(
    case: Case, split: str, shares: bool, block: int = 16
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As :func:`whole_of`, from the parts of a cut. The part alone for ``all``."""
    softmax = case.lowered.program.weights is None
    found = []
    for cut in cuts(split, case.sizes, block):
        part = call_part(case, cut, shares, softmax, named=split == "all")
        found.append(part if softmax else (part, None))
    if split == "keys":
        return _merged(case, found)
    dim = {"batch": 0, "heads": 1, "groups": 1}.get(split, 2)
    out = torch.cat([part[0] for part in found], dim)
    return out, torch.cat([part[1] for part in found], dim) if softmax else None


def _merged(
    case: Case, found: list[tuple[torch.Tensor, torch.Tensor | None]]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Results of parts of the keys: the sink is counted once."""
    outs = torch.stack([out for out, _ in found])
    if case.lowered.program.weights is not None:
        return outs.sum(0), None
    lses = torch.stack([lse for _, lse in found if lse is not None])
    alive = lses > -torch.inf
    some = alive.any(0)
    # Of rows without a live pair too, exponents are no differences of infinities.
    shift = torch.where(some, lses.amax(0), 0.0).detach()
    powers = torch.where(alive, (torch.where(alive, lses, 0.0) - shift).exp(), 0.0)
    total = powers.sum(0)
    if case.lowered.program.sink is not None:
        surplus = (alive.sum(0) - 1).clamp(min=0)
        total = total - surplus * (sinks_of(case) - shift).exp()
    safe = torch.where(some, total, 1.0)
    out = (outs * (powers / safe).unsqueeze(-1).to(outs.dtype)).sum(0)
    return out, torch.where(some, shift + safe.log(), -torch.inf)


def sinks_of(case: Case) -> torch.Tensor:
    """Each row's sink, (batch, heads, 1) or less, of the programs that have one."""
    if "logit" in case.captures:
        return case.captures["logit"].reshape(1, -1, 1)
    device, wide = case.q.device, torch.promote_types(case.q.dtype, torch.float32)
    b = torch.arange(case.sizes.batch, device=device)[:, None, None]
    h = torch.arange(case.sizes.heads, device=device)[None, :, None]
    return (0.3 * h + b - 0.1 * case.sizes.kv_len).to(wide)


def part_of_whole(
    found: tuple[torch.Tensor, torch.Tensor | None], case: Case, split: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What :func:`parts_of` gives, from the whole call's results."""
    if split != "all":
        return found
    (cut,) = cuts(split, case.sizes)
    out, lse = found
    return out[cut.b, cut.h, cut.q], None if lse is None else lse[cut.b, cut.h, cut.q]


def results(
    found: tuple[torch.Tensor, torch.Tensor | None], leaves: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """``out``, ``lse`` and the gradients by ``leaves``, of which some may be none, by name."""
    out, lse = found
    generator = torch.Generator().manual_seed(3)
    weighted = [out, *([] if lse is None else [torch.where(lse > -torch.inf, lse, 0.0)])]
    grads = [torch.randn(x.shape, generator=generator).to(x) for x in weighted]
    taken = torch.autograd.grad(weighted, list(leaves.values()), grads, allow_unused=True)
    named = {"out": out, **({} if lse is None else {"lse": lse})}
    zeros = {n: torch.zeros_like(x) for n, x in leaves.items()}
    named |= {n: zeros[n] if g is None else g for n, g in zip(leaves, taken, strict=True)}
    return {name: value.detach() for name, value in named.items()}


def ragged_of(
    case: Case, offsets: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call whose entries have queries from ``offsets`` on and ``lengths`` keys; no lse where
    weights are the program's own."""
    softmax = case.lowered.program.weights is None
    found = case.attention(
        case.q, case.k, case.v, q_offset=offsets, kv_lengths=lengths, return_lse=softmax,
        **case.captures,
    )  # fmt: skip
    return found if softmax else (found, None)


def entries_of(
    case: Case, offsets: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As :func:`ragged_of`, by a call for each batch entry, of its own keys alone."""
    softmax = case.lowered.program.weights is None
    found = []
    for b, (offset, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        captures = dict(case.captures)
        for decl in case.lowered.program.tensors:
            tensor = captures[decl.name]
            for number, dim in enumerate(decl.dims):
                if dim.value == "batch":
                    tensor = tensor.narrow(number, b, 1)
                elif dim.value == "kv_len":
                    tensor = tensor.narrow(number, 0, length)
            captures[decl.name] = tensor
        one = slice(b, b + 1)
        part = case.attention(
            case.q[one], case.k[one, :, :length], case.v[one, :, :length], q_offset=offset,
            return_lse=softmax, **captures,
        )  # fmt: skip
        found.append(part if softmax else (part, None))
    out = torch.cat([part[0] for part in found])
    return out, torch.cat([part[1] for part in found]) if softmax else None
