"""Lists of tiles are kept for as long as what the mask reads stays as it is, and no longer."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attndsl.backends.kernels import tile_list_cache
from attndsl.backends.kernels.tile_list_cache import KeptLists

CPU = torch.device("cpu")


class Lists:
    """Kept lists whose kernels note what a mask would read."""

    def __init__(self):
        self.kept = KeptLists("test lists")

    def of(self, *tensors, place=()):
        """The values of ``tensors`` as the kernels found them."""

        def make():
            return [torch.stack([x.sum(), x.numel() + x.sum() * 0]) for x in tensors] or [
                torch.zeros(2)
            ]

        return self.kept.of(place, tensors, CPU, make)

    def made_by(self, *tensors, place=()):
        """Whether they were made anew. They are right."""
        before = self.kept.made
        found = self.of(*tensors, place=place)
        for x, seen in zip(tensors, found, strict=bool(tensors)):
            assert seen[0] == x.sum()
        return self.kept.made - before == 1


@pytest.fixture
def lists():
    return Lists()


def test_they_are_made_once(lists):
    doc, start = torch.arange(10), torch.arange(4)
    assert lists.made_by(doc, start)
    assert not lists.made_by(doc, start)
    assert lists.made_by(doc)
    assert lists.made_by(doc, start, place="another stream")
    assert lists.made_by(start, doc)
    assert not lists.made_by(doc, start)
    assert (lists.kept.made, len(lists.kept)) == (4, 4)


def test_without_tensors_they_are_made_once(lists):
    assert lists.made_by()
    assert not lists.made_by()
    with torch.inference_mode():
        assert not lists.made_by()
    assert lists.made_by(place=1)


CHANGES = {
    "in place": lambda x: x.add_(1),
    "an element": lambda x: x.__setitem__(3, 50),
    "through a view": lambda x: x[2:].mul_(3),
    "through detach": lambda x: x.detach().add_(1),
    "through a flat view": lambda x: x.view(2, 5)[1].zero_(),
    "copied": lambda x: x.copy_(torch.arange(10) * 2),
    "as out": lambda x: torch.add(torch.arange(10), 5, out=x),
    "other memory": lambda x: setattr(x, "data", torch.arange(10) + 7),
    "other storage": lambda x: x.set_(torch.arange(10) + 8),
    "another size": lambda x: x.resize_(4),
    "foreach": lambda x: torch._foreach_add_([x], 2),
    "said to have changed": lambda x: (x.data.add_(1), torch.autograd.graph.increment_version(x)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(lists, change, mode):
    doc = torch.arange(10)
    assert lists.made_by(doc)
    with mode():
        CHANGES[change](doc)
    assert lists.made_by(doc)
    assert lists.made_by(doc) is doc.is_inference()


def test_memory_given_by_turns_is_seen(lists):
    """Blocks of memory and addresses come again, and ``data`` changes no version."""
    doc, version = torch.arange(1000), None
    for step in range(30):
        doc.data = torch.full((1000,), step)
        assert version in (None, doc._version)
        version = doc._version
        assert lists.made_by(doc)
        assert not lists.made_by(doc)


def test_a_new_tensor_in_the_place_of_an_old_one_is_another(lists):
    memory, seen = bytearray(800), set()
    for step in range(20):
        doc = torch.frombuffer(memory, dtype=torch.int64)
        memory[0] = step
        seen.add((id(doc), doc.data_ptr(), doc._version))
        assert lists.made_by(doc)
        assert not lists.made_by(doc)
        del doc
    assert len(seen) < 20, "ids, addresses and versions come again"
    assert len(lists.kept) == 0


def test_a_new_count_of_changes_in_the_same_memory_is_another(lists):
    memory, seen = torch.arange(10), set()
    for _ in range(20):
        doc = memory.data
        seen.add((id(doc), doc._version))
        assert lists.made_by(doc)
        assert not lists.made_by(doc)
        del doc
        memory.add_(1)
    assert len(seen) < 20, "ids come again, and each count begins at 0"


def test_views_are_told_apart_and_found_again(lists):
    base = torch.arange(24).view(4, 6)
    assert lists.made_by(base[0])
    assert lists.made_by(base[1])
    assert lists.made_by(base[:, 0])
    assert lists.made_by(base[0, ::2])
    assert lists.made_by(base[0].expand(3, 6))
    assert lists.made_by(base[:3])
    assert lists.made_by(base[:2])
    assert lists.made_by(base[:, :4])
    assert lists.made_by(base[:, :4].mT)
    assert not lists.made_by(base[1])
    assert not lists.made_by(base.view(-1)[6:12])
    base[3, 3] = 77
    # The version is that of the whole.
    assert lists.made_by(base[0])
    own = base[0]
    assert not lists.made_by(own)
    del base
    gc.collect()
    assert not lists.made_by(own)


def test_inference_shows_no_versions(lists):
    doc = torch.arange(10)
    with torch.inference_mode():
        of_inference = torch.arange(10)
        for _ in range(2):
            assert lists.made_by(of_inference)
            assert lists.made_by(doc)
    for _ in range(2):
        assert lists.made_by(of_inference)
        assert lists.made_by(doc, of_inference)
    assert lists.made_by(doc)
    assert not lists.made_by(doc)


def test_what_fused_optimizers_write_is_not_trusted(lists):
    """Torch does not count it."""
    limit = torch.rand(8, requires_grad=True)
    optimizer = torch.optim.AdamW([limit], lr=0.1, fused=True)
    limit.grad = torch.ones(8)
    for _ in range(3):
        for read in (limit, limit[2:]):
            assert lists.made_by(read)
            with torch.no_grad():
                assert lists.made_by(read)
        optimizer.step()
    still = torch.rand(8)
    assert lists.made_by(still)
    assert not lists.made_by(still)


def test_results_of_replayed_graphs_are_not_trusted(lists):
    """torch.compile's trees of CUDA graphs give the same tensor with other values each time."""
    doc = torch.arange(10)
    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(doc)
    try:
        for _ in range(2):
            assert lists.made_by(doc)
            assert lists.made_by(doc[1:])
    finally:
        torch._C._remove_cached_tensor(doc)
        torch._C._set_cached_tensors_enabled(False)
    assert lists.made_by(doc)
    assert not lists.made_by(doc)


@pytest.mark.parametrize("of", ["tensor", "view"])
def test_their_memory_goes_with_the_tensor(lists, of):
    doc = torch.arange(10)
    given = doc if of == "tensor" else doc[2:]
    memory = weakref.ref(lists.of(given)[0])
    gc.disable()
    try:
        assert memory() is not None
        assert len(lists.kept) == 1
        del doc, given
        assert memory() is None
        assert len(lists.kept) == 0
    finally:
        gc.enable()


def test_the_least_recently_used_go_first(lists, monkeypatch):
    monkeypatch.setattr(tile_list_cache, "_MOST_LISTS", 3)
    docs = [torch.full((4,), n) for n in range(4)]
    for doc in docs[:3]:
        assert lists.made_by(doc)
    assert not lists.made_by(docs[0])
    assert lists.made_by(docs[3])
    assert not lists.made_by(docs[0])
    assert len(lists.kept) == 3
    assert lists.made_by(docs[1])


def test_lists_that_are_made_again_are_recent(lists, monkeypatch):
    monkeypatch.setattr(tile_list_cache, "_MOST_LISTS", 2)
    first, second, third = (torch.full((4,), n) for n in range(3))
    assert lists.made_by(first)
    assert lists.made_by(second)
    first.add_(1)
    assert lists.made_by(first)
    assert lists.made_by(third)
    assert not lists.made_by(first)
    assert lists.made_by(second)


def test_a_call_has_its_lists_until_it_ends(lists):
    doc = torch.arange(10)
    for _ in range(2):
        found = lists.of(doc)
    del doc
    assert len(lists.kept) == 0
    assert found[0][0] == 45
    doc = torch.arange(10)
    found = lists.of(doc)
    del doc
    assert found[0][0] == 45


def test_memory_is_bounded(lists, monkeypatch):
    docs = [torch.full((4,), n) for n in range(3)]
    size = lists.of(docs[0])[0].nbytes
    monkeypatch.setattr(tile_list_cache, "_MOST_BYTES", 2 * size)
    gone = weakref.ref(lists.of(docs[0])[0])
    assert lists.made_by(docs[1])
    assert lists.made_by(docs[2])
    assert gone() is None
    assert len(lists.kept) == 2
    monkeypatch.setattr(tile_list_cache, "_MOST_BYTES", size - 1)
    for _ in range(2):
        assert lists.made_by(docs[0])
    assert len(lists.kept) == 2


def test_what_fails_is_not_kept(lists):
    doc = torch.arange(4)

    def fail():
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        lists.kept.of((), [doc], CPU, fail)
    assert lists.made_by(doc)


def test_a_change_meanwhile_is_seen(lists):
    doc = torch.arange(4)

    def make():
        found = doc.clone()
        doc.add_(1)
        return [found]

    lists.kept.of((), [doc], CPU, make)
    assert lists.made_by(doc)


def test_threads(lists):
    """Each has tensors of its own and some that all read, while others come and go."""
    shared = [torch.full((50,), n) for n in range(3)]
    wrong = []

    def work(number):
        own = torch.full((50,), number)
        for step in range(200):
            if step % 3 == 0:
                own.add_(1)
            for doc in (own, shared[step % 3], torch.full((50,), step)):
                if lists.of(doc)[0][0] != doc.sum():
                    wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(lists.kept) <= 3


class Changed:
    """Tensors that a random program changes, and the calls that read them."""

    def __init__(self):
        self.lists = Lists()
        self.tensors = [torch.arange(8), torch.arange(12).view(3, 4)]
        self.step = 0

    def run(self, action, number, place):
        self.step += 1
        number %= len(self.tensors)
        x = self.tensors[number]
        match action:
            case "read":
                self.lists.made_by(x, place=place)
            case "read two":
                self.lists.made_by(x, self.tensors[0], place=place)
            case "read a view":
                self.lists.made_by(x.reshape(-1)[place:], place=place)
            case "write":
                x.add_(self.step)
            case "write a view":
                x.view(-1)[place:].mul_(3)
            case "give memory":
                x.data = torch.full_like(x, self.step)
            case "replace":
                self.tensors[number] = torch.full(x.shape, self.step)
            case "keep a view":
                self.tensors.append(x.view(-1)[place:])
            case "copy":
                self.tensors.append(x.clone())
            case "drop":
                if len(self.tensors) > 1:
                    del self.tensors[number]


ACTIONS = (
    "read", "read two", "read a view", "write", "write a view", "give memory", "replace",
    "keep a view", "copy", "drop",
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.integers(0, 2)),
        min_size=5, max_size=40,
    )
)  # fmt: skip
def test_any_changes(actions):
    """``made_by`` compares what was kept with what is."""
    changed = Changed()
    for action in actions:
        changed.run(*action)
    for number in range(len(changed.tensors)):
        changed.run("read", number, 0)
        assert not changed.lists.made_by(changed.tensors[number], place=0)


def test_a_graph_that_is_captured_ends_it(lists, monkeypatch):
    """Replays write tensors whose versions stay."""
    device = torch.device("cuda")
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    doc = torch.arange(10)

    def made(*tensors):
        before = lists.kept.made
        lists.kept.of((), tensors, device, lambda: [torch.zeros(1)])
        return lists.kept.made > before

    assert made(doc)
    assert not made(doc)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", object())
    assert made(doc)
    assert made(doc)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    assert not made(doc)
    assert made()
    capturing[0] = True
    assert made(doc)
    assert made()
    capturing[0] = False
    assert made(doc)
    assert made(doc)
    # Lists that read no tensor are the same whatever was replayed.
    assert not made()
