"""Each function of the table against torch's own, on floats, ints and bools."""

import contextlib
import itertools
import operator

import pytest
import torch
import torch.nn.functional as F

import attndsl
from attndsl.backends.dense.interpret import LeafValues, evaluate
from attndsl.errors import TraceError
from attndsl.flex.torch_functions import ALIASES, FUNCTIONS, IN_PLACE, TURNED_ROUND
from attndsl.frontend import read
from attndsl.source import Source

OPERANDS = {
    "float": torch.tensor([-2.5, -1.0, -0.5, 0.25, 0.5, 1.5, 3.0], dtype=torch.float64),
    "int": torch.tensor([-7, -3, -1, 0, 1, 4, 6]),
    "bool": torch.tensor([False, True, True, False, True, False, True]),
}
OTHER = {
    "float": torch.tensor([1.5, -0.5, 2.0, 0.75, -1.25, 0.3, 2.5], dtype=torch.float64),
    "int": torch.tensor([2, -3, 5, 1, -2, 3, 4]),
    "bool": torch.tensor([True, True, False, False, True, True, False]),
}
OWN = {"log_sigmoid", "threshold", "masked_fill", "rlshift", "rrshift"}
"""What torch does not call so, or takes numbers for."""
KINDS = list(OPERANDS)
PYTHON = {"and": "and_", "or": "or_", "invert": "invert"}


def functions_named(name):
    """What torch, and Python's operators, call ``name``; methods as they are called."""
    homes = (torch, F, torch.special, operator)
    found = [getattr(home, PYTHON.get(name, name), None) for home in homes]
    for method in (name, f"__{name}__"):
        if hasattr(torch.Tensor, method) and method != "__div__":
            found.append(lambda x, *rest, method=method: getattr(x, method)(*rest))
    return list(dict.fromkeys(f for f in found if callable(f)))


def traced_values(function, operands):
    """``function`` of the operands by its traced program, elementwise."""
    tables = [operand.reshape(-1) for operand in operands]

    def score_mod(score, b, h, q_idx, kv_idx):
        return function(*(table[kv_idx] for table in tables)) * 1.0

    traced = attndsl.trace(score_mod, dtype=torch.float64)
    program = read(Source(str(traced)), {})
    size = tables[0].numel()
    places = torch.arange(size).reshape(1, 1, 1, size)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    variables = {"b": zero, "h": zero, "hkv": zero, "q": zero, "kv": places}
    scope = LeafValues(
        variables, {}, {}, traced.captures, torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    )
    (found,) = evaluate((program.score,), scope)
    return found.expand(1, 1, 1, size).reshape(-1)


def calls(function, name):
    """Operands that torch itself takes, of one to three tensors of all kinds, and what it gives."""
    # Shifts by negative amounts mean nothing.
    other = {k: x if k == "bool" or "shift" not in name else x.abs() for k, x in OTHER.items()}
    for count in (1, 2, 3):
        for kinds in itertools.product(KINDS, repeat=count):
            operands = [
                (OPERANDS if place % 2 == 0 else other)[kind] for place, kind in enumerate(kinds)
            ]
            try:
                wanted = function(*operands)
            except (TypeError, RuntimeError, ValueError, NotImplementedError):
                continue
            # Reductions share names with functions of two operands.
            if isinstance(wanted, torch.Tensor) and wanted.shape == operands[0].shape:
                yield kinds, operands, wanted


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *ALIASES, *TURNED_ROUND} - OWN))
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_values_are_those_of_torch(name):
    compared = 0
    for function in functions_named(name):
        for kinds, operands, wanted in calls(function, name):
            if name in ("pow", "rpow") and "float" not in kinds:
                # An int power of an int that varies is refused, but for powers of 2.
                with contextlib.suppress(TraceError):
                    traced_values(function, operands)
                continue
            found = traced_values(function, operands)
            torch.testing.assert_close(
                found, wanted.double(), atol=1e-5, rtol=1e-5, equal_nan=True, msg=f"{kinds}"
            )
            compared += 1
    assert compared


def test_functions_that_take_numbers():
    def function(x):
        return F.threshold(x, 0.3, -1.0) + (3 << x.long().abs()) + x.masked_fill(x < 0, 2.0)

    operands = [OPERANDS["float"]]
    torch.testing.assert_close(traced_values(function, operands), function(*operands))


@pytest.mark.parametrize("name", sorted(IN_PLACE))
def test_operators_in_place(name):
    function = getattr(operator, name)
    kind = "int" if name in ("iand", "ior", "ixor", "ilshift", "irshift") else "float"

    def changed(a, b):
        a = a + (a == a) * 0
        return function(a, b)

    operands = [OPERANDS[kind], OTHER[kind].abs()]
    torch.testing.assert_close(
        traced_values(changed, operands), changed(*operands).double(), equal_nan=True
    )
