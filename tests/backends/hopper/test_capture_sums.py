"""Gradients of what a score's parts mention, from sums that the one-pass backward has anyway."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.jobs import why_portable

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.hopper.capture_sums import (
    Learned,
    Statistics,
    gradients_of_parts,
    learned_parts,
)
from attndsl.backends.kernels.example import example_call
from attndsl.backends.log_sum import of_one_number
from attndsl.runtime.program_store import default_cache

GAIN = "tensor gain[heads]: float; mask = causal(); score = gain[h] * score"
TEXTS = {
    "gain": GAIN,
    "temperature": "tensor t[batch, heads]: float; score = score / t[b, h]",
    "gain in a cap": "tensor gain[heads]: float; score = 3 * tanh(gain[h] * score / 3)",
    "twice": "tensor gain[kinds]: float; score = gain[h % 2] * gain[1] * score",
    "param": "param gain: float; score = score * exp(gain)",
    "key bias": "tensor bias[heads, kv_len]: float; mask = causal(); score = score + bias[h, kv]",
    "by type": """
        tensor bias[kinds]: float
        tensor kind[kv_len]: int
        score = score + bias[kind[kv]]
    """,
    "query bias": "tensor bias[q_len]: float; mask = q >= 3; score = score + bias[q]",
    "all": """
        tensor gain[heads]: float
        tensor rows[batch, q_len]: float
        tensor columns[kv_len]: float
        mask = q >= kv and q != 5
        score = gain[h] * score + rows[b, q] - 2 * columns[kv]
    """,
    "rows and a sink": """
        tensor bias[q_len]: float
        tensor s[heads]: float
        score = score + 0.5 * bias[q]
        sink = s[h]
    """,
}
BOUNDED = "tensor n[batch]: int; mask = kv < n[b]; "
PAIRWISE = {
    f"tensor gain[heads]: float; {BOUNDED}score = gain[h] * score": "pair by pair",
    "tensor cap[heads]: float; score = cap[h] * tanh(score / cap[h])": "pair by pair",
    "tensor s[heads]: float; score = score + s[h] * (kv - q)": "distance",
    "tensor bias[q_len, kv_len]: float; score = score + bias[q, kv]": "pair by pair",
    "tensor bias[kv_len]: float; score = tanh(score) + bias[kv]": "pair by pair",
}


def captures_of(name, heads, length, device, batch=2):
    """Learned and other captures, by their names in the texts."""

    def learned(*shape):
        return (0.3 * torch.randn(shape, device=device) + 1).requires_grad_()

    found = {
        "gain": {"gain": learned(heads)},
        "temperature": {"t": learned(batch, heads)},
        "gain in a cap": {"gain": learned(heads)},
        "twice": {"gain": learned(3)},
        "param": {"gain": learned()},
        "key bias": {"bias": learned(heads, length)},
        "by type": {
            "bias": learned(5), "kind": torch.randint(0, 5, (length,), device=device).int(),
        },
        "query bias": {"bias": learned(length)},
        "all": {"gain": learned(heads), "rows": learned(batch, length), "columns": learned(length)},
        "rows and a sink": {"bias": learned(length), "s": learned(heads)},
    }  # fmt: skip
    return found[name]


@pytest.mark.parametrize("text", PAIRWISE)
def test_what_is_added_up_pair_by_pair_says_so(text):
    lowered = attndsl.compile(text).lowered
    names = frozenset(decl.name for decl in lowered.program.tensors)
    found = learned_parts(lowered, names)
    assert isinstance(found, str)
    assert PAIRWISE[text] in found
    # In bf16, what varies with the distance does not keep the Hopper kernels from the rest.
    call = example_call(lowered, 64, 64, torch.float16, {})
    assert why_portable(lowered, call, "backward", wants=Wants(tensors=names)) == found
    assert learned_parts(lowered, frozenset()) == Learned()


def test_rows_do_not_learn_from_results_of_more_keys():
    """A row's sum of the score's gradient is known where the results are the call's own."""
    lowered = attndsl.compile(TEXTS["all"]).lowered
    call = example_call(lowered, 64, 64, torch.bfloat16, {})
    for name, alone in (("rows", False), ("gain", True), ("columns", True)):
        names = frozenset({name})
        assert why_portable(lowered, call, "backward", wants=Wants(tensors=names)) is None
        partial = Wants(tensors=names, partial=True)
        found = why_portable(lowered, call, "backward", wants=partial)
        assert (found is None) == alone
        backend = generated_backend(("hopper", "triton"), default_cache())
        shares = backend._plan(lowered, call, partial)
        assert shares.lines.partial
        assert shares.lines.tensors == names
    assert "results over all keys" in why_portable(
        lowered, call, "backward", wants=Wants(tensors=frozenset({"rows"}), partial=True)
    )


def test_which_parts_learn():
    lowered = attndsl.compile(TEXTS["all"]).lowered
    for name, part in (("gain", "factor"), ("rows", "row"), ("columns", "column")):
        assert learned_parts(lowered, frozenset({name})) == Learned(**{part: True})
    wants = Wants(tensors=frozenset({"gain"}))
    for dtype, dim, refused in (
        (torch.bfloat16, 64, None),
        (torch.float16, 64, "fp16"),
        (torch.bfloat16, 192, "head dims up to 128"),
    ):
        found = why_portable(
            lowered, example_call(lowered, dim, dim, dtype, {}), "backward", wants=wants
        )
        assert (found is None) == (refused is None)
        assert refused is None or refused in found


def sums_of(text, q, k, v, do, dlse, captures):
    """What the kernel would sum up, by the reference: of K * dK, and of dS by column."""
    scale = q.shape[-1] ** -0.5
    head = "tensor zero[batch, heads, kv_len]: float;"
    marked = f"{head}{text}".replace("score = ", "score = zero[b, h, kv] + ", 1)
    zero = torch.zeros(*q.shape[:2], k.shape[2], dtype=q.dtype, requires_grad=True)
    k = k.detach().requires_grad_()
    out, lse = attndsl.compile(marked, backend="reference")(
        q, k, v, zero=zero, **captures, return_lse=True
    )
    dk, columns = torch.autograd.grad((out, lse), (k, zero), (do, dlse))
    rows = torch.where(lse == -torch.inf, 0.0, (do * out).sum(-1) - dlse)
    return lse.detach(), rows.detach(), (k * dk).sum((2, 3))[..., None].detach() / scale, columns


@pytest.mark.parametrize("name", TEXTS)
def test_gradients_from_sums_are_those_of_the_reference(name):
    length, heads = 9, 4
    q, k, v, do = torch.randn(4, 2, heads, length, 8, dtype=torch.float64)
    dlse = torch.randn(2, heads, length, dtype=torch.float64)
    captures = captures_of(name, heads, length, "cpu")
    captures = {n: x.detach().double() if x.is_floating_point() else x for n, x in captures.items()}
    lowered = attndsl.compile(TEXTS[name]).lowered
    names = {n for n, x in captures.items() if x.is_floating_point() and n != "s"}
    leaves = {n: captures[n].requires_grad_() for n in sorted(names)}
    outputs = attndsl.compile(TEXTS[name], backend="reference")(
        q, k, v, **captures, return_lse=True
    )
    expected = torch.autograd.grad(outputs, list(leaves.values()), (do, dlse))
    lse, delta, factors, columns = sums_of(TEXTS[name], q, k, v, do, dlse, captures)
    call = SimpleNamespace(
        q=q, k=k, v=v, scale=8**-0.5, q_offset=0, kv_offset=0, q_index=None, kv_index=None,
        tensors={n: x.detach() for n, x in captures.items() if lowered_has(lowered, n)},
        params={n: x.detach() for n, x in captures.items() if not lowered_has(lowered, n)},
        sizes={"kinds": captures["gain" if name == "twice" else "bias"].shape[0]}
        if name in ("twice", "by type") else {},
    )  # fmt: skip
    tensors = frozenset(n for n in names if lowered_has(lowered, n))
    wants = Wants(tensors=tensors, params=frozenset(names - tensors))
    learned = learned_parts(lowered, frozenset(names))
    assert isinstance(learned, Learned)
    found, of_params = gradients_of_parts(
        lowered, call, learned, wants,
        Statistics(
            of_one_number(lse), delta, dlse, factors if learned.factor else None,
            columns if learned.column else None,
        ),
    )  # fmt: skip
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close((found | of_params)[leaf], gradient, atol=1e-9, rtol=1e-9)


def lowered_has(lowered, name):
    return any(decl.name == name for decl in lowered.program.tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(TEXTS) - {"param"}))
@pytest.mark.parametrize("dim", [64, 128])
def test_kernels(check, name, dim):
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, 300, dim))
    captures = captures_of(name, 4, 300, "cuda")
    inputs = check.inputs(place, torch.bfloat16, kv_heads=2, captures=captures, with_lse=True)
    check(place, TEXTS[name], inputs)


@pytest.mark.gpu
def test_a_param_that_is_a_tensor_learns(check):
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, 300, 128))
    inputs = check.inputs(place, torch.bfloat16, captures=captures_of("param", 4, 300, "cuda"))
    found, exact = (
        check.run(attndsl.compile(TEXTS["param"], backend=backend), inputs.to(dtype))["gain"]
        for backend, dtype in (("hopper", torch.bfloat16), ("reference", torch.float64))
    )
    # One number, so that no mean evens out what one run errs by: delta is of an output rounded to
    # bf16, which adds some 2^-9 * sqrt(dim) a row.
    rows = inputs.q.shape[:3].numel()
    assert abs(float(found) - float(exact)) <= 4 * 2**-9 * (128 * rows) ** 0.5


@pytest.mark.gpu
def test_a_gain_of_zero_learns(check):
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, 300, 64))
    gain = torch.zeros(4, device="cuda", requires_grad=True)
    check(place, GAIN, check.inputs(place, torch.bfloat16, captures={"gain": gain}))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_come_out_alike_again(deterministic):
    q, k, v, do = torch.randn(4, 2, 4, 600, 64, device="cuda", dtype=torch.bfloat16)
    q.requires_grad_()
    captures = captures_of("all", 4, 600, "cuda")
    attention = attndsl.compile(TEXTS["all"], backend="hopper")

    def step():
        out = attention(q, k, v, deterministic=deterministic, **captures)
        return torch.autograd.grad(out, [*captures.values(), *[q] * deterministic], do)

    first = step()
    assert len(first) == 3 + deterministic
    for _ in range(20):
        for one, other in zip(first, step(), strict=True):
            assert torch.equal(one, other)
