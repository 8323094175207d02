"""Sequences of calls of the functions that have other libraries' signatures.

Each call is of packed sequences (rows, heads, dim) in memory of any strides that is written in
place between calls, and is held to dense attention in fp64. Rows behind the last sequence are in no
sequence, and may be NaN.
"""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import AttnDSLError

from . import layouts
from .compare import Outcome, Place, Verdict, cause_of, compared

if TYPE_CHECKING:
    from .layouts import Memory

_TAIL = 4
"""Rows behind the last sequence."""
_OPENING = """\
import torch, attndsl
from torch.nested import nested_tensor_from_jagged as jagged
from attndsl.compat import (BlockDiagonalCausalMask, BlockDiagonalMask, flash_attn_func,
    flash_attn_varlen_func, flash_attn_with_kvcache, memory_efficient_attention)
from attndsl.flex import create_block_mask, flex_attention
def masked(b, h, q, kv):
    return (docs[q] == docs[kv]) & ((q >= kv) if causal else (q >= 0))
def dense(x): return x[:n][None].transpose(1, 2)
def rows(x): return x.transpose(1, 2)[0]
def nested(x): return jagged(x[:n], cu.long()).transpose(1, 2)
"""
CALLS = {
    "varlen": "flash_attn_varlen_func(q_, k_, v_, cu, cu, n, n, causal=causal)[:n]",
    "xformers": "memory_efficient_attention(q_[:n][None], k_[:n][None], v_[:n][None], "
    "(BlockDiagonalCausalMask if causal else BlockDiagonalMask).from_seqlens(lengths))[0]",
    "nested": "attndsl.scaled_dot_product_attention(nested(q_), nested(k_), nested(v_), "
    "is_causal=causal).transpose(1, 2).values()",
    "flex": "rows(flex_attention(dense(q_), dense(k_), dense(v_), "
    "block_mask=create_block_mask(masked, None, None, n, n, device='cpu')))",
    "func": "flash_attn_func(q_[:n][None], k_[:n][None], v_[:n][None], causal=causal)[0]",
    "sdpa": "rows(attndsl.scaled_dot_product_attention(dense(q_), dense(k_), dense(v_), "
    "is_causal=causal))",
    "kvcache": "flash_attn_with_kvcache(q_[:n][None], k_[None], v_[None], "
    "cache_seqlens=filled, causal=causal)[0]",
}
_ONE = ("func", "sdpa", "kvcache")
"""Those that know no sequences."""


@dataclass(frozen=True, slots=True)
class WrapperCall:
    """A call, and what lies in memory."""

    function: str
    lengths: tuple[int, ...]
    causal: bool
    memory: tuple[Memory, Memory, Memory]
    seed: int
    learned: bool


def draw(seed: int) -> tuple[WrapperCall, ...]:
    """The calls of a seed: most of one shape and layout, so that they are written in place."""
    rng = random.Random(f"wrappers {seed}")
    calls: list[WrapperCall] = []
    heads, dim = rng.choice((1, 2)), rng.choice((2, 4, 8))
    for _ in range(rng.choice((2, 3, 4))):
        lengths = tuple(rng.randint(1, 9) for _ in range(rng.choice((1, 2, 3))))
        if calls and rng.random() < 0.7:
            lengths = tuple(rng.sample(calls[-1].lengths, len(calls[-1].lengths)))
        shape = (sum(lengths) + _TAIL, heads, dim)
        memory = tuple(layouts.draw(rng, shape, signed=True) for _ in "qkv")
        if calls and calls[-1].memory[0].shape == shape:
            memory = calls[-1].memory
        function = rng.choice(list(CALLS))
        learned = function != "kvcache" and rng.random() < 0.6
        calls.append(WrapperCall(function, lengths, rng.random() < 0.5, memory,
                                 rng.randrange(1 << 20), learned))  # fmt: skip
    return tuple(calls)


def _prepared(call: WrapperCall, before: WrapperCall | None, place: Place) -> list[str]:
    n = sum(call.lengths)
    ends = [sum(call.lengths[:at]) for at in range(len(call.lengths) + 1)]
    documents = [at for at, length in enumerate(call.lengths) for _ in range(length)]
    lines = [f"lengths, n, causal = {list(call.lengths)}, {n}, {call.causal}"]
    # Positions are written in place too.
    for name, values, dtype in (("cu", ends, "int32"), ("docs", documents, "int64"),
                                ("filled", [n], "int32")):  # fmt: skip
        made = f"torch.tensor({values}, dtype=torch.{dtype})"
        same = before is not None and len(before.lengths) == len(call.lengths)
        same &= before is not None and sum(before.lengths) == n
        lines.append(f"{name}.copy_({made})" if same else f"{name} = {made}")
    for at, (name, memory) in enumerate(zip("qkv", call.memory, strict=True)):
        source = (f"(torch.randint(-64, 65, ({memory.length},), generator=torch.Generator()"
                  f".manual_seed({call.seed + at})) / 32).to(torch.{place.dtype})")  # fmt: skip
        if before is not None and before.memory[at] == memory:
            lines.append(f"{name}_base.copy_({source})")
        else:
            lines += [
                f"{name}_base = {source}",
                f"{name}_ = {memory.view(f'{name}_base')}.detach()",
            ]
        if place.nan:  # Memory of its own: other layouts have these numbers in sequences too.
            view = memory.view(f"{name}_base")
            lines += [f"{name}_ = {view}.clone()", f"{name}_[n:] = torch.nan"]
        lines.append(f"{name}_.requires_grad_({call.learned})")
    return lines


def _called(call: WrapperCall) -> list[str]:
    lines = [f"out = {CALLS[call.function]}"]
    if call.learned:
        lines.append("dq, dk, dv = torch.autograd.grad(out, (q_, k_, v_), torch.ones_like(out))")
    return lines


def _expected(call: WrapperCall, scope: dict[str, Any]) -> dict[str, torch.Tensor]:
    n = sum(call.lengths)
    leaves = [scope[f"{name}_"].detach()[:n].clone().double().requires_grad_() for name in "qkv"]
    q, k, v = (x.transpose(0, 1) for x in leaves)
    live = torch.ones(n, n, dtype=torch.bool)
    if call.function not in _ONE:
        live = scope["docs"][:, None] == scope["docs"]
    if call.causal:
        live = live.tril()
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~live, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def judge(calls: tuple[WrapperCall, ...], place: Place) -> tuple[Outcome, int]:
    """Run the calls until one fails: its outcome and number."""
    scope: dict[str, Any] = {}
    exec(_OPENING, scope)
    before = None
    epsilon = torch.finfo(getattr(torch, place.dtype)).eps
    for at, call in enumerate(calls):
        exec("\n".join(_prepared(call, before, place)), scope)
        before, expected = call, _expected(call, scope)
        try:
            exec("\n".join(_called(call)), scope)
        except AttnDSLError as error:
            return Outcome(Verdict.REJECTED, str(error)[:160], str(error)), at
        except Exception as error:
            return Outcome(Verdict.CRASHED, cause_of(error), traceback.format_exc()), at
        for name, value in expected.items():
            if name != "out" and not call.learned:
                continue
            allowed = 64 * epsilon * (1 + value.abs().amax()) * torch.ones_like(value)
            wrong = compared(name, value, allowed, scope[name][: value.shape[0]])
            if wrong is not None:
                return Outcome(Verdict.WRONG, f"{name} of {call.function} is wrong", wrong), at
    return Outcome(Verdict.GOOD), len(calls)


def reproduction(calls: tuple[WrapperCall, ...], place: Place, outcome: Outcome) -> str:
    """Python that shows the failure without the fuzzer."""
    lines, before = [_OPENING], None
    for call in calls:
        lines += [f"# {call.function}", *_prepared(call, before, place), *_called(call)]
        before = call
    lines += ["print(out)", f"# {outcome.verdict.value}: {outcome.reason}"]
    return "\n".join([*lines, *(f"# {line}" for line in outcome.details.splitlines()[-1:])])


def try_seed(seed: int, place: Place) -> tuple[Outcome, str]:
    """What became of the calls of a seed, and the program of the fewest that fail alike."""
    calls = draw(seed)
    outcome, at = judge(calls, place)
    if not outcome.verdict.failed:
        return outcome, ""
    calls = calls[: at + 1]
    for gone in reversed(range(at)):
        fewer = (*calls[:gone], *calls[gone + 1 :])
        found, where = judge(fewer, place)
        if (found.verdict, found.reason, where) == (
            outcome.verdict,
            outcome.reason,
            len(fewer) - 1,
        ):
            calls = fewer
    return outcome, reproduction(calls, place, outcome)
