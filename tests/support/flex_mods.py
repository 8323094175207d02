"""Masks and scores of FlexAttention's documentation.

Each entry of ``MODS`` makes a ``score_mod``, a ``mask_mod`` or both, and names what it learns.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from attndsl.flex import and_masks, noop_mask, or_masks

B, H, Q, KV, D = 2, 4, 20, 24, 8
WINDOW = 7
MODS = {}


def mods(function):
    MODS[function.__name__] = function
    return function


def random(*shape, seed=7):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def learned(*shape):
    return random(*shape).requires_grad_()


def found(score=None, mask=None, reference=None, **learns):
    return SimpleNamespace(score=score, mask=mask, reference=reference or score, learns=learns)


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def global_window(b, h, q_idx, kv_idx):
    return causal_mask(b, h, q_idx, kv_idx) & (q_idx - kv_idx <= WINDOW)


@mods
def nothing():
    return found()


@mods
def noop():
    return found(mask=noop_mask)


@mods
def causal():
    return found(mask=causal_mask)


@mods
def window_of_a_global():
    return found(mask=global_window)


@mods
def sliding_window():
    size = 5

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= size) & (kv_idx - q_idx <= size)

    return found(mask=and_masks(causal_mask, window))


@mods
def prefix_lm():
    prefix = torch.tensor([3, 11])

    def mask(b, h, q_idx, kv_idx):
        return kv_idx < prefix[b]

    return found(mask=or_masks(mask, causal_mask))


@mods
def documents():
    doc = torch.arange(KV).repeat(B, 1) // torch.tensor([[5], [9]])

    def same(b, h, q_idx, kv_idx):
        return doc[b, q_idx] == doc[b, kv_idx]

    return found(mask=and_masks(causal_mask, same))


@mods
def documents_with_local_positions():
    lengths = torch.tensor([4, 9, 11])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    document = torch.repeat_interleave(torch.arange(3), lengths)

    def wrap(inner):
        def mask(b, h, q_idx, kv_idx):
            same = document[q_idx] == document[kv_idx]
            q_local = q_idx - offsets[document[q_idx]]
            kv_local = kv_idx - offsets[document[kv_idx]]
            return same & inner(b, h, q_local, kv_local)

        return mask

    def inner(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 4)

    return found(mask=wrap(inner))


@mods
def jagged():
    offsets = torch.tensor([0, 3, 10, 24])
    sequence = torch.bucketize(torch.arange(KV), offsets[1:], right=True)
    table = random(H, 2 * KV)

    def score(score, b, h, q_idx, kv_idx):
        q_seq, kv_seq = sequence[q_idx], sequence[kv_idx]
        q_nested, kv_nested = q_idx - offsets[q_seq], kv_idx - offsets[kv_seq]
        bias = table[h][q_nested - kv_nested + KV]
        return torch.where(q_seq == kv_seq, score + bias, -float("inf"))

    return found(score=score)


@mods
def neighbourhood():
    width, kernel = 6, 3

    def mask(b, h, q_idx, kv_idx):
        q_x, q_y = q_idx % width, q_idx // width
        kv_x, kv_y = kv_idx % width, kv_idx // width
        x = torch.clamp(q_x, kernel // 2, (width - 1) - kernel // 2)
        y = q_y.clamp(min=kernel // 2, max=(KV // width - 1) - kernel // 2)
        return ((x - kv_x).abs() <= kernel // 2) & ((y - kv_y).abs() <= kernel // 2)

    return found(mask=mask)


@mods
def paged():
    page, pages = 4, KV // 4
    logical = torch.full((B, pages), -1)
    logical[0, [3, 1, 5]] = torch.arange(3)
    logical[1, [0, 2, 4, 5]] = torch.arange(4)
    length = torch.tensor([10, 16])

    def physical(inner):
        def mask(b, h, q_idx, kv_idx):
            block = logical[b, kv_idx // page]
            place = block * page + kv_idx % page
            live = (block >= 0) & (place < length[b]) & (place >= 0)
            return torch.where(live, inner(b, h, q_idx, place), False)

        return mask

    def score(score, b, h, q_idx, kv_idx):
        block = logical[b, kv_idx // page]
        place = block * page + kv_idx % page
        moved = score - 0.1 * (q_idx - place)
        return torch.where(block >= 0, moved, float("-inf"))

    return found(score, physical(causal_mask))


@mods
def offset_of_a_cache():
    offset = torch.tensor(4)

    def moved(mask_mod, by):
        return lambda b, h, q_idx, kv_idx: mask_mod(b, h, q_idx + by, kv_idx)

    return found(mask=moved(causal_mask, offset))


@mods
def windows_by_head():
    sizes = torch.tensor([1, 2, 8, 30])

    def mask(b, h, q_idx, kv_idx):
        return torch.logical_and(q_idx >= kv_idx, q_idx - kv_idx < sizes[h])

    return found(mask=mask)


@mods
def seen_positions():
    seen = torch.rand(B, KV, generator=torch.Generator().manual_seed(3)) < 0.6
    return found(mask=lambda b, h, q_idx, kv_idx: seen[b][kv_idx] | (kv_idx == 0))


@mods
def tiles_of_two_dims():
    def mask(b, h, q_idx, kv_idx):
        near = torch.abs(q_idx // 4 % 3 - kv_idx // 4 % 3) < 2
        return near ^ ((q_idx & 1) == 1) | ~(kv_idx <= q_idx)

    return found(mask=mask)


@mods
def alibi():
    def score(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / H))
        return score + (kv_idx - q_idx) * scale

    return found(score, causal_mask)


@mods
def alibi_of_slopes():
    slopes = learned(H)
    return found(
        lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx), slopes=slopes
    )


@mods
def soft_cap():
    def capped(cap):
        def score(score, b, h, q_idx, kv_idx):
            score = score / cap
            score = torch.tanh(score)
            return score * cap

        return score

    return found(capped(1.5), causal_mask)


@mods
def relative():
    return found(lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx))


@mods
def relative_table():
    table = learned(H, Q + KV)
    return found(
        lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + KV], table=table
    )


@mods
def table_from_its_end():
    table = learned(40)
    return found(lambda score, b, h, q_idx, kv_idx: score + table[q_idx - kv_idx], table=table)


@mods
def buckets():
    table = learned(8, H)

    def score(score, b, h, q_idx, kv_idx):
        back = torch.maximum(q_idx - kv_idx, torch.zeros_like(q_idx))
        large = 4 + (torch.log(back.float() / 4 + 1e-6) / math.log(16 / 4) * 4).to(torch.long)
        bucket = torch.where(back < 4, back, torch.clamp(large, max=7))
        return score + table[bucket, h]

    return found(score, table=table)


@mods
def biases():
    by_pair, whole = learned(Q, KV), learned(B, H, Q, KV)

    def score(score, b, h, q_idx, kv_idx):
        return score + by_pair[q_idx, kv_idx] + whole[b][h, ..., kv_idx][q_idx]

    def indexed_at_once(score, b, h, q_idx, kv_idx):
        # torch's vmap has no derivative of lookups in several steps out of order.
        return score + by_pair[q_idx, kv_idx] + whole[b, h, q_idx, kv_idx]

    return found(score, reference=indexed_at_once, by_pair=by_pair, whole=whole)


@mods
def scalars():
    gain, shift, count = learned(()), torch.tensor(3), torch.tensor(0.25)

    def score(score, b, h, q_idx, kv_idx):
        return gain * score + shift * count - torch.exp(gain)

    return found(score, gain=gain)


@mods
def token_batch_and_head_scales():
    token, batch, head = learned(KV), learned(B), learned(H)

    def score(score, b, h, q_idx, kv_idx):
        return score * token[kv_idx] * batch[b] + head[h] * token[q_idx]

    return found(score, token=token, batch=batch, head=head)


@mods
def where_chain():
    def score(score, b, h, q_idx, kv_idx):
        score = torch.where((q_idx - kv_idx).abs() % 2 == 1, score * 0.5, score)
        score = torch.where((q_idx - kv_idx) % 3 == 0, score * 2.0, score)
        return torch.where(h >= 2, score, torch.where(q_idx < kv_idx, -float("inf"), score + 1))

    return found(score)


@mods
def lowest_of_a_dtype():
    def score(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, torch.finfo(score.dtype).min)

    return found(score)


@mods
def powers_and_quotients():
    def score(score, b, h, q_idx, kv_idx):
        score = score - q_idx // (1 + kv_idx) + (kv_idx - q_idx) % 5 / 7
        score = score + (kv_idx - q_idx) // 3 * 0.1 + 0.5**h - 2 ** (h + 1) / 16
        return score**2 * 0.1 + (1.0 + kv_idx) ** -0.5 + q_idx**2 * 0.01 + torch.fmod(q_idx - 9, 4)

    return found(score)


@mods
def trigonometry():
    def score(score, b, h, q_idx, kv_idx):
        return torch.cos(score) * torch.sin(score) + torch.tan(b * 0.3) - score.sin().cos()

    return found(score)


@mods
def activations():
    def score(score, b, h, q_idx, kv_idx):
        total = F.silu(score) + F.gelu(score) + F.gelu(score, approximate="tanh")
        total = total + F.softplus(score, beta=2.0) + torch.sigmoid(score) + F.leaky_relu(score)
        total = total + F.elu(score, 0.7) + F.logsigmoid(score) + F.hardswish(score) + F.mish(score)
        total = total + F.celu(score, 1.3) + F.selu(score) + F.softsign(score) + F.relu(score)
        return total + F.hardtanh(score) + F.tanhshrink(score) + F.softshrink(score, 0.1)

    return found(score)


@mods
def functions_of_floats():
    def score(score, b, h, q_idx, kv_idx):
        x = torch.sqrt(score**2 + 1)
        x = x + torch.rsqrt(1.0 + kv_idx.double()) + q_idx.double().log1p()
        x = x + torch.square(score).mul(0.1) + torch.reciprocal(x) + torch.expm1(-x) + x.log2()
        x = torch.logaddexp(x, score) + torch.lerp(score, x, 0.3) + torch.erf(x) + x.sinh() * 1e-3
        return torch.addcmul(x, score, score, value=0.5) + torch.add(x, score, alpha=2)

    return found(score)


@mods
def numbers_and_types():
    def score(score, b, h, q_idx, kv_idx):
        mask = (q_idx >= kv_idx).to(score.dtype)
        mask = mask + q_idx.ge(3).int() * (kv_idx % 2).bool() - torch.round(score * 3).long() * 0.1
        steps = torch.div(q_idx - 7, 3, rounding_mode="trunc") + torch.trunc(score).to(torch.int64)
        return score.float().to(torch.float64) * 1.5 + mask + steps * 0.01 + score.new_ones(())

    return found(score)


@mods
def in_place():
    def score(score, b, h, q_idx, kv_idx):
        alias = score
        score += 1
        score *= 2.0
        alias.add_(kv_idx, alpha=0.1).sub_(0.25)
        place = q_idx - kv_idx
        place -= 1
        return score + place * 0.5

    return found(score)


@mods
def made_inside():
    def score(score, b, h, q_idx, kv_idx):
        steps = torch.tensor([0.5, 0.25, 1.0, 2.0], dtype=torch.float64)
        return score * steps[h] + torch.tensor(0.5) + torch.zeros(()) + torch.full((), 2.0)

    return found(score)


@mods
def derived_inside():
    table, gain = learned(H, KV), learned(())

    def score(score, b, h, q_idx, kv_idx):
        return (
            score * torch.exp(gain) + (table * 2.0)[h, kv_idx] + table[1][kv_idx] + table[-1, q_idx]
        )

    return found(score, table=table, gain=gain)


@mods
def partials():
    table = learned(H)

    def biased(score, b, h, q_idx, kv_idx, bias, factor=1.0):
        return score * factor + bias[h]

    return found(functools.partial(biased, bias=table, factor=0.5), table=table)


class Mods:
    def __init__(self):
        self.table = learned(H)
        self.window = 5

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.table[h]

    def mask(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < self.window


@mods
def methods():
    owner = Mods()
    return found(owner.score, owner.mask, table=owner.table)


@mods
def tables_in_lists():
    tables, settings = [learned(H), learned(KV)], {"factor": 0.5, "which": 1}

    def score(score, b, h, q_idx, kv_idx, start=0.25):
        for table, place in zip(tables, (h, kv_idx), strict=True):
            score = score + table[place] * settings["factor"]
        return score + tables[settings["which"]][kv_idx] + start

    return found(score, zero=tables[0], one=tables[1])
