"""Several processes of gloo that run jobs together, and what each of them tells."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


def run_jobs(world: int, folder: Path, home: str, names: list[str]) -> dict[str, list[Any]]:
    """What each rank returned for each job: a text that begins with ``Traceback`` where it failed.

    Args:
        world: How many processes.
        folder: An empty one, for what they tell.
        home: The module with ``JOBS``: functions of the process group by name.
        names: The jobs, in order.

    Raises:
        AssertionError: The processes did not end. The message says how far each one came.
    """
    try:
        start_processes(_work, (world, str(folder), home, names), world)
    except Exception as error:
        logs = [f"{path.name}: {path.read_text('utf-8')}" for path in sorted(folder.glob("*.json"))]
        raise AssertionError("\n".join([str(error), *logs])) from error
    told = [json.loads(Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(world)]
    return {name: [one[name] for one in told] for name in names}


def start_processes(work: Callable[..., None], arguments: tuple[Any, ...], world: int) -> None:
    """Call ``work(rank, *arguments)`` in ``world`` processes, and wait for all of them.

    They are forked from one that has imported torch and attndsl, and nothing else: to import both
    takes three seconds of each process.
    """
    imported = ["torch.distributed.tensor", "attndsl.attention", "attndsl.parallel.dtensor"]
    multiprocessing.set_forkserver_preload(imported)
    torch.multiprocessing.start_processes(work, arguments, world, start_method="forkserver")


def _work(rank: int, world: int, folder: str, home: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(os.path.join(folder, "store"), world),
        rank=rank, world_size=world, timeout=timedelta(seconds=60),
    )  # fmt: skip
    jobs = importlib.import_module(home).JOBS
    found = {}
    for name in names:
        try:
            found[name] = jobs[name](dist.group.WORLD)
        except BaseException:  # pytest.raises raises such a one.
            found[name] = traceback.format_exc()
        # Before the ranks wait: one that fails alone leaves the others in its job.
        Path(folder, f"{rank}.json").write_text(json.dumps(found), "utf-8")
        dist.barrier()
    dist.destroy_process_group()
    # All is told. Threads of gloo that outlive their group abort the process now and then, as it
    # ends ("terminate called without an active exception").
    os._exit(0)
