"""Tile maps as masks of FlexAttention: which function their PARTIAL tiles evaluate."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.errors import UnsupportedError
from attndsl.inspection.tilemap import TileMap


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 5)


@pytest.fixture
def made():
    return attndsl.compile("causal() and q - kv < 5").tiles(32, 32, 8, 8)


def test_the_mask_is_the_one_that_is_passed(made):
    assert made.to_flex().mask_mod is made.mask_mod
    assert made.to_flex(window).mask_mod is window


def test_a_map_of_a_file_needs_a_mask(made, tmp_path):
    made.save(tmp_path / "tiles.npz")
    found = TileMap.load(tmp_path / "tiles.npz")
    with pytest.raises(UnsupportedError, match="no mask function"):
        found.to_flex()
    blocks = found.to_flex(window)
    assert blocks.mask_mod is window
    assert torch.equal(blocks.kv_indices, made.to_flex().kv_indices)
