"""What a trainer of torchtitan is built of, beside its model: data, no tokenizer, and losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer

from .titan_trainer import ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator


class Loader(BaseDataLoader):
    """Rows of random tokens in documents, the same few again and again."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(
        self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int,
        local_batch_size: int, **unused: Any,
    ) -> None:  # fmt: skip
        self.ranks, self.rank = dp_world_size, dp_rank
        self.length, self.batch = seq_len, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        drawn = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 2048, (ROWS, self.length + 1), generator=drawn)
        begins = torch.rand(ROWS, self.length, generator=drawn) < 5 / self.length
        begins[:, 0] = True
        places = torch.arange(self.length).expand(ROWS, -1)
        positions = places - torch.where(begins, places, 0).cummax(1).values
        first = self.rank * self.batch
        while True:
            mine = torch.arange(first, first + self.batch) % ROWS
            yield {"input": ids[mine, :-1], "positions": positions[mine]}, ids[mine, 1:]
            first += self.ranks * self.batch

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict


class Nothing(BaseTokenizer):
    """A tokenizer that nobody asks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, *, tokenizer_path: str) -> None:
        self.path = tokenizer_path

    def encode(self, *arguments: Any, **options: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *arguments: Any, **options: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


class Losses(MetricsProcessor):
    """Keeps the losses of all processes together."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Any, **given: Any) -> None:
        super().__init__(config, **given)
        self.losses: list[float] = []
        self.validated: list[float] = []

    def log(self, step: int, global_avg_loss: float, *rest: Any, **more: Any) -> None:
        self.losses.append(global_avg_loss)

    def log_validation(self, loss: float, step: int, *rest: Any) -> None:
        self.validated.append(loss)
