"""Folders whose files are run, and those who would have others run."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from attndsl.cli.cache_command import open_cache, print_stats
from attndsl.errors import CacheWarning, ConfigError
from attndsl.runtime import owned_folder
from attndsl.runtime.bundle_store import BundledCache, imported_places, remove_imported
from attndsl.runtime.disk_cache import KernelCache
from attndsl.runtime.owned_folder import open_folder

KEY = "a" * 64
OTHER = 12345
"""A user who is neither this one nor root."""
GOOD, BAD = "good = 1\n", "bad = 1\n"


@pytest.fixture(params=["descriptors", "paths"])
def cache(request, tmp_path, monkeypatch) -> KernelCache:
    if request.param == "paths":
        monkeypatch.setattr(owned_folder, "_HAS_DESCRIPTORS", False)
    found = KernelCache(tmp_path / "parent" / "cache")
    found.save(KEY, GOOD, {"number": 1})
    return found


def belongs_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the file or folder at ``path`` be another user's."""
    if os.geteuid() == 0:
        os.chown(path, OTHER, -1, follow_symlinks=False)
        return
    inode, own_stat, own_fstat = os.lstat(path).st_ino, os.stat, os.fstat

    def given(found: os.stat_result) -> os.stat_result:
        if found.st_ino != inode:
            return found
        return os.stat_result([OTHER if n == 4 else x for n, x in enumerate(found)])

    monkeypatch.setattr(os, "stat", lambda *a, **k: given(own_stat(*a, **k)))
    monkeypatch.setattr(os, "fstat", lambda *a: given(own_fstat(*a)))


def _json(cache: KernelCache) -> Path:
    return cache.folder / f"{KEY}.json"


def _elsewhere(path: Path) -> Path:
    """A file of the same content that lies elsewhere."""
    there = path.parents[1] / path.name
    there.write_bytes(path.read_bytes())
    there.chmod(0o600)
    path.unlink()
    return there


HOSTILE = {
    "of another user": belongs_to_another,
    "writable by a group": lambda path, _: path.chmod(0o620),
    "writable by all": lambda path, _: path.chmod(0o666),
    "a link": lambda path, _: path.symlink_to(_elsewhere(path)),
    "a link to nothing": lambda path, _: (path.unlink(), path.symlink_to("nothing")),
    "a hard link of a file that all may write": lambda path, _: (
        there := _elsewhere(path), there.chmod(0o666), os.link(there, path)),
    "a pipe": lambda path, _: (path.unlink(), os.mkfifo(path, 0o600)),
    "a folder": lambda path, _: (path.unlink(), path.mkdir()),
    "huge": lambda path, _: os.truncate(path, 1 << 40),
    "cut off": lambda path, _: os.truncate(path, path.stat().st_size - 5),
    "empty": lambda path, _: os.truncate(path, 0),
}  # fmt: skip


@pytest.mark.parametrize("end", ["json", "py"])
@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_what_others_may_have_written_is_not_run(cache, change, end, monkeypatch) -> None:
    change(cache.folder / f"{KEY}.{end}", monkeypatch)
    assert [entry.kind for entry in cache.entries()] in (["damaged"], [])
    begin = time.monotonic()
    with pytest.warns(CacheWarning, match="dropped the damaged cache entry"):
        assert cache.load(KEY) is None
    assert time.monotonic() - begin < 1, "nobody writes to the pipe"
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        entry = cache.save(KEY, GOOD, {})
        assert cache.load(KEY) == entry


def test_a_hard_link_of_a_file_of_another_user_is_not_run(cache, monkeypatch) -> None:
    there = _elsewhere(_json(cache))
    os.link(there, _json(cache))
    belongs_to_another(there, monkeypatch)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert cache.load(KEY) is None


def test_what_is_read_is_what_was_checked(cache, monkeypatch) -> None:
    """Others put their file in the place of this user's once that was looked at."""
    looked = os.fstat

    def late(handle: int) -> os.stat_result:
        found = looked(handle)
        if stat.S_ISREG(found.st_mode):
            for end, text in (("json", "{}"), ("py", BAD)):
                (cache.folder / f"new.{end}").write_text(text)
                os.replace(cache.folder / f"new.{end}", cache.folder / f"{KEY}.{end}")
        return found

    monkeypatch.setattr(os, "fstat", late)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        found = cache.load(KEY)
    assert found is None or found.source == GOOD


FOLDERS = {
    "of another user": belongs_to_another,
    "writable by a group": lambda path, _: path.chmod(0o770),
    "writable by all": lambda path, _: path.chmod(0o1777),
}


@pytest.mark.parametrize("change", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_of_others_is_not_used(cache, change, monkeypatch, capsys) -> None:
    bundle = cache.folder / "bundles" / ("b" * 64)
    bundle.mkdir(mode=0o700, parents=True)
    (bundle / "bundle.json").write_text("{}")
    assert len(imported_places(cache.folder)) == 1
    before = sorted(cache.folder.rglob("*"))
    change(cache.folder, monkeypatch)
    with pytest.warns(CacheWarning, match="or is writable by others; not used") as told:
        assert BundledCache(cache).load(KEY) is None
    assert len(told) == 1, "it is not asked for bundles"
    with pytest.warns(CacheWarning, match="cannot keep kernels in .* writable by others"):
        assert cache.save("c" * 64, GOOD, {}).source == GOOD
    assert sorted(cache.folder.rglob("*")) == before
    assert imported_places(cache.folder) == []
    assert cache.entries() == []
    for remove in (cache.clear, cache.prune, lambda: remove_imported(cache.folder)):
        with pytest.raises(ConfigError, match="writable by others"):
            remove()
    assert sorted(cache.folder.rglob("*")) == before
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(cache.folder))
    assert open_cache().folder == cache.folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        print_stats()
    assert "enabled  no: " in capsys.readouterr().out


def test_a_cache_that_is_off_is_asked_for_no_bundles(tmp_path) -> None:
    folder = tmp_path / "bundles" / ("b" * 64)
    folder.mkdir(mode=0o700, parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert BundledCache(KernelCache(tmp_path, enabled=False)).load(KEY) is None
    with pytest.warns(CacheWarning, match="cannot be used"):
        BundledCache(KernelCache(tmp_path)).load(KEY)


def test_folders_above_are_made_with_no_rights_for_others(tmp_path) -> None:
    before = os.umask(0)
    try:
        KernelCache(tmp_path / "a" / "b" / "cache").save(KEY, GOOD, {})
    finally:
        os.umask(before)
    made = [tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/cache"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    files = list(made[-1].iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 2


@pytest.mark.parametrize("relative", [True, False])
def test_own_links_lead_to_the_folder(cache, tmp_path, monkeypatch, relative) -> None:
    (tmp_path / "one").symlink_to("parent" if relative else tmp_path / "parent")
    (tmp_path / "two").symlink_to("one/../one/./cache")
    assert KernelCache(tmp_path / "two").load(KEY).source == GOOD
    monkeypatch.chdir(tmp_path)
    assert KernelCache(Path("two")).load(KEY).source == GOOD
    monkeypatch.chdir(tmp_path / "two")
    assert KernelCache(Path()).load(KEY).source == GOOD
    (tmp_path / "new").symlink_to("made")
    (tmp_path / "made").mkdir()
    made = KernelCache(tmp_path / "new" / "cache").save(KEY, GOOD, {})
    assert (tmp_path / "made" / "cache" / made.path.name).exists()


@pytest.mark.parametrize("name", ["link", "link/cache"])
def test_links_of_others_lead_nowhere(cache, tmp_path, monkeypatch, name) -> None:
    (tmp_path / "link").symlink_to(cache.folder if name == "link" else cache.folder.parent)
    assert KernelCache(tmp_path / name).load(KEY).source == GOOD
    belongs_to_another(tmp_path / "link", monkeypatch)
    with pytest.warns(CacheWarning, match="link of another user"):
        assert KernelCache(tmp_path / name).load(KEY) is None


def test_a_link_that_flips_after_the_check_changes_nothing(tmp_path, monkeypatch) -> None:
    own, other = (KernelCache(tmp_path / name) for name in ("own", "other"))
    own.save(KEY, GOOD, {})
    other.save(KEY, BAD, {})
    other.folder.chmod(0o777)
    (tmp_path / "link").symlink_to("own")
    looked = os.stat

    def late(path: int | Path, **options: object) -> os.stat_result:
        found = looked(path, **options)
        if stat.S_ISDIR(found.st_mode):
            (tmp_path / "new").symlink_to("other")
            os.replace(tmp_path / "new", tmp_path / "link")
        return found

    monkeypatch.setattr(os, "stat", late)
    assert KernelCache(tmp_path / "link").load(KEY).source == GOOD
    assert os.readlink(tmp_path / "link") == "other"


def _flipped(link: Path, targets: list[Path], done: threading.Event) -> None:
    """Have ``link`` lead to the one and to the other folder, by turns."""
    for number, target in enumerate(targets):
        link.with_name(f"link{number}").symlink_to(target)
    while not done.is_set():
        for number, target in enumerate(targets):
            made = link.with_name(f"link{number}")
            with suppress(FileExistsError):
                made.symlink_to(target)
            os.replace(made, link)


@pytest.mark.parametrize("which", ["the folder", "its parent"])
@pytest.mark.parametrize("theirs", ["of another user", "writable by all"])
def test_a_link_that_flips_has_nothing_of_others_run(tmp_path, monkeypatch, which, theirs) -> None:
    """For two seconds, or 7000 loads: a folder that was checked once was opened again."""
    own, other = (KernelCache(tmp_path / name / "cache") for name in ("own", "other"))
    own.save(KEY, GOOD, {})
    other.save(KEY, BAD, {})
    FOLDERS[theirs](other.folder, monkeypatch)
    whole = which == "the folder"
    targets = [x.folder if whole else x.folder.parent for x in (own, other)]
    attacked = KernelCache(tmp_path / "link" if whole else tmp_path / "link" / "cache")
    (tmp_path / "link").symlink_to(targets[0])
    done = threading.Event()
    attacker = threading.Thread(target=_flipped, args=(tmp_path / "link", targets, done))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    attacker.start()
    seen: dict[str | None, int] = {}
    try:
        end = time.monotonic() + 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            while sum(seen.values()) < 7000 and time.monotonic() < end:
                found = attacked.load(KEY)
                text = None if found is None else found.source
                seen[text] = seen.get(text, 0) + 1
                attacked.save("b" * 64, GOOD, {})
                attacked._memory.entries.clear()
    finally:
        done.set()
        attacker.join()
        sys.setswitchinterval(interval)
    assert BAD not in seen
    assert {GOOD, None} <= seen.keys(), "both folders were met"
    assert not (other.folder / f"{'b' * 64}.py").exists(), "nothing is written there"
    assert (other.folder / f"{KEY}.py").exists(), "nothing is removed there"


def test_a_folder_that_nobody_may_list_is_passed(tmp_path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may list all folders")
    cache = KernelCache(tmp_path / "home" / "cache")
    cache.save(KEY, GOOD, {})
    (tmp_path / "home").chmod(0o311)
    assert cache.load(KEY).source == GOOD


def test_folders_are_closed(tmp_path, monkeypatch) -> None:
    cache = KernelCache(tmp_path / "cache")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        for number in range(50):
            cache.save(f"{number:064d}", GOOD, {})
            cache.load(f"{number:064d}")
            cache.load(KEY)
            KernelCache(tmp_path / "missing" / "cache").load(KEY)
            (tmp_path / "open").mkdir(exist_ok=True)
            (tmp_path / "open").chmod(0o777)
            KernelCache(tmp_path / "open").load(KEY)
        cache.clear()
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_files_of_roots_serve_bundles_alone(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    (folder / "file").write_text("x")
    if os.geteuid():
        pytest.skip("only root has files of root")
    monkeypatch.setattr(os, "getuid", lambda: OTHER)
    with open_folder(folder, of_root=True) as opened:
        assert opened.read("file", 10) == b"x"
    with pytest.raises(ConfigError, match="belongs to another user"):
        open_folder(folder)
