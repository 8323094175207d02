"""The text of the Hopper backward as Python: its inputs, what it should find, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.dense.philox import kept as kept_pairs
from attndsl.backends.device.library import STATISTICS_PADDING
from attndsl.backends.emit.facts import PairTile
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.example import example_call
from attndsl.pipeline import lower
from attndsl.source import Source

from .gluon_machine import Descriptor, Pointer, Tiles, Vector, lists_of, number
from .kernel_text import PLAIN, Kernel, Run, cases_of, launch, sizes_of, specialised, tile_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.backends.base import StoredDS
    from attndsl.pipeline import Lowered

ROWS, WIDTH = 64, 16
"""Queries of a tile, fixed by how sums of dQ lie; head dim."""
SEED = 0x1234567
LOG2E = 1.4426950408889634
MASKS: dict[str, Callable[..., torch.Tensor]] = {
    "causal()": lambda q, kv: q >= kv,
    "sliding_window(20)": lambda q, kv: (q >= kv) & (q - kv < 20),
    "q < 30 and kv >= q": lambda q, kv: (q < 30) & (kv >= q),
    "q < 0": lambda q, kv: q < 0,
    "table[q, kv]": lambda q, kv: table_of(q, kv),
}


def bias_of(heads: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """(heads, q_len, kv_len), halves."""
    return torch.sin(1.0 + torch.arange(heads)[:, None, None] + q * 0.7 + kv * 1.3).half()


def table_of(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """A mask of FULL, PARTIAL and EMPTY tiles."""
    kind = (q // ROWS + kv // 16) % 3
    return (kind == 2) | ((kind == 1) & ((q + kv) % 3 > 0))


TEXTS = {
    "full": ("score", None),
    "causal": ("causal()", None),
    "window": ("sliding_window(20)", None),
    "some rows": ("q < 30 and kv >= q", None),
    "nothing": ("q < 0", None),
    "cap": ("mask = causal()\nscore = softcap(score, 2.0)", lambda s, q, kv: 2 * torch.tanh(s / 2)),
    "alibi": (
        "mask = causal()\nscore = score - 0.1 * (q - kv)",
        lambda s, q, kv: s - 0.1 * (q - kv),
    ),
    "sigmoid": ("mask = causal()\nweights = sigmoid(score) / 4", None),
    "own weights": (
        "mask = q < 30 and kv >= q\nscore = 3 * tanh(score / 3)\nweights = relu(score) / 9 + 0.02",
        lambda s, q, kv: 3 * torch.tanh(s / 3),
    ),
    "bias": (
        "mask = causal()\ntensor bias[heads, q_len, kv_len]: float\nscore = score + bias[h, q, kv]",
        lambda s, q, kv: s + bias_of(s.shape[1], q, kv).float(),
    ),
    "steep bias": (
        "tensor bias[heads, q_len, kv_len]: float\nscore = 2 * tanh(score + bias[h, q, kv])",
        lambda s, q, kv: 2 * torch.tanh(s + bias_of(s.shape[1], q, kv).float()),
    ),
    "table": ("tensor table[q_len, kv_len]: bool\nmask = table[q, kv]", None),
}
DROPPING = {
    "dropout": "mask = causal()\nweights = dropout(softmax(score), 0.4)",
    "dropout of a cap": (
        "mask = causal()\nscore = softcap(score, 2.0)\nweights = dropout(softmax(score), 0.4)"
    ),
    "dropout beside columns": (
        "score = score - 0.1 * (q - kv)\nweights = dropout(softmax(score), 0.4)"
    ),
    "own dropout": "mask = causal()\nweights = dropout(sigmoid(score) / 4, 0.4)",
}
TEXTS |= {
    "dropout": (DROPPING["dropout"], None),
    "dropout of a cap": (DROPPING["dropout of a cap"], TEXTS["cap"][1]),
    "dropout beside columns": (DROPPING["dropout beside columns"], TEXTS["alibi"][1]),
    "own dropout": (DROPPING["own dropout"], None),
}
PAIRS = {
    "bias": PairTile("bias", ("h", "q", "kv"), ("h",), "fp16"),
    "table": PairTile("table", ("q", "kv"), (), "i8"),
}
"""By tensor: how tiles of it are read."""
WEIGHTS = {
    "sigmoid": lambda s: torch.sigmoid(s) / 4,
    "own weights": lambda s: torch.relu(s) / 9 + 0.02,
}
WEIGHTS["own dropout"] = WEIGHTS["sigmoid"]


def kept(name: str, shape: torch.Size) -> torch.Tensor | float:
    """Factors of the weights."""
    if name not in DROPPING:
        return 1.0
    return kept_pairs(SEED, torch.tensor(0.4), tuple(shape)) / 0.6


def attention_of(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp by torch, in fp32, of scores with ``added``."""
    text, change = TEXTS[name]
    mask = text.split("\n")[-1 if "table" in name else 0].removeprefix("mask = ")
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    score = q @ k.mT * WIDTH**-0.5
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    allowed = MASKS.get(mask, lambda q, kv: kv >= 0)(rows, columns).expand(score.shape)
    if change is not None:
        score = change(score, rows, columns)
    score = score + added
    if name in WEIGHTS:
        weights = torch.where(allowed, WEIGHTS[name](score), 0.0)
        return weights * kept(name, score.shape) @ v, torch.zeros(score.shape[:-1])
    some = allowed.any(-1, keepdim=True)
    score = torch.where(allowed | ~some, score, -torch.inf)
    weights = torch.where(some, score.softmax(-1), 0.0)
    weights = weights * kept(name, score.shape)
    return weights @ v, torch.where(some[..., 0], score.logsumexp(-1), -torch.inf)


def pairs_of(
    lowered: Lowered, tensors: list[torch.Tensor], config: Config, wide: bool
) -> tuple[tuple[PairTile, ...], dict[str, Any]]:
    """What is read by tiles in a program, and its arguments."""
    tiles = tuple(PAIRS[decl.name] for decl in lowered.program.tensors)
    q, k = tensors[:2]
    places = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    arguments: dict[str, Any] = {}
    for place, tile in enumerate(tiles):
        bias = tile.name == "bias"
        data = bias_of(q.shape[1], *places) if bias else table_of(*places).to(torch.int8)
        keys = config.block_n if wide else config.block_n // 2
        arguments[f"pair{place}_desc"] = Tiles(data, ROWS, keys)
        arguments |= {f"t_{tile.name}": None, f"size0_{tile.name}": 0}
        arguments |= {f"{x}{n}_{tile.name}": 0 for x in ("size", "stride") for n in range(3)}
        if not bias:
            arguments |= lists_of((data != 0).mT, (config.block_n, ROWS), cut_is_full=True)
    return tiles, arguments


@dataclass(frozen=True)
class Stored:
    """What a kernel stores beside sums of dQ, and how."""

    kind: torch.dtype = torch.float16
    """That of dK and dV."""
    slopes: StoredDS | None = None
    """Get dS."""
    distances: torch.Tensor | None = None
    """Gets sums of dS."""
    turns: torch.Tensor | None = None
    """(heads, query tiles) int32: counts how many work tiles have added to sums of dQ; with it they
    take turns."""

    apart: bool = False
    """True if a work tile has one query head; sums over heads are dK and dV."""

    def features(self) -> tuple[str, ...]:
        """Flags of the plan of gradients."""
        flags = {"STORES_DS": self.slopes, "ADDS_DIAGONALS": self.distances}
        return tuple(flag for flag, there in flags.items() if there is not None)

    def arguments(self, config: Config) -> dict[str, Any]:
        """Those that are there for dS."""
        found: dict[str, Any] = {}
        if self.slopes is not None:
            values = self.slopes.values.flatten(0, 2)
            found["slopes_desc"] = Tiles(values, config.block_n, ROWS)
            found["STORED_TILES"] = Pointer(self.slopes.stored.view(-1))
        if self.distances is not None:
            found["DISTANCE_SUMS"] = Pointer(self.distances.view(-1))
        if self.turns is not None:
            found["TURNS"] = Pointer(self.turns.view(-1))
        return found


GRADIENTS = Stored()


def run_backward(
    name: str, tensors: list[torch.Tensor], config: Config, run: Run = PLAIN,
    stored: Stored = GRADIENTS,
) -> list[torch.Tensor]:  # fmt: skip
    """dQ, dK and dV of (q, k, v, dO), halves."""
    q, k, v, do = tensors
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    # Of bf16, whose range has room, weights are without the factor that all of them have.
    dtype = torch.bfloat16 if name in ("sigmoid", "own dropout") else torch.float16
    lowered = lower(Source(TEXTS[name][0]), {})
    tiles, of_pairs = pairs_of(lowered, tensors, config, run.wide)
    facts = specialised(
        lowered, example_call(lowered, 64, 64, dtype, {}), pair_tiles=tiles,
        features=stored.features(),
        wide_gradients=stored.kind is torch.float32, takes_turns=stored.turns is not None,
        heads_apart=stored.apart,
    )  # fmt: skip
    if run.wide:
        facts = replace(facts, head_dim=256, value_dim=256)
    kernel = Kernel("backward_kv", lowered, facts, config)
    lse2, delta = statistics(name, tensors)
    padded = lse2.shape[1]
    sums = torch.zeros(batch * heads * padded * WIDTH)
    owners = heads if stored.apart else kv_heads
    kind = torch.float32 if stored.apart else stored.kind
    size = batch * owners * kv_len * WIDTH
    dk, dv = (torch.full((size,), float("nan"), dtype=kind) for _ in (k, v))
    arguments = {
        "q_desc": Descriptor(q, ROWS), "do_desc": Descriptor(do, ROWS),
        "k_desc": Descriptor(k, config.block_n), "v_desc": Descriptor(v, config.block_n),
        "lse_desc": Vector(lse2.flatten(), ROWS), "delta_desc": Vector(delta.flatten(), ROWS),
        "LSE_SHIFT": Pointer(torch.zeros(lse2.numel())), "SUMS": Pointer(sums),
        "DK": Pointer(dk), "DV_OUT": Pointer(dv), "scale": WIDTH**-0.5,
        **sizes_of(q, k, run), "padded": number(padded), **steps_of_rows(owners, kv_len),
        **of_pairs, **stored.arguments(config), "seed": SEED,
    }  # fmt: skip
    items = -(-kv_len // config.block_n) * batch * owners
    text = kernel.text(flags=run.flags)
    launch(text, kernel, items, arguments, tile_sizes(config, WIDTH, WIDTH), run)
    # Blocks of 64 rows: the half of each warpgroup behind the other.
    dq = sums.view(batch, heads, padded // ROWS, 2, ROWS, WIDTH // 2).transpose(3, 4)
    dq = dq.reshape(batch, heads, padded, WIDTH)[:, :, :q_len] * WIDTH**-0.5
    dk, dv = dk.view(batch, kv_len, owners, -1).transpose(1, 2), dv.view(batch, owners, kv_len, -1)
    if stored.apart:
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return [dq, dk.float(), dv.float()]


def statistics(name: str, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows' log-sum-exp in base 2 and sums of out * dO, (batch * heads, padded)."""
    q, k, v, do = tensors
    out, lse = attention_of(name, q.float(), k.float(), v.float())
    step = STATISTICS_PADDING.value
    rows, q_len = q.shape[:2].numel(), q.shape[2]
    padded = -(-q_len // step) * step
    lse2, delta = torch.full((rows, padded), torch.inf), torch.zeros(rows, padded)
    finite = torch.where(lse == -torch.inf, torch.inf, lse * LOG2E)
    lse2[:, :q_len] = finite.flatten(0, 1)
    delta[:, :q_len] = (out.half().float() * do.float()).sum(-1).flatten(0, 1)
    return lse2, delta


def steps_of_rows(kv_heads: int, kv_len: int) -> dict[str, torch.Tensor]:
    """dK lies in memory as (batch, keys, heads), dV as (batch, heads, keys)."""
    found = {}
    for name, rows in (("dk", (1, kv_heads)), ("dv", (kv_len, 1))):
        steps = (kv_heads * kv_len, *rows)
        found |= {f"rows_{name}{dim}": number(x) for dim, x in zip("bhn", steps, strict=True)}
    return found


def inputs_of(q_len: int, kv_len: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(q_len + kv_len)

    def halves(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, WIDTH, generator=generator).half()

    q, k, v, do = (
        halves(*x) for x in ((2, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (2, q_len))
    )
    return [q, k, v, do]


CONFIG = Config(ROWS, 16, 4, 2, 2, 240)
PERSISTENT = replace(CONFIG, persistent=True)
SHAPES = ((100, 40, 2), (70, 37, 1), (30, 16, 1))
CASES = cases_of(TEXTS, len(SHAPES))
