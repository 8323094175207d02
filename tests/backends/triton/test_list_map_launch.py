"""Maps of lists by a kernel are those that torch's operations make."""

from __future__ import annotations

import pytest
import torch

from attndsl.call.list_maps import _by_torch

launch = pytest.importorskip("attndsl.backends.triton.list_map_launch")


def lists(device):
    torch.manual_seed(0)
    yield "long rows", torch.randint(-5, 60, (3, 1500), device=device)
    yield "short rows", torch.randint(-5, 60, (2, 70, 3), device=device, dtype=torch.int32)
    yield "small ints", torch.randint(-5, 60, (2, 5, 9), device=device).to(torch.int8)
    yield "strides", torch.randint(-5, 60, (9, 40, 4), device=device)[::2, ::3].transpose(0, 2)
    yield "repeated", torch.randint(-5, 60, (1, 7), device=device).expand(300, 7)
    yield "no elements", torch.zeros(4, 0, dtype=torch.long, device=device)
    yield "no rows", torch.zeros(0, 4, dtype=torch.long, device=device)
    yield "far", torch.tensor([[-(1 << 62), 1 << 62, -1, 0, 47, 48, 1 << 31]], device=device)


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("place", range(8))
def test_maps_are_those_of_torch(device, place, shift):
    name, listed = list(lists(device))[place]
    width = 48
    found = launch.launch_list_map(listed, width, shift)
    wanted = _by_torch(listed.cpu(), width, shift)
    assert found.shape == (*listed.shape[:-1], width), name
    # All that is outside comes to the last element, which nobody looks up.
    assert torch.equal(found[..., :-1].cpu(), wanted[..., :-1]), name
    assert found.is_contiguous()
