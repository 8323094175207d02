"""Generated modules and their executables: from memory, from the disk cache, or made anew."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import triton

from attndsl.errors import BackendError
from attndsl.passes.tiles.plan import LoopPlan

from ..device.library import row_statistics
from ..emit.facts import block_widths, with_forms
from ..emit.loops import LOOPS, row_width
from ..emit.template import Products
from ..emit.tile_lists import generate_lists
from ..kernels.arguments import arguments_of
from ..kernels.compile import (
    Argument,
    Executable,
    build,
    is_interpreted,
    module_of,
    record,
    restore,
)
from ..kernels.config import (
    INTERPRETED,
    MAX_SPILLS,
    MAX_SPILLS_OF_HALF,
    Config,
    is_hopeless,
    shared_memory_of,
)
from ..kernels.pair_work import work_of_pair
from ..kernels.tile_lists import LIST_CHUNK, STATISTICS_ROWS, ListKernels
from ..key import KernelKey, source_fingerprint, version_of
from .generate import entry_of, generate_attention
from .generate_gradients import SCATTERED
from .tiles import candidates

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from triton.backends.compiler import GPUTarget

    from attndsl.pipeline import Lowered

    from ..base import Entry, Store
    from ..emit.facts import KernelFacts

DIRECTIONS_OF = {
    "forward": ("forward",),
    "backward": ("backward_kv", "backward_q"),
    "distances": ("distances",),
    "pairs": ("pairs",),
    "stored": ("stored",),
    "scattered": SCATTERED,
    "tangent": ("tangent",),
    "bounded": ("scatter_sums",),
}
_KERNELS = frozenset(name for names in DIRECTIONS_OF.values() for name in names) | LOOPS.keys()
"""Names of generated kernels; others of a module are called what they are."""
_FORWARDS = frozenset({"forward", "scatter_bounds"})
"""Kernels without derivatives."""
_LIST_CONFIG = (4, 1)
"""Warps and stages of the kernels that find tiles."""
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
class Prepared:
    """The kernels of one specialisation and direction."""

    executables: Mapping[str, Executable]
    listed: frozenset[str]
    """Directions whose tiles come from lists."""


class Kernels:
    """Generates, compiles and keeps kernels, in memory and in ``store``."""

    directions: ClassVar[Mapping[str, tuple[str, ...]]] = DIRECTIONS_OF
    """The kernels that make a forward, a backward, gradients of captures that it does not, and
    tangents."""
    fixed: ClassVar[Mapping[str, Any]] = {"row_statistics": row_statistics}
    """Kernels of a backward whose text is the same for all programs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._modules: dict[str, _Module] = {}
        self._executables: dict[tuple[object, ...], Executable] = {}
        self.built = 0
        """Kernels compiled (or taken into the interpreter) by this object so far."""

    def attention(
        self, lowered: Lowered, kind: str, facts: KernelFacts, device: torch.device,
        has_dlse: bool,
    ) -> Prepared:  # fmt: skip
        """The kernels of ``forward`` or ``backward``.

        Raises:
            BackendError: No tile size fits the device.
        """
        with self._lock:
            target = current_target()
            precision = precision_of(facts.dtype, target)
            facts = with_forms(facts, lowered.program, target)
            executables, listed = {}, set()
            for direction in self.directions[kind]:
                key = self._key(lowered, direction, facts, precision, target)
                module = (
                    self._modules.get(key)
                    or self._stored(key)
                    or self._generate(lowered, direction, facts, precision, target, device, key)
                )
                executables[direction] = self._executable(
                    module, direction, facts, target, device,
                    (Config(**module.meta["config"]),), {},
                )  # fmt: skip
                if module.meta["listed"]:
                    listed.add(direction)
            if kind == "backward":
                configs = _candidates("backward_q", "dense", facts, target, device)
                more = self._fixed_constants(facts) | {"HAS_DLSE": has_dlse}
                for name in self.fixed:
                    executables[name] = self._executable(
                        module, name, facts, target, device, configs, more
                    )
            return Prepared(executables, frozenset(listed))

    def tile_lists(
        self, lowered: Lowered, facts: KernelFacts, device: torch.device,
        block_m: int, block_n: int, parts: int = 1,
    ) -> ListKernels:  # fmt: skip
        """The kernels that list the tiles of ``block_m`` rows, each in so many ``parts``."""
        with self._lock:
            target = current_target()
            key = self._key(lowered, "tiles", facts, "ieee", target)
            module = self._modules.get(key)
            if module is None:
                entry = self._store.load(key)
                if entry is None:
                    entry = self._store.save(key, generate_lists(lowered, facts), {})
                module = self._keep(key, entry, {"compiled": {}} | dict(entry.meta))
            config, sizes = list_config(block_m, block_n, parts)
            executables = {
                name: self._executable(module, name, facts, target, device, (config,), sizes)
                for name in ("summarise", "classify", "refine", "list_tiles")
            }
            return ListKernels(executables, parts)

    def _stored(self, key: str) -> _Module | None:
        entry = self._store.load(key)
        if entry is None or not {"config", "listed", "compiled"} <= set(entry.meta):
            return None
        return self._keep(key, entry, dict(entry.meta))

    def _keep(self, key: str, entry: Entry, meta: dict[str, Any]) -> _Module:
        module = _Module(key, entry.source, module_of(entry.source, entry.path, key), meta)
        self._modules[key] = module
        return module

    def _generate(
        self, lowered: Lowered, direction: str, facts: KernelFacts, precision: str,
        target: GPUTarget | None, device: torch.device, key: str,
    ) -> _Module:  # fmt: skip
        """The module for the first tile size that the device has the resources for.

        The loops of a text are those of one tile size, so that each attempt is a text of its own.
        A kernel that spills many registers is kept only if the next candidates are no better.
        """
        configs = self._configs(lowered, direction, facts, target, device)
        attempts = _ATTEMPTS_OF_SINGLES if facts.dtype == "fp32" else _ATTEMPTS
        best: tuple[int, _Module, Executable] | None = None
        refusals = []
        for number, config in enumerate(configs):
            if best is not None and (number >= attempts or is_hopeless(config, best[2].config)):
                continue
            try:
                module, executable = self._attempt(
                    lowered, direction, facts, precision, target, device, key, config
                )
            except BackendError as refusal:
                refusals.append(refusal.message)
                continue
            if best is None or executable.spills < best[0]:
                best = executable.spills, module, executable
            most = MAX_SPILLS_OF_HALF if config.most_registers else MAX_SPILLS
            if best[0] <= most:
                break
        if best is None:
            raise BackendError(
                "no tile size of this kernel fits the device: " + "; ".join(refusals),
                hint="report the program and head dims; backend='reference' computes it meanwhile",
            )
        _, module, executable = best
        # Published again, since a later attempt may have been the worse one.
        entry = self._store.save(key, module.source, module.meta)
        self._executables[key, direction, device, ()] = executable
        return self._keep(key, entry, module.meta)

    def _attempt(
        self, lowered: Lowered, direction: str, facts: KernelFacts, precision: str,
        target: GPUTarget | None, device: torch.device, key: str, config: Config,
    ) -> tuple[_Module, Executable]:  # fmt: skip
        """The module with one tile size, not kept, nor stored for others to find.

        Raises:
            BackendError: It does not fit.
        """
        loop = plan_loop(lowered, facts, direction, config)
        meta: dict[str, Any] = {
            "config": asdict(config),
            "listed": loop.listed is not None,
            "compiled": {},
        }
        products = Products(precision, target is None and facts.dtype == "bf16")
        text = self._text(lowered, facts, direction, loop, config, products)
        self._forget(key)
        try:
            # Described once it has compiled: whoever interrupts that leaves nothing to be found.
            module = self._keep(key, self._store.save(key, text, {}), meta)
            return module, self._executable(module, direction, facts, target, device, (config,), {})
        finally:
            self._forget(key)

    def configs(
        self, lowered: Lowered, direction: str, facts: KernelFacts, device: torch.device
    ) -> tuple[Config, ...]:
        """Tile sizes that a kernel may have, in order of preference."""
        return self._configs(lowered, direction, facts, current_target(), device)

    def choose(
        self, lowered: Lowered, direction: str, facts: KernelFacts, device: torch.device,
        config: Config,
    ) -> None:  # fmt: skip
        """Have a kernel with the tile sizes of ``config`` from now on, here and on disk.

        Raises:
            BackendError: They do not fit the device. Whatever is raised, all is as before.
        """
        with self._lock:
            target = current_target()
            precision = precision_of(facts.dtype, target)
            facts = with_forms(facts, lowered.program, target)
            key = self._key(lowered, direction, facts, precision, target)
            before = self._modules.get(key) or self._stored(key)
            try:
                module, executable = self._attempt(
                    lowered, direction, facts, precision, target, device, key, config
                )
            except BaseException:
                # An interruption too must not leave a kernel that may not fit.
                if before is not None:
                    entry = self._store.save(key, before.source, before.meta)
                    self._keep(key, entry, before.meta)
                raise
            self._keep(key, self._store.save(key, module.source, module.meta), module.meta)
            self._executables[key, direction, device, ()] = executable

    def _forget(self, key: str) -> None:
        self._modules.pop(key, None)
        for place in [place for place in self._executables if place[0] == key]:
            del self._executables[place]

    def _executable(
        self, module: _Module, name: str, facts: KernelFacts,
        target: GPUTarget | None, device: torch.device, configs: tuple[Config, ...],
        more: Mapping[str, int | bool],
    ) -> Executable:  # fmt: skip
        place = (module.key, name, device, tuple(more.values()))
        executable = self._executables.get(place)
        if executable is None:
            function = self._function(module, name)
            arguments = self._arguments(function, facts, more, configs[0])
            slot = "_".join([name, *map(str, more.values())])
            recorded = module.meta["compiled"].get(slot)
            if recorded is not None and target is not None:
                executable = restore(function, arguments, recorded)
            if executable is None:
                executable = build(
                    function, arguments, configs, target, _shared_memory(target, device), load=True
                )
                self.built += 1
                if target is not None:
                    module.meta["compiled"][slot] = record(executable)
                    self._store.save(module.key, module.source, module.meta)
            self._executables[place] = executable
        return executable

    def _function(self, module: _Module, name: str) -> Any:
        if name in self.fixed:
            return self.fixed[name]
        return getattr(module.module, entry_of(name) if name in _KERNELS else name)

    def _fixed_constants(self, facts: KernelFacts) -> dict[str, int | bool]:
        """Constants of the kernels in ``fixed``."""
        return {"ROWS": STATISTICS_ROWS}

    def _configs(
        self, lowered: Lowered, direction: str, facts: KernelFacts,
        target: GPUTarget | None, device: torch.device,
    ) -> tuple[Config, ...]:  # fmt: skip
        """Tile sizes to try for a kernel, in order."""
        work = work_of(lowered, facts, direction)
        of_pair = pairs_of(lowered, facts, direction)
        return _candidates(direction, work, facts, target, device, of_pair)

    def _text(
        self, lowered: Lowered, facts: KernelFacts, direction: str, loop: LoopPlan,
        config: Config, products: Products,
    ) -> str:  # fmt: skip
        """The module of a kernel with these tile sizes."""
        return generate_attention(lowered, facts, direction, loop, config, products)

    def _arguments(
        self, function: object, facts: KernelFacts, more: Mapping[str, int | bool],
        config: Config,
    ) -> list[Argument]:  # fmt: skip
        """Types of a kernel's arguments."""
        return arguments_of(function, facts, more)

    def _key(
        self, lowered: Lowered, kind: str, facts: KernelFacts, precision: str,
        target: GPUTarget | None,
    ) -> str:  # fmt: skip
        """Digest of what a module depends on."""
        return KernelKey(
            program=lowered.digest,
            kind=kind,
            facts=repr(facts),
            options=f"precision={precision}",
            target="interpreter" if target is None else f"{target.backend}:{target.arch}",
            torch=torch.__version__,
            triton=triton.__version__,
            attndsl=version_of("attndsl"),
            fingerprint=source_fingerprint(),
        ).digest()


def list_config(block_m: int, block_n: int, parts: int) -> tuple[Config, dict[str, int | bool]]:
    """Of kernels that write lists of tiles: how they run, and their constants."""
    rows = block_m // parts
    sizes = {"BLOCK_M": rows, "BLOCK_N": block_n, "CHUNK": LIST_CHUNK}
    return Config(rows, block_n, *_LIST_CONFIG), {
        **sizes,
        "PARTS": parts,
        "WIDTH": row_width(parts),
    }


def plan_loop(lowered: Lowered, facts: KernelFacts, direction: str, config: Config) -> LoopPlan:
    """The plan of one loop of a kernel with the tile sizes of ``config``; of some it is empty."""
    if direction not in LOOPS:
        return LoopPlan()
    return lowered.sparsity.loop(
        LOOPS[direction], config.block_m, config.block_n, facts.shifted, facts.indexed,
        facts.wide,
    )  # fmt: skip


def work_of(lowered: Lowered, facts: KernelFacts, direction: str) -> str:
    """What the loop of a kernel is like (see ``tiles.candidates``)."""
    if direction not in LOOPS:
        return "dense"
    return lowered.sparsity.work(LOOPS[direction], facts.shifted, facts.indexed)


def pairs_of(lowered: Lowered, facts: KernelFacts, direction: str) -> int:
    """What a kernel does for a pair, in instructions (see :mod:`.pair_work`)."""
    return work_of_pair(lowered, facts, direction not in _FORWARDS)


def current_target() -> GPUTarget | None:
    """The GPU that kernels are compiled for; None for the interpreter."""
    if is_interpreted(row_statistics):
        return None
    target: GPUTarget = triton.runtime.driver.active.get_current_target()
    return target


def _candidates(
    direction: str,
    work: str,
    facts: KernelFacts,
    target: GPUTarget | None,
    device: torch.device,
    of_pair: int = 0,
) -> tuple[Config, ...]:
    if target is None:
        return INTERPRETED
    size = 4 if facts.dtype == "fp32" else 2
    shared = _shared_memory(target, device)
    return candidates(direction, *block_widths(facts), size, shared, work, of_pair)


def precision_of(dtype: str, target: GPUTarget | None) -> str:
    """Input precision of fp32 products: as torch's own matrix products are set."""
    if dtype != "fp32" or target is None or target.backend != "cuda":
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _shared_memory(target: GPUTarget | None, device: torch.device) -> int:
    if target is None:
        return shared_memory_of("")
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])
