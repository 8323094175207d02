"""Programs whose rows several ranks share, held to the same programs in one process.

Each rank makes the whole's inputs from one seed, calls in one process, shards the inputs, and calls
with its rows. Output, log-sum-exp and dQ are the same bits. All errors are held to those of one
process against fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import attndsl
from attndsl.parallel import ContextParallel, Machine, Shape
from attndsl.parallel.row_layouts import chunk_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

HEADS, KV_HEADS, LENGTH, WIDTH = 4, 2, 1536, 16
"""1536 rows are whole tiles of 128 for 2, 3 and 4 ranks, also of both ends."""
DOCUMENTS = "tensor doc[batch, kv_len]: int\nmask = causal() and doc[b, q] == doc[b, kv]"
T5 = """tensor table[heads, 16]: float
mask = causal()
score = score + table[h, t5_bucket_causal(q - kv, 16, 128)]"""


@dataclass(frozen=True)
class Case:
    """A program and its captures, from a length."""

    text: str
    captures: Callable[[int], Mapping[str, torch.Tensor]] = field(default=lambda length: {})
    has_lse: bool = True
    seed: int | None = None
    rows: str | None = None
    """A capture that each rank has its own rows of, along dim 1."""


def _documents(length: int) -> dict[str, torch.Tensor]:
    ends = torch.tensor([[0.17, 0.26, 0.62], [0.52, 0.85, 0.9]]) * length
    return {"doc": torch.stack([torch.searchsorted(e, torch.arange(length)) for e in ends])}


def _per_head(length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.rand(HEADS, dtype=torch.float64)}


PROGRAMS: dict[str, Case] = {
    "causal": Case("causal()"),
    "window": Case("causal() and q - kv < 200"),
    "documents": Case(DOCUMENTS, _documents),
    "alibi": Case("mask = causal(); score = score + alibi()"),
    "softcap": Case("mask = causal(); score = softcap(score, 2.0)"),
    "gain": Case("tensor x[heads]: float\nmask = causal(); score = x[h] * score", _per_head),
    "distances": Case(
        "tensor x[heads, 2 * kv_len]: float\nmask = abs(q - kv) < 300; score = score + rel_bias(x)",
        lambda length: {"x": torch.rand(HEADS, 2 * length, dtype=torch.float64)},
    ),
    "sink": Case(
        "tensor x[heads]: float\nmask = causal() and q - kv < 128; sink = x[h]", _per_head
    ),
    "sigmoid": Case("mask = causal(); weights = sigmoid(score - log(kv_len))", has_lse=False),
    "full": Case("score * 0.5"),
    "dropout": Case("mask = causal(); weights = dropout(softmax(score), 0.2)", seed=7),
    "block_diffusion": Case("block_diffusion(kv_len // 2, 96)"),
    "natten": Case("natten2d(32, kv_len // 32, 7, 7)"),
    "windows_by_head": Case("causal() and q - kv < 64 * (h + 1)"),
    "t5": Case(T5, lambda length: {"table": torch.rand(HEADS, 16, dtype=torch.float64)}),
    "lower_right": Case("causal_lower_right() and kv < kv_len - 100"),
    "bias": Case(
        "tensor bias[heads, q_len, kv_len]: float\nmask = causal()\nscore = score + bias[h, q, kv]",
        lambda length: {"bias": torch.randn(HEADS, length, length)},
        rows="bias",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """How a program is run."""

    program: str
    layout: str = "head_tail"
    exchange: str = "gather"
    dtype: torch.dtype = torch.float32
    length: int = LENGTH
    heads: tuple[int, int] = (HEADS, KV_HEADS)
    create_graph: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.program} {self.layout} {self.exchange} {kind} {self.length}"


@dataclass(frozen=True)
class Outcome:
    """What came of a setting."""

    same: tuple[bool, ...]
    """Whether output, log-sum-exp (where there is one) and dQ are the same bits."""
    error: float
    """The worst of all results, relative to fp64 in one process."""
    alone: float
    """The same of one process."""
    again: bool
    """Whether a second run gave the same bits in all results."""


Results = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


def results_of(
    call: Callable[..., Any],
    case: Case,
    operands: list[torch.Tensor],
    weights: list[torch.Tensor],
    captures: Mapping[str, torch.Tensor],
    create_graph: bool = False,
) -> Results:
    """By rows: output, log-sum-exp where there is one, gradients of q, k and v; by capture."""
    inputs = [x.clone().requires_grad_() for x in operands]
    given = {n: x.clone().requires_grad_(x.is_floating_point()) for n, x in captures.items()}
    extra = {} if case.seed is None else {"seed": case.seed}
    found = call(*inputs, return_lse=case.has_lse, **given, **extra)
    found = found if case.has_lse else (found,)
    leaves = [*inputs, *(x for x in given.values() if x.requires_grad)]
    total = sum((x * w.to(x.dtype)).sum() for x, w in zip(found, weights, strict=False))
    grads = torch.autograd.grad(total, leaves, create_graph=create_graph)
    names = [n for n, x in given.items() if x.requires_grad]
    rows = [x.detach() for x in (*found, *grads[:3])]
    return rows, {n: x.detach() for n, x in zip(names, grads[3:], strict=True)}


def run(setting: Setting, group: ProcessGroup) -> Outcome:
    """Run a setting as one rank of ``group``."""
    case, length = PROGRAMS[setting.program], setting.length
    torch.manual_seed(3)
    captures = case.captures(length)
    heads, kv_heads = setting.heads
    shapes = [(2, n, length, WIDTH) for n in (heads, kv_heads, kv_heads)]
    operands = [torch.randn(shape).to(setting.dtype) for shape in shapes]
    weights = [torch.randn(2, heads, length, WIDTH), torch.randn(2, heads, length)]
    attention = attndsl.compile(case.text)
    doubles = [x.double() for x in operands]
    exact = results_of(attention, case, doubles, weights, captures)
    one = results_of(attention, case, operands, weights, captures)
    # More calls take nothing by this model: runs of rows are cut wherever they can be. The tensors
    # are small, and keys are kept as if they were large.
    cp = ContextParallel(
        group,
        setting.layout,
        exchange=setting.exchange,
        reduce=True,
        machine=Machine(call=0.0, kept=0.25),
    )
    shard = lambda x: cp.shard(x, 2)  # noqa: E731
    shape = Shape(2, heads, kv_heads, WIDTH, WIDTH, setting.dtype.itemsize)
    cp.plan(length, attention, shape=shape, captures=captures)
    own = dict(captures)
    if case.rows is not None:
        own[case.rows] = cp.shard(captures[case.rows], 1)
    share = [shard(x) for x in operands], [shard(x) for x in weights]
    rows, learned = results_of(cp(attention), case, *share, own, setting.create_graph)
    second = results_of(cp(attention), case, *share, own, setting.create_graph)
    wanted = [[shard(x) for x in some[0]] for some in (exact, one)]
    of_rows = case.rows
    for some, all_rows in zip((exact, one), wanted, strict=True):
        all_rows += [cp.shard(x, 1) if n == of_rows else x for n, x in some[1].items()]
    found = [*rows, *learned.values()]
    same = zip(rows, wanted[1], strict=False)
    return Outcome(
        tuple(torch.equal(x, y) for x, y in same)[: len(rows) - 2],
        max(_error(x, y) for x, y in zip(found, wanted[0], strict=True)),
        max(_error(x, y) for x, y in zip(wanted[1], wanted[0], strict=True)),
        all(map(torch.equal, found, [*second[0], *second[1].values()])),
    )


def _error(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the norm; rows without keys have log-sum-exps of -inf on both sides."""
    if not torch.equal(torch.isinf(x), torch.isinf(exact)):
        return math.inf
    x, exact = (torch.where(torch.isinf(y), 0, y).double() for y in (x, exact))
    norm = float(exact.norm())
    difference = float((x - exact).norm())
    return difference / norm if norm else difference


DTYPES = (torch.float64, torch.float32, torch.bfloat16)
GRID = [
    Setting(name, layout, exchange, dtype, length)
    for name, case in PROGRAMS.items()
    for dtype in DTYPES
    for length in (LENGTH, 1001)
    for exchange in ("gather", "heads")
    for layout in ("contiguous", "head_tail", "balanced")
    if exchange == "gather" or (layout != "balanced" and case.rows is None)
]
"""All programs, layouts, exchanges and dtypes; 1001 rows are no whole tiles."""
SAMPLE = [
    Setting("documents", "balanced", "gather", torch.bfloat16, 768),
    Setting("sink", "contiguous", "gather", torch.float32, LENGTH),
    Setting("distances", "contiguous", "gather", torch.float64, 501),
    Setting("bias", "head_tail", "gather", torch.float32, 768),
    Setting("windows_by_head", "balanced", "gather", torch.bfloat16, 768),
    Setting("dropout", "head_tail", "gather", torch.bfloat16, 768),
]
"""What the default run looks at, with three ranks."""


def _job(setting: Setting) -> Callable[[ProcessGroup], list[Any]]:
    def job(group: ProcessGroup) -> list[Any]:
        if setting.exchange == "heads" and KV_HEADS % group.size():
            return []
        outcome = run(setting, group)
        return [outcome.same, outcome.error, outcome.alone, outcome.again]

    return job


JOBS = {str(setting): _job(setting) for setting in (*GRID, *SAMPLE)}


def check(setting: Setting, told: list[Any]) -> bool:
    """Hold what all ranks have told to one process; False where the setting needs other ranks.

    Raises:
        AssertionError: A rank failed, or its results are not those of one process.
    """
    for one in told:
        assert isinstance(one, list), one
        if not one:
            return False
        same, error, alone, again = one
        # On CPUs heads share steps, so that with fewer heads other keys are added up together.
        whole_tiles = chunk_size(setting.length, len(told)) % 128 == 0
        if setting.exchange == "gather" and whole_tiles:
            assert all(same), f"{setting}: {same}"
        assert again, f"{setting}: a second run gave other bits"
        bound = 1e-13 if setting.dtype is torch.float64 else 1.1 * alone + 1e-7
        assert error <= bound, f"{setting}: error {error}, of one process {alone}"
    return True
