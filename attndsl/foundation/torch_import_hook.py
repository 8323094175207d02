"""Import hook that registers the operators with torch as soon as torch is imported.

``torch.export.load`` and other readers of saved graphs look operators up by name, in processes that
may have done nothing but ``import attndsl``, which is light: it does not import torch. So where
torch is imported later, its import registers them at its end. Nothing else of attndsl is imported
by that.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def register_operators() -> None:
    """Import :mod:`attndsl.call.torch_ops` now, or at the end of torch's own import."""
    if "torch" in sys.modules:
        import_module("attndsl.call.torch_ops")
    else:
        sys.meta_path.insert(0, _AfterTorch())


class _AfterTorch:
    """A finder of torch alone, as the others find it; in ``sys.meta_path`` until torch is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
        return spec


class _Loader:
    """Torch's loader, which afterwards leaves no trace of this one."""

    def __init__(self, loader: Any, finder: _AfterTorch) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        import_module("attndsl.call.torch_ops")
