"""Strides of workspaces: padded where rows are long, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attndsl.errors import ArgumentError
from attndsl.layout import ALIGNMENT, THRESHOLD, pad_strides

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)


@pytest.mark.parametrize(
    ("strides", "sizes", "dtype", "expected"),
    [
        ((32752, 2047, 1), (2, 16, 2047), torch.float32, (32768, 2048, 1)),
        ((4064, 127, 1), (2, 32, 127), torch.float32, (4064, 127, 1)),
        ((32752, 1, 16), (2, 16, 2047), torch.float32, (32768, 1, 16)),
        ((2047, 1), (16, 2047), torch.float16, (2048, 1)),
        ((2049, 1), (16, 2049), torch.float16, (2112, 1)),
        ((2048, 1), (16, 2048), torch.float32, (2048, 1)),
        ((32752, 32752, 2047, 1), (2, 1, 16, 2047), torch.float32, (32768, 32768, 2048, 1)),
        ((25, 25, 5, 1), (256, 1, 5, 5), torch.float32, (25, 25, 5, 1)),
        ((1,), (30522,), torch.float32, (1,)),
        ((), (), torch.float32, ()),
    ],
)
def test_the_rule(strides, sizes, dtype, expected):
    assert pad_strides(strides, sizes, dtype) == expected


def test_channels_last_stays():
    image = torch.empty(2, 3, 37, 41).to(memory_format=torch.channels_last)
    assert pad_strides(image.stride(), image.shape, image.dtype) == image.stride()
    volume = torch.empty(2, 3, 7, 37, 41).to(memory_format=torch.channels_last_3d)
    assert pad_strides(volume.stride(), volume.shape, volume.dtype) == volume.stride()
    assert pad_strides((4551, 1, 123, 3), (1, 3, 37, 41), torch.float32) == (4551, 1, 123, 3)
    assert pad_strides((9999, 1, 123, 3), (1, 3, 37, 41), torch.float32) == (9999, 1, 123, 3)
    plain = torch.empty(2, 3, 37, 41)
    assert pad_strides(plain.stride(), plain.shape, plain.dtype) == (4608, 1536, 41, 1)


def test_strides_and_sizes_of_other_ranks_are_refused():
    with pytest.raises(ArgumentError, match=r"strides are \(4, 1\) and sizes are \(4,\)") as caught:
        pad_strides((4, 1), (4,), torch.float32)
    assert "one stride a dim" in caught.value.hint


@given(
    st.lists(st.integers(2, 3000), min_size=1, max_size=3), st.randoms(), st.sampled_from(DTYPES)
)
def test_padded_tensors_are_as_they_were_but_aligned(sizes, random, dtype):
    order = list(range(len(sizes)))
    random.shuffle(order)
    strides, dense = [0] * len(sizes), 1
    for dim in order:
        strides[dim], dense = dense, dense * sizes[dim]
    found = pad_strides(strides, sizes, dtype)
    unit = ALIGNMENT // dtype.itemsize
    span = 1
    for dim in order:
        assert found[dim] >= span, "elements would overlap"
        assert found[dim] < span + unit, "more is padded than one line a row"
        assert found[dim] <= THRESHOLD or found[dim] % unit == 0 or found == tuple(strides)
        span = found[dim] * sizes[dim]
    assert (found == tuple(strides)) == all(s <= THRESHOLD or s % unit == 0 for s in strides)
