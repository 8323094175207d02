"""Compile the portable kernels for a GPU that is not there: for checks, to read resources."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndsl.backends.device.library import row_statistics
from attndsl.backends.emit.template import IEEE
from attndsl.backends.emit.tile_list_text import generate_lists
from attndsl.backends.engine.kernel_listing import with_all_tangents
from attndsl.backends.gradients.gradient_terms import is_plain, terms_of
from attndsl.backends.kernels.arguments import arguments_of
from attndsl.backends.kernels.compile import build, load_module
from attndsl.backends.kernels.compile_failures import KernelError
from attndsl.backends.kernels.kernel import Job
from attndsl.backends.kernels.modules import list_config
from attndsl.backends.kernels.target import machine_of
from attndsl.backends.kernels.tile_lists import STATISTICS_ROWS
from attndsl.backends.triton.captures.pair_gradients import exact_captures
from attndsl.backends.triton.kernels import FIXED, KERNELS
from attndsl.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from attndsl.backends.emit.facts import KernelFacts
    from attndsl.backends.kernels.compile import Argument
    from attndsl.backends.kernels.config import Config
    from attndsl.backends.kernels.kernel import Kernel
    from attndsl.backends.kernels.target import Target
    from attndsl.pipeline import Lowered

PORTABLE: Mapping[str, Kernel] = {kernel.name: kernel for kernel in KERNELS}
"""The portable kernels by their names."""


@dataclass(frozen=True, slots=True)
class CrossCompiled:
    """One kernel compiled for a target."""

    name: str
    config: Config
    shared: int
    """Bytes of shared memory."""
    kernel: Any
    """Triton's compiled kernel; ``kernel.asm`` has each stage."""


def cross_compile(
    lowered: Lowered,
    facts: KernelFacts,
    target: str,
    configs: dict[str, tuple[Config, ...]] | None = None,
    kernels: Collection[str] | None = None,
) -> list[CrossCompiled]:
    """Kernels of the same facts, each with the first config that fits ``target``.

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
    machine = machine_of(target)
    jobs = [job.on(machine) for job in _jobs(lowered, facts)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            name = job.kernel.name
            if kernels is None or name in kernels:
                chosen = (configs or {}).get(name) or job.kernel.configs(job, machine)
                found.append(_first_that_fits(job, chosen, machine, Path(folder)))
        if kernels is not None:
            return found
        (statistics,) = FIXED
        first = jobs[0]
        more = {"ROWS": STATISTICS_ROWS, **statistics.constants(first), "HAS_DLSE": True}
        options = statistics.configs(first, machine)
        own_arguments = arguments_of(row_statistics, first.facts, more)
        found.append(_compile(statistics.name, row_statistics, own_arguments, options, machine))
        if lowered.sparsity.bounds is not None:
            path = Path(folder) / "tile_lists.py"
            path.write_text(generate_lists(lowered, facts), "utf-8")
            module = load_module(path, path.stem)
            config, sizes = list_config(found[0].config.block_m, found[0].config.block_n, 1)
            for name in ("summarise", "classify", "refine", "list_tiles"):
                function = getattr(module, name)
                arguments = arguments_of(function, facts, sizes)
                found.append(_compile(name, function, arguments, (config,), machine))
    return found


def compile_jobs(jobs: Sequence[Job], target: str) -> list[CrossCompiled]:
    """The kernels of ``jobs``, each with the first config of its table that fits ``target``.

    Raises:
        BackendError: No config of a kernel fits.
    """
    machine = machine_of(target)
    with tempfile.TemporaryDirectory() as folder:
        own = [job.on(machine) for job in jobs]
        return [
            _first_that_fits(job, job.kernel.configs(job, machine), machine, Path(folder))
            for job in own
        ]


def _first_that_fits(
    job: Job, configs: tuple[Config, ...], machine: Target, folder: Path
) -> CrossCompiled:
    refusal: BackendError | None = None
    for config in configs:
        text = job.kernel.text(job, config, job.plan(config), IEEE)
        path = folder / f"{job.kernel.name}_{len(list(folder.iterdir()))}.py"
        path.write_text(text, "utf-8")
        function = getattr(load_module(path, path.stem), job.kernel.entry)
        try:
            arguments = job.kernel.arguments(function, job.facts, config)
            return _compile(job.kernel.name, function, arguments, (config,), machine)
        except KernelError:
            raise
        except BackendError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def _compile(
    name: str, function: Any, arguments: list[Argument], configs: tuple[Config, ...],
    machine: Target,
) -> CrossCompiled:  # fmt: skip
    assert machine.target is not None
    built = build(function, arguments, configs, machine.target, machine.shared, load=False)
    return CrossCompiled(name, built.config, built.kernel.metadata.shared, built.kernel)


def _jobs(lowered: Lowered, facts: KernelFacts) -> list[Job]:
    """The kernels that make the gradients in ``facts``, tangents, and those of all calls."""

    def jobs(facts: KernelFacts, *names: str) -> list[Job]:
        return [Job(PORTABLE[name], lowered, facts) for name in names]

    found = jobs(facts, "forward", "backward_q", "backward_kv", "distances")
    found += jobs(with_all_tangents(lowered, facts), "tangent")
    terms = terms_of(lowered, facts.tensor_gradients)
    types = dict(zip((c.name for c in facts.captures), facts.capture_types, strict=True))
    pairs = [term for term in terms if term.along == "pair"]
    if pairs:
        names = tuple(sorted({term.name for term in pairs}))
        apart = replace(facts, tensor_gradients=names, param_gradients=())
        found += jobs(apart, "scatter_bounds", "scatter_sums", "scatter_together")
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
        found += jobs(apart, "pairs", "stored")
    return found
