"""Random programs called within a graph of torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import attndsl


@dataclass(frozen=True, slots=True)
class InGraph:
    """Calls ``attention`` as one graph, which is new for each call."""

    attention: attndsl.Attention

    def __call__(self, **arguments: Any) -> Any:
        """As of ``attention``."""
        attention = self.attention

        def call(given: dict[str, Any]) -> Any:
            return attention(**given)

        torch._dynamo.reset()
        try:
            return torch.compile(call, fullgraph=True, backend="aot_eager")(arguments)
        except Exception:
            attention(
                **arguments
            )  # Dynamo says with an error of its own what a call is refused for.
            raise
