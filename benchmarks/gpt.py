"""A training step of a GPT with attention by attndsl, SDPA and FlexAttention: time and memory.

    python benchmarks/gpt.py [--attention attndsl,sdpa,flex] [--layers 12] [--length 4096] ...

The defaults are a model of 124 M parameters (12 layers, 768 features, 12 heads, tied embeddings)
on 16 sequences of 4096 tokens: torch.compile, bf16 autocast, AdamW. All ways share one model and
one optimizer, and take turns in one process. q, k and v are views of one packed projection, and
the output goes back by ``transpose(1, 2).reshape``. ``step_ms`` is the median over turns of the
mean of ``--steps`` steps, ``peak_gb`` the most memory that torch had allocated in a step (10^9
bytes; GPUs alone). On a CPU it runs too, for tiny models; FlexAttention does not train there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

import common

if TYPE_CHECKING:
    from collections.abc import Callable

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

WARM_UP, ROUNDS = 3, 5
COLUMNS = ["attention", "step_ms", "tokens_per_second", "peak_gb", "why"]


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    vocabulary: int


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.packed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """(batch, length, width) of the same."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.packed(self.norms[0](x)).split(width, -1)
        )
        out = attend(q, k, v)
        x = x + self.out(out.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """A decoder whose first and last layer share their weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        for weight in (self.tokens.weight, self.places.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Mean loss of predicting each of ``ids`` (batch, length + 1) from those before it."""
        x = self.tokens(ids[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x, attend)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def by_attndsl(sizes: Sizes, device: str) -> Attend:
    """A compiled program."""
    import attndsl

    attend: Attend = attndsl.compile("causal()")
    return attend


def by_sdpa(sizes: Sizes, device: str) -> Attend:
    """Torch's own, whichever of its kernels it takes."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def by_flex(sizes: Sizes, device: str) -> Attend:
    """FlexAttention with a causal block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = sizes.length
    blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = flex_attention(q, k, v, block_mask=blocks)
        return found

    return attend


WAYS = {"attndsl": by_attndsl, "sdpa": by_sdpa, "flex": by_flex}


class Training:
    """One model and optimizer, and a compiled step for each way."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        torch.manual_seed(0)
        self.sizes, self.device = sizes, device
        self.model = GPT(sizes).to(device)
        fused = device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        shape = (sizes.batch, sizes.length + 1)
        self.ids = torch.randint(sizes.vocabulary, shape, device=device)

    def step_by(self, way: str) -> Callable[[], float]:
        """What makes one step and returns the loss, which is read where the clock stands still."""
        attend = WAYS[way](self.sizes, self.device)
        loss_of = torch.compile(lambda ids: self.model(ids, attend))

        def step() -> Any:
            with torch.autocast(self.device, torch.bfloat16):
                loss = loss_of(self.ids)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    def milliseconds(self, step: Callable[[], object], steps: int) -> float:
        """Mean of ``steps`` steps."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        self.wait()
        return (time.perf_counter() - begin) / steps * 1e3

    def peak_gb(self, step: Callable[[], object]) -> float | None:
        """Most memory that torch had allocated in a step."""
        if self.device != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        step()
        self.wait()
        return torch.cuda.max_memory_allocated() / 1e9

    def wait(self) -> None:
        """For all that was started on the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(sizes: Sizes, ways: list[str], steps: int, device: str) -> list[dict[str, Any]]:
    """A row for each way."""
    training = Training(sizes, device)
    runs, rows = {}, {way: {"attention": way} for way in ways}
    for way in ways:
        try:
            step = training.step_by(way)
            for _ in range(WARM_UP):
                loss = float(step())
        except Exception as error:  # What a machine does not run is a finding, not the end.
            training.optimizer.zero_grad(set_to_none=True)
            rows[way]["why"] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        rows[way] |= {"loss": loss, "peak_gb": training.peak_gb(step)}
        runs[way] = step
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(ROUNDS):
        for way, step in runs.items():
            times[way].append(training.milliseconds(step, steps))
    for way, own in times.items():
        found = statistics.median(own)
        tokens = sizes.batch * sizes.length / found * 1e3
        rows[way] |= {"step_ms": found, "tokens_per_second": tokens}
    return list(rows.values())


def main() -> int:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"layers": 12, "width": 768, "heads": 12, "batch": 16, "length": 4096}
    for name, default in {**defaults, "vocabulary": 50257, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default}")
    parser.add_argument("--attention", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    ways = options.attention.split(",")
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        parser.error(f"there is no attention {unknown[0]}; there are: {', '.join(WAYS)}")
    sizes = Sizes(
        options.layers, options.width, options.heads, options.batch, options.length,
        options.vocabulary,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = measure(sizes, ways, options.steps, device)
    facts = {name: getattr(options, name) for name in defaults}
    rows = [{**row, **facts} for row in rows]
    for row in rows:
        print(json.dumps(row), file=sys.stderr, flush=True)
    path = common.write("gpt", device, rows, options.output)
    common.print_table(rows, [name for name in COLUMNS if any(name in row for row in rows)])
    print(f"written to {path}")
    return int(any("why" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
