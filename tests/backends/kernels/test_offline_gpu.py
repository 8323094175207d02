"""The driver of a GPU that is not there."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest
import triton

from attndsl.backends.kernels import offline_gpu
from attndsl.backends.kernels.offline_gpu import TARGETS, AbsentGPU
from attndsl.errors import BackendError


@pytest.mark.parametrize("target", ["cuda:12", "hip:gfx942", "cuda", "", "x" * 1000])
def test_other_targets_are_refused(target):
    with pytest.raises(BackendError, match="cannot be compiled for") as error:
        AbsentGPU(target)
    assert "cuda:90" in error.value.hint
    assert len(error.value.message) < 100


@pytest.fixture
def compiles(monkeypatch):
    """Kernels are compiled, as Triton says."""
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False), build=triton.knobs.build)
    monkeypatch.setattr(offline_gpu, "triton", SimpleNamespace(knobs=knobs))


def test_the_interpreter_is_refused(monkeypatch, compiles):
    offline_gpu.triton.knobs.runtime.interpret = True
    with pytest.raises(BackendError, match="TRITON_INTERPRET is set"):
        AbsentGPU("cuda:90")


@pytest.mark.parametrize("target", TARGETS)
def test_it_says_what_the_gpu_would(target, compiles, monkeypatch):
    gpu = AbsentGPU(target)
    assert f"cuda:{gpu.get_current_target().arch}" == target
    assert gpu.get_current_device() == 0
    assert gpu.utils.get_device_properties(0)["max_shared_mem"] >= 101376
    monkeypatch.setattr(offline_gpu, "local_bytes", lambda code: 96)
    assert gpu.utils.load_binary("name", b"code", 0, 0)[2:] == (0, 24, 1024)


def test_a_launcher_launches_nothing(compiles, monkeypatch):
    gpu = AbsentGPU("cuda:90")
    monkeypatch.setattr(gpu, "without_launchers", "none")
    assert gpu.launcher_cls(None, None)(1, 1, 1, 0) is None
    assert gpu.launchers == {}


def test_what_a_compiler_made_is_found_and_not_loaded(compiles, monkeypatch, tmp_path):
    """As Triton before 3.7 looks for a launcher: in its cache, then by a C compiler."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    gpu = AbsentGPU("cuda:90")
    monkeypatch.setattr(gpu, "without_launchers", "")
    manager = offline_gpu._finding(gpu._asked)
    made = []

    def make():
        cache = manager("KEY")
        if cache.get_file("launcher.so") is None:
            made.append(cache.put(b"library", "launcher.so", binary=True))
        raise AssertionError("loaded")

    for name in ("first", "second", "first"):
        gpu._find(name, make)
    path = tmp_path / "KEY" / "launcher.so"
    assert gpu.launchers == {"first": path, "second": path}
    assert path.read_bytes() == b"library"
    assert made == []  # Each is left where it would be loaded.
    assert manager("KEY").get_file("launcher.so") == str(path)  # Others get it as ever.


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("x86_64,Linux,64bit,ELF", "x86_64,Linux,64bit,"),
        ("aarch64,Linux,64bit,", "aarch64,Linux,64bit,ELF"),
    ],
)
def test_a_launcher_has_a_name_on_machines_that_know_less(
    own, other, compiles, monkeypatch, tmp_path
):
    """Its name has what the command ``file`` says, where that is there."""
    from triton.runtime import build

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(build, "platform_key", lambda: own)
    gpu = AbsentGPU("cuda:90")
    monkeypatch.setattr(gpu, "without_launchers", "")
    manager = offline_gpu._finding(gpu._asked)
    compiled = []

    def make():
        name = build.platform_key().replace(",", "-")
        cache = manager(name)
        if cache.get_file("launcher.so") is None:
            if triton.knobs.build.impl is None:
                compiled.append(name)
                library = b"library"
            else:
                with open(triton.knobs.build.impl("launcher", "x.c", "", [], [], []), "rb") as file:
                    library = file.read()
            cache.put(library, "launcher.so", binary=True)
        raise AssertionError("loaded")

    gpu._find("first", make)
    assert gpu.twins == {own.replace(",", "-"): other.replace(",", "-")}
    assert compiled == [own.replace(",", "-")]
    assert build.platform_key() == own
    assert triton.knobs.build.impl is None


@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("readelf")), reason="no compiler")
def test_launchers_ask_for_the_library_of_cuda(compiles, monkeypatch, tmp_path):
    """Linkers leave out a library of which nothing is called; loading such a launcher fails."""
    nvidia = SimpleNamespace(libcuda_path=None)
    monkeypatch.setattr(offline_gpu.triton.knobs, "nvidia", nvidia, raising=False)
    gpu = AbsentGPU("cuda:90")
    gpu._make_library()
    source, launcher = tmp_path / "launcher.c", tmp_path / "launcher.so"
    source.write_text("int cuCtxGetCurrent(void *); int go(void) { return cuCtxGetCurrent(0); }")
    subprocess.run(
        ["gcc", source, "-shared", "-fPIC", "-Wl,--as-needed", "-Wl,--no-undefined", "-o", launcher,
         "-l:libcuda.so.1", f"-L{nvidia.libcuda_path}"],
        check=True,
    )  # fmt: skip
    told = subprocess.run(["readelf", "-d", launcher], check=True, capture_output=True, text=True)
    assert "Shared library: [libcuda.so.1]" in told.stdout


def test_other_systems_have_one_name():
    assert offline_gpu._other_platform("arm64,Darwin,64bit,Mach-O") is None


def test_a_compiler_that_fails_is_told_once(compiles, monkeypatch):
    gpu = AbsentGPU("cuda:90")
    monkeypatch.setattr(gpu, "without_launchers", "")
    calls = []

    def make():
        calls.append(1)
        raise RuntimeError("no Python.h")

    for name in ("first", "second"):
        gpu._find(name, make)
    assert len(calls) == 1
    assert "no Python.h" in gpu.without_launchers
