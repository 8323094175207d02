"""Programs of a configuration that compile side by side before their first call."""

from __future__ import annotations

import json
import sys
import threading

import pytest
import torch

import attndsl
from attndsl import cli
from attndsl.building.warmup import Warmed, errors_of, warm_up
from attndsl.errors import ArgumentError, ProgramErrors

CPU = torch.device("cpu")
SECONDS = 20
PROGRAMS = """
window: causal() and q - kv < 8
gain: |
  tensor gain[heads]: float
  score = gain[h] * score
documents: |
  tensor doc[batch, kv_len]: int
  mask = doc[b, q] == doc[b, kv]
"""


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "model.yaml"
    found.write_text(PROGRAMS)
    return found


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """``command(*arguments)``: exit code, stdout, stderr of ``attndsl warmup`` on a CPU."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        common = ["--device", "cpu", "--dtype", "fp32", "--q-len", "16"]
        monkeypatch.setattr(sys, "argv", ["attndsl", "warmup", *map(str, arguments), *common])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return call


def operands(requires_grad=False):
    return {
        name: torch.randn(2, 2, 16, 8, requires_grad=requires_grad and name == "q")
        for name in ("q", "k", "v")
    }


def captures():
    return {"gain": torch.ones(2), "doc": torch.zeros(2, 16, dtype=torch.int32)}


def test_calls_run_side_by_side_with_the_callers_grad_mode():
    together = threading.Barrier(2)
    seen = []

    def call():
        together.wait(SECONDS)
        seen.append(torch.is_grad_enabled())

    told = []
    with torch.no_grad():
        found = warm_up({"a": call, "b": call}, CPU, told.append)
    assert seen == [False, False]
    assert [each.name for each in found] == ["a", "b"]
    assert sorted(told) == sorted(found)
    assert all(each.error is None and each.seconds >= 0 for each in found)


def test_each_error_is_kept_with_its_program_and_the_others_run():
    def fails():
        raise ArgumentError("no", hint="yes")

    ran = []
    found = warm_up({"a": fails, "b": lambda: ran.append(1), "c": fails}, CPU)
    assert ran == [1]
    assert [each.error is None for each in found] == [False, True, False]
    assert [error.message for error in errors_of(found)] == ["program 'a': no", "program 'c': no"]
    several = Warmed("d", 0.0, ProgramErrors([ArgumentError("one"), ArgumentError("two")]))
    assert [x.message for x in errors_of([several])] == ["program 'd': one", "program 'd': two"]


def test_what_is_no_error_of_a_program_is_raised():
    def fails():
        raise MemoryError("all of it")

    with pytest.raises(MemoryError, match="all of it"):
        warm_up({"a": fails, "b": lambda: None}, CPU)


def test_a_configuration_is_loaded_with_its_kernels(path, monkeypatch):
    calls = []
    right = attndsl.Attention.warmup

    def counted(self, *tensors, **arguments):
        calls.append((self.text, sorted(arguments["captures"]), arguments["scale"]))
        right(self, *tensors, **arguments)

    monkeypatch.setattr(attndsl.Attention, "warmup", counted)
    given = {**operands(requires_grad=True), "captures": captures(), "scale": 0.5}
    before = dict(given)
    layers = attndsl.load(path, warmup=given)
    assert given == before
    assert list(layers) == ["window", "gain", "documents"]
    assert sorted(names for _, names, _ in calls) == [[], ["doc"], ["gain"]]
    assert {scale for *_, scale in calls} == {0.5}
    assert all(layer._prepared for layer in layers.values())


def test_warming_up_makes_a_backward_where_something_learns():
    attention = attndsl.compile("tensor gain[heads]: float; score = gain[h] * score")
    backward = []
    gain = torch.ones(2, requires_grad=True)
    gain.register_hook(lambda grad: backward.append(grad.shape))
    attention.warmup(**operands(), captures={"gain": gain})
    assert backward == [(2,)]
    assert gain.grad is None


@pytest.mark.parametrize(
    ("warmup", "message"),
    [
        (torch.ones(2), "warmup is a Tensor that is no mapping"),
        ({1: 2}, "warmup is a dict that is no mapping from names"),
        ({"q": torch.ones(1, 1, 2, 8)}, "warmup has no tensor k"),
        ({**operands(), "v": 3}, "warmup has no tensor v"),
        ({**operands(), "captures": {"gian": torch.ones(2)}}, "the captures gian, which no"),
        ({**operands(), "captures": 3}, "captures is a int"),
        (
            {**operands(), "captures": {"gain": torch.ones(2)}},
            "program 'documents': the call lacks",
        ),
    ],
)
def test_what_is_no_call_is_refused(path, warmup, message):
    with pytest.raises(ArgumentError, match=message):
        attndsl.load(path, warmup=warmup)


def test_the_command_prints_a_line_for_each_program(command, path):
    code, out, err = command(path.name, "--backward", "--batch", 2, "--heads", 2, "--head-dim", 8)
    assert (code, err) == (0, "")
    *lines, last = out.splitlines()
    assert sorted(line.split()[0] for line in lines) == ["documents", "gain", "window"]
    assert last.startswith("3 programs on cpu in ")
    code, out, _ = command(path.name, "--name", "gain")
    assert out.splitlines()[-1].startswith("1 program on cpu in ")


def test_the_command_goes_on_after_an_error(command, tmp_path):
    (tmp_path / "some.yaml").write_text(
        'bad: mask = foo\nneeds: "param c: float\\nscore = softcap(score, c)"\nfine: causal()\n'
    )
    code, out, err = command("some.yaml")
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()] == ["fine", "1"]
    assert out.endswith("2 failed\n")
    assert "some.yaml:1:8: program 'bad': 'foo' is not declared" in err
    assert "program 'needs': the call lacks 'c'" in err
    code, out, err = command("some.yaml", "--json")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert found["ok"] is False
    assert found["backend"] == "cpu"
    errors = {
        each["name"]: [error["kind"] for error in each["errors"]] for each in found["programs"]
    }
    assert errors == {"bad": ["NameResolutionError"], "needs": ["ArgumentError"], "fine": []}
    assert command("some.yaml", "-p", "c=3.0", "--name", "needs")[0] == 0


def test_the_command_refuses_what_it_cannot_use(command, path):
    code, out, err = command(path.name, "--dim", "other=3")
    assert (code, out) == (2, "")
    assert "--dim gives 'other', which no tensor of the program introduces" in err
    assert command(path.name, "--name", "none")[0] == 2
