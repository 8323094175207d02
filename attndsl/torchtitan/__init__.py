"""An attention for models of torchtitan, whose mask and score are a program, and its trainer.

``Attention.Config(program="q - kv < 1024")`` stands where ``VarlenAttention.Config()`` stands.
``Trainer`` is torchtitan's, which trains such models with ``context_parallel_degree`` too. Needs
torchtitan 0.3. The trainer is imported when first used: it imports much more of torchtitan.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attndsl.errors import UnsupportedError

if find_spec("torchtitan") is None:
    raise UnsupportedError(
        "attndsl.torchtitan is for models of torchtitan, which is not installed",
        hint="pip install torchtitan==0.3.0, as its README says",
    )

try:
    import torchtitan.models.common.attention  # noqa: F401
except ImportError as error:
    raise UnsupportedError(
        f"attndsl.torchtitan needs torchtitan 0.3 and what it imports: {error}",
        hint="pip install torchtitan==0.3.0; versions 0.2 have other attention modules",
    ) from error

from .attention_module import Attention

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Attention", "Trainer"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "Trainer":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return import_module(".trainer", __name__).Trainer
        except ImportError as error:
            raise UnsupportedError(
                f"attndsl.torchtitan.Trainer needs what torchtitan's trainer imports: {error}",
                hint="install torchtitan==0.3.0 with the packages that it asks for, and a torch "
                "that its README names",
            ) from error
