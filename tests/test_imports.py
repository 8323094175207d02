"""Imports go one way between the layers, and the front half never needs torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from layers import layer_of

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = {
    "errors",
    "source",
    "settings",
    "foundation",
    "ir",
    "frontend",
    "passes",
    "serialise",
    "pipeline",
}
HEAVY = {"torch", "triton", "sympy", "islpy", "lark", "yaml", "numpy", "rich", "matplotlib"}


def _files() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for folder, package in (("attndsl", "attndsl"), ("backends", "attndsl.backends"),
                            ("grammar", "attndsl.grammar")):  # fmt: skip
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join([package, *parts])] = path
    return found


FILES = _files()
MODULES = sorted(FILES)


def _imports(module: str, *, run_time: bool) -> set[str]:
    """Names that ``module`` imports: modules, or names within modules."""
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            found.update(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text("utf-8")))
    return found


def _within(name: str) -> str | None:
    """The module of this package that an imported name lies in."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name or None


def test_the_walk_sees_the_package():
    assert {"attndsl", "attndsl.ir", "attndsl.backends.triton", "attndsl.grammar"} <= set(MODULES)
    assert "attndsl.source.Span" in _imports("attndsl.errors", run_time=False)
    assert "attndsl.source.Span" not in _imports("attndsl.errors", run_time=True)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_layer(module):
    assert module == "attndsl" or layer_of(module) is not None, (
        f"say in tools/layers.py where {module} is"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    # Imports for type checkers count too: a type of a higher layer is a dependency on it.
    if module == "attndsl":
        return
    for name in _imports(module, run_time=False):
        target = _within(name)
        if target in (None, "attndsl"):
            continue
        assert layer_of(target) <= layer_of(module), f"{module} imports {name} of a higher layer"


def test_no_import_cycles():
    edges = {
        module: {
            target
            for name in _imports(module, run_time=True)
            if (target := _within(name)) not in (None, module, "attndsl")
        }
        for module in MODULES
    }
    # `from package import name` of a package's own parts is how packages are written.
    for module in MODULES:
        if FILES[module].name == "__init__.py":
            for target in [t for t in edges if t.startswith(module + ".")]:
                edges[target].discard(module)
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(edges[module]):
                walk(target, (*path, module))
            done.add(module)

    for module in MODULES:
        walk(module, ())


@pytest.mark.parametrize(
    "module", [m for m in MODULES if "." in m and m.split(".")[1] in WITHOUT_TORCH]
)
def test_the_front_half_never_names_torch(module):
    for name in _imports(module, run_time=False):
        assert name.split(".")[0] not in ("torch", "triton"), f"{module} imports {name}"


@pytest.mark.parametrize("folder", ["backends", "grammar"])
def test_mapped_folders_import_relatively(folder):
    # Under their own name they would be a second copy of themselves.
    for module, path in FILES.items():
        if path.is_relative_to(ROOT / folder):
            names = _imports(module, run_time=False)
            assert not [name for name in names if name.split(".")[0] in ("backends", "grammar")]


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import attndsl, attndsl.errors, attndsl.source, attndsl.settings, attndsl.ir", set()),
        ("import attndsl.frontend, attndsl.pipeline, attndsl.serialise", set()),
        ("import attndsl.cli, attndsl.cli.program_inputs, attndsl.config", set()),
        ("import attndsl.cli.cache_command", set()),
        (
            "from attndsl.pipeline import lower\n"
            "from attndsl.source import Source\n"
            "lower(Source('q >= kv'), {})",
            {"lark"},
        ),
        (
            "import sys; sys.argv = ['attndsl', 'check', 'examples/gemma2.attn']\n"
            "from attndsl.cli import main\n"
            "try: main()\n"
            "except SystemExit as end: assert end.code == 0",
            {"lark"},
        ),
    ],
    ids=["import", "frontend", "cli", "cache", "lower", "check"],
)
def test_heavy_packages_wait_until_they_are_needed(code, allowed):
    code += f"\nimport sys; print(sorted(set(sys.modules) & {HEAVY - allowed!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
