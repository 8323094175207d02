"""The digest of the sources: of those that were imported, whatever lies on disk by now."""

from __future__ import annotations

import logging
import os
import shutil
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
from support.fork_server import run_python

from attndsl.building.bundle_pack import pack
from attndsl.errors import CacheWarning, ConfigError
from attndsl.foundation import fingerprint
from attndsl.foundation.fingerprint import source_fingerprint, sources_changed
from attndsl.foundation.logs import tell_once
from attndsl.runtime.disk_cache import KernelCache

ROOT = Path(__file__).parents[2]
KEY = "a" * 64


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three files, which this process has imported as it were."""
    folder = tmp_path / "package"
    (folder / "inner").mkdir(parents=True)
    for name in ("a.py", "inner/b.py", "inner/c.lark", "inner/notes.txt"):
        (folder / name).write_text(f"text of {name}\n")
    roots = {"attndsl": str(folder)}
    monkeypatch.setattr(fingerprint, "_ROOTS", roots)
    monkeypatch.setattr(fingerprint, "_IMPORTED", fingerprint._stamps(roots))
    source_fingerprint.cache_clear()
    tell_once.cache_clear()
    yield folder
    source_fingerprint.cache_clear()


def _replaced(path: Path) -> None:
    """As installers do it, which keep times of archives."""
    status, made = path.stat(), path.with_suffix(".new")
    made.write_text(path.read_text())
    os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))
    made.rename(path)


CHANGES = {
    "another text": lambda f: (f / "inner/b.py").write_text("another text\n"),
    "a text of one size": lambda f: (f / "a.py").write_text("TEXT of a.py\n"),
    "the grammar": lambda f: (f / "inner/c.lark").write_text("x"),
    "another file of one time": lambda f: _replaced(f / "a.py"),
    "a new file": lambda f: (f / "d.attn").write_text("x"),
    "a removed file": lambda f: (f / "inner/b.py").unlink(),
    "a renamed file": lambda f: (f / "a.py").rename(f / "b.py"),
    "a removed package": lambda f: shutil.rmtree(f),
    "there and back": lambda f: ((f / "a.py").rename(f / "x"), shutil.copy(f / "x", f / "a.py")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nobody_knows_the_digest_of_what_changed_before_it_was_read(package, change):
    change(package)
    found = source_fingerprint()
    assert sources_changed()
    source_fingerprint.cache_clear()
    assert source_fingerprint() != found, "it is no digest, and no other process has it"
    assert len(found) == 64


def test_compiled_kernels_that_came_with_the_package_are_no_text(package):
    before = fingerprint._stamps(fingerprint._ROOTS)
    (package / "shipped" / "triton-0.1").mkdir(parents=True)
    (package / "shipped" / "triton-0.1" / "a.py").write_text("x")
    assert fingerprint._stamps(fingerprint._ROOTS) == before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_digest_of_what_was_imported_stays(package, change):
    before = source_fingerprint()
    change(package)
    assert source_fingerprint() == before
    source_fingerprint.cache_clear()
    assert source_fingerprint() != before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nothing_is_kept_of_sources_that_changed(package, change, tmp_path, caplog):
    cache = KernelCache(tmp_path / "cache")
    cache.save("b" * 64, "x = 1\n", {})
    change(package)
    with caplog.at_level(logging.INFO, logger="attndsl"):
        entry = cache.save(KEY, "x = 1\n", {"number": 1})
        cache.save("c" * 64, "x = 1\n", {})
    assert cache.load(KEY) == entry
    assert {path.name[0] for path in cache.folder.iterdir()} == {"b"}
    assert [r.message.partition(":")[0] for r in caplog.records if "imported" in r.message] == [
        "the files of attndsl are not those that this process has imported, or are in an archive"
    ]
    with pytest.raises(ConfigError, match="nobody can say what the kernels are for"):
        pack(None, "cuda:90", tmp_path / "bundle")


def test_other_files_and_other_times_change_nothing(package, tmp_path):
    before = source_fingerprint()
    (package / "inner" / "notes.txt").write_text("others")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_text("x")
    assert not sources_changed()
    cache = KernelCache(tmp_path / "cache")
    assert cache.save(KEY, "", {}).path.parent == cache.folder
    assert source_fingerprint() == before


def test_a_look_takes_little_of_an_import():
    times = []
    for _ in range(5):
        begin = time.process_time()
        assert fingerprint._stamps(fingerprint._roots())
        times.append(time.process_time() - begin)
    assert min(times) < 0.01


def _copied(folder: Path) -> Path:
    """The package as it is installed: in one folder."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "attndsl", folder / "attndsl", ignore=skipped)
    for name in ("backends", "grammar"):
        shutil.copytree(ROOT / name, folder / "attndsl" / name, ignore=skipped)
    return folder


MASKED = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[1])
    import torch, attndsl
    if sys.argv[2:]:
        path, old, new = sys.argv[2:]
        import importlib, pathlib
        importlib.import_module("attndsl.pipeline")
        file = pathlib.Path(path)
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
    v = torch.eye(20)[None, None]
    q = torch.zeros(1, 1, 20, 16)
    found = attndsl.compile("causal() and q - kv < 7")(q, q, v)
    print(attndsl.__file__.startswith(sys.argv[1]), int((found[0, 0, -1] > 0).sum()))
    """
)


def test_an_upgrade_under_a_running_process_leaves_nothing_wrong(tmp_path):
    """The old version forgets masks. Nothing of it lies under the key of the new one."""
    folder = _copied(tmp_path / "site")
    new = "    written = program = with_known_signs(simplify(split_mask(program)))\n"
    old = f"    program = replace(program, mask=None)\n{new}"
    path = folder / "attndsl" / "pipeline.py"
    text = path.read_text()
    assert new in text
    path.write_text(text.replace(new, old))
    env = {**os.environ, "ATTNDSL_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    before = run_python(MASKED, folder, path, old, new, env=env, cwd=tmp_path)
    assert before.stdout == "True 20\n", before.stderr
    assert not (tmp_path / "cache").exists()
    for _ in range(2):
        after = run_python(MASKED, folder, env=env, cwd=tmp_path)
        assert (after.stdout, after.stderr) == ("True 7\n", "")
    assert len(list((tmp_path / "cache").glob("*.json"))) == 1


def test_in_a_zip_calls_keep_what_they_make_in_memory(tmp_path):
    folder = _copied(tmp_path / "site")
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in folder.rglob("*"):
            file.write(path, path.relative_to(folder))
    cache = tmp_path / "cache"
    env = {**os.environ, "ATTNDSL_CACHE_DIR": str(cache), "ATTNDSL_LOG": "info"}
    found = run_python(MASKED, archive, env=env | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert found.stdout == "True 7\n", found.stderr
    assert found.stderr.count("are in an archive") == 1
    assert CacheWarning.__name__ not in found.stderr
    assert not cache.exists()
