"""Hints for people who write Python, torch or FlexAttention, with the words of this language."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .reserved_names import is_reserved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.source import Span

USUAL_INDEX = {"batch": "b", "heads": "h", "kv_heads": "hkv", "q_len": "q", "kv_len": "kv"}
"""The index that mostly stands for a dim."""
_NAMES: dict[str, tuple[str, ...]] = {
    "q": ("q_idx", "q_pos", "q_index", "query_idx", "idx_q", "q_i", "qi", "i"),
    "kv": (
        "kv_idx", "k_idx", "kv_pos", "k_pos", "kv_index", "key_idx", "idx_kv", "idx_k", "ki", "j",
    ),
    "b": ("batch_idx", "b_idx", "batch_index", "bidx"),
    "h": ("head_idx", "h_idx", "head_index", "head", "hidx"),
    "heads": ("num_heads", "n_heads", "nheads", "n_head", "num_head"),
    "kv_heads": ("num_kv_heads", "n_kv_heads", "num_key_value_heads"),
    "batch": ("batch_size", "bsz"),
    "q_len": ("q_length", "seqlen_q", "seq_len_q", "len_q"),
    "kv_len": ("kv_length", "k_len", "seqlen_k", "seqlen_kv", "seq_len_k", "seq_len_kv", "len_k"),
    "head_dim": ("d", "dim", "d_k", "dk", "d_head", "head_size", "headdim"),
    "true": ("True",),
    "false": ("False",),
    "inf": ("Infinity", "infinity"),
}  # fmt: skip
_MEANT = {other: name for name, others in _NAMES.items() for other in others}
_SCALED = "the score already has the factor 1 / sqrt(head_dim)"
_ROTATE = "rotate q and k before the call: the score is made of what the call gets"
_RANDOM = "a program has no random numbers; 'weights = dropout(softmax(score), p)' drops weights"
_CHOOSE = (
    "a program speaks of one pair: choose keys before the call, and pass a bool tensor to look up"
)
_PRODUCT = (
    "q . k is the score itself; rows of other tensors are multiplied by dot(u[q, :], w[kv, :])"
)
_ROW = (
    "this needs all scores of a row at once, and a program speaks of one pair, so it cannot be "
    "written: weights are softmax or made of each score alone, as in 'weights = sigmoid(score)'"
)
_WINDOW = "write sliding_window(w) for the last w keys, local_window(w) for both sides"
TRACE = "attndsl.trace(score_mod, mask_mod) makes programs of Python functions"
_FUNCTIONS = {
    **dict.fromkeys(
        ("rope", "rotary", "rotary_emb", "apply_rope", "apply_rotary_pos_emb"), _ROTATE
    ),
    **dict.fromkeys(("random", "rand", "randn", "randint", "uniform", "bernoulli"), _RANDOM),
    **dict.fromkeys(("top_k", "topk", "kthvalue", "argsort", "quantile"), _CHOOSE),
    **dict.fromkeys(("matmul", "einsum", "mm", "bmm"), _PRODUCT),
    **dict.fromkeys(("entmax", "entmax15", "sparsemax", "rank", "softpick", "normalize"), _ROW),
    **dict.fromkeys(("window", "windowed", "sliding", "swa", "window_mask"), _WINDOW),
    **dict.fromkeys(("logsigmoid", "log_sigmoid"), "write -softplus(-x)"),
    "masked_fill": "write where(condition, -inf, score), or a 'mask' line",
    "arange": "positions are q and kv",
    "tril": "write q >= kv",
    "triu": "write q <= kv",
    "pow": "write x ** y",
    "log10": "write log(x) / log(10.0)",
    "print": "look at a program with 'attndsl show' or attn.scores(q, k)",
}
_NEAR = 80
"""Characters before an "=" that are looked at, and of expressions that hints repeat."""
_AUGMENTED = re.compile(r"(\w+)\s*(\*\*|//|<<|>>|[-+*/%&|^])=$")
_PARAM = re.compile(r"param\s+(\w+)\s*=\s*([^\s#;]*)")
_DIMS = re.compile(
    r"param\s+(\w+)\s*(?::\s*(int|float|bool)\s*)?\[([^\]]*)\]?(?:\s*:\s*(int|float|bool)\b)?"
)
_TYPED_FIRST = re.compile(r"tensor\s+(\w+)\s*:\s*(\w+)\s*\[\s*([^\]\s][^\]]*)\]")
_SCALAR = re.compile(r"tensor\s+(\w+)\s*:\s*(int|float|bool)\b")
_UNTYPED = re.compile(r"(param|tensor)\s+(\w+)\s*(\[[^\]]*\])?\s*:?\Z")
_NO_LOOPS = "there are no loops: a program speaks of one pair, and kernels go over all pairs"
_NO_RETURN = "write 'mask = ...' or 'score = ...'; a function is 'def f(x) = ...'"
_FIRST = {
    "for": _NO_LOOPS,
    "while": _NO_LOOPS,
    "return": _NO_RETURN,
    "class": "there are no classes; a function is 'def f(x) = ...'",
    "from": 'write import "FILE.attn", with a file beside this one',
}


def of_name(name: str) -> str | None:
    """The hint for a name that is not declared here, and that something has elsewhere."""
    if name in ("mask", "sink", "weights"):
        return f"'{name}' cannot be read: bind what it is to a name, and write that name twice"
    if name.lower() == "nan":
        return "a program has no NaN: write -inf where no query may see a key"
    if name not in _MEANT:
        return None
    note = f"; {_SCALED}" if _MEANT[name] == "head_dim" else ""
    return f"write '{_MEANT[name]}'{note}"


def of_value(name: str, kind: str) -> str:
    """The hint for a name that is not declared.

    Args:
        name: The name.
        kind: The type that its uses need.
    """
    name = name[:40]
    tensor = f" or 'tensor {name}[...]: float'" if kind == "float" else ""
    return f"declare 'param {name}: {kind}'{tensor}, or pass {name}=... to compile()"


def of_tensor(name: str) -> str:
    """The hint for a name that is indexed and not declared."""
    forms = f"'tensor {name[:40]}[...]: int', 'tensor {name[:40]}[...]: float'"
    return f"declare it ({forms}), or give it to compile()"


def of_optional(name: str) -> str:
    """The hint for a name that ``given`` asks for and that is not declared."""
    name = name[:40]
    return f"declare it ('tensor {name}[...]: int = none', 'param {name}: float = none')"


def of_joined(others: Sequence[str]) -> str:
    """The hint for ``mask = mask and ...``, with the texts of what else is joined there."""
    text = " and ".join(" ".join(each.split()) for each in others)
    text = text if len(text) <= _NEAR else "..."
    return f"several masks are joined by 'and': write 'mask = {text}'"


def of_later(name: str, bound: Span, read: Span) -> str:
    """The hint for a local name that a line reads before the line that binds it."""
    if (bound.source.name, bound.line) == (read.source.name, read.line):
        return f"'{name[:40]}' is bound behind this: move that statement up"
    return f"'{name[:40]}' is bound in {bound.line_from(read)}: move that line up"


def of_end(text: str) -> str | None:
    """The hint for a declaration without its type. ``text`` is the statement without comments."""
    found = _UNTYPED.match(text.strip())
    if found is None:
        return None
    kind, name, dims = found[1], found[2][:40], (found[3] or "")[:80]
    if not dims.strip("[ ]\t\n"):
        dims = ""
    if is_reserved(name):
        return _taken(name)
    if kind == "tensor" and not dims:
        return f"write 'tensor {name}[heads]: float', or 'param {name}: float' for one number"
    if kind == "param" and dims:
        return f"write 'tensor {name}{dims}: float'"
    return f"add a type: {kind} {name}{dims}: float"


def of_function(name: str) -> str | None:
    """The hint for a function that does not exist here, and does elsewhere."""
    return _FUNCTIONS.get(name)


def of_statement(text: str, start: int, token: str) -> str | None:
    """The hint for a statement of another language.

    Args:
        text: The statement.
        start: Where in it the parser has stopped.
        token: What it has found there.
    """
    code = text.lstrip()
    at = start - (len(text) - len(code))
    first = code.split(maxsplit=1)[0] if code else ""
    augmented = _AUGMENTED.search(code[max(0, at - _NEAR) : at + 1])
    if token == "=" and augmented is not None:
        name, operator = augmented.groups()
        return f"write '{name} = {name} {operator} ...'"
    if first == "param" and token == "=":
        return _declared(code)
    if first == "tensor" and token == ":":
        scalar, typed = _SCALAR.match(code), _TYPED_FIRST.match(code)
        if scalar is not None and typed is None:
            name, kind = scalar[1][:40], scalar[2]
            if is_reserved(name):
                return _taken(name)
            dims = "batch, kv_len" if kind == "int" else "heads"
            declared = f"'param {name}: {kind}'"
            return (
                f"a scalar is a param: {declared}; with dims write 'tensor {name}[{dims}]: {kind}'"
            )
        if typed is not None and is_reserved(typed[1]):
            return _taken(typed[1])
        form = f"{typed[1]}[{typed[3]}]: {typed[2]}" if typed else "doc[batch, kv_len]: int"
        return f"write 'tensor {form[:80]}'"
    if first == "param" and token == "[":
        return _of_dims(code)
    if first in ("param", "tensor") and token in ("int", "float", "bool"):
        return f"write ': {token}'"
    if first == "def" and token in (":", "->"):
        head = code[:at].strip()
        return f"write '{head[:60]} = ...', without 'return'; {TRACE}"
    return _FIRST.get(first)


def _taken(name: str) -> str:
    return f"'{name}' always has its own meaning: choose another name"


def _of_dims(code: str) -> str:
    """Hint on how to write a ``param`` line with dims."""
    found = _DIMS.match(code)
    name, before, dims, behind = found.groups() if found else ("p", None, "heads", None)
    if is_reserved(name):
        return _taken(name)
    name, dims, kind = name[:40], " ".join(dims.split())[:80], before or behind or "float"
    if not dims:
        return f"a param is one number: write 'param {name}: {kind}'"
    return f"a param is one number: write 'tensor {name}[{dims}]: {kind}'"


def _declared(code: str) -> str:
    """A ``param`` line with the type that its default has."""
    found = _PARAM.match(code)
    name, default = found.groups() if found is not None else ("window", "4")
    if is_reserved(name):
        return _taken(name)
    if default in ("true", "false", "True", "False"):
        dtype, default = "bool", default.lower()
    else:
        dtype = "int" if re.fullmatch(r"-?[\d_]+", default) else "float"
    return f"write 'param {name[:40]}: {dtype} = {default[:40]}'"


def of_default(name: str, wanted: str, value: bool | int | float) -> str:
    """The hint for a default of another type than the param's."""
    kind = "bool" if isinstance(value, bool) else "float" if isinstance(value, float) else "int"
    declared = f"'param {name[:40]}: {kind} = {str(value).lower()}'"
    if wanted == "bool":
        return f"write true or false, or {declared}"
    if isinstance(value, float) and not value.is_integer():
        return f"write {declared}"
    return f"write {int(value) if wanted == 'int' else float(value)}"


def of_element(name: str, dims: Sequence[str], written: Sequence[str] = ()) -> str:
    """Hint on how to read an element of a tensor.

    Args:
        name: The tensor.
        dims: Its dims, as text.
        written: The indices that stand there. If they are too few, they are those of the last dims.
    """
    lacking = max(0, len(dims) - len(written))
    kept = written if lacking and len(written) < len(dims) else ()
    usual = [USUAL_INDEX.get(dim, "...") for dim in dims]
    places = [*usual[: len(dims) - len(kept)], *kept]
    return f"write {name}[{', '.join(places)}]"
