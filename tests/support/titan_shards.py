"""Steps of torchtitan's Llama debug model by processes that share sequences."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

LENGTH, BATCH, HEADS, DIM = 128, 2, 16, 16


def work(rank: int, world: int, folder: str) -> None:
    """Write the losses of three steps, which are those of all ranks together."""
    from torchtitan.models.llama3 import llama3_configs

    from attndsl.parallel import ContextParallel, Shape
    from attndsl.torchtitan import Attention

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    config = llama3_configs["debugmodel"](attn_backend="varlen")
    for layer in config.layers:
        layer.attention.inner_attention = Attention.Config(program="q - kv < 40")
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    modules = [layer.attention.inner_attention for layer in model.layers.values()]
    positions = torch.cat([torch.arange(70), torch.arange(LENGTH - 70)]).expand(BATCH, -1)
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 2048, (BATCH, LENGTH + 1), generator=drawn)
    masks = model.get_attention_masks(positions)
    data = {"ids": ids[:, :-1], "labels": ids[:, 1:], "positions": positions}
    if world > 1:
        cp = ContextParallel(dist.group.WORLD)
        for module in modules:
            module.over(cp)
        data = cp.shard(
            data, dict.fromkeys(data, 1), programs=[module.attention for module in modules],
            shape=Shape(BATCH, HEADS, HEADS, DIM, DIM),
            captures=modules[0].captures(masks, BATCH, LENGTH),
        )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        logits = model(data["ids"], positions=data["positions"], attention_masks=masks)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), data["labels"].flatten(), reduction="sum"
        )
        (loss / (BATCH * LENGTH)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        total = loss.detach() / (BATCH * LENGTH)
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    Path(folder, f"losses{world}.{rank}.json").write_text(json.dumps(losses), "utf-8")
    dist.destroy_process_group()
