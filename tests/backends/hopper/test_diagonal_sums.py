"""Sums along diagonals as the device functions make them, run as Python; PTX lane by lane."""

from __future__ import annotations

import re
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gluon_machine import Machine, Pointer, Shared

Registers = torch.Tensor
"""(4 warps, 32 lanes) int32, a register of each thread."""
LANES = torch.arange(32, dtype=torch.int32)


def bits(values: torch.Tensor) -> Registers:
    return values.float().contiguous().view(torch.int32)


def numbers(register: Registers) -> torch.Tensor:
    return register.contiguous().view(torch.float32)


def pair(register: Registers) -> torch.Tensor:
    """(4, 32, 2), the halves of registers as bf16, the lower one first."""
    halves = torch.stack([register << 16, register & -65536], -1)
    return numbers(halves)


def packed(upper: torch.Tensor, lower: torch.Tensor) -> Registers:
    high, low = (bits(x.bfloat16()) for x in (upper, lower))
    return (high & -65536) | ((low >> 16) & 65535)


def product(left: list[Registers], right: Registers, sums: list[Registers]) -> list[Registers]:
    """``mma.m16n8k8`` of bf16, by the fragments that PTX specifies."""
    rows = torch.cat([pair(register).view(4, 8, 8) for register in left], 1)
    columns = pair(right).view(4, 8, 8)
    held = torch.stack([numbers(register) for register in sums], -1).view(4, 8, 4, 2, 2)
    found = held.permute(0, 3, 1, 2, 4).reshape(4, 16, 8) + rows @ columns.mT
    found = found.view(4, 2, 8, 4, 2).permute(0, 2, 3, 1, 4).reshape(4, 32, 4)
    return [bits(found[..., place]) for place in range(4)]


def run_ptx(text: str, operands: dict[str, Registers]) -> None:
    """Run the instructions of ``text``; ``operands`` are its registers."""

    def value(name: str) -> Any:
        if name == "%laneid":
            return LANES.expand(4, 32)
        if re.fullmatch(r"-?(0x)?[0-9a-f]+", name):
            number = int(name, 0)
            return number - (1 << 32) if number >= 1 << 31 else number
        return operands[name]

    for statement in text.replace("{\n        .reg", ".reg").split(";"):
        words = statement.strip().split(None, 1)
        if not words or words[0] in ("}", ".reg"):
            continue
        name = words[0]
        if name.startswith("mma"):
            groups = [re.split(r"\s*,\s*", group) for group in re.findall(r"{(.*?)}", words[1])]
            left, right, sums = ([value(x) for x in group] for group in groups[1:])
            found = product(left, right[0], sums)
            operands.update(zip(groups[0], found, strict=True))
            continue
        target, *names = re.split(r"\s*,\s*", words[1])
        a, b, *rest = (*map(value, names), None)
        match name:
            case "mov.u32":
                result = a
            case "and.b32":
                result = a & b
            case "mul.lo.u32":
                result = a * b
            case "add.u32":
                result = a + b
            case "sub.u32":
                result = a - b
            case "shl.b32":
                result = a << b
            case "sub.f32":
                result = bits(numbers(a) - numbers(b))
            case "setp.eq.s32":
                result = a == b
            case "selp.b32":
                result = torch.where(rest[0], a, b).int()
            case "cvt.rn.bf16x2.f32":
                result = packed(numbers(a), numbers(b))
            case "shfl.sync.idx.b32":
                result = a.gather(1, (b & 31).long())
            case _:
                raise AssertionError(f"unknown instruction {name}")
        operands[target] = result


def threads(tile: torch.Tensor) -> torch.Tensor:
    """(4 warps, 32 lanes, 2) of a square of each warp, (2, 2, 8, 8)."""
    return tile.expand(2, 2, 8, 8).reshape(4, 32, 2)


def run_asm(text: str, constraints: str, arguments: list[Any], **_: Any) -> list[torch.Tensor]:
    registers: list[Registers] = []
    for argument in arguments:
        held = threads(argument)
        if argument.dtype is torch.bfloat16:
            registers.append(packed(held[..., 1].float(), held[..., 0].float()))
        else:
            own = bits(held) if argument.dtype.is_floating_point else held.int()
            registers += [own[..., 0], own[..., 1]]
    assert len(constraints.split(",")) == 4 + len(registers)
    operands = {f"${place + 4}": register for place, register in enumerate(registers)}
    run_ptx(text, operands)
    found = [numbers(operands[f"${place}"]) for place in range(4)]
    return [torch.stack(found[place : place + 2], -1).view(2, 2, 8, 8) for place in (0, 2)]


def split(tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tile[..., 0], tile[..., 1]


def add(pointer: Pointer, values: torch.Tensor, sem: str) -> None:
    assert sem == "relaxed"
    pointer.data.index_add_(0, pointer.offset.long(), values)


@pytest.fixture
def device() -> dict[str, Any]:
    """The functions of ``diagonals``, on tensors of torch."""
    language = SimpleNamespace(
        constexpr=lambda value: value, float32=torch.float32, bfloat16=torch.bfloat16,
        arange=lambda begin, end, layout: torch.arange(begin, end, dtype=torch.int32),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        convert_layout=lambda tile, layout, assert_trivial=False: tile,
        where=torch.where, broadcast=torch.broadcast_tensors, reshape=torch.reshape,
        permute=torch.permute, split=split, static_range=range, sum=torch.sum, atomic_add=add,
        inline_asm_elementwise=run_asm, SliceLayout=lambda *_: None,
        DistributedLinearLayout=lambda *_: None, BlockedLayout=lambda *_: None,
    )  # fmt: skip
    same = SimpleNamespace(jit=lambda function: function, constexpr_function=lambda f: f)
    text = (resources.files("attndsl.backends.hopper") / "diagonal_sums.py").read_text("utf-8")
    text = text.replace("import triton\n", "").replace(
        "from triton.experimental import gluon\n", ""
    )
    text = text.replace("from triton.experimental.gluon import language as gl\n", "")
    text = text.replace(".to(gl.bfloat16)", ".bfloat16()")
    module = {"triton": same, "gluon": same, "gl": language}
    exec(text, module)
    return module


class Memory(Shared):
    """Shared memory whose slices begin anywhere."""

    def slice(self, first: int, size: int, dim: int) -> Memory:
        assert first % size == 0, "the compiler takes multiples of the size alone"
        return Memory(self.machine, self.data.narrow(dim, first, size))

    def reshape(self, shape: Any) -> Memory:
        return Memory(self.machine, self.data.view(*shape))


@pytest.mark.parametrize(("queries", "part"), [(64, 0), (128, 0), (128, 1)])
def test_sums_of_a_tile(device, queries, part):
    machine = Machine(0, 1)
    machine.current = SimpleNamespace(dirty=False)
    tile = torch.randn(128, queries, generator=torch.Generator().manual_seed(part)).bfloat16()
    lines = Memory(machine, torch.full((2, 2, 128), torch.nan))
    sums = torch.ones(300)
    device["add_diagonals"](Pointer(sums, 7), Memory(machine, tile), part, lines)
    expected = torch.ones(300, dtype=torch.float64)
    own = tile[:, 64 * part : 64 * part + 64].double()
    for distance in range(-127, 64):
        expected[7 + 128 + distance] += own.diagonal(distance).sum()
    # Sums of fp32 are multiplied as two of bf16.
    torch.testing.assert_close(sums.double(), expected, atol=1e-3, rtol=1e-5)
    assert torch.equal(sums[:7], torch.ones(7))
    assert torch.equal(sums[7 + 192 :], torch.ones(300 - 7 - 192))


def test_exact_sums(device):
    machine = Machine(0, 1)
    machine.current = SimpleNamespace(dirty=False)
    tile = torch.ones(128, 64, dtype=torch.bfloat16)
    lines, sums = Memory(machine, torch.zeros(2, 2, 128)), torch.zeros(192)
    device["add_diagonals"](Pointer(sums, 0), Memory(machine, tile), 0, lines)
    distance = torch.arange(-128, 64)
    lengths = torch.minimum(torch.minimum(distance + 128, 64 - distance), torch.tensor(64))
    assert torch.equal(sums, lengths.float())
