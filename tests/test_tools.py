"""What the tools count, on small sources."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _tool(name):
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


counts = _tool("counts")
TEMPLATE = '''\
"""A kernel."""

from attndsl.backends.triton.library import (
    dot, load_tile,
)

#: begin


@triton.jit
def add_tile(
    #: sums
    dk, dv, first,
    #: parameters
    BLOCK: tl.constexpr,
):
    return dk + load_tile(
        first + 1, BLOCK
    )


@triton.jit
def attention_forward(q, k, n):
    (
        #: sums
    ) = add_tile(
        # Not an argument.
        #: sums
        q, tl.where(k, 0.0, 1.0),
        tl.maximum(
            n,
            1,
        ),
        #: arguments
    )
    # one that is said of
    table = {
        "a": 1,
    }
'''
SOURCES = {
    "backends/triton/templates/kernel.py": TEMPLATE,
    "backends/hopper/library.py": (
        "from attndsl.backends.triton.library import dot, load_tile\n"
        "from ..triton import tiles\nfrom . import hopper_tiles\nfrom ..hopper.sums import add\n"
        "from torch import hopper\n\n"
        "@gluon.jit\ndef pack(tile, *, HALF: gl.constexpr):\n    return tile\n\n"
        "def host(a, b):\n    return a\n"
    ),
    "backends/base.py": "LOOPS = {**PLANS, 'tangent': 1, 'distances': 2}\nA = {'a': 1, 'b': 2}\n",
    "attndsl/runtime/autograd.py": "def _restore(plain):\n    return Call(*plain)\n",
    "attndsl/runtime/second.py": "def _call(plain):\n    return plain\n",
    "attndsl/runtime/higher.py": (
        "class Packed:\n    names: tuple = ('forward', 'backward')\n\n"
        "    def call(self):\n        return Call(*self.plain)\n"
    ),
}


def test_device_functions_and_their_parameters():
    found = counts.device_functions(SOURCES)
    assert [(f.name, f.parameters, f.hooks) for f in found] == [
        ("add_tile", 4, 2), ("attention_forward", 3, 0), ("pack", 2, 0)
    ]  # fmt: skip
    assert [f.name for f in counts.entries(found)] == ["attention_forward"]


def test_lines_that_only_pass_arguments():
    # Four of the first signature, one of the first call, two hooks and a line of the second call
    # with the two lines of the call within it, and the hook of what it returns.
    assert counts.passing_lines(TEMPLATE) == 4 + 1 + 5 + 1


def test_hooks_have_one_name_each():
    assert counts.hook_names(SOURCES) == {"sums", "parameters", "arguments"}


def test_tables_are_those_keyed_by_kernels():
    assert counts.kernel_tables(SOURCES) == [
        "backends/base.py:LOOPS",
        "attndsl/runtime/higher.py:names",
    ]


def test_comparisons_with_a_kernels_name():
    source = "a = kernel == 'pairs'\nb = kernel in ('pairs', 'stored')\nc = kernel == 'tile'\n"
    assert counts.kernel_comparisons({"backends/a.py": source}) == 2


def test_a_way_to_unpack_a_call_makes_one():
    assert counts.unpackings(SOURCES) == [
        "attndsl/runtime/autograd.py:_restore",
        "attndsl/runtime/higher.py:Packed.call",
    ]


def test_imports_across_families():
    assert counts.family_imports(SOURCES) == 3


def test_one_column_for_each_commit():
    shown = counts.table(
        {"old": {"lines": 12, "share": "9.5%"}, "new": {"lines": 7, "share": "8%"}}
    )
    assert shown.splitlines() == ["        old  new", "lines    12    7", "share  9.5%   8%"]


def test_the_working_tree_is_counted(capsys):
    counts.main([])
    shown = capsys.readouterr().out
    assert "templates: names of hooks" in shown


@pytest.mark.parametrize("path", ["backends/base.py", "attndsl/ir.py"])
def test_a_commit_is_read_without_a_checkout(path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert path in counts.read_commit("HEAD")
