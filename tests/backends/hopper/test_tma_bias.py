"""Captured tensors that Hopper kernels read by tiles: which, from where, what changes with them."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.jobs import configs_of, hopper_source, task_of
from support.mutation import number_of
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import attndsl
from attndsl.backends.base import Backward, Call, Wants
from attndsl.backends.emit.facts import PairTile, facts_of, with_forms
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.hopper import family as family_module
from attndsl.backends.hopper import hopper_layout as layout_module
from attndsl.backends.hopper import tma_bias
from attndsl.backends.hopper.descriptor_types import blocks_of
from attndsl.backends.hopper.family import Hopper
from attndsl.backends.hopper.shared_memory import query_slots, shared_bytes
from attndsl.backends.hopper.tma_bias import is_readable, pair_tiles, window, with_pair_tiles
from attndsl.backends.hopper.tma_copies import room_for
from attndsl.backends.kernels import modules
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.kernels.target import machine_of, parse_target
from attndsl.backends.triton.family import Portable
from attndsl.runtime.program_store import default_cache

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 4, 2, 48, 64
BIAS = "tensor bias[heads, q_len, kv_len]: float; score = score + bias[h, q, kv]"


def call_of(text, tensors, **changes):
    """A call with ``tensors``, of the lengths above."""
    lowered = attndsl.compile(text).lowered
    call = example_call(lowered, 64, 64, torch.bfloat16, tensors)
    q = torch.empty(BATCH, HEADS, Q_LEN, 64, dtype=torch.bfloat16)
    k = torch.empty(BATCH, KV_HEADS, KV_LEN, 64, dtype=torch.bfloat16)
    return lowered, call._replace(q=q, k=k, v=k, **changes)


def padded(*shape, dtype=torch.bfloat16, by=8):
    """A tensor whose rows are ``by`` elements apart more than they need."""
    return torch.zeros(*shape[:-1], shape[-1] + by, dtype=dtype)[..., : shape[-1]]


B, H, HKV, Q, KV = "batch", "heads", "kv_heads", "q_len", "kv_len"
SIZES = {B: BATCH, H: HEADS, HKV: KV_HEADS, Q: Q_LEN, KV: KV_LEN}
INDEX = {B: "b", H: "h", HKV: "hkv", Q: "q", KV: "kv"}


def program_of(dims, kind="float"):
    lookup = f"t[{', '.join(INDEX[dim] for dim in dims)}]"
    use = f"score = score + {lookup}" if kind == "float" else f"mask = {lookup}"
    return f"tensor t[{', '.join(dims)}]: {kind}; {use}"


@pytest.mark.parametrize(
    ("dims", "leading"),
    [((Q, KV), ()), ((H, Q, KV), ("h",)), ((B, H, Q, KV), ("b", "h")), ((HKV, Q, KV), ("hkv",)),
     ((H, B, Q, KV), ("h", "b"))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.bool])
def test_tensors_that_are_read_by_tiles(dims, leading, dtype):
    kind = "bool" if dtype is torch.bool else "float"
    tensor = torch.zeros([SIZES[dim] for dim in dims], dtype=dtype)
    lowered, call = call_of(program_of(dims, kind), {"t": tensor})
    (tile,) = pair_tiles(lowered, call, Task.FORWARD)
    name = {"torch.bool": "i8", "torch.float32": "fp32", "torch.float16": "fp16"}
    assert tile == PairTile(
        "t", tuple(INDEX[dim] for dim in dims), leading, name.get(str(dtype), "bf16")
    )
    own = window(tile, call)
    assert own.shape == tensor.shape
    assert own.stride() == tensor.stride()
    assert own.data_ptr() == tensor.data_ptr()


def test_dims_of_one_element_and_of_stride_zero_are_none():
    dims = (B, H, Q, KV)
    one = torch.zeros(1, 1, Q_LEN, KV_LEN, dtype=torch.bfloat16)
    for tensor in (one, one.expand(BATCH, HEADS, -1, -1)):
        lowered, call = call_of(program_of(dims), {"t": tensor})
        (tile,) = pair_tiles(lowered, call, Task.FORWARD)
        assert (tile.indices, tile.leading) == (("b", "h", "q", "kv"), ())
        assert window(tile, call).shape == (Q_LEN, KV_LEN)
    some = torch.zeros(1, HEADS, Q_LEN, KV_LEN, dtype=torch.bfloat16).expand(BATCH, -1, -1, -1)
    lowered, call = call_of(program_of(dims), {"t": some})
    (tile,) = pair_tiles(lowered, call, Task.FORWARD)
    assert tile.leading == ("h",)


def test_one_row_has_a_stride_that_is_possible():
    lowered, call = call_of(BIAS, {"bias": torch.zeros(HEADS, 1, KV_LEN).bfloat16()})
    call = call._replace(q=call.q[:, :, :1])
    (tile,) = pair_tiles(lowered, call, Task.FORWARD)
    assert window(tile, call).stride() == (KV_LEN, 16, 1)


def ragged(size):
    return torch.zeros(HEADS, Q_LEN, KV_LEN + size, dtype=torch.bfloat16)[..., :KV_LEN]


COPIED = {
    "rows of no multiple of 16 bytes": ragged(4),
    "an address of no such multiple": torch.zeros(HEADS, Q_LEN, 2 * KV_LEN).bfloat16()[
        ..., 1 : KV_LEN + 1
    ],
    "keys that lie apart": torch.zeros(HEADS, KV_LEN, Q_LEN).bfloat16().mT,
    "heads that lie apart": torch.zeros(HEADS * Q_LEN * KV_LEN + HEADS, dtype=torch.bfloat16)
    .as_strided((HEADS, Q_LEN, KV_LEN), (Q_LEN * KV_LEN + 1, KV_LEN, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIED)
def test_tensors_that_are_copied_first(name):
    tensor = COPIED[name]
    lowered, call = call_of(BIAS, {"bias": tensor})
    (tile,) = pair_tiles(lowered, call, Task.BACKWARD)
    own = window(tile, call)
    assert own.shape == tensor.shape
    assert own.stride() == tensor.stride()
    assert not is_readable(own)
    room = room_for(own)
    assert is_readable(room)
    assert room.shape == own.shape
    # A forward saves less: two batch entries are too few, four are not, of half of the pairs are.
    assert pair_tiles(lowered, call, Task.FORWARD) == ()
    call = call._replace(q=call.q.repeat(2, 1, 1, 1))
    assert pair_tiles(lowered, call, Task.FORWARD) == (tile,)
    lowered = attndsl.compile("mask = causal(); " + BIAS).lowered
    assert pair_tiles(lowered, call, Task.FORWARD) == ()
    assert pair_tiles(lowered, call, Task.BACKWARD) == (tile,)


def test_copies_have_but_what_calls_read():
    bias = torch.zeros(HEADS, 3 * Q_LEN, 4 * KV_LEN + 1)
    lowered, call = call_of(BIAS, {"bias": bias.bfloat16()}, q_offset=7, kv_offset=KV_LEN)
    (tile,) = pair_tiles(lowered, call, Task.BACKWARD)
    assert window(tile, call).shape == (HEADS, 7 + Q_LEN, 2 * KV_LEN)


@pytest.mark.parametrize(
    ("sizes", "dtype", "steps"),
    [((3, 100, 1001), torch.float32, (100416, 1004, 1)),
     ((3, 100, 1001), torch.bool, (100864, 1008, 1)),
     ((2, 16, 2047), torch.float32, (32768, 2048, 1)),
     ((2, 16, 2049), torch.bfloat16, (33792, 2112, 1)),
     ((9, 7), torch.float32, (8, 1))],
)  # fmt: skip
def test_room_for_copies(sizes, dtype, steps):
    room = room_for(torch.empty(sizes, dtype=dtype))
    assert room.stride() == steps
    assert is_readable(room)


WORTH = {
    "no mask": (BIAS, True),
    "half of the pairs": ("mask = causal(); " + BIAS, True),
    "few pairs": ("mask = sliding_window(8); " + BIAS, False),
    "nobody knows how many": (
        "tensor d[q_len]: int; mask = d[q] == d[kv]; " + BIAS, False,
    ),
    "the mask itself": ("tensor bias[q_len, kv_len]: bool; mask = bias[q, kv]", True),
}  # fmt: skip


@pytest.mark.parametrize("name", WORTH)
def test_what_is_worth_a_copy(name):
    text, worth = WORTH[name]
    odd = torch.zeros(HEADS, Q_LEN, KV_LEN + 1)[..., :KV_LEN]
    odd = odd[0].bool() if name == "the mask itself" else odd.bfloat16()
    odd = odd.new_zeros(*odd.shape[:-1], KV_LEN + 1)[..., :KV_LEN]
    tensors = {"bias": odd, "d": torch.zeros(Q_LEN, dtype=torch.int32)}
    lowered, _ = call_of(text, {})
    tensors = {tensor.name: tensors[tensor.name] for tensor in lowered.program.tensors}
    lowered, call = call_of(text, tensors)
    assert bool(pair_tiles(lowered, call, Task.BACKWARD)) == worth


ODD = {
    "one row for all": (
        BIAS, {"bias": torch.zeros(HEADS, 1, KV_LEN).bfloat16().expand(-1, Q_LEN, -1)}, {},
    ),
    "one key for all": (
        BIAS, {"bias": torch.zeros(HEADS, Q_LEN, 1).bfloat16().expand(-1, -1, KV_LEN)}, {},
    ),
    "rows that would be clamped": (BIAS, {"bias": padded(HEADS, Q_LEN - 1, KV_LEN)}, {}),
    "keys that would be clamped": (BIAS, {"bias": padded(HEADS, Q_LEN, KV_LEN - 1)}, {}),
    "heads that would be clamped": (BIAS, {"bias": padded(HEADS - 1, Q_LEN, KV_LEN)}, {}),
    "a position beyond": (BIAS, {"bias": padded(HEADS, Q_LEN, KV_LEN)}, {"q_offset": 1}),
    "a position between multiples of 16 bytes": (
        BIAS, {"bias": padded(HEADS, Q_LEN, 2 * KV_LEN)}, {"kv_offset": 4},
    ),
    "a position before": (BIAS, {"bias": padded(HEADS, Q_LEN, KV_LEN)}, {"kv_offset": -1}),
    "a position on the device": (
        BIAS, {"bias": padded(HEADS, Q_LEN, KV_LEN)}, {"q_offset": torch.tensor(0)},
    ),
    "positions that are looked up": (
        BIAS, {"bias": padded(HEADS, Q_LEN, KV_LEN)}, {"q_index": torch.arange(Q_LEN)},
    ),
    "wide numbers": (BIAS, {"bias": padded(HEADS, Q_LEN, KV_LEN).double()}, {}),
    "nothing": (BIAS, {"bias": torch.zeros(0, Q_LEN, KV_LEN)}, {}),
    "the other order": (
        "tensor t[kv_len, q_len]: float; score = score + t[kv, q]",
        {"t": padded(KV_LEN, Q_LEN)}, {},
    ),
    "expressions": (
        "tensor t[q_len, kv_len]: float; score = score + t[q, kv // 2]",
        {"t": padded(Q_LEN, KV_LEN)}, {},
    ),
    "integers": (
        "tensor t[q_len, kv_len]: int; mask = t[q, kv] > 0",
        {"t": padded(Q_LEN, KV_LEN, dtype=torch.int32)}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_tensors_that_are_looked_up(name):
    text, tensors, changes = ODD[name]
    lowered, call = call_of(text, tensors, **changes)
    assert pair_tiles(lowered, call, Task.FORWARD) == ()


MASK_BY_HEAD = "tensor bias[heads, q_len, kv_len]: bool; mask = bias[h, q, kv]"


def test_positions_at_multiples_of_16_bytes():
    bias = padded(HEADS, Q_LEN, 2 * KV_LEN)
    for tensor, first in ((bias, 8), (bias.float(), 4), (bias > 0, 16)):
        text = BIAS if tensor.is_floating_point() else MASK_BY_HEAD
        for offset in (first // 2, first, 2 * first):
            lowered, call = call_of(text, {"bias": tensor}, kv_offset=offset)
            found = pair_tiles(lowered, call, Task.FORWARD)
            assert len(found) == (offset % first == 0)


def test_from_positions_within_the_tensor():
    bias = padded(HEADS, 2 * Q_LEN, 2 * KV_LEN)
    lowered, call = call_of(BIAS, {"bias": bias}, q_offset=7, kv_offset=KV_LEN)
    (tile,) = pair_tiles(lowered, call, Task.FORWARD)
    # Rows and keys that are not the call's are zeros.
    assert window(tile, call).shape == (HEADS, 7 + Q_LEN, 2 * KV_LEN)


def chosen(text, tensors, direction, dim=128):
    lowered, call = call_of(text, tensors)
    call = call._replace(q=call.q.repeat(1, 1, 1, dim // 64), k=call.k.repeat(1, 1, 1, dim // 64))
    call = call._replace(v=call.k)
    facts = facts_of(lowered.program, call)
    facts = with_forms(facts, lowered.program, parse_target("cuda:90"))
    return lowered, with_pair_tiles(facts, lowered, call, task_of(direction))


@pytest.mark.parametrize("direction", ["forward", "backward_kv"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_find_room(direction, dim, dtype):
    bias = torch.zeros(HEADS, Q_LEN, KV_LEN, dtype=dtype)
    lowered, facts = chosen(BIAS, {"bias": bias}, direction, dim)
    # At head dim 256 a backward has 8 KB left.
    there = (direction, dim, dtype) != ("backward_kv", 256, torch.float32)
    assert bool(facts.pair_tiles) == there
    configs = configs_of(lowered, facts, direction)
    assert configs
    for config in configs:
        if there:
            assert shared_bytes(task_of(direction), facts, config) <= 232448
            block = blocks_of(task_of(direction), facts, config)["pair0_desc"]
            assert block.shape[0] == 1
            assert block.shape[2] * block.layout.element_bitwidth // 8 % 16 == 0
        else:
            assert "pair0_desc" not in blocks_of(task_of(direction), facts, config)


def test_a_tile_takes_the_place_of_the_next_queries():
    for dtype, slots in ((torch.bfloat16, 2), (torch.float32, 1)):
        bias = torch.zeros(HEADS, Q_LEN, KV_LEN, dtype=dtype)
        lowered, facts = chosen(BIAS, {"bias": bias}, "forward")
        config = configs_of(lowered, facts, "forward")[0]
        assert (config.block_n, config.persistent) == (128, True)
        assert query_slots(facts, config) == slots


def test_two_tensors_at_most():
    text = "; ".join(f"tensor t{n}[q_len, kv_len]: float" for n in range(3))
    text += "; score = score + " + " * ".join(f"t{n}[q, kv]" for n in range(3))
    tensors = {f"t{n}": padded(Q_LEN, KV_LEN) for n in range(3)}
    lowered, facts = chosen(text, tensors, "forward")
    assert len(facts.pair_tiles) == 2
    assert configs_of(lowered, facts, "forward")


def test_texts_say_how_tensors_are_read():
    bias = padded(HEADS, Q_LEN, KV_LEN)
    for direction in ("forward", "backward"):
        lowered, call = call_of(BIAS, {"bias": bias})
        tiled = hopper_source(lowered, call, direction, Wants())
        few = "mask = sliding_window(8); " + BIAS
        lowered, call = call_of(few, {"bias": ragged(4)})
        looked_up = hopper_source(lowered, call, direction, Wants())
        assert "def load_bias(" in tiled
        assert number_of(tiled, "return ((head.h, query, key),)")
        assert "tl.load(given.t_bias" not in tiled
        assert "def load_bias(" not in looked_up
        assert "tl.load(given.t_bias" in looked_up


def test_calls_of_other_strides_have_other_kernels():
    machine = machine_of("cuda:90")

    def key(tensor, **changes):
        lowered, call = call_of(BIAS, {"bias": tensor}, **changes)
        (job,) = Hopper().jobs(lowered, call, Task.FORWARD, None, None)
        return modules._key(job, "hopper", "forward", machine)

    one_row = torch.zeros(HEADS, 1, KV_LEN, dtype=torch.bfloat16).expand(-1, Q_LEN, -1)
    tiled, looked_up = key(padded(HEADS, Q_LEN, KV_LEN)), key(one_row)
    assert tiled != looked_up
    assert key(padded(HEADS, Q_LEN, KV_LEN, by=16)) == key(padded(HEADS, Q_LEN, KV_LEN, by=32))
    assert key(padded(HEADS, Q_LEN, KV_LEN), q_offset=1) != key(
        padded(HEADS, Q_LEN + 1, KV_LEN), q_offset=1
    )


def test_calls_from_other_positions_have_other_views():
    family = Hopper()
    _, call = call_of(BIAS, {"bias": padded(HEADS, 2 * Q_LEN, KV_LEN)})
    assert family.places(call) == ()
    places = {family.places(call._replace(q_offset=n)) for n in (1, 2)}
    assert len(places) == 2
    assert family.places(call._replace(q_offset=torch.tensor(1))) == (0,)
    plain = Call(call.q, call.k, call.v, 1.0, {}, q_offset=3)
    assert family.places(plain) == ()


def test_the_portable_backend_has_no_tiles():
    lowered, call = call_of(BIAS, {"bias": padded(HEADS, Q_LEN, KV_LEN)})
    (job,) = Portable().jobs(lowered, call, Task.FORWARD, None, None)
    assert job.facts.pair_tiles == ()


CAUSAL = "mask = causal(); "
FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
ON_GPU = {
    "bias": (CAUSAL + BIAS, ("heads", "q", "kv"), {}),
    "mask": ("tensor bias[q_len, kv_len]: bool; mask = bias[q, kv]", ("q", "kv"), {}),
    "mask of each entry": (
        "tensor bias[batch, q_len, kv_len]: bool; mask = bias[b, q, kv]", ("batch", "q", "kv"), {},
    ),
    "shared heads": (
        "tensor bias[batch, kv_heads, q_len, kv_len]: float; score = score + bias[b, hkv, q, kv]",
        ("batch", "kv_heads", "q", "kv"), {},
    ),
    "who sees whom": (
        "tensor bias[q_len, kv_len]: float; mask = bias[q, kv] > -1; "
        "score = 5 * tanh(score + bias[q, kv])",
        ("q", "kv"), {},
    ),
    "weights": (
        "tensor bias[heads, q_len, kv_len]: float; mask = causal(); "
        "weights = sigmoid(score + bias[h, q, kv])",
        ("heads", "q", "kv"), {},
    ),
    "from other positions": (
        "tensor bias[heads, n, m]: float; score = score + bias[h, q, kv]",
        ("heads", "q", "kv"), {"q_offset": 100, "kv_offset": 8},
    ),
}  # fmt: skip


def on_gpu(dims, options, lengths, dtype, by):
    """A capture on the GPU whose rows are ``by`` elements, and NaN where no pair looks."""
    q_len, kv_len = lengths
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2}
    q_end, kv_end = q_len + options.get("q_offset", 0), kv_len + options.get("kv_offset", 0)
    more = 70 if options else 0
    shape = (*(sizes[dim] for dim in dims[:-2]), q_end + more, by)
    tensor = torch.randn(shape, device="cuda")
    if dtype is torch.bool:
        return (tensor > 0)[..., : kv_end + more]
    tensor[..., q_end:, :] = tensor[..., kv_end:] = torch.nan
    return tensor.to(dtype)[..., : kv_end + more]


@pytest.fixture
def choices(monkeypatch):
    """How many tensors are read by tiles, for each layout that is made."""
    found = []

    def noted(*arguments):
        facts = with_pair_tiles(*arguments)
        found.append(len(facts.pair_tiles))
        return facts

    monkeypatch.setattr(family_module, "with_pair_tiles", noted)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(512, 640), (1000, 1333)], ids=["even", "ragged"])
@pytest.mark.parametrize("way", ["tiles", "copies", "lookups"])
def test_kernels(check, choices, monkeypatch, name, kind, dim, lengths, way):
    text, dims, options = ON_GPU[name]
    boolean = "mask" in name
    monkeypatch.setattr(tma_bias, "is_worth_a_copy", lambda *_: way == "copies")
    by = 1536 if way == "tiles" else 1537
    tensor = on_gpu(dims, options, lengths, torch.bool if boolean else FLOATS[kind], by)
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, 0, dim))
    inputs = check.inputs(
        place, torch.bfloat16, kv_heads=2, q_len=lengths[0], kv_len=lengths[1], options=options,
        captures={"bias": tensor},
    )  # fmt: skip
    golden, ref = (
        check.run(attndsl.compile(text, backend="reference"), inputs.to(dtype))
        for dtype in (torch.float64, torch.bfloat16)
    )
    # Copies would have no gaps between their rows.
    own = replace(inputs.to(torch.bfloat16), captures={"bias": tensor})
    found = check.run(attndsl.compile(text, backend="hopper"), own)
    spread = check.spread_of(text, inputs, torch.bfloat16)
    check.close(golden, ref, found, torch.bfloat16, spread=spread)
    room = (dim, kind, boolean) != (256, "fp32", False)
    tiled = way != "lookups"
    # Both are chosen where the first call begins to compile its backward, and where each runs.
    assert choices == 2 * [int(tiled), int(tiled and room)]


@pytest.mark.gpu
def test_calls_of_one_program_are_told_apart(check):
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, 256, 64))
    attention = attndsl.compile(CAUSAL + BIAS, backend="hopper")
    inputs = check.inputs(place, torch.bfloat16)
    for by in (256, 264, 257, 256):
        tensor = torch.randn(4, 256, by, device="cuda", dtype=torch.bfloat16)[..., :256]
        for moved in (tensor, tensor.clone()):
            own = replace(inputs.to(torch.bfloat16), captures={"bias": moved})
            text = CAUSAL + BIAS
            exact = check.run(attndsl.compile(text, backend="reference"), own)
            found = check.run(attention, own)
            for key, value in exact.items():
                torch.testing.assert_close(found[key], value, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("copied", [False, True])
def test_arguments_are_those_that_kernels_take(monkeypatch, copied):
    backend, launched = generated_backend(("hopper", "triton"), default_cache()), {}
    monkeypatch.setattr(tma_bias, "is_worth_a_copy", lambda *_: True)
    bias = torch.randn(HEADS, Q_LEN, KV_LEN + copied).bfloat16()[..., :KV_LEN]
    lowered, call = call_of(BIAS, {"bias": bias})
    wants = Wants()
    configs = {}

    def prepare(jobs, fixed, device, has_dlse):
        (job,) = jobs
        name = job.kernel.name
        configs[name] = replace(configs_of(job.lowered, job.facts, name)[0], persistent=False)
        executables = {name: SimpleNamespace(name=name, config=c) for name, c in configs.items()}
        executables |= {each.name: SimpleNamespace(name=each.name, config=None) for each in fixed}
        return SimpleNamespace(executables=executables, listed=())

    def launch_of(executable):
        def run(programs, stream, arguments):
            launched[executable.name] = arguments

        return SimpleNamespace(executable=executable, run=run, encoders={})

    monkeypatch.setattr(backend.modules, "prepare", prepare)
    monkeypatch.setattr(layout_module, "launch_of", launch_of)
    monkeypatch.setattr(family_module, "stream_of", lambda device: 0)
    monkeypatch.setattr(family_module, "on_device", lambda device: nullcontext())
    out, lse = backend.forward(lowered, call)
    backend.backward(lowered, call, Backward(out, lse, torch.zeros_like(out), None, wants))
    for name, direction in (("forward", "forward"), ("backward_kv", "backward")):
        text = hopper_source(lowered, call, direction, wants)
        (function,) = [
            item for item in ast.parse(text).body
            if isinstance(item, ast.FunctionDef) and item.name == f"attention_{name}"
        ]  # fmt: skip
        names = [item.arg for item in function.args.args if item.annotation is None]
        given = dict(zip(names, launched[name], strict=True))
        descriptors = {n for n, value in given.items() if isinstance(value, TensorDescriptor)}
        assert descriptors == {n for n in names if n.endswith("_desc")}
        assert (given["pair0_desc"].base is bias) == (not copied)
        assert torch.equal(given["pair0_desc"].base, bias)
        assert is_readable(given["pair0_desc"].base)
        assert given["pair0_desc"].shape == [HEADS, Q_LEN, KV_LEN]
        assert given["t_bias"] is call.tensors["bias"]
        assert (given["heads"], given["kv_len"]) == (HEADS, KV_LEN)
