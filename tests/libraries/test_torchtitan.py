"""Torchtitan's Llama debug model with its attention replaced.

torchtitan 0.3.0 is no dependency of the tests: it asks for ``datasets`` below 4.8, which does not
go with the versions in ``constraints.txt``. What these tests need of it:

    pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 einops torchdata tyro
    pip install --no-deps docstring_parser typeguard
"""

import copy
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from support.scripts import loader
from support.shard_work import start_processes
from support.titan_shards import work
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from attndsl import errors


def steps_script(monkeypatch):
    """The benchmark, which has a module of torch's own attention for packed documents."""
    return loader(monkeypatch, Path(__file__).parents[2] / "benchmarks")("torchtitan_steps")


@pytest.mark.slow
class TestModel:
    """With torchtitan."""

    @pytest.fixture(autouse=True)
    def titan(self):
        pytest.importorskip("torchtitan")
        self.attention = importlib.import_module("attndsl.torchtitan").Attention
        self.common = importlib.import_module("torchtitan.models.common.attention")
        self.llama = importlib.import_module("torchtitan.models.llama3")

    def model(self, inner):
        torch.manual_seed(0)
        config = self.llama._debugmodel("varlen")
        for layer in config.layers:
            layer.attention.inner_attention = inner
        model = config.build()
        model.init_states()
        return model

    def losses(self, inner, steps=3, compiled=False):
        model = self.model(inner)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        positions = torch.cat([torch.arange(20), torch.arange(12)]).expand(2, -1)
        found = []
        for step in range(steps):
            ids = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(step))
            masks = model.get_attention_masks(positions)
            logits = call(ids[:, :-1], positions=positions, attention_masks=masks)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def test_losses_are_those_of_torchs_attention(self, monkeypatch):
        wanted = self.losses(steps_script(monkeypatch).by_sdpa())
        assert self.losses(self.attention.Config()) == pytest.approx(wanted, abs=1e-4)
        compiled = self.losses(self.attention.Config(), compiled=True)
        assert compiled == pytest.approx(wanted, abs=1e-4)

    def test_programs_are_added(self):
        plain = self.losses(self.attention.Config(), 1)
        near = self.losses(self.attention.Config(program="q - kv < 4"), 1)
        window = self.losses(self.attention.Config(window_size=(3, 0)), 1)
        assert near == pytest.approx(window, abs=1e-5)
        assert near != pytest.approx(plain, abs=1e-5)

    def test_the_log_sum_exp_goes_to_the_epilogue(self):
        module = self.attention.Config(program="score = score + alibi()", heads=2).build()
        x = torch.randn(1, 8, 2, 4)
        masks = self.common.create_varlen_metadata_for_document(torch.arange(8)[None])
        out = module(x, x, x, attention_masks=masks, out_transform=lambda out, lse: (out, lse))
        assert out[0].shape == x.shape
        assert out[1].shape == (1, 8, 2)
        with pytest.raises(errors.UnsupportedError, match="1 of 2"):
            module(*[x[:, :, :1]] * 3, attention_masks=masks)
        with pytest.raises(errors.ArgumentError, match="NoneType"):
            module(x, x, x, attention_masks=None)

    def test_layers_share_documents_until_starts_change(self):
        home = importlib.import_module("attndsl.torchtitan.attention_module")

        def found(starts, batch=2, length=4):
            return home._documents(starts, batch, length)

        starts = torch.tensor([0, 3, 8])
        document = found(starts)
        assert document.tolist() == [[0, 0, 0, 1], [1, 1, 1, 1]]
        assert found(starts) is document
        assert found(starts, 1, 8).tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
        assert found(starts, 1, 4).tolist() == [[0, 0, 0, 1]]
        assert found(starts) is document
        starts[1] = 5
        changed = [[0, 0, 0, 0], [0, 1, 1, 1]]
        assert found(starts).tolist() == changed
        # A copy's version begins anew, and other memory has no version of its own.
        assert found(copy.deepcopy(starts)).tolist() == changed
        starts.data = torch.tensor([0, 3, 8])
        assert found(starts).tolist() == document.tolist()
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(found(torch.tensor([0, 3, 8])), FakeTensor)
        with torch.inference_mode():
            unseen = torch.tensor([0, 3, 8])
            assert found(unseen).tolist() == document.tolist()
            unseen[1] = 5
            assert found(unseen).tolist() == changed

    def test_layers_of_a_step_make_documents_once(self):
        model = self.model(self.attention.Config())
        assert len(model.layers) > 1
        kept = importlib.import_module("attndsl.torchtitan.attention_module")._KEPT
        masks = model.get_attention_masks(torch.arange(16).expand(2, -1))
        before = kept.made
        model(torch.zeros(2, 16, dtype=torch.int64), attention_masks=masks)
        assert kept.made == before + 1

    def test_processes_share_sequences(self, tmp_path):
        for world in (1, 2):
            start_processes(work, (world, str(tmp_path)), world)
        alone, *shared = (
            json.loads((tmp_path / f"losses{name}.json").read_text("utf-8"))
            for name in ("1.0", "2.0", "2.1")
        )
        assert alone[2] < alone[0]
        assert shared[0] == shared[1] == pytest.approx(alone, abs=1e-4)

    @pytest.mark.parametrize(
        ("program", "match"),
        [
            ("score = score + alibi()", "reads heads"),
            ("param w: int\nmask = q - kv < w", "captures w"),
        ],
    )
    def test_what_a_configuration_refuses(self, program, match):
        with pytest.raises(errors.ArgumentError, match=match) as caught:
            self.attention.Config(program=program).build()
        assert caught.value.hint


def test_without_torchtitan_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "attndsl.torchtitan", raising=False)
    with pytest.raises(
        errors.UnsupportedError, match="torchtitan, which is not installed"
    ) as caught:
        importlib.import_module("attndsl.torchtitan")
    assert "torchtitan==0.3.0" in caught.value.hint


def test_with_another_torchtitan_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torchtitan.models.common.attention", None)
    monkeypatch.delitem(sys.modules, "attndsl.torchtitan", raising=False)
    with pytest.raises(errors.UnsupportedError, match=r"needs torchtitan 0\.3") as caught:
        importlib.import_module("attndsl.torchtitan")
    assert "torchtitan==0.3.0" in caught.value.hint


@pytest.mark.slow
def test_steps_are_measured(monkeypatch, tmp_path):
    pytest.importorskip("torchtitan")
    script = steps_script(monkeypatch)
    assert script.main(["--device", "cpu", "--output", str(tmp_path / "found.json")]) == 0
    sdpa, own = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (sdpa["attention"], own["attention"]) == ("sdpa", "attndsl")
    assert own["documents"] > 2
    assert own["difference"] < 1e-4
    assert own["last"] < own["first"] - 1
    assert own["step_ms"] > 0


def test_steps_say_that_torchtitan_is_missing(monkeypatch, capsys):
    script = steps_script(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "attndsl.torchtitan", raising=False)
    assert script.main(["--device", "cpu"]) == 2
    assert "which is not installed" in capsys.readouterr().err


def rows_of(name):
    """Rows of a result file, and the version of PyTorch."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json"
    found = json.loads(path.read_text("utf-8"))
    return found["rows"], found["versions"]["torch"].split("+")[0]


def test_the_page_has_the_figures_of_the_files():
    path = Path(__file__).parents[2] / "docs" / "training.md"
    page = " ".join(path.read_text("utf-8").split())
    rows, torch_version = rows_of("torchtitan_steps_cpu")
    assert [(row["attention"], row["compiled"]) for row in rows] == [
        ("sdpa", False), ("attndsl", False), ("sdpa", True), ("attndsl", True)
    ]  # fmt: skip
    (first,) = {f"{row['first']:.2f}" for row in rows}
    (last,) = {f"{row['last']:.4f}" for row in rows}
    largest = max(row.get("difference", 0.0) for row in rows)
    assert f"With PyTorch {torch_version} on a CPU, losses fall from {first} to {last}" in page
    assert f"differ from SDPA's by at most {largest:.1e}." in page
    rows, torch_version = rows_of("torchtitan_steps")
    eager, compiled = rows[:2], rows[2:]
    for two, flag in ((eager, False), (compiled, True)):
        assert [(row["attention"], row["compiled"]) for row in two] == [
            ("flex", flag), ("attndsl", flag)
        ]  # fmt: skip
    largest = max(row.get("difference", 0.0) for row in rows)
    assert f"With PyTorch {torch_version} on one NVIDIA H200" in page
    assert f"FlexAttention's by at most {largest:.1e}." in page
    times = [f"{row['step_ms']:.1f}" for row in rows]
    assert "| ms per step | FlexAttention | attndsl |" in page
    assert f"| eager | {times[0]} | {times[1]} |" in page
    assert f"| compiled blocks | {times[2]} | {times[3]} |" in page
