"""Bundles: folders of compiled kernels, made by ``attndsl build`` and read by calls.

``bundle.json`` names every other file with its size and SHA-256. So the digest of ``bundle.json``
is the digest of all. Beside it lie

- ``entries/``: entries of the cache, as the cache has them, but that paths are within the bundle,
  and that texts are ``KEY.txt``: installers compile every ``.py`` of a package that they find;
- ``code/``: what Triton has compiled;
- ``launchers/``: what a C compiler has, for versions of Triton that have such.

A bundle is code: its texts are imported and its libraries are loaded. So nothing is read from a
bundle that others than its user or root may write to, nor through links, and what is read is held
to the digests first. No name of a file leads out of the bundle. Only the bundles that came with
this package may lie where others write, as the package does.

Non-goals: signatures; bundles that lie in archives.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from attndsl.backends.cache_entries import Entry
from attndsl.backends.key import version_of
from attndsl.errors import ConfigError
from attndsl.foundation.bounded_io import read_bytes
from attndsl.foundation.fingerprint import source_fingerprint

from .disk_cache import EntryInfo, described_entry, reason, verified_entry
from .owned_folder import open_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST = "bundle.json"
FORMAT = 2
MAX_MANIFEST = 16 << 20
"""Bytes of ``bundle.json``."""
MAX_FILE = 1 << 28
"""Bytes of any other file."""
MAX_BYTES = 4 << 30
"""Bytes of all files together."""
_MAX_TEXT = 200
"""Characters of a version."""
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,200}"
_NAMES = re.compile(
    rf"entries/[0-9a-f]{{64}}\.(?:txt|json)|code/{_NAME}/{_NAME}\.(?:cubin|json)"
    rf"|launchers/{_NAME}/{_NAME}\.so"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class BundleFile(NamedTuple):
    """Size and SHA-256 that a bundle records of one of its files."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions with which the kernels of a bundle were compiled."""

    attndsl: str
    fingerprint: str
    """Fingerprint of attndsl's sources."""
    triton: str
    python: str
    """The suffix of Python's libraries, on which launchers depend."""

    @staticmethod
    def here() -> Versions:
        """Versions of this process."""
        return Versions(
            version_of("attndsl"), source_fingerprint(), version_of("triton"), python_suffix()
        )


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle: its manifest has been checked, its files not yet."""

    folder: Path
    digest: str
    targets: tuple[str, ...]
    versions: Versions
    files: Mapping[str, BundleFile]
    driver: str | None
    """The module of Triton's driver, among the launchers."""
    twins: Mapping[str, str]
    """Names that Triton looks for on platforms that it knows less of, by name of a launcher's
    folder."""
    trusted: bool
    """True if it may lie where others write: it came with this package, or all is copied."""

    @property
    def size(self) -> int:
        """Bytes of all files except ``bundle.json``."""
        return sum(file.bytes for file in self.files.values())

    def keys(self) -> list[str]:
        """Keys of its entries."""
        names = (n for n in self.files if n.startswith("entries/") and n.endswith(".json"))
        return [name.removeprefix("entries/").removesuffix(".json") for name in names]

    def why_not(self) -> str | None:
        """Reason why this process can use no kernel of the bundle, whatever the GPU; or None."""
        here = Versions.here()
        wrong = [
            f"{name} {own}, and here is {found}"
            for name, own, found in (
                ("attndsl", self.versions.attndsl, here.attndsl),
                ("triton", self.versions.triton, here.triton),
            )
            if own != found
        ]
        if not wrong and self.versions.fingerprint != here.fingerprint:
            wrong = [f"attndsl {here.attndsl} with other sources than those here"]
        return None if not wrong else f"it is for {'; '.join(wrong)}"

    def why_no_launchers(self) -> str | None:
        """Reason why launchers are compiled here although the kernels are not; or None."""
        if self.driver is None or self.versions.python == (here := python_suffix()):
            return None
        return f"its launchers are for Python's {self.versions.python}, and here is {here}"

    def has_launcher(self, name: str) -> bool:
        """Return True if the bundle has the launcher ``name``, for this Python."""
        return name in self.files and name.endswith(python_suffix())

    def entry(self, key: str) -> Entry | None:
        """The entry of ``key`` with the paths of its code, all of it checked; or None.

        Raises:
            ConfigError, OSError, ValueError: The bundle is not as it was built.
        """
        if f"entries/{key}.json" not in self.files:
            return None
        text, described = self.read(f"entries/{key}.txt"), self.read(f"entries/{key}.json")
        found = verified_entry(self.folder / "entries" / f"{key}.txt", key, described, text)
        if "compiled" not in found.meta:
            return found
        compiled = found.meta["compiled"]
        if not isinstance(compiled, dict):
            raise ValueError(f"entry {key[:16]} is of another form")
        own = {slot: self._resolved(key, recorded) for slot, recorded in compiled.items()}
        return Entry(found.path, found.source, {**found.meta, "compiled": own})

    def _resolved(self, key: str, recorded: Any) -> dict[str, Any]:
        """Record of compiled code in an entry, with paths and digests of its checked files."""
        try:
            files = {str(name): str(path) for name, path in recorded["files"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"entry {key[:16]} is of another form") from error
        for name in files.values():
            self.read(name)
        return {
            **recorded,
            "files": {name: str(self.folder / path) for name, path in files.items()},
            "sha256": [self.files[path].sha256 for path in files.values()],
        }

    def read(self, name: str) -> bytes:
        """The content of a file that will be imported or loaded from where it lies.

        Raises:
            ConfigError, OSError, ValueError: The bundle has no such file, or not as it was built;
                others may write to it, unless it is trusted.
        """
        if name not in self.files:
            raise ValueError(f"it has no file {name!r}")
        file = self.files[name]
        if self.trusted:
            return _held(file, name, read_bytes(self.folder / name, file.bytes, pipes=False))
        with open_folder(self.folder, of_root=True) as folder:
            return _held(file, name, folder.read(name, file.bytes))

    def entries(self) -> list[EntryInfo]:
        """All entries, as listings show them; an entry that differs from its build is damaged."""
        found = []
        for key in self.keys():
            names = (f"entries/{key}.txt", f"entries/{key}.json")
            size = sum(self.files[name].bytes for name in names if name in self.files)
            try:
                text, described = (self.read(name) for name in names)
                entry = verified_entry(self.folder, key, described, text)
                size += self._code_bytes(entry)
            except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError):
                found.append(EntryInfo(key, "damaged", size, 0.0))
                continue
            kind, about = described_entry(entry.meta)
            found.append(EntryInfo(key, kind, size, 0.0, about))
        return found

    def _code_bytes(self, entry: Entry) -> int:
        compiled: Any = entry.meta.get("compiled", {})
        names = (name for slot in compiled.values() for name in slot["files"].values())
        return sum(self.files[name].bytes for name in names if name in self.files)


def is_name(name: str) -> bool:
    """Return True if a file of a bundle, other than ``bundle.json``, may have this name."""
    return _NAMES.fullmatch(name) is not None


def is_digest(text: str) -> bool:
    """Return True if ``text`` is a SHA-256 digest in lower-case hex."""
    return _SHA256.fullmatch(text) is not None


def python_suffix() -> str:
    """Suffix of file names of extension libraries for this Python."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or "")


def open_bundle(folder: Path, demanded: str | None = None, trusted: bool = False) -> Bundle:
    """The bundle in ``folder``.

    Args:
        folder: Where it lies. It may be a link.
        demanded: The digest that it has to have; any for None.
        trusted: Whether it may lie where others write: only for who copies all that it reads, and
            for what came with this package.

    Raises:
        ConfigError: There is none, it is not as it was built, it has another digest, or others
            may write to it.
    """
    name = f"the bundle {folder}"
    try:
        if trusted:
            content = read_bytes(folder / MANIFEST, MAX_MANIFEST, pipes=False)
        else:
            with open_folder(folder, of_root=True) as opened:
                content = opened.read(MANIFEST, MAX_MANIFEST)
        # Where its files are. What is read there is held to the digests.
        folder = folder.resolve(strict=True)
    except ConfigError as error:
        raise ConfigError(f"{name} cannot be used: {error.message}", hint=error.hint) from error
    except (OSError, ValueError, RuntimeError) as error:
        told = str(error) if isinstance(error, RuntimeError) else reason(error)
        raise ConfigError(
            f"{name} cannot be used: {told}",
            hint="give the folder that attndsl build has written, which holds bundle.json",
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if demanded is not None and digest != demanded:
        raise ConfigError(
            f"{name} has the digest {digest}, and {demanded} is demanded",
            hint="use the bundle that was built, or the digest that was printed when it was",
        )
    try:
        return _bundle(folder, digest, json.loads(content), trusted)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{name} cannot be read: {error}", hint="build it again with attndsl build"
        ) from error


def _held(file: BundleFile, name: str, content: bytes) -> bytes:
    """``content``, if it is that of the file that was built."""
    if len(content) != file.bytes or hashlib.sha256(content).hexdigest() != file.sha256:
        raise ValueError(f"{name} is not the file that was built")
    return content


def _bundle(folder: Path, digest: str, found: dict[str, Any], trusted: bool) -> Bundle:
    """The bundle that a manifest describes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It is of another form.
    """
    if found["format"] != FORMAT:
        raise ValueError("it is of another format")
    files = {name: BundleFile(x["bytes"], x["sha256"]) for name, x in found["files"].items()}
    for name, file in files.items():
        if not is_name(name):
            raise ValueError(f"{name[:80]!r} is no name of a file in a bundle")
        if type(file.bytes) is not int or not 0 <= file.bytes <= MAX_FILE:
            raise ValueError(f"{name} is said to have {str(file.bytes)[:40]} bytes")
        if not isinstance(file.sha256, str) or not _SHA256.fullmatch(file.sha256):
            raise ValueError(f"{name} has no digest")
    versions = Versions(**{name: _text(found[name]) for name in Versions.__slots__})
    driver = None if found["driver"] is None else _text(found["driver"])
    if driver is not None and driver not in files:
        raise ValueError(f"it has no file {driver!r}")
    twins = {_folder(own): _folder(other) for own, other in found["twins"].items()}
    targets = tuple(map(_text, found["targets"]))
    bundle = Bundle(folder, digest, targets, versions, files, driver, twins, trusted)
    if bundle.size > MAX_BYTES:
        raise ValueError(f"its files have more than {MAX_BYTES} bytes")
    return bundle


def _folder(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(_NAME, value):
        raise ValueError(f"{str(value)[:40]!r} is no name of a folder")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
        raise ValueError(f"{str(value)[:40]!r} is no version")
    return value
