"""Heads of generated texts, and what reads them."""

from __future__ import annotations

import ast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attndsl
from attndsl.backends.base import UNWRITTEN, Wants, Written
from attndsl.backends.hopper.family import Hopper
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Job, Task
from attndsl.backends.kernels.module_headers import (
    FIRST_LINE,
    arguments_in,
    config_in,
    fields_of,
    headed,
)
from attndsl.backends.kernels.target import machine_of
from attndsl.backends.triton.family import Portable

MACHINE = machine_of("cuda:90")
PROGRAM = """\
tensor gain[heads]: float

# Near pairs alone.
near = q - kv < 128
mask = near and q >= kv
score = gain[h] * score
"""


def jobs_of(text: str) -> list[Job]:
    lowered = attndsl.compile(text).lowered
    call = example_call(lowered, 64, 64, torch.bfloat16, {})
    grad = torch.empty_like(call.q)
    return [
        job.on(MACHINE)
        for family in (Portable(), Hopper())
        for task, given in ((Task.FORWARD, None), (Task.BACKWARD, grad))
        for job in family.jobs(lowered, call, task, given, Wants())
    ]


JOBS = jobs_of(PROGRAM)
TEXTS = [job.text(job.kernel.configs(job, MACHINE)[0], MACHINE) for job in JOBS]


def head_of(number: int, config: Config | None = None, written: Written = UNWRITTEN) -> str:
    job, text = JOBS[number], TEXTS[number]
    config = config or job.kernel.configs(job, MACHINE)[0]
    found = headed(text, job, config, MACHINE, written)
    assert found.endswith(f"\n{text}")
    return found.removesuffix(text)


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_a_head_says_how_its_kernel_is_compiled(number: int) -> None:
    job = JOBS[number]
    config = job.kernel.configs(job, MACHINE)[0]
    fields = fields_of(head_of(number))
    assert fields["kernel"] == [f"{job.kernel.family} {job.kernel.name}: {job.kernel.entry}"]
    assert fields["target"] == ["cuda:90"]
    assert fields["tiles"] == [str(config)]
    found = config_in(fields["options"][0])
    assert (found.warps, found.stages) == (config.warps, config.stages)
    (entry,) = (
        item
        for item in ast.parse(TEXTS[number]).body
        if isinstance(item, ast.FunctionDef) and item.name == job.kernel.entry
    )
    names = [x.arg for x in entry.args.args]
    known = arguments_in(fields["argument"])
    assert sorted(known) == sorted(names)
    expected = job.kernel.arguments(type("Entry", (), {"arg_names": names}), job.facts, config)
    assert [known[name] for name in names] == expected


def test_registers_that_are_bounded_are_said() -> None:
    found = fields_of(head_of(0, Config(64, 64, 8, 3, most_registers=128)))
    assert found["options"] == ["warps=8 stages=3 maxnreg=128"]
    assert config_in(found["options"][0]).most_registers == 128


def test_a_head_shows_the_program_as_it_was_written() -> None:
    head = head_of(0, written=Written(PROGRAM, {"window": 8, "exact": True}))
    lines = [line for line in PROGRAM.split("\n") if line]
    shown = head.split("\n")[2 : 2 + len(lines)]
    assert [line[12:] for line in shown] == lines
    assert "\n# bound     window = 8, exact = True\n" in head
    assert "near" not in head_of(0)
    assert "# program   " in head_of(0)


def test_long_programs_are_shown_in_part() -> None:
    text = "\n".join(f"a{number} = {'q + ' * 40}1" for number in range(100))
    head = head_of(0, written=Written(text))
    assert "... 60 more lines" in head
    assert max(map(len, head.split("\n"))) <= 100
    assert fields_of(head)["target"] == ["cuda:90"]


@settings(max_examples=200)
@given(st.text(st.sampled_from("a=1#:\n\r\t\0\f\v\x1c\x85\u2028\u202e'\"\\ \ud800é")))
def test_no_program_ends_its_comment(text: str) -> None:
    head = head_of(0, written=Written(text))
    assert all(line.startswith("#") for line in head.removesuffix("\n").splitlines())
    head.encode()
    assert head.split("\n")[:2] == [FIRST_LINE, "#"]
    fields = fields_of(head)
    plain = fields_of(head_of(0))
    assert {**fields, "program": []} == {**plain, "program": []}


def test_a_field_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="Q, K"):
        arguments_in(["Q, K"])
    with pytest.raises(ValueError, match="not enough values"):
        config_in("warps")
    with pytest.raises(KeyError):
        config_in("warps=4")
