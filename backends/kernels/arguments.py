"""Kernel arguments: their types for the compiler, and their values for a launch, in one order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton

from attndsl.errors import UnsupportedError

from ..emit.dropout_offsets import PARAMETERS, draws_arguments
from ..emit.facts import ADDRESS, block_widths, divisor_of
from ..memory_order import strides
from .compile import Argument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ..base import Call
    from ..emit.facts import KernelFacts
    from .config import Config

_STATISTICS = (
    "LSE", "LSE_MOVED", "LSE_OF_TOKENS", "DLSE", "LSE_SHIFT", "LSE_REST", "DELTA", "SUMS",
    "DISTANCE_SUMS", "DISTANCE_VALUES", "LINE_SUMS", "PARTS", "results_sum",
)  # fmt: skip
_LISTS = {
    "kinds": "*i8",
    "tile_rows": "*i32",
    "tile_list": "*i32",
    "row_ints": "*i64",
    "row_floats": "*fp32",
    "column_ints": "*i64",
    "column_floats": "*fp32",
}
_EXACT = {"BOUNDS": "*i32", "SCALES": "*fp64"}
_OUTPUTS = ("OUT", "OUT_MOVED")
_GRADIENTS = ("DQ", "DK", "DV_OUT")
_OWN = (*_OUTPUTS, *_GRADIENTS, "DK_SUM", "DV_SUM", "SLOPES")
_OPERANDS = ("Q", "K", "V", "Q_MOVED", "K_MOVED", "V_MOVED", "DOUT", *_OWN)


def arguments_of(
    function: Any, facts: KernelFacts, more: Mapping[str, int | bool]
) -> list[Argument]:
    """Types of all arguments of a generated kernel, by their names.

    Args:
        function: The kernel (its parameter names say what each argument is).
        facts: What it was generated for.
        more: Constants of this kernel alone.
    """
    block_dv = block_widths(facts)[1]
    # Of kernels whose text is the same for all programs.
    constants: dict[str, int | str | bool] = {
        "D": facts.head_dim,
        "DV": facts.value_dim,
        "BLOCK_DV": block_dv,
        **more,
    }
    captures = capture_types(facts)
    found = []
    for name in function.arg_names:
        if name in constants:
            found.append(Argument(name, "constexpr", constants[name]))
        elif name in captures:
            found.append(captures[name])
        else:
            found.append(template_argument(name, facts))
    return found


def plain_arguments(function: Any, facts: KernelFacts, config: Config) -> list[Argument]:
    """Types of all arguments of a kernel of plain Triton that has no constants of its own."""
    return arguments_of(function, facts, {})


def template_argument(name: str, facts: KernelFacts) -> Argument:
    """Type of an argument that templates name."""
    if name in _OPERANDS:
        wide = (facts.wide_out and name in _OUTPUTS) or (
            facts.wide_gradients and name in _GRADIENTS and not (name == "DQ" and facts.narrow_dq)
        )
        wide = wide or (facts.heads_apart and name in ("DK", "DV_OUT"))
        kind = "fp32" if wide else facts.dtype
        is_aligned = name in _OWN or facts.divisor > 1
        return Argument(name, f"*{kind}", divisor=ADDRESS if is_aligned else 1)
    if name in _LISTS:
        return Argument(name, _LISTS[name], divisor=ADDRESS)
    if name in _STATISTICS:
        return Argument(name, "*fp32", divisor=ADDRESS)
    if name in _EXACT:
        return Argument(name, _EXACT[name], divisor=ADDRESS)
    if name.startswith("PAIR_SUMS"):
        number = int(name[9:])
        divisor = ADDRESS if facts.pair_aligned[number] else 1
        return Argument(name, f"*{facts.pair_types[number]}", divisor=divisor)
    if name.startswith("pair_step"):
        aligned = facts.pair_aligned[int(name[9:].partition("_")[0])]
        return Argument(name, "i64", divisor=ADDRESS if aligned else 1)
    if name.startswith("stride_"):
        # Batches and heads are far apart; rows of a tile rarely are.
        wide = name[-1] in "bh" or facts.wide_rows
        divisor = facts.divisor if name[7] != "o" else divisor_of([facts.value_dim])
        return Argument(name, "i64" if wide else "i32", divisor=divisor)
    if name.startswith("rows_"):
        # Of results: a kernel multiplies them by the width, which says how these are aligned.
        return Argument(name, "i64" if name[-1] in "bh" or facts.wide_rows else "i32")
    if name == "COUNTS":
        return Argument(name, "*i32")
    if name == "STORED_TILES":
        return Argument(name, "*i8", divisor=ADDRESS)
    if name in ("slope_keys", "slope_queries"):
        return Argument(name, "i32", divisor=ADDRESS)
    if name == "scale":
        return Argument(name, "fp32")
    if name in ("q_origin", "kv_origin"):
        kind = facts.q_origin_type if name == "q_origin" else facts.kv_origin_type
        # Tiles of what pairs look up an element each are read as they lie.
        from_zero = bool(facts.pair_types) and kind == "i32" and not facts.shifted
        return Argument(name, kind, divisor=ADDRESS if from_zero else 1)
    return Argument(name, "i64" if name == "map_step" else "i32")


def capture_types(facts: KernelFacts) -> dict[str, Argument]:
    """Types of the arguments that the program adds, by name."""
    found: dict[str, Argument] = {}

    def add(name: str, kind: str, aligned: bool = False) -> None:
        found[name] = Argument(name, kind, divisor=ADDRESS if aligned else 1)

    for capture, kind, aligned in zip(
        facts.captures, facts.capture_types, facts.capture_aligned, strict=True
    ):
        name = capture.name
        add(f"t_{name}", f"*{kind}", aligned)
        for dim in range(capture.rank):
            add(f"size{dim}_{name}", "i32")
            add(f"stride{dim}_{name}", "i64" if capture.wide else "i32", aligned)
            add(f"gstride{dim}_{name}", "i64")
        add(f"exact_{name}", "*i64", aligned=True)
        add(f"notes_{name}", "*i32", aligned=True)
        add(f"copies_{name}", "i32")
        add(f"step_{name}", "i64")
    for param in facts.params:
        add(param.argument, param.type)
    for dim_name in facts.dim_names:
        add(f"n_{dim_name}", "i32")
    if facts.dropout:
        add("seed", facts.seed_type)
    if facts.draws is not None:
        for name in PARAMETERS:
            add(name, "i32")
    return found


def origin(offset: int | torch.Tensor, index: torch.Tensor | None) -> int | torch.Tensor:
    """Source of logical positions: a map, or the position of row 0 (a number or a 0-d tensor)."""
    return offset if index is None else index


def call_numbers(sizes: Sequence[int], call: Call) -> list[object]:
    """Arguments that every call gives: the scale, ``sizes``, and the origins of positions."""
    return [
        call.scale, *sizes, origin(call.q_offset, call.q_index),
        origin(call.kv_offset, call.kv_index),
    ]  # fmt: skip


def _checked(name: str, value: int) -> int:
    """``value``, unless the interpreter takes it for an int of 32 bits.

    Raises:
        UnsupportedError: The interpreter does.
    """
    if -(1 << 31) <= value < 1 << 31:
        return value
    if triton.knobs.runtime.interpret and abs(value) < 1 << 32:
        raise UnsupportedError(
            f"the param '{name}' is {value}, which Triton's interpreter takes for 32 bits",
            hint="pass a smaller one, or one from 2**32 on",
        )
    return value


def capture_arguments(facts: KernelFacts, call: Call) -> list[Any]:
    """Values of the arguments that the program adds, in the order of ``generate.parameters``."""
    values: list[Any] = []
    if not (call.tensors or call.params or facts.dim_names or facts.dropout):
        return values
    for capture in facts.captures:
        tensor = call.tensors[capture.name]
        if tensor.numel() == 0:
            # Nothing can be looked up: every index is clamped to one zero.
            tensor = tensor.new_zeros((1,) * capture.rank)
        steps = strides(tensor)
        values.append(tensor)
        values += tensor.shape
        values += [step for dim, step in enumerate(steps) if dim not in capture.unit_dims]
    for param in facts.params:
        value = call.params[param.name]
        if isinstance(value, int):
            value = _checked(param.name, int(value))
        values.append(value)
    values += [call.sizes[name] for name in facts.dim_names]
    if facts.dropout:
        seed = call.seed
        if isinstance(seed, int):
            seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)  # The low 64 bits, signed.
        values.append(seed)
    if facts.draws is not None:
        values += draws_arguments(call)
    return values
