"""Device functions of the Hopper kernels: slots, loads, and instructions that are written out."""

from __future__ import annotations

import re
import struct
from types import FunctionType, SimpleNamespace

import pytest
import torch

from attndsl.backends.hopper.channels import producer_load, slot_of
from attndsl.backends.hopper.library import mixture
from attndsl.backends.hopper.records import Channel, Slot, Tiles


@pytest.mark.parametrize("stages", range(1, 7))
def test_slots_come_in_turns(stages):
    for count in range(50):
        assert slot_of.fn(count, stages) == (count % stages, count // stages % 2)


@pytest.mark.parametrize("moves", [False, True])
def test_a_stage_is_full_when_all_bytes_have_come(moves):
    stages = SimpleNamespace(index=lambda place: place)
    desc = SimpleNamespace(block_type=SimpleNamespace(nbytes=96))
    expected, loaded = [], []
    names = {
        "producer_expect": lambda channel, slot, size: expected.append(size),
        "tma_load": lambda source, *_: loaded.append(source),
    }
    tangent = Tiles("its tangent", stages) if moves else None
    channel = Channel(desc, stages, None, None, tangent)
    FunctionType(producer_load.fn.__code__, names)(channel, Slot(0, 0), [0])
    assert loaded == [desc, "its tangent"][: 1 + moves]
    assert expected == [96 * len(loaded)]


def run(ptx: str, place: int, x: torch.Tensor) -> torch.Tensor:
    """Output number ``place`` of the 16 of ``ptx`` where all inputs are ``x``, in fp32."""
    found: dict[str, torch.Tensor] = {f"${16 + number}": x for number in range(16)}

    def value(name: str) -> torch.Tensor:
        if name.startswith("0f"):
            return torch.full_like(x, struct.unpack(">f", bytes.fromhex(name[2:]))[0])
        return found[name] if name in found else torch.tensor(int(name))

    for line in re.findall(r"([a-z0-9.]+ [^;{}]*);", ptx):
        name, _, rest = line.partition(" ")
        if name.startswith("."):
            continue
        target, *operands = rest.split(", ")
        args = [value(operand) for operand in operands]
        if name == "shl.b32":
            found[target] = (args[0].view(torch.int32) << args[1]).view(torch.float32)
            continue
        found[target] = {
            "add.f32": lambda a, b: a + b,
            "sub.f32": lambda a, b: a - b,
            "mul.f32": lambda a, b: a * b,
            "fma.rn.f32": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
            "ex2.approx.ftz.f32": torch.exp2,
        }[name](*args)
    return found[f"${place}"]


@pytest.mark.parametrize("number", [2, 3])
def test_powers_of_two_on_the_multipliers(number):
    ptx = mixture(number)
    x = torch.cat([torch.linspace(-125.9, 125.9, 100_001), torch.arange(-125.0, 126.0)])
    exact = torch.exp2(x.double())
    errors = [((run(ptx, place, x) - exact) / exact).abs().max() for place in range(16)]
    assert sum(bool(error > 1e-6) for error in errors) == number
    assert max(errors) < 1.1e-4
    whole = torch.arange(-125.0, 126.0)
    odd = torch.tensor([torch.nan, 0.0])
    for place in range(16):
        assert torch.equal(run(ptx, place, whole), torch.exp2(whole))
        assert torch.equal(run(ptx, place, odd).isnan(), odd.isnan())
