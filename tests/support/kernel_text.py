"""The one way to run a Hopper kernel's text as Python, on the machine that takes Gluon's place."""

from __future__ import annotations

import ast
import builtins
import inspect
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from attndsl.backends.emit import template
from attndsl.backends.emit.dead_code import only_needed
from attndsl.backends.emit.facts import facts_of, with_forms
from attndsl.backends.kernels.target import parse_target

from .gluon_machine import Machine, Pointer, number
from .gluon_operations import Operations
from .jobs import plan_loop, text_of
from .mutation import set_constants, with_constants

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from types import CodeType

    from attndsl.backends.base import Call
    from attndsl.backends.emit.facts import KernelFacts
    from attndsl.backends.kernels.config import Config
    from attndsl.pipeline import Lowered

ENTRIES = {
    "forward": "attention_forward",
    "forward_tangent": "attention_forward_tangent",
    "backward_kv": "attention_backward_kv",
}
"""Names of the kernels, by their family."""


@dataclass(frozen=True)
class Run:
    """How a text runs."""

    seed: int = 0
    """Of what the machine draws."""
    programs: int | None = None
    """At most so many of a persistent config; None for one an item."""
    change: Callable[[str], str] = str
    """What alters the text."""
    wide: bool = False
    """Whether the text is that of heads so wide that shared memory has less room."""
    origins: tuple[int, int] = (0, 0)
    """Positions of the first query and of the first key."""
    together: int = 3
    noted: Callable[[Any], object] | None = None
    """What an altered text may call."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """Constants that the text is made with instead of the program's."""


PLAIN = Run()


@dataclass(frozen=True)
class Kernel:
    """What a text is made from, and the tiles that it has on the machine."""

    family: str
    lowered: Lowered
    facts: KernelFacts
    config: Config

    def text(
        self, shown: Config | None = None, flags: Mapping[str, bool] = MappingProxyType({})
    ) -> str:
        """The text for the machine's tiles, or for those of another config.

        ``flags``: constants that have other values, before what they decide is left out.
        """
        loop = plan_loop(self.lowered, self.facts, self.family, self.config)
        shown = shown or self.config

        def changed(text: str, entries: Collection[str]) -> str:
            return _needed(with_constants(text, flags), tuple(entries))

        with mock.patch.object(template, "only_needed", changed):
            return text_of(self.lowered, self.facts, self.family, loop, shown)


@lru_cache(64)
def _needed(text: str, entries: tuple[str, ...]) -> str:
    return only_needed(text, entries)


def specialised(lowered: Lowered, call: Call, **changes: Any) -> KernelFacts:
    """What a text is for: such a call on Hopper, with some facts replaced."""
    facts = facts_of(lowered.program, call)
    return replace(with_forms(facts, lowered.program, parse_target("cuda:90")), **changes)


def tile_sizes(config: Config, width: int, value_width: int) -> dict[str, Any]:
    """Numbers that a text has as constants, or its entry as parameters."""
    return {
        "HEAD_DIM": width, "VALUE_DIM": value_width, "D": width, "DV": value_width,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.stages,
        "CONSUMERS": config.consumers, "REGISTERS": config.registers,
        "Q_KIND": "offset", "KV_KIND": "offset", "HALF": torch.float16,
        # Halves are fp16 here, which hold less than bf16.
        "MOST_TOTAL": 2.0**15,
    }  # fmt: skip


def sizes_of(q: torch.Tensor, k: torch.Tensor, run: Run) -> dict[str, Any]:
    """Arguments that all kernels have."""
    sizes = {"batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1]}
    sizes |= {"q_len": q.shape[2], "kv_len": k.shape[2], "together": run.together}
    sizes |= {"q_origin": run.origins[0], "kv_origin": run.origins[1]}
    return {name: number(size) for name, size in sizes.items()}


def launch(
    text: str, kernel: Kernel, items: int, arguments: Mapping[str, Any],
    constants: Mapping[str, Any], run: Run,
) -> None:  # fmt: skip
    """Run the text's programs to the end.

    Args:
        text: The kernel's; ``run`` alters it.
        kernel: What it is of.
        items: How many there are for the programs to share.
        arguments: Of the entry, by name: all that it has of these are given.
        constants: Likewise; those that are constants of the module have these values there.
        run: How.
    """
    persistent = kernel.config.persistent
    machine = Machine(run.seed, min(run.programs or items, items) if persistent else items)
    module = module_of(run.change(text), Operations(machine).modules(), constants)
    module["noted"] = run.noted
    entry = module[ENTRIES[kernel.family]]
    counter = torch.zeros((), dtype=torch.int32)
    given = {**arguments, **constants, "COUNTER": Pointer(counter)}
    taken = [given[name] for name in inspect.signature(entry).parameters]
    for program in range(machine.programs):
        machine.start(program, entry, *taken)
    machine.run()
    machine.finish()
    assert not counter


def module_of(
    text: str, modules: Mapping[str, Any], constants: Mapping[str, Any]
) -> dict[str, Any]:
    """The names of a kernel's text, whose imports are ``modules``.

    Its constants of these names have these values, and so has what is computed from them.
    """

    def find(name: str, *arguments: Any) -> Any:
        return builtins.__import__(name, *arguments) if name in _PYTHON else modules[name]

    module = {"__builtins__": {**vars(builtins), "__import__": find}, "__name__": "kernel"}
    module[_CONSTANTS] = constants
    exec(_compiled(text, tuple(constants)), module)
    return module


_CONSTANTS = "__constants__"
_PYTHON = ("__future__", "typing")


class _WithoutLayouts(ast.NodeTransformer):
    """Tensors of torch have no layouts."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if node.attr == "layout" and isinstance(node.value, ast.Attribute):
            return ast.Constant(None) if node.value.attr == "type" else node
        self.generic_visit(node)
        return node


@lru_cache(64)
def _compiled(text: str, constants: tuple[str, ...]) -> CodeType:
    tree = _WithoutLayouts().visit(ast.parse(text))
    names = {name: f"{_CONSTANTS}[{name!r}]" for name in constants}
    set_constants(tree, {name: ast.parse(x, mode="eval").body for name, x in names.items()})
    return compile(ast.fix_missing_locations(tree), "<kernel>", "exec")


def slow(*values: Any) -> Any:
    """A case that only ``-m slow`` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def cases_of(names: Iterable[str], shapes: int) -> list[Any]:
    """Each name with the number of each shape: all but one of a name's are slow."""
    return [
        pytest.param(name, shape) if place % shapes == shape else slow(name, shape)
        for place, name in enumerate(names)
        for shape in range(shapes)
    ]
