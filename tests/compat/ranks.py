"""One rank of tests/compat/test_distributed.py: ``python ranks.py FOLDER RANK RANKS``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import attndsl

# Odd, so that ranks hold shards of different sizes.
HEADS, DIM = 3, 8
WIDTH = HEADS * DIM


class Block(nn.Module):
    """Attention with a slope for each head, learned."""

    program = attndsl.compile(
        "tensor slope[heads]: float; mask = causal(); score = score - slope[h] * (q - kv)"
    )

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.rand(HEADS))
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.inner(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return x + self.outer(self.program(q, k, v, slope=self.slope).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A block, and one whose activations are computed again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=False)


def gradients(model, inputs, whole=lambda grad: grad):
    """By name, of the mean over the batch."""
    model.zero_grad()
    model(inputs).square().mean().backward()
    return {
        name.removeprefix("module."): whole(p.grad).detach().clone()
        for name, p in model.named_parameters()
    }


def parallel(state, part, ranks):
    """Gradients of the model replicated and sharded, in a process group that there is already."""
    found = {}
    model = Model()
    model.load_state_dict(state)
    found["ddp"] = gradients(DistributedDataParallel(model), part)
    mesh = init_device_mesh("cpu", (ranks,))
    model = Model()
    model.load_state_dict(state)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    sharded = [p.to_local().numel() < p.numel() for p in model.parameters()]
    assert all(sharded) or ranks == 1
    found["fsdp"] = gradients(model, part, lambda grad: grad.full_tensor())
    return found


def main(folder, rank, ranks):
    state, batch = torch.load(folder / "inputs")
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", store, rank=rank, world_size=ranks)
    torch.save(parallel(state, batch.chunk(ranks)[rank], ranks), folder / f"rank{rank}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
