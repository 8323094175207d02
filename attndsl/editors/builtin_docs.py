"""Meanings of the words and names of the language, in a sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attndsl.frontend.builtin_functions import FORMS
from attndsl.frontend.prelude import prelude_comment, prelude_function, prelude_span
from attndsl.frontend.vocabulary import Kind, kinds

if TYPE_CHECKING:
    from collections.abc import Iterator


class Meaning(NamedTuple):
    """Meaning of a name of the language."""

    name: str
    kind: Kind
    form: str
    """The syntax of its use."""
    said: str
    """Its meaning, in one sentence or two."""
    definition: str = ""
    """Definition of a prelude function."""
    parameters: tuple[str, ...] = ()
    """Parameters of a function; those of built-in ones have no names in calls."""


_WORDS = {
    "import": ('import "FILE.attn"', "The statements of a program file beside this one."),
    "param": (
        "param NAME: TYPE = DEFAULT",
        "A number that calls give; `= none` makes it optional.",
    ),
    "tensor": (
        "tensor NAME[DIM, ...]: TYPE",
        "A tensor that calls give; `= none` makes it optional. A new name as a dim is a size.",
    ),
    "def": ("def NAME(x, ...) = ...", "A function, written out at each of its calls."),
    "if": ("x if c else y", "`x` where the condition `c` holds, and `y` elsewhere."),
    "else": ("x if c else y", "`x` where the condition `c` holds, and `y` elsewhere."),
    "and": ("x and y", "Whether both conditions hold."),
    "or": ("x or y", "Whether one of two conditions holds."),
    "not": ("not x", "Whether a condition does not hold."),
    "in": (
        "x in t[i, :]",
        "True if a row of a tensor of ints has an element `x`: `kv // 64 in chosen[b, hkv, q, :]`.",
    ),
    "none": ("= none", "Behind a param or a tensor: calls may leave it out."),
    "mask": ("mask = CONDITION", "Whether the pair takes part. Several lines mean `and`."),
    "sink": ("sink = NUMBER", "A logit that is added to the denominator of each row alone."),
    "weights": (
        "weights = ...",
        "Weights in place of the softmax, from the final score; `dropout(softmax(score), p)`.",
    ),
    "score": ("score = NUMBER", "The score so far: `scale * (q . k)` before the first score line."),
    "q": ("q", "The logical position of the query."),
    "kv": ("kv", "The logical position of the key."),
    "b": ("b", "The batch entry."),
    "h": ("h", "The query head."),
    "hkv": ("hkv", "The key-value head, `h // (heads // kv_heads)`."),
    "batch": ("batch", "The number of batch entries."),
    "heads": ("heads", "The number of query heads."),
    "kv_heads": ("kv_heads", "The number of key-value heads."),
    "q_len": ("q_len", "The number of queries."),
    "kv_len": ("kv_len", "The number of keys; in expressions each batch entry's own."),
    "head_dim": ("head_dim", "The number of elements of a row of q."),
    "token": ("token", "The number of the row of q, counted over all batch entries or requests."),
    "tokens": ("tokens", "The number of rows of q, over all batch entries or requests."),
    "inf": ("inf", "Infinity. A score of `-inf` from `where` is a mask."),
    "pi": ("pi", "3.14159..."),
    "e": ("e", "2.71828..."),
    "true": ("true", "A condition that always holds."),
    "false": ("false", "A condition that never holds."),
    "int": ("int", "A whole number of 64 bits. `int(x)` rounds towards zero."),
    "float": ("float", "A number in the precision of the score. `float(x)` converts."),
    "bool": ("bool", "A condition. `bool(x)` is whether `x` is not 0."),
}
_FUNCTIONS = {
    "abs": "The size of `x`, without its sign.",
    "sign": "-1, 0 or 1.",
    "min": "The smallest of two or more values of the pair.",
    "max": "The largest of two or more values of the pair.",
    "clamp": "`x` brought into `low ... high`.",
    "where": "`x` where the condition `c` holds, and `y` elsewhere.",
    "floor": "`x` rounded down.",
    "ceil": "`x` rounded up.",
    "round": "`x` rounded to the nearest whole number, halves to the even one.",
    "sqrt": "The square root.",
    "rsqrt": "1 divided by the square root.",
    "exp": "e to the power of `x`.",
    "exp2": "2 to the power of `x`.",
    "log": "The natural logarithm.",
    "log2": "The logarithm to base 2.",
    "log1p": "`log(1 + x)`, exact near 0.",
    "expm1": "`exp(x) - 1`, exact near 0.",
    "sin": "The sine of an angle in radians.",
    "cos": "The cosine of an angle in radians.",
    "tan": "The tangent of an angle in radians.",
    "tanh": "The hyperbolic tangent.",
    "sigmoid": "`1 / (1 + exp(-x))`.",
    "silu": "`x * sigmoid(x)`.",
    "relu": "`max(x, 0)`.",
    "gelu": "`x * (1 + erf(x / sqrt(2))) / 2`.",
    "erf": "The error function.",
    "softplus": "`log(1 + exp(x))`.",
    "dot": "The product of two rows of captured tensors, added up along their last dim.",
    "given": "Whether the call has an optional param or tensor.",
    "softmax": "The softmax over a row, in `weights` only.",
    "dropout": "Weights of which each is dropped with a probability, in `weights` only.",
}


def meaning_of(name: str) -> Meaning | None:
    """Meaning of ``name`` where no program binds it; None for other names."""
    kind = kinds().get(name)
    if kind is None:
        return None
    if kind is Kind.PRELUDE:
        function, span = prelude_function(name), prelude_span(name)
        assert function is not None
        assert span is not None
        parameters = tuple(each.name for each in function.parameters)
        form = f"{name}({', '.join(parameters)})"
        return Meaning(name, kind, form, prelude_comment(name), span.text.strip(), parameters)
    if kind is Kind.FUNCTION:
        form = FORMS.get(name, f"{name}(x)")
        inner = form.partition("(")[2].removesuffix(")")
        return Meaning(name, kind, form, _FUNCTIONS[name], "", _arguments(inner))
    form, said = _WORDS[name]
    return Meaning(name, kind, form, said)


def all_meanings() -> Iterator[Meaning]:
    """The whole vocabulary, in the order of its names within each kind."""
    order = list(Kind)
    for name in sorted(kinds(), key=lambda name: (order.index(kinds()[name]), name)):
        found = meaning_of(name)
        assert found is not None
        yield found


def _arguments(text: str) -> tuple[str, ...]:
    """The arguments of a call, which may have brackets of their own."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part.strip() for part in parts)
