"""Compile kernels for a GPU that is not there: for checks, and to read their resources."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from triton.backends.compiler import GPUTarget

from attndsl.errors import BackendError
from attndsl.ir import SIZES, DType
from attndsl.passes.tiles.plan import DIRECTIONS

from ..base import Call
from ..device.library import row_statistics
from ..emit.expression import Capture
from ..emit.facts import block_widths, facts_of, with_forms, with_gradients
from ..emit.tangents import moved_name
from ..emit.template import Products
from ..emit.tile_lists import generate_lists
from ..gradients.pairs import exact_captures, with_pair_sums
from ..gradients.scattered import constant_factors
from ..gradients.shares import share_out
from ..gradients.terms import is_plain, terms_of
from ..kernels.arguments import arguments_of
from ..kernels.compile import build, load_module
from ..kernels.config import Config, shared_memory_of
from ..kernels.tile_lists import STATISTICS_ROWS
from .generate import entry_of, generate_attention
from .generate_gradients import SCATTERED
from .kernels import DIRECTIONS_OF, list_config, pairs_of, plan_loop, precision_of, work_of
from .tiles import candidates

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from attndsl.pipeline import Lowered

    from ..base import Wants
    from ..emit.facts import KernelFacts


@dataclass(frozen=True, slots=True)
class CrossCompiled:
    """One kernel compiled for a target."""

    name: str
    config: Config
    shared: int
    """Bytes of shared memory."""
    kernel: Any
    """Triton's compiled kernel; ``kernel.asm`` has each stage."""


def parse_target(text: str) -> GPUTarget:
    """``cuda:90`` or ``hip:gfx942`` as Triton's target."""
    backend, _, arch = text.partition(":")
    return GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)


def example_call(
    lowered: Lowered,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    captures: Mapping[str, Any],
) -> Call:
    """A small call on the CPU with the program's captures, for looking at its kernels.

    Args:
        lowered: The program.
        head_dim: Head dim of q and k.
        value_dim: Head dim of v.
        dtype: dtype of q, k and v.
        captures: Values of tensors and params; others are made up.
    """
    sizes = dict.fromkeys((*SIZES, *lowered.program.dim_names()), 2) | {"head_dim": head_dim}
    q, k = (torch.empty(2, 2, 2, head_dim, dtype=dtype) for _ in range(2))
    v = torch.empty(2, 2, 2, value_dim, dtype=dtype)
    kinds = {DType.FLOAT: torch.float32, DType.INT: torch.int32, DType.BOOL: torch.bool}
    numbers = {DType.FLOAT: 1.0, DType.INT: 1, DType.BOOL: True}
    tensors = {
        decl.name: captures.get(
            decl.name, torch.zeros((2,) * len(decl.dims), dtype=kinds[decl.dtype])
        )
        for decl in lowered.program.tensors
    }
    params = {
        decl.name: captures.get(decl.name, numbers[decl.dtype]) for decl in lowered.program.params
    }
    return Call(q, k, v, head_dim**-0.5, sizes, tensors, params)


def kernel_source(lowered: Lowered, call: Call, direction: str, wants: Wants) -> str:
    """Text of the modules that ``call`` would use, ``forward``, ``backward`` or ``tangent``.

    Tangents are along q, k, v and what ``wants`` names.
    """
    shared = shared_memory_of("cuda:90")
    facts = facts_of(lowered.program, call)
    facts = with_forms(facts, lowered.program, parse_target("cuda:90"))
    kernels = [(name, facts) for name in DIRECTIONS_OF[direction]]
    if direction == "backward":
        kernels = _backward_kernels(lowered, call, facts, wants)
    elif direction == "tangent":
        moving = _with_tangents(lowered, with_gradients(facts, wants))
        kernels = [(name, moving) for name in DIRECTIONS_OF[direction]]
    products = Products(precision_of(facts.dtype, parse_target("cuda:90")))
    texts = []
    for name, own in kernels:
        config = candidates_of(lowered, own, name, shared)[0]
        loop = plan_loop(lowered, own, name, config)
        texts.append(generate_attention(lowered, own, name, loop, config, products))
    return "\n\n".join(texts)


def _backward_kernels(
    lowered: Lowered, call: Call, facts: KernelFacts, wants: Wants
) -> list[tuple[str, KernelFacts]]:
    """The kernels that a backward of ``call`` runs, and what each is generated for."""
    shares = share_out(lowered, call, wants)
    lines = with_gradients(facts, shares.lines)
    found = [(name, lines) for name in DIRECTIONS_OF["backward"]]
    if shares.distances.tensors or shares.distances.params:
        found.append(("distances", facts))
    for group in shares.pairs:
        found.append(("pairs", with_pair_sums(with_gradients(facts, group), lowered, call)))
    if shares.others.tensors:
        others = with_gradients(facts, shares.others)
        bounded = constant_factors(lowered, shares.others.tensors) is not None
        found += [(name, others) for name in DIRECTIONS_OF["bounded" if bounded else "scattered"]]
    return found


def candidates_of(
    lowered: Lowered, facts: KernelFacts, name: str, shared: int
) -> tuple[Config, ...]:
    """The configs that a device with ``shared`` bytes of shared memory would try, in order."""
    work, of_pair = work_of(lowered, facts, name), pairs_of(lowered, facts, name)
    return _candidates(name, facts, shared, work, of_pair)


def _candidates(
    name: str, facts: KernelFacts, shared: int, work: str = "dense", of_pair: int = 0
) -> tuple[Config, ...]:
    size = 4 if facts.dtype == "fp32" else 2
    return candidates(name, *block_widths(facts), size, shared, work, of_pair)


def cross_compile(
    lowered: Lowered,
    facts: KernelFacts,
    target: str,
    configs: dict[str, tuple[Config, ...]] | None = None,
    kernels: Collection[str] | None = None,
) -> list[CrossCompiled]:
    """Kernels of one specialisation, each with the first config that fits ``target``.

    Args:
        lowered: The program.
        facts: Dtypes, head dims, kinds; its gradients say what the backward adds up, and which
            captures have a tangent beside q, k and v.
        target: ``cuda:80``, ``cuda:90``, ``cuda:100``, ``hip:gfx942`` ...
        configs: Candidates by kernel, in place of the table's.
        kernels: Names of those to compile alone; all if it is None.

    Raises:
        BackendError: No config of a kernel fits.
    """
    shared = shared_memory_of(target)
    compiler = _Compiler(parse_target(target), shared)
    attention = with_forms(facts, lowered.program, compiler.target)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, own in _kernels(lowered, attention):
            if kernels is not None and name not in kernels:
                continue
            for config in (configs or {}).get(name) or candidates_of(lowered, own, name, shared):
                loop = plan_loop(lowered, own, name, config)
                text = generate_attention(lowered, own, name, loop, config)
                path = Path(folder) / f"{name}_{len(list(Path(folder).iterdir()))}.py"
                path.write_text(text, "utf-8")
                function = getattr(load_module(path, path.stem), entry_of(name))
                try:
                    found.append(compiler.compile(name, function, own, (config,), {}))
                except BackendError as error:
                    refusal = error
                    continue
                break
            else:
                raise refusal
        if kernels is not None:
            return found
        statistics = _candidates("backward_q", facts, shared)
        more: dict[str, int | bool] = {"ROWS": STATISTICS_ROWS, "HAS_DLSE": True}
        found.append(compiler.compile("row_statistics", row_statistics, facts, statistics, more))
        if lowered.sparsity.bounds is not None:
            path = Path(folder) / "tile_lists.py"
            path.write_text(generate_lists(lowered, facts), "utf-8")
            module = load_module(path, path.stem)
            config, sizes = list_config(found[0].config.block_m, found[0].config.block_n, 1)
            for name in ("summarise", "classify", "refine", "list_tiles"):
                found.append(compiler.compile(name, getattr(module, name), facts, (config,), sizes))
    return found


def _kernels(lowered: Lowered, facts: KernelFacts) -> list[tuple[str, KernelFacts]]:
    """The kernels that make the gradients in ``facts``, tangents, and those of all calls."""
    found = [(name, facts) for name in (*DIRECTIONS, "distances")]
    found.append(("tangent", _with_tangents(lowered, facts)))
    terms = terms_of(lowered, facts.tensor_gradients)
    types = dict(zip((c.name for c in facts.captures), facts.capture_types, strict=True))
    pairs = [term for term in terms if term.along == "pair"]
    if pairs:
        names = tuple(sorted({term.name for term in pairs}))
        apart = replace(facts, tensor_gradients=names, param_gradients=())
        found += [(name, apart) for name in SCATTERED]
    plain = [term for term in pairs if is_plain(term)]
    if plain:
        names = tuple(sorted({term.name for term in plain}))
        own = [term for term in terms if term.name in names]
        kinds = tuple(types[term.name] for term in own)
        apart = replace(
            facts,
            tensor_gradients=names,
            param_gradients=(),
            captures=exact_captures(facts, tuple(own)),
            pair_types=kinds,
            pair_units=("kv",) * len(kinds),
            pair_aligned=(True,) * len(kinds),
        )
        found.append(("pairs", apart))
        found.append(("stored", apart))
    return found


def _with_tangents(lowered: Lowered, facts: KernelFacts) -> KernelFacts:
    """``facts`` for tangents along q, k, v and all whose gradients are in it."""
    program = lowered.program
    kinds = zip(facts.captures, facts.capture_types, facts.capture_aligned, strict=True)
    found = [
        (replace(capture, name=moved_name(program, capture.name)), kind, aligned)
        for capture, kind, aligned in kinds
        if capture.name in facts.tensor_gradients
    ]
    found += [
        (Capture(moved_name(program, name), DType.FLOAT, 0, 32, False), "fp32", False)
        for name in facts.param_gradients
    ]
    captures, types, aligned_ones = zip(*found, strict=True) if found else ((), (), ())
    return replace(
        facts,
        tensor_gradients=(),
        param_gradients=(),
        captures=(*facts.captures, *captures),
        capture_types=(*facts.capture_types, *types),
        capture_aligned=(*facts.capture_aligned, *aligned_ones),
        moving_operands="qkv",
        moving_captures=(*facts.tensor_gradients, *facts.param_gradients),
    )


@dataclass(frozen=True, slots=True)
class _Compiler:
    target: GPUTarget
    shared: int

    def compile(
        self,
        name: str,
        function: object,
        facts: KernelFacts,
        configs: tuple[Config, ...],
        more: Mapping[str, int | bool],
    ) -> CrossCompiled:
        arguments = arguments_of(function, facts, more)
        built = build(function, arguments, configs, self.target, self.shared, load=False)
        return CrossCompiled(name, built.config, built.kernel.metadata.shared, built.kernel)
