"""Which heads' tiles programs take side by side, and how long a causal call waits for its last."""

import heapq
from types import FunctionType, SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from support.brute import lowered_of, visited
from support.cross import PORTABLE

import attndsl
import attndsl.backends.engine.backend as backend_module
from attndsl.backends.device.library import place_of_item
from attndsl.backends.kernels import tile_order
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.tile_order import heads_per_wave
from attndsl.passes.tiles.tile_plan import BACKWARD_KV

CONFIG = Config(128, 128, 4, 2)
TURNS = {
    64: Config(128, 128, 4, 2, 2, 240, persistent=True),
    128: Config(64, 128, 4, 2, 2, 240, persistent=True),
}
"""Configs of backwards that take turns, by head dim."""
PROCESSORS = 132


@triton.jit
def _places(TILES, HEADS, tiles, heads, together, GROUPED: tl.constexpr, DESCENDING: tl.constexpr):
    item = tl.program_id(0)
    tile, head = place_of_item(item, tiles, heads, together, GROUPED, DESCENDING)
    tl.store(TILES + item, tile)
    tl.store(HEADS + item, head)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 7, 3), (3, 4, 4), (5, 6, 2)])
def test_items_are_taken_by_groups_of_heads(device, sizes, descending):
    tiles, heads, together = sizes
    found = torch.full((2, tiles * heads), -1, dtype=torch.int32, device=device)
    _places[(tiles * heads,)](found[0], found[1], tiles, heads, together, True, descending)
    order_of_tiles = range(tiles - 1, -1, -1) if descending else range(tiles)
    wanted, last = [], heads
    for size in [heads % together] * (heads % together > 0) + [together] * (heads // together):
        group = range(last - 1, last - 1 - size, -1)
        wanted += [(tile, head) for tile in order_of_tiles for head in group]
        last -= size
    assert list(zip(*found.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("descending", [False, True])
def test_items_are_taken_head_by_head(device, descending):
    found = torch.full((2, 12), -1, dtype=torch.int32, device=device)
    _places[(12,)](found[0], found[1], 4, 3, 2, False, descending)
    tiles = range(3, -1, -1) if descending else range(4)
    wanted = [(tile, head) for head in range(3) for tile in tiles]
    assert list(zip(*found.tolist(), strict=True)) == wanted


@pytest.fixture
def h200(monkeypatch):
    """A machine like an H200."""
    properties = SimpleNamespace(multi_processor_count=PROCESSORS, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def call_of(batch, heads, kv_heads, length, dim=128):
    rows = SimpleNamespace(
        shape=(batch, heads, length, dim), device=torch.device("cuda"), element_size=lambda: 2
    )
    keys = SimpleNamespace(shape=(batch, kv_heads, length, dim))
    return SimpleNamespace(q=rows, k=keys, v=keys)


def waiting(direction, batch, heads, kv_heads, length):
    """By how much a causal call of bare items takes longer than its share of the work."""
    call = call_of(batch, heads, kv_heads, length)
    together = heads_per_wave(call, PORTABLE[direction], CONFIG, True)
    tiles, all_heads = -(-length // 128), batch * heads
    repeated = 1
    if direction == "backward_kv":
        all_heads, repeated = batch * kv_heads, heads // kv_heads
    ends = [0.0] * PROCESSORS
    sizes = [all_heads % together] * (all_heads % together > 0)
    sizes += [together] * (all_heads // together)
    for size in sizes:
        for tile in range(tiles, 0, -1):
            for _ in range(size):
                heapq.heapreplace(ends, ends[0] + tile * repeated)
    return max(ends) / (sum(ends) / PROCESSORS)


SHAPES = [
    (4, 16, 16, 4096), (2, 16, 16, 8192), (1, 16, 16, 16384), (1, 8, 8, 32768), (1, 32, 32, 4096),
    (2, 12, 12, 8192), (8, 20, 20, 2048), (2, 32, 8, 8192), (3, 25, 5, 6144),
]  # fmt: skip


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("direction", ["forward", "backward_kv"])
def test_no_call_waits_long_for_its_longest_items(direction, shape):
    assert waiting(direction, *shape) < 1.05


def query_tiles(loop, config, tile, length):
    """Query tiles of a key tile that takes turns at them, in the order of visits."""
    queries = length // config.block_m
    known = {"$tile": tile, "$tiles": queries, "$whole": queries, "q_len": length}
    known["kv_len"] = length
    way = 1 if loop.descending else -1
    full, partial = (visited(x, known)[::way] for x in (loop.full, loop.partial))
    if not loop.two_sided:
        return full + partial
    ahead = [index for index in partial if full and way * index < way * full[0]]
    return ahead + full + partial[len(ahead) :]


def time_of(loop, config, shape, handover, masked=True):
    """Until a backward ends whose key tiles take turns, in steps of one query tile each.

    ``handover`` is the time from an addition to the next work tile's, None where nobody waits.
    """
    batch, _, kv_heads, length, _ = shape
    in_turn = handover is not None
    together = heads_per_wave(call_of(*shape), PORTABLE["backward_kv"], config, masked, in_turn)
    tiles, heads = -(-length // config.block_n), batch * kv_heads
    steps = [query_tiles(loop, config, tile, length) for tile in range(tiles)]
    ends, free = [0.0] * PROCESSORS, {}
    place = FunctionType(place_of_item.fn.__code__, {"tl": SimpleNamespace(minimum=min)})
    for item in range(tiles * heads):
        tile, head = place(item, tiles, heads, together, True, loop.descending)
        now = ends[0] + 1.5
        for query in steps[tile]:
            # It adds near the end of a step.
            now = max(now + 0.8, free.get((head, query), 0.0))
            if handover is not None:
                free[head, query] = now + handover
            now += 0.2
        heapq.heapreplace(ends, now)
    return max(ends)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("dim", TURNS)
@pytest.mark.parametrize("shape", [(4, 16, 16, 4096), (2, 16, 16, 8192), (8, 16, 16, 2048)])
@pytest.mark.parametrize("text", ["score", "causal()", "sliding_window(1024)", "kv >= q"])
def test_no_work_tile_waits_long_for_its_turn(text, shape, dim):
    config = TURNS[dim]
    loop = lowered_of(text).sparsity.loop_in_turn(
        BACKWARD_KV, config.block_m, config.block_n, False, False
    )
    masked = text != "score"
    plain, quick, slow = (time_of(loop, config, (*shape, dim), x, masked) for x in (None, 0.6, 1.0))
    assert 0.98 * plain < quick < 1.05 * plain
    assert slow < 1.15 * plain


@pytest.mark.usefixtures("h200")
def test_heads_fit_the_cache():
    def heads(direction, *sizes, masked=True):
        return heads_per_wave(call_of(*sizes), PORTABLE[direction], CONFIG, masked)

    assert heads("forward", 2, 16, 16, 8192) == 8
    assert heads("backward_kv", 2, 16, 16, 8192) == 4
    assert heads("backward_kv", 2, 32, 8, 8192) == 4
    # One head has more items than run at a time, and takes the cache.
    assert heads("backward_kv", 1, 8, 8, 32768) == 1
    # Not as many items as run at a time: these read what they read, side by side or not.
    assert heads("backward_kv", 4, 16, 2, 8192, 256) == 2
    # Heads that share keys go together.
    assert heads("forward", 2, 32, 8, 8192) % 4 == 0
    assert heads("forward", 2, 32, 8, 8192, masked=False) == 4
    assert heads("backward_kv", 2, 32, 8, 8192, masked=False) == 1
    assert heads("forward", 1, 2, 2, 64) == 2
    assert heads("backward_kv", 1, 2, 2, 0) == 2


@pytest.mark.usefixtures("h200")
def test_groups_are_large_where_work_tiles_would_wait_again_and_again():
    def heads(dim, length, masked=True, in_turn=True):
        call = call_of(2, 32, 32, length, dim)
        return heads_per_wave(call, PORTABLE["backward_kv"], TURNS[dim], masked, in_turn)

    assert heads(64, 8192) == 16
    assert heads(64, 2048) == 33
    assert heads(64, 8192, masked=False) == heads(64, 8192, in_turn=False) == 4
    assert heads(128, 8192) == heads(128, 8192, in_turn=False) == 4


def test_kernels_that_are_interpreted_run_one_program_at_a_time():
    assert tile_order.processors_of(torch.device("cpu")) == 1
    x = torch.randn(1, 4, 512, 16)
    call = SimpleNamespace(q=x, k=x, v=x)
    assert heads_per_wave(call, PORTABLE["forward"], CONFIG, True) == 1


@pytest.mark.parametrize("text", ["causal()", "kv >= q", "q >= kv and (h % 2 == 0 or kv < 9)"])
@pytest.mark.parametrize("together", [2, 3, 7])
def test_groups_of_heads_give_what_heads_give(monkeypatch, device, together, text):
    def some(call, kernel, config, masked, in_turn):
        heads = call.k.shape[1] if kernel.loop.own == "kv" else call.q.shape[1]
        return min(together, call.q.shape[0] * heads)

    monkeypatch.setattr(backend_module, "heads_per_wave", some)
    # Two tiles. No call before had this length, whose layout would be used again.
    length = 34 + together
    q = torch.randn(2, 6, length, 16, device=device, requires_grad=True)
    k, v = (torch.randn(2, 3, length, 16, device=device, requires_grad=True) for _ in range(2))
    grad_out = torch.randn_like(q)
    found, wanted = (
        (out, *torch.autograd.grad(out, (q, k, v), grad_out))
        for backend in ("triton", "reference")
        for out in [attndsl.compile(text, backend=backend)(q, k, v)]
    )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
