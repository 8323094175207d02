"""Run calls without a GPU and keep what each of their kernels is compiled from.

``kernel_diff.py`` runs this file as a program, with one commit's package on the path. Triton's
driver is one that says which GPU there is, its ``compile`` stops at the intermediate form, and a
launch keeps its arguments instead of running. So the kernels are those that a call would run, found
in the way that a call finds them.

Each kernel of each call becomes a line of JSON: ``case``, ``setting``, ``task``, ``kernel``, ``ir``
(digest of the normalised form, whose text is in the folder for texts), ``options``, ``arguments``
(what was launched with, by role) and, with ``--ptx``, ``ptx``.

Non-goals: resources of kernels (``tests/backends/triton/test_cross.py``), second choices of tile
sizes, which only a device that refuses the first ones reaches, and kernels that no program changes,
which find and copy the requests of a step.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from kernel_calls import DTYPES, options_of
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver

from kernel_cases import BATCH, CASES, HEADS, KV_HEADS, LENGTH, ROWS, SETTINGS, Case, Setting

os.environ.pop("TRITON_INTERPRET", None)

import attndsl  # Kernels are compiled, whatever the environment says.

try:
    from attndsl.call.dispatch import get_backend
except ModuleNotFoundError:  # Of trees from before the modules had these names.
    from attndsl.runtime.dispatch import get_backend
from attndsl.foundation.caches import CACHES, Reason

SHARED_MEMORY = {"cuda:80": 166912, "cuda:90": 232448}


class Driver:
    """A driver of Triton for a GPU that is not there."""

    def __init__(self, target: str) -> None:
        self._target = GPUTarget("cuda", int(target.partition(":")[2]), 32)
        found = {"max_shared_mem": SHARED_MEMORY[target], "multiprocessor_count": 132}
        self.utils = SimpleNamespace(get_device_properties=lambda device: found)

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """The first one."""
        return 0


class StandIn(SimpleNamespace):
    """In place of a compiled kernel. Like one, it is equal to itself alone."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Tracer:
    """Keeps the kernels that one call compiles and launches."""

    def __init__(self, texts: Path, ptx: bool) -> None:
        self.texts, self.ptx = texts, ptx
        self.kernels: list[dict[str, Any]] = []
        self.known: dict[int, str] = {}
        self._launches = itertools.count()

    def compile(self, source: Any, target: Any = None, options: Any = None) -> Any:
        """What stands in for ``triton.compile``."""
        stages, module, metadata = _frontend(source, target, options)
        form = "ttir" if "ttir" in stages else "ttgir"
        names = list(stages)
        module = stages[form](module, metadata)
        text = normalise(module.str_nodebug(), roles_of(source))
        line: dict[str, Any] = {
            "kernel": source.name,
            "ir": self._keep(text),
            "options": {key: str(value) for key, value in sorted((options or {}).items())},
        }
        if self.ptx:
            for stage in names[names.index(form) + 1 : names.index("ptx") + 1]:
                module = stages[stage](module, metadata)
            line["ptx"] = self._keep(normalise_ptx(str(module), source))
        self.kernels.append(line)
        return self._stand_in(source, line)

    def _keep(self, text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        path = self.texts / digest
        if not path.exists():
            path.write_text(text)
        return digest

    def _stand_in(self, source: Any, line: dict[str, Any]) -> Any:
        def run(*arguments: object) -> None:
            line.setdefault("first launch", next(self._launches))
            values = arguments[9:]
            found = dict(zip(source.signature, values, strict=False))
            constants = {n for n, kind in source.signature.items() if kind == "constexpr"}
            line.setdefault("launches", []).append(
                {"programs": arguments[0]}
                | {n: self._label(v) for n, v in found.items() if n not in constants}
            )

        metadata = SimpleNamespace(shared=0, tensordesc_meta=(), num_warps=4, name=source.name)
        return StandIn(
            src=source, metadata=metadata, n_spills=0, n_regs=0, hash=line["ir"], name=source.name,
            metadata_group={}, function=None, packed_metadata=None, run=run, asm={},
            _init_handles=lambda: None,
        )  # fmt: skip

    def _label(self, value: object) -> object:
        if hasattr(value, "base"):
            return f"blocks {value.block_shape} of {self._label(value.base)}"
        if isinstance(value, torch.Tensor):
            return self.known.get(value.data_ptr(), f"{value.dtype} {tuple(value.shape)}")
        if isinstance(value, int):
            return self.known.get(value, value if abs(value) < 1 << 40 else "an address")
        return value if isinstance(value, (float, bool, type(None))) else str(value)


def in_order(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels in the order of their first launches: several threads compile them in any order."""
    return sorted(kernels, key=lambda line: line.get("first launch", math.inf))


def _frontend(source: Any, target: Any, options: Any) -> tuple[dict[str, Any], Any, Any]:
    """The stages of a compilation, and the module before the first one."""
    backend = compiler.make_backend(target)
    parsed = backend.parse_options(dict(options or {}) | source.parse_options())
    metadata = {"hash": "", "target": target, **parsed.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    context = compiler.ir.context()
    compiler.ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target,
        parsed,
        backend.get_codegen_implementation(parsed),
        backend.get_module_map(),
        context,
    )
    return stages, module, metadata


def leaves(signature: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and types of what is no constant, tuples taken apart."""
    found: list[tuple[str, str]] = []

    def walk(name: str, kind: Any) -> None:
        if isinstance(kind, tuple):
            fields = getattr(kind, "_fields", range(len(kind)))
            for field, part in zip(fields, kind, strict=True):
                walk(str(field), part)
        elif kind != "constexpr":
            found.append((name, str(kind)))

    for name, kind in signature.items():
        walk(name, kind)
    return found


def roles_of(source: Any) -> list[str]:
    """What each parameter of a compiled kernel is, in order: a descriptor has several."""
    roles: list[str] = []
    for name, kind in leaves(source.signature):
        roles.append(name)
        if kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            roles += [f"{name}.{number}" for number in range(2 * rank)]
    return roles


def normalise(text: str, roles: list[str]) -> str:
    """The intermediate form with its parameters called by their roles, and in no order.

    Layouts stand where they are used, and what warpgroups are handed is called by what it is.
    """
    lines = []
    constants: dict[str, str] = {}
    for line in _by_capture(_without_aliases(text.split("\n"))):
        constant = re.match(r"\s*(%[\w-]+) = arith\.constant (.*)", line)
        if constant:
            # Where constants stand says nothing: they are made where they are used.
            constants[constant[1]] = f"[{constant[2]}]"
            continue
        line = re.sub(r"%(?:c|true|false)[\w-]*", lambda m: constants.get(m[0], m[0]), line)
        if line.lstrip().startswith("tt.func public"):
            inside = line[line.index("(") + 1 : line.rindex("attributes")]
            parts = sorted(
                _by_role(part, roles)
                for part in re.findall(r"%arg\d+: .*?(?=, %arg\d+: |\)\s*$)", inside)
            )
            lines += ["tt.func", *(f"  {part}" for part in parts)]
        elif not line.startswith(("#loc", "module attributes")):
            lines.append(_by_role(line, roles))
    return "\n".join(lines)


def _without_aliases(lines: list[str]) -> list[str]:
    """Lines with each layout in full: aliases have numbers in the order of their first use."""
    layouts: dict[str, str] = {}
    found = []
    for line in lines:
        whole = re.sub(r"#\w+", lambda m: layouts.get(m[0], m[0]), line)
        alias = re.match(r"(#\w+) = (.*)", line)
        if alias and not line.startswith("#loc"):
            layouts[alias[1]] = whole.partition(" = ")[2]
        else:
            found.append(whole)
    return found


def _by_capture(lines: list[str]) -> list[str]:
    """Lines in which a warpgroup's arguments are called by what it is handed, in no order."""
    handed: list[str] = []
    names: dict[str, str] = {}
    found = []
    for line in lines:
        start = re.match(r"(\s*ttg\.warp_specialize\()(.*?)(\).*)", line)
        if start:
            handed = start[2].split(", ")
            line = start[1] + ", ".join(sorted(handed)) + start[3]
        elif handed and (part := re.match(r"(\s*partition\d+)\((.*)\)( num_warps.*)", line)):
            own = re.findall(r"(%\w+): ", part[2])
            names = dict(zip(own, (f"{name}.handed" for name in handed), strict=True))
            line = part[1] + part[3]
        elif names and re.match(r"\s*\} : \(.*\) -> \(\)$", line):
            # The types of what is handed.
            handed, names = [], {}
            line = line.partition(" : ")[0]
        elif names:
            line = re.sub(r"%arg\d+\b", lambda m, own=names: own.get(m[0], m[0]), line)
        found.append(line)
    return found


def _by_role(text: str, roles: list[str]) -> str:
    return re.sub(r"%arg(\d+)\b", lambda m: _role(m[1], roles), text)


def _role(number: str, roles: list[str]) -> str:
    return f"%{roles[int(number)]}" if int(number) < len(roles) else f"%arg{number}"


def normalise_ptx(text: str, source: Any) -> str:
    """PTX without names, comments, places and labels; parameters are called by their roles."""
    roles = roles_of(source)
    labels: dict[str, str] = {}
    lines, registers = [], {}
    for raw in text.split("\n"):
        line = raw.partition("//")[0].rstrip()
        if not line.strip() or re.match(r"\s*(\.loc|\.file|\.section|\.param|\.version)", line):
            continue
        if re.match(r"\s*\.(b8|b16|b32|b64)\b", line):
            break  # What follows is for debuggers.
        line = re.sub(
            rf"{source.name}_param_(\d+)",
            lambda m: roles[int(m[1])] if int(m[1]) < len(roles) else f"hidden{m[1]}",
            line,
        )
        line = re.sub(r"\$\w+|__\w*[Ll]abel\w*", lambda m: _number(labels, m[0], "L"), line)
        line = re.sub(r"%[a-z]+\d+", lambda m: _number(registers, m[0], "%"), line)
        lines.append(line)
    return "\n".join(lines)


def _number(found: dict[str, str], name: str, first: str) -> str:
    kind = re.sub(r"\d", "", name) if first == "%" else first
    return found.setdefault(name, f"{kind}{len(found)}")


def operands(case: Case, setting: Setting) -> dict[str, torch.Tensor]:
    """q, k, v and captures."""
    dim = setting.dim - case.sizes.get("less", 0)
    length = ROWS.get(setting.family, case.sizes.get("length", LENGTH))
    kv_len = length if setting.family == "short" else case.sizes.get("kv_len", LENGTH)
    dtype = DTYPES[setting.dtype]
    q = torch.zeros(BATCH, HEADS, length, dim, dtype=dtype)
    k = torch.zeros(BATCH, KV_HEADS, kv_len, dim, dtype=dtype)
    v = torch.zeros(BATCH, KV_HEADS, kv_len, case.sizes.get("value", dim), dtype=dtype)
    kinds = {"f": dtype, "s": torch.float32, "i": torch.int32, "b": torch.bool}
    captures = {
        name: torch.zeros(dims, dtype=kinds[kind]) for name, (dims, kind) in case.tensors.items()
    }
    return {"q": q, "k": k, "v": v} | captures


def trace(case: Case, setting: Setting, texts: Path, ptx: bool) -> list[dict[str, Any]]:
    """The kernels of all calls of one case at one setting."""
    tracer = Tracer(texts, ptx)
    driver.set_active(Driver(setting.target))
    triton.compile = tracer.compile
    CACHES.invalidate(Reason.BACKENDS)  # Its kernels are for one target.
    backend = "decode" if setting.family == "serve" else setting.family
    type(get_backend(backend)).why_not = lambda backend, device: None
    given = operands(case, setting)
    tracer.known = {tensor.data_ptr(): name for name, tensor in given.items()}
    q, k, v, *_ = given.values()
    captures = {name: given[name] for name in case.tensors}
    more = options_of(case)
    program = attndsl.compile(case.text, backend=backend)
    params = {
        name: torch.tensor(value) if name in case.learned else value
        for name, value in case.params.items()
    }

    def call(q, k, v, **moving):
        return program(q, k, v, **(captures | params | moving), **more)

    lines: list[dict[str, Any]] = []

    def keep(task: str) -> None:
        found = {"case": case.name, "setting": setting.name, "task": task}
        lines.extend(found | line for line in in_order(tracer.kernels))
        tracer.kernels.clear()

    if setting.family == "serve":
        triton.JITFunction.run = lambda *arguments, **named: None
        for counts in ((ROWS["serve"], 1), (300, 1)):
            serve(program, q, counts, captures | params)
            keep(f"serve {max(counts)}")
        return lines
    with torch.no_grad():
        call(q, k, v)
    keep("forward")
    if setting.family == "decode":
        return lines
    learned = [captures[n] if n in captures else params[n] for n in case.learned]
    for tensor in (q, k, v, *learned):
        tensor.requires_grad_()
    call(q, k, v).sum().backward()
    keep("backward")
    for tensor in (q, k, v, *learned):
        tensor.requires_grad_(False)
    if case.tangents and setting.family not in ROWS:
        names = [name for name in case.tangents if name != "qkv"]
        moved = {n: captures[n] if n in captures else torch.tensor(case.params[n]) for n in names}
        own = (q, k, v) if "qkv" in case.tangents else ()
        values = (*own, *moved.values())

        def of(*values):
            operands = values[:3] if own else (q, k, v)
            return call(*operands, **dict(zip(moved, values[len(own) :], strict=True)))

        torch.func.jvp(of, values, tuple(torch.ones_like(x) for x in values))
        keep("tangent")
    return lines


def serve(
    program: attndsl.Attention, like: torch.Tensor, counts: tuple[int, ...], given: dict[str, Any]
) -> None:
    """A step of requests with ``counts`` queries over 1024 keys each, in pages of 16."""
    heads, dim, size = like.shape[1], like.shape[3], 16
    table = torch.arange(len(counts) * LENGTH // size, dtype=torch.int32).view(len(counts), -1)
    k, v = (like.new_zeros(table.numel(), size, KV_HEADS, dim) for _ in range(2))
    lengths = torch.full((len(counts),), LENGTH, dtype=torch.int32)
    cache = attndsl.PagedCache(k, v, table, lengths)
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    q = like.new_zeros(sum(counts), heads, dim)
    program.serve(q, cache, starts, most_queries=max(counts), captures=given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=Path, required=True, help="folder for texts by digest")
    parser.add_argument("--tree", type=Path, required=True, help="folder of the commit's package")
    parser.add_argument("--ptx", action="store_true", help="compile to PTX too")
    arguments = parser.parse_args()
    if arguments.tree.resolve() not in Path(attndsl.__file__).resolve().parents:
        sys.exit(f"kernel_trace: attndsl is {attndsl.__file__}, and not in {arguments.tree}")
    warnings.simplefilter("ignore")
    by_case = {case.name: case for case in CASES}
    by_setting = {setting.name: setting for setting in SETTINGS}
    for request in sys.stdin:
        case, setting = json.loads(request)
        start = time.perf_counter()
        reply: dict[str, Any] = {"case": case, "setting": setting}
        try:
            reply["kernels"] = trace(
                by_case[case], by_setting[setting], arguments.texts, arguments.ptx
            )
        except Exception as error:  # The other calls are looked at all the same.
            reply["error"] = "".join(traceback.format_exception(error))[-3000:]
        reply["seconds"] = round(time.perf_counter() - start, 2)
        with suppress(BrokenPipeError):
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"ATTNDSL_CACHE_DIR": folder, "ATTNDSL_SHIPPED": "0"}
        main()
