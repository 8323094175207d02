"""Templates with a program printed in: the text of a module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from attndsl.ir import DType, reads_score

from .dead_code import only_needed
from .device_functions import PAIR, program_function
from .expression import Printed, print_expressions
from .module_lines import wrapped

if TYPE_CHECKING:
    from attndsl.ir import Node

    from .facts import KernelFacts
    from .leaf_names import LeafNames


class Literal(str):
    """Text of a constant's value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


Flags = Mapping[str, bool | float | str]


@dataclass(frozen=True, slots=True)
class Products:
    """Settings of a kernel's matrix products."""

    precision: str = "ieee"
    """Triton's name of the precision of fp32 products."""
    upcast: bool = False
    """True if products of bf16 are made in fp32, because the interpreter's own are wrong."""


IEEE = Products()


def fill_template(
    package: str,
    templates: tuple[str, ...],
    entries: Collection[str],
    functions: list[str],
    helpers: set[str],
    flags: Flags,
    given: list[str],
    more: Mapping[str, list[str]] | None = None,
) -> str:
    """A module's text: what its entries need of the templates, one after the other, and filled.

    Args:
        package: Where ``templates/`` lies.
        templates: Its files, by their stems.
        entries: Names of the kernels.
        functions: Texts of the program's own record and device functions.
        helpers: Library functions that these use.
        flags: Constants of the module.
        given: Kernel arguments that the program adds.
        more: Lines for further hooks.
    """
    fills = {
        "imports": import_lines("device", helpers),
        "flags": [f"{name} = tl.constexpr({value!r})" for name, value in flags.items()],
        "functions": "\n\n\n".join(functions).split("\n"),
        "given": wrapped(given),
        **(more or {}),
    }
    lines = [line for name in templates for line in _fill(_template(package, name), fills)]
    return only_needed("\n".join(lines), entries)


def import_lines(folder: str, names: set[str]) -> list[str]:
    """The statement that imports functions of the library in a folder, if there are any."""
    found = f"from attndsl.backends.{folder}.library import {', '.join(sorted(names))}"
    return [found] * bool(names)


def pair_function(
    name: str, root: Node | None, facts: KernelFacts, doc: str
) -> tuple[str, set[str]]:
    """``root`` as a function of a tile of pairs, and the library functions that it uses."""
    body, used = (["return live"], set()) if root is None else pair_body(root, facts.names())
    return program_function(name, f"score, live, {PAIR}", facts, doc, body, bool(root)), used


def pair_body(root: Node, names: LeafNames) -> tuple[list[str], set[str]]:
    """Lines that return ``root`` for a tile of pairs, and the library functions that they use."""
    printed: Printed = print_expressions((root,), names)
    result = printed.results[0]
    if root.dtype is DType.FLOAT and not reads_score(root):
        result = f"{printed.terms[0]} + tl.zeros(score.shape, tl.float32)"
    return [*printed.lines, f"return {result}"], set(printed.helpers)


def _template(package: str, name: str) -> list[str]:
    text = (resources.files(package) / "templates" / f"{name}.py").read_text("utf-8")
    _, marker, rest = text.partition("#: begin\n")
    return (rest if marker else text).replace("# ruff: noqa: F821\n", "").split("\n")


def _fill(template: list[str], fills: dict[str, list[str]]) -> list[str]:
    lines = []
    for line in template:
        stripped = line.strip()
        if stripped.startswith("#: "):
            indent = line[: len(line) - len(stripped)]
            lines += [indent + text if text else "" for text in fills[stripped[3:]]]
        else:
            lines.append(line)
    return lines
