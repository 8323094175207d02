"""``attndsl build``: a bundle of compiled kernels, on a machine that needs no GPU."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attndsl.building.build import Progress, build, check_backend
from attndsl.building.bundle_calls import (
    CAPTURE_DTYPES,
    DTYPES,
    HEADS,
    LENGTHS,
    POSITIONS,
    CallGrid,
    float_names,
)
from attndsl.building.bundle_pack import check_output, pack, words
from attndsl.building.warmup import errors_of
from attndsl.errors import render, visible
from attndsl.ir import DType

from .example_options import check_dim_names
from .program_inputs import check_key, read_program, read_programs
from .show_command import compile_program
from .usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from attndsl.api import Attention
    from attndsl.building.build import Built, CompiledKernel
    from attndsl.building.bundle_pack import PackedBundle
    from attndsl.building.warmup import Warmed
    from attndsl.frontend.declare import Declared

_SHOWN = 60
_MOST_SIZE = 1 << 20


class What(NamedTuple):
    """Programs to build, with their declarations, backend and target."""

    files: Sequence[str]
    name: str | None
    key: str | None
    declared: Mapping[str, Declared]
    exact: bool
    backend: str
    target: str


def build_bundle(what: What, asked: CallGrid, output: str, as_json: bool) -> int:
    """Write a bundle and say what is in it; 1 if a program cannot be compiled, otherwise 0.

    Raises:
        UsageError, AttnDSLError: Nothing can be built.
    """
    check_backend(what.backend, what.target)
    folder = Path(output)
    check_output(folder)
    begin = time.perf_counter()
    programs = _programs(what)
    check_dim_names((x.lowered.program for x in programs.values()), asked.dims)
    _check_captures(programs, asked)
    shown = _Shown(as_json)
    built = build(programs, asked, what.target, Progress(shown.compiled, shown.done))
    errors = errors_of(each for each in built.warmed if each.error is not None)
    shown.end()
    if errors:
        for error in errors:
            print(render(error) + "\n", file=sys.stderr)
        print(f"no bundle is written: {len(errors)} errors", file=sys.stderr)
        return 1
    packed = pack(built, what.target, folder)
    seconds = time.perf_counter() - begin
    if as_json:
        print(json.dumps(_as_json(packed, built, what, asked, output, seconds), indent=1))
    else:
        _print(packed, built, what, asked, output, seconds)
    return 0


def _programs(what: What) -> dict[str, Attention]:
    """The programs of all files, compiled, by names that tell them apart.

    Raises:
        AttnDSLError: What is wrong with the first that has errors.
    """
    found = {}
    for file in what.files:
        check_key(file, what.key)
        if what.name is None:
            named = read_programs(file, what.key)
        else:
            named = [read_program(file, what.name, what.key)]
        for program in named:
            name = program.name if program.name not in found else f"{file}: {program.name}"
            found[name] = compile_program(program, what.declared, what.backend, what.exact)
    if not found:
        raise UsageError("the files have no program", hint="name a file that has one")
    return found


def _check_captures(programs: Mapping[str, Attention], asked: CallGrid) -> None:
    """Refuse names and types that no program has.

    Raises:
        UsageError: Names those that there are.
    """
    all_of = [x.lowered.program for x in programs.values()]
    tensors = {decl.name: decl for program in all_of for decl in program.tensors}
    floats = {name for program in all_of for name in float_names(program)}
    for option, names, known in (
        ("--capture", asked.captures, set(tensors)), ("--learned", asked.learned or (), floats)
    ):  # fmt: skip
        for name in names:
            if name not in known:
                what = "captured tensor" if option == "--capture" else "float capture"
                raise UsageError(
                    f"{option} names '{name[:_SHOWN]}', which is no {what} of a program",
                    hint=f"there are: {', '.join(sorted(known)) or 'none'}",
                )
    for name, kind in asked.captures.items():
        if kind.is_floating_point != (tensors[name].dtype is DType.FLOAT):
            other = "bf16" if tensors[name].dtype is DType.FLOAT else "int64"
            raise UsageError(
                f"--capture gives '{name}' another type than its declaration",
                hint=f"write a dtype of its own kind, such as --capture {name}={other}",
            )


class _Shown:
    """Progress of a build on the terminal: one line that changes, and one for each program."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._begin = time.perf_counter()
        self._count = 0
        self._lock = threading.Lock()

    def compiled(self, kernel: CompiledKernel) -> None:
        """A kernel is there."""
        with self._lock:
            self._count += 1
            if self._live:
                seconds = time.perf_counter() - self._begin
                text = f"attndsl: {self._count} kernels, {seconds:.0f} s, {kernel.name}"
                print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def done(self, warmed: Warmed) -> None:
        """A program is."""
        if not self._quiet and warmed.error is None:
            self.end()
            print(f"{visible(warmed.name)}: compiled in {warmed.seconds:.1f} s", flush=True)

    def end(self) -> None:
        """Clear the line that changes."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def read_asked(options: Mapping[str, Any]) -> CallGrid:
    """Read the calls that a bundle is to cover from the command's options.

    Raises:
        UsageError: One of them is not of its form.
    """
    lengths = _all(options["lengths"], "--lengths", _pair_of_lengths) or LENGTHS
    heads = _all(options["heads"], "--heads", _pair_of_heads) or HEADS
    positions = tuple(_words(options["positions"])) or POSITIONS[:1]
    dtypes = tuple(_words(options["dtype"])) or ("bf16",)
    for name, given, known in (
        ("--dtype", dtypes, tuple(DTYPES)), ("--positions", positions, POSITIONS)
    ):  # fmt: skip
        wrong = [x for x in given if x not in known]
        if wrong:
            raise UsageError(f"{name} has no '{wrong[0][:_SHOWN]}'", hint=f"use {', '.join(known)}")
    learned = _words(options["learned"])
    if learned and not options["backward"]:
        raise UsageError("--learned is given without --backward", hint="add --backward")
    return CallGrid(
        dtypes=dtypes,
        head_dims=tuple(_sizes(options["head_dim"], "--head-dim")) or (64,),
        value_dim=options["value_dim"],
        heads=tuple(heads),
        lengths=tuple(lengths),
        positions=positions,
        backward=options["backward"],
        learned=tuple(learned) if learned else None,
        deterministic=options["deterministic"],
        dims=options["dims"],
        captures=dict(_capture(text) for text in options["capture"]),
    )


def _words(given: Iterable[str]) -> list[str]:
    """Words, apart by commas or given one after another."""
    return list(dict.fromkeys(w.strip() for text in given for w in text.split(",") if w.strip()))


def _all(given: Iterable[str], option: str, read: Any) -> list[tuple[int, int]]:
    return [read(word, option) for word in _words(given)]


def _sizes(given: Iterable[str], option: str) -> list[int]:
    return [_size(word, word, option) for word in _words(given)]


def _size(word: str, whole: str, option: str) -> int:
    if not (word.isascii() and word.isdigit()) or not 1 <= int(word[:9]) <= _MOST_SIZE:
        raise UsageError(
            f"{option} {whole[:_SHOWN]!r} is no size",
            hint=f"write whole numbers from 1 to {_MOST_SIZE}, such as {option} 64,128",
        )
    return int(word[:9])


def _pair_of_lengths(word: str, option: str) -> tuple[int, int]:
    rows, _, keys = word.partition("x")
    return _size(rows, word, option), _size(keys or rows, word, option)


def _pair_of_heads(word: str, option: str) -> tuple[int, int]:
    heads, _, shared = word.partition("/")
    found = _size(heads, word, option), _size(shared or heads, word, option)
    if found[0] % found[1]:
        raise UsageError(
            f"{option} {word!r}: {found[0]} heads cannot share {found[1]} key heads evenly",
            hint=f"write heads/key heads, such as {option} 32/8",
        )
    return found


def _capture(text: str) -> tuple[str, torch.dtype]:
    name, _, kind = (part.strip() for part in text.partition("="))
    if kind not in CAPTURE_DTYPES:
        raise UsageError(
            f"--capture {text[:_SHOWN]!r} gives no name a dtype",
            hint=f"write --capture doc=int64; dtypes are {', '.join(CAPTURE_DTYPES)}",
        )
    return name, CAPTURE_DTYPES[kind]


def covers(asked: CallGrid) -> list[str]:
    """Describe the calls that a bundle covers, in lines."""
    dims = "/".join(map(str, asked.head_dims))
    value = "" if asked.value_dim is None else f", head dim of v {asked.value_dim}"
    heads = ", ".join(f"{own}/{shared}" for own, shared in asked.heads)
    lengths = ", ".join(f"{rows}x{keys}" for rows, keys in asked.lengths)
    found = [
        f"{', '.join(asked.dtypes)}, head dim {dims}{value}; heads/key heads {heads}",
        f"rows x keys {lengths}; positions {', '.join(asked.positions)}",
    ]
    if asked.captures:
        kinds = (f"{n} {str(x).removeprefix('torch.')}" for n, x in asked.captures.items())
        found.append(f"captures {', '.join(kinds)}")
    if not asked.backward:
        gradients = "no gradients"
    else:
        captures = (
            "all float captures, or of none" if asked.learned is None else ", ".join(asked.learned)
        )
        gradients = f"gradients of q, k, v and {captures}, of lse too"
    return [*found, gradients + ", deterministic" * asked.deterministic]


def _print(
    packed: PackedBundle, built: Built, what: What, asked: CallGrid, output: str, seconds: float
) -> None:
    for kernel in packed.kernels:
        took = f"{kernel.seconds:6.1f} s" if kernel.seconds else "  cached"
        line = (
            f"{took} {kernel.bytes:>8} bytes  {words(kernel.about)}: {kernel.name}  {kernel.text}"
        )
        print(visible(line))
    own = (f"{name}: {line}" for name, line in _summary(packed, built, what, seconds))
    print("\n".join([*own, *(f"covers: {line}" for line in covers(asked))]))
    print(f"bundle: {visible(output)}, {packed.bytes} bytes")
    print(f"digest: {packed.digest}")


def _summary(
    packed: PackedBundle, built: Built, what: What, seconds: float
) -> list[tuple[str, str]]:
    import triton

    from attndsl import __version__

    found = [
        ("built", f"{len(packed.kernels)} kernels of {packed.programs} programs from "
                  f"{built.calls} calls in {seconds:.1f} s"),
        ("for", f"{what.target}, triton {triton.__version__}, attndsl {__version__}; "
                "an environment with other versions compiles for itself"),
    ]  # fmt: skip
    for (program, why), calls in sorted(built.without.items()):
        said = f"{calls} call{'s' * (calls > 1)} of '{program}', which torch operations run: {why}"
        found.append(("without kernels", visible(said)))
    lacking = built.gpu.without_launchers
    if not built.gpu.launchers and lacking:
        found.append(("launchers", f"none, since {lacking}"))
    else:
        version = ".".join(map(str, sys.version_info[:2]))
        found.append(("launchers", f"{len(built.gpu.launchers)}, for Python {version}"))
    return found


def _as_json(
    packed: PackedBundle, built: Built, what: What, asked: CallGrid, output: str, seconds: float
) -> dict[str, Any]:
    return {
        "bundle": output,
        "digest": packed.digest,
        "target": what.target,
        "bytes": packed.bytes,
        "seconds": round(seconds, 3),
        "calls": built.calls,
        "without_kernels": [
            {"program": program, "calls": calls, "why": why}
            for (program, why), calls in sorted(built.without.items())
        ],
        "covers": covers(asked),
        "kernels": [
            {
                "program": kernel.text,
                "kernel": kernel.about.kernel,
                "function": kernel.name,
                "dtype": kernel.about.dtype,
                "head_dim": kernel.about.head_dim,
                "value_dim": kernel.about.value_dim,
                "seconds": round(kernel.seconds, 3),
                "bytes": kernel.bytes,
            }
            for kernel in packed.kernels
        ],
    }
