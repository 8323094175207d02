"""A compiled program as a value: looked at, compared, kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attndsl.runtime.arguments import joined

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from attndsl.backends.base import Scalar
    from attndsl.pipeline import Lowered
    from attndsl.source import Source

    Captures = Mapping[str, torch.Tensor | Scalar]


class Compiled:
    """What :class:`attndsl.Attention` is beside its calls."""

    __slots__ = ()
    _spec: str
    _source: Source
    _backend: str
    _checked: bool
    _defaults: dict[str, Any]
    _lowered: Lowered

    @property
    def text(self) -> str:
        """The program's text."""
        return self._source.text

    @property
    def backend(self) -> str:
        """The backend asked for."""
        return self._backend

    @property
    def lowered(self) -> Lowered:
        """The program as backends get it."""
        return self._lowered

    def _given(self, captures: Captures | None, named: Captures) -> dict[str, Any]:
        """The captures of a call: given at once, by keywords, or to ``compile``."""
        return {**self._defaults, **joined(captures, named)}

    def __repr__(self) -> str:
        line = " ".join(self.text.split())
        shown = line if len(line) <= 60 else line[:57] + "..."
        return f"Attention({shown!r}, backend={self._backend!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Compiled):
            return NotImplemented
        mine = (self._spec, self._backend, self._checked)
        return mine == (other._spec, other._backend, other._checked) and (
            self._defaults.keys() == other._defaults.keys()
            and all(t is other._defaults[n] for n, t in self._defaults.items())
        )

    def __hash__(self) -> int:
        return hash((self._spec, self._backend, self._checked))

    def __reduce__(self) -> tuple[Any, ...]:
        kept = self._spec, self._source, self._backend, self._checked, self._defaults
        return type(self), kept
