"""What kernels are given of a call."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import attndsl
from attndsl import errors
from attndsl.backends.base import Wants
from attndsl.backends.emit.facts import facts_of, with_gradients
from attndsl.backends.kernels.arguments import call_numbers, capture_arguments, template_argument
from attndsl.backends.kernels.example import example_call

ATTENTION = attndsl.compile("param w: int\nmask = q - kv < w")


def given(w: int) -> list[object]:
    call = example_call(ATTENTION.lowered, 16, 16, torch.float32, {"w": w})
    return capture_arguments(facts_of(ATTENTION.lowered.program, call), call)


@pytest.mark.parametrize(
    "w", [0, -(1 << 31), (1 << 31) - 1, 1 << 32, -(1 << 40), 1 << 62, sys.maxsize, -(1 << 63)]
)
def test_ints_that_fit(w):
    assert w in given(w)


def test_ints_that_the_interpreter_takes_for_others(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert 1 << 31 in given(1 << 31)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(errors.UnsupportedError, match="interpreter"):
        given(1 << 31)
    assert 1 << 32 in given(1 << 32)


def test_results_in_fp32():
    call = example_call(ATTENTION.lowered, 16, 16, torch.bfloat16, {"w": 3})
    names = ("OUT", "OUT_MOVED", "DQ", "DK", "DV_OUT", "SLOPES", "Q", "DOUT", "LSE")

    def types(call, wants):
        facts = with_gradients(facts_of(ATTENTION.lowered.program, call), wants)
        return [template_argument(name, facts).type for name in names]

    half, wide = "*bf16", "*fp32"
    assert types(call, Wants()) == [half] * 8 + [wide]
    own = call._replace(wide=True)
    assert types(own, Wants()) == [wide] * 2 + [half] * 6 + [wide]
    assert types(call, Wants(wide=True)) == [half] * 2 + [wide] * 3 + [half] * 3 + [wide]


@pytest.mark.parametrize("divisor", [1, 8, 16])
@pytest.mark.parametrize("value_dim", [24, 32])
def test_strides_of_the_output_are_those_of_its_width(divisor, value_dim):
    call = example_call(ATTENTION.lowered, 16, 16, torch.float32, {"w": 3})
    facts = replace(facts_of(ATTENTION.lowered.program, call), divisor=divisor, value_dim=value_dim)
    for dim in "bhm":
        assert template_argument(f"stride_o{dim}", facts).divisor == {24: 8, 32: 16}[value_dim]
        assert template_argument(f"stride_q{dim}", facts).divisor == divisor


@pytest.mark.parametrize(("head_dim", "divisor"), [(64, 16), (40, 8), (36, 1), (1, 1)])
def test_rows_of_forty_elements_are_read_by_eights(head_dim, divisor):
    rows = torch.zeros(2, 3, 5, head_dim)
    call = example_call(ATTENTION.lowered, 16, 16, torch.float32, {"w": 3})
    call = call._replace(q=rows, k=rows, v=rows)
    assert facts_of(ATTENTION.lowered.program, call).divisor == divisor


def test_a_map_of_positions_takes_the_place_of_their_origin():
    call = example_call(ATTENTION.lowered, 16, 16, torch.float32, {"w": 3})
    rows, columns = torch.arange(2), torch.arange(3)
    call = call._replace(q_offset=5, kv_offset=7)
    assert call_numbers((11, 13), call) == [call.scale, 11, 13, 5, 7]
    for mapped, found in (
        (call._replace(q_index=rows), [rows, 7]), (call._replace(kv_index=columns), [5, columns])
    ):  # fmt: skip
        numbers = call_numbers((11, 13), mapped)[3:]
        assert all(one is other for one, other in zip(numbers, found, strict=True))
