"""Train a small character model whose attention comes from a configuration file.

    python examples/char_model/train.py [--steps 500] [--device cuda] [--backend triton]

A transformer in plain torch; model.yaml says what each layer attends to. It reads Python's own
documentation, shows its loss fall, and writes a few lines of its own with a key-value cache.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

import attndsl

from text import ALPHABET, gather

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl import Attention

CONFIG = Path(__file__).with_name("model.yaml")
LAYERS = ("local", "global", "local", "global")
WIDTH, HEADS, LENGTH, BATCH = 128, 4, 96, 16
LEARNING_RATE = 3e-3
BARS = "▁▂▃▄▅▆▇█"


class Layer(nn.Module):
    """Attention and a feed-forward part, each added to what comes in."""

    def __init__(self, attention: Attention) -> None:
        """A layer that attends as ``attention`` says."""
        super().__init__()
        self.attention = attention
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None) -> torch.Tensor:
        """(batch, length, WIDTH) to the same; a cache holds keys and values of positions before."""
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        before = 0
        if cache is not None:
            if cache:
                before = cache[0].shape[2]
                k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            cache[:] = k, v
        # The program uses positions. The offset is the position of the first of these queries.
        attended = self.attention(q, k, v, q_offset=before)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(x)


class Model(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, backend: str) -> None:
        """Layers as LAYERS and the configuration say."""
        super().__init__()
        attention = attndsl.load(CONFIG, backend=backend)
        self.embedding = nn.Embedding(len(ALPHABET), WIDTH)
        self.layers = nn.ModuleList(Layer(attention[name]) for name in LAYERS)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(
        self, text: torch.Tensor, caches: list[list[torch.Tensor]] | None = None
    ) -> torch.Tensor:
        """(batch, length) to (batch, length, characters)."""
        x = self.embedding(text)
        for number, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[number])
        return self.head(self.norm(x))

    @torch.no_grad()
    def write(self, start: str, count: int) -> str:
        """``count`` characters that might follow ``start``, one at a time through caches."""
        device = self.embedding.weight.device
        generator = torch.Generator().manual_seed(1)
        caches: list[list[torch.Tensor]] = [[] for _ in self.layers]
        new = torch.tensor([[ALPHABET.index(c) for c in start]], device=device)
        text = start
        for _ in range(count):
            chances = torch.softmax(self(new, caches)[0, -1].float().cpu() / 0.7, -1)
            choice = int(torch.multinomial(chances, 1, generator=generator))
            text += ALPHABET[choice]
            new = torch.tensor([[choice]], device=device)
        return text


def loss_of(model: Model, data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mean cross-entropy of a random batch, in nats a character."""
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
    rows = data[starts[:, None] + torch.arange(LENGTH + 1)].to(model.embedding.weight.device)
    return functional.cross_entropy(
        model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten()
    )


def train(model: Model, data: torch.Tensor, steps: int) -> list[float]:
    """Train for ``steps`` batches; the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    warm = max(1, min(20, steps // 5))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * min(s / steps, 1))),
    )
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    bar, report = progress(steps)
    with bar:
        for _ in range(steps):
            loss = loss_of(model, data, generator)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            report(losses)
    return losses


def progress(steps: int) -> tuple[object, Callable[[list[float]], None]]:
    """A progress bar on a terminal, a line now and then elsewhere."""
    if not sys.stdout.isatty():
        every = max(1, steps // 10)

        def line(losses: list[float]) -> None:
            if len(losses) % every == 0:
                print(f"step {len(losses):4} of {steps}: loss {losses[-1]:.3f}", flush=True)

        return nullcontext(), line
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("loss {task.fields[loss]:.3f}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    task = bar.add_task("", total=steps, loss=math.nan)
    return bar, lambda losses: bar.update(task, completed=len(losses), loss=losses[-1])


def curve(losses: list[float], width: int = 60) -> str:
    """The losses as a line of bars, each the mean of its part."""
    width = min(width, len(losses))
    edges = [round(i * len(losses) / width) for i in range(width + 1)]
    means = [mean(losses[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / ((high - low) or 1)
    return "".join(BARS[round((value - low) * scale)] for value in means)


def mean(values: list[float]) -> float:
    """Their mean."""
    return sum(values) / len(values)


def main(arguments: list[str] | None = None) -> int:
    """Train and write; 1 if the loss did not fall as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto", help="auto, reference or triton")
    parser.add_argument("--write", type=int, default=400, help="characters to write at the end")
    options = parser.parse_args(arguments)
    if options.steps < 10:
        parser.error("give at least 10 steps")

    begin = time.perf_counter()
    torch.manual_seed(0)
    text = gather()
    if len(text) < 200_000:
        parser.error(f"only {len(text)} characters of documentation are installed here")
    data = torch.tensor(bytearray(text.encode("ascii")), dtype=torch.uint8)
    table = torch.zeros(256, dtype=torch.long)
    table[torch.tensor([ord(c) for c in ALPHABET])] = torch.arange(len(ALPHABET))
    data = table[data.long()]
    held = len(data) // 20
    model = Model(options.backend).to(options.device)
    count = sum(p.numel() for p in model.parameters())
    print(f"text: {len(text)} characters of documentation; model: {count} parameters")
    print(f"attention of the layers ({CONFIG.name}):")
    for name in dict.fromkeys(LAYERS):
        program = model.layers[LAYERS.index(name)].attention
        print(f"  {name:<7} {'; '.join(program.text.strip().splitlines())}")

    losses = train(model, data[:-held], options.steps)
    some = max(1, options.steps // 20)
    start, end = mean(losses[:some]), mean(losses[-some:])
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        unseen = mean([loss_of(model, data[-held:], generator).item() for _ in range(8)])
    print(f"\nloss  {curve(losses)}")
    print(f"      {start:.3f} at first, {end:.3f} at the end, {unseen:.3f} on text not trained on")
    print(f"      ({time.perf_counter() - begin:.0f} s; guessing would be {math.log(96):.3f})")
    print(f"\nwritten by the model:\n{model.write('Return the ', options.write)}")
    # The frequencies of letters alone bring the loss to about 3.1. A few steps need not get there.
    wanted = 0.6 * start if options.steps >= 150 else 0.97 * start
    if not end < wanted:
        print(f"\nthe loss did not fall to {wanted:.3f}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
