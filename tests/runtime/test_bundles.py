"""Bundles as files: what is read, what is refused, and that nothing of what is refused is used."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import sysconfig
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import attndsl
from attndsl import cli, settings
from attndsl.backends.key import KernelKey, version_of
from attndsl.errors import CacheWarning, ConfigError
from attndsl.foundation.fingerprint import source_fingerprint
from attndsl.foundation.logs import tell_once
from attndsl.runtime import bundle_store, bundles
from attndsl.runtime.bundle_store import (
    BundledCache,
    import_bundle,
    imported_places,
    remove_imported,
)
from attndsl.runtime.bundles import Versions, open_bundle
from attndsl.runtime.disk_cache import KernelCache, entry_text
from attndsl.settings import BundlePlace, add_bundle, read_bundles

KEY = "a" * 64
CODE = "code/00ff/attention.cubin"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
LAUNCHER = f"launchers/KEY/launcher{SUFFIX}"
SOURCE = "x = 1\n"


def entry_files(slot: dict | None = None, source: str = SOURCE) -> dict[str, bytes]:
    recorded = {"files": {"attention.cubin": CODE}, "hash": "00ff", "launcher": LAUNCHER}
    about = {"text": "causal()", "kernel": "triton forward", "target": "cuda:80", "head_dim": 64}
    meta = {"compiled": {"forward": slot or recorded}, "about": about, "config": {}}
    return {
        f"entries/{KEY}.txt": source.encode(),
        f"entries/{KEY}.json": entry_text(KEY, source, meta).encode(),
        CODE: b"code",
        LAUNCHER: b"library",
    }


def write_bundle(folder: Path, contents: dict[str, bytes] | None = None, **changes: object) -> str:
    """A bundle of one made-up kernel; its digest."""
    contents = entry_files() if contents is None else contents
    here = Versions.here()
    manifest = {
        "format": bundles.FORMAT, "targets": ["cuda:80"], "attndsl": here.attndsl,
        "fingerprint": here.fingerprint, "triton": here.triton, "python": here.python,
        "driver": None, "twins": {},
        "files": {
            name: {"bytes": len(x), "sha256": hashlib.sha256(x).hexdigest()}
            for name, x in contents.items()
        },
    }  # fmt: skip
    for name, content in contents.items():
        path = folder / name
        if path.resolve().is_relative_to(folder.resolve()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    text = json.dumps(manifest | changes)
    folder.mkdir(exist_ok=True)
    (folder / "bundle.json").write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def store(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> BundledCache:
    monkeypatch.setenv("ATTNDSL_BUNDLES", str(folder))
    monkeypatch.setitem(sys.modules, "triton", fake_triton(tmp_path))
    return BundledCache(KernelCache(tmp_path / "cache"))


def fake_triton(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(knobs=SimpleNamespace(cache=SimpleNamespace(dir=str(tmp_path / "tc"))))


def test_an_entry_of_a_bundle_is_found_with_its_code(store, folder, tmp_path) -> None:
    entry = store.load(KEY)
    assert entry.source == SOURCE
    slot = entry.meta["compiled"]["forward"]
    assert slot["files"] == {"attention.cubin": str(folder / CODE)}
    assert slot["sha256"] == [hashlib.sha256(b"code").hexdigest()]
    assert (tmp_path / "tc" / "KEY" / f"launcher{SUFFIX}").read_bytes() == b"library"
    assert store.load("b" * 64) is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("now", [b"code", b"CODE"])
def test_code_that_changed_after_it_was_checked_is_not_loaded(now, folder, monkeypatch):
    from attndsl.backends.kernels import compile as kernels

    slot = open_bundle(folder).entry(KEY).meta["compiled"]["forward"]
    config = {"block_m": 64, "block_n": 64, "warps": 4, "stages": 1}
    (folder / CODE).write_bytes(now)
    loaded = []

    def reads(source, files, name):
        code = Path(files["attention.cubin"]).read_bytes()
        return SimpleNamespace(kernel=code, _init_handles=lambda: loaded.append(code))

    monkeypatch.setattr(kernels, "CompiledKernel", reads)
    monkeypatch.setattr(kernels, "_source", lambda *_: None)
    found = kernels.restore(None, [], {**slot, "config": config})
    assert (found is not None, loaded) == ((True, [now]) if now == b"code" else (False, []))


def test_the_cache_comes_first_unless_the_text_is_the_same(store, folder) -> None:
    store.cache.save(KEY, "x = 2\n", {"compiled": {}})
    assert store.load(KEY).source == "x = 2\n"
    gone = {"files": {"attention.cubin": "/gone"}}
    store.cache.save(KEY, SOURCE, {"compiled": {"forward": gone, "other": gone}})
    found = store.load(KEY).meta["compiled"]
    assert found["forward"]["files"] == {"attention.cubin": str(folder / CODE)}
    assert found["other"] == gone


def test_the_cache_keeps_no_paths_into_bundles(store, monkeypatch) -> None:
    """Who puts other files there when the bundle is gone would have them loaded unchecked."""
    entry = store.load(KEY)
    made = {"files": {"attention.cubin": "/made/here"}}
    compiled = {**entry.meta["compiled"], "other": made}
    with pytest.warns(CacheWarning, match="is in no bundle"):  # Part of the entry.
        store.save(KEY, SOURCE, {**entry.meta, "compiled": compiled})
    assert store.cache.load(KEY).meta["compiled"] == {"other": made}
    assert set(store.load(KEY).meta["compiled"]) == {"forward", "other"}
    monkeypatch.setenv("ATTNDSL_BUNDLES", "")
    assert store.load(KEY).meta["compiled"] == {"other": made}


def test_the_first_bundle_that_has_an_entry_gives_it(store, folder, tmp_path, monkeypatch) -> None:
    write_bundle(tmp_path / "second", entry_files(source="x = 2\n"))
    write_bundle(tmp_path / "empty", {})
    paths = [tmp_path / "empty", tmp_path / "second", folder]
    monkeypatch.setenv("ATTNDSL_BUNDLES", os.pathsep.join(map(str, paths)))
    assert store.load(KEY).source == "x = 2\n"


def test_a_launcher_is_found_by_either_name_of_the_platform(store, folder, tmp_path) -> None:
    write_bundle(folder, twins={"KEY": "TWIN"})
    assert store.load(KEY) is not None
    found = sorted(path.parent.name for path in (tmp_path / "tc").glob("*/launcher*"))
    assert found == ["KEY", "TWIN"]


@pytest.mark.parametrize("kind", ["a file", "a link", "a longer file"])
def test_a_launcher_of_another_content_is_replaced(kind, store, folder, tmp_path) -> None:
    path, there = tmp_path / "tc" / "KEY" / f"launcher{SUFFIX}", tmp_path / "there"
    path.parent.mkdir(parents=True)
    there.write_bytes(b"library")
    path.symlink_to(there) if kind == "a link" else path.write_bytes(b"LIBRARY" * (len(kind) - 5))
    assert store.load(KEY) is not None
    assert (path.read_bytes(), path.is_symlink()) == (b"library", False)
    before = path.stat()
    assert store.load(KEY) is not None
    assert path.stat().st_mtime_ns == before.st_mtime_ns, "it is not written again"


def test_a_launcher_of_another_python_is_left(store, folder, tmp_path) -> None:
    files = entry_files()
    other = "launchers/KEY/launcher.cpython-99-plan9.so"
    files = {**entry_files({"files": {}, "launcher": other}), other: b"library"}
    write_bundle(folder, files, driver=other, python=".cpython-99-plan9.so")
    with pytest.warns(CacheWarning, match="a C compiler makes them here"):
        assert store.load(KEY) is not None
    assert not (tmp_path / "tc").exists()


@pytest.mark.parametrize(
    "compiled", [[], {"forward": []}, {"forward": {}}, {"forward": {"files": [1]}}, None, "x"]
)
def test_entries_of_another_form_are_told_and_listed_as_damaged(compiled, store, folder) -> None:
    contents = entry_files()
    words = entry_text(KEY, SOURCE, {"compiled": compiled})
    write_bundle(folder, {**contents, f"entries/{KEY}.json": words.encode()})
    with pytest.warns(CacheWarning, match="is of another form"):
        assert store.load(KEY) is None
    (listed,) = open_bundle(folder).entries()
    assert listed.kind == "damaged"


@pytest.mark.parametrize("name", ["", "a/b/c/d", "x", "launchers/../../x", 3])
def test_an_entry_may_name_no_launcher_that_is_not_there(name, store, folder, tmp_path) -> None:
    named = f"{name}{SUFFIX}" if isinstance(name, str) else name
    write_bundle(folder, entry_files({"files": {}, "launcher": named}))
    assert store.load(KEY) is not None
    assert not (tmp_path / "tc").exists()


def _edit(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


def _linked(folder: Path, name: str) -> None:
    target = folder.parent / "elsewhere"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)


DAMAGE = {
    "changed text": lambda f: _edit(f, f"entries/{KEY}.txt", b"import os\n"),
    "changed words": lambda f: _edit(f, f"entries/{KEY}.json", b"{}"),
    "changed code": lambda f: _edit(f, CODE, b"CODE"),
    "truncated code": lambda f: _edit(f, CODE, b"cod"),
    "longer code": lambda f: _edit(f, CODE, b"code" * 1000),
    "lost code": lambda f: (f / CODE).unlink(),
    "linked code": lambda f: _linked(f, CODE),
    "linked folder": lambda f: _linked(f, "code"),
    "open code": lambda f: (f / CODE).chmod(0o666),
    "open folder": lambda f: (f / "code").chmod(0o777),
    "a pipe": lambda f: ((f / CODE).unlink(), os.mkfifo(f / CODE, 0o600)),
    "a folder": lambda f: ((f / CODE).unlink(), (f / CODE).mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_entries_are_told_and_not_used(damage, store, folder) -> None:
    damage(folder)
    with pytest.warns(CacheWarning, match="an entry of the bundle .* is not used"):
        assert store.load(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load(KEY) is None  # Told once.
        store.save(KEY, SOURCE, {"about": {"target": "cuda:80"}})


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_bundles_are_not_imported(damage, folder, tmp_path) -> None:
    damage(folder)
    cache = KernelCache(tmp_path / "cache")
    with pytest.raises(ConfigError):
        import_bundle(folder, cache)
    assert imported_places(cache.folder) == []
    assert not list((tmp_path / "cache" / "bundles").iterdir() if cache.folder.exists() else [])


MANIFESTS = {
    "no json": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "no fields": "{}",
    "not text": b"\xff\xfe",
    "another format": {"format": 99},
    "a path up": {"files": {"../../x.py": {"bytes": 1, "sha256": "0" * 64}}},
    "a path in code": {"files": {"code/../x.cubin": {"bytes": 1, "sha256": "0" * 64}}},
    "a path from the root": {"files": {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}},
    "a hidden file": {"files": {"code/.x/.y.cubin": {"bytes": 1, "sha256": "0" * 64}}},
    "another kind of file": {"files": {"code/x/y.py": {"bytes": 1, "sha256": "0" * 64}}},
    "a line": {"files": {"code/x/y.cubin\n": {"bytes": 1, "sha256": "0" * 64}}},
    "huge": {"files": {CODE: {"bytes": 1 << 40, "sha256": "0" * 64}}},
    "negative": {"files": {CODE: {"bytes": -1, "sha256": "0" * 64}}},
    "no number": {"files": {CODE: {"bytes": True, "sha256": "0" * 64}}},
    "no digest": {"files": {CODE: {"bytes": 1, "sha256": "x"}}},
    "huge together": {
        "files": {f"code/{n}/x.cubin": {"bytes": 1 << 28, "sha256": "0" * 64} for n in range(17)}
    },
    "another driver": {"driver": "launchers/x/y.so"},
    "twins of no names": {"twins": {"KEY": "../x"}},
    "twins of paths": {"twins": {"a/b": "x"}},
    "twins of numbers": {"twins": {"KEY": 3}},
    "a list of twins": {"twins": ["KEY"]},
    "versions of no text": {"triton": 3},
    "control characters": {"triton": "\x1b[31m"},
    "a long version": {"triton": "3" * 1000},
    "targets of no text": {"targets": [1]},
}


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_hostile_manifests_are_refused(manifest, folder, store, tmp_path) -> None:
    if isinstance(manifest, dict):
        write_bundle(folder, **manifest)
    else:
        content = manifest if isinstance(manifest, bytes) else manifest.encode()
        (folder / "bundle.json").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read") as error:
        open_bundle(folder)
    assert error.value.hint
    with pytest.raises(ConfigError):
        import_bundle(folder, KernelCache(tmp_path / "cache"))
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert store.load(KEY) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "bundle.json").unlink(), "No such file"),
        (lambda f: f.chmod(0o777), "writable by others"),
        (lambda f: (f / "bundle.json").chmod(0o666), "writable by others"),
        (lambda f: _linked(f, "bundle.json"), "is a link"),
        (lambda f: os.truncate(f / "bundle.json", bundles.MAX_MANIFEST + 1), "larger than"),
        (lambda f: ((f / "bundle.json").unlink(), (f / "bundle.json").mkdir()), "is a folder"),
    ],
)
def test_bundles_that_others_may_write_to_are_refused(change, said, folder) -> None:
    change(folder)
    with pytest.raises(ConfigError, match=said) as error:
        open_bundle(folder)
    assert error.value.hint


def test_another_owner_is_refused(folder, monkeypatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    open_bundle(folder)  # Root's, as in images.
    if os.geteuid() == 0:
        os.chown(folder / CODE, 54321, -1)
        with pytest.raises(ConfigError, match="belongs to another user"):
            open_bundle(folder).read(CODE)


def test_a_link_to_a_whole_bundle_is_followed(folder, tmp_path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert open_bundle(tmp_path / "link").folder == folder


def test_digests_are_demanded(folder, tmp_path, store, monkeypatch) -> None:
    digest = open_bundle(folder).digest
    assert open_bundle(folder, digest).digest == digest
    with pytest.raises(ConfigError, match=f"has the digest {digest}, and {'0' * 64} is demanded"):
        open_bundle(folder, "0" * 64)
    monkeypatch.setenv("ATTNDSL_BUNDLES", f"{folder}@{digest}")
    assert store.load(KEY) is not None
    monkeypatch.setenv("ATTNDSL_BUNDLES", f"{folder}@{'0' * 64}")
    with pytest.warns(CacheWarning, match="is demanded; kernels are compiled as without it"):
        assert store.load(KEY) is None


def test_an_import_is_a_copy_that_only_its_user_may_write(folder, tmp_path) -> None:
    cache = KernelCache(tmp_path / "cache")
    found = import_bundle(folder, cache)
    assert found.new
    own = tmp_path / "cache" / "bundles" / found.bundle.digest
    modes = {stat.S_IMODE(p.stat().st_mode) & 0o077 for p in own.rglob("*")}
    assert modes == {0}
    assert not import_bundle(folder, cache).new
    assert imported_places(cache.folder) == [BundlePlace(own, found.bundle.digest)]
    store = BundledCache(cache)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert store._entry(open_bundle(own), KEY).source == SOURCE
    count, size = remove_imported(cache.folder)
    assert count == 1
    assert size > 0
    assert imported_places(cache.folder) == []


def test_a_demanded_digest_allows_a_folder_that_others_write_to(folder, tmp_path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o777)
    cache = KernelCache(tmp_path / "cache")
    with pytest.raises(ConfigError, match="writable by others"):
        import_bundle(folder, cache)
    content = (folder / "bundle.json").read_bytes()
    assert import_bundle(folder, cache, hashlib.sha256(content).hexdigest()).new


def test_a_damaged_copy_is_imported_anew(folder, tmp_path) -> None:
    cache = KernelCache(tmp_path / "cache")
    own = import_bundle(folder, cache).bundle.folder
    (own / CODE).write_bytes(b"CODE")
    assert import_bundle(folder, cache).new
    assert (own / CODE).read_bytes() == b"code"


def test_many_processes_import_at_once(folder, tmp_path) -> None:
    """As those of a cluster that have one home; each finds a whole copy afterwards."""
    cache = KernelCache(tmp_path / "cache")
    cache.make_folder()
    gate = threading.Barrier(8)

    def imported(_: int) -> bool:
        gate.wait()
        return import_bundle(folder, cache).new

    with ThreadPoolExecutor(8) as pool:
        assert any(pool.map(imported, range(8)))
    (place,) = imported_places(cache.folder)
    assert bundle_store.checked_bundle(*place).digest == place.digest
    assert [path.name for path in place.path.parent.iterdir()] == [place.digest]


def test_a_copy_that_another_process_has_put_there_meanwhile_stays(
    folder, tmp_path, monkeypatch
) -> None:
    cache, asked = KernelCache(tmp_path / "cache"), []

    def late(target: Path, digest: str):
        if not asked:  # The copy is not there yet, and comes while this process makes its own.
            asked.append(target)
            import_bundle(folder, cache)
            raise ConfigError("no such folder")
        return checked(target, digest)

    checked = bundle_store.checked_bundle
    monkeypatch.setattr(bundle_store, "checked_bundle", late)
    assert not import_bundle(folder, cache).new
    assert imported_places(cache.folder) == [BundlePlace(asked[0], asked[0].name)]


def test_what_killed_imports_leave_is_cleared(folder, tmp_path) -> None:
    cache = KernelCache(tmp_path / "cache")
    left = import_bundle(folder, cache).bundle.folder.parent / "importing-x"
    left.mkdir()
    (left / "file").write_text("")
    assert remove_imported(cache.folder)[0] == 1
    assert not left.parent.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"triton": "2.0.0"}, "it is for triton 2.0.0, and here is"),
        ({"attndsl": "9.9"}, "it is for attndsl 9.9, and here is"),
        ({"fingerprint": "0"}, "with other sources than those here"),
    ],
)
def test_other_versions_are_told_once(changes, said, folder, store) -> None:
    write_bundle(folder, {}, **changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.load(KEY)
        store.load(KEY)
        store.save(KEY, SOURCE, {"about": {"text": "causal()", "target": "cuda:80"}})
    assert [each.category for each in caught] == [CacheWarning]
    assert len(caught) == 1
    assert said in str(caught[0].message)
    assert "kernels are compiled as without it" in str(caught[0].message)


@pytest.mark.parametrize(
    ("target", "said"),
    [("cuda:90", "the bundles are for cuda:80"), ("cuda:80", "have other programs, dtypes")],
)
def test_what_a_bundle_lacks_is_told_once(target, said, store) -> None:
    about = {"text": "q > kv", "kernel": "triton forward", "target": target, "head_dim": 32}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.save("b" * 64, SOURCE, {"about": about})
        store.save("c" * 64, SOURCE, {"about": about})
        store.save("d" * 64, "", {"kind": "program"})
    assert len(caught) == 1
    assert "is in no bundle and is compiled here" in str(caught[0].message)
    assert "triton forward" in str(caught[0].message)
    assert said in str(caught[0].message)


def test_nothing_is_told_without_bundles(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("ATTNDSL_BUNDLES", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BundledCache(KernelCache(tmp_path)).save(KEY, SOURCE, {"about": {"target": "cuda:90"}})


def test_paths_of_bundles(monkeypatch, tmp_path) -> None:
    digest = "0123456789abcdef" * 4
    monkeypatch.setenv("ATTNDSL_BUNDLES", f"/a::/b@{digest}:/node@20/c")
    assert read_bundles() == (
        BundlePlace(Path("/a")), BundlePlace(Path("/b"), digest), BundlePlace(Path("/node@20/c"))
    )  # fmt: skip
    assert settings.read_settings().bundles == read_bundles()
    monkeypatch.setenv("ATTNDSL_BUNDLES", "/b@123")
    with pytest.raises(ConfigError, match="'123' is no digest of a bundle"):
        read_bundles()


def test_a_home_that_nobody_has_is_no_bundle(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("ATTNDSL_BUNDLES", "~nobody-of-this-name/bundle")
    with pytest.warns(CacheWarning, match="No such file"):
        assert BundledCache(KernelCache(tmp_path)).load(KEY) is None


def test_packages_add_bundles(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("ATTNDSL_BUNDLES", "")
    add_bundle(tmp_path / "a")
    add_bundle(tmp_path / "a")
    add_bundle(tmp_path / "b", "0" * 64)
    assert read_bundles() == (BundlePlace(tmp_path / "a"), BundlePlace(tmp_path / "b", "0" * 64))
    with pytest.raises(ConfigError, match="is no digest"):
        add_bundle(tmp_path / "c", "1")
    with pytest.raises(ConfigError, match="holds ':'"):
        add_bundle("/a:b")
    monkeypatch.setenv("ATTNDSL_BUNDLES", "")
    add_bundle("/opt/kernels@2")
    add_bundle("/opt/kernels@2", "0" * 64)
    assert read_bundles() == (
        BundlePlace(Path("/opt/kernels@2")), BundlePlace(Path("/opt/kernels@2"), "0" * 64)
    )  # fmt: skip


def test_the_command_imports_and_clears(folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["attndsl", "cache", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, *capsys.readouterr()

    digest = open_bundle(folder).digest
    code, _, error = run("import", str(folder), "--digest", "0" * 64)
    assert (code, f"has the digest {digest}" in error) == (1, True)
    assert run("import", str(folder), "--digest", "short")[0] == 2
    code, out, _ = run("import", str(folder), "--digest", digest)
    assert (code, out.endswith(f"digest: {digest}\n")) == (0, True)
    assert "triton forward cuda:80 D64  causal()" in run("list")[1]
    assert "bundles  1, " in run("stats")[1]
    out = run("clear")[1]
    assert "removed 1 imported bundle, " in out
    assert "not of the cache" not in out
    assert run("list")[1] == ""


def test_keys_do_not_depend_on_torch() -> None:
    assert not any("torch" in name for name in KernelKey.__dataclass_fields__)


def test_the_key_of_a_kernel_is_the_same_for_another_torch(monkeypatch) -> None:
    import torch

    from attndsl.backends.engine import kernel_listing as source
    from attndsl.backends.kernels import modules
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.kernels.kernel import Task
    from attndsl.backends.kernels.target import machine_of
    from attndsl.backends.triton.family import Portable

    lowered = attndsl.compile(
        "tensor t[heads]: float; mask = causal(); score = t[h] * score"
    ).lowered
    call = example_call(lowered, 64, 64, torch.bfloat16, {})
    machine = machine_of("cuda:90")
    (job,) = Portable().jobs(lowered, call, Task.FORWARD, None, None)

    def made() -> tuple[str, str]:
        own = job.on(machine)
        return modules._key(own, "triton", "forward", machine), source._shown(
            own, machine, source.UNWRITTEN
        )

    before = made()
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    assert made() == before
    assert version_of("torch") not in before[1]
    assert len(source_fingerprint()) == 64


def test_an_import_that_was_cut_off_leaves_nothing_that_is_read(
    folder, tmp_path, monkeypatch
) -> None:
    cache = KernelCache(tmp_path / "cache")

    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(bundle_store.os, "rename", fails)
    with pytest.raises(ConfigError, match="the disk is full"):
        import_bundle(folder, cache)
    assert imported_places(cache.folder) == []


@pytest.fixture
def shipped(store, folder, tmp_path, monkeypatch) -> Path:
    """The made-up bundle as the one that came with the package, and as no other."""
    monkeypatch.setattr(bundle_store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("ATTNDSL_SHIPPED", "1")
    monkeypatch.setenv("ATTNDSL_BUNDLES", "")
    tell_once.cache_clear()
    own = tmp_path / "shipped" / f"triton-{version_of('triton')}"
    own.parent.mkdir()
    folder.rename(own)
    return own


def test_what_came_with_the_package_is_found_without_a_setting(
    shipped, store, tmp_path, monkeypatch
) -> None:
    for path in (shipped, *shipped.rglob("*")):  # As installed with umask 000.
        path.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = store.load(KEY)
        assert found.source == SOURCE
        assert found.meta["compiled"]["forward"]["files"] == {
            "attention.cubin": f"{shipped / CODE}"
        }
        assert (tmp_path / "tc" / "KEY" / f"launcher{SUFFIX}").read_bytes() == b"library"
        store.save("b" * 64, SOURCE, {"about": {"target": "cuda:80"}})  # Nobody asked for it.
        monkeypatch.setenv("ATTNDSL_SHIPPED", "0")
        assert store.load(KEY) is None


def test_a_bundle_of_the_user_comes_before_the_shipped_one(
    shipped, store, tmp_path, monkeypatch
) -> None:
    write_bundle(tmp_path / "own", entry_files(source="x = 2\n"))
    monkeypatch.setenv("ATTNDSL_BUNDLES", str(tmp_path / "own"))
    assert store.load(KEY).source == "x = 2\n"


def test_what_a_bundle_of_the_user_lacks_is_found_in_the_shipped_one(
    shipped, store, tmp_path, monkeypatch
) -> None:
    write_bundle(tmp_path / "own", {})
    monkeypatch.setenv("ATTNDSL_BUNDLES", str(tmp_path / "own"))
    assert store.load(KEY).source == SOURCE
    write_bundle(tmp_path / "own", {}, triton="0.1")
    with pytest.warns(CacheWarning, match="does not fit: it is for triton 0.1"):
        assert store.load(KEY).source == SOURCE


def test_an_entry_of_the_cache_comes_before_a_shipped_one(shipped, store) -> None:
    """Such as that of ``tune``."""
    store.save(KEY, "x = 2\n", {"about": {"target": "cuda:80"}})
    assert store.load(KEY).source == "x = 2\n"
    assert "compiled" not in store.load(KEY).meta


def test_processes_share_shipped_kernels_that_nobody_may_write(shipped, tmp_path) -> None:
    for path in (shipped, *shipped.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    stores = [BundledCache(KernelCache(tmp_path / f"cache-{n}")) for n in range(8)]
    with ThreadPoolExecutor(len(stores)) as pool:
        found = list(pool.map(lambda store: store.load(KEY), stores))
    assert [entry.source for entry in found] == [SOURCE] * len(stores)
    folder = tmp_path / "tc" / "KEY"
    assert [path.name for path in folder.iterdir()] == [f"launcher{SUFFIX}"]
    assert (folder / f"launcher{SUFFIX}").read_bytes() == b"library"


def test_commands_say_where_shipped_kernels_are_and_whether_calls_use_them(
    shipped, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["attndsl", *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        return str(capsys.readouterr().out)

    size = sum(map(len, entry_files().values()))
    told = f"1 entries, {size} bytes, for cuda:80"
    assert f"shipped  {told}\n" in run("cache", "stats")
    assert run("cache", "list") == f"shipped {shipped}: {told}\n"
    (entry,) = json.loads(run("cache", "list", "--json"))
    assert (entry["bundle"], entry["target"]) == (str(shipped), "cuda:80")
    assert f"\n  kernels that came with attndsl: {told}\n" in run("doctor")
    assert json.loads(run("doctor", "--json"))["cache"]["shipped"] == told
    write_bundle(shipped, python=".cpython-99-plan9.so", driver=LAUNCHER)
    assert f"{told}; its launchers are for Python's .cpython-99" in run("cache", "stats")
    write_bundle(shipped, fingerprint="0" * 64)
    stale = "not used: it is for attndsl 0.2.0 with other sources than those here"
    assert f"shipped  {told}; {stale}\n" in run("cache", "stats")
    assert run("cache", "list") == f"shipped {shipped}: {told}; {stale}\n"
    monkeypatch.setenv("ATTNDSL_SHIPPED", "0")
    assert "shipped  not used: ATTNDSL_SHIPPED=0\n" in run("cache", "stats")
    assert run("cache", "list") == ""
    monkeypatch.setenv("ATTNDSL_SHIPPED", "1")
    (shipped / "bundle.json").write_text("{")
    assert f"shipped  not used: the bundle {shipped} cannot be read: " in run("cache", "stats")
    shipped.rename(shipped.with_name("triton-0.1"))
    none = f"not used: there is none for Triton {version_of('triton')}"
    assert f"shipped  {none}\n" in run("cache", "stats")


def test_the_switch_of_shipped_kernels_is_on_or_off(monkeypatch) -> None:
    monkeypatch.setenv("ATTNDSL_SHIPPED", "nonsense")
    with pytest.raises(ConfigError, match="ATTNDSL_SHIPPED is 'nonsense'"):
        settings.asks_for_shipped()
    monkeypatch.delenv("ATTNDSL_SHIPPED")
    assert settings.asks_for_shipped()


@pytest.mark.parametrize(
    "other", [{"fingerprint": "0" * 64}, {"triton": "0.1"}, {"attndsl": "0.1"}]
)
def test_shipped_kernels_of_other_versions_are_passed_over_and_the_log_says_so_once(
    other, shipped, store, caplog
) -> None:
    write_bundle(shipped, **other)
    with warnings.catch_warnings(), caplog.at_level("INFO", "attndsl"):
        warnings.simplefilter("error")
        assert store.load(KEY) is None
        assert store.load("b" * 64) is None
    assert caplog.text.count("the kernels that came with attndsl are not used: it is for ") == 1


def test_shipped_kernels_of_another_triton_are_not_opened(shipped, store) -> None:
    (shipped / "bundle.json").write_text("{")
    shipped.rename(shipped.with_name("triton-0.1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load(KEY) is None


NOT_WRITABLE = {x: y for x, y in DAMAGE.items() if not x.startswith(("open", "linked"))}


@pytest.mark.parametrize("damage", NOT_WRITABLE.values(), ids=NOT_WRITABLE)
def test_damage_to_shipped_kernels_is_told_and_they_are_not_used(damage, shipped, store) -> None:
    damage(shipped)
    with pytest.warns(CacheWarning, match="an entry of the bundle .* is not used"):
        assert store.load(KEY) is None


@pytest.mark.parametrize("content", ["{", None])
def test_a_shipped_manifest_that_cannot_be_read_is_told_once(content, shipped, store) -> None:
    path = shipped / "bundle.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.warns(CacheWarning, match="came with attndsl, and kernels are compiled as without"):
        assert store.load(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load(KEY) is None


def test_a_shipped_launcher_replaces_none_that_was_made_here(shipped, store, tmp_path) -> None:
    path = tmp_path / "tc" / "KEY" / f"launcher{SUFFIX}"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"made here")
    assert store.load(KEY) is not None
    assert path.read_bytes() == b"made here"


def test_shipped_launchers_of_another_python_are_left_in_silence(shipped, store, tmp_path) -> None:
    other = "launchers/KEY/launcher.cpython-99-plan9.so"
    files = {**entry_files({"files": {}, "launcher": other}), other: b"library"}
    write_bundle(shipped, files, driver=other, python=".cpython-99-plan9.so")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load(KEY) is not None
        store.prepare()
    assert not (tmp_path / "tc").exists()
