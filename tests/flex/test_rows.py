"""Reductions of short captured rows, against torch on the whole."""

import numpy as np
import pytest
import torch

from attndsl.errors import ArgumentError, TraceError
from attndsl.flex import create_block_mask, flex_attention

B, H, L, D = 2, 3, 12, 4
TABLE = torch.linspace(-1, 1, 2 * 5).reshape(2, 5)
ROWS = torch.linspace(-2, 1, 3 * 5).reshape(3, 5)
LONG = torch.zeros(3, 64)
LISTED = torch.tensor([1, 5, 7])
J = torch.arange(L)[:, None]
FLAGS = torch.tensor([[True, False, True], [True, True, True]])

CASES = {
    "sum": (lambda b, h, i, j: TABLE[b].sum(-1), TABLE.sum(-1)[:, None, None, None]),
    "mean": (lambda b, h, i, j: TABLE[b].mean(dim=-1), TABLE.mean(-1)[:, None, None, None]),
    "prod": (lambda b, h, i, j: ROWS[h].prod(), ROWS.prod(-1)[:, None, None]),
    "amax": (lambda b, h, i, j: ROWS[h].amax(-1), ROWS.amax(-1)[:, None, None]),
    "amin": (lambda b, h, i, j: torch.amin(ROWS[h], -1), ROWS.amin(-1)[:, None, None]),
    "any": (lambda b, h, i, j: FLAGS[b].any(-1), FLAGS.any(-1)[:, None, None, None]),
    "all": (lambda b, h, i, j: FLAGS[b].all(), FLAGS.all(-1)[:, None, None, None]),
    "flags": (lambda b, h, i, j: FLAGS[b].sum(), FLAGS.sum(-1)[:, None, None, None]),
    "dot": (
        lambda b, h, i, j: torch.dot(TABLE[b], ROWS[h]),
        torch.einsum("bd,hd->bh", TABLE, ROWS)[:, :, None, None],
    ),
    "isin": (lambda b, h, i, j: torch.isin(j, LISTED), torch.isin(torch.arange(L), LISTED)),
}


@pytest.mark.parametrize("name", CASES)
def test_reductions(name):
    function, values = CASES[name]
    q = torch.zeros(B, H, L, D)
    _, lse = flex_attention(
        q, q, q, lambda s, b, h, i, j: s + function(b, h, i, j), return_lse=True
    )
    wanted = values.float().expand(B, H, L, L).logsumexp(-1)
    torch.testing.assert_close(lse, wanted)


MANY = torch.randint(-2, L + 2, (B, L, 40))
MANY[:, :, :] = torch.where(MANY % 3 == 0, MANY, -1)
FEW = torch.randint(0, L // 4, (H, 2, 33), dtype=torch.int32)
TURNED = MANY.transpose(1, 2).contiguous()


@pytest.mark.parametrize(
    ("mod", "wanted"),
    [
        (lambda b, h, i, j: torch.isin(j, MANY[b, i]), (MANY[..., None, :] == J).any(-1)[:, None]),
        (
            lambda b, h, i, j: (i >= j) & torch.isin(j // 4, FEW[h][i // 6]),
            (J[:, 0] <= J) & (FEW[:, J[:, 0] // 6][:, :, None] == J // 4).any(-1),
        ),
    ],
)
def test_long_rows_of_ints_are_lists(mod, wanted):
    q, k, v = (torch.randn(B, H, L, D) for _ in range(3))
    wanted = wanted.expand(B, H, L, L)
    block_mask = create_block_mask(mod, B, H, L, L, device="cpu")
    out = flex_attention(q, k, v, block_mask=block_mask)
    score = (q @ k.mT * D**-0.5).masked_fill(~wanted, float("-inf"))
    torch.testing.assert_close(out, score.softmax(-1).nan_to_num(0.0) @ v)


@pytest.mark.parametrize(
    ("function", "match", "hint"),
    [
        (lambda j: torch.isin(j, TURNED[0, :, j]), "row of 40", "before the call"),
        (lambda j: torch.isin(j, torch.zeros(40)), "row of 40", "before the call"),
        (lambda j: LONG[j].sum(-1), "row of 64", "before the call"),
        (lambda j: torch.stack([j, j]), "'stack'", "torch.where"),
        (lambda j: torch.bucketize(j, LISTED), "'bucketize'", "before the call"),
        (lambda j: torch.isin(j, torch.zeros(2, 2)), "'isin'", "one dim"),
        (lambda j: (ROWS[j] == j).any(), "1 dim", "write torch.isin(x, row)"),
    ],
)
def test_what_is_not_written_out(function, match, hint):
    q = torch.zeros(B, H, L, D)
    with pytest.raises(TraceError, match=match) as caught:
        flex_attention(q, q, q, lambda s, b, h, i, j: s + function(j))
    assert hint in caught.value.hint


def test_numbers_of_other_kinds():
    q = torch.randn(1, 1, L, D, generator=torch.Generator().manual_seed(0))
    wanted = flex_attention(q, q, q, scale=0.5)
    for scale in (np.float32(0.5), torch.tensor(0.5), np.float64(0.5)):
        assert torch.equal(flex_attention(q, q, q, scale=scale), wanted)
    mask = create_block_mask(
        lambda b, h, i, j: i >= j, np.int64(1), None, torch.tensor(L), np.int32(L), device="cpu"
    )
    assert mask.shape == (1, 1, L, L)
    with pytest.raises(ArgumentError, match="Q_LEN is"):
        create_block_mask(lambda b, h, i, j: i >= j, 1, 1, np.float32(1.5), L)


@pytest.mark.parametrize("options", [{"BACKEND": "INVALID"}, {"fwd_BLOCK_M": "64"}])
def test_kernel_options_have_values_of_torch(options):
    q = torch.zeros(1, 1, L, D)
    with pytest.raises(ArgumentError, match="kernel option") as caught:
        flex_attention(q, q, q, kernel_options=options)
    assert caught.value.hint
