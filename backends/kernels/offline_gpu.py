"""A driver of Triton for a GPU that is not there: kernels are compiled for it and never launched.

With this driver a call finds its kernels in the way that it finds them on the GPU. Code is not
loaded, so that what a GPU would say of it is read from the code itself.

Before version 3.7, Triton has a C compiler make a launcher for each kernel and a module for the
driver. They are made here too, against a library of empty functions in place of CUDA's, and not
loaded.

Non-goals: AMD's GPUs; results, since nothing runs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from triton.runtime.cache import FileCacheManager

from attndsl.errors import BackendError
from attndsl.foundation.logs import LOG

from .compile import HAS_LAUNCHERS
from .config import SHARED_MEMORY
from .cubin import local_bytes
from .target import parse_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton.backends.compiler import GPUTarget

TARGETS = tuple(name for name in SHARED_MEMORY if name.startswith("cuda:"))
"""GPUs that kernels can be compiled for without them."""
_MOST_THREADS = 1024
_REGISTER_BYTES = 4
DRIVER = "driver"
"""Name of the module of Triton's driver among launchers."""
_LIBRARY = "libcuda.so.1"


class Loaded(NamedTuple):
    """Result of Triton's ``load_binary``."""

    module: None
    function: None
    registers: int
    spills: int
    most_threads: int


class _Found(Exception):
    """Signal that a file is in Triton's cache by now. Nothing else raises or catches it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = Path(path)


def _finding(asked: threading.local) -> type[FileCacheManager]:
    """Triton's cache, which ends the making of a launcher where it would be loaded.

    Args:
        asked: Has ``now`` in threads that have one made.
    """

    class Finding(FileCacheManager):  # type: ignore[misc]
        def get_file(self, filename: str) -> str | None:
            found: str | None = super().get_file(filename)
            if found is not None and hasattr(asked, "now"):
                raise _Found(found)
            return found

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            path: str = super().put(data, filename, binary)
            if hasattr(asked, "now"):
                raise _Found(path)
            return path

    return Finding


def _other_platform(own: str) -> str | None:
    """Name that Triton would give this platform if the command ``file`` were added, or removed.

    ``platform.architecture``, which Triton asks, finds out how programs are linked by ``file``.
    Slim images have none, and then the name ends in nothing. None for other systems.
    """
    linked = ",ELF"
    if own.endswith(linked):
        return own.removesuffix("ELF")
    return own + "ELF" if own.endswith(",") else None


class _Launcher:
    """Launches nothing."""

    def __call__(self, *arguments: object) -> None:
        """Nothing."""


class _Utilities:
    """Stand-in for Triton's GPU utilities: properties of a GPU, and spills of compiled code."""

    def __init__(self, target: GPUTarget, shared: int) -> None:
        self._properties = {"max_shared_mem": shared, "multiprocessor_count": 1}

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Properties that decide which kernels there are."""
        return self._properties

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> Loaded:
        """Report the spilled registers of ``code`` as CUDA would, without loading it."""
        spills = local_bytes(code) // _REGISTER_BYTES
        return Loaded(None, None, 0, spills, _MOST_THREADS)


class AbsentGPU:
    """The driver of a GPU that is not there."""

    def __init__(self, target: str) -> None:
        """Kernels for ``target``, such as ``cuda:90``.

        Raises:
            BackendError: There is no such target, or the interpreter is on.
        """
        if target not in TARGETS:
            raise BackendError(
                f"kernels cannot be compiled for {target[:40]!r} without it",
                hint=f"use one of {', '.join(TARGETS)}",
            )
        if triton.knobs.runtime.interpret:
            raise BackendError(
                "TRITON_INTERPRET is set, so that nothing is compiled",
                hint="unset TRITON_INTERPRET",
            )
        self._target = parse_target(target)
        self.utils = _Utilities(self._target, SHARED_MEMORY[target])
        self.launchers: dict[str, Path] = {}
        """Results of a C compiler in Triton's cache, by hash of a kernel, or ``driver``."""
        self.twins: dict[str, str] = {}
        """By name of a launcher's folder there: its name where Triton knows less, or more, of the
        platform. See :func:`_other_platform`."""
        self.without_launchers = "" if HAS_LAUNCHERS else "this Triton needs none"
        """Reason why there are no launchers, or empty."""
        self._lock, self._asked = threading.Lock(), threading.local()

    def activate(self) -> None:
        """Let this process compile for the GPU, and for no other from now on."""
        triton.runtime.driver.set_active(self)
        if not HAS_LAUNCHERS:
            return
        triton.knobs.cache.manager_class = _finding(self._asked)
        try:
            self._make_library()
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            self.without_launchers = f"no C compiler makes them here: {error}"
            return
        from triton.backends.nvidia.driver import CudaUtils

        self._find(DRIVER, CudaUtils)

    def get_current_target(self) -> GPUTarget:
        """Target that kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> _Launcher:
        """Stand-in for Triton's launcher of a kernel; the real one is made and kept, if wanted."""
        if not self.without_launchers:
            from triton.backends.nvidia.driver import CudaLauncher

            self._find(metadata.hash, lambda: CudaLauncher(source, metadata))
        return _Launcher()

    def _find(self, name: str, make: Callable[[], object]) -> None:
        """Have a launcher made, unless it was."""
        with self._lock:
            if name in self.launchers or self.without_launchers:
                return
            self._asked.now = True
            try:
                make()
            except _Found as found:
                self.launchers[name] = found.path
                self._find_twin(found.path, make)
            except Exception as error:  # Triton's, the C compiler's: kernels serve without.
                self.without_launchers = f"Triton cannot make them here: {error}"
                LOG.warning("no launchers: %s", error)
            finally:
                del self._asked.now

    def _find_twin(self, path: Path, make: Callable[[], object]) -> None:
        """Note the folder name that the launcher at ``path`` has on the other kind of machine."""
        from triton.runtime import build

        own, other = build.platform_key, _other_platform(build.platform_key())
        if other is None:
            return
        build.platform_key = lambda: other
        # Nothing is compiled again.
        triton.knobs.build.impl = lambda *given: str(path)
        try:
            make()
        except _Found as found:
            self.twins[path.parent.name] = found.path.parent.name
        except Exception as error:  # The launcher itself is there.
            LOG.warning("a launcher has no name for %s: %s", other, error)
        finally:
            build.platform_key = own
            triton.knobs.build.impl = None

    def _make_library(self) -> None:
        """A library that launchers ask for by its name when they are loaded.

        Linkers leave out a library that defines nothing that is called. A launcher without it
        cannot be loaded, so that it would be compiled again.
        """
        import triton.backends.nvidia.driver as driver

        folder = Path(tempfile.mkdtemp(prefix="attndsl-cuda-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        text, sources = folder / "empty.c", Path(driver.__file__)
        called = {
            name
            for path in (sources, sources.with_name("driver.c"))
            for name in re.findall(r"\bcu[A-Z]\w*", path.read_text("utf-8"))
        }
        text.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(called)))
        compiler = sysconfig.get_config_var("CC") or "cc"
        for command in ("gcc", "clang", compiler.split()[0]):
            with suppress(FileNotFoundError):
                line = [
                    command,
                    "-shared",
                    f"-Wl,-soname,{_LIBRARY}",
                    "-o",
                    folder / _LIBRARY,
                    text,
                ]
                subprocess.run(line, check=True, capture_output=True)
                triton.knobs.nvidia.libcuda_path = str(folder)
                return
        raise RuntimeError("neither gcc nor clang is there")
