"""The forward kernel's text as Python, on the machine that takes Gluon's place."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from support.gluon_machine import lists_of

from attndsl.backends.hopper.generate import generate
from attndsl.backends.hopper.own_tiles import own_tiles
from attndsl.backends.triton.cross import example_call, parse_target
from attndsl.backends.triton.kernels import plan_loop
from attndsl.backends.triton.specialise import PairTile, specialise, with_forms
from attndsl.backends.triton.tiles import Config
from attndsl.pipeline import lower
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

    from attndsl.backends.base import Call
    from attndsl.pipeline import Lowered

TEXTS = {
    "full": "score",
    "causal": "causal()",
    "window": "sliding_window(20)",
    "some rows": "q < 30 and kv >= q",
    "nothing": "q < 0",
    "alibi": "mask = causal()\nscore = alibi()",
    "cap": "mask = causal()\nscore = softcap(2.0)",
    "sink": "mask = causal()\nsink = 0.5",
    "cap and sink": "mask = q < 30 and kv >= q\nscore = softcap(2.0)\nsink = 0.5 - h",
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
    gluon: SimpleNamespace, lowered: Any, inputs: Inputs, config: Config, origins: tuple[int, int]
) -> tuple[tuple[PairTile, ...], dict[str, Any]]:
    """What is read by tiles in a program, and its arguments."""
    tiles = tuple(PAIRS[decl.name] for decl in lowered.program.tensors if decl.name in PAIRS)
    arguments: dict[str, Any] = {}
    for number, tile in enumerate(tiles):
        data = inputs.bias if tile.name == "bias" else inputs.allowed.to(torch.int8)
        # Rows and keys that positions do not reach are none of the call's.
        before = torch.nn.functional.pad(data, (origins[1], 0, origins[0], 0), value=77)
        rows = config.block_m // config.consumers
        arguments[f"pair{number}_desc"] = gluon.Tiles(before, rows, config.block_n)
        arguments |= {f"t_{tile.name}": None, f"size0_{tile.name}": 0}
        arguments |= {f"{x}{n}_{tile.name}": 0 for x in ("size", "stride") for n in range(3)}
    return tiles, arguments


def run_text(
    gluon: SimpleNamespace, name: str, inputs: Inputs, config: Config, seed: int = 0,
    programs: int | None = None, together: int = 3, wide: bool = False,
    change: Any = lambda text: text, origins: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.bfloat16, noted: Any = None, part: OfPart | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output and log-sum-exp of the generated kernel.

    Where it is ``wide``, shared memory has no room for an output beside q. ``change`` alters the
    text. ``origins`` are positions of the first query and key. The text is that for ``dtype``, in
    which ``noted`` may be called. ``name`` is that of a program, or its text.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    batch, heads, q_len, _ = q.shape
    lowered = lower(Source(TEXTS.get(name, name)), {})
    call = example_call(lowered, 64, 64, dtype, {})
    if part is not None:
        lowered, call = part.localised(lowered, call)
    special = specialise(lowered.program, call)
    special = with_forms(special, lowered.program, parse_target("cuda:90"))
    tiles, of_pairs = pairs_of(gluon, lowered, inputs, config, origins)
    special = replace(special, pair_tiles=tiles)
    loop = plan_loop(lowered, special, "forward", config)
    width = v.shape[3]
    if width != WIDTH:
        special = replace(special, value_dim=128)
    shown = config
    if wide:
        special = replace(special, head_dim=256, value_dim=256)
        shown = replace(config, block_m=128, block_n=64)
    text = generate(lowered, special, "forward", loop, shown)
    if wide:
        # Its plan of rows is for other tiles.
        text = text.replace("ROWS_HAVE_TILES = tl.constexpr(True)", "ROWS_HAVE_TILES = False")
    text = change(text)
    own = width != WIDTH or (config.persistent and not wide)
    assert f"OWN_OUTPUT = tl.constexpr({own})" in text
    # The machine's halves are fp16.
    text = re.sub(r"\w+\.type\.layout", "None", text).replace("2.0**48", "2.0**15")
    items = -(-q_len // config.block_m) * batch * heads
    machine = gluon.Machine(seed, min(programs or items, items) if config.persistent else items)
    operations = gluon.Operations(machine)
    modules = operations.modules()
    modules["attndsl.backends.hopper.dialect"] = modules["attndsl.backends.hopper"].dialect
    module = gluon.module_of(text, modules)
    module["noted"] = noted
    kernel = module["attention_forward"]
    out = torch.full((batch, heads, q_len, v.shape[3]), float("nan"), dtype=torch.float16)
    lse = torch.full((batch * heads * q_len,), float("nan"))
    rows = config.block_m // config.consumers
    counter = torch.zeros((), dtype=torch.int32)
    sizes = {"batch": batch, "heads": heads, "kv_heads": k.shape[1], "q_len": q_len}
    sizes["kv_len"] = k.shape[2]
    arguments = {
        "q_desc": gluon.Descriptor(q, rows), "k_desc": gluon.Descriptor(k, config.block_n),
        "v_desc": gluon.Descriptor(v, config.block_n), "o_desc": gluon.Descriptor(out, rows),
        "LSE": gluon.Pointer(lse), "COUNTER": gluon.Pointer(counter), "scale": WIDTH**-0.5,
        **{size: gluon.number(value) for size, value in sizes.items()},
        "q_origin": origins[0], "kv_origin": origins[1], "together": gluon.number(together),
        "HEAD_DIM": WIDTH, "D": WIDTH,
        "DV": width, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "STAGES": config.stages, "CONSUMERS": config.consumers,
        "REGISTERS": config.registers, "Q_KIND": "offset", "KV_KIND": "offset",
        "t_doc": gluon.Pointer(inputs.doc), "size0_doc": gluon.number(len(inputs.doc)),
        **lists_of(
            inputs.allowed, (config.block_m, config.block_n), cut_is_full=False,
            parts=own_tiles(lowered, special, "forward", config).parts,
        ),
        "seed": SEED, **of_pairs, **({} if part is None else part.arguments),
    }  # fmt: skip
    taken = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    for program in range(machine.programs):
        machine.start(program, kernel, *(arguments[name] for name in taken))
    machine.run()
    assert not counter
    return out, lse.view(batch, heads, q_len)


SMALL = Config(16, 8, 4, 2, 2, 240)
PERSISTENT = replace(SMALL, persistent=True)
SHAPES = ((40, 40, 2, 8), (33, 50, 4, 8), (20, 7, 1, 8), (40, 24, 2, 16))


FORMS = {
    "three stages": replace(PERSISTENT, stages=3),
    "three consumers": replace(PERSISTENT, block_m=24, consumers=3),
    "one stage": replace(PERSISTENT, stages=1),
    "early": replace(PERSISTENT, early=True),
}
