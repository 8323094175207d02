"""The text of the Hopper kernel that makes results and tangents, as Python: programs and inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.hopper.features.tile_skipping import own_tiles
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.pipeline import lower
from attndsl.source import Source

from .gluon_machine import Descriptor, Pointer, lists_of, number
from .kernel_text import PLAIN, Kernel, Run, cases_of, launch, sizes_of, specialised, tile_sizes
from .mutation import number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Positions = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

WIDTH = 8
CONFIG = Config(16, 8, 4, 2, 2, 240)
PERSISTENT = replace(CONFIG, persistent=True)


@dataclass(frozen=True)
class Program:
    """A program, and what it says in torch: of heads (H, 1, 1), queries (Q, 1) and keys (1, K)."""

    text: str
    mask: Callable[..., torch.Tensor] = lambda h, q, kv: (q >= kv) | (h < 0)
    score: Callable[..., torch.Tensor] = lambda s, h, q, kv: s
    sink: Callable[[torch.Tensor], torch.Tensor] | None = None


def everything(h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q + kv + h) > -1


def slanted(s: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return s - 0.1 * (h + 1) * (q - kv)


PROGRAMS = {
    "full": Program("score", everything),
    "causal": Program("causal()"),
    "window": Program("sliding_window(20)", lambda h, q, kv: (q >= kv) & (q - kv < 20)),
    "some rows": Program("q < 30 and kv >= q", lambda h, q, kv: (q < 30) & (kv >= q)),
    "nothing": Program("q < 0", lambda h, q, kv: q + 0 * kv < 0),
    "documents": Program(
        "tensor doc[q_len]: int\nmask = q >= kv and doc[q] == doc[kv]",
        lambda h, q, kv: (q >= kv) & (q // 13 == kv // 13),
    ),
    "column": Program("mask = causal()\nscore = score - 0.1 * (h + 1) * (q - kv)", score=slanted),
    "cap": Program(
        "mask = causal()\nscore = softcap(score, 2.0)",
        score=lambda s, h, q, kv: 2 * torch.tanh(s / 2),
    ),
    "signs": Program(
        "mask = causal()\nscore = (1 - h) * score", score=lambda s, h, q, kv: (1 - h) * s
    ),
    "steep": Program(
        "mask = causal()\nscore = 90 * tanh((2 - h) * score / 90) + q / 8",
        score=lambda s, h, q, kv: 90 * torch.tanh((2 - h) * s / 90) + q / 8,
    ),
    "by pairs": Program(
        "score = score * (1 + (q + kv) % 3) + (q * kv) % 5", everything,
        lambda s, h, q, kv: s * (1 + (q + kv) % 3) + (q * kv) % 5,
    ),
    "sink": Program("mask = causal()\nsink = 0.5 - h", sink=lambda h: 0.5 - h),
    "column and sink": Program(
        "mask = q < 30 and kv >= q\nscore = score - 0.1 * (h + 1) * (q - kv)\nsink = 0.5",
        lambda h, q, kv: (q < 30) & (kv >= q), slanted, lambda h: 0.5 + 0 * h,
    ),
}  # fmt: skip
SHAPES = ((40, 40, 2, 8), (33, 50, 4, 8), (20, 7, 1, 8), (40, 24, 2, 16))
"""Queries, keys, heads of keys, columns of values."""


@dataclass(frozen=True)
class Inputs:
    """(batch, heads, length, width), in halves: q, k and v, and where they move."""

    points: tuple[torch.Tensor, ...]
    moved: tuple[torch.Tensor, ...]


def inputs_of(q_len: int, kv_len: int, kv_heads: int, value_width: int) -> Inputs:
    generator = torch.Generator().manual_seed(q_len + kv_len)
    shapes = ((4, q_len, WIDTH), (kv_heads, kv_len, WIDTH), (kv_heads, kv_len, value_width))
    both = [
        tuple(torch.randn(2, *shape, generator=generator).half() for shape in shapes)
        for _ in range(2)
    ]
    return Inputs(*both)


def expected(
    name: str, inputs: Inputs, moving: str = "qkv", origins: tuple[int, int] = (0, 0),
    scale: float = WIDTH**-0.5,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Output, log-sum-exp and their tangents, in fp64."""
    program = PROGRAMS[name]
    points = tuple(x.double() for x in inputs.points)
    moved = [
        x.double() if letter in moving else torch.zeros_like(x).double()
        for letter, x in zip("qkv", inputs.moved, strict=True)
    ]
    h = torch.arange(4)[:, None, None]
    q = origins[0] + torch.arange(points[0].shape[2])[:, None]
    kv = origins[1] + torch.arange(points[1].shape[2])[None, :]
    live = program.mask(h, q, kv).expand(4, len(q), kv.shape[1])
    group = 4 // points[1].shape[1]

    def attend(q_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = program.score(scale * (q_rows @ k.mT), h, q, kv).double()
        score = torch.where(live, score, -torch.inf)
        if program.sink is not None:
            sink = program.sink(h).double().expand(*score.shape[:3], 1)
            score = torch.cat([score, sink], -1)
        # Rows with no live pair have no derivatives: their scores are others.
        some = live.any(-1, keepdim=True)
        lse = torch.where(some, score, 0.0).logsumexp(-1, keepdim=True)
        weights = torch.where(live, torch.exp(score[..., : live.shape[-1]] - lse), 0.0)
        return weights @ v, torch.where(some, lse, -torch.inf).squeeze(-1)

    (out, lse), (out_moved, lse_moved) = torch.func.jvp(attend, points, tuple(moved))
    return out, lse, out_moved, lse_moved


def run_tangent(
    name: str, inputs: Inputs, config: Config = CONFIG, run: Run = PLAIN, moving: str = "qkv",
    scale: float = WIDTH**-0.5, dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As :func:`expected`, of the kernel whose text is for ``dtype``; halves are fp16 here."""
    lowered = lower(Source(PROGRAMS[name].text), {})
    q, k, v = inputs.points
    width = v.shape[3]
    call = example_call(lowered, 64, 64 * width // WIDTH, dtype, {})
    call = call._replace(q_offset=run.origins[0], kv_offset=run.origins[1], scale=scale)
    facts = specialised(lowered, call, moving_operands=moving)
    kernel = Kernel("forward_tangent", lowered, facts, config)
    shown, constants, flags = config, tile_sizes(config, WIDTH, width), dict(run.flags)
    if run.wide:
        shown = replace(config, block_n=64, stages=9)
        # Its plan of rows is for other tiles.
        flags["ROWS_HAVE_TILES"] = False
    text = kernel.text(shown, flags)
    own = width != WIDTH or (config.persistent and not run.wide)
    assert bool(number_of(text, "allocate_tiles(results.out, ...)")) == own
    outs = [torch.full((*q.shape[:3], width), torch.nan, dtype=torch.float16) for _ in range(2)]
    rows = [torch.full((parts, q.shape[:3].numel()), torch.nan) for parts in (2, 1)]
    parts = own_tiles(lowered, facts, Task.FORWARD_TANGENT, config).parts
    block = config.block_m // config.consumers
    doc = documents(inputs)[: q.shape[2]]
    arguments = {
        **descriptors(inputs, config, moving),
        "o_desc": Descriptor(outs[0], block), "o_moved_desc": Descriptor(outs[1], block),
        "LSE": Pointer(rows[0].view(-1)), "LSE_MOVED": Pointer(rows[1].view(-1)), "scale": scale,
        **sizes_of(q, k, run), "t_doc": Pointer(doc), "size0_doc": number(len(doc)),
        **lists_of(
            allowed(name, inputs), (config.block_m, config.block_n), cut_is_full=False,
            parts=parts,
        ),
    }  # fmt: skip
    items = -(-q.shape[2] // config.block_m) * q.shape[:2].numel()
    launch(text, kernel, items, arguments, constants, run)
    lse, lse_moved = (x.sum(0).view(q.shape[:3]) for x in rows)
    return outs[0], lse, outs[1], lse_moved


def descriptors(inputs: Inputs, config: Config, moving: str) -> dict[str, Any]:
    """Those of q, k and v, and of where they move; what does not move is never read."""
    blocks = (config.block_m // config.consumers, config.block_n, config.block_n)
    found = {}
    for letter, x, moved, block in zip("qkv", inputs.points, inputs.moved, blocks, strict=True):
        given = moved if letter in moving else torch.full_like(moved, torch.nan)
        found[f"{letter}_desc"] = Descriptor(x, block)
        found[f"{letter}_moved_desc"] = Descriptor(given, block)
    return found


def documents(inputs: Inputs) -> torch.Tensor:
    longest = max(x.shape[2] for x in inputs.points)
    return torch.arange(longest, dtype=torch.int32) // 13


def allowed(name: str, inputs: Inputs) -> torch.Tensor:
    """The program's mask from the first positions on, for lists of tiles."""
    q, k, _ = inputs.points
    places = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    return PROGRAMS[name].mask(torch.zeros((), dtype=torch.int64), *places)


def close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(
        torch.allclose(own.double(), golden, atol=1e-2 * (1 + float(size)), rtol=4e-3)
        for own, golden in zip(found, wanted, strict=True)
        for size in [golden[golden.isfinite()].abs().max() if golden.isfinite().any() else 0]
    )


CASES = [
    case
    for case in cases_of(PROGRAMS, len(SHAPES))
    for name, shape in [case.values]
    if name != "documents" or SHAPES[shape][0] >= SHAPES[shape][1]
]
