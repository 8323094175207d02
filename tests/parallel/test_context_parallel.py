"""One sequence on several ranks equals the sequence in one process."""

from __future__ import annotations

import pytest
from support import shard_cases, shard_programs
from support.shard_work import run_jobs

QUICK = (
    "positions_and_unshard", "checkpointing", "heads_of_dtensors", "faults",
    "arguments_of_one_rank", "early_shards", "refusals", "documents_by_batch", "changed_masks",
    "calls_again", "captured", "one_row", "words", "bytes_sent",
)  # fmt: skip
WORDS = """\
512 rows on 2 ranks, 256 each: contiguous, in chunks of 128, up to 1 runs of rows a rank

local
  exchange     keys travel to the rows that see them
  load         slowest 1.14 of the mean; live tiles by rank: 3 4
  keys fetched 0 128 of 512
  bytes        65.5 kB in all, forward and backward, 65.5 kB at most a rank: 0.25 of an all-gather \
of keys and a reduce-scatter of gradients
  buffer       196.6 kB at most a rank, of keys, values and gradients"""


def programs_on(world, folder, settings):
    told = run_jobs(world, folder, "support.shard_programs", [str(x) for x in settings])
    return [shard_programs.check(setting, told[str(setting)]) for setting in settings]


def check_cases(world, folder, names):
    told = run_jobs(world, folder, "support.shard_cases", list(names))
    for name in names:
        if name not in ("words", "bytes_sent"):
            assert told[name] == [None] * world, told[name]
    return told


def test_programs_on_three_ranks(tmp_path):
    assert all(programs_on(3, tmp_path, shard_programs.SAMPLE))


def test_two_ranks(tmp_path):
    told = check_cases(2, tmp_path, QUICK)
    assert told["words"] == [WORDS.replace(" \\\n", " ")] * 2
    received = [one[0] for one in told["bytes_sent"]]
    planned = [one[1] for one in told["bytes_sent"]]
    # Gradients go to who holds the keys, and the plan counts them where the keys went.
    assert sum(received) == sum(planned)
    assert sum(received) * 4 == 2 * told["bytes_sent"][0][2]


def test_gradients_from_given_results(tmp_path):
    told = run_jobs(2, tmp_path, "support.shard_results", ["given_results"])
    assert told["given_results"] == [None] * 2


def test_what_a_second_stream_computes_is_there_where_it_is_read(tmp_path):
    """And the detector of races notices where streams do not wait, or nobody for the network."""
    first, last = run_jobs(2, tmp_path, "support.shard_cases", ["streams"])["streams"]
    # All rows of the first rank wait for nobody.
    assert first[0] == last[0] == []
    assert first[1][1] == 0
    assert last[1][1] > 10
    assert last[2:] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_programs(tmp_path, world):
    assert sum(programs_on(world, tmp_path, shard_programs.GRID)) > 250


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_all_cases(tmp_path, world):
    check_cases(world, tmp_path, [case.__name__ for case in shard_cases.CASES])
