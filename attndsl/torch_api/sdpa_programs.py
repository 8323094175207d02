"""The programs that torch's arguments stand for, as text; each is compiled once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndsl.api import Options, compile_source
from attndsl.foundation.caches import memoised
from attndsl.source import Source

if TYPE_CHECKING:
    from attndsl.attention import Attention

POSITION = {"batch": "b", "heads": "h", "q_len": "q", "kv_len": "kv"}
"""Variable that indexes each dim in a lookup."""
REACH = {
    "all": "",
    "causal": "causal()",
    "causal_lower_right": "causal_lower_right()",
    "range": "first_key[q] <= kv < end_key[q]",
}
"""Condition of the language for the keys that a query may see, before any mask."""
FIRST_KEY, END_KEY = "first_key", "end_key"
"""Captures of the reach ``range``: bounds of the keys that each query sees."""


@dataclass(frozen=True, slots=True)
class CaptureForm:
    """Properties of a captured tensor that decide the program's text."""

    name: str
    kind: str
    """``live`` (true: the pair takes part), ``dead`` (true: it does not), ``bias`` (added to the
    score), ``sparse bias`` (the same, and -inf is a mask), ``bound`` (of the reach ``range``)."""
    dims: tuple[str, ...]
    """Dims among ``POSITION``, in its order."""

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        """The same in terms of builtins, which graphs take as constants."""
        return self.name, self.kind, self.dims


Key = tuple[tuple[str, str, tuple[str, ...]], ...]


def program_text(reach: str, captures: Key, dropout: bool) -> str:
    """The program.

    Args:
        reach: A key of ``REACH``.
        captures: The :attr:`CaptureForm.key` of each captured tensor.
        dropout: Whether weights are dropped, with the probability ``dropout_p``.
    """
    types = {"live": "bool", "dead": "bool", "bound": "int"}
    declarations, conditions, scores = [], [REACH[reach]], []
    for name, kind, dims in captures:
        declarations.append(f"tensor {name}[{', '.join(dims)}]: {types.get(kind, 'float')}")
        lookup = f"{name}[{', '.join(POSITION[dim] for dim in dims)}]"
        if kind == "live":
            conditions.append(lookup)
        elif kind == "dead":
            conditions.append(f"not {lookup}")
        elif kind != "bound":
            scores.append(f"score = score + {lookup}")
            # NaN is no mask: it shows in the output, as torch's does.
            conditions.append(f"{lookup} != -inf" if kind == "sparse bias" else "")
    mask = " and ".join(condition for condition in conditions if condition)
    lines = declarations + ["param dropout_p: float"] * dropout
    lines += [f"mask = {mask}"] * bool(mask) + scores
    lines += ["weights = dropout(softmax(score), dropout_p)"] * dropout
    return "\n".join(lines) or "score"


@memoised("programs of torch's attention arguments", 1024)
def program(reach: str, captures: Key, dropout: bool) -> Attention:
    """The compiled program; see :func:`program_text`."""
    return compile_source(Source(program_text(reach, captures, dropout)), {}, Options())
