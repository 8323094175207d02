"""Where a program was written is no part of what it is: of its operator, its graphs, its equality.

Errors know it all the same.
"""

from __future__ import annotations

import copy
import pickle
import warnings
import zipfile

import pytest
import torch
from support.fork_server import run_python
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import attndsl
from attndsl.errors import ShapeError
from attndsl.serialise import lowered_to_json

ROWS = """
  tensor u[kv_len, r]: float
  tensor w[q_len, s]: float
  mask = causal()
  score = score + dot(w[q, :], u[kv, :])
"""
LAYERS = "".join(f"layer{number}: |{ROWS}" for number in range(12))


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.linear = nn.Linear(4, 4)

    def forward(self, x, u, w):
        return self.attention(self.linear(x), x, x, u=u, w=w)


def _load(folder, text):
    folder.mkdir()
    path = folder / "programs.yaml"
    path.write_text(text)
    return path, attndsl.load(path)


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """The file, and twelve programs of one text in it."""
    return _load(tmp_path_factory.mktemp("origins") / "the-author", LAYERS)


def test_layers_of_one_text_share_a_graph(layers):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    programs = list(layers[1].values())
    stack = [torch.compile(Layer(programs[n % 12]), backend=counter) for n in range(24)]
    x, u, w = torch.randn(1, 2, 5, 4), torch.randn(5, 3), torch.randn(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layer in stack:
            x = layer(x.detach(), u, w)
            x.sum().backward()
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_saved_graphs_hold_no_path(tmp_path, strict):
    text = "one: causal()\ntwo: score + (kv - q)\n"
    text += "three: {program: 'mask = q - kv < w', params: {w: 3}}\n"
    path, programs = _load(tmp_path / "the-author", text)

    class Model(nn.Module):
        def forward(self, x):
            for attention in programs.values():
                x = attention(x, x, x)
            return x

    x = torch.randn(1, 2, 6, 4)
    exported = torch.export.export(Model(), (x,), strict=strict)
    torch.testing.assert_close(exported.module()(x), Model()(x))
    saved = tmp_path / "model.pt2"
    torch.export.save(exported, saved)
    with zipfile.ZipFile(saved) as archive:
        parts = [archive.read(name) for name in archive.namelist()]
    assert any(b"q - kv < w" in part for part in parts)
    for part in (saved.read_bytes(), *parts):
        assert path.name.encode() not in part
        assert b"the-author" not in part


CALL = """
import sys, torch, attndsl
programs = attndsl.load(sys.argv[1])
q = torch.randn(1, 1, 5, 4)
for name in ("layer0", "layer7"):
    try:
        programs[name](q, q, q, u=torch.randn(5, 3), w=torch.randn(5, 2))
    except attndsl.AttnDSLError as error:
        print(error.span.source.name, error.span.line, error.span.text, sep="|")
"""


def test_errors_at_calls_name_the_file_and_the_entry(layers):
    path, programs = layers
    q, u, w = torch.randn(1, 1, 5, 4), torch.randn(5, 3), torch.randn(5, 2)
    for number in (7, 0, 11):
        with pytest.raises(ShapeError) as caught:
            programs[f"layer{number}"](q, q, q, u=u, w=w)
        line = 5 * number + 5
        assert str(caught.value).startswith(f"{path}:{line}:17: dot multiplies rows")
    # Another process has the programs from the cache, whose entry knows places in the text only.
    done = run_python(CALL, path)
    assert done.returncode == 0, done.stderr
    dot = "dot(w[q, :], u[kv, :])"
    assert done.stdout.splitlines() == [f"{path}|5|{dot}", f"{path}|40|{dot}"]


def test_equal_texts_are_equal_operators(layers):
    path, programs = layers
    first, last = programs["layer0"], programs["layer11"]
    elsewhere = attndsl.compile(first.text, name="elsewhere.attn", first_line=7)
    assert first == last == elsewhere
    assert len({first, last, elsewhere}) == 1
    assert first != attndsl.compile(first.text, exact=True)
    # Copies say where they come from.
    q = torch.randn(1, 1, 5, 4)
    for again in (pickle.loads(pickle.dumps(last)), copy.deepcopy(last)):
        assert again == last
        with pytest.raises(ShapeError) as caught:
            again(q, q, q, u=torch.randn(5, 3), w=torch.randn(5, 2))
        assert str(caught.value).startswith(f"{path}:60:")


def test_errors_of_equal_texts_name_their_own_file(tmp_path):
    for name in ("one", "two"):
        with pytest.raises(attndsl.AttnDSLError) as caught:
            _load(tmp_path / name, "a: {program: q - kv < windw, params: {window: 3}}")
        assert {error.span.source.name for error in caught.value.errors} == {
            str(tmp_path / name / "programs.yaml")
        }


def test_places_are_kept_where_another_text_had_the_expression_first():
    dot = "dot(left[q, :], right[kv, :])"
    declared = "tensor left[q_len, n]: float\ntensor right[kv_len, n]: float\n"
    first = attndsl.compile(f"{declared}score = 2.0 * {dot}")
    text = f"{declared}\n\nscore = score + {dot}"
    second = attndsl.compile(text)
    places = lowered_to_json(second.lowered, text)["program"]["places"]
    assert [text.index(dot), text.index(dot) + len(dot)] in places.values()
    assert first.lowered.program.score is not second.lowered.program.score
