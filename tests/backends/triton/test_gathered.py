"""Gradients of tables that pairs look up by what they gather: sums first, then exact ones."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.gradients.gradient_plan import Rest, plan_gradients
from attndsl.backends.kernels.example import example_call
from attndsl.backends.triton.captures import KINDS

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"
)
BATCH, HEADS, LENGTH = 2, 4, 37
CASES = {
    "of positions": ("tensor t[7, 7]: float; tensor i[kv_len]: int; "
                     "score = score + t[i[q], i[kv]]", Rest(BATCH, HEADS)),
    "by the score": ("tensor t[7, 7]: float; tensor i[kv_len]: int; "
                     "mask = causal(); score = score * t[i[q], i[kv]]", Rest(BATCH, HEADS)),
    "of heads": ("tensor t[heads, 30]: float; tensor i[kv_len, kv_len]: int; "
                 "score = score + t[h, i[q, kv]]", Rest(BATCH, 1)),
    "of key heads": ("tensor t[kv_heads, 30]: float; tensor i[kv_len, kv_len]: int; "
                     "mask = q - kv < 9 * (h + 1); score = score + t[hkv, i[q, kv]]",
                     Rest(BATCH, 1)),
    "of entries": ("tensor t[30]: float; tensor i[batch, kv_len]: int; "
                   "score = score + t[i[b, q] + i[b, kv]]", Rest(1, HEADS)),
    "of pairs of heads": ("tensor t[2, 30]: float; tensor i[batch, kv_len]: int; "
                          "score = score + t[h // 2, i[b, q] + i[b, kv]]", None),
    "with rows": ("tensor t[30]: float; tensor i[kv_len]: int; "
                  "score = score + t[i[q] + i[kv]] * t[i[q]]", Rest(BATCH, HEADS)),
    "of weights": ("tensor t[7, 7]: float; tensor i[kv_len]: int; "
                   "weights = sigmoid(score) * t[i[q], i[kv]]", Rest(BATCH, HEADS)),
    "with dropout": ("tensor t[7, 7]: float; tensor i[kv_len]: int; "
                     "score = score + t[i[q], i[kv]]; weights = dropout(softmax(score), 0.3)",
                     Rest(BATCH, HEADS)),
    "outside": ("tensor t[7, 7]: float; tensor i[kv_len]: int; "
                "score = score + t[i[q] - 2, 2 * i[kv]]", Rest(BATCH, HEADS)),
    "by the score's size": ("tensor t[9]: float; score = score + t[int(score) + q % 2]", None),
    "three lookups": ("tensor t[30]: float; tensor i[kv_len]: int; "
                      "score = score + t[i[q] + i[kv]] + t[i[kv]] * t[i[q] * i[kv] % 9]", None),
}  # fmt: skip


def captures_of(text, batch=BATCH, length=LENGTH, device="cpu"):
    lowered = attndsl.compile(text).lowered
    sizes = {"batch": batch, "heads": HEADS, "kv_heads": HEADS // 2, "kv_len": length}
    made = {}
    generator = torch.Generator().manual_seed(3)
    for decl in lowered.program.tensors:
        dims = [sizes.get(str(x.value), x.value) for x in decl.dims]
        if decl.name == "i":
            made["i"] = torch.randint(0, 7, dims, generator=generator).to(device)
        else:
            made["t"] = torch.randn(dims, generator=generator).to(device).requires_grad_()
    return made


@pytest.mark.parametrize("name", CASES)
def test_what_indices_do_not_tell_apart_is_summed_first(name):
    text, rest = CASES[name]
    lowered = attndsl.compile(text).lowered
    call = example_call(lowered, 16, 16, torch.float32, captures_of(text))
    q, k = torch.empty(BATCH, HEADS, LENGTH, 16), torch.empty(BATCH, HEADS // 2, LENGTH, 16)
    call = call._replace(q=q, k=k, v=k)
    (share,) = plan_gradients(KINDS, lowered, call, Wants(tensors=frozenset("t"))).shares
    assert share.rest == rest


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_reference(name):
    text, _ = CASES[name]
    generator = torch.Generator().manual_seed(1)
    q, grad = torch.randn(2, BATCH, HEADS, LENGTH, 16, generator=generator)
    k, v = torch.randn(2, BATCH, HEADS // 2, LENGTH, 16, generator=generator)
    found = []
    for backend in ("triton", "reference"):
        captures = captures_of(text)
        options = {"seed": 3} if "dropout" in text else {}
        out = attndsl.compile(text, backend=backend)(q, k, v, captures=captures, **options)
        found.append(torch.autograd.grad(out, captures["t"], grad)[0])
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[0], found[1], rtol=2e-4, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_the_bits_are_the_same_each_time(name):
    text, _ = CASES[name]
    generator = torch.Generator().manual_seed(1)
    q, grad = (x.cuda().bfloat16() for x in torch.randn(2, 8, HEADS, 500, 64, generator=generator))
    k, v = (x.cuda().bfloat16() for x in torch.randn(2, 8, 2, 500, 64, generator=generator))
    captures = captures_of(text, 8, 500, "cuda")
    options = {"seed": 3} if "dropout" in text else {}
    found = []
    for backend in ("auto", "auto", "reference"):
        operands = (q, k, v) if backend == "auto" else (q.float(), k.float(), v.float())
        attention = attndsl.compile(text, backend=backend)
        out = attention(*operands, captures=captures, **options)
        found.append(torch.autograd.grad(out, captures["t"], grad.to(out.dtype))[0])
    assert torch.equal(found[0], found[1])
    error = float((found[0] - found[2]).norm() / found[2].norm())
    assert error < 0.02, error
