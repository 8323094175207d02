"""Training steps of five models with attention by SDPA, FlexAttention and attndsl.

    python benchmarks/training.py [--only gpt1k,bert] [--rounds 20] [--tiny]

========  ==============================================================================
gpt1k     GPT of 124 M parameters, 1024 tokens, causal
gpt4k     the same, 4096 tokens
vit       ViT-B/16 at 224: 197 tokens, all pairs (A. Dosovitskiy et al., 2021)
bert      BERT-base, 512 tokens, keys padded from half the length on (J. Devlin et al., 2019)
dit       DiT-B/2 on latents of 64 x 64: 1024 tokens, adaLN-Zero (W. Peebles, S. Xie, 2023)
========  ==============================================================================

Blocks are pre-norm in all of them; data are random. Each model is one process, in which the ways
take turns with one set of weights and one optimizer: bf16 autocast, fused AdamW. Blocks, embedding
and loss are compiled by torch.compile, each once for all layers. ``step_ms`` is the median over
rounds of the mean of three steps. Hosts have slow phases of a second, so that few rounds tell
little of a model whose steps wait for the host. ``ratio`` is SDPA's step over this one, so below 1
is slower. ``peak_gb`` is the most memory that torch had allocated in a step (10^9 bytes; GPUs
alone). ``loss`` is that of the first weights, which all ways have to agree on.

Before anything is measured, all models run a step side by side, so that compiled code lies in the
caches. On a CPU the script runs tiny models with ``--tiny``, whose graphs are not compiled to C++;
FlexAttention does not train there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gpt
import torch
from torch import nn
from torch.nn import functional

import common
import worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpt import Attend

WAYS = ("sdpa", "flex", "attndsl")
WARM_UP, STEPS = 2, 3
WARM_SECONDS, PART_SECONDS, ALL_SECONDS = 90.0, 60.0, 235.0
"""Longest that warming up, a model and a run on a GPU take."""
_LEAST_SECONDS = 10.0
COLUMNS = ["model", "attention", "step_ms", "ratio", "peak_gb", "loss", "why"]
PATCH, LATENT_PATCH, LATENTS = 16, 2, 4
NOISY = 1000
"""Steps of a diffusion."""


@dataclass(frozen=True)
class Part:
    """A model and its batch."""

    kind: str
    """``gpt``, ``vit``, ``bert`` or ``dit``."""
    layers: int
    width: int
    heads: int
    batch: int
    size: int
    """Tokens, or the side of an image or of latents."""
    outputs: int
    """Words or classes."""

    @property
    def length(self) -> int:
        """Rows of attention."""
        if self.kind == "vit":
            return (self.size // PATCH) ** 2 + 1
        return (self.size // LATENT_PATCH) ** 2 if self.kind == "dit" else self.size


PARTS = {
    "gpt1k": Part("gpt", 12, 768, 12, 16, 1024, 50304),
    "gpt4k": Part("gpt", 12, 768, 12, 4, 4096, 50304),
    "vit": Part("vit", 12, 768, 12, 128, 224, 1000),
    "bert": Part("bert", 12, 768, 12, 32, 512, 30528),
    "dit": Part("dit", 12, 768, 12, 16, 64, 1000),
}
TINY = {"layers": 2, "width": 32, "heads": 2, "batch": 2, "outputs": 16}
TINY_SIZES = {"gpt": 24, "vit": 48, "bert": 24, "dit": 8}


class Batch(NamedTuple):
    """Random data of a step."""

    inputs: torch.Tensor
    targets: torch.Tensor
    condition: torch.Tensor | None
    """(batch, 2): the step of a diffusion and a class."""


class TokenModel(nn.Module):
    """Words in, words out: GPT and BERT. The first and last layer share their weights."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.tokens = nn.Embedding(part.outputs, part.width)
        self.places = nn.Embedding(part.length, part.width)
        self.blocks = nn.ModuleList(blocks_of(part, gpt.Block))
        self.norm = nn.LayerNorm(part.width)
        for weight in (self.tokens.weight, self.places.weight):
            nn.init.normal_(weight, std=0.02)

    def embed(self, batch: Batch) -> tuple[torch.Tensor, None]:
        """(batch, length, width)."""
        return self.tokens(batch.inputs) + self.places.weight, None

    def loss(self, x: torch.Tensor, condition: None, batch: Batch) -> torch.Tensor:
        """Mean cross entropy of all words."""
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


class ViT(nn.Module):
    """An image in, a class out."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, part.width, PATCH, PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, part.width))
        self.places = nn.Parameter(torch.randn(part.length, part.width) * 0.02)
        self.blocks = nn.ModuleList(blocks_of(part, gpt.Block))
        self.norm, self.head = nn.LayerNorm(part.width), nn.Linear(part.width, part.outputs)

    def embed(self, batch: Batch) -> tuple[torch.Tensor, None]:
        """(batch, length, width)."""
        x = self.patches(batch.inputs).flatten(2).mT
        return torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places, None

    def loss(self, x: torch.Tensor, condition: None, batch: Batch) -> torch.Tensor:
        """Mean cross entropy."""
        return functional.cross_entropy(self.head(self.norm(x[:, 0])), batch.targets)


class DiTBlock(nn.Module):
    """A block whose norms are shifted and scaled, and whose results are gated, by a condition."""

    def __init__(self, sizes: gpt.Sizes) -> None:
        super().__init__()
        self.block = gpt.Block(sizes)
        # The condition has the norms' own factors and terms.
        self.block.norms = nn.ModuleList(
            nn.LayerNorm(sizes.width, elementwise_affine=False) for _ in range(2)
        )
        self.modulation = nn.Linear(sizes.width, 6 * sizes.width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor, attend: Attend) -> torch.Tensor:
        """(batch, length, width) of the same; ``condition`` is (batch, width)."""
        parts = self.modulation(functional.silu(condition))[:, None].chunk(6, -1)
        shift, scale, gate, shift_feed, scale_feed, gate_feed = parts
        block = self.block
        batch, length, width = x.shape
        packed = block.packed(block.norms[0](x) * (1 + scale) + shift)
        q, k, v = (
            each.view(batch, length, block.heads, -1).transpose(1, 2)
            for each in packed.split(width, -1)
        )
        out = attend(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + gate * block.out(out)
        return x + gate_feed * block.feed(block.norms[1](x) * (1 + scale_feed) + shift_feed)


class DiT(nn.Module):
    """Noisy latents in, their noise out."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.patches = nn.Conv2d(LATENTS, part.width, LATENT_PATCH, LATENT_PATCH)
        self.places = nn.Parameter(torch.randn(part.length, part.width) * 0.02)
        self.times = nn.Embedding(NOISY, part.width)
        self.classes = nn.Embedding(part.outputs, part.width)
        self.blocks = nn.ModuleList(blocks_of(part, DiTBlock))
        self.norm = nn.LayerNorm(part.width)
        self.head = nn.Linear(part.width, LATENTS * LATENT_PATCH**2)

    def embed(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, length, width), and the condition (batch, width)."""
        assert batch.condition is not None
        when, label = batch.condition.unbind(-1)
        return self.patches(batch.inputs).flatten(2).mT + self.places, (
            self.times(when) + self.classes(label)
        )

    def loss(self, x: torch.Tensor, condition: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mean square distance to the noise, in patches."""
        side = LATENT_PATCH
        wanted = functional.unfold(batch.targets, side, stride=side).mT
        return functional.mse_loss(self.head(self.norm(x)).float(), wanted)


MODELS: dict[str, type[nn.Module]] = {
    "gpt": TokenModel, "bert": TokenModel, "vit": ViT, "dit": DiT,
}  # fmt: skip


def blocks_of(part: Part, made: Callable[[gpt.Sizes], nn.Module]) -> list[nn.Module]:
    """The layers of a model."""
    sizes = gpt.Sizes(part.layers, part.width, part.heads, part.batch, part.length, part.outputs)
    return [made(sizes) for _ in range(part.layers)]


def batch_of(part: Part, device: str) -> Batch:
    """Random data."""
    n = part.batch
    if part.kind == "vit":
        images = torch.randn(n, 3, part.size, part.size, device=device)
        return Batch(images, torch.randint(part.outputs, (n,), device=device), None)
    if part.kind == "dit":
        latents, noise = torch.randn(2, n, LATENTS, part.size, part.size, device=device)
        when = torch.randint(NOISY, (n,), device=device)
        label = torch.randint(part.outputs, (n,), device=device)
        return Batch(latents, noise, torch.stack([when, label], -1))
    words = torch.randint(part.outputs, (n, part.size + 1), device=device)
    return Batch(words[:, :-1].contiguous(), words[:, 1:].contiguous(), None)


def lengths_of(part: Part, device: str) -> torch.Tensor:
    """(batch,) keys of each entry of BERT: from half the length on, evenly."""
    return torch.linspace(part.length // 2, part.length, part.batch, device=device).int()


def by_sdpa(part: Part, device: str) -> Attend:
    """Torch's own, whichever of its kernels it takes."""
    mask = None
    if part.kind == "bert":
        places = torch.arange(part.length, device=device)
        mask = (places < lengths_of(part, device)[:, None])[:, None, None]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=part.kind == "gpt"
        )

    return attend


def by_flex(part: Part, device: str) -> Attend:
    """FlexAttention, with a block mask where there is a mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks, length = None, part.length
    if part.kind == "gpt":
        blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, device)
    elif part.kind == "bert":
        lengths = lengths_of(part, device)
        blocks = create_block_mask(
            lambda b, h, q, kv: kv < lengths[b], part.batch, None, length, length, device
        )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = flex_attention(q, k, v, block_mask=blocks)
        return found

    return attend


def by_attndsl(part: Part, device: str) -> Attend:
    """A compiled program."""
    import attndsl

    if part.kind != "bert":
        attend: Attend = attndsl.compile("causal()" if part.kind == "gpt" else "score")
        return attend
    padded = attndsl.compile("tensor lengths[batch]: int; mask = valid_keys(lengths)")
    lengths = lengths_of(part, device)
    return lambda q, k, v: padded(q, k, v, lengths=lengths)


MADE = {"sdpa": by_sdpa, "flex": by_flex, "attndsl": by_attndsl}


def run_block(
    block: nn.Module, x: torch.Tensor, condition: torch.Tensor | None, attend: Attend
) -> torch.Tensor:
    """One layer."""
    found: torch.Tensor = block(x, attend) if condition is None else block(x, condition, attend)
    return found


class Training:
    """One model and optimizer, and a step for each way."""

    def __init__(self, part: Part, device: str) -> None:
        torch.manual_seed(0)
        self.part, self.device = part, device
        self.model: Any = MODELS[part.kind](part).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.batch = batch_of(part, device)
        backend = "inductor" if device == "cuda" else "aot_eager"
        self.embed, self.loss_of, self.layer = (
            torch.compile(each, backend=backend)
            for each in (self.model.embed, self.model.loss, run_block)
        )

    def loss(self, attend: Attend) -> torch.Tensor:
        """Of the weights as they are; gradients are left in the parameters."""
        with torch.autocast(self.device, torch.bfloat16):
            x, condition = self.embed(self.batch)
            for block in self.model.blocks:
                x = self.layer(block, x, condition, attend)
            loss: torch.Tensor = self.loss_of(x, condition, self.batch)
        loss.backward()
        return loss.detach()

    def step(self, attend: Attend) -> None:
        """A step of the optimizer."""
        self.loss(attend)
        self.optimizer.step()
        self.forget()

    def forget(self) -> None:
        """The gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def milliseconds(self, attend: Attend) -> float:
        """Mean of a few steps."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.step(attend)
        self.wait()
        return (time.perf_counter() - begin) / STEPS * 1e3

    def peak_gb(self, attend: Attend) -> float | None:
        """Most memory that torch had allocated in a step."""
        if self.device != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        self.step(attend)
        self.wait()
        return torch.cuda.max_memory_allocated() / 1e9

    def wait(self) -> None:
        """For all that was started on the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(cell: worker.Cell, tiny: bool) -> worker.Found:
    """A row for each way of one model; without rounds a step of each alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training = Training(part_of(cell["model"], tiny), device)
    rows: dict[str, dict[str, Any]] = {way: {"attention": way} for way in WAYS}
    ready: dict[str, Attend] = {}
    for way in WAYS:
        try:
            attend = MADE[way](training.part, device)
            rows[way]["loss"] = float(training.loss(attend))
            ready[way] = attend
        except Exception as error:  # What a machine does not run is a finding, not the end.
            rows[way]["why"] = f"{type(error).__name__}: {str(error)[:200]}"
        training.forget()
    times: dict[str, list[float]] = {way: [] for way in ready}
    for way, attend in ready.items() if cell["rounds"] else ():
        for _ in range(WARM_UP):
            training.step(attend)
        rows[way]["peak_gb"] = training.peak_gb(attend)
    for _ in range(cell["rounds"]):
        for way, attend in ready.items():
            times[way].append(training.milliseconds(attend))
    for way, own in times.items():
        if own:
            rows[way]["step_ms"] = statistics.median(own)
    return {"rows": list(rows.values())}


def part_of(name: str, tiny: bool) -> Part:
    """A model's sizes."""
    part = PARTS[name]
    return replace(part, **TINY, size=TINY_SIZES[part.kind]) if tiny else part


def rows_of(name: str, found: worker.Found) -> list[dict[str, Any]]:
    """The rows of one model in the result file; one that says why there are none."""
    if "why" in found:
        return [{"model": name, "why": found["why"]}]
    steps = {row["attention"]: row.get("step_ms") for row in found["rows"]}
    rows = []
    for row in found["rows"]:
        own, other = row.get("step_ms"), steps.get("sdpa")
        ratio = {"ratio": other / own} if own and other else {}
        rows.append({"model": name, **row, **ratio})
    return rows


def warm(names: Sequence[str]) -> None:
    """Let all models run once side by side, so that compiled code lies in the caches."""
    threads = max(1, (os.cpu_count() or 1) // max(1, len(names)))
    environ = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    each = [["--worker", json.dumps([{"model": name, "rounds": 0}])] for name in names]
    worker.side_by_side(Path(__file__), each, environ, WARM_SECONDS)


def seconds_for(device: str, begin: float) -> float:
    """How long the next model may take in a run since ``begin``; 0 for not at all."""
    if device != "cuda":
        return worker.CELL_SECONDS
    left = begin + ALL_SECONDS - time.monotonic()
    return min(PART_SECONDS, left) if left > _LEAST_SECONDS else 0.0


def main() -> int:
    """Parse the command line, warm up, measure, print and write; 1 if a model has no figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="names of models, by commas")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="models of two small layers")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker.serve(json.loads(options.worker), lambda cell: measure(cell, options.tiny))
        return 0
    names = options.only.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"there is no model '{unknown[0]}'; there are: {', '.join(PARTS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begin = time.monotonic()
    if device == "cuda" and not options.tiny:
        warm(names)
        print(f"compiled in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    flags = ["--tiny"] * options.tiny
    for name in names:
        seconds = seconds_for(device, begin)
        # A process for each: what one model leaves in memory is no part of the next one's peak.
        cells = [{"model": name, "rounds": options.rounds}] if seconds else []
        rows += [] if cells else rows_of(name, {"why": "no time was left"})
        for _, found in worker.measured(Path(__file__), cells, flags, seconds):
            rows += rows_of(name, found)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        common.write("training", device, rows, options.output)
    common.print_table(rows, [name for name in COLUMNS if any(name in row for row in rows)])
    ours = [row for row in rows if row.get("attention", "attndsl") == "attndsl"]
    return int(any("step_ms" not in row for row in ours))


if __name__ == "__main__":
    sys.exit(main())
