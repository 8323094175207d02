"""Trace the way of the data: the modules that one piece of work enters, in order.

``python tools/ways.py`` traces every way of ``WAYS``, ``python tools/ways.py cpu lower`` some.
``--write`` puts those of ``ON_PAGE`` into ``docs/dev/architecture.md``. No GPU is needed: kernels
are made and not run.

A module is *entered* where a function of it runs that has not run before on this way, after a
function of another module. *Stays* are the entries, *rooms* the different modules, *returns* the
stays beyond the first one in each room. A *call up* calls a module of a higher layer.

Calls within the functions of ``CLOSED`` are not followed: how kernels are made is no part of
how they are called. Each way has a process of its own: what one keeps, another would not enter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from layers import layer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
CLOSED = frozenset(
    ("Modules.prepare", "Modules.tile_lists", "Executable.launch", "Executable.launch_grid")
)
"""Qualified names of functions whose own calls are not followed."""
_FOLDERS = {"attndsl": ("attndsl",), "backends": ("attndsl", "backends"),
            "grammar": ("attndsl", "grammar")}  # fmt: skip


class Entry(NamedTuple):
    """A function that ran."""

    module: str
    function: str
    caller: str | None
    """The module that it was called from, the next one of the project; None for the first."""


class Way(NamedTuple):
    """What a piece of work entered."""

    stays: tuple[str, ...]
    """Modules in the order in which they were entered."""
    calls: Counter[str]
    """Calls of functions of each module."""
    up: Counter[tuple[str, str]]
    """Calls from a module to one of a higher layer: both, and how often."""

    @property
    def rooms(self) -> int:
        """Number of different modules."""
        return len(set(self.stays))

    @property
    def returns(self) -> int:
        """How often a module was entered again."""
        return len(self.stays) - self.rooms


def module_at(path: str) -> str | None:
    """The dotted name of the project's module at ``path``; None for files of others."""
    try:
        folder, *parts = Path(path).relative_to(ROOT).with_suffix("").parts
    except ValueError:
        return None
    if folder not in _FOLDERS or not parts:
        return None
    return ".".join([*_FOLDERS[folder], *(part for part in parts if part != "__init__")])


def entries_of(
    work: Callable[[], object], module_of: Callable[[str], str | None] = module_at
) -> list[Entry]:
    """The functions of the project that ``work`` runs, in order, as :func:`sys.setprofile` tells.

    Args:
        work: What to run.
        module_of: The module at a path, or None if its functions do not count.
    """
    found: list[Entry] = []
    closed: list[FrameType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and closed and frame is closed[-1]:
            closed.pop()
        if event != "call" or closed:
            return
        module, name = module_of(frame.f_code.co_filename), frame.f_code.co_qualname
        # Comprehensions are no functions of their own.
        if module is None or frame.f_code.co_name.startswith("<"):
            return
        found.append(Entry(module, name, _caller(frame, module_of)))
        if name in CLOSED:
            closed.append(frame)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def way_of(entries: Iterable[Entry]) -> Way:
    """Stays, calls and calls up of ``entries``."""
    stays: list[str] = []
    calls: Counter[str] = Counter()
    up: Counter[tuple[str, str]] = Counter()
    seen = set()
    for entry in entries:
        calls[entry.module] += 1
        if entry.caller is not None and _is_up(entry.caller, entry.module):
            up[entry.caller, entry.module] += 1
        place = entry.module, entry.function
        if place not in seen and (not stays or stays[-1] != entry.module):
            stays.append(entry.module)
        seen.add(place)
    return Way(tuple(stays), calls, up)


def shown(name: str, way: Way) -> str:
    """A way in words: one line for each room, in the order of its first stay."""
    lines = [f"{name}: {len(way.stays)} stays, {way.rooms} rooms, {way.returns} returns"]
    stays = Counter(way.stays)
    for module in stays:
        again = stays[module] - 1
        line = f"  {module.removeprefix('attndsl.')}: {way.calls[module]} calls"
        lines.append(f"{line}, entered again {again} times" if again else line)
    for (caller, callee), number in way.up.items():
        lines.append(f"  up: {caller} calls {callee}, {number} times")
    return "\n".join(lines)


def page_of(rooms: Mapping[str, Sequence[str]]) -> str:
    """The ways of :data:`ON_PAGE` as on the page, from the modules of each in their order."""
    lines = ["```text"]
    for name, title in ON_PAGE.items():
        folders: dict[str, list[str]] = {}
        for module in rooms[name]:
            folder, _, last = module.removeprefix("attndsl.").rpartition(".")
            folders.setdefault(folder or "attndsl", []).append(last)
        lines.append(f"{title}: {len(rooms[name])} modules")
        for folder, modules in folders.items():
            head = f"  {folder:<24} "
            lines += textwrap.wrap(", ".join(modules), _WIDTH, initial_indent=head,
                                   subsequent_indent=" " * len(head))  # fmt: skip
        lines.append("")
    return "\n".join([*lines[:-1], "```"])


def _caller(frame: FrameType, module_of: Callable[[str], str | None]) -> str | None:
    outer = frame.f_back
    while outer is not None:
        module = module_of(outer.f_code.co_filename)
        if module is not None:
            return module
        outer = outer.f_back
    return None


def _is_up(caller: str, callee: str) -> bool:
    below, above = layer_of(caller), layer_of(callee)
    return below is not None and above is not None and above > below


def lower_text() -> Callable[[], object]:
    """Text to a lowered program."""
    from attndsl.pipeline import lower
    from attndsl.source import Source

    return lambda: lower(Source("causal()"), {})


def score_to_text(backend: str) -> Callable[[], object]:
    """A program with a modified score to the text of a backend's forward."""
    import attndsl

    attn = attndsl.compile("score * 0.5 + 0.1 * (kv - q)")
    return lambda: attn.source(backend=backend)


def cpu_forward() -> Callable[[], object]:
    """A forward of the CPU backend."""
    from attndsl.call.dispatch import get_backend

    lowered, call = _causal_call("float32")
    backend = get_backend("cpu")
    return lambda: backend.forward(lowered, call)


def backward(backend: str, known: bool = False) -> Callable[[], object]:
    """A backward by kernels of ``backend``: the first of its signature, or one that is known."""
    import torch

    from attndsl.backends.base import Backward, Wants
    from attndsl.call.dispatch import get_backend

    lowered, call = _causal_call("bfloat16")
    kernels = get_backend(backend)
    out, lse = kernels.forward(lowered, call)
    grad_out = torch.ones_like(out)

    def run() -> object:
        return kernels.backward(lowered, call, Backward(out, lse, grad_out, None, Wants()))

    if known:
        run()
    return run


def _causal_call(dtype: str, text: str = "causal()") -> tuple[Any, Any]:
    import torch

    from attndsl.backends.base import Call
    from attndsl.pipeline import lower
    from attndsl.source import Source

    q = torch.ones(1, 2, 64, 64, dtype=getattr(torch, dtype))
    k = v = q[:, :1]
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 64, "kv_len": 64, "head_dim": 64}
    return lower(Source(text), {}), Call(q, k, v, 0.125, sizes)


def hopper_call(known: bool = False) -> Callable[[], object]:
    """A call as users make it, with its backward by autograd: the first, or one like those before.

    Of a first call, what comes before its backend is followed.
    """
    import torch

    import attndsl

    attention = attndsl.compile("causal()", backend="hopper")
    leaves = [
        torch.ones(1, heads, 64, 64, dtype=torch.bfloat16, requires_grad=True)
        for heads in (2, 1, 1)
    ]
    grad = torch.ones_like(leaves[0])

    def run() -> object:
        return torch.autograd.grad(attention(*leaves), leaves, grad)

    if not known:
        return lambda: attention(*[x.detach() for x in leaves])
    for _ in range(3):
        run()
    return run


def serving_step() -> Callable[[], object]:
    """A layer of a decoding step by kernels that read pages, like one before.

    The step has a plan, which has looked at values: on a GPU no call does.
    """
    import torch

    import attndsl

    attention = attndsl.compile("causal()", backend="decode")
    pages = torch.ones(4, 16, 1, 64, dtype=torch.bfloat16)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    cache = attndsl.PagedCache(pages, pages, table, torch.tensor([20, 30], dtype=torch.int32))
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    q = torch.ones(2, 2, 64, dtype=torch.bfloat16)
    plan = attention.plan(cache, starts, len(q), most_queries=1)

    def run() -> object:
        with torch.no_grad():
            return attention.serve(q, cache, starts, plan=plan)

    for _ in range(3):
        run()
    return run


def text_of_job(backend: str) -> Callable[[], object]:
    """A lowered program with a modified score to the text of the kernel of a forward."""
    from attndsl.backends.kernels.kernel import Task
    from attndsl.backends.kernels.target import machine_of
    from attndsl.call.dispatch import get_backend

    lowered, call = _causal_call("bfloat16", "score * 0.5 + 0.1 * (kv - q)")
    machine = machine_of("cuda:90")
    family = next(x for x in get_backend(backend).families if x.name == backend)
    (job,) = family.jobs(lowered, call, Task.FORWARD, None, None)
    job = job.on(machine)
    config = job.kernel.configs(job, machine)[0]
    return lambda: job.text(config, machine)


WAYS: dict[str, Callable[[], Callable[[], object]]] = {
    "lower": lower_text,
    "cpu": cpu_forward,
    "triton backward": lambda: backward("triton"),
    "triton backward again": lambda: backward("triton", known=True),
    "hopper backward": lambda: backward("hopper"),
    "hopper backward again": lambda: backward("hopper", known=True),
    "hopper call": hopper_call,
    "hopper call again": lambda: hopper_call(known=True),
    "serving step again": serving_step,
    "triton kernel text": lambda: text_of_job("triton"),
    "hopper kernel text": lambda: text_of_job("hopper"),
    "triton text": lambda: score_to_text("triton"),
    "hopper text": lambda: score_to_text("hopper"),
}
"""By name: what makes ready, and returns the work to trace."""
ON_PAGE = {
    "lower": "A text is lowered",
    "hopper kernel text": "A lowered score becomes the text of Hopper's forward",
    "hopper call again": "A call and its backward by Hopper's kernels, like one before",
    "cpu": "A forward on a CPU",
}
"""Ways that the page has, and what it calls them."""
PAGE = ROOT / "docs" / "dev" / "architecture.md"
BEGIN, END = "<!-- ways: begin (tools/ways.py --write) -->", "<!-- ways: end -->"
_WIDTH = 100


@contextmanager
def kernels_that_never_run() -> Iterator[None]:
    """Kernels are made as for Triton's interpreter, in a cache of their own, and not launched.

    To be entered before Triton is imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {"TRITON_INTERPRET": "1", "ATTNDSL_CACHE_DIR": folder}
        variables["ATTNDSL_SHIPPED"] = "0"
        with mock.patch.dict(os.environ, variables), warnings.catch_warnings():
            import attndsl.backends.hopper.launch
            from attndsl.backends.hopper.family import Hopper
            from attndsl.backends.kernels.compile import Executable

            def launch(*_: object) -> None:
                """Nothing."""

            with (
                mock.patch.object(Executable, "launch", launch),
                mock.patch.object(Executable, "launch_grid", launch),
                mock.patch.object(Hopper, "why_no_device", return_value=None),
                mock.patch.multiple(
                    attndsl.backends.hopper.launch,
                    why_wrapped=lambda kernel: None,
                    direct_launch=lambda kernel, constants: launch,
                    tensor_map_encoders=lambda kernel: {},
                ),
            ):
                yield


def main(arguments: Sequence[str] | None = None, echo: Callable[[str], object] = print) -> None:
    """Print the ways named on the command line."""
    parser = argparse.ArgumentParser(description="Trace the way of the data through the modules.")
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)}; all if none")
    parser.add_argument("--brief", action="store_true", help="one line a way")
    parser.add_argument("--write", action="store_true", help="those of the page, into the page")
    options = parser.parse_args(arguments)
    if options.write:
        if options.ways or options.brief:
            parser.error("--write has the ways of the page, whole: leave out the others")
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            parser.error(f"{PAGE} has not both {BEGIN!r} and {END!r}")
        page = page_of({name: rooms_of(name) for name in ON_PAGE})
        PAGE.write_text(f"{before}{BEGIN}\n\n{page}\n\n{END}{after}", "utf-8")
        return
    for name in options.ways or WAYS:
        if name not in WAYS:
            parser.error(f"there is no way {name!r}")
    for name in options.ways or WAYS:
        text = _traced(name)
        echo(text.partition("\n")[0] if options.brief else text + "\n")


def rooms_of(name: str) -> list[str]:
    """The modules of a way, in the order in which they were entered first."""
    return _traced(name, "list_rooms").splitlines()


def _traced(name: str, how: str = "trace") -> str:
    """A way in words, traced in a process of its own."""
    code = f"import ways; ways.{how}({name!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "tools",
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.rstrip()


def trace(name: str) -> None:
    """Print a way of this process."""
    with kernels_that_never_run():
        print(shown(name, way_of(entries_of(WAYS[name]()))))


def list_rooms(name: str) -> None:
    """Print the modules of a way of this process, a line each."""
    with kernels_that_never_run():
        print(*dict.fromkeys(way_of(entries_of(WAYS[name]())).stays), sep="\n")


if __name__ == "__main__":
    main()
