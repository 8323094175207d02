"""The forward kernel's text as Python, on the machine that takes Gluon's place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.emit.facts import PairTile
from attndsl.backends.hopper.features.tile_skipping import own_tiles
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.pipeline import lower
from attndsl.source import Source

from .gluon_machine import Descriptor, Pointer, Tiles, lists_of, number
from .kernel_text import PLAIN, Kernel, Run, launch, sizes_of, specialised, tile_sizes
from .mutation import number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.backends.base import Call
    from attndsl.pipeline import Lowered

TEXTS = {
    "full": "score",
    "causal": "causal()",
    "window": "sliding_window(20)",
    "some rows": "q < 30 and kv >= q",
    "nothing": "q < 0",
    "alibi": "mask = causal()\nscore = score + alibi()",
    "cap": "mask = causal()\nscore = softcap(score, 2.0)",
    "sink": "mask = causal()\nsink = 0.5",
    "cap and sink": "mask = q < 30 and kv >= q\nscore = softcap(score, 2.0)\nsink = 0.5 - h",
    "documents": "tensor doc[q_len]: int\nmask = q >= kv and doc[q] == doc[kv]",
    "signs": "mask = causal()\nscore = (1 - h) * score",
    "sigmoid": "mask = causal()\nweights = sigmoid(score) / 4",
    "dropout": "mask = causal()\nweights = dropout(softmax(score), 0.4)",
    "own dropout": "mask = causal()\nweights = dropout(sigmoid(score), 0.1)",
    "own weights": "mask = q < 30 and kv >= q\nscore = 2 * score\nweights = relu(score) / 9 + 0.02",
    "bias": "tensor bias[heads, q_len, kv_len]: float\nscore = score + bias[h, q, kv]",
    "table": "tensor table[q_len, kv_len]: bool\nmask = table[q, kv]",
    "table and bias": """
        tensor table[q_len, kv_len]: bool
        tensor bias[heads, q_len, kv_len]: float
        mask = table[q, kv]
        score = score + bias[h, q, kv]
    """,
    "first document": "tensor doc[q_len]: int\nmask = doc[q] == 0",
}
PAIRS = {
    "bias": PairTile("bias", ("h", "q", "kv"), ("h",), "fp16"),
    "table": PairTile("table", ("q", "kv"), (), "i8"),
}
"""By tensor: how tiles of it are read."""
WIDTH = 8
SEED = 0x1234567


@dataclass(frozen=True)
class OfPart:
    """What makes a program and an example of its calls those of a part, and what is added then."""

    localised: Callable[[Lowered, Call], tuple[Lowered, Call]]
    arguments: dict[str, Any]
    """Of the kernel, by name."""


@dataclass(frozen=True)
class Inputs:
    """One call: (batch, heads, length, width), in halves; ``allowed`` is (q_len, kv_len)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    allowed: torch.Tensor
    doc: torch.Tensor
    bias: torch.Tensor


def inputs_of(name: str, q_len: int, kv_len: int, kv_heads: int, value_width: int) -> Inputs:
    generator = torch.Generator().manual_seed(q_len + kv_len)

    def halves(heads: int, length: int, width: int) -> torch.Tensor:
        return torch.randn(2, heads, length, width, generator=generator).half()

    q, kv = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
    doc = torch.arange(max(q_len, kv_len), dtype=torch.int32) // 13
    allowed = {
        "full": kv >= 0,
        "window": (q >= kv) & (q - kv < 20),
        "some rows": (q < 30) & (kv >= q),
        "own weights": (q < 30) & (kv >= q),
        "cap and sink": (q < 30) & (kv >= q),
        "nothing": q < 0,
        "documents": (q >= kv) & (doc[:q_len, None] == doc[None, :kv_len]),
        "first document": doc[:q_len, None] == 0,
        "bias": kv >= 0,
        "table": table_of(q, kv),
        "table and bias": table_of(q, kv),
    }.get(name, q >= kv)
    k, v = halves(kv_heads, kv_len, WIDTH), halves(kv_heads, kv_len, value_width)
    q_rows, bias = halves(4, q_len, WIDTH), 2 * halves(4, q_len, kv_len)[0]
    return Inputs(q_rows, k, v, allowed.expand(q_len, kv_len), doc[:q_len], bias)


def table_of(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """A mask of FULL, PARTIAL and EMPTY tiles in no order; some rows have FULL ones alone."""
    kind = (q // 16 * 3 + kv // 8) % 4
    return (kind > 1) | ((kind == 1) & ((q + kv) % 3 > 0) & (q // 16 > 0))


def pairs_of(
    lowered: Lowered, inputs: Inputs, config: Config, origins: tuple[int, int]
) -> tuple[tuple[PairTile, ...], dict[str, Any]]:
    """What is read by tiles in a program, and its arguments."""
    tiles = tuple(PAIRS[decl.name] for decl in lowered.program.tensors if decl.name in PAIRS)
    arguments: dict[str, Any] = {}
    for place, tile in enumerate(tiles):
        data = inputs.bias if tile.name == "bias" else inputs.allowed.to(torch.int8)
        # Rows and keys that positions do not reach are none of the call's.
        before = torch.nn.functional.pad(data, (origins[1], 0, origins[0], 0), value=77)
        rows = config.block_m // config.consumers
        arguments[f"pair{place}_desc"] = Tiles(before, rows, config.block_n)
        arguments |= {f"t_{tile.name}": None, f"size0_{tile.name}": 0}
        arguments |= {f"{x}{n}_{tile.name}": 0 for x in ("size", "stride") for n in range(3)}
    return tiles, arguments


def run_forward(
    name: str, inputs: Inputs, config: Config, run: Run = PLAIN, part: OfPart | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the generated kernel of a program, or of its text.

    The text is for bf16; the machine's halves are fp16.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    lowered = lower(Source(TEXTS.get(name, name)), {})
    call = example_call(lowered, 64, 64, torch.bfloat16, {})
    if part is not None:
        lowered, call = part.localised(lowered, call)
    width = v.shape[3]
    tiles, of_pairs = pairs_of(lowered, inputs, config, run.origins)
    facts = specialised(lowered, call, pair_tiles=tiles)
    if width != WIDTH:
        facts = replace(facts, value_dim=128)
    shown, constants, flags = config, tile_sizes(config, WIDTH, width), dict(run.flags)
    if run.wide:
        facts = replace(facts, head_dim=256, value_dim=256)
        shown = replace(config, block_m=128, block_n=64)
        # Its plan of rows is for other tiles.
        flags["ROWS_HAVE_TILES"] = False
    kernel = Kernel("forward", lowered, facts, config)
    text = kernel.text(shown, flags)
    own = bool(number_of(text, "allocate_tiles(results.out, ...)"))
    assert own == (width != WIDTH)
    two_slots = config.persistent and not own and not run.wide
    assert ("QUERIES = tl.constexpr(2)" in text) == two_slots
    out = torch.full((*q.shape[:3], width), float("nan"), dtype=torch.float16)
    lse = torch.full((2, q.shape[:3].numel()), float("nan"))
    rows = config.block_m // config.consumers
    blocks = (config.block_m, config.block_n)
    parts = own_tiles(lowered, facts, Task.FORWARD, config).parts
    arguments = {
        "q_desc": Descriptor(q, rows), "k_desc": Descriptor(k, config.block_n),
        "v_desc": Descriptor(v, config.block_n), "o_desc": Descriptor(out, rows),
        "LSE": Pointer(lse.view(-1)), "scale": WIDTH**-0.5, **sizes_of(q, k, run),
        "t_doc": Pointer(inputs.doc), "size0_doc": number(len(inputs.doc)),
        **lists_of(inputs.allowed, blocks, cut_is_full=False, parts=parts),
        "seed": SEED, **of_pairs, **({} if part is None else part.arguments),
    }  # fmt: skip
    items = -(-q.shape[2] // config.block_m) * q.shape[:2].numel()
    launch(text, kernel, items, arguments, constants, run)
    return out, lse.sum(0).view(q.shape[:3])


SMALL = Config(16, 8, 4, 2, 2, 240)
PERSISTENT = replace(SMALL, persistent=True)
SHAPES = ((40, 40, 2, 8), (33, 50, 4, 8), (20, 7, 1, 8), (40, 24, 2, 16))


FORMS = {
    "three stages": replace(PERSISTENT, stages=3),
    "three consumers": replace(PERSISTENT, block_m=24, consumers=3),
    "one consumer": replace(SMALL, block_m=8, consumers=1),
    "one stage": replace(PERSISTENT, stages=1),
    "early": replace(PERSISTENT, early=True),
}
