"""The processes that answer: killed where they take too long, and replaced."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest

from attndsl.play import worker_pool
from attndsl.play.answers import answer
from attndsl.play.messages import PageRequest, PictureCall, RequestKind
from attndsl.play.worker_pool import Helper, Helpers

STUB = """
import json, os, sys, time

def serve():
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        text = given["asked"]["text"]
        if text.startswith("sleep"):
            time.sleep(float(text.split()[1]))
        if text == "half":
            print('{"numb', end="", flush=True)
            time.sleep(60)
        if text == "die":
            os._exit(3)
        found = {"problems": [], "result": {"text": text, "pid": os.getpid()}}
        print(json.dumps({"number": given["number"], "answer": found}), flush=True)

while True:
    child = os.fork()
    if child == 0:
        serve()
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
    print(flush=True)
"""
SLOW = "\n".join(
    [f"param n{i}: int = {3 + i}" for i in range(20)]
    + ["mask = " + " and ".join(f"strided(n{x}, n{y})" for x in range(10) for y in range(10, 20))]
)
"""Takes seconds."""


def run(work, seconds=1.0, command=(sys.executable, "-c", STUB)):
    """``work(helper)``, with a helper that ends after it."""

    async def whole():
        helper = Helper(seconds, command)
        await helper.start()
        try:
            return await work(helper)
        finally:
            await helper.stop()

    return asyncio.run(whole())


def asked(text):
    return PageRequest(RequestKind.PICTURE, text)


def test_answers_come_in_order():
    async def work(helper):
        return await asyncio.gather(*(helper.ask(asked(f"{i}")) for i in range(10)))

    found = run(work)
    assert [each["result"]["text"] for each in found] == [f"{i}" for i in range(10)]
    assert len({each["result"]["pid"] for each in found}) == 1


def test_what_takes_too_long_is_stopped_and_the_next_is_answered():
    async def work(helper):
        begin = time.monotonic()
        slow = await helper.ask(asked("sleep 60"))
        taken = time.monotonic() - begin
        return slow, taken, await helper.ask(asked("next"))

    slow, taken, after = run(work)
    assert slow["result"] is None
    assert slow["problems"][0]["message"] == "this takes longer than 1 seconds, and was stopped"
    assert taken < 20
    assert after["result"]["text"] == "next"


def test_half_an_answer_is_none():
    async def work(helper):
        await helper.ask(asked("half"))
        return await helper.ask(asked("next"))

    assert run(work)["result"]["text"] == "next"


def test_a_process_that_dies_is_replaced():
    async def work(helper):
        return await helper.ask(asked("die")), await helper.ask(asked("next"))

    died, after = run(work, seconds=60)
    assert "memory" in died["problems"][0]["message"]
    assert after["result"]["text"] == "next"


def test_nobody_waits_for_what_nobody_wants():
    async def work(helper):
        first = await helper.ask(asked("first"))
        task = asyncio.create_task(helper.ask(asked("sleep 60")))
        await asyncio.sleep(0.2)
        task.cancel()
        begin = time.monotonic()
        after = await helper.ask(asked("next"))
        assert task.cancelled()
        return first, time.monotonic() - begin, after

    first, taken, after = run(work, seconds=50)
    assert taken < 20
    assert after["result"]["text"] == "next"
    assert after["result"]["pid"] != first["result"]["pid"]


def test_what_is_soon_done_is_not_killed():
    async def work(helper):
        first = await helper.ask(asked("first"))
        task = asyncio.create_task(helper.ask(asked("sleep 0.1")))
        await asyncio.sleep(0.02)
        task.cancel()
        after = await helper.ask(asked("next"))
        return first["result"]["pid"] == after["result"]["pid"], after["result"]["text"]

    assert run(work, seconds=50) == (True, "next")


def test_many_requests_are_refused(monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_WAITING", 2)

    async def work(helper):
        tasks = [asyncio.create_task(helper.ask(asked("sleep 0.2"))) for _ in range(3)]
        return await asyncio.gather(*tasks)

    found = run(work, seconds=50)
    assert [each["result"] is None for each in found] == [False, False, True]
    assert "too many" in found[2]["problems"][0]["message"]


def test_a_process_that_does_not_start_is_said():
    async def work(helper):
        return await helper.ask(asked("x"))

    found = run(work, command=(sys.executable, "-c", "pass"))
    assert found["problems"][0]["message"] == "the compiler has ended"


def test_a_process_that_was_killed_from_outside_is_started_again():
    async def work(helper):
        await helper.ask(asked("first"))
        running = helper._running
        running.process.kill()
        os.kill(running.pid, 9)
        await running.process.wait()
        await asyncio.sleep(0.1)
        return await helper.ask(asked("next"))

    assert run(work, seconds=50)["result"]["text"] == "next"


@pytest.mark.parametrize("text", ["sleep 0.5", "sleep 60"])
def test_a_parent_that_is_killed_in_the_middle_of_a_request_takes_no_other_along(text):
    """Its child goes on, and says what it found where others no longer wait for it."""

    async def work(helper):
        await helper.ask(asked("first"))
        old = helper._running
        task = asyncio.create_task(helper.ask(asked(text)))
        await asyncio.sleep(0.2)
        old.process.kill()
        found = [await task, await helper.ask(asked("next"))]
        await old.process.wait()
        found += [await helper.ask(asked(f"{number}")) for number in range(3)]
        return found, old.pid, helper._running is old

    found, child, same = run(work, seconds=2.0)
    assert (found[0]["result"] or {"text": "sleep 60"})["text"] == text
    assert [each["result"]["text"] for each in found[2:]] == ["0", "1", "2"]
    assert found[1]["result"]["text"] == "next"
    assert not same
    end = time.monotonic() + 20
    while is_there(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_no_process_stays_behind():
    async def work(helper):
        await helper.ask(asked("first"))
        return helper._running.pid, helper._running.process.pid

    for pid in run(work):
        end = time.monotonic() + 20
        while is_there(pid):
            assert time.monotonic() < end
            time.sleep(0.05)


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


WARM = """
import sys, torch
from attndsl.play.answers import answer
from attndsl.play.examples import examples
from attndsl.play.messages import PageRequest, RequestKind
from attndsl.play.worker import warm_up
warm_up()
before = set(sys.modules)
texts = [e.text for group in examples() for e in group.examples if e.name != "in_window"]
for text in [*texts, "q - kv < 1 + 1", "x = q + 1; mask = x + x + 1 > kv", "q >= k"]:
    answer(PageRequest(RequestKind.PICTURE, text))
print(sorted(set(sys.modules) - before))
"""


def test_nothing_is_left_to_import_for_pictures():
    done = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
def test_the_compilers_own_process():
    """One process for all of this, since it takes seconds to start."""

    async def work(helper):
        text = "param w: int = 9\nmask = causal() and q - kv < w"
        same = await helper.ask(PageRequest(RequestKind.PICTURE, text))
        here = answer(PageRequest(RequestKind.PICTURE, text)).as_json()
        assert same == json.loads(json.dumps(here))
        # A text that prints, or deep ones, end no process.
        for hostile in ("(" * 9000, "x = 1\n" * 2700, "\0"):
            assert (await helper.ask(PageRequest(RequestKind.PICTURE, hostile)))["problems"]
        helper.seconds = 0.4
        slow = await helper.ask(PageRequest(RequestKind.DETAILS, SLOW))
        assert "longer than 0.4 seconds" in slow["problems"][0]["message"]
        helper.seconds = 60.0
        begin = time.monotonic()
        assert (await helper.ask(PageRequest(RequestKind.PICTURE, "q >= kv")))["result"]
        # A fork of what has been imported, not a new import, which takes seconds.
        assert time.monotonic() - begin < 5
        large = "tensor t[1024, 1024, 1024]: float\nscore = score + t[q, kv, 0]"
        found = await helper.ask(
            PageRequest(RequestKind.PICTURE, large, view=PictureCall(q_len=1024, kv_len=1024))
        )
        assert "memory" in found["problems"][0]["message"]
        assert (await helper.ask(PageRequest(RequestKind.PICTURE, "q >= kv")))["result"]

    run(work, 60.0, worker_pool.COMMAND)


def test_helpers_share_processes():
    async def work():
        one, other = (Helper(9.0, (sys.executable, "-c", STUB)) for _ in range(2))
        found = Helpers(
            {RequestKind.PICTURE: one, RequestKind.LAYOUT: one, RequestKind.DETAILS: other}
        )
        await found.start()
        try:
            pids = [
                (await found.ask(PageRequest(kind, "x")))["result"]["pid"] for kind in found.by_kind
            ]
        finally:
            await found.stop()
        return pids

    picture, layout, details = asyncio.run(work())
    assert picture == layout != details
