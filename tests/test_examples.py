import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "picture")


def test_every_variant_has_an_example():
    expected = (
        "alibi block_diffusion causal dilated dsa joined latent learned_alibi lengths "
        "neighbourhood_2d nsa optional packed_documents prefix_lm relative_bias sigmoid sinks "
        "sliding_window soft_cap t5_bias video_tiles"
    )
    assert expected.split() == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_run_and_verify_themselves(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "picture", raising=False)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    # Each compares itself with something written another way, and shows what it did.
    assert re.search(r"difference.*: \d\.\de-\d\d", out)
    assert len(out.splitlines()) > 15


@pytest.fixture
def train(monkeypatch):
    """The character model's script, as names."""
    folder = EXAMPLES / "char_model"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "text", raising=False)
    return runpy.run_path(str(folder / "train.py"))


def test_served_bytes_are_those_of_the_plain_model(monkeypatch, capsys):
    folder = EXAMPLES / "serve"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    serve = runpy.run_path(str(folder / "serve.py"))
    monkeypatch.delitem(sys.modules, "model")
    assert serve["main"](["--requests", "7"]) == 0
    out = capsys.readouterr().out
    assert "7 of 7 requests have the bytes of the plain model" in out
    assert int(re.search(r"(\d+) drafts kept", out)[1]) > 10


def train_long(*arguments):
    """The script for sequences that processes share, to its end."""
    script = str(EXAMPLES / "long" / "train.py")
    command = [sys.executable, script, "--steps", "2", "--length", "200", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "ranks", [("2", "2"), pytest.param(("4", "2"), marks=pytest.mark.slow)], ids="x".join
)
def test_processes_that_share_sequences_have_the_losses_of_one(ranks):
    alone, shared = train_long("--ranks", "1"), train_long("--ranks", ranks[0], "--cp", ranks[1])
    assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
    one, several = (
        [float(x) for x in re.findall(r"loss ([\d.]+)", found.stdout)] for found in (alone, shared)
    )
    assert len(one) == 2
    assert one[1] < one[0]
    assert several == pytest.approx(one, abs=2e-5)
    assert "keys travel to the rows that see them" in shared.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "3", "--cp", "2"], "choose --cp so that processes / cp divides 4"),
        (["--ranks", "2", "--cp", "0"], "are 1 or more"),
    ],
)
def test_processes_that_share_no_sequences_are_refused(arguments, said, capsys):
    main = runpy.run_path(str(EXAMPLES / "long" / "train.py"))["main"]
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_the_character_model_learns(train, capsys):
    assert train["main"](["--steps", "12", "--write", "20", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    size = int(re.search(r"text: (\d+) characters", out)[1])
    assert size >= 200_000
    start, end = map(float, re.search(r"([\d.]+) at first, ([\d.]+) at the end", out).groups())
    assert end < 0.95 * start
    assert "\x1b" not in out
    assert out.split("written by the model:\n")[1].startswith("Return the ")


def test_the_character_model_says_when_it_does_not_learn(train, monkeypatch, capsys):
    monkeypatch.setitem(train["main"].__globals__, "LEARNING_RATE", 0.0)
    assert train["main"](["--steps", "10", "--write", "1", "--device", "cpu"]) == 1
    assert "did not fall" in capsys.readouterr().err


def test_the_text_is_the_same_every_time(train):
    gather = sys.modules["text"].gather
    short = gather(30_000)
    assert short == gather(30_000)
    assert len(short) == 30_000
    assert len(set(short.split("\n\n"))) > 20


def test_generation_with_a_cache_equals_generation_without(train):
    import torch

    model = train["Model"]("auto").eval()
    text = torch.randint(0, 90, (1, 40))
    caches = [[] for _ in model.layers]
    with torch.no_grad():
        whole = model(text)
        parts = torch.cat([model(text[:, i : i + 10], caches) for i in range(0, 40, 10)], 1)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


def test_the_curve_falls_with_the_losses(train):
    assert train["curve"]([4.0, 3.0, 2.0, 1.0]) == "█▆▃▁"
    assert len(train["curve"]([1.0] * 500)) == 60
