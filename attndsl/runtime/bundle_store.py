"""The kernel cache and the bundles in one store, which calls search before they compile.

An entry of the cache comes first, since ``tune`` writes there. Where both have the same text, the
bundle's compiled code is used: that of the cache may be gone.

Bundles are those of ``ATTNDSL_BUNDLES``, in order, then those that ``attndsl cache import`` copied
into the cache's folder, then the one that came with this package for this Triton, if it has one.
The environment is read whenever an entry is looked up, which happens once for each kernel. A bundle
that cannot be used is told once and passed over: no call fails for its sake, and no call uses it.
The user has not asked for the one of this package. So only damage to it is a warning; the log and
``attndsl doctor`` tell that it does not fit.
"""

from __future__ import annotations

import os
import stat
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attndsl.backends.cache_entries import About, Entry
from attndsl.backends.key import version_of
from attndsl.errors import CacheWarning, ConfigError
from attndsl.foundation.bounded_io import read_bytes
from attndsl.foundation.caches import memoised
from attndsl.foundation.logs import LOG, tell_once
from attndsl.settings import BundlePlace, asks_for_shipped, read_bundles

from .bundles import MANIFEST, MAX_MANIFEST, is_digest, open_bundle
from .disk_cache import IMPORTED, described_entry, reason
from .owned_folder import open_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .bundles import Bundle
    from .disk_cache import KernelCache

_PROGRAM = "program"
_ATTEMPTS = 4
"""Attempts of an import, while others import the same bundle or remove it."""
_IMPORTING = "importing-"
"""Prefix of the folders of unfinished imports."""
SHIPPED = Path(__file__).parents[1] / "shipped"
"""Bundles that came with this package, each named after its version of Triton."""


class Imported(NamedTuple):
    """Result of importing a bundle."""

    bundle: Bundle
    """The copy."""
    new: bool
    """False if the cache had it already."""


class Shipped(NamedTuple):
    """The bundle that came with this package for this Triton."""

    folder: Path
    """Folder of the bundle, if there is one."""
    bundle: Bundle | None = None
    """None if it is not asked for, is missing, or cannot be read."""
    why_not: str | None = None
    """Reason why no call uses it; None where calls do."""
    damaged: bool = False
    """True if it cannot be read."""


class BundledCache:
    """A cache and bundles. Implements :class:`attndsl.backends.cache_entries.Store`."""

    def __init__(self, cache: KernelCache) -> None:
        """Bundles beside ``cache``, which gets what no bundle has."""
        self.cache = cache
        self._told: set[str] = set()
        self._missed: set[str] = set()
        self._lent: set[str] = set()
        """Files of bundles, which are looked up there each time."""

    def load(self, key: str) -> Entry | None:
        """The entry of ``key``, or None; see the module."""
        own, found = self.cache.load(key), None
        for bundle in (*self._bundles(), *self._shipped()):
            found = self._entry(bundle, key)
            if found is not None:
                LOG.debug("bundle: found %s in %s", key[:16], bundle.folder)
                break
        if own is None or found is None:
            return own or found
        if own.source != found.source:
            return own
        return Entry(found.path, found.source, {**own.meta, "compiled": _joined(own, found)})

    def save(self, key: str, source: str, meta: Mapping[str, object]) -> Entry:
        """Publish an entry in the cache, and tell once that a bundle lacks it."""
        if key not in self._missed and meta.get("kind") != _PROGRAM:
            self._missed.add(key)
            self._tell_missed(described_entry(meta)[1])
        return self.cache.save(key, source, self._without_lent(meta))

    def _without_lent(self, meta: Mapping[str, object]) -> Mapping[str, object]:
        """``meta`` without code from bundles, which is of no use once a bundle is removed."""
        slots: Any = meta.get("compiled", {})
        own = {s: x for s, x in slots.items() if self._lent.isdisjoint(x["files"].values())}
        return meta if len(own) == len(slots) else {**meta, "compiled": own}

    def prepare(self) -> None:
        """Give Triton the module of its driver, before it looks for it."""
        for bundle in (*self._bundles(), *self._shipped()):
            if bundle.driver is not None and bundle.why_not() is None:
                self._lay_out(bundle, bundle.driver)

    def _bundles(self) -> list[Bundle]:
        found = []
        imported = imported_places(self.cache.folder) if self.cache.enabled else []
        for place in (*read_bundles(), *imported):
            try:
                bundle = _opened(place, _stamp(place.path))
            except ConfigError as error:
                self._warn(f"{error.message}; kernels are compiled as without it", error.hint)
                continue
            for why, done in (
                (bundle.why_not(), "kernels are compiled as without it"),
                (bundle.why_no_launchers(), "a C compiler makes them here"),
            ):
                if why is not None:
                    self._warn(f"the bundle {bundle.folder} does not fit: {why}; {done}")
                    break
            found.append(bundle)
        return found

    def _shipped(self) -> list[Bundle]:
        """The bundle of this package for this Triton, unless its sources have changed since."""
        found = shipped_bundle()
        if found.damaged:
            text = f"{found.why_not}; it came with attndsl, and kernels are compiled as without it"
            self._warn(text, "install attndsl again")
        if found.bundle is None:
            return []
        if found.why_not is not None:
            tell_once(f"the kernels that came with attndsl are not used: {found.why_not}")
            return []
        return [found.bundle]

    def _entry(self, bundle: Bundle, key: str) -> Entry | None:
        """The entry of one bundle, with what loading it needs."""
        try:
            found = bundle.entry(key)
        except (ConfigError, OSError, ValueError) as error:
            self._warn(f"an entry of the bundle {bundle.folder} is not used: {reason(error)}")
            self._missed.add(key)  # Which tells why it is compiled here.
            return None
        if found is not None:
            slots: Any = found.meta.get("compiled", {})
            for slot in slots.values():
                self._lent.update(slot["files"].values())
                if isinstance(slot.get("launcher"), str):
                    self._lay_out(bundle, slot["launcher"])
        return found

    def _lay_out(self, bundle: Bundle, name: str) -> None:
        """Put a launcher where Triton looks for it; one of another content is replaced.

        Launchers that came with this package replace none: one that was made here fits better.
        """
        if not bundle.has_launcher(name):
            return
        import triton  # Whoever asks for kernels has it.

        _, key, file = name.split("/")
        keys = (key, bundle.twins.get(key, key))
        paths = [Path(triton.knobs.cache.dir) / each / file for each in dict.fromkeys(keys)]
        try:
            content = bundle.read(name)
            for path in paths:
                if path.exists() if bundle.trusted else _holds(path, content):
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, content)
        except (OSError, ValueError) as error:  # ConfigError is a ValueError.
            self._warn(
                f"a launcher of the bundle {bundle.folder} is compiled here: {reason(error)}"
            )

    def _tell_missed(self, about: About) -> None:
        """Log that the kernel compiled now is in no bundle, if there are bundles."""
        bundles = self._bundles()
        if not bundles:
            return
        what = f"{about.kernel} for {about.target} {about.dtype} D{about.head_dim}: {about.text}"
        LOG.info("in no bundle, compiled here: %s", what)
        fitting = [bundle for bundle in bundles if bundle.why_not() is None]
        if not fitting:
            return  # Which has been told.
        if any(about.target in bundle.targets for bundle in fitting):
            if not read_bundles():
                return  # What was imported for one model says nothing of others.
            why = "the bundles have other programs, dtypes, head dims or kinds of calls"
        else:
            targets = dict.fromkeys(target for bundle in fitting for target in bundle.targets)
            why = f"the bundles are for {', '.join(targets)}"
        self._warn(
            "a kernel is in no bundle and is compiled here, like others that the log names "
            f"(ATTNDSL_LOG=info): {what}; {why}",
            kind="missed",
        )

    def _warn(self, text: str, hint: str | None = None, kind: str = "") -> None:
        if (kind or text) not in self._told:
            self._told.add(kind or text)
            LOG.info("%s", text)
            whole = f"{text} ({hint})" if hint else text
            warnings.warn(whole, CacheWarning, stacklevel=4)


def shipped_bundle() -> Shipped:
    """The bundle that came with this package for this Triton, and whether calls use it."""
    triton = version_of("triton")
    folder = SHIPPED / f"triton-{triton}"
    if not asks_for_shipped():
        return Shipped(folder, why_not="ATTNDSL_SHIPPED=0")
    if not folder.is_dir():
        return Shipped(folder, why_not=f"there is none for Triton {triton}")
    try:
        bundle = _opened(BundlePlace(folder), _stamp(folder), trusted=True)
    except ConfigError as error:
        return Shipped(folder, None, error.message, damaged=True)
    return Shipped(folder, bundle, bundle.why_not())


def imported_places(folder: Path) -> list[BundlePlace]:
    """The folder of bundles that the cache in ``folder`` has imported, unless others may write."""
    try:
        with open_folder(folder) as cache, cache.within(IMPORTED) as places:
            names = sorted(name for name, _ in places.scan())
    except (OSError, ConfigError):
        return []  # There are none, or the cache says why its folder is not used.
    # An import that was cut off leaves a folder of another name.
    return [BundlePlace(folder / IMPORTED / name, name) for name in names if is_digest(name)]


def import_bundle(source: Path, cache: KernelCache, demanded: str | None = None) -> Imported:
    """Copy the bundle in ``source`` into the cache's folder, file by file, each one checked.

    Args:
        source: A bundle. If a digest is demanded, it may lie where others write.
        cache: Where to.
        demanded: The digest that it has to have.

    Raises:
        ConfigError: It cannot be used, or the cache's folder cannot.
    """
    bundle = open_bundle(source, demanded, trusted=demanded is not None)
    target = cache.folder / IMPORTED / bundle.digest
    try:
        return Imported(checked_bundle(target, bundle.digest), False)
    except ConfigError:
        pass  # It is not there, or damaged.
    try:
        cache.make_folder()
        target.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_IMPORTING) as found:
            folder = Path(found) / bundle.digest
            folder.mkdir(mode=0o700)
            for name in bundle.files:
                for parent in reversed((folder / name).relative_to(folder).parents[:-1]):
                    (folder / parent).mkdir(mode=0o700, exist_ok=True)
                _write(folder / name, bundle.read(name))
            # Last, as in the cache: a copy without it is none.
            manifest = read_bytes(bundle.folder / MANIFEST, MAX_MANIFEST, pipes=False)
            _write(folder / MANIFEST, manifest)
            open_bundle(folder, bundle.digest)
            new = _put(folder, target, bundle.digest)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the bundle {source} cannot be imported: {error}",
            hint="build it again, or look at what the folder of the cache is: attndsl cache path",
        ) from error
    return Imported(open_bundle(target, bundle.digest), new)


def _put(folder: Path, target: Path, digest: str) -> bool:
    """Have ``folder`` at ``target``; False where another process has put a whole copy there.

    Raises:
        OSError: It cannot be had.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            os.rename(folder, target)
        except OSError:
            if attempt == _ATTEMPTS:
                raise
        else:
            return True
        with suppress(ConfigError):
            checked_bundle(target, digest)
            return False
        # A damaged copy is removed from beside this one, with it.
        with suppress(FileNotFoundError):
            os.rename(target, folder.parent / f"damaged-{attempt}")
    raise AssertionError  # The last attempt has raised.


def checked_bundle(folder: Path, demanded: str | None = None) -> Bundle:
    """The bundle in ``folder``, all its files held to their digests.

    Raises:
        ConfigError: It is not as it was built.
    """
    bundle = open_bundle(folder, demanded)
    for name in bundle.files:
        try:
            bundle.read(name)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the bundle {folder} is not as it was built: {error}",
                hint="build it again, or copy it again",
            ) from error
    return bundle


def remove_imported(folder: Path) -> tuple[int, int]:
    """Remove the bundles that the cache in ``folder`` has imported: how many, and their bytes.

    Raises:
        ConfigError: They cannot be removed.
    """
    count, size = 0, 0
    try:
        with open_folder(folder) as cache, cache.within(IMPORTED) as places:
            for name, status in places.scan():
                if not stat.S_ISDIR(status.st_mode):
                    continue
                if is_digest(name):
                    count, size = count + 1, size + _bytes_in(places.path / name)
                    places.remove_tree(name)
                elif name.startswith(_IMPORTING):
                    with suppress(OSError):
                        places.remove_tree(name)  # Of imports that were killed.
    except FileNotFoundError:
        return 0, 0
    except (OSError, ConfigError) as error:
        raise ConfigError(f"cannot remove the bundles in {folder}: {reason(error)}") from error
    with suppress(OSError):
        (folder / IMPORTED).rmdir()  # Unless somebody keeps other things there.
    return count, size


def _bytes_in(folder: Path) -> int:
    return sum(x.stat().st_size for x in folder.rglob("*") if x.is_file())


def _joined(own: Entry, found: Entry) -> dict[str, Any]:
    """Compiled code that either entry records, by slot; that of ``found`` comes first."""
    slots: list[Any] = [own.meta.get("compiled", {}), found.meta.get("compiled", {})]
    return {**slots[0], **slots[1]}


def _stamp(folder: Path) -> tuple[int, ...]:
    """Inode, modification time and size of ``bundle.json``: others once a bundle is replaced."""
    try:
        found = (folder / MANIFEST).stat()
    except (OSError, ValueError):
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


@memoised("opened bundles", 64)
def _opened(place: BundlePlace, stamp: tuple[int, ...], trusted: bool = False) -> Bundle:
    return open_bundle(*place, trusted)


def _holds(path: Path, content: bytes) -> bool:
    """Tell whether the file at ``path`` is no link, and has ``content``."""
    try:
        return not path.is_symlink() and read_bytes(path, len(content), pipes=False) == content
    except (OSError, ConfigError):
        return False


def _write(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` so that readers see all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix="tmp.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
