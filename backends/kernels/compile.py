"""A generated module's kernels as things that can be launched: compiled, or interpreted."""

from __future__ import annotations

import hashlib
import json
import linecache
import os
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import triton
from triton import CompilationError
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import triton_key
from triton.runtime.errors import OutOfResources, PTXASError

from attndsl.errors import BackendError, ConfigError
from attndsl.foundation.caches import memoised
from attndsl.foundation.logs import LOG

from ..emit.parsing import parsing
from .compile_failures import kernel_error, reason_of
from .compile_pool import Turn
from .config import Config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triton.backends.compiler import GPUTarget


HAS_LAUNCHERS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
"""True if this Triton compiles a launcher for each kernel."""
_FAILED_PASS = "PassManager::run failed"
"""Message of Triton where a pass of its compiler fails."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument: Triton's type (``constexpr`` for constants), and what is known of it."""

    name: str
    type: str
    constant: int | str | bool | None = None
    divisor: int = 1
    """A number known to divide it: 1, 8 or 16."""


@dataclass(frozen=True, slots=True)
class Executable:
    """A kernel ready to launch, and the config that it was compiled with."""

    kernel: Any
    config: Config
    interpreted: bool
    constants: tuple[object, ...] = field(default=())
    """Values of the trailing constant arguments."""

    @property
    def spills(self) -> int:
        """Registers a thread that are kept in memory; 0 for the interpreter."""
        return 0 if self.interpreted else int(self.kernel.n_spills or 0)

    def launch(self, programs: int, stream: int, arguments: Sequence[object]) -> None:
        """Run ``programs`` programs on ``stream`` with the run-time arguments, in order."""
        self.launch_grid((programs, 1, 1), stream, arguments)

    def launch_grid(
        self, grid: tuple[int, int, int], stream: int, arguments: Sequence[object]
    ) -> None:
        """Run a grid of programs, told apart by up to three numbers; else as :meth:`launch`."""
        if self.interpreted:
            self.kernel[grid](*arguments, *self.constants)
            return
        kernel = self.kernel
        kernel.run(
            *grid, stream, kernel.function, kernel.packed_metadata, None, None, None,
            *arguments, *self.constants,
        )  # fmt: skip


def load_module(path: Path, key: str) -> ModuleType:
    """The generated module at ``path``."""
    return module_of(path.read_text("utf-8"), path, key)


def module_of(source: str, path: Path, key: str) -> ModuleType:
    """The module that the text ``source`` makes, whatever the file at ``path`` holds by now.

    Triton asks Python for the kernels' text, and gets ``source`` too.
    """
    name = str(path)
    # Without a time of change, entries are never compared with the file.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType(f"attndsl_kernels_{key[:16]}")
    module.__file__ = name
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def is_module_of(source: str, path: Path) -> bool:
    """Return True if ``source`` is what Python shows of the module at ``path``, made last."""
    return "".join(linecache.getlines(str(path))) == source


def is_interpreted(function: object) -> bool:
    """Return True if Triton's interpreter runs ``function`` (TRITON_INTERPRET was set)."""
    return not isinstance(function, triton.runtime.JITFunction)


def compile_kernel(
    function: object,
    arguments: Sequence[Argument],
    config: Config,
    target: GPUTarget,
    shared_memory: int,
) -> Any:
    """Compile for ``target``, which need not be present.

    Args:
        function: The kernel.
        arguments: All its arguments, in order.
        config: Tile sizes and launch options.
        target: Architecture.
        shared_memory: Bytes that one program may use.

    Raises:
        OutOfResources: The compiled kernel needs more shared memory than that.
        KernelError: Triton does not lower its text.
    """
    source = _source(function, arguments)
    options: dict[str, object] = {
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": True,
    }
    if config.most_registers and target.backend == "cuda":
        options["maxnreg"] = config.most_registers

    def compiled() -> Any:
        with Turn() as source.turn:
            hash_triton().join()
            try:
                return triton.compile(source, target=target, options=options)
            finally:
                source.join()

    try:
        kernel = parsing(compiled)
    except CompilationError as error:
        raise kernel_error(function, error) from error
    if kernel.metadata.shared > shared_memory:
        raise OutOfResources(kernel.metadata.shared, shared_memory, "shared memory")
    return kernel


@memoised("threads that read Triton's files", None)
def hash_triton() -> threading.Thread:
    """A thread that looks at all of Triton's files, which Triton does before it first compiles.

    That takes a quarter of a second, and Python's lock is free meanwhile.
    """
    thread = threading.Thread(target=triton_key, name="attndsl hashes triton", daemon=True)
    thread.start()
    return thread


def with_launcher(compiled: Callable[[], Any]) -> Any:
    """The kernel that ``compiled`` gives, and in Triton's cache the launcher that it will look for.

    Before version 3.7 Triton has a C compiler make one for each kernel when it loads it. See M32 in
    docs/dev/measured.md.
    """
    kernel = compiled()
    # What fails here fails again where the kernel is loaded, and is raised there.
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def build(
    function: object,
    arguments: Sequence[Argument],
    configs: Sequence[Config],
    target: GPUTarget | None,
    shared_memory: int,
    load: bool,
    compiled: Callable[[], Any] | None = None,
) -> Executable:
    """The first of ``configs`` that the device has resources for.

    Args:
        function: The kernel.
        arguments: All its arguments, in order; BLOCK_M and BLOCK_N are taken from the config.
        configs: Candidates, best first.
        target: Architecture; None for the interpreter.
        shared_memory: Bytes that one program may use.
        load: Whether to load the code onto the current device, where registers run out.
        compiled: Gives what :func:`compile_kernel` does for the first config, or raises the same.

    Raises:
        KernelError: Triton does not lower its text.
        BackendError: None fits; says what each lacked.
        ConfigError: Triton cannot write its files.
    """
    if target is None:
        config = configs[0]
        return Executable(function, config, True, _constants(arguments))
    refusals = []
    for config in configs:
        try:
            begun, compiled = compiled, None
            if begun is None:
                kernel = compile_kernel(function, arguments, config, target, shared_memory)
            else:
                kernel = begun()
            if load:
                kernel._init_handles()
        except (OutOfResources, PTXASError) as refusal:
            refusals.append(f"{config}: {reason_of(refusal)}")
            continue
        except OSError as failure:
            raise ConfigError(
                f"Triton cannot write what it compiles: {failure}",
                hint="make room, or name other folders by TRITON_CACHE_DIR and TMPDIR; "
                "backend='reference' needs none",
            ) from failure
        except RuntimeError as failure:
            # A pass of the compiler itself: Triton 3.6 to pipeline some lookups that a mask guards
            # which reads the score; with fewer stages it succeeds.
            if _FAILED_PASS not in str(failure):
                raise
            refusals.append(f"{config}: {reason_of(failure)}")
            continue
        return Executable(kernel, config, False, _constants(arguments))
    raise BackendError(
        "no tile size of this kernel fits the device: " + "; ".join(refusals),
        hint="report the program and head dims; backend='reference' computes it meanwhile",
    )


def record(executable: Executable) -> dict[str, object] | None:
    """The JSON values by which :func:`restore` finds the compiled code again.

    None where Triton's files are gone, or are no longer those that it has read.
    """
    kernel = executable.kernel
    files = {
        name: str(path)
        for name, path in kernel.metadata_group.items()
        if name.endswith((".json", ".cubin", ".hsaco")) and not name.startswith("__grp__")
    }
    try:
        digests = _digests(kernel, files)
    except (OSError, ValueError) as error:
        LOG.info("compiled code is not kept: %s", error)
        return None
    config = asdict(executable.config)
    return {"config": config, "hash": kernel.hash, "files": files, "sha256": digests}


def restore(
    function: object, arguments: Sequence[Argument], recorded: Mapping[str, Any]
) -> Executable | None:
    """The executable of an earlier process, or None where its compiled code is gone or another.

    Triton would find the code in its own cache too, but hashes its whole installation first, which
    takes longer than all else of a warm start.
    """
    try:
        config = Config(**recorded["config"])
        # A kernel of Triton's that is made half-way says so on stderr when it is collected.
        if not all(map(os.path.exists, recorded["files"].values())):
            return None
        source = _source(function, arguments)
        kernel = CompiledKernel(source, recorded["files"], recorded["hash"])
        # Whoever changed a file after it was recorded does not have it run.
        if _digests(kernel, recorded["files"]) != recorded["sha256"]:
            return None
        kernel._init_handles()
    except (OSError, KeyError, TypeError, ValueError, StopIteration, RuntimeError):
        return None
    return Executable(kernel, config, False, _constants(arguments))


def _digests(kernel: Any, files: Mapping[str, str]) -> list[str]:
    """SHA-256 of each of the files that Triton has read ``kernel`` from.

    Raises:
        OSError: One is gone.
        ValueError: One does not say what Triton has read.
    """
    found = []
    for name, path in files.items():
        content = kernel.kernel
        if name.endswith(".json"):
            content = Path(path).read_bytes()
            # As Triton has written it.
            read = json.dumps(kernel.metadata._asdict(), default=vars)
            if json.loads(content) != json.loads(read):
                raise ValueError(f"{path} has changed")
        found.append(hashlib.sha256(content).hexdigest())
    return found


def _constants(arguments: Sequence[Argument]) -> tuple[object, ...]:
    return tuple(a.constant for a in arguments if a.type == "constexpr")


class _InTurn:
    """A kernel's text, whose turn ends once it is read.

    Before version 3.7 a C compiler makes the kernel's launcher while Triton lowers the kernel. See
    M70 in docs/dev/measured.md.
    """

    name: str
    turn: Turn | None = None
    _launcher: threading.Thread | None = None

    def make_ir(self, *given: Any) -> Any:
        """Make the IR that Triton lowers, begin the launcher, and end the kernel's turn."""
        try:
            module = super().make_ir(*given)  # type: ignore[misc]
            if HAS_LAUNCHERS and given[0].backend == "cuda":
                self._begin_launcher(module.get_tensordesc_metadata())
            return module
        finally:
            if self.turn is not None:
                self.turn.end()

    def join(self) -> None:
        """Wait for the launcher."""
        if self._launcher is not None:
            self._launcher.join()

    def _begin_launcher(self, descriptors: object) -> None:
        """Have a thread make the launcher, whose text depends on nothing else of the kernel."""
        known = SimpleNamespace(tensordesc_meta=descriptors)

        def make() -> None:
            # What fails here fails again where the kernel is loaded, and is raised there. Triton
            # asks for more than is known by now once the launcher is in its cache.
            with suppress(Exception):
                triton.runtime.driver.active.launcher_cls(self, known)

        thread = threading.Thread(target=make, name=f"attndsl makes a launcher of {self.name}")
        with suppress(RuntimeError):  # The system has no more threads.
            thread.start()
            self._launcher = thread


class _TritonSource(_InTurn, ASTSource):  # type: ignore[misc]
    """A kernel of Triton."""


class _GluonSource(_InTurn, GluonASTSource):  # type: ignore[misc]
    """A kernel of Gluon."""


def _source(function: Any, arguments: Sequence[Argument]) -> _TritonSource | _GluonSource:
    constants = {a.name: a.constant for a in arguments if a.type == "constexpr"}
    signature = {a.name: a.type for a in arguments}
    attributes = {
        (position,): [["tt.divisibility", argument.divisor]]
        for position, argument in enumerate(arguments)
        if argument.divisor > 1
    }
    kind = _GluonSource if function.is_gluon() else _TritonSource
    return kind(function, signature, constexprs=constants, attrs=attributes)
