"""The support table: the page is what the code answers, and follows it."""

import json
import re

import pytest
import support_table
from support.fork_server import run_python
from support_features import FEATURES

BUSY = "the kernels are busy elsewhere"
CODE = f"""
import json, sys
sys.path.insert(0, "")
import support_table
from unittest import mock

found = {{"now": support_table.page()}}
with support_table.absent_hopper():
    from attndsl.backends.engine.families import families_of
    from attndsl.backends.hopper.family import Hopper
    from attndsl.backends.tiled.cpu import CPUBackend
    from attndsl.backends.triton.decode_family import Decode

    why_not = Hopper.why_not

    def busy(self, lowered, call, task, *rest):
        if lowered.program.sink is not None and task.name == "forward":
            return {BUSY!r}
        return why_not(self, lowered, call, task, *rest)

    with mock.patch.object(Hopper, "why_not", busy):
        found["busy"] = support_table.page()
    with mock.patch.object(Decode, "why_not", lambda *_: None):
        found["decode"] = support_table.page()
    found["others"] = families_of("auto", "cuda:80")
    asked = [support_table.ask(x, "bf16", 128, "auto", "cpu") for x in support_table.FEATURES]
    found["cpu"] = [isinstance(x, support_table.Asked) for x in asked]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def pages():
    """Answers of a process of its own: backends of kernels that never run are kept there."""
    done = run_python(CODE, cwd=support_table.ROOT / "tools")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_page_is_what_the_code_answers(pages):
    page = support_table.PAGE.read_text("utf-8")
    assert page == pages["now"], "run python tools/support_table.py --write"
    assert len(page.split()) <= support_table.MOST_WORDS
    for feature in FEATURES:
        assert feature.name in page, feature.name


def test_each_number_has_a_note(pages):
    page, _, notes = pages["now"].partition("## Notes")
    numbers = {int(x) for each in re.findall(r"<sup>([\d,]+)</sup>", page) for x in each.split(",")}
    found = [int(x) for x in re.findall(r"^(\d+)\. \S", notes, re.MULTILINE)]
    assert sorted(numbers) == found == list(range(1, len(found) + 1))


def test_a_cell_follows_a_refusal(pages):
    assert BUSY not in pages["now"]
    assert re.search(r"^\| .*learned sink.* \| yes \| yes \|", pages["now"], re.MULTILINE)
    (row,) = re.findall(r"^\| learned sink \| portable<sup>(\d+)</sup> \| yes \|", pages["busy"],
                        re.MULTILINE)  # fmt: skip
    assert f"\n{row}. {BUSY}\n" in pages["busy"]
    assert "no dropout (the decode kernels" in pages["now"]
    assert "no dropout" not in pages["decode"]


def test_what_the_legend_promises_of_other_machines(pages):
    assert pages["others"] == ["triton"]
    assert pages["cpu"] == [True] * len(FEATURES)


def test_a_cell_is_the_best_verdict_with_all_reasons():
    notes = support_table.Notes()
    verdict = support_table.Verdict
    assert notes.cell([verdict("no", "b"), verdict("yes"), verdict("portable", "a")]) == (
        "yes<sup>1,2</sup>"
    )
    assert notes.cell([verdict("torch"), verdict("portable", "a")]) == "portable<sup>2</sup>"
    assert notes.lines() == ["1. b", "2. a"]
