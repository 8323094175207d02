"""Fast hardware forms of functions: which there are, what they err by, and where they may stand."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from attndsl.ir import DType, Node, Op, toposort

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

EXACT, EX2, APPROX = "exact", "ex2", "approx"
"""Sets of forms: none; of the instructions ex2 and rcp; with the instruction tanh."""


@dataclass(frozen=True, slots=True)
class FastForm:
    """A fast form of one function."""

    function: str
    """Its name in the library of device functions."""
    words: str
    """Description of the form, with its largest error."""


_EXP = FastForm("exp_ex2", "ex2.approx, error of the exact form but 0 below 2^-126")
FORMS: Mapping[str, Mapping[Op, FastForm]] = MappingProxyType(
    {
        EXACT: {},
        EX2: {
            Op.EXP: _EXP,
            Op.TANH: FastForm(
                "tanh_ex2", "ex2.approx and rcp.approx, absolute error 4e-7, relative 2^-17"
            ),
            Op.SIGMOID: FastForm("sigmoid_ex2", "ex2.approx and rcp.approx, absolute error 3e-7"),
            Op.SILU: FastForm("silu_ex2", "ex2.approx and rcp.approx, error 3e-7 times |x|"),
        },
        APPROX: {
            Op.EXP: _EXP,
            Op.TANH: FastForm("tanh_approx", "tanh.approx, relative error 2^-11"),
            Op.SIGMOID: FastForm("sigmoid_approx", "tanh.approx, absolute error 2^-12"),
            Op.SILU: FastForm("silu_approx", "tanh.approx, error 2^-12 times |x|"),
        },
    }
)

_DTYPES = MappingProxyType({"bf16": APPROX, "fp16": EX2, "fp32": EXACT})
"""By dtype of q: what a form errs by must be small beside the rounding of that dtype.

bf16 rounds by 2^-9 and fp16 by 2^-12, so that tanh.approx is for bf16 only.
"""

_JUMPS_AND_POLES = frozenset(
    {
        Op.FLOOR, Op.CEIL, Op.ROUND, Op.SIGN, Op.FLOORDIV, Op.MOD, Op.LOG, Op.LOG2, Op.LOG1P,
        Op.SQRT, Op.RSQRT, Op.POW, Op.TAN,
    }
)  # fmt: skip


def forms_for(dtype: str, target: str | None, exact: bool) -> str:
    """The set of forms that kernels use.

    Args:
        dtype: Triton's name of the dtype of q.
        target: Triton's name of the kind of device, ``cuda`` or ``hip``; None for the interpreter.
        exact: Whether the user asked for exact forms.
    """
    return EXACT if exact or target != "cuda" else _DTYPES[dtype]


def fast_nodes(roots: Iterable[Node]) -> frozenset[Node]:
    """The nodes below ``roots`` that may take a fast form, where their function has one.

    What feeds a comparison, a conversion, a rounding, a logarithm, a root, a power or a divisor
    stays exact: these make a large difference of a small one. So masks have no fast form, and
    agree with the tiles that were found for them.
    """
    order = toposort(*roots)
    exact: set[Node] = set()
    for item in reversed(order):
        if item in exact or item.dtype is not DType.FLOAT or item.op in _JUMPS_AND_POLES:
            exact.update(item.args)
        elif item.op is Op.DIV:
            exact.add(item.args[1])
    return frozenset(item for item in order if item not in exact and item.op in FORMS[EX2])


def describe_forms(roots: Iterable[Node]) -> list[str]:
    """A line of plain text for each function below ``roots`` that has fast forms."""
    found = sorted({item.op for item in fast_nodes(roots)}, key=str)
    return [
        f"{op.name.lower():<10} "
        + "; ".join(
            f"{dtype}: {FORMS[forms][op].words if forms != EXACT else 'exact'}"
            for dtype, forms in _DTYPES.items()
        )
        for op in found
    ]
