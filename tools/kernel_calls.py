"""What the calls of ``kernel_cases.py`` are given beside operands and captures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernel_cases import LENGTH

if TYPE_CHECKING:
    from kernel_cases import Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def options_of(case: Case, batch: int = 2, device: str = "cpu") -> dict[str, Any]:
    """Arguments of the call; ``batch`` is even."""
    found = dict(case.call)
    length, kv_len = case.sizes.get("length", LENGTH), case.sizes.get("kv_len", LENGTH)
    if found.get("q_offset") == "tensor":
        found["q_offset"] = torch.tensor(512, device=device)
    if found.get("q_offset") == "entries":
        starts = torch.tensor([512, 300], dtype=torch.int32, device=device)
        found["q_offset"] = starts.repeat(batch // 2)
    if found.get("q_index"):
        found["q_index"] = torch.arange(length, dtype=torch.int32, device=device)
    if found.get("kv_index"):
        found["kv_index"] = torch.arange(kv_len, dtype=torch.int32, device=device)
    if found.get("out_dtype"):
        found["out_dtype"] = DTYPES[found["out_dtype"]]
    return found
