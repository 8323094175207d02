"""Every kernel compiles for every supported architecture, without one being present."""

from __future__ import annotations

import textwrap

import pytest
from support.fork_server import compiling, run_python

SCRIPT = textwrap.dedent(
    """
    import sys
    from support.cross import cross_compile
    from attndsl.backends.emit.leaf_names import CaptureFacts
    from attndsl.backends.emit.facts import ParamKind, KernelFacts
    from attndsl.ir import DType
    from attndsl.pipeline import lower
    from attndsl.source import Source

    TEXTS = {
        "plain": "score",
        "rich": '''
    tensor doc[batch, kv_len]: int
    tensor gain[heads]: float
    tensor bias[q_len, kv_len]: float
    param cap: float
    mask = q >= kv and doc[b, q] == doc[b, kv]
    score = cap * tanh(gain[h] * score / cap) + bias[q, kv]
    ''',
    }
    targets, case, dtype, head_dim = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    kernels = sys.argv[5].split(",") if sys.argv[5] else None
    lowered = lower(Source(TEXTS[case]), {})
    captures = (
        CaptureFacts("doc", DType.INT, 2, 32, False, frozenset({1}), ("batch", "kv_len")),
        CaptureFacts("gain", DType.FLOAT, 1, 32, False, frozenset({0}), ("heads",)),
        CaptureFacts("bias", DType.FLOAT, 2, 16, False, frozenset({1}), ("q_len", "kv_len")),
    )
    rich = case == "rich"
    facts = KernelFacts(
        head_dim=head_dim,
        value_dim=head_dim,
        dtype=dtype,
        captures=captures if rich else (),
        capture_types=("i32", "fp32", "bf16") if rich else (),
        capture_aligned=(True, True, True) if rich else (),
        params=(ParamKind("cap", DType.FLOAT, "*fp32"),) if rich else (),
        dim_names=(),
        q_kind="offset",
        q_origin_type="i32",
        kv_kind="offset",
        kv_origin_type="i32",
        divisor=16,
        wide_rows=False,
        tensor_gradients=("bias", "gain") if rich else (),
        param_gradients=("cap",) if rich else (),
    )
    for target in targets.split(","):
        for kernel in cross_compile(lowered, facts, target, kernels=kernels):
            print(kernel.name, target, kernel.shared)
    """
)


WIDE_BOUNDS = textwrap.dedent(
    """
    import sys
    from dataclasses import replace
    import torch
    from support.cross import cross_compile
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.emit.facts import facts_of
    from attndsl.backends.kernels.config import Config
    from attndsl.passes.tiles.tile_plan import DIRECTIONS
    from attndsl.pipeline import lower
    from attndsl.source import Source

    TEXTS = {
        "offset": "q >= kv and q - kv < 100",
        "lengths": "tensor n[batch]: int; mask = q >= kv and kv < n[b]",
        "param": "param n: int; mask = q >= kv and q - kv < n",
        "constant": "-4294967296 >= -q",
    }
    case, size = sys.argv[1], int(sys.argv[2])
    lowered = lower(Source(TEXTS[case]), {})
    captures = {"n": torch.zeros(2, dtype=torch.int64) if case == "lengths" else 1 << 40}
    call = example_call(lowered, 16, 16, torch.float32, captures)
    if case == "offset":
        call = call._replace(q_offset=torch.tensor(200), kv_offset=3)
    configs = dict.fromkeys(DIRECTIONS, (Config(size, size, 4, 1),))
    facts = facts_of(lowered.program, call)
    for kernel in cross_compile(lowered, facts, "cuda:90", configs, DIRECTIONS):
        print(kernel.name, kernel.config.block_m)
    """
)


LISTS = textwrap.dedent(
    """
    import sys
    import tempfile
    from pathlib import Path
    import torch
    from attndsl.backends.emit.facts import facts_of
    from attndsl.backends.emit.tile_list_text import generate_lists
    from attndsl.backends.kernels.arguments import arguments_of
    from attndsl.backends.kernels.compile import build, load_module
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.kernels.target import machine_of
    from attndsl.backends.kernels.modules import list_config
    from attndsl.pipeline import lower
    from attndsl.source import Source

    lowered = lower(Source(sys.argv[1]), {})
    facts = facts_of(lowered.program, example_call(lowered, 16, 16, torch.float32, {}))
    config, sizes = list_config(32, 32, 1)
    machine = machine_of("cuda:90")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lists.py"
        path.write_text(generate_lists(lowered, facts), "utf-8")
        module = load_module(path, "lists")
        for name in ("summarise", "classify", "refine", "list_tiles"):
            function = getattr(module, name)
            arguments = arguments_of(function, facts, sizes)
            build(function, arguments, (config,), machine.target, machine.shared, load=False)
            print(name)
    """
)


RESULTS_IN_FP32 = textwrap.dedent(
    """
    from dataclasses import replace
    import torch
    from support.cross import cross_compile
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.emit.facts import facts_of
    from attndsl.backends.kernels.config import Config
    from attndsl.pipeline import lower
    from attndsl.source import Source

    lowered = lower(Source("causal()"), {})
    configs = dict.fromkeys(("forward", "backward_kv"), (Config(64, 64, 4, 1),))
    call = example_call(lowered, 32, 32, torch.bfloat16, {})
    for wide in (False, True):
        facts = replace(
            facts_of(lowered.program, call._replace(wide=wide)), divisor=16,
            wide_gradients=wide,
        )
        for kernel in cross_compile(lowered, facts, "cuda:90", configs, configs):
            lines = kernel.kernel.asm["ttir"].split("\\n")
            halves = ["bf16" in line for line in lines if "tt.store" in line]
            print(kernel.name, wide, sum(halves), len(halves))
    """
)


SOFTCAP = textwrap.dedent(
    """
    import sys
    from dataclasses import replace
    import torch
    from support.cross import cross_compile
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.emit.facts import facts_of
    from attndsl.backends.kernels.config import Config
    from attndsl.passes.tiles.tile_plan import DIRECTIONS
    from attndsl.pipeline import lower
    from attndsl.source import Source

    configs = dict.fromkeys((*DIRECTIONS, "tangent"), (Config(32, 32, 4, 1),))
    for case in sys.argv[1:]:
        target, dtype, exact = case.split(",")
        lowered = lower(Source("score = 50.0 * tanh(score / 50.0)"), {}, exact == "True")
        call = example_call(lowered, 32, 32, getattr(torch, dtype), {})
        facts = replace(facts_of(lowered.program, call), divisor=16)
        for kernel in cross_compile(lowered, facts, target, configs, configs):
            text = kernel.kernel.asm.get("ptx") or kernel.kernel.asm["amdgcn"]
            names = ("tanh.approx.f32", "rcp.approx.ftz.f32", "ex2.approx.ftz.f32")
            print(case, kernel.name, *map(text.count, names))
    """
)


PARTS = textwrap.dedent(
    """
    import sys
    from dataclasses import replace
    import torch
    from attndsl.backends.base import Part
    from support.cross import cross_compile
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.emit.facts import facts_of
    from attndsl.backends.kernels.config import Config
    from attndsl.passes.tiles.tile_plan import DIRECTIONS
    from attndsl.pipeline import lower
    from attndsl.call.sub_calls import localised
    from attndsl.source import Source

    TEXTS = {
        "entries": "mask = causal() and q - kv < 100 and kv >= kv_len // 3; "
        "score = score + alibi()",
        "shares": (
            "tensor bias[heads, q_len, kv_len]: float; mask = causal_lower_right();"
            "score = score + bias[h, q, kv]"
        ),
        "rows": (
            "tensor t[n]: float; score = score + t[q * kv % n];"
            "weights = dropout(softmax(score), 0.5)"
        ),
    }
    TEXTS["blocks"] = TEXTS["positions"] = TEXTS["rows"]
    case = sys.argv[1]
    lowered = lower(Source(TEXTS[case]), {})
    call = example_call(lowered, 64, 64, torch.bfloat16, {})
    batch, heads, q_len, _ = call.q.shape
    sizes = {**call.sizes, "heads": 3 * heads, "kv_heads": 3 * heads, "q_len": 1000, "kv_len": 1000}
    part = Part(0, heads, frozenset({"q", "kv"}))
    offsets = {"q_offset": 32, "kv_offset": 128}
    if case == "entries":
        ints = torch.zeros(batch, dtype=torch.int64)
        part, offsets = Part(0, heads, kv_lengths=ints), {"q_offset": ints}
        sizes["kv_len"] = call.k.shape[2]
    elif case == "shares":
        part = replace(part, shares=frozenset({("bias", 0), ("bias", 1)}))
    elif case == "rows":
        offsets["q_offset"] = 5
    elif case == "positions":
        offsets = {"q_offset": torch.tensor(5), "kv_offset": torch.tensor(7)}
    moved, call = localised(lowered, call._replace(sizes=sizes, part=part, **offsets))
    facts = replace(facts_of(moved.program, call), divisor=16)
    learned = tuple(decl.name for decl in lowered.program.tensors)
    facts = replace(facts, tensor_gradients=learned)
    names = [*DIRECTIONS, *sys.argv[2:]]
    configs = dict.fromkeys(names, (Config(64, 64, 4, 1),))
    for kernel in cross_compile(moved, facts, "cuda:90", configs, names):
        print(kernel.name, facts.draws and "-".join(facts.draws))
    """
)


def _run(script: str, *arguments: object) -> list[list[str]]:
    # Where the interpreter is chosen for this process's kernels, nothing could be compiled.
    done = run_python(script, *arguments, env=compiling(), limit=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


def _compile(
    targets: str, case: str, dtype: str, head_dim: int, kernels: str = ""
) -> list[list[str]]:
    return _run(SCRIPT, targets, case, dtype, head_dim, kernels)


@pytest.mark.parametrize(
    "target",
    [
        "cuda:90",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cuda:80", "cuda:100")),
        pytest.param("hip:gfx942", marks=pytest.mark.slow),
    ],
)
def test_compiles_for(target: str) -> None:
    rows = _compile(target, "rich", "bf16", 64)
    attention = ["forward", "backward_q", "backward_kv"]
    tangents = ["distances", "tangent"]
    gradients = ["scatter_bounds", "scatter_sums", "scatter_together"]
    gradients += ["pairs", "stored", "row_statistics"]
    lists = ["summarise", "classify", "refine", "list_tiles"]
    assert [row[0] for row in rows] == attention + tangents + gradients + lists


def test_compiles_for_each_target() -> None:
    targets = ["cuda:80", "cuda:100", "hip:gfx942"]
    attention = ["forward", "backward_kv"]
    rows = _compile(",".join(targets), "plain", "bf16", 32, ",".join(attention))
    assert [row[:2] for row in rows] == [[name, each] for each in targets for name in attention]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kernels"),
    [
        # The kernel that needs the most shared memory.
        ("bf16", 256, "backward_kv"),
        *(
            pytest.param(*case, "", marks=pytest.mark.slow)
            for case in (("bf16", 256), ("fp32", 256), ("fp16", 512), ("bf16", 1), ("fp16", 203))
        ),
    ],
)
def test_any_head_dim_fits_a_small_gpu(dtype: str, head_dim: int, kernels: str) -> None:
    rows = _compile("cuda:86", "plain", dtype, head_dim, kernels)
    assert max(int(row[2]) for row in rows) <= 101376


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("offset", 16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("offset", 32), ("lengths", 32), ("param", 16))
        ),
        ("constant", 32),
    ],
)
def test_bounds_of_64_bits_make_loops_of_32(case: str, size: int) -> None:
    """Triton wants one type of a variable that a loop carries; the interpreter does not mind."""
    rows = _run(WIDE_BOUNDS, case, size)
    assert [row[1] for row in rows] == [str(size)] * 3


@pytest.mark.parametrize(
    "text",
    [
        # The kernel that looks at pairs has no scores, and is compiled all the same.
        "mask = not q == hkv if ~bool(q) else not 2.0 >= kv == kv\n"
        "score = where(int(clamp(ceil(floor(score)), -1000, 1000)) == -q, score, -inf)",
        "mask = exp(score) < 2 and q % 5 != kv % 7",
    ],
    ids=["rounded", "exponential"],
)
def test_lists_of_masks_that_read_the_score_compile(text: str) -> None:
    names = ["summarise", "classify", "refine", "list_tiles"]
    assert [name for (name,) in _run(LISTS, text)] == names


@pytest.mark.parametrize(
    ("case", "more", "draws"),
    [
        ("entries", ["tangent"], "None"),
        ("rows", ["scatter_sums"], "row-block"),
        pytest.param("positions", ["tangent"], "position-position", marks=pytest.mark.slow),
        pytest.param("blocks", [], "block-block", marks=pytest.mark.slow),
        pytest.param("shares", ["pairs"], "None", marks=pytest.mark.slow),
    ],
)
def test_kernels_of_parts_compile(case: str, more: list[str], draws: str) -> None:
    rows = _run(PARTS, case, *more)
    assert [row[0] for row in rows] == ["forward", "backward_q", "backward_kv", *more]
    assert {row[1] for row in rows} == {draws}


Counts = dict[str, dict[str, list[int]]]


def _softcaps(*cases: str) -> Counts:
    """How many tanhs, reciprocals and exponentials each kernel of each case has."""
    found: Counts = {}
    for case, kernel, *counts in _run(SOFTCAP, *cases):
        found.setdefault(case, {})[kernel] = list(map(int, counts))
    return found


@pytest.fixture(scope="module")
def softcaps() -> Counts:
    """Cases that one process compiles."""
    return _softcaps("cuda:90,bfloat16,False", "cuda:90,float16,False", "cuda:90,bfloat16,True")


def test_softcap_in_bf16_is_one_instruction_a_pair(softcaps: Counts) -> None:
    rows = softcaps["cuda:90,bfloat16,False"]
    assert rows["forward"][0] > 0
    # One exponential a pair is the softmax; the derivative shares the score's tanh.
    for name in ("backward_q", "backward_kv"):
        tanhs, reciprocals, exponentials = rows[name]
        assert 0 < tanhs == exponentials
        assert reciprocals == 0


def test_softcap_in_fp16_is_an_exponential_and_a_reciprocal(softcaps: Counts) -> None:
    rows = softcaps["cuda:90,float16,False"]
    assert rows["forward"][:1] == [0]
    for name in ("backward_q", "backward_kv"):
        tanhs, reciprocals, exponentials = rows[name]
        assert tanhs == 0
        assert 0 < 2 * reciprocals == exponentials


@pytest.mark.parametrize(
    "case",
    [
        "cuda:90,bfloat16,True",
        "hip:gfx942,bfloat16,False",
        pytest.param("cuda:90,float32,False", marks=pytest.mark.slow),
    ],
)
def test_softcap_is_exact_where_asked_for_and_elsewhere(softcaps: Counts, case: str) -> None:
    rows = softcaps[case] if case in softcaps else _softcaps(case)[case]
    assert list(rows) == ["forward", "backward_q", "backward_kv", "tangent"]
    assert [counts[:2] for counts in rows.values()] == [[0, 0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("case", ["plain", "rich"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_grid_compiles(target: str, case: str, dtype: str, head_dim: int) -> None:
    assert len(_compile(target, case, dtype, head_dim)) == (13 if case == "rich" else 6)


def test_results_in_fp32() -> None:
    # The forward stores the output and both parts of lse, the backward dK and dV.
    assert sorted(_run(RESULTS_IN_FP32)) == [
        ["backward_kv", "False", "2", "2"],
        ["backward_kv", "True", "0", "2"],
        ["forward", "False", "1", "3"],
        ["forward", "True", "0", "3"],
    ]
