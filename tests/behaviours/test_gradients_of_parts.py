"""A backward from given results takes parts of calls as calls do: rows, heads, entries, keys."""

from __future__ import annotations

import pytest
import torch
from support.parts import PROGRAMS, RAGGED, SPLITS, Sizes, cuts, make_case, share_of
from torch.utils.flop_counter import FlopCounterMode

import attndsl

BACKENDS = ("reference", "cpu")
HALF = (
    "tensor s[heads]: float\n"
    "mask = causal_lower_right(); score = softcap(score, 3.0) + s[h] * (q - kv)"
)


def _sized(sizes, cut):
    """What the call of a part says of the whole, every size."""
    return {
        "batch": sizes.batch, "b_offset": cut.b.start, "heads": sizes.heads,
        "h_offset": cut.h.start, "kv_heads": sizes.kv_heads, "q_len": sizes.q_len,
        "q_offset": cut.q.start, "kv_len": sizes.kv_len, "kv_offset": cut.kv.start,
    }  # fmt: skip


def _operands(case, cut):
    """Leaves of their own: q, k and v of a part."""
    given = case.q[cut.b, cut.h, cut.q], case.k[cut.b, cut.hkv, cut.kv]
    return [x.detach().requires_grad_() for x in (*given, case.v[cut.b, cut.hkv, cut.kv])]


def _check(case, operands, captures, options, tolerance=1e-9):
    """Gradients that a backward makes of a call's own results are those of autograd."""
    learned = {n: x for n, x in captures.items() if x.is_floating_point()}
    softmax = case.lowered.program.weights is None
    found = case.attention(*operands, return_lse=softmax, **captures, **options)
    found = found if softmax else (found,)
    if not softmax:
        results, back = (found[0].detach(), None), (torch.randn_like(found[0]),)
    else:
        results = tuple(x.detach() for x in found)
        alive = results[1] > -torch.inf
        back = torch.randn_like(results[0]), torch.where(alive, torch.randn_like(results[1]), 0.0)
    wanted = torch.autograd.grad(found, [*operands, *learned.values()], back, allow_unused=True)
    # Kernels are called from where no gradients are recorded: leaves say what is wanted.
    with torch.no_grad():
        made = case.attention.backward(*operands, *results, *back, **captures, **options)
    assert list(made.captures) == list(learned)
    leaves = zip((*made[:3], *made.captures.values()), wanted, strict=True)
    for (one, other), leaf in zip(leaves, [*operands, *learned.values()], strict=True):
        assert one.shape == leaf.shape
        other = torch.zeros_like(leaf) if other is None else other
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", SPLITS)
def test_backwards_of_parts(backend, split):
    for name in PROGRAMS:
        torch.manual_seed(0)
        case = make_case(name, backend, sizes=Sizes(q_len=12, kv_len=14, head_dim=4))
        *_, cut = cuts(split, case.sizes, 5)
        for shares in (False, True):
            captures = {
                n: share_of(case, n, cut).detach().requires_grad_(x.requires_grad) if shares else x
                for n, x in case.captures.items()
            }
            options = case.options | _sized(case.sizes, cut)
            _check(case, _operands(case, cut), captures, options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RAGGED)
def test_backwards_of_entries_of_their_own_lengths(backend, name):
    torch.manual_seed(0)
    case = make_case(name, backend, sizes=Sizes(batch=3, q_len=3, kv_len=20), programs=RAGGED)
    options = {"q_offset": torch.tensor([5, 0, 12]), "kv_lengths": torch.tensor([8, 3, 20])}
    _check(case, [case.q, case.k, case.v], case.captures, options)


@pytest.mark.parametrize(
    ("name", "split"),
    [("gains", "batch"), ("key slopes", "heads"), ("slopes", "groups"), ("sink", "all")],
)
def test_backwards_by_kernels(device, name, split):
    sizes = Sizes(q_len=8, kv_len=12)
    case = make_case(name, "triton", torch.float32, sizes, device)
    *_, cut = cuts(split, sizes)
    options = case.options | _sized(sizes, cut)
    _check(case, _operands(case, cut), case.captures, options, 1e-4)


def _half(dtype=torch.bfloat16):
    """Operands of a whole call, and one part of it: heads 2 and 3, rows 8 to 24, entry 1."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16).to(dtype) for h, n in ((4, 24), (2, 40), (2, 40)))
    part = q[1:, 2:, 8:], k[1:, 1:], v[1:, 1:]
    options = {
        "batch": 2, "b_offset": 1, "heads": 4, "h_offset": 2, "kv_heads": 2, "q_len": 24,
        "q_offset": 8,
    }  # fmt: skip
    return (q, k, v), part, options, torch.randn(4, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_in_fp32(backend, dtype):
    attention = attndsl.compile(HALF, backend=backend)
    whole, part, options, s = _half(dtype)
    options["out_dtype"] = torch.float32
    for _ in range(2):
        wanted = attention(*whole, s=s, out_dtype=torch.float32)[1:, 2:, 8:]
        found = attention(*part, s=s, **options)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, wanted)
    back = torch.randn_like(found)
    (one,), (other,) = (torch.autograd.grad(x, s, back) for x in (found, wanted))
    torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("how", ["compiled", "dispatched"])
def test_backwards_through_operators(how, wide):
    """They are told of the part, and whether its results are in fp32."""
    attention = attndsl.compile(HALF)
    _, part, options, s = _half()
    kind = torch.float32 if wide else None
    with torch.no_grad():
        out, lse = attention(*part, s=s, return_lse=True, out_dtype=kind, **options)
    back = torch.randn_like(out)

    def backward(q, k, v, s, out, lse, back):
        found = attention.backward(
            q, k, v, out, lse, back, s=s, wants_captures=("s",), grad_dtype=torch.float32,
            **options,
        )  # fmt: skip
        return *found[:3], found.captures["s"]

    given = *part, s.detach(), out, lse, back
    wanted = backward(*given)
    if how == "compiled":
        found = torch.compile(backward, backend="aot_eager", fullgraph=True)(*given)
    else:
        with FlopCounterMode(display=False) as counter:
            found = backward(*given)
        assert counter.get_total_flops() > 0
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("how", ["compiled", "dispatched"])
def test_dims_of_other_names_in_operators(how):
    """One is as long as the whole has heads, and is looked up by heads alone."""
    attention = attndsl.compile(
        "tensor t[n]: float\ntensor u[n]: float\nscore = score * t[h] + u[n - 1 - h] / n"
    )
    q, t, u = (torch.randn(n).requires_grad_() for n in ((2, 4, 6, 8), (8,), (8,)))

    def part(q, t, u):
        return attention(q, q, q, t=t, u=u, heads=8, kv_heads=8, h_offset=4)

    all_heads = torch.cat([torch.zeros_like(q), q], 1)
    wanted = attention(all_heads, all_heads, all_heads, t=t, u=u)[:, 4:]
    torch.testing.assert_close(part(q, t, u), wanted)
    if how == "compiled":
        found = torch.compile(part, backend="aot_eager", fullgraph=True)(q, t, u)
    else:
        with FlopCounterMode(display=False):
            found = part(q, t, u)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(
        *(torch.autograd.grad(x.sin().sum(), [q, t, u]) for x in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other)
