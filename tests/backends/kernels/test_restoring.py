"""Compiled code of earlier processes: what is loaded is what was recorded."""

from __future__ import annotations

import errno
import json

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from attndsl.backends.kernels import compile as kernels
from attndsl.backends.kernels.compile import Executable, build, record, restore
from attndsl.backends.kernels.config import Config
from attndsl.errors import ConfigError

CONFIG = Config(64, 64, 4, 1)
METADATA = {
    "name": "attention", "num_warps": 4, "num_ctas": 1, "shared": 1024, "warp_size": 32,
    "cluster_dims": (1, 1, 1), "tmem_size": None, "ptx_options": "",
    "target": {"backend": "cuda", "arch": 80, "warp_size": 32},
}  # fmt: skip


@pytest.fixture
def loaded(monkeypatch) -> list[bytes]:
    """Code that a GPU was given."""
    found: list[bytes] = []
    monkeypatch.setattr(kernels, "_source", lambda *_: None)
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda own: found.append(own.kernel))
    return found


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """Triton's, of one kernel."""
    (tmp_path / "attention.json").write_text(json.dumps(METADATA))
    (tmp_path / "attention.cubin").write_bytes(b"code")
    (tmp_path / "attention.ttir").write_text("text")
    return {path.name: str(path) for path in sorted(tmp_path.iterdir())}


@pytest.fixture
def recorded(files, loaded):
    found = record(Executable(CompiledKernel(None, files, "00ff"), CONFIG, False))
    # As it comes from the disk.
    return json.loads(json.dumps(found))


def test_what_was_recorded_is_loaded(recorded, loaded):
    assert sorted(recorded["files"]) == ["attention.cubin", "attention.json"]
    assert len(recorded["sha256"]) == 2
    found = restore(None, [], recorded)
    assert loaded == [b"code"]
    assert found.kernel.metadata.shared == 1024
    assert found.config == CONFIG


def _put(folder, text):
    (folder / "attention.json").write_text(text)


def _edit(folder, **changes):
    _put(folder, json.dumps(METADATA | changes))


CHANGES = {
    "other code": lambda f: (f / "attention.cubin").write_bytes(b"CODE"),
    "code that was cut off": lambda f: (f / "attention.cubin").write_bytes(b"cod"),
    "no code": lambda f: (f / "attention.cubin").unlink(),
    "less memory": lambda f: _edit(f, shared=0),
    "another function": lambda f: _edit(f, name="other"),
    "another target": lambda f: _edit(f, target={"backend": "cuda", "arch": 90, "warp_size": 32}),
    "the same in other bytes": lambda f: _put(f, " " + json.dumps(METADATA)),
    "no words": lambda f: (f / "attention.json").unlink(),
    "words that are no JSON": lambda f: _put(f, "{"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*CompiledKernel.__del__")  # Of a half-made one, in Triton.
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_changed_since_is_not_loaded(change, recorded, loaded, tmp_path):
    change(tmp_path)
    assert restore(None, [], recorded) is None
    assert loaded == []


@pytest.mark.parametrize("digests", [None, [], ["0" * 64] * 2, "x", ["0" * 64]])
def test_what_has_no_digests_is_not_loaded(digests, recorded, loaded):
    del recorded["sha256"]
    assert (
        restore(None, [], recorded if digests is None else recorded | {"sha256": digests}) is None
    )
    assert loaded == []


@pytest.mark.parametrize("change", ["less memory", "no words"])
def test_what_changes_before_it_is_recorded_is_not(change, files, loaded, tmp_path):
    kernel = CompiledKernel(None, files, "00ff")
    CHANGES[change](tmp_path)
    assert record(Executable(kernel, CONFIG, False)) is None


def test_words_that_change_between_two_reads_are_not_believed(
    recorded, loaded, tmp_path, monkeypatch
):
    """Triton reads the one, and the digest is that of the other."""
    (tmp_path / "attention.json").rename(tmp_path / "kept")
    (tmp_path / "attention.json").write_text(json.dumps(METADATA | {"shared": 0}))
    made = CompiledKernel

    def late(*given):
        found = made(*given)
        (tmp_path / "kept").rename(tmp_path / "attention.json")
        return found

    monkeypatch.setattr(kernels, "CompiledKernel", late)
    assert restore(None, [], recorded) is None
    assert loaded == []
    assert json.loads((tmp_path / "attention.json").read_text())["shared"] == 1024


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_disk_of_tritons_is_told(number):
    def compiled():
        raise OSError(number, "told by the system")

    target = GPUTarget("cuda", 80, 32)
    with pytest.raises(ConfigError, match="told by the system") as error:
        build(None, [], [CONFIG], target, 1 << 16, load=False, compiled=compiled)
    assert "TRITON_CACHE_DIR" in error.value.hint
