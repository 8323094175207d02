"""Twenty training steps of torchtitan's Llama debug model by attndsl and by FlexAttention.

    python benchmarks/torchtitan_steps.py [--device cuda] [--compile] [--output FILE]

The model, its sizes and its random weights are torchtitan 0.3.0's own; its trainer has no part.
All ways begin with the same weights. Every step has the same random tokens in packed documents, so
that the loss falls. On a GPU these are the debug model's 8 rows of 2048 tokens under bf16 autocast
(the trainer casts by FSDP), on a CPU two rows of 32 in fp32. FlexAttention does not train on CPUs.
There SDPA with a dense mask stands beside, a module of this script: torchtitan's own SDPA takes no
documents. Steps of the ways take turns. ``step_ms`` is the median of the last ten steps, each
waited for: masks, forward, backward and AdamW. ``difference`` is the largest one of two losses of a
step. ``--compile`` adds rows in which torchtitan compiles each block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.fsdp
from torch.nn import functional

from attndsl.errors import AttnDSLError

import common

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

STEPS, TIMED = 20, 10
VOCABULARY = 2048
ADAMW = {"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""Torchtitan's, of ``llama3_debugmodel`` and ``default_adamw``, without its schedule."""
STOOD_IN = "DataParallelMeshDims"
COLUMNS = ["attention", "compiled", "first", "last", "difference", "step_ms", "why"]


@dataclass(frozen=True)
class Batch:
    """Tokens (batch, length + 1) and positions (batch, length), which begin anew in documents."""

    ids: torch.Tensor
    positions: torch.Tensor

    @property
    def documents(self) -> int:
        """How many there are."""
        return int((self.positions == 0).sum())


def batch_of(rows: int, length: int, device: str) -> Batch:
    """Random tokens, in some eight documents a row."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    begins = torch.rand(rows, length, generator=generator) < 8 / length
    begins[:, 0] = True
    places = torch.arange(length).expand(rows, -1)
    positions = places - torch.where(begins, places, 0).cummax(1).values
    return Batch(ids.to(device), positions.to(device))


def llama3() -> Any:
    """Torchtitan's Llama models.

    Its code for FSDP imports a name that torch has from 2.12 on. Nothing here shards, so that with
    torch 2.11 a class that nobody can make has that name.
    """

    def refuse(self: object, *_: object, **__: object) -> None:
        raise NotImplementedError(f"torch {torch.__version__} has no {STOOD_IN}")

    if not hasattr(torch.distributed.fsdp, STOOD_IN):
        setattr(torch.distributed.fsdp, STOOD_IN, type(STOOD_IN, (), {"__init__": refuse}))
    from torchtitan.models import llama3 as found

    return found


def by_attndsl() -> Any:
    """A configuration of attndsl's module, without a program of its own."""
    from attndsl.torchtitan import Attention

    return Attention.Config()


def by_flex() -> Any:
    """A configuration of torchtitan's FlexAttention, which compiles itself."""
    from torchtitan.models.common.attention import FlexAttention

    return FlexAttention.Config()


def by_sdpa() -> Any:
    """A configuration of torch's SDPA with a dense mask of documents."""
    from torchtitan.models.common.attention import VarlenAttention

    class Dense(VarlenAttention):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(VarlenAttention.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any) -> None:
            super(VarlenAttention, self).__init__()

        def forward(self, *qkv: torch.Tensor, attention_masks: Any, **given: Any) -> torch.Tensor:
            batch, length = qkv[0].shape[:2]
            rows = torch.arange(batch * length, device=qkv[0].device)
            starts = attention_masks.cu_seq_q[1:].contiguous()
            document = torch.searchsorted(starts, rows, right=True).view(batch, 1, length)
            causal = torch.ones(length, length, dtype=torch.bool, device=rows.device).tril()
            mask = (document[..., None] == document[..., None, :]) & causal
            q, k, v = (x.transpose(1, 2) for x in qkv)
            found = functional.scaled_dot_product_attention(
                q, k, v, mask, scale=given.get("scale"), enable_gqa=True
            )
            return found.transpose(1, 2)

    return Dense.Config()


WAYS: dict[str, Callable[[], Any]] = {"flex": by_flex, "sdpa": by_sdpa, "attndsl": by_attndsl}


def model_with(way: str, device: str) -> Any:
    """The debug model with ``way``'s attention and the weights of seed 0."""
    config = llama3().llama3_configs["debugmodel"](attn_backend="varlen")
    for layer in config.layers:
        layer.attention.inner_attention = WAYS[way]()
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model.to(device)


def masks_of(way: str, model: Any, positions: torch.Tensor) -> Any:
    """What the model gives its attention.

    Torchtitan makes FlexAttention's block mask with ``separate_full_blocks=True``, an argument that
    torch has from 2.13 on. It is the default, and was always so: the mask is the same without it.
    """
    if way != "flex":
        return model.get_attention_masks(positions)
    from torch.nn.attention.flex_attention import and_masks
    from torchtitan.models.common import attention

    documents = attention.get_efficient_causal_mask_mod_for_packed_document(positions)
    batch, length = positions.shape
    return attention.create_attention_mask(
        and_masks(attention.get_causal_mask_mod(), documents), batch, None, length, length,
        device=positions.device, BLOCK_SIZE=attention.FlexAttention.Config().block_size,
    )  # fmt: skip


def compile_blocks(model: Any) -> None:
    """As torchtitan's trainer does on one GPU."""
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.compile import apply_compile

    sizes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "world_size"), 1)
    apply_compile(
        model, compile_config=CompileConfig(enable=True), parallel_dims=ParallelDims(**sizes)
    )


def steps(way: str, compiled: bool, batch: Batch, device: str) -> Iterator[tuple[float, float]]:
    """Loss and milliseconds of each step; reading the loss waits for the device."""
    model = model_with(way, device)
    if compiled:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=device == "cuda")
    for _ in range(STEPS):
        begin = time.perf_counter()
        masks = masks_of(way, model, batch.positions)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch.ids[:, :-1], positions=batch.positions, attention_masks=masks)
        wanted = batch.ids[:, 1:].flatten()
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item(), (time.perf_counter() - begin) * 1e3


def by_turns(
    ways: Sequence[str], compiled: bool, batch: Batch, device: str
) -> list[dict[str, Any]]:
    """A row for each way, whose steps take turns; what a machine does not run is a finding."""
    rows: list[dict[str, Any]] = []
    running = {}
    for way in ways:
        rows.append({
            "attention": way, "compiled": compiled, "batch": batch.positions.shape[0],
            "length": batch.positions.shape[1], "documents": batch.documents,
            "dtype": "bf16 autocast" if device == "cuda" else "fp32",
            "torchtitan": metadata.version("torchtitan"),
        })  # fmt: skip
        running[way] = steps(way, compiled, batch, device)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(STEPS):
        for way, row in zip(ways, rows, strict=True):
            if "why" in row:
                continue
            try:
                found[way].append(next(running[way]))
            except Exception as error:
                row["why"] = f"{type(error).__name__}: {str(error)[:200]}"
        if sys.stderr.isatty():
            print(f"step {number + 1} of {STEPS}", end="\r", file=sys.stderr, flush=True)
    for way, row in zip(ways, rows, strict=True):
        if "why" not in row:
            losses, times = (list(x) for x in zip(*found[way], strict=True))
            row |= {
                "losses": losses, "first": losses[0], "last": losses[-1],
                "step_ms": statistics.median(times[-TIMED:]), "first_step_ms": times[0],
            }  # fmt: skip
    return rows


def compare(rows: list[dict[str, Any]]) -> None:
    """Give rows of attndsl the largest difference of their losses from the other way's."""
    measured = [row for row in rows if "losses" in row]
    for own in measured:
        for other in measured:
            alike = own["compiled"] == other["compiled"]
            if own["attention"] == "attndsl" != other["attention"] and alike:
                pairs = zip(own["losses"], other["losses"], strict=True)
                own["difference"] = max(abs(a - b) for a, b in pairs)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all rows, and write them after each."""
    on_gpu = options.device == "cuda"
    batch = batch_of(*((8, 2048) if on_gpu else (2, 32)), options.device)
    rows: list[dict[str, Any]] = []
    for compiled in (False, True) if options.compile else (False,):
        ways = ("flex" if on_gpu else "sdpa", "attndsl")
        words = f"{' and '.join(ways)}{', compiled blocks' if compiled else ''}"
        print(f"{words}: {STEPS} steps each, by turns", file=sys.stderr, flush=True)
        rows += by_turns(ways, compiled, batch, options.device)
        compare(rows)
        print(*map(json.dumps, rows[-len(ways) :]), sep="\n", file=sys.stderr, flush=True)
        name = "torchtitan_steps" if on_gpu else "torchtitan_steps_cpu"
        common.write(name, options.device, rows, options.output)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="rows with compiled blocks too")
    parser.add_argument("--output", "--out", type=Path, help="result file")
    options = parser.parse_args(arguments)
    try:
        by_attndsl()
        llama3()
    except (AttnDSLError, ImportError) as error:
        print(f"torchtitan_steps.py: {error}", file=sys.stderr)
        return 2
    rows = run(options)
    print(f"torchtitan {metadata.version('torchtitan')}, torch {torch.__version__}")
    common.print_table(rows, [name for name in COLUMNS if any(name in row for row in rows)])
    for row in rows:
        if "losses" in row:
            kind = "compiled" if row["compiled"] else "eager"
            print(row["attention"], kind, *(f"{loss:.4f}" for loss in row["losses"]))
    return int(any("why" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
