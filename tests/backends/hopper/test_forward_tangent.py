"""The text of the kernel that makes results and tangents, run as Python.

Gluon has no interpreter; ``conftest.py`` has what takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.gluon_machine import altered, lists_of

from attndsl.backends.hopper.generate_tangent import generate_tangent
from attndsl.backends.hopper.own_tiles import own_tiles
from attndsl.backends.triton.cross import example_call, parse_target
from attndsl.backends.triton.kernels import plan_loop
from attndsl.backends.triton.specialise import specialise, with_forms
from attndsl.backends.triton.tiles import Config
from attndsl.pipeline import lower
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

    Positions = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

WIDTH = 8
CONFIG = Config(16, 8, 4, 2, 2, 240)
PERSISTENT = replace(CONFIG, persistent=True)


@dataclass(frozen=True)
class Program:
    """A program, and what it says in torch: of heads (H, 1, 1), queries (Q, 1) and keys (1, K)."""

    text: str
    mask: Callable[..., torch.Tensor] = lambda h, q, kv: (q >= kv) | (h < 0)
    score: Callable[..., torch.Tensor] = lambda s, h, q, kv: s
    sink: Callable[[torch.Tensor], torch.Tensor] | None = None


def everything(h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q + kv + h) > -1


def slanted(s: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return s - 0.1 * (h + 1) * (q - kv)


PROGRAMS = {
    "full": Program("score", everything),
    "causal": Program("causal()"),
    "window": Program("sliding_window(20)", lambda h, q, kv: (q >= kv) & (q - kv < 20)),
    "some rows": Program("q < 30 and kv >= q", lambda h, q, kv: (q < 30) & (kv >= q)),
    "nothing": Program("q < 0", lambda h, q, kv: q + 0 * kv < 0),
    "documents": Program(
        "tensor doc[q_len]: int\nmask = q >= kv and doc[q] == doc[kv]",
        lambda h, q, kv: (q >= kv) & (q // 13 == kv // 13),
    ),
    "column": Program("mask = causal()\nscore = score - 0.1 * (h + 1) * (q - kv)", score=slanted),
    "cap": Program(
        "mask = causal()\nscore = softcap(2.0)",
        score=lambda s, h, q, kv: 2 * torch.tanh(s / 2),
    ),
    "signs": Program(
        "mask = causal()\nscore = (1 - h) * score", score=lambda s, h, q, kv: (1 - h) * s
    ),
    "steep": Program(
        "mask = causal()\nscore = 90 * tanh((2 - h) * score / 90) + q / 8",
        score=lambda s, h, q, kv: 90 * torch.tanh((2 - h) * s / 90) + q / 8,
    ),
    "by pairs": Program(
        "score = score * (1 + (q + kv) % 3) + (q * kv) % 5", everything,
        lambda s, h, q, kv: s * (1 + (q + kv) % 3) + (q * kv) % 5,
    ),
    "sink": Program("mask = causal()\nsink = 0.5 - h", sink=lambda h: 0.5 - h),
    "column and sink": Program(
        "mask = q < 30 and kv >= q\nscore = score - 0.1 * (h + 1) * (q - kv)\nsink = 0.5",
        lambda h, q, kv: (q < 30) & (kv >= q), slanted, lambda h: 0.5 + 0 * h,
    ),
}  # fmt: skip
SHAPES = ((40, 40, 2, 8), (33, 50, 4, 8), (20, 7, 1, 8), (40, 24, 2, 16))
"""Queries, keys, heads of keys, columns of values."""


@dataclass(frozen=True)
class Inputs:
    """(batch, heads, length, width), in halves: q, k and v, and where they move."""

    points: tuple[torch.Tensor, ...]
    moved: tuple[torch.Tensor, ...]


def inputs_of(q_len: int, kv_len: int, kv_heads: int, value_width: int) -> Inputs:
    generator = torch.Generator().manual_seed(q_len + kv_len)
    shapes = ((4, q_len, WIDTH), (kv_heads, kv_len, WIDTH), (kv_heads, kv_len, value_width))
    both = [
        tuple(torch.randn(2, *shape, generator=generator).half() for shape in shapes)
        for _ in range(2)
    ]
    return Inputs(*both)


def expected(
    name: str, inputs: Inputs, moving: str = "qkv", origins: tuple[int, int] = (0, 0),
    scale: float = WIDTH**-0.5,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Output, log-sum-exp and their tangents, in fp64."""
    program = PROGRAMS[name]
    points = tuple(x.double() for x in inputs.points)
    moved = [
        x.double() if letter in moving else torch.zeros_like(x).double()
        for letter, x in zip("qkv", inputs.moved, strict=True)
    ]
    h = torch.arange(4)[:, None, None]
    q = origins[0] + torch.arange(points[0].shape[2])[:, None]
    kv = origins[1] + torch.arange(points[1].shape[2])[None, :]
    live = program.mask(h, q, kv).expand(4, len(q), kv.shape[1])
    group = 4 // points[1].shape[1]

    def attend(q_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = program.score(scale * (q_rows @ k.mT), h, q, kv).double()
        score = torch.where(live, score, -torch.inf)
        if program.sink is not None:
            sink = program.sink(h).double().expand(*score.shape[:3], 1)
            score = torch.cat([score, sink], -1)
        # Rows with no live pair have no derivatives: their scores are others.
        some = live.any(-1, keepdim=True)
        lse = torch.where(some, score, 0.0).logsumexp(-1, keepdim=True)
        weights = torch.where(live, torch.exp(score[..., : live.shape[-1]] - lse), 0.0)
        return weights @ v, torch.where(some, lse, -torch.inf).squeeze(-1)

    (out, lse), (out_moved, lse_moved) = torch.func.jvp(attend, points, tuple(moved))
    return out, lse, out_moved, lse_moved


def run_text(
    gluon: SimpleNamespace, name: str, inputs: Inputs, moving: str = "qkv", config: Config = CONFIG,
    seed: int = 0, dtype: torch.dtype = torch.bfloat16, origins: tuple[int, int] = (0, 0),
    scale: float = WIDTH**-0.5, programs: int = 3, wide: bool = False,
    change: Any = lambda text: text,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As :func:`expected`, of the generated kernel; ``change`` alters its text.

    Where it is ``wide``, shared memory has no room for an output beside q.
    """
    lowered = lower(Source(PROGRAMS[name].text), {})
    q, k, v = inputs.points
    width = v.shape[3]
    call = example_call(lowered, 64, 64 * width // WIDTH, dtype, {})
    call = replace(call, q_offset=origins[0], kv_offset=origins[1], scale=scale)
    special = specialise(lowered.program, call)
    special = with_forms(special, lowered.program, parse_target("cuda:90"))
    special = replace(special, moving_operands=moving)
    loop = plan_loop(lowered, special, "forward_tangent", config)
    shown = replace(config, block_n=64, stages=9) if wide else config
    text = change(generate_tangent(lowered, special, loop, shown))
    own = width != WIDTH or (config.persistent and not wide)
    assert f"OWN_OUTPUT = tl.constexpr({own})" in text
    text = text.replace("own.type.layout", "None")
    batch, heads, q_len, _ = q.shape
    items = -(-q_len // config.block_m) * batch * heads
    machine = gluon.Machine(seed, min(programs, items) if config.persistent else items)
    modules = gluon.Operations(machine).modules()
    modules["attndsl.backends.hopper.dialect"] = modules["attndsl.backends.hopper"].dialect
    kernel = gluon.module_of(text, modules)["attention_forward_tangent"]
    outs = [torch.full((*q.shape[:3], width), torch.nan, dtype=torch.float16) for _ in range(2)]
    rows = [torch.full((batch * heads * q_len,), torch.nan) for _ in range(2)]
    blocks = (config.block_m // config.consumers, config.block_n, config.block_n)
    arguments: dict[str, Any] = {
        f"{letter}_desc": gluon.Descriptor(x, block)
        for letter, x, block in zip("qkv", inputs.points, blocks, strict=True)
    }
    # What does not move is never read.
    still = [torch.full_like(x, torch.nan) for x in inputs.moved]
    arguments |= {
        f"{letter}_moved_desc": gluon.Descriptor(x if letter in moving else none, block)
        for letter, x, none, block in zip("qkv", inputs.moved, still, blocks, strict=True)
    }
    counter = torch.zeros((), dtype=torch.int32)
    sizes = {"batch": batch, "heads": heads, "kv_heads": k.shape[1], "q_len": q_len}
    doc = torch.arange(max(q_len, k.shape[2]), dtype=torch.int32) // 13
    places = torch.arange(q_len)[:, None], torch.arange(k.shape[2])[None, :]
    allowed = PROGRAMS[name].mask(torch.zeros((), dtype=torch.int64), *places)
    arguments |= {
        "o_desc": gluon.Descriptor(outs[0], blocks[0]),
        "o_moved_desc": gluon.Descriptor(outs[1], blocks[0]),
        "LSE": gluon.Pointer(rows[0]), "LSE_MOVED": gluon.Pointer(rows[1]),
        "COUNTER": gluon.Pointer(counter), "scale": scale,
        **{size: gluon.number(value) for size, value in sizes.items()},
        "kv_len": gluon.number(k.shape[2]), "q_origin": origins[0], "kv_origin": origins[1],
        "together": gluon.number(3), "HEAD_DIM": WIDTH, "D": WIDTH, "DV": width,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.stages,
        "CONSUMERS": config.consumers, "REGISTERS": config.registers,
        "Q_KIND": "offset", "KV_KIND": "offset",
        "t_doc": gluon.Pointer(doc[:q_len]), "size0_doc": gluon.number(q_len),
        **lists_of(
            allowed, (config.block_m, config.block_n), cut_is_full=False,
            parts=own_tiles(lowered, special, "forward_tangent", config).parts,
        ),
    }  # fmt: skip
    taken = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    for program in range(machine.programs):
        machine.start(program, kernel, *(arguments[name] for name in taken))
    machine.run()
    assert not counter
    lse, lse_moved = (x.view(batch, heads, q_len) for x in rows)
    return outs[0], lse, outs[1], lse_moved


def close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(
        torch.allclose(own.double(), golden, atol=1e-2 * (1 + float(size)), rtol=4e-3)
        for own, golden in zip(found, wanted, strict=True)
        for size in [golden[golden.isfinite()].abs().max() if golden.isfinite().any() else 0]
    )


@pytest.fixture
def run(gluon: SimpleNamespace) -> Any:
    """Runs the kernel of a program, see :func:`run_text`."""
    return partial(run_text, gluon)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    (name, shape) if place % len(SHAPES) == shape else slow(name, shape)
    for place, name in enumerate(PROGRAMS)
    for shape in range(len(SHAPES))
    if name != "documents" or SHAPES[shape][0] >= SHAPES[shape][1]
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_results_and_tangents(run, name, shape):
    inputs = inputs_of(*SHAPES[shape])
    found = run(name, inputs, seed=shape)
    assert close(found, expected(name, inputs))


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_persistent_programs_compute_the_same(run, name, shape):
    inputs = inputs_of(*SHAPES[shape])
    once = run(name, inputs, seed=shape)
    for programs, wide in ((3, False), (7, SHAPES[shape][3] == WIDTH)):
        found = run(name, inputs, config=PERSISTENT, seed=programs, programs=programs, wide=wide)
        assert all(map(torch.equal, found, once))


@pytest.mark.parametrize(
    ("name", "moving"),
    [("causal", "q"), ("causal", "k"), ("causal", "v"), ("causal", "qk"), ("cap", "v"),
     ("cap", "qv"), ("cap", "kv"), ("signs", "v")],
)  # fmt: skip
def test_what_does_not_move_is_not_read(run, name, moving):
    inputs = inputs_of(*SHAPES[0])
    found = run(name, inputs, moving, seed=len(moving))
    assert close(found, expected(name, inputs, moving))
    again = run(name, inputs, moving, PERSISTENT, seed=len(moving))
    assert all(map(torch.equal, again, found))


FORMS = {
    "one stage": replace(CONFIG, stages=1),
    "three stages": replace(CONFIG, stages=3),
    "three consumers": replace(CONFIG, block_m=24, consumers=3),
    "one consumer": replace(CONFIG, block_m=8, consumers=1),
    "early": replace(CONFIG, early=True),
    "persistent, one stage": replace(PERSISTENT, stages=1),
    "persistent, three stages": replace(PERSISTENT, stages=3),
    "persistent, three consumers": replace(PERSISTENT, block_m=24, consumers=3),
    "persistent, one consumer": replace(PERSISTENT, block_m=8, consumers=1),
    "persistent, early": replace(PERSISTENT, early=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(run, form):
    inputs = inputs_of(*SHAPES[0])
    for name, dtype in (("causal", torch.bfloat16), ("cap", torch.float16)):
        found = run(name, inputs, config=FORMS[form], seed=1, dtype=dtype)
        assert close(found, expected(name, inputs))


@pytest.mark.parametrize("name", ["causal", "cap", "column", slow("window")])
def test_positions_and_scales(run, name):
    inputs = inputs_of(*SHAPES[1])
    for origins, scale in (((3, 5), 0.4), ((0, 9), -0.4)):
        found = run(name, inputs, origins=origins, scale=scale)
        assert close(found, expected(name, inputs, origins=origins, scale=scale))


LEAVE_Q = "mbarrier.arrive(q_empty.index(PART), count=1)"
FIRST_PARTIAL = (
    "    if FORWARD_HAS_PARTIAL:\n        kv_tile = partial_tile(\n            begin_partial,"
)
# What it must not do without: taken out of the text, the machine notices.
NEEDED = {
    "room for k": ("mbarrier.wait(k_empty.index(stage), phase ^ 1)", "pass"),
    "room for v": ("mbarrier.wait(v_empty.index(stage), phase ^ 1)", "pass"),
    "k has been read": ("mbarrier.arrive(k_empty.index(stage), count=1)", "pass"),
    "v has been read": ("mbarrier.arrive(v_empty.index(stage), count=1)", "pass"),
    "k has come": ("mbarrier.wait(k_full.index(stage), phase)", "pass"),
    "v has come": ("mbarrier.wait(v_full.index(stage), phase)", "pass"),
    "q has come": ("mbarrier.wait(q_full.index(PART), turn & 1)", "pass"),
    "the first ones pass": ("leave_tiles(done, done + begin_partial,", "leave_tiles(0, 0,"),
    "the last ones pass": ("leave_tiles(done + left, done + tiles,", "leave_tiles(0, 0,"),
    "phases": ("stage, phase = slot_of(count, STAGES)", "stage, phase = count % STAGES, 0"),
    "all bytes of q": ("(2 if MOVES_Q else 1)", "1"),
    "all bytes of k": ("(2 if MOVES_K else 1)", "1"),
    "all bytes of v": ("(2 if MOVES_V else 1)", "1"),
    "the output is read": ("    tma_wait(0)\n    place.", "    place."),
    "the output is seen": (
        "    fence_async_shared()\n    tma_store(o_moved",
        "    tma_store(o_moved",
    ),
}


NEEDED_WHERE_PERSISTENT = {
    "room for q": (f"    {LEAVE_Q}", "    pass"),
    "q has been read": ("mbarrier.wait(q_empty.index(part), (turn & 1) ^ 1)", "pass"),
    "q is read to the end": (
        LEAVE_Q,
        "pass",
        FIRST_PARTIAL,
        f"    {LEAVE_Q}\n{FIRST_PARTIAL}",
    ),
    "phases of q": (
        "mbarrier.wait(q_full.index(PART), turn & 1)",
        "mbarrier.wait(q_full.index(PART), 0)",
    ),
    "items before": ("PART, done + step, kv_tile", "PART, step, kv_tile"),
    "PARTIAL tiles before": ("PART, done + partial_tiles + step", "PART, done + step"),
    "the output is read": ("            tma_wait(0)\n    else", "            pass\n    else"),
    "items are read": ("mbarrier.wait(item_empty, (turn & 1) ^ 1)", "pass"),
    "items are written": ("            mbarrier.wait(item_full, turn & 1)", ""),
    "zero at the end": ("gl.store(COUNTER, 0)", "pass"),
}
NEEDED_IN_PLACE_OF_Q = {
    "the output is read": (
        "        tma_wait(0)\n    if PERSISTENT and not",
        "        pass\n    if PERSISTENT and not",
    ),
    "room for q": (f"        {LEAVE_Q}\n    return", "        pass\n    return"),
}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("one item", name) for name in NEEDED),
        *(("persistent", name) for name in NEEDED_WHERE_PERSISTENT),
        *(("in place of q", name) for name in NEEDED_IN_PLACE_OF_Q),
    ],
)
def test_the_machine_notices(run, form, name):
    inputs = inputs_of(*SHAPES[0])
    out = run("causal", inputs)
    config = CONFIG if form == "one item" else PERSISTENT
    needed = {
        "one item": NEEDED, "persistent": NEEDED_WHERE_PERSISTENT,
        "in place of q": NEEDED_IN_PLACE_OF_Q,
    }  # fmt: skip
    changes = needed[form][name]

    def change(text: str) -> str:
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            text = altered(text, old, new)
        return text

    def noticed(seed: int) -> bool:
        try:
            found = run(
                "causal", inputs, config=config, seed=seed, programs=2, change=change,
                wide=form == "in place of q",
            )  # fmt: skip
        except AssertionError:
            return True
        return not all(map(torch.equal, found, out))

    assert any(map(noticed, range(1, 40)))
