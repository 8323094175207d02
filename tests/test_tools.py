"""What the tools count, on small sources."""

from pathlib import Path

import counts
import pytest
import ways
from layers import LAYERS, layer_of
from support.fork_server import run_python

ROOT = Path(__file__).parents[1]
TEMPLATE = '''\
"""A kernel."""

from attndsl.backends.device.library import (
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
        "from attndsl.backends.triton.lists import dot, load_tile\n"
        "from ..triton import tiles\nfrom . import hopper_tiles\nfrom ..hopper.sums import add\n"
        "from torch import hopper\n\n"
        "@gluon.jit\ndef pack(tile, *, HALF: gl.constexpr):\n    return tile\n\n"
        "def host(a, b):\n    return a\n"
    ),
    "backends/base.py": "LOOPS = {**PLANS, 'tangent': 1, 'distances': 2}\nA = {'a': 1, 'b': 2}\n",
    "attndsl/call/autograd.py": "def _restore(plain):\n    return Call(*plain)\n",
    "attndsl/call/double_backward.py": "def _call(plain):\n    return plain\n",
    "attndsl/call/chunked_autograd.py": (
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
        "attndsl/call/chunked_autograd.py:names",
    ]


def test_comparisons_with_a_kernels_name():
    source = "a = kernel == 'pairs'\nb = kernel in ('pairs', 'stored')\nc = kernel == 'tile'\n"
    assert counts.kernel_comparisons({"backends/a.py": source}) == 2


def test_a_way_to_unpack_a_call_makes_one():
    assert counts.unpackings(SOURCES) == [
        "attndsl/call/autograd.py:_restore",
        "attndsl/call/chunked_autograd.py:Packed.call",
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


def _run(modules):
    """Run ``start()`` of a module ``a``, each module's text a file of its own."""
    space = {}
    for name, text in modules.items():
        exec(compile(text, f"/made/up/{name}.py", "exec"), space)
    found = ways.entries_of(
        space["start"], lambda path: Path(path).stem if path.startswith("/made/up") else None
    )
    return found, ways.way_of(found)


def test_a_stay_begins_where_a_new_function_runs():
    entries, way = _run(
        {
            "a": "def start():\n    [first() for _ in range(3)]\n    own()\n    last()\n"
                 "def own():\n    sorted([2, 1], key=first_again)\n",
            "b": "def first():\n    pass\ndef first_again(x):\n    return x\n"
                 "def last():\n    first()\n",
        }
    )  # fmt: skip
    assert way.stays == ("a", "b", "a", "b")
    assert (way.rooms, way.returns) == (2, 2)
    assert way.calls == {"a": 2, "b": 7}
    assert entries[0] == ("a", "start", None)
    assert entries[1] == ("b", "first", "a")


@pytest.fixture
def traced_sooner(monkeypatch):
    """Ways are traced in processes that begin with torch imported, and otherwise as ever."""

    def traced(name, how="trace"):
        code = f"import sys; sys.path.insert(0, ''); import ways; ways.{how}({name!r})"
        done = run_python(code, cwd=ROOT / "tools")
        assert done.returncode == 0, done.stderr
        return done.stdout.rstrip()

    monkeypatch.setattr(ways, "_traced", traced)


def test_calls_within_closed_functions_are_not_followed():
    _, way = _run(
        {
            "a": "def start():\n    Executable().launch()\n    after()\n",
            "b": "class Executable:\n    def launch(self):\n        inner()\n",
            "c": "def inner():\n    pass\n",
            "d": "def after():\n    pass\n",
        }
    )
    assert way.stays == ("a", "b", "d")


def test_calls_of_a_higher_layer_are_told():
    up = ways.Entry("attndsl.api", "compile", "attndsl.ir")
    down = ways.Entry("attndsl.ir", "node", "attndsl.api")
    way = ways.way_of([up, down, up])
    assert way.up == {("attndsl.ir", "attndsl.api"): 2}
    assert "up: attndsl.ir calls attndsl.api, 2 times" in ways.shown("way", way)


@pytest.mark.parametrize(
    ("name", "most"), [("hopper call again", 6), ("serving step again", 8)]
)  # fmt: skip
def test_known_calls_enter_few_rooms(capsys, name, most):
    ways.main([name, "--brief"])
    told = capsys.readouterr().out.removeprefix(f"{name}: ")
    stays, rooms, _ = (int(part.split()[0]) for part in told.split(","))
    assert 1 < rooms <= most < stays


@pytest.mark.usefixtures("traced_sooner")
def test_the_page_has_the_ways_of_today():
    page = ways.page_of({name: ways.rooms_of(name) for name in ways.ON_PAGE})
    assert page in ways.PAGE.read_text("utf-8"), "run python tools/ways.py --write"
    with_more = ways.page_of({name: ["attndsl.api", "attndsl.ir"] for name in ways.ON_PAGE})
    assert "  attndsl                  api, ir" in with_more


def test_modules_are_found_by_their_files():
    assert ways.module_at(str(ROOT / "backends" / "cli.py")) == "attndsl.backends.cli"
    assert ways.module_at(str(ROOT / "attndsl" / "cli" / "__init__.py")) == "attndsl.cli"
    assert ways.module_at(str(ROOT / "tests" / "conftest.py")) is None
    assert ways.module_at("/usr/lib/python3/os.py") is None


@pytest.mark.parametrize("name", ["lower", "hopper backward"])
def test_ways_are_traced(name):
    lines = []
    ways.main([name], lines.append)
    (text,) = lines
    assert text.startswith(f"{name}: ")
    assert " calls" in text
    assert "  up: " not in text


def test_layers_name_each_module_once():
    names = [name for layer in LAYERS for name in layer]
    assert len(names) == len(set(names))
    assert layer_of("attndsl.backends.base") < layer_of("attndsl.runtime.disk_cache")
    assert layer_of("attndsl.nothing_of_this_name") is None
