"""The backward kernels' text, run as Python: gradients, and what warpgroups owe one another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gluon_machine import lists_of

from attndsl.backends.hopper.generate import generate
from attndsl.backends.philox import uniform
from attndsl.backends.triton.cross import example_call, parse_target
from attndsl.backends.triton.kernels import plan_loop
from attndsl.backends.triton.library import STATISTICS_PADDING
from attndsl.backends.triton.specialise import PairTile, specialise, with_forms
from attndsl.backends.triton.tiles import Config
from attndsl.pipeline import lower
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

ROWS, WIDTH = 64, 16
"""Queries of a tile, fixed by how sums of dQ lie; head dim."""
SEED = 0x1234567
LOG2E = 1.4426950408889634
MASKS: dict[str, Callable[..., torch.Tensor]] = {
    "causal()": lambda q, kv: q >= kv,
    "sliding_window(20)": lambda q, kv: (q >= kv) & (q - kv < 20),
    "q < 30 and kv >= q": lambda q, kv: (q < 30) & (kv >= q),
    "q < 0": lambda q, kv: q < 0,
    "table[q, kv]": lambda q, kv: table_of(q, kv),
}


def bias_of(heads: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """(heads, q_len, kv_len), halves."""
    return torch.sin(1.0 + torch.arange(heads)[:, None, None] + q * 0.7 + kv * 1.3).half()


def table_of(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """A mask of FULL, PARTIAL and EMPTY tiles."""
    kind = (q // ROWS + kv // 16) % 3
    return (kind == 2) | ((kind == 1) & ((q + kv) % 3 > 0))


TEXTS = {
    "full": ("score", None),
    "causal": ("causal()", None),
    "window": ("sliding_window(20)", None),
    "some rows": ("q < 30 and kv >= q", None),
    "nothing": ("q < 0", None),
    "cap": ("mask = causal()\nscore = softcap(2.0)", lambda s, q, kv: 2 * torch.tanh(s / 2)),
    "alibi": (
        "mask = causal()\nscore = score - 0.1 * (q - kv)",
        lambda s, q, kv: s - 0.1 * (q - kv),
    ),
    "sigmoid": ("mask = causal()\nweights = sigmoid(score)", None),
    "own weights": (
        "mask = q < 30 and kv >= q\nscore = 3 * tanh(score / 3)\nweights = relu(score) / 9 + 0.02",
        lambda s, q, kv: 3 * torch.tanh(s / 3),
    ),
    "bias": (
        "mask = causal()\ntensor bias[heads, q_len, kv_len]: float\nscore = score + bias[h, q, kv]",
        lambda s, q, kv: s + bias_of(s.shape[1], q, kv).float(),
    ),
    "steep bias": (
        "tensor bias[heads, q_len, kv_len]: float\nscore = 2 * tanh(score + bias[h, q, kv])",
        lambda s, q, kv: 2 * torch.tanh(s + bias_of(s.shape[1], q, kv).float()),
    ),
    "table": ("tensor table[q_len, kv_len]: bool\nmask = table[q, kv]", None),
}
DROPPING = {
    "dropout": "mask = causal()\nweights = dropout(softmax(score), 0.4)",
    "dropout of a cap": (
        "mask = causal()\nscore = softcap(2.0)\nweights = dropout(softmax(score), 0.4)"
    ),
    "dropout beside columns": (
        "score = score - 0.1 * (q - kv)\nweights = dropout(softmax(score), 0.4)"
    ),
    "own dropout": "mask = causal()\nweights = dropout(sigmoid(score), 0.4)",
}
TEXTS |= {
    "dropout": (DROPPING["dropout"], None),
    "dropout of a cap": (DROPPING["dropout of a cap"], TEXTS["cap"][1]),
    "dropout beside columns": (DROPPING["dropout beside columns"], TEXTS["alibi"][1]),
    "own dropout": (DROPPING["own dropout"], None),
}
PAIRS = {
    "bias": PairTile("bias", ("h", "q", "kv"), ("h",), "fp16"),
    "table": PairTile("table", ("q", "kv"), (), "i8"),
}
"""By tensor: how tiles of it are read."""
WEIGHTS = {"sigmoid": torch.sigmoid, "own weights": lambda s: torch.relu(s) / 9 + 0.02}
WEIGHTS["own dropout"] = torch.sigmoid


def kept(name: str, shape: torch.Size) -> torch.Tensor | float:
    """Factors of the weights."""
    if name not in DROPPING:
        return 1.0
    return (uniform(SEED, *shape, torch.device("cpu")) >= 0.4) / 0.6


def attention_of(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp by torch, in fp32, of scores with ``added``."""
    text, change = TEXTS[name]
    mask = text.split("\n")[-1 if "table" in name else 0].removeprefix("mask = ")
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    score = q @ k.mT * WIDTH**-0.5
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    allowed = MASKS.get(mask, lambda q, kv: kv >= 0)(rows, columns).expand(score.shape)
    if change is not None:
        score = change(score, rows, columns)
    score = score + added
    if name in WEIGHTS:
        weights = torch.where(allowed, WEIGHTS[name](score), 0.0)
        return weights * kept(name, score.shape) @ v, torch.zeros(score.shape[:-1])
    some = allowed.any(-1, keepdim=True)
    score = torch.where(allowed | ~some, score, -torch.inf)
    weights = torch.where(some, score.softmax(-1), 0.0)
    weights = weights * kept(name, score.shape)
    return weights @ v, torch.where(some[..., 0], score.logsumexp(-1), -torch.inf)


def pairs_of(
    gluon: SimpleNamespace, lowered: Any, tensors: list[torch.Tensor], config: Config, wide: bool
) -> tuple[tuple[PairTile, ...], dict[str, Any]]:
    """What is read by tiles in a program, and its arguments."""
    tiles = tuple(PAIRS[decl.name] for decl in lowered.program.tensors)
    q, k = tensors[:2]
    places = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    arguments: dict[str, Any] = {}
    for number, tile in enumerate(tiles):
        bias = tile.name == "bias"
        data = bias_of(q.shape[1], *places) if bias else table_of(*places).to(torch.int8)
        keys = config.block_n if wide else config.block_n // 2
        arguments[f"pair{number}_desc"] = gluon.Tiles(data, ROWS, keys)
        arguments |= {f"t_{tile.name}": None, f"size0_{tile.name}": 0}
        arguments |= {f"{x}{n}_{tile.name}": 0 for x in ("size", "stride") for n in range(3)}
        if not bias:
            arguments |= lists_of((data != 0).mT, (config.block_n, ROWS), cut_is_full=True)
    return tiles, arguments


def run_text(
    gluon: SimpleNamespace, name: str, tensors: list[torch.Tensor], config: Config, seed: int = 0,
    wide: bool = False, change: Any = lambda text: text, programs: int = 1,
    distances: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """dQ, dK and dV of (q, k, v, dO), halves; ``change`` alters the text.

    ``programs`` are those of a persistent config. ``distances`` get sums of dS, if given.
    """
    q, k, v, do = tensors
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    out, lse = attention_of(name, q.float(), k.float(), v.float())
    step = STATISTICS_PADDING.value
    padded = -(-q_len // step) * step
    lse2, delta = torch.full((batch * heads, padded), torch.inf), torch.zeros(batch * heads, padded)
    rows = torch.where(lse == -torch.inf, torch.inf, lse * LOG2E)
    lse2[:, :q_len] = rows.flatten(0, 1)
    delta[:, :q_len] = (out.half().float() * do.float()).sum(-1).flatten(0, 1)
    lowered = lower(Source(TEXTS[name][0]), {})
    special = specialise(lowered.program, example_call(lowered, 64, 64, torch.float16, {}))
    special = with_forms(special, lowered.program, parse_target("cuda:90"))
    tiles, of_pairs = pairs_of(gluon, lowered, tensors, config, wide)
    special = replace(special, pair_tiles=tiles, adds_diagonals=distances is not None)
    loop = plan_loop(lowered, special, "backward_kv", config)
    if wide:
        special = replace(special, head_dim=256, value_dim=256)
    text = change(generate(lowered, special, "backward_kv", loop, config))
    for layout in ("rows.type.layout", "own.type.layout"):
        text = text.replace(layout, "None").replace("128, BLOCK_M // 64]", "8]")
    items = -(-kv_len // config.block_n) * batch * kv_heads
    machine = gluon.Machine(seed, min(programs, items) if config.persistent else items)
    modules = gluon.Operations(machine).modules()
    modules["attndsl.backends.hopper.dialect"] = modules["attndsl.backends.hopper"].dialect
    kernel = gluon.module_of(text, modules)["attention_backward_kv"]
    sums = torch.zeros(batch * heads * padded * WIDTH)
    dk, dv = (torch.full((x.numel(),), float("nan"), dtype=torch.float16) for x in (k, v))
    counter = torch.zeros((), dtype=torch.int32)
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len}
    sizes |= {"kv_len": kv_len, "padded": padded}
    arguments = {
        "q_desc": gluon.Descriptor(q, ROWS), "do_desc": gluon.Descriptor(do, ROWS),
        "k_desc": gluon.Descriptor(k, config.block_n),
        "v_desc": gluon.Descriptor(v, config.block_n),
        "lse_desc": gluon.Vector(lse2.flatten(), ROWS),
        "delta_desc": gluon.Vector(delta.flatten(), ROWS),
        "SUMS": gluon.Pointer(sums), "DK": gluon.Pointer(dk), "DV_OUT": gluon.Pointer(dv),
        "COUNTER": gluon.Pointer(counter), "scale": WIDTH**-0.5,
        **{size: gluon.number(value) for size, value in sizes.items()},
        "q_origin": 0, "kv_origin": 0, "HEAD_DIM": WIDTH, "VALUE_DIM": WIDTH, "D": WIDTH,
        "DV": WIDTH, "BLOCK_M": ROWS, "BLOCK_N": config.block_n, "STAGES": config.stages,
        "REGISTERS": config.registers, "Q_KIND": "offset", "KV_KIND": "offset", **of_pairs,
        "seed": SEED,
    }  # fmt: skip
    if distances is not None:
        arguments["DISTANCE_SUMS"] = gluon.Pointer(distances.view(-1))
    taken = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    for program in range(machine.programs):
        machine.start(program, kernel, *(arguments[name] for name in taken))
    machine.run()
    assert not counter
    # Blocks of 64 rows: the half of each warpgroup behind the other.
    dq = sums.view(batch, heads, padded // ROWS, 2, ROWS, WIDTH // 2).transpose(3, 4)
    dq = dq.reshape(batch, heads, padded, WIDTH)[:, :, :q_len] * WIDTH**-0.5
    return [dq, dk.view(k.shape).float(), dv.view(v.shape).float()]


@pytest.fixture
def run(gluon: SimpleNamespace) -> Any:
    """Runs the backward kernel of a program, see :func:`run_text`."""
    return partial(run_text, gluon)


def inputs_of(q_len: int, kv_len: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(q_len + kv_len)

    def halves(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, WIDTH, generator=generator).half()

    q, k, v, do = (
        halves(*x) for x in ((2, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (2, q_len))
    )
    return [q, k, v, do]


CONFIG = Config(ROWS, 16, 4, 2, 2, 240)
PERSISTENT = replace(CONFIG, persistent=True)
SHAPES = ((100, 40, 2), (70, 37, 1), (30, 16, 1))


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    pytest.param(name, shape) if place % len(SHAPES) == shape else slow(name, shape)
    for place, name in enumerate(TEXTS)
    for shape in range(len(SHAPES))
]


@pytest.mark.parametrize(
    ("name", "shape", "wide"),
    [
        pytest.param(*case.values, wide, marks=case.marks)
        for case in CASES
        for wide in (False, True)
        # The wide backward has no dropout.
        if not (wide and case.values[0] in DROPPING)
    ],
)
def test_gradients(run, name, shape, wide):
    tensors = inputs_of(*SHAPES[shape])
    leaves = [x.float().requires_grad_() for x in tensors[:3]]
    out, _ = attention_of(name, *leaves)
    expected = torch.autograd.grad(out, leaves, tensors[3].float(), allow_unused=True)
    for peeled, seed in ((True, 1), (False, 2)):
        found = run(name, tensors, replace(CONFIG, peeled=peeled), seed, wide)
        for value, wanted in zip(found, expected, strict=True):
            scale = 1 + float(wanted.abs().max())
            torch.testing.assert_close(value, wanted, atol=4e-3 * scale, rtol=0)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_persistent_programs_compute_the_same(run, name, shape):
    tensors = inputs_of(*SHAPES[shape])
    usual = run(name, tensors, CONFIG)
    for programs in (1, 2):
        found = run(name, tensors, PERSISTENT, programs, programs=programs)
        torch.testing.assert_close(found[0], usual[0], atol=1e-4, rtol=1e-4)
        # Sums of dQ are in no fixed order.
        assert all(map(torch.equal, found[1:], usual[1:]))


NEEDED = {
    "room for q": (False, "mbarrier.arrive(q_empty.index(stage), count=1)", "pass"),
    "room for dO": (False, "mbarrier.arrive(do_empty.index(stage), count=1)", "pass"),
    "phases of q": (False, "mbarrier.wait(q_full.index(stage), phase)", "pass"),
    "both halves of dS": (False, "    meet()\n", "    pass\n"),
    "both halves of dS, wide": (True, "    meet()\n    making_q", "    pass\n    making_q"),
    "the slopes are there": (True, "        await_announced()\n", "        pass\n"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_the_machine_notices(run, name):
    wide, old, new = NEEDED[name]
    tensors = inputs_of(140, 40, 1)
    usual = run("full", tensors, CONFIG, 1, wide)

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    def noticed(seed: int) -> bool:
        try:
            found = run("full", tensors, CONFIG, seed, wide, change)
        except AssertionError:
            return True
        return any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(found, usual, strict=True))

    assert any(map(noticed, range(1, 7)))


NEEDED_AGAIN = {
    "room for keys": ("        mbarrier.arrive(kv_empty, count=1)\n", "        pass\n"),
    "keys have been read": ("mbarrier.wait(kv_empty, (turn & 1) ^ 1)", "pass"),
    "phases of k": ("mbarrier.wait(k_full, turn & 1)", "pass"),
    "phases of v": ("mbarrier.wait(v_full, turn & 1)", "pass"),
    "items are read": ("mbarrier.wait(item_empty, (turn & 1) ^ 1)", "pass"),
    "items are written": ("            mbarrier.wait(item_full, turn & 1)", ""),
    "query tiles go on": ("    count = done\n    before", "    count = 0\n    before"),
    "zero at the end": ("gl.store(COUNTER, 0)", "pass"),
    "bits are there": ("mbarrier.wait(kept_full.index(stage), (count // STAGES) & 1)", "pass"),
}


@pytest.mark.parametrize("name", NEEDED_AGAIN)
def test_the_machine_notices_in_persistent_programs(run, name):
    old, new = NEEDED_AGAIN[name]
    # Many query tiles, and items so short that the producer is ahead by whole items.
    several = [inputs_of(140, 90, 1), inputs_of(30, 90, 2)]
    program = "dropout" if "bits" in name else "causal"
    usual = [run(program, tensors, CONFIG, 1) for tensors in several]

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    def noticed(seed: int) -> bool:
        try:
            found = [
                run(program, tensors, PERSISTENT, seed, change=change, programs=2)
                for tensors in several
            ]
        except AssertionError:
            return True
        return any(
            not torch.allclose(a, b, atol=1e-3)
            for some, others in zip(found, usual, strict=True)
            for a, b in zip(some, others, strict=True)
        )

    assert any(map(noticed, range(1, 7)))


LEAVE = "mbarrier.arrive(pairs_empty.index(PART), count=1)"
WAIT = "mbarrier.wait(pairs_full.index(PART), count & 1)"
NEEDED_FOR_PAIRS = {
    "tiles have come": [(f"    {WAIT}", "    pass")],
    "phases": [(WAIT, "mbarrier.wait(pairs_full.index(PART), 0)")],
    "room for tiles": [(LEAVE, "pass")],
    "tiles have been read": [("mbarrier.wait(pairs_empty.index(part), (count & 1) ^ 1)", "pass")],
    "read before they go": [
        (LEAVE, "pass"), ("    pair_parts = read_pairs(", f"    {LEAVE};pair_parts = read_pairs("),
    ],
    "heads": [("tma_load(pair0_desc, [h, ", "tma_load(pair0_desc, [0 * h, ")],
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED_FOR_PAIRS)
@pytest.mark.parametrize("form", ["usual", "wide", "persistent"])
def test_the_machine_notices_tiles_of_pairs(run, name, form):
    tensors, wide = inputs_of(140, 90, 2), form == "wide"
    usual = run("bias", tensors, CONFIG, 1)

    def change(text: str) -> str:
        for old, new in NEEDED_FOR_PAIRS[name]:
            assert old in text
            text = text.replace(old, new)
        return text

    def noticed(seed: int) -> bool:
        config = PERSISTENT if form == "persistent" else CONFIG
        try:
            found = run("bias", tensors, config, seed, wide, change, 2)
        except AssertionError:
            return True
        # No number either where it has not come.
        return not all(torch.allclose(a, b, atol=1e-2) for a, b in zip(found, usual, strict=True))

    assert any(map(noticed, range(1, 7)))


def distances_by(
    run: Any, name: str, tensors: list[torch.Tensor], *more: Any, **changes: Any
) -> Any:
    """Sums of dS by distance, (heads, from minus all keys of whole tiles on)."""
    q_len, kv_tiles = tensors[0].shape[2], -(-tensors[1].shape[2] // CONFIG.block_n)
    step = STATISTICS_PADDING.value
    padded = -(-q_len // step) * step
    sums = torch.zeros(1, 2, kv_tiles, padded + kv_tiles * CONFIG.block_n)
    run(name, tensors, *more, distances=sums, **changes)
    return sums[0].sum(1)


def distances_of(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """As :func:`distances_by`, by torch."""
    q, k, v, do = (x.float() for x in tensors)
    added = torch.zeros(1, 2, q.shape[2], k.shape[2], requires_grad=True)
    out, _ = attention_of(name, q, k, v, added)
    (slopes,) = torch.autograd.grad(out, added, do)
    first = -(-k.shape[2] // CONFIG.block_n) * CONFIG.block_n
    step = STATISTICS_PADDING.value
    found = torch.zeros(2, -(-q.shape[2] // step) * step + first)
    for distance in range(1 - k.shape[2], q.shape[2]):
        lines = slopes[0].diagonal(-distance, 1, 2)
        found[:, first + distance] = lines.sum(-1)
    return found


SUMMED = ("full", "causal", "window", "some rows", "nothing", "alibi", "bias", "table")


@pytest.mark.parametrize(("name", "shape"), [case for case in CASES if case.values[0] in SUMMED])
def test_sums_along_diagonals(run, name, shape):
    tensors = inputs_of(*SHAPES[shape])
    expected = distances_of(name, tensors)
    one_stage = replace(CONFIG, stages=1)
    for seed, config in enumerate((CONFIG, one_stage, PERSISTENT, PERSISTENT)):
        found = distances_by(run, name, tensors, config, seed, programs=1 + seed % 2)
        torch.testing.assert_close(found, expected, atol=0.02, rtol=4e-3)


ANNOUNCE = "mbarrier.arrive(ds_full.index(count % 2), count=1)"
NEEDED_TO_ADD = {
    "dS is there": [("    mbarrier.wait(ds_full.index(place), (count // 2) & 1)\n", "")],
    "phases of dS": [("ds_full.index(place), (count // 2) & 1", "ds_full.index(place), 0")],
    "dS is announced": [(ANNOUNCE, "pass")],
    "both have written": [
        (ANNOUNCE, "pass"), ("    meet()\n", f"    if PART == 0: {ANNOUNCE}\n    meet()\n"),
    ],
    "dS has been read": [
        ("            if count > done:\n                add_tile(count - 1, sums_before, ds_s",
         "            if count > done + 1:\n                add_tile(count - 2, sums_before, ds_s"),
    ],
    "the last tile": [("\n    if count > done:\n", "\n    if False:\n")],
    "heads": [("((b * heads + h) * kv_tiles + tile)", "(b * heads * kv_tiles + tile)")],
    "places": [("            sums_before = line + first", "            sums_before = line")],
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED_TO_ADD)
def test_the_machine_notices_sums_along_diagonals(run, name):
    several = [inputs_of(240, 40, 1), inputs_of(100, 90, 2)]
    usual = [distances_of("full", tensors) for tensors in several]

    def change(text: str) -> str:
        for old, new in NEEDED_TO_ADD[name]:
            assert old in text
            text = text.replace(old, new)
        return text

    def noticed(seed: int) -> bool:
        try:
            found = [
                distances_by(run, "full", tensors, PERSISTENT, seed, change=change, programs=2)
                for tensors in several
            ]
        except AssertionError:
            return True
        return any(not torch.allclose(a, b, atol=0.05) for a, b in zip(found, usual, strict=True))

    assert any(map(noticed, range(1, 9)))
