"""``attndsl.compare`` finds what is wrong, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

import attndsl
from attndsl.backends.tiled.cpu import CPUBackend
from attndsl.errors import ArgumentError, ShapeError, UnsupportedError
from attndsl.inspection import reference_check

LEARNED = """
tensor doc[batch, kv_len]: int
tensor gain[heads, kv_len]: float
tensor s[heads]: float
param p: float
param cap: float
param near: float = 3.0
mask = causal() and doc[b, q] == doc[b, kv]
score = softcap(score, cap) * gain[h, kv] - abs(q - kv) / near
sink = s[h]
weights = dropout(softmax(score), p)
"""


def inputs(dtype=torch.float32, q_len=24, kv_len=24, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 16))
    return [scale * torch.randn(s, generator=generator).to(dtype) for s in shapes]


def captures(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return {
        "doc": torch.arange(24).expand(2, -1) // 9,
        "gain": torch.randn(4, 24, generator=generator).to(dtype),
        "s": torch.randn(4, generator=generator),
        "p": torch.tensor(0.2),
        "cap": torch.tensor(2.0, dtype=dtype),
    }


def wrong_backward(monkeypatch, change):
    """From now on ``change`` changes what the CPU backend's backward makes."""
    right = CPUBackend.backward

    def backward(self, lowered, call, results):
        found = right(self, lowered, call, results)
        change(found)
        return found

    monkeypatch.setattr(CPUBackend, "backward", backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_right_call_passes(dtype):
    found = attndsl.compare(attndsl.compile(LEARNED), *inputs(dtype), **captures(dtype))
    assert found.ok, found
    names = ["out", "lse", "dq", "dk", "dv", "dgain", "ds", "dp", "dcap"]  # near is a number.
    assert [row.name for row in found.rows] == names
    assert [row.shape for row in found.rows[-4:]] == [(4, 24), (4,), (), ()]
    assert (found.backend, found.device, found.dtype) == ("cpu", "cpu", dtype)
    assert all(row.mean_error <= row.max_error and row.note == "" for row in found.rows)
    assert isinstance(found.seed, int)


@pytest.mark.parametrize("name", ["gain", "s", "p", "cap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_gradient_of_a_capture_fails_alone(name, dtype, monkeypatch):
    def change(found):
        for part in (found.tensors, found.params):
            if name in part:
                part[name].mul_(1.01)

    wrong_backward(monkeypatch, change)
    found = attndsl.compare(attndsl.compile(LEARNED), *inputs(dtype), **captures(dtype))
    assert [row.name for row in found.rows if not row.ok] == [f"d{name}"]
    assert not found.ok
    assert f"FAILED: d{name}" in found.title
    (row,) = (row for row in found.rows if not row.ok)
    assert row.relative_error == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 2), (2, 5), (5, 2), (16, 3), (2, 40)])
def test_few_elements_and_keys_of_half_types_are_no_failures(lengths, dtype):
    """A row with one large weight has a gradient near 0, of which the output's rounding is left."""
    attention = attndsl.compile("tensor gain[heads]: float; score = gain[h] * score")
    for scale in (0.01, 1.0, 5.0):
        q, k, v = inputs(dtype, *lengths)
        gain = torch.ones(4, dtype=dtype)
        found = attndsl.compare(attention, scale * q, k, 100 * v, gain=gain)
        assert found.ok, found


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wrong_gradients_of_half_types_fail(name, dtype, monkeypatch):
    wrong_backward(monkeypatch, lambda found: getattr(found, name).mul_(1.05))
    three = inputs(dtype, 128, 128)
    found = attndsl.compare(attndsl.compile("causal()"), *three)
    assert [row.name for row in found.rows if not row.ok] == [f"d{name}"]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_and_large_gradients_are_held_to_their_own_size(scale, dtype, monkeypatch):
    attention, (q, k, v) = attndsl.compile("causal()"), inputs(dtype)
    grad = scale * torch.randn(2, 4, 24, 16, dtype=dtype)
    assert attndsl.compare(attention, q, k, v * scale, grad_out=grad).ok
    wrong_backward(monkeypatch, lambda found: found.q.mul_(1.001))
    found = attndsl.compare(attention, q, k, v * scale, grad_out=grad)
    assert [row.name for row in found.rows if not row.ok] == ["dq"]


def test_the_log_sum_exps_gradient_takes_part_if_it_is_asked_for(monkeypatch):
    attention, three = attndsl.compile("causal()"), inputs()
    grad_lse = torch.ones(2, 4, 24)
    for more in ({"return_lse": True}, {"grad_lse": grad_lse}):
        assert attndsl.compare(attention, *three, **more).ok
    right = CPUBackend.backward

    def without_lse(self, lowered, call, results):
        return right(self, lowered, call, results._replace(grad_lse=None))

    monkeypatch.setattr(CPUBackend, "backward", without_lse)
    assert attndsl.compare(attention, *three).ok
    for more in ({"return_lse": True}, {"grad_lse": grad_lse}):
        found = attndsl.compare(attention, *three, **more)
        assert [row.name for row in found.rows if not row.ok] == ["dq", "dk"]


def test_a_wrong_output_fails(monkeypatch):
    right = CPUBackend.forward

    def forward(self, lowered, call):
        out, lse = right(self, lowered, call)
        return out * 1.01, lse

    monkeypatch.setattr(CPUBackend, "forward", forward)
    found = attndsl.compare(attndsl.compile("causal()"), *inputs())
    assert not found.rows[0].ok
    assert found.rows[1].ok


def test_a_map_of_other_tiles_is_found_out():
    attention = attndsl.compile("tensor d[q_len]: int; d[q] == d[kv]")
    q = torch.randn(1, 1, 512, 8)
    same, other = torch.zeros(512).int(), torch.arange(512) // 256
    for told, ok in ((same, True), (other, False)):
        tiles = attention.tiles(512, 512, d=told)
        assert attndsl.compare(attention, q, q, q, d=same, tiles=tiles).ok == ok


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.1, "q_offset": 3, "kv_offset": -2},
        {"q_offset": torch.tensor([4, 9]), "kv_lengths": torch.tensor([20, 24])},
        {"heads": 8, "kv_heads": 4, "h_offset": 4},
        {"q_index": torch.arange(24).flip(0), "deterministic": True},
    ],
)
def test_other_arguments_are_those_of_the_call(options):
    text = "mask = causal() and (h < 6 or kv > 3); score = score + alibi()"
    assert attndsl.compare(attndsl.compile(text), *inputs(), **options).ok
    whole = attndsl.compile(f"tensor gain[heads]: float; {text} * gain[h]")
    gain = torch.randn(options.get("heads", 4))
    found = attndsl.compare(whole, *inputs(), gain=gain, **options)
    assert found.ok
    assert found.rows[-1].shape == gain.shape


def test_outputs_in_fp32_of_half_operands():
    found = attndsl.compare(
        attndsl.compile("causal()"), *inputs(torch.bfloat16), out_dtype=torch.float32
    )
    assert found.ok
    assert found.dtype is torch.bfloat16


def test_dropout_drops_the_same_everywhere():
    attention = attndsl.compile("weights = dropout(relu(score), 0.3)")
    found = attndsl.compare(attention, *inputs())
    assert found.ok
    assert [row.name for row in found.rows] == ["out", "dq", "dk", "dv"]  # It has no log-sum-exp.
    again = attndsl.compare(attention, *inputs(), seed=found.seed)
    assert again.seed == found.seed
    assert again.rows == found.rows
    for more in ({"return_lse": True}, {"grad_lse": torch.ones(2, 4, 24)}):
        with pytest.raises(UnsupportedError, match="the program has other weights"):
            attndsl.compare(attention, *inputs(), **more)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_of_the_callers_changes(mode):
    attention = attndsl.compile("tensor g[heads]: float; score * g[h]")
    q, k, v = inputs()
    g = torch.ones(4, requires_grad=True)
    with mode():
        q = q + 0  # In inference mode, a tensor of its own kind.
        found = attndsl.compare(attention, q, k, v, g=g)
    assert found.ok
    assert g.grad is q.grad is None
    assert g.requires_grad
    assert not q.requires_grad


def test_autocast_is_that_of_the_call():
    with torch.autocast("cpu", torch.bfloat16):
        found = attndsl.compare(attndsl.compile("causal()"), *inputs())
    assert found.ok, found
    assert found.dtype is torch.bfloat16
    assert found.rows[0].mean_error > 1e-4


def test_captures_with_values_and_those_that_are_chosen():
    attention = attndsl.compile(
        "tensor a[heads]: float; score = score * a[h] + c[h] * kv", c=torch.ones(4)
    )
    given = {"captures": {"a": torch.ones(4)}}
    names = [row.name for row in attndsl.compare(attention, *inputs(), **given).rows]
    assert names[-2:] == ["dc", "da"]
    found = attndsl.compare(attention, *inputs(), wants_captures=["a"], **given)
    assert [row.name for row in found.rows][-2:] == ["dv", "da"]
    with pytest.raises(ArgumentError, match="'x' has no gradient"):
        attndsl.compare(attention, *inputs(), wants_captures=["x"], **given)


def test_infinities_and_nan_are_told():
    attention = attndsl.compile("tensor x[heads]: float; score + log(x[h])")
    x = torch.tensor([1.0, -1.0, 2.0, 3.0])
    found = attndsl.compare(attention, *inputs(), x=x)
    assert not found.ok
    out = found.rows[0]
    assert out.note.startswith(f"{2 * 24 * 16} elements of the reference are not finite")
    assert "checked=True" in out.note
    assert all(math.isfinite(number) for row in found.rows for number in
               (row.max_error, row.relative_error, row.mean_error, row.allowed))  # fmt: skip


def test_an_infinity_that_the_reference_does_not_have(monkeypatch):
    def change(found):
        found.k[0, 0, 3, 2] = torch.inf

    wrong_backward(monkeypatch, change)
    found = attndsl.compare(attndsl.compile("causal()"), *inputs())
    assert [row.note for row in found.rows if not row.ok] == ["1 elements are not finite"]


def test_rows_without_keys_are_right():
    attention = attndsl.compile("mask = q > 5 and kv > 2")
    found = attndsl.compare(attention, *inputs())
    assert found.ok, found


@pytest.mark.parametrize(
    ("text", "arguments", "dead"),
    [
        ("mask = q > 5 and kv > 2", {}, 2 * 4 * 6),
        ("mask = q >= kv", {"q_offset": -3}, 2 * 4 * 3),
        ("mask = q >= kv; sink = 0.0", {"q_offset": -3}, 2 * 4 * 3),
        ("score = score if q > 1 else -inf", {}, 2 * 4 * 2),
        ("mask = h > 0", {}, 2 * 24),
        ("causal()", {"kv_lengths": torch.tensor([0, 24])}, 4 * 24),
        ("causal()", {}, 0),
    ],
)
def test_rows_without_keys_are_counted(text, arguments, dead):
    found = attndsl.compare(attndsl.compile(text), *inputs(), **arguments)
    assert found.ok, found
    assert found.dead_rows == dead
    said = f"{dead} of {2 * 4 * 24} rows have no live pair; their output is 0"
    assert (said in str(found)) == (said in found._repr_html_()) == (dead > 0)
    assert found.remark == (said if dead else "")


def test_rows_without_keys_are_not_counted_where_weights_are_the_programs_own():
    """A sigmoid of -inf is a weight like others."""
    text = "mask = q >= kv; weights = 1.0 / (1.0 + exp(score))"
    found = attndsl.compare(attndsl.compile(text), *inputs(), q_offset=-3)
    assert found.ok, found
    assert found.dead_rows is None
    assert found.remark == ""


def test_one_row_without_keys():
    q = torch.zeros(1, 1, 3, 8)
    found = attndsl.compare(attndsl.compile("q > 0"), q, q, q)
    assert found.remark == "1 of 3 rows has no live pair; its output is 0"


def test_empty_calls():
    q = torch.zeros(2, 4, 0, 8)
    assert attndsl.compare(attndsl.compile("causal()"), q, q, q).ok
    assert attndsl.compare(attndsl.compile("causal()"), q, q, q).dead_rows == 0


def test_text_and_html():
    found = attndsl.compare(attndsl.compile(LEARNED), *inputs(), **captures())
    lines = str(found).split("\n")
    assert lines[0] == "cpu on cpu, float32, beside the reference in float64: ok"
    assert lines[1].split() == [
        "result", "shape", "max", "error", "of", "allowed", "relative", "reference", "mean",
        "error", "allowed", "mean", "verdict",
    ]  # fmt: skip
    assert len({line.rindex("ok") for line in lines[2:]}) == 1  # Columns stand below each other.
    assert lines[-1].split()[:2] == ["dcap", "0-d"]
    assert repr(found) == str(found)
    assert not [line for line in lines if line != line.rstrip()]
    assert found._repr_html_().count("<tr>") == 1 + len(found.rows)
    assert "<caption>cpu on cpu" in found._repr_html_()


def test_steps_are_told():
    told = []
    attndsl.compare(attndsl.compile("causal()"), *inputs(torch.bfloat16), progress=told.append)
    assert told == [
        "the call, on cpu", "the reference in float64", "the reference in bfloat16",
        "what rounding may do",
    ]  # fmt: skip


def test_what_does_not_fit_in_memory_is_refused(monkeypatch):
    q = torch.empty(1).expand(1, 16, 1 << 14, 1)
    monkeypatch.setattr(CPUBackend, "forward", None)  # It is not even begun.
    with pytest.raises(ArgumentError) as caught:
        attndsl.compare(attndsl.compile("causal()"), q, q, q)
    assert caught.value.message == (
        "the reference is dense and would take about 256.0 GiB, and max_bytes allows 8.0 GiB"
    )
    assert "fewer heads" in caught.value.hint
    with pytest.raises(ArgumentError, match="max_bytes is '8G'"):
        attndsl.compare(attndsl.compile("causal()"), q, q, q, max_bytes="8G")


def test_memory_grows_with_operations_and_pairs():
    attention = attndsl.compile("mask = causal(); score = softcap(score, 20.0)")
    q, k, v = inputs()
    needed = 8 * (2 * 4 * 24 * 24) * (5 + 6)
    assert attndsl.compare(attention, q, k, v, max_bytes=needed).ok
    for refused in ({"max_bytes": needed - 1}, {"max_bytes": needed, "near": 1.0}):
        other = attndsl.compile(
            "param near: float; score = near * softcap(score, 20) - abs(q - kv)"
        )
        with pytest.raises(ArgumentError, match="dense"):
            attndsl.compare(other if "near" in refused else attention, q, k, v, **refused)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"grad_out": torch.ones(2, 4, 24, 8)}, ShapeError, "grad_out has shape"),
        ({"grad_lse": torch.ones(2, 4)}, ShapeError, "grad_lse has shape"),
        ({"grad_out": 1.0}, ArgumentError, "grad_out is a float"),
        ({"gian": torch.ones(4)}, ArgumentError, "did you mean 'gain'"),
        ({"q_offset": "x"}, ArgumentError, "q_offset is 'x'"),
    ],
)
def test_refusals(arguments, kind, words):
    attention = attndsl.compile("tensor gain[heads]: float; score * gain[h]")
    given = {} if "gian" in arguments else {"gain": torch.ones(4)}
    with pytest.raises(kind, match=words):
        attndsl.compare(attention, *inputs(), **given, **arguments)
    with pytest.raises(ArgumentError, match="attn is a str"):
        attndsl.compare("causal()", *inputs())


def test_the_kernels_of_gpus_are_held_to_it_too(device):
    attention = attndsl.compile(LEARNED, backend="triton")
    three = [x.to(device) for x in inputs()]
    given = {name: x.to(device) for name, x in captures().items()}
    found = attndsl.compare(attention, *three, **given)
    assert found.ok, found
    assert found.backend == "triton"


def test_the_method_is_that_of_the_tests():
    import conftest

    for dtype, factor in conftest.FACTOR.items():
        assert reference_check.FACTORS[dtype] == factor
    own = {"dq": "q", "dk": "k", "dv": "v"}
    for name, factor in reference_check.GRADIENT_FACTORS.items():
        assert factor == conftest.GRADIENT_FACTOR[own.get(name, name)]
