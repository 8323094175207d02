"""A program's kernels as the text of a Python module: templates with the program printed in.

Non-goals: compiling the text, and choosing tile sizes.
"""

from __future__ import annotations

import textwrap
from importlib import resources
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, dependencies

from .expression import Printed, Printer, element_offset, print_expressions
from .loops import print_loop

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from .specialise import Specialisation

_INDENT = "    "
_PAIR = "b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len"


def generate_forward(lowered: Lowered, special: Specialisation) -> str:
    """The module of the forward kernel."""
    return _render(("forward",), lowered, special)


def generate_backward(lowered: Lowered, special: Specialisation) -> str:
    """The module of the backward kernels, which add up the gradients that ``special`` names."""
    return _render(("weights", "backward_kv", "backward_q"), lowered, special)


def parameters(special: Specialisation) -> list[str]:
    """Kernel arguments that the program adds: captures with sizes and strides, params, dims."""
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
    return names


def gradient_parameters(special: Specialisation) -> list[str]:
    """Kernel arguments of the gradient buffers, fp32: address, and strides of a tensor's."""
    names = []
    ranks = {capture.name: capture.rank for capture in special.captures}
    for name in special.tensor_gradients:
        names.append(f"g_{name}")
        names += [f"gstride{dim}_{name}" for dim in range(ranks[name])]
    names += [f"g_{name}" for name in special.param_gradients]
    return names


def _render(templates: tuple[str, ...], lowered: Lowered, special: Specialisation) -> str:
    program, plan = lowered.program, lowered.plan
    names = parameters(special)
    functions, helpers = _functions(lowered, special)
    passes = {"forward": plan.forward, "kv_pass": plan.backward_kv, "q_pass": plan.backward_q}
    if "forward" in templates:
        passes = {"forward": passes["forward"]}
    else:
        del passes["forward"]
    loops = [text for name, loop in passes.items() for text in print_loop(name, loop, names)]
    modified = program.score.op is not Op.SCORE
    flags = {
        "MASKED": program.mask is not None,
        "MODIFIED": modified,
        "SCALED_FIRST": modified
        or (program.mask is not None and "score" in dependencies(program.mask)[program.mask])
        or special.negative_scale,
        "RAGGED_FULL": plan.ragged_full,
        "HAS_CAPTURE_GRADIENTS": bool(special.tensor_gradients or special.param_gradients),
    }
    for name, loop in passes.items():
        flags[f"{name.upper()}_HAS_FULL"] = bool(loop.full)
        flags[f"{name.upper()}_HAS_PARTIAL"] = bool(loop.partial)
    imports = sorted(helpers)
    fills = {
        "imports": [f"from attndsl.backends.triton.library import {', '.join(imports)}"]
        if imports
        else [],
        "flags": [f"{name} = tl.constexpr({value})" for name, value in flags.items()],
        "functions": "\n\n\n".join([*functions, *loops]).split("\n"),
        "parameters": _wrapped(names),
        "arguments": _wrapped(names),
        "gradient_parameters": _wrapped(gradient_parameters(special)),
        "gradient_arguments": _wrapped(gradient_parameters(special)),
    }
    lines = []
    for template in templates:
        lines += _fill(_template(template), fills)
    while "\n\n\n\n" in (text := "\n".join(lines)):
        lines = text.replace("\n\n\n\n", "\n\n\n").split("\n")
    return text.rstrip() + "\n"


def _template(name: str) -> list[str]:
    text = (resources.files(__package__) / "templates" / f"{name}.py").read_text("utf-8")
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


def _wrapped(names: list[str]) -> list[str]:
    return textwrap.wrap(", ".join(names) + ",", 88) if names else []


def _functions(lowered: Lowered, special: Specialisation) -> tuple[list[str], set[str]]:
    """The program's own device functions, and the library functions that they use."""
    program, derivative = lowered.program, lowered.derivative
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
    )
    for name, root, doc in specs:
        body, used = (["return live"], set()) if root is None else _pair_body(root, special)
        helpers |= used
        texts.append(_function(name, "score, live", special, doc, body, root is not None))
    body, used = _gradient_body(lowered, special)
    helpers |= used
    texts.append(
        _function(
            "add_capture_gradients",
            "dscore, score, live",
            special,
            "Add each pair's part to the gradients of captured tensors and params.",
            body,
            bool(special.tensor_gradients or special.param_gradients),
            gradient_parameters(special),
        )
    )
    return texts, helpers


def _function(
    name: str,
    first: str,
    special: Specialisation,
    doc: str,
    body: list[str],
    reads_params: bool,
    more: list[str] | None = None,
) -> str:
    arguments = [f"{first}, {_PAIR},", *_wrapped(parameters(special)), *_wrapped(more or [])]
    prologue = _param_values(special) if reads_params else []
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


def _param_values(special: Specialisation) -> list[str]:
    lines = []
    for kind in special.params:
        value = f"tl.load({kind.argument})" if kind.type.startswith("*") else kind.argument
        if kind.dtype is DType.FLOAT and kind.type != "fp32":
            lines.append(f"p_{kind.name} = {value}.to(tl.float32)")
        elif kind.dtype is DType.BOOL:
            lines.append(f"p_{kind.name} = {value} + tl.zeros([1, 1], tl.int32) != 0")
        elif value != f"p_{kind.name}":
            small = kind.type in ("*i8", "*u8", "*i16")
            lines.append(f"p_{kind.name} = {value}" + (".to(tl.int32)" if small else ""))
    return lines


def _pair_body(root: Node, special: Specialisation) -> tuple[list[str], set[str]]:
    printed: Printed = print_expressions((root,), special.names())
    result = printed.results[0]
    if root.dtype is DType.FLOAT and "score" not in dependencies(root)[root]:
        value = f"tl.full([1, 1], {result}, tl.float32)" if root.op is Op.CONST else result
        result = f"{value} + tl.zeros(score.shape, tl.float32)"
    return [*printed.lines, f"return {result}"], set(printed.helpers)


def _gradient_body(lowered: Lowered, special: Specialisation) -> tuple[list[str], set[str]]:
    """One atomic addition a gradient: of the tile, or of its sums over the axes the index lacks."""
    derivative = lowered.derivative
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
