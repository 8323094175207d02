"""Gluon's operations on tensors of torch, for tests that run a kernel's text as Python."""

from __future__ import annotations

from collections import Counter
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from triton import JITFunction

from attndsl.backends.dense.philox import kept_at
from attndsl.backends.device import records
from attndsl.backends.device.library import head_of, place_of_item
from attndsl.backends.hopper import channels
from attndsl.backends.hopper import records as hopper_records

from .gluon_machine import Addition, Barriers, Product, Shared, number, unwritten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .gluon_machine import Descriptor, Machine, Pointer


def keep(values: torch.Tensor, bits: torch.Tensor, negated: bool = False) -> torch.Tensor:
    """Values of a part of a tile, of which ``bits`` says where it is and what decides."""
    millionths, number, seed, part, first_row, first_column, size, keys_first = bits.tolist()
    assert millionths >= 0, "read before it was drawn"
    first_row += part * len(values)
    ranges = (first_row, first_row + len(values)), (first_column, first_column + size)
    q, kv = reversed(ranges) if keys_first else ranges
    p = torch.tensor(millionths / 1e6)
    kept = kept_at(seed, p, torch.tensor([[number]]), q, kv)[0, 0]
    return torch.where(kept.mT if keys_first else kept, values, -values if negated else 0.0)


def partial_row_sums(tile: torch.Tensor) -> torch.Tensor:
    """Half a tile has fewer columns here."""
    padded = torch.nn.functional.pad(tile, (0, -tile.shape[1] % 8))
    return padded.reshape(len(tile), -1, 8).sum(1)


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
            "attndsl.backends.hopper": SimpleNamespace(gluon_dialect=language),
            "attndsl.backends.hopper.gluon_dialect": language,
            "attndsl.backends.hopper.channels": self.channels(barrier, language),
            "attndsl.backends.hopper.library": SimpleNamespace(
                add_to_sums=self.add_tile, signal_p=self.signal_p,
                await_turn=self.await_turn, count_turn=self.count_turn,
                wait_for_p=self.wait_for_p, await_written=lambda: self.wait_stores(0),
                sync_consumers=self.sync_consumers,
                count_up=lambda begin, size, layout: begin + language.arange(0, size),
                partial_row_sums=partial_row_sums,
                pin_before_wait=lambda values, zero: None,
                halves=lambda words, half, layout: words,
                multiply=self.multiply_rows,
                multiply_blocks=self.multiply_blocks,
                column_blocks=lambda data, stage, number, width: tuple(
                    data.index(stage * number + block).reshape([data.shape[3], width // number])
                    for block in range(number)
                ),
                # Rows side by side here, so that any number of them will do.
                max_of_two_rows=lambda peak: peak.view(-1, 2).amax(1).repeat_interleave(2),
                ramps=lambda begins, slope, size, layout: (
                    begins[:, None] + slope * language.arange(0, size)
                ),
                mixed_exp2=lambda x, number: torch.exp2(x),
                ramp=lambda begin, slope, size, layout: begin + slope * language.arange(0, size),
                # Halves are fp16 here, and hold less than bf16.
                pack=lambda tile, half: tile.clamp(-65504, 65504).to(half),
                places_of=lambda first, length, origin, kind, size, layout: (
                    first + origin + language.arange(0, size)
                ),
                fold_partials=lambda eighths: eighths.reshape(len(eighths), 4, 2).sum(2),
                lazy_max=torch.maximum,
                lazy_rescale=lambda tile, factors: tile * factors[:, None],
                lazy_shift=lambda scores, rests, shifts, factor: scores,
                lazy_difference=lambda tile, shifts: tile - shifts[:, None],
                spread=lambda values, places: (
                    values[None, :] if places.shape[0] == 1 else values[:, None]
                ),
                unpack=lambda words, zero, half, layout: words,
                widened=lambda words, half, layout: words.float(),
            ),
            "attndsl.backends.hopper.dropout_bits": SimpleNamespace(
                factor_of_kept=lambda p: 1 / (1 - torch.as_tensor(p)),
                halves_of_kept=lambda weights, half, layout: torch.relu(weights).to(half),
                keep_packed=keep, keep=keep, layout_of_row_bits=lambda columns: None,
                layout_of_key_bits=lambda columns: None,
                keep_of_rows=lambda *arguments: self.draw(*arguments, keys_first=False),
                keep_of_keys=lambda *arguments: self.draw(*arguments, keys_first=True),
            ),
            "attndsl.backends.hopper.diagonal_sums": SimpleNamespace(
                add_diagonals=self.add_diagonals
            ),
            "attndsl.backends.hopper.triton_compat": SimpleNamespace(
                tma_load=self.load_tile, tma_store=self.store_tile, tma_wait=self.wait_stores,
                view_memory=lambda memory, dtype, shape, layout: memory.reshape(shape),
            ),
            "attndsl.backends.device.records": records,
            "attndsl.backends.hopper.records": hopper_records,
            "attndsl.backends.device.dropout_tile": SimpleNamespace(
                drop_of_head=lambda p, number, seed: (round(1e6 * float(p)), int(number), seed),
                drop_of_part=lambda p, number, seed, row, key: (
                    round(1e6 * float(p)), int(number), seed, 2 * row, 16 * key
                ),
            ),
            "attndsl.backends.device.library": SimpleNamespace(
                place_of_item=FunctionType(place_of_item.fn.__code__, {"tl": language}),
                positions=lambda index, length, origin, kind: index + origin,
                head_of=FunctionType(head_of.fn.__code__, {"Head": records.Head}),
                shift_of=lambda origins, q_kind, kv_kind: records.Shift(*origins),
                relu=torch.relu, sigmoid_ex2=torch.sigmoid, tanh_ex2=torch.tanh,
                sigmoid_approx=torch.sigmoid, tanh_approx=torch.tanh,
            ),
        }  # fmt: skip

    def channels(self, barrier: SimpleNamespace, language: SimpleNamespace) -> SimpleNamespace:
        """The module itself, on barriers of the machine."""
        each = SimpleNamespace(mbarrier_arrive=lambda x, increment_count: self.arrive(x, 128))
        names = {**vars(channels), "gl": language, "mbarrier": barrier, "async_copy": each}
        names["tma_load"] = self.load_tile
        for name, found in vars(channels).items():
            if isinstance(found, JITFunction) and found.__module__ == channels.__name__:
                own = found.fn
                names[name] = FunctionType(own.__code__, names, name, own.__defaults__)
        return SimpleNamespace(**names)

    def language(self) -> SimpleNamespace:
        def where(condition: Any, left: Any, right: Any) -> Any:
            if isinstance(condition, bool):
                condition = torch.tensor(condition)
            return torch.where(condition, left, right)

        def spread(shape: Any, value: Any, dtype: Any, layout: Any = None) -> torch.Tensor:
            return torch.full(tuple(shape), value, dtype=dtype)

        def both(function: Any) -> Any:
            return lambda left, right: function(torch.as_tensor(left), torch.as_tensor(right))

        named = {
            name: getattr(torch, name)
            for name in ("float32", "float64", "float16", "int8", "int32", "int64")
        }
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
            convert_layout=lambda tile, layout, assert_trivial=False: tile, full=spread,
            fma=lambda x, y, z: x * y + z, zeros_like=torch.zeros_like,
            cast=lambda x, dtype: torch.as_tensor(x).to(dtype),
            load=self.load, max=lambda tile, axis: tile.amax(axis), maximum=both(torch.maximum),
            min=lambda tile, axis: tile.amin(axis), minimum=both(torch.minimum),
            num_programs=lambda axis: number(self.machine.programs),
            program_id=lambda axis: number(self.machine.current.program), static_range=range,
            store=self.store, sum=lambda tile, axis: tile.sum(axis, dtype=tile.dtype),
            to_tensor=torch.as_tensor,
            warp_specialize=self.facts_of, where=where,
            zeros=lambda shape, dtype, layout=None: spread(shape, 0, dtype),
        )  # fmt: skip

    def draw(
        self, memory: Shared, slot: Any, drop: Any, first_row: Any, first_column: Any, parts: int,
        columns: int, keys_first: bool,
    ) -> None:  # fmt: skip
        """Takes long: others go on meanwhile."""
        millionths, number, seed, *begins = drop
        begins = begins or [0, 0]
        row, column = reversed(begins) if keys_first else begins
        place = int(first_row) + row, int(first_column) + column
        for part in range(parts):
            for _ in range(4):
                self.machine.pause()
            bits = [millionths, number, seed, part, *place, columns, keys_first]
            memory.index(slot + part).store(torch.tensor(bits).int())

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout == "barrier":
            return Barriers(shape[0], len(shape))
        if shape[1:2] == [128]:
            # A word or more for each thread: what stands for the bits of a tile, see :func:`keep`.
            dtype, shape = torch.int32, [shape[0], 8]
        return Shared(self.machine, torch.full(tuple(shape), unwritten(dtype), dtype=dtype))

    def facts_of(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(partitions) - 1
        program = self.machine.current.program
        started = [self.machine.start(program, *(part[0], *part[1])) for part in partitions]
        self.machine.pause(lambda: all(task.life.dead for task in started))

    def init(self, barrier: Barriers, count: int) -> None:
        assert not barrier.one.count
        barrier.one.count = barrier.one.pending = count

    def wait(self, barrier: Barriers, phase: Any) -> None:
        found, parity = barrier.one, int(phase)
        assert parity in (0, 1)
        self.machine.pause(lambda: (found.phases - 1) % 2 == parity)
        self.knows(found.additions)

    def knows(self, additions: list[Addition]) -> None:
        """The task has waited for what these happened before."""
        known = self.machine.current.additions
        known += [addition for addition in additions if addition.sent]

    def expect(self, barrier: Barriers, size: int) -> None:
        barrier.one.bytes += size
        barrier.one.arrive()
        self.machine.pause()

    def arrive(self, barrier: Barriers, count: int, pred: Any = True) -> None:
        if pred:
            barrier.one.arriving += self.machine.current.additions
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

    def sync_consumers(self) -> None:
        """Both consumers of a program pass, or none."""
        program = self.machine.current.program
        self.meetings[program] += 1
        last = -(-self.meetings[program] // 2) * 2
        self.machine.pause(lambda: self.meetings[program] >= last)

    def signal_p(self) -> None:
        program = self.machine.current.program
        assert self.announced[program] == self.heard[program], "announced before it was heard"
        self.announced[program] += 1
        self.machine.pause()

    def wait_for_p(self) -> None:
        program = self.machine.current.program
        self.machine.pause(lambda: self.announced[program] > self.heard[program])
        self.heard[program] += 1

    def add_tile(self, pointer: Pointer, tile: torch.Tensor) -> None:
        first = int(pointer.offset)
        assert 0 <= first <= pointer.data.numel() - tile.numel(), "added outside of the sums"
        addition = Addition(pointer.data[first : first + tile.numel()], tile.reshape(-1).clone())
        self.machine.current.additions.append(addition)
        self.machine.events.append(addition)
        self.machine.pause()

    def count_turn(self, pointer: Pointer) -> None:
        """Waits for all additions that the task knows of, others' too: a release is cumulative."""
        known = self.machine.current.additions
        while known:
            known.pop()()
        pointer.data[int(pointer.offset)] += 1
        self.machine.pause()

    def await_turn(self, pointer: Pointer, turn: Any) -> None:
        count = pointer.data[int(pointer.offset)]
        self.machine.pause(lambda: bool(count >= turn))
        assert count == turn, "somebody added out of turn"

    def add_diagonals(self, pointer: Pointer, tile: Shared, part: int, lines: Shared) -> None:
        """Takes long: others go on meanwhile."""
        tile = tile.slice(64 * part, 64, dim=1)
        kept = tile.data.clone()
        assert not kept.isnan().any(), "read before it had come"
        for _ in range(8):
            self.machine.pause()
        assert torch.equal(tile.data, kept), "overwritten while it was read"
        keys, queries = kept.shape
        for distance in range(1 - keys, queries):
            place = int(pointer.offset) + keys + distance
            pointer.data[place] += kept.float().diagonal(distance).sum()

    def wait_stores(self, pending: int) -> None:
        task = self.machine.current
        self.machine.pause(lambda: task.stores <= pending)

    def multiply(
        self, left: Any, right: Shared, sums: Any, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async
        if isinstance(sums, Product):
            sums = sums.value
        product = Product(left, right, sums.clone() if use_acc else torch.zeros(()))
        product.value = product.compute()
        assert not product.value.isnan().any(), "read before it had come"
        self.machine.current.products.append(product)
        self.machine.pause()
        return product

    def multiply_rows(self, left: Shared, right: Shared, zeros: Any, width: int) -> Product:
        return self.multiply(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)

    def multiply_blocks(
        self, left: Sequence[Shared], right: Sequence[Shared], zeros: Any, width: int
    ) -> Product:
        product = zeros
        for block, (rows, columns) in enumerate(zip(left, right, strict=True)):
            product = self.multiply(
                rows, columns.permute((1, 0)), product, use_acc=block > 0, is_async=True
            )
        return product

    def products(self, pending: int, deps: list[Product]) -> Any:
        self.machine.pause()
        running = self.machine.current.products
        while len(running) > pending:
            product = running.pop(0)
            assert torch.equal(product.compute(), product.value), "overwritten while it was read"
        assert not any(found in running for found in deps)
        values = tuple(found.value for found in deps)
        return values if len(values) > 1 else values[0]

    def add(self, pointer: Pointer, value: int, sem: str) -> torch.Tensor:
        found = number(int(pointer.data))
        pointer.data += value
        self.machine.pause()
        return found

    def load(self, pointer: Pointer, mask: Any = True, other: int = 0) -> torch.Tensor:
        offset = torch.as_tensor(pointer.offset)
        places = torch.where(torch.as_tensor(mask), offset, 0).long()
        # Places behind the end are errors of torch, and those before the first are not.
        assert not (places < 0).any(), "read before the first element"
        found = pointer.data[places]
        return torch.where(torch.as_tensor(mask), found, other)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        if mask is None:
            assert int(pointer.offset) >= 0, "written before the first element"
            pointer.data.view(-1)[int(pointer.offset)] = value
        else:
            places = pointer.offset[mask].long()
            assert not (places < 0).any(), "written before the first element"
            pointer.data[places] = value[mask].to(pointer.data.dtype)
