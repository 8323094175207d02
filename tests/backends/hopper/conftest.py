"""Gluon's operations on tensors of torch, for tests that run a kernel's text as Python.

Warpgroups are threads of which one runs at a time: which one, and when copies and products read and
write, is drawn. What is read before it has come or after it has been overwritten makes an error,
and so do warpgroups that wait for each other for ever.
"""

from __future__ import annotations

import builtins
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attndsl.backends.philox import uniform_at


def number(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


def unwritten(dtype: torch.dtype) -> float:
    """What memory holds before anything has come: no number, no position, a mask's false."""
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype is torch.int8 else -1


def held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Stopped(BaseException):
    """Ends the threads of a run that has failed."""


@dataclass(eq=False)
class Task:
    """A warpgroup, or a program that waits for its warpgroups."""

    program: int
    turn: threading.Lock = field(default_factory=held)
    ready: Any = None
    """What it waits for: a function."""
    done: bool = False
    error: BaseException | None = None
    products: list[Product] = field(default_factory=list)
    stores: int = 0
    dirty: bool = False
    """Whether it has written to shared memory since its last fence."""


class Machine:
    """Runs tasks, one at a time, and whatever the hardware does beside them."""

    def __init__(self, seed: int, programs: int) -> None:
        self.random = random.Random(seed)
        self.haste = (0.3, 0.01)[seed % 2]
        """How often copies go on while tasks could."""
        self.programs = programs
        self.tasks: list[Task] = []
        self.events: list[Any] = []
        self.back = held()
        self.current: Task | None = None
        self.failed = False

    def start(self, program: int, function: Any, *arguments: Any) -> Task:
        task = Task(program)

        def run() -> None:
            try:
                task.turn.acquire()
                if not self.failed:
                    function(*arguments)
            except Stopped:
                pass
            except BaseException as error:  # Raised again by what runs the machine.
                task.error = error
            task.done = True
            if not self.failed:
                self.back.release()

        threading.Thread(target=run, daemon=True).start()
        self.tasks.append(task)
        return task

    def pause(self, ready: Any = None) -> None:
        """Let others run, or not, and go on some time after ``ready()``."""
        if (ready is None or ready()) and self.random.random() < 0.5:
            return
        task = self.current
        task.ready = ready
        self.back.release()
        task.turn.acquire()
        if self.failed:
            raise Stopped

    def run(self) -> None:
        try:
            while self.tasks:
                task = self.able()
                if self.events and (task is None or self.random.random() < self.haste):
                    self.events.pop(self.random.randrange(len(self.events)))()
                    continue
                assert task is not None, f"{len(self.tasks)} tasks wait for ever"
                self.current = task
                task.turn.release()
                self.back.acquire()
                if task.error is not None:
                    raise task.error
                if task.done:
                    self.tasks.remove(task)
        finally:
            self.failed = True
            for task in self.tasks:
                task.turn.release()

    def able(self) -> Task | None:
        """Any task that need not wait."""
        start = self.random.randrange(len(self.tasks))
        for task in (*self.tasks[start:], *self.tasks[:start]):
            if task.ready is None or task.ready():
                return task
        return None


class Barrier:
    """Counts arrivals and bytes; ``phases`` have completed."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phases = 0

    def arrive(self, count: int = 1) -> None:
        assert self.count, "before its init"
        assert count <= self.pending, "more arrivals than it counts"
        self.pending -= count
        self.settle()

    def settle(self) -> None:
        if not self.pending and not self.bytes:
            self.phases += 1
            self.pending = self.count


class Barriers:
    """Shared memory that holds barriers; where there is one, that one."""

    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, place: Any) -> Barriers:
        found = Barriers(0)
        found.all = [self.all[int(place)]]
        return found

    @property
    def one(self) -> Barrier:
        (found,) = self.all
        return found


@dataclass
class Shared:
    """Shared memory that holds tiles."""

    machine: Machine
    data: torch.Tensor

    def index(self, place: Any) -> Shared:
        return Shared(self.machine, self.data[int(place)])

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.machine, self.data.view(*shape))

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def slice(self, first: int, size: int, dim: int) -> Shared:
        return Shared(self.machine, self.data.narrow(dim, first, size))

    def permute(self, order: Any) -> Shared:
        return Shared(self.machine, self.data.permute(*order))

    def load(self, layout: Any) -> torch.Tensor:
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)
        self.machine.current.dirty = True


@dataclass(eq=False)
class Product:
    """A product that runs: what it reads must stay as it is until the end."""

    left: Any
    right: Shared
    sums: torch.Tensor
    value: torch.Tensor | None = None

    def compute(self) -> torch.Tensor:
        left = self.left.data if isinstance(self.left, Shared) else self.left
        return left.float() @ self.right.data.float() + self.sums


@dataclass
class Descriptor:
    """A tensor (batch, heads, length, width), by blocks of rows."""

    tensor: torch.Tensor
    rows: int

    dtype = torch.float16
    layout = None

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=self.rows * self.tensor.shape[3] * 2)

    def block(self, place: list[Any]) -> torch.Tensor:
        b, h, first, _ = map(int, place)
        return self.tensor[b, h, first : first + self.rows]


@dataclass
class Vector:
    """A tensor (length,) of fp32, by blocks."""

    tensor: torch.Tensor
    rows: int

    layout = None

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=self.rows * 4)

    def block(self, place: list[Any]) -> torch.Tensor:
        first = int(place[0])
        return self.tensor[first : first + self.rows, None]


@dataclass
class Tiles:
    """A tensor (..., queries, keys), by tiles; beyond it are zeros."""

    tensor: torch.Tensor
    rows: int
    columns: int

    layout = None

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=self.rows * self.columns * self.tensor.element_size())

    def block(self, place: list[Any]) -> torch.Tensor:
        *leading, row, column = map(int, place)
        own = self.tensor[tuple(leading)][row:, column:][: self.rows, : self.columns]
        found = own.new_zeros(self.rows, self.columns)
        found[: own.shape[0], : own.shape[1]] = own
        return found


@dataclass
class Pointer:
    data: torch.Tensor
    offset: Any = 0

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.data, self.offset + step)


def kept_bits(drop: Any, part: int, first: Any, size: int, keys_first: bool = True) -> torch.Tensor:
    """What :func:`keep` needs to draw for a tile, whose number of rows it knows."""
    millionths, number, seed, own = drop
    return torch.tensor([millionths, number, seed, own, part, first, size, keys_first]).int()


def keep(values: torch.Tensor, bits: torch.Tensor, negated: bool = False) -> torch.Tensor:
    millionths, number, seed, own, part, first, size, keys_first = bits.tolist()
    assert millionths >= 0, "read before it was drawn"
    own += part * len(values)
    ranges = (own, own + len(values)), (first, first + size)
    q, kv = reversed(ranges) if keys_first else ranges
    drawn = uniform_at(seed, torch.tensor([[number]]), q, kv)[0, 0]
    kept = (drawn.mT if keys_first else drawn) >= millionths / 1e6
    return torch.where(kept, values, -values if negated else 0.0)


class Operations:
    """Stand-ins for the modules that a kernel's text imports."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.meetings: Counter[int] = Counter()
        self.announced: Counter[int] = Counter()
        self.heard: Counter[int] = Counter()

    def modules(self) -> dict[str, Any]:
        language = self.language()
        barrier = SimpleNamespace(
            MBarrierLayout=lambda: "barrier", init=self.init, wait=self.wait,
            expect=self.expect, arrive=self.arrive,
        )  # fmt: skip
        gluon = SimpleNamespace(jit=lambda function: function, language=language)
        return {
            "triton": SimpleNamespace(jit=gluon.jit),
            "triton.experimental": SimpleNamespace(gluon=gluon),
            "triton.experimental.gluon": gluon,
            "triton.experimental.gluon.language.nvidia.hopper": SimpleNamespace(
                fence_async_shared=self.fence, mbarrier=barrier, warpgroup_mma=self.multiply,
                warpgroup_mma_wait=self.products,
            ),
            "attndsl.backends.hopper": SimpleNamespace(dialect=language),
            "attndsl.backends.hopper.library": SimpleNamespace(
                add_to_sums=self.add_tile, announce=self.announce,
                await_announced=self.await_announced, meet=self.meet,
                count_up=lambda begin, size, layout: begin + language.arange(0, size),
                eighths_of_sums=lambda tile: tile.reshape(tile.shape[0], -1, 8).sum(1),
                finish=lambda values, zero: None,
                halves=lambda words, half, layout: words,
                multiply=self.multiply_rows,
                line=lambda begin, slope, size, layout: begin + slope * language.arange(0, size),
                pack=lambda tile, half: tile.to(half),
                places_of=lambda first, length, origin, kind, size, layout: (
                    first + origin + language.arange(0, size)
                ),
                raised=torch.maximum,
                scaled=lambda tile, factors: tile * factors[:, None],
                spread=lambda values, places: (
                    values[None, :] if places.shape[0] == 1 else values[:, None]
                ),
                unpack=lambda words, zero, half, layout: words,
                word=lambda memory, number: memory.load(None)[number],
                words=lambda values: torch.tensor([*map(int, values), *[-1] * (16 - len(values))]),
            ),
            "attndsl.backends.hopper.dropout": SimpleNamespace(
                drop_of_head=lambda p, number, seed, first, keys_first: (
                    round(1e6 * float(p)), int(number), seed, int(first)
                ),
                factor_of_kept=lambda p: 1 / (1 - torch.as_tensor(p)),
                halves_of_kept=lambda weights, half, layout: torch.relu(weights).to(half),
                draws_of_pairs=lambda drop, first, zero, size, layout: (
                    kept_bits(drop, 0, first, size, keys_first=False)
                ),
                keep_drawn=lambda values, draws, drop: keep(values, draws),
                keep=keep, kept_bits=self.draw, layout_of_bits=lambda words: None,
            ),
            "attndsl.backends.hopper.shim": SimpleNamespace(
                tma_load=self.load_tile, tma_store=self.store_tile, tma_wait=self.wait_stores
            ),
            "attndsl.backends.triton.library": SimpleNamespace(
                positions=lambda index, length, origin, kind: index + origin,
                shift_of_positions=lambda origin, kind: origin,
                relu=torch.relu, sigmoid_ex2=torch.sigmoid, tanh_ex2=torch.tanh,
            ),
        }  # fmt: skip

    def language(self) -> SimpleNamespace:
        def where(condition: Any, left: Any, right: Any) -> Any:
            if isinstance(condition, bool):
                condition = torch.tensor(condition)
            return torch.where(condition, left, right)

        def spread(shape: Any, value: Any, dtype: Any, layout: Any = None) -> torch.Tensor:
            return torch.full(tuple(shape), value, dtype=dtype)

        def both(function: Any) -> Any:
            return lambda left, right: function(torch.as_tensor(left), torch.as_tensor(right))

        named = {name: getattr(torch, name) for name in ("float32", "float16", "int32", "int64")}
        layouts = ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout",
                   "SwizzledSharedLayout", "NVMMASharedLayout")  # fmt: skip
        return SimpleNamespace(
            **named, **{name: lambda *_: None for name in layouts},
            abs=torch.abs, exp2=lambda x: torch.exp2(torch.as_tensor(x)), log=torch.log,
            log2=torch.log2,
            allocate_shared_memory=self.allocate, constexpr=lambda value: value,
            arange=lambda begin, end, layout=None: (
                torch.arange(begin, end, dtype=torch.int32)
            ),
            atomic_add=self.add, broadcast=torch.broadcast_tensors,
            cdiv=lambda size, block: (size + block - 1) // block,
            convert_layout=lambda tile, layout: tile, full=spread,
            load=self.load, max=lambda tile, axis: tile.amax(axis), maximum=both(torch.maximum),
            minimum=both(torch.minimum), num_programs=lambda axis: number(self.machine.programs),
            program_id=lambda axis: number(self.machine.current.program), static_range=range,
            store=self.store, sum=lambda tile, axis: tile.sum(axis, dtype=tile.dtype),
            warp_specialize=self.specialise, where=where,
            zeros=lambda shape, dtype, layout=None: spread(shape, 0, dtype),
        )  # fmt: skip

    def draw(self, *arguments: Any) -> torch.Tensor:
        """Takes long: others go on meanwhile."""
        for _ in range(8):
            self.machine.pause()
        return kept_bits(*arguments)

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout == "barrier":
            return Barriers(shape[0])
        return Shared(self.machine, torch.full(tuple(shape), unwritten(dtype), dtype=dtype))

    def specialise(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(partitions) - 1
        program = self.machine.current.program
        started = [self.machine.start(program, *(part[0], *part[1])) for part in partitions]
        self.machine.pause(lambda: all(task.done for task in started))

    def init(self, barrier: Barriers, count: int) -> None:
        assert not barrier.one.count
        barrier.one.count = barrier.one.pending = count

    def wait(self, barrier: Barriers, phase: Any) -> None:
        found, parity = barrier.one, int(phase)
        assert parity in (0, 1)
        self.machine.pause(lambda: (found.phases - 1) % 2 == parity)

    def expect(self, barrier: Barriers, size: int) -> None:
        barrier.one.bytes += size
        barrier.one.arrive()
        self.machine.pause()

    def arrive(self, barrier: Barriers, count: int) -> None:
        barrier.one.arrive(count)
        self.machine.pause()

    def fence(self) -> None:
        self.machine.current.dirty = False

    def load_tile(self, desc: Any, place: list[Any], bar: Barriers, dest: Shared) -> None:
        whole, barrier = dest.data.view(desc.rows, -1), bar.one
        whole.fill_(unwritten(whole.dtype))
        source = desc.block(place)

        def complete() -> None:
            whole.zero_()
            whole[: len(source)] = source
            barrier.bytes -= desc.block_type.nbytes
            barrier.settle()

        self.machine.events.append(complete)
        self.machine.pause()

    def store_tile(self, desc: Descriptor, place: list[Any], source: Shared) -> None:
        task, kept = self.machine.current, source.data.clone()
        assert not task.dirty, "written without a fence"
        task.stores += 1

        def complete() -> None:
            assert torch.equal(source.data, kept), "overwritten while it was stored"
            found = desc.block(place)
            found.copy_(kept.view(desc.rows, -1)[: len(found)])
            task.stores -= 1

        self.machine.events.append(complete)
        self.machine.pause()

    def meet(self) -> None:
        """Both consumers of a program pass, or none."""
        program = self.machine.current.program
        self.meetings[program] += 1
        last = -(-self.meetings[program] // 2) * 2
        self.machine.pause(lambda: self.meetings[program] >= last)

    def announce(self) -> None:
        program = self.machine.current.program
        assert self.announced[program] == self.heard[program], "announced before it was heard"
        self.announced[program] += 1
        self.machine.pause()

    def await_announced(self) -> None:
        program = self.machine.current.program
        self.machine.pause(lambda: self.announced[program] > self.heard[program])
        self.heard[program] += 1

    def add_tile(self, pointer: Pointer, tile: torch.Tensor) -> None:
        first = int(pointer.offset)
        pointer.data[first : first + tile.numel()] += tile.reshape(-1)
        self.machine.pause()

    def wait_stores(self, pending: int) -> None:
        task = self.machine.current
        self.machine.pause(lambda: task.stores <= pending)

    def multiply(
        self, left: Any, right: Shared, sums: Any, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async
        product = Product(left, right, sums.clone() if use_acc else torch.zeros(()))
        product.value = product.compute()
        assert not product.value.isnan().any(), "read before it had come"
        self.machine.current.products.append(product)
        self.machine.pause()
        return product

    def multiply_rows(self, left: Shared, right: Shared, zeros: Any, width: int) -> Product:
        return self.multiply(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)

    def products(self, pending: int, deps: list[Product]) -> torch.Tensor:
        self.machine.pause()
        running = self.machine.current.products
        while len(running) > pending:
            product = running.pop(0)
            assert torch.equal(product.compute(), product.value), "overwritten while it was read"
        (found,) = deps
        assert found not in running
        return found.value

    def add(self, pointer: Pointer, value: int, sem: str) -> torch.Tensor:
        found = number(int(pointer.data))
        pointer.data += value
        self.machine.pause()
        return found

    def load(self, pointer: Pointer, mask: Any = True, other: int = 0) -> torch.Tensor:
        offset = torch.as_tensor(pointer.offset)
        found = pointer.data[torch.where(torch.as_tensor(mask), offset, 0).long()]
        return torch.where(torch.as_tensor(mask), found, other)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        if mask is None:
            pointer.data.fill_(value)
        else:
            pointer.data[pointer.offset[mask].long()] = value[mask].to(pointer.data.dtype)


def module_of(text: str, modules: dict[str, Any]) -> dict[str, Any]:
    """The names of a kernel's text, whose imports are ``modules``."""

    def find(name: str, *arguments: Any) -> Any:
        return modules[name]

    module = {"__builtins__": {**vars(builtins), "__import__": find}, "__name__": "kernel"}
    exec(text, module)
    return module


@pytest.fixture
def gluon() -> SimpleNamespace:
    """What a kernel's text and its arguments are made of."""
    return SimpleNamespace(
        Machine=Machine, Operations=Operations, Descriptor=Descriptor, Vector=Vector,
        Tiles=Tiles, Pointer=Pointer, number=number, module_of=module_of,
    )  # fmt: skip
