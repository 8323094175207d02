"""Under another default device, results are those of the tensors' own device.

The default is `meta` here, where nothing has values: a tensor that is made there by mistake cannot
be copied back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import attndsl

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = """
param window: int = 5
tensor slope[heads]: float
tensor doc[batch, kv_len]: int
mask = causal() and (q - kv < window or kv < 2) and doc[b, q] == doc[b, kv]
score = softcap(score, 20.0) - exp(slope[h]) * (q - kv)
"""


@pytest.fixture
def elsewhere() -> Iterator[None]:
    with torch.device("meta"):
        assert torch.zeros(1).is_meta
        yield


def given(
    dtype: torch.dtype = torch.float32,
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    qkv = tuple(
        torch.randn(1, 2, 24, 8, generator=generator, device="cpu").to(dtype) for _ in range(3)
    )
    doc = (torch.arange(24, device="cpu") // 10)[None]
    return qkv, {"slope": torch.full((2,), -2.0, device="cpu"), "doc": doc}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_and_comparisons(elsewhere: None, dtype: torch.dtype) -> None:
    qkv, captures = given(dtype)
    attention = attndsl.compile(TEXT)
    assert attention(*qkv, **captures).device.type == "cpu"
    found = attndsl.compare(attention, *qkv, return_lse=True, **captures)
    assert found.ok, found
    assert found.device == "cpu"


def test_plain_masks(elsewhere: None) -> None:
    qkv, _ = given()
    assert attndsl.compile("causal()")(*qkv).device.type == "cpu"


def test_pictures_and_what_is_made_up(elsewhere: None) -> None:
    captures = given()[1]
    attention = attndsl.compile(TEXT)
    drawn = attention.plot(q_len=24, kv_len=24, block_m=8, block_n=8, **captures)
    with torch.device("cpu"):
        assert drawn == attention.plot(q_len=24, kv_len=24, block_m=8, block_n=8, **captures)
        html = attention._repr_html_()
    assert attention._repr_html_() == html
    assert "<svg" in html


def test_views_and_reach(elsewhere: None) -> None:
    (q, k, _), captures = given()
    attention = attndsl.compile(TEXT)
    assert attention.mask(24, 24, doc=captures["doc"]).device.type == "cpu"
    assert attention.scores(q, k, **captures).device.type == "cpu"
    assert attention.weights(q, k, **captures).device.type == "cpu"
    assert "work" in attention.explain(q_len=24, kv_len=24, doc=captures["doc"])
