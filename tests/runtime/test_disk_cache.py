"""The disk cache: many processes, killed writers, damage, folders that cannot be used."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.fork_server import run_python

import attndsl
from attndsl.backends.cache_entries import About
from attndsl.backends.key import FORMAT_VERSION
from attndsl.errors import CacheWarning
from attndsl.runtime import disk_cache as cache_module
from attndsl.runtime.disk_cache import KernelCache
from attndsl.runtime.owned_folder import OwnedFolder

KEY = "a" * 64


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


def test_what_is_saved_is_loaded(cache: KernelCache) -> None:
    assert cache.load(KEY) is None
    entry = cache.save(KEY, "x = 1\n", {"kind": "forward"})
    assert entry.path.read_text() == "x = 1\n"
    found = cache.load(KEY)
    assert found == entry
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert [(e.key, e.kind) for e in cache.entries()] == [(KEY, "forward")]
    assert cache.clear().entries == 1
    assert cache.load(KEY) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / f"{KEY}.json").write_text("{"),
        lambda f: (f / f"{KEY}.json").write_text("[]"),
        lambda f: (f / f"{KEY}.json").write_text('{"format": 1}'),
        lambda f: (f / f"{KEY}.json").write_bytes(b"\xff\xfe"),
        lambda f: (f / f"{KEY}.json").write_text("[" * 100_000),
        lambda f: _replace(f, '"window": 7', '"window": 3'),
        lambda f: _replace(f, '"window": 7', '"window": 7 '),
        lambda f: (f / f"{KEY}.py").write_text("x = 2\n"),
        lambda f: (f / f"{KEY}.py").write_text(""),
        lambda f: _edit(f, format=99),
        lambda f: _edit(f, key="b" * 64),
        lambda f: _edit(f, meta=[1]),
        lambda f: _sign(f, "[1]"),
        lambda f: _sign(f, "{}"),
        lambda f: _sign(f, '{"meta": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        lambda f: _sign(f, json.dumps({"format": FORMAT_VERSION, "key": KEY, "meta": [1]})),
    ],
)
def test_damaged_entries_are_reported_dropped_and_made_again(cache: KernelCache, damage) -> None:
    cache.save(KEY, "x = 1\n", {"window": 7})
    damage(cache.folder)
    assert [entry.kind for entry in cache.entries()] == ["damaged"]
    with pytest.warns(CacheWarning, match="damaged"):
        assert cache.load(KEY) is None
    assert not (cache.folder / f"{KEY}.json").exists()
    cache.save(KEY, "x = 1\n", {})
    found = cache.load(KEY)
    assert found is not None
    assert found.source == "x = 1\n"


def _edit(folder: Path, **changes: object) -> None:
    path = folder / f"{KEY}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _sign(folder: Path, described: str) -> None:
    """Write a description that has the right digest."""
    rest, path = described.encode()[1:], folder / f"{KEY}.json"
    digest = cache_module._digest(rest, (folder / f"{KEY}.py").read_bytes())
    path.write_bytes(f'{{"sha256": "{digest}",\n'.encode() + rest)


def _replace(folder: Path, old: str, new: str) -> None:
    path = folder / f"{KEY}.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


MASKED = textwrap.dedent(
    """
    import torch, attndsl
    attention = attndsl.compile("causal() and q - kv < 7", backend="reference")
    v = torch.eye(20)[None, None]
    q = torch.zeros(1, 1, 20, 16)
    print(int((attention(q, q, v)[0, 0, -1] > 0).sum()))
    """
)


def test_a_changed_program_is_reported_and_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    def run() -> tuple[str, str]:
        done = run_python(MASKED, env=_environment(folder))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    assert run() == ("7", "")
    (path,) = folder.glob("*.json")
    written = path.read_text()
    changed = written.replace("7\n", "3\n")
    assert changed != written
    path.write_text(changed)
    seen, said = run()
    assert seen == "7"
    assert f"dropped the damaged cache entry {path.stem[:16]}" in said
    assert path.read_text() == written
    assert run() == ("7", "")


def test_what_is_imported_is_what_was_checked(cache: KernelCache) -> None:
    from attndsl.backends.kernels.compile import module_of

    entry = cache.save(KEY, "x = 1\n", {})
    assert entry.path.is_absolute()  # A relative one would be a file of the checkout.
    entry.path.write_text("x = 2\n")
    assert module_of(entry.source, entry.path, KEY).x == 1
    assert not (cache.folder / "__pycache__").exists()


FOREIGN = ("notes.py", "data.json", "half.tmp", f"{KEY}.txt", f"{KEY}.json.bak", "lock", "A" * 64)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    (folder / "inner").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    (folder / "inner" / f"{KEY}.py").write_text("theirs")
    for name in FOREIGN:
        (folder / name).write_text("theirs" * 1000)
    (folder / f"{'c' * 64}.json").symlink_to(folder / "data.json")
    (folder / f"{'d' * 64}.py").mkdir()
    left = {*FOREIGN, "inner", f"{'c' * 64}.json", f"{'d' * 64}.py"}
    (folder / f"{'e' * 64}.py3k_x9.tmp").write_text("half")

    cache = KernelCache(folder, limit=6000)
    cache.save(KEY, "#" * 5000, {})
    cache.save("b" * 64, "#" * 5000, {})
    assert [entry.key for entry in cache.entries()] == ["b" * 64]
    done = cache.clear()
    assert done.entries == 1
    assert set(done.foreign) == left
    assert {path.name for path in folder.iterdir()} == left
    assert all((folder / name).read_text() == "theirs" * 1000 for name in FOREIGN)
    with pytest.warns(CacheWarning, match="is a link"):
        assert cache.load("c" * 64) is None
    with pytest.warns(CacheWarning, match="cannot keep"):
        cache.save("c" * 64, "x = 1\n", {})
    assert (folder / f"{'c' * 64}.json").is_symlink()
    assert (folder / "data.json").read_text() == "theirs" * 1000


def test_a_missing_text_is_no_entry(cache: KernelCache) -> None:
    cache.save(KEY, "x = 1\n", {})
    (cache.folder / f"{KEY}.py").unlink()
    assert cache.load(KEY) is None


def _attention_works() -> None:
    # A text that this process has not compiled before, so that the cache is asked.
    attention = attndsl.compile(f"q >= kv and q - kv < 5  # {time.time_ns()}")
    q = torch.randn(1, 1, 8, 4)
    assert attention(q, q, q).isfinite().all()


WRITE_ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS]


@pytest.mark.parametrize("number", WRITE_ERRORS, ids=lambda n: errno.errorcode[n])
@pytest.mark.parametrize("place", ["open", "write", "close", "replace"])
def test_what_cannot_be_written_is_kept_in_memory(
    cache: KernelCache, monkeypatch, number: int, place: str
) -> None:
    cache.make_folder()
    with monkeypatch.context() as patched:
        _fail_to_write(patched, number, place)
        with pytest.warns(CacheWarning, match=os.strerror(number)):
            entry = cache.save(KEY, "x = 1\n", {"number": (1, 2)})
    assert (entry.source, entry.meta) == ("x = 1\n", {"number": [1, 2]})
    assert cache.load(KEY) == entry
    assert list(cache.folder.iterdir()) == []
    again = cache.save(KEY, "x = 2\n", {})
    assert again.path.parent == cache.folder
    assert cache.load(KEY) == again


def _fail_to_write(monkeypatch: pytest.MonkeyPatch, number: int, place: str) -> None:
    """Have writes of files fail, wherever these lie: where they begin, go on, or end."""
    opened, fdopen = os.open, os.fdopen

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    def opens(path: str, flags: int, *more: object, **options: object) -> int:
        return fails() if flags & os.O_CREAT else opened(path, flags, *more, **options)

    class Broken:
        def __init__(self, handle: int, mode: str, **_: object) -> None:
            self.file = fdopen(handle, mode)

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()
            if place == "close":
                fails()

        def write(self, content: bytes) -> None:
            fails() if place == "write" else self.file.write(content)

    if place == "open":
        monkeypatch.setattr(os, "open", opens)
    elif place == "replace":
        monkeypatch.setattr(os, "replace", fails)
    else:
        monkeypatch.setattr(os, "fdopen", Broken)


@pytest.mark.parametrize("kept", [True, False])
def test_calls_need_no_disk_at_all(tmp_path: Path, monkeypatch, kept: bool) -> None:
    """Neither the cache's nor that of temporary files."""
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ATTNDSL_CACHE", str(int(kept)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    _fail_to_write(monkeypatch, errno.ENOSPC, "open")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        if not kept:
            _attention_works()
            return
    with pytest.warns(CacheWarning, match="No space left"):
        _attention_works()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid(), reason="mounts a file system")
def test_calls_need_no_room_for_files(tmp_path: Path) -> None:
    place = tmp_path / "full"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", place])
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with suppress(OSError):
            (place / "all").write_bytes(b"x" * 8192)
        found = run_python(MASKED, env=_environment(place / "cache") | {"TMPDIR": str(place)})
    finally:
        subprocess.run(["umount", place], check=True)
    assert (found.returncode, found.stdout) == (0, "7\n"), found.stderr
    assert "No space left on device" in found.stderr


UNUSABLE = {
    "a file": lambda f: (f.parent.mkdir(), f.write_text("")),
    "a file above": lambda f: f.parent.write_text(""),
    "shared": lambda f: (f.mkdir(parents=True), f.chmod(0o777)),
    "shared by a group": lambda f: (f.mkdir(parents=True), f.chmod(0o770)),
    "a link in a circle": lambda f: (f.parent.mkdir(), f.symlink_to(f)),
    "a pipe": lambda f: (f.parent.mkdir(), os.mkfifo(f)),
}


@pytest.mark.parametrize("make", UNUSABLE.values(), ids=UNUSABLE)
def test_folders_that_cannot_be_used_do_not_fail_the_call(tmp_path: Path, monkeypatch, make):
    folder = tmp_path / "above" / "cache"
    make(folder)
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(folder))
    with pytest.warns(CacheWarning):
        _attention_works()
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_names_that_are_too_long_do_not_fail_the_call(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path / ("n" * 300)))
    with pytest.warns(CacheWarning, match="name too long"):
        _attention_works()


def test_an_entry_that_cannot_be_read_now_is_not_removed(cache: KernelCache, monkeypatch) -> None:
    cache.save(KEY, "x = 1\n", {})

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(OwnedFolder, "read", fails)
        with pytest.warns(CacheWarning, match="cannot read kernels in .*: Input/output error"):
            assert cache.load(KEY) is None
    assert cache.load(KEY).source == "x = 1\n"


def test_writers_of_one_key_leave_a_whole_entry(cache: KernelCache, monkeypatch) -> None:
    publish = OwnedFolder.publish
    others = [1, 2]

    def interrupted(folder: OwnedFolder, name: str, content: bytes) -> None:
        publish(folder, name, content)
        if name.endswith(".json") and others:
            # Another writer comes as far as its text here, and publishes its .json later.
            publish(folder, f"{KEY}.py", f"x = {others.pop()}\n".encode())

    monkeypatch.setattr(OwnedFolder, "publish", interrupted)
    entry = cache.save(KEY, "x = 7\n", {"kind": "forward"})
    assert not others
    assert cache.load(KEY) == entry


def test_a_text_that_is_there_already_is_not_written(cache: KernelCache, monkeypatch) -> None:
    cache.save(KEY, "x = 1\n", {"number": 1})
    publish, published = OwnedFolder.publish, []

    def noted(folder: OwnedFolder, name: str, content: bytes) -> None:
        published.append(Path(name).suffix)
        publish(folder, name, content)

    monkeypatch.setattr(OwnedFolder, "publish", noted)
    cache.save(KEY, "x = 1\n", {"number": 2})
    assert published == [".json"]
    found = cache.load(KEY)
    assert found is not None
    assert found.meta == {"number": 2}
    cache.save(KEY, "x = 2\n", {"number": 3})
    assert published == [".json", ".py", ".json"]


def test_a_folder_that_is_cleared_meanwhile_does_not_fail_the_writer(
    cache: KernelCache, monkeypatch
) -> None:
    replace, cleared = os.replace, [1, 2]

    def late(source: str, target: str, **places: int) -> None:
        if cleared:
            cleared.pop()
            assert cache.clear().bytes
        replace(source, target, **places)

    monkeypatch.setattr(os, "replace", late)
    entry = cache.save(KEY, "x = 1\n", {})
    assert not cleared
    assert entry.path.parent == cache.folder
    assert cache.load(KEY) == entry


class Drawn:
    """Stands in for the generator of chances."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        """The same number each time."""
        return self.number


def test_a_writer_rarely_lists_the_folder(cache: KernelCache, monkeypatch) -> None:
    scan, scanned = OwnedFolder.scan, []

    def noted(folder: OwnedFolder) -> list[tuple[str, os.stat_result]]:
        scanned.append(folder)
        return scan(folder)

    monkeypatch.setattr(OwnedFolder, "scan", noted)
    size = sum(path.stat().st_size for path in _saved(cache, 0))
    # 64 times while as many bytes as the limit are written.
    chance = 64 * size / cache.limit
    for number, expected in ((chance * 1.01, 0), (chance * 0.99, 1)):
        monkeypatch.setattr(cache_module, "_CHANCE", Drawn(number))
        scanned.clear()
        _saved(cache, 1)
        assert len(scanned) == expected


def _saved(cache: KernelCache, number: int) -> tuple[Path, Path]:
    path = cache.save(f"{number:064d}", "#" * 2000, {}).path
    return path, path.with_suffix(".json")


def test_the_folder_stays_near_its_limit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "_CHANCE", random.Random(0))
    cache = KernelCache(tmp_path / "kernels", limit=500_000)
    sizes = []
    for number in range(400):
        _saved(cache, number)
        if number >= 240:
            sizes.append(sum(path.stat().st_size for path in cache.folder.iterdir()))
    # The chance of a tenth more is 0.2%.
    assert 500_000 < max(sizes) < 550_000
    assert min(sizes) > 490_000


MANY = textwrap.dedent(
    """
    import os, sys, time, warnings
    from pathlib import Path
    from attndsl.runtime.disk_cache import KernelCache
    warnings.simplefilter("error")
    cache = KernelCache(Path(sys.argv[1]))
    start, write = os.pipe()
    children = []
    for number in range(32):
        child = os.fork()
        if not child:
            os.close(write)
            os.read(start, 1)  # Until the parent closes its end.
            failed = 1
            try:
                for entry in range(20):
                    # Half of the entries are those of all processes.
                    key = 1000 * (number + 1) * (entry % 2) + entry
                    cache.save(f"{key:064d}", f"x = {key}\\n" * 500, {"by": number})
                failed = 0
            finally:
                os._exit(failed)
        children.append(child)
    os.close(write)
    print([os.waitpid(child, 0)[1] for child in children])
    """
)


def test_many_processes_write_at_once(cache: KernelCache) -> None:
    cache.folder.mkdir(mode=0o700)
    for number in range(1000):
        (cache.folder / f"{'f' * 32}{number:032d}.py").write_text("x = 1\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", MANY, str(cache.folder)], capture_output=True, text=True,
        check=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout == f"{[0] * 32}\n", done.stderr[-2000:]
    found = cache.entries()
    assert len(found) == 10 + 32 * 10
    for entry in found:
        loaded = cache.load(entry.key)
        assert loaded is not None
        assert loaded.source == f"x = {int(entry.key)}\n" * 500


def test_entries_say_what_they_are(cache: KernelCache) -> None:
    about = About("causal()", "d" * 64, "hopper forward", "cuda:90", "bf16", 128, 64)
    cache.save(KEY, "x = 1\n", {"about": about.to_json(), "kind": "kernel"})
    (entry,) = cache.entries()
    assert (entry.kind, entry.about) == ("kernel", about)
    assert About().to_json() == {}
    # Of older versions.
    cache.save(KEY, "x = 1\n", {"config": {}})
    (entry,) = cache.entries()
    assert (entry.kind, entry.about) == ("kernel", About())


@pytest.mark.parametrize(
    "about",
    [None, [], "text", 7, {"text": 7}, {"text": ["x"]}, {"text": "x" * 1_000_000},
     {"head_dim": "64"}, {"head_dim": True}, {"head_dim": 10**300}, {"other": "x"}],
)  # fmt: skip
def test_what_is_no_description_is_not_shown(cache: KernelCache, about) -> None:
    cache.save(KEY, "", {"about": about, "kind": ["forward"]})
    (entry,) = cache.entries()
    assert (entry.kind, entry.about) == ("kernel", About())


def test_old_entries_make_room(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "kernels", limit=6000)
    for number in range(6):
        cache.save(f"{number:064d}", "#" * 2000, {})
        os.utime(cache.folder / f"{number:064d}.json", (number, number))
    kept = [int(entry.key) for entry in cache.entries()]
    assert 5 in kept
    assert 0 not in kept
    assert sum(entry.bytes for entry in cache.entries()) <= 6000


WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from attndsl.runtime.disk_cache import KernelCache
    cache = KernelCache(Path(sys.argv[1]))
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        cache.save(f"{number % 5:064d}", f"x = {number}\\n" * 2000, {"number": number})
    """
)


def test_killed_writers_leave_nothing_half_written(cache: KernelCache) -> None:
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", WRITER, str(cache.folder)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.15)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    # An entry may have been caught between its two files: it is then reported, never used.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        found = [cache.load(f"{number:064d}") for number in range(5)]
    whole = [entry for entry in found if entry is not None]
    assert len(whole) >= 3
    for entry in whole:
        assert entry.source == f"x = {entry.meta['number']}\n" * 2000
    assert cache.save(KEY, "y = 1\n", {}).path.parent == cache.folder


CALLER = textwrap.dedent(
    """
    import warnings
    warnings.simplefilter("error")
    # The interpreter of Triton 3.6.
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0 to a scalar")
    import torch, attndsl
    torch.manual_seed(0)
    q = torch.randn(1, 2, 20, 16)
    attention = attndsl.compile("causal() and q - kv < 7", backend="triton")
    other = attndsl.compile("causal() and q - kv < 7", backend="reference")
    print(float((attention(q, q, q) - other(q, q, q)).abs().max()))
    """
)


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "ATTNDSL_CACHE_DIR": str(folder),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_processes_that_start_at_once_share_what_they_make(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", CALLER], env=_environment(tmp_path / "cache"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    for child in children:
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err[-2000:]
        assert float(out) < 1e-5
    found = KernelCache(tmp_path / "cache")
    assert len(found.entries()) == 2
    assert all(found.load(entry.key) is not None for entry in found.entries())


def test_a_warm_start_imports_no_compiler(tmp_path: Path) -> None:
    environment = _environment(tmp_path / "cache")
    script = (
        CALLER + "import sys\nprint([m for m in ('lark', 'sympy', 'islpy') if m in sys.modules])\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True,
            check=True, timeout=120,
        ).stdout.splitlines()[-1]
        for _ in range(2)
    ]  # fmt: skip
    assert runs == ["['lark', 'islpy']", "[]"]


def test_other_lengths_and_param_values_make_no_new_kernel(tmp_path: Path) -> None:
    from attndsl.backends.base import Call
    from attndsl.backends.engine.backend import generated_backend
    from attndsl.pipeline import lower
    from attndsl.source import Source

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = generated_backend(("triton",), KernelCache(tmp_path / "kernels"))
    lowered = lower(
        Source("param w: int\nparam c: float\nscore = softcap(score, c)\nmask = q - kv < w"), {}
    )
    counts = []
    for length, w, c in ((16, 3, 2.0), (48, 3, 2.0), (80, 9, 7.5), (33, 1, 1.0)):
        q = torch.randn(2, 2, length, 16, device=device)
        sizes = {"batch": 2, "heads": 2, "kv_heads": 2, "q_len": length, "kv_len": length}
        call = Call(q, q, q, 0.25, sizes | {"head_dim": 16}, {}, {"w": w, "c": c})
        backend.forward(lowered, call)
        counts.append(backend.kernels_built)
    assert counts == [1, 1, 1, 1]
