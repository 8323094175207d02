"""Generated modules and their executables: from memory, from the disk cache, or made anew."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import triton

from attndsl.errors import BackendError
from attndsl.foundation.caches import CACHES
from attndsl.foundation.fingerprint import source_fingerprint
from attndsl.foundation.logs import LOG
from attndsl.ir import leaf_names
from attndsl.passes.print_ir import short_form

from ..base import SHORT_FORM
from ..cache_entries import About
from ..emit.facts import for_lists
from ..emit.loops import row_width
from ..emit.tile_list_text import generate_lists
from ..key import KernelKey, version_of
from .arguments import arguments_of
from .compile import (
    Executable,
    build,
    compile_kernel,
    hash_triton,
    is_module_of,
    module_of,
    record,
    restore,
    with_launcher,
)
from .compile_failures import KernelError
from .compile_pool import Compilations, Turn
from .config import MAX_SPILLS, MAX_SPILLS_OF_HALF, Config, is_hopeless
from .module_headers import TAIL, headed
from .target import current_machine
from .tile_list_cache import KeptLists
from .tile_lists import LIST_CHUNK, STATISTICS_ROWS, ListKernels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    import torch

    from ..cache_entries import Entry, Store
    from .compile import Argument
    from .kernel import FixedKernel, Job
    from .target import Target

_Place = tuple[str, str, Config, tuple[int | bool, ...]]
"""Key of a compilation: a module's key, the function, its tile size, and its own constants."""
_LIST_CONFIG = (4, 1)
"""Warps and stages of the kernels that find tiles."""
_LISTINGS = ("summarise", "classify", "refine", "list_tiles")
_ATTEMPTS = 3
"""Candidates that are compiled in search of one that does not spill."""
_ATTEMPTS_OF_SINGLES = 2
"""The same in fp32, whose products in three parts spill in most, and take long to compile."""


@dataclass(slots=True)
class _Module:
    """A generated module, imported."""

    key: str
    source: str
    module: ModuleType
    meta: dict[str, Any]
    """JSON values. Of an attention kernel: ``config``, and ``listed``: whether its tiles are. Of
    all: ``compiled``, where compiled code lies."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of a module that is to be compiled."""

    name: str
    function: Any
    arguments: list[Argument]
    configs: tuple[Config, ...]
    more: Mapping[str, int | bool]
    """Constants of it alone."""


@dataclass(frozen=True, slots=True)
class PreparedKernels:
    """The kernels of one task."""

    executables: Mapping[str, Executable]
    listed: frozenset[str]
    """Kernels whose tiles come from lists."""


class Modules:
    """Generates, compiles and keeps kernels, in memory and in ``store``.

    None goes while this object lives: captured CUDA graphs launch their code, which is unloaded
    with an executable. So this is no cache.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._modules: dict[str, _Module] = {}
        self._executables: dict[tuple[object, ...], Executable] = {}
        self._compilations = Compilations()
        self._begun: dict[_Place, _Module] = {}
        """Modules whose kernels are being compiled before anything asked for them."""
        self.kept_lists = KeptLists("lists of tiles by mask, sizes, tensors and their versions")
        """Tile lists of the masks whose tiles have no closed form."""
        self.built = 0
        """Kernels compiled (or taken into the interpreter) by this object so far."""
        CACHES.at_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew in a forked process: another thread may have held it."""
        self._lock = threading.RLock()

    def start(
        self, jobs: Sequence[Job], fixed: Sequence[FixedKernel], device: torch.device,
        has_dlse: bool,
    ) -> list[_Place]:  # fmt: skip
        """Begin to compile what :meth:`prepare` with the same arguments will wait for.

        Of each kernel the tile size that is tried first. The interpreter compiles nothing.

        Returns:
            What that is.
        """
        places: list[_Place] = []
        with self._lock:
            machine = current_machine(device)
            if machine.target is None:
                return places
            for given in jobs:
                job = given.on(machine)
                key = _key(job, job.kernel.family, job.kernel.name, machine)
                module = self._modules.get(key) or self._stored(key)
                if module is None:
                    config = job.kernel.configs(job, machine)[0]
                    if self._begin(job, config, key, machine).meta["listed"]:
                        self._start_lists(given, config, machine, device)
                    places.append((key, job.kernel.name, config, ()))
            for each in _needed(fixed, jobs):
                function = _fixed_function(each, jobs[0], machine, has_dlse)
                if module is None or not self._is_known(module, function, device):
                    self._compile(key, function, machine)
                    places.append(_place_of(key, function))
        return places

    def prepare(
        self, jobs: Sequence[Job], fixed: Sequence[FixedKernel], device: torch.device,
        has_dlse: bool,
    ) -> PreparedKernels:  # fmt: skip
        """The kernels of ``jobs``, and with them those of ``fixed``.

        Raises:
            BackendError: Triton cannot compile a kernel, or no tile size fits the device.
        """
        # Without the lock, so that other threads begin with other programs meanwhile.
        self._compilations.wait(self.start(jobs, fixed, device, has_dlse))
        with self._lock:
            machine = current_machine(device)
            executables, listed = {}, set()
            for job in (job.on(machine) for job in jobs):
                key = _key(job, job.kernel.family, job.kernel.name, machine)
                module = (
                    self._modules.get(key)
                    or self._stored(key)
                    or self._generate(job, key, machine, device)
                )
                config = Config(**module.meta["config"])
                found = self._executable(module, _entry_of(module, job, config), machine, device)
                executables[job.kernel.name] = found
                if module.meta["listed"]:
                    listed.add(job.kernel.name)
            for each in _needed(fixed, jobs):
                function = _fixed_function(each, jobs[0], machine, has_dlse)
                executables[each.name] = self._executable(module, function, machine, device)
            return PreparedKernels(executables, frozenset(listed))

    def tile_lists(self, job: Job, config: Config, device: torch.device) -> ListKernels:
        """The kernels that list tiles for the kernel of a job, which was made with ``config``."""
        with self._lock:
            machine = current_machine(device)
            self._start_lists(job, config, machine, device)
            module, listings = self._listings(job, config, machine)
            executables = {
                listing.name: self._executable(module, listing, machine, device)
                for listing in listings
            }
        assert job.kernel.loop is not None
        return ListKernels(
            executables,
            job.kernel.parts_of_lists(job, config),
            job.kernel.loop,
            tuple(sorted(leaf_names(job.lowered.program.mask))),
            self.kept_lists,
        )

    def _start_lists(self, job: Job, config: Config, machine: Target, device: torch.device) -> None:
        """Begin to compile what :meth:`tile_lists` will wait for."""
        if machine.target is not None:
            module, listings = self._listings(job, config, machine)
            for listing in listings:
                if not self._is_known(module, listing, device):
                    self._compile(module.key, listing, machine)

    def _listings(
        self, job: Job, config: Config, machine: Target
    ) -> tuple[_Module, tuple[_Function, ...]]:
        """The module that lists tiles, and its functions."""
        own, sizes = list_config(
            config.block_m, config.block_n, job.kernel.parts_of_lists(job, config)
        )
        job = replace(job, facts=for_lists(job.facts))
        key = _key(job, "", "tiles", machine)
        module = self._modules.get(key)
        if module is None:
            entry = self._store.load(key)
            if entry is None:
                text = generate_lists(job.lowered, job.facts)
                entry = self._store.save(key, text, _about(job, "lists of tiles", machine))
            module = self._keep(key, entry, {"compiled": {}} | dict(entry.meta))

        def listing(name: str) -> _Function:
            function = getattr(module.module, name)
            return _Function(
                name, function, arguments_of(function, job.facts, sizes), (own,), sizes
            )

        return module, tuple(map(listing, _LISTINGS))

    def choose(self, job: Job, config: Config, device: torch.device) -> None:
        """Have a kernel with the tile sizes of ``config`` from now on, here and on disk.

        Raises:
            BackendError: They do not fit the device. Whatever is raised, all is as before.
        """
        with self._lock:
            machine = current_machine(device)
            job = job.on(machine)
            key = _key(job, job.kernel.family, job.kernel.name, machine)
            before = self._modules.get(key) or self._stored(key)
            try:
                module, executable = self._attempt(job, config, key, machine, device)
            except BaseException:
                # An interruption too must not leave a kernel that may not fit.
                if before is not None:
                    entry = self._store.save(key, before.source, before.meta)
                    self._keep(key, entry, before.meta)
                raise
            self._publish(module, executable, job, device)

    def _stored(self, key: str) -> _Module | None:
        entry = self._store.load(key)
        if entry is None or not {"config", "listed", "compiled"} <= set(entry.meta):
            return None
        return self._keep(key, entry, dict(entry.meta))

    def _keep(self, key: str, entry: Entry, meta: dict[str, Any]) -> _Module:
        module = _Module(key, entry.source, module_of(entry.source, entry.path, key), meta)
        self._modules[key] = module
        return module

    def _publish(
        self, module: _Module, executable: Executable, job: Job, device: torch.device
    ) -> _Module:
        """Store ``module`` for others to find, since a later attempt may have been another one."""
        key = module.key
        entry = self._store.save(key, module.source, module.meta)
        self._executables[key, job.kernel.name, device, ()] = executable
        if not is_module_of(entry.source, entry.path):
            return self._keep(key, entry, module.meta)
        self._modules[key] = module
        return module

    def _generate(self, job: Job, key: str, machine: Target, device: torch.device) -> _Module:
        """The module for the first tile size that the device has the resources for.

        The loops of a text are those of one tile size, so that each attempt is a text of its own.
        A kernel that spills many registers is kept only if the next candidates are no better.
        """
        attempts = _ATTEMPTS_OF_SINGLES if job.facts.dtype == "fp32" else _ATTEMPTS
        best: tuple[int, _Module, Executable] | None = None
        refusals = []
        configs = job.kernel.configs(job, machine)
        for number, config in enumerate(configs):
            if best is not None and (number >= attempts or is_hopeless(config, best[2].config)):
                continue
            if number == 1 and machine.target is not None:
                # At most two in a row: all that may follow the first one, side by side.
                for other in configs[1:attempts]:
                    if best is None or not is_hopeless(other, best[2].config):
                        self._begin(job, other, key, machine)
            try:
                module, executable = self._attempt(job, config, key, machine, device)
            except KernelError:
                self._leave(key, job.kernel.name)
                raise
            except BackendError as refusal:
                LOG.info("%s for %s: %s does not fit: %s", job.kernel.name, machine.name, config,
                         refusal.message)  # fmt: skip
                refusals.append(refusal.message)
                continue
            LOG.debug("%s for %s: %s spills %d registers", job.kernel.name, machine.name, config,
                      executable.spills)  # fmt: skip
            if best is None or executable.spills < best[0]:
                best = executable.spills, module, executable
            most = MAX_SPILLS_OF_HALF if config.most_registers else MAX_SPILLS
            if best[0] <= most:
                break
        self._leave(key, job.kernel.name)
        if best is None:
            raise BackendError(
                "no tile size of this kernel fits the device: " + "; ".join(refusals),
                hint="report the program and head dims; backend='reference' computes it meanwhile",
            )
        return self._publish(*best[1:], job, device)

    def _attempt(
        self, job: Job, config: Config, key: str, machine: Target, device: torch.device
    ) -> tuple[_Module, Executable]:
        """The module with one tile size, not kept, nor stored for others to find.

        Raises:
            BackendError: It does not fit.
        """
        self._forget(key)
        try:
            # Described once it has compiled: whoever interrupts that leaves nothing to be found.
            module = self._begun.pop((key, job.kernel.name, config, ()), None)
            if module is None:
                module = self._made(job, config, key, machine)
            self._modules[key] = module
            function = _entry_of(module, job, config)
            return module, self._executable(module, function, machine, device, stored=False)
        finally:
            self._forget(key)

    def _made(self, job: Job, config: Config, key: str, machine: Target) -> _Module:
        """The module with one tile size. Its file has the text, and says nothing of it yet."""
        plan = job.plan(config)
        about = _about(job, f"{job.kernel.family} {job.kernel.name}", machine)
        meta: dict[str, Any] = {
            **about,
            "config": asdict(config),
            "listed": plan.listed is not None,
            "compiled": {},
        }
        if machine.target is not None:
            hash_triton()
        with Turn():
            text = job.kernel.text(job, config, plan, machine.products(job.facts))
            text = headed(text, job, config, machine) + TAIL
            entry = self._store.save(key, text, about)
            return _Module(key, entry.source, module_of(entry.source, entry.path, key), meta)

    def _begin(self, job: Job, config: Config, key: str, machine: Target) -> _Module:
        """The module with one tile size, whose kernel is compiled meanwhile."""
        place = (key, job.kernel.name, config, ())
        module = self._begun.get(place)
        if module is None:
            module = self._begun[place] = self._made(job, config, key, machine)
            self._compile(key, _entry_of(module, job, config), machine)
        return module

    def _compile(self, key: str, what: _Function, machine: Target) -> None:
        """Have the first tile size of a function compiled meanwhile."""
        target = machine.target
        assert target is not None
        config = what.configs[0]
        compiled = partial(
            compile_kernel, what.function, what.arguments, config, target, machine.shared
        )
        self._compilations.begin(
            _place_of(key, what), f"{what.name} for {machine.name}, {config}",
            partial(with_launcher, compiled),
        )  # fmt: skip

    def _leave(self, key: str, name: str) -> None:
        """Forget what was begun for a kernel, which is there by now."""

        def unwanted(place: _Place) -> bool:
            return place[:2] == (key, name)

        self._begun = {place: x for place, x in self._begun.items() if not unwanted(place)}
        self._compilations.drop(unwanted)

    def _is_known(self, module: _Module, what: _Function, device: torch.device) -> bool:
        """Return True if a function was compiled before, here or by another process."""
        place = (module.key, what.name, device, tuple(what.more.values()))
        return place in self._executables or _slot(what) in module.meta["compiled"]

    def _forget(self, key: str) -> None:
        self._modules.pop(key, None)
        for place in [place for place in self._executables if place[0] == key]:
            del self._executables[place]

    def _executable(
        self,
        module: _Module,
        what: _Function,
        machine: Target,
        device: torch.device,
        stored: bool = True,
    ) -> Executable:
        """The executable of a function; a new one is ``stored`` with its module."""
        constants = tuple(what.more.values())
        place = (module.key, what.name, device, constants)
        executable = self._executables.get(place)
        if executable is not None:
            return executable
        slot = _slot(what)
        recorded = module.meta["compiled"].get(slot)
        if recorded is not None and machine.target is not None:
            executable = restore(what.function, what.arguments, recorded)
            LOG.debug("%s: compiled code of %s is %s", what.name, module.key[:16],
                      "gone" if executable is None else "there")  # fmt: skip
        if executable is None:
            begun = _place_of(module.key, what)
            compiled = None
            if self._compilations.has(begun):
                compiled = partial(self._compilations.take, begun)
            executable = build(
                what.function, what.arguments, what.configs, machine.target, machine.shared,
                load=True, compiled=compiled,
            )  # fmt: skip
            self.built += 1
            if machine.target is not None and (made := record(executable)) is not None:
                module.meta["compiled"][slot] = made
                if stored:
                    self._store.save(module.key, module.source, module.meta)
        self._executables[place] = executable
        return executable


def _place_of(key: str, what: _Function) -> _Place:
    return key, what.name, what.configs[0], tuple(what.more.values())


def _slot(what: _Function) -> str:
    """Name of a function in the records of compiled code."""
    return "_".join([what.name, *map(str, what.more.values())])


def _entry_of(module: _Module, job: Job, config: Config) -> _Function:
    function = getattr(module.module, job.kernel.entry)
    arguments = job.kernel.arguments(function, job.facts, config)
    return _Function(job.kernel.name, function, arguments, (config,), {})


def _needed(fixed: Sequence[FixedKernel], jobs: Sequence[Job]) -> list[FixedKernel]:
    return [each for each in fixed if each.applies(jobs[0])]


def _fixed_function(fixed: FixedKernel, job: Job, machine: Target, has_dlse: bool) -> _Function:
    more = {"ROWS": STATISTICS_ROWS, **fixed.constants(job), "HAS_DLSE": has_dlse}
    arguments = arguments_of(fixed.function, job.facts, more)
    configs = fixed.configs(job, machine)
    return _Function(fixed.name, fixed.function, arguments, configs, more)


def _about(job: Job, kernel: str, machine: Target) -> dict[str, Any]:
    """A module in words, as its description holds them."""
    facts = job.facts
    about = About(
        short_form(job.lowered, SHORT_FORM), job.lowered.digest, kernel, machine.name, facts.dtype,
        facts.head_dim, facts.value_dim,
    )  # fmt: skip
    return {"about": about.to_json()}


def _key(job: Job, family: str, kind: str, machine: Target) -> str:
    """Digest of all that a module depends on."""
    precision = machine.products(job.facts).precision if family else "ieee"
    return KernelKey(
        program=job.lowered.digest,
        kind=f"{family} {kind}".strip(),
        facts=repr(job.facts),
        options=f"precision={precision}",
        target=machine.name,
        triton=triton.__version__,
        attndsl=version_of("attndsl"),
        fingerprint=source_fingerprint(),
    ).digest()


def list_config(block_m: int, block_n: int, parts: int) -> tuple[Config, dict[str, int | bool]]:
    """Config and constants of the kernels that write lists of tiles."""
    rows = block_m // parts
    sizes = {"BLOCK_M": rows, "BLOCK_N": block_n, "CHUNK": LIST_CHUNK}
    return Config(rows, block_n, *_LIST_CONFIG), {
        **sizes,
        "PARTS": parts,
        "WIDTH": row_width(parts),
    }
