"""Scripts that lie beside the package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def loader(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[str], Any]:
    """``load(name)``: a script of ``folder`` as a module, which may import its neighbours."""
    monkeypatch.syspath_prepend(str(folder))

    def load(name: str) -> Any:
        path = folder / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load
