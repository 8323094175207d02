"""Channels between a kernel's producer and its consumers, in shared memory.

A :class:`~.records.Channel` has stages with two barriers each. The producer acquires a stage, fills
it and commits it; each consumer waits for it, reads it and releases it. The names are those of
CUTLASS's pipelines. All uses of ``mbarrier`` are here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .records import KeyItem, QueryItem, Slot, Turn
from .triton_compat import tma_load


@gluon.jit
def slot_of(count, STAGES: gl.constexpr):
    """Slot of tile number ``count`` among STAGES of them.

    As ``count % STAGES`` and ``count // STAGES & 1``. Compilers do not know that counts are not
    negative: what they make of a division takes registers from others.
    """
    if STAGES == 1 or STAGES == 2 or STAGES == 4:
        stage = count & (STAGES - 1)
        phase = (count >> (STAGES // 2)) & 1
    else:
        stage = count % STAGES
        phase = (count // STAGES) & 1
    return Slot(stage, phase)


@gluon.jit
def allocate_tiles(desc, NUMBER: gl.constexpr):
    """Shared memory for ``NUMBER`` tiles of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [NUMBER] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def allocate_barriers(NUMBER: gl.constexpr):
    """Barriers of ``NUMBER`` stages, before :func:`init_barrier`."""
    return gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init_barrier(barriers, stage, ARRIVALS: gl.constexpr):
    """Make the barrier of a stage complete its phases by so many arrivals."""
    mbarrier.init(barriers.index(stage), count=ARRIVALS)


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers of ``NUMBER`` stages, whose phases complete by so many arrivals."""
    found = allocate_barriers(NUMBER)
    for stage in gl.static_range(NUMBER):
        init_barrier(found, stage, ARRIVALS)
    return found


@gluon.jit
def new_barrier(ARRIVALS: gl.constexpr):
    """The barrier of a channel of one stage; no row of several.

    Each dimension of whatever a warpgroup starts with takes 4 bytes of shared memory.
    """
    found = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(found, count=ARRIVALS)
    return found


@gluon.jit
def barrier_at(barriers, stage):
    """The barrier of a stage; a :func:`new_barrier` itself."""
    return barriers if barriers.rank == 1 else barriers.index(stage)


@gluon.jit
def producer_acquire(channel, slot):
    """Wait until the consumers have released the stage, if they ever do."""
    if channel.empty is not None:
        mbarrier.wait(barrier_at(channel.empty, slot.stage), slot.phase ^ 1)


@gluon.jit
def producer_expect(channel, slot, BYTES: gl.constexpr):
    """Commit the stage as soon as so many bytes have come; returns its barrier."""
    ready = barrier_at(channel.full, slot.stage)
    mbarrier.expect(ready, BYTES)
    return ready


@gluon.jit
def producer_load(channel, slot, place):
    """Load the tile at ``place``, with its tangent if it has one, and commit the stage."""
    tangent = channel.tangent
    SIZE: gl.constexpr = channel.desc.block_type.nbytes
    ready = producer_expect(channel, slot, SIZE if tangent is None else 2 * SIZE)
    tma_load(channel.desc, place, ready, channel.data.index(slot.stage))
    if tangent is not None:
        tma_load(tangent.desc, place, ready, tangent.data.index(slot.stage))


@gluon.jit
def producer_load_blocks(channel, slot, place, NUMBER: gl.constexpr):
    """Load a tile in NUMBER blocks of 64 columns, one place of data each, and commit the stage."""
    if NUMBER == 1:
        producer_load(channel, slot, place)
    else:
        ready = producer_expect(channel, slot, NUMBER * channel.desc.block_type.nbytes)
        for block in gl.static_range(NUMBER):
            own = channel.data.index(slot.stage * NUMBER + block)
            tma_load(channel.desc, [place[0], place[1], place[2], 64 * block], ready, own)


@gluon.jit
def producer_commit(channel, slot):
    """Let the consumers have a stage that was written."""
    mbarrier.arrive(barrier_at(channel.full, slot.stage), count=1)


@gluon.jit
def consumer_wait(channel, slot):
    """Wait until the stage has been committed."""
    mbarrier.wait(barrier_at(channel.full, slot.stage), slot.phase)


@gluon.jit
def consumer_release(channel, slot, pred=True):
    """Say that this consumer has read the stage, where ``pred``."""
    mbarrier.arrive(barrier_at(channel.empty, slot.stage), count=1, pred=pred)


@gluon.jit
def consumer_release_by(channel, slot, PER_THREAD: gl.constexpr):
    """Release the stage; PER_THREAD, by each thread of the warpgroup (128 arrivals).

    Such a thread says so when its copies by cp.async have come. There are none: the plain way, once
    for all, makes the four warps wait for each other first. It waits for no load of a thread's own
    from there: what was loaded must have been used before.
    """
    if PER_THREAD:
        async_copy.mbarrier_arrive(barrier_at(channel.empty, slot.stage), increment_count=False)
    else:
        consumer_release(channel, slot)


@gluon.jit
def pack_fields(values, memory):
    """Write up to 16 integers, each known to all threads."""
    places = gl.arange(0, 16, layout=gl.BlockedLayout([1], [32], [4], [0]))
    found = places * 0
    for number in gl.static_range(len(values)):
        found = gl.where(places == number, values[number], found)
    memory.store(found)


@gluon.jit
def read_field(memory, NUMBER: gl.constexpr):
    """Number ``NUMBER`` of :func:`pack_fields`, known to all threads."""
    return gl.sum(memory.slice(NUMBER, 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def item_memory(CONSUMERS: gl.constexpr):
    """Stage in which the producer says what work tiles are; barriers full, empty."""
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    item = gl.allocate_shared_memory(gl.int32, [16], ROW)
    return item, new_barrier(1), new_barrier(CONSUMERS)


@gluon.jit
def acquire_item(items, work_index):
    """Wait until the consumers know what the work tile before was."""
    mbarrier.wait(items.empty, (work_index & 1) ^ 1)


@gluon.jit
def announce_item(item, items):
    """Tell the consumers what the work tile is."""
    pack_fields(item, items.data)
    mbarrier.arrive(items.full, count=1)


@gluon.jit
def await_item(items, work_index):
    """Wait until :func:`announce_item` has told number ``work_index``."""
    mbarrier.wait(items.full, work_index & 1)


@gluon.jit
def release_item(items):
    """Say that this consumer knows what the work tile is."""
    mbarrier.arrive(items.empty, count=1)


@gluon.jit
def query_item(items):
    """The work tile of a forward that :func:`announce_item` told."""
    item = items.data
    return QueryItem(
        work_tile=read_field(item, 0),
        tile=read_field(item, 1),
        b=read_field(item, 2),
        h=read_field(item, 3),
        hkv=read_field(item, 4),
        full=read_field(item, 5),
        partial=read_field(item, 6),
        first_live=read_field(item, 7),
        first_full=read_field(item, 8),
        nothing=read_field(item, 9) != 0,
        uses_fixed_max=read_field(item, 10) != 0,
    )


@gluon.jit
def key_item(items):
    """The work tile of a backward that :func:`announce_item` told."""
    item = items.data
    return KeyItem(
        work_tile=read_field(item, 0),
        tile=read_field(item, 1),
        b=read_field(item, 2),
        hkv=read_field(item, 3),
    )


@gluon.jit
def turn_at(place):
    """The :class:`~.records.Turn` that :func:`pack_fields` wrote."""
    return Turn(place=read_field(place, 0), turn=read_field(place, 1))
