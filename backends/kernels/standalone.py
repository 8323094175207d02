"""Compile the kernels of a text by itself: what ``python FILE`` does with a generated text.

Heads (:mod:`.module_headers`) say what Triton needs to know of a kernel beside its text. A file may
have the texts of several kernels. Each is a module of its own, since their constants have the same
names.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton

from attndsl.errors import AttnDSLError, BackendError

from .compile import build, is_interpreted, module_of
from .config import SHARED_MEMORY, shared_memory_of
from .module_headers import FIRST_LINE, arguments_in, config_in, fields_of
from .target import INTERPRETER, parse_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Alone:
    """A kernel that was compiled from its text alone."""

    name: str
    """Its family, its name and its entry."""
    target: str
    kernel: Any
    """Triton's compiled kernel; ``kernel.asm`` has each stage."""

    def __str__(self) -> str:
        """Describe the kernel to people: name, target, registers, stack and shared memory."""
        shared = f"{self.kernel.metadata.shared} bytes of shared memory"
        usage = "" if "cubin" not in self.kernel.asm else _usage(self.kernel.asm["cubin"])
        return f"{self.name}, {self.target}: {usage}{shared}"


def compile_text(text: str, path: Path, target: str | None = None) -> Iterator[Alone]:
    """The kernels of ``text``, compiled one after the other.

    Args:
        text: Of :meth:`attndsl.Attention.source`, or of a file of the cache, changed or not.
        path: The file that errors of the compiler point at.
        target: ``cuda:90``, ``hip:gfx942`` ...; that of each head for None.

    Raises:
        BackendError: It is no such text, there is no such target, or a kernel does not fit it.
    """
    lines = text.split("\n")
    first = [number for number, line in enumerate(lines) if line.rstrip() == FIRST_LINE]
    if not first:
        raise BackendError(
            f"{path} has no head of a generated kernel",
            hint="keep the comments above each kernel as attn.source() gives them",
        )
    for start, end in zip(first, [*first[1:], len(lines)], strict=True):
        # As many lines as there are before it, so that errors have the numbers of the file's.
        yield _compiled("\n" * start + "\n".join(lines[start:end]), path, start, target)


def _compiled(text: str, path: Path, start: int, target: str | None) -> Alone:
    fields = fields_of(text[start:])
    try:
        name, types = fields["kernel"][0], arguments_in(fields["argument"])
        config, own = config_in(fields["options"][0]), fields["target"][0]
    except (KeyError, ValueError) as error:
        raise BackendError(
            f"the head of a kernel at line {start + 1} of {path} cannot be read: {error}",
            hint="keep the comments above each kernel as attn.source() gives them",
        ) from None
    target = target or own
    if target not in SHARED_MEMORY and (target != own or target == INTERPRETER):
        raise BackendError(
            f"how much shared memory {target!r} has is not known",
            hint=f"use --target with one of {', '.join(SHARED_MEMORY)}",
        )
    function = _entry_in(text, path, start, name.rpartition(": ")[2])
    missing = [each for each in function.arg_names if each not in types]
    if missing:
        raise BackendError(
            f"the head of {name} says no type of {', '.join(missing)}",
            hint="name it in a line '# argument', after one that is of its type",
        )
    arguments = [types[each] for each in function.arg_names]
    shared = shared_memory_of(target)
    built = build(function, arguments, (config,), parse_target(target), shared, load=False)
    return Alone(name, target, built.kernel)


def _entry_in(text: str, path: Path, start: int, entry: str) -> Any:
    """The function that a kernel's text, from line ``start`` of a file on, launches."""
    function = getattr(module_of(text, path, f"line{start}"), entry, None)
    if function is None:
        raise BackendError(
            f"the kernel at line {start + 1} of {path} has no function {entry}",
            hint="name the function that is launched in the head's line '# kernel'",
        )
    if is_interpreted(function):
        raise BackendError(
            "TRITON_INTERPRET is set, so that nothing is compiled", hint="unset TRITON_INTERPRET"
        )
    return function


def _usage(cubin: bytes) -> str:
    """Registers and stack of a thread, according to CUDA's tool that comes with Triton."""
    try:
        tool = triton.knobs.nvidia.cuobjdump.path
    except RuntimeError:
        return "registers unknown, since this Triton has no cuobjdump, "
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise BackendError("cuobjdump says no registers", hint="report what it prints:\n" + text)
    return f"{found[1]} registers, {found[2]} bytes of stack a thread, "


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of a generated text: ``python FILE [--target cuda:90] [--show ptx]``."""
    file = Path(sys.argv[0])
    parser = argparse.ArgumentParser(
        prog=f"python {file}", description="Compile the kernels of this file; needs no GPU."
    )
    parser.add_argument("--target", help="cuda:90, hip:gfx942 ...; by default that of the head")
    parser.add_argument(
        "--show", metavar="STAGE", help="print a stage of each kernel too: ttir, ttgir, llir, ptx"
    )
    chosen = parser.parse_args(arguments)
    try:
        for found in compile_text(file.read_text("utf-8"), file, chosen.target):
            print(found)
            if chosen.show is None:
                continue
            stage = found.kernel.asm.get(chosen.show)
            if not isinstance(stage, str):
                there = [name for name, x in found.kernel.asm.items() if isinstance(x, str)]
                parser.error(f"there is no stage {chosen.show!r}; use {', '.join(there)}")
            print(stage)
    except AttnDSLError as error:
        sys.exit(str(error))
