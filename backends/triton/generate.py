"""A program's kernels as the text of a Python module: templates with the program printed in.

Non-goals: compiling the text, and choosing tile sizes.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, Program, const, reads_score
from attndsl.passes.differentiate import differentiate
from attndsl.passes.tiles.plan import DIRECTIONS

from .device_functions import (
    gradient_parameters,
    param_values,
    parameters,
    program_function,
    wrapped,
)
from .expression import Printed, Printer, element_offset, print_expressions
from .loops import LIST_PARAMETERS, print_loop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node
    from attndsl.passes.differentiate import Derivative
    from attndsl.passes.tiles.plan import LoopPlan
    from attndsl.pipeline import Lowered

    from .expression import Names
    from .specialise import Specialisation

_INDENT = "    "
PAIR = "b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len"
"""What functions of pairs take beside the score and what the program adds."""


_PASSES = {"forward": "forward", "backward_kv": "kv_pass", "backward_q": "q_pass"}
"""What templates call the loop of each direction."""


def generate_attention(
    lowered: Lowered, special: Specialisation, direction: str, loop: LoopPlan
) -> str:
    """The module of one kernel, ``attention_{direction}`` or ``distances``, with its loop's plan.

    The backward kernels add up the gradients that ``special`` names.
    """
    if direction == "distances":
        return _generate_distances(lowered, special)
    program, sparsity = lowered.program, lowered.sparsity
    names = parameters(special)
    functions, helpers = _functions(lowered, special)
    if direction == "forward":
        text, used = _sink_function(program.sink, special)
        functions.append(text)
        helpers |= used
    name = _PASSES[direction]
    texts, used = print_loop(
        name,
        DIRECTIONS[direction].along,
        loop,
        names,
        param_values(special, scalar=True),
        special.names(),
    )
    listed = loop.listed is not None
    flags = _flags(program) | {
        "SCALED_FIRST": program.score.op is not Op.SCORE
        or reads_score(program.mask)
        or program.weights is not None
        or special.negative_scale,
        "RAGGED_FULL": sparsity.plain,
        "HAS_SINK": program.sink is not None,
        "HAS_DROPOUT": program.dropout is not None,
        "HAS_CAPTURE_GRADIENTS": bool(special.tensor_gradients or special.param_gradients),
        f"{name.upper()}_HAS_FULL": listed or bool(loop.full),
        f"{name.upper()}_HAS_PARTIAL": listed or bool(loop.partial),
        f"{name.upper()}_DESCENDING": loop.descending,
    }
    more = {
        "gradient_parameters": wrapped(gradient_parameters(special)),
        "gradient_arguments": wrapped(gradient_parameters(special)),
        f"{name}_lists": wrapped(LIST_PARAMETERS) if listed else [],
    }
    templates = ("forward",) if direction == "forward" else ("weights", direction)
    return fill_template(
        __package__, templates, [*functions, *texts], helpers | used, flags, names, more
    )


def _generate_distances(lowered: Lowered, special: Specialisation) -> str:
    """The module of the kernel that adds up dS along diagonals."""
    functions, helpers = _functions(lowered, special)
    flags = _flags(lowered.program) | {"MASK_READS_SCORE": reads_score(lowered.program.mask)}
    return fill_template(
        __package__, ("weights", "distances"), functions, helpers, flags, parameters(special),
        {"gradient_parameters": [], "gradient_arguments": []},
    )  # fmt: skip


def _flags(program: Program) -> dict[str, bool | float]:
    """Constants of every module."""
    return {
        "MASKED": program.mask is not None,
        "MODIFIED": program.score.op is not Op.SCORE,
        "OWN_WEIGHTS": program.weights is not None,
    }


def fill_template(
    package: str,
    templates: tuple[str, ...],
    functions: list[str],
    helpers: set[str],
    flags: Mapping[str, bool | float],
    names: list[str],
    more: Mapping[str, list[str]],
) -> str:
    """A module's text: the templates one after the other, their hooks filled.

    Args:
        package: Where ``templates/`` lies.
        templates: Its files, by their stems.
        functions: Texts of the program's own device functions.
        helpers: Library functions that these use.
        flags: Constants of the module.
        names: Kernel arguments that the program adds.
        more: Lines for further hooks.
    """
    fills = {
        "imports": import_lines("triton", helpers),
        "flags": [f"{name} = tl.constexpr({value})" for name, value in flags.items()],
        "functions": "\n\n\n".join(functions).split("\n"),
        "parameters": wrapped(names),
        "arguments": wrapped(names),
        **more,
    }
    lines = []
    for template in templates:
        lines += _fill(_template(package, template), fills)
    while "\n\n\n\n" in (text := "\n".join(lines)):
        lines = text.replace("\n\n\n\n", "\n\n\n").split("\n")
    return text.rstrip() + "\n"


def import_lines(backend: str, names: set[str]) -> list[str]:
    """The statement that imports library functions of a backend, if there are any."""
    return [f"from attndsl.backends.{backend}.library import {', '.join(sorted(names))}"] * bool(
        names
    )


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


def _functions(lowered: Lowered, special: Specialisation) -> tuple[list[str], set[str]]:
    """The program's own device functions, and the library functions that they use."""
    program, derivative = lowered.program, lowered.derivative
    slope = None if program.weights is None else _derivative(program.weights).score
    helpers: set[str] = set()
    texts = []
    specs: tuple[tuple[str, Node | None, str], ...] = (
        ("mask_of_pair", program.mask, "Whether each pair takes part."),
        ("score_of_pair", program.score, "The program's score from scale * (q . k)."),
        (
            "derivative_of_pair",
            derivative.score,
            "Derivative of the program's score by scale * (q . k).",
        ),
        ("weight_of_pair", program.weights, "The weight that the program gives to its score."),
        ("slope_of_weight", slope, "The weight's derivative by the score."),
        ("drop_probability", program.dropout, "With what probability each pair is dropped."),
    )
    for name, root, doc in specs:
        text, used = pair_function(name, root, special, doc)
        helpers |= used
        texts.append(text)
    learns = bool(special.tensor_gradients or special.param_gradients)
    for name, found, doc in (
        ("add_capture_gradients", derivative, "score"),
        ("add_weight_gradients", _derivative(program.weights), "weight"),
        ("add_dropout_gradients", _derivative(program.dropout), "chance to be dropped"),
    ):
        body, used = _gradient_body(found, special)
        helpers |= used
        texts.append(
            program_function(
                name,
                f"dscore, score, live, {PAIR}",
                special,
                f"Add each pair's part, by its {doc}, to the gradients of captures and params.",
                body,
                learns,
                gradient_parameters(special),
            )
        )
    return texts, helpers


def pair_function(
    name: str, root: Node | None, special: Specialisation, doc: str
) -> tuple[str, set[str]]:
    """``root`` as a function of a tile of pairs, and the library functions that it uses."""
    body, used = (["return live"], set()) if root is None else pair_body(root, special.names())
    first = f"score, live, {PAIR}"
    return program_function(name, first, special, doc, body, root is not None), used


def pair_body(root: Node, names: Names) -> tuple[list[str], set[str]]:
    """Lines that return ``root`` for a tile of pairs, and the library functions that they use."""
    printed: Printed = print_expressions((root,), names)
    result = printed.results[0]
    if root.dtype is DType.FLOAT and not reads_score(root):
        value = f"tl.full([1, 1], {result}, tl.float32)" if root.op is Op.CONST else result
        result = f"{value} + tl.zeros(score.shape, tl.float32)"
    return [*printed.lines, f"return {result}"], set(printed.helpers)


def _sink_function(root: Node | None, special: Specialisation) -> tuple[str, set[str]]:
    """The sink as a scalar, and the library functions that it uses."""
    body, helpers = ["return 0.0"], set[str]()
    if root is not None:
        printed = print_expressions((root,), special.names())
        # A tile of one element, or a number.
        result = f"return tl.sum({printed.results[0]} + tl.zeros([1, 1], tl.float32))"
        body, helpers = [*printed.lines, result], set(printed.helpers)
    first = "b, h, hkv, batch, heads, kv_heads, q_len, kv_len"
    doc = "The logit that is in the denominator of each row of a head."
    return program_function("sink_of_head", first, special, doc, body, root is not None), helpers


def _derivative(root: Node | None) -> Derivative:
    """Derivatives of what stands around the score; a plain softmax has none."""
    return differentiate(Program(score=const(0.0) if root is None else root))


def _gradient_body(derivative: Derivative, special: Specialisation) -> tuple[list[str], set[str]]:
    """One atomic addition a gradient: of the tile, or of its sums over the axes the index lacks."""
    tensors = [g for g in derivative.tensors if g.load.value in special.tensor_gradients]
    params = [g for g in derivative.params if g.name in special.param_gradients]
    if not tensors and not params:
        return ["pass"], set()
    factors = tuple(g.factor for g in tensors) + tuple(g.factor for g in params)
    roots = factors + tuple(index for g in tensors for index in g.load.args)
    names = special.names()
    printer = Printer(roots, names)
    captures = {c.name: c for c in special.captures}
    lines = []
    for gradient in tensors:
        name = str(gradient.load.value)
        # Strides of the buffer are its own, so no dim of it counts as having stride 1.
        indices = printer.indices(gradient.load)
        offset = element_offset(indices, "gstride", name, captures[name].wide, frozenset())
        found = frozenset[str]().union(*(printer.deps[index] for index in gradient.load.args))
        part = f"dscore * {printer.operand(gradient.factor)}"
        if {"q", "kv"} <= found or "score" in found:
            lines.append(f"tl.atomic_add(g_{name} + {offset}, {part}, mask=live)")
        elif "q" in found:
            lines.append(f"tl.atomic_add(g_{name} + {offset}, tl.sum({part}, 1, keep_dims=True))")
        elif "kv" in found:
            lines.append(f"tl.atomic_add(g_{name} + {offset}, tl.sum({part}, 0, keep_dims=True))")
        else:
            total = f"tl.sum(tl.sum({part}, 1, keep_dims=True), 0, keep_dims=True)"
            lines.append(
                f"tl.atomic_add(g_{name} + ({offset} + tl.zeros([1, 1], tl.int32)), {total})"
            )
    for item in params:
        lines.append(
            f"tl.atomic_add(g_{item.name}, tl.sum(dscore * {printer.operand(item.factor)}))"
        )
    return [*printer.lines, *lines], set(printer.helpers)
