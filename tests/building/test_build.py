"""Bundles that are built without a GPU, and processes that compile nothing with them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import shipped_kernels
import torch
from support.fork_server import COMMAND, run_python, run_script

import attndsl
from attndsl import cli
from attndsl.backends.base import Wants
from attndsl.backends.emit.facts import facts_of
from attndsl.backends.hopper.family import Hopper
from attndsl.backends.hopper.tile_sizes import has_small_tiles
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.kernels.offline_gpu import TARGETS, AbsentGPU
from attndsl.backends.key import version_of
from attndsl.building import build
from attndsl.building.bundle_calls import LENGTHS, CallGrid, examples
from attndsl.building.bundle_pack import check_output
from attndsl.errors import ConfigError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

COUNTED = partial(run_script, Path(__file__).parents[1] / "support" / "counted_calls.py")
BUILD = partial(run_python, COMMAND, "build")
PROGRAMS = """
packed: |
  tensor doc[batch, kv_len]: int
  tensor gain[heads]: float
  mask = causal() and doc[b, q] == doc[b, kv]
  score = gain[h] * score
"""
PACKED = (
    "tensor doc[batch, kv_len]: int\ntensor gain[heads]: float\n"
    "same = doc[b, q] == doc[b, kv]; mask = causal() and same; score = gain[h] * score"
)
"""``packed``, written in another way."""


class Workplace:
    """A folder with caches of its own; commands run as on a machine without a GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests: dict[str, str] = {}

    def run(
        self, program: Callable[..., subprocess.CompletedProcess[str]], *arguments: object,
        cache: str = "cache", bundles: str = "", triton: str = "", shipped: bool = False,
    ) -> str:  # fmt: skip
        """The standard output of a program with these arguments, in a process of its own."""
        environment = os.environ | {
            "ATTNDSL_CACHE_DIR": str(self.folder / cache),
            "ATTNDSL_BUNDLES": bundles,
            "TRITON_CACHE_DIR": str(self.folder / (triton or f"triton-{cache}")),
            "ATTNDSL_SHIPPED": "1" if shipped else "0",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("TRITON_INTERPRET", None)
        done = program(*arguments, env=environment, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        self.errors = done.stderr
        return done.stdout

    def build(self, file: str, output: str, *options: str) -> str:
        printed = self.run(BUILD, file, "-o", output, *options, cache="builder")
        self.digests[output] = printed.rsplit("digest: ", 1)[1].strip()
        return printed

    def counted(self, target: str, calls: list[dict], shipped: str = "", **more: str) -> dict:
        """What calls of a fresh process compile; its seconds are printed."""
        given = (target, json.dumps(calls), *filter(None, (shipped,)))
        printed = self.run(COUNTED, *given, shipped=bool(shipped), **more)
        found = json.loads(printed.splitlines()[-1])
        print(f"{target}, {len(calls)} calls: {found}")
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """With a bundle of one program, forward and backward, for cuda:80."""
    found = Workplace(tmp_path_factory.mktemp("bundles"))
    (found.folder / "model.yaml").write_text(PROGRAMS)
    found.printed = found.build(
        "model.yaml", "bundle", "--target", "cuda:80", "--head-dim", "16", "--backward",
        "--learned", "gain", "--lengths", "96,100",
    )  # fmt: skip
    return found


@pytest.fixture
def command(monkeypatch, capsys):
    """``command(cache, *arguments)``: what ``attndsl`` prints."""

    def call(cache: Path, *arguments: str) -> str:
        monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(cache))
        monkeypatch.setattr(sys, "argv", ["attndsl", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
        return str(capsys.readouterr().out)

    return call


def packed_call(length: int, heads: int, kv_heads: int, **more: object) -> dict:
    return {
        "text": PACKED, "dtype": "bf16",
        "q": [1, heads, length, 16], "k": [1, kv_heads, length, 16],
        "captures": {"doc": [[1, length], "int32"], "gain": [[heads], "fp32"]},
        "learned": ["gain"], **more,
    }  # fmt: skip


CALLS = [
    packed_call(512, 4, 4),
    packed_call(512, 6, 2, lse=True),
    packed_call(257, 2, 1),
    packed_call(33, 2, 2, lse=True),
]
"""Lengths, heads and batch of a call are none of the bundle's."""


def test_a_fresh_process_compiles_nothing_after_an_import(place: Workplace, command) -> None:
    digest = place.digests["bundle"]
    arguments = ("cache", "import", str(place.folder / "bundle"), "--digest", digest)
    printed = command(place.folder / "cache", *arguments)
    assert printed.startswith("imported: ")
    assert f"digest: {digest}\n" in printed
    assert command(place.folder / "cache", *arguments).startswith("there already: ")
    found = place.counted("cuda:80", CALLS)
    assert (found["compiled"], found["launchers"]) == (0, 0)
    assert len(found["seconds"]["backward"]) == len(CALLS)
    assert "CacheWarning" not in place.errors


def test_a_bundle_in_the_path_is_read_where_it_lies(place: Workplace) -> None:
    own = f"{place.folder / 'bundle'}@{place.digests['bundle']}"
    for path in (place.folder / "bundle").rglob("*"):
        path.chmod(path.stat().st_mode & ~0o222)
    nothing = place.folder / "nothing"
    found = place.counted("cuda:80", CALLS[:2], cache="unused", bundles=f"{nothing}:{own}")
    assert (found["compiled"], found["launchers"]) == (0, 0)
    kept = [path.name for path in (place.folder / "unused").iterdir()]
    assert len(kept) == 2, "the other text of the program alone, and no kernel"
    assert f"the bundle {nothing} cannot be used" in place.errors


def test_kernels_that_came_with_the_package_are_found_unasked(place: Workplace) -> None:
    own = place.folder / "shipped" / f"triton-{version_of('triton')}"
    shutil.copytree(place.folder / "bundle", own)
    found = place.counted("cuda:80", CALLS[:2], cache="shipped-a", shipped=str(own.parent))
    assert (found["compiled"], found["launchers"]) == (0, 0)
    assert place.errors == ""
    kept = [path.name for path in (place.folder / "shipped-a").iterdir()]
    assert len(kept) == 2, "the other text of the program alone, and no kernel"


def test_damaged_kernels_that_came_with_the_package_are_made_anew(place: Workplace) -> None:
    own = place.folder / "damaged" / f"triton-{version_of('triton')}"
    shutil.copytree(place.folder / "bundle", own)
    for path in own.glob("code/*/attention_forward.cubin"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = place.counted("cuda:80", CALLS[:1], cache="shipped-b", shipped=str(own.parent))
    assert found["compiled"] == 1, "the forward alone"
    assert "is not the file that was built" in place.errors


def test_the_tool_says_which_bundles_are_for_these_sources(place: Workplace, capsys) -> None:
    folder = place.folder / "checked"
    assert shipped_kernels.check(folder) == 1
    own = folder / "triton-3.6.0"
    shutil.copytree(place.folder / "bundle", own)
    assert shipped_kernels.check(folder) == 0
    manifest = json.loads((own / "bundle.json").read_text())
    own.with_name("triton-3.9.0").mkdir()
    stale = json.dumps(manifest | {"fingerprint": "0" * 64})
    (own.with_name("triton-3.9.0") / "bundle.json").write_text(stale)
    assert shipped_kernels.check(folder) == 1
    said = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == ["no bundle", "for these sources", "for these sources", "for other sources"]


def test_the_counting_counts(place: Workplace) -> None:
    """What the bundle lacks is compiled: another GPU, and said once."""
    own = str(place.folder / "bundle")
    call = {"text": "causal()", "dtype": "bf16", "q": [1, 2, 64, 16], "k": [1, 2, 64, 16]}
    found = place.counted("cuda:89", [call], cache="other", bundles=own)
    assert found["compiled"] == 1
    assert "the bundles are for cuda:80" in place.errors
    assert place.errors.count("is in no bundle") == 1


def test_a_build_says_what_it_compiled(place: Workplace) -> None:
    lines = place.printed.splitlines()
    assert lines[0].startswith("packed: compiled in ")
    kernels = [line for line in lines if " bytes  triton " in line]
    assert {line.split("bytes  ")[1].split(" ")[1] for line in kernels} == {
        "forward", "backward_kv", "backward_q"
    }  # fmt: skip
    assert all("mask = causal() and doc[b, q] == doc[b, kv]" in line for line in kernels)
    assert "covers: gradients of q, k, v and gain, of lse too" in lines
    assert any(line.startswith("for: cuda:80, triton ") for line in lines)
    assert len(place.digests["bundle"]) == 64


def test_entries_of_bundles_are_listed_in_words(place: Workplace, command, monkeypatch) -> None:
    own = str(place.folder / "bundle")
    monkeypatch.setenv("ATTNDSL_BUNDLES", own)
    lines = command(place.folder / "none", "cache", "list").splitlines()
    assert lines[0].endswith(f"cuda:80, digest {place.digests['bundle']}")
    assert any("triton forward cuda:80 bf16 D16  mask = causal() and doc" in line for line in lines)
    found = json.loads(command(place.folder / "none", "cache", "list", "--json"))
    assert {entry["bundle"] for entry in found} == {own}
    assert "damaged" not in {entry["kind"] for entry in found}


@pytest.mark.parametrize(
    ("dim", "lengths", "rows"),
    [
        (64, ((4096, 4096),), {4096, 336, 1024, 6144}),
        (64, ((4095, 4095),), {4095, 333, 1007, 6143}),
        (64, LENGTHS, {1024, 1007, 336, 333, 6144, 6143}),
        (64, ((1, 4096), (100, 100)), {1, 100}),
        (72, ((4096, 4096),), {4096, 640, 6144}),
        (128, ((4096, 4096),), {4096, 512, 6144}),
        (256, ((4096, 4096),), {4096}),
        (64, ((512, 4096),), {512, 336, 1024, 6144}),
        (128, ((1007, 2001),), {1007, 509, 6143}),
        (128, ((100, 300),), {100, 64}),
    ],
)
@pytest.mark.parametrize("text", ["score", "causal()"])
def test_all_sizes_of_hopper_tiles_are_built(text, dim, lengths, rows) -> None:
    asked = CallGrid(head_dims=(dim,), lengths=lengths)
    attention = attndsl.compile(text)
    made = list(examples(attention, asked))
    assert {x.operands[0].shape[2] for x in made} == rows
    masked = attention.lowered.program.mask is not None

    call = example_call(attention.lowered, dim, dim, torch.bfloat16, {})
    facts = facts_of(attention.lowered.program, call)

    def small(task: Task, q_len: int, kv_len: int) -> bool:
        return has_small_tiles(task, facts, q_len, kv_len, masked)

    def alike(q_len: int, kv_len: int) -> Iterator[tuple[int, int]]:
        """Lengths of calls that such a bundle is for."""
        few = range(1, 129, 9)
        some = (*range(129, 1500, 37), 8192)
        for own in few if q_len <= 128 else some:
            yield from [(own, own)] if q_len == kv_len else product((own,), (*few, *some))

    for task in (Task.FORWARD, Task.BACKWARD):
        found = {small(task, *(x.shape[2] for x in one.operands[:2])) for one in made}
        assert found >= {small(task, *lengths) for lengths in alike(*lengths[0])}


DOCUMENTS = "tensor doc[kv_len]: int\nmask = q >= kv and doc[q] == doc[kv]"


@pytest.mark.parametrize(
    ("text", "lengths", "kinds"),
    [
        ("causal()", ((1024, 1024),), {"heads_apart"}),
        (DOCUMENTS, ((4096, 4096),), {"heads_apart", "few_tiles"}),
        (DOCUMENTS, ((200, 200),), {"heads_apart", "few_tiles"}),
        ("causal()", ((100, 300),), {"heads_apart", "few_rows"}),
    ],
)
@pytest.mark.parametrize("heads", [((4, 4),), ((8, 2),)])
def test_calls_of_other_batches_and_heads_are_built(text, lengths, kinds, heads) -> None:
    """Both kinds of each; what else decides, as lengths do, is the same or met by others."""
    attention = attndsl.compile(text)
    lowered, asked = attention.lowered, CallGrid(lengths=lengths, heads=heads, backward=True)
    calls = [
        example_call(lowered, 64, 64, torch.bfloat16, {})._replace(
            q=one.operands[0], k=one.operands[1], v=one.operands[2]
        )
        for one in examples(attention, asked)
    ]  # fmt: skip
    for kind in kinds:
        task = Task.BACKWARD if kind == "heads_apart" else Task.FORWARD
        wanted = Wants() if task is Task.BACKWARD else None
        jobs = [Hopper().jobs(lowered, call, task, None, wanted)[0] for call in calls]
        assert {getattr(job.facts, kind) for job in jobs} == {False, True}


@pytest.mark.parametrize(
    ("text", "lengths", "heads"),
    [
        ("tensor g[heads - 2]: float; score = score * g[0]", (300, 300), (8, 2)),
        ("tensor g[q_len - 100]: float; score = score * g[0]", (101, 300), (8, 8)),
    ],
)
def test_shapes_that_a_program_cannot_have_are_left_out(text, lengths, heads) -> None:
    asked = CallGrid(lengths=(lengths,), heads=(heads,), backward=True)
    made = [one.operands for one in examples(attndsl.compile(text), asked)]
    shapes = {(q.shape[1], k.shape[1], q.shape[2], k.shape[2]) for q, k, _ in made}
    assert (*heads, *lengths) in shapes
    assert not {shape for shape in shapes if shape[0] <= 2 and "heads" in text}


def test_heads_of_few_keys_are_more_than_processors_too() -> None:
    asked = CallGrid(lengths=((100, 100),), heads=((4, 4),), backward=True)
    made = examples(attndsl.compile("causal()"), asked)
    programs = {one.operands[1].shape[:2].numel() for one in made}
    assert min(programs) < 132 < max(programs)


@pytest.mark.slow
def test_two_builds_have_the_same_code(place: Workplace) -> None:
    """Where Triton has nothing yet; no folder of a build is in what it compiles."""
    options = ("--target", "cuda:80", "--head-dim", "16", "--lengths", "96", "--heads", "2/2")
    found = []
    for name in ("once", "again"):
        place.run(BUILD, "model.yaml", "-o", name, *options, cache=f"cache-{name}")
        # Launchers of Triton 3.6 hold the folder in which a C compiler made them.
        files = json.loads((place.folder / name / "bundle.json").read_text())["files"]
        found.append({x: y for x, y in files.items() if not x.startswith("launchers/")})
    assert found[0] == found[1]


@pytest.mark.slow
def test_calls_on_hopper_compile_nothing(place: Workplace) -> None:
    """Kernels of Hopper and of keys that fit, dropout, gradients of q, k and v."""
    texts = {
        "causal.attn": "mask = causal()",
        "drop.attn": "weights = dropout(softmax(score), 0.1)",
    }
    for name, text in texts.items():
        (place.folder / name).write_text(text)
    common = ("--target", "cuda:90", "--head-dim", "64", "--heads", "4/4")
    place.build("drop.attn", "dropped", *common, "--lengths", "1024")
    place.build("causal.attn", "hopper", *common, "--lengths", "1024,100", "--backward")
    causal, dropped = texts.values()
    long, odd, short = (
        {"q": [1, heads, length, 64], "k": [1, kv_heads, length, 64], "dtype": "bf16"}
        for heads, kv_heads, length in ((4, 4, 2048), (6, 3, 1007), (6, 2, 100))
    )
    calls = [
        *({"text": causal, **shape} for shape in (long, odd, short)),
        *({"text": causal, **shape, "learned": [], "lse": True} for shape in (long, odd, short)),
        {"text": causal, **long, "learned": []},
        *({"text": dropped, **shape, "options": {"seed": 3}} for shape in (long, odd)),
    ]
    own = (str(place.folder / name) for name in ("dropped", "hopper"))
    found = place.counted("cuda:90", calls, cache="slow", bundles=os.pathsep.join(own))
    assert (found["compiled"], found["launchers"]) == (0, 0)


class NotActive(AbsentGPU):
    """In this process kernels are interpreted, whatever the options say."""

    def __init__(self, target: str) -> None:
        if target not in TARGETS:
            super().__init__(target)
        self.launchers, self.without_launchers = {}, "nothing is compiled"
        self.twins = {}

    def activate(self) -> None:
        pass


@pytest.mark.slow
def test_calls_of_serving_compile_nothing(place: Workplace) -> None:
    """Lengths of each entry, ids in int64, dtypes, an optional capture, the decode backend."""
    texts = {
        "served.attn": "mask = causal()",
        "ids.attn": "tensor doc[batch, kv_len]: int = none\n"
        "mask = causal()\nmask = doc[b, q] == doc[b, kv]",
    }
    for name, text in texts.items():
        (place.folder / name).write_text(text)
    common = ("--dtype", "fp16,bf16", "--head-dim", "32", "--positions", "entries")
    place.build("served.attn", "serving", "--target", "cuda:80", *common, "--lengths", "1x512,64")
    place.build(
        "served.attn", "decoding", "--target", "cuda:80", *common, "--lengths", "1x512",
        "--backend", "decode", "--heads", "8/2",
    )  # fmt: skip
    place.build(
        "ids.attn", "ids", "--target", "cuda:80", "--dtype", "fp16", "--head-dim", "32",
        "--capture", "doc=int64",
    )  # fmt: skip
    k = {"k": [2, 2, 700, 32], "options": {"q_offset": [600, 30], "kv_lengths": [601, 31]}}
    served = {"text": texts["served.attn"], "q": [2, 8, 1, 32], **k}
    whole = {"q": [2, 8, 333, 32], "k": [2, 8, 333, 32], "dtype": "fp16"}
    calls = [
        {**served, "dtype": "bf16"},
        {**served, "dtype": "fp16", "backend": "decode"},
        {**served, "dtype": "fp16", "q": [2, 4, 50, 32]},
        {"text": texts["ids.attn"], **whole},
        {"text": texts["ids.attn"], **whole, "captures": {"doc": [[2, 333], "int64"]}},
    ]
    own = (str(place.folder / name) for name in ("serving", "decoding", "ids"))
    found = place.counted("cuda:80", calls, cache="served", bundles=os.pathsep.join(own))
    assert (found["compiled"], found["launchers"]) == (0, 0)


def test_calls_without_kernels_are_named(place: Workplace) -> None:
    text = "tensor x[kv_len, r]: float\nscore = score + dot(x[q, :], x[kv, :])"
    (place.folder / "dots.attn").write_text(text)
    common = ("--target", "cuda:80", "--head-dim", "16,240", "--dim", "r=24", "--heads", "2/2")
    printed = place.build("dots.attn", "dots", *common, "--lengths", "64,80")
    why = "a row of q with its contractions has 264 elements (limit: 256)"
    assert (
        f"without kernels: 2 calls of 'dots.attn', which torch operations run: {why}\n" in printed
    )
    assert "from 4 calls" in printed
    printed = place.run(
        BUILD, "dots.attn", "-o", "more", *common, "--json", cache="builder"
    )  # fmt: skip
    found = json.loads(printed)
    assert found["without_kernels"] == [{"program": "dots.attn", "calls": 2, "why": why}]
    assert {kernel["head_dim"] for kernel in found["kernels"]} == {40}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "cuda:12"], "kernels cannot be compiled for 'cuda:12' without it"),
        (["--target", "cuda:80", "--backend", "hopper"], "the hopper backend compiles for cuda:90"),
        (["--target", "cuda:80", "--backend", "cpu"], "the cpu backend compiles no kernels"),
        (["--target", "cuda:80", "--dtype", "fp64"], "--dtype has no 'fp64'"),
        (["--target", "cuda:80", "--lengths", "0"], "--lengths '0' is no size"),
        (["--target", "cuda:80", "--heads", "8/3"], "8 heads cannot share 3 key heads"),
        (["--target", "cuda:80", "--positions", "x"], "--positions has no 'x'"),
        (["--target", "cuda:80", "--capture", "doc"], "--capture 'doc' gives no name a dtype"),
        (["--target", "cuda:80", "--capture", "d=int64"], "--capture names 'd'"),
        (["--target", "cuda:80", "--learned", "gain"], "--learned is given without --backward"),
        (["--target", "cuda:80", "--dim", "n=4"], "--dim gives 'n'"),
        (["--target", "cuda:80", "--head-dim", "999"], "takes head dims from 1 to 512"),
        (["--target", "cuda:80", "--capture", "gain=int32"], "--capture gives 'gain' another type"),
        (
            ["--target", "cuda:80", "--backward", "--learned", "doc"],
            "--learned names 'doc', which is no float capture",
        ),
    ],
)
def test_wrong_use_is_refused(options, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(build, "AbsentGPU", NotActive)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.yaml").write_text(PROGRAMS)
    monkeypatch.setattr(sys, "argv", ["attndsl", "build", "model.yaml", "-o", "out", *options])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (1, 2)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_else_is_written_over(tmp_path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files than a bundle's"):
        check_output(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        check_output(tmp_path / "notes")
    check_output(tmp_path / "new")


@pytest.mark.parametrize("own", ["README.md", "code/x/y.py", "entries/notes.txt"])
def test_a_bundle_with_other_files_in_it_is_not_replaced(own, tmp_path) -> None:
    entry = tmp_path / "entries" / f"{'0' * 64}.txt"
    entry.parent.mkdir()
    entry.write_text("")
    (tmp_path / "bundle.json").write_text("{}")
    check_output(tmp_path)
    (tmp_path / own).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / own).write_text("mine")
    with pytest.raises(ConfigError, match=f"holds other files than a bundle's: {own}"):
        check_output(tmp_path)
