"""Few rows over keys that they all see: what is taken so, and what comes of it."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.backends.log_sum import public_lse
from attndsl.backends.tiled.cpu import CPUBackend
from attndsl.backends.tiled.sdpa_single import single_call
from attndsl.call.bind import bind
from attndsl.call.options import CallOptions, Location

CLOSE = {dtype: {"atol": 0.02, "rtol": 0.02} for dtype in (torch.bfloat16, torch.float16)}
"""The reference rounds on its way."""
SEEN = {
    # Program, rows, keys, q_offset and kv_offset: which keys all rows see.
    ("score", 3, 50, 0, 0): (0, 50),
    ("causal()", 1, 50, 49, 0): (0, 50),
    ("causal()", 1, 50, 60, 0): (0, 50),
    ("causal()", 1, 1, 0, 0): (0, 1),
    ("causal()", 2, 50, 49, 0): (0, 50),
    ("causal()", 2, 50, 48, 0): None,
    ("causal()", 1, 50, 48, 0): (0, 49),
    ("causal()", 1, 50, 3, -46): (0, 50),
    ("causal() and q - kv < 20", 1, 50, 49, 0): (30, 50),
    ("causal() and q - kv < 20", 1, 50, 65, 0): (46, 50),
    ("causal() and q - kv < 20", 1, 50, 70, 0): None,
    ("causal() and q - kv < 20", 2, 50, 49, 0): None,
    ("causal() and q % 7 == 0", 1, 50, 49, 0): (0, 50),
    ("causal() and q % 7 == 0", 1, 50, 50, 0): None,
    ("causal() and q % 7 == 0", 2, 50, 49, 0): None,
    ("causal() and kv % 7 == 0", 1, 50, 49, 0): None,
    ("causal() and kv <= q + h", 1, 50, 49, 0): None,
    ("kv == 49", 1, 50, 0, 0): None,
    ("mask = causal(); sink = 0.5", 1, 50, 49, 0): None,
    ("causal()", 1, 50, 0, 0): (0, 1),
    ("causal()", 1, 50, -1, 0): None,
    ("causal() and q - kv < 20", 1, 50, 10, 0): (0, 11),
    ("causal() and q - kv < 20", 1, 50, 30, 0): None,
}


def _call(attention, rows, keys, q_offset=0, kv_offset=0, heads=(2, 2), **options):
    q = torch.randn(2, heads[0], rows, 8)
    k, v = torch.randn(2, 2, heads[1], keys, 8)
    location = Location(q_offset, kv_offset, None, None)
    return bind(attention.lowered.program, (q, k, v), {}, location, CallOptions(**options))


@pytest.mark.parametrize(("case", "seen"), SEEN.items())
def test_which_keys_all_rows_see(case, seen):
    text, *numbers = case
    attention = attndsl.compile(text, backend="cpu")
    call = _call(attention, *numbers)
    single = single_call(attention.lowered, call)
    assert single == seen
    if single is not None:
        reference = attndsl.compile(text, backend="reference")
        wanted = reference(
            call.q, call.k, call.v, q_offset=numbers[2], kv_offset=numbers[3], return_lse=True
        )
        out, lse = single.forward(attention.lowered, call)
        torch.testing.assert_close((out, public_lse(lse)), wanted)


def test_many_rows_are_taken_apart():
    attention = attndsl.compile("score", backend="cpu")
    assert single_call(attention.lowered, _call(attention, 8, 50)) is not None
    assert single_call(attention.lowered, _call(attention, 9, 50)) is None
    assert single_call(attention.lowered, _call(attention, 3, 50, heads=(6, 2))) is None


def test_given_tiles_and_positions_are_heeded():
    attention = attndsl.compile("causal()", backend="cpu")
    call = _call(attention, 1, 50, 49)
    assert single_call(attention.lowered, call) is not None
    index = torch.arange(50)
    for other in (
        call._replace(tiles=object()), call._replace(q_index=index[:1]),
        call._replace(kv_index=index), call._replace(q_offset=torch.tensor(49)),
    ):  # fmt: skip
        assert single_call(attention.lowered, other) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("heads", "rows"), [((4, 4), 1), ((4, 2), 1), ((4, 2), 3), ((2, 2), 5)])
def test_results_are_those_of_a_forward(dtype, transposed, heads, rows):
    """In values, dtype and order in memory, and gradients come of them."""
    backend = CPUBackend()
    attention, reference = (
        attndsl.compile("causal()", backend=name) for name in ("cpu", "reference")
    )

    def made(count, length):
        if transposed:
            return torch.randn(2, length, count, 16, dtype=dtype).transpose(1, 2)
        return torch.randn(2, count, length, 16, dtype=dtype)

    q, k, v = made(heads[0], rows), made(heads[1], 40), made(heads[1], 40)
    for wide in (None, torch.float32) if q.dtype.itemsize == 2 else (None,):
        call = bind(
            attention.lowered.program, (q, k, v), {}, Location(60, 0, None, None),
            CallOptions(out_dtype=wide),
        )  # fmt: skip
        assert single_call(attention.lowered, call) is not None
        out, lse = backend.forward(attention.lowered, call)
        wanted = reference(q, k, v, q_offset=60, return_lse=True, out_dtype=wide)
        torch.testing.assert_close((out, public_lse(lse)), wanted, **CLOSE.get(dtype, {}))
        assert out.stride() == wanted[0].stride()
        assert lse.is_contiguous()
        assert not out._is_view()
        assert not lse._is_view()
    operands = [x.requires_grad_() for x in (q, k, v)]
    found, wanted = (
        torch.autograd.grad(run(*operands, q_offset=60).sum(), operands)
        for run in (attention, reference)
    )
    torch.testing.assert_close(found, wanted, **CLOSE.get(dtype, {}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_keys_that_are_no_numbers_count(value):
    """torch says 0 of rows without numbers, where they have few keys."""
    attention, reference = (
        attndsl.compile("causal()", backend=name) for name in ("cpu", "reference")
    )
    q = torch.randn(1, 2, 1, 8).abs()
    for length in (1, 3, 20):
        k, v = torch.randn(2, 1, 2, length, 8)
        for place in (slice(None), slice(-1, None)):
            spoilt = k.clone()
            spoilt[:, :, place] = value
            found, wanted = (
                run(q, spoilt, v, q_offset=length - 1, return_lse=True)
                for run in (attention, reference)
            )
            torch.testing.assert_close(found, wanted, equal_nan=True)


def test_keys_that_share_memory_are_read_as_they_are():
    attention, reference = (
        attndsl.compile("causal()", backend=name) for name in ("cpu", "reference")
    )
    q = torch.randn(2, 4, 1, 8)
    for k in (
        torch.randn(2, 1, 30, 8).expand(-1, 4, -1, -1),
        torch.randn(2, 4, 1, 8).expand(-1, -1, 30, -1),
        torch.randn(1, 1, 30, 8).expand(2, 4, -1, -1),
        torch.randn(2 * 4 * 240).as_strided((2, 4, 30, 8), (960, 240, 4, 1)),
    ):
        torch.testing.assert_close(attention(q, k, k, q_offset=29), reference(q, k, k, q_offset=29))
