"""Exported programs: saved here, loaded and run by a process that only imports attndsl."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from support.fork_server import run_python
from torch import nn
from torch.export import Dim

import attndsl
from attndsl import scaled_dot_product_attention
from attndsl.call.op_encoding import EncodedCall, packed
from attndsl.compat import flash_attn_varlen_func, flash_attn_with_kvcache
from attndsl.errors import ShapeError, UnsupportedError
from attndsl.flex import create_block_mask, flex_attention

ALIBI = attndsl.compile(
    "tensor slope[heads]: float; param near: int; param gain: float\n"
    "mask = causal() and q - kv < near; score = gain * score - slope[h] * (q - kv)"
)
DROPPED = attndsl.compile("mask = causal(); weights = dropout(softmax(score), 0.5)")
ATTENTION = attndsl.compile("causal()")
Q, KV = Dim("q", min=1, max=1 << 20), Dim("kv", min=1, max=1 << 20)


def _heads(length, heads=4):
    return torch.randn(2, heads, length, 8)


class Alibi(nn.Module):
    """A learned capture, grouped heads, params and an offset that depend on the lengths."""

    shapes = ({2: Q}, {2: KV}, {2: KV})

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.rand(4))

    def inputs(self, q_len, kv_len):
        return _heads(q_len), _heads(kv_len, 2), _heads(kv_len, 2)

    def forward(self, q, k, v):
        offset = k.shape[2] - q.shape[2]
        out, lse = ALIBI(
            q, k, v, slope=self.slope, near=k.shape[2] // 2 + 1, gain=k.shape[2] ** -0.5,
            q_offset=offset, return_lse=True,
        )  # fmt: skip
        return out * lse[..., None]


class Masked(nn.Module):
    """torch's signature, with padding."""

    shapes = ({2: Q}, {2: KV}, {2: KV}, {1: KV})

    def inputs(self, q_len, kv_len):
        real = torch.arange(kv_len) < torch.tensor([kv_len, kv_len - 1])[:, None]
        return _heads(q_len), _heads(kv_len), _heads(kv_len), real

    def forward(self, q, k, v, real):
        return scaled_dot_product_attention(q, k, v, real[:, None, None], is_causal=True)


class Flex(nn.Module):
    """A Python score with a parameter."""

    shapes = ({2: Q}, {2: KV}, {2: KV})

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.rand(4))

    def inputs(self, q_len, kv_len):
        return _heads(q_len), _heads(kv_len), _heads(kv_len)

    def forward(self, q, k, v):
        steps = torch.tensor([1.0, 0.5, 0.25, 0.0])
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + self.slope[h] * steps[h] * (i - j))


class Encoder(nn.Module):
    """Modules of torch."""

    shapes = ({1: Q}, {1: Q})

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        layer.self_attn = attndsl.nn.MultiheadAttention(16, 2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def inputs(self, q_len, kv_len):
        return torch.randn(2, q_len, 16), torch.arange(q_len).expand(2, -1) > 2

    def forward(self, x, padded):
        return self.layers(x, src_key_padding_mask=padded)


MODELS = {"alibi": Alibi, "masked": Masked, "flex": Flex, "encoder": Encoder}
LENGTHS = ((5, 9), (7, 12), (1, 1))
LOAD = """
import attndsl, sys, torch
for name in sys.argv[2:]:
    program = torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()
    for inputs, expected in torch.load(f"{sys.argv[1]}/{name}.runs"):
        torch.testing.assert_close(program(*inputs), expected)
"""


def _export(folder, name, strict):
    model = MODELS[name]().eval()
    with torch.no_grad():
        runs = []
        for lengths in LENGTHS:
            inputs = model.inputs(*lengths)
            runs.append((inputs, model(*inputs)))
    exported = torch.export.export(model, runs[0][0], dynamic_shapes=model.shapes, strict=strict)
    torch.export.save(exported, folder / f"{name}.pt2")
    torch.save(runs, folder / f"{name}.runs")


@pytest.mark.parametrize(
    ("names", "strict"),
    [
        (("alibi", "flex"), False),
        pytest.param(("masked", "encoder"), False, marks=pytest.mark.slow),
        pytest.param(tuple(MODELS), True, marks=pytest.mark.slow, id="by dynamo"),
    ],
)
def test_saved_programs_run_in_another_process(tmp_path, names, strict):
    for name in names:
        _export(tmp_path, name, strict)
    done = run_python(LOAD, tmp_path, *names)
    assert done.returncode == 0, done.stderr


OPEN = {
    "packed rows": (
        lambda x, cu: flash_attn_varlen_func(x, x, x, cu, cu, 99, 99, causal=True), (0,),
        lambda n: (torch.randn(n, 2, 8), torch.tensor([0, 7, n])),
    ),
    "kv_lengths": (
        lambda q, k, lengths: ATTENTION(q, k, k, kv_lengths=lengths, q_offset=5), (0, 0, 0),
        lambda n: (torch.randn(n, 2, 3, 8), torch.randn(n, 2, 30, 8), torch.arange(n)),
    ),
    "entries of a cache": (
        lambda q, k, n: flash_attn_with_kvcache(q, k, k, cache_seqlens=n, causal=True), (0, 0, 0),
        lambda n: (torch.randn(n, 1, 2, 8), torch.randn(n, 30, 2, 8), torch.arange(n) + 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_checks_leave_a_dim_open(name):
    function, dims, inputs = OPEN[name]

    class Layer(nn.Module):
        def forward(self, *given):
            return function(*given)

    size = Dim("size", min=8, max=4096)
    given = inputs(24)
    shapes = [{dims[n]: size} if n < len(dims) else None for n in range(len(given))]
    exported = torch.export.export(Layer(), given, dynamic_shapes=(tuple(shapes),), strict=True)
    for count in (9, 26):
        given = inputs(count)
        torch.testing.assert_close(exported.module()(*given), function(*given))


def test_dropout_of_an_exported_program_is_drawn_at_each_run():
    class Layer(nn.Module):
        def forward(self, x):
            return DROPPED(x, x, x)

    x = _heads(8)
    program = torch.export.export(Layer(), (x,)).module()
    torch.manual_seed(5)
    first, second = program(x), program(x)
    torch.manual_seed(5)
    assert torch.equal(DROPPED(x, x, x), first)
    assert not torch.equal(first, second)


RUN_PACKAGE = """
import attndsl, sys, torch
package = torch._inductor.aoti_load_package(f"{sys.argv[1]}/layer.pt2")
for inputs, expected in torch.load(f"{sys.argv[1]}/layer.runs"):
    torch.testing.assert_close(package(*inputs), expected)
"""
PACKAGED = {
    "no captures": ("causal()", {}),
    "captures": (
        "tensor t[heads]: float; param n: int; param a: float; mask = q - kv < n\n"
        "score = a * score * t[h]",
        {"t": torch.rand(4), "n": 3, "a": 0.5},
    ),
    "ids and a sink": (
        "tensor doc[kv_len]: int; tensor s[heads]: float; mask = doc[q] == doc[kv]; sink = s[h]",
        {"doc": torch.arange(64) // 5, "s": torch.rand(4)},
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own, in torch.
@pytest.mark.parametrize(("text", "captures"), PACKAGED.values(), ids=PACKAGED)
def test_packages_of_aot_inductor_run_in_another_process(tmp_path, text, captures):
    """They call the operator with None for empty lists; lengths are open."""
    attention = attndsl.compile(text)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in captures.items():
                if isinstance(value, torch.Tensor):
                    self.register_buffer(name, value)

        def forward(self, q, k):
            given = {name: getattr(self, name, value) for name, value in captures.items()}
            if "doc" in given:
                given["doc"] = given["doc"][: k.shape[2]]
            out, lse = attention(q, k, k, **given, return_lse=True)
            return out * lse[..., None]

    layer, length = Layer(), Dim("length", min=2, max=64)
    with torch.no_grad():
        runs = [((_heads(n), _heads(n)), None) for n in (8, 13, 40)]
        runs = [(inputs, layer(*inputs)) for inputs, _ in runs]
    exported = torch.export.export(layer, runs[0][0], dynamic_shapes=({2: length}, {2: length}))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
    torch.save(runs, tmp_path / "layer.runs")
    code = [sys.executable, "-P", "-W", "ignore", "-c", RUN_PACKAGE, str(tmp_path)]
    subprocess.run(code, check=True, timeout=300)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "made", [lambda x: ATTENTION(x, x, x), attndsl.nn.MultiheadAttention(8, 2)]
)
def test_traces_of_one_length_are_refused(made):
    x = torch.randn(2, 4, 8) if isinstance(made, nn.Module) else _heads(8)
    inputs = (x, x, x) if isinstance(made, nn.Module) else (x,)
    with pytest.raises(UnsupportedError, match="would record the operations of these lengths"):
        torch.jit.trace(made, inputs)


class Switched(nn.Module):
    """Models that are traced without the program that they hold."""

    def __init__(self, uses: bool):
        super().__init__()
        self.attention, self.uses = ATTENTION, uses

    def forward(self, x):
        return self.attention(x, x, x) if self.uses else 2 * x


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_model_is_traced_that_holds_a_program_and_does_not_call_it():
    x = _heads(8)
    assert torch.equal(torch.jit.trace(Switched(False), (x,))(x), 2 * x)
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace would record"):
        torch.jit.trace(Switched(True), (x,))


def test_torch_script_is_refused():
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script compiles Python") as error:
        torch.jit.script(ATTENTION)
    assert "torch.export" in error.value.hint
    with pytest.raises(RuntimeError, match="Attention"):
        torch.jit.script(Switched(True))


def test_all_members_of_a_program_can_be_looked_at():
    """As tools for documentation and mocks do."""
    assert dict(inspect.getmembers(ATTENTION))["text"] == "causal()"


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference", "triton"])
def test_tensors_without_elements_give_shapes(backend):
    def meta(*shape, **more):
        return torch.empty(*shape, device="meta", **more)

    program = attndsl.compile(
        "tensor doc[batch, kv_len]: int; tensor gain[heads]: float; param near: int\n"
        "mask = q - kv < near and doc[b, kv] > 0; score = gain[h] * score",
        backend=backend,
    )
    q = meta(2, 4, 6, 8, dtype=torch.bfloat16, requires_grad=True)
    k, v = meta(2, 2, 9, 8, dtype=torch.bfloat16), meta(2, 2, 9, 16, dtype=torch.bfloat16)
    gain = meta(4, requires_grad=True)
    doc = meta(2, 9, dtype=torch.int64)
    out, lse = program(q, k, v, doc=doc, gain=gain, near=3, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == ((2, 4, 6, 16), torch.bfloat16, "meta")
    assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)
    (out.sum() + lse.sum()).backward()
    assert (q.grad.shape, q.grad.device.type, gain.grad.shape) == (q.shape, "meta", (4,))
    part = {"q_offset": meta(2, dtype=torch.int32), "kv_lengths": meta(2, dtype=torch.int32)}
    assert program(q, k, v, doc=doc, gain=gain, near=3, **part).shape == (2, 4, 6, 16)
    with pytest.raises(ShapeError):
        program(q, k, meta(2, 2, 8, 16, dtype=torch.bfloat16), doc=doc, gain=gain, near=3)


def test_tensors_without_elements_have_weights_and_all_derivatives():
    x = torch.empty(2, 4, 6, 8, device="meta", requires_grad=True)
    (first,) = torch.autograd.grad(ATTENTION(x, x, x).sum(), x, create_graph=True)
    assert torch.autograd.grad(first.sum(), x)[0].shape == x.shape
    _, tangent = torch.func.jvp(lambda y: ATTENTION(y, y, y), (x.detach(),), (x.detach(),))
    assert (tangent.shape, tangent.device.type) == (x.shape, "meta")
    layer = attndsl.nn.MultiheadAttention(8, 2, device="meta", batch_first=True)
    out, weights = layer(*[torch.empty(3, 5, 8, device="meta")] * 3)
    assert (out.shape, weights.shape) == ((3, 5, 8), (3, 5, 5))


def test_no_operator_has_an_empty_list_of_tensors_or_ints():
    """Packages of AOTInductor would give None for it."""
    x = torch.randn(1, 2, 5, 4)
    given = packed(EncodedCall(attndsl.compile("causal()")._spec, "auto", False, x, x, x))
    assert given.tensors
    assert given.ints
    out, _ = torch.ops.attndsl.forward(*given)
    torch.testing.assert_close(out, attndsl.compile("causal()")(x, x, x))


def test_block_masks_are_exported():
    blocks = create_block_mask(lambda b, h, i, j: i - j <= 3, 1, 1, 9, 9, "cpu", BLOCK_SIZE=4)

    class Layer(nn.Module):
        def forward(self, x):
            return flex_attention(x, x, x, block_mask=blocks)

    x = _heads(9)
    program = torch.export.export(Layer(), (x,)).module()
    torch.testing.assert_close(program(x), flex_attention(x, x, x, block_mask=blocks))


def test_a_trace_of_tensors_without_data_serves_no_other_call():
    """Constants that a function makes are its trace's; those of an export have no values."""

    def twice(score, b, h, q_idx, kv_idx):
        return score * torch.tensor([0.5, 2.0, 1.0, 0.0])[h]

    class Layer(nn.Module):
        def forward(self, x):
            return flex_attention(x, x, x, twice)

    x = _heads(6)
    with torch._subclasses.FakeTensorMode():
        assert flex_attention(*[torch.empty(2, 4, 6, 8)] * 3, twice).shape == x.shape
    program = torch.export.export(Layer(), (x,)).module()
    torch.testing.assert_close(program(x), flex_attention(x, x, x, twice))
