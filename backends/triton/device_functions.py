"""Texts of generated device functions: arguments that a program adds, bodies, docstrings.

Non-goals: expressions (``expression.py``), whole modules (``generate.py``).
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from attndsl.ir import DType

from .draws import PARAMETERS

if TYPE_CHECKING:
    from .specialise import Specialisation

_INDENT = "    "
PAIR = "b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len"
"""What functions of pairs take beside the score and what the program adds."""


def parameters(special: Specialisation) -> list[str]:
    """Kernel arguments that the program adds: captures and their layouts, params, dims, a seed."""
    names = []
    for capture in special.captures:
        names.append(f"t_{capture.name}")
        names += [f"size{dim}_{capture.name}" for dim in range(capture.rank)]
        names += [
            f"stride{dim}_{capture.name}"
            for dim in range(capture.rank)
            if dim not in capture.unit_dims
        ]
    names += [kind.argument for kind in special.params]
    names += [f"n_{name}" for name in special.dim_names]
    names += ["seed"] * special.dropout
    names += PARAMETERS if special.draws is not None else ()
    return names


def program_function(
    name: str,
    first: str,
    special: Specialisation,
    doc: str,
    body: list[str],
    reads_params: bool,
    more: list[str] | None = None,
) -> str:
    """A device function that takes ``first``, then what the program adds, then ``more``."""
    arguments = [*textwrap.wrap(f"{first},", 88), *wrapped(parameters(special))]
    arguments += wrapped(more or [])
    prologue = param_values(special) if reads_params else []
    return "\n".join(
        [
            "@triton.jit",
            f"def {name}(",
            *(_INDENT + line for line in arguments),
            "):",
            f'{_INDENT}"""{doc}"""',
            *(_INDENT + line for line in [*prologue, *body]),
        ]
    )


def param_values(special: Specialisation, scalar: bool = False) -> list[str]:
    """Lines that give each param's value its name; ``scalar``: where no tile is near."""
    lines = []
    for kind in special.params:
        value = f"tl.load({kind.argument})" if kind.type.startswith("*") else kind.argument
        if kind.type == "fp32":
            # Under Triton's interpreter a float argument is a Python number.
            lines.append(f"p_{kind.name} = tl.full([], {value}, tl.float32)")
        elif kind.dtype is DType.FLOAT:
            lines.append(f"p_{kind.name} = {value}.to(tl.float32)")
        elif kind.dtype is DType.BOOL:
            block = value if scalar else f"{value} + tl.zeros([1, 1], tl.int32)"
            lines.append(f"p_{kind.name} = {block} != 0")
        elif value != f"p_{kind.name}":
            small = kind.type in ("*i8", "*u8", "*i16")
            lines.append(f"p_{kind.name} = {value}" + (".to(tl.int32)" if small else ""))
    return lines


def wrapped(names: list[str]) -> list[str]:
    """``names`` as lines of arguments."""
    return textwrap.wrap(", ".join(names) + ",", 88) if names else []
