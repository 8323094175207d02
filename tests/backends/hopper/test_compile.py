"""Hopper kernels compile for sm_90, without one being present."""

from __future__ import annotations

import json
import textwrap

import pytest
from support.fork_server import compiling, run_python

SCRIPT = textwrap.dedent(
    """
    import json, re, subprocess, sys, tempfile
    from dataclasses import replace
    from pathlib import Path
    import torch, triton
    from attndsl.backends.base import Draws, Part
    from attndsl.backends.hopper.descriptor_types import arguments_of
    from support.jobs import configs_of
    from attndsl.backends.hopper.tile_shapes import widest
    from attndsl.backends.hopper.shared_memory import has_own_output, query_slots, shared_bytes
    from attndsl.backends.hopper.tma_bias import with_pair_tiles
    from attndsl.backends.hopper.tile_sizes import CANDIDATES, for_busy_producers
    from attndsl.backends.kernels.arguments import arguments_of as portable_arguments
    from attndsl.backends.kernels.compile import build, load_module
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.kernels.target import parse_target
    from attndsl.backends.hopper.features.tile_skipping import own_tiles
    from attndsl.backends.emit.tile_list_text import generate_lists
    from attndsl.backends.kernels.modules import list_config
    from support.jobs import plan_loop, task_of, text_of
    from attndsl.backends.emit.facts import facts_of, with_forms
    from attndsl.pipeline import lower
    from attndsl.call.sub_calls import localised
    from attndsl.source import Source

    TEXTS = {
        "plain": "score",
        "causal": "causal()",
        "rich": '''
    tensor doc[batch, kv_len]: int
    tensor gain[heads]: float
    tensor bias[q_len, kv_len]: float
    param cap: float
    mask = q >= kv and doc[b, q] == doc[b, kv]
    score = cap * tanh(gain[h] * score / cap) + bias[q, kv]
    ''',
        "nothing": "q < 0",
        "weights": '''
    tensor doc[q_len]: int
    tensor gain[heads]: float
    mask = doc[q] == doc[kv]
    score = gain[h] * tanh(score) - 0.1 * (q - kv)
    weights = relu(score) ** 2 / kv_len + gain[h] * doc[kv]
    ''',
        "common": "mask = causal(); weights = sigmoid(score) / kv_len",
        "bool": "tensor seg[kv_len]: bool; mask = seg[q] == seg[kv]",
        "softcap": "mask = causal()\\nscore = softcap(score, 20.0)",
        "alibi": "mask = causal()\\nscore = score + alibi()",
        "keyed": '''
    tensor t[heads, kv_len]: float
    mask = causal()
    score = score + alibi()
    score = score + t[h, kv]
    ''',
        "constant": "mask = causal()\\nscore = -2.0 * (h + 1)",
        "sink": "tensor s[heads]: float\\nmask = causal()\\nscore = score + alibi()"
        "\\nsink = s[h] * s[h]",
        "dropped": (
            "tensor bias[heads, q_len, kv_len]: float\\nmask = causal()\\n"
            "score = score + bias[h, q, kv]\\nweights = dropout(softmax(score), 0.1)"
        ),
        "dropout": "param p: float\\nmask = causal()\\nweights = dropout(softmax(score), p)",
        "bias": '''
    tensor bias[batch, kv_heads, q_len, kv_len]: float
    mask = causal()
    score = score + bias[b, hkv, q, kv]
    ''',
        "table": "tensor table[batch, q_len, kv_len]: bool; mask = table[b, q, kv]",
        "both": '''
    tensor bias[heads, q_len, kv_len]: float
    tensor table[q_len, kv_len]: bool
    mask = table[q, kv]
    score = 9 * tanh(score + bias[h, q, kv])
    ''',
        "relative": '''
    tensor rel[heads, n]: float
    mask = causal()
    score = score + rel[h, q - kv + kv_len]
    ''',
        "slopes": "tensor s[heads]: float; score = score - s[h] * (q - kv)",
        "logic": "param all: bool = false\\nmask = q >= kv or all\\nscore = where(q < 5, 1, score)",
    }
    def compiled(
        direction, case, head_dim, number, indexed=False, value_dim=None, dtype="bfloat16",
        persistent=None, tiles=None, stored=False, summed=False, moving="", wide=False,
        drawn=False, part="", turns=False,
    ):
        task = task_of(direction)
        lowered = lower(Source(TEXTS[case]), {})
        call = example_call(lowered, head_dim, value_dim or head_dim, getattr(torch, dtype), {})
        if indexed:
            call = call._replace(q_index=torch.arange(2), kv_offset=torch.tensor(3))
        if part:
            batch, heads, q_len, _ = call.q.shape
            sizes = {**call.sizes, "batch": 3 * batch, "heads": 2 * heads, "q_len": 5 * q_len}
            sizes["kv_heads"] = 2 * call.k.shape[1]
            if part == "entries":
                firsts = torch.zeros(batch, dtype=torch.int64)
                call = call._replace(q_offset=firsts, part=Part(batch, heads, kv_lengths=firsts))
            else:
                call = call._replace(q_offset=64, part=Part(batch, heads, frozenset("q")))
            lowered, call = localised(lowered, call._replace(sizes=sizes))
        if drawn:
            call = call._replace(draws=Draws(8, 1, 2, 32, 256))
        target = parse_target("cuda:90")
        if tiles:
            rows = [x.new_empty(2, 2, 64, x.shape[3]) for x in (call.q, call.k, call.v)]
            tensors = {
                name: torch.empty((2,) * (x.dim() - 2) + (64, 64)).to(
                    torch.bool if x.dtype is torch.bool else getattr(torch, tiles)
                )
                for name, x in call.tensors.items()
            }
            call = call._replace(q=rows[0], k=rows[1], v=rows[2], tensors=tensors)
        facts = with_forms(facts_of(lowered.program, call), lowered.program, target)
        facts = replace(
            facts, features=("STORES_DS",) * stored + ("ADDS_DIAGONALS",) * summed,
            moving_operands=moving, wide_gradients=wide, takes_turns=turns,
        )
        if not moving:
            facts = with_pair_tiles(facts, lowered, call, task)
        assert len(facts.pair_tiles) == len(tiles and call.tensors or ())
        config = CANDIDATES[task][widest(facts)][number]
        if lowered.program.dropout is not None:
            # Their registers are others.
            config = configs_of(lowered, facts, direction)[number]
        if persistent is None:
            persistent = configs_of(lowered, facts, direction)[0].persistent
        config = replace(config, persistent=persistent)
        if summed:
            (config,) = for_busy_producers((config,))
        loop = plan_loop(lowered, facts, direction, config)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "hopper.py"
            text = text_of(lowered, facts, direction, loop, config)
            assert ("drop_of_part" in text) == drawn
            assert ("n_h_offset" in text or "n_hkv_offset" in text) == bool(part)
            path.write_text(text, "utf-8")
            function = getattr(load_module(path, "hopper"), f"attention_{direction}")
            arguments = arguments_of(task, function, facts, config)
            if loop.listed is not None:
                compile_lists(lowered, facts, config, Path(folder), target)
            built = build(function, arguments, (config,), target, 232448, load=False)
            # A forward's output, or the next work tile's rows of q, may have a place of their own.
            own = direction == "forward" and (
                has_own_output(facts, config) or query_slots(facts, config) == 2
            )
            if direction != "forward_tangent" and not own:
                assert built.kernel.metadata.shared <= shared_bytes(task, facts, config)
            return built

    def machine_code(kernel):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def has_registers(kernel):
        # Where a warpgroup needs more than are set for it, ptxas sets none at all.
        return "USETMAXREG" in machine_code(kernel)

    def overlaps(kernel):
        # Where registers of a product may change while it runs, ptxas waits after each part.
        return machine_code(kernel).count("WARPGROUP.DEPBAR.LE gsb0, 0x0") <= 40

    def spills(kernel):
        # Bytes that a thread keeps in memory.
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return int(re.search(r"STACK:(\\d+)", text)[1])

    def orders_additions(kernel):
        # A warpgroup's threads meet between their additions and the arrival that tells of them.
        wanted = [r"red\\.relaxed\\.gpu", r"bar\\.sync +\t?[0-9]+, 128", r"mbarrier\\.arrive"]
        found = re.findall("|".join(wanted), kernel.asm["ptx"])
        for one, other in zip(found, found[1:]):
            assert not (one.startswith("red") and other.startswith("mbarrier"))
        assert any(x.startswith("red") for x in found)
        return "red.release.gpu" in kernel.asm["ptx"] and "ld.acquire.gpu" in kernel.asm["ptx"]

    def compile_lists(lowered, facts, config, folder, target):
        path = folder / "lists.py"
        path.write_text(generate_lists(lowered, facts), "utf-8")
        module = load_module(path, "lists")
        parts = own_tiles(lowered, facts, task_of("forward"), config).parts
        config, sizes = list_config(config.block_m, config.block_n, parts)
        for name in ("summarise", "classify", "refine", "list_tiles"):
            function = getattr(module, name)
            arguments = portable_arguments(function, facts, sizes)
            build(function, arguments, (config,), target, 232448, load=False)

    for direction, case, head_dim, number, *more in json.loads(sys.argv[1]):
        built = compiled(direction, case, head_dim, number, **dict(*more))
        multiplies = "wgmma" in built.kernel.asm["ptx"]
        if direction == "forward":
            assert overlaps(built.kernel)
        if dict(*more).get("summed"):
            assert "mma.sync" in built.kernel.asm["ptx"]
            assert has_registers(built.kernel)
        if dict(*more).get("turns"):
            assert orders_additions(built.kernel)
            assert has_registers(built.kernel)
        if dict(*more).get("moving"):
            assert has_registers(built.kernel)
            assert spills(built.kernel) <= 96
        print(direction, case, head_dim, multiplies, built.kernel.metadata.shared)
    """
)


CASES = {
    "forward": [
        ("forward", "causal", 128, 0),
        ("forward", "rich", 64, 0),
        ("forward", "weights", 64, 1),
        ("forward", "plain", 64, 1),
        ("forward", "plain", 128, 0, {"persistent": False}),
        ("forward", "dropped", 128, 0, {"tiles": "bfloat16"}),
    ],
    "backward": [
        ("backward_kv", "causal", 128, 0),
        ("backward_kv", "rich", 64, 0),
        ("backward_kv", "dropout", 64, 0),
        ("backward_kv", "causal", 64, 1, {"persistent": False}),
        ("backward_kv", "relative", 128, 0, {"summed": True}),
        ("backward_kv", "both", 64, 1, {"tiles": "float32"}),
        ("backward_kv", "causal", 128, 0, {"turns": True}),
    ],
    "wide backward and tangents": [
        ("backward_kv", "rich", 256, 0, {"dtype": "float16"}),
        ("backward_kv", "nothing", 256, 0),
        ("backward_kv", "alibi", 192, 1, {"value_dim": 128}),
        ("backward_kv", "causal", 64, 0, {"value_dim": 256}),
        ("forward_tangent", "causal", 128, 0, {"moving": "qkv"}),
        ("forward_tangent", "rich", 64, 1, {"moving": "qkv", "indexed": True}),
        ("forward_tangent", "causal", 128, 0, {"moving": "qkv", "persistent": False}),
        ("forward_tangent", "sink", 128, 0, {"moving": "v", "dtype": "float16"}),
    ],
    "more forward": [
        ("forward", "plain", 256, 0),
        ("forward", "causal", 192, 0, {"value_dim": 128}),
        ("forward", "sink", 64, 0),
        ("forward", "keyed", 64, 0),
        ("forward", "nothing", 128, 1),
        ("forward", "alibi", 64, 0),
        ("forward", "constant", 64, 1),
        ("forward", "logic", 64, 1),
        ("forward", "dropout", 128, 0),
        ("forward", "dropout", 256, 0),
        ("forward", "bool", 64, 0),
        ("forward", "rich", 128, 0, {"indexed": True}),
    ],
    "more of a program a tile": [
        ("forward", "causal", 64, 0, {"persistent": False, "value_dim": 128}),
        ("forward", "rich", 128, 0, {"persistent": False, "indexed": True}),
        ("forward", "sink", 128, 2, {"persistent": False}),
        ("forward", "alibi", 256, 0, {"persistent": True}),
        ("backward_kv", "rich", 128, 0, {"persistent": False, "indexed": True}),
        ("backward_kv", "weights", 64, 0, {"persistent": False}),
    ],
    "parts and outputs in fp32": [
        ("forward", "dropout", 64, 0, {"drawn": True}),
        ("forward", "alibi", 128, 0, {"part": "entries"}),
        ("backward_kv", "rich", 64, 0, {"part": "numbers"}),
        ("backward_kv", "causal", 128, 0, {"wide": True}),
    ],
    "more parts": [
        ("backward_kv", "dropout", 64, 0, {"drawn": True}),
        ("forward", "rich", 128, 0, {"part": "entries"}),
        ("forward", "sink", 64, 0, {"part": "entries", "persistent": False}),
        ("forward", "weights", 64, 1, {"part": "numbers"}),
        ("forward", "bias", 128, 0, {"part": "numbers"}),
        ("backward_kv", "alibi", 128, 0, {"part": "entries"}),
        ("backward_kv", "relative", 128, 0, {"part": "numbers"}),
        ("forward_tangent", "alibi", 128, 0, {"moving": "qkv", "part": "entries"}),
    ],
    "more backward in fp32": [
        ("backward_kv", "common", 256, 0, {"wide": True}),
        ("backward_kv", "dropout", 64, 0, {"wide": True}),
    ],
    "more backward": [
        ("backward_kv", "rich", 128, 0, {"indexed": True}),
        ("backward_kv", "nothing", 64, 2),
        ("backward_kv", "alibi", 128, 0),
        ("backward_kv", "constant", 64, 2),
        ("backward_kv", "logic", 64, 2),
        ("backward_kv", "bool", 128, 0),
        ("backward_kv", "softcap", 128, 0),
        ("backward_kv", "dropout", 128, 0),
        ("backward_kv", "weights", 128, 0),
        ("backward_kv", "common", 128, 0),
    ],
    "more turns": [
        ("backward_kv", "plain", 64, 0, {"turns": True}),
        ("backward_kv", "softcap", 64, 1, {"turns": True}),
        ("backward_kv", "alibi", 128, 0, {"turns": True, "part": "entries"}),
        ("backward_kv", "dropout", 128, 0, {"turns": True, "wide": True}),
    ],
    "more sums along diagonals": [
        ("backward_kv", "slopes", 64, 0, {"summed": True}),
        ("backward_kv", "relative", 64, 1, {"summed": True, "persistent": False}),
        ("backward_kv", "slopes", 128, 1, {"summed": True, "indexed": True}),
        ("backward_kv", "alibi", 128, 0, {"summed": True, "value_dim": 64}),
        ("backward_kv", "bias", 128, 0, {"summed": True, "tiles": "bfloat16"}),
    ],
    "more wide backward": [
        ("backward_kv", "plain", 256, 0),
        ("backward_kv", "weights", 256, 0),
        ("backward_kv", "common", 256, 0),
    ],
    "more tangents": [
        ("forward_tangent", "plain", 128, 0, {"moving": "qkv"}),
        ("forward_tangent", "causal", 64, 0, {"moving": "qkv"}),
        ("forward_tangent", "softcap", 128, 0, {"moving": "qkv"}),
        ("forward_tangent", "rich", 128, 2, {"moving": "qkv"}),
        ("forward_tangent", "plain", 128, 1, {"moving": "qkv"}),
        ("forward_tangent", "constant", 64, 0, {"moving": "q", "value_dim": 128}),
        ("forward_tangent", "alibi", 128, 0, {"moving": "k", "value_dim": 64}),
        ("forward_tangent", "nothing", 64, 0, {"moving": "qk"}),
        ("forward_tangent", "softcap", 64, 0, {"moving": "v"}),
        ("forward_tangent", "bool", 128, 0, {"moving": "qkv", "dtype": "float16"}),
    ],
    "more tiles of pairs": [
        ("forward", "bias", 128, 0, {"tiles": "bfloat16"}),
        ("forward", "bias", 128, 0, {"tiles": "float32"}),
        ("forward", "bias", 64, 0, {"tiles": "float32"}),
        ("forward", "table", 64, 0, {"tiles": "bfloat16", "persistent": False}),
        ("forward", "both", 128, 2, {"tiles": "float32"}),
        ("forward", "both", 256, 0, {"tiles": "bfloat16"}),
        ("backward_kv", "bias", 128, 0, {"tiles": "float32"}),
        ("backward_kv", "bias", 64, 0, {"tiles": "bfloat16", "persistent": False}),
        ("backward_kv", "bias", 128, 0, {"tiles": "float32", "stored": True}),
        ("backward_kv", "bias", 128, 1, {"stored": True, "persistent": False}),
        ("backward_kv", "bias", 64, 0, {"tiles": "bfloat16", "stored": True}),
        ("backward_kv", "table", 128, 0, {"tiles": "bfloat16"}),
        ("backward_kv", "bias", 256, 0, {"tiles": "float16", "dtype": "float16"}),
        ("backward_kv", "table", 192, 1, {"tiles": "bfloat16", "value_dim": 128}),
    ],
}
"""One process compiles the kernels of a name; ``-m slow`` those that are more of the same kind."""


@pytest.mark.parametrize(
    "cases", [pytest.param(name, marks=[pytest.mark.slow] * ("more" in name)) for name in CASES]
)
def test_compiles_for_hopper(cases):
    done = run_python(SCRIPT, json.dumps(CASES[cases]), env=compiling(), limit=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for case, line in zip(CASES[cases], done.stdout.splitlines(), strict=True):
        direction, name, head_dim, multiplies, shared = line.split()
        assert (direction, name, int(head_dim)) == case[:3]
        # Without a live tile there is nothing to multiply.
        nothing = case[1] == "nothing" and direction != "forward"
        assert multiplies == str(not nothing)
        assert int(shared) <= 232448
