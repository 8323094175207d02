"""Train on sequences that several processes share: FSDP2, and context parallelism.

    python examples/long/train.py [--ranks 4] [--cp 2] [--steps 5] [--length 512]
    torchrun --nproc-per-node 8 examples/long/train.py --cp 4 --device cuda --length 131072

Each group of ``--cp`` processes holds the rows of the same sequences. There are as many groups as
that leaves, and each has its share of the batch. Weights are sharded over all of them. The losses
are those of one process (``--ranks 1``): rows of packed documents, one layer that sees its whole
document, and one with a window.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import attndsl
from attndsl.parallel import ContextParallel, Shape

DOCUMENTS = "tensor document[batch, q_len]: int\nmask = document[b, q] == document[b, kv]\n"
WHOLE = attndsl.compile(DOCUMENTS + "mask = causal()\nscore = score + alibi()")
NEAR = attndsl.compile(DOCUMENTS + "mask = causal() and q - kv < 64\nscore = softcap(score, 20.0)")
BATCH, HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 4, 4, 2, 16, 64, 256


class Layer(torch.nn.Module):
    """A layer whose attention takes this process's rows."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = torch.nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        """Of this process's rows ``x`` (batch, rows, width)."""
        heads = self.qkv(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        # The documents of the whole sequence: captured tensors are read by logical position.
        out = self.attention(q, k, v, document=document)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    """A small decoder of bytes. ALiBi tells its positions."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Layer(cp(attention)) for attention in (WHOLE, NEAR))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, document: torch.Tensor
    ) -> torch.Tensor:
        """What the rows' losses add up to."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, document)
        logits = self.head(x).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")


def batch_of(step: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes (batch, length + 1), the same on all ranks, and the document of each position."""
    drawn = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 32, (BATCH, length + 1), generator=drawn)
    begins = torch.rand(BATCH, length, generator=drawn) < 6 / length
    return tokens, begins.cumsum(1)


def train(options: argparse.Namespace) -> None:
    """Print the losses of all steps, which are those of all ranks together."""
    ranks, kind = dist.get_world_size(), options.device
    sizes = ranks // options.cp, options.cp
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"])
    torch.manual_seed(0)
    model = Model(cp).to(kind)
    together = mesh["dp", "cp"]._flatten("dp_cp")
    for part in (*model.layers, model):
        fully_shard(part, mesh=together)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    each = BATCH // mesh["dp"].size()
    first = each * mesh["dp"].get_local_rank()
    for step in range(options.steps):
        batch = batch_of(step, options.length)
        tokens, document = (x[first : first + each].to(kind) for x in batch)
        rows = cp.shard(
            {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, {"tokens": 1, "labels": 1},
            programs=[WHOLE, NEAR], shape=Shape(each, HEADS, KV_HEADS, DIM, DIM),
            document=document,
        )  # fmt: skip
        total = model(rows["tokens"], rows["labels"], document)
        # FSDP takes the mean over ranks, which may hold different numbers of rows.
        (total * (ranks / (BATCH * options.length))).backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = total.detach() / (BATCH * options.length)
        dist.all_reduce(shown)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {shown.item():.6f}", flush=True)
    if dist.get_rank() == 0:
        print(cp.explain())


def work(rank: int, options: argparse.Namespace, store: str | None = None) -> None:
    """One process: of ``--ranks``, which meet in a file, or one that torchrun has started."""
    backend = "gloo"
    if options.device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    if store is None:
        dist.init_process_group(backend)
    else:
        torch.set_num_threads(1)
        shared = dist.FileStore(store, options.ranks)
        dist.init_process_group(backend, store=shared, rank=rank, world_size=options.ranks)
    train(options)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Start the processes, or be one of those that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, default=4, help="processes, where torchrun starts none"
    )
    parser.add_argument("--cp", type=int, default=2, help="processes that share a sequence")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=512, help="rows of a sequence")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    started = "RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if started else options.ranks
    options.cp = min(options.cp, ranks)
    if min(ranks, options.cp, options.steps, options.length) < 1:
        parser.error("numbers of processes, steps and rows are 1 or more")
    if ranks % options.cp or BATCH % (ranks // options.cp):
        parser.error(
            f"{ranks} processes are no groups of {options.cp} that share {BATCH} sequences: "
            f"choose --cp so that processes / cp divides {BATCH}"
        )
    if started:
        work(int(os.environ["LOCAL_RANK"]), options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, str(Path(folder, "store"))), ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
