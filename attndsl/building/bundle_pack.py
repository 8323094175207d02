"""Packing of a build's kernels into a bundle: a folder whose files are all named by digests."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attndsl.backends.kernels.offline_gpu import DRIVER
from attndsl.errors import ConfigError
from attndsl.foundation.fingerprint import sources_changed
from attndsl.runtime.bundles import FORMAT, MANIFEST, Versions, is_name
from attndsl.runtime.disk_cache import described_entry, entry_text

if TYPE_CHECKING:
    from attndsl.backends.cache_entries import About

    from .build import Built


class PackedKernel(NamedTuple):
    """One kernel of a bundle."""

    about: About
    text: str
    """Its program, as it was written."""
    name: str
    """Name of the function, with its constants."""
    seconds: float
    """Seconds of its compilation; 0 where Triton had it."""
    bytes: int
    """Size of the compiled code."""


class PackedBundle(NamedTuple):
    """A bundle, as it was written."""

    digest: str
    kernels: tuple[PackedKernel, ...]
    programs: int
    bytes: int
    """Size of all files."""


def pack(built: Built, target: str, folder: Path) -> PackedBundle:
    """Write the bundle; a bundle that is there already is replaced.

    Raises:
        ConfigError: ``folder`` holds something else, or cannot be written; the package has changed.
    """
    check_output(folder)
    if sources_changed():
        raise ConfigError(
            "the files of attndsl are not those that this process has imported, or are in an "
            "archive, so that nobody can say what the kernels are for",
            hint="build again, with attndsl in a folder",
        )
    folder = Path(os.path.abspath(folder))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as found:
            writer = _BundleWriter(Path(found) / "bundle")
            kernels, programs = _entries(built, writer)
            digest = writer.finish(built, target)
            check_output(folder)  # Minutes have passed.
            if folder.is_dir():
                os.replace(folder, Path(found) / "before")
            os.replace(writer.folder, folder)
    except OSError as error:
        raise ConfigError(
            f"the bundle cannot be written to {folder}: {error.strerror or error}"
        ) from error
    return PackedBundle(digest, tuple(kernels), programs, writer.size)


def check_output(folder: Path) -> None:
    """Refuse to write a bundle over something else.

    Raises:
        ConfigError: ``folder`` holds what is no file of a bundle, and would be lost.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", hint="give -o another name")
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and name != MANIFEST and not is_name(name):
            raise ConfigError(
                f"{folder} holds other files than a bundle's: {name}",
                hint="give -o a folder of its own",
            )


class _BundleWriter:
    """A bundle that is being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, dict[str, Any]] = {}
        self.driver: str | None = None
        folder.mkdir()
        folder.chmod(0o755)

    @property
    def size(self) -> int:
        return sum(file["bytes"] for file in self.files.values())

    def add(self, name: str, content: bytes) -> str:
        """Write a file that all may read and only the owner may write to, unless it is there."""
        if name not in self.files:
            path = self.folder
            for part in name.split("/")[:-1]:
                path = path / part
                if not path.exists():
                    path.mkdir()
                    path.chmod(0o755)
            path = self.folder / name
            path.write_bytes(content)
            path.chmod(0o644)
            digest = hashlib.sha256(content).hexdigest()
            self.files[name] = {"bytes": len(content), "sha256": digest}
        return name

    def add_launcher(self, path: Path) -> str:
        return self.add(f"launchers/{path.parent.name}/{path.name}", path.read_bytes())

    def finish(self, built: Built, target: str) -> str:
        """Write the manifest: its digest."""
        driver = built.gpu.launchers.get(DRIVER)
        manifest = {
            "format": FORMAT,
            "targets": [target],
            **asdict(Versions.here()),
            "driver": None if driver is None else self.add_launcher(driver),
            "twins": dict(sorted(built.gpu.twins.items())),
            "files": dict(sorted(self.files.items())),
        }
        content = json.dumps(manifest, indent=1).encode()
        path = self.folder / MANIFEST
        path.write_bytes(content)
        path.chmod(0o644)
        return hashlib.sha256(content).hexdigest()


def _entries(built: Built, writer: _BundleWriter) -> tuple[list[PackedKernel], int]:
    """Write all entries: the kernels in them, and how many are programs."""
    kernels: list[PackedKernel] = []
    entries = sorted(built.store.entries.items())
    said = [described_entry(entry.meta) for _, entry in entries]
    texts = {about.program: about.text for kind, about in said if kind == "program"}
    programs = 0
    for (key, entry), (kind, about) in zip(entries, said, strict=True):
        meta: dict[str, Any] = dict(entry.meta)
        if kind == "program":
            programs += 1
        elif not meta.get("compiled"):
            continue  # Of a tile size that did not fit.
        else:
            compiled = {}
            for slot, recorded in meta["compiled"].items():
                compiled[slot], size = _code(recorded, built, writer)
                seconds = built.seconds.get(recorded["hash"], 0.0)
                text = texts.get(about.program, about.text)
                kernels.append(PackedKernel(about, text, slot, seconds, size))
            meta["compiled"] = compiled
        described = entry_text(key, entry.source, meta)
        writer.add(f"entries/{key}.txt", entry.source.encode())
        writer.add(f"entries/{key}.json", described.encode())
    return sorted(kernels, key=lambda x: (x.text, words(x.about), x.name)), programs


def _code(
    recorded: dict[str, Any], built: Built, writer: _BundleWriter
) -> tuple[dict[str, Any], int]:
    """Write what was compiled for one kernel: what its entry records, and bytes."""
    files, size = {}, 0
    for name, path in recorded["files"].items():
        content = Path(path).read_bytes()
        files[name] = writer.add(f"code/{recorded['hash']}/{name}", content)
        size += len(content)
    found = {**recorded, "files": files}
    launcher = built.gpu.launchers.get(recorded["hash"])
    if launcher is not None:
        found["launcher"] = writer.add_launcher(launcher)
    return found, size


def words(about: About) -> str:
    """Name, dtype and head dims of a kernel, without its program."""
    dims = "/".join(dict.fromkeys(str(n) for n in (about.head_dim, about.value_dim) if n))
    parts = (about.kernel, about.dtype, dims and f"D{dims}")
    return " ".join(part for part in parts if part)
