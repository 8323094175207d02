"""dQ comes back from the order in which warpgroups add it up."""

from __future__ import annotations

import pytest
import torch

from attndsl.backends.hopper.around_backward import SUM_BLOCK, dq_from_sums, sum_of_heads


def place(head: int, row: int, column: int, padded: int, width: int) -> int:
    """Where ``library.add_to_sums`` adds: thread by thread, each four values of its fragment."""
    warp, lane_row, half = row % 64 // 16, row % 8, row % 16 // 8
    thread = warp * 32 + lane_row * 4 + column % 8 // 2
    block = (head * padded + row // 64 * 64) * width
    return block + column // 8 * 512 + thread * 4 + half * 2 + column % 2


@pytest.mark.parametrize(("width", "head_dim"), [(64, 40), (128, 128), (256, 192)])
@pytest.mark.parametrize("q_len", [100, 129])
def test_dq_from_sums(device, width, head_dim, q_len):
    heads, padded = 2, -(-q_len // 128) * 128
    wanted = torch.randn(heads, padded, width)
    order = [
        place(head, row, column, padded, width)
        for head in range(heads)
        for row in range(padded)
        for column in range(width)
    ]
    assert sorted(order) == list(range(wanted.numel()))
    sums = torch.empty(wanted.numel())
    sums[torch.tensor(order)] = wanted.flatten()
    # One batch entry of two heads, then two entries of one, whose rows alternate.
    for entry, head, row in ((0, q_len, 1), (1, 0, 2)):
        dq = torch.full((heads * q_len * head_dim,), float("nan"), device=device)
        checks = torch.ones(padded // 32 * heads, device=device)
        dq_from_sums[(padded // 32 * heads,)](
            sums.to(device), dq, checks, 2.0, entry, head, row, 2 if head else 1, q_len, head_dim,
            width, True,
        )  # fmt: skip
        assert (checks == 0).all()
        found = dq.cpu().view((2, q_len, head_dim) if head else (q_len, 2, head_dim))
        found = found if head else found.transpose(0, 1)
        assert torch.equal(found, 2.0 * wanted[:, :q_len, :head_dim])


def test_sums_that_are_not_finite_are_told(device):
    sums = torch.zeros(2 * 128 * 64, device=device)
    sums[64 * 32 * 3 + 5] = torch.inf
    dq, checks = torch.empty(2 * 128 * 64, device=device), torch.ones(8, device=device)
    dq_from_sums[(8,)](sums, dq, checks, 1.0, 0, 128, 1, 2, 128, 64, 64, True)
    assert checks.isnan().tolist() == [False] * 3 + [True] + [False] * 4


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(("kv_len", "width"), [(1, 40), (70, 64), (33, 80)])
def test_sums_of_heads(device, kv_len, width, group, by_rows):
    """In a memory order of heads, or of rows of all heads."""
    batch, kv_heads = 2, 3
    widths = (width, 24)
    parts = [torch.randn(batch, kv_heads * group, kv_len, n, device=device) for n in widths]
    out = [torch.full((batch, kv_heads, kv_len, n), float("nan"), device=device) for n in widths]
    if by_rows:
        out = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in out]
    rows = [step // x.shape[3] for x in out for step in x.stride()[:3]]
    programs = sum(-(-kv_len * n // SUM_BLOCK) for n in widths) * batch * kv_heads
    sum_of_heads[(programs,)](*parts, *out, *rows, kv_heads, kv_len, group, *widths, SUM_BLOCK)
    for found, of_heads in zip(out, parts, strict=True):
        torch.testing.assert_close(found, of_heads.unflatten(1, (kv_heads, group)).sum(2))
