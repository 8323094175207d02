"""How a process ends that has compiled a Gluon kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent(
    """
    from pathlib import Path
    import attndsl.backends.hopper.triton_compat
    from attndsl.backends.kernels.compile import Argument, compile_kernel, module_of
    from attndsl.backends.kernels.config import Config
    from attndsl.backends.kernels.target import parse_target

    # Triton infers the layout of what [None, :] makes.
    TEXT = '''
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    TILE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))

    @gluon.jit
    def kernel(X):
        row = gl.arange(0, 128, layout=gl.SliceLayout(0, TILE))[None, :]
        gl.store(X + row, row)
    '''
    module = module_of(TEXT, Path("kernel.py"), "0")
    arguments = [Argument("X", "*i32")]
    compile_kernel(module.kernel, arguments, Config(0, 0, 4, 1), parse_target("cuda:90"), 1 << 16)
    print("compiled")
    """
)


def test_a_process_that_compiled_a_kernel_ends_in_silence(tmp_path):
    # Triton 3.9 would say what its bindings "leaked".
    command = [sys.executable, "-P", "-c", PROGRAM]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert ended.stdout == "compiled\n"
    assert "leaked" not in ended.stderr
