"""What a Hopper kernel's warpgroups share when its text runs as Python: a machine of tasks.

Warpgroups are greenlets, of which one runs at a time: which one, and when copies and products read
and write, is drawn. Threads would take three times as long, since a run changes between them some
thousand times. What is read before it has come or after it has been overwritten makes an error,
and so do warpgroups that wait for each other for ever.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from attndsl.backends.emit.loops import row_width


def number(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


def unwritten(dtype: torch.dtype) -> float:
    """What memory holds before anything has come: no number, no position, a mask's false."""
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype is torch.int8 else -1


@dataclass(eq=False)
class Task:
    """A warpgroup, or a program that waits for its warpgroups."""

    program: int
    life: greenlet
    ready: Any = None
    """What it waits for: a function."""
    products: list[Product] = field(default_factory=list)
    stores: int = 0
    dirty: bool = False
    """Whether it has written to shared memory since its last fence."""
    additions: list[Addition] = field(default_factory=list)
    """To sums in global memory, its own and those that happened before what it has waited for."""


@dataclass(eq=False)
class Addition:
    """A tile that is added to sums in global memory some time after it was sent."""

    sums: torch.Tensor
    tile: torch.Tensor
    sent: bool = True

    def __call__(self) -> None:
        """Land."""
        if self.sent:
            self.sums += self.tile
            self.sent = False


class Machine:
    """Runs tasks, one at a time, and whatever the hardware does beside them."""

    def __init__(self, seed: int, programs: int) -> None:
        self.random = random.Random(seed)
        self.haste = (0.3, 0.01)[seed % 2]
        """How often copies go on while tasks could."""
        self.programs = programs
        self.tasks: list[Task] = []
        self.events: list[Any] = []
        self.current: Task | None = None
        self.own = getcurrent()
        """What runs the machine, to which tasks give way. Their errors are raised there."""

    def start(self, program: int, function: Any, *arguments: Any) -> Task:
        task = Task(program, greenlet(lambda: function(*arguments), self.own))
        self.tasks.append(task)
        return task

    def pause(self, ready: Any = None) -> None:
        """Let others run, or not, and go on some time after ``ready()``."""
        if (ready is None or ready()) and self.random.random() < 0.5:
            return
        self.current.ready = ready
        self.own.switch()

    def run(self) -> None:
        try:
            while self.tasks:
                task = self.able()
                if self.events and (task is None or self.random.random() < self.haste):
                    self.events.pop(self.random.randrange(len(self.events)))()
                    continue
                assert task is not None, f"{len(self.tasks)} tasks wait for ever"
                self.current = task
                task.life.switch()
                if task.life.dead:
                    self.tasks.remove(task)
        finally:
            for task in self.tasks:
                task.life.throw()

    def finish(self) -> None:
        """What tasks that are done have sent to sums lands.

        A store that nobody waited for does not: shared memory, which it reads, is another's now.
        """
        sent = [event for event in self.events if isinstance(event, Addition)]
        while sent:
            sent.pop(self.random.randrange(len(sent)))()

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
        self.arriving: list[Addition] = []
        self.additions: list[Addition] = []
        """Those that happened before its last phase was complete."""

    def arrive(self, count: int = 1) -> None:
        assert self.count, "before its init"
        assert count <= self.pending, "more arrivals than it counts"
        self.pending -= count
        self.settle()

    def settle(self) -> None:
        if not self.pending and not self.bytes:
            self.phases += 1
            self.pending = self.count
            self.additions, self.arriving = self.arriving, []


class Barriers:
    """Shared memory that holds barriers; where there is one, that one."""

    def __init__(self, number: int, rank: int) -> None:
        self.all = [Barrier() for _ in range(number)]
        self.rank = rank

    def index(self, place: Any) -> Barriers:
        found = Barriers(0, self.rank - 1)
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

    def slice(self, first: int, size: int, dim: int = 0) -> Shared:
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
        width = self.tensor.shape[3]
        return SimpleNamespace(nbytes=self.rows * width * 2, shape=[1, 1, self.rows, width])

    def block(self, place: list[Any]) -> torch.Tensor:
        b, h, first, _ = map(int, place)
        return self.tensor[b, h, first : first + self.rows]


@dataclass
class Vector:
    """A tensor (length,) of fp32, by blocks."""

    tensor: torch.Tensor
    rows: int

    dtype = torch.float32
    layout = None

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=self.rows * 4, shape=[self.rows])

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
        return SimpleNamespace(
            nbytes=self.rows * self.columns * self.tensor.element_size(),
            shape=[*(1 for _ in self.tensor.shape[:-2]), self.rows, self.columns],
        )

    def block(self, place: list[Any]) -> torch.Tensor:
        *leading, row, column = map(int, place)
        own = self.tensor[tuple(leading)][row:, column:][: self.rows, : self.columns]
        if own.shape == (self.rows, self.columns):
            return own
        found = own.new_zeros(self.rows, self.columns)
        found[: own.shape[0], : own.shape[1]] = own
        return found


@dataclass
class Pointer:
    data: torch.Tensor
    offset: Any = 0

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.data, self.offset + step)


def lists_of(
    allowed: torch.Tensor, blocks: tuple[int, int], cut_is_full: bool, parts: int = 1
) -> dict[str, Any]:
    """What the kernels that find tiles say of a mask, one map for all heads.

    Args:
        allowed: (rows, columns); a list is of the tiles of one block of rows.
        blocks: Rows and columns of a tile.
        cut_is_full: Whether a tile is FULL that reaches beyond the last column.
        parts: Of how many parts of a block's rows they tell.
    """
    row_tiles, column_tiles = (
        -(-size // block) for size, block in zip(allowed.shape, blocks, strict=True)
    )
    size = blocks[0] // parts
    rows = torch.zeros(row_tiles, row_width(parts), dtype=torch.int32)
    if parts > 1:
        rows[:, 4::2] = column_tiles
    tiles = torch.zeros(row_tiles, column_tiles, dtype=torch.int32)
    for row in range(row_tiles):
        for column in range(column_tiles):
            part = allowed[row * blocks[0] :, column * blocks[1] :][: blocks[0], : blocks[1]]
            if part.all() and (cut_is_full or part.shape[1] == blocks[1]):
                tiles[row, rows[row, 0]] = column
                rows[row, 0] += 1
            elif part.any():
                tiles[row, column_tiles - 1 - rows[row, 1]] = column
                for own in range(parts if parts > 1 else 0):
                    if part[own * size : (own + 1) * size].any():
                        first = rows[row, 4 + 2 * own]
                        first.copy_(torch.minimum(first, rows[row, 1]))
                        rows[row, 5 + 2 * own] = rows[row, 1] + 1
                rows[row, 1] += 1
        rows[row, 2] = -1
    return {
        "tile_rows": Pointer(rows.flatten()), "tile_list": Pointer(tiles.flatten()),
        "list_step_b": 0, "list_step_h": 0,
    }  # fmt: skip
