"""The forward kernel's text, run as Python: its barriers, by the rules of those of the hardware.

Gluon has no interpreter; ``conftest.py`` has what takes its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from forward_text import FORMS, PERSISTENT, SEED, SHAPES, SMALL, TEXTS, WIDTH, inputs_of
from gluon_machine import altered

from attndsl.backends.dense.philox import kept as kept_pairs

if TYPE_CHECKING:
    from forward_text import Inputs


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


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    (name, shape) if place % len(SHAPES) == shape else slow(name, shape)
    for place, name in enumerate(TEXTS)
    for shape in range(len(SHAPES))
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_persistent_programs_compute_the_same(run, name, shape):
    inputs = inputs_of(name, *SHAPES[shape])
    out, lse = run(name, inputs, SMALL)
    if name not in ("alibi", "sink", "cap and sink"):
        assert torch.allclose(out.float(), expected(inputs, name), atol=4e-3, rtol=2e-3)
    if name in WEIGHTS:
        alive = inputs.allowed.any(-1).expand(lse.shape)
        assert torch.equal(lse, torch.where(alive, 0.0, float("-inf")))
    found = [
        run(name, inputs, PERSISTENT, programs, programs, wide=wide)
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
    assert "ANCHORED = tl.constexpr(True)" in text
    return text.replace("    return turn\n", "    noted(turn)\n    return turn\n")


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
def test_items_whose_weights_grew_too_large_are_computed_again(run, name, shape, programs, form):
    inputs = growing(name, shape)
    config = PERSISTENT if form == "two consumers" else FORMS[form]
    turns: list[int] = []
    out, lse = run(name, inputs, SMALL)
    assert torch.isfinite(out).all()
    again, again_lse = run(
        name, inputs, config, programs, programs, change=counted, noted=turns.append
    )
    assert torch.allclose(again.float(), out.float(), atol=2e-3, rtol=2e-3)
    assert torch.allclose(again_lse, lse, atol=1e-3, rtol=1e-5)
    items = -(-shape[0] // config.block_m) * 8
    # One more turn a program, in which nothing is done, and one for each that was lost.
    assert sum(turns) > items + min(programs, items)


def test_nothing_is_computed_again_where_weights_fit(run):
    inputs, turns = inputs_of("causal", 70, 70, 4, 8), []

    run("causal", inputs, PERSISTENT, 1, 5, change=counted, noted=turns.append)
    assert sum(turns) == 5 * 8 + 5


def test_scores_that_are_bounded_need_no_maximum(run):
    """And have the log-sum-exp that others have, beside a sink, and where no pair takes part."""
    inputs = inputs_of("cap and sink", *SHAPES[0])
    text = []

    def noted(given: str) -> str:
        text.append(given)
        return given

    out, lse = run("cap and sink", inputs, PERSISTENT, 1, 3, change=noted)
    assert "BOUNDED = tl.constexpr(True)" in text[0]
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
def test_forms(run, form, programs):
    inputs = inputs_of("documents", *SHAPES[0])
    out, _ = run("documents", inputs, FORMS[form], programs, programs, together=8)
    assert torch.allclose(out.float(), expected(inputs), atol=4e-3)


# What it must not do without: taken out of the text, the machine notices.
NEEDED = {
    "room for v": ("mbarrier.arrive(v_empty.index(last_stage), count=1)", "pass"),
    "room for q": ("mbarrier.arrive(q_empty.index(PART), count=1)", "pass"),
    "q has been read": ("mbarrier.wait(q_empty.index(part), (turn & 1) ^ 1)", "pass"),
    "phases of q": ("mbarrier.wait(q_full.index(PART), turn & 1)", "pass"),
    "phases of k": (
        "    stage, phase = slot_of(count, STAGES)\n    mbarrier.wait(q_full",
        "    stage, phase = 0, count // STAGES & 1\n    mbarrier.wait(q_full",
    ),
    "the output is read": ("            tma_wait(0)\n    else", "            pass\n    else"),
    "items are read": ("mbarrier.wait(item_empty, (turn & 1) ^ 1)", "pass"),
    "items are written": ("            mbarrier.wait(item_full, turn & 1)", ""),
    "zero at the end": ("gl.store(COUNTER, 0)", "pass"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_the_machine_notices(run, name):
    inputs = inputs_of("causal", *SHAPES[0])
    out, lse = run("causal", inputs, SMALL)
    old, new = NEEDED[name]

    def change(text: str) -> str:
        return altered(text, old, new)

    def noticed(seed: int) -> bool:
        try:
            found = run("causal", inputs, PERSISTENT, seed, 2, change=change)
        except AssertionError:
            return True
        return not torch.equal(found[0], out) or not torch.equal(found[1], lse)

    assert any(map(noticed, range(1, 7)))


def test_padding_is_nothing_to_be_relative_to(run):
    """Of a bias that keeps the first keys out; nothing is computed again for that."""
    inputs, turns = inputs_of("bias", 24, 70, 4, 8), []
    inputs.bias[:, :, :21] = -60000.0

    out, _ = run("bias", inputs, PERSISTENT, 1, 2, change=counted, noted=turns.append)
    assert torch.allclose(out.float(), expected(inputs, "bias"), atol=4e-3, rtol=2e-3)
    assert sum(turns) == 2 * 8 + 2


NEEDED_WHEN_LOST = {
    "a place for each turn": ("(turn & 1) * CONSUMERS", "0"),
    "each consumer's": ("lost = lost | word", "lost = lost & word"),
    "the last one's": ("pause = (item >= items) & (last >= 0)", "pause = item > 999999"),
    "to be taken still": ("took = gl.where(pause, 0, 1 - lost)", "took = gl.where(pause, 0, 1)"),
    "the one that was lost": ("gl.where(lost != 0, older,", "gl.where(lost != 0, last,"),
    "phases of q": ("mbarrier.arrive(q_full.index(part), count=1)", "pass"),
    "how large": ("(total <= MOST_TOTAL)", "(total <= 1e30)"),
    "how small": ("(total >= LEAST_TOTAL)", "(total >= 0.0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED_WHEN_LOST)
def test_the_machine_notices_what_is_lost(run, name):
    old, new = NEEDED_WHEN_LOST[name]
    # Programs whose tiles come by halves are behind the producer more rarely.
    case = "alibi" if name == "a place for each turn" else "full"

    def change(text: str) -> str:
        return altered(text, old, new)

    def noticed(seed: int) -> bool:
        inputs, out = cases[seed % 2]
        try:
            found, _ = run(case, inputs, PERSISTENT, seed, 3, change=change)
        except AssertionError:
            return True
        return not torch.allclose(found.float(), out.float(), atol=2e-3, rtol=2e-3)

    # Many rows are lost, or few.
    both = [growing(case, (32, 42, 2, 8), size) for size in (40.0, 6.0)]
    cases = [(inputs, run(case, inputs, SMALL)[0]) for inputs in both]
    assert any(map(noticed, range(1, 9)))


@pytest.mark.parametrize("form", [SMALL, *FORMS.values()], ids=["usual", *FORMS])
def test_tiles_of_pairs_from_any_position(run, form):
    inputs = inputs_of("bias", *SHAPES[0])
    out, _ = run("bias", inputs, form, 3, 3, origins=(3, 5))
    assert torch.allclose(out.float(), expected(inputs, "bias"), atol=4e-3)


LEAVE = "mbarrier.arrive(pairs_empty.index(PART), count=1)"
NEEDED_FOR_PAIRS = {
    "tiles have come": [("    mbarrier.wait(pairs_full.index(PART), count & 1)", "    pass")],
    "phases": [("mbarrier.wait(pairs_full.index(PART), count & 1)",
                "mbarrier.wait(pairs_full.index(PART), 0)")],
    "room for tiles": [(LEAVE, "pass")],
    "tiles have been read": [("mbarrier.wait(pairs_empty.index(part), (count & 1) ^ 1)", "pass")],
    "read before they go": [
        (LEAVE, "pass"), ("    pair_parts = read_pairs(", f"    {LEAVE};pair_parts = read_pairs("),
    ],
    "all bytes": [(" + pair1_desc.block_type.nbytes", "")],
    "rows of each consumer": [("first_query + part * pair0_s.shape[1]", "first_query")],
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED_FOR_PAIRS)
def test_the_machine_notices_tiles_of_pairs(run, name):
    inputs = inputs_of("table and bias", *SHAPES[0])
    out, _ = run("table and bias", inputs, SMALL)

    def change(text: str) -> str:
        for old, new in NEEDED_FOR_PAIRS[name]:
            text = altered(text, old, new)
        return text

    def noticed(seed: int) -> bool:
        try:
            found, _ = run("table and bias", inputs, PERSISTENT, seed, 2, change=change)
        except AssertionError:
            return True
        return not torch.equal(found, out)

    assert any(map(noticed, range(1, 7)))


def test_full_tiles_load_no_mask(run):
    inputs = inputs_of("table", *SHAPES[0])
    texts = []

    def change(text: str) -> str:
        texts.append(text)
        return text.replace("partial_tiles + step == 0", "False")

    out, _ = run("table", inputs, SMALL)
    found, _ = run("table", inputs, SMALL, change=change)
    assert "if wanted:" in texts[0]
    # A row of tiles that are all FULL reads the first one's mask.
    assert not torch.equal(found, out)
    assert "read_pairs(PART, count, PARTIAL, SCORES" in texts[0]
