"""Functions of the prelude, in the fuzzer's own trees: from what docs/gallery.md says of them."""

from __future__ import annotations

from .operations import PROMOTE, Form, operation
from .program import Apply, Expr, Function, Kind, Literal, Name

INT, FLOAT, BOOL = Kind.INT, Kind.FLOAT, Kind.BOOL
_Q, _KV, _H, _HEADS, _Q_LEN, _KV_LEN = (
    Name(name, INT) for name in ("q", "kv", "h", "heads", "q_len", "kv_len")
)
_N, _W, _C, _X = Name("n", INT), Name("w", INT), Name("c", FLOAT), Name("x", FLOAT)


def _of(word: str, *args: Expr) -> Apply:
    return Apply(operation(word, *(arg.kind for arg in args)), args)


def _float(item: Expr) -> Apply:
    return Apply(PROMOTE, (item,))


def _window(size: Expr) -> Apply:
    kinds = (INT, INT, INT)
    form = operation("<=", *kinds, form=Form.BETWEEN)
    return Apply(form, (Literal(0), _of("-", _Q, _KV), size))


def _every(step: Expr) -> Apply:
    return _of("==", _of("%", _of("-", _Q, _KV), step), Literal(0))


_CAUSAL = _of(">=", _Q, _KV)
_NEAR = _of("<", _of("-", _Q, _KV), _W)
MASKS = (
    Function("causal", (), _CAUSAL, True),
    Function(
        "causal_lower_right", (), _of(">=", _of("-", _of("+", _Q, _KV_LEN), _Q_LEN), _KV), True
    ),
    Function("sliding_window", (_W,), _window(_W), True),
    Function("local_window", (_W,), _of("<", _of("abs", _of("-", _Q, _KV)), _W), True),
    Function("prefix_lm", (_N,), _of("or", _CAUSAL, _of("<", _KV, _N)), True),
    Function("dilated", (_W, _N), _of("and", _window(_W), _every(_N)), True),
    Function("strided", (_W, _N), _of("and", _CAUSAL, _of("or", _NEAR, _every(_N))), True),
    Function("block_diagonal", (_N,), _of("==", _of("//", _Q, _N), _of("//", _KV, _N)), True),
    Function("block_causal", (_N,), _of(">=", _of("//", _Q, _N), _of("//", _KV, _N)), True),
    Function("global_tokens", (_N,), _of("or", _of("<", _Q, _N), _of("<", _KV, _N)), True),
)
"""Masks of at most two ints."""
_SLOPE = _of(
    "exp2", _of("/", _of("*", Literal(-8.0), _float(_of("+", _H, Literal(1)))), _float(_HEADS))
)
_DISTANCE = _of("abs", _of("-", _Q, _KV))
ALIBI = Function("alibi", (), _of("-", _of("*", _SLOPE, _float(_DISTANCE))), True)
"""A bias."""
SOFTCAP = Function("softcap", (_X, _C), _of("*", _C, _of("tanh", _of("/", _X, _C))), True)
"""A float and its limit, which is a float too."""
