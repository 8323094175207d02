"""Checks whether a call is one of several processes, without torch's parts for these.

Those take long to import, and a process that has none of them has no such call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from attndsl.errors import UnsupportedError

_HOME = "torch.distributed.tensor"
OF_TORCH = torch._C._nn.scaled_dot_product_attention
"""Torch's own function, which ``torch.nn.functional`` has unless it was replaced."""


def is_dtensor(value: object) -> bool:
    """Return True if ``value`` is a ``torch.distributed.tensor.DTensor``."""
    # What has been imported is an attribute of its parent. To ask ``sys.modules`` instead would
    # make torch.compile look at the thousands of modules there are, for each graph.
    home: Any = getattr(torch.distributed, "tensor", None)
    return home is not None and isinstance(value, home.DTensor)


def is_within_context_parallel() -> bool:
    """Return True if torch's ``context_parallel`` is on."""
    now = functional.scaled_dot_product_attention
    return now is not OF_TORCH and str(getattr(now, "__module__", "")).startswith(_HOME)


def refuse_context_parallel() -> None:
    """Refuse calls within torch's ``context_parallel``, which shards their rows and keys.

    It replaces torch's own function by one of its modules, and knows of no other attention. So
    such a call would be that of each process's keys alone.

    Raises:
        UnsupportedError: It is on.
    """
    if is_within_context_parallel():
        raise UnsupportedError(
            "torch's context_parallel has sharded the rows and keys, and it replaces only torch's "
            "own attention: this call would see the keys of one process",
            hint="leave the context, gather k and v, and say which rows these are: "
            "q_index=positions, or q_offset and q_len",
        )
