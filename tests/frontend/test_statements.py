"""Statements about names: whatever is bound, read or wrong, a user's error is what comes out."""

from __future__ import annotations

import random

import pytest

from attndsl import ir
from attndsl.errors import AttnDSLError, NameResolutionError, ProgramErrors
from attndsl.frontend import Bound, ParamSpec, TensorSpec, read
from attndsl.pipeline import check
from attndsl.source import Source


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("a = a + 1\nscore = a", "a", "'a' is read in its own definition"),
        ("a = a", "a", "'a' is read in its own definition"),
        ("a = where(q < 3, a[q], 1)\nmask = a > 0", "a[q]", "'a' is read in its own definition"),
        ("tensor t[t]: float\nscore = t[q]", "t", "'t' is read in its own definition"),
        ("tensor t[t + 1]: float\nscore = t[q]", "t", "'t' is read in its own definition"),
        ("score = a\na = 1", "a", "'a' is not declared"),
        ("tensor t[n]: float\nn = 3\nscore = t[q % n]", "n", "'n' is already bound in line 1"),
    ],
)
def test_names_are_bound_before_they_are_read_and_once(text, at, message):
    with pytest.raises(NameResolutionError, match=message) as caught:
        check(Source(text), {})
    assert caught.value.span.text == at


@pytest.mark.parametrize("name", ["clamp", "dot", "given", "sliding_window", "where"])
def test_a_function_of_the_program_goes_before_one_of_its_name(name):
    text = "def mine(a, b, c) = a + 2 * b - c\nmask = q < mine(kv, h, c=3)"
    assert read(Source(text.replace("mine", name)), {}) == read(Source(text), {})


@pytest.mark.parametrize("name", ["a", "z"])
def test_dims_declared_in_python_mention_params_whatever_their_order(name):
    bound = {"n": Bound(4), name: TensorSpec(("n",))}
    texts = {f"score * {name}[0] * n": bound, f"param n: int\nscore * {name}[0] * n": bound}
    for text, declared in texts.items():
        for given in (declared, dict(reversed(declared.items()))):
            (tensor,) = read(Source(text), given).tensors
            assert [dim.value for dim in tensor.dims] == [4]
    found = read(Source(f"param n: int\nscore * {name}[0] * n"), {name: TensorSpec(("n",))})
    assert found.tensors[0].dims == (ir.param("n", ir.DType.INT),)


def test_uses_of_a_failed_name_add_no_error():
    text = "a = nope\nc = a + 1\ntensor t[q]: float\nscore = score + c * t[h]\nmask = a > score"
    with pytest.raises(ProgramErrors) as caught:
        check(Source(text), {})
    assert [error.span.text for error in caught.value.errors] == ["nope", "q"]


class _Texts:
    """Random programs in which few names do many things."""

    names = ("a", "score", "mask", "weights", "sink", "t", "p", "n", "f", "q", "inf", "causal")
    functions = ("f", "tanh", "softmax", "softcap", "causal", "max", "int", "dot", "a", "dropout")

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def expression(self, depth: int) -> str:
        choice = self.draw.choice
        kind = self.draw.randrange(6) if depth else 0
        if kind == 0:
            return choice((*self.names, "1", "2.5", "true", "-inf", "kv", "heads"))
        first, second = (self.expression(depth - 1) for _ in range(2))
        if kind == 1:
            return f"({first} {choice(('+', '-', '/', 'and', '<', '==', '&', '**'))} {second})"
        if kind == 2:
            return f"where({self.expression(depth - 1)}, {first}, {second})"
        if kind == 3:
            return f"{choice('tapn')}[{first}{choice(('', ', q', ', :'))}]"
        if kind == 4:
            return f"{choice(('-', 'not ', '~'))}{first}"
        return f"{choice(self.functions)}({', '.join((first, second)[: self.draw.randrange(3)])})"

    def statement(self) -> str:
        choice = self.draw.choice
        kind, name, value = self.draw.randrange(8), choice(self.names), self.expression(3)
        if kind == 0:
            return f"param {name}: {choice(('int', 'float', 'bool', 'x'))}" + choice(("", " = 1"))
        if kind == 1:
            dims = [choice(("n", "heads", "3", value)) for _ in range(self.draw.randrange(3))]
            return f"tensor {name}[{', '.join(dims)}]: {choice(('int', 'float', 'bool'))}"
        if kind == 2:
            return f"def {name}({choice(('', 'x', 'a, x'))}) = {value}"
        return value if kind == 3 else f"{name} = {value}"

    def declared(self) -> dict[str, object]:
        given = (Bound(3), Bound(-2.5), Bound(True), ParamSpec("int"), TensorSpec(("n", "t + 1")))
        return {self.draw.choice(self.names): self.draw.choice(given)}


@pytest.mark.parametrize("seed", range(2))
def test_no_statement_leads_to_anything_but_a_users_error(seed):
    texts = _Texts(seed)
    good, shown = 0, set[str]()
    for _ in range(250):
        text = "\n".join(texts.statement() for _ in range(texts.draw.randint(1, 4)))
        try:
            check(Source(text), texts.declared() if texts.draw.randrange(3) == 0 else {})
            good += 1
        except AttnDSLError as error:
            shown.add(str(error))
    assert good
    assert len(shown) > 10
