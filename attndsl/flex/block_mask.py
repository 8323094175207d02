"""``create_block_mask``, from the expression of the mask rather than from all its pairs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import create_block_mask as torch_blocks

from attndsl.call.call_slice import CallSizes
from attndsl.call.value_checks import has_values
from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.inspection.tile_search import find_tiles, kinds_by_pairs
from attndsl.passes.int_ranges import POSITION_LIMIT
from attndsl.passes.tiles.tile_plan import EMPTY, FORWARD, FULL, PARTIAL
from attndsl.runtime.kernel_source import device_of

from .compiled_traces import compiled, near, position_ranges
from .operand_checks import number_of
from .python_spans import refusal_at
from .trace_cache import default_traces
from .tracing import arguments_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attndsl.inspection.tilemap import TileMap

    from .tracing import Mod

_BLOCK = 128
"""torch's size of a block where none is given."""
_BLOCKS = frozenset({
    "mask_mod", "BLOCK_SIZE", "seq_lengths", "kv_num_blocks", "kv_indices", "full_kv_num_blocks",
    "full_kv_indices",
})  # fmt: skip
"""Attributes that say which pairs are live."""
_FIELDS = tuple(
    name for name in inspect.signature(TorchBlockMask.__init__).parameters if name != "self"
)
"""All attributes of torch's masks."""
_SEPARATES = "separate_full_blocks" in inspect.signature(torch_blocks).parameters
"""True if torch's function knows the argument: with torch 2.11 it does not."""


class BlockMask(TorchBlockMask):
    """A ``BlockMask`` of torch, which torch's own ``flex_attention`` takes too.

    One that :func:`create_block_mask` made remembers that its blocks say what its ``mask_mod``
    says: calls then derive the work from the mask, and the blocks are for looking at. Once
    ``mask_mod`` is replaced or the mask is sliced, calls go by the blocks, as torch does.
    """

    by_mask: bool = False
    """True if the blocks were derived from ``mask_mod``, and neither has changed since."""
    varies: tuple[bool, bool] = (True, True)
    """Flags for batch entries and for heads: True if the mask varies with them."""
    tiles: TileMap | None = None
    """The blocks as calls of :class:`attndsl.Attention` take them, where they have use for them."""

    def derived(self, batch: int, heads: int) -> bool:
        """Return True if the blocks say no more than the mask for a call of these sizes."""
        own = self.kv_num_blocks.shape[:2]
        covered = all(
            not varies or size == wanted
            for varies, size, wanted in zip(self.varies, own, (batch, heads), strict=False)
        )
        return self.by_mask and covered

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; blocks or a ``mask_mod`` set by hand are not derived any more."""
        object.__setattr__(self, name, value)
        if name in _BLOCKS:
            object.__setattr__(self, "by_mask", False)

    def to(self, device: torch.device | str) -> BlockMask:
        """The same on ``device``."""
        tiles = None if self.tiles is None else self.tiles.to(device)
        return self._like(super().to(device), tiles)

    def __getitem__(self, index: Any) -> BlockMask:
        """Blocks of some batch entries, heads and rows; its ``mask_mod`` has to be set anew."""
        return _adopt(super().__getitem__(index))

    @classmethod
    def from_kv_blocks(
        cls, kv_num_blocks: torch.Tensor, kv_indices: torch.Tensor, *args: Any, **kwargs: Any
    ) -> BlockMask:
        """A block mask of listed blocks, as torch's; lists may be shorter than a row of blocks.

        torch takes their width for the number of blocks in a row. Where ``seq_lengths`` says that
        there are more, the lists are filled up.
        """
        taken = inspect.signature(TorchBlockMask.from_kv_blocks).bind(
            kv_num_blocks, kv_indices, *args, **kwargs
        )
        given = taken.arguments
        if given.get("seq_lengths") is not None:
            size = given.get("BLOCK_SIZE", _BLOCK)
            columns = -(-given["seq_lengths"][1] // (size if isinstance(size, int) else size[1]))
            for name in ("kv_indices", "full_kv_indices"):
                indices = given.get(name)
                if indices is not None and indices.shape[-1] < columns:
                    short = columns - indices.shape[-1]
                    given[name] = torch.nn.functional.pad(indices, (0, short))
        made: BlockMask = super().from_kv_blocks(*taken.args, **taken.kwargs)
        return made

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The upper left corner of these lengths, which are not above the mask's own.

        Raises:
            ArgumentError: A length is above the mask's own.
        """
        if new_q_len > self.seq_lengths[0] or new_kv_len > self.seq_lengths[1]:
            raise ArgumentError(
                f"a block mask of {self.seq_lengths[0]} x {self.seq_lengths[1]} cannot grow to "
                f"{new_q_len} x {new_kv_len}",
                hint="make one of these lengths with create_block_mask",
            )
        rows, columns = self.BLOCK_SIZE
        down, across = -(-new_q_len // rows), -(-new_kv_len // columns)

        def cropped(
            numbers: torch.Tensor, indices: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return _ordered(listed_blocks(numbers, indices, across)[:, :, :down])

        numbers, indices = cropped(self.kv_num_blocks, self.kv_indices)
        full: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            full = cropped(self.full_kv_num_blocks, self.full_kv_indices)
        made = self.from_kv_blocks(
            numbers, indices, *full,
            BLOCK_SIZE=self.BLOCK_SIZE, mask_mod=self.mask_mod, seq_lengths=(new_q_len, new_kv_len),
            compute_q_blocks=self.q_indices is not None,
        )  # fmt: skip
        return self._like(made, None)

    def _like(self, other: TorchBlockMask, tiles: TileMap | None) -> BlockMask:
        made = _adopt(other)
        made.by_mask, made.varies, made.tiles = self.by_mask, self.varies, tiles
        return made


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The blocks of a mask; like torch's function, but no pair is looked at where none need be.

    Args:
        mask_mod: A function of ``(b, h, q_idx, kv_idx)``.
        B: Batch entries that the mask tells apart; None where it does not.
        H: The same of query heads.
        Q_LEN: Number of queries.
        KV_LEN: Number of keys.
        device: Device of the captured tensors; by default the accelerator, or the CPU.
        BLOCK_SIZE: Rows and columns of a block, or one number for both.
        _compile: Has no effect: nothing is gained by it here.
        separate_full_blocks: Whether blocks without a dead pair are listed apart.
        compute_dq_write_order: For torch's FLASH backend only, and refused.
        dq_kv_order: The order of that.

    Within a graph of ``torch.compile`` torch's own function finds the blocks, by all pairs. Calls
    of :func:`.flex_call.flex_attention` go by ``mask_mod`` and leave them to the compiler, which
    drops them.

    Raises:
        TraceError: The function cannot be traced.
        ArgumentError: A size that cannot be.
        UnsupportedError: ``compute_dq_write_order`` is asked for.
    """
    if torch.compiler.is_dynamo_compiling() and not compute_dq_write_order:
        # Dynamo follows torch's function. Calls go by the mask, so compilers drop the blocks.
        more = {} if separate_full_blocks or not _SEPARATES else {"separate_full_blocks": False}
        blocks = _adopt(
            torch_blocks(mask_mod, B, H, Q_LEN, KV_LEN, _device(device), BLOCK_SIZE, **more)
        )
        if not (separate_full_blocks or _SEPARATES):
            blocks = _adopt(_in_one_list(blocks))
        blocks.by_mask, blocks.varies = True, (B is not None, H is not None)
        return blocks
    batch, heads = (1 if size is None else number_of(size) for size in (B, H))
    made: BlockMask = _CREATE(
        mask_mod, CallSizes(number_of(Q_LEN), number_of(KV_LEN), batch, heads), device, BLOCK_SIZE,
        separate_full_blocks, dq_kv_order if compute_dq_write_order else None,
    )  # fmt: skip
    return made


def _create(
    mask_mod: Mod, sizes: CallSizes, device: torch.device | str | None,
    block_size: int | tuple[int, int], separate_full_blocks: bool, write_order: bool | None,
) -> BlockMask:  # fmt: skip
    """See :func:`create_block_mask`."""
    if write_order is not None:
        raise UnsupportedError(
            f"compute_dq_write_order, with dq_kv_order={write_order}, is of torch's FLASH backend",
            hint="drop it: torch.use_deterministic_algorithms(True) makes gradients deterministic",
        )
    if arguments_of(mask_mod) == 5:
        raise refusal_at(
            getattr(mask_mod, "__code__", None),
            "create_block_mask got a function of 5 arguments",
            "pass a mask_mod, a function of (b, h, q_idx, kv_idx)",
        )
    device = _device(device)
    block = tuple(block_size) if isinstance(block_size, tuple | list) else (block_size,) * 2
    if len(block) != 2 or not all(type(size) is int and 0 < size < 1 << 63 for size in block):
        raise ArgumentError(
            f"BLOCK_SIZE is {block_size!r}", hint="pass a whole number, 1 or more, or two of them"
        )
    rows, columns = block
    batch, heads, q_len, kv_len = sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len
    for name, size in (("B", batch), ("H", heads), ("Q_LEN", q_len), ("KV_LEN", kv_len)):
        if type(size) is not int or not 0 <= size < POSITION_LIMIT:
            raise ArgumentError(f"{name} is {size!r}", hint="pass a whole number, 0 or more")
    lengths = position_ranges(batch, heads, q_len, kv_len)
    traced = default_traces().trace(None, mask_mod, torch.float32, device, lengths)
    attention = compiled(traced.text, "auto")
    named = near(traced.captures, device)
    call = attention.call_of_lengths(named, q_len, kv_len, batch, heads, device=device)
    tiles = None
    if not _may_search(device, named.values()):
        # The search reads numbers, and a graph has to find the blocks anew in each run.
        kinds = kinds_by_pairs(attention.lowered, call, rows, columns)
    else:
        tiles = find_tiles(attention.lowered, call, rows, columns, FORWARD.name, exact=True)
        kinds = tiles.kinds
    kinds = kinds.expand(batch, heads, -1, -1).clone()
    # torch counts a ragged block as partial: its pairs beyond the lengths are dead there.
    for ragged in (kinds[:, :, q_len // rows :], kinds[..., kv_len // columns :]):
        ragged.masked_fill_(ragged == FULL, PARTIAL)
    listed = (kinds == PARTIAL) if separate_full_blocks else (kinds != EMPTY)
    numbers, indices = _ordered(listed)
    full: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if separate_full_blocks:
        full = _ordered(kinds == FULL)
    made = BlockMask.from_kv_blocks(
        numbers, indices, *full, BLOCK_SIZE=(rows, columns), mask_mod=mask_mod,
        seq_lengths=(q_len, kv_len),
    )  # fmt: skip
    made.by_mask = True
    maps = attention.lowered.sparsity.maps(2, 2)
    made.varies = (maps[0] == 2, maps[1] == 2)
    loop = attention.lowered.sparsity.loop(FORWARD, rows, columns, False, False)
    # Kernels compute closed forms faster than they read them.
    made.tiles = None if loop.listed is None else tiles
    return made


def _may_search(device: torch.device, captures: Iterable[Any]) -> bool:
    """Return True if blocks may be found by evaluating the mask on the values of captures."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    made = torch.empty(0, device=device)
    return all(has_values(x) for x in (made, *captures) if isinstance(x, torch.Tensor))


def _device(given: torch.device | str | None) -> torch.device:
    """Device of the captured tensors: by default the accelerator, or the CPU without one."""
    if given is None:
        given = torch.accelerator.current_accelerator() or "cpu"
    return device_of(given)


_REASON = (
    "attndsl.flex.create_block_mask with compute_dq_write_order is refused: drop that argument"
)
_CREATE: Any = torch.compiler.disable(_create, reason=_REASON)  # type: ignore[no-untyped-call]


def listed_blocks(numbers: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Table of the blocks that each row lists, out of ``columns``: bool, of four dims.

    Args:
        numbers: (..., rows), how many blocks each row lists.
        indices: (..., rows, most), the blocks, the listed ones first.
        columns: Number of blocks in a row.
    """
    most = indices.shape[-1]
    listed = torch.arange(most, device=indices.device) < numbers.unsqueeze(-1)
    # What is not listed goes to one column more, which is then dropped. So do blocks beyond the
    # last column, which have no pair.
    inside = (indices >= 0) & (indices < columns)
    places = torch.where(listed & inside, indices, columns).long()
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    table = table.scatter(-1, places, listed)[..., :columns]
    return table.reshape((1,) * (4 - table.dim()) + tuple(table.shape))


def _ordered(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and indices of the chosen blocks of each row, the chosen ones first."""
    indices = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1).to(torch.int32), indices.to(torch.int32)


def _adopt(other: TorchBlockMask) -> BlockMask:
    """A mask of torch's as one of ours, whose blocks count."""
    if isinstance(other, BlockMask):
        return other
    made = BlockMask.__new__(BlockMask)
    # One by one, since Dynamo follows no change of a whole __dict__ with torch 2.11.
    for name in _FIELDS:
        setattr(made, name, getattr(other, name))
    return made


def _in_one_list(blocks: BlockMask) -> TorchBlockMask:
    """The mask with its full blocks among the others, as ``separate_full_blocks=False`` says."""
    listed = listed_blocks(blocks.kv_num_blocks, blocks.kv_indices, blocks.kv_indices.shape[-1])
    if blocks.full_kv_num_blocks is not None and blocks.full_kv_indices is not None:
        columns = blocks.full_kv_indices.shape[-1]
        listed |= listed_blocks(blocks.full_kv_num_blocks, blocks.full_kv_indices, columns)
    numbers, indices = _ordered(listed)
    return TorchBlockMask.from_kv_blocks(
        numbers, indices, BLOCK_SIZE=blocks.BLOCK_SIZE, mask_mod=blocks.mask_mod,
        seq_lengths=blocks.seq_lengths,
    )  # fmt: skip
