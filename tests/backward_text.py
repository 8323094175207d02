"""The text of the Hopper backward as Python: its inputs, what it should find, and how it is run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gluon_machine import lists_of

from attndsl.backends.dense.philox import kept as kept_pairs
from attndsl.backends.hopper.generate import generate
from attndsl.backends.triton.cross import example_call, parse_target
from attndsl.backends.triton.kernels import plan_loop
from attndsl.backends.triton.library import STATISTICS_PADDING
from attndsl.backends.triton.specialise import PairTile, specialise, with_forms
from attndsl.backends.triton.tiles import Config
from attndsl.pipeline import lower
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

    from attndsl.backends.base import Slopes

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
    "cap": ("mask = causal()\nscore = softcap(2.0)", lambda s, q, kv: 2 * torch.tanh(s / 2)),
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
        "mask = causal()\nscore = softcap(2.0)\nweights = dropout(softmax(score), 0.4)"
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
    gluon: SimpleNamespace, lowered: Any, tensors: list[torch.Tensor], config: Config, wide: bool
) -> tuple[tuple[PairTile, ...], dict[str, Any]]:
    """What is read by tiles in a program, and its arguments."""
    tiles = tuple(PAIRS[decl.name] for decl in lowered.program.tensors)
    q, k = tensors[:2]
    places = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    arguments: dict[str, Any] = {}
    for number, tile in enumerate(tiles):
        bias = tile.name == "bias"
        data = bias_of(q.shape[1], *places) if bias else table_of(*places).to(torch.int8)
        keys = config.block_n if wide else config.block_n // 2
        arguments[f"pair{number}_desc"] = gluon.Tiles(data, ROWS, keys)
        arguments |= {f"t_{tile.name}": None, f"size0_{tile.name}": 0}
        arguments |= {f"{x}{n}_{tile.name}": 0 for x in ("size", "stride") for n in range(3)}
        if not bias:
            arguments |= lists_of((data != 0).mT, (config.block_n, ROWS), cut_is_full=True)
    return tiles, arguments


def run_text(
    gluon: SimpleNamespace, name: str, tensors: list[torch.Tensor], config: Config, seed: int = 0,
    wide: bool = False, change: Any = lambda text: text, programs: int = 1,
    slopes: Slopes | None = None, distances: torch.Tensor | None = None,
    kind: torch.dtype = torch.float16,
) -> list[torch.Tensor]:  # fmt: skip
    """dQ, dK and dV of (q, k, v, dO), halves; ``change`` alters the text.

    ``programs`` are those of a persistent config. ``slopes`` get dS, and ``distances`` sums of dS.
    dK and dV are stored in ``kind``.
    """
    q, k, v, do = tensors
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    out, lse = attention_of(name, q.float(), k.float(), v.float())
    step = STATISTICS_PADDING.value
    padded = -(-q_len // step) * step
    lse2, delta = torch.full((batch * heads, padded), torch.inf), torch.zeros(batch * heads, padded)
    rows = torch.where(lse == -torch.inf, torch.inf, lse * LOG2E)
    lse2[:, :q_len] = rows.flatten(0, 1)
    delta[:, :q_len] = (out.half().float() * do.float()).sum(-1).flatten(0, 1)
    lowered = lower(Source(TEXTS[name][0]), {})
    # Of bf16, whose range has room, weights are without the factor that all of them have.
    dtype = torch.bfloat16 if name in ("sigmoid", "own dropout") else torch.float16
    special = specialise(lowered.program, example_call(lowered, 64, 64, dtype, {}))
    special = with_forms(special, lowered.program, parse_target("cuda:90"))
    tiles, of_pairs = pairs_of(gluon, lowered, tensors, config, wide)
    special = replace(special, pair_tiles=tiles, stores_slopes=slopes is not None)
    special = replace(special, adds_diagonals=distances is not None)
    special = replace(special, wide_gradients=kind is torch.float32)
    if slopes is not None:
        of_pairs["slopes_desc"] = gluon.Tiles(slopes.values.flatten(0, 2), config.block_n, ROWS)
        of_pairs["STORED_TILES"] = gluon.Pointer(slopes.stored.view(-1))
    loop = plan_loop(lowered, special, "backward_kv", config)
    if wide:
        special = replace(special, head_dim=256, value_dim=256)
    text = change(generate(lowered, special, "backward_kv", loop, config))
    for layout in ("rows.type.layout", "own.type.layout"):
        text = text.replace(layout, "None").replace("128, BLOCK_M // 64]", "8]")
    items = -(-kv_len // config.block_n) * batch * kv_heads
    machine = gluon.Machine(seed, min(programs, items) if config.persistent else items)
    modules = gluon.Operations(machine).modules()
    modules["attndsl.backends.hopper.dialect"] = modules["attndsl.backends.hopper"].dialect
    kernel = gluon.module_of(text, modules)["attention_backward_kv"]
    sums = torch.zeros(batch * heads * padded * WIDTH)
    dk, dv = (torch.full((x.numel(),), float("nan"), dtype=kind) for x in (k, v))
    counter = torch.zeros((), dtype=torch.int32)
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len}
    sizes |= {"kv_len": kv_len, "padded": padded, "together": 3}
    # dK lies in memory as (batch, keys, heads), dV as (batch, heads, keys).
    for name, rows in (("dk", (1, kv_heads)), ("dv", (kv_len, 1))):
        steps = (kv_heads * kv_len, *rows)
        sizes |= {f"rows_{name}{dim}": step for dim, step in zip("bhn", steps, strict=True)}
    arguments = {
        "q_desc": gluon.Descriptor(q, ROWS), "do_desc": gluon.Descriptor(do, ROWS),
        "k_desc": gluon.Descriptor(k, config.block_n),
        "v_desc": gluon.Descriptor(v, config.block_n),
        "lse_desc": gluon.Vector(lse2.flatten(), ROWS),
        "delta_desc": gluon.Vector(delta.flatten(), ROWS),
        "SUMS": gluon.Pointer(sums), "DK": gluon.Pointer(dk), "DV_OUT": gluon.Pointer(dv),
        "COUNTER": gluon.Pointer(counter), "scale": WIDTH**-0.5,
        **{size: gluon.number(value) for size, value in sizes.items()},
        "q_origin": 0, "kv_origin": 0, "HEAD_DIM": WIDTH, "VALUE_DIM": WIDTH, "D": WIDTH,
        "DV": WIDTH, "BLOCK_M": ROWS, "BLOCK_N": config.block_n, "STAGES": config.stages,
        "REGISTERS": config.registers, "Q_KIND": "offset", "KV_KIND": "offset", **of_pairs,
        "seed": SEED,
    }  # fmt: skip
    if distances is not None:
        arguments["DISTANCE_SUMS"] = gluon.Pointer(distances.view(-1))
    taken = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    for program in range(machine.programs):
        machine.start(program, kernel, *(arguments[name] for name in taken))
    machine.run()
    assert not counter
    # Blocks of 64 rows: the half of each warpgroup behind the other.
    dq = sums.view(batch, heads, padded // ROWS, 2, ROWS, WIDTH // 2).transpose(3, 4)
    dq = dq.reshape(batch, heads, padded, WIDTH)[:, :, :q_len] * WIDTH**-0.5
    dk = dk.view(batch, kv_len, kv_heads, -1).transpose(1, 2)
    return [dq, dk.float(), dv.view(v.shape).float()]


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


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    pytest.param(name, shape) if place % len(SHAPES) == shape else slow(name, shape)
    for place, name in enumerate(TEXTS)
    for shape in range(len(SHAPES))
]
