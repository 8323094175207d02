"""Pause of the garbage collector during imports and other work that makes no garbage.

Python looks through all objects when many new ones have come to stay. After ``import torch`` that
is a million, and takes 0.1 to 0.2 s each time: see M59 in docs/dev/measured.md.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def gc_paused() -> Iterator[None]:
    """Context in which the garbage collector is off; afterwards it is as it was."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
