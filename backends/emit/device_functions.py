"""Texts of generated device functions, and the record of what a program adds to a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import DType

from .dropout_offsets import PARAMETERS
from .module_lines import INDENT, scope_function

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .facts import KernelFacts

PAIR = "q, kv"
"""Arguments of the functions of pairs besides the score and the scope."""


def parameters(facts: KernelFacts) -> list[str]:
    """Kernel arguments that the program adds: captures and their layouts, params, dims, a seed."""
    names = []
    for capture in facts.captures:
        names.append(f"t_{capture.name}")
        names += [f"size{dim}_{capture.name}" for dim in range(capture.rank)]
        names += [
            f"stride{dim}_{capture.name}"
            for dim in range(capture.rank)
            if dim not in capture.unit_dims
        ]
    names += [kind.argument for kind in facts.params]
    names += [f"n_{name}" for name in facts.dim_names]
    names += ["seed"] * facts.dropout
    names += PARAMETERS if facts.draws is not None else ()
    return names


def record_of_given(names: Sequence[str]) -> str:
    """The record ``Given`` with these fields."""
    fields = [f"{name}: object" for name in names]
    return "\n".join(
        [
            "class Given(NamedTuple):",
            f'{INDENT}"""What the program adds to the arguments of the kernel."""',
            *([""] if fields else []),
            *(INDENT + field for field in fields),
        ]
    )


def program_function(
    name: str, arguments: str, facts: KernelFacts, doc: str, body: list[str], reads: bool
) -> str:
    """A device function that takes ``arguments`` and the scope.

    ``reads``: it may read params.
    """
    prologue = param_values(facts) if reads else []
    return scope_function(name, arguments, doc, [*prologue, *body])


def param_values(facts: KernelFacts, scalar: bool = False) -> list[str]:
    """Lines that give each param's value its name; ``scalar``: where no tile is near."""
    lines = []
    for kind in facts.params:
        value = f"given.{kind.argument}"
        if kind.type.startswith("*"):
            value = f"tl.load({value})"
        if kind.type == "fp32":
            # Under Triton's interpreter a float argument is a Python number.
            lines.append(f"p_{kind.name} = tl.full([], {value}, tl.float32)")
        elif kind.dtype is DType.FLOAT:
            lines.append(f"p_{kind.name} = {value}.to(tl.float32)")
        elif kind.dtype is DType.BOOL:
            block = value if scalar else f"{value} + tl.zeros([1, 1], tl.int32)"
            lines.append(f"p_{kind.name} = {block} != 0")
        else:
            small = kind.type in ("*i8", "*u8", "*i16")
            lines.append(f"p_{kind.name} = {value}" + (".to(tl.int32)" if small else ""))
    return lines
