"""Two kinds of caches, and their owner."""

import gc
import multiprocessing
import os
import threading

import pytest

from attndsl.backends.kernels.modules import Modules
from attndsl.backends.kernels.work_counters import Counts
from attndsl.flex.trace_cache import TraceCache
from attndsl.foundation.caches import CACHES, BoundedCache, Reason, memoised


def statistics_of(name):
    (found,) = (x for x in CACHES.statistics() if x.name == name)
    return found


def test_entries_are_found_until_others_take_their_place():
    cache = BoundedCache("test entries", 8)
    for number in range(100):
        cache.put(number, str(number))
        assert cache.get(number) == str(number)
        assert len(cache) <= 8
    assert cache.get(0) is None
    assert cache.statistics().evictions == 100 - len(cache)


def test_entries_in_use_stay():
    cache = BoundedCache("test entries in use", 8)
    cache.put("hot", 1)
    for number in range(100):
        cache.put(number, number)
        assert cache.get("hot") == 1


def test_one_key_has_one_entry():
    cache = BoundedCache("test keys", 4)
    for value in range(10):
        cache.put("a", value)
    assert (len(cache), cache.get("a")) == (1, 9)


def test_all_values_are_there():
    cache = BoundedCache("test all values", 4)
    for number in range(10):
        cache.put(number, number)
        assert cache.values()[-1] == number
    assert len(cache.values()) == len(cache)


def test_what_is_there_is_not_made():
    cache = BoundedCache("test values", 4)
    made = []

    def make():
        made.append(1)
        return len(made)

    assert [cache.get_or_make("a", make) for _ in range(3)] == [1, 1, 1]
    assert cache.statistics().misses == 1


def test_threads_get_one_value():
    cache = BoundedCache("test threads", 16)
    barrier, found = threading.Barrier(8), []

    def work():
        barrier.wait()
        for key in range(8):
            found.append((key, cache.get_or_make(key, object)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 64
    assert len(set(found)) == 8


def test_a_reason_empties_those_that_have_it():
    own = BoundedCache("test of backends", 4, Reason.BACKENDS)
    other = BoundedCache("test of nothing", 4)
    for cache in (own, other):
        cache.put("a", 1)
    CACHES.invalidate(Reason.KERNELS)
    assert "a" in own
    CACHES.invalidate(Reason.BACKENDS)
    assert ("a" in own, "a" in other) == (False, True)
    CACHES.invalidate(Reason.RESET)
    assert "a" not in other


def test_results_of_functions_are_kept_and_dropped():
    made = []

    @memoised("test results", 4, Reason.KERNELS)
    def twice(x):
        made.append(x)
        return 2 * x

    assert [twice(3), twice(3)] == [6, 6]
    assert made == [3]
    assert statistics_of("test results")[1:4] == (4, 1, 1)
    CACHES.invalidate(Reason.KERNELS)
    assert (twice(3), made) == (6, [3, 3])


def test_caches_of_one_name_are_added_up_and_go_with_their_holders():
    first, second = (BoundedCache("test sums", 4) for _ in range(2))
    first.put("a", 1)
    second.put("b", 1)
    assert statistics_of("test sums").entries == 2
    del second
    gc.collect()
    assert statistics_of("test sums").entries == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forks_have_locks_of_their_own():
    cache = BoundedCache("test forks", 4)
    with cache._lock:
        process = multiprocessing.get_context("fork").Process(target=cache.put, args=("a", 1))
        process.start()
    process.join(20)
    assert process.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("make", [Counts, TraceCache, lambda: Modules(None)])
def test_what_is_no_cache_has_locks_of_its_own_in_forks(make):
    holder = make()
    held, go = threading.Event(), threading.Event()

    def hold():
        with holder._lock:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    # Looked up by the child: the lock is another one there.
    process = multiprocessing.get_context("fork").Process(target=lambda: holder._lock.acquire())
    process.start()
    process.join(20)
    go.set()
    thread.join()
    assert process.exitcode == 0
