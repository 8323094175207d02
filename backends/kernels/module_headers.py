"""Heads of generated texts: comments that say what a module is, for people and :mod:`.standalone`.

A head is a line, then fields between two empty comments, then how the text runs alone. It stands
before the module's docstring, so that no kernel depends on it.
"""

from __future__ import annotations

import re
import textwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING

from attndsl.passes.print_ir import print_program

from ..base import UNWRITTEN
from ..key import version_of
from .compile import Argument
from .config import Config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..base import Written
    from .kernel import Job
    from .target import Target

FIRST_LINE = "# A kernel that attndsl has generated."
TAIL = """

if __name__ == "__main__":
    from attndsl.backends.kernels.standalone import main

    main()
"""
"""Last lines of a file of such texts."""
_NOTE = """\
This text runs alone: "python FILE" compiles it, changed or not, and says how many registers the
kernel takes. It needs no GPU. "python FILE --help" names the options. Calls do not run this file:
they generate their kernels themselves."""
_KEY = 10
"""Columns of a field's name."""
_WIDTH = 100
_MOST_LINES = 40
"""Lines of a program that a head shows."""


def headed(
    text: str, job: Job, config: Config, machine: Target, written: Written = UNWRITTEN
) -> str:
    """``text``, the module of a job with these tile sizes, with its head.

    Args:
        text: The module.
        job: What it was generated for.
        config: Tile sizes.
        machine: Where it will run.
        written: The program as a person wrote it. By default the head shows it as the compiler has
            it, which is the same for all programs that mean the same.
    """
    kernel, facts = job.kernel, job.facts
    fields = [("program", line) for line in _program(job, written)]
    if written.bound:
        bound = ", ".join(f"{name} = {value!r}" for name, value in written.bound.items())
        fields.append(("bound", _printable(bound)))
    value_dim = f", head dim of v {facts.value_dim}" * (facts.value_dim != facts.head_dim)
    fields += [
        ("kernel", f"{kernel.family} {kernel.name}: {kernel.entry}"),
        ("call", f"q, k and v in {facts.dtype}, head dim {facts.head_dim}{value_dim}"),
        ("target", machine.name),
        ("tiles", str(config)),
        ("options", _options(config)),
        *(("argument", group) for group in _groups(_arguments(text, job, config))),
        ("versions", f"attndsl {version_of('attndsl')}, triton {version_of('triton')}"),
    ]
    note = (f"# {line}" for line in _NOTE.split("\n"))
    return "\n".join([FIRST_LINE, "#", *_lines(fields), "#", *note, text])


def fields_of(text: str) -> dict[str, list[str]]:
    """The fields of the head that ``text`` begins with: name -> values."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for line in text.split("\n")[2:]:
        if line == "#" or not line.startswith("# "):
            break
        key, value = line[2 : 2 + _KEY].strip(), line[2 + _KEY :]
        if key:
            values = found.setdefault(key, [])
            values.append(value)
        elif values:
            values[-1] += f" {value.strip()}"
    return found


def arguments_in(values: Iterable[str]) -> dict[str, Argument]:
    """Arguments by name, from the values of the field ``argument``.

    Raises:
        ValueError: They are no such values.
    """
    found = {}
    for value in values:
        kind, separator, names = value.rpartition(": ")
        if not separator:
            raise ValueError(value)
        kind, _, divisor = kind.partition(" % ")
        for name in names.split(", "):
            found[name] = Argument(name, kind, divisor=int(divisor or 1))
    return found


def config_in(options: str) -> Config:
    """Launch options, from the field of that name; tile sizes are constants of the text.

    Raises:
        ValueError, KeyError: It is no such value.
    """
    found = {name: int(value) for name, value in (x.split("=") for x in options.split())}
    return Config(0, 0, found["warps"], found["stages"], most_registers=found.get("maxnreg", 0))


def _options(config: Config) -> str:
    text = f"warps={config.warps} stages={config.stages}"
    return text + f" maxnreg={config.most_registers}" * bool(config.most_registers)


def _program(job: Job, written: Written) -> list[str]:
    """Lines of the program, each printable and none too long."""
    text = written.text
    if not text.strip():
        text = print_program(job.lowered.program)
    # An empty line would be the end of the fields.
    lines = [x for line in text.split("\n") if (x := _printable(line.expandtabs(4)).rstrip())]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"... {len(lines) - _MOST_LINES} more lines"]
    room = _WIDTH - 2 - _KEY
    return [x if len(x) <= room else f"{x[: room - 3]}..." for x in lines]


def _printable(text: str) -> str:
    """``text`` without control characters, which could end a comment."""
    return "".join(c if c.isprintable() else "?" for c in text.strip("\r"))


def _arguments(text: str, job: Job, config: Config) -> list[Argument]:
    """Types of the arguments of a module's entry."""
    found = re.search(rf"^def {job.kernel.entry}\(([^)]*)\):", text, re.MULTILINE)
    assert found is not None
    names = [part.partition(":")[0].strip() for part in found[1].split(",") if part.strip()]
    return job.kernel.arguments(SimpleNamespace(arg_names=names), job.facts, config)


def _groups(arguments: list[Argument]) -> Iterator[str]:
    """Arguments of one kind after another: ``*bf16 % 16: Q, K``."""
    groups: dict[tuple[str, int], list[str]] = {}
    for argument in arguments:
        assert argument.type != "constexpr", f"{argument.name}: modules have constants of their own"
        groups.setdefault((argument.type, argument.divisor), []).append(argument.name)
    for (kind, divisor), names in groups.items():
        yield f"{kind}{f' % {divisor}' * (divisor > 1)}: {', '.join(names)}"


def _lines(fields: list[tuple[str, str]]) -> Iterator[str]:
    """Fields as comments; of several in a row with one name the first has it."""
    before = ""
    for key, value in fields:
        parts = [value]
        if key != "program":
            parts = textwrap.wrap(
                value, _WIDTH - 2 - _KEY, break_long_words=False, break_on_hyphens=False
            )
        shown = "" if key == before == "program" else key
        before = key
        for part in parts:
            yield f"# {shown:<{_KEY}}{part}".rstrip()
            shown = ""
