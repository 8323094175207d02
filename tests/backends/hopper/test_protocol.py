"""The forward kernel's text, run as Python: its barriers, by the rules of those of the hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.forward_text import (
    FORMS,
    PERSISTENT,
    SEED,
    SHAPES,
    SMALL,
    TEXTS,
    WIDTH,
    inputs_of,
    run_forward,
)  # fmt: skip
from support.kernel_text import Run, cases_of, slow
from support.mutation import before, drop, early, is_noticed, number_of, swap

from attndsl.backends.dense.philox import kept as kept_pairs

if TYPE_CHECKING:
    from support.forward_text import Inputs


WEIGHTS = {
    "sigmoid": lambda score: torch.sigmoid(score) / 4,
    "own dropout": torch.sigmoid,
    "own weights": lambda score: torch.relu(2 * score) / 9 + 0.02,
}


def kept(inputs: Inputs, name: str) -> torch.Tensor | float:
    """Factors of the weights."""
    if "dropout" not in name:
        return 1.0
    batch, heads, q_len, _ = inputs.q.shape
    p = 0.1 if name == "own dropout" else 0.4
    return kept_pairs(SEED, torch.tensor(p), (batch, heads, q_len, inputs.k.shape[2])) / (1 - p)


def expected(inputs: Inputs, name: str = "") -> torch.Tensor:
    group = inputs.q.shape[1] // inputs.k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    score = inputs.q.float() @ k.mT * WIDTH**-0.5
    if name in WEIGHTS:
        return WEIGHTS[name](score).masked_fill(~inputs.allowed, 0.0) * kept(inputs, name) @ v
    if name == "signs":
        score = score * (1 - torch.arange(score.shape[1]))[:, None, None]
    if "bias" in name:
        score = score + inputs.bias.float()
    if "cap" in name:
        score = 2 * torch.tanh(score / 2)
    score = score.masked_fill(~inputs.allowed, float("-inf"))
    return score.softmax(-1).nan_to_num() * kept(inputs, name) @ v


CASES = cases_of(TEXTS, len(SHAPES))


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_persistent_programs_compute_the_same(name, shape):
    inputs = inputs_of(name, *SHAPES[shape])
    out, lse = run_forward(name, inputs, SMALL)
    if name not in ("alibi", "sink", "cap and sink"):
        assert torch.allclose(out.float(), expected(inputs, name), atol=4e-3, rtol=2e-3)
    if name in WEIGHTS:
        alive = inputs.allowed.any(-1).expand(lse.shape)
        assert torch.equal(lse, torch.where(alive, 0.0, float("-inf")))
    found = [
        run_forward(name, inputs, PERSISTENT, Run(programs, programs, wide=wide))
        for programs, wide in ((3, False), (7, SHAPES[shape][3] == WIDTH))
    ]
    same = SHAPES[shape][3] != WIDTH
    for again, again_lse in found:
        # Wide rows do not have their tiles by halves, whose sums are rounded otherwise.
        assert torch.equal(again, found[0][0]) or not same
        assert torch.equal(again_lse, found[0][1]) or not same
        # Weights may be rounded relative to another maximum.
        assert torch.allclose(again.float(), out.float(), atol=1e-3, rtol=1e-3)
        assert torch.allclose(again_lse, lse, atol=1e-4)


def growing(name: str, shape: tuple[int, int, int, int], size: float = 40.0) -> Inputs:
    """Scores of some rows of some heads are far larger for late keys than for all before.

    Of others all are far below 0.
    """
    inputs = inputs_of(name, *shape)
    late = torch.arange(inputs.k.shape[2])[:, None] % 23 == 19
    inputs.k[:, -1:] = torch.where(late, size * inputs.k[:, -1:], inputs.k[:, -1:])
    # All keys of these heads are alike, and far from the odd queries.
    inputs.k[1, -1:] = 9 * inputs.k[1, -1:, :1] + inputs.k[1, -1:] / 8
    inputs.q[1, :, 1::2] = -9 * inputs.k[1, -1, 0]
    return inputs


def counted(text: str) -> str:
    """Of an anchored kernel, whose programs tell how many turns they took."""
    assert number_of(text, "await_written()")
    return before("return work_index", "noted(work_index)")(text)


GROWING = [
    ("full", (40, 42, 2, 8)), ("causal", (50, 50, 4, 8)), ("sink", (50, 70, 1, 16)),
    ("alibi", (50, 50, 4, 8)), ("table", (40, 60, 2, 8)), ("dropout", (40, 60, 2, 8)),
    ("bias", (24, 42, 4, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), GROWING, ids=[name for name, _ in GROWING])
@pytest.mark.parametrize(
    ("programs", "form"),
    [(5, "two consumers"), slow(1, "two consumers"), slow(5, "three consumers")],
)
def test_items_whose_weights_grew_too_large_are_computed_again(name, shape, programs, form):
    inputs = growing(name, shape)
    config = PERSISTENT if form == "two consumers" else FORMS[form]
    turns: list[int] = []
    out, lse = run_forward(name, inputs, SMALL)
    assert torch.isfinite(out).all()
    counting = Run(programs, programs, counted, noted=turns.append)
    again, again_lse = run_forward(name, inputs, config, counting)
    assert torch.allclose(again.float(), out.float(), atol=2e-3, rtol=2e-3)
    assert torch.allclose(again_lse, lse, atol=1e-3, rtol=1e-5)
    items = -(-shape[0] // config.block_m) * 8
    # One more turn a program, in which nothing is done, and one for each that was lost.
    assert sum(turns) > items + min(programs, items)


def test_nothing_is_computed_again_where_weights_fit():
    inputs, turns = inputs_of("causal", 70, 70, 4, 8), []

    run_forward("causal", inputs, PERSISTENT, Run(1, 5, counted, noted=turns.append))
    assert sum(turns) == 5 * 8 + 5


def test_scores_that_are_bounded_need_no_maximum():
    """And have the log-sum-exp that others have, beside a sink, and where no pair takes part."""
    inputs = inputs_of("cap and sink", *SHAPES[0])
    text = []

    def noted(given: str) -> str:
        text.append(given)
        return given

    out, lse = run_forward("cap and sink", inputs, PERSISTENT, Run(1, 3, noted))
    assert not number_of(text[0], "gl.max(...)")
    k, v = (x.float().repeat_interleave(2, 1) for x in (inputs.k, inputs.v))
    score = 2 * torch.tanh(inputs.q.float() @ k.mT * WIDTH**-0.5 / 2)
    score = score.masked_fill(~inputs.allowed, float("-inf"))
    sinks = (0.5 - torch.arange(score.shape[1]))[:, None, None].expand(*score.shape[:3], 1)
    whole = torch.cat([score, sinks], -1)
    alive = inputs.allowed.any(-1).expand(lse.shape)
    assert not alive.all()
    wanted = torch.where(alive, whole.logsumexp(-1), float("-inf"))
    assert torch.allclose(lse, wanted, atol=1e-4)
    weights = torch.where(alive[..., None], whole.softmax(-1)[..., :-1], 0.0)
    assert torch.allclose(out.float(), weights @ v, atol=4e-3)


@pytest.mark.parametrize("programs", [2, *(slow(number) for number in (1, 5, 100))])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, programs):
    inputs = inputs_of("documents", *SHAPES[0])
    out, _ = run_forward("documents", inputs, FORMS[form], Run(programs, programs, together=8))
    assert torch.allclose(out.float(), expected(inputs), atol=4e-3)


# What it must not do without: taken out of the text, the machine notices.
NEEDED = {
    "room for v": drop("consumer_release(v, ...)", "add_last"),
    "room for q": drop("consumer_release(q, ...)"),
    "q has been read": drop("producer_acquire(q, ...)"),
    "phases of q": drop("consumer_wait(q, ...)"),
    "phases of k": swap(
        "slot_of(tile_index, ...)", "Slot(0, tile_index // STAGES & 1)", "consume_work"
    ),
    "the output is read": drop("tma_wait(...)", "leave_query"),
    "room for the next rows of q": drop("leave_query(...)", "consume_work"),
    "items are read": drop("acquire_item(...)"),
    "items are written": drop("await_item(...)", "consume", nth=2),
    "zero at the end": drop("gl.store(counter, ...)"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_the_machine_notices(name):
    inputs = inputs_of("causal", *SHAPES[0])
    out, lse = run_forward("causal", inputs, PERSISTENT, Run(1, 2))

    def differs(seed: int) -> bool:
        found = run_forward("causal", inputs, PERSISTENT, Run(seed, 2, NEEDED[name]))
        return not torch.equal(found[0], out) or not torch.equal(found[1], lse)

    assert is_noticed(differs, 6)


@pytest.mark.parametrize("kv_len", [70, 72], ids=["a PARTIAL tile", "no PARTIAL tile"])
def test_padding_is_nothing_to_be_relative_to(kv_len):
    """Of a bias that keeps the first keys out; nothing is computed again for that."""
    inputs, turns = inputs_of("bias", 24, kv_len, 4, 8), []
    inputs.bias[:, :, :21] = -60000.0

    out, _ = run_forward("bias", inputs, PERSISTENT, Run(1, 2, counted, noted=turns.append))
    assert torch.allclose(out.float(), expected(inputs, "bias"), atol=4e-3, rtol=2e-3)
    assert sum(turns) == 2 * 8 + 2


NEEDED_WHEN_LOST = {
    "a place for each turn": swap("(work_index & 1) * CONSUMERS", "0"),
    "each consumer's": swap("lost | _word", "lost & _word"),
    "the last one's": swap("(work_tile >= work_tiles) & (last >= 0)", "work_tile > 999999"),
    "to be taken still": swap("gl.where(pause, 0, 1 - lost)", "gl.where(pause, 0, 1)"),
    "the one that was lost": swap(
        "gl.where(lost != 0, older, _then)", "gl.where(lost != 0, last, _then)"
    ),
    "phases of q": drop("producer_commit(q, ...)"),
    "how large": swap("total <= MOST_TOTAL", "total <= 1e30"),
    "how small": swap("total >= LEAST_TOTAL", "total >= 0.0"),
}


@pytest.mark.parametrize("name", NEEDED_WHEN_LOST)
def test_the_machine_notices_what_is_lost(name):
    # Programs whose tiles come by halves are behind the producer more rarely.
    case = "alibi" if name == "a place for each turn" else "full"
    # Many rows are lost, or few.
    both = [growing(case, (32, 42, 2, 8), size) for size in (40.0, 6.0)]
    cases = [(inputs, run_forward(case, inputs, SMALL)[0]) for inputs in both]

    def differs(seed: int) -> bool:
        inputs, out = cases[seed % 2]
        found, _ = run_forward(case, inputs, PERSISTENT, Run(seed, 3, NEEDED_WHEN_LOST[name]))
        return not torch.allclose(found.float(), out.float(), atol=2e-3, rtol=2e-3)

    assert is_noticed(differs, 8)


@pytest.mark.parametrize("form", [SMALL, *FORMS.values()], ids=["usual", *FORMS])
def test_tiles_of_pairs_from_any_position(form):
    inputs = inputs_of("bias", *SHAPES[0])
    out, _ = run_forward("bias", inputs, form, Run(3, 3, origins=(3, 5)))
    assert torch.allclose(out.float(), expected(inputs, "bias"), atol=4e-3)


LEAVE = "consumer_release(bias, ...)"
NEEDED_FOR_PAIRS = {
    "tiles have come": drop("consumer_wait(bias, ...)"),
    "phases": swap("slot_of_bias(PART, tile_index)", "slot_of_bias(PART, 0)", "read_bias"),
    "room for tiles": drop(LEAVE),
    "tiles have been read": drop("producer_acquire(bias, ...)"),
    "read before they go": early(LEAVE, to="pair_parts = read_bias(...)"),
    "all bytes": swap("BIAS_BYTES * _pairs * _keys", "_pairs * _keys"),
    "rows of each consumer": swap("first_query + part * _rows % _all", "first_query"),
}


@pytest.mark.parametrize("name", NEEDED_FOR_PAIRS)
def test_the_machine_notices_tiles_of_pairs(name):
    inputs = inputs_of("table and bias", *SHAPES[0])
    out, _ = run_forward("table and bias", inputs, PERSISTENT, Run(1, 2))

    def differs(seed: int) -> bool:
        run = Run(seed, 2, NEEDED_FOR_PAIRS[name])
        return not torch.equal(run_forward("table and bias", inputs, PERSISTENT, run)[0], out)

    assert is_noticed(differs, 6)


def test_full_tiles_load_no_mask():
    inputs = inputs_of("table", *SHAPES[0])
    texts = []

    def change(text: str) -> str:
        texts.append(text)
        return swap("_partial_tiles + step == 0", "False")(text)

    out, _ = run_forward("table", inputs, SMALL)
    found, _ = run_forward("table", inputs, SMALL, Run(change=change))
    assert number_of(texts[0], "if wanted: ...")
    # A row of tiles that are all FULL reads the first one's mask.
    assert not torch.equal(found, out)
    assert number_of(texts[0], "read_bias(PART, tile_index, PARTIAL, ...)")
