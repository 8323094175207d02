"""Findings of a call, kept for calls that differ from it in the number of keys alone.

A cache of keys grows from step to step, so that each of its calls is the first of its signature. To
bind such a call takes longer than its attention on a CPU: see M57 in docs/measured.md.

Non-goals: captures and parts of larger calls, whose checks look at lengths; backends that choose
kernels by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attndsl.backends.base import Signature
from attndsl.passes.widths import POSITION_LIMIT
from attndsl.settings import asks_to_verify

if TYPE_CHECKING:
    from attndsl.backends.base import Backend, Call
    from attndsl.runtime.parts import Terms
    from attndsl.runtime.values import Values

_MOST = 256
"""Kinds of calls that are kept."""
_K, _V = 4, 8
"""Where shape, strides, dtype and device of k and of v begin in a signature of a call."""
_KINDS = 14
"""Where it has the kinds of captures and positions; None of a call without any."""


class Prepared(NamedTuple):
    """Backend, template call and checks of values that were found for calls of one signature."""

    backend: Backend
    template: Call
    """Without tensors."""
    as_given: bool
    """Whether q, k and v go to the backend as they are."""
    needs: Values
    terms: Terms | None
    """How a part is put into its program's terms."""
    marks: bool
    """Whether results tell of wrong numbers."""


class OtherLengths:
    """Keeps what was found by all of a signature that is no number of keys."""

    def __init__(self) -> None:
        self._kept: dict[Any, Prepared] = {}

    def keep(self, signature: tuple[Any, ...], prepared: Prepared) -> None:
        """Keep what was found of a call, if it holds for any number of keys."""
        key = _key(signature)
        if key is None or not prepared.backend.any_length or prepared.terms is not None:
            return
        if len(self._kept) >= _MOST:
            self._kept.clear()
        self._kept[key] = prepared

    def of(self, signature: tuple[Any, ...]) -> Prepared | None:
        """Findings for a call of this signature; None where no earlier call was like it."""
        if not self._kept or (key := _key(signature)) is None or asks_to_verify():
            return None
        length = signature[_K][2]
        if length >= POSITION_LIMIT:
            return None
        found = self._kept.get(key)
        if found is None:
            return None
        template = found.template
        assert template.signature is not None
        own = template._replace(
            sizes={**template.sizes, "kv_len": length},
            signature=Signature(template.signature.name),
        )
        return found._replace(template=own)


def _key(signature: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """``signature`` without numbers of keys, and strides that a longer tensor has others of.

    None where k and v are not of one length, or not of four dims, and of calls with more.
    """
    if signature[_KINDS] is not None:
        return None
    (k, k_steps), (v, v_steps) = signature[_K : _K + 2], signature[_V : _V + 2]
    if len(k) != 4 or len(v) != 4 or k[2] != v[2]:
        return None
    return (
        signature[:_K], k[:2], k[3], k_steps[3], signature[_K + 2 : _V], v[:2], v[3], v_steps[3],
        signature[_V + 2 :],
    )  # fmt: skip
