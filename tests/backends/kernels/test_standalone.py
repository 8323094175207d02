"""Texts of kernels that are run by themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.fork_server import run_script

import attndsl
from attndsl.backends.kernels.standalone import compile_text
from attndsl.errors import BackendError

if TYPE_CHECKING:
    import subprocess

PROGRAM = """\
tensor gain[heads]: float

distance = q - kv
near = distance < 128
mask = near and distance >= 0
rows = gain[h] * score
tl = tanh(rows)
score = tl + 0.1 * distance
"""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python PATH``, where Triton's interpreter is not chosen."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return run_script(path, *arguments, cwd=path.parent, env=environment)


def said(path: Path, *arguments: str) -> list[str]:
    done = run(path, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def written(folder: Path, *arguments: str, program: str = PROGRAM) -> Path:
    path = folder / f"{'_'.join(arguments)}.py"
    direction, backend = arguments
    path.write_text(attndsl.compile(program).source(direction, backend=backend), "utf-8")
    return path


@pytest.mark.parametrize(
    ("direction", "backend", "kernels"),
    [
        ("forward", "hopper", ["hopper forward: attention_forward"]),
        pytest.param("backward", "triton", ["triton backward_kv: attention_backward_kv",
                                            "triton backward_q: attention_backward_q"],
                     marks=pytest.mark.slow),
        pytest.param("tangent", "triton", ["triton tangent: attention_tangent"],
                     marks=pytest.mark.slow),
        pytest.param("forward", "decode", ["decode forward_1x2: attention_decode"],
                     marks=pytest.mark.slow),
        pytest.param("forward", "short", ["short forward_16x16: attention_short_forward"],
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_text_runs_alone(
    direction: str, backend: str, kernels: list[str], tmp_path: Path
) -> None:
    lines = said(written(tmp_path, direction, backend))
    assert [line.partition(", cuda:90: ")[0] for line in lines] == sorted(kernels)
    for line in lines:
        assert " registers, " in line
        assert line.endswith(" bytes of shared memory")


def code_of(lines: list[str]) -> list[str]:
    """Instructions of PTX, without places in files and what is said of it."""
    start = next(number for number, line in enumerate(lines) if line.startswith(".version"))
    end = next(number for number, line in enumerate(lines) if line.lstrip().startswith(".section"))
    found = [line.partition("//")[0].strip() for line in lines[start:end]]
    return [x for x in found if x and not x.startswith((".loc", ".file")) and "$L__tmp" not in x]


SHOW = """\
import sys
from pathlib import Path
from attndsl.backends.kernels.standalone import compile_text

for path in map(Path, sys.argv[1:]):
    for found in compile_text(path.read_text("utf-8"), path):
        print(found.kernel.asm["ptx"])
        print("end of", path.stem)
"""


def test_names_change_no_code_and_texts_may_be_changed(tmp_path: Path) -> None:
    """Programs that mean the same, of which one has no locals to give names."""
    named = written(tmp_path, "forward", "triton")
    one_line = (
        "tensor gain[heads]: float; mask = q - kv < 128 and q - kv >= 0; "
        "score = tanh(gain[h] * score) + 0.1 * (q - kv)"
    )
    plain, changed, script = (tmp_path / f"{name}.py" for name in ("plain", "changed", "script"))
    plain.write_text(attndsl.compile(one_line).source(backend="triton"), "utf-8")
    text = named.read_text("utf-8")
    assert "    distance = " in text
    assert "    distance = " not in plain.read_text("utf-8")
    text = text.replace("distance < 128", "distance < 77")
    changed.write_text(text.replace("# options   warps=4", "# options   warps=8"), "utf-8")
    script.write_text(SHOW, "utf-8")
    lines = said(script, *map(str, (named, plain, changed)))
    codes = []
    for path in (named, plain, changed):
        end = lines.index(f"end of {path.stem}")
        codes.append(code_of(lines[:end]))
        lines = lines[end + 1 :]
    assert codes[0] == codes[1]
    assert len(codes[0]) > 300
    assert codes[2] != codes[0]
    assert ".reqntid 256" in codes[2]


@pytest.mark.slow
def test_a_stage_or_target_that_is_not_there(tmp_path: Path) -> None:
    path = written(tmp_path, "forward", "triton", program="causal()")
    (line,) = said(path, "--target", "cuda:80")
    assert line.startswith("triton forward: attention_forward, cuda:80: ")
    missing = run(path, "--show", "wasm")
    assert missing.returncode == 2
    assert "there is no stage 'wasm'; use " in missing.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# A kernel that", "# Some kernel that", "no head of a generated kernel"),
        ("# kernel    ", "# kernels   ", "line 1 of .* cannot be read: 'kernel'"),
        ("warps=4", "warps=four", "line 1 of .* cannot be read: .*four"),
        ("# target    cuda:90", "# target    interpreter", "'interpreter' has is not known"),
        ("# kernel    triton forward: attention_forward", "# kernel    x: y", "no function y"),
    ],
)
def test_texts_that_cannot_be_read(old: str, new: str, message: str) -> None:
    text = attndsl.compile("causal()").source(backend="triton")
    assert old in text
    with pytest.raises(BackendError, match=message) as caught:
        list(compile_text(text.replace(old, new), Path("kernel.py")))
    assert caught.value.hint


def test_targets_that_are_not_known() -> None:
    text = attndsl.compile("causal()").source(backend="triton")
    with pytest.raises(BackendError, match="'cuda:12'") as caught:
        list(compile_text(text, Path("kernel.py"), "cuda:12"))
    assert "cuda:90" in str(caught.value.hint)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled in this process")
def test_nothing_is_compiled_for_the_interpreter() -> None:
    text = attndsl.compile("causal()").source(backend="triton")
    with pytest.raises(BackendError, match="TRITON_INTERPRET is set"):
        list(compile_text(text, Path("kernel.py")))
