"""Agreement of all ranks on a plan: one all-gather of digests, and one error on all of them.

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

_MOST_FIELDS = 15
"""Room for them: ranks that compare unlike things exchange as many numbers."""


def digest(value: object) -> int:
    """63 bits that tell values apart: of tensors, by their elements."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        text = f"{tuple(data.shape)} {data.dtype}"
        elements = data.flatten().view(torch.uint8).numpy().data if data.numel() else None
    else:
        text, elements = repr(value), None
    # Made to find differences fast, and not to withstand anyone.
    found = hashlib.sha1(text.encode(), usedforsecurity=False)
    if elements is not None:
        found.update(elements)
    return int.from_bytes(found.digest()[:8], "big") >> 1


def agree(
    step: str,
    fields: Mapping[str, object],
    problem: Exception | None,
    group: ProcessGroup,
    device: torch.device,
) -> None:
    """Wait until all ranks have come here, and go on if they say the same.

    Args:
        step: What is compared, in words: ranks may be at different places.
        fields: What is compared, by its name in the error; empty where this rank has failed.
        problem: What went wrong on this rank. It is raised here.
        group: The ranks.
        device: Where tensors of the group's collectives lie.

    Raises:
        ArgumentError: On all ranks: they differ, or another one has failed.
    """
    ranks, names = dist.get_world_size(group), list(fields)
    told = [0, digest(step)]
    try:
        told += map(digest, fields.values())
    except Exception as error:
        problem = problem or error
    told[0] = int(problem is not None)
    own = torch.tensor(told + [0] * (_MOST_FIELDS - len(told)), device=device)
    found = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(found, own, group)
    if problem is not None:
        raise problem
    columns = list(zip(*torch.stack(found).tolist(), strict=True))
    failing = [rank for rank, x in enumerate(columns[0]) if x]
    if failing:
        raise ArgumentError(
            f"{_ranks(failing)} could not plan its part of the call",
            hint="the error there says why",
        )
    for name, column in zip(["step", *names], columns[1:], strict=False):
        common = max(column, key=lambda x: (column.count(x), -column.index(x)))
        others = [rank for rank, x in enumerate(column) if x != common]
        if others:
            here = f"; this rank is at {step}" if name == "step" else ""
            raise ArgumentError(
                f"{_ranks(others)} has another {name} than the other ranks of the sequence{here}",
                hint="all ranks of one sequence make the same calls, with the same programs, "
                "lengths, params, masks and seeds",
            )


def _ranks(some: list[int]) -> str:
    return "rank " + " and ".join(map(str, some))
