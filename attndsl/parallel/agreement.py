"""Whether all ranks plan the same: one all-gather of digests, and one error on all of them.

Ranks that plan otherwise would wait for each other for ever, or read each other's rows wrongly.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from attndsl.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

FAILED = "failure"
"""The field of what went wrong on a rank; ``None`` where nothing did."""


def digest(value: object) -> int:
    """63 bits that tell values apart: of tensors, by their elements."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        text = f"{tuple(data.shape)} {data.dtype}".encode()
        text += data.flatten().view(torch.uint8).numpy().tobytes() if data.numel() else b""
    else:
        text = repr(value).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def agree(fields: Mapping[str, object], group: ProcessGroup, device: torch.device) -> None:
    """Wait until all ranks have come here, and go on if they say the same.

    Args:
        fields: What is compared, by its name in the error. Names are the same on all ranks.
        group: The ranks.
        device: Where tensors of the group's collectives lie.

    Raises:
        ArgumentError: On all ranks: they differ, or one of them has failed.
    """
    ranks = dist.get_world_size(group)
    own = torch.tensor([digest(x) for x in fields.values()], device=device)
    found = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(found, own, group)
    table = torch.stack(found).tolist()
    columns = list(zip(*table, strict=True))
    names = list(fields)
    failed = [rank for rank, x in enumerate(columns[names.index(FAILED)]) if x != digest(None)]
    if failed:
        raise ArgumentError(
            f"{_ranks(failed)} could not plan its part of the call",
            hint="the error there says why",
        )
    for name, column in zip(names, columns, strict=True):
        common = max(column, key=lambda x: (column.count(x), -column.index(x)))
        others = [rank for rank, x in enumerate(column) if x != common]
        if others:
            raise ArgumentError(
                f"{_ranks(others)} has another {name} than the other ranks of the sequence",
                hint="all ranks of one sequence make the same calls, with the same programs, "
                "lengths, params, masks and seeds",
            )


def _ranks(some: list[int]) -> str:
    return "rank " + " and ".join(map(str, some))
