"""Bound launches behind guards: what passes is right, and what is not alike does not pass."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import attndsl
from attndsl.call import guarded_launch as module
from attndsl.call.dispatch import get_backend
from attndsl.call.prepared import _MOST_LAUNCHES
from attndsl.foundation.caches import CACHES, Reason

TEXT = "tensor gain[heads]: float; param w: float; score = score * gain[h] * w; mask = kv <= q + 9"


def drawn(dim=16, rows=20, keys=30):
    q = torch.randn(2, 4, rows, dim)
    return q, torch.randn(2, 2, keys, dim), torch.randn(2, 2, keys, dim)


class Runs:
    """Counts bound launches that were made, and their runs."""

    def __init__(self, monkeypatch, name):
        self.made = self.runs = 0
        backend = get_backend("triton")
        real = getattr(backend, name)

        def bind(*given):
            self.made += 1
            launch = real(*given)

            def run(*tensors):
                self.runs += 1
                return launch(*tensors)

            return run

        monkeypatch.setattr(backend, name, bind)


@pytest.fixture
def forwards(monkeypatch):
    return Runs(monkeypatch, "bound_forward")


@pytest.fixture
def backwards(monkeypatch):
    return Runs(monkeypatch, "bound_backward")


def check(attention, operands, **given):
    reference = attndsl.compile(attention.text, backend="reference")
    out = attention(*operands, **given)
    wanted = reference(*operands, **given)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


def test_known_calls_run_a_bound_launch(forwards):
    """With captures and params of the same value; others, and odd addresses, are looked at."""
    attention = attndsl.compile(TEXT, backend="triton")
    numbers = []
    for w in (0.5, 0.5, 0.5, 0.25, 0.5, -0.0, 0.0, 0.25):
        check(attention, drawn(), gain=torch.rand(4), w=w)
        numbers.append((forwards.made, forwards.runs))
    assert numbers == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (4, 3)]
    q, k, v = drawn()
    odd = torch.randn(q.numel() + 1)[1:].view(q.shape)
    check(attention, (odd, k, v), gain=torch.rand(4), w=0.5)
    assert (forwards.made, forwards.runs) == (4, 3)


def test_a_param_of_many_values_binds_a_few(forwards):
    """To bind takes longer than a call, and each call may bring another value."""
    attention = attndsl.compile("param w: float; score = score * w", backend="triton")
    for number in range(_MOST_LAUNCHES + 5):
        check(attention, drawn(), w=float(number))
    assert (forwards.made, forwards.runs) == (_MOST_LAUNCHES, 0)


def test_options_and_keywords_have_launches_of_their_own(forwards):
    attention = attndsl.compile("causal()", backend="triton")
    reference = attndsl.compile("causal()", backend="reference")
    operands = drawn()
    ways = [
        {}, {"return_lse": True}, {"return_lse": False}, {"deterministic": True},
        {"out_dtype": torch.float32}, {"captures": {}}, {"scale": 0.3}, {"q_offset": 4},
        {"out": torch.empty(2, 4, 20, 16)},
    ]  # fmt: skip
    for _ in range(4):
        for given in ways:
            own = {n: x for n, x in given.items() if n != "out"}
            found, wanted = attention(*operands, **given), reference(*operands, **own)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert forwards.made == 8
    # Those that lie at their values in no signature are bound at their first call.
    assert forwards.runs == 3 * 3 + 5 * 2


def step(attention, keys, **given):
    """A call of one row, and its result of the reference; the keys lie in room for more."""
    q, k, v = torch.randn(2, 4, 1, 16), *torch.randn(2, 2, 2, 64, 16)
    check(attention, (q, k[:, :, :keys], v[:, :, :keys]), **given)


def test_layers_of_a_step_run_bound_and_steps_bind_once(forwards):
    attention = attndsl.compile("causal()", backend="triton")
    numbers = []
    for keys in (20, 21, 22, 22, 23, 9):
        for _ in range(4):
            step(attention, keys, q_offset=keys - 1)
        numbers.append((forwards.made, forwards.runs))
    # The first call of all is prepared, and the second one is bound.
    assert numbers == [(1, 2), (2, 6), (3, 10), (3, 14), (4, 18), (5, 22)]
    # Room for as many keys in every step: the offset alone differs.
    q, k, v = drawn(rows=1)
    for offset in (5, 5, 5, 6, 6, 7):
        check(attention, (q, k, v), q_offset=offset)
    assert forwards.made == 5 + 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"q_offset": 1 << 30}, {"q_offset": -(1 << 30)}, {"q_offset": 2.5}, {"q_offset": "3"},
        {"q_offset": True}, {"q_offset": 3, "kv_offset": 1 << 30},
    ],
)  # fmt: skip
def test_steps_are_looked_at_as_first_calls_are(forwards, wrong):
    attention = attndsl.compile("causal()", backend="triton")
    for _ in range(4):
        step(attention, 20, **dict.fromkeys(wrong, 3))
    assert forwards.runs
    with pytest.raises(attndsl.errors.ArgumentError, match="offset"):
        step(attention, 20, **wrong)
    q, k, v = torch.randn(2, 4, 1, 16), *torch.randn(2, 2, 2, 64, 16)
    for other in ((k[:, :, :21], v[:, :, :20]), (k[:, :1], v), (k[..., :8], v)):
        with pytest.raises(attndsl.errors.ShapeError):
            attention(q, *other, **dict.fromkeys(wrong, 3))
    step(attention, 20, **dict.fromkeys(wrong, 3))


def test_other_kinds_of_offsets_and_scales_are_right(forwards):
    attention = attndsl.compile("causal()", backend="triton")
    whole = torch.tensor(4)
    for _ in range(3):
        for given in (
            {"q_offset": 4}, {"q_offset": whole}, {"q_offset": 0},
            {"q_offset": 4, "scale": 0.5}, {"q_offset": 4, "scale": None}, {"scale": -1.0},
            {"scale": 1}, {"scale": 1.0}, {"q_offset": 4, "kv_offset": 2},
        ):  # fmt: skip
            for keys in (30, 31):
                check(attention, drawn(keys=keys), **given)
    assert forwards.runs


def test_tensors_along_keys_have_the_length_of_the_keys(forwards):
    attention = attndsl.compile("tensor own[kv_len]: float; score + own[kv]", backend="triton")
    for _ in range(3):
        step(attention, 20, own=torch.randn(20), q_offset=19)
    with pytest.raises(attndsl.errors.ShapeError, match="own"):
        step(attention, 21, own=torch.randn(20), q_offset=20)
    step(attention, 21, own=torch.randn(21), q_offset=20)


def test_gradients_see_the_offset_of_their_call():
    attention = attndsl.compile("causal()", backend="triton")
    reference = attndsl.compile("causal()", backend="reference")
    for offset in (3, 3, 3, 4, 5):
        q, k, v = (x.requires_grad_() for x in drawn())
        found, wanted = (
            torch.autograd.grad(own(q, k, v, q_offset=offset).sum(), (q, k, v))
            for own in (attention, reference)
        )
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_a_program_refuses_stays_refused(forwards):
    attention = attndsl.compile("weights = relu(score)", backend="triton")
    operands = drawn()
    for _ in range(4):
        attention(*operands)
        with pytest.raises(attndsl.errors.UnsupportedError, match="log-sum-exp"):
            attention(*operands, return_lse=True)


def test_captures_by_a_mapping_and_by_default_run_bound(forwards):
    gain = torch.rand(4)
    by_default = attndsl.compile("score * gain[h]", backend="triton", gain=gain)
    plain = attndsl.compile(TEXT, backend="triton")
    reference = attndsl.compile("score * gain[h]", backend="reference", gain=gain)
    operands = drawn()
    for _ in range(4):
        torch.testing.assert_close(
            by_default(*operands), reference(*operands), atol=1e-5, rtol=1e-5
        )
        check(plain, operands, captures={"gain": torch.rand(4), "w": 0.5})
    assert (forwards.made, forwards.runs) == (2, 4)


class Seen(TorchDispatchMode):
    """Lists the operations that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_listens_is_told(forwards):
    attention, (q, k, v) = attndsl.compile("causal()", backend="triton"), drawn()
    wanted = attention(q, k, v)
    attention(q, k, v)
    attention(q, k, v)
    runs = forwards.runs
    assert runs == 1
    with Seen() as mode:
        attention(q, k, v)
    assert any("attndsl" in name for name in mode.names)
    with torch.profiler.profile() as profile:
        attention(q, k, v)
    assert any("causal" in event.name for event in profile.events())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        assert forward_ad.unpack_dual(attention(dual, k, v)).tangent is not None
    mapped = torch.func.vmap(lambda x: attention(x, k, v))(torch.stack([q, q]))
    torch.testing.assert_close(mapped[1], wanted)
    _, moved = torch.func.jvp(lambda x: attention(x, k, v), (q,), (torch.ones_like(q),))
    assert moved.abs().sum() > 0
    negative = torch._neg_view(-q)
    assert negative.is_neg()
    torch.testing.assert_close(attention(negative, k, v), wanted)
    assert forwards.runs == runs


def test_autocast_converts_whatever_was_bound(forwards):
    """In the dtype that autocast has, also where a call of another dtype was bound within it."""
    attention = attndsl.compile("causal()", backend="triton")
    q, k, v = (x.half() for x in drawn())
    for _ in range(3):
        assert attention(q, k, v).dtype is torch.float16
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            for _ in range(3):
                assert attention(q, k, v).dtype is dtype
    assert attention(q, k, v).dtype is torch.float16
    assert forwards.runs


def test_modes_of_gradients_are_kept_apart(forwards, backwards):
    attention, (q, k, v) = attndsl.compile("causal()", backend="triton"), drawn()
    learned = q.clone().requires_grad_()
    for _ in range(4):
        assert attention(learned, k, v).requires_grad
        assert not attention(q, k, v).requires_grad
        with torch.no_grad():
            assert not attention(learned, k, v).requires_grad
        with torch.inference_mode():
            assert attention(learned, k, v).is_inference()
    assert forwards.made == 4
    grads = [torch.autograd.grad(attention(learned, k, v).sum(), learned)[0] for _ in range(3)]
    assert torch.equal(grads[0], grads[2])
    assert (backwards.made, backwards.runs) == (1, 3)


def test_precision_of_products_is_looked_at(forwards):
    attention, operands = attndsl.compile("causal()", backend="triton"), drawn()
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for _ in range(3):
                check(attention, operands)
    finally:
        torch.set_float32_matmul_precision(before)
    assert forwards.made == 2


def test_backwards_of_many_strides_are_bound_a_few_times(backwards):
    attention = attndsl.compile("causal()", backend="triton")
    reference = attndsl.compile("causal()", backend="reference")
    q, k, v = (x.requires_grad_() for x in drawn())
    for width in range(module._MOST_BACKWARDS + 3):
        grad = torch.randn(2, 4, 20, 16 + 4 * width)[..., :16]
        found, wanted = (
            torch.autograd.grad(each(q, k, v), (q, k, v), grad) for each in (attention, reference)
        )
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    # The first call of a signature is not bound.
    assert backwards.made == module._MOST_BACKWARDS
    assert attention._prepared.recent_launches.each


@pytest.mark.parametrize("needs", [(0,), (1, 2), (0, 1, 2)])
def test_backwards_of_log_sum_exps_and_hooks(backwards, needs):
    """A gradient of the log-sum-exp has a launch of its own; hooks may move what is saved."""
    attention = attndsl.compile("causal()", backend="triton")
    reference = attndsl.compile("causal()", backend="reference")
    operands = drawn()
    for place in needs:
        operands[place].requires_grad_()
    learned = [operands[place] for place in needs]

    def gradients(each, weight):
        out, lse = each(*operands, return_lse=True)
        total = (out * torch.arange(16)).sum()
        if weight:
            total = total + (lse * torch.arange(20)).sum()
        return torch.autograd.grad(total, learned)

    def moved(x):
        return x.double().mT.contiguous() if x.dim() == 4 else x

    def back(x):
        return x.mT.float() if x.dim() == 4 else x

    for number in range(5):
        for weight in (0, 1):
            torch.testing.assert_close(
                gradients(attention, weight), gradients(reference, weight), atol=1e-5, rtol=1e-5
            )
        if number == 2:
            with torch.autograd.graph.saved_tensors_hooks(moved, back):
                found = gradients(attention, 1)
            torch.testing.assert_close(found, gradients(reference, 1), atol=1e-5, rtol=1e-5)
    lse = attention(*operands, return_lse=True)[1]
    found = torch.autograd.grad(lse.sum(), learned, allow_unused=True)
    wanted = torch.autograd.grad(
        reference(*operands, return_lse=True)[1].sum(), learned, allow_unused=True
    )
    for one, other in zip(found, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert backwards.runs > 4


def test_second_derivatives_of_a_bound_call():
    attention = attndsl.compile("causal()", backend="triton")
    reference = attndsl.compile("causal()", backend="reference")
    q, k, v = (x.requires_grad_() for x in drawn(rows=4, keys=5))

    def second(each):
        (first,) = torch.autograd.grad(each(q, k, v).square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (q, k, v))

    for _ in range(3):
        attention(q, k, v)
        torch.testing.assert_close(second(attention), second(reference), atol=1e-4, rtol=1e-4)


def test_batched_gradients_of_a_bound_call_are_refused():
    attention, (q, k, v) = attndsl.compile("causal()", backend="triton"), drawn()
    learned = q.clone().requires_grad_()
    for _ in range(4):
        out = attention(learned, k, v)
        with pytest.raises(attndsl.errors.UnsupportedError, match="is_grads_batched"):
            torch.autograd.grad(out, learned, torch.randn(3, *out.shape), is_grads_batched=True)
        torch.autograd.grad(attention(learned, k, v).sum(), learned)


def test_a_bound_launch_holds_no_tensors():
    attention, operands = attndsl.compile(TEXT, backend="triton"), list(drawn())
    gain = torch.rand(4)
    operands[0].requires_grad_()
    for _ in range(3):
        attention(*operands, gain=gain, w=0.5).sum().backward()
    seen = [weakref.ref(x) for x in (*operands, gain)]
    del operands, gain
    gc.collect()
    assert [x() for x in seen] == [None] * 4
    held = weakref.ref(attention)
    del attention
    assert held() is None


def test_values_changed_in_place_are_read(forwards):
    attention, operands = attndsl.compile(TEXT, backend="triton"), drawn()
    gain = torch.rand(4)
    for number in range(4):
        operands[number % 3].mul_(0.5)
        gain.add_(0.25)
        check(attention, operands, gain=gain, w=0.5)
    assert forwards.runs == 2


def test_a_reset_drops_what_was_bound(forwards):
    attention, operands = attndsl.compile("causal()", backend="triton"), drawn()
    for number, reason in enumerate((Reason.KERNELS, Reason.RESET)):
        for _ in range(3):
            attention(*operands)
        assert attention._prepared.recent_launches.each
        assert forwards.made == 1 + number
        CACHES.invalidate(reason)
        assert not attention._prepared.recent_launches.each


def test_many_shapes_share_the_first_places(forwards):
    attention = attndsl.compile("causal()", backend="triton")
    shapes = [drawn(rows=rows) for rows in range(1, 9)]
    for _ in range(3):
        for operands in shapes:
            check(attention, operands)
    assert (forwards.made, forwards.runs) == (8, 8)
    recent = attention._prepared.recent_launches
    assert len(recent.each) == recent.bound < 8


def test_other_things_than_tensors_are_refused_as_ever():
    attention, (q, k, v) = attndsl.compile("causal()", backend="triton"), drawn()
    for _ in range(3):
        attention(q, k, v)
    for bad in (None, 3, "q", [1.0]):
        with pytest.raises(attndsl.errors.AttnDSLError):
            attention(q, bad, v)
        with pytest.raises(attndsl.errors.AttnDSLError):
            attention(bad, k, v)
